//! Number of bytes copied of a packet: its headers, or all of it.

use forebay_buf::{Frame, PageFrag, Pool};
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};

/// One cache line of a packet.
const SHORT_HEAD_BYTES: u32 = 64;
/// Two cache lines of a packet.
const LONG_HEAD_BYTES: u32 = 2 * 64;

/// Number of packets in a row with headers within the first line from which only that line is
/// copied.
const SHORT_RUN: u8 = 64;

const UDP: u8 = 17;

/// Estimate of header lengths, from recent packets. If [parsing](forebay_rx::parse) needs more than
/// was copied, it pulls the rest.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct HeaderCopyLen {
    /// Number of packets in a row with short headers, at most [`SHORT_RUN`].
    short_run: u8,
}

impl HeaderCopyLen {
    /// Returns the number of bytes to copy of the next packet.
    #[inline]
    pub(super) fn len_bytes(self) -> u32 {
        if self.short_run < SHORT_RUN { LONG_HEAD_BYTES } else { SHORT_HEAD_BYTES }
    }

    /// Accounts for a packet whose first bytes are `head`.
    #[inline]
    pub(super) fn add(&mut self, head: &[u8]) {
        self.short_run = if is_short(head) { (self.short_run + 1).min(SHORT_RUN) } else { 0 };
    }
}

/// Copies the beginning of a packet, from `at` on. A copy of constant length is faster. The head of
/// every packet longer than that has one of two constant lengths.
#[inline(always)] // part of the work for every packet that is not copied as a whole
pub(super) fn copy_head(frag: &PageFrag, at: u32, to: &mut [u8]) {
    if let Ok(head) = <&mut [u8; SHORT_HEAD_BYTES as usize]>::try_from(&mut *to) {
        frag.copy_in(at, head);
    } else if let Ok(head) = <&mut [u8; LONG_HEAD_BYTES as usize]>::try_from(&mut *to) {
        frag.copy_in(at, head);
    } else {
        frag.copy_in(at, to);
    }
}

/// Copies a small packet into a private frame.
#[inline(always)] // a frame returned through memory would wait for the store
pub(super) fn copied(
    frag: &PageFrag,
    header_bytes: u32,
    len_bytes: u32,
    pool: &mut Pool,
) -> Option<Frame> {
    let mut frame = pool.allocate(len_bytes)?;
    frame.set_len(len_bytes);
    match frame.room_mut().first_chunk_mut::<{ SHORT_HEAD_BYTES as usize }>() {
        // A short packet is copied with a few bytes more, because constant lengths are copied
        // faster.
        Some(line) if len_bytes <= SHORT_HEAD_BYTES => frag.copy_in(header_bytes, line),
        _ => frag.copy_in(header_bytes, frame.data_mut()),
    }
    Some(frame)
}

/// True if all headers end within the first line, as those of UDP over IP without tags or options.
#[inline]
fn is_short(head: &[u8]) -> bool {
    let Some(head) = head.first_chunk::<{ SHORT_HEAD_BYTES as usize }>() else { return false };
    match u16::from_be_bytes([head[12], head[13]]) {
        ETHERTYPE_IPV4 => head[14] == 0x45 && head[23] == UDP,
        ETHERTYPE_IPV6 => head[20] == UDP,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;

    use etherparse::{PacketBuilder, PacketBuilderStep, VlanId};

    use super::*;

    fn of(packets: impl IntoIterator<Item = Vec<u8>>) -> u32 {
        let mut heads = HeaderCopyLen::default();
        packets.into_iter().for_each(|packet| heads.add(&packet));
        heads.len_bytes()
    }

    fn link() -> PacketBuilderStep<etherparse::Ethernet2Header> {
        PacketBuilder::ethernet2([1; 6], [2; 6])
    }

    fn built(step: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut packet = Vec::new();
        step(&mut packet);
        packet
    }

    fn udp() -> Vec<u8> {
        built(|to| link().ipv4([1; 4], [2; 4], 9).udp(1, 2).write(to, &[0; 300]).unwrap())
    }

    fn udp_6() -> Vec<u8> {
        built(|to| link().ipv6([1; 16], [2; 16], 9).udp(1, 2).write(to, &[0; 300]).unwrap())
    }

    fn tcp() -> Vec<u8> {
        built(|to| link().ipv4([1; 4], [2; 4], 9).tcp(1, 2, 3, 4).write(to, &[0; 300]).unwrap())
    }

    fn tagged() -> Vec<u8> {
        let step = || link().single_vlan(VlanId::try_new(7).unwrap()).ipv4([1; 4], [2; 4], 9);
        built(|to| step().udp(1, 2).write(to, &[0; 300]).unwrap())
    }

    #[test]
    fn second_header_line_left_alone() {
        let short = || repeat_n(udp(), 64).chain(repeat_n(udp_6(), 200));
        assert_eq!(of([]), 128);
        assert_eq!(of(short().take(63)), 128);
        assert_eq!(of(short().take(64)), 64);
        assert_eq!(of(short()), 64);
        for long in [tcp(), tagged(), vec![0; 14], udp()[..63].to_vec()] {
            assert_eq!(of(short().chain([long])), 128);
        }
    }
}
