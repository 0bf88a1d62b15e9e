//! Two hosts, and a path that loses, repeats, delays and reorders by a seed.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_buf::{Frame, Region};
use forebay_rx::coalesce::cut;
use forebay_rx::cpu::CpuId;
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify, parse_packet};
use forebay_stack::network::{Identity, NetworkConfig, NetworkLayer, NetworkVerdict, Prefix};
use forebay_stack::tcp::{
    FlowHasher, ListenerQueues, Readiness, Tcp, TcpConfig, TcpDevice, TcpError, TcpOut, TcpSocket,
};

pub(super) const MTU: u32 = 1500;
/// Frames for segments.
const CHUNKS: u32 = 8192;

/// Time after which a path takes packets of another size.
const LARGEST_TURN_US: u64 = 5_000_000;

/// Sockets with which laws of all of them are checked after each call.
const CHECKED_MAX: u32 = 16;

/// FIN and PSH among TCP's flags (RFC 9293, section 3.1).
const FIN_OR_PSH: u16 = 1 | 8;

/// A host of TCP.
pub(super) struct Host {
    pub(super) tcp: Tcp,
    hasher: FlowHasher,
    /// CPU that segments are processed on.
    pub(super) cpu: CpuId,
    pub(super) network: NetworkLayer,
    pub(super) identity: Identity,
    pub(super) receives_on: TcpDevice,
    pub(super) pool: Pool,
    /// Number of calls so far.
    calls: u64,
    /// Connections that were told to be ready, and what for after the last call.
    readiness: Vec<(TcpSocket, Readiness)>,
    /// Sizes of the frames in which the packets of the last call left.
    pub(super) left_in: Vec<u32>,
    /// Packets with PSH or FIN that have left: of several segments, and of one.
    pub(super) large_pushes: usize,
    pub(super) small_pushes: usize,
    /// Device that keeps frames for a while; without one, they return at once.
    pub(super) device: Option<HoldingDevice>,
    pub(super) address: IpAddr,
}

/// Device that returns a frame some time after its packet was handed in, from another CPU.
pub(super) struct HoldingDevice {
    pub(super) pool: Pool,
    pub(super) hold_us: u64,
    /// Frames, and the times when they return.
    held: VecDeque<(u64, Frame)>,
}

impl HoldingDevice {
    pub(super) fn new(pool: Pool, hold_us: u64) -> Self {
        Self { pool, hold_us, held: VecDeque::new() }
    }

    /// Keeps the frame of a packet. Returns a copy.
    fn keep(&mut self, packet: Packet, now_us: u64) -> Packet {
        let mut frame = self.pool.allocate(packet.frame.len_bytes()).unwrap();
        frame.copy_from(packet.frame.data());
        let link = packet.headers.link;
        let mut copy = Packet::received(frame, Arrival(0), packet.wire_len, link);
        (copy.headers, copy.hash) = (packet.headers, packet.hash);
        copy.set_gso_size(packet.gso_size());
        self.held.push_back((now_us + self.hold_us, packet.frame));
        copy
    }

    fn release(&mut self, now_us: u64) {
        while let Some((_, frame)) = self.held.pop_front_if(|(at_us, _)| *at_us <= now_us) {
            self.pool.put(frame);
        }
        self.pool.flush();
    }
}

impl Host {
    pub(super) fn new(last: u8, config: TcpConfig, chunks: u32) -> Self {
        let share = vec![
            ChunkClass { chunk_bytes: 2048, chunks },
            ChunkClass { chunk_bytes: 68 << 10, chunks: 16 },
        ];
        let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
        let address = IpAddr::from([192, 0, 2, last]);
        let mut network = NetworkLayer::new(NetworkConfig::default(), Default::default());
        network.take_tcp();
        let addresses = vec![Prefix { address, bits: 24 }];
        Self {
            tcp: Tcp::new(config, [last; 16], 0),
            hasher: FlowHasher::new([last; 16]),
            cpu: CpuId(0),
            network,
            identity: Identity { addresses, mtu: MTU, is_whole_host: true, ..Identity::default() },
            receives_on: TcpDevice { mtu_bytes: MTU, is_whole_host: true },
            pool: carve(region, &[share]).unwrap().remove(0),
            calls: 0,
            readiness: Vec::new(),
            left_in: Vec::new(),
            large_pushes: 0,
            small_pushes: 0,
            device: None,
            address,
        }
    }

    /// Calls TCP. What it sends goes to `sent`, cut into segments.
    pub(super) fn call<R>(
        &mut self,
        now_us: u64,
        sent: &mut Vec<Vec<u8>>,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R,
    ) -> R {
        self.device.iter_mut().for_each(|device| device.release(now_us));
        let mut packets = Vec::new();
        let mut out = TcpOut { now_us, cpu: self.cpu, pool: &mut self.pool, packets: &mut packets };
        let result = act(&mut self.tcp, &mut out);
        self.check_levels();
        self.check_readiness();
        self.left_in = packets.iter().map(|packet| packet.frame.truesize()).collect();
        let mut segments = Vec::new();
        let (pool, packets): (_, Vec<_>) = match &mut self.device {
            Some(device) => {
                let copies =
                    packets.into_iter().map(|packet| device.keep(packet, now_us)).collect();
                (&mut device.pool, copies)
            }
            None => (&mut self.pool, packets),
        };
        for packet in packets {
            check(&packet);
            let is_pushed = packet.view().tcp_flags().is_some_and(|flags| flags & FIN_OR_PSH != 0);
            let pushes = match packet.gso_size() {
                0 => &mut self.small_pushes,
                _ => &mut self.large_pushes,
            };
            *pushes += usize::from(is_pushed);
            match packet.gso_size() {
                0 => segments.push(packet),
                _ => cut(packet, pool, &mut segments).unwrap(),
            }
        }
        for segment in segments {
            sent.push(segment.frame.data().to_vec());
            pool.put(segment.frame);
        }
        result
    }

    /// Checks that the numbers by state are those of the connections. In long runs not after each call: a wrong number stays.
    fn check_levels(&mut self) {
        self.calls += 1;
        let is_skipped = self.calls > 1000 && !self.calls.is_multiple_of(32);
        if is_skipped || self.tcp.socket_count() > CHECKED_MAX {
            return;
        }
        let mut expected = BTreeMap::from([
            ("SYN-RECV", self.tcp.request_count()),
            ("TIME-WAIT", self.tcp.time_wait_count()),
        ]);
        for (_, info) in self.tcp.connections(0..self.tcp.slots()) {
            *expected.entry(info.state.name()).or_default() += 1;
        }
        expected.remove("UNCONN");
        expected.retain(|_, count| *count > 0);
        let levels = self.tcp.levels().iter().filter(|(_, count)| *count > 0);
        assert_eq!(levels.collect::<BTreeMap<_, _>>(), expected);
    }

    /// Checks that what a connection became ready for is told: its waiters learn of it in no other way.
    fn check_readiness(&mut self) {
        if self.tcp.socket_count() > CHECKED_MAX {
            return self.readiness.clear();
        }
        let mut told = Vec::new();
        self.tcp.take_ready(&mut told);
        self.readiness.retain_mut(|(socket, before)| {
            let Some(now) = readiness_of(&self.tcp, *socket) else { return false };
            let before = std::mem::replace(before, now);
            let is_told = told.contains(socket) || !has_grown(&before, &now);
            assert!(is_told, "{socket:?} became {now:?} after {before:?}");
            true
        });
        let is_known = |socket| self.readiness.iter().any(|(known, _)| *known == socket);
        told.retain(|socket| !is_known(*socket));
        let tcp = &self.tcp;
        self.readiness.extend(told.into_iter().flat_map(|it| Some((it, readiness_of(tcp, it)?))));
    }

    /// A packet in a frame of this host, parsed.
    pub(super) fn packet(&mut self, bytes: &[u8]) -> Option<Packet> {
        let len = u32::try_from(bytes.len()).unwrap();
        let mut frame = self.pool.allocate(len)?;
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(0), len, Link::Ip);
        parse_packet(&mut packet, Verify::Checksums, &mut self.pool).unwrap();
        Some(packet)
    }

    pub(super) fn deliver(&mut self, packet: Packet, now_us: u64, sent: &mut Vec<Vec<u8>>) {
        match self.network.receive(packet, &self.identity, now_us * 1000, &mut self.pool) {
            NetworkVerdict::Segment(packet) => {
                let flow = self.hasher.flow_of(&packet);
                let on = self.receives_on;
                self.call(now_us, sent, |tcp, out| tcp.receive(packet, flow.as_ref(), on, out));
            }
            NetworkVerdict::Answer(packet)
            | NetworkVerdict::Taken(packet)
            | NetworkVerdict::Dropped(packet, _) => self.pool.put(packet.frame),
            other => panic!("{other:?}"),
        }
    }
}

/// Readiness of a connection; `None` of other sockets.
fn readiness_of(tcp: &Tcp, socket: TcpSocket) -> Option<Readiness> {
    tcp.flow(socket).ok()?;
    tcp.readiness(socket).ok()
}

fn has_grown(before: &Readiness, now: &Readiness) -> bool {
    let kinds = |it: &Readiness| {
        [it.readable, it.writable, it.peer_closed, it.hung_up, it.failed, it.urgent]
    };
    kinds(before).iter().zip(kinds(now)).any(|(before, now)| now && !before)
}

/// Checks a packet as a device does that cuts it (`virtio_net_hdr_to_skb`).
fn check(packet: &Packet) {
    let (len, size) = (packet.headers.payload_len, packet.gso_size());
    assert!(packet.frame.len_bytes() <= u32::from(u16::MAX), "{}", packet.frame.len_bytes());
    assert!(size == 0 || len > size, "{len} bytes in segments of {size}");
    let segment_len =
        u32::from(packet.headers.payload_offset) + u32::from(if size > 0 { size } else { len });
    assert!(segment_len <= MTU, "a segment of {segment_len} bytes");
}

/// Faults of a path, in percent, and its delay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) loss: u32,
    pub(super) repeat: u32,
    pub(super) reorder: u32,
    pub(super) delay_us: u64,
    /// Segments that arrive together are merged.
    pub(super) merges: bool,
    /// Largest packets that the path takes, in bytes, in turn for a while each; 0 for all. Larger ones are dropped
    /// without an error.
    pub(super) largest_bytes: [u32; 2],
    /// Time between two packets of a direction, at least; 0 for any.
    pub(super) apart_us: u64,
}

/// Two hosts with a path between them.
pub(super) struct Pair {
    pub(super) hosts: [Host; 2],
    pub(super) now_us: u64,
    pub(super) faults: Faults,
    random: u64,
    /// Packets under way, by arrival and number: to which host, and their bytes.
    path: BTreeMap<(u64, u64), (usize, Vec<u8>)>,
    count: u64,
    /// Time when the last packet of each host arrives, if they are apart.
    arrives_us: [u64; 2],
    /// Segments that each host sent.
    pub(super) segments: [u64; 2],
    /// Sequence and acknowledgement number of the last segment that each host sent.
    pub(super) last: [(u32, u32); 2],
    /// Queues of listeners, which are empty in the end.
    pub(super) queues: Vec<Arc<ListenerQueues>>,
}

impl Pair {
    pub(super) fn new(seed: u64, faults: Faults, configs: [TcpConfig; 2]) -> Self {
        Self::with_chunks(CHUNKS, seed, faults, configs)
    }

    /// Hosts with this number of frames for segments each.
    pub(super) fn with_chunks(
        chunks: u32,
        seed: u64,
        faults: Faults,
        configs: [TcpConfig; 2],
    ) -> Self {
        let [first, second] = configs;
        Self {
            hosts: [Host::new(1, first, chunks), Host::new(2, second, chunks)],
            now_us: 0,
            faults,
            random: seed | 1,
            path: BTreeMap::new(),
            count: 0,
            arrives_us: [0; 2],
            segments: [0; 2],
            last: [(0, 0); 2],
            queues: Vec::new(),
        }
    }

    /// A number below `limit` (xorshift).
    pub(super) fn random(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    pub(super) fn address(&self, host: usize, port: u16) -> SocketAddr {
        SocketAddr::new(self.hosts[host].address, port)
    }

    /// Calls the TCP of a host.
    pub(super) fn call<R>(
        &mut self,
        host: usize,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R,
    ) -> R {
        let mut sent = Vec::new();
        let result = self.hosts[host].call(self.now_us, &mut sent, act);
        self.carry(host, sent);
        result
    }

    fn carry(&mut self, from: usize, sent: Vec<Vec<u8>>) {
        self.segments[from] += sent.len() as u64;
        for bytes in sent {
            let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
            self.last[from] = (number(24), number(28));
            if self.random(100) < self.faults.loss.into() || self.is_too_large(bytes.len()) {
                continue;
            }
            let copies = 1 + u64::from(self.random(100) < self.faults.repeat.into());
            for _ in 0..copies {
                let late = self.random(100) < self.faults.reorder.into();
                let extra_us = if late { self.random(self.faults.delay_us * 2 + 1000) } else { 0 };
                let mut at_us = self.now_us + self.faults.delay_us + extra_us;
                if self.faults.apart_us > 0 {
                    at_us = at_us.max(self.arrives_us[from] + self.faults.apart_us);
                    self.arrives_us[from] = at_us;
                }
                self.count += 1;
                self.path.insert((at_us, self.count), (1 - from, bytes.clone()));
            }
        }
    }

    /// True if the path drops packets of this length now.
    fn is_too_large(&self, len_bytes: usize) -> bool {
        let turn = (self.now_us / LARGEST_TURN_US % 2) as usize;
        let largest_bytes = self.faults.largest_bytes[turn];
        largest_bytes > 0 && len_bytes > largest_bytes as usize
    }

    /// Time of the next event.
    pub(super) fn next_us(&self) -> Option<u64> {
        let timers = self.hosts.iter().filter_map(|host| host.tcp.next_timer_us()).min();
        let arrival = self.path.keys().next().map(|(at_us, _)| *at_us);
        timers.into_iter().chain(arrival).min()
    }

    /// Goes on to the next event. Returns false without one.
    pub(super) fn step(&mut self) -> bool {
        let Some(next_us) = self.next_us() else { return false };
        self.now_us = self.now_us.max(next_us);
        self.arrive();
        for host in 0..2 {
            self.call(host, Tcp::advance);
        }
        true
    }

    fn arrive(&mut self) {
        let mut arrived: [Vec<Vec<u8>>; 2] = [Vec::new(), Vec::new()];
        while let Some(entry) = self.path.first_entry().filter(|entry| entry.key().0 <= self.now_us)
        {
            let (to, bytes) = entry.remove();
            arrived[to].push(bytes);
        }
        for (to, packets) in arrived.into_iter().enumerate() {
            let mut sent = Vec::new();
            let now_us = self.now_us;
            let host = &mut self.hosts[to];
            let packets = packets.iter().filter_map(|bytes| host.packet(bytes)).collect();
            let packets = if self.faults.merges { merged(packets) } else { packets };
            packets.into_iter().for_each(|packet| host.deliver(packet, now_us, &mut sent));
            self.carry(to, sent);
        }
    }

    /// Opens a connection from host 0 to a listener of host 1.
    pub(super) fn open(&mut self, port: u16) -> (TcpSocket, TcpSocket) {
        let there = self.address(1, port);
        let listener = self.hosts[1].tcp.socket().unwrap();
        self.hosts[1].tcp.bind(listener, there).unwrap();
        self.hosts[1].tcp.listen(listener, 16).unwrap();
        let client = self.hosts[0].tcp.socket().unwrap();
        let here = self.address(0, 0);
        let begun = self.call(0, |tcp, out| tcp.connect(client, (here, there), MTU, out));
        assert_eq!(begun, Err(TcpError::InProgress));
        for _ in 0..10_000 {
            if let Ok((server, _)) = self.hosts[1].tcp.accept(listener) {
                self.call(1, |tcp, out| tcp.close(listener, out)).unwrap();
                return (client, server);
            }
            assert!(self.step(), "a connection that is being opened has a timer");
        }
        panic!("the connection was not opened");
    }

    /// Checks that nothing is left, once both ends have closed.
    pub(super) fn check_rest(&mut self) {
        for _ in 0..100_000 {
            if !self.step() {
                break;
            }
        }
        for host in &mut self.hosts {
            assert_eq!(host.tcp.socket_count(), 0, "sockets are left: {host:?}");
            assert_eq!((host.tcp.time_wait_count(), host.tcp.request_count()), (0, 0));
            assert_eq!(host.tcp.opening_count(), 0);
            assert_eq!(host.tcp.memory_bytes(), 0);
            host.pool.flush();
            assert_eq!(host.pool.in_use(), 0, "frames are away");
        }
        for queues in &self.queues {
            assert_eq!((queues.handshakes(), queues.opening(), queues.waiting()), (0, 0, 0));
        }
    }
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host {} with {:?}", self.address, self.tcp.counters())
    }
}

/// Merges segments that follow each other, as coalescing does.
fn merged(packets: Vec<Packet>) -> Vec<Packet> {
    let mut whole: Vec<Packet> = Vec::new();
    for packet in packets {
        match whole.last_mut() {
            Some(last) if follows(last, &packet) => {
                let Packet { mut frame, headers, .. } = packet;
                frame.pull(headers.payload_offset.into());
                let size = last.headers.payload_len / (1 + last.frame.follower_count());
                if last.gso_size() == 0 {
                    last.set_gso_size(size);
                }
                last.headers.payload_len += headers.payload_len;
                last.frame.append(frame);
            }
            _ => whole.push(packet),
        }
    }
    whole
}

fn follows(last: &Packet, packet: &Packet) -> bool {
    let is_plain =
        |packet: &Packet| packet.view().tcp_flags().is_some_and(|flags| flags & 0xff == 0x10);
    let merged = 1 + last.frame.follower_count();
    let size = last.headers.payload_len / merged;
    let next =
        last.view().tcp_sequence().map(|seq| seq.wrapping_add(u32::from(size) * u32::from(merged)));
    size > 0
        && packet.headers.payload_len == size
        && packet.headers.payload_offset == last.headers.payload_offset
        && is_plain(last)
        && is_plain(packet)
        && packet.view().ports() == last.view().ports()
        && packet.view().tcp_sequence() == next
        && merged < 16
}
