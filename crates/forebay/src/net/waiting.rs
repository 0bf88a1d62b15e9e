//! Waiting until something may be read from a socket, or sent.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use forebay_engine::is_cpu;
use forebay_stack::socket::reader::SocketReader;
use forebay_sys::readiness::readiness;

use super::endpoint::Inner;
use super::shared::NetState;
use super::wake::Wake;

/// Looked so often, at first and at most, for packet memory that has come home: nobody tells of it.
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);

impl Inner {
    /// Tries until there is something, as long as may be waited.
    pub(super) fn wait_for<T>(
        &self,
        mut attempt: impl FnMut(&mut SocketReader) -> Option<T>,
    ) -> io::Result<T> {
        let mut deadline = Deadline::of(&self.options.read_timeout_ns);
        loop {
            if let Some(found) = self.try_once(&mut attempt)? {
                return Ok(found);
            }
            // In this order: whoever ends it wakes all who looked before.
            let sleeper = self.wake.sleeper();
            let has_ended = self.shared.has_ended();
            if self.is_ready_or_armed(true) {
                thread::yield_now(); // it is a moment away
                continue;
            }
            if has_ended {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if self.options.is_nonblocking.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            sleeper.sleep(deadline.left()?);
        }
    }

    /// Tries once. What a peer has told comes first, as in the kernel.
    fn try_once<T>(
        &self,
        attempt: impl FnOnce(&mut SocketReader) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let mut reader = self.reader();
        let is_refused = self.hub.take_refusal();
        let found = if is_refused { None } else { attempt(&mut reader) };
        if found.is_some() || is_refused {
            self.tell_if_readable(&mut reader);
        }
        if is_refused { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(found) }
    }

    /// Takes what is there, and waits for nothing.
    pub(super) fn try_take<T>(&self, take: impl FnOnce(&mut SocketReader) -> T) -> T {
        let mut reader = self.reader();
        let taken = take(&mut reader);
        self.tell_if_readable(&mut reader);
        taken
    }

    /// True if there is anything to read. If not, whoever delivers next wakes the readers.
    /// `is_asleep`: the caller is counted as a sleeper.
    pub(super) fn is_ready_or_armed(&self, is_asleep: bool) -> bool {
        let mut reader = self.reader();
        let is_ready = reader.has_ready() || !self.arm(&mut reader, is_asleep);
        self.tell_if_readable(&mut reader);
        is_ready
    }

    /// Says that a reader goes to sleep, unless something is there: then nobody sleeps.
    fn arm(&self, reader: &mut SocketReader, is_asleep: bool) -> bool {
        let is_armed = reader.outlet.arm();
        if !is_armed && self.wake.has_others(is_asleep) {
            self.hub.wake_reader();
        }
        is_armed
    }

    /// Has the descriptor, if there is one, tell how it stands. From then on either it is readable, or
    /// whoever delivers next makes it so.
    pub(super) fn tell_if_readable(&self, reader: &mut SocketReader) {
        let Some(descriptor) = self.descriptor.get() else { return };
        let due = reader.outlet.due();
        if reader.has_ready() || self.hub.has_news(due) {
            return self.wake.readable();
        }
        self.wake.not_readable(due, descriptor);
        // Whoever ended the run, or put something in, may have said so just before.
        if !reader.outlet.arm() || self.hub.has_news(due) {
            self.hub.wake_reader();
        }
    }

    /// Descriptor that tells whoever waits for it that something may be read, or sent.
    pub(super) fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(descriptor) = self.descriptor.get() {
            return Ok(descriptor.as_fd());
        }
        let mut reader = self.reader();
        if self.descriptor.get().is_none() {
            let (teller, told) = readiness()?;
            self.wake.set_teller(teller);
            let _ = self.descriptor.set(told); // the reader is locked
            self.tell_if_readable(&mut reader);
        }
        drop(reader);
        Ok(self.descriptor.get().unwrap_or_else(|| unreachable!("it was made")).as_fd())
    }

    /// Senders that wait for packet memory.
    pub(super) fn patience(&self) -> Patience<'_> {
        Patience { of: self, deadline: Deadline::of(&self.options.write_timeout_ns), pause: PAUSE }
    }
}

/// A sender's.
pub(super) struct Patience<'a> {
    of: &'a Inner,
    deadline: Deadline,
    pause: Duration,
}

impl Patience<'_> {
    /// Waits a while, if that is allowed.
    ///
    /// # Errors
    /// Would block; `BrokenPipe` once the engine has ended: none will come home.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        let Inner { shared, wake, options, descriptor, .. } = self.of;
        if shared.has_ended() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // What a CPU's own thread waits for may be for itself to do.
        if options.is_nonblocking.load(Ordering::Relaxed) || is_cpu() {
            if let Some(descriptor) = descriptor.get() {
                wake.not_writable(descriptor);
                shared.blocked.add(wake, shared);
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let left = self.deadline.left()?.unwrap_or(self.pause);
        thread::sleep(self.pause.min(left));
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }
}

/// Until when a call waits.
struct Deadline {
    timeout: Option<Duration>,
    /// Time at which it began to wait, once it has.
    began: Option<Instant>,
}

impl Deadline {
    /// `timeout_ns` of 0 is for ever.
    fn of(timeout_ns: &AtomicU64) -> Self {
        let ns = timeout_ns.load(Ordering::Relaxed);
        Self { timeout: (ns > 0).then(|| Duration::from_nanos(ns)), began: None }
    }

    /// Time left; None: for ever.
    ///
    /// # Errors
    /// Would block, as on Linux, when nothing is.
    fn left(&mut self) -> io::Result<Option<Duration>> {
        let Some(timeout) = self.timeout else { return Ok(None) };
        let now = Instant::now();
        let Some(until) = self.began.get_or_insert(now).checked_add(timeout) else {
            return Ok(None);
        };
        match until.checked_duration_since(now) {
            Some(left) if !left.is_zero() => Ok(Some(left)),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

/// Sockets whose descriptors say that what is sent would block. While there are any, a thread looks for
/// packet memory that has come home.
#[derive(Default)]
pub(super) struct Blocked(Mutex<Watched>);

#[derive(Default)]
struct Watched {
    sockets: Vec<Weak<Wake>>,
    has_watcher: bool,
}

impl Blocked {
    fn add(&self, socket: &Arc<Wake>, shared: &Arc<NetState>) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let this = Arc::downgrade(socket);
        if !watched.sockets.iter().any(|other| other.ptr_eq(&this)) {
            watched.sockets.push(this);
        }
        if !watched.has_watcher {
            let shared = Arc::downgrade(shared);
            let watcher = thread::Builder::new().name("forebay-send".into());
            watched.has_watcher = watcher.spawn(move || while Self::watch(&shared) {}).is_ok();
        }
        if !watched.has_watcher {
            // Who cannot be told in time asks in vain now and then.
            watched.release();
        }
    }

    /// Looks once. Returns whether anybody waits still.
    fn watch(shared: &Weak<NetState>) -> bool {
        thread::sleep(PAUSE_MAX);
        let Some(shared) = shared.upgrade() else { return false };
        let has_room = shared.has_ended() || shared.has_send_room();
        let mut watched = shared.blocked.0.lock().unwrap_or_else(PoisonError::into_inner);
        if has_room {
            watched.release();
            watched.has_watcher = false;
        }
        !has_room
    }
}

impl Watched {
    fn release(&mut self) {
        self.sockets
            .drain(..)
            .filter_map(|socket| socket.upgrade())
            .for_each(|wake| wake.writable());
    }
}
