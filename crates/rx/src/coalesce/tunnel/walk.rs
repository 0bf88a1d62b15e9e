//! Walks from a frame's first header to the innermost IP header, by which the packet is merged.

use super::layers::{LayerKind, OuterLayers, PPPOE_BEFORE_LEN};
use crate::coalesce::candidate::{ipv4, ipv6, take_shared};
use crate::coalesce::refusal::MergeRefusal;
use crate::coalesce::wire::{IPV4_BYTES, IPV6_BYTES, ODD_CHECKSUM, UDP_BYTES};
use crate::parse::extension::ExtensionWalk;
use crate::parse::{
    Checksum, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Headers, Link, MAX_EXTENSION_HEADERS, Network,
    Verify, is_plain, link_layer, parse,
};

const ETHERTYPE_BRIDGED: u16 = 0x6558;
const ETHERTYPE_PPPOE_SESSION: u16 = 0x8864;

const IPIP: u8 = 4;
const UDP: u8 = 17;
const IPV6: u8 = 41;
const GRE: u8 = 47;

const PORT_VXLAN: u16 = 4789;
const PORT_VXLAN_GPE: u16 = 4790;
/// VXLAN port that Linux used before IANA assigned 4789.
const PORT_VXLAN_LINUX: u16 = 8472;
const PORT_GENEVE: u16 = 6081;

/// PPPoE version 1, type 1, code 0: session data (RFC 2516).
const PPPOE_SESSION: [u8; 2] = [0x11, 0];
/// PPPoE header, including the PPP protocol field.
const PPPOE_BYTES: usize = 8;
const PPP_IPV4: u16 = 0x0021;
const PPP_IPV6: u16 = 0x0057;

/// MAC addresses, two VLAN tags, EtherType or length, LLC/SNAP header.
const LINK_BYTES_MAX: usize = 12 + 2 * 4 + 2 + 8;

const FRAGMENT_BITS: u16 = 0x3fff;

/// True for the UDP port of a tunnel. As in the kernel, datagrams to these ports are never merged
/// as plain UDP, because splitting them again could corrupt the inner packets.
#[inline(always)]
pub(super) fn is_tunnel(port: u16) -> bool {
    matches!(port, PORT_VXLAN | PORT_VXLAN_GPE | PORT_VXLAN_LINUX | PORT_GENEVE)
}

/// Header that comes next.
#[derive(Clone, Copy)]
enum NextHeader {
    Ethernet,
    Pppoe,
    Ip(Network),
    Gre,
    Vxlan,
    VxlanGpe,
    Geneve,
}

/// Walk in progress.
struct Walk<'a> {
    bytes: &'a [u8],
    /// End of the frame on the wire.
    end: usize,
    /// Offset of the next header.
    at: usize,
    layers: OuterLayers,
    /// True inside a tunnel other than PPPoE (the kernel's `encap_mark`).
    is_inside: bool,
    /// End of all headers, if known. A UDP header that ends there is the innermost one.
    headers_end: Option<usize>,
    /// Header assumed behind UDP, whatever its port.
    behind_udp: Option<NextHeader>,
}

/// Outer layers and inner headers of a parsed packet, with offsets in the frame; `None` if it is
/// not a tunnel. Verifies only the header checksums of outer IPv4 headers.
///
/// # Errors
/// If the packet is a tunnel that cannot be merged.
pub(super) fn walk(
    bytes: &[u8],
    wire_len: u32,
    outer: &Headers,
) -> Result<Option<(OuterLayers, Headers)>, MergeRefusal> {
    let link = link_layer(bytes, outer.link);
    let Some(next) = link.ethertype.and_then(NextHeader::of_ethertype) else { return Ok(None) };
    let mut walk = Walk::new(bytes, wire_len, link.network_offset.into());
    let link_header = bytes.get(..walk.at).unwrap_or_default();
    walk.step_inside(next, link_header)?;
    let inner = walk.innermost(outer.link)?;
    Ok((!walk.layers.is_empty()).then_some((walk.layers, inner)))
}

/// Outer layers and inner headers of a packet whose headers are known to end at `headers_end`. So a tunnel over UDP is
/// recognized at any port: its headers must end there, too.
pub(super) fn walk_to(
    whole: (&[u8], u32),
    outer: &Headers,
    headers_end: usize,
) -> Option<(OuterLayers, Headers)> {
    walk_by(whole, whole, outer, headers_end)
}

/// Outer layers and inner headers of a merged packet. The layers are those of `second`, the headers
/// of its second segment, which was `second_len` bytes long on the wire. The outer headers in `bytes`
/// may have been edited, and do not select the layers.
pub(super) fn walk_merged(
    whole: (&[u8], u32),
    outer: &Headers,
    second: (&[u8], u32),
) -> Option<(OuterLayers, Headers)> {
    walk_by(second, whole, outer, second.0.len())
}

/// Outer layers by the bytes of one packet, which may lack the end of the innermost header, and inner headers of another one.
fn walk_by(
    (bytes, wire_len): (&[u8], u32),
    (whole, whole_len): (&[u8], u32),
    outer: &Headers,
    headers_end: usize,
) -> Option<(OuterLayers, Headers)> {
    let link = link_layer(bytes, outer.link);
    let next = link.ethertype.and_then(NextHeader::of_ethertype)?;
    let at = usize::from(link.network_offset);
    let link_header = bytes.get(..at)?;
    [None].into_iter().chain(NextHeader::OVER_UDP.map(Some)).find_map(|behind_udp| {
        let walk = Walk::new(bytes, wire_len, at);
        let mut walk = Walk { headers_end: Some(headers_end), behind_udp, ..walk };
        walk.step_inside(next, link_header).ok()?;
        let inner = Walk::new(whole, whole_len, walk.at).innermost(outer.link).ok()?;
        let is_it = !walk.layers.is_empty() && usize::from(inner.payload_offset) == headers_end;
        is_it.then_some((walk.layers, inner))
    })
}

/// Headers of the IP packet inside PPPoE, with offsets in the frame.
pub(super) fn behind_pppoe(bytes: &[u8], outer: &Headers) -> Option<Headers> {
    let link = link_layer(bytes, outer.link);
    let at = usize::from(link.network_offset);
    let mut walk = Walk { end: usize::MAX, ..Walk::new(bytes, 0, at) };
    (link.ethertype == Some(ETHERTYPE_PPPOE_SESSION)).then_some(())?;
    walk.at += PPPOE_BYTES;
    walk.innermost(outer.link).ok()
}

impl NextHeader {
    fn of_ethertype(ethertype: u16) -> Option<Self> {
        Some(match ethertype {
            ETHERTYPE_IPV4 => Self::Ip(Network::Ipv4),
            ETHERTYPE_IPV6 => Self::Ip(Network::Ipv6),
            ETHERTYPE_PPPOE_SESSION => Self::Pppoe,
            _ => return None,
        })
    }

    /// Header announced by an EtherType inside a tunnel, where Ethernet frames are allowed too.
    fn of_tunnelled(ethertype: u16) -> Result<Self, MergeRefusal> {
        match ethertype {
            ETHERTYPE_BRIDGED => Ok(Self::Ethernet),
            other => Self::of_ethertype(other).ok_or(MergeRefusal::Protocol),
        }
    }

    /// Headers of tunnels over UDP.
    const OVER_UDP: [Self; 3] = [Self::Vxlan, Self::Geneve, Self::VxlanGpe];

    fn of_port(port: u16) -> Option<Self> {
        Some(match port {
            PORT_VXLAN | PORT_VXLAN_LINUX => Self::Vxlan,
            PORT_VXLAN_GPE => Self::VxlanGpe,
            PORT_GENEVE => Self::Geneve,
            _ => return None,
        })
    }
}

impl<'a> Walk<'a> {
    fn new(bytes: &'a [u8], wire_len: u32, at: usize) -> Self {
        let end = (wire_len as usize).max(bytes.len());
        let (headers_end, behind_udp) = (None, None);
        let layers = OuterLayers::default();
        Self { bytes, end, at, layers, is_inside: false, headers_end, behind_udp }
    }

    /// Walks to the innermost IP header. Terminates: each tunnel type except PPPoE is entered at
    /// most once, and PPPoE is always followed by IP.
    fn step_inside(&mut self, first: NextHeader, link_header: &[u8]) -> Result<(), MergeRefusal> {
        let mut next = Some(first);
        while let Some(header) = next {
            next = match header {
                NextHeader::Ethernet => Some(self.ethernet()?),
                NextHeader::Pppoe => Some(self.pppoe()?),
                NextHeader::Gre => Some(self.gre()?),
                NextHeader::Vxlan => Some(self.vxlan()?),
                NextHeader::VxlanGpe => Some(self.vxlan_gpe()?),
                NextHeader::Geneve => Some(self.geneve()?),
                NextHeader::Ip(network) => self.ip(network)?,
            };
        }
        if !self.layers.is_empty() && !is_plain(link_header) {
            return Err(MergeRefusal::Protocol);
        }
        Ok(())
    }

    /// Parses the headers at the current offset: the inner ones.
    fn innermost(&self, link: Link) -> Result<Headers, MergeRefusal> {
        let bytes = self.bytes.get(self.at..).ok_or(MergeRefusal::Snapped)?;
        let len = u32::try_from(self.end.saturating_sub(self.at)).unwrap_or(u32::MAX);
        let mut inner = parse(bytes, len, Link::Ip, Verify::Nothing);
        let shift = |offset: u16| match offset {
            0 => 0,
            offset => offset.saturating_add(u16::try_from(self.at).unwrap_or(u16::MAX)),
        };
        inner.link = link;
        inner.network_offset = u8::try_from(self.at).map_err(|_| MergeRefusal::Extension)?;
        inner.transport_offset = shift(inner.transport_offset);
        inner.payload_offset = shift(inner.payload_offset);
        Ok(inner)
    }

    fn header<const N: usize>(&self) -> Result<&[u8; N], MergeRefusal> {
        match self.bytes.get(self.at..).and_then(<[u8]>::first_chunk) {
            Some(header) => Ok(header),
            None if self.at + N <= self.end => Err(MergeRefusal::Snapped),
            None => Err(MergeRefusal::Flaw),
        }
    }

    fn push(&mut self, kind: LayerKind) -> Result<(), MergeRefusal> {
        let offset = u8::try_from(self.at).map_err(|_| MergeRefusal::Extension)?;
        self.layers.push(kind, offset).ok_or(MergeRefusal::TunnelDepth)
    }

    /// Verifies that a layer extends exactly to the end of the frame.
    fn ends(&self, end: usize) -> Result<(), MergeRefusal> {
        match end {
            end if end == self.end => Ok(()),
            // Bytes after the end of the outermost layer are padding of the link.
            end if end < self.end && self.layers.is_empty() => Err(MergeRefusal::Padded),
            _ => Err(MergeRefusal::TunnelLength),
        }
    }

    /// Steps over an IP header that carries a tunnel; `None` at the innermost one.
    fn ip(&mut self, network: Network) -> Result<Option<NextHeader>, MergeRefusal> {
        let told = if network == Network::Ipv4 { self.ipv4() } else { self.ipv6() };
        let (protocol, len, end) = match told {
            Err(_) if self.layers.is_empty() => return Ok(None), // not a tunnel; flaw is recorded
            told => told?,
        };
        let next = match protocol {
            IPIP => Some(NextHeader::Ip(Network::Ipv4)),
            IPV6 => Some(NextHeader::Ip(Network::Ipv6)),
            GRE => Some(NextHeader::Gre),
            UDP => self
                .port_behind(len)
                .and_then(|port| self.behind_udp.or_else(|| NextHeader::of_port(port))),
            _ => None,
        };
        let is_outer = next.is_some();
        if is_outer && self.is_inside {
            return Err(MergeRefusal::TunnelDepth);
        }
        if is_outer {
            self.judge_ip(network, len)?;
        }
        if is_outer || !self.layers.is_empty() {
            self.ends(end)?;
        }
        if !is_outer {
            return Ok(None);
        }
        self.push(if network == Network::Ipv4 { LayerKind::Ipv4 } else { LayerKind::Ipv6 })?;
        self.is_inside = true;
        self.at += len;
        if protocol == UDP {
            self.udp()?;
        }
        Ok(next)
    }

    /// Protocol, header length and end of an IPv4 packet.
    fn ipv4(&self) -> Result<(u8, usize, usize), MergeRefusal> {
        let header = self.header::<IPV4_BYTES>()?;
        if header[0] >> 4 != 4 {
            return Err(MergeRefusal::Flaw);
        }
        let len = usize::from(header[0] & 0x0f) * 4;
        let end = self.at + usize::from(u16::from_be_bytes([header[2], header[3]]));
        if u16::from_be_bytes([header[6], header[7]]) & FRAGMENT_BITS != 0 {
            return Err(MergeRefusal::Fragment);
        }
        Ok((header[9], len, end))
    }

    fn ipv6(&self) -> Result<(u8, usize, usize), MergeRefusal> {
        let header = self.header::<IPV6_BYTES>()?;
        if header[0] >> 4 != 6 {
            return Err(MergeRefusal::Flaw);
        }
        let end = self.at + IPV6_BYTES + usize::from(u16::from_be_bytes([header[4], header[5]]));
        let bytes = self.bytes.get(self.at..).unwrap_or_default();
        let mut walk = ExtensionWalk { kind: header[6], at: IPV6_BYTES };
        for _ in 0..MAX_EXTENSION_HEADERS {
            if !take_shared(&mut walk, bytes).ok_or(MergeRefusal::Snapped)? {
                break;
            }
        }
        Ok((walk.kind, walk.at, end))
    }

    /// Verifies that an outer IP header can be restored exactly when the packet is split.
    fn judge_ip(&self, network: Network, len: usize) -> Result<(), MergeRefusal> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match network {
            Network::Ipv4 => ipv4(rest, len, Checksum::Unknown).map(drop),
            _ => ipv6(rest, len).map(drop),
        }
    }

    /// Destination port of the UDP header that follows an IP header of `len` bytes.
    fn port_behind(&self, len: usize) -> Option<u16> {
        if self.headers_end == Some(self.at + len + UDP_BYTES) {
            return None; // the innermost: its payload is the segments'
        }
        let &[_, _, high, low] = self.bytes.get(self.at + len..)?.first_chunk()?;
        Some(u16::from_be_bytes([high, low]))
    }

    fn udp(&mut self) -> Result<(), MergeRefusal> {
        let &[_, _, _, _, high, low, checksum @ ..] = self.header::<UDP_BYTES>()?;
        self.ends(self.at + usize::from(u16::from_be_bytes([high, low])))?;
        self.push(if checksum == [0; 2] { LayerKind::Udp } else { LayerKind::UdpSummed })?;
        self.at += UDP_BYTES;
        Ok(())
    }

    fn gre(&mut self) -> Result<NextHeader, MergeRefusal> {
        const CHECKSUM: u8 = 0x80;
        const KEY: u8 = 0x20;
        let &[flags, version, high, low] = self.header()?;
        if flags & !(CHECKSUM | KEY) != 0 || version != 0 {
            return Err(MergeRefusal::TunnelKind);
        }
        let next = NextHeader::of_tunnelled(u16::from_be_bytes([high, low]))?;
        let mut len = 4;
        if flags & CHECKSUM != 0 {
            let &[.., high, low] = self.header::<6>()?;
            if [high, low] == ODD_CHECKSUM {
                return Err(MergeRefusal::OddChecksum);
            }
            self.push(LayerKind::GreSummed)?;
            len += 4;
        }
        self.at += if flags & KEY != 0 { len + 4 } else { len };
        Ok(next)
    }

    fn vxlan(&mut self) -> Result<NextHeader, MergeRefusal> {
        const HAS_VNI: u8 = 0x08;
        let &[flags, ..] = self.header::<8>()?;
        self.at += 8;
        if flags & HAS_VNI == 0 { Err(MergeRefusal::TunnelKind) } else { Ok(NextHeader::Ethernet) }
    }

    fn vxlan_gpe(&mut self) -> Result<NextHeader, MergeRefusal> {
        const HAS_PROTOCOL: u8 = 0x04;
        const IS_OAM: u8 = 0x01;
        let &[flags, _, _, protocol, ..] = self.header::<8>()?;
        self.at += 8;
        match (flags & (HAS_PROTOCOL | IS_OAM), protocol) {
            (0, _) | (HAS_PROTOCOL, 3) => Ok(NextHeader::Ethernet),
            (HAS_PROTOCOL, 1) => Ok(NextHeader::Ip(Network::Ipv4)),
            (HAS_PROTOCOL, 2) => Ok(NextHeader::Ip(Network::Ipv6)),
            (HAS_PROTOCOL, _) => Err(MergeRefusal::Protocol),
            _ => Err(MergeRefusal::TunnelKind),
        }
    }

    fn geneve(&mut self) -> Result<NextHeader, MergeRefusal> {
        const BASE_BYTES: usize = 8;
        const IS_CONTROL: u8 = 0x80;
        let &[words, flags, high, low, ..] = self.header::<BASE_BYTES>()?;
        if words >> 6 != 0 || flags & IS_CONTROL != 0 {
            return Err(MergeRefusal::TunnelKind);
        }
        self.at += BASE_BYTES + usize::from(words & 0x3f) * 4;
        NextHeader::of_tunnelled(u16::from_be_bytes([high, low]))
    }

    fn ethernet(&mut self) -> Result<NextHeader, MergeRefusal> {
        let bytes = self.bytes.get(self.at..).ok_or(MergeRefusal::Snapped)?;
        let link = link_layer(bytes, Link::Ethernet);
        let len = usize::from(link.network_offset);
        let header = bytes.get(..len).unwrap_or_default();
        let is_snapped = bytes.len() < LINK_BYTES_MAX && self.bytes.len() < self.end;
        let Some(next) = link.ethertype.and_then(NextHeader::of_ethertype) else {
            return Err(if is_snapped { MergeRefusal::Snapped } else { MergeRefusal::Protocol });
        };
        if !is_plain(header) {
            return Err(MergeRefusal::Protocol);
        }
        self.at += len;
        Ok(next)
    }

    fn pppoe(&mut self) -> Result<NextHeader, MergeRefusal> {
        let &[version, code, _, _, high, low, protocol @ ..] = self.header::<8>()?;
        if [version, code] != PPPOE_SESSION {
            return Err(MergeRefusal::TunnelKind);
        }
        let next = match u16::from_be_bytes(protocol) {
            PPP_IPV4 => NextHeader::Ip(Network::Ipv4),
            PPP_IPV6 => NextHeader::Ip(Network::Ipv6),
            _ => return Err(MergeRefusal::Protocol),
        };
        self.ends(
            self.at + usize::from(PPPOE_BEFORE_LEN) + usize::from(u16::from_be_bytes([high, low])),
        )?;
        self.push(LayerKind::Pppoe)?;
        self.at += PPPOE_BYTES;
        Ok(next)
    }
}
