//! Frames of a ring of slots: each is taken from its slot, or from the socket if it is longer.
//!
//! A lone frame is taken at once. Under load, frames are taken many at a time: while this CPU looks
//! for the next frame, the CPU that receives waits for the slot's cache line.

use std::io::ErrorKind;

use forebay_rx::coalesce::gso::VIRTIO_NET_HDR_BYTES;
use forebay_sys::packet::FrameRing;

use super::block::{InvalidBlock, RingFrame, SlotContent};
use super::source::{Halt, LARGEST_BYTES, PacketReceiver};

/// Mean time between frames below which the ring counts as loaded: more than 125,000 frames per
/// second.
const LOADED_NS: u64 = 8_000;

/// Time for which a loaded ring is left alone. No longer than a CPU shared with other programs
/// spins, since `poll(2)` would return at once.
const REST_NS: u64 = 20_000;

/// Pace at which a ring is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ReadPace {
    /// Time at which frames were taken last.
    taken_ns: u64,
    /// Time until which the ring is left alone.
    rest_until_ns: u64,
}

impl ReadPace {
    /// Time until which the ring is left alone; `None` if it may be read now.
    pub(super) fn rests_until(&self, now_ns: u64) -> Option<u64> {
        (now_ns < self.rest_until_ns).then_some(self.rest_until_ns)
    }

    /// Ends a rest: frames wait in the ring.
    pub(super) fn resume(&mut self) {
        self.rest_until_ns = 0;
    }

    /// Records that frames were taken, and leaves the ring alone for a moment if they came fast.
    pub(super) fn took(&mut self, frames: u64, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(self.taken_ns);
        if since_ns < frames.saturating_mul(LOADED_NS) {
            self.rest_until_ns = now_ns.saturating_add(REST_NS);
        }
        self.taken_ns = now_ns;
    }
}

/// Ring of slots, and the frame read from its socket.
pub(super) struct Slots {
    ring: FrameRing,
    /// Bytes of the oldest frame, if it is longer than its slot.
    whole: Box<[u8]>,
    /// Length of the frame in `whole`; `None` if it was not read.
    whole_len: Option<usize>,
    /// True if a read returned an error of the socket, which `SO_ERROR` no longer has.
    had_error: bool,
    pub(super) pace: ReadPace,
}

impl Slots {
    pub(super) fn new(ring: FrameRing) -> Self {
        Self {
            ring,
            whole: vec![0; LARGEST_BYTES as usize].into(),
            whole_len: None,
            had_error: false,
            pace: ReadPace::default(),
        }
    }

    /// True if a read has returned an error of the socket since this was asked last.
    pub(super) fn take_error(&mut self) -> bool {
        std::mem::take(&mut self.had_error)
    }

    pub(super) fn ring(&self) -> &FrameRing {
        &self.ring
    }

    /// Takes frames until none is left, the burst is full or no memory is free.
    pub(super) fn take(
        &mut self,
        receiver: &mut PacketReceiver<'_>,
        max: usize,
    ) -> Result<Halt, InvalidBlock> {
        while let Some(slot) = self.ring.slot() {
            if receiver.is_full(max) {
                return Ok(Halt::Enough);
            }
            let (mut frame, mut content) = RingFrame::in_slot(slot)?;
            if content == SlotContent::InSocket {
                let len = match self.whole_len {
                    Some(len) => len,
                    None => read_whole(&self.ring, &mut self.whole, &mut self.had_error)?,
                };
                // A burst without memory leaves the frame here, since it has left the socket.
                self.whole_len = Some(len);
                frame.bytes = &self.whole[..len];
                content = match frame.wire_len as usize {
                    wire_len if wire_len > len => SlotContent::Cut,
                    _ => SlotContent::Whole,
                };
            }
            match content {
                SlotContent::Cut => receiver.cut += 1,
                SlotContent::Whole | SlotContent::InSocket => {
                    if !receiver.receive(&frame) {
                        return Ok(Halt::NoMemory);
                    }
                }
            }
            self.whole_len = None;
            self.ring.give_back();
        }
        Ok(Halt::Empty)
    }
}

/// Reads a frame from the socket, and returns its length.
fn read_whole(
    ring: &FrameRing,
    to: &mut [u8],
    had_error: &mut bool,
) -> Result<usize, InvalidBlock> {
    // The slot has the same `virtio_net_hdr`.
    let mut vnet_hdr = [0; VIRTIO_NET_HDR_BYTES];
    let read = match ring.take_whole(&mut vnet_hdr, to) {
        // A pending error, as of a link that went down, comes first and once; the frame is there.
        Err(error) if error.kind() != ErrorKind::WouldBlock => {
            *had_error = true;
            ring.take_whole(&mut vnet_hdr, to)
        }
        read => read,
    };
    read.ok().and_then(|len| len.checked_sub(VIRTIO_NET_HDR_BYTES)).ok_or(InvalidBlock::Absent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_10_only_load_rests() {
        let mut pace = ReadPace::default();
        // Round trips of 20 us, each taken at once.
        for round in 1..100 {
            pace.took(1, round * 20_000);
            assert_eq!(pace.rests_until(round * 20_000), None);
        }
        // A frame each microsecond: from the second on, a block of them each 20 us.
        let now_ns = 10_000_000;
        pace.took(1, now_ns);
        pace.took(1, now_ns + 1_000);
        assert!(pace.rests_until(now_ns + 1_000 + REST_NS - 1).is_some());
        assert_eq!(pace.rests_until(now_ns + 1_000 + REST_NS), None);
        pace.took(20, now_ns + 1_000 + REST_NS);
        assert!(pace.rests_until(now_ns + 1_000 + REST_NS + 1).is_some());
        // The load ends: a frame later is taken at once, and the ring rests no more.
        pace.took(1, now_ns + 100_000);
        assert_eq!(pace.rests_until(now_ns + 100_000 + REST_NS), None);
        pace.took(1, now_ns + 150_000);
        assert_eq!(pace.rests_until(now_ns + 150_000), None);
    }
}
