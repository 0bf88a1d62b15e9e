//! The checksum of a merged packet, told from those of its segments without looking at a payload.
//!
//! A right checksum makes a segment's words sum up to nothing, so its payload's sum is the opposite
//! of its headers'. The headers of one packet differ in few words; what they share is summed up
//! once, at the end.

use super::CoalesceMode;
use super::candidate::{Candidate, TCP_BYTES, UDP_BYTES};
use super::header::pseudo_sum;
use crate::packet::Packet;
use crate::parse::Transport;
use crate::parse::checksum::Sum;

/// The words that differ between segments, summed up over those behind the first.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SegmentSums {
    /// Of the segments whose payload begins at an even place of the packet's.
    even: Sum,
    even_count: u16,
    /// Of the others: their bytes are the other halves of the packet's words.
    odd: Sum,
    odd_count: u16,
}

impl SegmentSums {
    /// Adds a segment, still with its headers, whose payload goes to `offset`.
    pub(super) fn add(
        &mut self,
        packet: &Packet,
        candidate: &Candidate,
        offset: u32,
        mode: CoalesceMode,
    ) {
        let words = varying(packet, candidate.payload_len, mode);
        let (sum, count) = if offset.is_multiple_of(2) {
            (&mut self.even, &mut self.even_count)
        } else {
            (&mut self.odd, &mut self.odd_count)
        };
        *sum = sum.plus(words);
        *count += 1;
    }

    /// The sum of all payloads, behind that of `first`, whose headers are still as they came.
    pub(super) fn payloads(&self, first: &Packet, mode: CoalesceMode) -> Sum {
        let (bytes, headers) = (first.frame.data(), &first.headers);
        let payload_len = headers.payload_len.into();
        let header = bytes.get(headers.transport_offset.into()..headers.payload_offset.into());
        let whole =
            pseudo_sum(bytes, headers, payload_len).plus(Sum::of(header.unwrap_or_default()));
        let own = varying(first, payload_len, mode);
        let shared = whole.plus_word(!own.fold());
        let times =
            |count: u16| Sum::default().plus_len(usize::from(shared.fold()) * usize::from(count));
        let even = times(self.even_count + 1).plus(own).plus(self.even);
        let odd = times(self.odd_count).plus(self.odd);
        Sum::default().plus_word(!even.fold()).plus_word((!odd.fold()).swap_bytes())
    }
}

/// The words of a segment's header, and of its pseudo header, that need not be those of the others.
fn varying(packet: &Packet, payload_len: u32, mode: CoalesceMode) -> Sum {
    let (bytes, headers) = (packet.frame.data(), &packet.headers);
    let start = usize::from(headers.transport_offset);
    let len = usize::from(headers.payload_offset) - start + payload_len as usize;
    let segment = bytes.get(start..headers.payload_offset.into()).unwrap_or_default();
    let sum = Sum::default().plus_len(len);
    match headers.transport {
        Transport::Tcp => {
            let Some((header, options)) = segment.split_first_chunk::<TCP_BYTES>() else {
                return sum;
            };
            let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
            let sum =
                sum.plus_word(word(4)).plus_word(word(6)).plus_word(word(12)).plus_word(word(16));
            match mode {
                CoalesceMode::Gro => sum,
                CoalesceMode::Lro => {
                    let sum = sum.plus_word(word(8)).plus_word(word(10)).plus_word(word(14));
                    sum.plus(Sum::of(options))
                }
            }
        }
        _ => match segment.first_chunk::<UDP_BYTES>() {
            Some(&[.., len_high, len_low, high, low]) => sum
                .plus_word(u16::from_be_bytes([len_high, len_low]))
                .plus_word(u16::from_be_bytes([high, low])),
            None => sum,
        },
    }
}
