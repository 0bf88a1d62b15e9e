//! Endpoint: the state of one socket, shared by its handles.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::{fmt, io};

use forebay_rx::Packet;
use forebay_rx::hash::FlowHash;
use forebay_stack::network::Identity;
use forebay_stack::socket::SocketId;
use forebay_stack::socket::queue::SocketQueue;
use forebay_stack::socket::reader::SocketReader;
use forebay_sys::readiness::ReadinessTold;
use rustix::io::Errno;

use super::datagram::{Datagram, Datagrams};
use super::shared::{BoundEntry, NetState};
use super::transmit::{Between, Gathered, SentMarks};
use super::wake::Wake;

/// One socket, shared by all handles to it.
pub(super) struct Inner {
    pub(super) shared: Arc<NetState>,
    pub(super) id: SocketId,
    /// Address that the socket was bound to.
    bound: SocketAddr,
    peer: Mutex<Option<Peer>>,
    is_connected: AtomicBool,
    pub(super) hub: Arc<SocketQueue>,
    pub(super) reader: Mutex<SocketReader>,
    pub(super) wake: Arc<Wake>,
    /// Created on first use.
    pub(super) descriptor: OnceLock<ReadinessTold>,
    pub(super) is_nonblocking: AtomicBool,
    /// Time-out of receive calls, in ns; 0: none.
    pub(super) read_timeout_ns: AtomicU64,
    /// Time-out of send calls, in ns; 0: none.
    pub(super) write_timeout_ns: AtomicU64,
    /// True if flows are steered to the CPU that reads them (RFS).
    pub(super) is_followed: AtomicBool,
    pub(super) ttl: AtomicU8,
    pub(super) tos: AtomicU8,
    /// Reserves the port against other programs of the kernel, and sends datagrams whose next hop
    /// only the kernel can resolve.
    pub(super) reserved: Option<std::net::UdpSocket>,
}

/// Addresses of a connected socket, in the form shown to the application.
#[derive(Clone, Copy)]
struct Peer {
    /// The socket's own address.
    local: SocketAddr,
    remote: SocketAddr,
}

/// Time at which the device is notified of a datagram.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flush {
    Now,
    Later,
}

impl Inner {
    /// Creates the endpoint of a bound socket.
    pub(super) fn new(
        shared: Arc<NetState>,
        bound: BoundEntry,
        wake: Arc<Wake>,
        reserved: Option<std::net::UdpSocket>,
    ) -> Self {
        let BoundEntry { id, local, outlet, home, is_followed } = bound;
        Self {
            shared,
            id,
            bound: local,
            peer: Mutex::default(),
            is_connected: AtomicBool::new(false),
            hub: Arc::clone(outlet.hub()),
            descriptor: OnceLock::new(),
            reader: Mutex::new(SocketReader::new(outlet, home)),
            wake,
            is_nonblocking: AtomicBool::new(false),
            read_timeout_ns: AtomicU64::new(0),
            write_timeout_ns: AtomicU64::new(0),
            is_followed: AtomicBool::new(is_followed),
            ttl: AtomicU8::new(SentMarks::default().ttl),
            tos: AtomicU8::new(0),
            reserved,
        }
    }

    pub(super) fn reader(&self) -> MutexGuard<'_, SocketReader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer(&self) -> MutexGuard<'_, Option<Peer>> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The socket's own address: chosen by the route once connected, else the bound one.
    pub(super) fn local(&self) -> SocketAddr {
        let chosen = || self.peer().map(|peer| peer.local);
        let is_connected = self.is_connected.load(Ordering::Acquire);
        is_connected.then(chosen).flatten().unwrap_or(self.bound)
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
        let (_, own) = self.shared.routes().find(remote.ip()).ok_or(Errno::NETUNREACH)?;
        let mut local = self.local();
        // As in the kernel, connecting gives the socket an address.
        if plain(local).ip().is_unspecified()
            && let Some(own) = own
        {
            local = self.shown(SocketAddr::new(own, local.port()));
        }
        let mut peer = self.peer();
        *peer = Some(Peer { local, remote: to });
        self.is_connected.store(true, Ordering::Release);
        self.shared.rebind(self.id, |binding| {
            (binding.local, binding.remote) = (plain(local), Some(remote));
        });
        Ok(())
    }

    fn read_here(&self, flows: impl Iterator<Item = FlowHash>) {
        self.shared.flows().read_here(flows, self.is_connected.load(Ordering::Relaxed));
    }

    /// Copies as much as fits, and records that the flow is read on this CPU.
    pub(super) fn read(&self, packet: &Packet, buffer: &mut [u8]) -> (usize, SocketAddr) {
        if self.is_followed.load(Ordering::Relaxed) {
            self.read_here(std::iter::once(packet.hash));
        }
        let len = packet.copy_payload(buffer);
        let view = packet.view();
        let (port, _) = view.ports().unwrap_or_default();
        let ip = view.source().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        (len, self.shown(SocketAddr::new(ip, port)))
    }

    /// Address in the socket's family: an IPv6 socket shows IPv4 addresses as mapped (RFC 3493,
    /// section 3.7).
    fn shown(&self, address: SocketAddr) -> SocketAddr {
        match (self.bound, address) {
            (SocketAddr::V6(_), SocketAddr::V4(v4)) => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            _ => address,
        }
    }

    pub(super) fn take_batch(
        &self,
        reader: &mut SocketReader,
        batch: &mut Datagrams,
        max: usize,
    ) -> Option<usize> {
        let datagrams = &mut batch.datagrams;
        let count = reader.take(max, |packet| datagrams.push(Datagram::of(packet)));
        if count == 0 {
            return None;
        }
        if self.is_followed.load(Ordering::Relaxed) {
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

    pub(super) fn marks(&self, gso_size: u16) -> SentMarks {
        let (ttl, tos) = (self.ttl.load(Ordering::Relaxed), self.tos.load(Ordering::Relaxed));
        SentMarks { ttl, tos, gso_size }
    }

    pub(super) fn send(
        &self,
        payload: &[u8],
        to: SocketAddr,
        gso_size: u16,
        flush: Flush,
    ) -> io::Result<usize> {
        let to = plain(to);
        // An IPv4 socket has no IPv6 source address.
        if self.bound.is_ipv4() && to.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        if self.hub.take_refusal() {
            self.tell_if_readable(&mut self.reader());
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let routes = self.shared.routes();
        let Some((device, address)) = routes.find(to.ip()) else {
            self.shared.unsent.count_no_route(to.ip());
            return Err(Errno::NETUNREACH.into());
        };
        let bound = plain(self.local());
        let is_bound = !bound.ip().is_unspecified() && !bound.ip().is_multicast();
        let ip = if is_bound { Some(bound.ip()) } else { address };
        let source = SocketAddr::new(ip.ok_or(Errno::NETUNREACH)?, bound.port());
        let between = Between { source, destination: to };
        let identity = routes.identity(device);
        let mut transmitter = self.shared.transmitter();
        let pieces = match gso_size {
            0 => payload.chunks(payload.len().max(1)),
            size => payload.chunks(transmitter.whole_len(size)),
        };
        let marks = self.marks(gso_size);
        let empty = payload.is_empty().then_some(&[][..]);
        let mut patience = self.patience();
        for piece in pieces.chain(empty) {
            loop {
                match transmitter.gather(device, identity, between, (piece, marks)) {
                    Ok(Gathered::Yes) => break,
                    Ok(Gathered::NextUnknown) => {
                        self.send_by_kernel(piece, to, gso_size)?;
                        break;
                    }
                    Err(full) if full.kind() == io::ErrorKind::WouldBlock => {
                        drop(transmitter);
                        patience.wait()?;
                        transmitter = self.shared.transmitter();
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        if flush == Flush::Now {
            transmitter.flush(device).map_err(io::Error::other)?;
        }
        Ok(payload.len())
    }

    /// Sends through the kernel, which resolves the next hop and queues the datagram meanwhile. On
    /// a device that the kernel does not have, the first datagrams to a new neighbour are lost, as
    /// behind a full ARP queue.
    fn send_by_kernel(&self, payload: &[u8], to: SocketAddr, gso_size: u16) -> io::Result<()> {
        let Some(reserved) = &self.reserved else {
            self.shared.unsent.count_discard(to.ip());
            return Ok(());
        };
        let size = if gso_size > 0 { usize::from(gso_size) } else { payload.len().max(1) };
        let empty = payload.is_empty().then_some(&[][..]);
        for piece in payload.chunks(size).chain(empty) {
            reserved.send_to(piece, self.shown(to))?;
        }
        Ok(())
    }

    pub(super) fn send_replies(&self, batch: &mut Datagrams) -> io::Result<usize> {
        let mut transmitter = self.shared.transmitter();
        let routes = self.shared.routes();
        let marks = self.marks(0);
        let mut sent = 0;
        for datagram in batch.datagrams.extract_if(.., |datagram| datagram.answer.is_some()) {
            let Datagram { packet, answer: Some(answer), freed_bytes, .. } = datagram else {
                continue;
            };
            batch.gone_bytes += packet.frame.truesize() + freed_bytes;
            let to = answer.between.destination.ip();
            let Some((device, address)) = routes.find(to) else {
                self.shared.unsent.count_no_route(to);
                transmitter.put(packet);
                continue;
            };
            let identity = routes.identity(device);
            let mut between = answer.between;
            // A datagram to a multicast or broadcast address is answered from a unicast address.
            if !identity.is_own(between.source.ip())
                && let Some(address) = address
            {
                between.source.set_ip(address);
            }
            let packet = (packet, answer.back);
            match transmitter.gather_answer(device, identity, packet, (between, marks)) {
                Ok(()) => sent += 1,
                Err(_) => self.shared.unsent.count_discard(to),
            }
        }
        transmitter.flush_all().map_err(io::Error::other)?;
        Ok(sent)
    }

    pub(super) fn join(&self, group: IpAddr) -> io::Result<()> {
        if !group.is_multicast() {
            return Err(Errno::INVAL.into());
        }
        if let Some(reserved) = &self.reserved {
            match group {
                IpAddr::V4(group) => reserved.join_multicast_v4(&group, &Ipv4Addr::UNSPECIFIED)?,
                IpAddr::V6(group) => reserved.join_multicast_v6(&group, 0)?,
            }
        }
        for device in &self.shared.devices {
            device.identity.rcu(|identity| {
                let mut identity = Identity::clone(identity);
                if !identity.groups.contains(&group) {
                    identity.groups.push(group);
                }
                identity
            });
        }
        self.shared.rebind(self.id, |binding| binding.groups.push(group));
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).outlet.close();
        self.shared.close(self.id);
        self.wake.close();
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.local())
    }
}

/// An address in the form of packets: IPv4-mapped IPv6 addresses become IPv4.
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), address.port()),
            None => address,
        },
        IpAddr::V4(_) => address,
    }
}
