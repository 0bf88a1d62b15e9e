//! Wake-up of a TCP socket's waiters: threads blocked in a call, CPUs whose thread waits, and pollers of the socket's
//! descriptor. Separate from [UDP's](super::super::wake), whose waiters look at a queue that is filled without a lock: here
//! a shard sets the readiness with its lock held, and waiters are notified of changes once the lock is free.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{io, mem};

use forebay_rx::CpuId;
use forebay_rx::arrive::Waker;
use forebay_rx::hash::FlowHash;
use forebay_stack::tcp::Readiness;
use forebay_sys::readiness::{Ended, ReadinessDescriptor, ReadinessSetter, readiness};

use super::shards::ShardSocket;

/// Waiters of a socket, by its kind.
#[derive(Clone)]
pub(super) enum Watch {
    Stream(Arc<StreamWatch>),
    Listener(Arc<ListenerWatch>),
}

/// Waiters of a connection.
#[derive(Default)]
pub(super) struct StreamWatch {
    pub(super) wait: Wait,
}

/// Waiters of a listener, and its connections that wait to be accepted.
#[derive(Default)]
pub(super) struct ListenerWatch {
    pub(super) wait: Wait,
    /// Listening socket of each connection, in order. The backlog bounds it.
    ready: Mutex<VecDeque<ShardSocket>>,
}

impl Watch {
    /// Sets what the socket is ready for. Called with its shard locked. Returns true if the waiters
    /// are to be [notified](Self::notify).
    #[must_use]
    pub(super) fn set(&self, readiness: &Readiness) -> bool {
        match self {
            Self::Stream(stream) => {
                let gone = readiness.hung_up || readiness.failed;
                let ended = match readiness {
                    Readiness { hung_up: true, failed: true, .. } => Ended::Failed,
                    Readiness { hung_up: true, .. } => Ended::Both,
                    Readiness { peer_closed: true, .. } => Ended::Peer,
                    _ => Ended::Nothing,
                };
                stream.wait.set(readiness.readable || gone, readiness.writable || gone, ended)
            }
            Self::Listener(_) => false,
        }
    }

    /// Notifies the waiters. Called without locks: a thread that wakes may take the caller's CPU at once.
    pub(super) fn notify(&self) {
        match self {
            Self::Stream(stream) => stream.wait.notify(),
            Self::Listener(listener) => listener.wait.notify(),
        }
    }

    /// Notifies the waiters for the last time, as the run has ended: every call returns.
    pub(super) fn end(&self) {
        match self {
            Self::Stream(stream) => stream.wait.end(),
            Self::Listener(listener) => listener.wait.end(),
        }
    }
}

impl StreamWatch {
    /// Waiters that poll a descriptor which was made for them.
    pub(super) fn with_readiness(
        (setter, descriptor): (ReadinessSetter, ReadinessDescriptor),
    ) -> Self {
        Self { wait: Wait::with_readiness(setter, descriptor) }
    }

    pub(super) fn set_hash(&self, hash: FlowHash) {
        self.wait.hash.store(hash.0, Ordering::Relaxed);
    }

    /// Flow hash of the connection's packets; `None` before the first.
    pub(super) fn hash(&self) -> Option<FlowHash> {
        Some(self.wait.hash.load(Ordering::Relaxed)).filter(|hash| *hash != 0).map(FlowHash)
    }
}

impl ListenerWatch {
    /// Waiters that already poll a descriptor.
    pub(super) fn with_readiness(setter: ReadinessSetter, descriptor: ReadinessDescriptor) -> Self {
        Self { wait: Wait::with_readiness(setter, descriptor), ..Self::default() }
    }

    /// Adds a connection. The waiters are to be notified.
    pub(super) fn push(&self, listening: ShardSocket) {
        let mut ready = self.ready();
        ready.push_back(listening);
        self.wait.set_one_more();
    }

    /// Takes the first connection; without one, the number of wake-ups so far.
    pub(super) fn pop(&self) -> Result<ShardSocket, Seen> {
        let mut ready = self.ready();
        let first = ready.pop_front();
        if ready.is_empty() && self.wait.set(false, false, Ended::Nothing) {
            self.wait.notify();
        }
        first.ok_or_else(|| self.wait.seen())
    }

    /// Number of wake-ups so far, if no connection waits.
    pub(super) fn seen_if_empty(&self) -> Option<Seen> {
        let ready = self.ready();
        ready.is_empty().then(|| self.wait.seen())
    }

    fn ready(&self) -> MutexGuard<'_, VecDeque<ShardSocket>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of wake-ups that a waiter has seen, modulo 2^32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Seen(u32);

/// Number of waiters that are still to be notified.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Unnotified(u16);

impl Unnotified {
    const NOBODY: Self = Self(0);
    /// So many that all are notified.
    const ALL: Self = Self(u16::MAX);

    fn one_more(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// Wake-up of a socket's waiters.
#[derive(Default)]
pub(super) struct Wait {
    state: Mutex<State>,
    changed: Condvar,
    /// Flow hash of the last segment of a connection; 0 before the first, and of listeners. Here it takes no room.
    hash: AtomicU32,
}

const _: () = assert!(size_of::<StreamWatch>() <= 40, "TCP-12: waiters of an idle connection");

#[derive(Default)]
struct State {
    wakes: u32,
    sleepers: u32,
    unnotified: Unnotified,
    is_readable: bool,
    is_writable: bool,
    /// Sides of the connection that have ended.
    ended: Ended,
    /// True while a write waits for memory that other connections use.
    lacks_memory: bool,
    /// True once the run has ended: all calls return, so that pollers must make them.
    has_ended: bool,
    /// `None` as long as there were none.
    others: Option<Box<Others>>,
}

/// Waiters that do not sleep.
#[derive(Default)]
struct Others {
    pollers: Option<Pollers>,
    /// CPUs whose threads wait in their own turns.
    inline: Vec<(CpuId, Waker)>,
    /// Waker of the handle that has taken the connection over.
    taker: Option<Waker>,
}

/// Pollers of the socket's descriptor.
struct Pollers {
    /// Dropped before the setter, whose end would be reported as the connection's.
    descriptor: Arc<ReadinessDescriptor>,
    setter: ReadinessSetter,
    /// True if the socket stopped being readable since the pollers were last notified.
    fell_readable: bool,
    fell_writable: bool,
}

impl Pollers {
    fn new(setter: ReadinessSetter, descriptor: Arc<ReadinessDescriptor>) -> Self {
        Self { descriptor, setter, fell_readable: false, fell_writable: false }
    }
}

/// Descriptor of a socket's handles, which ends with the last of them: not with the engine's references to its
/// waiters, since a set of `epoll` would report it until then.
#[derive(Default)]
pub(super) struct Polled(OnceLock<Arc<ReadinessDescriptor>>);

impl Polled {
    /// Descriptor by which pollers learn that the socket is readable or writable.
    pub(super) fn descriptor(&self, wait: &Wait) -> io::Result<BorrowedFd<'_>> {
        if let Some(descriptor) = self.0.get() {
            return Ok(descriptor.as_fd());
        }
        let descriptor = wait.descriptor()?;
        Ok(self.0.get_or_init(|| descriptor).as_fd())
    }

    /// Closes the descriptor: pollers are not notified from then on.
    pub(super) fn close(&mut self, wait: &Wait) {
        // Whoever notifies has the state locked.
        let pollers = wait.state().others.as_mut().and_then(|others| others.pollers.take());
        drop(self.0.take());
        drop(pollers);
    }
}

impl Wait {
    fn with_readiness(setter: ReadinessSetter, descriptor: ReadinessDescriptor) -> Self {
        let pollers = Some(Pollers::new(setter, Arc::new(descriptor)));
        let others = Some(Box::new(Others { pollers, ..Others::default() }));
        Self { state: State { others, ..State::default() }.into(), ..Self::default() }
    }

    /// Sets what the socket is ready for. Returns true if the waiters are to be [notified](Self::notify).
    #[must_use]
    pub(super) fn set(&self, is_readable: bool, is_writable: bool, ended: Ended) -> bool {
        let mut state = self.state();
        if state.has_ended {
            return false;
        }
        let grew = is_readable && !state.is_readable
            || is_writable && !state.is_writable
            || ended > state.ended;
        let is_same = (state.is_readable, state.is_writable, state.ended)
            == (is_readable, is_writable, ended);
        let fell_readable = state.is_readable && !is_readable;
        let fell_writable = state.is_writable && !is_writable;
        (state.is_readable, state.is_writable, state.ended) = (is_readable, is_writable, ended);
        if grew {
            state.wake_all();
        }
        let Some(pollers) = state.pollers() else { return grew };
        pollers.fell_readable |= fell_readable;
        pollers.fell_writable |= fell_writable;
        grew || !is_same
    }

    /// Notes that a write found no memory. Returns true if that was not known.
    pub(super) fn lack_memory(&self) -> bool {
        let mut state = self.state();
        let is_new = !state.has_ended && !mem::replace(&mut state.lacks_memory, true);
        state.notify_pollers();
        is_new
    }

    /// Wakes the waiters, as there is memory again.
    pub(super) fn memory_is_back(&self) {
        let mut state = self.state();
        state.lacks_memory = false;
        state.wake_all();
        drop(state);
        self.notify();
    }

    /// Sets that there is one more thing to take. It is for one waiter: others would find nothing.
    pub(super) fn set_one_more(&self) {
        let mut state = self.state();
        (state.is_readable, state.is_writable) = (true, false);
        state.wakes = state.wakes.wrapping_add(1);
        state.unnotified = state.unnotified.one_more();
    }

    /// Notifies the waiters of what was set.
    pub(super) fn notify(&self) {
        let mut state = self.state();
        state.notify_pollers();
        let unnotified = mem::take(&mut state.unnotified);
        if unnotified != Unnotified::NOBODY
            && let Some(others) = &state.others
        {
            others.inline.iter().for_each(|(_, wake)| wake());
            others.taker.iter().for_each(|wake| wake());
        }
        if state.sleepers == 0 {
            return;
        }
        drop(state);
        match unnotified {
            Unnotified::ALL => self.changed.notify_all(),
            Unnotified(count) => (0..count).for_each(|_| self.changed.notify_one()),
        }
    }

    /// Wakes all waiters for the last time.
    pub(super) fn end(&self) {
        let mut state = self.state();
        state.has_ended = true;
        (state.is_readable, state.is_writable) = (true, true);
        state.wake_all();
        drop(state);
        self.notify();
    }

    /// Number of wake-ups so far. A waiter gets it before it looks for news, and then sleeps.
    pub(super) fn seen(&self) -> Seen {
        Seen(self.state().wakes)
    }

    /// True if there was no wake-up since.
    pub(super) fn is_quiet_since(&self, seen: Seen) -> bool {
        self.seen() == seen
    }

    /// Sleeps until there are news, at most for `at_most`.
    pub(super) fn sleep(&self, seen: Seen, at_most: Option<Duration>) {
        let mut state = self.state();
        state.sleepers += 1;
        let is_quiet = |state: &mut State| state.wakes == seen.0;
        let mut state = match at_most {
            None => {
                self.changed.wait_while(state, is_quiet).unwrap_or_else(PoisonError::into_inner)
            }
            Some(at_most) => {
                let waited = self.changed.wait_timeout_while(state, at_most, is_quiet);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.sleepers -= 1;
    }

    /// Adds a CPU whose thread waits in its own turns.
    pub(super) fn add_inline(&self, cpu: CpuId, wake: impl FnOnce() -> Waker) {
        let mut state = self.state();
        let inline = &mut state.others.get_or_insert_default().inline;
        if inline.iter().all(|(of, _)| *of != cpu) {
            inline.push((cpu, wake()));
        }
    }

    /// Takes the pair from its pollers, who are not notified from then on. `wake` is called when they would be.
    pub(super) fn take_over(
        &self,
        wake: Waker,
    ) -> Option<(ReadinessSetter, Arc<ReadinessDescriptor>)> {
        let mut state = self.state();
        let others = state.others.get_or_insert_default();
        others.taker = Some(wake);
        others.pollers.take().map(|Pollers { descriptor, setter, .. }| (setter, descriptor))
    }

    /// Descriptor that is polled, created on first use.
    fn descriptor(&self) -> io::Result<Arc<ReadinessDescriptor>> {
        let mut state = self.state();
        if let Some(pollers) = state.pollers() {
            return Ok(Arc::clone(&pollers.descriptor));
        }
        let (setter, descriptor) = readiness()?;
        let descriptor = Arc::new(descriptor);
        let pollers = Pollers::new(setter, Arc::clone(&descriptor));
        state.others.get_or_insert_default().pollers = Some(pollers);
        state.notify_pollers();
        Ok(descriptor)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pollers(&mut self) -> Option<&mut Pollers> {
        self.others.as_mut()?.pollers.as_mut()
    }

    /// Counts a wake-up of all waiters, who are to be notified.
    fn wake_all(&mut self) {
        self.wakes = self.wakes.wrapping_add(1);
        self.unnotified = Unnotified::ALL;
    }

    fn notify_pollers(&mut self) {
        let is_writable = self.is_writable && (!self.lacks_memory || self.has_ended);
        let (is_readable, ended) = (self.is_readable, self.ended);
        let Some(pollers) = self.pollers() else { return };
        let fell_readable = mem::take(&mut pollers.fell_readable);
        let fell_writable = mem::take(&mut pollers.fell_writable);
        let Pollers { descriptor, setter, .. } = pollers;
        // First: it makes the descriptor readable, too, and who waits is notified of both at once.
        setter.end(ended, descriptor);
        // What fell and rose again before this call is an edge, for which `EPOLLET` waits.
        if fell_readable || !is_readable {
            setter.not_readable(descriptor);
        }
        if is_readable {
            setter.readable();
        }
        if fell_writable || !is_writable {
            setter.not_writable(descriptor);
        }
        if is_writable {
            setter.writable();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::Timespec;
    use rustix::event::epoll::{
        CreateFlags, Event, EventData, EventFlags, add, create, wait as events_of,
    };

    use super::*;

    /// Next event of a set, if there is one.
    fn event(epoll: &OwnedFd) -> Option<EventFlags> {
        let mut events = Vec::<Event>::with_capacity(1);
        let at_once = Timespec::default();
        events_of(epoll, rustix::buffer::spare_capacity(&mut events), Some(&at_once)).unwrap();
        events.first().map(|event| event.flags)
    }

    #[test]
    fn tcp_17_closed_descriptor_has_no_events() {
        let made_before = readiness().unwrap();
        for watch in [StreamWatch::default(), StreamWatch::with_readiness(made_before)] {
            let (epoll, mut polled) = (create(CreateFlags::CLOEXEC).unwrap(), Polled::default());
            let descriptor = polled.descriptor(&watch.wait).unwrap();
            let programs = descriptor.try_clone_to_owned().unwrap();
            add(&epoll, &programs, EventData::new_u64(0), EventFlags::IN).unwrap();
            drop(programs);
            polled.close(&watch.wait);
            // The engine has the waiters until the end of a batch.
            assert!(watch.wait.set(true, true, Ended::Failed));
            watch.wait.notify();
            assert_eq!(event(&epoll), None);
            drop(watch);
            assert_eq!(event(&epoll), None);
        }
    }

    #[test]
    fn tcp_17_waiter_sees_end_at_once() {
        let rest = EventFlags::IN | EventFlags::RDHUP;
        for (ended, also) in [(Ended::Peer, rest), (Ended::Both, rest | EventFlags::HUP)] {
            for _ in 0..200 {
                let (wait, polled) = (Wait::default(), Polled::default());
                let epoll = create(CreateFlags::CLOEXEC).unwrap();
                let asked = rest | EventFlags::ONESHOT;
                let descriptor = polled.descriptor(&wait).unwrap();
                add(&epoll, descriptor, EventData::new_u64(0), asked).unwrap();
                let told = std::thread::scope(|scope| {
                    let waits = scope.spawn(|| {
                        let mut events = Vec::<Event>::with_capacity(1);
                        let room = rustix::buffer::spare_capacity(&mut events);
                        events_of(&epoll, room, None).unwrap();
                        events[0].flags
                    });
                    std::thread::yield_now();
                    assert!(wait.set(true, true, ended));
                    wait.notify();
                    waits.join().unwrap()
                });
                assert_eq!(told, also);
            }
        }
    }

    #[test]
    fn tcp_17_readiness_risen_again_is_edge() {
        let (wait, polled) = (Wait::default(), Polled::default());
        let epoll = create(CreateFlags::CLOEXEC).unwrap();
        let edges = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        add(&epoll, polled.descriptor(&wait).unwrap(), EventData::new_u64(0), edges).unwrap();
        let edge = || event(&epoll);
        let (both, ended) = (EventFlags::IN | EventFlags::OUT, Ended::Nothing);
        assert!(wait.set(true, true, ended));
        wait.notify();
        assert_eq!(edge(), Some(both));
        for (is_readable, is_writable) in [(false, true), (true, false), (false, false)] {
            wait.notify();
            assert_eq!(edge(), None, "nothing is new");
            assert!(wait.set(is_readable, is_writable, ended));
            assert!(wait.set(true, true, ended));
            wait.notify();
            assert_eq!(edge(), Some(both), "{is_readable} {is_writable}");
        }
    }
}
