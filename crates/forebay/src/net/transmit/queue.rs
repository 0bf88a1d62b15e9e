//! Sending of what was gathered: one thread at a time, and without the lock of those who gather.
//!
//! A call to the kernel takes long, and wakes the receiver, which may take the caller's CPU. A thread that
//! finds the sink in use therefore leaves its packets to the thread that uses it, as the kernel's queueing
//! disciplines do (`__dev_xmit_skb`, `__qdisc_run`). Packets of a queue leave in the order in which they
//! were gathered.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::{fmt, mem};

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::sink::{Sink, SinkError};
use forebay_sys::clock::Clock;

use super::super::neighbours::DeviceNeighbours;
use super::{FragmentIds, PathMtus, Transmitter};

/// Batches that a call sends for others, at most.
const BATCHES_MAX: usize = 16;

/// Transmit queue of one CPU: what is gathered, and a sink for each device.
pub(in crate::net) struct TransmitQueue {
    transmitter: Mutex<Transmitter>,
    sinks: Box<[Mutex<DeviceSink>]>,
}

/// Device that packets leave by.
struct DeviceSink {
    sink: Box<dyn Sink>,
    /// Packets that are being sent; empty between calls.
    batch: Vec<Packet>,
}

/// Point in what a transmitter sends: the number of times that it had nothing left to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::net) struct SendMark(pub(super) u64);

/// Point in what a transmitter sends, for the segments of a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::net) struct SegmentMark {
    sent: SendMark,
    /// For segments that wait for their next hop.
    left: Option<LeftMark>,
}

/// Number of times that a transmitter had nothing left to send, and no segment waited for its next hop.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LeftMark(u64);

/// Outcome of a flush.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::net) enum Flushed {
    /// Everything is sent, or is being sent by another thread.
    All,
    /// Others gather as fast as this call sends: a later flush goes on.
    Part,
}

impl TransmitQueue {
    pub(in crate::net) fn new(
        pool: Pool,
        take_whole: bool,
        shared: (Arc<FragmentIds>, Arc<PathMtus>),
        clock: Clock,
        paths: Vec<(Box<dyn Sink>, DeviceNeighbours)>,
    ) -> Self {
        let (sinks, neighbours): (Vec<_>, Vec<_>) = paths.into_iter().unzip();
        let device_sink = |sink| Mutex::new(DeviceSink { sink, batch: Vec::new() });
        let neighbours = neighbours.into_iter();
        let transmitter = Transmitter::new(pool, take_whole, shared, clock, neighbours);
        Self {
            transmitter: Mutex::new(transmitter),
            sinks: sinks.into_iter().map(device_sink).collect(),
        }
    }

    /// Gathered packets and their path. Not to be held across a system call.
    pub(in crate::net) fn transmitter(&self) -> MutexGuard<'_, Transmitter> {
        self.transmitter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the gathered packets of a device, unless another thread does. The device may be gone.
    pub(in crate::net) fn flush(&self, device: usize) -> (Flushed, Result<(), SinkError>) {
        let mut sent = Ok(());
        for _ in 0..BATCHES_MAX {
            // In this order: whoever gathers and then finds the sink in use is seen by its user here.
            let mut transmitter = self.transmitter();
            if transmitter.paths[device].gathered.is_empty() {
                // Calls that sent nothing have left frames of other CPUs here.
                transmitter.pool.flush();
                return (Flushed::All, sent);
            }
            drop(transmitter);
            let mut device_sink = match self.sinks[device].try_lock() {
                Ok(device_sink) => device_sink,
                Err(TryLockError::Poisoned(device_sink)) => device_sink.into_inner(),
                Err(TryLockError::WouldBlock) => return (Flushed::All, sent),
            };
            let DeviceSink { sink, batch } = &mut *device_sink;
            self.transmitter().take_gathered(device, batch);
            if !batch.is_empty() {
                sent = sent.and(sink.send(batch));
            }
            self.transmitter().put_sent(device, batch);
        }
        (Flushed::Part, sent)
    }

    /// Sends the gathered packets of all devices. One of them may be gone.
    pub(in crate::net) fn flush_all(&self) -> (Flushed, Result<(), SinkError>) {
        // All devices have their turn, also after one that is gone.
        let of_each = (0..self.sinks.len()).map(|device| self.flush(device));
        of_each.fold((Flushed::All, Ok(())), |(all, ok), (sent, result)| {
            (all.max(sent), ok.and(result))
        })
    }
}

impl Transmitter {
    /// True if there are packets to be sent, which nobody may be sending.
    pub(in crate::net) fn has_gathered(&self) -> bool {
        self.paths.iter().any(|path| !path.gathered.is_empty())
    }

    /// Takes the packets to be sent on a device.
    fn take_gathered(&mut self, device: usize, batch: &mut Vec<Packet>) {
        let path = &mut self.paths[device];
        path.is_sending = true;
        mem::swap(&mut path.gathered, batch);
    }

    /// Takes back the frames of packets that are sent.
    fn put_sent(&mut self, device: usize, batch: &mut Vec<Packet>) {
        batch.drain(..).for_each(|packet| self.pool.put(packet.frame));
        self.pool.flush();
        self.paths[device].is_sending = false;
        if self.is_clear() {
            self.mark.0 += 1;
            self.left_mark.0 += u64::from(!self.has_unresolved());
        }
    }

    /// Mark of what has been gathered so far, for [`has_sent`](Self::has_sent).
    pub(in crate::net) fn mark(&self) -> SendMark {
        self.mark
    }

    /// True if there was nothing left to send at some time since this mark. Never becomes false again.
    pub(in crate::net) fn has_cleared(&self, mark: SendMark) -> bool {
        self.mark != mark
    }

    /// True if everything is sent that had been gathered at this mark. May be false for a while longer.
    pub(in crate::net) fn has_sent(&self, mark: SendMark) -> bool {
        self.mark != mark || self.is_clear()
    }

    /// Mark of the segments that a shard has gathered so far, for [`has_sent_segments`](Self::has_sent_segments): those at the mark
    /// `before`, and later ones, of which some wait for their next hop or none.
    pub(in crate::net) fn segment_mark(
        &self,
        before: Option<SegmentMark>,
        is_some_waiting: bool,
    ) -> SegmentMark {
        let still = before.and_then(|before| before.left).filter(|left| !self.have_left(*left));
        let left = if is_some_waiting { Some(self.left_mark) } else { still };
        SegmentMark { sent: self.mark, left }
    }

    /// True if all segments are sent, or dropped, that had been gathered at this mark: others can overtake none of them. May be
    /// false for a while longer.
    pub(in crate::net) fn has_sent_segments(&self, mark: SegmentMark) -> bool {
        self.has_sent(mark.sent) && mark.left.is_none_or(|left| self.have_left(left))
    }

    fn have_left(&self, mark: LeftMark) -> bool {
        self.left_mark != mark || self.is_clear_of_segments()
    }

    /// True if nothing is to be sent, nothing is being sent, and no segment waits for its next hop. Datagrams never wait there:
    /// for them, [`is_clear`](Self::is_clear) is enough.
    fn is_clear_of_segments(&self) -> bool {
        self.is_clear() && !self.has_unresolved()
    }

    /// True if nothing is to be sent, and nothing is being sent.
    fn is_clear(&self) -> bool {
        self.paths.iter().all(|path| path.gathered.is_empty() && !path.is_sending)
    }
}

impl fmt::Debug for TransmitQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransmitQueue({:?})", self.transmitter())
    }
}
