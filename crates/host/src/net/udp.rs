//! UDP sockets as those of `std`, and what those cannot: many datagrams at once where they lie, and a
//! reader that turns its CPU itself.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use path::arrive::Waker;
use path::socket::SocketId;
use path::{Handler, Packet};
use rustix::io::Errno;

use super::datagram::{Datagram, Datagrams};
use super::reader::Reader;
use super::shared::{Bound, Shared};
use super::transmit::{Between, Gathered, Marks};
use crate::engine::CpuThread;
use crate::sys::{self, Event};

/// A UDP socket of a [`Net`](super::Net).
///
/// One thread at a time reads from it; any number may send.
#[derive(Clone)]
pub struct UdpSocket(pub(super) Arc<Inner>);

pub(super) struct Inner {
    shared: Arc<Shared>,
    id: SocketId,
    local: SocketAddr,
    remote: Mutex<Option<SocketAddr>>,
    reader: Mutex<Reader>,
    wake: Arc<Wake>,
    is_nonblocking: AtomicBool,
    /// 0: for ever.
    read_timeout_ns: AtomicU64,
    ttl: AtomicU8,
    tos: AtomicU8,
    /// Keeps the port from the kernel's other programs, and sends what only the kernel knows the way
    /// of.
    reserved: Option<std::net::UdpSocket>,
}

/// How the reader is woken.
pub(super) struct Wake {
    event: Event,
    /// A reader that turns its CPU itself sleeps there.
    inline: ArcSwapOption<Waker>,
}

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { event: Event::new()?, inline: ArcSwapOption::empty() })
    }

    pub(super) fn wake(&self) {
        match &*self.inline.load() {
            Some(wake) => wake(),
            None => self.event.signal(),
        }
    }
}

/// What a socket has counted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SocketCounts {
    /// Datagrams that were queued for its reader.
    pub queued: u64,
    /// The same by the CPU that they were delivered on, in the order of the engine's.
    pub by_cpu: Vec<u64>,
    /// Datagrams that it had no room for: `RcvbufErrors`.
    pub rcvbuf_errors: u64,
    /// Bytes of packet memory that it holds now.
    pub rmem: u32,
    /// The most that it may hold.
    pub rcvbuf: u32,
}

impl UdpSocket {
    pub(super) fn new(
        shared: Arc<Shared>,
        bound: Bound,
        wake: Arc<Wake>,
        reserved: Option<std::net::UdpSocket>,
    ) -> Self {
        let Bound { id, local, outlet, home } = bound;
        Self(Arc::new(Inner {
            shared,
            id,
            local,
            remote: Mutex::new(None),
            reader: Mutex::new(Reader::new(outlet, home)),
            wake,
            is_nonblocking: AtomicBool::new(false),
            read_timeout_ns: AtomicU64::new(0),
            ttl: AtomicU8::new(Marks::default().ttl),
            tos: AtomicU8::new(0),
            reserved,
        }))
    }

    /// The address that it is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local
    }

    /// The address that it is connected to, if it is.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        *self.0.remote()
    }

    /// Connects it: only what comes from there is received from now on, and [`send`](Self::send) goes
    /// there.
    ///
    /// # Errors
    /// When the address cannot be resolved, or is of another family; `ENETUNREACH` when there is no way.
    pub fn connect(&self, to: impl ToSocketAddrs) -> io::Result<()> {
        let to = first(to)?;
        if to.is_ipv6() != self.0.local.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        let (to_plain, local) = (plain(to), plain(self.0.local));
        let (_, own) = self.0.shared.routes().find(to_plain.ip()).ok_or(Errno::NETUNREACH)?;
        *self.0.remote() = Some(to);
        self.0.shared.rebind(self.0.id, |binding| {
            binding.remote = Some(to_plain);
            // As the kernel does: from now on it has an address of its own.
            if local.ip().is_unspecified()
                && let Some(own) = own
            {
                binding.local = SocketAddr::new(own, local.port());
            }
        });
        Ok(())
    }

    /// Sends to whom it is connected to.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); and `ENOTCONN`.
    pub fn send(&self, payload: &[u8]) -> io::Result<usize> {
        let to = self.peer_addr().ok_or(Errno::NOTCONN)?;
        self.0.send(payload, to, 0, Flush::Now)
    }

    /// Sends a datagram. It is not cut into fragments.
    ///
    /// # Errors
    /// `EMSGSIZE` when it does not fit in the MTU, `ENETUNREACH` when there is no way; would block
    /// when no packet memory is free; when the device is gone.
    pub fn send_to(&self, payload: &[u8], to: impl ToSocketAddrs) -> io::Result<usize> {
        self.0.send(payload, first(to)?, 0, Flush::Now)
    }

    /// Sends a payload as datagrams of `gso_size` bytes each, the last one perhaps shorter
    /// (`UDP_SEGMENT`).
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn send_gso(&self, payload: &[u8], gso_size: u16, to: SocketAddr) -> io::Result<usize> {
        self.0.send(payload, to, gso_size, Flush::Now)
    }

    /// Sends many datagrams, and tells the device once.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to) of the first that cannot be sent, if that is the first at all;
    /// else the number of those before it.
    pub fn send_batch<'a>(
        &self,
        datagrams: impl IntoIterator<Item = (&'a [u8], SocketAddr)>,
    ) -> io::Result<usize> {
        let mut sent = 0;
        let mut failed = None;
        for (payload, to) in datagrams {
            if let Err(error) = self.0.send(payload, to, 0, Flush::Later) {
                failed = Some(error);
                break;
            }
            sent += 1;
        }
        let flushed = self.0.shared.transmitter().flush_all().map_err(io::Error::other);
        match failed {
            Some(error) if sent == 0 => Err(error),
            _ => flushed.map(|()| sent),
        }
    }

    /// Receives one datagram, and says how much of it there is in `buffer` and who sent it. What does
    /// not fit is cut off.
    ///
    /// # Errors
    /// Would block, or `TimedOut`, as it was set; `BrokenPipe` once the engine has ended and all is
    /// read.
    pub fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let packet = self.0.wait_for(Reader::next)?;
        let read = self.0.read(&packet, buffer);
        self.0.reader().give_back(packet, self.0.shared.policy.load());
        Ok(read)
    }

    /// Receives from whom it is connected to, or anyone.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buffer).map(|(len, _)| len)
    }

    /// Reads the next datagram without taking it.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.0.wait_for(|reader| reader.peek().map(|packet| self.0.read(packet, buffer)))
    }

    /// Receives up to `max` datagrams where they lie, as many as are there, at least one. What
    /// `batch` had is given back first.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv_batch(&self, batch: &mut Datagrams, max: usize) -> io::Result<usize> {
        self.begin(batch);
        self.0.wait_for(|reader| self.0.take_batch(reader, batch, max))
    }

    /// The same, and returns 0 if none is there.
    pub fn try_recv_batch(&self, batch: &mut Datagrams, max: usize) -> usize {
        self.begin(batch);
        self.0.take_batch(&mut self.0.reader(), batch, max).unwrap_or(0)
    }

    /// The same on the thread of a CPU, which takes packets in and delivers them itself while there
    /// is nothing to read: nobody else is woken. Returns 0 once nothing will come any more.
    pub fn recv_batch_on<H: Handler>(
        &self,
        cpu: &mut CpuThread<H>,
        batch: &mut Datagrams,
        max: usize,
    ) -> usize {
        self.begin(batch);
        if self.0.wake.inline.load().is_none() {
            self.0.wake.inline.store(Some(Arc::new(cpu.waker())));
        }
        let is_ready = || self.0.reader().is_ready_or_armed();
        loop {
            let goes_on = cpu.turn_until(is_ready);
            let count = self.0.take_batch(&mut self.0.reader(), batch, max).unwrap_or(0);
            // Where another CPU delivers, the datagram may be a moment away.
            if count > 0 || !(goes_on || is_ready()) {
                return count;
            }
        }
    }

    fn begin(&self, batch: &mut Datagrams) {
        batch.clear();
        batch.of = Some(Arc::clone(&self.0));
    }

    /// Sends the answers of a batch back to where its datagrams came from, in their order.
    ///
    /// # Errors
    /// When the device is gone. What cannot be sent for another reason is dropped, and counted by the
    /// device's sink.
    pub fn send_replies(&self, batch: &mut Datagrams) -> io::Result<usize> {
        self.0.send_replies(batch)
    }

    /// Whether calls return at once if nothing is there (`O_NONBLOCK`).
    pub fn set_nonblocking(&self, is_nonblocking: bool) {
        self.0.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    /// How long a call waits for a datagram; `None`: for ever (`SO_RCVTIMEO`).
    pub fn set_read_timeout(&self, timeout: Option<Duration>) {
        let ns = timeout.map_or(0, |timeout| timeout.as_nanos().max(1));
        self.0.read_timeout_ns.store(u64::try_from(ns).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Whether datagrams of one sender that were merged are read as one (`UDP_GRO`).
    pub fn set_gro(&self, is_on: bool) {
        self.0.reader().takes_merged = is_on;
    }

    /// Time to live, or hop limit, of what it sends.
    pub fn set_ttl(&self, ttl: u8) {
        self.0.ttl.store(ttl, Ordering::Relaxed);
    }

    /// DSCP and ECN of what it sends.
    pub fn set_traffic_class(&self, class: u8) {
        self.0.tos.store(class, Ordering::Relaxed);
    }

    /// The most bytes of packet memory that it may hold (`SO_RCVBUF`), within `rmem_max`.
    pub fn set_recv_buffer_size(&self, bytes: u32) {
        self.0.reader().outlet.account().set_rcvbuf(bytes.min(self.0.shared.rmem_max));
    }

    /// Receives what is sent to a group, too. On a device that the kernel has as well, the kernel
    /// joins it, which is what tells the network.
    ///
    /// # Errors
    /// `EINVAL` if it is no group; what the kernel says.
    pub fn join_multicast(&self, group: IpAddr) -> io::Result<()> {
        self.0.join(group)
    }

    /// What it has counted.
    #[must_use]
    pub fn counts(&self) -> SocketCounts {
        let reader = self.0.reader();
        let account = reader.outlet.account();
        SocketCounts {
            queued: account.queued(),
            by_cpu: account.lanes().map(|lane| lane.queued.get()).collect(),
            rcvbuf_errors: account.dropped(),
            rmem: account.rmem(),
            rcvbuf: account.rcvbuf(),
        }
    }
}

/// When the device is told of what was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flush {
    Now,
    Later,
}

impl Inner {
    pub(super) fn reader(&self) -> MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remote(&self) -> MutexGuard<'_, Option<SocketAddr>> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries until there is something, as long as may be waited.
    fn wait_for<T>(&self, mut attempt: impl FnMut(&mut Reader) -> Option<T>) -> io::Result<T> {
        let mut until = None;
        loop {
            let mut reader = self.reader();
            if let Some(found) = attempt(&mut reader) {
                return Ok(found);
            }
            let has_ended = self.shared.has_ended();
            self.wake.inline.store(None);
            self.wake.event.clear();
            if reader.is_ready_or_armed() {
                drop(reader);
                std::thread::yield_now(); // it is a moment away
                continue;
            }
            drop(reader);
            if has_ended {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if self.is_nonblocking.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let left = match self.read_timeout_ns.load(Ordering::Relaxed) {
                0 => None,
                ns => {
                    let now = Instant::now();
                    let until = *until.get_or_insert_with(|| now + Duration::from_nanos(ns));
                    match until.checked_duration_since(now) {
                        Some(left) if !left.is_zero() => Some(left),
                        _ => return Err(io::ErrorKind::TimedOut.into()),
                    }
                }
            };
            if !self.shared.has_ended() {
                self.wake.event.wait(&[], left);
            }
        }
    }

    /// Copies what fits, and records that the flow is read here.
    fn read(&self, packet: &Packet, buffer: &mut [u8]) -> (usize, SocketAddr) {
        self.shared.flows().touch(packet.hash);
        let view = packet.view();
        let payload = view.payload();
        let len = payload.len().min(buffer.len());
        buffer[..len].copy_from_slice(&payload[..len]);
        let (port, _) = view.ports().unwrap_or_default();
        let ip = view.source().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        (len, self.shown(SocketAddr::new(ip, port)))
    }

    /// An IPv6 socket shows IPv4 addresses as IPv6 ones (RFC 3493, section 3.7).
    fn shown(&self, address: SocketAddr) -> SocketAddr {
        match (self.local, address) {
            (SocketAddr::V6(_), SocketAddr::V4(v4)) => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            _ => address,
        }
    }

    fn take_batch(&self, reader: &mut Reader, batch: &mut Datagrams, max: usize) -> Option<usize> {
        let datagrams = &mut batch.datagrams;
        let count = reader.take(max, |packet| datagrams.push(Datagram::of(packet)));
        if count == 0 {
            return None;
        }
        let flows = datagrams.iter().map(|datagram| datagram.packet.hash);
        self.shared.flows().touch_all(flows, sys::current_cpu());
        Some(count)
    }

    /// Takes back what a batch still has.
    pub(super) fn give_back(&self, batch: &mut Datagrams) {
        let gone_bytes = std::mem::take(&mut batch.gone_bytes);
        if batch.datagrams.is_empty() && gone_bytes == 0 {
            return;
        }
        let policy = self.shared.policy.load();
        let mut reader = self.reader();
        reader.let_go(gone_bytes);
        reader.give_back_all(batch.datagrams.drain(..).map(|datagram| datagram.packet), policy);
    }

    fn marks(&self, gso_size: u16) -> Marks {
        let (ttl, tos) = (self.ttl.load(Ordering::Relaxed), self.tos.load(Ordering::Relaxed));
        Marks { ttl, tos, gso_size }
    }

    fn send(
        &self,
        payload: &[u8],
        to: SocketAddr,
        gso_size: u16,
        flush: Flush,
    ) -> io::Result<usize> {
        let to = plain(to);
        if self.local.is_ipv4() && to.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        let routes = self.shared.routes();
        let (device, address) = routes.find(to.ip()).ok_or(Errno::NETUNREACH)?;
        let bound = plain(self.local);
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
        for piece in pieces.chain(empty) {
            match transmitter.gather(device, identity, between, (piece, marks))? {
                Gathered::Yes => {}
                Gathered::NextUnknown => self.send_by_kernel(piece, to, gso_size)?,
            }
        }
        if flush == Flush::Now {
            transmitter.flush(device).map_err(io::Error::other)?;
        }
        Ok(payload.len())
    }

    /// The kernel finds the next station, and keeps the datagram meanwhile. On a device that it does
    /// not have, the first datagrams to a new station are lost, as behind a full queue of ARP's.
    fn send_by_kernel(&self, payload: &[u8], to: SocketAddr, gso_size: u16) -> io::Result<()> {
        let Some(reserved) = &self.reserved else { return Ok(()) };
        let size = if gso_size > 0 { usize::from(gso_size) } else { payload.len().max(1) };
        let empty = payload.is_empty().then_some(&[][..]);
        for piece in payload.chunks(size).chain(empty) {
            reserved.send_to(piece, self.shown(to))?;
        }
        Ok(())
    }

    fn send_replies(&self, batch: &mut Datagrams) -> io::Result<usize> {
        let mut transmitter = self.shared.transmitter();
        let routes = self.shared.routes();
        let marks = self.marks(0);
        let mut sent = 0;
        for datagram in batch.datagrams.extract_if(.., |datagram| datagram.answer.is_some()) {
            let Datagram { packet, answer: Some(answer) } = datagram else { continue };
            batch.gone_bytes += packet.frame.truesize();
            let to = answer.between.destination.ip();
            let Some((device, address)) = routes.find(to) else {
                transmitter.put(packet);
                continue;
            };
            let identity = routes.identity(device);
            let mut between = answer.between;
            // Nobody answers in the name of a group, or of all.
            if !identity.is_own(between.source.ip())
                && let Some(address) = address
            {
                between.source.set_ip(address);
            }
            let (packet, to) = ((packet, answer.back), (between, marks));
            if transmitter.gather_answer(device, identity, packet, to).is_ok() {
                sent += 1;
            }
        }
        transmitter.flush_all().map_err(io::Error::other)?;
        Ok(sent)
    }

    fn join(&self, group: IpAddr) -> io::Result<()> {
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
                let mut identity = path::network::Identity::clone(identity);
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
        self.shared.close(self.id);
    }
}

impl AsFd for UdpSocket {
    /// Readable once there may be something to read after a call said that it would block: what
    /// `poll(2)`, `epoll` and tokio's `AsyncFd` wait for.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.event.descriptor()
    }
}

impl fmt::Debug for UdpSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UdpSocket({} {})", self.0.id, self.0.local)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.local)
    }
}

fn first(of: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    of.to_socket_addrs()?.next().ok_or_else(|| Errno::DESTADDRREQ.into())
}

/// An address as it stands in packets: IPv4's own, not as IPv6 sockets show it.
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), address.port()),
            None => address,
        },
        IpAddr::V4(_) => address,
    }
}
