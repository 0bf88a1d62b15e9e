//! Waiting until a socket is readable or writable.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use forebay_engine::{Arrived, is_cpu};
use forebay_stack::socket::queue::SocketQueueConsumer;
use forebay_stack::socket::reader::SocketReader;
use forebay_sys::readiness::{Ended, ReadinessDescriptor, ReadinessSetter, readiness};
use forebay_sys::signals::with_all_blocked;

use super::endpoint::Endpoint;
use super::options::Timeout;
use super::shared::{CpuIndex, NetState};
use super::wake::Wake;

/// First and longest pause between two checks for free packet memory: no event announces it.
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);

impl Endpoint {
    /// Calls `attempt` until it finds something, at most for the socket's read time-out, and once on the thread of a CPU.
    pub(super) fn wait_for<T>(
        &self,
        mut attempt: impl FnMut(&mut SocketReader) -> Option<T>,
    ) -> io::Result<T> {
        let mut deadline = Deadline::of(&self.options.read_timeout);
        let mut has_waited = false;
        loop {
            if let Some(found) = self.try_once(&mut attempt)? {
                if has_waited {
                    self.shared.suspend_wakeups();
                }
                return Ok(found);
            }
            // A CPU's own thread must not sleep: only its turns bring what it waits for.
            let may_wait = !self.options.is_nonblocking.load(Ordering::Relaxed) && !is_cpu();
            has_waited = may_wait;
            if may_wait {
                deadline.check()?;
            }
            let waiting = may_wait.then(|| self.shared.begin_wait());
            if waiting.as_ref().is_some_and(|waiting| waiting.arrived != Arrived::Nothing) {
                continue;
            }
            // The order matters: a sleeper registered before `end` is woken by it.
            let sleeper = self.wake.sleeper();
            let has_ended = self.shared.has_ended();
            if self.is_readable_else_arm(true) {
                thread::yield_now(); // the packet is in the queue, but not visible yet
                continue;
            }
            if has_ended {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if !may_wait {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            sleeper.sleep(deadline.left()?);
        }
    }

    /// Tries once. A refusal by the peer is reported first, as in the kernel.
    fn try_once<T>(
        &self,
        attempt: impl FnOnce(&mut SocketReader) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let mut reader = self.reader();
        let is_refused = self.queue.take_refusal();
        let found = if is_refused { None } else { attempt(&mut reader) };
        if found.is_some() || is_refused {
            self.update_descriptor(&mut reader);
        }
        if is_refused { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(found) }
    }

    /// Takes the peer's refusal. True if there was one.
    pub(super) fn take_refusal(&self) -> bool {
        let is_refused = self.queue.take_refusal();
        if is_refused {
            self.update_descriptor(&mut self.reader());
        }
        is_refused
    }

    /// Takes what is available, without waiting.
    pub(super) fn try_take<T>(&self, take: impl FnOnce(&mut SocketReader) -> T) -> T {
        let mut reader = self.reader();
        let taken = take(&mut reader);
        self.update_descriptor(&mut reader);
        taken
    }

    /// True if there is anything to read. If not, arms the wake-up: the next CPU that delivers wakes
    /// the readers.
    /// `is_asleep` is true if the caller is counted as a sleeper.
    pub(super) fn is_readable_else_arm(&self, is_asleep: bool) -> bool {
        let mut reader = self.reader();
        let is_ready =
            reader.has_ready() || !self.arm(&mut reader, SocketQueueConsumer::arm, is_asleep);
        self.update_descriptor(&mut reader);
        is_ready
    }

    /// As [`is_readable_else_arm`](Self::is_readable_else_arm) for a CPU that reads in its own turns
    /// and takes no errors.
    pub(super) fn has_datagram_else_arm(&self) -> bool {
        let mut reader = self.reader();
        let arm = SocketQueueConsumer::arm_for_packets;
        let has_some = reader.has_ready() || !self.arm(&mut reader, arm, false);
        self.update_descriptor(&mut reader);
        has_some
    }

    /// Announces that a reader goes to sleep. If something is available instead, the other sleepers
    /// are woken. Returns true if the reader may sleep.
    fn arm(
        &self,
        reader: &mut SocketReader,
        arm: impl FnOnce(&mut SocketQueueConsumer) -> bool,
        is_asleep: bool,
    ) -> bool {
        let is_armed = arm(&mut reader.consumer);
        if !is_armed && self.wake.has_others(is_asleep) {
            self.queue.wake_reader();
        }
        is_armed
    }

    /// Updates the descriptor, if there is one. From then on either the descriptor is readable, or
    /// the next CPU that delivers makes it readable.
    pub(super) fn update_descriptor(&self, reader: &mut SocketReader) {
        let Some(descriptor) = self.descriptor.get() else { return };
        let due = reader.consumer.due();
        if reader.has_ready() || self.queue.has_news(due) {
            return self.wake.readable();
        }
        self.wake.not_readable(due, descriptor);
        // A CPU may have ended the run or put a packet in just before.
        if self.queue.has_news_else_arm(due) {
            self.queue.wake_reader();
        }
    }

    /// Descriptor by which pollers learn that the socket is readable or writable.
    pub(super) fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.descriptor_from(readiness)
    }

    /// The [descriptor](Self::descriptor), which `make` creates if there is none.
    pub(super) fn descriptor_from(
        &self,
        make: impl FnOnce() -> io::Result<(ReadinessSetter, ReadinessDescriptor)>,
    ) -> io::Result<BorrowedFd<'_>> {
        if let Some(descriptor) = self.descriptor.get() {
            return Ok(descriptor.as_fd());
        }
        let mut reader = self.reader();
        if self.descriptor.get().is_none() {
            let (setter, descriptor) = make()?;
            self.wake.set_setter(setter);
            let _ = self.descriptor.set(descriptor); // never set before: the reader is locked
            self.update_descriptor(&mut reader);
        }
        drop(reader);
        Ok(self.descriptor.get().unwrap_or_else(|| unreachable!("it was made")).as_fd())
    }

    /// Notifies pollers of the descriptor for ever that sides of the socket have ended.
    pub(super) fn notify_ended(&self, ended: Ended) -> io::Result<()> {
        self.descriptor()?;
        if let Some(descriptor) = self.descriptor.get() {
            self.wake.end(ended, descriptor);
        }
        Ok(())
    }

    /// Creates the wait for packet memory of one send call.
    pub(super) fn patience(&self) -> Patience<'_> {
        Patience { of: self, deadline: Deadline::of(&self.options.write_timeout), pause: PAUSE }
    }
}

/// A send call's wait for packet memory.
pub(super) struct Patience<'a> {
    of: &'a Endpoint,
    deadline: Deadline,
    pause: Duration,
}

impl Patience<'_> {
    /// Waits for a while, if permitted, for memory of a CPU.
    ///
    /// # Errors
    /// `WouldBlock`; `BrokenPipe` once the engine has ended, as no more memory will be returned.
    pub(super) fn wait(&mut self, by: CpuIndex) -> io::Result<()> {
        let Endpoint { shared, wake, options, descriptor, .. } = self.of;
        if shared.has_ended() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // A CPU's own thread must not wait: it may be the one that has to return the memory.
        if options.is_nonblocking.load(Ordering::Relaxed) || is_cpu() {
            if let Some(descriptor) = descriptor.get() {
                wake.not_writable(descriptor);
                shared.blocked.add(wake, by, shared);
            }
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let left = self.deadline.left()?.unwrap_or(self.pause);
        thread::sleep(self.pause.min(left));
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }
}

/// End of the wait of one call.
pub(super) struct Deadline {
    timeout: Option<Duration>,
    /// Time at which the wait began.
    began: Option<Instant>,
}

impl Deadline {
    /// Creates the deadline of a call with this time-out.
    pub(super) fn of(timeout: &Timeout) -> Self {
        Self { timeout: timeout.get(), began: None }
    }

    /// Begins the wait, if it has not begun. To be called before CPUs are turned: that may find packets for others without end.
    ///
    /// # Errors
    /// As [`left`](Self::left).
    pub(super) fn check(&mut self) -> io::Result<()> {
        self.left().map(drop)
    }

    /// Time left; `None` if there is no time-out.
    ///
    /// # Errors
    /// `WouldBlock`, as on Linux, if no time is left.
    pub(super) fn left(&mut self) -> io::Result<Option<Duration>> {
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

/// Sockets whose descriptors are not writable. While there are any, a thread checks for free packet
/// memory.
#[derive(Default)]
pub(super) struct Blocked(Mutex<Watched>);

#[derive(Default)]
struct Watched {
    /// Each socket with the CPU whose memory its send found full.
    sockets: Vec<(Weak<Wake>, CpuIndex)>,
    has_watcher: bool,
}

impl Blocked {
    fn add(&self, socket: &Arc<Wake>, by: CpuIndex, shared: &Arc<NetState>) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let this = Arc::downgrade(socket);
        if !watched.sockets.iter().any(|(other, on)| other.ptr_eq(&this) && *on == by) {
            watched.sockets.push((this, by));
        }
        if !watched.has_watcher {
            let shared = Arc::downgrade(shared);
            let watcher = thread::Builder::new().name("forebay-send".into());
            let watch = move || while Self::watch(&shared) {};
            // As the engine's threads: the program's handlers are for its own.
            watched.has_watcher = with_all_blocked(|| watcher.spawn(watch)).is_ok();
        }
        if !watched.has_watcher {
            // Without a watcher, poll callers must retry: report the sockets as writable.
            watched.release(|_| true);
        }
    }

    /// Checks once. Returns true if sockets still wait.
    fn watch(shared: &Weak<NetState>) -> bool {
        thread::sleep(PAUSE_MAX);
        let Some(shared) = shared.upgrade() else { return false };
        let room = shared.send_room();
        let has_ended = shared.has_ended();
        let mut watched = shared.blocked.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.release(|by| has_ended || room[by.0]);
        watched.has_watcher = !watched.sockets.is_empty();
        watched.has_watcher
    }
}

impl Watched {
    /// Makes the sockets writable whose CPU has room, and forgets them and those that are closed.
    fn release(&mut self, has_room: impl Fn(CpuIndex) -> bool) {
        self.sockets.retain(|(socket, by)| {
            let Some(wake) = socket.upgrade() else { return false };
            let is_over = has_room(*by);
            if is_over {
                wake.writable();
            }
            !is_over
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicU64;

    use forebay_engine::BusyPoll;
    use forebay_stack::socket::SocketId;
    use forebay_stack::socket::queue::Enqueue;
    use forebay_stack::socket::table::Binding;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::super::rig::{PacketsForOthers, Recording, engine_of, host, own_address};
    use super::super::{Net, NetConfig};
    use super::*;

    /// Engine whose readers are behind, or not; its turns find nothing, the first of them nothing yet.
    #[derive(Default)]
    struct Moderated {
        are_behind: bool,
        /// Number of turns that find nothing yet.
        spins: u64,
        /// Number of suspensions that were ended.
        resumed: AtomicU64,
        turns: AtomicU64,
        /// Number of waits that have ended.
        ended: AtomicU64,
    }

    impl BusyPoll for Moderated {
        fn before_wait(&self) -> Arrived {
            let turns = self.turns.fetch_add(1, Ordering::Relaxed);
            if turns < self.spins { Arrived::Soon } else { Arrived::Nothing }
        }

        fn is_moderated(&self) -> bool {
            self.are_behind
        }

        fn resume(&self) {
            self.resumed.fetch_add(1, Ordering::Relaxed);
        }

        fn after_wait(&self) {
            self.ended.fetch_add(1, Ordering::Relaxed);
        }

        fn suspend(&self) {}
    }

    /// A thread whose sockets are readable anyway receives no more.
    #[test]
    fn exe_9_readable_sockets_come_first() {
        for (are_behind, ready, turns) in [(true, 2, 0), (true, 0, 1), (false, 2, 1)] {
            let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
            let engine = Arc::new(Moderated { are_behind, ..Moderated::default() });
            state.set_busy_poll(Arc::clone(&engine) as _);
            let net = Net(state);
            assert_eq!(net.wait(true, || ready, || 7), if turns == 0 { ready } else { 7 });
            assert_eq!(engine.turns.load(Ordering::Relaxed), turns);
            assert_eq!(engine.ended.load(Ordering::Relaxed), turns);
        }
    }

    #[test]
    fn exe_9_spinning_wait_sees_descriptors() {
        // (spins, may it, looks until one is ready, turns, answer)
        for (spins, may_spin, ready_at, turns, answer) in
            [(3, true, 9, 4, 7), (3, true, 2, 2, 1), (3, false, 9, 1, 7), (0, true, 9, 1, 7)]
        {
            let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
            let engine = Arc::new(Moderated { spins, ..Moderated::default() });
            state.set_busy_poll(Arc::clone(&engine) as _);
            let looks = AtomicU64::new(0);
            let look = || i32::from(looks.fetch_add(1, Ordering::Relaxed) + 1 == ready_at);
            assert_eq!(Net(state).wait(may_spin, look, || 7), answer);
            assert_eq!(engine.turns.load(Ordering::Relaxed), turns);
            assert_eq!(engine.ended.load(Ordering::Relaxed), turns);
            let has_slept = answer == 7;
            let looked = if may_spin { turns - u64::from(has_slept) } else { 0 };
            assert_eq!(looks.load(Ordering::Relaxed), looked, "a look costs a call");
            assert_eq!(engine.resumed.load(Ordering::Relaxed), u64::from(has_slept));
        }
    }

    /// A call that spins tries again, and ends at its time-out.
    #[test]
    fn udp_11_spinning_read_times_out() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        let engine = Arc::new(Moderated { spins: u64::MAX, ..Moderated::default() });
        state.set_busy_poll(Arc::clone(&engine) as _);
        let socket = Net(Arc::clone(&state)).bind(SocketAddr::new(own_address(0), 53)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert_eq!(socket.recv(&mut [0; 1]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let turns = engine.turns.load(Ordering::Relaxed);
        assert!(turns > 1);
        assert_eq!(engine.ended.load(Ordering::Relaxed), turns);
    }

    /// A thread that counted as waiting for ever would leave CPUs awake after each packet.
    #[test]
    fn exe_9_panicking_wait_ends() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        let engine = Arc::new(Moderated::default());
        state.set_busy_poll(Arc::clone(&engine) as _);
        let net = Net(state);
        catch_unwind(AssertUnwindSafe(|| net.wait(true, || 0, || panic!("as the test asks"))))
            .unwrap_err();
        assert_eq!(engine.ended.load(Ordering::Relaxed), 1);
    }

    /// Only the turns of this very thread would bring what it waits for.
    #[test]
    fn udp_11_cpu_never_sleeps_in_read() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        let engine = Arc::new(Moderated::default());
        state.set_busy_poll(Arc::clone(&engine) as _);
        let socket = Net(Arc::clone(&state)).bind(SocketAddr::new(own_address(0), 53)).unwrap();
        // Ends the wait that should not begin.
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let read = move |_: &mut _| {
            assert_eq!(socket.recv(&mut [0; 1]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        };
        let outcome = engine_of(&state).run_with(read).unwrap();
        assert!(outcome.errors.is_empty(), "{:?}", outcome.errors);
        assert_eq!(engine.turns.load(Ordering::Relaxed), 0, "no wait has begun");
    }

    /// A call returns though other sockets get packets without a gap.
    #[test]
    fn exe_9_timeout_ends_busy_polled_read() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        state.set_busy_poll(Arc::<PacketsForOthers>::default());
        let socket = Net(state).bind(SocketAddr::new(own_address(0), 53)).unwrap();
        socket.set_read_timeout(Some(PacketsForOthers::TURN)).unwrap();
        assert_eq!(socket.recv(&mut [0; 1]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    /// A wake-up that finds everything read leaves the descriptor armed: no reader does that again.
    #[test]
    fn udp_11_late_wake_up_arms_again() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        let wake = Arc::<Wake>::default();
        let binding = Binding::new(SocketId(0), SocketAddr::new(own_address(0), 53));
        let entry = state.bind(binding, 1 << 20, Arc::clone(&wake) as _).unwrap();
        let socket = Endpoint::new(state, entry, wake, None);
        socket.descriptor().unwrap();
        for _ in 0..3 {
            assert_eq!(socket.queue.refuse(), Enqueue::WakeReader);
            assert!(socket.queue.take_refusal(), "as a reader does before the CPU's wake-up");
            socket.queue.wake_reader();
        }
    }

    /// No CPU wakes the readers of a socket that is bound after the end of the run.
    #[test]
    fn udp_11_end_reaches_late_sockets() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        state.end();
        let wake = Arc::<Wake>::default();
        let binding = Binding::new(SocketId(0), SocketAddr::new(own_address(0), 53));
        let entry = state.bind(binding, 1 << 20, Arc::clone(&wake) as _).unwrap();
        let socket = Endpoint::new(state, entry, wake, None);
        let descriptor = socket.descriptor().unwrap();
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        assert_eq!(poll(&mut polled, Some(&Timespec::default())), Ok(1));
    }

    /// A socket is writable again once the CPU has memory whose send found none, whatever others have.
    #[test]
    fn udp_20_writable_once_senders_cpu_has_memory() {
        let queue = || vec![Box::new(Recording::default()) as _];
        let state = host(vec![queue(), queue()], NetConfig::TCP);
        let wake = Arc::<Wake>::default();
        let binding = Binding::new(SocketId(0), SocketAddr::new(own_address(0), 53));
        let entry = state.bind(binding, 1 << 20, Arc::clone(&wake) as _).unwrap();
        let socket = Endpoint::new(Arc::clone(&state), entry, wake, None);
        socket.options.is_nonblocking.store(true, Ordering::Relaxed);
        socket.descriptor().unwrap();
        let mut held = Vec::new();
        let mut transmitter = state.transmitter_of(CpuIndex(0));
        held.extend(std::iter::from_fn(|| transmitter.pool().allocate(1)));
        drop(transmitter);
        assert_eq!(state.send_room(), [false, true]);
        assert_eq!(
            socket.patience().wait(CpuIndex(0)).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        let watch = || Blocked::watch(&Arc::downgrade(&state));
        assert!((0..5).all(|_| watch()), "the other CPU's memory is of no use");
        held.into_iter().for_each(|frame| state.transmitter_of(CpuIndex(0)).pool().put(frame));
        assert!(!watch());
    }
}
