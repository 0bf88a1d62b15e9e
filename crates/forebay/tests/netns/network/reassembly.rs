//! Hostile fragments: the same pieces are given to the kernel's reassembly and to ours. Raw sockets
//! of an unassigned protocol receive every datagram, whatever its content.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU32;
use std::ops::Range;

use etherparse::{IpFragOffset, IpNumber, Ipv4Header};
use forebay_buf::Pool;
use forebay_device::tun::{TunDevice, TunKind, TunSink};
use forebay_rx::parse::{Verify, parse_into};
use forebay_rx::sink::Sink;
use forebay_stack::network::reassembly::{
    Fragments, FragmentsConfig, GivenUp, Reassembly, ReassemblyLimits,
};
use forebay_sys::random::Random;
use forebay_testkit::namespaces::{await_local_route, command, ip};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with};

use crate::network::frames::MAC;
use crate::network::{Test, local_addresses};

pub(crate) const TESTS: &[Test] = &[
    ("fragments_reassemble_as_in_kernel", of_one_datagram_at_a_time),
    ("many_fragmented_datagrams_match_kernel", of_many_datagrams),
];

/// The interface, in the namespace of the test's thread.
const NAME: &str = "net-fragments";
const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 1);
const PEER_V4: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const PEER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2);

/// "For experimentation and testing" (RFC 3692).
const PROTOCOL: u8 = 253;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

const ETHERNET_BYTES: usize = 14;
const IPV6_BYTES: usize = 40;

const DATAGRAMS: u16 = 1500;

/// Memory limit large enough for no eviction: eviction differs from the kernel's.
const PLENTY: u32 = 64 << 20;

fn of_one_datagram_at_a_time() {
    compare(1);
}

/// Interleaves so many datagrams that the kernel's `ipfrag_max_dist` is exceeded.
fn of_many_datagrams() {
    compare(300);
}

/// Compares the outcome of each frame, with the fragments of `at_once` datagrams interleaved.
fn compare(at_once: usize) {
    let seed = std::env::var("FOREBAY_SEED").map_or(6, |seed| seed.parse().unwrap());
    let mut random = Random::new(seed);
    let (mut kernel, mut ours) = (Kernel::new(), Ours::new());
    let mut datagrams: Vec<_> = (0..DATAGRAMS).map(|id| pieces(&mut random, id)).collect();
    let (mut joined, mut frames) = (0, 0);
    for together in datagrams.chunks_mut(at_once) {
        while let Some(place) = next(&mut random, together) {
            let frame = together[place].remove(0);
            let (expected, joint) = (kernel.offer(&frame), ours.offer(&frame));
            assert_eq!(
                joint,
                expected,
                "seed {seed}, frame {frames}: {}\n we, and the kernel",
                hex::encode(&frame)
            );
            frames += 1;
            joined += joint.len();
        }
    }
    eprintln!("seed {seed}: {frames} fragments, {joined} datagrams of {DATAGRAMS}");
    assert!(joined > usize::from(DATAGRAMS) / 4, "the generator makes good ones, too");
}

/// Index of a datagram that has fragments left.
fn next(random: &mut Random, datagrams: &[Vec<Vec<u8>>]) -> Option<usize> {
    let left: Vec<_> = (0..datagrams.len()).filter(|&at| !datagrams[at].is_empty()).collect();
    left.get(below(random, left.len().max(1))).copied()
}

/// A datagram in fragments, in some order, mostly with invalid fragments among them.
fn pieces(random: &mut Random, id: u16) -> Vec<Vec<u8>> {
    let (is_ipv6, units) = (chance(random, 50), between(random, 1..11));
    let total = units * 8 + pick(random, &[0, 0, 0, 1, 5]);
    let mut places: Vec<(Range<usize>, bool)> = Vec::new();
    let mut start = 0;
    while start < total {
        let end = if chance(random, 10) { total } else { start + between(random, 1..5) * 8 };
        places.push((start..end.min(total), end < total));
        start = end;
    }
    if chance(random, 80) {
        for _ in 0..below(random, 4) {
            let start = below(random, units + 1) * 8;
            places.push(match below(random, 10) {
                0..4 => places[below(random, places.len())].clone(),
                4..7 => (start..start + below(random, 40), chance(random, 70)),
                _ => (start..start + between(random, 1..4) * 8, false),
            });
        }
    }
    if chance(random, 60) {
        for at in 0..places.len() {
            let other = below(random, places.len());
            places.swap(at, other);
        }
    }
    let ecns: &[u8] =
        pick(random, &[&[0], &[0], &[2], &[2, 3], &[1, 2], &[0, 2], &[3], &[0, 1, 2, 3]]);
    let place = |(range, is_more): (Range<usize>, bool)| {
        let tos = 0xb8 | pick(random, ecns);
        let piece = Piece { id, range, is_more, tos };
        // A first fragment that is also the last is not a fragment.
        let is_fragment = piece.range.start > 0 || is_more;
        is_fragment.then(|| if is_ipv6 { piece.ipv6(random) } else { piece.ipv4(random) })
    };
    places.into_iter().filter_map(place).collect()
}

/// A fragment to be built.
struct Piece {
    id: u16,
    range: Range<usize>,
    is_more: bool,
    tos: u8,
}

impl Piece {
    /// Data of the fragment: every eight bytes identify the datagram, the position and the
    /// fragment.
    fn data(&self, random: &mut Random) -> Vec<u8> {
        let [high, low] = self.id.to_be_bytes();
        let salt = byte(random);
        let unit = |at: usize| [high, low, u8::try_from(at % 256).unwrap(), salt, 0, 0, 0, 0];
        let first = self.range.start / 8;
        let units = (first..=first + self.range.len() / 8).flat_map(unit);
        units.take(self.range.len()).collect()
    }

    fn ipv4(&self, random: &mut Random) -> Vec<u8> {
        let data = self.data(random);
        let len = u16::try_from(data.len()).unwrap();
        let [source, destination] = [PEER_V4, OWN_V4].map(|address| address.octets());
        let mut header = Ipv4Header::new(len, 64, IpNumber(PROTOCOL), source, destination).unwrap();
        header.identification = self.id;
        header.more_fragments = self.is_more;
        header.dont_fragment = chance(random, 30);
        header.fragment_offset = self.offset();
        (header.dscp, header.ecn) =
            ((self.tos >> 2).try_into().unwrap(), (self.tos & 3).try_into().unwrap());
        if chance(random, 15) {
            header.options = [1, 1, 1, 0].into();
            header.total_len += 4;
        }
        header.header_checksum = header.calc_header_checksum();
        let mut bytes = link(0x0800);
        header.write(&mut bytes).unwrap();
        bytes.extend(data);
        if chance(random, 20) {
            bytes.extend([0xee; 7]); // padding
        }
        bytes
    }

    fn ipv6(&self, random: &mut Random) -> Vec<u8> {
        // The first fragment's next header counts.
        let is_first = self.range.start == 0;
        let next = if is_first { PROTOCOL } else { pick(random, &[PROTOCOL, 250]) };
        let field = self.offset().value() << 3 | u16::from(self.is_more);
        let before: &[u8] = if chance(random, 15) { &[FRAGMENT, 0, 1, 4, 0, 0, 0, 0] } else { &[] };
        let kind = if before.is_empty() { FRAGMENT } else { DESTINATION_OPTIONS };
        let id = u32::from(self.id).to_be_bytes();
        let header = [&[next, 0], field.to_be_bytes().as_slice(), &id].concat();
        let payload = [before, &header, &self.data(random)].concat();
        let len = u16::try_from(payload.len()).unwrap().to_be_bytes();
        let [high, low] = [self.tos >> 4, self.tos << 4];
        let fixed = [0x60 | high, low, 0, 0, len[0], len[1], kind, 64];
        let addresses = [PEER_V6.octets(), OWN_V6.octets()].concat();
        [link(0x86dd).as_slice(), &fixed, &addresses, &payload].concat()
    }

    fn offset(&self) -> IpFragOffset {
        IpFragOffset::try_new(u16::try_from(self.range.start / 8).unwrap()).unwrap()
    }
}

fn link(kind: u16) -> Vec<u8> {
    [MAC.as_slice(), &[2, 0, 0, 0, 0, 2], &kind.to_be_bytes()].concat()
}

/// A TAP, and raw sockets behind it.
struct Kernel {
    sink: TunSink,
    pool: Pool,
    sockets: [OwnedFd; 2],
}

impl Kernel {
    /// Creates the TAP and sockets in the calling thread's namespace, which must be new.
    fn new() -> Self {
        let device = TunDevice::open(NAME, TunKind::Tap, 1).unwrap();
        let memory = format!("net.ipv4.ipfrag_high_thresh={PLENTY}");
        command(&format!("sysctl -qw {memory} net.ipv6.ip6frag_high_thresh={PLENTY}"));
        ip(&format!("link set {NAME} address {}", MAC.map(|byte| format!("{byte:02x}")).join(":")));
        ip(&format!("link set {NAME} addrgenmode none"));
        ip(&format!("addr add {OWN_V4}/24 dev {NAME}"));
        ip(&format!("addr add {OWN_V6}/64 dev {NAME} nodad"));
        ip(&format!("link set {NAME} up"));
        await_local_route(OWN_V6);
        let protocol = NonZeroU32::new(PROTOCOL.into()).map(Protocol::from_raw);
        let sockets = [AddressFamily::INET, AddressFamily::INET6].map(|family| {
            socket_with(family, SocketType::RAW, SocketFlags::NONBLOCK, protocol).unwrap()
        });
        Self { sink: device.sink(), pool: local_addresses::pool(), sockets }
    }

    /// Bytes of the datagrams that a frame completes: IPv4 from the header on, IPv6 without
    /// headers.
    fn offer(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let mut packets = vec![local_addresses::packet(frame, &mut self.pool)];
        self.sink.send(&mut packets).unwrap();
        packets.drain(..).for_each(|packet| self.pool.put(packet.frame));
        let mut bytes = vec![0; 1 << 16];
        let mut received = Vec::new();
        for socket in &self.sockets {
            while let Ok((_, len)) = recv(socket, bytes.as_mut_slice(), RecvFlags::empty()) {
                received.push(bytes[..len].to_vec());
            }
        }
        received
    }
}

/// The reassembly under test.
struct Ours {
    fragments: Fragments,
    pool: Pool,
}

impl Ours {
    fn new() -> Self {
        let FragmentsConfig { ipv4, ipv6, seed } = FragmentsConfig::default();
        let plenty = |limits| ReassemblyLimits { high_thresh: PLENTY, ..limits };
        let config = FragmentsConfig { ipv4: plenty(ipv4), ipv6: plenty(ipv6), seed };
        Self { fragments: Fragments::new(config), pool: local_addresses::pool() }
    }

    fn offer(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let mut packet = local_addresses::packet(frame, &mut self.pool);
        let wire_len = packet.wire_len;
        parse_into(&mut packet.headers, packet.frame.data(), wire_len, None, Verify::Checksums);
        let mut given_up = GivenUp::default();
        let added = self.fragments.add(packet, 0, &mut self.pool, &mut given_up);
        given_up.packets.into_iter().for_each(|(packet, _)| self.pool.put(packet.frame));
        let packet = match added {
            Reassembly::Waits => return Vec::new(),
            Reassembly::Complete(packet) | Reassembly::Dropped(packet, _) => packet,
        };
        let is_whole = packet.headers.fragment.is_whole();
        let bytes = &packet.frame.data()[ETHERNET_BYTES..];
        let out = is_whole.then(|| match bytes {
            [0x60..=0x6f, ..] if bytes[6] == DESTINATION_OPTIONS => {
                bytes[IPV6_BYTES + 8..].to_vec()
            }
            [0x60..=0x6f, ..] => bytes[IPV6_BYTES..].to_vec(),
            _ => bytes.to_vec(),
        });
        self.pool.put(packet.frame);
        out.into_iter().collect()
    }
}

fn chance(random: &mut Random, percent: u64) -> bool {
    random.below(100) < percent
}

fn byte(random: &mut Random) -> u8 {
    u8::try_from(random.below(256)).unwrap()
}

fn below(random: &mut Random, bound: usize) -> usize {
    usize::try_from(random.below(bound as u64)).unwrap()
}

fn between(random: &mut Random, range: Range<usize>) -> usize {
    range.start + below(random, range.len())
}

fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[below(random, of.len())]
}
