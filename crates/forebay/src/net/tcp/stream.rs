//! TCP connections with the calls of `std::net::TcpStream`, and reads in place.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;
use std::{fmt, iter};

use forebay_engine::CpuThread;
use forebay_rx::Handler;
use forebay_rx::arrive::Waker;
use forebay_stack::socket::shown;
use forebay_stack::tcp::{
    Flow, PackedFlow, ReadMode, Tcp, TcpError, TcpInfo, TcpOptions, TcpOut, TcpSocket, WriteFlags,
};
use forebay_sys::readiness::{ReadinessDescriptor, ReadinessSetter, readiness};

use super::super::Net;
use super::super::options::Timeout;
use super::super::shared::NetState;
use super::super::unbound::try_each;
use super::call::wait_for;
use super::connect;
use super::shards::{Reserved, ShardSocket};
use super::wait::{Polled, StreamWatch, Watch};

/// A TCP connection of a [`Net`].
///
/// Handles are cheap to clone; the connection is closed with the last one. Any number of threads may
/// read and write. Each read and write records the CPU that it runs on, and the connection's packets
/// are steered there (RFS).
#[derive(Clone)]
pub struct TcpStream(Arc<StreamState>, Caller);

/// Kind of a call that waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CallKind {
    Open,
    Read,
    Write,
}

/// Flag of a connection whose application sees IPv4 addresses as IPv6 ones.
const IS_MAPPED: u8 = 1;
/// Flag of a closed connection.
const IS_CLOSED: u8 = 2;
/// Flag of a connection that was [taken over](TcpStream::take_over).
const IS_TAKEN: u8 = 4;

/// Pair of a descriptor that is polled.
type Pair = (ReadinessSetter, Arc<ReadinessDescriptor>);

/// Kind of the handle that makes a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    Handle,
    /// Handle that goes on once the connection was [taken over](TcpStream::take_over).
    Taker,
}

/// A connection, shared by its handles.
struct StreamState {
    shared: Arc<NetState>,
    place: ShardSocket,
    watch: Arc<StreamWatch>,
    polled: Polled,
    read_timeout: Timeout,
    write_timeout: Timeout,
    /// Keeps the port from the kernel, if the kernel has the device, too.
    reserved: Option<Reserved>,
    ends: PackedFlow,
    /// [`IS_MAPPED`], [`IS_CLOSED`] and [`IS_TAKEN`].
    flags: AtomicU8,
    is_nonblocking: AtomicBool,
}

const _: () = assert!(size_of::<StreamState>() <= 112, "TCP-12: handle of an idle connection");

impl TcpStream {
    /// Opens a connection to the first address that answers. The calling thread must be in the network
    /// namespace in which the engine was created: the kernel there is asked whether it has a route, and keeps
    /// the port from its own programs.
    ///
    /// # Errors
    /// Of the last address: `ConnectionRefused`, `TimedOut`, `ENETUNREACH` without a route and to a group or a
    /// broadcast address, `Unsupported` to this host itself, `EADDRNOTAVAIL` without a free port (on an interface that the
    /// kernel has, too, each connection has one of its ports for itself, whoever the peer is), `EMFILE` or `ENFILE` without a
    /// descriptor for the socket that keeps it; `WouldBlock` on the thread of a CPU, which must not wait;
    /// `BrokenPipe` once the run has ended.
    pub fn connect(net: &Net, to: impl ToSocketAddrs) -> io::Result<Self> {
        try_each(to, |to| {
            let stream = Self::begin_connect(net, to)?;
            stream.0.await_open()?;
            Ok(stream)
        })
    }

    /// Begins to open a connection, without waiting. It is open once it is writable and
    /// [`take_error`](Self::take_error) finds nothing.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), without those of the peer.
    pub fn begin_connect(net: &Net, to: SocketAddr) -> io::Result<Self> {
        Ok(connect::begin(&net.0, to, None, StreamWatch::default())?.0)
    }

    /// Begins to open a connection that has its [descriptor](Self::descriptor) already. If the process has no descriptors
    /// left, nothing is sent.
    ///
    /// # Errors
    /// As [`begin_connect`](Self::begin_connect); `EMFILE` or `ENFILE` without descriptors.
    pub fn begin_connect_with_descriptor(net: &Net, to: SocketAddr) -> io::Result<Self> {
        let waiters = StreamWatch::with_readiness(readiness()?);
        Ok(connect::begin(&net.0, to, None, waiters)?.0)
    }

    /// Opens a connection as [`connect`](Self::connect), with the first of `bytes` in its SYN if the server has given this
    /// host a Fast Open cookie before (RFC 7413); else the SYN asks for one. Returns the number of bytes that left, perhaps 0: the
    /// rest is to be written. The network may duplicate a SYN, so those bytes must do no harm if they come twice.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `Unsupported` if
    /// [`TcpConfig::fast_open`](forebay_stack::tcp::TcpConfig::fast_open) does not have it for clients.
    pub fn connect_with_data(
        net: &Net,
        to: impl ToSocketAddrs,
        bytes: &[u8],
    ) -> io::Result<(Self, usize)> {
        try_each(to, |to| {
            let (stream, written) = Self::begin_connect_with_data(net, to, bytes)?;
            stream.0.await_open()?;
            Ok((stream, written))
        })
    }

    /// Begins to open a connection with data in its SYN, without waiting.
    ///
    /// # Errors
    /// As [`connect_with_data`](Self::connect_with_data), without those of the peer.
    pub fn begin_connect_with_data(
        net: &Net,
        to: SocketAddr,
        bytes: &[u8],
    ) -> io::Result<(Self, usize)> {
        connect::begin(&net.0, to, Some(bytes), StreamWatch::default())
    }

    /// Creates the handle of a connection.
    pub(super) fn of(
        shared: Arc<NetState>,
        place: ShardSocket,
        flow: Flow,
        is_mapped: bool,
        reserved: Option<Reserved>,
        watch: StreamWatch,
    ) -> Self {
        let watch = Arc::new(watch);
        shared.watch(place, &Watch::Stream(Arc::clone(&watch)));
        watch.wait.notify();
        let state = StreamState {
            shared,
            place,
            watch,
            polled: Polled::default(),
            read_timeout: Timeout::default(),
            write_timeout: Timeout::default(),
            reserved,
            ends: PackedFlow::of(&flow),
            flags: AtomicU8::new(if is_mapped { IS_MAPPED } else { 0 }),
            is_nonblocking: AtomicBool::default(),
        };
        Self(Arc::new(state), Caller::Handle)
    }

    /// Address of this end.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.shown(self.0.ends.unpacked().ours)
    }

    /// Address of the peer.
    #[must_use]
    pub fn peer_addr(&self) -> SocketAddr {
        self.0.shown(self.0.ends.unpacked().theirs)
    }

    /// Copies received bytes without consuming them (`MSG_PEEK`).
    ///
    /// # Errors
    /// As `read`: `WouldBlock`, at once or after the time-out, as configured, and on the thread of a
    /// CPU; `ConnectionReset` and `TimedOut` of the connection; `BrokenPipe` once the run has ended.
    pub fn peek(&self, room: &mut [u8]) -> io::Result<usize> {
        self.0.reading(self.1, |tcp, socket, out| tcp.peek(socket, room, out))
    }

    /// Reads bytes in the frame that they came in: calls `take` with the first ones, without a copy,
    /// and consumes as many as it returns. `take` is not called at the end of the stream. It runs with
    /// a part of the host locked, so it must not call any socket of the [`Net`].
    ///
    /// # Errors
    /// As [`peek`](Self::peek).
    pub fn read_in_place(&self, mut take: impl FnMut(&[u8]) -> usize) -> io::Result<usize> {
        self.0.reading(self.1, |tcp, socket, out| {
            if tcp.fill(socket).is_empty() {
                tcp.read(socket, &mut [], out)?; // passes an urgent byte that is next
                if tcp.peek(socket, &mut [0], out)? == 0 {
                    return Ok(0); // peeking tells why there is nothing to read
                }
            }
            let bytes = tcp.fill(socket);
            let len = take(bytes).min(bytes.len());
            tcp.consume(socket, len, out)?;
            Ok(len)
        })
    }

    /// Takes the urgent byte (`MSG_OOB`). Never waits for it, as in the kernel (`tcp_recv_urg`).
    ///
    /// # Errors
    /// `InvalidInput` without one, `WouldBlock` if it is announced but has not arrived, `UnexpectedEof` if the peer's
    /// data ended before it; else as [`peek`](Self::peek).
    pub fn read_urgent(&self) -> io::Result<u8> {
        self.0.urgent(ReadMode::Take)
    }

    /// Reads the urgent byte without taking it (`MSG_OOB` with `MSG_PEEK`).
    ///
    /// # Errors
    /// As [`read_urgent`](Self::read_urgent).
    pub fn peek_urgent(&self) -> io::Result<u8> {
        self.0.urgent(ReadMode::Peek)
    }

    /// Writes bytes with flags: others follow at once, or the last is urgent.
    ///
    /// # Errors
    /// As `write`.
    pub fn write_with(&self, bytes: &[u8], flags: WriteFlags) -> io::Result<usize> {
        self.0.write(self.1, bytes, flags)
    }

    /// Closes one direction, or both.
    ///
    /// # Errors
    /// `NotConnected` if the connection has ended.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let socket = self.0.place.socket;
        Ok(self.0.call(|tcp, out| tcp.shutdown(socket, how, out))?)
    }

    /// Closes the connection as its last handle does, though there may be others. Calls blocked on those stay blocked, and
    /// none of them is of use any more.
    pub fn close_for_all(&self) {
        self.0.close();
    }

    /// Sends small segments at once, or not (`TCP_NODELAY`).
    ///
    /// # Errors
    /// `NotConnected` if the connection has ended, as for all options.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        let socket = self.0.place.socket;
        Ok(self.0.call(|tcp, out| tcp.set_nodelay(socket, nodelay, out))?)
    }

    /// Has small segments wait until they are full, 200 ms at most (`TCP_CORK`), or sends them.
    ///
    /// # Errors
    /// As [`set_nodelay`](Self::set_nodelay).
    pub fn set_cork(&self, cork: bool) -> io::Result<()> {
        let socket = self.0.place.socket;
        Ok(self.0.call(|tcp, out| tcp.set_cork(socket, cork, out))?)
    }

    /// True if small segments are sent at once.
    ///
    /// # Errors
    /// As [`set_nodelay`](Self::set_nodelay).
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.options()?.nodelay)
    }

    /// Sets what closing does with unacknowledged data (`SO_LINGER`): zero resets the connection, `None` and any other time
    /// go on sending in the background. Closing never waits.
    ///
    /// # Errors
    /// As [`set_nodelay`](Self::set_nodelay).
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        // Less than a second is not zero.
        let seconds = |linger: Duration| linger.as_nanos().div_ceil(1_000_000_000);
        let seconds = |linger| u32::try_from(seconds(linger)).unwrap_or(u32::MAX);
        self.set_option(|options| options.linger_s = linger.map(seconds))
    }

    /// Changes any options of the connection, except [`TcpOptions::zero_copy`] and [`TcpOptions::timestamping`], which stay off:
    /// their reports cannot be read here. `change` runs with a part of the host locked, so it must not call any socket of the
    /// [`Net`].
    ///
    /// # Errors
    /// As [`set_nodelay`](Self::set_nodelay).
    pub fn set_option(&self, change: impl FnOnce(&mut TcpOptions)) -> io::Result<()> {
        let socket = self.0.place.socket;
        Ok(self.0.call(|tcp, out| {
            let mut options = tcp.options(socket)?;
            change(&mut options);
            tcp.set_options(socket, without_reports(options), out)
        })?)
    }

    /// Options of the connection.
    ///
    /// # Errors
    /// As [`set_nodelay`](Self::set_nodelay).
    pub fn options(&self) -> io::Result<TcpOptions> {
        Ok(self.0.call(|tcp, _| tcp.options(self.0.place.socket))?)
    }

    /// State of the connection (`TCP_INFO`); `None` once it has ended.
    #[must_use]
    pub fn info(&self) -> Option<TcpInfo> {
        self.0.call(|tcp, _| tcp.info(self.0.place.socket)).ok().flatten()
    }

    /// Number of bytes that the peer has not acknowledged, the FIN among them (`SIOCOUTQ`), and number of
    /// those that were received and not read, up to an urgent one (`SIOCINQ`).
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn queued_bytes(&self) -> io::Result<(u32, u32)> {
        Ok(self.0.call(|tcp, _| tcp.queued_bytes(self.0.place.socket))?)
    }

    /// True if the next byte to read is the urgent one (`SIOCATMARK`).
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn is_at_urgent(&self) -> io::Result<bool> {
        Ok(self.0.call(|tcp, _| tcp.is_at_urgent(self.0.place.socket))?)
    }

    /// True if all bytes before an urgent one can be read: [`peek`](Self::peek) finds no others.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn is_urgent_behind_unread(&self) -> io::Result<bool> {
        Ok(self.0.call(|tcp, _| tcp.is_urgent_behind_unread(self.0.place.socket))?)
    }

    /// Sends ACKs at once from now on, or lets them wait for data (`TCP_QUICKACK`).
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn set_quick_acks(&self, quick: bool) -> io::Result<()> {
        Ok(self.0.call(|tcp, out| tcp.set_quick_acks(self.0.place.socket, quick, out))?)
    }

    /// True if ACKs are sent at once now; false after a reply (the kernel's `pingpong` mode), too.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn has_quick_acks(&self) -> io::Result<bool> {
        Ok(self.0.call(|tcp, _| tcp.has_quick_acks(self.0.place.socket))?)
    }

    /// Takes the error that waits (`SO_ERROR`).
    ///
    /// # Errors
    /// `BrokenPipe` once the run has ended; `NotConnected` if only the connection has.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        let error = self.0.call(|tcp, _| tcp.take_error(self.0.place.socket));
        Ok(error.map_err(|error| self.0.shared.tcp_failure(error))?.map(io::Error::from))
    }

    /// Sets whether calls return `WouldBlock` instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.0.is_nonblocking.store(nonblocking, Ordering::Relaxed);
    }

    /// Sets the time-out of reads.
    ///
    /// # Errors
    /// `InvalidInput` for a time-out of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.read_timeout.set(timeout)
    }

    /// Sets the time-out of writes.
    ///
    /// # Errors
    /// As [`set_read_timeout`](Self::set_read_timeout).
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.write_timeout.set(timeout)
    }

    /// Time-out of reads.
    #[must_use]
    pub fn read_timeout(&self) -> Option<Duration> {
        self.0.read_timeout.get()
    }

    /// Time-out of writes.
    #[must_use]
    pub fn write_timeout(&self) -> Option<Duration> {
        self.0.write_timeout.get()
    }

    /// Descriptor to poll. It is readable and writable as the connection is; nothing can be read from
    /// it or written to it.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.0.polled.descriptor(&self.0.watch.wait)
    }

    /// Takes the connection over from its handles: their calls that read and write fail with `ResourceBusy` from then on, and
    /// those that wait on the descriptor are not notified. Returns the handle whose calls go on, and the pair of the
    /// descriptor, if there was one. `wake` is called, with locks held, when there is news for that handle. `None` if the
    /// connection was taken over before.
    #[must_use]
    pub fn take_over(&self, wake: Waker) -> Option<(Self, Option<Pair>)> {
        let take = || self.0.flags.fetch_or(IS_TAKEN, Ordering::AcqRel) & IS_TAKEN == 0;
        if !self.0.call(|_, _| take()) {
            return None;
        }
        let pair = self.0.watch.wait.take_over(wake);
        Some((Self(Arc::clone(&self.0), Caller::Taker), pair))
    }

    /// Reads on the thread of a CPU, whose turns go on until there is something to read.
    ///
    /// # Errors
    /// As [`peek`](Self::peek); `BrokenPipe` once no packet can arrive any more.
    pub fn read_on<H: Handler>(
        &self,
        cpu: &mut CpuThread<H>,
        room: &mut [u8],
    ) -> io::Result<usize> {
        self.0.on_cpu(cpu, |stream| {
            stream.reading(self.1, |tcp, socket, out| tcp.read(socket, room, out))
        })
    }

    /// Writes all bytes on the thread of a CPU, whose turns go on until there is room.
    ///
    /// # Errors
    /// As `write`; `BrokenPipe` once no packet can leave any more.
    pub fn write_all_on<H: Handler>(
        &self,
        cpu: &mut CpuThread<H>,
        mut bytes: &[u8],
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            let written =
                self.0.on_cpu(cpu, |stream| stream.write(self.1, bytes, WriteFlags::default()))?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

impl StreamState {
    fn call<R>(&self, act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R) -> R {
        self.shared.call_socket(self.place, act)
    }

    fn reading<T>(
        &self,
        caller: Caller,
        attempt: impl FnMut(&mut Tcp, TcpSocket, &mut TcpOut<'_>) -> Result<T, TcpError>,
    ) -> io::Result<T> {
        self.record_cpu();
        self.wait_for(CallKind::Read, caller, attempt)
    }

    fn urgent(&self, mode: ReadMode) -> io::Result<u8> {
        self.record_cpu();
        let byte = self.call(|tcp, out| tcp.read_urgent(self.place.socket, mode, out))?;
        byte.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    fn write(&self, caller: Caller, bytes: &[u8], flags: WriteFlags) -> io::Result<usize> {
        self.record_cpu();
        self.wait_for(CallKind::Write, caller, |tcp, socket, out| {
            tcp.write(socket, bytes, flags, out)
        })
    }

    /// Waits until the connection is open.
    fn await_open(&self) -> io::Result<()> {
        self.wait_for(CallKind::Open, Caller::Handle, |tcp, socket, _| {
            if let Some(error) = tcp.take_error(socket)? {
                return Err(error);
            }
            let readiness = tcp.readiness(socket)?;
            if readiness.writable { Ok(()) } else { Err(TcpError::WouldBlock) }
        })
    }

    /// Records that the application runs on the calling CPU (RFS).
    fn record_cpu(&self) {
        if let Some(hash) = self.watch.hash() {
            self.shared.flows().read_here(iter::once(hash), true);
        }
    }

    fn wait_for<T>(
        &self,
        kind: CallKind,
        caller: Caller,
        mut attempt: impl FnMut(&mut Tcp, TcpSocket, &mut TcpOut<'_>) -> Result<T, TcpError>,
    ) -> io::Result<T> {
        let wait = &self.watch.wait;
        let timeout = match kind {
            CallKind::Open => &Timeout::default(),
            CallKind::Read => &self.read_timeout,
            CallKind::Write => &self.write_timeout,
        };
        wait_for(&self.shared, wait, &self.is_nonblocking, timeout, || {
            // First: news that come while the connection is not locked end the sleep.
            let seen = wait.seen();
            match self.attempt(kind, caller, &mut attempt) {
                Some(Ok(done)) => Ok(Ok(done)),
                Some(Err(TcpError::WouldBlock | TcpError::InProgress)) => Ok(Err(seen)),
                Some(Err(error)) => Err(self.shared.tcp_failure(error)),
                None => Err(io::ErrorKind::ResourceBusy.into()),
            }
        })
    }

    /// Makes a call once. `None` if it is a handle's, and the connection was taken over.
    fn attempt<T>(
        &self,
        kind: CallKind,
        caller: Caller,
        attempt: &mut impl FnMut(&mut Tcp, TcpSocket, &mut TcpOut<'_>) -> Result<T, TcpError>,
    ) -> Option<Result<T, TcpError>> {
        let (result, has_room) = self.call(|tcp, out| {
            // With the connection locked: who has taken it over has seen all calls of handles.
            if caller == Caller::Handle && self.flags.load(Ordering::Relaxed) & IS_TAKEN != 0 {
                return None;
            }
            let result = attempt(tcp, self.place.socket, out);
            let readiness = tcp.readiness(self.place.socket);
            Some((result, readiness.is_ok_and(|readiness| readiness.writable)))
        })?;
        if has_room && kind == CallKind::Write && matches!(result, Err(TcpError::WouldBlock)) {
            self.shared.await_memory(&self.watch);
        }
        Some(result)
    }

    /// Repeats a call on the thread of a CPU, which turns until there is news.
    fn on_cpu<H: Handler, T>(
        &self,
        cpu: &mut CpuThread<H>,
        mut call: impl FnMut(&Self) -> io::Result<T>,
    ) -> io::Result<T> {
        let wait = &self.watch.wait;
        wait.add_inline(cpu.cpu(), || cpu.waker());
        loop {
            let seen = wait.seen();
            match call(self) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if !cpu.turn_until(|| !wait.is_quiet_since(seen)) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
    }

    fn close(&self) {
        if self.flags.fetch_or(IS_CLOSED, Ordering::AcqRel) & IS_CLOSED == 0 {
            self.shared.close_socket(self.place, self.reserved.clone());
        }
    }

    /// Address as the application sees it.
    fn shown(&self, address: SocketAddr) -> SocketAddr {
        let scoped = self.shared.routes().scoped(address, self.ends.unpacked().ours.ip());
        shown(scoped, self.flags.load(Ordering::Relaxed) & IS_MAPPED != 0)
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        self.polled.close(&self.watch.wait);
        self.close();
    }
}

impl Read for &TcpStream {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.0.reading(self.1, |tcp, socket, out| tcp.read(socket, room, out))
    }
}

impl Write for &TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(self.1, bytes, WriteFlags::default())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for TcpStream {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        (&*self).read(room)
    }
}

impl Write for TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRawFd for TcpStream {
    /// Descriptor to poll.
    ///
    /// # Panics
    /// If the process has no descriptors left; see [`descriptor`](Self::descriptor).
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor().expect("a descriptor for the connection").as_fd().as_raw_fd()
    }
}

impl fmt::Debug for TcpStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStream({} to {})", self.local_addr(), self.peer_addr())
    }
}

/// Options without those whose reports cannot be read here: nothing queues what nobody takes.
pub(super) fn without_reports(options: TcpOptions) -> TcpOptions {
    let TcpOptions { zero_copy, timestamping, .. } = TcpOptions::default();
    TcpOptions { zero_copy, timestamping, ..options }
}
