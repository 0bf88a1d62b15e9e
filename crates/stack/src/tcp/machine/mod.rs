//! One shard of a host's TCP: finds the connection of a segment, which then processes it.

mod listeners; // listeners by address
mod calls; //     the application's calls, by socket
mod request; //   one handshake
mod handshake; // SYNs and ACKs at a listener
mod cookies; //   handshakes without memory
mod fast_open; // connections that begin with their SYN
mod syn_filter; // SYNs that are answered in a flood
mod passing; //   connections that go on in another process
mod reset; //     segments that belong to nothing
mod time_wait; // connections that ended
mod orphans; //   connections without an owner
mod housekeeping; // timers, memory, readiness after each change
mod levels; //    numbers of connections by state
mod observe; //   listeners and connections, for observers

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use forebay_buf::Pool;
use forebay_rx::cpu::CpuId;
use forebay_rx::packet::Packet;

use self::fast_open::FastOpenQueue;
pub use self::levels::TcpLevels;
use self::listeners::Listeners;
pub use self::listeners::ReusePort;
pub use self::observe::Listening;
use self::request::Request;
use self::syn_filter::SynFilter;
use self::time_wait::TimeWait;
use super::config::{TcpConfig, TcpOptions};
use super::connection::{Answer, Connection, Context, PathError, Shut, State, TcpInfo};
use super::connection_table::{ConnectionTable, Word};
use super::counters::TcpCounters;
use super::error::TcpError;
use super::error_queue::ErrorQueue;
use super::fast_open::{FastOpenCache, FastOpenKeys, FastOpenOptions};
use super::flow::{Flow, FlowHasher, HashedFlow};
use super::isn::Secret;
use super::memory::{Charge, TcpMemory};
use super::on_demand::OnDemand;
use super::seq::Seq;
use super::slots::Slots;
use super::timer_wheel::TimerWheel;
use super::wire::{Outgoing, Segment, emit};
use crate::Division;

/// Handle of a socket. A handle of a closed socket is refused, even if its slot is used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TcpSocket {
    index: u32,
    generation: u32,
}

impl TcpSocket {
    /// Slot of the socket among those of its [`Tcp`]. Slots of closed sockets are used again.
    #[must_use]
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// Device that a segment arrived on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpDevice {
    /// MTU of the device.
    pub mtu_bytes: u32,
    /// False if the kernel has the device, too: segments of no connection and no listener are the
    /// kernel's to answer.
    pub is_whole_host: bool,
}

/// Queues of one listener, which may listen in several [`Tcp`].
#[derive(Debug, Default)]
pub struct ListenerQueues {
    /// Handshakes that are not complete.
    requests: AtomicU32,
    /// Connections that wait to be accepted.
    accepted: AtomicU32,
    /// Connections that begin with their SYN.
    fast_open: FastOpenQueue,
}

/// Context of a call: the time, the CPU, memory, and the way out.
#[derive(Debug)]
pub struct TcpOut<'a> {
    /// Current time, in µs. It never goes back.
    pub now_us: u64,
    /// CPU that the call is made on. Of listeners that share an address, one prefers it.
    pub cpu: CpuId,
    /// Packet memory.
    pub pool: &'a mut Pool,
    /// Segments to be sent, in order; each begins with its IP header.
    pub packets: &'a mut Vec<Packet>,
}

/// State of a flow, for observers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, for an observer")]
pub enum Found {
    /// A connection.
    Connection(TcpInfo),
    /// A handshake at a listener, which is not complete.
    Handshake,
    /// A connection that has ended, or waits for the peer's FIN without an owner.
    TimeWait,
}

/// One shard of a host's TCP.
#[derive(Debug)]
pub struct Tcp {
    config: TcpConfig,
    secret: Secret,
    counters: Arc<TcpCounters>,
    levels: Arc<TcpLevels>,
    sockets: Slots<SocketEntry>,
    /// Connections, requests and entries in TIME-WAIT, by their ends.
    targets: ConnectionTable<Target>,
    listeners: Listeners,
    requests: Slots<Request>,
    /// Keys of Fast Open cookies, and those that servers gave this host.
    fast_open_keys: FastOpenKeys,
    fast_open_cache: Arc<FastOpenCache>,
    /// Connections that began with their SYN and whose handshake is not over, by socket.
    fast_opening: BTreeMap<u32, Arc<ListenerQueues>>,
    time_waits: Slots<TimeWait>,
    socket_timers: TimerWheel,
    request_timers: TimerWheel,
    time_wait_timers: TimerWheel,
    /// Memory of all queues, in bytes, and that of all TCPs together.
    memory_bytes: u64,
    memory: Arc<TcpMemory>,
    /// Place among other processes that listen on the same ports.
    division: Option<Arc<dyn Division>>,
    /// Connections without an owner.
    orphans: u32,
    /// Number of the next socket.
    generation: u32,
    /// Local ports tried so far.
    port_steps: u32,
    /// Time when a listener last overflowed into cookies, in µs; 0 for never.
    cookies_us: u64,
    syn_filter: SynFilter,
    /// Sockets whose readiness grew.
    ready: Vec<TcpSocket>,
    fired: Vec<u32>,
}

/// Memory of a connection without data, beside what the application has of it.
const CONNECTION_BYTES: usize = size_of::<Connection>()
    + size_of::<SocketEntry>()
    + ConnectionTable::<Target>::ENTRY_BYTES
    + TimerWheel::TIMER_BYTES;

/// Most of the 1,024 bytes that an idle connection may take, with its handle and what wakes its waiters.
const CONNECTION_BYTES_MAX: usize = 768;
const _: () = assert!(CONNECTION_BYTES <= CONNECTION_BYTES_MAX, "TCP-12: an idle connection");

/// A socket in its slot.
#[derive(Debug)]
struct SocketEntry {
    generation: u32,
    kind: Kind,
    told: Told,
    /// State that counts in [`Tcp::levels`]; [`State::Closed`] of a socket that is not a connection.
    counted: State,
    charge: Charge,
    /// Socket as it was before it connected, if it had more than options: a later `connect` needs that again.
    before: Option<Box<Idle>>,
}

/// Readiness that was told last, a bit for each kind.
#[derive(Clone, Copy, Default, Debug)]
struct Told(u8);

#[derive(Debug)]
enum Kind {
    Idle(Box<Idle>),
    Listener(Box<Listener>),
    Connection(Box<Connection>),
}

/// A socket that is neither connected nor listening.
#[derive(Debug, Default)]
struct Idle {
    options: TcpOptions,
    fast_open: FastOpenOptions,
    bound: Option<SocketAddr>,
    /// Sharing of the address, once it is bound.
    reuse_port: Option<ReusePort>,
    /// Error of the connection that was ended here, to be told by the next call.
    error: Option<TcpError>,
    /// Error queue of that connection.
    errors: OnDemand<ErrorQueue>,
    /// Directions that were shut down, of the connection to be opened, too.
    shut: Shut,
}

impl Idle {
    /// Forgets options that end with a connection, or with listening (`tcp_disconnect`).
    fn reset_connection_options(&mut self) {
        let initial = TcpOptions::DEFAULT;
        self.options.max_segment = initial.max_segment;
        self.options.window_clamp = initial.window_clamp;
        self.options.quick_acks = initial.quick_acks;
        self.shut = Shut::default();
    }

    fn has_more_than_options(&self) -> bool {
        self.bound.is_some() || self.fast_open != FastOpenOptions::default()
    }
}

/// A listening socket.
#[derive(Debug)]
struct Listener {
    /// Options that its connections inherit.
    options: TcpOptions,
    fast_open: FastOpenOptions,
    local: SocketAddr,
    reuse_port: Option<ReusePort>,
    /// Connections that wait to be accepted, at most one more than this.
    backlog: u32,
    accepted: VecDeque<u32>,
    queues: Arc<ListenerQueues>,
}

impl SocketEntry {
    fn options(&self) -> TcpOptions {
        match &self.kind {
            Kind::Idle(idle) => idle.options,
            Kind::Listener(listener) => listener.options,
            Kind::Connection(connection) => connection.options.get(),
        }
    }
}

/// Value behind a flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    Connection(u32),
    Request(u32),
    TimeWait(u32),
}

/// Highest bits of a word, which tell the kind of a target.
const TARGET_SHIFT: u32 = 30;
const INDEX_MASK: u32 = (1 << TARGET_SHIFT) - 1;

impl Word for Target {
    fn word(self) -> u32 {
        let (kind, index) = match self {
            Self::Connection(index) => (0, index),
            Self::Request(index) => (1, index),
            Self::TimeWait(index) => (2, index),
        };
        // 2^30 connections would take a TiB.
        assert!(index <= INDEX_MASK, "a shard holds at most {INDEX_MASK} connections");
        kind << TARGET_SHIFT | index
    }

    fn of_word(word: u32) -> Self {
        let index = word & INDEX_MASK;
        match word >> TARGET_SHIFT {
            0 => Self::Connection(index),
            1 => Self::Request(index),
            _ => Self::TimeWait(index),
        }
    }
}

impl Tcp {
    /// Creates a TCP without sockets. `secret` must be random: sequence numbers, cookies and hashes
    /// come from it.
    #[must_use]
    pub fn new(config: TcpConfig, secret: [u8; 16], now_us: u64) -> Self {
        Self::with_memory(config, secret, now_us, Arc::default())
    }

    /// Creates one of several TCPs with common limits of memory, [`TcpConfig::memory_bytes`] and
    /// [`TcpConfig::received_bytes`].
    #[must_use]
    pub fn with_memory(
        config: TcpConfig,
        secret: [u8; 16],
        now_us: u64,
        memory: Arc<TcpMemory>,
    ) -> Self {
        Self {
            config,
            secret: Secret(secret),
            counters: Arc::default(),
            levels: Arc::default(),
            sockets: Slots::default(),
            targets: ConnectionTable::new(FlowHasher::new(secret)),
            listeners: Listeners::default(),
            requests: Slots::default(),
            fast_open_keys: Secret(secret).fast_open_keys(),
            fast_open_cache: Arc::new(FastOpenCache::new(secret)),
            fast_opening: BTreeMap::new(),
            time_waits: Slots::default(),
            socket_timers: TimerWheel::new(now_us),
            request_timers: TimerWheel::new(now_us),
            time_wait_timers: TimerWheel::new(now_us),
            memory_bytes: 0,
            memory,
            division: None,
            orphans: 0,
            generation: 0,
            port_steps: 0,
            cookies_us: 0,
            syn_filter: SynFilter::default(),
            ready: Vec::new(),
            fired: Vec::new(),
        }
    }

    /// Replaces the settings. Sockets keep what they began with, but for the offers of a SYN that is sent again.
    pub fn configure(&mut self, config: TcpConfig) {
        self.config = config;
    }

    /// Settings.
    #[must_use]
    pub fn config(&self) -> &TcpConfig {
        &self.config
    }

    /// Sets the place among other processes that listen on the same ports.
    pub fn divide(&mut self, place: Arc<dyn Division>) {
        self.division = Some(place);
    }

    /// True if this process takes new connections of a flow to a listener.
    fn takes(&self, listener: u32, flow: &Flow) -> bool {
        let Some(division) = &self.division else { return true };
        self.address_of(listener).is_some_and(|local| division.takes(local, flow))
    }

    /// True if this process answers for a listener about a flow that is nobody's.
    fn answers(&self, listener: u32, flow: &Flow) -> bool {
        let Some(division) = &self.division else { return true };
        self.address_of(listener).is_some_and(|local| division.answers(local, flow))
    }

    /// Address of a listener.
    fn address_of(&self, listener: u32) -> Option<SocketAddr> {
        match &self.sockets.at(listener)?.kind {
            Kind::Listener(listener) => Some(listener.local),
            _ => None,
        }
    }

    /// Claims a flow of a listener for this process. False if another one has it.
    fn claim(&self, flow: &Flow, syn: Seq) -> bool {
        self.division.as_ref().is_none_or(|division| division.claim(flow, syn.0))
    }

    /// Forgets a flow, which any process may have from now on.
    fn forget_flow(&mut self, flow: &Flow) {
        self.targets.remove(flow);
        if let Some(division) = &self.division {
            division.release(flow);
        }
    }

    /// Counters, for any reader.
    #[must_use]
    pub fn counters(&self) -> &Arc<TcpCounters> {
        &self.counters
    }

    /// Processes a segment to this host, whose header and checksum the network layer has checked. `flow`
    /// is that of the segment, hashed with the secret of this TCP. Returns the connection that it
    /// belonged to before.
    pub fn receive(
        &mut self,
        packet: Packet,
        flow: Option<&HashedFlow>,
        device: TcpDevice,
        out: &mut TcpOut<'_>,
    ) -> Option<TcpSocket> {
        self.counters.in_segs.add(packet.wire_count().into());
        let (Some(flow), Some(segment)) = (flow, Segment::of(&packet)) else {
            self.counters.in_errs.add(1);
            out.pool.put(packet.frame);
            return None;
        };
        let mtu_bytes = device.mtu_bytes;
        let target = self.targets.find_hashed(flow);
        if segment.options.is_signed && !matches!(target, Some(Target::TimeWait(_))) {
            // As the kernel, even where a reset would follow: it could not be signed.
            self.counters.md5_unexpected.add(1);
            out.pool.put(packet.frame);
            return None;
        }
        let answer = match target {
            Some(Target::Connection(index)) => {
                let generation = self.sockets.at(index).map(|entry| entry.generation);
                self.receive_connected(index, packet, &segment, out);
                return generation.map(|generation| TcpSocket { index, generation });
            }
            Some(Target::Request(index)) => {
                self.bound_request(index, mtu_bytes);
                self.receive_request(index, packet, &segment, out)
            }
            Some(Target::TimeWait(index)) => {
                self.receive_in_time_wait(index, packet, &segment, mtu_bytes, out)
            }
            None => self.receive_unknown(flow, packet, &segment, device, out),
        };
        if answer == Answer::Reset {
            self.reset(flow.flow(), &segment, out);
        }
        None
    }

    /// Processes an ICMP error about a segment of ours that began at `seq`. Returns the MTU of the path, if the error narrowed
    /// it: only one about a segment in flight does (RFC 5927).
    pub fn receive_error(
        &mut self,
        flow: &Flow,
        seq: Seq,
        error: PathError,
        out: &mut TcpOut<'_>,
    ) -> Option<u32> {
        match self.targets.find(flow) {
            Some(Target::Connection(index)) => {
                let process = |connection: &mut Connection, cx: &mut Context<'_>| {
                    connection.on_path_error(error, seq, cx)
                };
                self.with_connection(index, out, process).flatten()
            }
            Some(Target::Request(at)) => {
                self.end_handshake(at, seq, error);
                None
            }
            Some(Target::TimeWait(_)) | None => None,
        }
    }

    /// Processes an error about a SYN-ACK (`tcp_req_err`).
    fn end_handshake(&mut self, at: u32, seq: Seq, error: PathError) {
        if self.requests.at(at).is_some_and(|request| request.sequence != seq) {
            self.counters.out_of_window_icmps.add(1);
        } else if let PathError::Unreachable { ends_handshake: true, .. } = error {
            self.drop_request(at);
            self.counters.listen_drops.add(1);
        }
    }

    fn receive_connected(
        &mut self,
        index: u32,
        packet: Packet,
        segment: &Segment,
        out: &mut TcpOut<'_>,
    ) {
        let mut packet = Some(packet);
        let answer = self.with_connection(index, out, |connection, cx| {
            if packet.as_ref().is_some_and(|packet| is_too_far(packet, connection.min_ttl())) {
                // Forged perhaps: neighbours alone have such a TTL (RFC 5082).
                cx.counters.min_ttl_drop.add(1);
                return None;
            }
            packet.take().map(|packet| (connection.flow(), connection.receive(packet, segment, cx)))
        });
        if let Some(packet) = packet {
            out.pool.put(packet.frame);
        }
        if let Some(Some((flow, Answer::Reset))) = answer {
            self.reset(&flow, segment, out);
        }
    }

    /// Segment of no connection: a listener's, or nobody's.
    fn receive_unknown(
        &mut self,
        flow: &HashedFlow,
        packet: Packet,
        segment: &Segment,
        device: TcpDevice,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        let Some(listener) = self.listeners.find(flow, out.cpu) else {
            out.pool.put(packet.frame);
            // Another one answers, if it is nobody's: the kernel, or a process that listens.
            let is_ours = device.is_whole_host && self.division.is_none();
            if !is_ours {
                self.counters.not_ours.add(1);
            }
            return Answer::reset_if(is_ours);
        };
        self.receive_at_listener(listener, flow.flow(), packet, segment, device.mtu_bytes, out)
    }

    /// Entry of a socket that is not closed.
    fn entry(&self, socket: TcpSocket) -> Result<&SocketEntry, TcpError> {
        let entry = self.sockets.at(socket.index);
        entry.filter(|entry| entry.generation == socket.generation).ok_or(TcpError::NoSocket)
    }

    fn entry_mut(&mut self, socket: TcpSocket) -> Result<&mut SocketEntry, TcpError> {
        let entry = self.sockets.at_mut(socket.index);
        entry.filter(|entry| entry.generation == socket.generation).ok_or(TcpError::NoSocket)
    }

    /// Lets a connection do something, and then follows what changed.
    fn with_connection<R>(
        &mut self,
        index: u32,
        out: &mut TcpOut<'_>,
        act: impl FnOnce(&mut Connection, &mut Context<'_>) -> R,
    ) -> Option<R> {
        let memory = self.pressure();
        let Some(SocketEntry { kind: Kind::Connection(connection), .. }) =
            self.sockets.at_mut(index)
        else {
            return None;
        };
        let mut cx = Context {
            now_us: out.now_us,
            pool: out.pool,
            out: out.packets,
            config: &self.config,
            counters: &self.counters,
            fast_open: &self.fast_open_cache,
            memory,
        };
        let result = act(connection, &mut cx);
        self.follow(index, out);
        Some(result)
    }

    pub(super) fn send(&self, outgoing: &Outgoing<'_>, out: &mut TcpOut<'_>) {
        match emit(outgoing, out.pool) {
            Some(packet) => {
                self.counters.out_segs.add(1);
                out.packets.push(packet);
            }
            None => self.counters.no_frame.add(1),
        }
    }
}

/// True if a packet came from farther away than a socket permits. Without a limit, the packet is not looked at.
fn is_too_far(packet: &Packet, min_ttl: u8) -> bool {
    min_ttl > 0 && packet.view().ttl().is_some_and(|ttl| ttl < min_ttl)
}
