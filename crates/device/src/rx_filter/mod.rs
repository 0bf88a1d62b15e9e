//! Filter of the packets that are taken from an interface; the kernel keeps the rest.

mod filter; // the same filter as classic BPF
mod share; //  a part of the flows

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

pub use filter::{filter, nothing};
use forebay_rx::parse::extension::{ExtensionWalk, FRAGMENT};
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Link, MAX_VLAN_TAGS};
use forebay_sys::error::{Error, Result};
pub use share::{BUCKETS, FlowShare};

/// Maximum number of port ranges in a list, limited by the jump distance of classic BPF.
pub const MAX_RANGES: usize = 64;

/// Maximum number of IPv6 extension headers to skip: as many as RFC 8200 allows before a segment,
/// fragment header excluded. A packet with more stays with the kernel.
pub const MAX_EXTENSION_HEADERS: usize = 4;

/// Header fields that the filter needs.
pub(crate) mod wire {
    use std::ops::RangeInclusive;

    use forebay_rx::parse::extension::{DESTINATION_OPTIONS, HOP_BY_HOP, ROUTING};

    /// TPIDs of IEEE 802.1Q and 802.1ad, and the predecessor of the latter.
    pub(crate) const VLAN_TAGS: [u16; 3] = [0x8100, 0x88a8, 0x9100];
    /// "More fragments" bit and fragment offset (RFC 791).
    pub(crate) const IPV4_FRAGMENT: u16 = 0x3fff;
    /// Hop-by-hop options, routing, destination options (RFC 8200).
    pub(crate) const EXTENSION_HEADERS: [u8; 3] = [HOP_BY_HOP, ROUTING, DESTINATION_OPTIONS];
    /// Fragment offset (RFC 791).
    pub(crate) const IPV4_OFFSET: u16 = 0x1fff;
    /// Protocol numbers of ICMP (RFC 792) and ICMPv6 (RFC 4443).
    pub(crate) const ICMP: u8 = 1;
    pub(crate) const ICMPV6: u8 = 58;
    /// Length of an error's own header, which the packet that it is about follows.
    pub(crate) const ICMP_ERROR_BYTES: u8 = 8;
    /// Destination unreachable ("fragmentation needed" is one), time exceeded, parameter problem.
    pub(crate) const ICMP_ERRORS: [u8; 3] = [3, 11, 12];
    /// Destination unreachable, packet too big, time exceeded, parameter problem.
    pub(crate) const ICMPV6_ERRORS: RangeInclusive<u8> = 1..=4;
}

/// Packets to take.
///
/// `all`: every frame, ARP too. A list, as in `udp:53,tcp:443,udp:1000-2000,tcp`: unfragmented
/// packets to these ports, over IPv4 or IPv6, behind at most two VLAN tags, and ICMP errors about
/// segments from these TCP ports, of whose connections the kernel knows nothing. Fragments stay
/// with the kernel, because later fragments have no ports, unless [`RxFilter::with_fragments`] asks for them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum RxFilter {
    /// Every frame.
    #[default]
    All,
    /// Packets to these destination ports, ICMP errors about segments from the TCP ports, and fragments if asked for.
    Only(FilterDestinations),
}

/// Destination ports, by protocol: ranges that neither overlap nor touch, in rising order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FilterDestinations {
    tcp: Vec<RangeInclusive<u16>>,
    udp: Vec<RangeInclusive<u16>>,
    fragments: TakenFragments,
}

/// Fragments that are taken, to all ports of the protocols.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TakenFragments {
    /// None.
    #[default]
    None,
    /// All, besides unfragmented packets to the ports.
    All,
    /// All, and nothing else.
    Alone,
}

impl FilterDestinations {
    /// Fragments that are taken.
    #[must_use]
    pub fn fragments(&self) -> TakenFragments {
        self.fragments
    }

    /// Returns the ports taken of a protocol.
    #[must_use]
    pub fn ports(&self, protocol: FilterProtocol) -> &[RangeInclusive<u16>] {
        match protocol {
            FilterProtocol::Tcp => &self.tcp,
            FilterProtocol::Udp => &self.udp,
        }
    }
}

/// Protocol with ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FilterProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl FilterProtocol {
    /// Both protocols.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    /// Protocol number in the IP header.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl RxFilter {
    /// Adds fragments of the protocols, to all ports. They come by packet sockets, which get copies:
    /// the XDP program, which takes packets away from the kernel, leaves fragments there.
    #[must_use]
    pub fn with_fragments(self) -> Self {
        self.taking(TakenFragments::All)
    }

    /// Fragments [alone](TakenFragments::Alone), for a packet socket beside an XDP program; `None` if they are not taken, or
    /// the program takes them with all frames.
    #[must_use]
    pub fn fragments_alone(&self) -> Option<Self> {
        let Self::Only(only) = self else { return None };
        let are_taken = only.fragments != TakenFragments::None;
        are_taken.then(|| self.clone().taking(TakenFragments::Alone))
    }

    fn taking(self, fragments: TakenFragments) -> Self {
        match self {
            Self::All => Self::All,
            Self::Only(only) => Self::Only(FilterDestinations { fragments, ..only }),
        }
    }

    /// True if a frame of type `link` is taken. Reference for the kernel's programs.
    #[must_use]
    pub fn takes(&self, frame: &[u8], link: Link) -> bool {
        let Self::Only(only) = self else { return true };
        let is_to_port = || {
            local_port(frame, link).is_some_and(|(protocol, port)| self.takes_port(protocol, port))
        };
        let is_fragment = || {
            let protocol = fragment_protocol(frame, link);
            protocol.is_some_and(|protocol| self.takes_protocol(protocol))
        };
        match only.fragments {
            TakenFragments::None => is_to_port(),
            TakenFragments::All => is_to_port() || is_fragment(),
            TakenFragments::Alone => is_fragment(),
        }
    }

    /// True if packets of a protocol are taken, to any port.
    #[must_use]
    pub fn takes_protocol(&self, protocol: FilterProtocol) -> bool {
        match self {
            Self::All => true,
            Self::Only(only) => !only.ports(protocol).is_empty(),
        }
    }

    /// True if packets of a protocol to this port are taken.
    #[must_use]
    pub fn takes_port(&self, protocol: FilterProtocol, port: u16) -> bool {
        match self {
            Self::All => true,
            Self::Only(only) => only.ports(protocol).iter().any(|range| range.contains(&port)),
        }
    }
}

/// Port of this host that a frame is about: its destination, or the source of the segment that an ICMP error quotes. `None`
/// if it has none, or is a fragment.
fn local_port(frame: &[u8], link: Link) -> Option<(FilterProtocol, u16)> {
    let (number, payload) = match network(frame, link)? {
        (ETHERTYPE_IPV4, packet) => ipv4(packet)?,
        (ETHERTYPE_IPV6, packet) => ipv6(packet)?,
        _ => return None,
    };
    let (protocol, port) = match number {
        wire::ICMP => (FilterProtocol::Tcp, quoted_port(payload)?),
        wire::ICMPV6 => (FilterProtocol::Tcp, quoted_port_v6(payload)?),
        _ => {
            let is_its = |protocol: &FilterProtocol| protocol.number() == number;
            let &[_, _, port @ ..] = payload.first_chunk::<4>()?;
            (FilterProtocol::ALL.into_iter().find(is_its)?, port)
        }
    };
    Some((protocol, u16::from_be_bytes(port)))
}

/// Protocol of a frame with a fragment; `None` for other frames and protocols.
fn fragment_protocol(frame: &[u8], link: Link) -> Option<FilterProtocol> {
    let number = match network(frame, link)? {
        (ETHERTYPE_IPV4, packet) => {
            let header = ipv4_header(packet)?;
            is_fragment(header).then_some(header[9])?
        }
        (ETHERTYPE_IPV6, packet) => match ipv6(packet)? {
            (FRAGMENT, header) => *header.first()?,
            _ => return None,
        },
        _ => return None,
    };
    FilterProtocol::ALL.into_iter().find(|protocol| protocol.number() == number)
}

/// Source port of the segment that an ICMP error is about, as the stack reads it.
fn quoted_port(message: &[u8]) -> Option<[u8; 2]> {
    let quoted = message.get(wire::ICMP_ERROR_BYTES.into()..)?;
    let header = ipv4_header(quoted)?;
    let is_first = u16::from_be_bytes([header[6], header[7]]) & wire::IPV4_OFFSET == 0;
    let is_segment = is_first && header[9] == FilterProtocol::Tcp.number();
    if !is_segment || !wire::ICMP_ERRORS.contains(message.first()?) {
        return None;
    }
    quoted.get(ipv4_header_bytes(header)..)?.first_chunk().copied()
}

/// As [`quoted_port`], of ICMPv6.
fn quoted_port_v6(message: &[u8]) -> Option<[u8; 2]> {
    let (header, segment) =
        message.get(wire::ICMP_ERROR_BYTES.into()..)?.split_first_chunk::<40>()?;
    let is_segment = header[0] >> 4 == 6 && header[6] == FilterProtocol::Tcp.number();
    if !is_segment || !wire::ICMPV6_ERRORS.contains(message.first()?) {
        return None;
    }
    segment.first_chunk().copied()
}

/// Returns the `EtherType`, and the packet.
fn network(frame: &[u8], link: Link) -> Option<(u16, &[u8])> {
    match link {
        Link::Ip if frame.first()? >> 4 == 4 => return Some((ETHERTYPE_IPV4, frame)),
        Link::Ip => return Some((ETHERTYPE_IPV6, frame)),
        Link::Ethernet => {}
    }
    let mut behind = frame.get(12..)?;
    for _ in 0..=MAX_VLAN_TAGS {
        let (&[high, low], rest) = behind.split_first_chunk()?;
        let ethertype = u16::from_be_bytes([high, low]);
        if !wire::VLAN_TAGS.contains(&ethertype) {
            return Some((ethertype, rest));
        }
        behind = rest.get(2..)?;
    }
    None
}

/// Returns the protocol number, and the bytes behind the header.
fn ipv4(packet: &[u8]) -> Option<(u8, &[u8])> {
    let header = ipv4_header(packet)?;
    // Later fragments have no ports.
    if is_fragment(header) {
        return None;
    }
    Some((header[9], packet.get(ipv4_header_bytes(header)..)?))
}

/// Fixed part of an IPv4 header.
fn ipv4_header(packet: &[u8]) -> Option<&[u8; 20]> {
    packet
        .first_chunk()
        .filter(|header| header[0] >> 4 == 4 && ipv4_header_bytes(header) >= header.len())
}

fn ipv4_header_bytes(header: &[u8; 20]) -> usize {
    usize::from(header[0] & 0x0f) * 4
}

fn is_fragment(header: &[u8; 20]) -> bool {
    u16::from_be_bytes([header[6], header[7]]) & wire::IPV4_FRAGMENT != 0
}

/// Returns the protocol number, and the bytes behind the extension headers.
fn ipv6(packet: &[u8]) -> Option<(u8, &[u8])> {
    let (header, behind) = packet.split_first_chunk::<40>()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let mut walk = ExtensionWalk { kind: header[6], at: 0 };
    for _ in 0..MAX_EXTENSION_HEADERS {
        if !wire::EXTENSION_HEADERS.contains(&walk.kind) {
            break;
        }
        walk.take(behind)?;
    }
    Some((walk.kind, behind.get(walk.at..)?))
}

impl FromStr for RxFilter {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "all" {
            return Ok(Self::All);
        }
        let refused = |why| Error::Setting { what: "take", value: text.to_owned(), why };
        let mut found = FilterDestinations::default();
        for entry in text.split(',') {
            let (protocol, ports) = destination(entry.trim()).map_err(refused)?;
            match protocol {
                FilterProtocol::Tcp => found.tcp.push(ports),
                FilterProtocol::Udp => found.udp.push(ports),
            }
        }
        found.tcp = joined(found.tcp);
        found.udp = joined(found.udp);
        let ranges = found.tcp.len() + found.udp.len();
        if ranges > MAX_RANGES {
            let why = format!("it has {ranges} ranges of ports and {MAX_RANGES} are the most");
            return Err(refused(why));
        }
        Ok(Self::Only(found))
    }
}

/// Parses one entry of a list: a protocol, and its ports unless all.
fn destination(entry: &str) -> Result<(FilterProtocol, RangeInclusive<u16>), String> {
    let (name, ports) = entry.split_once(':').map_or((entry, None), |(p, r)| (p, Some(r)));
    let protocol = match name {
        "tcp" => FilterProtocol::Tcp,
        "udp" => FilterProtocol::Udp,
        "" => return Err("an entry is empty; each is udp or tcp, and perhaps :PORT".to_owned()),
        "all" => return Err("\"all\" stands alone: it takes every frame".to_owned()),
        _ => {
            return Err(format!(
                "{name:?} is not a protocol with ports that is known here; each entry is udp or \
                 tcp, and perhaps :PORT or :PORT-PORT, or the whole is `all`"
            ));
        }
    };
    let Some(ports) = ports else { return Ok((protocol, 0..=u16::MAX)) };
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (first, last) = (port(entry, first)?, port(entry, last)?);
    if first > last {
        return Err(format!(
            "the ports of {entry:?} go from {first} down to {last}; turn them round"
        ));
    }
    Ok((protocol, first..=last))
}

fn port(entry: &str, text: &str) -> Result<u16, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if is_number => Ok(port),
        _ => Err(format!("{text:?} in {entry:?} is not a port: a number from 0 to 65535")),
    }
}

/// Merges port ranges: in rising order, as few as possible.
fn joined(mut ranges: Vec<RangeInclusive<u16>>) -> Vec<RangeInclusive<u16>> {
    ranges.sort_by_key(|range| *range.start());
    let mut joined: Vec<RangeInclusive<u16>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if *range.start() <= last.end().saturating_add(1) => {
                *last = *last.start()..=*last.end().max(range.end());
            }
            _ => joined.push(range),
        }
    }
    joined
}

impl fmt::Display for RxFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Only(destinations) = self else { return f.write_str("all") };
        let mut separator = "";
        for protocol in FilterProtocol::ALL {
            for ports in destinations.ports(protocol) {
                write!(f, "{separator}{}", protocol.name())?;
                match (*ports.start(), *ports.end()) {
                    (0, u16::MAX) => {}
                    (first, last) if first == last => write!(f, ":{first}")?,
                    (first, last) => write!(f, ":{first}-{last}")?,
                }
                separator = ",";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn told(list: &str) -> String {
        list.parse::<RxFilter>().unwrap_err().to_string()
    }

    #[test]
    fn list_prints_shortest_form() {
        for (list, same) in [
            ("all", "all"),
            ("udp", "udp"),
            ("udp:53", "udp:53"),
            (" udp:53, tcp:443 ", "tcp:443,udp:53"),
            ("udp:1000-2000,tcp,udp:53", "tcp,udp:53,udp:1000-2000"),
            ("udp:1-5,udp:6,udp:4-7", "udp:1-7"),
            ("udp:7,udp", "udp"),
            ("tcp:0-65535", "tcp"),
            ("tcp:65535,tcp:0", "tcp:0,tcp:65535"),
        ] {
            assert_eq!(list.parse::<RxFilter>().unwrap().to_string(), same, "{list}");
        }
    }

    #[test]
    fn bad_list_error_names_place() {
        for (list, why) in [
            ("", "an entry is empty"),
            ("udp:53,", "an entry is empty"),
            ("sctp:53", "\"sctp\" is not a protocol"),
            ("UDP:53", "\"UDP\" is not a protocol"),
            ("53", "\"53\" is not a protocol"),
            ("udp:", "\"\" in \"udp:\" is not a port"),
            ("tcp:1,udp:65536", "\"65536\" in \"udp:65536\" is not a port"),
            ("udp:+5", "\"+5\" in \"udp:+5\" is not a port"),
            ("udp:5-", "\"\" in \"udp:5-\" is not a port"),
            ("udp:1-2-3", "\"2-3\" in \"udp:1-2-3\" is not a port"),
            ("udp:9-5", "\"udp:9-5\" go from 9 down to 5"),
            ("udp,all", "\"all\" stands alone"),
        ] {
            assert!(told(list).contains(why), "{list}: {}", told(list));
        }
        let odd_ports = |count| (0..count).map(|n| format!("udp:{}", 2 * n)).collect::<Vec<_>>();
        assert!(odd_ports(MAX_RANGES).join(",").parse::<RxFilter>().is_ok());
        assert!(told(&odd_ports(MAX_RANGES + 1).join(",")).contains("65 ranges of ports and 64"));
    }

    proptest! {
        #[test]
        fn port_list_matches_its_ports(
            entries in prop::collection::vec((any::<bool>(), 0..40_u16, 0..4_u16), 1..20),
            port in 0..45_u16,
        ) {
            let list = entries.iter().map(|&(is_tcp, first, more)| {
                format!("{}:{first}-{}", if is_tcp { "tcp" } else { "udp" }, first + more)
            });
            let take: RxFilter = list.collect::<Vec<_>>().join(",").parse().unwrap();
            let again: RxFilter = take.to_string().parse().unwrap();
            prop_assert_eq!(&take, &again);

            let mut frame = [0; 42];
            frame[12] = 0x08;
            frame[14] = 0x45;
            frame[36..38].copy_from_slice(&port.to_be_bytes());
            for (number, tcp) in [(6, true), (17, false), (1, true)] {
                frame[23] = number;
                let is_listed = number != 1 && entries.iter().any(|&(is_tcp, first, more)| {
                    is_tcp == tcp && (first..=first + more).contains(&port)
                });
                prop_assert_eq!(take.takes(&frame, Link::Ethernet), is_listed);
            }
        }
    }
}
