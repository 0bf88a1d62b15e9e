//! Connections whose applications move from CPU to CPU, behind the receive path, in an order of steps that a seed
//! determines.
//!
//! Queues take in segments and steer them; CPUs dequeue batches, and pass them to the connections some steps later. Each
//! read records the CPU that the application is on (RFS), and the mask of permitted CPUs changes. Every byte is
//! compared with what its client sent.

use std::net::IpAddr;
use std::sync::Arc;

use etherparse::{PacketBuilder, TcpOptionElement};
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_buf::{Position, Region};
use forebay_rx::arrive::{Burst, PollStatus};
use forebay_rx::delivery::{Batch, Delivery, Handler};
use forebay_rx::hash::{FlowHash, Hasher, KEYED_KEY_BYTES};
use forebay_rx::intake::{Intake, IntakeConfig};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify, parse_packet};
use forebay_rx::steer::{MoveAfter, SockFlowTable, SpreadPolicy, SteerConfig};
use forebay_rx::{CpuId, RxQueue, SteerReason};
use forebay_stack::network::{Identity, NetworkConfig, NetworkLayer, NetworkVerdict, Prefix};
use forebay_stack::tcp::{
    Flow, FlowHasher, HashedFlow, Tcp, TcpConfig, TcpDevice, TcpError, TcpOut, TcpSocket,
};

const MTU: u32 = 1500;
const DEVICE: TcpDevice = TcpDevice { mtu_bytes: MTU, is_whole_host: true };
const SECRET: [u8; 16] = [3; 16];
const SERVER: [u8; 4] = [192, 0, 2, 2];
const PORT: u16 = 80;
/// Address of the first client, in 10.0.0.0/8; each has its own.
const FIRST_CLIENT: u32 = 0x0a00_0000;
const CLIENT_SEQ: u32 = 1000;
/// Largest payload of a segment.
const PAYLOAD_MAX: usize = 64;
/// Frames of each CPU.
const CHUNKS: u32 = 4096;
/// Packets that a queue takes in at once, and those of a CPU's batch.
const BURST: u32 = 64;
/// Packets that a backlog takes.
const BACKLOG: u32 = 1000;
/// Connections that are active at a time; each in its turn.
const ACTIVE: u64 = 2048;
/// One read in this many moves the application.
const READS_A_MOVE: u64 = 4;
/// One step in this many changes the permitted CPUs.
const STEPS_A_MASK: u64 = 50_000;
/// Shards of connections for each CPU.
const SHARDS_PER_CPU: usize = 32;

/// Size of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct MovesPlan {
    pub(super) seed: u64,
    pub(super) cpus: u16,
    /// The first CPUs poll one each.
    pub(super) queues: u16,
    pub(super) connections: u32,
    pub(super) segments: u64,
    /// Slots of each queue's flow table, and of the socket-flow table.
    pub(super) flow_slots: u32,
}

/// Result of a run, in which every byte that was sent has been compared.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct MovesResult {
    pub(super) segments: u64,
    pub(super) bytes: u64,
    /// Packets that moved their slot.
    pub(super) moves: u64,
    /// Packets that waited until their predecessors were processed, in the hold or on their old CPU.
    pub(super) waits: u64,
    /// Segments that a connection had to queue out of order, or had before.
    pub(super) disordered: u64,
    pub(super) dropped: u64,
    /// CPUs that passed on packets.
    pub(super) cpus: usize,
}

/// Runs a plan to its end.
pub(super) fn run(plan: MovesPlan) -> MovesResult {
    let queues = u32::from(plan.queues);
    assert!(
        plan.connections.is_multiple_of(queues),
        "each connection has one queue, and each queue as many"
    );
    let mut world = World::new(plan);
    (0..plan.connections).for_each(|client| world.open(client));
    while !world.has_ended() {
        world.step();
    }
    world.result()
}

struct World {
    plan: MovesPlan,
    random: Random,
    now_us: u64,
    epoch: u32,
    queues: Vec<Queue>,
    cpus: Vec<Cpu>,
    /// Memory of each CPU.
    pools: Vec<Pool>,
    host: Host,
    /// CPUs that may have packets.
    busy: Vec<CpuId>,
    /// Number of segments sent so far.
    sent: u64,
    dropped: u64,
}

struct Queue {
    intake: Intake,
    burst: Burst,
}

struct Cpu {
    delivery: Delivery,
    /// True if it has dequeued a batch that it has not passed on yet.
    has_batch: bool,
    is_busy: bool,
    has_passed: bool,
}

/// Connections and their applications.
struct Host {
    network: NetworkLayer,
    identity: Identity,
    hasher: FlowHasher,
    shards: Vec<Shard>,
    clients: Vec<Client>,
    sock_flows: Arc<SockFlowTable>,
    cpus: u64,
    random: Random,
    now_us: u64,
    bytes: u64,
    moves: u64,
    waits: u64,
}

struct Shard {
    tcp: Tcp,
    listener: TcpSocket,
}

/// A connection, and the client at its other end.
struct Client {
    socket: TcpSocket,
    /// Initial sequence number of the host.
    host_seq: u32,
    sent: u32,
    read: u32,
    /// CPU that the application is on.
    cpu: CpuId,
}

/// Pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn cpu(&mut self, cpus: u64) -> CpuId {
        CpuId(u16::try_from(self.below(cpus)).unwrap())
    }
}

impl World {
    fn new(plan: MovesPlan) -> Self {
        let mut random = Random(plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let cpus = usize::from(plan.cpus);
        let sock_flows = Arc::new(SockFlowTable::new(plan.flow_slots, cpus));
        let mut key = [0; KEYED_KEY_BYTES];
        key.iter_mut().for_each(|byte| *byte = u8::try_from(random.below(256)).unwrap());
        let hasher = Arc::new(Hasher::keyed(&key, false));
        let mut queues: Vec<_> = (0..plan.queues)
            .map(|queue| {
                let mut intake = Intake::new(config(&plan, RxQueue(queue), &hasher));
                intake.set_sock_flows(Some(Arc::clone(&sock_flows)), 0);
                Queue { intake, burst: Burst::default() }
            })
            .collect();
        let cpus = (0..plan.cpus).map(CpuId).map(|cpu| {
            let connect = |queue: &mut Queue| {
                let capacity = (BACKLOG + 1).next_power_of_two();
                queue.intake.connect(cpu, capacity, Position(0), true)
            };
            let lanes = queues.iter_mut().map(connect).collect();
            let delivery = Delivery::new(cpu, lanes, BURST as usize);
            Cpu { delivery, has_batch: false, is_busy: false, has_passed: false }
        });
        let cpus = cpus.collect();
        for queue in &mut queues {
            queue.intake.set_rps_cpus((0..plan.cpus).map(CpuId), 0);
        }
        let share = vec![ChunkClass { chunk_bytes: 512, chunks: CHUNKS }];
        let shares = vec![share; usize::from(plan.cpus)];
        let pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
        Self {
            plan,
            now_us: 1_000_000,
            epoch: 0,
            host: Host::new(&plan, sock_flows, Random(random.below(u64::MAX) | 1)),
            random,
            queues,
            cpus,
            pools,
            busy: Vec::new(),
            sent: 0,
            dropped: 0,
        }
    }

    /// Opens the connection of a client, past the receive path.
    fn open(&mut self, client: u32) {
        self.now_us += 1;
        self.host.now_us = self.now_us;
        let pool = &mut self.pools[0];
        let syn = parsed(pool, &segment(client, CLIENT_SEQ, None, &[]));
        let answer = self.host.deliver(syn, CpuId(0), pool).expect("a SYN is answered");
        let syn_ack = answer.frame.data()[24..28].try_into().unwrap();
        let host_seq = u32::from_be_bytes(syn_ack);
        pool.put(answer.frame);
        let ack = segment(client, CLIENT_SEQ + 1, Some(host_seq.wrapping_add(1)), &[]);
        let ack = parsed(pool, &ack);
        self.host.accept(ack, host_seq, pool);
        pool.collect();
    }

    fn has_ended(&self) -> bool {
        let held = || self.queues.iter().any(|queue| queue.intake.held() > 0);
        self.sent == self.plan.segments && self.busy.is_empty() && !held()
    }

    /// Does one thing, on one CPU.
    fn step(&mut self) {
        self.now_us += self.random.below(2);
        self.host.now_us = self.now_us;
        if self.random.below(STEPS_A_MASK) == 0 {
            self.change_mask();
        }
        if self.busy.is_empty() || self.random.below(8) == 0 {
            let queue = self.random.below(self.plan.queues.into());
            return self.poll(usize::try_from(queue).unwrap());
        }
        let at = usize::try_from(self.random.below(self.busy.len() as u64)).unwrap();
        if !self.turn(self.busy[at]) {
            let cpu = self.busy.swap_remove(at);
            self.cpus[cpu.index()].is_busy = false;
        }
    }

    /// Permits a random half of the CPUs.
    fn change_mask(&mut self) {
        self.epoch += 1;
        let cpus = (0..self.plan.cpus).map(CpuId);
        let permitted: Vec<_> = cpus.filter(|_| self.random.below(2) == 0).collect();
        for queue in &mut self.queues {
            queue.intake.set_rps_cpus(permitted.iter().copied(), self.epoch);
        }
    }

    /// Takes in a burst, as far as there is room.
    fn poll(&mut self, queue: usize) {
        let asked = 1 + self.random.below(BURST.into());
        let room = self.queues[queue].intake.room_for(u32::try_from(asked).unwrap());
        self.pools[queue].collect();
        for _ in 0..room {
            if self.sent == self.plan.segments {
                break;
            }
            self.send(queue);
        }
        let Queue { intake, burst } = &mut self.queues[queue];
        burst.poll_status = PollStatus::Drained;
        intake.observe();
        let pool = &mut self.pools[queue];
        for cpu in intake.turn(self.now_us * 1000, burst, pool) {
            let at = &mut self.cpus[cpu.index()];
            if !std::mem::replace(&mut at.is_busy, true) {
                self.busy.push(cpu);
            }
        }
        for dropped in intake.drain_dropped() {
            self.dropped += 1;
            dropped.packet.into_iter().for_each(|packet| pool.put(packet.frame));
        }
        pool.flush();
    }

    /// Sends the next segment of an active client of a queue.
    fn send(&mut self, queue: usize) {
        let connections = u64::from(self.plan.connections);
        let queues = u64::from(self.plan.queues);
        // The active clients are those from here on: all have their turn in the run.
        let first = self.sent * connections / self.plan.segments;
        let number = (first + self.random.below(ACTIVE.min(connections))) % connections;
        // The nearest one of this queue.
        let number = number - number % queues + queue as u64;
        let id = u32::try_from(number).unwrap();
        let client = &mut self.host.clients[usize::try_from(number).unwrap()];
        let len = 1 + u32::try_from(self.random.below(PAYLOAD_MAX as u64)).unwrap();
        let payload: Vec<u8> = (0..len).map(|at| byte_of(id, client.sent + at)).collect();
        let seq = CLIENT_SEQ + 1 + client.sent;
        let bytes = segment(id, seq, Some(client.host_seq.wrapping_add(1)), &payload);
        let arrival = Arrival::of_frame(self.sent);
        let Some(packet) = received(&mut self.pools[queue], arrival, &bytes) else { return };
        client.sent += len;
        self.sent += 1;
        self.queues[queue].burst.packets.push(packet);
    }

    /// Ends a CPU's batch, or begins one. Returns false if there was nothing to do.
    fn turn(&mut self, cpu: CpuId) -> bool {
        let pool = &mut self.pools[cpu.index()];
        let at = &mut self.cpus[cpu.index()];
        if std::mem::take(&mut at.has_batch) {
            at.delivery.handle(pool, &mut self.host);
            at.delivery.complete(pool);
            at.has_passed = true;
            pool.flush();
            return true;
        }
        let batch = 1 + usize::try_from(self.random.below(BURST.into())).unwrap();
        at.has_batch = at.delivery.take(batch) > 0;
        at.has_batch
    }

    /// Compares what was sent with what was read.
    fn result(mut self) -> MovesResult {
        for (number, client) in self.host.clients.iter().enumerate() {
            assert_eq!(client.read, client.sent, "bytes of connection {number} are missing");
        }
        self.pools.iter_mut().for_each(Pool::collect);
        let in_use: usize = self.pools.iter_mut().map(|pool| pool.in_use()).sum();
        assert_eq!(in_use, 0, "frames are missing");
        // Queued out of order, and received again.
        let disordered = ["TCPOFOQueue", "DelayedACKLost"].map(|name| self.host.counted(name));
        MovesResult {
            segments: self.sent,
            bytes: self.host.bytes,
            moves: self.host.moves,
            waits: self.host.waits,
            disordered: disordered.iter().sum(),
            dropped: self.dropped,
            cpus: self.cpus.iter().filter(|cpu| cpu.has_passed).count(),
        }
    }
}

fn config(plan: &MovesPlan, queue: RxQueue, hasher: &Arc<Hasher>) -> IntakeConfig {
    IntakeConfig {
        queue,
        cpus: plan.cpus.into(),
        verify: Verify::Checksums,
        completes_checksums: false,
        hasher: Arc::clone(hasher),
        coalesce: None,
        steer: SteerConfig {
            polling_cpu: CpuId(queue.0),
            rps_flow_cnt: plan.flow_slots,
            move_after: MoveAfter::default(),
            hold_max: BACKLOG,
            spread: SpreadPolicy::Always,
            batch_max: BURST,
        },
        netdev_max_backlog: BACKLOG,
    }
}

impl Host {
    fn new(plan: &MovesPlan, sock_flows: Arc<SockFlowTable>, random: Random) -> Self {
        let mut network = NetworkLayer::new(NetworkConfig::default(), Default::default());
        network.take_tcp();
        let shards = usize::from(plan.cpus) * SHARDS_PER_CPU;
        let config = TcpConfig { max_sockets: plan.connections + 1, ..TcpConfig::default() };
        let addresses = vec![Prefix { address: SERVER.into(), bits: 24 }];
        Self {
            network,
            identity: Identity { addresses, mtu: MTU, is_whole_host: true, ..Identity::default() },
            hasher: FlowHasher::new(SECRET),
            shards: (0..shards).map(|_| Shard::listening(config)).collect(),
            clients: Vec::with_capacity(plan.connections as usize),
            sock_flows,
            cpus: plan.cpus.into(),
            random,
            now_us: 0,
            bytes: 0,
            moves: 0,
            waits: 0,
        }
    }

    fn counted(&self, name: &str) -> u64 {
        let of_shard = |Shard { tcp, .. }: &Shard| {
            tcp.counters().iter().find(|(of, _)| *of == name).expect("a counter of TCP").1
        };
        self.shards.iter().map(of_shard).sum()
    }

    /// Passes a packet to its connection. Returns the first packet that is sent for it.
    fn deliver(&mut self, packet: Packet, cpu: CpuId, pool: &mut Pool) -> Option<Packet> {
        let received = self.network.receive(packet, &self.identity, self.now_us * 1000, pool);
        let NetworkVerdict::Segment(packet) = received else { panic!("{received:?}") };
        let flow = self.hasher.flow_of(&packet).unwrap();
        let mut packets = Vec::new();
        let mut out = TcpOut { now_us: self.now_us, cpu, pool, packets: &mut packets };
        let shards = self.shards.len();
        let Shard { tcp, .. } = &mut self.shards[shard_of(&flow, shards)];
        tcp.receive(packet, Some(&flow), DEVICE, &mut out);
        tcp.advance(&mut out);
        let mut packets = packets.into_iter();
        let first = packets.next();
        packets.for_each(|packet| pool.put(packet.frame));
        first
    }

    /// Passes on the last packet of a handshake, and accepts its connection.
    fn accept(&mut self, ack: Packet, host_seq: u32, pool: &mut Pool) {
        let flow = self.hasher.flow_of(&ack).unwrap();
        assert!(self.deliver(ack, CpuId(0), pool).is_none());
        let shards = self.shards.len();
        let Shard { tcp, listener } = &mut self.shards[shard_of(&flow, shards)];
        let (socket, _) = tcp.accept(*listener).unwrap();
        let cpu = self.random.cpu(self.cpus);
        self.clients.push(Client { socket, host_seq, sent: 0, read: 0, cpu });
    }

    /// Reads all that is there, as the application of the connection does.
    fn read(&mut self, flow: &HashedFlow, packet_hash: FlowHash, pool: &mut Pool) {
        let id = client_of(flow.flow());
        let client = &mut self.clients[id as usize];
        let shards = self.shards.len();
        let Shard { tcp, .. } = &mut self.shards[shard_of(flow, shards)];
        let mut packets = Vec::new();
        let (now_us, cpu) = (self.now_us, client.cpu);
        let mut out = TcpOut { now_us, cpu, pool, packets: &mut packets };
        let mut room = [0; 4 * PAYLOAD_MAX];
        loop {
            match tcp.read(client.socket, &mut room, &mut out) {
                Ok(len) => {
                    assert!(len > 0, "connection {id} has ended");
                    for &byte in &room[..len] {
                        assert_eq!(byte, byte_of(id, client.read), "byte {} of {id}", client.read);
                        client.read += 1;
                    }
                    self.bytes += len as u64;
                }
                Err(error) => {
                    assert_eq!(error, TcpError::WouldBlock, "connection {id}");
                    break;
                }
            }
        }
        packets.into_iter().for_each(|packet| pool.put(packet.frame));
        if self.random.below(READS_A_MOVE) == 0 {
            client.cpu = self.random.cpu(self.cpus);
        }
        self.sock_flows.record(packet_hash, client.cpu);
    }
}

impl Handler for Host {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        for note in batch.notes {
            self.moves += u64::from(note.head_old.is_some());
            let waited = matches!(note.steer_reason, SteerReason::Held | SteerReason::Stay);
            self.waits += u64::from(waited);
        }
        for packet in batch.packets.drain(..) {
            let (flow, hash) = (self.hasher.flow_of(&packet).unwrap(), packet.hash);
            let answer = self.deliver(packet, batch.cpu, batch.pool);
            answer.into_iter().for_each(|packet| batch.pool.put(packet.frame));
            self.read(&flow, hash, batch.pool);
        }
    }
}

impl Shard {
    fn listening(config: TcpConfig) -> Self {
        let mut tcp = Tcp::new(config, SECRET, 0);
        let listener = tcp.socket().unwrap();
        tcp.bind(listener, (IpAddr::from(SERVER), PORT).into()).unwrap();
        tcp.listen(listener, 16).unwrap();
        Self { tcp, listener }
    }
}

fn shard_of(flow: &HashedFlow, shards: usize) -> usize {
    usize::try_from(flow.hash() % shards as u64).unwrap()
}

fn client_of(flow: &Flow) -> u32 {
    let IpAddr::V4(address) = flow.theirs.ip() else { panic!("{flow:?}") };
    address.to_bits() - FIRST_CLIENT
}

/// Byte of a client's stream.
fn byte_of(client: u32, at: u32) -> u8 {
    client.wrapping_add(at).wrapping_mul(0x9e37_79b1).to_be_bytes()[0]
}

/// A segment of a client: without an ACK, its SYN.
fn segment(client: u32, seq: u32, ack: Option<u32>, payload: &[u8]) -> Vec<u8> {
    let builder = PacketBuilder::ipv4((FIRST_CLIENT + client).to_be_bytes(), SERVER, 64);
    let builder = builder.tcp(4000, PORT, seq, u16::MAX);
    let mut bytes = Vec::new();
    match ack {
        Some(ack) => builder.ack(ack).write(&mut bytes, payload).unwrap(),
        None => {
            let options = [TcpOptionElement::MaximumSegmentSize(1460)];
            builder.syn().options(&options).unwrap().write(&mut bytes, payload).unwrap();
        }
    }
    bytes
}

/// A packet in a frame of this pool; `None` if it has none.
fn received(pool: &mut Pool, arrival: Arrival, bytes: &[u8]) -> Option<Packet> {
    let len = u32::try_from(bytes.len()).unwrap();
    let mut frame = pool.allocate(len)?;
    frame.copy_from(bytes);
    Some(Packet::received(frame, arrival, len, Link::Ip))
}

/// A packet as it comes to the host.
fn parsed(pool: &mut Pool, bytes: &[u8]) -> Packet {
    let mut packet = received(pool, Arrival(0), bytes).unwrap();
    parse_packet(&mut packet, Verify::Checksums, pool).unwrap();
    packet
}

/// Fewer connections than the bench `moves` is meant for, on as many CPUs.
#[test]
fn tcp_20_bytes_ordered_through_all_moves() {
    let plan = MovesPlan {
        seed: 1,
        cpus: 128,
        queues: 4,
        connections: 5_000,
        segments: 200_000,
        flow_slots: 4096,
    };
    let result = run(plan);
    assert_eq!((result.segments, result.disordered, result.dropped), (plan.segments, 0, 0));
    assert_eq!(result.cpus, 128);
    assert!(result.moves > 30_000 && result.waits > 30_000, "{result:?}");
}
