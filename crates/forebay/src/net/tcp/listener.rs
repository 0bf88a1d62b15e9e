//! TCP listeners with the calls of `std::net::TcpListener`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fmt, io};

use forebay_engine::CpuThread;
use forebay_rx::{CpuId, Handler};
use forebay_stack::socket::table::Reuse;
use forebay_stack::tcp::{
    FastOpenOptions, ListenerQueues, PassedConnection, ReusePort, Tcp, TcpError, TcpOptions,
    TcpOut, TcpSocket,
};
use forebay_sys::readiness::{Ended, ReadinessDescriptor, ReadinessSetter, readiness};
use forebay_sys::tcp_reserve::Reservation;
use rustix::io::Errno;

use super::super::Net;
use super::super::endpoint::plain;
use super::super::options::Timeout;
use super::super::shared::NetState;
use super::super::unbound::first_free;
use super::call::wait_for;
use super::shards::{Reserved, ShardSocket};
use super::stream::{TcpStream, without_reports};
use super::wait::{ListenerWatch, Polled, Seen, StreamWatch, Watch};

/// Connections that may wait to be accepted, by default, as with `std`.
const BACKLOG: u32 = 128;
/// A TCP listener of a [`Net`].
///
/// Handles are cheap to clone; listening ends with the last one.
#[derive(Clone)]
pub struct TcpListener(Arc<ListenerState>);

/// Options of a listener.
#[derive(Clone, Copy, Debug)]
pub(in crate::net) struct ListenOptions {
    pub(in crate::net) reuse: Reuse,
    pub(in crate::net) cpu: Option<CpuId>,
    pub(in crate::net) is_v6_only: bool,
    pub(in crate::net) is_reserved: bool,
    /// Receive buffer of its connections, in bytes; `None` for one that grows.
    pub(in crate::net) rcvbuf: Option<u32>,
    /// Connections that may wait to be accepted.
    pub(in crate::net) backlog: u32,
}

/// Makes the waiters of the next connection.
type Reserve<'a> = dyn FnMut() -> io::Result<StreamWatch> + 'a;

/// A listener, shared by its handles.
struct ListenerState {
    shared: Arc<NetState>,
    local: SocketAddr,
    /// Listening sockets in all shards.
    sockets: Vec<ShardSocket>,
    watch: Arc<ListenerWatch>,
    queues: Arc<ListenerQueues>,
    polled: Polled,
    is_nonblocking: AtomicBool,
    accept_timeout: Timeout,
    /// Keeps the port from the kernel, if the kernel has one of the devices, too.
    reserved: Option<Reserved>,
}

impl TcpListener {
    /// Listens on the first address that is free, with room for 128 connections that wait to be
    /// accepted. `[::]` takes IPv4, too. [`SocketOptions::listen`](super::super::SocketOptions::listen)
    /// shares an address among listeners.
    ///
    /// # Errors
    /// Of the last address: `EADDRINUSE` if another listener, or a program on the kernel's stack, has
    /// it, or all; `EADDRNOTAVAIL` if it is not one of this host's.
    pub fn bind(net: &Net, local: impl ToSocketAddrs) -> io::Result<Self> {
        Self::bind_with_backlog(net, local, BACKLOG)
    }

    /// Listens on the first address that is free, with room for `backlog` connections, at most 4096.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with_backlog(
        net: &Net,
        local: impl ToSocketAddrs,
        backlog: u32,
    ) -> io::Result<Self> {
        net.socket().listen(local, backlog)
    }

    /// Listens on an address.
    pub(in crate::net) fn listen(
        shared: &Arc<NetState>,
        local: SocketAddr,
        how: &ListenOptions,
    ) -> io::Result<Self> {
        shared.check_local(plain(local).ip())?;
        first_free(local, |mut local, reserved| {
            *reserved = reserve(shared, local, how)?.map(Arc::new);
            if let Some(reserved) = reserved {
                local.set_port(reserved.port()?);
            }
            Self::listen_at(shared, local, how, reserved.clone())
        })
    }

    /// Listens on an address whose port the kernel keeps for it; 0 is chosen.
    fn listen_at(
        shared: &Arc<NetState>,
        local: SocketAddr,
        how: &ListenOptions,
        reserved: Option<Reserved>,
    ) -> io::Result<Self> {
        let mut ports = shared.tcp.ports(local);
        loop {
            let port = match local.port() {
                0 => ports.next().ok_or(Errno::ADDRINUSE)?,
                port => port,
            };
            let mut address = local;
            address.set_port(port);
            // A port that is chosen is nobody else's, not even to share.
            if local.port() == 0 && shared.tcp.has_listener_at(plain(address)) {
                continue;
            }
            match listen_everywhere(shared, address, how, ListenerWatch::default()) {
                Ok(listening) => return Ok(Self::of(shared, address, listening, reserved)),
                Err(TcpError::AddressInUse) if local.port() == 0 => {}
                Err(error) => return Err(refusal(error)),
            }
        }
    }

    /// Listens on an address that the caller keeps from the kernel. The listener's descriptor is that of
    /// `readiness`, if it is given.
    pub(in crate::net) fn listen_reserved(
        shared: &Arc<NetState>,
        local: SocketAddr,
        how: &ListenOptions,
        reserved: Option<Reserved>,
        readiness: Option<(ReadinessSetter, ReadinessDescriptor)>,
    ) -> io::Result<Self> {
        shared.check_local(plain(local).ip())?;
        let watch =
            readiness.map(|(setter, descriptor)| ListenerWatch::with_readiness(setter, descriptor));
        let listening = listen_everywhere(shared, local, how, watch.unwrap_or_default());
        if let Some(reserved) = &reserved {
            reserved.set_live(true);
        }
        Ok(Self::of(shared, local, listening.map_err(refusal)?, reserved))
    }

    fn of(
        shared: &Arc<NetState>,
        local: SocketAddr,
        listening: Listening,
        reserved: Option<Reserved>,
    ) -> Self {
        let Listening { sockets, watch, queues } = listening;
        Self(Arc::new(ListenerState {
            shared: Arc::clone(shared),
            local,
            sockets,
            watch,
            queues,
            polled: Polled::default(),
            is_nonblocking: AtomicBool::default(),
            accept_timeout: Timeout::default(),
            reserved,
        }))
    }

    /// Changes the options that connections accepted from then on have; see [`TcpStream::set_option`]. `change` is called once for each
    /// part of the host, with that part locked, so it must not call any socket of the [`Net`].
    pub fn set_option(&self, mut change: impl FnMut(&mut TcpOptions)) {
        for &ShardSocket { shard, socket } in &self.0.sockets {
            // Ignored: the sockets have ended with the run.
            let _ = self.0.shared.call_tcp(shard, |tcp, out| {
                let mut options = tcp.options(socket)?;
                change(&mut options);
                tcp.set_options(socket, without_reports(options), out)
            });
        }
    }

    /// Changes Fast Open (RFC 7413): with a [queue](FastOpenOptions::queue), and if
    /// [`TcpConfig::fast_open`](forebay_stack::tcp::TcpConfig::fast_open) has it for servers, a client that was here before
    /// sends its first bytes in the SYN, and is accepted at once. The network may duplicate a SYN, so those bytes must do no
    /// harm if they come twice. `change` is called as by [`set_option`](Self::set_option).
    ///
    /// # Errors
    /// `BrokenPipe` once the run has ended; `Unsupported` if the SYN shall wait for data, as only those of clients do.
    pub fn set_fast_open(&self, mut change: impl FnMut(&mut FastOpenOptions)) -> io::Result<()> {
        let ListenerState { shared, sockets, .. } = &*self.0;
        sockets.iter().try_for_each(|&ShardSocket { shard, socket }| {
            let changed = shared.call_tcp(shard, |tcp, _| {
                let mut options = tcp.fast_open(socket)?;
                change(&mut options);
                if options.waits_for_data {
                    return Err(TcpError::Unsupported);
                }
                tcp.set_fast_open(socket, options)
            });
            changed.map_err(|error| shared.tcp_failure(error))
        })
    }

    /// Address that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local
    }

    /// Takes a connection, and its peer's address.
    ///
    /// # Errors
    /// `WouldBlock`, at once or after the time-out, as configured, and on the thread of a CPU;
    /// `BrokenPipe` once the run has ended.
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accept_when(&mut || Ok(StreamWatch::default()))
    }

    /// Takes a connection, whose descriptor `reserve` makes. That is called once a connection waits, which goes on
    /// waiting if `reserve` fails.
    ///
    /// # Errors
    /// As [`accept`](Self::accept), and those of `reserve`.
    pub fn accept_reserving(
        &self,
        mut reserve: impl FnMut() -> io::Result<(ReadinessSetter, ReadinessDescriptor)>,
    ) -> io::Result<(TcpStream, SocketAddr)> {
        self.accept_when(&mut || reserve().map(StreamWatch::with_readiness))
    }

    /// Takes a connection that has its [descriptor](TcpStream::descriptor) already. If the process has no descriptors left,
    /// the connection goes on waiting.
    ///
    /// # Errors
    /// As [`accept`](Self::accept); `EMFILE` or `ENFILE` without descriptors.
    pub fn accept_with_descriptor(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accept_reserving(readiness)
    }

    fn accept_when(&self, reserve: &mut Reserve<'_>) -> io::Result<(TcpStream, SocketAddr)> {
        let ListenerState { shared, watch, is_nonblocking, accept_timeout, .. } = &*self.0;
        wait_for(shared, &watch.wait, is_nonblocking, accept_timeout, || self.try_accept(reserve))
    }

    /// Takes a connection on the thread of a CPU, whose turns go on until there is one.
    ///
    /// # Errors
    /// As [`accept`](Self::accept); `BrokenPipe` once no packet can arrive any more.
    pub fn accept_on<H: Handler>(
        &self,
        cpu: &mut CpuThread<H>,
    ) -> io::Result<(TcpStream, SocketAddr)> {
        let wait = &self.0.watch.wait;
        wait.add_inline(cpu.cpu(), || cpu.waker());
        loop {
            let seen = match self.try_accept(&mut || Ok(StreamWatch::default()))? {
                Ok(accepted) => return Ok(accepted),
                Err(seen) => seen,
            };
            if !cpu.turn_until(|| !wait.is_quiet_since(seen)) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
    }

    /// Number of handshakes whose ACK has not come, those of connections that began with their SYN among them.
    #[must_use]
    pub fn handshake_count(&self) -> u32 {
        self.0.queues.handshakes() + self.0.queues.opening()
    }

    /// Takes the first connection that waits and whose handshake is over, for a listener of another process.
    #[must_use]
    pub fn pass_on(&self) -> Option<PassedConnection> {
        let ListenerState { shared, watch, .. } = &*self.0;
        // Those of a socket that none can be taken from wait on.
        let (mut awaiting, mut staying) = (Vec::new(), Vec::new());
        let passed = std::iter::from_fn(|| watch.pop().ok()).find_map(|at| {
            if !awaiting.contains(&at) {
                match shared.call_tcp(at.shard, |tcp, out| tcp.pass_on(at.socket, out)) {
                    Err(TcpError::InProgress) => awaiting.push(at),
                    passed => return passed.ok().flatten(),
                }
            }
            staying.push(at);
            None
        });
        if !staying.is_empty() {
            staying.into_iter().for_each(|at| watch.push(at));
            watch.wait.notify(); // who looked meanwhile has found nothing
        }
        passed
    }

    /// Adds a connection that a listener of another process has passed on. False if there is no room.
    #[must_use]
    pub fn adopt(&self, passed: &PassedConnection) -> bool {
        let shard = self.0.shared.tcp.shard_of(passed.flow());
        let is_ipv4 = passed.flow().ours.is_ipv4();
        let mut sockets = self.0.sockets.iter().filter(|socket| socket.shard == shard);
        // The second one listens at IPv4 addresses.
        let (first, second) = (sockets.next(), sockets.next());
        let listening = second.filter(|_| is_ipv4).or(first);
        listening.is_some_and(|&ShardSocket { shard, socket }| {
            self.0.shared.call_tcp(shard, |tcp, out| tcp.adopt(socket, passed, out))
        })
    }

    fn try_accept(
        &self,
        reserve: &mut Reserve<'_>,
    ) -> io::Result<Result<(TcpStream, SocketAddr), Seen>> {
        let ListenerState { shared, local, watch, reserved, .. } = &*self.0;
        loop {
            if let Some(seen) = watch.seen_if_empty() {
                return Ok(Err(seen));
            }
            let waiters = reserve()?;
            let ShardSocket { shard, socket: listener } = match watch.pop() {
                Ok(first) => first,
                Err(seen) => return Ok(Err(seen)),
            };
            let accepted = shared.call_tcp(shard, |tcp, _| {
                let (socket, _) = tcp.accept(listener)?;
                Ok::<_, TcpError>((socket, tcp.flow(socket)?))
            });
            // A connection that was reset while it waited leaves nothing to accept.
            if let Ok((socket, flow)) = accepted {
                let is_mapped = local.is_ipv6() && flow.theirs.is_ipv4();
                let socket = ShardSocket { shard, socket };
                let (shared, reserved) = (Arc::clone(shared), reserved.clone());
                let stream = TcpStream::of(shared, socket, flow, is_mapped, reserved, waiters);
                let peer = stream.peer_addr();
                return Ok(Ok((stream, peer)));
            }
        }
    }

    /// Iterator over the connections: accepts without end.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<TcpStream>> {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// Sets whether [`accept`](Self::accept) returns `WouldBlock` instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.0.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// Sets the time-out of [`accept`](Self::accept).
    ///
    /// # Errors
    /// `InvalidInput` of zero.
    pub fn set_accept_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.accept_timeout.set(timeout)
    }

    /// Time-out of [`accept`](Self::accept).
    #[must_use]
    pub fn accept_timeout(&self) -> Option<Duration> {
        self.0.accept_timeout.get()
    }

    /// Notifies pollers of the [descriptor](Self::descriptor) for ever that the listener has ended, before its last handle is
    /// dropped (`shutdown`).
    pub fn notify_ended(&self) {
        let wait = &self.0.watch.wait;
        if wait.set(true, true, Ended::Both) {
            wait.notify();
        }
    }

    /// Descriptor to poll: readable while a connection waits.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.0.polled.descriptor(&self.0.watch.wait)
    }
}

/// Reserves the port in the kernel, if the kernel has one of the devices, too.
fn reserve(
    shared: &NetState,
    local: SocketAddr,
    how: &ListenOptions,
) -> io::Result<Option<Reservation>> {
    // The kernel does not have addresses of devices that only this process has.
    if !how.is_reserved || !shared.is_kernels(plain(local).ip()) {
        return Ok(None);
    }
    Reservation::listen(local, how.reuse.is_shared(), how.is_v6_only).map(Some)
}

/// Sockets of a listener in all shards, with what they share.
struct Listening {
    sockets: Vec<ShardSocket>,
    watch: Arc<ListenerWatch>,
    queues: Arc<ListenerQueues>,
}

/// Listens on an address in all shards, or in none.
fn listen_everywhere(
    shared: &NetState,
    local: SocketAddr,
    how: &ListenOptions,
    watch: ListenerWatch,
) -> Result<Listening, TcpError> {
    let (queues, watch) = (Arc::<ListenerQueues>::default(), Arc::new(watch));
    let both = local.ip().is_unspecified() && local.is_ipv6() && !how.is_v6_only;
    let any_v4 = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), local.port());
    let mut sockets = Vec::new();
    for address in std::iter::once(plain(local)).chain(both.then_some(any_v4)) {
        let reuse_port = how.reuse.is_shared().then_some(ReusePort {
            cpu: how.cpu.filter(|_| how.reuse == Reuse::ThisCpu),
            is_mapped: local.is_ipv6() && address.is_ipv4(),
        });
        for shard in shared.tcp.indices() {
            let queues = Arc::clone(&queues);
            let watch = Watch::Listener(Arc::clone(&watch));
            let listen = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
                let socket = tcp.socket()?;
                let listens = listen(tcp, out, socket, address, reuse_port, how, queues);
                if listens.is_err() {
                    tcp.close(socket, out)?;
                }
                listens.map(|()| socket)
            };
            match shared.open_socket(shard, &watch, listen) {
                Ok(socket) => sockets.push(socket),
                Err(error) => {
                    close_all(shared, &sockets);
                    return Err(error);
                }
            }
        }
    }
    Ok(Listening { sockets, watch, queues })
}

fn listen(
    tcp: &mut Tcp,
    out: &mut TcpOut<'_>,
    socket: TcpSocket,
    address: SocketAddr,
    reuse_port: Option<ReusePort>,
    how: &ListenOptions,
    queues: Arc<ListenerQueues>,
) -> Result<(), TcpError> {
    tcp.bind_reuse_port(socket, address, reuse_port)?;
    let options = TcpOptions { rcvbuf: how.rcvbuf, ..tcp.options(socket)? };
    tcp.set_options(socket, options, out)?;
    tcp.listen_with_queues(socket, how.backlog, queues)
}

/// Error of a listener that may not listen, with the number that the kernel has for it.
fn refusal(error: TcpError) -> io::Error {
    match error {
        TcpError::AddressInUse => Errno::ADDRINUSE.into(),
        error => error.into(),
    }
}

fn close_all(shared: &NetState, sockets: &[ShardSocket]) {
    for &listening in sockets {
        shared.close_socket(listening, None);
    }
}

impl Drop for ListenerState {
    fn drop(&mut self) {
        self.polled.close(&self.watch.wait);
        close_all(&self.shared, &self.sockets);
        if let Some(reserved) = &self.reserved {
            reserved.set_live(false);
        }
    }
}

impl AsRawFd for TcpListener {
    /// Descriptor to poll.
    ///
    /// # Panics
    /// If the process has no descriptors left; see [`descriptor`](Self::descriptor).
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor().expect("a descriptor for the listener").as_fd().as_raw_fd()
    }
}

impl fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpListener({})", self.0.local)
    }
}
