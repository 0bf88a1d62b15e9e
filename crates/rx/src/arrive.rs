//! Arrive: frames come in bursts from a source.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_buf::Pool;
use forebay_buf::frags::FRAG_TABLE_BYTES;
use forebay_buf::frame::BEFORE_PACKET_BYTES;

use crate::cpu::RxQueue;
use crate::drop_reason::DropReason;
use crate::packet::{Arrival, Packet};

/// Source of frames: a capture, a generator, a device queue.
///
/// One CPU polls a source, and never waits in it.
pub trait Source: Send {
    /// Memory that it needs.
    fn needs(&self) -> FrameNeeds {
        FrameNeeds::default()
    }

    /// Gets its place in a run, once, before the first poll.
    ///
    /// # Errors
    /// When the device cannot use the memory, or cannot be opened after all.
    fn attach(&mut self, _at: Attachment<'_>) -> Result<(), SourceError> {
        Ok(())
    }

    /// Adds frames to `burst`, in the order of arrival, in memory from `pool`.
    ///
    /// # Errors
    /// When the source is broken and will give no more. What came before stays in `burst`.
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError>;

    /// Sends the packets that CPUs have handed to the device, takes back the frames of those that
    /// were sent, and returns how many packets went. Called in every turn before the poll, and on
    /// after the source is exhausted.
    fn transmit(&mut self, _pool: &mut Pool) -> usize {
        0
    }

    /// Descriptor that is readable while there are frames: a CPU that has nothing to do sleeps on it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// True if there are packets to be sent. Asked right before its CPU sleeps.
    fn has_work(&mut self) -> bool {
        false
    }
}

/// Part of a nonlinear packet that the frame itself holds: link, network and transport headers with their
/// options, and the first extension headers.
pub const HEAD_BYTES: u32 = 256;

/// A chunk for that, and the list of its pieces.
pub const HEAD_CHUNK_BYTES: u32 = BEFORE_PACKET_BYTES + HEAD_BYTES + FRAG_TABLE_BYTES;

/// Memory that a source needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameNeeds {
    /// Frames that the device holds, besides those that are under way.
    pub device_frames: u32,
    /// Frames of [`HEAD_CHUNK_BYTES`] that it fills ahead, besides those that are under way, if it
    /// gives packets [in pieces](crate::Packet::is_nonlinear); else 0. All that is under way from it
    /// has such a frame then, and larger ones are for the few that are copied together.
    pub head_frames: u32,
    /// The largest frame that it gives, in bytes.
    pub largest_bytes: u32,
    /// True if checksums may come that are not complete, and nothing says so: `AF_XDP` on a veth
    /// gives what a local socket sends as it is. The intake completes them.
    pub may_be_partial: bool,
}

impl Default for FrameNeeds {
    /// No frames of its own, and as large as any; checksums are complete.
    fn default() -> Self {
        Self { device_frames: 0, head_frames: 0, largest_bytes: u32::MAX, may_be_partial: false }
    }
}

/// A source's place in a run.
pub struct Attachment<'a> {
    /// The memory that its frames are received in: the same as in every poll.
    pub pool: &'a mut Pool,
    /// Numbering of its frames.
    pub numbering: Numbering,
    /// Wakes the CPU that polls it.
    pub wake: Waker,
}

impl fmt::Debug for Attachment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attachment({:?}, {:?})", self.pool, self.numbering)
    }
}

/// Wakes a CPU, from any thread; cheap if it is awake.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// The numbers of a queue's frames: they rise along the queue, and no two queues share one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbering {
    next: u64,
    step: u64,
}

impl Numbering {
    /// Numbers of one queue of so many.
    #[must_use]
    pub fn of_queue(queue: RxQueue, queues: u16) -> Self {
        Self { next: queue.0.into(), step: queues.max(1).into() }
    }

    /// The next frame's.
    #[inline]
    pub fn next_arrival(&mut self) -> Arrival {
        let arrival = Arrival::of_frame(self.next);
        self.next += self.step;
        arrival
    }
}

/// Request to a source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PollRequest {
    /// The engine's time.
    pub now_ns: u64,
    /// The most frames.
    pub max: usize,
    /// True if a frame that is due while no packet memory is free may wait, if the source can keep
    /// it, rather than be dropped as by a device.
    pub may_wait: bool,
    /// True if the run ends: what is here already is still given, and then the source is exhausted.
    pub is_last: bool,
}

/// Failure of a source, in words that tell a person how to mend it.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// State of a source after a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// More, perhaps: poll again at once.
    Ready,
    /// Nothing before this time.
    IdleUntil {
        /// In the engine's time.
        now_ns: u64,
    },
    /// Nothing before the descriptor is readable or the waker is called.
    Idle,
    /// Nothing ever again.
    Exhausted,
}

/// Frames as they came from a source, oldest first.
#[derive(Debug, Default)]
pub struct Burst {
    /// Packets received, not looked at yet.
    pub packets: Vec<Packet>,
    /// Frames that could not be received.
    pub refused: Vec<RefusedFrame>,
    /// Frames that the kernel had to drop since the last poll, before they could be taken.
    pub kernel_dropped: u64,
    /// Frames left in the source, as told by whoever polls.
    pub behind: PollStatus,
}

/// Frames left behind a burst: segments wait for more only if some are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PollStatus {
    /// More, right now.
    MorePending,
    /// Nothing yet.
    #[default]
    Drained,
    /// Nothing that segments may wait for: nothing ever again, or nothing before they make room.
    Last,
}

impl Burst {
    /// Number of frames that came.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packets.len() + self.refused.len()
    }

    /// True if none came.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A frame that the source had to let go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RefusedFrame {
    /// Place in the order of arrival.
    pub arrival: Arrival,
    /// Length on the wire.
    pub wire_len: u32,
    /// Reason.
    pub reason: DropReason,
}
