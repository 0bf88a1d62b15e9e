//! State shared by sockets and the stacks of all CPUs.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::{fmt, io};

use arc_swap::ArcSwap;
use forebay_buf::Pool;
use forebay_engine::{Arrived, BusyPoll, Flows};
use forebay_rx::sink::SinkError;
use forebay_rx::{CpuId, RxQueue};
use forebay_stack::Division;
use forebay_stack::network::neighbours::Neighbours as Learned;
use forebay_stack::network::{Identity, NetworkCounters};
use forebay_stack::socket::LOCAL_PORTS;
use forebay_stack::socket::SocketId;
use forebay_stack::socket::account::Account;
use forebay_stack::socket::counters::{BLOCK_SOCKETS, CounterTable};
use forebay_stack::socket::queue::{
    SocketQueue, SocketQueueConfig, SocketQueueConsumer, WakeReader, open,
};
use forebay_stack::socket::reclaim::{ReclaimCounters, SharedPolicy};
use forebay_stack::socket::table::{Binding, Bindings, Membership, Reuse, SocketTable};
use forebay_stack::tcp::TcpConfig;
use forebay_sys as sys;
use forebay_sys::interface::InterfaceIndex;
use rustix::io::Errno;
use siphasher::sip::SipHasher13;

use super::directory::Directory;
use super::following::Following;
use super::fragment_ids::FragmentIds;
use super::memberships::Groups;
use super::path_mtus::PathMtus;
use super::routes::{Gateways, Routes};
use super::tcp::{MtuWalk, TcpShards};
use super::transmit::{Flushed, TransmitQueue, Transmitter};
use super::udp::SocketCounts;
use super::unsent::Unsent;
use super::waiting::Blocked;

/// Maximum number of sockets.
pub(super) const SOCKETS_MAX: usize = 1 << 17;

/// Index of a CPU among those of the engine, and of its transmitter and packet memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct CpuIndex(pub(super) usize);

/// Initial size of each CPU's ring to a socket.
const SLOTS: u32 = 32;

/// A device, as the stacks see it.
pub(super) struct NetDevice {
    pub(super) name: String,
    /// Addresses of this host on the device.
    pub(super) identity: ArcSwap<Identity>,
    /// Kernel's interface index; `None` if the kernel does not have the device.
    pub(super) kernels: Option<InterfaceIndex>,
    /// Interface that limits what is sent by its MTU, whoever has the addresses; `None` of a back end.
    pub(super) interface: Option<InterfaceIndex>,
    /// Largest MTU whose packets can be received here, in bytes.
    pub(super) mtu_max: u32,
    /// Gateways of the kernel there.
    pub(super) gateways: Gateways,
    /// Neighbours learned here, because the kernel cannot learn them.
    pub(super) learned: Arc<Mutex<Learned>>,
}

impl NetDevice {
    /// Neighbours learned here, locked for one look-up or update.
    pub(super) fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of a [`Net`](super::Net).
pub(super) struct NetState {
    cpus: Box<[CpuId]>,
    pub(super) directory: Arc<Directory>,
    pub(super) table: Arc<ArcSwap<SocketTable>>,
    sockets: Mutex<BoundSockets>,
    socket_counters: Arc<CounterTable>,
    pub(super) tcp: TcpShards,
    pub(super) mtu_walk: MtuWalk,
    pub(super) devices: Box<[NetDevice]>,
    /// `None` if the kernel has none of the devices.
    pub(super) following: Option<Following>,
    /// Device index by rx queue.
    queues: Box<[usize]>,
    late: OnceLock<Late>,
    /// Turns by threads that are about to wait, if they are enabled.
    busy_poll: OnceLock<Arc<dyn BusyPoll>>,
    pub(super) blocked: Blocked,
    pub(super) groups: Groups,
    /// Number of the next datagram that leaves in fragments.
    pub(super) fragment_ids: Arc<FragmentIds>,
    pub(super) path_mtus: Arc<PathMtus>,
    pub(super) policy: SharedPolicy,
    /// Reason why there are no copy caches, if there are none.
    pub(super) no_copy_cache: Option<String>,
    pub(super) rmem_default: u32,
    pub(super) rmem_max: u32,
    has_ended: AtomicBool,
    pub(super) counters: Box<[Arc<NetworkCounters>]>,
    pub(super) unsent: Unsent,
    pub(super) reclaim_counters: Box<[Arc<ReclaimCounters>]>,
}

/// Wait of a call, which ends however the call does.
pub(super) struct CallWait<'a> {
    /// Outcome of the turns before it: unless that is nothing, the call tries again instead of sleeping.
    pub(super) arrived: Arrived,
    busy_poll: Option<&'a dyn BusyPoll>,
}

impl Drop for CallWait<'_> {
    fn drop(&mut self) {
        self.busy_poll.into_iter().for_each(BusyPoll::after_wait);
    }
}

/// Parts that exist once the engine is built, before any packet.
pub(super) struct Late {
    /// Transmit queues, in the order of the engine's CPUs.
    transmit_queues: Box<[TransmitQueue]>,
    flows: Flows,
    /// Pool from which readers get [return handles](Pool::return_handle).
    home: Mutex<Pool>,
}

/// Sockets bound now.
struct BoundSockets {
    bindings: Bindings,
    /// Number of closed sockets that had a slot, by slot.
    generations: Vec<u32>,
    /// Free slots.
    free: Vec<u32>,
    /// Key of the order in which ports are chosen, and the number of those chosen so far.
    ports: SipHasher13,
    chosen: u64,
}

/// Queue of a bound socket.
struct BoundQueue {
    local: SocketAddr,
    queue: Arc<SocketQueue>,
}

impl BoundQueue {
    /// The socket's number, address and these counters. `None` if it was closed before they were read to the end:
    /// those of its slot may be another socket's.
    fn with(self, counts: SocketCounts) -> Option<(usize, SocketAddr, SocketCounts)> {
        let Self { local, queue } = self;
        (!queue.is_closed()).then(|| (queue.id().index(), local, counts))
    }
}

/// Sums of the counters of sockets, read together.
fn sums_of(sockets: Vec<BoundQueue>) -> impl Iterator<Item = (usize, SocketAddr, SocketCounts)> {
    let accounts: Vec<_> = sockets.iter().map(|bound| bound.queue.account()).collect();
    let sums = Account::sums(&accounts);
    sockets.into_iter().zip(sums).filter_map(|(bound, sums)| {
        let counts = SocketCounts::without_cpus(bound.queue.account(), sums);
        bound.with(counts)
    })
}

/// Parts of a `NetState`.
pub(super) struct NetParts {
    pub(super) cpus: Vec<CpuId>,
    pub(super) devices: Vec<NetDevice>,
    pub(super) following: Option<Following>,
    pub(super) queues: Vec<usize>,
    pub(super) policy: SharedPolicy,
    pub(super) no_copy_cache: Option<String>,
    pub(super) rmem_default: u32,
    pub(super) rmem_max: u32,
    pub(super) seed: u64,
    pub(super) tcp: TcpConfig,
    pub(super) counters: Vec<Arc<NetworkCounters>>,
    pub(super) division: Option<Arc<dyn Division>>,
}

/// A socket that has just been bound.
pub(super) struct BoundEntry {
    pub(super) id: SocketId,
    pub(super) local: SocketAddr,
    pub(super) consumer: SocketQueueConsumer,
    pub(super) home: Pool,
    /// True if flows are steered to the CPU that reads them (RFS). False if each CPU reads the
    /// datagrams delivered on it: recording those reads would pin flows to their present CPU, and
    /// keep them from being spread.
    pub(super) is_followed: bool,
    /// True for a socket that is for IPv6 alone.
    pub(super) is_v6_only: bool,
}

impl NetState {
    pub(super) fn new(parts: NetParts) -> Self {
        Self {
            tcp: TcpShards::new(parts.tcp, parts.cpus.len(), parts.division),
            mtu_walk: MtuWalk::default(),
            socket_counters: Arc::new(CounterTable::new(parts.cpus.len(), SOCKETS_MAX)),
            reclaim_counters: parts.cpus.iter().map(|_| Arc::default()).collect(),
            directory: Arc::default(),
            cpus: parts.cpus.into(),
            table: Arc::new(ArcSwap::from_pointee(SocketTable::new(Vec::new(), parts.seed))),
            sockets: Mutex::new(BoundSockets::new(parts.seed, sys::random_key())),
            devices: parts.devices.into(),
            following: parts.following,
            queues: parts.queues.into(),
            late: OnceLock::new(),
            busy_poll: OnceLock::new(),
            blocked: Blocked::default(),
            groups: Groups::default(),
            fragment_ids: Arc::new(FragmentIds::new(sys::random_key())),
            path_mtus: Arc::default(),
            policy: parts.policy,
            no_copy_cache: parts.no_copy_cache,
            rmem_default: parts.rmem_default,
            rmem_max: parts.rmem_max,
            has_ended: AtomicBool::new(false),
            counters: parts.counters.into(),
            unsent: Unsent::default(),
        }
    }

    /// Sets the parts that come with the engine. To be called once.
    pub(super) fn complete(&self, queues: Vec<TransmitQueue>, flows: Flows, home: Pool) {
        let (transmit_queues, home) = (queues.into(), Mutex::new(home));
        let set = self.late.set(Late { transmit_queues, flows, home });
        debug_assert!(set.is_ok(), "an engine is built once");
    }

    /// State of the host that all transmitters use.
    pub(super) fn for_transmitters(&self) -> (Arc<FragmentIds>, Arc<PathMtus>) {
        (Arc::clone(&self.fragment_ids), Arc::clone(&self.path_mtus))
    }

    fn late(&self) -> &Late {
        self.late.get().unwrap_or_else(|| unreachable!("a Net is handed out when it is complete"))
    }

    /// Table in which readers record the CPU that they run on.
    pub(super) fn flows(&self) -> &Flows {
        &self.late().flows
    }

    /// Device index of a queue.
    pub(super) fn device_of(&self, queue: RxQueue) -> usize {
        self.queues.get(usize::from(queue.0)).copied().unwrap_or(0)
    }

    /// Binds a socket to an address that was [checked](Self::check_local); port 0 selects an ephemeral port.
    ///
    /// # Errors
    /// `EADDRINUSE` as in the kernel; `EMFILE` at [`SOCKETS_MAX`] sockets.
    pub(super) fn bind(
        &self,
        mut binding: Binding,
        rcvbuf: u32,
        reader: Arc<dyn WakeReader>,
    ) -> io::Result<BoundEntry> {
        let mut sockets = self.sockets();
        if binding.local.port() == 0 {
            sockets.choose_port(&mut binding)?;
        } else if sockets.bindings.conflict(&binding).is_some() {
            return Err(Errno::ADDRINUSE.into());
        }
        binding.id = sockets.free_id()?;
        let (id, local) = (binding.id, binding.local);
        let is_followed = binding.reuse != Reuse::ThisCpu;
        // As in the kernel, an address of IPv6 is for IPv6 alone (`__inet6_bind`).
        let is_v6_only = local.is_ipv6() && (binding.is_v6_only || !local.ip().is_unspecified());
        let config = SocketQueueConfig { id, rcvbuf, slots: SLOTS };
        let (queue, consumer) = open(config, &self.socket_counters, reader);
        // A socket must be in the directory before the table names it.
        self.directory.enter(Arc::clone(&queue));
        if self.has_ended() {
            queue.end(); // `end` has looked through the directory before
        }
        sockets.bindings.insert(binding);
        self.publish(&sockets);
        let home = self.late().home.lock().unwrap_or_else(PoisonError::into_inner).return_handle();
        Ok(BoundEntry { id, local, consumer, home, is_followed, is_v6_only })
    }

    /// Changes a socket's binding. The socket counts as the last one bound from now on: among
    /// sockets connected alike, the kernel selects the last.
    pub(super) fn rebind(&self, id: SocketId, change: impl FnOnce(&mut Binding)) {
        let mut sockets = self.sockets();
        sockets.bindings.rebind(id, change);
        self.publish(&sockets);
    }

    /// Sets whether a socket reuses its address, which counts when others are bound.
    pub(super) fn set_reuses_address(&self, id: SocketId, is_on: bool) {
        self.sockets().bindings.set_reuses_address(id, is_on);
    }

    /// Sets the groups that a socket has joined.
    pub(super) fn set_groups(&self, id: SocketId, groups: &[Membership]) {
        let mut sockets = self.sockets();
        sockets.bindings.set_groups(id, groups);
        self.publish(&sockets);
    }

    /// Removes a socket that has no reader any more.
    pub(super) fn close(&self, id: SocketId) {
        let mut sockets = self.sockets();
        sockets.bindings.remove(id);
        self.publish(&sockets);
        self.directory.remove(id);
        sockets.give_back(id);
    }

    /// Sockets bound now, with all their counters.
    pub(super) fn counts_of_sockets(&self) -> Vec<(usize, SocketAddr, SocketCounts)> {
        let counted = |bound: BoundQueue| {
            let counts = SocketCounts::of(bound.queue.account());
            bound.with(counts)
        };
        self.bound().filter_map(counted).collect()
    }

    /// Sockets bound now, with the sums of their counters.
    pub(super) fn sums_of_sockets(
        &self,
    ) -> impl Iterator<Item = (usize, SocketAddr, SocketCounts)> {
        let mut bound = self.bound();
        std::iter::from_fn(move || {
            let next: Vec<_> = bound.by_ref().take(BLOCK_SOCKETS).collect();
            (!next.is_empty()).then(|| sums_of(next))
        })
        .flatten()
    }

    /// Queues of the sockets bound now, in the order of their numbers. Sockets are bound and closed meanwhile.
    fn bound(&self) -> impl Iterator<Item = BoundQueue> {
        let bound: Vec<_> =
            self.sockets().bindings.iter().map(|binding| (binding.id, binding.local)).collect();
        bound
            .into_iter()
            .filter_map(|(id, local)| Some(BoundQueue { local, queue: self.directory.find(id)? }))
    }

    fn publish(&self, sockets: &BoundSockets) {
        self.table.store(Arc::new(sockets.bindings.table().clone()));
    }

    pub(super) fn cpus(&self) -> &[CpuId] {
        &self.cpus
    }

    /// Index of the transmitter of the calling thread's CPU; of another CPU if the engine does not
    /// run on that one. A call that sends keeps to one, even if its thread migrates meanwhile.
    pub(super) fn transmitter_index(&self) -> CpuIndex {
        let cpu = sys::current_cpu();
        let index = self.cpus.iter().position(|&own| own == cpu);
        CpuIndex(index.unwrap_or(cpu.index() % self.cpus.len()))
    }

    /// Indices of all CPUs.
    pub(super) fn cpu_indices(&self) -> impl Iterator<Item = CpuIndex> + use<> {
        (0..self.cpus.len()).map(CpuIndex)
    }

    /// For each CPU, true if it has packet memory for a datagram of any length.
    pub(super) fn send_room(&self) -> Vec<bool> {
        self.cpu_indices().map(|index| self.transmitter_of(index).has_room()).collect()
    }

    /// Transmitter of a CPU. Not to be held across a system call.
    pub(super) fn transmitter_of(&self, CpuIndex(index): CpuIndex) -> MutexGuard<'_, Transmitter> {
        self.late().transmit_queues[index].transmitter()
    }

    /// Sends what the transmitter of a CPU has gathered for a device.
    ///
    /// # Errors
    /// If the device is gone.
    pub(super) fn flush(&self, index: CpuIndex, device: usize) -> Result<(), SinkError> {
        self.finish_flush(index, self.late().transmit_queues[index.0].flush(device))
    }

    /// Sends what the transmitter of a CPU has gathered for all devices.
    ///
    /// # Errors
    /// If one of the devices is gone.
    pub(super) fn flush_all(&self, index: CpuIndex) -> Result<(), SinkError> {
        self.finish_flush(index, self.late().transmit_queues[index.0].flush_all())
    }

    /// Leaves the rest of an incomplete flush to the CPU itself.
    fn finish_flush(
        &self,
        index: CpuIndex,
        (sent, result): (Flushed, Result<(), SinkError>),
    ) -> Result<(), SinkError> {
        if sent == Flushed::Part {
            self.tcp.look_soon(index);
        }
        result
    }

    /// Routes to all destinations.
    pub(super) fn routes(&self) -> Routes<'_> {
        Routes(&self.devices)
    }

    /// Number of transmit frames in use.
    pub(super) fn send_frames_away(&self) -> usize {
        self.cpu_indices().map(|index| self.transmitter_of(index).frames_away()).sum()
    }

    /// Refuses a local address that nothing is received at, as the kernel does. An address added just now may not be known
    /// yet: pending notifications of the kernel are read first.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL`.
    pub(super) fn check_local(&self, address: IpAddr) -> io::Result<()> {
        let is_known = || address.is_unspecified() || self.is_receivable(address);
        if is_known() || self.follow_news().is_ok() && is_known() {
            return Ok(());
        }
        Err(Errno::ADDRNOTAVAIL.into())
    }

    /// True for a group or a broadcast address, and for the unspecified address.
    pub(super) fn is_to_many(&self, address: IpAddr) -> bool {
        let is_to_many = |device: &NetDevice| device.identity.load().is_to_many(address);
        address.is_unspecified() || self.devices.iter().any(is_to_many)
    }

    fn is_receivable(&self, address: IpAddr) -> bool {
        address.is_multicast()
            || self.devices.iter().any(|device| device.identity.load().is_for_us(address))
    }

    /// True if the kernel has this address on one of the devices, or if it may be on any of them.
    pub(super) fn is_kernels(&self, address: IpAddr) -> bool {
        let is_any = address.is_unspecified() || address.is_multicast();
        let mut kernels = self.devices.iter().filter(|device| device.kernels.is_some());
        kernels.any(|device| is_any || device.identity.load().is_for_us(address))
    }

    /// Ends all sockets, as no more packets will come: wakes their readers, and drops packets that
    /// wait for a neighbour.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        {
            // A socket that is bound meanwhile is in the directory, or sees the end.
            let _sockets = self.sockets();
            self.directory.queues().for_each(|queue| queue.end());
        }
        self.end_tcp();
        let mut dropped = Vec::new();
        self.devices.iter().for_each(|device| device.learned().close(&mut dropped));
        drop(dropped);
        for index in self.cpu_indices() {
            self.transmitter_of(index).drop_unresolved(self);
            // Ignored: a device that is gone has already failed the sender's call.
            let _ = self.flush_all(index);
        }
    }

    /// Lets threads that are about to wait turn CPUs.
    pub(super) fn set_busy_poll(&self, busy_poll: Arc<dyn BusyPoll>) {
        let _ = self.busy_poll.set(busy_poll); // one that is set stays: it turns the same CPUs
    }

    /// See [`BusyPoll::is_moderated`]; false if it is not enabled.
    pub(super) fn is_moderated(&self) -> bool {
        self.busy_poll.get().is_some_and(|busy_poll| busy_poll.is_moderated())
    }

    /// See [`BusyPoll::resume`].
    pub(super) fn resume_wakeups(&self) {
        self.busy_poll.get().into_iter().for_each(|busy_poll| busy_poll.resume());
    }

    /// Begins the wait of a call, which lasts as long as the value: see [`BusyPoll::before_wait`].
    pub(super) fn begin_wait(&self) -> CallWait<'_> {
        let busy_poll = self.busy_poll.get().map(|busy_poll| &**busy_poll);
        let arrived = busy_poll.map_or(Arrived::Nothing, |busy_poll| busy_poll.before_wait());
        CallWait { arrived, busy_poll }
    }

    /// See [`BusyPoll::suspend`].
    pub(super) fn suspend_wakeups(&self) {
        self.busy_poll.get().into_iter().for_each(|busy_poll| busy_poll.suspend());
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    fn sockets(&self) -> MutexGuard<'_, BoundSockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BoundSockets {
    fn new(seed: u64, key: [u8; 16]) -> Self {
        Self {
            bindings: Bindings::new(seed),
            generations: Vec::new(),
            free: Vec::new(),
            ports: SipHasher13::new_with_key(&key),
            chosen: 0,
        }
    }

    fn free_id(&mut self) -> io::Result<SocketId> {
        let next = u32::try_from(self.generations.len()).unwrap_or(u32::MAX);
        let slot = self.free.pop().unwrap_or(next);
        if slot as usize >= SOCKETS_MAX {
            return Err(Errno::MFILE.into());
        }
        if slot == next {
            self.generations.push(0);
        }
        Ok(SocketId::new(slot, self.generations[slot as usize]))
    }

    /// Makes the slot of a closed socket available again.
    fn give_back(&mut self, id: SocketId) {
        let generation = &mut self.generations[id.index()];
        *generation = generation.wrapping_add(1);
        self.free.extend(u32::try_from(id.index()));
    }

    /// Chooses a port for a socket that has none: the first free one from a random one on, which nobody can tell from those
    /// before (RFC 6056, section 3.3.1; `udp_lib_get_port`).
    fn choose_port(&mut self, binding: &mut Binding) -> io::Result<()> {
        let drawn = self.ports.hash(&self.chosen.to_ne_bytes());
        self.chosen += 1;
        let (least, most) = (*LOCAL_PORTS.start(), *LOCAL_PORTS.end());
        let offset = u16::try_from(drawn % LOCAL_PORTS.len() as u64).unwrap_or(0);
        let first = least + offset;
        for port in (first..=most).chain(least..first) {
            binding.local.set_port(port);
            if self.bindings.conflict(binding).is_none() {
                return Ok(());
            }
        }
        Err(Errno::ADDRINUSE.into())
    }
}

impl fmt::Debug for NetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices: Vec<_> = self.devices.iter().map(|device| &device.name).collect();
        write!(f, "Net({devices:?}, {} CPUs)", self.cpus.len())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn binding() -> Binding {
        Binding::new(SocketId(0), SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))
    }

    fn ports_by(key: [u8; 16]) -> Vec<u16> {
        let mut sockets = BoundSockets::new(1, key);
        let choose = |number| {
            let mut binding = binding();
            sockets.choose_port(&mut binding).unwrap();
            binding.id = SocketId::new(number, 0);
            let port = binding.local.port();
            sockets.bindings.insert(binding);
            port
        };
        (0..1000).map(choose).collect()
    }

    #[test]
    fn udp_23_chosen_ports_follow_no_order() {
        let ports = ports_by([7; 16]);
        assert!(ports.iter().all(|port| LOCAL_PORTS.contains(port)));
        let neighbours = ports.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 16).count();
        assert!(neighbours < 20, "{neighbours} of 999 are near the one before");
        let middle = LOCAL_PORTS.start().midpoint(*LOCAL_PORTS.end());
        let lower = ports.iter().filter(|&&port| port < middle).count();
        assert!((400..600).contains(&lower), "{lower} of 1000");
        let other = ports_by([8; 16]);
        let same = ports.iter().zip(&other).filter(|(port, other)| port == other).count();
        assert!(same < 10, "{same} of 1000 with another key");
    }

    #[test]
    fn udp_23_last_free_port_is_found() {
        const FREE: u16 = 40_000;
        let mut sockets = BoundSockets::new(1, [7; 16]);
        for (number, port) in (0..).zip(LOCAL_PORTS).filter(|&(_, port)| port != FREE) {
            let mut binding = binding();
            binding.id = SocketId::new(number, 0);
            binding.local.set_port(port);
            sockets.bindings.insert(binding);
        }
        let mut last = binding();
        sockets.choose_port(&mut last).unwrap();
        assert_eq!(last.local.port(), FREE);
        last.id = SocketId::new(1 << 16, 0);
        sockets.bindings.insert(last);
        let error = sockets.choose_port(&mut binding()).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::ADDRINUSE));
    }
}
