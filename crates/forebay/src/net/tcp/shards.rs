//! The connections of a host, in shards.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, mem};

use forebay_rx::Packet;
use forebay_rx::arrive::Waker;
use forebay_rx::hash::FlowHash;
use forebay_stack::Division;
use forebay_stack::network::{Identity, TcpPathError};
use forebay_stack::socket::LOCAL_PORTS;
use forebay_stack::tcp::{
    FastOpenCache, Flow, FlowHasher, Found, HashedFlow, State, Tcp, TcpConfig, TcpCounters,
    TcpDevice, TcpLevels, TcpMemory, TcpOut, TcpSocket,
};
use forebay_sys as sys;
use forebay_sys::clock::Clock;
use forebay_sys::tcp_reserve::Reservation;

use super::super::neighbours::WayBack;
use super::super::path_mtus::PathMtus;
use super::super::shared::{CpuIndex, NetState};
use super::super::transmit::SegmentMark;
use super::short::ShortOfMemory;
use super::timers::TcpTimers;
use super::wait::{StreamWatch, Watch};

/// Shards for each CPU. Two CPUs wait for each other only if they work on one shard at a time.
const SHARDS_PER_CPU: usize = 32;

/// Part by which a full table of waiters grows, and places that it grows by at least.
const GROWTH_PART: usize = 8;
const WATCHES_MIN: usize = 8;

/// CPU that looks for memory.
pub(super) const MEMORY_CPU: CpuIndex = CpuIndex(0);

/// Connections, listeners and their timers.
pub(in crate::net) struct TcpShards {
    shards: Box<[Mutex<Shard>]>,
    hasher: FlowHasher,
    clock: Clock,
    pub(super) timers: TcpTimers,
    /// Local ports tried so far.
    port_steps: AtomicU32,
    /// Memory of all shards together, its limit, and the connections whose writes wait for some.
    pub(super) memory: Arc<TcpMemory>,
    memory_bytes_max: u64,
    short_of_memory: ShortOfMemory,
    counters: Box<[Arc<TcpCounters>]>,
    pub(super) levels: Box<[Arc<TcpLevels>]>,
    /// Paths that errors about segments in flight have told of. Those about datagrams, which hosts beside the path can forge,
    /// are not among them.
    path_mtus: PathMtus,
}

/// Index of a shard among all of a host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct ShardIndex(pub(super) usize);

/// Socket of a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ShardSocket {
    pub(super) shard: ShardIndex,
    pub(super) socket: TcpSocket,
}

/// Port that the kernel's programs cannot have, and that the kernel does not answer on.
pub(super) type Reserved = Arc<Reservation>;

/// Work that a TCP has done.
struct Work<'a, R> {
    shard: MutexGuard<'a, Shard>,
    result: R,
    /// Transmitter whose memory was used.
    by: CpuIndex,
    /// Transmitter to be flushed, if any, without the shard's lock.
    gathered_by: Option<CpuIndex>,
}

/// Part of the connections.
pub(super) struct Shard {
    pub(super) tcp: Tcp,
    /// Waiters of each socket that the application has, by [`TcpSocket::index`]: an index is used again only after the
    /// application has closed the socket.
    watches: Vec<Option<Watch>>,
    /// Segments to be sent; empty between calls.
    packets: Vec<Packet>,
    /// Sockets whose readiness grew; empty between calls.
    ready: Vec<TcpSocket>,
    /// Ports of connections without an application, which the kernel must not answer on.
    orphans: Vec<(TcpSocket, Reserved)>,
    /// Number of sockets when `orphans` was last looked through.
    sockets: u32,
    /// Transmitter that gathered the last segments of this shard, and its mark of them.
    gathered_by: Option<(CpuIndex, SegmentMark)>,
}

/// Waiters to notify when it is dropped: also if a later segment panics.
#[derive(Default)]
struct ToNotify(Vec<Watch>);

impl Drop for ToNotify {
    fn drop(&mut self) {
        self.0.iter().for_each(Watch::notify);
    }
}

impl TcpShards {
    pub(in crate::net) fn new(
        config: TcpConfig,
        cpus: usize,
        division: Option<Arc<dyn Division>>,
    ) -> Self {
        let of_all =
            |division: &Arc<dyn Division>| Clock::Machine { origin_ns: division.origin_ns() };
        let clock = division.as_ref().map_or_else(Clock::machine, of_all);
        let count = cpus * SHARDS_PER_CPU;
        let share = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let of_cpu = u32::try_from(SHARDS_PER_CPU).unwrap_or(u32::MAX);
        let config = TcpConfig {
            max_sockets: config.max_sockets.div_ceil(share),
            max_time_wait: config.max_time_wait.div_ceil(share),
            max_orphans: config.max_orphans.div_ceil(share),
            cookies_per_s: config.cookies_per_s.div_ceil(of_cpu),
            ..config
        };
        // One secret: a sequence number or cookie does not depend on the number of shards.
        let secret = division.as_ref().map_or_else(sys::random_key, |division| division.secret());
        let memory = Arc::<TcpMemory>::default();
        let now_us = clock.now_ns() / 1000;
        let mut tcps: Vec<Tcp> = (0..count)
            .map(|_| Tcp::with_memory(config, secret, now_us, Arc::clone(&memory)))
            .collect();
        // The next connection to a server may be another shard's.
        let cookies = Arc::new(FastOpenCache::new(secret));
        tcps.iter_mut().for_each(|tcp| tcp.share_fast_open(Arc::clone(&cookies)));
        if let Some(place) = division {
            tcps.iter_mut().for_each(|tcp| tcp.divide(Arc::clone(&place)));
        }
        Self {
            counters: tcps.iter().map(|tcp| Arc::clone(tcp.counters())).collect(),
            levels: tcps.iter().map(|tcp| Arc::clone(tcp.levels())).collect(),
            shards: tcps.into_iter().map(|tcp| Mutex::new(Shard::new(tcp))).collect(),
            hasher: FlowHasher::new(secret),
            clock,
            path_mtus: PathMtus::default(),
            timers: TcpTimers::new(cpus, SHARDS_PER_CPU),
            port_steps: AtomicU32::new(0),
            memory,
            memory_bytes_max: config.memory_bytes,
            short_of_memory: ShortOfMemory::default(),
        }
    }

    /// Sets the wakers of all CPUs, once the engine is built.
    pub(in crate::net) fn set_wakers(&self, wakers: Vec<Waker>) {
        self.timers.set_wakers(wakers);
    }

    /// Wakes a CPU to look at its transmitter soon.
    pub(in crate::net) fn look_soon(&self, cpu: CpuIndex) {
        self.timers.wake_to_look(cpu, self.now_us());
    }

    /// Clock of all connections, and of all next hops.
    pub(in crate::net) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// MTU of the path to a host, by a device with this MTU.
    pub(super) fn mtu_towards(&self, peer: IpAddr, device_mtu: u32, now_ns: u64) -> u32 {
        let of_path = self.path_mtus.find(peer, now_ns);
        of_path.map_or(device_mtu, |of_path| of_path.min(device_mtu))
    }

    /// Time of all connections, in µs.
    pub(super) fn now_us(&self) -> u64 {
        self.clock.now_ns() / 1000
    }

    /// Number of shards.
    pub(in crate::net) fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Indices of all shards.
    pub(super) fn indices(&self) -> impl ExactSizeIterator<Item = ShardIndex> + use<> {
        (0..self.shards.len()).map(ShardIndex)
    }

    /// Shard of a connection.
    pub(super) fn shard_of(&self, flow: &Flow) -> ShardIndex {
        self.shard_of_hashed(&self.hasher.hashed(flow))
    }

    fn shard_of_hashed(&self, flow: &HashedFlow) -> ShardIndex {
        let count = self.shards.len() as u64;
        // The remainder of a small number.
        ShardIndex(usize::try_from(flow.hash() % count).unwrap_or(0))
    }

    /// Local ports, in an order that depends on the address that they are for (RFC 6056).
    pub(super) fn ports(&self, towards: SocketAddr) -> impl Iterator<Item = u16> + use<> {
        let (first_port, last_port) = (*LOCAL_PORTS.start(), *LOCAL_PORTS.end());
        let count = u32::from(last_port - first_port) + 1;
        let flow = Flow { ours: SocketAddr::new(towards.ip(), 0), theirs: towards };
        let step = u64::from(self.port_steps.fetch_add(1, Ordering::Relaxed));
        let first = (self.hasher.hashed(&flow).hash() >> 32).wrapping_add(step);
        let offset = move |step: u32| (first + u64::from(step)) % u64::from(count);
        (0..count).map(move |step| first_port + u16::try_from(offset(step)).unwrap_or(0))
    }

    /// True if a listener has this address, or all.
    pub(super) fn has_listener_at(&self, address: SocketAddr) -> bool {
        // All shards have the same listeners.
        self.shard(ShardIndex(0)).tcp.has_listener_at(address)
    }

    /// State of a flow in the TCP of its shard.
    pub(super) fn find(&self, flow: &Flow) -> Option<Found> {
        self.shard(self.shard_of(flow)).tcp.find(flow)
    }

    /// Flows of the connections of a shard whose last segment had this hash, at most `most`.
    pub(super) fn flows_of(&self, shard: ShardIndex, hash: FlowHash, most: usize) -> Vec<Flow> {
        let shard = self.shard(shard);
        let is_of = |watch: &Watch| matches!(watch, Watch::Stream(it) if it.hash() == Some(hash));
        let watched = shard.watches.iter().enumerate();
        let watched = watched.filter(|(_, watch)| watch.as_ref().is_some_and(is_of));
        let sockets = watched.filter_map(|(index, _)| shard.tcp.socket_at(index));
        sockets.filter_map(|socket| shard.tcp.flow(socket).ok()).take(most).collect()
    }

    pub(super) fn shard(&self, ShardIndex(index): ShardIndex) -> MutexGuard<'_, Shard> {
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if writes wait for memory.
    pub(super) fn is_short_of_memory(&self) -> bool {
        self.short_of_memory.is_any()
    }

    /// Wakes the writes that wait for memory, if there is some or they have waited for long.
    pub(super) fn release_writes(&self, now_us: u64) {
        let is_memory_back = self.memory.bytes() < self.memory_bytes_max;
        self.short_of_memory.release(is_memory_back, now_us);
    }

    /// Number of closed connections whose peer does not have everything yet.
    pub(in crate::net) fn unfinished(&self) -> usize {
        let is_unfinished = |shard: &Shard, socket: TcpSocket| {
            let state = shard.tcp.info(socket).ok().flatten().map(|info| info.state);
            matches!(state, Some(State::FinWait1 | State::Closing | State::LastAck))
        };
        let of_shard = |index| {
            let shard = self.shard(index);
            let orphans = shard.orphans.iter();
            orphans.filter(|(socket, _)| is_unfinished(&shard, *socket)).count()
        };
        self.indices().map(of_shard).sum()
    }

    /// Counters of all shards.
    pub(in crate::net) fn counters(&self) -> &[Arc<TcpCounters>] {
        &self.counters
    }
}

impl Shard {
    fn new(tcp: Tcp) -> Self {
        Self {
            tcp,
            watches: Vec::new(),
            packets: Vec::new(),
            ready: Vec::new(),
            orphans: Vec::new(),
            sockets: 0,
            gathered_by: None,
        }
    }

    fn watch_of(&self, socket: TcpSocket) -> Option<&Watch> {
        self.watches.get(socket.index())?.as_ref()
    }

    /// Registers the waiters of a socket.
    fn watch(&mut self, socket: TcpSocket, watch: Watch) {
        let index = socket.index();
        if self.watches.len() <= index {
            let more = index + 1 - self.watches.len();
            if self.watches.capacity() <= index {
                // Not twice as much: an idle connection pays for it.
                self.watches.reserve_exact(more.max(WATCHES_MIN).max(index / GROWTH_PART));
            }
            self.watches.resize_with(index + 1, || None);
        }
        self.watches[index] = Some(watch);
        // Nobody waits yet.
        let _ = self.set_readiness(socket);
    }

    /// Forgets the waiters of a socket.
    fn unwatch(&mut self, socket: TcpSocket) {
        if let Some(place) = self.watches.get_mut(socket.index()) {
            *place = None;
        }
    }

    /// Releases the ports of connections that have ended.
    fn release_ports(&mut self) {
        let Self { tcp, orphans, sockets, .. } = self;
        // A segment in the middle of a connection ends none.
        if *sockets != tcp.socket_count() {
            *sockets = tcp.socket_count();
            orphans.retain(|(socket, _)| tcp.readiness(*socket).is_ok());
        }
    }

    /// Sets the readiness of a socket. Returns its waiters if they are to be notified.
    fn set_readiness(&self, socket: TcpSocket) -> Option<&Watch> {
        let watch = self.watch_of(socket)?;
        let readiness = self.tcp.readiness(socket).ok()?;
        watch.set(&readiness).then_some(watch)
    }

    /// Sets the readiness of the sockets where it grew. Adds their waiters to those to notify.
    fn set_ready(&mut self, shard: ShardIndex, to_notify: &mut Vec<Watch>) {
        let mut ready = mem::take(&mut self.ready);
        self.tcp.take_ready(&mut ready);
        for socket in ready.drain(..) {
            if let Some(watch @ Watch::Listener(listener)) = self.watch_of(socket) {
                listener.push(ShardSocket { shard, socket });
                to_notify.push(watch.clone());
            } else {
                to_notify.extend(self.set_readiness(socket).cloned());
            }
        }
        self.ready = ready;
    }
}

impl NetState {
    /// Calls the TCP of a shard. What it answers leaves at once, and who waits for it is woken.
    pub(super) fn call_tcp<R>(
        &self,
        index: ShardIndex,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R,
    ) -> R {
        let Work { shard, result, gathered_by, .. } = self.work(index, act);
        self.finish(index, shard, gathered_by, Vec::new());
        result
    }

    /// Calls the TCP of a socket, which may be less ready afterwards.
    pub(super) fn call_socket<R>(
        &self,
        ShardSocket { shard: index, socket }: ShardSocket,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R,
    ) -> R {
        let Work { shard, result, gathered_by, .. } = self.work(index, act);
        let to_notify = shard.set_readiness(socket).cloned().into_iter().collect();
        self.finish(index, shard, gathered_by, to_notify);
        result
    }

    /// Calls the TCP of a shard to open a socket, whose waiters get all news.
    pub(super) fn open_socket<E>(
        &self,
        index: ShardIndex,
        watch: &Watch,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> Result<TcpSocket, E>,
    ) -> Result<ShardSocket, E> {
        let Work { mut shard, result: opened, gathered_by, .. } = self.work(index, act);
        if let Ok(socket) = &opened {
            shard.watch(*socket, watch.clone());
        }
        self.finish(index, shard, gathered_by, Vec::new());
        self.end_if_over(watch);
        Ok(ShardSocket { shard: index, socket: opened? })
    }

    /// Registers the waiters of a socket that is open.
    pub(super) fn watch(&self, ShardSocket { shard, socket }: ShardSocket, watch: &Watch) {
        self.tcp.shard(shard).watch(socket, watch.clone());
        self.end_if_over(watch);
    }

    /// Wakes the connection's writers once memory is free. No event announces that, so the first CPU
    /// looks for it.
    pub(super) fn await_memory(&self, watch: &Arc<StreamWatch>) {
        if watch.wait.lack_memory() {
            let now_us = self.tcp.now_us();
            self.tcp.short_of_memory.add(watch, now_us);
            self.tcp.timers.wake_to_look(MEMORY_CPU, now_us);
        }
    }

    /// Wakes waiters that the end of the run did not find.
    fn end_if_over(&self, watch: &Watch) {
        if self.has_ended() {
            watch.end();
        }
    }

    /// Closes a socket. Its port stays reserved until the peer has everything.
    pub(super) fn close_socket(
        &self,
        ShardSocket { shard: index, socket }: ShardSocket,
        reserved: Option<Reserved>,
    ) {
        let work = self.work(index, |tcp, out| tcp.close(socket, out));
        let Work { mut shard, result: closed, gathered_by, .. } = work;
        // A socket that ended with the run may have left its index to another.
        if closed.is_ok() {
            shard.unwatch(socket);
        }
        if let Some(reserved) = reserved.filter(|_| shard.tcp.readiness(socket).is_ok()) {
            shard.orphans.push((socket, reserved));
        }
        self.finish(index, shard, gathered_by, Vec::new());
    }

    /// Processes the segments of a batch, which arrived on a device with this identity, on a CPU.
    pub(in crate::net) fn receive_segments(
        &self,
        on: &Identity,
        cpu: CpuIndex,
        segments: &mut Vec<Packet>,
    ) {
        let now_ns = self.tcp.clock().now_ns();
        // MTU of the path to the source of the segment before: segments of a flow come together.
        let mut last = None;
        let mut to_notify = ToNotify::default();
        for packet in segments.drain(..) {
            let hash = packet.hash;
            let flow = self.tcp.hasher.flow_of(&packet);
            let index = flow.as_ref().map_or(ShardIndex(0), |flow| self.tcp.shard_of_hashed(flow));
            let source = flow.as_ref().map(|flow| flow.flow().theirs.ip());
            let back = source.and_then(|source| WayBack::of(&packet, source));
            let mtu_bytes = source.map_or(on.mtu, |source| match last {
                Some((of, mtu_bytes)) if of == source => mtu_bytes,
                _ => last.insert((source, self.tcp.mtu_towards(source, on.mtu, now_ns))).1,
            });
            let device = TcpDevice { mtu_bytes, is_whole_host: on.is_whole_host };
            let receive = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
                tcp.receive(packet, flow.as_ref(), device, out)
            };
            let Work { shard, result, by, .. } = self.work_by(cpu, index, back, receive);
            if let Some(Watch::Stream(stream)) = result.and_then(|socket| shard.watch_of(socket)) {
                stream.set_hash(hash);
            }
            self.release(index, shard, &mut to_notify.0);
            // Even if nothing was gathered: the other one has frames of this CPU now.
            if by != cpu {
                self.send_gathered(by);
            }
        }
        self.send_gathered(cpu);
    }

    /// Processes an ICMP error about a segment of ours.
    pub(in crate::net) fn receive_path_error(&self, about: &TcpPathError) {
        let &TcpPathError { flow, seq, error } = about;
        let index = self.tcp.shard_of(&flow);
        let narrowed = self.call_tcp(index, |tcp, out| tcp.receive_error(&flow, seq, error, out));
        if let Some(mtu_bytes) = narrowed {
            // The next connections to this host begin with it.
            self.tcp.path_mtus.learn(flow.theirs.ip(), mtu_bytes, self.tcp.clock().now_ns());
        }
    }

    /// Resets all connections, as the run has ended, and wakes who waits for them.
    pub(in crate::net) fn end_tcp(&self) {
        for index in self.tcp.indices() {
            self.call_tcp(index, Tcp::abort_all);
            let shard = self.tcp.shard(index);
            shard.watches.iter().flatten().for_each(Watch::end);
        }
    }

    /// Lets the TCP of a shard do something, and gathers what it answers.
    fn work<R>(
        &self,
        index: ShardIndex,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R,
    ) -> Work<'_, R> {
        self.work_by(self.transmitter_index(), index, None, act)
    }

    /// Lets the TCP of a shard do something on a CPU. The answer to a segment goes the way `back`
    /// that it came.
    fn work_by<R>(
        &self,
        cpu: CpuIndex,
        index: ShardIndex,
        back: Option<WayBack>,
        act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R,
    ) -> Work<'_, R> {
        let mut shard = self.tcp.shard(index);
        // Segments stay in order: they leave by one transmitter until it has sent those before.
        let by = shard.gathered_by.map_or(cpu, |(by, mark)| {
            if by == cpu || self.transmitter_of(by).has_sent_segments(mark) { cpu } else { by }
        });
        let mut transmitter = self.transmitter_of(by);
        let Shard { tcp, packets, .. } = &mut *shard;
        let (now_us, cpu) = (self.tcp.now_us(), self.cpus()[cpu.0]);
        let result = act(tcp, &mut TcpOut { now_us, cpu, pool: transmitter.pool(), packets });
        let mut gathered_by = None;
        if !packets.is_empty() {
            let is_some_waiting = transmitter.gather_segments(packets, back, self);
            if transmitter.take_held() | transmitter.has_unresolved() {
                self.tcp.timers.wake_to_look(by, now_us);
            }
            let before = shard.gathered_by.filter(|(before, _)| *before == by);
            let before = before.map(|(_, mark)| mark);
            shard.gathered_by = Some((by, transmitter.segment_mark(before, is_some_waiting)));
            gathered_by = Some(by);
        }
        drop(transmitter);
        Work { shard, result, by, gathered_by }
    }

    /// Sets the timer, releases the shard, sends, and wakes who waits for what changed.
    fn finish(
        &self,
        index: ShardIndex,
        shard: MutexGuard<'_, Shard>,
        gathered_by: Option<CpuIndex>,
        mut to_notify: Vec<Watch>,
    ) {
        self.release(index, shard, &mut to_notify);
        if let Some(by) = gathered_by {
            self.send_gathered(by);
        }
        to_notify.iter().for_each(Watch::notify);
    }

    /// Sends what a transmitter has gathered.
    fn send_gathered(&self, by: CpuIndex) {
        // Ignored: a device that is gone ends its source.
        let _ = self.flush_all(by);
    }

    /// Sets the timer, and releases the shard. Adds those who wait for what changed.
    fn release(
        &self,
        index: ShardIndex,
        mut shard: MutexGuard<'_, Shard>,
        to_notify: &mut Vec<Watch>,
    ) {
        shard.set_ready(index, to_notify);
        shard.release_ports();
        self.tcp.timers.set(index, shard.tcp.next_timer_us());
    }
}

impl fmt::Debug for TcpShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpShards({})", self.shards.len())
    }
}
