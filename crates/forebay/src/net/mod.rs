//! UDP and TCP sockets over an engine: datagrams and bytes reach their sockets in order, and their memory
//! returns to the CPU that owns it.
//!
//! A program opens devices, creates a [`Net`] over them, binds sockets, and runs the engine.
//! Readers run on the program's own threads, or on the engine's: [`NetEngine::run_with`] gives each
//! CPU's thread to a function, which reads and answers there, and runs the CPU's turns while there
//! is nothing to read.
//!
//! On an interface that the kernel has too (`AF_XDP`, `AF_PACKET`), this host has the kernel's
//! addresses and neighbours, and a port bound here is reserved in the kernel. Over `AF_XDP` with
//! [`RxFilter::All`](forebay_device::rx_filter::RxFilter) the kernel receives nothing: ARP,
//! neighbour discovery and echo requests are answered here. On a TAP or TUN, this host has the
//! addresses of [`Addresses::Own`].
//!
//! An echo server on every CPU; each datagram is answered by the thread that received it:
//!
//! ```no_run
//! use forebay::net::{Datagrams, Net, NetConfig};
//! use forebay::Config;
//! use forebay::{Device, DeviceConfig, Via};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = DeviceConfig::new("eth1", Via::AfXdp);
//! config.take = "udp:7".parse()?;
//! let device = Device::open(&config)?;
//! let (net, engine) = Net::over(&Config::live(), &NetConfig::default(), &mut [device])?;
//! let bind = |&cpu| Ok((cpu, net.socket().reuse_port_on(cpu).bind("0.0.0.0:7")?));
//! let sockets = net.cpus().iter().map(bind).collect::<std::io::Result<Vec<_>>>()?;
//! engine.run_with(move |cpu| {
//!     let here = cpu.cpu();
//!     let Some((_, socket)) = sockets.iter().find(|(of, _)| *of == here) else { return };
//!     let mut batch = Datagrams::new();
//!     while socket.recv_batch_on(cpu, &mut batch, 64) > 0 {
//!         for datagram in &mut batch {
//!             let heard = datagram.payload().to_vec();
//!             datagram.reply(&heard).ok();
//!         }
//!         socket.send_replies(&mut batch).ok();
//!     }
//! })?;
//! # Ok(())
//! # }
//! ```

mod host; //       the host of each CPU's stack
mod identities; // addresses of this host on each device
mod following; //  changes in the kernel, which are followed
mod memberships; // multicast groups
mod shared; //     state shared by sockets and stacks
mod directory; //  all sockets by id
mod endpoint; //   the state of a socket
mod options; //    options of a socket
mod wake; //       wake-up of a UDP socket's waiters
mod waiting; //    sleep until a socket is readable or writable
mod inline; //     reads on a CPU's own thread, which turns it meanwhile
mod datagram; //   datagrams as read
pub mod message; // datagrams with control data
mod udp; //        the public socket type
mod udp_descriptor; // descriptors of UDP sockets
mod unbound; //    sockets that are not bound yet
pub mod connection_id; // IDs that name a QUIC endpoint
mod tcp; //        TCP connections and listeners
mod ways_back; //  ways that datagrams came
mod routes; //     device and source address for a destination
mod sending; //    from a socket to the transmit path
mod path_mtus; // narrow paths that routers have told of
mod fragment_ids; // numbers of datagrams that leave in fragments
mod neighbours; // next hops and their link-layer addresses
mod transmit; //   headers, next hop, device
mod unsent; //     counters of datagrams not sent
pub mod counters; // counters of the stack and of sockets
mod snmp; //       counters in the lines of /proc/net/snmp

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::{fmt, io};

use counters::SocketCounts;
pub use datagram::{Datagram, Datagrams};
use following::Following;
use forebay_buf::Pool;
use forebay_control::Control;
use forebay_device::{Device, Via};
use forebay_engine::{Arrived, Config, CpuThread, DeviceQueues, Engine, Outcome, Stopper};
use forebay_rx::CpuId;
use forebay_rx::sink::Sink;
use forebay_stack::Division;
pub use forebay_stack::Stack;
use forebay_stack::network::neighbours::NeighbourDrops;
use forebay_stack::network::reassembly::Fragments;
use forebay_stack::network::{NetworkConfig, NetworkCounters, NetworkLayer};
use forebay_stack::socket::copy_cache::{self, CopyCache};
use forebay_stack::socket::reclaim::{
    BufferReclaimer, ReclaimCounters, ReclaimPolicy, SharedPolicy,
};
use forebay_stack::tcp::TcpConfig;
use forebay_sys as sys;
use forebay_sys::error::{Error, Result};
use host::CpuHost;
pub use identities::Addresses;
use message::DeviceIndex;
use neighbours::DeviceNeighbours;
use shared::{CpuIndex, NetDevice, NetParts, NetState};
pub use tcp::{TcpListener, TcpStream};
use transmit::TransmitQueue;
pub use udp::UdpSocket;
pub use unbound::SocketOptions;

/// Configuration of the socket layer.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Addresses of this host on each device, in the order of the devices. Default: the kernel's.
    pub addresses: Vec<Addresses>,
    /// Receive buffer of a new socket, in bytes of `truesize` (`rmem_default`).
    pub rmem_default: u32,
    /// Upper limit of a socket's receive buffer, in bytes (`rmem_max`).
    pub rmem_max: u32,
    /// Initial policy for the memory that queued datagrams wait in.
    pub policy: ReclaimPolicy,
    /// Additional frames per rx queue for datagrams queued in sockets (`udp_mem`). If sockets hold
    /// more in total, the device runs short of frames.
    pub kept_frames: u32,
    /// Frames per CPU for datagrams that sockets send.
    pub send_frames: u32,
    /// Memory of the copy caches of all CPUs, in bytes (UDP-5). `None`: 1 % of the kernel's
    /// `udp_mem`.
    pub copy_cache_bytes: Option<u64>,
    /// Settings of TCP. Of these, [`TcpConfig::gso_bytes`] and [`TcpConfig::pushes_large_packets`] follow from the devices,
    /// whatever is given, and [`TcpConfig::received_bytes`] is at most three quarters of the memory of [`Self::kept_frames`].
    pub tcp: TcpConfig,
    /// Place among other processes that listen on the same ports, if there are such.
    pub division: Option<Arc<dyn Division>>,
}

impl NetConfig {
    /// Packet memory that a socket may hold by default, in bytes: enough for as many small
    /// datagrams as the kernel's `rmem_default`, as `truesize` is three times the kernel's for
    /// them.
    pub const RMEM_DEFAULT: u32 = 3 * 212_992;

    /// Default of the upper limit on a socket's packet memory, in bytes.
    pub const RMEM_MAX: u32 = 64 << 20;

    /// Default settings of TCP: the kernel's, with buffers that fit in [`Self::kept_frames`], and paced.
    pub const TCP: TcpConfig = TcpConfig {
        rmem: (131_072, 6 << 20),
        memory_bytes: 64 << 20,
        received_bytes: 64 << 20,
        cookies_per_s: 20_000,
        pacing: true,
        ..TcpConfig::KERNELS
    };
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            rmem_default: Self::RMEM_DEFAULT,
            rmem_max: Self::RMEM_MAX,
            policy: ReclaimPolicy::default(),
            kept_frames: 8192,
            send_frames: 1024,
            copy_cache_bytes: None,
            tcp: Self::TCP,
            division: None,
        }
    }
}

/// Memory that the received bytes of all connections may occupy, so that each device keeps frames to
/// receive into.
fn received_bytes(kept_frames: u32, devices: &[Device]) -> u64 {
    let sources = devices.iter().flat_map(|device| &device.sources);
    let kept = sources.map(|source| forebay_engine::kept_bytes(kept_frames, source.needs()));
    kept.min().unwrap_or(u64::MAX) / 4 * 3
}

/// Handle to bind sockets with. Cheap to clone.
#[derive(Clone)]
pub struct Net(Arc<NetState>);

/// An engine whose packets go to sockets. If it is dropped without a run, calls of the sockets return as after one.
pub struct NetEngine {
    engine: Engine<Stack>,
    shared: EndOnDrop,
}

/// State of a [`Net`] whose sockets end when its engine has ended, or is dropped without a run.
struct EndOnDrop(Arc<NetState>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Net {
    /// Maximum number of sockets open at the same time.
    pub const SOCKETS_MAX: usize = shared::SOCKETS_MAX;

    /// Creates an engine over the devices whose packets go to sockets, and the handle to bind
    /// sockets with.
    ///
    /// # Errors
    /// As [`Engine::over`]; and if the kernel's addresses cannot be read, or a sink cannot be
    /// opened.
    pub fn over(
        config: &Config,
        net: &NetConfig,
        devices: &mut [Device],
    ) -> Result<(Self, NetEngine)> {
        let cpus = config.cpus.cpus().to_vec();
        let following = Following::open(devices)?;
        let net_devices = identities::of_devices(devices, &net.addresses, following.as_ref())?;
        let paths = cpus.iter().map(|_| send_paths(devices, &net_devices));
        let paths = paths.collect::<Result<Vec<_>>>()?;
        let config = Config {
            devices: DeviceQueues::of(devices),
            kept_frames: net.kept_frames,
            senders: u16::try_from(cpus.len()).unwrap_or(u16::MAX),
            spare_frames: net.send_frames.max(config.spare_frames),
            small_frames: net.send_frames.next_multiple_of(8),
            ..config.clone()
        };
        let (caches, no_copy_cache) = match copy_caches(net, cpus.len()) {
            Ok(caches) => (caches.into_iter().map(Some).collect(), None),
            Err(why) => (cpus.iter().map(|_| None).collect::<Vec<_>>(), Some(why)),
        };
        let shared = Arc::new(NetState::new(NetParts {
            cpus: cpus.clone(),
            queues: identities::device_by_queue(devices),
            devices: net_devices,
            following,
            policy: SharedPolicy::default(),
            no_copy_cache,
            rmem_default: net.rmem_default,
            rmem_max: net.rmem_max,
            seed: u64::from_ne_bytes(sys::random_key().first_chunk().copied().unwrap_or_default()),
            tcp: TcpConfig {
                gso_bytes: gso_bytes(devices),
                pushes_large_packets: devices.iter().all(|device| device.via != Via::AfPacket),
                received_bytes: net
                    .tcp
                    .received_bytes
                    .min(received_bytes(net.kept_frames, devices)),
                ..net.tcp
            },
            counters: cpus.iter().map(|_| Arc::default()).collect(),
            division: net.division.clone(),
        }));
        let mut stacks = stacks(&shared, caches, net.division.as_ref()).into_iter();
        let mut engine = Engine::over(&config, devices, |_| {
            stacks.next().unwrap_or_else(|| unreachable!("as many as CPUs"))
        })?;
        for (stack, small) in engine.take_small().into_iter().enumerate() {
            engine.handler_mut(stack).set_small(small);
        }
        shared.tcp.set_wakers(engine.wakers());
        let senders = engine.take_senders();
        if let Some(home) = senders.first().map(Pool::return_handle) {
            let queues = transmit_queues(&shared, gso_bytes(devices) > 0, senders, paths);
            shared.complete(queues, engine.flows(), home);
        }
        let this = Self(Arc::clone(&shared));
        this.set_policy(net.policy)?;
        Ok((this, NetEngine { engine, shared: EndOnDrop(shared) }))
    }

    /// Binds a socket.
    ///
    /// # Errors
    /// As [`SocketOptions::bind`].
    pub fn bind(&self, local: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        self.socket().bind(local)
    }

    /// Options of a new socket, to be set before it is bound.
    pub fn socket(&self) -> SocketOptions {
        SocketOptions::of(self)
    }

    /// The CPUs that datagrams are delivered on.
    #[must_use]
    pub fn cpus(&self) -> &[CpuId] {
        self.0.cpus()
    }

    /// Device of this name.
    #[must_use]
    pub fn device_named(&self, name: &str) -> Option<DeviceIndex> {
        let index = self.0.devices.iter().position(|device| device.name == name)?;
        u8::try_from(index).ok().map(DeviceIndex)
    }

    /// Sets the policy for the memory of datagrams.
    ///
    /// # Errors
    /// If `policy` is `copy-cache` and there is no memory for a copy cache (UDP-5).
    pub fn set_policy(&self, policy: ReclaimPolicy) -> Result<()> {
        if let (ReclaimPolicy::CopyCache, Some(why)) = (policy, &self.0.no_copy_cache) {
            let (what, value) = ("buffer policy", policy.to_string());
            return Err(Error::Setting { what, value, why: why.clone() });
        }
        self.0.policy.store(policy);
        Ok(())
    }

    /// Sockets bound now: the number of each, its local address and its counters. No socket is bound or closed while
    /// the list is made.
    #[must_use]
    pub fn sockets(&self) -> Vec<(usize, SocketAddr, SocketCounts)> {
        self.0.counts_of_sockets()
    }

    /// Counters of each socket, in the order of their numbers and without the counters by CPU
    /// ([`by_cpu`](SocketCounts::by_cpu) is empty). Those of 256 sockets are read at a time: many sockets take little
    /// memory.
    pub fn socket_totals(&self) -> impl Iterator<Item = (usize, SocketAddr, SocketCounts)> {
        self.0.sums_of_sockets()
    }

    /// Address of this host from which to answer a datagram (`ipi_spec_dst`): its destination, or, if that is a group or a
    /// broadcast address, the address that the device which it came by uses towards its source.
    #[must_use]
    pub fn answering_address(
        &self,
        destination: IpAddr,
        source: IpAddr,
        DeviceIndex(device): DeviceIndex,
    ) -> Option<IpAddr> {
        let routes = self.0.routes();
        if routes.is_own(destination) {
            return Some(destination);
        }
        routes.find_by(usize::from(device), source)?.1
    }

    /// Number of TCP connections that were closed and whose peer does not have everything yet: their data are
    /// lost if the process ends now. Those on devices that only this process has are not counted.
    #[must_use]
    pub fn unfinished_connections(&self) -> usize {
        self.0.tcp.unfinished()
    }

    /// Number of TCP connections, handshakes and connections in TIME-WAIT.
    #[must_use]
    pub fn flow_count(&self) -> usize {
        self.0.tcp.flow_count()
    }

    /// Waits for descriptors. `sleep` waits for them and `look` checks them without waiting; both return the number that is
    /// ready, or a negative error. With [busy polling](NetEngine::enable_busy_poll), the thread first receives packets for
    /// CPUs that sleep, and calls `sleep` only if `look` then finds nothing. If readers are behind, `look` comes before
    /// receiving. With `may_spin`, a thread that waits alone goes on receiving and looking for up to 100 µs before it sleeps,
    /// if its last pauses were short. For 1 ms after a wait that found something, packets wake no engine thread, unless
    /// another thread waits.
    pub fn wait(&self, may_spin: bool, look: impl Fn() -> i32, sleep: impl FnOnce() -> i32) -> i32 {
        if self.0.is_moderated() {
            let ready = look();
            if ready != 0 {
                return ready;
            }
        }
        let ready = loop {
            let waiting = self.0.begin_wait();
            let spins = may_spin && waiting.arrived == Arrived::Soon;
            let ready = if spins || waiting.arrived == Arrived::Packets { look() } else { 0 };
            if ready != 0 {
                break ready;
            }
            if !spins {
                self.0.resume_wakeups();
                break sleep();
            }
        };
        if ready > 0 {
            self.0.suspend_wakeups();
        }
        ready
    }

    /// Counters of the network layer, by CPU.
    #[must_use]
    pub fn counters(&self) -> &[Arc<NetworkCounters>] {
        &self.0.counters
    }

    /// Counters of all CPUs in the format of `/proc/net/snmp`.
    #[must_use]
    pub fn snmp(&self) -> String {
        snmp::snmp(&self.0.counters, self.0.tcp.counters(), &self.0.unsent)
    }

    /// Further counters of TCP in the format of `/proc/net/netstat`.
    #[must_use]
    pub fn netstat(&self) -> String {
        snmp::netstat(self.0.tcp.counters())
    }

    /// Counters of all CPUs in the format of `/proc/net/snmp6`.
    #[must_use]
    pub fn snmp6(&self) -> String {
        snmp::snmp6(&self.0.counters, &self.0.unsent)
    }

    /// Datagrams dropped while they waited for a neighbour's link address, on devices that only
    /// this process has.
    #[must_use]
    pub fn neighbour_drops(&self) -> NeighbourDrops {
        self.0.devices.iter().fold(NeighbourDrops::default(), |sum, device| {
            let drops = device.learned().drops();
            NeighbourDrops {
                neigh_queuefull: sum.neigh_queuefull + drops.neigh_queuefull,
                neigh_failed: sum.neigh_failed + drops.neigh_failed,
                neigh_dead: sum.neigh_dead + drops.neigh_dead,
            }
        })
    }

    /// Datagrams copied to smaller buffers for slow readers, per CPU.
    #[must_use]
    pub fn reclaim_counters(&self) -> &[Arc<ReclaimCounters>] {
        &self.0.reclaim_counters
    }

    /// Number of frames in use after a run: 0 once all sockets are closed, or all queued datagrams
    /// are read and dropped.
    pub fn frames_away(&self, outcome: &mut Outcome<Stack>) -> usize {
        let stacks = outcome.handlers.iter_mut().map(Stack::frames_away).sum::<usize>();
        outcome.frames_still_away() + stacks + self.0.send_frames_away()
    }

    /// Reads this host's addresses from the kernel again, on devices that the kernel has too, and the MTUs of its devices.
    /// While the engine runs, it does so by itself once the kernel notifies it of a change.
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub fn refresh_addresses(&self) -> Result<()> {
        self.0.follow_kernel()
    }
}

impl NetEngine {
    /// Handle that changes the engine while it runs, and reads its state. It explains a flow with its
    /// connection.
    #[must_use]
    pub fn control(&self) -> Control {
        let shared = Arc::downgrade(&self.shared.0);
        Control::of(&self.engine).with_connections(Arc::new(move |name, hash| {
            shared.upgrade().map_or_else(Vec::new, |shared| shared.connections_of(name, hash))
        }))
    }

    /// Handle that asks the engine to stop.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.engine.stopper()
    }

    /// Lets threads that are about to wait for sockets receive packets first, as with the kernel's busy polling: calls that
    /// block do, and others by [`Net::wait`]. A thread that works for long delays what no other waits for
    /// by up to 1 ms, such as acknowledgements.
    pub fn enable_busy_poll(&mut self) {
        self.shared.0.set_busy_poll(self.engine.busy_poll());
    }

    /// Runs on the engine's own threads until every source is exhausted. Readers then get the
    /// datagrams still queued, and `BrokenPipe` after the last one.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn run(self) -> Result<Outcome<Stack>> {
        self.run_with(CpuThread::turn_to_the_end)
    }

    /// Runs with `application` in control of every CPU's thread: see [`Engine::run_with`].
    ///
    /// # Errors
    /// As [`Engine::run_with`].
    pub fn run_with(
        self,
        application: impl Fn(&mut CpuThread<Stack>) + Send + Sync + 'static,
    ) -> Result<Outcome<Stack>> {
        let Self { engine, shared } = self;
        let outcome = engine.run_with(application);
        drop(shared);
        outcome.map(|mut outcome| {
            outcome.handlers.iter_mut().for_each(Stack::end);
            outcome.frames_away = outcome.frames_still_away();
            outcome
        })
    }
}

/// Stack of each CPU, in their order, with its copy cache if it has one.
fn stacks(
    shared: &Arc<NetState>,
    caches: Vec<Option<CopyCache>>,
    division: Option<&Arc<dyn Division>>,
) -> Vec<Stack> {
    let cpus = shared.cpus();
    let config = network_config(cpus.len());
    // Shared by all CPUs: flows may move to another CPU while their fragments wait.
    let fragments = Arc::new(Fragments::shared(config.fragments, cpus.len()));
    let counters = shared.counters.iter().zip(&shared.reclaim_counters);
    let parts = cpus.iter().zip(caches).zip(counters).enumerate();
    parts
        .map(|(index, ((&cpu, cache), (counters, reclaim_counters)))| {
            let (fragments, counters) = (Arc::clone(&fragments), Arc::clone(counters));
            let mut network = NetworkLayer::with_fragments(fragments, config, counters);
            network.take_tcp();
            let reclaimer = BufferReclaimer::new(cache, None, Arc::clone(reclaim_counters));
            let host = Box::new(CpuHost::new(CpuIndex(index), Arc::clone(shared)));
            let stack = Stack::new(cpu, index, network, reclaimer, host);
            match division {
                Some(division) => stack.divided(Arc::clone(division)),
                None => stack,
            }
        })
        .collect()
}

/// Transmit queue of each CPU, from its frames and its paths to the devices, which may all take packets of several datagrams.
fn transmit_queues(
    shared: &NetState,
    take_whole: bool,
    pools: Vec<Pool>,
    paths: Vec<SendPaths>,
) -> Vec<TransmitQueue> {
    let queue = |(pool, paths)| {
        let (of_all, clock) = (shared.for_transmitters(), shared.tcp.clock().clone());
        TransmitQueue::new(pool, take_whole, of_all, clock, paths)
    };
    pools.into_iter().zip(paths).map(queue).collect()
}

/// Sinks of all devices for one CPU, each with the next hops on its device.
type SendPaths = Vec<(Box<dyn Sink>, DeviceNeighbours)>;

fn send_paths(devices: &[Device], net_devices: &[NetDevice]) -> Result<SendPaths> {
    devices
        .iter()
        .zip(net_devices)
        .map(|(device, net_device)| {
            let neighbours = match (net_device.kernels, device.via) {
                (Some(interface), _) => {
                    let learned = device.takes_all().then(|| Arc::clone(&net_device.learned));
                    DeviceNeighbours::of_kernel(interface, learned).map_err(|source| {
                        Error::Device {
                            name: device.name.clone(),
                            what: "ask for the routes there".to_owned(),
                            source,
                            help: "check that this process may use netlink sockets".to_owned(),
                        }
                    })?
                }
                (None, Via::Tun) => DeviceNeighbours::NoLink,
                (None, Via::AfXdp | Via::AfPacket | Via::Tap | Via::VhostUser) => {
                    DeviceNeighbours::Own(Arc::clone(&net_device.learned))
                }
            };
            Ok((device.sink()?, neighbours))
        })
        .collect()
}

/// Payload of the largest packet that TCP sends: that of the largest IP packet, if every device sends such packets whole;
/// else 0, for single segments.
fn gso_bytes(devices: &[Device]) -> u32 {
    const LARGEST_IP_BYTES: u32 = u16::MAX as u32;
    const HEADERS_BYTES: u32 = 1 << 10;
    let mut sources = devices.iter().flat_map(|device| &device.sources);
    let all_large = sources.all(|source| source.needs().largest_bytes > LARGEST_IP_BYTES);
    if all_large { LARGEST_IP_BYTES - HEADERS_BYTES } else { 0 }
}

/// Copy caches, one per CPU; or the reason why there are none.
fn copy_caches(net: &NetConfig, cpus: usize) -> Result<Vec<CopyCache>, String> {
    let of_kernel = || sys::udp_mem_low_pages().map(copy_cache::budget_bytes);
    // Only the initial network namespace has the file.
    let budget_bytes = net.copy_cache_bytes.or_else(of_kernel).ok_or(
        "a copy cache has 1 % of the memory that net.ipv4.udp_mem names, and this network \
         namespace has no such file: say how much it may be (copy_cache_bytes)",
    )?;
    let count = u32::try_from(cpus).unwrap_or(u32::MAX);
    let buffers = copy_cache::buffers_per_cpu(budget_bytes, count);
    let bytes = CopyCache::region_bytes(buffers.map_err(|low| low.to_string())?);
    let cache = |owner| {
        let region = sys::map_packet_memory(bytes).map_err(|error| error.to_string())?;
        Ok(CopyCache::new(region, owner))
    };
    (0..u16::try_from(cpus).unwrap_or(u16::MAX)).map(cache).collect()
}

/// Minimum of a CPU's share of the ICMP error rate and burst, however many CPUs there are: the
/// kernel's burst to one host (`XRLIM_BURST_FACTOR`).
const ICMP_MSGS_LEAST: u32 = 6;

/// Configuration with the kernel's limits, which apply to the whole host: each CPU gets its share
/// of the ICMP error rate, and all CPUs share the reassembly limits.
fn network_config(cpus: usize) -> NetworkConfig {
    let cpus = u32::try_from(cpus).unwrap_or(u32::MAX).max(1);
    let share = |limit: u32| (limit / cpus).max(ICMP_MSGS_LEAST);
    let mut config = NetworkConfig::default();
    config.icmp_msgs_per_sec = share(config.icmp_msgs_per_sec);
    config.icmp_msgs_burst = share(config.icmp_msgs_burst);
    config.fragments.seed = sys::random_key();
    config
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for NetEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetEngine({:?})", self.shared.0)
    }
}

#[cfg(test)]
mod rig;
#[cfg(test)]
mod tests;
