//! The transmit side: prepends headers to a payload.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use forebay_buf::Frame;
use forebay_rx::packet::Packet;
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{Checksum, Headers, Link, Network, Transport};

pub(super) const ETHERNET_BYTES: u32 = 14;
pub(super) const IPV4_BYTES: u32 = 20;
pub(super) const IPV6_BYTES: u32 = 40;
pub(super) const UDP_BYTES: u32 = 8;
pub(super) const UDP: u8 = 17;
const TCP: u8 = 6;
const UDP_HEADER_LEN: u16 = 8;

/// Upper bound on the header bytes before a payload: Ethernet, IPv6, UDP.
pub const HEADERS_BYTES_MAX: u32 = ETHERNET_BYTES + IPV6_BYTES + UDP_BYTES;

/// Initial TTL and hop limit: `ip_default_ttl`.
pub const DEFAULT_TTL: u8 = 64;

/// The MAC addresses of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkAddresses {
    /// Destination MAC address.
    pub to: [u8; 6],
    /// Source MAC address.
    pub from: [u8; 6],
}

/// A datagram's headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdpHeaders {
    /// MAC addresses; `None` on a device without link header.
    pub link_addresses: Option<LinkAddresses>,
    /// Source address and port.
    pub source: SocketAddr,
    /// Destination address and port, of the same family.
    pub destination: SocketAddr,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// DSCP and ECN bits.
    pub tos: u8,
    /// Payload bytes of each datagram but the last, if the payload contains several
    /// (`UDP_SEGMENT`); else 0. The device, or the code that sends to it, segments the packet.
    pub gso_size: u16,
    /// Identification of an IPv4 datagram that routers may fragment: of several, that of the first. `None`: none may (DF).
    pub identification: Option<u16>,
}

/// Addresses of a segment whose TCP header and payload are in a frame already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpHeaders {
    /// Source address and port.
    pub source: SocketAddr,
    /// Destination address and port, of the same family.
    pub destination: SocketAddr,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// DSCP and ECN bits.
    pub tos: u8,
    /// Bytes of the TCP header.
    pub header_len: u8,
    /// True if the payload is of several segments, to be cut later: the checksum field then holds
    /// the pseudo-header's sum.
    pub is_gso: bool,
}

/// Fields of an IP header beside its addresses.
#[derive(Clone, Copy)]
pub(super) struct IpFields {
    pub(super) protocol: u8,
    pub(super) ttl: u8,
    pub(super) tos: u8,
}

/// Reason why headers cannot be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeaderError {
    /// The payload is too long for a length field.
    TooLong,
    /// Source and destination are of different families.
    Families,
}

/// Prepends the headers to the payload, which is all that `frame` contains, and returns their
/// description. All checksums are complete, except that with `gso_size` set the UDP checksum field
/// holds the pseudo-header's sum (see [`Packet::is_gso`](forebay_rx::Packet::is_gso)).
///
/// # Errors
/// If the headers cannot be written; `frame` is then unchanged.
///
/// # Panics
/// If the headroom is less than [`HEADERS_BYTES_MAX`]: frames from a pool have more.
pub fn emit_udp(frame: &mut Frame, headers: &UdpHeaders) -> Result<Headers, HeaderError> {
    let udp_len = frame.len_bytes().saturating_add(UDP_BYTES);
    let udp_len = u16::try_from(udp_len).map_err(|_| HeaderError::TooLong)?;
    let network = match (headers.source, headers.destination) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            if u32::from(udp_len) + IPV4_BYTES > u16::MAX.into() {
                // The IPv4 length field counts the header too.
                return Err(HeaderError::TooLong);
            }
            push_udp(frame, udp_len, headers, pseudo_v4(*source.ip(), *destination.ip()));
            let piece = headers
                .identification
                .map_or(Ipv4Piece::WHOLE, |id| Ipv4Piece { id, flags_and_offset: 0 });
            push_ipv4(frame, *source.ip(), *destination.ip(), headers.ip(UDP), piece);
            Network::Ipv4
        }
        (SocketAddr::V6(source), SocketAddr::V6(destination)) => {
            push_udp(frame, udp_len, headers, pseudo_v6(*source.ip(), *destination.ip()));
            push_ipv6(frame, *source.ip(), *destination.ip(), headers.ip(UDP));
            Network::Ipv6
        }
        _ => return Err(HeaderError::Families),
    };
    let link = push_link(frame, network, headers.link_addresses);
    Ok(noted(link, network, udp_len))
}

/// The description that parsing the frame would give.
fn noted(link: Link, network: Network, udp_len: u16) -> Headers {
    let network_offset = match link {
        Link::Ethernet => 14,
        Link::Ip => 0,
    };
    let (transport_offset, ip_checksum) = match network {
        Network::Ipv4 => (u16::from(network_offset) + 20, Checksum::Good),
        Network::Ipv6 | Network::Other => (u16::from(network_offset) + 40, Checksum::Unknown),
    };
    Headers {
        link,
        network,
        transport: Transport::Udp,
        protocol: UDP,
        ip_checksum,
        l4_checksum: Checksum::Good,
        network_offset,
        transport_offset,
        payload_offset: transport_offset + 8,
        payload_len: udp_len - 8,
        ..Headers::default()
    }
}

impl UdpHeaders {
    pub(super) fn ip(&self, protocol: u8) -> IpFields {
        IpFields { protocol, ttl: self.ttl, tos: self.tos }
    }
}

/// Completes the checksum of the TCP header that `frame` begins with, prepends the IP header, and
/// returns their description.
///
/// # Errors
/// If the headers cannot be written; `frame` is then unchanged.
///
/// # Panics
/// If the headroom is less than [`HEADERS_BYTES_MAX`], or if `frame` is shorter than a TCP header.
pub fn emit_tcp(frame: &mut Frame, headers: &TcpHeaders) -> Result<Headers, HeaderError> {
    let tcp_len = u16::try_from(frame.len_bytes()).map_err(|_| HeaderError::TooLong)?;
    let fields = IpFields { protocol: TCP, ttl: headers.ttl, tos: headers.tos };
    let network = match (headers.source, headers.destination) {
        (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
            let (source, destination) = (*source.ip(), *destination.ip());
            if u32::from(tcp_len) + IPV4_BYTES > u16::MAX.into() {
                // The IPv4 length field counts the header too.
                return Err(HeaderError::TooLong);
            }
            sum_tcp(frame, tcp_len, pseudo_v4(source, destination), headers.is_gso);
            push_ipv4(frame, source, destination, fields, Ipv4Piece::WHOLE);
            Network::Ipv4
        }
        (SocketAddr::V6(source), SocketAddr::V6(destination)) => {
            let (source, destination) = (*source.ip(), *destination.ip());
            sum_tcp(frame, tcp_len, pseudo_v6(source, destination), headers.is_gso);
            push_ipv6(frame, source, destination, fields);
            Network::Ipv6
        }
        _ => return Err(HeaderError::Families),
    };
    let udp = noted(Link::Ip, network, UDP_HEADER_LEN);
    Ok(Headers {
        transport: Transport::Tcp,
        protocol: TCP,
        payload_offset: udp.transport_offset + u16::from(headers.header_len),
        payload_len: tcp_len - u16::from(headers.header_len),
        ..udp
    })
}

/// Prepends the link header to a packet that begins with its IP header, on a device that has one.
///
/// # Panics
/// If the headroom is less than a link header: packets from [`emit_tcp`] have more.
pub fn emit_link(packet: &mut Packet, link_addresses: Option<LinkAddresses>) {
    let Packet { frame, headers, .. } = packet;
    headers.link = push_link(frame, headers.network, link_addresses);
    if headers.link == Link::Ethernet {
        headers.network_offset += 14;
        headers.transport_offset += 14;
        headers.payload_offset += 14;
    }
    packet.wire_len = packet.frame.len_bytes();
}

fn sum_tcp(frame: &mut Frame, tcp_len: u16, addresses: Sum, is_gso: bool) {
    let bytes = frame.data_mut();
    bytes[16..18].fill(0);
    let pseudo = addresses.plus_word(TCP.into()).plus_word(tcp_len);
    let field = if is_gso { pseudo.fold() } else { !pseudo.plus(Sum::of(bytes)).fold() };
    bytes[16..18].copy_from_slice(&field.to_be_bytes());
}

pub(super) fn pseudo_v4(source: Ipv4Addr, destination: Ipv4Addr) -> Sum {
    Sum::of_words(&[source.octets(), destination.octets()])
}

pub(super) fn pseudo_v6(source: Ipv6Addr, destination: Ipv6Addr) -> Sum {
    Sum::of(&source.octets()).plus(Sum::of(&destination.octets()))
}

fn push_udp(frame: &mut Frame, udp_len: u16, headers: &UdpHeaders, addresses: Sum) {
    let pseudo = addresses.plus_word(UDP.into()).plus_word(udp_len);
    frame.push(UDP_BYTES);
    let bytes = frame.data_mut();
    bytes[0..2].copy_from_slice(&headers.source.port().to_be_bytes());
    bytes[2..4].copy_from_slice(&headers.destination.port().to_be_bytes());
    bytes[4..6].copy_from_slice(&udp_len.to_be_bytes());
    bytes[6..8].fill(0);
    let checksum =
        if headers.gso_size > 0 { pseudo.fold() } else { checksum_of(pseudo.plus(Sum::of(bytes))) };
    bytes[6..8].copy_from_slice(&checksum.to_be_bytes());
}

/// Checksum field of a datagram with this sum; never 0, which means no checksum (RFC 768).
pub(super) fn checksum_of(sum: Sum) -> u16 {
    match !sum.fold() {
        0 => u16::MAX,
        sum => sum,
    }
}

/// Identification, flags and offset of an IPv4 packet.
#[derive(Clone, Copy)]
pub(super) struct Ipv4Piece {
    pub(super) id: u16,
    pub(super) flags_and_offset: u16,
}

impl Ipv4Piece {
    /// DF set, and therefore without an identification (RFC 6864).
    const WHOLE: Self = Self { id: 0, flags_and_offset: 0x4000 };
}

/// Prepends a header without options.
pub(super) fn push_ipv4(
    frame: &mut Frame,
    source: Ipv4Addr,
    destination: Ipv4Addr,
    fields: IpFields,
    piece: Ipv4Piece,
) {
    frame.push(IPV4_BYTES);
    // Lossless: the packet's length was checked by `emit_udp` or `emit_tcp`.
    let total_len = u16::try_from(frame.len_bytes()).unwrap_or(u16::MAX);
    let bytes = frame.data_mut();
    bytes[0..2].copy_from_slice(&[0x45, fields.tos]);
    bytes[2..4].copy_from_slice(&total_len.to_be_bytes());
    bytes[4..6].copy_from_slice(&piece.id.to_be_bytes());
    bytes[6..8].copy_from_slice(&piece.flags_and_offset.to_be_bytes());
    bytes[8..12].copy_from_slice(&[fields.ttl, fields.protocol, 0, 0]);
    bytes[12..16].copy_from_slice(&source.octets());
    bytes[16..20].copy_from_slice(&destination.octets());
    let checksum = !Sum::of(&bytes[..20]).fold();
    bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
}

pub(super) fn push_ipv6(
    frame: &mut Frame,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    fields: IpFields,
) {
    // Lossless, as above.
    let payload_len = u16::try_from(frame.len_bytes()).unwrap_or(u16::MAX);
    frame.push(IPV6_BYTES);
    let bytes = frame.data_mut();
    bytes[0..4].copy_from_slice(&[0x60 | fields.tos >> 4, fields.tos << 4, 0, 0]);
    bytes[4..6].copy_from_slice(&payload_len.to_be_bytes());
    bytes[6..8].copy_from_slice(&[fields.protocol, fields.ttl]);
    bytes[8..24].copy_from_slice(&source.octets());
    bytes[24..40].copy_from_slice(&destination.octets());
}

pub(super) fn push_link(
    frame: &mut Frame,
    network: Network,
    link_addresses: Option<LinkAddresses>,
) -> Link {
    let Some(LinkAddresses { to, from }) = link_addresses else { return Link::Ip };
    frame.push(ETHERNET_BYTES);
    let bytes = frame.data_mut();
    bytes[0..6].copy_from_slice(&to);
    bytes[6..12].copy_from_slice(&from);
    let ethertype: u16 = if network == Network::Ipv4 { 0x0800 } else { 0x86dd };
    bytes[12..14].copy_from_slice(&ethertype.to_be_bytes());
    Link::Ethernet
}

#[cfg(test)]
pub(super) mod tests {
    use etherparse::{NetHeaders, PacketHeaders, TransportHeader};
    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
    use forebay_rx::parse::{Verify, parse};
    use proptest::prelude::*;

    use super::*;

    /// A pool of one frame for a packet of any length.
    pub(in crate::network) fn pool() -> Pool {
        let share = vec![ChunkClass { chunk_bytes: 68 << 10, chunks: 1 }];
        let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
        carve(region, &[share]).unwrap().remove(0)
    }

    fn headers(source: &str, destination: &str) -> UdpHeaders {
        let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
        let link_addresses =
            Some(LinkAddresses { to: [2, 0, 0, 0, 0, 2], from: [2, 0, 0, 0, 0, 1] });
        UdpHeaders {
            link_addresses,
            source,
            destination,
            ttl: DEFAULT_TTL,
            tos: 0,
            gso_size: 0,
            identification: None,
        }
    }

    proptest! {
        #[test]
        fn emitted_headers_parse_everywhere(
            payload in prop::collection::vec(any::<u8>(), 0..1500),
            is_v6: bool, has_link: bool, ttl: u8, tos: u8, ports: (u16, u16), identification: Option<u16>,
        ) {
            let of = |v4: &str, v6: &str, port| {
                let ip = if is_v6 { v6 } else { v4 };
                SocketAddr::new(ip.parse().unwrap(), port)
            };
            let to = UdpHeaders {
                source: of("192.0.2.1", "2001:db8::1", ports.0),
                destination: of("198.51.100.7", "2001:db8:ffff::7", ports.1),
                link_addresses: headers("0.0.0.0:1", "0.0.0.0:1").link_addresses.filter(|_| has_link),
                ttl, tos, gso_size: 0, identification,
            };
            let mut frame = pool().allocate(2000).unwrap();
            frame.copy_from(&payload);
            let noted = emit_udp(&mut frame, &to).unwrap();
            let bytes = frame.data();
            let read = if has_link {
                PacketHeaders::from_ethernet_slice(bytes)
            } else {
                PacketHeaders::from_ip_slice(bytes)
            };
            let read = read.unwrap();
            let Some(TransportHeader::Udp(udp)) = read.transport else { panic!("{read:?}") };
            prop_assert_eq!((udp.source_port, udp.destination_port), ports);
            prop_assert_eq!(read.payload.slice(), &payload[..]);
            let checksum = match &read.net {
                Some(NetHeaders::Ipv4(ip, _)) => {
                    let is_whole = identification.is_none();
                    prop_assert_eq!((ip.time_to_live, ip.dont_fragment), (ttl, is_whole));
                    prop_assert_eq!(ip.identification, identification.unwrap_or(0));
                    prop_assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                    prop_assert_eq!(ip.dscp.value() << 2 | ip.ecn.value(), tos);
                    udp.calc_checksum_ipv4(ip, &payload).unwrap()
                }
                Some(NetHeaders::Ipv6(ip, _)) => {
                    prop_assert_eq!((ip.hop_limit, ip.traffic_class), (ttl, tos));
                    udp.calc_checksum_ipv6(ip, &payload).unwrap()
                }
                other => panic!("{other:?}"),
            };
            prop_assert_eq!(udp.checksum, checksum);
            let link = if has_link { Link::Ethernet } else { Link::Ip };
            let parsed = parse(bytes, frame.len_bytes(), link, Verify::Checksums);
            prop_assert_eq!(noted, parsed);
        }
    }

    #[test]
    fn oversized_payload_is_refused() {
        let mut pool = pool();
        let to = headers("192.0.2.1:1", "192.0.2.2:2");
        let mut frame = pool.allocate(66_000).unwrap();
        frame.set_len(65_508);
        assert_eq!(emit_udp(&mut frame, &to), Err(HeaderError::TooLong));
        frame.set_len(65_507);
        assert!(emit_udp(&mut frame, &to).is_ok());
        let both = headers("192.0.2.1:1", "[2001:db8::1]:2");
        pool.put(frame);
        let mut frame = pool.allocate(0).unwrap();
        assert_eq!(emit_udp(&mut frame, &both), Err(HeaderError::Families));
        assert_eq!(frame.len_bytes(), 0);
    }
}
