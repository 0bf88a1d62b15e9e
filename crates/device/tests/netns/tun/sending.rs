//! Sending: the kernel receives packets sent to a device. The packets come from another device's
//! source, unchanged or merged.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{PageFragCache, Pool, Region};
use forebay_device::tun::{TunDevice, TunKind};
use forebay_rx::Packet;
use forebay_rx::arrive::{HEAD_CHUNK_BYTES, PollStatus};
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode, Coalescer};
use forebay_rx::counters::CoalesceCounters;
use forebay_rx::hash::Hasher;
use forebay_rx::parse::{Verify, parse_packet};
use forebay_rx::sink::{SendDrop, Sink, SinkCounters};
use forebay_testkit::namespaces::{command, enter_new, ip};

use crate::tun::Test;
use crate::tun::rig::{Rig, payload, silence};

pub(crate) const TESTS: &[Test] = &[
    ("tcp_passes_cut_and_merged", tcp),
    ("merged_datagrams_arrive_as_sent", datagrams),
    ("tags_removed_for_tun", tags),
    ("promise_2_tun_unsendable_packets_drop_by_name", dropped),
    ("device_flows_stay_in_their_queues", queues),
];

const BOTH: [(&str, TunKind); 2] = [("tun", TunKind::Tun), ("tap", TunKind::Tap)];

/// Form in which packets are passed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pass {
    AsTheyCame,
    Merged,
    /// Nonlinear, as if received from a device with shared memory.
    InPieces,
    InPiecesMerged,
}

impl Pass {
    fn merges(self) -> bool {
        matches!(self, Self::Merged | Self::InPiecesMerged)
    }
}

/// Forwarder from one device's sources to another device.
pub(crate) struct Pump {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    counters: Arc<SinkCounters>,
}

impl Pump {
    /// Starts in the namespace of the calling thread, which must be that of `from`.
    pub(crate) fn start(from: &TunDevice, to: &TunDevice, pass: Pass) -> Self {
        let mut sink = to.sink();
        let stop = Arc::new(AtomicBool::new(false));
        let mut rig = Rig::new(from);
        let counters = Arc::clone(sink.counters());
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut stage = Stage::new(pass);
            while !stopped.load(Ordering::Relaxed) {
                let mut packets = stage.turn(rig.drain(0).0);
                if packets.is_empty() {
                    thread::sleep(Duration::from_micros(20));
                }
                let handed = packets.len();
                sink.send(&mut packets).unwrap();
                assert!(packets.len() >= handed, "packets were kept");
                packets.drain(..).for_each(|packet| rig.pool.put(packet.frame));
            }
            rig.all_home(Vec::new());
        });
        Self { stop, thread, counters }
    }

    pub(crate) fn end(self) -> Arc<SinkCounters> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.counters
    }
}

/// Stages in between: parsing, and coalescing of the packets of one poll.
struct Stage {
    hasher: Hasher,
    coalescer: Option<Coalescer>,
    splitter: Splitter,
    splits: bool,
}

/// Memory as of a device with shared memory.
struct Splitter {
    heads: Pool,
    shared: PageFragCache,
}

impl Splitter {
    fn new() -> Self {
        const BLOCKS: u32 = 64;
        let share = vec![ChunkClass { chunk_bytes: HEAD_CHUNK_BYTES, chunks: 8192 }];
        let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
        let heads = carve(region, &[share]).unwrap().remove(0);
        let shared = Arc::new(Region::allocate_shared((BLOCKS as usize) << 20));
        Self { heads, shared: PageFragCache::new(&shared, 0, 1 << 20, BLOCKS) }
    }

    /// Moves all but the first bytes of a packet into buffers of an odd length.
    fn split(&mut self, packet: Packet) -> Packet {
        const HEAD_LEN: usize = 116;
        const BUFFER_LEN: usize = 1535;
        let Some((head, rest)) = packet.frame.data().split_at_checked(HEAD_LEN) else {
            return packet;
        };
        let mut frame = self.heads.allocate(HEAD_CHUNK_BYTES - BEFORE_PACKET_BYTES).unwrap();
        frame.copy_from(head);
        for bytes in rest.chunks(BUFFER_LEN) {
            let mut frag = self.shared.cut(1536).unwrap();
            frag.copy_out(0, bytes);
            frag.set_len(u32::try_from(bytes.len()).unwrap());
            frame.attach(frag).unwrap();
        }
        Packet { frame, ..packet }
    }
}

impl Stage {
    fn new(pass: Pass) -> Self {
        let config = CoalesceConfig { mode: CoalesceMode::Gro, ..CoalesceConfig::default() };
        let coalescer = || Coalescer::new(config, Arc::new(CoalesceCounters::default()));
        let coalescer = pass.merges().then(coalescer);
        let splits = matches!(pass, Pass::InPieces | Pass::InPiecesMerged);
        let hasher = Hasher::keyed(&[7; 16], false);
        Self { hasher, coalescer, splitter: Splitter::new(), splits }
    }

    fn turn(&mut self, mut packets: Vec<Packet>) -> Vec<Packet> {
        let Self { splitter, splits, .. } = self;
        splitter.heads.collect();
        if *splits {
            packets = packets.into_iter().map(|packet| splitter.split(packet)).collect();
        }
        for packet in &mut packets {
            parse_packet(packet, Verify::Checksums, &mut splitter.heads).unwrap();
            packet.hash = self.hasher.hash(&packet.view());
        }
        let Some(coalescer) = &mut self.coalescer else { return packets };
        let mut out = Vec::new();
        coalescer.coalesce(&mut packets, 0, &mut out);
        coalescer.end_poll(PollStatus::Last, 0, &mut out);
        out
    }
}

/// Runs `make` in a thread with its own namespace, and returns the result.
pub(crate) fn elsewhere<T: Send + 'static>(make: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            enter_new();
            silence();
            make()
        });
        thread.join().unwrap()
    })
}

/// Sends 8 MB to a listener of another namespace, and checks that they arrive as sent.
pub(crate) fn stream_to(listener: &TcpListener) {
    let sent: Vec<u8> = (0..400).flat_map(|number| payload(number, 20_011)).collect();
    let received = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut received = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
            received
        });
        TcpStream::connect(listener.local_addr().unwrap()).unwrap().write_all(&sent).unwrap();
        reader.join().unwrap()
    });
    assert!(received == sent, "{} bytes of {}", received.len(), sent.len());
}

/// Opens the device of one of two stations, 1 or 2.
pub(crate) fn lladdr(name: &str, kind: TunKind, number: u8) -> TunDevice {
    let device = TunDevice::open(name, kind, 1).unwrap();
    station(name, kind, number);
    device
}

/// Gives a device the addresses of a station, and the other station as its neighbour.
pub(crate) fn station(name: &str, kind: TunKind, number: u8) {
    if kind == TunKind::Tap {
        ip(&format!("link set {name} address 02:00:00:00:00:0{number}"));
    }
    ip(&format!("addr add 10.9.0.{number}/24 dev {name}"));
    let peer = 3 - number;
    if kind == TunKind::Tap {
        ip(&format!("neigh replace 10.9.0.{peer} lladdr 02:00:00:00:00:0{peer} dev {name}"));
    }
}

/// Returns a counter of the kernel in the calling thread's namespace.
pub(crate) fn snmp(protocol: &str, field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(&format!("{protocol}: ")));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let place = names.split(' ').position(|name| name == field).unwrap();
    values.split(' ').nth(place).unwrap().parse().unwrap()
}

fn tcp() {
    let cases = [
        ("on", Pass::AsTheyCame),
        ("off", Pass::AsTheyCame),
        ("off", Pass::Merged),
        ("on", Pass::InPieces),
        ("off", Pass::InPieces),
        ("off", Pass::InPiecesMerged),
    ];
    for ((_, kind), (offload, pass)) in
        BOTH.into_iter().flat_map(|kind| cases.map(|case| (kind, case)))
    {
        let near = lladdr("tnnear", kind, 1);
        command(&format!("ethtool -K tnnear tx {offload} tso {offload}"));
        let (far, back, listener, in_errors) = elsewhere(|| {
            let far = lladdr("tnfar", kind, 2);
            let listener = TcpListener::bind("10.9.0.2:2000").unwrap();
            let back = Pump::start(&far, &near, Pass::AsTheyCame);
            // This thread stays in the far namespace, where it reads the counter at the end.
            let (ask, asked) = std::sync::mpsc::channel::<()>();
            let told = thread::spawn(move || {
                let _ = asked.recv();
                snmp("Tcp", "InErrs")
            });
            (far, back, listener, (ask, told))
        });
        let pump = Pump::start(&near, &far, pass);
        stream_to(&listener);
        let counters = pump.end();
        back.end();
        drop(in_errors.0);
        assert_eq!(in_errors.1.join().unwrap(), 0, "checksums were wrong");
        let case = format!("{kind:?}, offloads {offload}, {pass:?}");
        let is_gso = offload == "on" || pass.merges();
        let (frames, packets) = (counters.frames(), counters.packets());
        assert_eq!(2 * frames > 3 * packets, is_gso, "{case}: {frames} frames, {packets} packets");
        assert_eq!(counters.dropped_in_all(), counters.dropped(SendDrop::Full), "{case}");
    }
}

/// Datagrams from one socket to another arrive unchanged and in order.
fn datagrams() {
    let passes = [Pass::Merged, Pass::InPiecesMerged];
    for ((_, kind), pass) in BOTH.into_iter().flat_map(|kind| passes.map(|pass| (kind, pass))) {
        let near = lladdr("tnnear", kind, 1);
        let (far, receiver) = elsewhere(|| {
            let far = lladdr("tnfar", kind, 2);
            (far, UdpSocket::bind("10.9.0.2:2000").unwrap())
        });
        let sender = UdpSocket::bind("10.9.0.1:1000").unwrap();
        sender.connect("10.9.0.2:2000").unwrap();
        let (mut rig, mut sink) = (Rig::new(&near), far.sink());
        let mut stage = Stage::new(pass);
        let mut merged = 0;
        for (round, len) in [1000, 1, 1472, 100, 33].into_iter().enumerate() {
            // More datagrams than are gathered into one write, with a shorter last one; fewer than
            // a socket has room for.
            let lens: Vec<usize> = (0..70).map(|_| len).chain([len - 1]).collect();
            for (number, &len) in lens.iter().enumerate() {
                sender.send(&payload(round * 1000 + number, len)).unwrap();
            }
            let mut packets = stage.turn(rig.take(0, lens.len()));
            merged += packets.iter().filter(|packet| packet.segment_count() > 1).count();
            sink.send(&mut packets).unwrap();
            packets.drain(..).for_each(|packet| rig.pool.put(packet.frame));
            let mut received = [0; 2000];
            receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            for (number, &len) in lens.iter().enumerate() {
                let got = receiver.recv(&mut received).unwrap();
                assert_eq!(received[..got], payload(round * 1000 + number, len), "{number}");
            }
        }
        assert!(merged >= 5, "{merged} merged packets");
        let counters = sink.counters();
        assert_eq!((counters.frames(), counters.dropped_in_all()), (5 * 71, 0));
        assert!(counters.packets() < 40, "{}", counters.packets());
        rig.all_home(Vec::new());
    }
}

fn tags() {
    let near = lladdr("tnnear", TunKind::Tap, 1);
    let (far, receiver) = elsewhere(|| {
        let far = lladdr("tnfar", TunKind::Tun, 2);
        (far, UdpSocket::bind("10.9.0.2:2000").unwrap())
    });
    let sender = UdpSocket::bind("10.9.0.1:1000").unwrap();
    sender.connect("10.9.0.2:2000").unwrap();
    (0..40).for_each(|number| assert_eq!(sender.send(&payload(number, 900)).unwrap(), 900));
    sender.send(b"alone").unwrap();
    let (mut rig, mut sink) = (Rig::new(&near), far.sink());
    let mut packets = rig.take(0, 41);
    packets.iter_mut().for_each(tag_twice);
    let mut packets = Stage::new(Pass::Merged).turn(packets);
    assert_eq!(packets[0].headers.network_offset, 22);
    assert!(packets[0].segment_count() > 10);
    sink.send(&mut packets).unwrap();
    let mut received = [0; 2000];
    for number in 0..40 {
        let got = receiver.recv(&mut received).unwrap();
        assert_eq!(received[..got], payload(number, 900));
    }
    let got = receiver.recv(&mut received).unwrap();
    assert_eq!(&received[..got], b"alone");
    rig.all_home(packets);
}

/// Inserts two VLAN tags into an Ethernet frame, as if received with them.
fn tag_twice(packet: &mut Packet) {
    packet.frame.push(8);
    let data = packet.frame.data_mut();
    data.copy_within(8..20, 0);
    data[12..20].copy_from_slice(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6]);
    (packet.wire_len, packet.device_sum) = (packet.wire_len + 8, None);
}

fn dropped() {
    // Without a known neighbour, the kernel sends ARP requests, which are not IP.
    let near = TunDevice::open("tnnear", TunKind::Tap, 1).unwrap();
    ip("addr add 10.9.0.1/24 dev tnnear");
    let (tun, mut rig) = (TunDevice::open("tnfar", TunKind::Tun, 1).unwrap(), Rig::new(&near));
    let socket = UdpSocket::bind("10.9.0.1:1000").unwrap();
    socket.send_to(b"who is it?", "10.9.0.2:2000").unwrap();
    let mut sink = tun.sink();
    let mut packets = Stage::new(Pass::AsTheyCame).turn(rig.take(0, 1));
    sink.send(&mut packets).unwrap();
    assert_eq!(sink.counters().dropped(SendDrop::NotIp), 1);

    ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev tnnear nud permanent");
    socket.send_to(b"there you are", "10.9.0.2:2000").unwrap();
    let mut packets = Stage::new(Pass::AsTheyCame).turn(rig.take(0, 1));
    // The datagram that waited for the neighbour may have arrived too, or only that one.
    packets.truncate(1);
    ip("link set tnfar down");
    sink.send(&mut packets).unwrap();
    assert_eq!(sink.counters().dropped(SendDrop::Down), 1);
    ip("link set tnfar up");
    sink.send(&mut packets).unwrap();
    assert_eq!((sink.counters().packets(), sink.counters().dropped_in_all()), (1, 2));
    ip("link del tnfar");
    let gone = sink.send(&mut packets).unwrap_err();
    assert_eq!(gone.to_string(), "the interface tnfar is gone");
    assert_eq!((sink.counters().packets(), sink.counters().dropped_in_all()), (1, 3));
    assert_eq!(packets.len(), 1, "a packet was lost");
    drop(packets);

    let ip_only = TunDevice::open("tnip", TunKind::Tun, 1).unwrap();
    ip("addr add 10.8.0.1/24 dev tnip");
    let socket = UdpSocket::bind("10.8.0.1:1000").unwrap();
    socket.send_to(b"no Ethernet here", "10.8.0.2:2000").unwrap();
    let (mut rig, mut sink) = (Rig::new(&ip_only), near.sink());
    let mut packets = Stage::new(Pass::AsTheyCame).turn(rig.take(0, 1));
    sink.send(&mut packets).unwrap();
    assert_eq!(sink.counters().dropped(SendDrop::LinkHeader), 1);
}

fn queues() {
    let device = TunDevice::open("tnmany", TunKind::Tun, 4).unwrap();
    assert!(device.facts().contains(&("steering", "by flow".to_owned())), "{:?}", device.facts());
    ip("addr add 10.9.0.1/24 dev tnmany");
    let mut rig = Rig::new(&device);
    let sockets: Vec<_> = (0..32).map(|_| UdpSocket::bind("10.9.0.1:0").unwrap()).collect();
    let mut queue_of = vec![None; sockets.len()];
    let mut sink = device.sink();
    for round in 0..4 {
        for (flow, socket) in (0..).zip(&sockets) {
            socket.send_to(&[round, flow], "10.9.0.2:2000").unwrap();
        }
        let mut received = 0;
        for queue in 0..4 {
            let mut packets = Stage::new(Pass::AsTheyCame).turn(rig.drain(queue).0);
            for packet in &packets {
                let &[told, flow] = packet.view().payload() else { panic!("{packet:?}") };
                assert_eq!(told, round);
                let before = queue_of[usize::from(flow)].replace(queue);
                assert_eq!(before.unwrap_or(queue), queue, "flow {flow} has another queue");
                // Numbers rise along each queue, and are unique.
                assert_eq!(packet.arrival.0 % 4, u32::try_from(queue).unwrap());
            }
            received += packets.len();
            // Answers through the first queue, to which the kernel would move the flow.
            packets.iter_mut().for_each(answer);
            sink.send(&mut packets).unwrap();
            packets.drain(..).for_each(|packet| rig.pool.put(packet.frame));
        }
        assert_eq!(received, sockets.len());
    }
    let used = |queue| queue_of.contains(&Some(queue));
    assert!((0..4).all(used), "{queue_of:?}");
    for socket in &sockets {
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut received = [0; 2];
        (0..4).for_each(|_| assert_eq!(socket.recv(&mut received).unwrap(), 2));
    }
    rig.all_home(Vec::new());
}

/// Swaps addresses and ports, which leaves the checksums valid.
fn answer(packet: &mut Packet) {
    let data = packet.frame.data_mut();
    let (source, rest) = data[12..].split_at_mut(4);
    source.swap_with_slice(&mut rest[..4]);
    let (source, rest) = data[20..].split_at_mut(2);
    source.swap_with_slice(&mut rest[..2]);
}
