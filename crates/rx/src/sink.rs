//! Sink: egress through a device, and its counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::packet::Packet;
use crate::reasons;

/// One CPU's end of a device's tx queue, or of a socket.
pub trait Sink: Send {
    /// Sends packets, the oldest first, and never waits for room.
    ///
    /// Packets that the device keeps until they are sent are taken out of the vector. Finished
    /// packets, sent or dropped, stay in it for the caller to free. A packet that cannot be sent is
    /// dropped and counted by [reason](SendDrop).
    ///
    /// # Errors
    /// If the device is permanently gone.
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError>;

    /// Counters of sent and dropped packets.
    fn counters(&self) -> &Arc<SinkCounters>;
}

/// Reason why a sink cannot be used any more.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// Counters of one sink. Written by the CPU that sends and, if packets cross a ring, by the CPU
/// that drives the device's queue; read by any thread.
///
/// Every packet passed to the sink is counted as sent or as dropped.
#[derive(Debug, Default)]
pub struct SinkCounters {
    packets: AtomicU64,
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: [AtomicU64; SendDrop::ALL.len()],
}

impl SinkCounters {
    /// Number of packets passed to the device; a merged packet counts once.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Number of segments of those packets: frames on the wire.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    /// Number of bytes of those packets; headers of a merged packet count once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Number of packets dropped for this reason. Some segments of a packet that was cut may have
    /// been sent.
    #[must_use]
    pub fn dropped(&self, reason: SendDrop) -> u64 {
        self.dropped[reason.index()].load(Ordering::Relaxed)
    }

    /// Number of packets dropped for any reason.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        SendDrop::ALL.into_iter().map(|reason| self.dropped(reason)).sum()
    }

    /// Counts the packets sent by a call. Only a sink, or the tx queue below it, calls this.
    pub fn add_sent(&self, sent: Sent) {
        add(&self.packets, sent.packets);
        add(&self.frames, sent.frames);
        add(&self.bytes, sent.bytes);
    }

    /// Counts dropped packets. Only a sink, or the tx queue below it, calls this.
    pub fn add_dropped(&self, reason: SendDrop, packets: u64) {
        add(&self.dropped[reason.index()], packets);
    }
}

/// Adds the count of a batch; several threads may add.
fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// Number of sent packets that are not counted yet.
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
    /// Sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets + other.packets,
            frames: self.frames + other.frames,
            bytes: self.bytes + other.bytes,
        }
    }

    /// Counts a sent packet.
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
        /// Longer than the device's MTU, and not to be segmented.
        TooLong = "too_long",
        /// Not an IP packet, for a device that takes nothing else.
        NotIp = "not_ip",
        /// Link header missing for a device that needs one, or present for a device that has none.
        LinkHeader = "link_header",
        /// The device is down.
        Down = "down",
        /// Refused by the kernel for another reason.
        Refused = "refused",
        /// Not written to the capture file, because the disk is full or failed.
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
