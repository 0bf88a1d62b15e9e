//! The checksum of a merged packet, told from those of its segments without looking at a payload.
//!
//! A right checksum makes all words of a segment sum up to nothing, so its payload's sum is the
//! opposite of its headers'. Of those, few words differ between the segments of a packet; only they
//! are added up as segments come.

use super::CoalesceMode;
use super::compare::Own;
use super::header::pseudo_sum;
use crate::packet::Packet;
use crate::parse::Transport;
use crate::parse::checksum::Sum;

/// Ones' complement sums are numbers modulo this.
const MODULUS: u64 = 0xffff;

/// Header fields that each segment of a packet has of its own, lengths and last flags aside.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentSums {
    /// Of segments whose payload begins at an even place of the packet's; and of the others, whose
    /// bytes are the other halves of the packet's words.
    sides: [Side; 2],
    /// The first segment's.
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

    /// Adds a segment, still with its headers, whose payload goes to `offset`.
    #[inline(always)]
    pub(super) fn add(&mut self, packet: &Packet, own: &Own, offset: u32, mode: CoalesceMode) {
        let side = &mut self.sides[(offset & 1) as usize];
        side.words += words(packet, own, mode);
        side.segments += 1;
    }

    /// The sum of the payloads, `payload_len` bytes in all behind the headers of `first`, which are
    /// still as they came; `last_flags` are those that only the last segment has.
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
        // All that a segment of full length has, but for its own words.
        let shared = u64::from(whole.fold()) + MODULUS - self.first % MODULUS;
        // A length stands in the pseudo header, and again in UDP's.
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

/// A segment's own words by their values: sequence number and checksum; in `lro` mode, in which
/// most of it may advance, all of its header.
#[inline(always)]
fn words(packet: &Packet, own: &Own, mode: CoalesceMode) -> u64 {
    match mode {
        CoalesceMode::Gro => u64::from(own.sequence) + u64::from(own.checksum),
        CoalesceMode::Lro => Sum::of(header_bytes(packet)).fold().into(),
    }
}

/// The transport header.
fn header_bytes(packet: &Packet) -> &[u8] {
    let headers = &packet.headers;
    let place = headers.transport_offset.into()..headers.payload_offset.into();
    packet.frame.data().get(place).unwrap_or_default()
}
