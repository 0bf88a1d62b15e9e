//! Flows of a few kinds, each of which continues from segment to segment.

use std::collections::HashMap;

use crate::tunnels::Tunnel;
use arbitrary::Arbitrary;
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Link};

/// Payload sizes that add up to even and odd offsets. Eight of the largest, over IPv4, exceed the
/// maximum length of a packet by one byte.
const SIZES_BYTES: [u16; 8] = [1, 2, 6, 7, 100, 1000, 1448, 8187];

const TCP: u8 = 6;
const UDP: u8 = 17;
const ACK: u8 = 0x10;

/// Frame, and the number of bytes that were cut off its end.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: Vec<u8>,
    pub(crate) cut_off: u8,
    pub(crate) link: Link,
}

/// Modification of a segment. All but the last three keep its checksums correct, if there is room.
#[derive(Arbitrary, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Nothing,
    /// TCP flags.
    Flags(u8),
    /// Position in the stream.
    Sequence(i8),
    /// Step of the IPv4 id, also for the segments behind.
    Id(u8),
    /// Steps of acknowledgement, window and timestamp, also for the segments behind.
    Advance {
        acknowledgement: i8,
        window: u8,
        timestamp: i8,
    },
    /// Hop limit.
    Hops(u8),
    /// Bits of the IPv4 fragment field.
    Fragment(u8),
    /// Bits of any header byte.
    Header {
        at: u8,
        bits: u8,
    },
    /// A segment without payload.
    Empty,
    /// A payload for which the checksum computes to 0, stored as 0 or as 0xffff.
    OddChecksum {
        ones: bool,
    },
    /// Bytes appended behind the segment.
    Padded {
        bytes: u8,
        with: u8,
    },
    /// Bits of any byte.
    Damaged {
        at: u16,
        bits: u8,
    },
    /// Any bits of a tunnel's outer headers are changed; their checksums may be corrected afterwards.
    Outside {
        at: u8,
        bits: u8,
        mended: bool,
    },
    /// The end was not captured.
    Snapped {
        bytes: u8,
    },
    /// The end was never received.
    CutShort {
        bytes: u8,
    },
}

/// State of every flow.
#[derive(Default)]
pub(crate) struct Flows(HashMap<u8, Flow>);

impl Flows {
    /// Returns the next segment of a flow.
    pub(crate) fn next(&mut self, flow: u8, size: u8, change: Change) -> Received {
        let flow = self.0.entry(flow).or_insert_with_key(|&number| Flow::new(number));
        flow.next(SIZES_BYTES[usize::from(size) % SIZES_BYTES.len()], change)
    }
}

struct Flow {
    number: u8,
    sequence: u32,
    id: u16,
    acknowledgement: u32,
    window: u16,
    timestamp: u32,
}

impl Flow {
    /// Starts a flow with all counters close to their wrap.
    fn new(number: u8) -> Self {
        Self {
            number,
            sequence: u32::MAX - 5000,
            id: u16::MAX - 9,
            acknowledgement: u32::MAX - 50,
            window: 4000,
            timestamp: u32::MAX - 50,
        }
    }

    fn is_ipv6(&self) -> bool {
        self.number & 1 == 1
    }

    fn is_udp(&self) -> bool {
        self.number & 2 == 2
    }

    /// VLAN tags; `None` if there is no link header.
    fn tags(&self) -> Option<&'static [u16]> {
        match self.number >> 2 & 3 {
            0 => Some(&[]),
            1 => Some(&[0x8100]),
            2 => Some(&[0x88a8, 0x8100]),
            _ => None,
        }
    }

    /// True if IPv4 ids count up, and TCP has timestamps.
    fn is_rich(&self) -> bool {
        self.number & 16 == 16
    }

    /// Headers around its packets.
    fn tunnel(&self) -> Tunnel {
        match self.number >> 5 {
            1 => Tunnel::Ipip,
            2 => Tunnel::Gre6 { is_routed: self.is_rich() },
            3 => Tunnel::Vxlan { is_summed: false },
            4 => Tunnel::Vxlan { is_summed: true },
            5 => Tunnel::Pppoe,
            6 => Tunnel::IpipInIpip,
            7 if self.is_rich() => Tunnel::Geneve,
            7 => Tunnel::VxlanGpe,
            _ => Tunnel::Nothing,
        }
    }

    fn next(&mut self, payload_len: u16, change: Change) -> Received {
        let payload_len = if change == Change::Empty { 0 } else { payload_len };
        match change {
            Change::Id(step) => self.id = self.id.wrapping_add(step.into()),
            Change::Advance { acknowledgement, window, timestamp } => {
                let acknowledgement = i32::from(acknowledgement);
                self.acknowledgement = self.acknowledgement.wrapping_add_signed(acknowledgement);
                self.window = self.window.wrapping_add(window.into());
                self.timestamp = self.timestamp.wrapping_add_signed(timestamp.into());
            }
            _ => {}
        }
        let mut segment = self.segment(payload_len);
        segment.change(change);
        segment.mend();
        segment.damage(change);
        self.sequence = self.sequence.wrapping_add(payload_len.into());
        self.id = self.id.wrapping_add(self.is_rich().into());
        let mut bytes = self.tunnel().wrap(&segment.bytes, segment.network, self.id, change);
        let cut_off = match change {
            Change::Snapped { bytes: cut_off } => cut_off,
            _ => 0,
        };
        bytes.truncate(bytes.len().saturating_sub(cut_off.into()));
        let link = if self.tags().is_none() { Link::Ip } else { Link::Ethernet };
        Received { bytes, cut_off, link }
    }

    fn segment(&self, payload_len: u16) -> Segment {
        let mut bytes = self.link();
        let network = bytes.len();
        let transport_header = if self.is_udp() { self.udp(payload_len) } else { self.tcp() };
        let len = length(transport_header.len()) + payload_len;
        bytes.extend(if self.is_ipv6() { self.ipv6(len) } else { self.ipv4(len) });
        let transport = bytes.len();
        bytes.extend(transport_header);
        let payload = bytes.len();
        // No two segments have the same payload or the same sum.
        let start = self.sequence;
        bytes.extend(
            (0..u32::from(payload_len)).map(|at| start.wrapping_add(at * 7).to_le_bytes()[0]),
        );
        let (is_ipv6, is_udp) = (self.is_ipv6(), self.is_udp());
        Segment { bytes, network, transport, payload, is_ipv6, is_udp }
    }

    fn link(&self) -> Vec<u8> {
        let Some(tags) = self.tags() else { return Vec::new() };
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        for tag in tags {
            bytes.extend(tag.to_be_bytes());
            bytes.extend([0, 5]);
        }
        let ethertype = if self.is_ipv6() { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
        bytes.extend(ethertype.to_be_bytes());
        bytes
    }

    fn ipv4(&self, len: u16) -> Vec<u8> {
        let [id_high, id_low] = self.id.to_be_bytes();
        let [len_high, len_low] = (20 + len).to_be_bytes();
        let mut bytes = vec![0x45, 0, len_high, len_low, id_high, id_low, 0x40, 0, 64];
        bytes.extend([self.protocol(), 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes
    }

    fn ipv6(&self, len: u16) -> Vec<u8> {
        let [len_high, len_low] = len.to_be_bytes();
        let mut bytes = vec![0x60, 0, 0, 0, len_high, len_low, self.protocol(), 64];
        bytes.extend([0xfd; 16]);
        bytes.extend([0xfc; 16]);
        bytes
    }

    fn protocol(&self) -> u8 {
        if self.is_udp() { UDP } else { TCP }
    }

    fn udp(&self, payload_len: u16) -> Vec<u8> {
        let mut bytes = self.ports();
        bytes.extend((8 + payload_len).to_be_bytes());
        bytes.extend([0, 0]);
        bytes
    }

    fn tcp(&self) -> Vec<u8> {
        let mut bytes = self.ports();
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledgement.to_be_bytes());
        bytes.extend([if self.is_rich() { 0x80 } else { 0x50 }, ACK]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0; 4]);
        if self.is_rich() {
            bytes.extend([1, 1, 8, 10]);
            bytes.extend(self.timestamp.to_be_bytes());
            bytes.extend([0, 0, 0, 9]);
        }
        bytes
    }

    fn ports(&self) -> Vec<u8> {
        vec![4, self.number, 0, 80]
    }
}

/// Frame under construction, with the offsets of its parts.
struct Segment {
    bytes: Vec<u8>,
    network: usize,
    transport: usize,
    payload: usize,
    is_ipv6: bool,
    is_udp: bool,
}

impl Segment {
    /// Changes bytes that checksums cover, before these are computed.
    fn change(&mut self, change: Change) {
        let (network, transport) = (self.network, self.transport);
        match change {
            Change::Flags(flags) if !self.is_udp => self.bytes[transport + 13] = flags,
            Change::Sequence(ahead) if !self.is_udp => {
                let field: &mut [u8; 4] = field(&mut self.bytes, transport + 4);
                let sequence = u32::from_be_bytes(*field);
                *field = sequence.wrapping_add_signed(ahead.into()).to_be_bytes();
            }
            Change::Hops(hops) => self.bytes[network + if self.is_ipv6 { 7 } else { 8 }] = hops,
            Change::Fragment(bits) if !self.is_ipv6 => self.bytes[network + 6] ^= bits,
            Change::Header { at, bits } => {
                let at = usize::from(at) % self.payload;
                self.bytes[at] ^= bits;
            }
            _ => {}
        }
    }

    fn mend(&mut self) {
        if !self.is_ipv6 {
            *field(&mut self.bytes, self.network + 10) = [0; 2];
            let checksum = !Sum::of(&self.bytes[self.network..self.transport]).fold();
            *field(&mut self.bytes, self.network + 10) = checksum.to_be_bytes();
        }
        let at = self.checksum();
        *field(&mut self.bytes, at) = [0; 2];
        let addresses = self.network + if self.is_ipv6 { 8 } else { 12 }..self.transport;
        let protocol = if self.is_udp { UDP } else { TCP };
        let sum = Sum::of(&self.bytes[addresses])
            .plus_word(protocol.into())
            .plus_len(self.bytes.len() - self.transport)
            .plus(Sum::of(&self.bytes[self.transport..]));
        let checksum = match !sum.fold() {
            0 if self.is_udp => u16::MAX,
            checksum => checksum,
        };
        *field(&mut self.bytes, at) = checksum.to_be_bytes();
    }

    /// Changes the frame after its checksums are computed.
    fn damage(&mut self, change: Change) {
        match change {
            Change::OddChecksum { ones } => {
                let at = self.checksum();
                let checksum = u16::from_be_bytes(*field(&mut self.bytes, at));
                if let Some(word) = self.bytes[self.payload..].first_chunk_mut() {
                    let (sum, carry) = u16::from_be_bytes(*word).overflowing_add(checksum);
                    *word = (sum + u16::from(carry)).to_be_bytes();
                }
                *field(&mut self.bytes, at) = if ones { [0xff; 2] } else { [0; 2] };
            }
            Change::Padded { bytes, with } => {
                self.bytes.extend(std::iter::repeat_n(with, bytes.into()));
            }
            Change::Damaged { at, bits } => {
                let at = usize::from(at) % self.bytes.len();
                self.bytes[at] ^= bits;
            }
            Change::CutShort { bytes } => {
                self.bytes.truncate(self.bytes.len().saturating_sub(bytes.into()));
            }
            _ => {}
        }
    }

    fn checksum(&self) -> usize {
        self.transport + if self.is_udp { 6 } else { 16 }
    }
}

fn field<const N: usize>(bytes: &mut [u8], at: usize) -> &mut [u8; N] {
    bytes[at..].first_chunk_mut().expect("a header is whole while it is made")
}

fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).expect("shorter than an IP packet can be")
}
