//! Socket calls by descriptor. A call that waits does so in virtual time, on a thread of its own, and
//! packetdrill's main thread turns the clock meanwhile.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current, sleep};
use std::time::Duration;

use forebay_stack::socket::LOCAL_PORTS;
use forebay_stack::tcp::{self, ReadMode, TcpError, TcpOptions, TcpSocket, WriteFlags};

use crate::errno::Errno;
use crate::host::Host;
use crate::kept::Kept;
use crate::options::SECOND_US;
use crate::polls::Epoll;

/// Real time that the clock stands still at most for a call that returns.
const RETURN: Duration = Duration::from_secs(1);
/// Real time that the main thread rests after a call that waited returned: packetdrill takes note of the call's outcome
/// once it has the lock that the main thread has released.
const REST: Duration = Duration::from_millis(2);
/// Real time between two looks at the main thread by a waiting call. The main thread waits for the
/// call a second at most.
const LOOK: Duration = Duration::from_millis(1);
/// Looks without a call of the main thread in between after which a waiting call turns the clock: if
/// the main thread is known to wait, and if this cannot be known.
const LOOKS_WAITING: u32 = 2;
const LOOKS_UNKNOWN: u32 = 200;
/// Virtual time that a receive waits for a packet at most, in µs.
const RECEIVE_US: u64 = 2_000_000_000;

/// The shared object's state.
#[derive(Debug)]
pub(crate) struct Shim {
    state: Mutex<State>,
    changed: Condvar,
    main_thread: ThreadId,
}

/// Host and sockets, behind the mutex.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) host: Host,
    sockets: BTreeMap<i32, Entry>,
    pub(crate) epolls: BTreeMap<i32, Epoll>,
    /// Other ends of the descriptors of sockets.
    pub(crate) inlets: BTreeMap<i32, UnixStream>,
    /// Calls of the main thread so far.
    turns: u64,
    /// A call waits, until this time; it is to try again.
    waits_until_us: Option<u64>,
    tries_again: bool,
    /// A packet arrived, or a timer fired.
    has_changed: bool,
    /// Thread whose call returned, and that has not asked for the time yet.
    returning: Option<ThreadId>,
    /// A call that waited returned, and the main thread has not rested since.
    has_returned: bool,
}

/// A descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) socket: TcpSocket,
    pub(crate) is_nonblocking: bool,
    pub(crate) listens: bool,
    /// `SO_REUSEADDR`, which changes nothing here.
    pub(crate) reuses_address: bool,
    /// `SO_RCVTIMEO` and `SO_SNDTIMEO`, in µs.
    pub(crate) receive_timeout_us: Option<u64>,
    pub(crate) send_timeout_us: Option<u64>,
    pub(crate) kept: Kept,
    /// Writes that found too little room.
    pub(crate) full_writes: u32,
}

/// Flags of reads and writes.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Flags {
    pub(crate) peeks: bool,
    pub(crate) is_urgent: bool,
    pub(crate) never_waits: bool,
    pub(crate) more_follows: bool,
    pub(crate) ends_record: bool,
    pub(crate) waits_for_all: bool,
    pub(crate) wants_errors: bool,
    pub(crate) zero_copy: bool,
}

impl Flags {
    pub(crate) fn of_write(self) -> WriteFlags {
        WriteFlags {
            is_urgent: self.is_urgent,
            more_follows: self.more_follows,
            ends_record: self.ends_record,
            zero_copy: self.zero_copy,
            ..WriteFlags::default()
        }
    }
}

impl Shim {
    pub(crate) fn new(flags: &str) -> Self {
        let state = State {
            host: Host::new(flags),
            sockets: BTreeMap::new(),
            epolls: BTreeMap::new(),
            inlets: BTreeMap::new(),
            turns: 0,
            waits_until_us: None,
            tries_again: false,
            has_changed: false,
            returning: None,
            has_returned: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), main_thread: current().id() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the descriptor of a new socket.
    pub(crate) fn socket(&self, fd: i32, domain: i32) -> Result<i32, Errno> {
        let mut state = self.lock();
        state.host.is_mapped = domain == libc::AF_INET6 && !state.host.is_ipv6();
        state.host.follow_sysctls();
        let socket = state.host.tcp.socket()?;
        let mut options = state.host.sysctls.options(state.host.tcp.options(socket)?);
        options.unsent_limit = state.host.sysctls.unsent_limit();
        state.host.call(|tcp, out| tcp.set_options(socket, options, out))?;
        state.sockets.insert(fd, Entry::of(socket));
        Ok(fd)
    }

    pub(crate) fn bind(&self, fd: i32, address: SocketAddr) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        state.host.tcp.bind(socket, address)?;
        Ok(0)
    }

    pub(crate) fn listen(&self, fd: i32, backlog: u32) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        let listening = state.host.tcp.listen(socket, backlog);
        if listening == Err(TcpError::Invalid) {
            // Not bound, unless this fails, too: at a port of its own.
            let port = LOCAL_PORTS.start() + u16::try_from(fd).unwrap_or(0);
            let local = SocketAddr::new(state.host.address(), port);
            state.host.tcp.bind(socket, local)?;
            state.host.tcp.listen(socket, backlog)?;
        } else {
            listening?;
        }
        state.entry(fd)?.listens = true;
        Ok(0)
    }

    /// Accepts into the descriptor `new_fd`.
    pub(crate) fn accept(&self, fd: i32, new_fd: i32) -> Result<SocketAddr, Errno> {
        let (waits, timeout_us) = self.waiting(fd, false, |entry| entry.receive_timeout_us)?;
        self.wait(waits, timeout_us, |state| {
            let listener = state.entry(fd)?.clone();
            let (accepted, peer) = state.host.tcp.accept(listener.socket)?;
            state.sockets.insert(new_fd, listener.inheriting(accepted));
            state.host.change_route(accepted);
            Ok(peer)
        })
    }

    pub(crate) fn connect(&self, fd: i32, peer: SocketAddr) -> Result<i32, Errno> {
        let (waits, timeout_us) = self.waiting(fd, false, |entry| entry.send_timeout_us)?;
        self.lock().host.follow_sysctls();
        let mut has_begun = false;
        let result = self.wait(waits, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let local = SocketAddr::new(state.host.address(), 0);
            let mtu_bytes = state.host.mtu_bytes();
            let begin =
                state.host.call(|tcp, out| tcp.connect(socket, (local, peer), mtu_bytes, out));
            has_begun |= begin == Err(TcpError::InProgress);
            match begin {
                Err(TcpError::InProgress | TcpError::Already) => Err(Errno::AGAIN),
                other => other.map(|()| 0).map_err(Errno::from),
            }
        });
        match result {
            Err(Errno::AGAIN) if has_begun => Err(Errno(libc::EINPROGRESS)),
            Err(Errno::AGAIN) => Err(Errno(libc::EALREADY)),
            other => other,
        }
    }

    /// `connect` to `AF_UNSPEC`.
    pub(crate) fn disconnect(&self, fd: i32) -> Result<i32, Errno> {
        let mut state = self.lock();
        let entry = state.entry(fd)?;
        entry.listens = false;
        let socket = entry.socket;
        state.host.call(|tcp, out| tcp.disconnect(socket, out))?;
        drop(self.let_others_run(state));
        Ok(0)
    }

    pub(crate) fn read(&self, fd: i32, room: &mut [u8], flags: Flags) -> Result<usize, Errno> {
        let (waits, timeout_us) =
            self.waiting(fd, flags.never_waits, |entry| entry.receive_timeout_us)?;
        if flags.wants_errors {
            return self.take_report(fd).map(|_| 0);
        }
        let mut low_water = self.lock().options(fd)?.low_water_bytes as usize;
        let (mut filled, mut peeked) = (0, 0);
        let result = self.wait(waits && !flags.is_urgent, timeout_us, |state| {
            if filled > 0 && state.has_nothing_more(fd)? {
                // The next call tells why.
                return Ok(0);
            }
            let socket = state.entry(fd)?.socket;
            let room = &mut room[filled..];
            let read = state.host.call(|tcp, out| {
                if flags.is_urgent {
                    let mode = if flags.peeks { ReadMode::Peek } else { ReadMode::Take };
                    let byte = tcp.read_urgent(socket, mode, out)?;
                    Ok(byte.zip(room.first_mut()).map_or(0, |(byte, place)| {
                        *place = byte;
                        1
                    }))
                } else if flags.peeks {
                    tcp.peek(socket, room, out)
                } else {
                    tcp.read(socket, room, out)
                }
            })?;
            let target = if flags.waits_for_all { room.len() } else { low_water.min(room.len()) };
            let is_waited_for = flags.peeks && flags.waits_for_all && !flags.is_urgent;
            let mut has_ended = || state.readiness(fd).is_ok_and(|ready| ready.peer_closed);
            if flags.peeks && !is_waited_for || read == 0 || read >= target {
                return Ok(read);
            }
            if is_waited_for {
                peeked = read;
                return if has_ended() { Ok(read) } else { Err(Errno::AGAIN) };
            }
            if state.has_nothing_more(fd)? {
                return Ok(read);
            }
            filled += read;
            low_water = low_water.saturating_sub(read);
            Err(Errno::AGAIN)
        });
        match result {
            Ok(read) => Ok(filled + read),
            Err(_) if filled + peeked > 0 => Ok(filled + peeked),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn shutdown(&self, fd: i32, how: Shutdown) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        state.host.call(|tcp, out| tcp.shutdown(socket, how, out))?;
        drop(self.let_others_run(state));
        Ok(0)
    }

    pub(crate) fn close(&self, fd: i32) -> Result<i32, Errno> {
        let mut state = self.lock();
        if state.epolls.remove(&fd).is_some() {
            return Ok(0);
        }
        let socket = state.entry(fd)?.socket;
        let linger_s = state.host.tcp.options(socket)?.linger_s.filter(|&seconds| seconds > 0);
        let linger_us = linger_s.map(|seconds| u64::from(seconds) * SECOND_US);
        state.sockets.remove(&fd);
        state.inlets.remove(&fd);
        state.epolls.values_mut().for_each(|epoll| epoll.forget(fd));
        state.host.call(|tcp, out| tcp.close(socket, out))?;
        drop(self.let_others_run(state));
        let closed =
            self.wait(linger_us.is_some(), linger_us, |state| match state.host.tcp.info(socket) {
                Ok(Some(info)) if is_unacknowledged(info.state) => Err(Errno::AGAIN),
                _ => Ok(0),
            });
        match closed {
            Err(Errno::AGAIN) => Ok(0),
            other => other,
        }
    }

    /// Changes the options of a socket.
    pub(crate) fn set_options(
        &self,
        fd: i32,
        change: impl FnOnce(&mut TcpOptions),
    ) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        let mut options = state.host.tcp.options(socket)?;
        change(&mut options);
        state.host.call(|tcp, out| tcp.set_options(socket, options, out))?;
        Ok(0)
    }

    /// A packet from the peer.
    pub(crate) fn deliver(&self, bytes: &[u8]) {
        let mut state = self.lock();
        state.turns += 1;
        state.has_changed = true;
        state.host.deliver(bytes);
        drop(self.let_others_run(state));
    }

    /// Turns the clock until a packet leaves, and returns it with its time.
    pub(crate) fn receive(&self) -> Option<(Vec<u8>, u64)> {
        self.follow_inlets();
        let mut state = self.lock();
        let end_us = state.host.now_us + RECEIVE_US;
        while !state.host.has_sent() {
            state.turns += 1;
            let went_on = state.step(end_us);
            state = self.let_others_run(state);
            if !went_on && !state.host.has_sent() {
                return None;
            }
        }
        state.host.take_sent()
    }

    pub(crate) fn sleep(&self, us: u64) {
        if std::mem::take(&mut self.lock().has_returned) {
            sleep(REST);
        }
        let mut state = self.lock();
        let end_us = state.host.now_us + us;
        loop {
            state.turns += 1;
            let went_on = state.step(end_us);
            state = self.let_others_run(state);
            if !went_on {
                return;
            }
        }
    }

    /// The time. It advances by itself, since packetdrill spins on it.
    pub(crate) fn now_us(&self) -> u64 {
        let mut state = self.lock();
        if state.returning == Some(current().id()) {
            state.returning = None;
            self.changed.notify_all();
        } else {
            state.turns += 1;
            let end_us = state.host.now_us + 1;
            while state.step(end_us) {
                state = self.let_others_run(state);
            }
            state = self.let_others_run(state);
        }
        state.host.now_us
    }

    /// True if calls on a descriptor wait, and their limit in µs.
    pub(crate) fn waiting(
        &self,
        fd: i32,
        never: bool,
        timeout: impl FnOnce(&Entry) -> Option<u64>,
    ) -> Result<(bool, Option<u64>), Errno> {
        let mut state = self.lock();
        let entry = state.entry(fd)?;
        Ok((!never && !entry.is_nonblocking, timeout(entry)))
    }

    /// Tries a call until it does not say `EAGAIN`, or until its time is over.
    pub(crate) fn wait<R>(
        &self,
        waits: bool,
        timeout_us: Option<u64>,
        mut attempt: impl FnMut(&mut State) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let mut state = self.lock();
        let end_us = timeout_us.map_or(u64::MAX, |us| state.host.now_us + us);
        let (mut has_waited, mut quiet_looks) = (false, 0);
        loop {
            let result = attempt(&mut state);
            let is_over = state.host.now_us >= end_us;
            if !matches!(result, Err(Errno::AGAIN)) || !waits || is_over {
                if has_waited {
                    (state.waits_until_us, state.tries_again) = (None, false);
                    state.returning = Some(current().id());
                    state.has_returned = true;
                    self.changed.notify_all();
                }
                drop(self.let_others_run(state));
                return result;
            }
            has_waited = true;
            (state.waits_until_us, state.tries_again) = (Some(end_us), false);
            self.changed.notify_all();
            let turns = state.turns;
            let waited = self.changed.wait_timeout_while(state, LOOK, |state| !state.tries_again);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            quiet_looks = if state.turns == turns { quiet_looks + 1 } else { 0 };
            let next_us = state.host.tcp.next_timer_us().unwrap_or(u64::MAX).min(end_us);
            let is_main = current().id() == self.main_thread;
            if next_us < u64::MAX && (is_main || is_awaited(quiet_looks)) {
                state.has_changed |= state.host.step(next_us);
            }
        }
    }

    /// Lets a waiting call go on if something happened, and waits until it has returned and asked
    /// for the time: virtual time must not run ahead of it.
    fn let_others_run<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let is_over = state.waits_until_us.is_some_and(|end_us| end_us <= state.host.now_us);
        let has_changed = std::mem::take(&mut state.has_changed) | state.host.has_news();
        if state.waits_until_us.is_some() && (has_changed || is_over) {
            state.tries_again = true;
            self.changed.notify_all();
            let is_busy = |state: &mut State| {
                state.waits_until_us.is_some() && state.tries_again
                    || state.returning.is_some_and(|thread| thread != current().id())
            };
            let waited = self.changed.wait_timeout_while(state, RETURN, is_busy);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            state.returning = None;
        }
        state
    }
}

impl State {
    /// Advances the clock to the next timer, at most to `end_us` and to the end of a call that waits.
    /// Returns false at `end_us`.
    fn step(&mut self, end_us: u64) -> bool {
        let until_us = self.waits_until_us.unwrap_or(u64::MAX).max(self.host.now_us);
        let went_on = self.host.step(end_us.min(until_us));
        self.has_changed |= went_on;
        went_on || until_us < end_us
    }

    /// True if everything was read, and an error or the end follows.
    fn has_nothing_more(&mut self, fd: i32) -> Result<bool, Errno> {
        let readiness = self.readiness(fd)?;
        let socket = self.entry(fd)?.socket;
        let unread = self.host.tcp.info(socket)?.map_or(0, |info| info.unread_bytes);
        Ok((readiness.failed || readiness.peer_closed) && unread == 0)
    }

    /// True of a descriptor that is a socket or an `epoll`.
    pub(crate) fn has(&self, fd: i32) -> bool {
        self.sockets.contains_key(&fd) || self.epolls.contains_key(&fd)
    }

    pub(crate) fn options(&mut self, fd: i32) -> Result<TcpOptions, Errno> {
        let socket = self.entry(fd)?.socket;
        Ok(self.host.tcp.options(socket)?)
    }

    pub(crate) fn entry(&mut self, fd: i32) -> Result<&mut Entry, Errno> {
        self.sockets.get_mut(&fd).ok_or(Errno(libc::EBADF))
    }
}

impl Entry {
    fn of(socket: TcpSocket) -> Self {
        Self {
            socket,
            is_nonblocking: false,
            listens: false,
            reuses_address: false,
            receive_timeout_us: None,
            send_timeout_us: None,
            kept: Kept::default(),
            full_writes: 0,
        }
    }

    /// Entry of a connection that a listener accepted.
    fn inheriting(&self, socket: TcpSocket) -> Self {
        Self { socket, is_nonblocking: false, listens: false, kept: self.kept.inherited(), ..*self }
    }
}

/// True if packetdrill's main thread waits until a call returns: it sleeps on a futex (system call of
/// its `/proc` entry), and has not called in between.
fn is_awaited(quiet_looks: u32) -> bool {
    let main_thread = std::process::id();
    match std::fs::read_to_string(format!("/proc/self/task/{main_thread}/syscall")) {
        Ok(told) => {
            let number = told.split(' ').next().and_then(|number| number.parse().ok());
            quiet_looks >= LOOKS_WAITING && number == Some(libc::SYS_futex)
        }
        Err(_) => quiet_looks >= LOOKS_UNKNOWN,
    }
}

/// True as long as a close with `SO_LINGER` waits (`sk_stream_closing`).
fn is_unacknowledged(state: tcp::State) -> bool {
    matches!(state, tcp::State::FinWait1 | tcp::State::Closing | tcp::State::LastAck)
}
