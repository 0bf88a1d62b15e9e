//! Endpoint: the state of one socket, shared by its handles.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::{fmt, io};

use forebay_rx::Packet;
use forebay_rx::hash::FlowHash;
use forebay_stack::socket::queue::SocketQueue;
use forebay_stack::socket::reader::SocketReader;
use forebay_stack::socket::table::Membership;
use forebay_stack::socket::{SocketId, shown};
use forebay_sys::hidden::Hidden;
use forebay_sys::readiness::ReadinessDescriptor;
use rustix::io::Errno;

use super::datagram::{Datagram, Datagrams, scoped, traffic_class_of, ttl_of};
use super::message::{DeviceIndex, Received};
use super::neighbours::WayBack;
use super::options::Options;
use super::sending::{is_this_host, no_loopback};
use super::shared::{BoundEntry, NetState};
use super::transmit::LastSent;
use super::wake::Wake;
use super::ways_back::WaysBack;

/// One socket, shared by all handles to it.
pub(super) struct Endpoint {
    pub(super) shared: Arc<NetState>,
    pub(super) id: SocketId,
    /// Address that the socket was bound to.
    bound: SocketAddr,
    /// True if it is for IPv6 alone.
    is_v6_only: bool,
    /// True if packets to the address that it was bound to are for many, or that is none.
    is_bound_to_many: bool,
    peer: Mutex<Option<Peer>>,
    is_connected: AtomicBool,
    pub(super) queue: Arc<SocketQueue>,
    pub(super) reader: Mutex<SocketReader>,
    pub(super) wake: Arc<Wake>,
    /// Created on first use.
    pub(super) descriptor: OnceLock<ReadinessDescriptor>,
    pub(super) options: Options,
    /// Keeps the datagrams of each flow in order.
    pub(super) last_sent: LastSent,
    /// Ways back to those whose datagrams came by devices that only this process has.
    ways_back: WaysBack,
    /// Multicast groups joined.
    pub(super) joined: Mutex<Vec<Membership>>,
    /// Reserves the port against other programs of the kernel, and sends datagrams whose next hop
    /// only the kernel can resolve.
    pub(super) reserved: Option<Hidden<std::net::UdpSocket>>,
}

/// Addresses of a connected socket, in the form shown to the application.
#[derive(Clone, Copy)]
struct Peer {
    /// The socket's own address.
    local: SocketAddr,
    remote: SocketAddr,
}

impl Endpoint {
    /// Creates the endpoint of a bound socket.
    pub(super) fn new(
        shared: Arc<NetState>,
        bound: BoundEntry,
        wake: Arc<Wake>,
        reserved: Option<Hidden<std::net::UdpSocket>>,
    ) -> Self {
        let BoundEntry { id, local, consumer, home, is_followed, is_v6_only } = bound;
        Self {
            is_bound_to_many: shared.is_to_many(plain(local).ip()),
            shared,
            id,
            bound: local,
            is_v6_only,
            peer: Mutex::default(),
            is_connected: AtomicBool::new(false),
            queue: Arc::clone(consumer.queue()),
            descriptor: OnceLock::new(),
            reader: Mutex::new(SocketReader::new(consumer, home)),
            wake,
            options: Options::new(is_followed),
            last_sent: LastSent::default(),
            ways_back: WaysBack::default(),
            joined: Mutex::default(),
            reserved,
        }
    }

    pub(super) fn reader(&self) -> MutexGuard<'_, SocketReader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self) -> MutexGuard<'_, Option<Peer>> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if it is bound to an IPv4 address.
    pub(super) fn is_ipv4(&self) -> bool {
        self.bound.is_ipv4()
    }

    /// Refuses an IPv4 address if the socket is for IPv6 alone.
    pub(super) fn check_v6_only(&self, to: IpAddr) -> io::Result<()> {
        if self.is_v6_only && to.is_ipv4() { Err(Errno::NETUNREACH.into()) } else { Ok(()) }
    }

    /// The socket's own address: chosen by the route once connected, else the bound one.
    pub(super) fn local(&self) -> SocketAddr {
        let chosen = || self.peer().map(|peer| peer.local);
        let is_connected = self.is_connected.load(Ordering::Acquire);
        is_connected.then(chosen).flatten().unwrap_or(self.bound)
    }

    /// Own address of a datagram. An IPv6 address that `connect` chose is not used for IPv4 destinations.
    pub(super) fn local_for(&self, to: IpAddr) -> SocketAddr {
        let local = self.local();
        let is_chosen = local.ip() != self.bound.ip();
        if is_chosen && to.is_ipv4() && plain(local).is_ipv6() { self.bound } else { local }
    }

    /// True for an own address that its datagrams may have as their source: a group or a broadcast address that it was bound
    /// to is none (`inet_bind`).
    pub(super) fn is_source(&self, own: SocketAddr) -> bool {
        let is_for_many = self.is_bound_to_many && own.ip() == self.bound.ip();
        !(is_for_many || plain(own).ip().is_unspecified())
    }

    /// Peer that the socket is connected to.
    pub(super) fn remote(&self) -> Option<SocketAddr> {
        self.is_connected.load(Ordering::Acquire).then(|| *self.peer())?.map(|peer| peer.remote)
    }

    pub(super) fn connect(&self, to: SocketAddr) -> io::Result<()> {
        if to.is_ipv6() != self.bound.is_ipv6() {
            // The peer must be of the socket's family, possibly as a mapped address.
            return Err(Errno::AFNOSUPPORT.into());
        }
        let remote = plain(to);
        self.check_v6_only(remote.ip())?;
        let routes = self.shared.routes();
        let mut local = self.local_for(remote.ip());
        let named = Some(local).filter(|local| !plain(*local).ip().is_unspecified());
        let chosen = named.is_none().then(|| self.group_source(&routes, remote.ip())).flatten();
        let route = self.find_route(&routes, None, named.or(chosen), to)?;
        let (device, own) = route.ok_or(Errno::NETUNREACH)?;
        // An IPv4 source has no way to IPv6 (`ip6_dst_lookup_tail`).
        if plain(local).is_ipv4() && remote.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        let identity = routes.identity(device);
        self.check_broadcast(remote, &identity)?;
        if is_this_host(remote.ip(), &identity) && !self.has_kernel(device) {
            return Err(no_loopback(remote.ip()));
        }
        // As in the kernel, connecting gives the socket an address.
        if plain(local).ip().is_unspecified()
            && let Some(own) = own
        {
            let of_kernel = || routes.kernels_source(device, remote.ip());
            let own = chosen.map(|own| own.ip()).or_else(of_kernel).unwrap_or(own);
            let scope_id = routes.scope_on(device);
            local = self.shown(scoped(SocketAddr::new(own, local.port()), scope_id));
        }
        let mut peer = self.peer();
        *peer = Some(Peer { local, remote: to });
        self.is_connected.store(true, Ordering::Release);
        self.shared.rebind(self.id, |binding| {
            (binding.local, binding.remote) = (plain(local), Some(remote));
        });
        Ok(())
    }

    pub(super) fn disconnect(&self) {
        let mut peer = self.peer();
        if peer.take().is_none() {
            return;
        }
        self.is_connected.store(false, Ordering::Release);
        self.shared.rebind(self.id, |binding| {
            (binding.local, binding.remote) = (plain(self.bound), None);
        });
    }

    fn read_here(&self, flows: impl Iterator<Item = FlowHash>) {
        self.shared.flows().read_here(flows, self.is_connected.load(Ordering::Relaxed));
    }

    /// Records the way that a datagram came by a device that only this process has.
    fn record_way(&self, packet: &Packet) {
        if self.is_ours_alone(packet.headers.device.into()) {
            self.ways_back.record(packet);
        }
    }

    /// Way back to a source of datagrams that came by a device.
    pub(super) fn way_back(&self, device: usize, source: IpAddr) -> Option<WayBack> {
        if self.is_ours_alone(device) { self.ways_back.find(device, source) } else { None }
    }

    /// True if only this process has the device.
    fn is_ours_alone(&self, device: usize) -> bool {
        self.shared.devices.get(device).is_some_and(|device| device.kernels.is_none())
    }

    /// Copies as much as fits, and records that the flow is read on this CPU.
    pub(super) fn read(&self, packet: &Packet, buffer: &mut [u8]) -> (usize, SocketAddr) {
        let Received { len, source, .. } = self.read_message(packet, buffer);
        (len, source)
    }

    /// Copies as much as fits, and returns what the headers say, too. Records that the flow is read on this CPU.
    pub(super) fn read_message(&self, packet: &Packet, buffer: &mut [u8]) -> Received {
        if self.options.is_followed.load(Ordering::Relaxed) {
            self.read_here(std::iter::once(packet.hash));
        }
        self.record_way(packet);
        let len = packet.copy_payload(buffer);
        let view = packet.view();
        let (from, to) = view.ports().unwrap_or_default();
        let nobody = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let scope_id = self.shared.routes().scope_on(packet.headers.device.into());
        let shown = |ip: Option<IpAddr>, port| {
            self.shown(scoped(SocketAddr::new(ip.unwrap_or(nobody), port), scope_id))
        };
        Received {
            len,
            is_truncated: len < usize::from(packet.headers.payload_len),
            source: shown(view.source(), from),
            destination: shown(view.destination(), to),
            device: DeviceIndex(packet.headers.device),
            traffic_class: traffic_class_of(packet),
            ttl: ttl_of(packet),
            gso_size: packet.gso_size(),
            timestamp_ns: packet.timestamp_ns,
        }
    }

    /// Address in the socket's family.
    pub(super) fn shown(&self, address: SocketAddr) -> SocketAddr {
        shown(address, self.bound.is_ipv6())
    }

    /// Takes up to `max` datagrams into an empty batch, which stays empty if there are none.
    pub(super) fn take_batch(
        self: &Arc<Self>,
        reader: &mut SocketReader,
        batch: &mut Datagrams,
        max: usize,
    ) -> Option<usize> {
        let datagrams = &mut batch.datagrams;
        let routes = self.shared.routes();
        let count = reader.take(max, |packet| {
            self.record_way(&packet);
            let scope_id = routes.scope_on(packet.headers.device.into());
            datagrams.push(Datagram::of(packet, scope_id));
        });
        if count == 0 {
            return None;
        }
        batch.of = Some(Arc::clone(self));
        if self.options.is_followed.load(Ordering::Relaxed) {
            let flows = datagrams.iter().map(|datagram| datagram.packet.hash);
            self.read_here(flows);
        }
        Some(count)
    }

    /// Returns the frames of the datagrams that a batch still has.
    pub(super) fn give_back(&self, batch: &mut Datagrams) {
        let freed_bytes = batch.datagrams.iter().map(|datagram| datagram.freed_bytes).sum::<u32>();
        let gone_bytes = std::mem::take(&mut batch.gone_bytes) + freed_bytes;
        if batch.datagrams.is_empty() && gone_bytes == 0 {
            return;
        }
        let policy = self.shared.policy.load();
        let mut reader = self.reader();
        reader.let_go(gone_bytes);
        reader.give_back_all(batch.datagrams.drain(..).map(|datagram| datagram.packet), policy);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // First: a set of `epoll` would tell of its other end.
        drop(self.descriptor.take());
        self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).consumer.close();
        self.leave_all();
        self.shared.close(self.id);
        self.wake.close();
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.local())
    }
}

/// An address in the form of packets: IPv4-mapped IPv6 addresses become IPv4, and scopes are left out.
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    let mapped = match address.ip() {
        IpAddr::V6(ip) => ip.to_ipv4_mapped(),
        IpAddr::V4(_) => None,
    };
    SocketAddr::new(mapped.map_or(address.ip(), IpAddr::V4), address.port())
}

#[cfg(test)]
mod tests;
