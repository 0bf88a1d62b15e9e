//! Resegmentation, the inverse of merging: the frames that a packet was merged from.

use std::num::{NonZeroU16, NonZeroU32};

use forebay_buf::Frame;

use super::header::{HeaderBytes, ipv4_id};
use super::segments::read_tag;
use super::tunnel::{OuterIds, Tunnel};
use super::wire::{CWR, FIN, PSH};
use crate::nonlinear::sum_in;
use crate::packet::{Packet, Shape};
use crate::parse::checksum::Sum;
use crate::parse::{Checksum, Headers, Network, Transport, View};

/// Splits a merged packet into `out`, oldest segment first. Any other packet goes there unchanged,
/// including a GSO packet (see [`cut`](super::cut())) and a datagram in several frames.
///
/// Only the payloads, and the bytes behind them, are the original ones: the headers of all segments
/// are rebuilt from those of the packet. Of a packet merged in [`Gro`](super::CoalesceMode::Gro)
/// mode they are byte for byte the original; one merged in [`Lro`](super::CoalesceMode::Lro) mode
/// has lost older acknowledgements, windows, timestamps and ids, and its segments carry the newest.
pub fn resegment(mut packet: Packet, out: &mut Vec<Packet>) {
    let Shape::Merged(size) = packet.shape() else {
        return out.push(packet);
    };
    let plan = ResegmentPlan::of(&packet, size);
    let followers = packet.frame.take_followers();
    let first = out.len();
    out.push(plan.first(packet));
    for (number, frame) in (1..).zip(followers) {
        out.push(plan.follower(number, frame, &out[first]));
    }
}

/// Header fields that the segments have in common.
pub(super) struct ResegmentPlan {
    /// Headers of the packet; valid for a segment except for the payload length.
    headers: Headers,
    gso_size: NonZeroU32,
    payload_len: u32,
    sequence: u32,
    /// Lower eight TCP flags.
    flags: u8,
    first_id: Option<u16>,
    /// Difference of each id from the one before: 0 or 1.
    id_step: u16,
    /// Headers outside.
    tunnel: Option<(Tunnel, OuterIds)>,
}

/// Headers that the second segment was received with, which are still in front of its payload, and
/// its length on the wire. `None` if the packet was copied.
pub(super) fn second_header(packet: &Packet) -> Option<(&[u8], u32)> {
    let frame = packet.frame.followers().next()?;
    let wire_len = u32::from(packet.headers.payload_offset) + frame.total_len_bytes();
    Some((header_of(packet, 0)?, wire_len))
}

/// Headers that a further segment was received with, counted from 0.
fn header_of(packet: &Packet, number: usize) -> Option<&[u8]> {
    let dead = packet.frame.followers().nth(number)?.headroom();
    dead.get(dead.len().checked_sub(packet.headers.payload_offset.into())?..)
}

/// Difference of each IP ID from the one before, 0 or 1, by that of the packet and by those that the second and the third
/// segment arrived with. A handler may have written another ID into the packet. Of two segments it is then unknown if the
/// IDs rose, and each gets the ID that was written. Segments of a copy have rising ones, as from the kernel.
pub(super) fn id_step(own: Option<u16>, others: [Option<u16>; 2]) -> u16 {
    u16::from(match (own, others) {
        (_, [Some(second), Some(third)]) => second != third,
        (Some(own), [Some(second), None]) => second == own.wrapping_add(1),
        _ => true,
    })
}

impl ResegmentPlan {
    /// Plan of a merged or GSO packet with `size` bytes of payload per segment.
    pub(super) fn of(packet: &Packet, size: NonZeroU16) -> Self {
        let is_tunnel = packet.headers.transport == Transport::Tunnel;
        let bytes = packet.frame.data();
        let others = [second_header(packet).map(|(header, _)| header), header_of(packet, 1)];
        let tunnel = if is_tunnel { Tunnel::of_merged(packet) } else { None };
        let headers = tunnel.map_or(packet.headers, |(_, inner)| inner);
        let view = View::new(bytes, &headers);
        let first_id = ipv4_id(bytes, &headers);
        let other_ids = others.map(|header| ipv4_id(header?, &headers));
        let tunnel = tunnel.map(|(tunnel, _)| (tunnel, OuterIds::of(&tunnel, bytes, others)));
        Self {
            headers,
            gso_size: size.into(),
            payload_len: headers.payload_len.into(),
            sequence: view.tcp_sequence().unwrap_or(0),
            flags: view.tcp_flags().map_or(0, |flags| flags.to_be_bytes()[1]),
            first_id,
            id_step: id_step(first_id, other_ids),
            tunnel,
        }
    }

    /// True if headers can be made for the segments. False for a copied tunnel whose headers were
    /// edited so that it is no longer recognized.
    pub(super) fn has_headers(&self) -> bool {
        self.tunnel.is_some() || self.headers.transport != Transport::Tunnel
    }

    pub(super) fn segments(&self) -> u32 {
        self.payload_len.div_ceil(self.gso_size.get())
    }

    /// Offset of a segment's payload in that of the packet, and its length.
    pub(super) fn place(&self, number: u32) -> (u32, u32) {
        let offset = number * self.gso_size.get();
        (offset, (self.payload_len - offset).min(self.gso_size.get()))
    }

    fn first(&self, mut packet: Packet) -> Packet {
        packet.set_gso_size(0);
        self.rewrite_looking(0, &mut packet);
        packet
    }

    fn follower(&self, number: u32, mut frame: Frame, first: &Packet) -> Packet {
        let (arrival, timestamp_ns) = read_tag(&frame);
        frame.push(self.headers.payload_offset.into());
        let header_len = usize::from(self.headers.payload_offset);
        frame.data_mut()[..header_len].copy_from_slice(&first.frame.data()[..header_len]);
        let received = Packet::received(frame, arrival, 0, self.headers.link);
        let mut packet = Packet { timestamp_ns, hash: first.hash, ..received };
        self.rewrite_looking(number, &mut packet);
        packet
    }

    /// [Rewrites](Self::rewrite) a segment whose payload sum is not known.
    fn rewrite_looking(&self, number: u32, packet: &mut Packet) {
        let start = usize::from(self.headers.payload_offset);
        let (_, len) = self.place(number);
        let payload = sum_in(&packet.frame, start..start + len as usize);
        self.rewrite(number, payload, packet);
    }

    /// Rewrites lengths, id, sequence number, flags and checksum of the segment of this number,
    /// which has the packet's headers and its own payload, of this sum.
    pub(super) fn rewrite(&self, number: u32, payload: Sum, packet: &mut Packet) {
        let (offset, payload_len) = self.place(number);
        packet.wire_len = packet.frame.total_len_bytes();
        packet.headers = self.headers;
        packet.headers.payload_len = u16::try_from(payload_len).unwrap_or(u16::MAX);
        packet.headers.l4_checksum = Checksum::Good;
        if self.headers.network == Network::Ipv4 {
            packet.headers.ip_checksum = Checksum::Good;
        }
        let mut flags = self.flags;
        if number > 0 {
            flags &= !CWR;
        }
        if number + 1 < self.segments() {
            flags &= !(PSH | FIN);
        }
        let step = self.id_step * u16::try_from(number).unwrap_or(u16::MAX);
        let id = self.first_id.map(|id| id.wrapping_add(step));
        let mut header = HeaderBytes::new(packet.frame.data_mut(), &self.headers);
        header.set_lengths(payload_len, id);
        header.set_sequence(self.sequence.wrapping_add(offset));
        header.set_flags(PSH | FIN | CWR, flags);
        header.set_checksum(payload_len, payload);
        if let Some((tunnel, ids)) = &self.tunnel {
            let id = ids.nth(number);
            tunnel.rewrite(packet.frame.data_mut(), &self.headers, payload_len, id);
            packet.headers = tunnel.headers_of_segment(&packet.headers);
        }
    }
}
