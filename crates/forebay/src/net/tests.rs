//! From frames to the data that a reader gets: fragmented, merged, and GSO datagrams, with every
//! policy and every call, and with large and small packet memory.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::gso::{GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr};
use forebay_rx::coalesce::{CoalesceConfig, Coalescer};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::{Arrival, Packet, Shape};
use forebay_rx::parse::{Link, Verify, parse_into};
use forebay_rx::{CpuId, Handler, RxQueue};
use forebay_stack::Stack;
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, Prefix,
};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::copy_cache::CopyCache;
use forebay_stack::socket::counters::CounterTable;
use forebay_stack::socket::queue::{Awake, SocketQueueConfig, open};
use forebay_stack::socket::reader::SocketReader;
use forebay_stack::socket::reclaim::{BufferReclaimer, ReclaimPolicy, SharedPolicy};
use forebay_stack::socket::table::{Binding, Membership};
use forebay_testkit::host::{FixedHost, SentPackets};
use proptest::prelude::*;

use super::datagram::Datagram;

const OWN_V4: [u8; 4] = [10, 9, 0, 1];
const OWN_V6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const GROUP: [u8; 4] = [239, 1, 2, 3];
const SENDER_V4: [u8; 4] = [10, 9, 0, 2];
const SENDER_V6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
const PORT: u16 = 9000;
const SOCKETS: u16 = 2;
/// Large enough that no fragments are evicted: eviction is not tested here.
const FRAGMENTS_BYTES: u32 = 1 << 30;

/// Socket that datagrams are sent to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum To {
    V4,
    V6,
    /// A multicast group that every socket has joined.
    Group,
}

/// Form in which the datagrams arrive.
#[derive(Clone, Debug)]
enum Way {
    /// Fragments of at most `at_most` bytes, in any order, some of them twice.
    Fragments { len: usize, at_most: usize, order: u64 },
    /// `count` datagrams of `len` bytes, merged here.
    Merged { len: usize, count: usize },
    /// `count` datagrams of `len` bytes in one GSO frame.
    Gso { len: usize, count: usize },
}

/// Call used to read a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Receive,
    /// Receive into a buffer this much too short.
    Truncate(usize),
    PeekFirst,
    Batch,
    /// Answer each datagram in place.
    Reply,
}

#[derive(Clone, Debug)]
struct Turn {
    to: To,
    way: Way,
    policy: ReclaimPolicy,
    /// Call used by each socket to read before the next turn, if any.
    calls: [Option<Call>; SOCKETS as usize],
}

fn way() -> impl Strategy<Value = Way> {
    let small = (4usize..3000, 1usize..40);
    let large = (3000usize..65_000, 30usize..1000);
    let fragments = prop_oneof![4 => small, 1 => large, 1 => Just((65_507, 1))];
    let fragments = (fragments, any::<u64>()).prop_map(|((len, eighths), order)| Way::Fragments {
        len,
        at_most: eighths * 8,
        order,
    });
    let several = || (4usize..600, 2usize..20);
    prop_oneof![
        3 => fragments,
        1 => several().prop_map(|(len, count)| Way::Merged { len, count }),
        1 => several().prop_map(|(len, count)| Way::Gso { len, count }),
    ]
}

fn call() -> impl Strategy<Value = Option<Call>> {
    proptest::option::of(prop_oneof![
        Just(Call::Receive),
        (1usize..5000).prop_map(Call::Truncate),
        Just(Call::PeekFirst),
        Just(Call::Batch),
        Just(Call::Reply),
    ])
}

fn turn() -> impl Strategy<Value = Turn> {
    let to = prop_oneof![Just(To::V4), Just(To::V6), Just(To::Group)];
    let policy = prop::sample::select(ReclaimPolicy::ALL.to_vec());
    (to, way(), policy, [call(), call()]).prop_map(|(to, way, policy, calls)| Turn {
        to,
        way,
        policy,
        calls,
    })
}

/// A CPU's stack, two sockets, and the datagrams expected from them.
struct Rig {
    pool: Pool,
    stack: Stack,
    counters: Arc<NetworkCounters>,
    policy: Arc<SharedPolicy>,
    /// Packets that the stack sent.
    answers: SentPackets,
    readers: Vec<SocketReader>,
    gro: [bool; SOCKETS as usize],
    /// Length of each datagram sent, by the number that it begins with.
    sent: HashMap<u32, usize>,
    next: u32,
    /// Number of datagrams that each socket should get, and that it got or dropped.
    expected: [u64; SOCKETS as usize],
    got: [u64; SOCKETS as usize],
}

impl Rig {
    fn new(largest_chunk_bytes: u32, gro: [bool; SOCKETS as usize], rcvbuf: u32) -> Self {
        let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
        let main = match largest_chunk_bytes {
            large @ 4096.. => vec![class(512, 20_000), class(2048, 600), class(large, 40)],
            _ => vec![class(512, 20_000), class(2048, 600)],
        };
        let shares = [main, vec![class(512, 64)]];
        let mut pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
        let (small, pool) = (pools.pop().unwrap(), pools.pop().unwrap());
        let cache = CopyCache::new(Region::allocate(CopyCache::region_bytes(8)), 0);
        let relief = BufferReclaimer::new(Some(cache), Some(small), Arc::default());
        let counters = Arc::new(NetworkCounters::default());
        let mut config = NetworkConfig::default();
        config.fragments.ipv4.high_thresh = FRAGMENTS_BYTES;
        config.fragments.ipv4.max_dist = 0;
        config.fragments.ipv6.high_thresh = FRAGMENTS_BYTES;
        let network = NetworkLayer::new(config, Arc::clone(&counters));
        let table = Arc::new(CounterTable::new(1, SOCKETS.into()));
        let (mut bindings, mut readers, mut queues) = (Vec::new(), Vec::new(), Vec::new());
        for id in 0..SOCKETS {
            // The second socket receives the group only.
            let ip = if id == 0 { IpAddr::from([0; 16]) } else { IpAddr::from(GROUP) };
            let groups = vec![Membership { group: IpAddr::from(GROUP), device: 0 }];
            let id = SocketId(id.into());
            bindings.push(Binding { groups, ..Binding::new(id, (ip, PORT).into()) });
            let config = SocketQueueConfig { id, rcvbuf, slots: 64 };
            let (queue, consumer) = open(config, &table, Arc::new(Awake));
            queues.push(queue);
            readers.push(SocketReader::new(consumer, pool.return_handle()));
        }
        for (reader, gro) in readers.iter_mut().zip(gro) {
            reader.set_takes_merged(gro);
        }
        let prefix = |address, bits| Prefix { address, bits };
        let identity = Identity {
            addresses: vec![prefix(OWN_V4.into(), 24), prefix(OWN_V6.into(), 64)],
            groups: vec![GROUP.into()],
            mtu: 1500,
            ..Identity::default()
        };
        let host = FixedHost::new(identity, bindings, queues);
        let (policy, answers) = (Arc::clone(&host.policy), host.sent.clone());
        let stack = Stack::new(CpuId(0), 0, network, relief, Box::new(host));
        let (sent, next, expected, got) = (HashMap::new(), 0, [0; 2], [0; 2]);
        Self { pool, stack, counters, policy, answers, readers, gro, sent, next, expected, got }
    }

    fn turn(&mut self, turn: &Turn) {
        let mut packets = self.packets(turn);
        self.policy.store(turn.policy);
        let mut batch = Batch {
            cpu: CpuId(0),
            rx_queue: RxQueue(0),
            packets: &mut packets,
            notes: &[],
            pool: &mut self.pool,
        };
        self.stack.handle(&mut batch);
        assert!(self.answers.take().is_empty());
        for (socket, call) in (0..).zip(turn.calls) {
            if let Some(call) = call {
                self.read(socket, call, turn.policy);
            }
        }
    }

    /// Packets of a turn, as an intake would hand them over.
    fn packets(&mut self, turn: &Turn) -> Vec<Packet> {
        let sockets = if turn.to == To::Group { 2 } else { 1 };
        let (len, count) = match turn.way {
            Way::Fragments { len, .. } => (len, 1),
            Way::Merged { len, count } | Way::Gso { len, count } => (len, count),
        };
        (0..sockets).for_each(|socket| self.expected[socket] += count as u64);
        let payloads: Vec<_> = (0..count).map(|_| self.payload(len)).collect();
        match turn.way {
            Way::Fragments { at_most, order, .. } => {
                let frames = fragments(turn.to, &payloads[0], at_most, self.next, order);
                self.all_received(&frames).unwrap_or_else(|| self.expect_less(sockets, count))
            }
            Way::Merged { .. } => {
                let frames: Vec<_> =
                    payloads.iter().map(|payload| whole(turn.to, payload)).collect();
                let Some(mut packets) = self.all_received(&frames) else {
                    return self.expect_less(sockets, count);
                };
                let mut coalescer = Coalescer::new(CoalesceConfig::default(), Arc::default());
                let mut out = Vec::new();
                coalescer.coalesce(&mut packets, 0, &mut out);
                coalescer.end_poll(PollStatus::Last, 0, &mut out);
                assert!(out.len() == 1 && out[0].is_merged());
                out
            }
            Way::Gso { len, .. } => {
                let bytes = whole(turn.to, &payloads.concat());
                let Some(mut packet) = self.received(&bytes, Link::Ethernet) else {
                    return self.expect_less(sockets, count);
                };
                let udp_at = u16::try_from(bytes.len() - payloads.concat().len() - 8).unwrap();
                let told = VirtioNetHdr {
                    flags: NEEDS_CSUM,
                    gso_type: GSO_UDP_L4,
                    hdr_len: udp_at + 8,
                    gso_size: u16::try_from(len).unwrap(),
                    csum_start: udp_at,
                    csum_offset: 6,
                };
                told.carry_into(&mut packet).unwrap();
                assert!(packet.is_gso());
                vec![parsed(packet)]
            }
        }
    }

    /// Payload whose bytes identify the datagram, and their position in it.
    fn payload(&mut self, len: usize) -> Vec<u8> {
        self.sent.insert(self.next, len);
        self.next += 1;
        payload(self.next - 1, len)
    }

    fn received(&mut self, bytes: &[u8], link: Link) -> Option<Packet> {
        let len = u32::try_from(bytes.len()).unwrap();
        let mut frame = self.pool.allocate(len)?;
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(self.next), len, link);
        packet.hash = FlowHash(7);
        Some(packet)
    }

    /// Allocates packets for all frames, or for none if the pool runs out.
    fn all_received(&mut self, frames: &[Vec<u8>]) -> Option<Vec<Packet>> {
        let mut packets = Vec::new();
        for bytes in frames {
            match self.received(bytes, Link::Ethernet) {
                Some(packet) => packets.push(parsed(packet)),
                None => {
                    packets.into_iter().for_each(|packet| self.pool.put(packet.frame));
                    return None;
                }
            }
        }
        Some(packets)
    }

    /// No frames are free for these datagrams, so a device would not deliver them.
    fn expect_less(&mut self, sockets: usize, count: usize) -> Vec<Packet> {
        (0..sockets).for_each(|socket| self.expected[socket] -= count as u64);
        Vec::new()
    }

    /// Reads everything available.
    fn read(&mut self, socket: usize, call: Call, policy: ReclaimPolicy) {
        let mut room = vec![0; 1 << 20];
        loop {
            let reader = &mut self.readers[socket];
            match call {
                Call::Batch | Call::Reply => {
                    let mut batch = Vec::new();
                    if reader.take(7, |packet| batch.push(Datagram::of(packet, 0))) == 0 {
                        return;
                    }
                    for mut datagram in batch {
                        self.got[socket] += self.judge_datagram(&datagram, self.gro[socket]);
                        if call == Call::Reply {
                            reply(&mut datagram);
                        }
                        let Datagram { packet, freed_bytes, .. } = datagram;
                        self.readers[socket].let_go(freed_bytes);
                        self.readers[socket].give_back_all([packet].into_iter(), policy);
                    }
                }
                Call::Receive | Call::Truncate(_) | Call::PeekFirst => {
                    if call == Call::PeekFirst {
                        let Some(packet) = reader.peek() else { return };
                        let len = packet.copy_payload(&mut room);
                        self.judge(&room[..len], self.gro[socket]);
                    }
                    let reader = &mut self.readers[socket];
                    let Some(packet) = reader.next() else { return };
                    let whole = packet.copy_payload(&mut room);
                    let datagrams = self.judge(&room[..whole], self.gro[socket]);
                    self.got[socket] += datagrams;
                    if let Call::Truncate(less) = call {
                        let mut short = vec![0; whole.saturating_sub(less)];
                        assert_eq!(packet.copy_payload(&mut short), short.len());
                        assert_eq!(short, room[..short.len()]);
                    }
                    self.readers[socket].give_back(packet, policy);
                }
            }
        }
    }

    /// Checks one element of a batch. Returns the number of datagrams in it.
    fn judge_datagram(&self, datagram: &Datagram, is_gro: bool) -> u64 {
        let segments: Vec<_> = datagram.segments().collect();
        assert_eq!(segments[0], datagram.payload());
        assert!(datagram.gso_size() == 0 || segments[0].len() == usize::from(datagram.gso_size()));
        assert!(is_gro || segments.len() == 1);
        segments.iter().map(|segment| self.judge(segment, false)).sum()
    }

    /// Checks the bytes of one datagram, or of several. Returns their number.
    fn judge(&self, bytes: &[u8], may_be_several: bool) -> u64 {
        let (mut rest, mut count) = (bytes, 0);
        while let Some((number, _)) = rest.split_first_chunk() {
            let number = u32::from_ne_bytes(*number);
            let (datagram, behind) = rest.split_at(self.sent[&number]);
            assert!(datagram == payload(number, datagram.len()), "datagram {number}");
            (rest, count) = (behind, count + 1);
        }
        assert!(rest.is_empty() && (may_be_several || count == 1));
        count
    }

    fn end(mut self, policy: ReclaimPolicy) {
        for socket in 0..self.readers.len() {
            self.read(socket, Call::Receive, policy);
            let account = self.readers[socket].consumer.account();
            assert_eq!(account.rmem(), 0, "nothing is charged any more");
            assert_eq!(self.got[socket], account.queued());
        }
        let lost = NetworkDrop::ALL.map(|reason| (reason, self.counters.drops.get(reason)));
        let lost: HashMap<_, _> = lost.into_iter().collect();
        let total: u64 = self.expected.iter().sum();
        let refused = lost[&NetworkDrop::SocketRcvbuff] + lost[&NetworkDrop::Nomem];
        assert!(self.got.iter().sum::<u64>() + refused <= total);
        let is_all = self.got.iter().sum::<u64>() == total;
        assert!(is_all || refused > 0, "{:?} of {:?}, {lost:?}", self.got, self.expected);
        assert_eq!(self.stack.network().fragments().frames(), 0);
        let Self { mut stack, mut pool, readers, .. } = self;
        drop(readers);
        assert_eq!((stack.frames_away(), pool.in_use()), (0, 0), "all frames are home");
    }
}

fn reply(datagram: &mut Datagram) {
    let answer = [9; 20];
    if datagram.reply(&answer).is_ok() {
        assert_eq!((datagram.payload(), datagram.packet.shape()), (&answer[..], Shape::Single));
        assert_eq!(datagram.segments().collect::<Vec<_>>(), [answer]);
    }
}

fn payload(number: u32, len: usize) -> Vec<u8> {
    let bytes = (4..len).map(|at| u8::try_from((at * 7 + number as usize * 13) % 251).unwrap());
    number.to_ne_bytes().into_iter().chain(bytes).collect()
}

fn parsed(mut packet: Packet) -> Packet {
    let Packet { headers, frame, wire_len, device_sum, .. } = &mut packet;
    parse_into(headers, frame.data(), *wire_len, *device_sum, Verify::Checksums);
    packet
}

/// A datagram of any length, in one frame.
fn whole(to: To, payload: &[u8]) -> Vec<u8> {
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]);
    let builder = match to {
        To::V4 => builder.ipv4(SENDER_V4, OWN_V4, 64),
        To::V6 => builder.ipv6(SENDER_V6, OWN_V6, 64),
        To::Group => builder.ipv4(SENDER_V4, GROUP, 64),
    };
    let mut bytes = Vec::new();
    builder.udp(1000, PORT).write(&mut bytes, payload).unwrap();
    bytes
}

/// A datagram in frames of at most `at_most` bytes of IP payload, shuffled, the first two twice.
fn fragments(to: To, payload: &[u8], at_most: usize, id: u32, order: u64) -> Vec<Vec<u8>> {
    let bytes = whole(to, payload);
    let data_at = if to == To::V6 { 54 } else { 34 };
    let (headers, data) = bytes.split_at(data_at);
    // An IPv6 packet with 65,507 bytes of UDP payload has no room for a longer fragment.
    let parts: Vec<_> = data.chunks(at_most.min(1464)).collect();
    let mut frames = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        let is_last = number + 1 == parts.len();
        let offset = u16::try_from(number * at_most.min(1464)).unwrap();
        frames.push(match to {
            To::V6 => fragment_v6(headers, part, offset, is_last, id),
            To::V4 | To::Group => fragment_v4(headers, part, offset, is_last, id),
        });
    }
    if frames.len() > 2 {
        frames.extend(frames[..2].to_vec());
    }
    // The last fragment must arrive last: a duplicate behind it would begin another datagram.
    let last = frames.len().min(parts.len());
    let mut seed = order;
    let mut below = |bound: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % bound
    };
    let ends = frames.remove(last - 1);
    for left in (2..=frames.len()).rev() {
        frames.swap(left - 1, below(left));
    }
    frames.push(ends);
    frames
}

fn fragment_v4(headers: &[u8], part: &[u8], offset: u16, is_last: bool, id: u32) -> Vec<u8> {
    let mut header = etherparse::Ipv4Header::from_slice(&headers[14..]).unwrap().0;
    header.set_payload_len(part.len()).unwrap();
    header.identification = u16::try_from(id % (1 << 16)).unwrap();
    header.dont_fragment = false;
    header.more_fragments = !is_last;
    header.fragment_offset = etherparse::IpFragOffset::try_new(offset / 8).unwrap();
    header.header_checksum = header.calc_header_checksum();
    [&headers[..14], &header.to_bytes(), part].concat()
}

fn fragment_v6(headers: &[u8], part: &[u8], offset: u16, is_last: bool, id: u32) -> Vec<u8> {
    let mut frame = headers.to_vec();
    let len = u16::try_from(part.len() + 8).unwrap();
    frame[18..20].copy_from_slice(&len.to_be_bytes());
    frame[20] = 44;
    frame.extend([17, 0]);
    frame.extend((offset | u16::from(!is_last)).to_be_bytes());
    frame.extend(id.to_be_bytes());
    frame.extend(part);
    frame
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// With any form of arrival, buffer policy and call, each datagram is read as it was sent, alone
    /// unless its reader takes merged ones, or is dropped with a reason; no memory is lost.
    #[test]
    fn promise_1_and_2_readers_get_datagrams_as_sent(
        turns in proptest::collection::vec(turn(), 1..12),
        gro in [any::<bool>(), any::<bool>()],
        largest in prop::sample::select(vec![2048u32, 8192, 1 << 17]),
        rcvbuf in prop_oneof![Just(1u32 << 30), 20_000u32..400_000],
    ) {
        let mut rig = Rig::new(largest, gro, rcvbuf);
        for turn in &turns {
            rig.turn(turn);
        }
        rig.end(turns[0].policy);
    }
}

/// Each CPU may send `XRLIM_BURST_FACTOR` errors at once to a host, however many CPUs there are.
#[test]
fn promise_13_each_cpu_may_send_icmp_burst() {
    const BURST: u32 = 6;
    let whole = NetworkConfig::default();
    for cpus in [1, 2, 8, 9, 64, 1024] {
        let config = super::network_config(cpus);
        for (share, whole) in [
            (config.icmp_msgs_burst, whole.icmp_msgs_burst),
            (config.icmp_msgs_per_sec, whole.icmp_msgs_per_sec),
        ] {
            let count = u32::try_from(cpus).unwrap();
            assert!(share >= BURST && share <= whole, "{share} of {whole} for {cpus}");
            assert!(share * count <= whole || share == BURST, "{share} of {whole} for {cpus}");
        }
    }
}
