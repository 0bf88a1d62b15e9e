//! Packets that reach sockets, or are answered, are in private memory, wherever a device had put
//! them.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::collections::BTreeSet;
use std::sync::Arc;

use etherparse::PacketBuilder;
use forebay_buf::frags::FRAG_TABLE_BYTES;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{PageFragCache, Pool, Region};
use forebay_rx::arrive::{HEAD_CHUNK_BYTES, PollStatus};
use forebay_rx::coalesce::gso::{GSO_UDP_L4, NEEDS_CSUM, VirtioNetHdr};
use forebay_rx::coalesce::{CoalesceConfig, Coalescer};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify, parse_packet};
use forebay_rx::{CpuId, Handler, Packet, RxQueue};
use forebay_stack::Stack;
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, Prefix,
};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::counters::CounterTable;
use forebay_stack::socket::queue::{Awake, SocketQueueConfig, SocketQueueConsumer, open};
use forebay_stack::socket::reclaim::BufferReclaimer;
use forebay_stack::socket::table::Binding;
use forebay_testkit::host::{FixedHost, SentPackets};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ADDRESSES: [[u8; 4]; 2] = [[10, 9, 0, 2], [10, 9, 0, 1]];
const PORT: u16 = 53;
const VXLAN_PORT: u16 = 4789;

/// Bytes of a packet that are in the first frame: all, or only the leading ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lies {
    InOneFrame,
    InPieces { head_len: usize },
}

/// A host with one socket, and the queue that it receives from.
pub(super) struct Host {
    pub(super) stack: Stack,
    pub(super) consumer: SocketQueueConsumer,
    counters: Arc<NetworkCounters>,
    heads: Pool,
    shared: PageFragCache,
    pool: Pool,
    sent: SentPackets,
}

fn pools(classes: [ChunkClass; 2]) -> Pool {
    let share = classes.to_vec();
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    carve(region, &[share]).unwrap().remove(0)
}

impl Host {
    /// Creates a host with this many frames for copies.
    pub(super) fn new(copies: u32) -> Self {
        Self::bound(PORT, copies)
    }

    fn bound(port: u16, copies: u32) -> Self {
        let counters = Arc::<NetworkCounters>::default();
        let network = NetworkLayer::new(NetworkConfig::default(), Arc::clone(&counters));
        let id = SocketId(0);
        let table = Arc::new(CounterTable::new(1, 1));
        let (queue, consumer) =
            open(SocketQueueConfig { id, rcvbuf: 1 << 20, slots: 64 }, &table, Arc::new(Awake));
        let relief = BufferReclaimer::new(None, None, Arc::default());
        let local = (ADDRESSES[1], port).into();
        let prefix = Prefix { address: ADDRESSES[1].into(), bits: 24 };
        let identity = Identity {
            mac: Some(OURS),
            addresses: vec![prefix],
            elsewhere: BTreeSet::new(),
            groups: Vec::new(),
            mtu: 9000,
            is_whole_host: true,
        };
        let host = FixedHost::new(identity, vec![Binding::new(id, local)], vec![queue]);
        let sent = host.sent.clone();
        let stack = Stack::new(CpuId(0), 0, network, relief, Box::new(host));
        let region = Arc::new(Region::allocate_shared(1 << 20));
        let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
        Self {
            stack,
            consumer,
            counters,
            heads: pools([class(HEAD_CHUNK_BYTES, 64), class(4096, 64)]),
            shared: PageFragCache::new(&region, 0, 1 << 16, 16),
            pool: pools([class(512, 0), class(4096, copies)]),
            sent,
        }
    }

    fn received(&mut self, bytes: &[u8], number: u32, lies: Lies) -> Packet {
        let mut frame = match lies {
            Lies::InOneFrame => self.heads.allocate(3000).unwrap(),
            Lies::InPieces { .. } => self.heads.allocate(256 + FRAG_TABLE_BYTES).unwrap(),
        };
        let head_len = match lies {
            Lies::InOneFrame => bytes.len(),
            Lies::InPieces { head_len } => head_len.min(bytes.len()),
        };
        frame.copy_from(&bytes[..head_len]);
        for piece in bytes[head_len..].chunks(333) {
            let mut frag = self.shared.cut(384).unwrap();
            frag.copy_out(0, piece);
            frag.set_len(u32::try_from(piece.len()).unwrap());
            frame.attach(frag).unwrap();
        }
        let wire_len = u32::try_from(bytes.len()).unwrap();
        let mut packet = Packet::received(frame, Arrival(number), wire_len, Link::Ethernet);
        parse_packet(&mut packet, Verify::Checksums, &mut self.heads).unwrap();
        packet.hash = FlowHash(7);
        packet
    }

    /// Passes packets through the stack, merged if possible. Returns how many segments each had.
    pub(super) fn receive(&mut self, frames: &[Vec<u8>], lies: Lies) -> Vec<u32> {
        let packets = (0..).zip(frames).map(|(number, bytes)| self.received(bytes, number, lies));
        let (mut packets, mut merged) = (packets.collect(), Vec::new());
        let mut coalescer = Coalescer::new(CoalesceConfig::default(), Arc::default());
        coalescer.coalesce(&mut packets, 0, &mut merged);
        coalescer.end_poll(PollStatus::Last, 0, &mut merged);
        let is_in_pieces = lies != Lies::InOneFrame;
        assert!(merged.iter().all(|packet| packet.is_nonlinear() == is_in_pieces));
        let counts = merged.iter().map(Packet::segment_count).collect();
        let mut batch = Batch {
            cpu: CpuId(0),
            rx_queue: RxQueue(0),
            packets: &mut merged,
            notes: &[],
            pool: &mut self.pool,
        };
        self.stack.handle(&mut batch);
        self.pool.flush();
        assert_eq!((self.shared.away_blocks()), 0, "nothing lies where it came");
        counts
    }

    /// Packets that the socket received, as lists of datagrams; and the answers.
    fn seen(&mut self) -> (Vec<Vec<Vec<u8>>>, Vec<Vec<u8>>) {
        let mut taken = Vec::new();
        self.consumer.take(64, &mut taken);
        let answers = self.sent.take();
        assert!(taken.iter().chain(&answers).all(|packet| !packet.is_nonlinear()));
        let datagrams =
            |packet: &Packet| packet.segments().map(|segment| segment.payload.to_vec()).collect();
        let seen = taken.iter().map(datagrams).collect();
        taken.into_iter().for_each(|packet| self.pool.put(packet.frame));
        (seen, answers.iter().map(|packet| packet.frame.data().to_vec()).collect())
    }
}

/// A GSO packet that is dropped counts as the datagrams that it would be cut into.
#[test]
fn udp_13_gso_drop_counts_each_datagram() {
    // For the socket, whose reader takes one at a time, and for a port that nobody has bound.
    for (port, reason) in [(PORT, NetworkDrop::Nomem), (PORT + 1, NetworkDrop::NoSocket)] {
        // A frame for the first datagram only.
        let mut host = Host::new(1);
        let mut bytes = Vec::new();
        ethernet().udp(1000, port).write(&mut bytes, &[3; 1950]).unwrap();
        let mut packet = host.received(&bytes, 1, Lies::InOneFrame);
        let told = VirtioNetHdr {
            flags: NEEDS_CSUM,
            gso_type: GSO_UDP_L4,
            hdr_len: 42,
            gso_size: 100,
            csum_start: 34,
            csum_offset: 6,
        };
        told.carry_into(&mut packet).unwrap();
        assert!(packet.is_gso());
        let mut packets = vec![packet];
        let mut batch = Batch {
            cpu: CpuId(0),
            rx_queue: RxQueue(0),
            packets: &mut packets,
            notes: &[],
            pool: &mut host.pool,
        };
        host.stack.handle(&mut batch);
        assert_eq!(host.counters.drops.get(reason), 20, "{reason:?}");
    }
}

pub(super) fn ethernet() -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    let [from, to] = ADDRESSES;
    PacketBuilder::ethernet2([2, 0, 0, 0, 0, 2], OURS).ipv4(from, to, 64)
}

pub(super) fn datagram(port: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    ethernet().udp(port, PORT).write(&mut bytes, payload).unwrap();
    bytes
}

/// Three datagrams that are merged, one that is not, and an echo request.
fn frames() -> Vec<Vec<u8>> {
    let mut frames: Vec<_> = (1u8..4).map(|mark| datagram(1000, &[mark; 1200])).collect();
    frames.push(datagram(1001, &[9; 2001]));
    let mut echo = Vec::new();
    ethernet().icmpv4_echo_request(1, 2).write(&mut echo, &[5; 1001]).unwrap();
    frames.push(echo);
    frames
}

#[test]
fn promise_5_payloads_are_private_when_read() {
    let mut twin = Host::new(16);
    twin.receive(&frames(), Lies::InOneFrame);
    let expected = twin.seen();
    assert_eq!(expected.0.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
    assert_eq!((expected.0[0][2].as_slice(), expected.1.len()), (&[3; 1200][..], 1));
    for head_len in [42, 116, 256] {
        let mut host = Host::new(16);
        host.receive(&frames(), Lies::InPieces { head_len });
        assert_eq!(host.seen(), expected, "{head_len}");
        assert_eq!(host.counters.drops.total(), 0);
        assert_eq!((host.heads.in_use(), host.pool.in_use()), (0, 0));
    }
}

#[test]
fn promise_2_without_private_memory_drops_by_frame() {
    // Copies for the first two of the three datagrams to be merged.
    let mut host = Host::new(2);
    host.receive(&frames()[..3], Lies::InPieces { head_len: 116 });
    assert_eq!(host.seen().0.len(), 0);
    assert_eq!(host.counters.drops.get(NetworkDrop::Nomem), 3);
    assert_eq!((host.heads.in_use(), host.pool.in_use()), (0, 0));
    host.receive(&frames()[3..], Lies::InPieces { head_len: 116 });
    let (datagrams, answers) = host.seen();
    assert_eq!((datagrams.len(), answers.len()), (1, 1));
}

/// TCP over IPv4 in an Ethernet frame: segments of a flow, one by one.
fn segments(ethernet_bytes: usize) -> Vec<Vec<u8>> {
    let segment = |number: u8| {
        let header = etherparse::TcpHeader { acknowledgment_number: 1, ack: true, ..tcp(number) };
        let mut bytes = Vec::new();
        ethernet().tcp_header(header).write(&mut bytes, &[number; 1000]).unwrap();
        bytes.split_off(14 - ethernet_bytes)
    };
    (0..3).map(segment).collect()
}

fn tcp(number: u8) -> etherparse::TcpHeader {
    etherparse::TcpHeader::new(1000, 80, u32::from(number) * 1000, 512)
}

/// The host does not look into tunnels, so it gets them as they came, whatever was merged.
#[test]
fn lro_t5_sockets_get_original_tunnel_datagrams() {
    let payloads = segments(14).into_iter().map(|frame| {
        let header = [8, 0, 0, 0, 0, 0, 7, 0];
        [&header[..], &frame].concat()
    });
    let payloads: Vec<_> = payloads.collect();
    let datagram = |payload: &Vec<u8>| {
        let mut bytes = Vec::new();
        ethernet().udp(50_000, VXLAN_PORT).write(&mut bytes, payload).unwrap();
        bytes
    };
    let frames: Vec<_> = payloads.iter().map(datagram).collect();
    for lies in [Lies::InOneFrame, Lies::InPieces { head_len: 42 }] {
        for takes_merged in [false, true] {
            let mut host = Host::bound(VXLAN_PORT, 16);
            host.consumer.set_takes_merged(takes_merged);
            assert_eq!(host.receive(&frames, lies), [3], "they are merged on the way");
            let expected: Vec<_> = payloads.iter().map(|it| vec![it.clone()]).collect();
            assert_eq!(host.seen().0, expected, "{lies:?}");
            assert_eq!(host.counters.drops.total(), 0);
            assert_eq!((host.heads.in_use(), host.pool.in_use()), (0, 0));
        }
    }
}

#[test]
fn lro_t5_unknown_tunnels_drop_by_frame() {
    let ipip = |inner: Vec<u8>| {
        let mut bytes = Vec::new();
        let outside = ethernet();
        outside.write(&mut bytes, etherparse::ip_number::IPV4, &inner).unwrap();
        bytes
    };
    let frames: Vec<_> = segments(0).into_iter().map(ipip).collect();
    let mut host = Host::new(16);
    assert_eq!(host.receive(&frames, Lies::InOneFrame), [3], "they are merged on the way");
    assert_eq!(host.seen().0.len(), 0);
    assert_eq!(host.counters.drops.get(NetworkDrop::IpNoproto), 3);
    assert_eq!((host.heads.in_use(), host.pool.in_use()), (0, 0));
}

/// GSO packet of `count` small datagrams in a tunnel, and the place of their UDP headers.
fn merged_by_kernel(host: &mut Host, is_vxlan: bool, count: u16) -> Packet {
    let builder = PacketBuilder::ethernet2([6; 6], [8; 6]);
    let mut inner = Vec::new();
    let payload = vec![3; usize::from(count) * 8];
    builder.ipv4([10, 1, 0, 1], [10, 1, 0, 2], 64).udp(7, 9).write(&mut inner, &payload).unwrap();
    let mut bytes = Vec::new();
    let csum_start = if is_vxlan {
        let payload = [&[8, 0, 0, 0, 0, 0, 7, 0], &inner[..]].concat();
        ethernet().udp(50_000, VXLAN_PORT).write(&mut bytes, &payload).unwrap();
        84
    } else {
        ethernet().write(&mut bytes, etherparse::ip_number::IPV4, &inner[14..]).unwrap();
        54
    };
    let told = VirtioNetHdr {
        flags: NEEDS_CSUM,
        gso_type: GSO_UDP_L4,
        hdr_len: csum_start + 8,
        gso_size: 8,
        csum_start,
        csum_offset: 6,
    };
    let mut packet = host.received(&bytes, 1, Lies::InOneFrame);
    told.carry_into(&mut packet).unwrap();
    parse_packet(&mut packet, Verify::Checksums, &mut host.heads).unwrap();
    assert!(packet.is_gso() && packet.is_merged_tunnel());
    packet
}

/// The frames of its first segments are free again before the last ones are cut.
#[test]
fn lro_t8_whole_tunnels_need_few_frames() {
    for (is_vxlan, reason) in [(true, NetworkDrop::SocketRcvbuff), (false, NetworkDrop::IpNoproto)]
    {
        let mut host = Host::bound(VXLAN_PORT, 140);
        host.consumer.account().set_rcvbuf(200_000);
        let mut packets = vec![merged_by_kernel(&mut host, is_vxlan, 300)];
        let mut batch = Batch {
            cpu: CpuId(0),
            rx_queue: RxQueue(0),
            packets: &mut packets,
            notes: &[],
            pool: &mut host.pool,
        };
        host.stack.handle(&mut batch);
        let drops = &host.counters.drops;
        let (dropped, total) = (drops.get(reason), drops.total());
        let seen = host.seen().0.len() as u64;
        assert_eq!((dropped, total), (300 - seen, 300 - seen));
        assert_eq!(seen > 0, is_vxlan);
        assert_eq!((host.heads.in_use(), host.pool.in_use()), (0, 0));
    }
}

/// Segments without a frame are counted.
#[test]
fn lro_t8_segments_without_memory_are_counted() {
    let mut host = Host::bound(VXLAN_PORT, 20);
    let mut packets = vec![merged_by_kernel(&mut host, true, 50)];
    let mut batch = Batch {
        cpu: CpuId(0),
        rx_queue: RxQueue(0),
        packets: &mut packets,
        notes: &[],
        pool: &mut host.pool,
    };
    host.stack.handle(&mut batch);
    let seen = host.seen().0.len() as u64;
    assert!(seen > 0);
    assert_eq!(host.counters.drops.get(NetworkDrop::Nomem), 50 - seen);
    assert_eq!((host.heads.in_use(), host.pool.in_use()), (0, 0));
}
