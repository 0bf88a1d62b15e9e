//! What a packet must be to be merged at all, whatever is held of its flow.

use super::CoalesceMode;
use super::lro::Timestamps;
use super::refusal::Refusal;
use crate::packet::Packet;
use crate::parse::checksum::{self, Sum};
use crate::parse::{Checksum, Fragment, Network, Transport};

pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;
pub(super) const URG: u8 = 0x20;
pub(super) const CWR: u8 = 0x80;

pub(super) const IPV4_BYTES: usize = 20;
pub(super) const IPV6_BYTES: usize = 40;
pub(super) const TCP_BYTES: usize = 20;
pub(super) const UDP_BYTES: usize = 8;

const RESERVED_BIT: u8 = 0x80;
const CONGESTION_EXPERIENCED: u8 = 0x03;
const HOP_BY_HOP: u8 = 0;
const DESTINATION_OPTIONS: u8 = 60;

/// A packet that may be merged: whole, right, and of a kind that can be given back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Bytes before the payload.
    pub(super) header_len: usize,
    pub(super) payload_len: u32,
    /// TCP's sequence number.
    pub(super) sequence: u32,
    /// TCP's lower eight flags.
    pub(super) flags: u8,
}

impl Candidate {
    /// Whether nothing may follow this segment.
    pub(super) fn ends(&self) -> bool {
        self.flags & (PSH | FIN) != 0
    }
}

/// Judges a parsed packet by itself.
pub(super) fn examine(packet: &Packet, mode: CoalesceMode) -> Result<Candidate, Refusal> {
    let headers = &packet.headers;
    let bytes = packet.frame.data();
    let start = usize::from(headers.network_offset);
    let Some(rest) = bytes.get(start..) else { return Err(Refusal::Flaw) };
    if headers.flaw.is_some() {
        return Err(Refusal::Flaw);
    }
    if headers.fragment != Fragment::Whole {
        return Err(Refusal::Fragment);
    }
    let network_len = usize::from(headers.transport_offset).saturating_sub(start);
    let (end, tos) = match headers.network {
        Network::Ipv4 => ipv4(rest, network_len, headers.ip_checksum)?,
        Network::Ipv6 => ipv6(rest, network_len)?,
        Network::Other => return Err(Refusal::Protocol),
    };
    if mode == CoalesceMode::Lro && tos & CONGESTION_EXPERIENCED == CONGESTION_EXPERIENCED {
        return Err(Refusal::CongestionMark);
    }
    let Some(segment) = rest.get(network_len..) else { return Err(Refusal::Snapped) };
    match headers.transport {
        Transport::Tcp => tcp(packet, segment, mode),
        Transport::Udp => udp(packet, segment, start + end),
        Transport::Icmp | Transport::Other => Err(Refusal::Protocol),
    }
}

/// Returns where the packet ends, from the network header on, and its type of service.
fn ipv4(rest: &[u8], network_len: usize, checksum: Checksum) -> Result<(usize, u8), Refusal> {
    let Some(header) = rest.first_chunk::<IPV4_BYTES>() else { return Err(Refusal::Flaw) };
    if network_len != IPV4_BYTES || header[6] & RESERVED_BIT != 0 {
        return Err(Refusal::IpOptions);
    }
    let verdict = match checksum {
        Checksum::Unknown => checksum::judge(Sum::of(header)),
        known => known,
    };
    if verdict != Checksum::Good {
        return Err(Refusal::IpChecksum);
    }
    if [header[10], header[11]] == [0xff; 2] {
        return Err(Refusal::OddChecksum);
    }
    Ok((u16::from_be_bytes([header[2], header[3]]).into(), header[1]))
}

/// As [`ipv4`].
fn ipv6(rest: &[u8], network_len: usize) -> Result<(usize, u8), Refusal> {
    let Some(header) = rest.first_chunk::<IPV6_BYTES>() else { return Err(Refusal::Flaw) };
    let payload_len = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let options = rest.get(IPV6_BYTES..network_len).ok_or(Refusal::Flaw)?;
    if payload_len == 0 || !are_options(header[6], options) {
        return Err(Refusal::Extension);
    }
    Ok((IPV6_BYTES + payload_len, header[0] << 4 | header[1] >> 4))
}

/// Whether all extension headers are ones that every segment of a flow can share.
fn are_options(mut next: u8, mut bytes: &[u8]) -> bool {
    while let &[after, len, ..] = bytes {
        let (HOP_BY_HOP | DESTINATION_OPTIONS) = next else { return false };
        let Some(rest) = bytes.get((usize::from(len) + 1) * 8..) else { return false };
        (next, bytes) = (after, rest);
    }
    bytes.is_empty()
}

fn tcp(packet: &Packet, segment: &[u8], mode: CoalesceMode) -> Result<Candidate, Refusal> {
    let Some(header) = segment.first_chunk::<TCP_BYTES>() else { return Err(Refusal::Snapped) };
    let flags = header[13];
    if flags & (SYN | RST | URG | CWR) != 0 {
        return Err(Refusal::TcpFlags);
    }
    let candidate =
        whole(packet, u32::from_be_bytes([header[4], header[5], header[6], header[7]]), flags)?;
    if [header[16], header[17]] == [0xff; 2] {
        return Err(Refusal::OddChecksum);
    }
    if mode == CoalesceMode::Lro {
        // The source's: nothing but data and acknowledgements, timestamps or no options at all.
        if flags & !PSH != ACK || header[12] & 0x0f != 0 {
            return Err(Refusal::TcpFlags);
        }
        let options_len = candidate.header_len - usize::from(packet.headers.transport_offset);
        let options = segment.get(TCP_BYTES..options_len).unwrap_or_default();
        if !options.is_empty() && Timestamps::of(options).is_none() {
            return Err(Refusal::TcpOptions);
        }
    }
    Ok(candidate)
}

fn udp(packet: &Packet, segment: &[u8], end: usize) -> Result<Candidate, Refusal> {
    let Some(header) = segment.first_chunk::<UDP_BYTES>() else { return Err(Refusal::Snapped) };
    if [header[6], header[7]] == [0; 2] {
        return Err(Refusal::NoChecksum);
    }
    let candidate = whole(packet, 0, 0)?;
    if candidate.header_len + usize::from(packet.headers.payload_len) != end {
        return Err(Refusal::UdpLength);
    }
    if packet.frame.data().len() != end {
        return Err(Refusal::Padded);
    }
    Ok(candidate)
}

/// What TCP and UDP have in common: all of it is there, it is right, and there is something.
fn whole(packet: &Packet, sequence: u32, flags: u8) -> Result<Candidate, Refusal> {
    let headers = &packet.headers;
    let header_len = usize::from(headers.payload_offset);
    let len = packet.frame.data().len();
    if len != packet.wire_len as usize || len < header_len + usize::from(headers.payload_len) {
        return Err(Refusal::Snapped);
    }
    match headers.l4_checksum {
        Checksum::Good => {}
        Checksum::Bad => return Err(Refusal::L4Checksum),
        Checksum::Unknown => return Err(Refusal::Unverified),
    }
    if headers.payload_len == 0 {
        return Err(Refusal::NoPayload);
    }
    Ok(Candidate { header_len, payload_len: headers.payload_len.into(), sequence, flags })
}
