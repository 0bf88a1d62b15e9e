//! Any frames through the network layer: every delivery is a whole, valid datagram for this host,
//! every answer is well-formed, memory stays within its limits, and every frame is accounted for
//! (promises 2, 3 and 5).
//!
//! Input: a byte whose lowest bit is set if frames have no Ethernet header, the next one if the
//! host is shared with another stack, and the third one if it has TCP; then frames, each behind a byte of options (see below) and
//! its length (u16, little-endian).
#![no_main]

use std::net::IpAddr;
use std::sync::Arc;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{self, Checksum, Headers, Link, Transport, Verify, parse, parse_into};
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict, Prefix,
    TcpPathError,
};
use forebay_stack::tcp::Flow;
use libfuzzer_sys::fuzz_target;

/// Few chunks, the largest of which holds a datagram of 64 KiB.
const CHUNKS: [ChunkClass; 3] = [
    ChunkClass { chunk_bytes: 512, chunks: 128 },
    ChunkClass { chunk_bytes: 4096, chunks: 16 },
    ChunkClass { chunk_bytes: 1 << 17, chunks: 1 },
];

/// Memory limit for fragments, so small that they evict each other.
const FRAGMENTS_BYTES: u32 = 24 << 10;

const MTU: u32 = 1500;

/// Bits of the first byte.
const HAS_NO_LINK: u8 = 1;
const IS_SHARED_HOST: u8 = 2;
const HAS_TCP: u8 = 4;

/// Bits of a frame's byte: correct its checksums, use a port without a socket, advance the time
/// before it.
const FIX_IP: u8 = 1;
const FIX_TRANSPORT: u8 = 2;
const NO_SOCKET: u8 = 4;
const LATER: [(u8, u64); 2] = [(8, 1_000_000), (16, 20_000_000_000)];

fuzz_target!(|input: &[u8]| {
    let Some((&[kind], mut rest)) = input.split_first_chunk() else { return };
    let mut rig = Rig::new(kind);
    while let Some((&[kind, low, high], behind)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([low, high])).min(behind.len());
        let (frame, behind) = behind.split_at(len);
        rig.receive(kind, frame);
        rest = behind;
    }
    rig.end();
});

struct Rig {
    network: NetworkLayer,
    counters: Arc<NetworkCounters>,
    identity: Identity,
    link: Link,
    has_tcp: bool,
    pool: Pool,
    now_ns: u64,
}

impl Rig {
    fn new(kind: u8) -> Self {
        let shares = [CHUNKS.to_vec()];
        let pools = carve(Region::allocate(region_bytes(&shares)), &shares).expect("large enough");
        let counters = Arc::new(NetworkCounters::default());
        let prefix = |address: [u16; 8], bits| Prefix { address: IpAddr::from(address), bits };
        let own_v4 = Prefix { address: IpAddr::from([10, 9, 0, 1]), bits: 24 };
        let (has_no_link, has_tcp) = (kind & HAS_NO_LINK > 0, kind & HAS_TCP > 0);
        let mut network = NetworkLayer::new(config(), Arc::clone(&counters));
        if has_tcp {
            network.take_tcp();
        }
        Self {
            network,
            counters,
            identity: Identity {
                mac: (!has_no_link).then_some([2, 0, 0, 0, 0, 9]),
                addresses: vec![own_v4, prefix([0xfd00, 0, 0, 0, 0, 0, 0, 1], 64)],
                elsewhere: [IpAddr::from([192, 0, 2, 53])].into(),
                groups: vec![IpAddr::from([239, 1, 2, 3])],
                mtu: MTU,
                is_whole_host: kind & IS_SHARED_HOST == 0,
            },
            link: if has_no_link { Link::Ip } else { Link::Ethernet },
            has_tcp,
            pool: pools.into_iter().next().expect("one share"),
            now_ns: 1,
        }
    }

    fn receive(&mut self, kind: u8, bytes: &[u8]) {
        let ways = LATER.into_iter().filter(|(bit, _)| kind & bit > 0);
        self.now_ns += ways.map(|(_, later_ns)| later_ns).sum::<u64>();
        let Ok(len_bytes) = u32::try_from(bytes.len()) else { return };
        // Waiting fragments may hold all frames of a size: others are then refused, as on a device.
        let Some(frame) = self.pool.allocate(len_bytes) else { return };
        let mut packet = Packet::received(frame, Arrival(7), len_bytes, self.link);
        packet.frame.copy_from(bytes);
        fix(kind, packet.frame.data_mut(), self.link);
        let Packet { frame, headers, .. } = &mut packet;
        parse_into(headers, frame.data(), len_bytes, None, Verify::Checksums);
        let (away, dropped) = (self.pool.in_use(), self.counters.drops.total());
        let Self { network, identity, now_ns, pool, .. } = self;
        match network.receive(packet, identity, *now_ns, pool) {
            NetworkVerdict::Datagram(packet) if kind & NO_SOCKET > 0 => {
                self.is_good(&packet, Transport::Udp);
                let Self { network, identity, now_ns, pool, .. } = self;
                match network.unreachable(packet, identity, *now_ns, pool) {
                    NetworkVerdict::Answer(packet) => self.is_answer(packet),
                    NetworkVerdict::Dropped(packet, _) => self.pool.put(packet.frame),
                    other => panic!("an unreachable port made {other:?}"),
                }
            }
            NetworkVerdict::Datagram(packet) => {
                self.is_good(&packet, Transport::Udp);
                self.pool.put(packet.frame);
            }
            NetworkVerdict::Answer(packet) => self.is_answer(packet),
            NetworkVerdict::Heard(packet, heard) if heard.is_answer => self.is_answer(packet),
            NetworkVerdict::Heard(packet, _) => self.pool.put(packet.frame),
            NetworkVerdict::Taken(packet)
            | NetworkVerdict::Refused(packet, _)
            | NetworkVerdict::TooBig(packet, _) => self.pool.put(packet.frame),
            NetworkVerdict::Segment(packet) => {
                assert!(self.has_tcp, "a layer that takes no TCP passed it on");
                self.is_good(&packet, Transport::Tcp);
                self.pool.put(packet.frame);
            }
            NetworkVerdict::PathError(packet, about) => {
                assert!(self.has_tcp, "a layer that takes no TCP passed it on");
                is_quoted(&packet, &about);
                self.pool.put(packet.frame);
            }
            NetworkVerdict::Kept => {
                assert!(self.pool.in_use() <= away, "one waits, and others may go")
            }
            NetworkVerdict::Dropped(packet, _) => {
                assert!(self.counters.drops.total() > dropped, "what is dropped is counted");
                self.pool.put(packet.frame);
            }
        }
        let held = self.network.fragments().held_bytes();
        assert!(held.into_iter().all(|bytes| bytes <= FRAGMENTS_BYTES), "{held:?} bytes wait");
    }

    fn is_good(&self, packet: &Packet, expected: Transport) {
        let Headers { transport, fragment, flaw, l4_checksum, .. } = packet.headers;
        assert_eq!((transport, flaw), (expected, None));
        assert!(fragment.is_whole() && l4_checksum != Checksum::Bad);
        let view = packet.view();
        let [source, destination] = [view.source(), view.destination()];
        let destination = destination.expect("an IP packet");
        // From 0.0.0.0 to 0.0.0.0 is a broadcast to the kernel (`ip_route_input_slow`).
        let is_nobodys = destination.is_unspecified() && source == Some(destination);
        assert!(self.identity.is_for_us(destination) || is_nobodys, "{destination} is not ours");
        assert!(view.source().is_some() && view.ports().is_some());
        let payload_offset = usize::from(packet.headers.payload_offset);
        let bytes: usize = packet.fragments().map(<[u8]>::len).sum();
        assert!(bytes >= payload_offset + usize::from(packet.headers.payload_len));
        assert!(packet.is_chain() || view.payload().len() == packet.headers.payload_len.into());
    }

    fn is_answer(&mut self, packet: Packet) {
        assert!(self.identity.is_whole_host || packet.headers.transport == Transport::Icmp);
        let Packet { frame, headers, .. } = packet;
        let again = parse(frame.data(), frame.len_bytes(), headers.link, Verify::Checksums);
        assert_eq!((again.flaw, again.fragment.is_whole()), (None, true));
        assert_ne!(again.ip_checksum, Checksum::Bad);
        self.pool.put(frame);
    }

    fn end(mut self) {
        let mut dropped: Vec<(Packet, NetworkDrop)> = Vec::new();
        // One call expires a bounded number of fragments.
        while self.network.fragments().frames() > 0 {
            self.network.expire(u64::MAX, &mut dropped);
        }
        dropped.drain(..).for_each(|(packet, _)| self.pool.put(packet.frame));
        assert_eq!(self.pool.in_use(), 0, "all frames are home");
    }
}

/// Ports and number of the segment stand one behind the other in the message.
fn is_quoted(packet: &Packet, about: &TcpPathError) {
    let Flow { ours, theirs } = about.flow;
    assert_eq!(ours.is_ipv4(), theirs.is_ipv4());
    let ports = [ours.port().to_be_bytes(), theirs.port().to_be_bytes()].concat();
    let header = [ports, about.seq.0.to_be_bytes().to_vec()].concat();
    let bytes: Vec<u8> = packet.fragments().flatten().copied().collect();
    assert!(bytes.windows(header.len()).any(|quoted| quoted == header), "{about:?}");
}

fn config() -> NetworkConfig {
    let mut config = NetworkConfig::default();
    config.fragments.ipv4.high_thresh = FRAGMENTS_BYTES;
    config.fragments.ipv6.high_thresh = FRAGMENTS_BYTES;
    config
}

/// Corrects checksums, if the headers have any.
fn fix(kind: u8, bytes: &mut [u8], link: Link) {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let headers = parse(bytes, len, link, Verify::Nothing);
    let at = usize::from(headers.network_offset);
    if kind & FIX_IP > 0 && headers.network == parse::Network::Ipv4 {
        let header_len = bytes.get(at).map_or(0, |first| usize::from(first & 15) * 4);
        put_sum(bytes.get_mut(at..at + header_len), 10, Sum::default());
    }
    let sum_at = match (headers.protocol, headers.transport) {
        (_, Transport::Udp) => 6,
        (_, Transport::Tcp) => 16,
        (1 | 58, Transport::Icmp) => 2,
        _ => return,
    };
    if kind & FIX_TRANSPORT > 0 {
        let start = usize::from(headers.transport_offset);
        let end = usize::from(headers.payload_offset) + usize::from(headers.payload_len);
        let view = parse::View::new(bytes, &headers);
        let addresses = view.address_bytes().filter(|_| headers.protocol != 1).unwrap_or_default();
        let pseudo = match addresses {
            [] => Sum::default(),
            _ => Sum::of(addresses).plus_word(headers.protocol.into()).plus_len(end - start),
        };
        put_sum(bytes.get_mut(start..end), sum_at, pseudo);
    }
}

fn put_sum(bytes: Option<&mut [u8]>, at: usize, pseudo: Sum) {
    let Some(bytes) = bytes else { return };
    let Some(field) = bytes.get_mut(at..at + 2) else { return };
    field.fill(0);
    let sum = !pseudo.plus(Sum::of(bytes)).fold();
    if let Some(field) = bytes.get_mut(at..at + 2) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
}
