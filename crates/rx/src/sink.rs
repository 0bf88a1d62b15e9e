//! Sink: the way out of a device, and the counters of what it sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::packet::Packet;
use crate::reasons;

/// One CPU's end of a way out: a device's queue, or a socket.
pub trait Sink: Send {
    /// Sends packets, the oldest first, and never waits for room.
    ///
    /// Packets that the device keeps until they are sent are taken out of the vector; those done
    /// with, sent or dropped, stays in it for the caller to give back. What cannot be sent is
    /// dropped and counted by [name](SendDrop).
    ///
    /// # Errors
    /// When the device is gone for good.
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError>;

    /// Counters of packets sent so far, and of those that were not.
    fn counters(&self) -> &Arc<SinkCounters>;
}

/// Reason why a sink cannot be used any more.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Counters of one sink. Written by the CPU that sends and, where packets go over a ring, by the
/// one that drives the device's queue; read by anyone.
///
/// Packets that were handed in are those that were sent and those that were dropped.
#[derive(Debug, Default)]
pub struct SinkCounters {
    packets: AtomicU64,
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: [AtomicU64; SendDrop::ALL.len()],
}

impl SinkCounters {
    /// Packets that were handed to the device, merged ones counted once.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// The segments in them: what goes over the wire in the end.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Bytes of them, a merged packet's headers counted once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Packets that were dropped for this reason. Of a packet that was cut, some segments may have
    /// gone out all the same.
    #[must_use]
    pub fn dropped(&self, reason: SendDrop) -> u64 {
        self.dropped[reason.index()].load(Ordering::Relaxed)
    }

    /// Packets that were dropped for any reason.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        SendDrop::ALL.into_iter().map(|reason| self.dropped(reason)).sum()
    }

    /// Counts what a call has sent. Only a sink, or what it sends through, calls this.
    pub fn add_sent(&self, sent: Sent) {
        add(&self.packets, sent.packets);
        add(&self.frames, sent.frames);
        add(&self.bytes, sent.bytes);
    }

    /// Counts packets that were dropped. Only a sink, or what it sends through, calls this.
    pub fn add_dropped(&self, reason: SendDrop, packets: u64) {
        add(&self.dropped[reason.index()], packets);
    }
}

/// For a batch of packets at a time.
fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// Packets sent that are not counted yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sent {
    /// Packets, merged ones counted once.
    pub packets: u64,
    /// Segments.
    pub frames: u64,
    /// Bytes, headers once.
    pub bytes: u64,
}

impl Sent {
    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets + other.packets,
            frames: self.frames + other.frames,
            bytes: self.bytes + other.bytes,
        }
    }

    /// Counts a packet that went out.
    pub fn add(&mut self, packet: &Packet) {
        self.packets += 1;
        self.frames += u64::from(packet.wire_count());
        self.bytes += packet.fragments().map(|bytes| bytes.len() as u64).sum::<u64>();
    }
}

reasons! {
    /// Reason why a packet was not sent.
    pub enum SendDrop {
        /// The device, or the queue before it, had no room.
        Full = "full",
        /// Longer than the device's MTU, and not to be cut.
        TooLong = "too_long",
        /// Not an IP packet, for a device that takes nothing else.
        NotIp = "not_ip",
        /// Without a link header, for a device that needs one; or with one, for a device that has
        /// none.
        LinkHeader = "link_header",
        /// The device is down.
        Down = "down",
        /// The kernel refused it for another reason.
        Refused = "refused",
        /// Not written into its capture: the disk is full, or broken.
        NotWritten = "not_written",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_2_sink_counters_add_up() {
        let counters = SinkCounters::default();
        counters.add_sent(Sent { packets: 2, frames: 5, bytes: 7000 });
        counters.add_dropped(SendDrop::Full, 3);
        counters.add_dropped(SendDrop::Down, 1);
        counters.add_sent(Sent { packets: 1, frames: 1, bytes: 60 });
        assert_eq!((counters.packets(), counters.frames(), counters.bytes()), (3, 6, 7060));
        assert_eq!(counters.dropped(SendDrop::Full), 3);
        assert_eq!(counters.dropped_in_all(), 4);
    }
}
