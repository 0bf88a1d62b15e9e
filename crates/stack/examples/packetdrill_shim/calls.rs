//! Socket calls by descriptor. A call that waits does so in virtual time, on a thread of its own, and
//! packetdrill's main thread turns the clock meanwhile.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current};
use std::time::Duration;

use forebay_stack::tcp::{Readiness, TcpError, TcpOptions, TcpSocket, WriteFlags};

use crate::errno::Errno;
use crate::host::Host;

/// Real time without a call of the main thread after which a waiting call turns the clock.
const IDLE: Duration = Duration::from_millis(20);
/// Virtual time that a receive waits for a packet at most, in µs.
const RECEIVE_US: u64 = 2_000_000_000;
/// Virtual time of one step without timers, in µs.
const STEP_US: u64 = 1_000;

/// The shared object's state.
#[derive(Debug)]
pub(crate) struct Shim {
    state: Mutex<State>,
    changed: Condvar,
}

/// Host and sockets, behind the mutex.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) host: Host,
    sockets: BTreeMap<i32, Entry>,
    /// Calls of the main thread so far.
    turns: u64,
    /// A call waits; it is to try again.
    is_waiting: bool,
    tries_again: bool,
    /// Thread whose call returned, and that has not asked for the time yet.
    returning: Option<ThreadId>,
}

/// A descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) socket: TcpSocket,
    pub(crate) is_nonblocking: bool,
    /// `SO_RCVTIMEO` and `SO_SNDTIMEO`, in µs.
    pub(crate) receive_timeout_us: Option<u64>,
    pub(crate) send_timeout_us: Option<u64>,
}

/// Flags of reads and writes.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Flags {
    pub(crate) peeks: bool,
    pub(crate) is_urgent: bool,
    pub(crate) never_waits: bool,
    pub(crate) more_follows: bool,
}

impl Flags {
    fn of_write(self) -> WriteFlags {
        WriteFlags { is_urgent: self.is_urgent, more_follows: self.more_follows }
    }
}

/// One descriptor of a poll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polled {
    pub(crate) fd: i32,
    pub(crate) events: i16,
    pub(crate) revents: i16,
}

impl Shim {
    pub(crate) fn new(flags: &str) -> Self {
        let state = State {
            host: Host::new(flags),
            sockets: BTreeMap::new(),
            turns: 0,
            is_waiting: false,
            tries_again: false,
            returning: None,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the descriptor of a new socket.
    pub(crate) fn socket(&self, fd: i32) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.host.tcp.socket()?;
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
        state.host.tcp.listen(socket, backlog)?;
        Ok(0)
    }

    /// Accepts into the descriptor `new_fd`.
    pub(crate) fn accept(&self, fd: i32, new_fd: i32) -> Result<SocketAddr, Errno> {
        let (waits, timeout_us) = self.waiting(fd, false, |entry| entry.receive_timeout_us)?;
        self.wait(waits, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let (accepted, peer) = state.host.tcp.accept(socket)?;
            state.sockets.insert(new_fd, Entry::of(accepted));
            Ok(peer)
        })
    }

    pub(crate) fn connect(&self, fd: i32, peer: SocketAddr) -> Result<i32, Errno> {
        let (waits, timeout_us) = self.waiting(fd, false, |entry| entry.send_timeout_us)?;
        let first = {
            let mut state = self.lock();
            let socket = state.entry(fd)?.socket;
            let local = SocketAddr::new(state.host.address(), 0);
            let mtu_bytes = state.host.mtu_bytes();
            let first =
                state.host.call(|tcp, out| tcp.connect(socket, (local, peer), mtu_bytes, out));
            drop(self.let_others_run(state));
            first
        };
        match first {
            Err(TcpError::InProgress) if waits => {}
            other => return other.map(|()| 0).map_err(Errno::from),
        }
        self.wait(true, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let ready = state.host.tcp.readiness(socket)?;
            if !ready.writable && !ready.failed {
                return Err(Errno::AGAIN);
            }
            match state.host.tcp.take_error(socket)? {
                Some(error) => Err(error.into()),
                None => Ok(0),
            }
        })
    }

    pub(crate) fn read(&self, fd: i32, room: &mut [u8], flags: Flags) -> Result<usize, Errno> {
        let (waits, timeout_us) =
            self.waiting(fd, flags.never_waits, |entry| entry.receive_timeout_us)?;
        self.wait(waits, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let read = state.host.call(|tcp, out| {
                if flags.is_urgent {
                    let byte = tcp.read_urgent(socket, out)?;
                    Ok(room.first_mut().map_or(0, |place| {
                        *place = byte;
                        1
                    }))
                } else if flags.peeks {
                    tcp.peek(socket, room, out)
                } else {
                    tcp.read(socket, room, out)
                }
            });
            read.map_err(Errno::from)
        })
    }

    /// Writes all bytes, or as many as there is room for without waiting.
    pub(crate) fn write(&self, fd: i32, bytes: &[u8], flags: Flags) -> Result<usize, Errno> {
        let (waits, timeout_us) =
            self.waiting(fd, flags.never_waits, |entry| entry.send_timeout_us)?;
        let mut written = 0;
        let result = self.wait(waits, timeout_us, |state| {
            let socket = state.entry(fd)?.socket;
            let more = state
                .host
                .call(|tcp, out| tcp.write(socket, &bytes[written..], flags.of_write(), out))?;
            written += more;
            if written < bytes.len() { Err(Errno::AGAIN) } else { Ok(()) }
        });
        match result {
            Err(error) if written == 0 => Err(error),
            _ => Ok(written),
        }
    }

    pub(crate) fn shutdown(&self, fd: i32, receive: bool, send: bool) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        state.host.call(|tcp, out| tcp.shutdown(socket, receive, send, out))?;
        drop(self.let_others_run(state));
        Ok(0)
    }

    pub(crate) fn close(&self, fd: i32) -> Result<i32, Errno> {
        let mut state = self.lock();
        let socket = state.entry(fd)?.socket;
        state.sockets.remove(&fd);
        state.host.call(|tcp, out| tcp.close(socket, out))?;
        drop(self.let_others_run(state));
        Ok(0)
    }

    pub(crate) fn poll(
        &self,
        polled: &mut [Polled],
        timeout_us: Option<u64>,
    ) -> Result<i32, Errno> {
        let result = self.wait(timeout_us != Some(0), timeout_us, |state| {
            let mut count = 0;
            for polled in polled.iter_mut() {
                polled.revents = match state.entry(polled.fd).map(|entry| entry.socket) {
                    Ok(socket) => revents(&state.host.tcp.readiness(socket)?, polled.events),
                    Err(_) => libc::POLLNVAL,
                };
                count += i32::from(polled.revents != 0);
            }
            if count > 0 { Ok(count) } else { Err(Errno::AGAIN) }
        });
        match result {
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
        state.host.deliver(bytes);
        drop(self.let_others_run(state));
    }

    /// Turns the clock until a packet leaves, and returns it with its time.
    pub(crate) fn receive(&self) -> Option<(Vec<u8>, u64)> {
        let mut state = self.lock();
        let end_us = state.host.now_us + RECEIVE_US;
        while !state.host.has_sent() {
            state.turns += 1;
            let went_on = state.host.step(end_us);
            state = self.let_others_run(state);
            if !went_on && !state.host.has_sent() {
                return None;
            }
        }
        state.host.take_sent()
    }

    pub(crate) fn sleep(&self, us: u64) {
        let mut state = self.lock();
        let end_us = state.host.now_us + us;
        loop {
            state.turns += 1;
            let went_on = state.host.step(end_us);
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
            while state.host.step(end_us) {}
            state = self.let_others_run(state);
        }
        state.host.now_us
    }

    /// True if calls on a descriptor wait, and their limit in µs.
    fn waiting(
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
    fn wait<R>(
        &self,
        waits: bool,
        timeout_us: Option<u64>,
        mut attempt: impl FnMut(&mut State) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        let mut state = self.lock();
        let end_us = timeout_us.map_or(u64::MAX, |us| state.host.now_us + us);
        let mut has_waited = false;
        loop {
            let result = attempt(&mut state);
            let is_over = state.host.now_us >= end_us;
            if !matches!(result, Err(Errno::AGAIN)) || !waits || is_over {
                if has_waited {
                    (state.is_waiting, state.tries_again) = (false, false);
                    state.returning = Some(current().id());
                    self.changed.notify_all();
                }
                drop(self.let_others_run(state));
                return result;
            }
            has_waited = true;
            (state.is_waiting, state.tries_again) = (true, false);
            self.changed.notify_all();
            let turns = state.turns;
            let waited = self.changed.wait_timeout_while(state, IDLE, |state| !state.tries_again);
            let (guard, elapsed) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            if elapsed.timed_out() && state.turns == turns {
                // The main thread waits for this call: nobody else turns the clock.
                let step_us = (state.host.now_us + STEP_US).min(end_us);
                state.host.step(step_us);
            }
        }
    }

    /// Lets a waiting call go on if something happened, and waits until it has returned and asked
    /// for the time: virtual time must not run ahead of it.
    fn let_others_run<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if state.host.has_news() && state.is_waiting {
            state.tries_again = true;
            self.changed.notify_all();
            let is_busy = |state: &mut State| {
                state.is_waiting && state.tries_again
                    || state.returning.is_some_and(|thread| thread != current().id())
            };
            let waited = self.changed.wait_timeout_while(state, IDLE, is_busy);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            state.returning = None;
        }
        state
    }
}

impl State {
    pub(crate) fn entry(&mut self, fd: i32) -> Result<&mut Entry, Errno> {
        self.sockets.get_mut(&fd).ok_or(Errno(libc::EBADF))
    }
}

impl Entry {
    fn of(socket: TcpSocket) -> Self {
        Self { socket, is_nonblocking: false, receive_timeout_us: None, send_timeout_us: None }
    }
}

/// Events of a poll, as the kernel tells them.
fn revents(ready: &Readiness, events: i16) -> i16 {
    let mut is = 0;
    let mut note = |is_so: bool, event: i16| is |= if is_so { event } else { 0 };
    note(ready.readable, libc::POLLIN | libc::POLLRDNORM);
    note(ready.writable, libc::POLLOUT | libc::POLLWRNORM);
    note(ready.peer_closed, libc::POLLRDHUP);
    note(ready.urgent, libc::POLLPRI);
    let always = libc::POLLERR | libc::POLLHUP;
    note(ready.hung_up, libc::POLLHUP);
    note(ready.failed, libc::POLLERR);
    is & (events | always)
}
