//! Transmit-side IP fragmentation of datagrams larger than the MTU (RFC 791, section 3.2; RFC 8200,
//! section 4.5).

use std::net::{IpAddr, SocketAddr};

use forebay_buf::Frame;
use forebay_rx::Packet;
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{Headers, Link, Network, Verify, parse};

use super::compose::{
    ETHERNET_BYTES, HeaderError, IPV4_BYTES, IPV6_BYTES, Ipv4Piece, UDP, UDP_BYTES, UdpHeaders,
    checksum_of, pseudo_v4, pseudo_v6, push_ipv4, push_ipv6, push_link,
};
use super::icmp::{ICMP, ICMPV6};

const FRAGMENT_HEADER_BYTES: u32 = 8;
const FRAGMENT_HEADER: u8 = 44;
const MORE_FRAGMENTS: u16 = 0x2000;
/// Unit of the fragment offset field, in bytes.
const OFFSET_UNIT: usize = 8;

/// Datagram being sent as fragments, in order from the first.
#[derive(Clone, Debug)]
pub struct FragmentedDatagram<'a> {
    headers: UdpHeaders,
    udp: [u8; 8],
    payload: &'a [u8],
    id: u32,
    /// Bytes of UDP header and payload in each fragment except the last.
    step: usize,
    /// Bytes of UDP header and payload already emitted.
    at: usize,
}

impl<'a> FragmentedDatagram<'a> {
    /// Divides a datagram into fragments that fit in `mtu`. `id` is the identification, not
    /// recently used between these addresses; IPv4 uses its lower 16 bits.
    ///
    /// # Errors
    /// If the headers cannot be written, or with [`TooLong`](HeaderError::TooLong) if the MTU has
    /// no room for the first fragment.
    pub fn new(
        payload: &'a [u8],
        headers: UdpHeaders,
        mtu: u32,
        id: u32,
    ) -> Result<Self, HeaderError> {
        let udp_len = payload.len() + UDP_BYTES as usize;
        let udp_len = u16::try_from(udp_len).map_err(|_| HeaderError::TooLong)?;
        let (ip_bytes, addresses) = match (headers.source, headers.destination) {
            (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
                if u32::from(udp_len) + IPV4_BYTES > u16::MAX.into() {
                    return Err(HeaderError::TooLong);
                }
                (IPV4_BYTES, pseudo_v4(*source.ip(), *destination.ip()))
            }
            (SocketAddr::V6(source), SocketAddr::V6(destination)) => {
                let ip_bytes = IPV6_BYTES + FRAGMENT_HEADER_BYTES;
                (ip_bytes, pseudo_v6(*source.ip(), *destination.ip()))
            }
            _ => return Err(HeaderError::Families),
        };
        let step = mtu.saturating_sub(ip_bytes) as usize / OFFSET_UNIT * OFFSET_UNIT;
        // The first fragment must hold the whole UDP header.
        if step <= UDP_BYTES as usize {
            return Err(HeaderError::TooLong);
        }
        let (from, to) = (headers.source.port(), headers.destination.port());
        let mut udp = [0; 8];
        for (at, field) in [from, to, udp_len].into_iter().enumerate() {
            udp[2 * at..2 * at + 2].copy_from_slice(&field.to_be_bytes());
        }
        let pseudo = addresses.plus_word(UDP.into()).plus_word(udp_len);
        let sum = checksum_of(pseudo.plus(Sum::of(&udp)).plus(Sum::of(payload)));
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
        Ok(Self { headers, udp, payload, id, step, at: 0 })
    }

    /// Number of fragments still to be emitted.
    #[must_use]
    pub fn count(&self) -> usize {
        (self.len() - self.at).div_ceil(self.step)
    }

    /// Maximum number of bytes of a fragment, including its link header.
    #[must_use]
    pub fn fragment_bytes_max(&self) -> u32 {
        let step = u32::try_from(self.step).unwrap_or(u32::MAX);
        step.saturating_add(ETHERNET_BYTES + IPV6_BYTES + FRAGMENT_HEADER_BYTES)
    }

    /// Writes the next fragment into an empty frame, and returns its headers.
    ///
    /// # Panics
    /// If the frame has less room than [`fragment_bytes_max`](Self::fragment_bytes_max), or no
    /// fragment is left.
    pub fn emit_next(&mut self, frame: &mut Frame) -> Headers {
        let (at, end) = (self.at, (self.at + self.step).min(self.len()));
        assert!(at < end, "as many fragments as were counted");
        let udp_len = self.udp.len();
        frame.copy_from(&self.payload[at.saturating_sub(udp_len)..end - udp_len]);
        if at == 0 {
            frame.push(UDP_BYTES);
            frame.data_mut()[..udp_len].copy_from_slice(&self.udp);
        }
        self.at = end;
        // Lossless: the constructor limited the datagram to 64 KiB.
        let offset = u16::try_from(at).unwrap_or(u16::MAX);
        let has_more = end < self.len();
        let network = match (self.headers.source, self.headers.destination) {
            (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
                let more = if has_more { MORE_FRAGMENTS } else { 0 };
                let [.., high, low] = self.id.to_be_bytes();
                let piece = Ipv4Piece {
                    id: u16::from_be_bytes([high, low]),
                    flags_and_offset: more | (offset / 8),
                };
                push_ipv4(frame, *source.ip(), *destination.ip(), self.headers.ip(UDP), piece);
                Network::Ipv4
            }
            (source, destination) => {
                let (IpAddr::V6(source), IpAddr::V6(destination)) = (source.ip(), destination.ip())
                else {
                    unreachable!("the families were compared")
                };
                frame.push(FRAGMENT_HEADER_BYTES);
                let bytes = frame.data_mut();
                bytes[0..2].copy_from_slice(&[UDP, 0]);
                bytes[2..4].copy_from_slice(&(offset | u16::from(has_more)).to_be_bytes());
                bytes[4..8].copy_from_slice(&self.id.to_be_bytes());
                push_ipv6(frame, source, destination, self.headers.ip(FRAGMENT_HEADER));
                Network::Ipv6
            }
        };
        let link = push_link(frame, network, self.headers.link_addresses);
        parse(frame.data(), frame.len_bytes(), link, Verify::Nothing)
    }

    fn len(&self) -> usize {
        self.udp.len() + self.payload.len()
    }
}

/// Answer to an echo request, being sent as fragments because the request came in fragments, too.
#[derive(Clone, Debug)]
pub struct FragmentedAnswer<'a> {
    /// Link header and IP header.
    header: &'a [u8],
    link: Link,
    network: Network,
    message: &'a [u8],
    id: u32,
    /// Bytes of the message in each fragment except the last.
    step: usize,
    /// Bytes of the message already written.
    at: usize,
}

impl<'a> FragmentedAnswer<'a> {
    /// Divides an ICMP message, whose IP header has neither options nor extension headers, into fragments. `None` for
    /// another packet, if it fits in `mtu`, and if it must not be fragmented.
    #[must_use]
    pub fn of(packet: &'a Packet, mtu: u32) -> Option<Self> {
        const DO_NOT_FRAGMENT: u8 = 0x40;
        let Headers { link, network, network_offset, .. } = packet.headers;
        let bytes = packet.frame.data();
        let ip = bytes.get(network_offset.into()..)?;
        let (is_message, ip_bytes, added_bytes) = match (network, ip.first_chunk::<10>()?) {
            (Network::Ipv4, &[0x45, _, _, _, _, _, flags, _, _, ICMP]) => {
                (flags & DO_NOT_FRAGMENT == 0, IPV4_BYTES, IPV4_BYTES)
            }
            (Network::Ipv6, &[_, _, _, _, _, _, ICMPV6, _, _, _]) => {
                (true, IPV6_BYTES, IPV6_BYTES + FRAGMENT_HEADER_BYTES)
            }
            _ => return None,
        };
        let header_len = usize::from(network_offset) + ip_bytes as usize;
        let (header, message) = bytes.split_at_checked(header_len)?;
        let step = mtu.saturating_sub(added_bytes) as usize / OFFSET_UNIT * OFFSET_UNIT;
        let is_too_long = ip.len() > mtu as usize && step > 0 && !packet.is_chain();
        (is_message && is_too_long).then_some(Self {
            header,
            link,
            network,
            message,
            id: 0,
            step,
            at: 0,
        })
    }

    /// Sets the identification, not recently used between these addresses; IPv4 uses its lower 16 bits.
    pub fn set_id(&mut self, id: u32) {
        self.id = id;
    }

    /// Number of fragments still to be written.
    #[must_use]
    pub fn count(&self) -> usize {
        (self.message.len() - self.at).div_ceil(self.step)
    }

    /// Maximum number of bytes of a fragment, including its link header.
    #[must_use]
    pub fn fragment_bytes_max(&self) -> usize {
        self.header.len() + FRAGMENT_HEADER_BYTES as usize + self.step
    }

    /// Writes the next fragment into a frame, and returns its headers.
    ///
    /// # Panics
    /// If the frame has less room than [`fragment_bytes_max`](Self::fragment_bytes_max), or no
    /// fragment is left.
    pub fn write_next(&mut self, frame: &mut Frame) -> Headers {
        let (at, end) = (self.at, (self.at + self.step).min(self.message.len()));
        assert!(at < end, "as many fragments as were counted");
        self.at = end;
        // Lossless: no message is longer than 64 KiB.
        let offset = u16::try_from(at).unwrap_or(u16::MAX);
        let (has_more, data) = (end < self.message.len(), &self.message[at..end]);
        let ip_at = self.header.len()
            - match self.network {
                Network::Ipv4 => IPV4_BYTES as usize,
                Network::Ipv6 | Network::Other => IPV6_BYTES as usize,
            };
        let mut fragment_header = [0; FRAGMENT_HEADER_BYTES as usize];
        let added: &[u8] = match self.network {
            Network::Ipv4 => &[],
            Network::Ipv6 | Network::Other => {
                fragment_header[0] = ICMPV6;
                let field = offset | u16::from(has_more);
                fragment_header[2..4].copy_from_slice(&field.to_be_bytes());
                fragment_header[4..8].copy_from_slice(&self.id.to_be_bytes());
                &fragment_header
            }
        };
        let behind = self.header.len() + added.len();
        frame.set_len(u32::try_from(behind + data.len()).unwrap_or(u32::MAX));
        let bytes = frame.data_mut();
        bytes[..self.header.len()].copy_from_slice(self.header);
        bytes[self.header.len()..behind].copy_from_slice(added);
        bytes[behind..].copy_from_slice(data);
        let len = u16::try_from(added.len() + data.len()).unwrap_or(u16::MAX);
        let header = &mut bytes[ip_at..];
        match self.network {
            Network::Ipv4 => {
                let more = if has_more { MORE_FRAGMENTS } else { 0 };
                let total_len = len.saturating_add(20);
                header[2..4].copy_from_slice(&total_len.to_be_bytes());
                header[4..6].copy_from_slice(&self.id.to_be_bytes()[2..]);
                header[6..8].copy_from_slice(&(more | (offset / 8)).to_be_bytes());
                header[10..12].fill(0);
                let sum = !Sum::of(&header[..20]).fold();
                header[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            Network::Ipv6 | Network::Other => {
                header[4..6].copy_from_slice(&len.to_be_bytes());
                header[6] = FRAGMENT_HEADER;
            }
        }
        parse(frame.data(), frame.len_bytes(), self.link, Verify::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{IpSlice, Ipv6ExtensionsSlice, UdpHeader};
    use proptest::prelude::*;

    use super::*;
    use crate::network::compose::tests::pool;

    fn headers(is_v6: bool, (tos, ttl): (u8, u8)) -> UdpHeaders {
        let of = |v4: &str, v6: &str| if is_v6 { v6 } else { v4 }.parse().unwrap();
        let source = of("192.0.2.1:53", "[2001:db8::1]:53");
        let destination = of("198.51.100.7:4000", "[2001:db8:ffff::7]:4000");
        UdpHeaders {
            link_addresses: None,
            source,
            destination,
            ttl,
            tos,
            gso_size: 0,
            identification: None,
        }
    }

    /// Fragment offset, more-fragments flag and identification of an IP packet.
    fn piece(ip: &IpSlice<'_>) -> (usize, bool, u32) {
        match ip {
            IpSlice::Ipv4(ip) => {
                let header = ip.header();
                assert_eq!(header.header_checksum(), header.to_header().calc_header_checksum());
                let offset = header.fragments_offset().byte_offset().into();
                (offset, header.more_fragments(), header.identification().into())
            }
            IpSlice::Ipv6(ip) => {
                let extensions: &Ipv6ExtensionsSlice<'_> = ip.extensions();
                let Some(etherparse::Ipv6ExtensionSlice::Fragment(fragment)) =
                    extensions.clone().into_iter().next()
                else {
                    panic!("no fragment header")
                };
                let offset = fragment.fragment_offset().byte_offset().into();
                (offset, fragment.more_fragments(), fragment.identification())
            }
        }
    }

    proptest! {
        #[test]
        fn udp_10_fragments_make_the_datagram(
            payload in prop::collection::vec(any::<u8>(), 1..9000),
            is_v6: bool, mtu in 68u32..1600, id: u32, marks: (u8, u8),
        ) {
            let headers = headers(is_v6, marks);
            let mut datagram = FragmentedDatagram::new(&payload, headers, mtu, id).unwrap();
            let (mut pool, mut whole) = (pool(), Vec::new());
            let count = datagram.count();
            for number in 1..=count {
                let mut frame = pool.allocate(datagram.fragment_bytes_max()).unwrap();
                let noted = datagram.emit_next(&mut frame);
                prop_assert!(frame.len_bytes() <= mtu);
                let ip = IpSlice::from_slice(frame.data()).unwrap();
                let (offset, has_more, its_id) = piece(&ip);
                prop_assert_eq!((offset, has_more), (whole.len(), number < count));
                prop_assert_eq!(its_id, if is_v6 { id } else { id & 0xffff });
                prop_assert_eq!(noted.fragment.is_whole(), count == 1);
                whole.extend_from_slice(ip.payload().payload);
                pool.put(frame);
            }
            let (udp, rest) = UdpHeader::from_slice(&whole).unwrap();
            prop_assert_eq!(rest, &payload[..]);
            prop_assert_eq!(usize::from(udp.length), payload.len() + 8);
            let checksum = match (headers.source.ip(), headers.destination.ip()) {
                (IpAddr::V4(from), IpAddr::V4(to)) => {
                    udp.calc_checksum_ipv4_raw(from.octets(), to.octets(), rest).unwrap()
                }
                (IpAddr::V6(from), IpAddr::V6(to)) => {
                    udp.calc_checksum_ipv6_raw(from.octets(), to.octets(), rest).unwrap()
                }
                _ => unreachable!(),
            };
            prop_assert_eq!(udp.checksum, checksum);
        }
    }
}
