//! Segments by etherparse, and changes to them on the wire.

use etherparse::{
    IpDscp, IpEcn, IpHeaders, Ipv4Extensions, Ipv4Header, Ipv4Options, Ipv6Extensions, Ipv6Header,
    PacketBuilder, TcpHeader, VlanId, ip_number,
};
use forebay_rx::coalesce::gso::{
    GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr,
};
use forebay_rx::hash::FlowHash;
use forebay_rx::parse::{
    Checksum, DeviceSum, Headers, Link, Network, Transport, Verify, View, parse,
};

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
pub(crate) const URG: u8 = 0x20;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

/// Offset at which the headers of a frame without tags begin.
pub(crate) const IP: usize = 14;
pub(crate) const AFTER_IPV4: usize = IP + 20;

/// Properties of one segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) link: Link,
    pub(crate) mac: u8,
    pub(crate) vlans: Vec<u16>,
    pub(crate) is_v6: bool,
    pub(crate) ttl: u8,
    pub(crate) tos: u8,
    pub(crate) id: u16,
    pub(crate) dont_fragment: bool,
    pub(crate) ip_options: Vec<u8>,
    pub(crate) flow_label: u32,
    pub(crate) extensions: Ipv6Extensions,
    pub(crate) is_udp: bool,
    /// UDP without a checksum, whose words add up as if 0 were the right one.
    pub(crate) is_unsummed: bool,
    pub(crate) port: u16,
    pub(crate) sequence: u32,
    pub(crate) acknowledgement: u32,
    pub(crate) window: u16,
    pub(crate) flags: u8,
    pub(crate) urgent: u16,
    pub(crate) options: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

/// TCP segment over IPv4, whose sequence number and id are about to wrap.
pub(crate) fn tcp() -> Segment {
    Segment {
        link: Link::Ethernet,
        mac: 2,
        vlans: vec![],
        is_v6: false,
        ttl: 64,
        tos: 0,
        id: u16::MAX,
        dont_fragment: true,
        ip_options: vec![],
        flow_label: 0x12345,
        extensions: Ipv6Extensions::default(),
        is_udp: false,
        is_unsummed: false,
        port: 1000,
        sequence: u32::MAX - 50,
        acknowledgement: 9,
        window: 512,
        flags: ACK,
        urgent: 0,
        options: vec![],
        payload: payload(u32::MAX - 50, 100),
    }
}

pub(crate) fn udp() -> Segment {
    Segment { is_udp: true, ..tcp() }
}

/// TCP options: NOP, NOP, timestamps.
pub(crate) fn timestamps(value: u32, echo: u32) -> Vec<u8> {
    [[1, 1, 8, 10], value.to_be_bytes(), echo.to_be_bytes()].concat()
}

/// Bytes of the stream from `sequence` on; they differ between consecutive segments.
fn payload(sequence: u32, len: usize) -> Vec<u8> {
    let byte = |at: u32| (at ^ at >> 8).to_le_bytes()[0];
    (0..).take(len).map(|at| byte(sequence.wrapping_add(at))).collect()
}

impl Segment {
    /// Segment with this many bytes of payload.
    pub(crate) fn sized(self, len: usize) -> Self {
        Self { payload: payload(self.sequence, len), ..self }
    }

    /// Segment `number` segments later.
    pub(crate) fn nth(&self, number: u32) -> Self {
        let len = self.payload.len();
        let ahead = u32::try_from(len).unwrap().wrapping_mul(number);
        let sequence = self.sequence.wrapping_add(ahead);
        Self {
            id: self.id.wrapping_add(u16::try_from(number).unwrap()),
            sequence,
            payload: payload(sequence, len),
            ..self.clone()
        }
    }

    /// Run of `count` segments, beginning with this one.
    pub(crate) fn run(&self, count: u32) -> Vec<Wire> {
        (0..count).map(|number| self.nth(number).wire()).collect()
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn wire(&self) -> Wire {
        let vlan = |index: usize| VlanId::try_new(self.vlans[index]).unwrap();
        let ethernet = || PacketBuilder::ethernet2([self.mac; 6], [4; 6]);
        let step = match (self.link, self.vlans.len()) {
            (Link::Ip, _) => PacketBuilder::ip(self.ip()),
            (Link::Ethernet, 0) => ethernet().ip(self.ip()),
            (Link::Ethernet, 1) => ethernet().single_vlan(vlan(0)).ip(self.ip()),
            (Link::Ethernet, _) => ethernet().double_vlan(vlan(0), vlan(1)).ip(self.ip()),
        };
        let mut bytes = Vec::new();
        let written = if self.is_udp {
            step.udp(self.port, 443).write(&mut bytes, &self.payload)
        } else {
            step.tcp_header(self.tcp_header()).write(&mut bytes, &self.payload)
        };
        written.unwrap();
        if self.is_udp && self.is_unsummed && self.payload.len() > 1 {
            let at = bytes.len() - self.payload.len() - 2;
            let sum = folded(words(&bytes[at..at + 4]));
            bytes[at..at + 4].copy_from_slice(&u32::from(sum).to_be_bytes());
        }
        Wire::new(bytes, self.link)
    }

    /// IP headers, whose lengths and protocol numbers the builder fills in.
    fn ip(&self) -> IpHeaders {
        if self.is_v6 {
            let header = Ipv6Header {
                traffic_class: self.tos,
                flow_label: self.flow_label.try_into().unwrap(),
                hop_limit: self.ttl,
                source: [0x20; 16],
                destination: [0xfd; 16],
                ..Ipv6Header::default()
            };
            return IpHeaders::Ipv6(header, self.extensions.clone());
        }
        let (from, to) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let mut header = Ipv4Header::new(0, self.ttl, ip_number::UDP, from, to).unwrap();
        header.dscp = IpDscp::try_new(self.tos >> 2).unwrap();
        header.ecn = IpEcn::try_new(self.tos & 3).unwrap();
        header.identification = self.id;
        header.dont_fragment = self.dont_fragment;
        header.options = Ipv4Options::try_from(self.ip_options.as_slice()).unwrap();
        IpHeaders::Ipv4(header, Ipv4Extensions::default())
    }

    fn tcp_header(&self) -> TcpHeader {
        let flag = |bit: u8| self.flags & 1 << bit != 0;
        let mut header = TcpHeader::new(self.port, 443, self.sequence, self.window);
        header.acknowledgment_number = self.acknowledgement;
        (header.fin, header.syn, header.rst, header.psh) = (flag(0), flag(1), flag(2), flag(3));
        (header.ack, header.urg, header.ece, header.cwr) = (flag(4), flag(5), flag(6), flag(7));
        header.urgent_pointer = self.urgent;
        header.set_options_raw(&self.options).unwrap();
        header
    }
}

/// Frame, and the source's information about it.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) bytes: Vec<u8>,
    pub(crate) link: Link,
    pub(crate) wire_len: u32,
    pub(crate) timestamp_ns: u64,
    pub(crate) hash: FlowHash,
    pub(crate) l4_checksum: Checksum,
    pub(crate) device_sum: Option<DeviceSum>,
    /// `virtio_net_hdr` before the frame.
    pub(crate) vnet: Option<VirtioNetHdr>,
}

impl Wire {
    pub(crate) fn new(bytes: Vec<u8>, link: Link) -> Self {
        let wire_len = u32::try_from(bytes.len()).unwrap();
        Self {
            bytes,
            link,
            wire_len,
            timestamp_ns: 0,
            hash: FlowHash::NONE,
            l4_checksum: Checksum::Unknown,
            device_sum: None,
            vnet: None,
        }
    }

    pub(crate) fn edit(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub(crate) fn padded(mut self, padding: &[u8]) -> Self {
        self.bytes.extend(padding);
        Self { wire_len: u32::try_from(self.bytes.len()).unwrap(), ..self }
    }

    /// Frame truncated to `len` bytes by the capture.
    pub(crate) fn snapped(mut self, len: usize) -> Self {
        self.bytes.truncate(len);
        self
    }

    pub(crate) fn recorded(self, timestamp_ns: u64) -> Self {
        Self { timestamp_ns, ..self }
    }

    pub(crate) fn hashed(self, hash: u32) -> Self {
        Self { hash: FlowHash(hash), ..self }
    }

    /// Frame from a device that sums received bytes behind the Ethernet header.
    pub(crate) fn summed(self) -> Self {
        let skipped = if self.link == Link::Ethernet { IP } else { 0 };
        let sum = self.bytes.get(skipped..).map_or(0, |bytes| folded(words(bytes)));
        Self { device_sum: DeviceSum::new(sum), ..self }
    }

    pub(crate) fn headers(&self) -> Headers {
        parse(&self.bytes, self.wire_len, self.link, Verify::Checksums)
    }

    /// Frame with recomputed checksums, as far as it has any.
    pub(crate) fn resummed(mut self) -> Self {
        let headers = self.headers();
        let (start, transport) =
            (usize::from(headers.network_offset), usize::from(headers.transport_offset));
        if headers.network == Network::Ipv4 && start + 20 <= self.bytes.len() {
            let end = start + usize::from(self.bytes[start] & 15) * 4;
            if let Some(header) = self.bytes.get(start..end).filter(|header| header.len() >= 20) {
                let sum = words(&[&header[..10], &header[12..]].concat());
                self = self.edit(start + 10, &(!folded(sum)).to_be_bytes());
            }
        }
        let field = match headers.transport {
            Transport::Tcp => transport + 16,
            Transport::Udp => transport + 6,
            _ => return self,
        };
        self = self.edit(field, &[0; 2]);
        let sum = self.transport_sum(&headers);
        let field_value = match (!folded(sum), headers.transport) {
            (0, Transport::Udp) => 0xffff,
            (value, _) => value,
        };
        self.edit(field, &field_value.to_be_bytes())
    }

    /// Frame as the kernel passes on a local socket's: the checksum field holds the pseudo header's
    /// sum, and the rest is left to the device; to be cut into `gso_size` if that is not 0.
    pub(crate) fn partial(self, gso_size: u16) -> Self {
        let headers = self.headers();
        let (gso_type, csum_offset) = match (headers.transport, headers.network) {
            (Transport::Udp, _) => (GSO_UDP_L4, 6),
            (_, Network::Ipv6) => (GSO_TCPV6, 16),
            _ => (GSO_TCPV4, 16),
        };
        let is_cwr = csum_offset == 16 && {
            self.bytes[usize::from(headers.transport_offset) + 13] & CWR > 0
        };
        let gso_type = if is_cwr { gso_type | GSO_ECN } else { gso_type };
        let vnet = VirtioNetHdr {
            flags: NEEDS_CSUM,
            gso_type: if gso_size == 0 { GSO_NONE } else { gso_type },
            hdr_len: headers.payload_offset,
            gso_size,
            csum_start: headers.transport_offset,
            csum_offset,
        };
        let len = headers.payload_offset - headers.transport_offset + headers.payload_len;
        let view = View::new(&self.bytes, &headers);
        let addresses = words(view.address_bytes().unwrap());
        let sum = folded(addresses + u64::from(len) + u64::from(headers.protocol));
        let field = usize::from(headers.transport_offset + csum_offset);
        Self { vnet: Some(vnet), ..self.edit(field, &sum.to_be_bytes()) }
    }

    /// Sum of pseudo header and segment, which a correct checksum makes all ones.
    pub(crate) fn transport_sum(&self, headers: &Headers) -> u64 {
        let (start, end) = (usize::from(headers.transport_offset), {
            usize::from(headers.payload_offset) + usize::from(headers.payload_len)
        });
        let segment = &self.bytes[start..end.min(self.bytes.len())];
        let view = View::new(&self.bytes, headers);
        let addresses = words(view.address_bytes().unwrap_or_default());
        addresses + words(segment) + segment.len() as u64 + u64::from(headers.protocol)
    }
}

/// Sum of big-endian words.
pub(crate) fn words(bytes: &[u8]) -> u64 {
    let word = |pair: &[u8]| u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
    bytes.chunks(2).map(word).sum()
}

pub(crate) fn folded(sum: u64) -> u16 {
    // A multiple of 0xffff but 0 is all ones.
    u16::try_from(if sum > 0 { (sum - 1) % 0xffff + 1 } else { 0 }).unwrap()
}
