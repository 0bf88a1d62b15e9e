//! A TCP connection of the program.

use std::io::Read;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

use forebay::net::TcpStream;
use forebay_stack::tcp::{State, TcpInfo, WriteFlags};
use forebay_sys::hidden::Hidden;
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;

use crate::errno::{MOVED, stream_errno};
use crate::option::SocketOption;
use crate::origin::Origin;
use crate::relay;
use crate::runtime::hold_at_end;
use crate::socket::CallWait;
use crate::tcp_options::{
    Inherited, Packets, TcpSetting, flag_of, is_buffer_set, is_flag, new_socket,
};
use crate::udp_options::timeout;

/// Bytes that a look into several buffers finds at most: more than a connection keeps.
const PEEKED_MAX_BYTES: usize = 16 << 20;

/// Connection, shared by the descriptors that were duplicated from each other.
pub(crate) struct Stream {
    pub(crate) tcp: TcpStream,
    is_ipv6: bool,
    is_nonblocking: AtomicBool,
    /// The kernel's socket that stores the options, made when the program asks for one.
    store: OnceLock<Hidden>,
    /// Error found after part of a call was done; the next call returns it. 0 for none.
    pending_error: AtomicI32,
    /// Options of the listener.
    inherited: Arc<Inherited>,
    /// Process that the socket belongs to.
    origin: Origin,
    /// Use by other processes.
    pub(crate) part: relay::Part,
}

/// Form of a call that receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct StreamMode {
    pub(crate) dont_wait: bool,
    pub(crate) peek: bool,
    /// Waits until the buffers are full (`MSG_WAITALL`).
    pub(crate) wait_all: bool,
    /// Discards what it receives (`MSG_TRUNC`).
    pub(crate) discard: bool,
    /// True once the call has received something: a signal then ends its wait in any case.
    pub(crate) has_part: bool,
}

/// Form of a call that sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SendMode {
    pub(crate) dont_wait: bool,
    pub(crate) more_follows: bool,
    pub(crate) is_urgent: bool,
    pub(crate) ends_record: bool,
}

impl Stream {
    /// Takes a connection that was accepted, with the numbers of its pair.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptors left.
    pub(crate) fn accepted(
        tcp: TcpStream,
        inherited: Arc<Inherited>,
        is_ipv6: bool,
        numbers: (RawFd, Option<RawFd>),
    ) -> Result<Self, Errno> {
        tcp.set_nonblocking(true);
        let stream = Self {
            tcp,
            is_ipv6,
            is_nonblocking: AtomicBool::default(),
            store: OnceLock::new(),
            pending_error: AtomicI32::new(0),
            inherited,
            origin: Origin::here(),
            part: relay::Part::new(numbers),
        };
        stream.inherited.copy_timeouts_to(stream.readiness()?);
        Ok(stream)
    }

    /// Descriptor that is polled.
    pub(crate) fn readiness(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.tcp.descriptor().map_err(|error| stream_errno(&error))
    }

    /// The kernel's socket, never connected, which stores the options.
    pub(crate) fn kernel(&self) -> Result<BorrowedFd<'_>, Errno> {
        if let Some(store) = self.store.get() {
            return Ok(store.as_fd());
        }
        let made = Hidden::new(new_socket(self.is_ipv6)?)?;
        self.inherited.copy_to(made.as_fd());
        Ok(self.store.get_or_init(|| made).as_fd())
    }

    /// The kernel's socket that has the port: the listener's.
    pub(crate) fn holder(&self) -> BorrowedFd<'_> {
        self.inherited.kernel.as_fd()
    }

    /// Family of its addresses, as the program sees them.
    pub(crate) fn family(&self) -> i32 {
        if self.is_ipv6 { libc::AF_INET6 } else { libc::AF_INET }
    }

    /// Packets of the connection: also a socket of IPv6 may have those of IPv4.
    fn packets(&self) -> Packets {
        let is_v4 = self.tcp.peer_addr().ip().to_canonical().is_ipv4();
        if is_v4 { Packets::V4 } else { Packets::V6 }
    }

    /// True for `IPV6_V6ONLY` of an IPv6 connection, which cannot be set after `bind`.
    pub(crate) fn is_fixed(&self, option: SocketOption) -> bool {
        self.is_ipv6 && option == SocketOption::of_ipv6(libc::IPV6_V6ONLY)
    }

    pub(crate) fn set_nonblocking(&self, is_nonblocking: bool) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.tcp.local_addr()
    }

    /// # Errors
    /// `ENOTCONN` once the connection has ended.
    pub(crate) fn peer(&self) -> Result<SocketAddr, Errno> {
        self.check()?;
        let is_open = self.tcp.info().is_some_and(|info| info.state != State::Closed);
        if is_open { Ok(self.tcp.peer_addr()) } else { Err(Errno::NOTCONN) }
    }

    /// Address of the peer, also of a connection that has ended.
    pub(crate) fn last_peer(&self) -> Result<SocketAddr, Errno> {
        self.check()?;
        Ok(self.tcp.peer_addr())
    }

    /// True if the program has set the size of a buffer.
    pub(crate) fn has_set_buffer(&self, bit: i32) -> bool {
        self.store.get().is_some_and(|store| is_buffer_set(store.as_fd(), bit))
    }

    /// State of the connection; `None` in a child, in which its locks may be held by threads that it has not.
    pub(crate) fn info(&self) -> Option<TcpInfo> {
        if self.is_of_parent() { None } else { self.tcp.info() }
    }

    /// Adopts an option that the program has set on the kernel's socket.
    pub(crate) fn adopt_option(&self, option: SocketOption) -> Result<(), Errno> {
        self.check()?;
        if let Some(setting) = TcpSetting::of(option, self.kernel()?) {
            // Ignored: as in the kernel, a connection that has ended keeps the value.
            let _ = self.tcp.set_option(|options| setting.apply(self.packets(), options));
        }
        Ok(())
    }

    /// Sets an option that the connection itself stores, or that only a connection refuses; `None` for another one.
    pub(crate) fn set_own(&self, option: SocketOption, value: i32) -> Option<Result<(), Errno>> {
        let is_on = value != 0;
        match (option.level, option.name) {
            _ if is_flag(option) => Some(self.set_flag(option, is_on)),
            (libc::IPPROTO_TCP, libc::TCP_QUICKACK) => Some(self.set_quick_acks(is_on)),
            // The kernel's socket would take it, since it is not connected.
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) if value == 0 => Some(Err(Errno::INVAL)),
            (
                libc::IPPROTO_TCP,
                libc::TCP_FASTOPEN | libc::TCP_FASTOPEN_NO_COOKIE | libc::TCP_FASTOPEN_CONNECT,
            ) => Some(Err(Errno::INVAL)),
            _ => None,
        }
    }

    fn set_flag(&self, option: SocketOption, is_on: bool) -> Result<(), Errno> {
        self.check()?;
        // Ignored: as above.
        let _ = match (option.level, option.name) {
            // These send what waits, also if they change nothing.
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => self.tcp.set_nodelay(is_on),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => self.tcp.set_cork(is_on),
            _ => {
                let setting = TcpSetting::flag(option, is_on);
                self.tcp.set_option(|options| setting.apply(self.packets(), options))
            }
        };
        Ok(())
    }

    fn set_quick_acks(&self, is_on: bool) -> Result<(), Errno> {
        self.check()?;
        // Ignored: as above.
        let _ = self.tcp.set_quick_acks(is_on);
        Ok(())
    }

    /// Option that the connection itself stores; `None` if it is another one.
    pub(crate) fn own_flag(&self, option: SocketOption) -> Result<Option<bool>, Errno> {
        let is_quick_ack = option == SocketOption::of_tcp(libc::TCP_QUICKACK);
        if !is_quick_ack && !is_flag(option) {
            return Ok(None);
        }
        self.check()?;
        if is_quick_ack {
            return Ok(self.tcp.has_quick_acks().ok());
        }
        Ok(self.tcp.options().ok().and_then(|options| flag_of(option, &options)))
    }

    /// Takes the error that waits (`SO_ERROR`).
    pub(crate) fn take_error(&self) -> Result<Option<Errno>, Errno> {
        self.check()?;
        // The readiness descriptor has told it.
        let _ = socket_error(self.readiness()?);
        if let Some(error) = self.take_pending_error() {
            return Ok(Some(error));
        }
        Ok(self.tcp.take_error().ok().flatten().map(|error| stream_errno(&error)))
    }

    /// Number of bytes that can be read, up to an urgent one (`SIOCINQ`).
    pub(crate) fn unread_len(&self) -> Result<usize, Errno> {
        self.check()?;
        Ok(self.tcp.queued_bytes().map_or(0, |(_, unread)| unread as usize))
    }

    /// Number of bytes that the peer has not acknowledged, the FIN among them (`SIOCOUTQ`).
    pub(crate) fn unacknowledged_len(&self) -> Result<usize, Errno> {
        self.check()?;
        Ok(self.tcp.queued_bytes().map_or(0, |(unacknowledged, _)| unacknowledged as usize))
    }

    /// Number of those that were not sent (`SIOCOUTQNSD`).
    pub(crate) fn unsent_len(&self) -> Result<usize, Errno> {
        let unacknowledged = self.unacknowledged_len()?;
        let info = self.info().filter(|info| info.unsent_bytes > 0);
        // A FIN follows all that is not sent.
        Ok(info.map_or(0, |info| unacknowledged.saturating_sub(info.unacked_bytes as usize)))
    }

    /// True if the next byte to read is the urgent one (`SIOCATMARK`).
    pub(crate) fn is_at_urgent(&self) -> Result<bool, Errno> {
        self.check()?;
        Ok(self.tcp.is_at_urgent().unwrap_or(false))
    }

    /// Receives into buffers, waiting for the first byte if the socket and the call permit.
    pub(crate) fn receive<'a>(
        &self,
        rooms: impl Iterator<Item = &'a mut [u8]>,
        mode: StreamMode,
    ) -> Result<usize, Errno> {
        self.check()?;
        if !mode.peek {
            return self.receive_into(rooms, mode);
        }
        let mut rooms: Vec<_> = rooms.collect();
        let most: usize = rooms.iter().map(|room| room.len()).sum();
        if mode.wait_all && !mode.dont_wait {
            self.await_peeked(most)?;
        }
        if rooms.len() < 2 {
            return self.receive_into(rooms.into_iter(), mode);
        }
        // What one look finds, for all buffers: a second look would find the same.
        let mut bytes = vec![0; most.min(PEEKED_MAX_BYTES)];
        let len = self.receive_into(std::iter::once(&mut bytes[..]), mode)?;
        let mut left = bytes.get(..len).unwrap_or_default();
        for room in &mut rooms {
            let (here, behind) = left.split_at(left.len().min(room.len()));
            room[..here.len()].copy_from_slice(here);
            left = behind;
        }
        Ok(len)
    }

    /// Waits until so many bytes can be looked at, and for the first at least: the end, an urgent byte, a signal and the
    /// time-out end the wait for others (`tcp_recvmsg_locked`).
    fn await_peeked(&self, most: usize) -> Result<(), Errno> {
        let mut wait = CallWait::default();
        self.attempt(Some((&mut wait, false)), |tcp| tcp.peek(&mut [0]))?;
        let waits = !self.is_nonblocking.load(Ordering::Relaxed);
        while waits && self.lacks_bytes(most)? && wait.waits_for_more(self.readiness()?) {}
        Ok(())
    }

    /// True if fewer bytes can be looked at, and others may come before an urgent one.
    fn lacks_bytes(&self, most: usize) -> Result<bool, Errno> {
        let is_urgent_next = self.tcp.is_urgent_behind_unread().unwrap_or(false);
        Ok(!is_urgent_next && self.unread_len()? < most)
    }

    fn receive_into<'a>(
        &self,
        rooms: impl Iterator<Item = &'a mut [u8]>,
        mode: StreamMode,
    ) -> Result<usize, Errno> {
        let (mut done, mut wait) = (0, CallWait::default());
        let mut rooms = rooms.peekable();
        while let Some(mut room) = rooms.next() {
            // A call without room waits, too, unless there is room in a later buffer.
            while !room.is_empty() || done == 0 && rooms.peek().is_none() {
                let waits = !mode.dont_wait && (done == 0 || mode.wait_all);
                let has_part = done > 0 || mode.has_part;
                let waits = waits.then_some((&mut wait, has_part));
                let len = match self.receive_some(room, mode, waits) {
                    Ok(len) => len,
                    Err(error) => return self.part(done, error),
                };
                if len == 0
                    && done == 0
                    && !room.is_empty()
                    && let Some(error) = self.take_pending_error()
                {
                    return self.part(0, error);
                }
                done += len;
                let is_all = len < room.len() && !mode.wait_all;
                if len == 0 || mode.peek || is_all {
                    return Ok(done);
                }
                room = room.get_mut(len..).unwrap_or_default();
            }
        }
        Ok(done)
    }

    fn receive_some(
        &self,
        room: &mut [u8],
        mode: StreamMode,
        wait: Option<(&mut CallWait, bool)>,
    ) -> Result<usize, Errno> {
        if room.is_empty() {
            // As the kernel: waits for a byte, and leaves it there. The end of the time-out is not an error.
            let waits = wait.is_some() && !self.is_nonblocking.load(Ordering::Relaxed);
            return match self.attempt(wait, |tcp| tcp.peek(&mut [0])) {
                Err(Errno::AGAIN) if waits => Ok(0),
                peeked => peeked.map(|_| 0),
            };
        }
        self.attempt(wait, |tcp| match mode {
            StreamMode { peek: true, .. } => tcp.peek(room),
            StreamMode { discard: true, .. } => {
                let want = room.len();
                let mut len = 0;
                loop {
                    let taken = tcp.read_in_place(|bytes| bytes.len().min(want - len));
                    match taken {
                        Ok(taken) if taken > 0 && len + taken < want => len += taken,
                        Ok(taken) => return Ok(len + taken),
                        Err(error) if len > 0 => {
                            self.set_pending_error(stream_errno(&error));
                            return Ok(len);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            _ => tcp.read(room),
        })
    }

    /// Takes the urgent byte (`MSG_OOB`), or only looks at it; `None` if the peer's data ended before it.
    pub(crate) fn receive_urgent(&self, peek: bool) -> Result<Option<u8>, Errno> {
        self.check()?;
        let byte = if peek { self.tcp.peek_urgent() } else { self.tcp.read_urgent() };
        let byte = match byte {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
            byte => byte.map(Some).map_err(|error| stream_errno(&error)),
        };
        byte.inspect_err(|error| self.forget_error(error))
    }

    /// Attempts until there is something. With the call's waits goes true if it has received a part.
    fn attempt<T>(
        &self,
        mut wait: Option<(&mut CallWait, bool)>,
        mut attempt: impl FnMut(&mut &TcpStream) -> std::io::Result<T>,
    ) -> Result<T, Errno> {
        loop {
            let result = attempt(&mut &self.tcp).map_err(|error| stream_errno(&error));
            hold_at_end();
            match (result, &mut wait) {
                (Err(Errno::AGAIN), Some((wait, has_part)))
                    if !self.is_nonblocking.load(Ordering::Relaxed) =>
                {
                    self.unless_moved(wait.readable(self.readiness()?, *has_part))?;
                    self.unless_copied()?;
                }
                (result, _) => return result,
            }
        }
    }

    /// Sends buffers, waiting for room if the socket and the call permit.
    pub(crate) fn send<'a>(
        &self,
        pieces: impl Iterator<Item = &'a [u8]>,
        mode: SendMode,
    ) -> Result<usize, Errno> {
        self.check()?;
        if let Some(error) = self.take_pending_error() {
            return self.part(0, error);
        }
        let mut pieces = pieces.filter(|piece| !piece.is_empty()).peekable();
        if pieces.peek().is_none() {
            let sent = self.send_some(&[], WriteFlags::default(), None);
            return sent.or_else(|error| self.part(0, error));
        }
        let (mut done, mut wait) = (0, CallWait::default());
        while let Some(mut piece) = pieces.next() {
            let is_last = pieces.peek().is_none();
            let flags = WriteFlags {
                is_urgent: mode.is_urgent && is_last,
                more_follows: mode.more_follows || !is_last,
                ends_record: mode.ends_record && is_last,
                ..WriteFlags::default()
            };
            while !piece.is_empty() {
                let waits = (!mode.dont_wait).then_some((&mut wait, done));
                match self.send_some(piece, flags, waits) {
                    Ok(len) => (piece, done) = (piece.get(len..).unwrap_or_default(), done + len),
                    Err(error) => return self.part(done, error),
                }
            }
        }
        Ok(done)
    }

    /// Error of a call that would open the connection (`MSG_FASTOPEN`).
    pub(crate) fn refuse_opening(&self) -> Errno {
        match self.check() {
            Ok(()) => Errno::ISCONN,
            Err(error) => error,
        }
    }

    /// Sends a part. With the call's waits goes the number of bytes that it has sent.
    fn send_some(
        &self,
        bytes: &[u8],
        flags: WriteFlags,
        mut waits: Option<(&mut CallWait, usize)>,
    ) -> Result<usize, Errno> {
        loop {
            let sent = self.tcp.write_with(bytes, flags).map_err(|error| stream_errno(&error));
            hold_at_end();
            match (sent, &mut waits) {
                (Err(Errno::AGAIN), Some((wait, done)))
                    if !self.is_nonblocking.load(Ordering::Relaxed) =>
                {
                    let readiness = self.readiness()?;
                    let timeout = timeout(readiness, libc::SO_SNDTIMEO);
                    self.unless_moved(wait.writable(readiness, timeout, *done == 0))?;
                    self.unless_copied()?;
                }
                (sent, _) => return sent,
            }
        }
    }

    /// Result of a call that failed: the bytes done so far, if any, with the error kept for the next call.
    fn part(&self, done: usize, error: Errno) -> Result<usize, Errno> {
        if done == 0 {
            self.forget_error(&error);
            return Err(error);
        }
        self.set_pending_error(error);
        Ok(done)
    }

    /// Keeps an error for the next call, but for those that it would find anyway.
    pub(crate) fn set_pending_error(&self, error: Errno) {
        if !matches!(error, Errno::AGAIN | Errno::INTR | Errno::PIPE | MOVED) {
            self.pending_error.store(error.raw_os_error(), Ordering::Relaxed);
        }
    }

    fn take_pending_error(&self) -> Option<Errno> {
        if self.pending_error.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let pending = self.pending_error.swap(0, Ordering::Relaxed);
        (pending != 0).then(|| Errno::from_raw_os_error(pending))
    }

    /// Clears the readiness descriptor's error, which a call has returned: errors are reported once.
    fn forget_error(&self, error: &Errno) {
        if !matches!(*error, Errno::AGAIN | Errno::INTR)
            && let Ok(readiness) = self.readiness()
        {
            let _ = socket_error(readiness);
        }
    }

    pub(crate) fn shutdown(&self, how: i32) -> Result<(), Errno> {
        self.check()?;
        let how = match how {
            libc::SHUT_RD => Shutdown::Read,
            libc::SHUT_WR => Shutdown::Write,
            libc::SHUT_RDWR => Shutdown::Both,
            _ => return Err(Errno::INVAL),
        };
        self.tcp.shutdown(how).map_err(|error| stream_errno(&error))
    }

    /// Closes the connection as the process ends, also while other threads wait for it. It goes on for processes that have
    /// copies.
    pub(crate) fn end_here(&self) {
        relay::leave(self);
        if !self.part.is_taken() {
            self.tcp.close_for_all();
        }
    }

    /// True if the number of the connection outlives this process's use of it.
    pub(crate) fn may_have_copies(&self) -> bool {
        self.part.is_taken() || self.part.may_have_copies()
    }

    /// True if calls are for the kernel: in another process than the owner, and once the connection was taken over.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.is_of_parent() || self.part.is_taken()
    }

    /// Result of a wait, after which the call is to be made anew if the connection was taken over.
    fn unless_moved(&self, waited: Result<(), Errno>) -> Result<(), Errno> {
        match waited {
            Ok(()) | Err(Errno::BADF) if self.part.is_taken() => Err(MOVED),
            waited => waited,
        }
    }

    /// Refuses to go on after a wait in which a signal's handler has forked: the child has no copy of what has arrived.
    fn unless_copied(&self) -> Result<(), Errno> {
        if self.is_of_parent() { self.check() } else { Ok(()) }
    }

    pub(crate) fn is_of_parent(&self) -> bool {
        self.origin.is_parent()
    }

    /// # Errors
    /// `EBADF` if the owner could not hand the connection over.
    fn check(&self) -> Result<(), Errno> {
        match self.is_elsewhere() {
            true => Err(self.origin.refuse("a connection was accepted", "serve it in one process")),
            false => Ok(()),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        relay::let_go(self);
    }
}
