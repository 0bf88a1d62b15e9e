//! Detects tunnels, and verifies their checksums that neither the device nor an earlier stage
//! verified.

use forebay_buf::Frame;

use super::layers::{LayerKind, OuterLayers};
use super::walk::walk;
use super::{Tunnel, UDP, addresses_at};
use crate::coalesce::refusal::MergeRefusal;
use crate::nonlinear::sum_in;
use crate::packet::Packet;
use crate::parse::checksum::{Sum, judge};
use crate::parse::pull::pull_all;
use crate::parse::{Checksum, Fragment, Headers, Network, Transport, View};

/// Outcome of [`open`].
#[must_use]
pub(in crate::coalesce) enum Opened {
    /// Not a tunnel.
    Plain,
    /// Tunnel that cannot be merged.
    Refused(MergeRefusal),
    /// Tunnel that can be merged; `packet.headers` are the inner headers from now on.
    Tunnel(Tunnel),
}

/// Detects a tunnel and verifies its inner checksum, which neither the device nor an earlier stage
/// has verified. A sum over the frame from the device (`CHECKSUM_COMPLETE`) or from the copy saves
/// the pass over the payload.
pub(in crate::coalesce) fn open(packet: &mut Packet) -> Opened {
    let Headers { flaw, fragment, .. } = packet.headers;
    let is_judged_as_plain =
        packet.is_chain() || packet.is_gso() || flaw.is_some() || fragment != Fragment::Whole;
    if is_judged_as_plain {
        return Opened::Plain;
    }
    let outer = packet.headers;
    let (layers, mut inner) = match walk_pulling(packet) {
        Ok(Some(found)) => found,
        Ok(None) => return Opened::Plain,
        Err(refusal) => return Opened::Refused(refusal),
    };
    let tunnel = Tunnel { outer, layers };
    match tunnel.verify(packet, &inner) {
        Ok(checksum) => inner.l4_checksum = checksum,
        Err(refusal) => return Opened::Refused(refusal),
    }
    packet.headers = inner;
    Opened::Tunnel(tunnel)
}

/// Walks the headers of a packet. Headers that continue in frags of a nonlinear packet are first
/// pulled into the head, if there is room.
fn walk_pulling(packet: &mut Packet) -> Result<Option<(OuterLayers, Headers)>, MergeRefusal> {
    let Packet { frame, wire_len, headers, .. } = packet;
    let walked = walk(frame.data(), *wire_len, headers);
    if frame.frag_count() == 0 || are_held(frame, &walked) {
        return walked;
    }
    let _ = pull_all(frame);
    let walked = walk(frame.data(), *wire_len, headers);
    if are_held(frame, &walked) { walked } else { Err(MergeRefusal::InPieces) }
}

/// True if all headers are in the linear part of the frame.
fn are_held(frame: &Frame, walked: &Result<Option<(OuterLayers, Headers)>, MergeRefusal>) -> bool {
    match walked {
        Ok(Some((_, inner))) => (1..=frame.data().len()).contains(&inner.payload_offset.into()),
        walked => *walked != Err(MergeRefusal::Snapped),
    }
}

impl Tunnel {
    /// State of the inner checksum, once the outer checksums are verified.
    fn verify(&self, packet: &Packet, inner: &Headers) -> Result<Checksum, MergeRefusal> {
        let bytes = packet.frame.data();
        let start = usize::from(inner.transport_offset);
        let end = packet.frame.total_len_bytes() as usize;
        let is_summed = matches!(inner.transport, Transport::Tcp | Transport::Udp)
            && inner.fragment == Fragment::Whole
            && inner.flaw.is_none();
        if !is_summed || end != packet.wire_len as usize {
            return Ok(Checksum::Unknown);
        }
        let told = packet.device_sum.and_then(|sum| sum.from(bytes, inner.link, start));
        let rest = told.unwrap_or_else(|| sum_in(&packet.frame, start..end));
        self.verify_outer(bytes, (start, end), rest)?;
        let len = usize::from(inner.payload_offset - inner.transport_offset)
            + usize::from(inner.payload_len);
        let segment = match start + len {
            segment_end if segment_end == end => rest,
            segment_end => sum_in(&packet.frame, start..segment_end),
        };
        let is_udp = inner.transport == Transport::Udp;
        if is_udp && bytes.get(start + 6..start + 8) == Some(&[0; 2]) {
            return Ok(Checksum::Unknown); // no checksum, even if the sum happens to be right
        }
        let Some(addresses) = View::new(bytes, inner).address_bytes() else {
            return Ok(Checksum::Unknown);
        };
        let pseudo = Sum::of(addresses).plus_word(inner.protocol.into()).plus_len(len);
        Ok(judge(pseudo.plus(segment)))
    }

    /// Verifies the outer checksums, except a UDP checksum that parsing verified. `rest` is the sum
    /// of the bytes from `start` to `end`.
    fn verify_outer(
        &self,
        bytes: &[u8],
        (start, end): (usize, usize),
        rest: Sum,
    ) -> Result<(), MergeRefusal> {
        let is_verified = self.outer.l4_checksum == Checksum::Good;
        let mut pseudo = Sum::default();
        for layer in self.layers.as_slice() {
            let at = usize::from(layer.offset);
            let from_here = || Sum::of(bytes.get(at..start).unwrap_or_default()).plus(rest);
            let sum = match layer.kind {
                LayerKind::Ipv4 => {
                    pseudo = addresses_sum(bytes, at, Network::Ipv4);
                    continue;
                }
                LayerKind::Ipv6 => {
                    pseudo = addresses_sum(bytes, at, Network::Ipv6);
                    continue;
                }
                LayerKind::UdpSummed if !is_verified => {
                    from_here().plus(pseudo).plus_word(UDP.into()).plus_len(end - at)
                }
                LayerKind::GreSummed => from_here(),
                LayerKind::UdpSummed | LayerKind::Udp | LayerKind::Pppoe => continue,
            };
            if judge(sum) != Checksum::Good {
                return Err(MergeRefusal::TunnelChecksum);
            }
        }
        Ok(())
    }
}

/// Sum of the source and destination address in an IP header.
pub(super) fn addresses_sum(bytes: &[u8], at: usize, network: Network) -> Sum {
    Sum::of(addresses_at(bytes, network, at).unwrap_or_default())
}
