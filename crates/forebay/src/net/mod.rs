//! UDP sockets over an engine: what is delivered on a CPU comes to the socket that it is for, in
//! order, and its memory goes back to whoever owns it.
//!
//! A program opens devices, lays a [`Net`] over them, binds sockets, and runs the engine. Its readers
//! are threads of its own, or the engine's: [`NetEngine::run_with`] gives each CPU's thread to a
//! function, which reads and answers there, and turns the CPU itself while there is nothing to read.
//!
//! On an interface that the kernel has too (`AF_XDP`, `AF_PACKET`), this host is whom the kernel says
//! it is, its neighbours are the kernel's, and a port that is bound here is kept from the kernel's
//! programs. Over `AF_XDP` with everything taken ([`RxFilter::All`](forebay_device::rx_filter::RxFilter)) the kernel
//! hears nothing there: ARP, neighbour discovery and echo requests are answered here. On a TAP or TUN,
//! this host is whom [`Addresses::Own`] says.
//!
//! An echo on every CPU, each question answered by the thread that took it in:
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

mod datagram; //   what a reader gets
mod directory; //  all sockets by their ids
mod endpoint; //   a socket behind its face
mod host; //       the host of each CPU's stack
mod identities; // who we are on a device
mod neighbours; // the next station
mod shared; //     what sockets and stacks share
mod snmp; //       what was counted, as the kernel writes it
mod transmit; //   the way out
mod udp; //        sockets
mod unsent; //     what could not be sent
mod wake; //       who waits for a socket
mod waiting; //    until something may be read, or sent

use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::{fmt, io};

pub use datagram::{Datagram, Datagrams, NoRoom};
use endpoint::Inner;
use forebay_control::Control;
use forebay_device::{Device, Via};
use forebay_engine::{Config, CpuThread, DeviceQueues, Engine, Outcome, Stopper};
use forebay_rx::CpuId;
pub use forebay_stack::Stack;
use forebay_stack::network::neighbours::NeighbourDrops;
use forebay_stack::network::reassembly::Fragments;
use forebay_stack::network::{NetworkConfig, NetworkLayer};
pub use forebay_stack::network::{NetworkCounters, NetworkDrop};
use forebay_stack::socket::SocketId;
use forebay_stack::socket::copy_cache::{self, CopyCache};
pub use forebay_stack::socket::reclaim::ReclaimPolicy;
use forebay_stack::socket::reclaim::{BufferReclaimer, ReclaimCounters, SharedPolicy};
use forebay_stack::socket::table::{Binding, Reuse};
use forebay_sys as sys;
use forebay_sys::error::{Error, Result};
use host::CpuHost;
pub use identities::Addresses;
use neighbours::KernelNeighbours;
use shared::{NetDevice, NetParts, NetState};
use transmit::Transmitter;
pub use udp::{SocketCounts, UdpSocket};
use wake::Wake;

/// Configuration of the socket layer.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Addresses of this host on each device, in their order. Devices that are not named: as the kernel says.
    pub addresses: Vec<Addresses>,
    /// Packet memory that a socket may hold at first, in bytes.
    pub rmem_default: u32,
    /// The most that it may be given.
    pub rmem_max: u32,
    /// Policy at first for the memory of datagrams.
    pub policy: ReclaimPolicy,
    /// Frames of each queue for what waits in sockets: together they should not hold more, or
    /// the device lacks some (`udp_mem`).
    pub kept_frames: u32,
    /// Frames of each CPU's own for what sockets send.
    pub send_frames: u32,
    /// The memory of each CPU's copy cache is a part of this, in bytes: 1 % of the kernel's `udp_mem`
    /// (UDP-5). None: what that is here.
    pub copy_cache_bytes: Option<u64>,
}

impl NetConfig {
    /// Packet memory that a socket may hold by default, in bytes: what the kernel's
    /// `rmem_default` holds of small datagrams, whose `truesize` is a third of ours there.
    pub const RMEM_DEFAULT: u32 = 3 * 212_992;

    /// Packet memory that a socket may be given at most by default, in bytes.
    pub const RMEM_MAX: u32 = 64 << 20;
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
        }
    }
}

/// Handle by which sockets are bound. Cheap to clone.
#[derive(Clone)]
pub struct Net(Arc<NetState>);

/// An engine whose packets go to sockets.
pub struct NetEngine {
    engine: Engine<Stack>,
    shared: Arc<NetState>,
}

impl Net {
    /// Sockets that there may be at once.
    pub const SOCKETS_MAX: usize = shared::SOCKETS_MAX;

    /// Lays sockets over devices: an engine, and where to bind.
    ///
    /// # Errors
    /// As [`Engine::over`]; and when the kernel cannot be asked for addresses, or a way out cannot be
    /// opened.
    pub fn over(
        config: &Config,
        net: &NetConfig,
        devices: &mut [Device],
    ) -> Result<(Self, NetEngine)> {
        let cpus = config.cpus.cpus().to_vec();
        let faces = identities::of_devices(devices, &net.addresses)?;
        let ways = cpus.iter().map(|_| ways_out(devices, &faces)).collect::<Result<Vec<_>>>()?;
        let config = Config {
            devices: DeviceQueues::of(devices),
            kept_frames: net.kept_frames,
            senders: u16::try_from(cpus.len()).unwrap_or(u16::MAX),
            spare_frames: net.send_frames.max(config.spare_frames),
            small_frames: net.send_frames.next_multiple_of(8),
            ..config.clone()
        };
        let counters: Vec<Arc<NetworkCounters>> = cpus.iter().map(|_| Arc::default()).collect();
        let (caches, no_copy_cache) = match copy_caches(net, cpus.len()) {
            Ok(caches) => (caches.into_iter().map(Some).collect(), None),
            Err(why) => (cpus.iter().map(|_| None).collect::<Vec<_>>(), Some(why)),
        };
        let shared = Arc::new(NetState::new(NetParts {
            cpus: cpus.clone(),
            queues: identities::device_by_queue(devices),
            devices: faces,
            policy: SharedPolicy::default(),
            no_copy_cache,
            rmem_default: net.rmem_default,
            rmem_max: net.rmem_max,
            seed: u64::from_ne_bytes(sys::random_key().first_chunk().copied().unwrap_or_default()),
            counters: counters.clone(),
        }));
        let relief = shared.relief.iter().map(Arc::clone);
        let network = network_config(cpus.len());
        // Flows move between CPUs while their fragments wait.
        let fragments = Arc::new(Fragments::shared(network.fragments, cpus.len()));
        let mut stacks = cpus.iter().zip(counters).zip(caches).zip(relief).enumerate().map(
            |(index, (((&cpu, counters), cache), relief))| {
                let network = NetworkLayer::sharing(Arc::clone(&fragments), network, counters);
                let relief = BufferReclaimer::new(cache, None, relief);
                let host = Box::new(CpuHost::new(index, Arc::clone(&shared)));
                Stack::new((cpu, index), network, relief, host)
            },
        );
        let mut engine = Engine::over(&config, devices, |_| {
            stacks.next().unwrap_or_else(|| unreachable!("as many as CPUs"))
        })?;
        drop(stacks);
        for (stack, small) in engine.take_small().into_iter().enumerate() {
            engine.handler_mut(stack).set_small(small);
        }
        let mut senders = engine.take_senders();
        let home = senders.first().map(forebay_buf::Pool::return_handle);
        let transmitters = senders.drain(..).zip(ways);
        let transmitters = transmitters.map(|(pool, ways)| Transmitter::new(pool, ways)).collect();
        if let Some(home) = home {
            shared.complete(transmitters, engine.flows(), home);
        }
        let this = Self(Arc::clone(&shared));
        this.set_policy(net.policy)?;
        Ok((this, NetEngine { engine, shared }))
    }

    /// Binds a socket.
    ///
    /// # Errors
    /// As [`SocketOptions::bind`].
    pub fn bind(&self, local: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        self.socket().bind(local)
    }

    /// A socket that is to be set up before it is bound.
    pub fn socket(&self) -> SocketOptions {
        SocketOptions {
            net: self.clone(),
            reuse: Reuse::None,
            cpu: None,
            is_v6_only: false,
            rcvbuf: self.0.rmem_default,
            is_reserved: true,
        }
    }

    /// The CPUs that datagrams are delivered on.
    #[must_use]
    pub fn cpus(&self) -> &[CpuId] {
        self.0.cpus()
    }

    /// Sets the policy for the memory of datagrams.
    ///
    /// # Errors
    /// When there is no memory for a copy cache (UDP-5), and that is what is asked for.
    pub fn set_policy(&self, policy: ReclaimPolicy) -> Result<()> {
        if let (ReclaimPolicy::CopyCache, Some(why)) = (policy, &self.0.no_copy_cache) {
            let (what, value) = ("buffers", policy.to_string());
            return Err(Error::Setting { what, value, why: why.clone() });
        }
        self.0.policy.store(policy);
        Ok(())
    }

    /// Counters of the network layer, by CPU.
    #[must_use]
    pub fn counters(&self) -> &[Arc<NetworkCounters>] {
        &self.0.counters
    }

    /// The same in the lines of `/proc/net/snmp`, all CPUs together.
    #[must_use]
    pub fn snmp(&self) -> String {
        snmp::snmp(&self.0.counters, &self.0.unsent)
    }

    /// The same in the lines of `/proc/net/snmp6`.
    #[must_use]
    pub fn snmp6(&self) -> String {
        snmp::snmp6(&self.0.counters, &self.0.unsent)
    }

    /// Datagrams that sockets sent and that waited in vain for a neighbour's station, where the kernel
    /// does not have the device too.
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

    /// Datagrams that were moved to other buffers for slow readers, by CPU.
    #[must_use]
    pub fn relief(&self) -> &[Arc<ReclaimCounters>] {
        &self.0.relief
    }

    /// Frames that have not come home after a run: none once the sockets are closed, or all that they
    /// held is read and given back.
    pub fn frames_away(&self, outcome: &mut Outcome<Stack>) -> usize {
        let stacks = outcome.handlers.iter_mut().map(Stack::frames_away).sum::<usize>();
        outcome.frames_still_away() + stacks + self.0.send_frames_away()
    }

    /// Becomes who the kernel says this host is, where the kernel has the device too: its addresses
    /// may have changed.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn refresh_addresses(&self) -> Result<()> {
        identities::refresh(&self.0.devices)
    }
}

/// A socket to be.
#[derive(Clone, Debug)]
#[must_use]
pub struct SocketOptions {
    net: Net,
    reuse: Reuse,
    cpu: Option<CpuId>,
    is_v6_only: bool,
    rcvbuf: u32,
    is_reserved: bool,
}

impl SocketOptions {
    /// Shares its address with others of the same kind (`SO_REUSEPORT`): each flow goes to one of
    /// them, by its hash.
    pub fn reuse_port(mut self) -> Self {
        self.reuse = Reuse::Hash;
        self
    }

    /// Shares its address with others of the same kind, one for each CPU: this one gets what is
    /// delivered on `cpu`. What is delivered where none of them is goes to one by its hash.
    pub fn reuse_port_on(mut self, cpu: CpuId) -> Self {
        (self.reuse, self.cpu) = (Reuse::ThisCpu, Some(cpu));
        self
    }

    /// True if an IPv6 socket leaves IPv4 alone (`IPV6_V6ONLY`).
    pub fn v6_only(mut self, is_v6_only: bool) -> Self {
        self.is_v6_only = is_v6_only;
        self
    }

    /// The most bytes of packet memory that it may hold, within `rmem_max` (`SO_RCVBUF`).
    pub fn recv_buffer_size(mut self, bytes: u32) -> Self {
        self.rcvbuf = bytes.min(self.net.0.rmem_max);
        self
    }

    /// True if the port is kept from the kernel's programs, where the kernel has a device too.
    pub fn reserve(mut self, is_reserved: bool) -> Self {
        self.is_reserved = is_reserved;
        self
    }

    /// Binds it.
    ///
    /// # Errors
    /// `EADDRINUSE` when another socket, or a program of the kernel's, has the address;
    /// `EADDRNOTAVAIL` when it is not this host's; when no descriptors are left.
    pub fn bind(self, local: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        let Self { net: Net(shared), reuse, cpu, is_v6_only, rcvbuf, is_reserved } = self;
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "no address to bind to");
        let mut local = local.to_socket_addrs()?.next().ok_or_else(none)?;
        let is_shared = reuse != Reuse::None;
        let is_kernels = shared.devices.iter().any(|device| device.kernels.is_some());
        let reserved = if is_reserved && is_kernels {
            Some(sys::udp_reserve::reserve(local, is_shared, is_v6_only)?)
        } else {
            None
        };
        if let Some(reserved) = &reserved {
            local.set_port(reserved.local_addr()?.port());
        }
        let wake = Arc::new(Wake::default());
        let binding =
            Binding { reuse, cpu, is_v6_only, ..Binding::new(SocketId(0), endpoint::plain(local)) };
        let bound = shared.bind(binding, rcvbuf, Arc::<Wake>::clone(&wake))?;
        Ok(UdpSocket(Arc::new(Inner::new(shared, bound, wake, reserved))))
    }
}

impl NetEngine {
    /// Handle that changes the engine while it runs, and tells its state.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::of(&self.engine)
    }

    /// Handle that asks it to stop.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.engine.stopper()
    }

    /// Runs on threads of its own until every source is exhausted. Then readers get what they have
    /// not read, and `BrokenPipe` behind it.
    ///
    /// # Errors
    /// As [`Engine::run`].
    pub fn run(self) -> Result<Outcome<Stack>> {
        self.run_with(CpuThread::turn_to_the_end)
    }

    /// The same, with every CPU's thread in the hands of `application`: see [`Engine::run_with`].
    ///
    /// # Errors
    /// As [`Engine::run_with`].
    pub fn run_with(
        self,
        application: impl Fn(&mut CpuThread<Stack>) + Send + Sync + 'static,
    ) -> Result<Outcome<Stack>> {
        let Self { engine, shared } = self;
        let outcome = engine.run_with(application);
        shared.end();
        outcome.map(|mut outcome| {
            outcome.handlers.iter_mut().for_each(Stack::end);
            outcome.frames_away = outcome.frames_still_away();
            outcome
        })
    }
}

/// A way out of each device for one CPU.
fn ways_out(
    devices: &[Device],
    faces: &[NetDevice],
) -> Result<Vec<(Box<dyn forebay_rx::sink::Sink>, KernelNeighbours)>> {
    devices
        .iter()
        .zip(faces)
        .map(|(device, face)| {
            let neighbours = match (face.kernels, device.via) {
                (Some(interface), _) => {
                    let learned = device.takes_all().then(|| Arc::clone(&face.learned));
                    KernelNeighbours::of_kernel(interface, learned)
                }
                (None, Via::Tun) => KernelNeighbours::None,
                (None, _) => KernelNeighbours::Own(Arc::clone(&face.learned)),
            };
            Ok((device.sink()?, neighbours))
        })
        .collect()
}

/// A copy cache for each CPU; if there is no memory for them, says so.
fn copy_caches(net: &NetConfig, cpus: usize) -> Result<Vec<CopyCache>, String> {
    let of_kernel = || sys::udp_mem_low_pages().map(copy_cache::budget_bytes);
    // Only the first network namespace has the file.
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

/// A CPU tells of so many errors at once and a second at least, as many as the kernel tells one host of
/// (`XRLIM_BURST_FACTOR`), however many CPUs there are.
const ICMP_MSGS_LEAST: u32 = 6;

/// The kernel's limits are the host's. How often errors are told of, each CPU has its share of; what
/// waits for more fragments is the host's here, too.
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
        write!(f, "NetEngine({:?})", self.shared)
    }
}

#[cfg(test)]
mod tests;
