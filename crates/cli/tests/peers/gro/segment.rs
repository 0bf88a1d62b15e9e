//! Builds the frames of a case: a segment is described by its special fields.

use etherparse::{
    EtherType, Ethernet2Header, IpDscp, IpEcn, IpNumber, Ipv4Header, Ipv4Options, Ipv6FlowLabel,
    Ipv6Header, SingleVlanHeader, TcpHeader, UdpHeader, VlanId,
};

use crate::frames::Frame;
use crate::gro::damage::Damage;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    /// Largest TCP payload in an IP packet of 65,535 bytes.
    pub(crate) fn largest_payload(self) -> usize {
        65_535 - self.header_bytes() - TcpHeader::MIN_LEN
    }

    pub(crate) fn header_bytes(self) -> usize {
        match self {
            Self::Ipv4 => Ipv4Header::MIN_LEN,
            Self::Ipv6 => Ipv6Header::LEN,
        }
    }
}

/// VLAN tags, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tags {
    None,
    Single,
    Double,
}

impl Tags {
    fn ethertypes(self) -> &'static [u16] {
        match self {
            Self::None => &[],
            Self::Single => &[0x8100],
            Self::Double => &[0x88a8, 0x8100],
        }
    }
}

/// Transport header of a datagram or segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    Tcp,
    Udp,
    /// UDP without a checksum.
    UdpUnsummed,
}

/// Header between the fixed IPv6 header and the transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extension {
    /// A destination options header with one padding option, filled with this byte.
    Options(u8),
    /// A fragment header: the first of several fragments.
    Fragment,
}

/// Initial sequence number, that of the Linux self-test.
const START: u32 = 100;
const SOURCE_PORT: u16 = 1500;
const DESTINATION_PORT: u16 = 8000;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DESTINATION_OPTIONS: u8 = 60;
const FRAGMENT: u8 = 44;

/// Start of a datagram that ends a flow.
pub(crate) const END: &[u8] = b"END";
/// Longer than any other datagram: cannot be appended, and so flushes the flow.
pub(crate) const END_BYTES: usize = 9_400;
/// Far from the offsets of a flow's data.
const END_OFFSET: u32 = 0x4000_0000;

#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) family: Family,
    pub(crate) tags: Tags,
    pub(crate) transport: Transport,
    /// Part of the source address that identifies the case.
    case: u8,
    pub(crate) source_port: u16,
    /// Sending time, in milliseconds.
    pub(crate) at_ms: u64,
    sequence: u32,
    ack: u32,
    flags: &'static str,
    payload_len: usize,
    tcp_options: Vec<u8>,
    spoil_transport: bool,
    hop_limit: u8,
    traffic_class: u8,
    identification: u16,
    dont_fragment: bool,
    more_fragments: bool,
    ip_options: Vec<u8>,
    spoil_ip: bool,
    flow_label: u32,
    extension: Option<Extension>,
    /// Minimum length of the frame, and the padding byte.
    padding: (usize, u8),
    damage: Option<Damage>,
    is_end: bool,
}

impl Segment {
    pub(crate) fn first(family: Family, tags: Tags, case: u8) -> Self {
        Self {
            family,
            tags,
            transport: Transport::Tcp,
            case,
            source_port: SOURCE_PORT,
            at_ms: 0,
            sequence: START,
            ack: START,
            flags: "A",
            payload_len: 100,
            tcp_options: Vec::new(),
            spoil_transport: false,
            hop_limit: 8,
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            more_fragments: false,
            ip_options: Vec::new(),
            spoil_ip: false,
            flow_label: 0,
            extension: None,
            padding: (0, 0),
            damage: None,
            is_end: false,
        }
    }

    /// The segment whose data begins `offset` bytes into the flow.
    pub(crate) fn at(&self, offset: usize) -> Self {
        let offset = u32::try_from(offset).unwrap();
        Self { sequence: self.sequence.wrapping_add(offset), ..self.clone() }
    }

    /// The segment in a flow with another initial sequence number.
    pub(crate) fn starting_at(self, sequence: u32) -> Self {
        Self { sequence, ..self }
    }

    pub(crate) fn len(self, payload_len: usize) -> Self {
        Self { payload_len, ..self }
    }

    pub(crate) fn flags(self, flags: &'static str) -> Self {
        Self { flags, ..self }
    }

    pub(crate) fn ack(self, ack: u32) -> Self {
        Self { ack, ..self }
    }

    pub(crate) fn port(self, source_port: u16) -> Self {
        Self { source_port, ..self }
    }

    pub(crate) fn transport(self, transport: Transport) -> Self {
        Self { transport, ..self }
    }

    pub(crate) fn tcp_options(self, options: &[u8]) -> Self {
        Self { tcp_options: options.to_vec(), ..self }
    }

    pub(crate) fn ip_options(self, options: &[u8]) -> Self {
        Self { ip_options: options.to_vec(), ..self }
    }

    pub(crate) fn bad_transport_checksum(self) -> Self {
        Self { spoil_transport: true, ..self }
    }

    pub(crate) fn bad_ip_checksum(self) -> Self {
        Self { spoil_ip: true, ..self }
    }

    pub(crate) fn hop_limit(self, hop_limit: u8) -> Self {
        Self { hop_limit, ..self }
    }

    pub(crate) fn traffic_class(self, traffic_class: u8) -> Self {
        Self { traffic_class, ..self }
    }

    pub(crate) fn identification(self, identification: u16, dont_fragment: bool) -> Self {
        Self { identification, dont_fragment, ..self }
    }

    /// The first fragment of a packet, in either family.
    pub(crate) fn fragment(self) -> Self {
        match self.family {
            Family::Ipv4 => Self { more_fragments: true, ..self },
            Family::Ipv6 => self.extension(Extension::Fragment),
        }
    }

    pub(crate) fn extension(self, extension: Extension) -> Self {
        Self { extension: Some(extension), ..self }
    }

    pub(crate) fn flow_label(self, flow_label: u32) -> Self {
        Self { flow_label, ..self }
    }

    pub(crate) fn padded_to(self, len: usize, with: u8) -> Self {
        Self { padding: (len, with), ..self }
    }

    pub(crate) fn damaged(self, damage: Damage) -> Self {
        Self { damage: Some(damage), ..self }
    }

    /// The segment in another case.
    pub(crate) fn of_case(self, case: u8) -> Self {
        Self { case, ..self }
    }

    pub(crate) fn at_ms(self, at_ms: u64) -> Self {
        Self { at_ms, ..self }
    }

    /// The segment sent last in this flow: it flushes all held segments.
    pub(crate) fn end(&self) -> Self {
        let plain = Self::first(self.family, self.tags, self.case).port(self.source_port);
        let end = Self { is_end: true, at_ms: self.at_ms, ..plain };
        match self.transport {
            Transport::Tcp => Self { sequence: START + END_OFFSET, ..end.len(0).flags("FA") },
            _ => end.len(END_BYTES).transport(Transport::Udp),
        }
    }

    pub(crate) fn frame(&self) -> Frame {
        let mut bytes = self.link();
        bytes.extend(match self.family {
            Family::Ipv4 => self.ipv4(),
            Family::Ipv6 => self.ipv6(),
        });
        let (least, filling) = self.padding;
        bytes.resize(bytes.len().max(least), filling);
        let wire_len = u32::try_from(bytes.len()).unwrap();
        if let Some(damage) = self.damage {
            damage.apply(&mut bytes);
        }
        Frame { bytes, wire_len }
    }

    fn link(&self) -> Vec<u8> {
        let ethertype = match self.family {
            Family::Ipv4 => EtherType::IPV4.0,
            Family::Ipv6 => EtherType::IPV6.0,
        };
        let mut kinds = self.tags.ethertypes().iter().copied().chain([ethertype]);
        let first = Ethernet2Header {
            source: [0xaa, 0, 0, 0, 0, 2],
            destination: [0xaa, 0, 0, 0, 0, 1],
            ether_type: EtherType(kinds.next().unwrap()),
        };
        let mut bytes = first.to_bytes().to_vec();
        for (kind, id) in kinds.zip([100, 7]) {
            let tag = SingleVlanHeader {
                vlan_id: VlanId::try_new(id).unwrap(),
                ether_type: EtherType(kind),
                ..SingleVlanHeader::default()
            };
            bytes.extend(tag.to_bytes());
        }
        bytes
    }

    fn ipv4(&self) -> Vec<u8> {
        let [source, destination] = [[10, 66, self.case, 2], [10, 66, self.case, 1]];
        let (protocol, segment) =
            self.segment(|header, payload| header.checksum_ipv4(source, destination, payload));
        let mut header = Ipv4Header {
            dscp: IpDscp::try_new(self.traffic_class >> 2).unwrap(),
            ecn: IpEcn::try_new(self.traffic_class & 3).unwrap(),
            identification: self.identification,
            dont_fragment: self.dont_fragment,
            more_fragments: self.more_fragments,
            time_to_live: self.hop_limit,
            protocol: IpNumber(protocol),
            source,
            destination,
            options: Ipv4Options::try_from(self.ip_options.as_slice()).unwrap(),
            ..Ipv4Header::default()
        };
        header.set_payload_len(segment.len()).unwrap();
        header.header_checksum = header.calc_header_checksum() ^ u16::from(self.spoil_ip);
        [header.to_bytes().as_slice(), &segment].concat()
    }

    fn ipv6(&self) -> Vec<u8> {
        let address = |last| [0xfd, 0xaa, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, self.case, 0, last];
        let [source, destination] = [address(2), address(1)];
        let (protocol, segment) =
            self.segment(|header, payload| header.checksum_ipv6(source, destination, payload));
        let (next_header, extension) = match self.extension {
            None => (protocol, Vec::new()),
            Some(Extension::Options(filling)) => {
                (DESTINATION_OPTIONS, [&[protocol, 0, 1, 4][..], &[filling; 4]].concat())
            }
            Some(Extension::Fragment) => (FRAGMENT, vec![protocol, 0, 0, 1, 0, 0, 0, 9]),
        };
        let payload = [extension, segment].concat();
        let header = Ipv6Header {
            traffic_class: self.traffic_class,
            flow_label: Ipv6FlowLabel::try_new(self.flow_label).unwrap(),
            payload_length: u16::try_from(payload.len()).unwrap(),
            next_header: IpNumber(next_header),
            hop_limit: self.hop_limit,
            source,
            destination,
        };
        [&header.to_bytes()[..], &payload].concat()
    }

    /// Protocol number and payload of the IP packet.
    fn segment(&self, checksum: impl Fn(&Header, &[u8]) -> u16) -> (u8, Vec<u8>) {
        let payload = self.payload();
        let mut header = match self.transport {
            Transport::Tcp => Header::Tcp(self.tcp()),
            _ => Header::Udp(UdpHeader {
                source_port: self.source_port,
                destination_port: DESTINATION_PORT,
                length: u16::try_from(UdpHeader::LEN + payload.len()).unwrap(),
                checksum: 0,
            }),
        };
        if self.transport != Transport::UdpUnsummed {
            header.set_checksum(checksum(&header, &payload) ^ u16::from(self.spoil_transport));
        }
        let protocol = if self.transport == Transport::Tcp { TCP } else { UDP };
        (protocol, [header.to_bytes(), payload].concat())
    }

    fn tcp(&self) -> TcpHeader {
        let has = |flag| self.flags.contains(flag);
        let mut header =
            TcpHeader::new(self.source_port, DESTINATION_PORT, self.sequence, u16::MAX);
        (header.fin, header.syn, header.rst, header.psh) = (has('F'), has('S'), has('R'), has('P'));
        (header.ack, header.urg, header.ece, header.cwr) = (has('A'), has('U'), has('E'), has('C'));
        header.acknowledgment_number = self.ack;
        header.set_options_raw(&self.tcp_options).unwrap();
        header
    }

    /// Payload bytes that encode their flow and position, so that a wrong joint is detected.
    fn payload(&self) -> Vec<u8> {
        let flow = u32::from(self.source_port);
        let byte = |offset: usize| {
            let position = self.sequence.wrapping_add(u32::try_from(offset).unwrap());
            (position ^ flow).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]
        };
        let mut payload: Vec<_> = (0..self.payload_len).map(byte).collect();
        if self.is_end && !payload.is_empty() {
            payload[..END.len()].copy_from_slice(END);
        }
        payload
    }
}

enum Header {
    Tcp(TcpHeader),
    Udp(UdpHeader),
}

impl Header {
    fn checksum_ipv4(&self, source: [u8; 4], destination: [u8; 4], payload: &[u8]) -> u16 {
        match self {
            Self::Tcp(tcp) => tcp.calc_checksum_ipv4_raw(source, destination, payload).unwrap(),
            Self::Udp(udp) => udp.calc_checksum_ipv4_raw(source, destination, payload).unwrap(),
        }
    }

    fn checksum_ipv6(&self, source: [u8; 16], destination: [u8; 16], payload: &[u8]) -> u16 {
        match self {
            Self::Tcp(tcp) => tcp.calc_checksum_ipv6_raw(source, destination, payload).unwrap(),
            Self::Udp(udp) => udp.calc_checksum_ipv6_raw(source, destination, payload).unwrap(),
        }
    }

    fn set_checksum(&mut self, checksum: u16) {
        match self {
            Self::Tcp(tcp) => tcp.checksum = checksum,
            Self::Udp(udp) => udp.checksum = checksum,
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Tcp(tcp) => tcp.to_bytes().to_vec(),
            Self::Udp(udp) => udp.to_bytes().to_vec(),
        }
    }
}
