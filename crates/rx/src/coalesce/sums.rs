//! Checksum of a merged packet, computed from those of its segments without reading a payload.
//!
//! With a correct checksum, all words of a segment sum up to zero (ones' complement), so the sum of
//! its payload is the complement of its headers' sum. Few words of the headers differ between the
//! segments of a packet; only those are added as segments arrive.

use super::CoalesceMode;
use super::compare::Own;
use super::header::pseudo_sum;
use crate::packet::Packet;
use crate::parse::Transport;
use crate::parse::checksum::Sum;

/// Modulus of ones' complement sums.
const MODULUS: u64 = 0xffff;

/// Sums of the header fields that differ between segments, without lengths and the last segment's
/// flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentSums {
    /// Segments whose payload begins at an even offset of the packet's payload; and those at an odd
    /// offset, whose bytes are the other halves of the packet's words.
    sides: [Side; 2],
    /// Words of the first segment.
    first: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Side {
    words: u64,
    segments: u64,
}

impl SegmentSums {
    /// Begins with the first segment.
    pub(super) fn begin(packet: &Packet, own: &Own, mode: CoalesceMode) -> Self {
        let first = words(packet, own, mode);
        Self { sides: [Side { words: first, segments: 1 }, Side::default()], first }
    }

    /// Adds a segment that still has its headers, and whose payload goes to `offset`.
    #[inline(always)]
    pub(super) fn add(&mut self, packet: &Packet, own: &Own, offset: u32, mode: CoalesceMode) {
        let side = &mut self.sides[(offset & 1) as usize];
        side.words += words(packet, own, mode);
        side.segments += 1;
    }

    /// Sum of the payloads, `payload_len` bytes in all, behind the headers of `first`, which are
    /// still as received; `last_flags` are those that only the last segment has.
    pub(super) fn payloads(
        &self,
        first: &Packet,
        payload_len: u32,
        last_flags: u8,
        mode: CoalesceMode,
    ) -> Sum {
        let headers = &first.headers;
        let size = u64::from(headers.payload_len);
        let behind_last = self.sides[0].segments + self.sides[1].segments - 1;
        let last_lacks = size * (behind_last + 1) - u64::from(payload_len);
        let last_side = usize::from(size * behind_last % 2 == 1);
        let whole = pseudo_sum(first.frame.data(), headers, headers.payload_len.into())
            .plus(Sum::of(header_bytes(first)));
        // Headers of a segment of full length, without the words that differ.
        let shared = u64::from(whole.fold()) + MODULUS - self.first % MODULUS;
        // The length is a field of the pseudo header, and of UDP's header, too.
        let lengths = if headers.transport == Transport::Udp { 2 } else { 1 };
        let flags = if mode == CoalesceMode::Gro { u64::from(last_flags) } else { 0 };
        let of_last = flags + lengths * (MODULUS - last_lacks);
        let [even, odd] = [0, 1].map(|place| {
            let Side { words, segments } = self.sides[place];
            let of_last = if place == last_side { of_last } else { 0 };
            let sum = words + segments * (shared % MODULUS) + of_last;
            u16::try_from(sum % MODULUS).unwrap_or(0)
        });
        Sum::default().plus_word(!even).plus_word((!odd).swap_bytes())
    }
}

/// Value of the words that differ between segments: sequence number and checksum; in `lro` mode, in
/// which most fields may advance, the whole header.
#[inline(always)]
fn words(packet: &Packet, own: &Own, mode: CoalesceMode) -> u64 {
    match mode {
        CoalesceMode::Gro => u64::from(own.sequence) + u64::from(own.checksum),
        CoalesceMode::Lro => Sum::of(header_bytes(packet)).fold().into(),
    }
}

/// Bytes of the transport header.
fn header_bytes(packet: &Packet) -> &[u8] {
    let headers = &packet.headers;
    let place = headers.transport_offset.into()..headers.payload_offset.into();
    packet.frame.data().get(place).unwrap_or_default()
}
