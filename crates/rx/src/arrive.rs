//! Arrive: bursts of frames from a source.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_buf::Pool;
use forebay_buf::frags::FRAG_TABLE_BYTES;
use forebay_buf::frame::BEFORE_PACKET_BYTES;

use crate::cpu::RxQueue;
use crate::drop_reason::DropReason;
use crate::intake::DEV_WEIGHT;
use crate::packet::{Arrival, Packet};

/// Source of frames: a capture file, a generator, or a device queue.
///
/// A source is polled by one CPU, and never blocks.
pub trait Source: Send {
    /// Packet memory that the source needs.
    fn needs(&self) -> FrameNeeds {
        FrameNeeds::default()
    }

    /// Attaches the source to a run, once, before the first poll.
    ///
    /// # Errors
    /// If the device cannot use the memory, or cannot be opened.
    fn attach(&mut self, _at: Attachment<'_>) -> Result<(), SourceError> {
        Ok(())
    }

    /// Adds frames to `burst`, in the order of arrival, in memory from `pool`.
    ///
    /// # Errors
    /// If the source has failed for good. Frames already in `burst` stay there.
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError>;

    /// Transmits packets that CPUs queued for the device, recycles the frames of those sent, and
    /// returns how many were sent. Called every turn before the poll, also after the source is
    /// exhausted.
    fn transmit(&mut self, _pool: &mut Pool) -> usize {
        0
    }

    /// Descriptor that is readable while frames are pending; an idle CPU sleeps on it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// True if packets are queued for transmission. Asked right before the CPU sleeps.
    fn has_work(&mut self) -> bool {
        false
    }

    /// True if [`transmit`](Self::transmit) has left packets that it could send now. Asked by a thread that transmits for a
    /// CPU that is to sleep on: packets received meanwhile do not count.
    fn has_unsent(&mut self) -> bool {
        self.has_work()
    }

    /// True if frames that were sent have not come back yet. No event announces that: a later turn recycles them.
    fn is_sending(&self) -> bool {
        false
    }
}

/// Maximum length of the part of a nonlinear packet in the frame itself: link, network and
/// transport headers with their options, and the first extension headers.
pub const HEAD_BYTES: u32 = 256;

/// Size of a chunk for that part and the table of its pieces.
pub const HEAD_CHUNK_BYTES: u32 = BEFORE_PACKET_BYTES + HEAD_BYTES + FRAG_TABLE_BYTES;

/// Memory that a source needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameNeeds {
    /// Number of frames owned by the device, besides those on the path.
    pub device_frames: u32,
    /// Number of frames of [`HEAD_CHUNK_BYTES`] filled ahead, if the source gives
    /// [nonlinear](crate::Packet::is_nonlinear) packets; else 0. Each packet on the path has such a
    /// frame then; larger ones are for the few that are linearized.
    pub head_frames: u32,
    /// Length of the largest frame, in bytes.
    pub largest_bytes: u32,
    /// Number of packets on the path at once for which there is memory, beside those that
    /// applications keep; the source waits beyond. `None`: as many as the path may hold.
    pub packets_max: Option<u32>,
    /// True if partial checksums may arrive unmarked, as by `AF_XDP` on a veth from a local socket.
    /// The intake completes them.
    pub may_be_partial: bool,
}

impl Default for FrameNeeds {
    /// Default needs: no own frames, any length, as many as the path may hold, complete checksums.
    fn default() -> Self {
        Self {
            device_frames: 0,
            head_frames: 0,
            largest_bytes: u32::MAX,
            packets_max: None,
            may_be_partial: false,
        }
    }
}

/// Memory, numbers and waker that a source gets from its run.
pub struct Attachment<'a> {
    /// Packet memory to receive into; the same in every poll.
    pub pool: &'a mut Pool,
    /// Numbers for its frames.
    pub numbering: Numbering,
    /// Waker of the polling CPU.
    pub wake: Waker,
    /// As `wake`, for a thread that has queued packets for transmission: it may transmit them itself.
    pub wake_to_send: Waker,
}

impl<'a> Attachment<'a> {
    /// Attachment to a thread that never sleeps, and therefore needs no waker.
    #[must_use]
    pub fn without_waker(pool: &'a mut Pool, numbering: Numbering) -> Self {
        let wake: Waker = Arc::new(|| {});
        Self { pool, numbering, wake_to_send: Arc::clone(&wake), wake }
    }
}

impl fmt::Debug for Attachment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attachment({:?}, {:?})", self.pool, self.numbering)
    }
}

/// Wakes a CPU, from any thread; cheap if it is awake.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Numbers of a queue's frames: increasing along the queue, and distinct between queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbering {
    next: u64,
    step: u64,
}

impl Numbering {
    /// Numbering of one of `queues` queues.
    #[must_use]
    pub fn of_queue(queue: RxQueue, queues: u16) -> Self {
        Self { next: queue.0.into(), step: queues.max(1).into() }
    }

    /// Number of the next frame.
    #[inline]
    pub fn next_arrival(&mut self) -> Arrival {
        let arrival = Arrival::of_frame(self.next);
        self.next += self.step;
        arrival
    }
}

/// Arguments of a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PollRequest {
    /// Engine time, in ns.
    pub now_ns: u64,
    /// Maximum number of frames (budget).
    pub max: usize,
    /// True if a source that can wait (a capture, generated traffic) keeps a frame until packet
    /// memory is free; otherwise the frame is dropped as [`NoBuffer`](DropReason::NoBuffer).
    pub may_wait: bool,
    /// True at the end of the run: frames already pending are still given, then the source is
    /// exhausted.
    pub is_last: bool,
}

/// Error of a source; its message says how to mend it.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// State of a source after a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// More frames may be pending: poll again at once.
    Ready,
    /// Nothing due before this time.
    IdleUntil {
        /// Engine time, in ns.
        now_ns: u64,
    },
    /// Not emptied, or starved of memory so that frames are lost, and nothing to take before this time.
    BehindUntil {
        /// Engine time, in ns.
        now_ns: u64,
    },
    /// Nothing until the descriptor is readable or the waker is called.
    Idle,
    /// Nothing any more.
    Exhausted,
}

/// Frames from a source, oldest first.
#[derive(Debug)]
pub struct Burst {
    /// Packets received, not parsed yet.
    pub packets: Vec<Packet>,
    /// Frames that could not be received.
    pub refused: Vec<RefusedFrame>,
    /// Number of frames dropped by the kernel since the last poll.
    pub kernel_dropped: u64,
    /// State of the source after the burst; set by the poller.
    pub poll_status: PollStatus,
    /// Maximum number of frames that was asked for; set by the poller.
    pub asked: usize,
}

impl Default for Burst {
    /// An empty burst, of [`DEV_WEIGHT`] frames asked for.
    fn default() -> Self {
        Self {
            packets: Vec::new(),
            refused: Vec::new(),
            kernel_dropped: 0,
            poll_status: PollStatus::default(),
            asked: DEV_WEIGHT,
        }
    }
}

/// Frames that may follow a burst, as the poller knows; held segments wait only if more is pending.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PollStatus {
    /// More frames are pending.
    MorePending,
    /// Drained for now.
    #[default]
    Drained,
    /// Last burst that held segments may wait for: nothing follows, or only after they make room.
    Last,
}

impl Burst {
    /// Number of frames, received or refused.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packets.len() + self.refused.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if there are as many as were asked for.
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.is_empty() && self.len() >= self.asked
    }
}

/// Frame that the source could not receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RefusedFrame {
    /// Number in the order of arrival.
    pub arrival: Arrival,
    /// Length on the wire.
    pub wire_len: u32,
    /// Reason.
    pub reason: DropReason,
}
