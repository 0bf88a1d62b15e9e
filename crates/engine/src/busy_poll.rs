//! Turns of a sleeping CPU by threads of the application, as the kernel's busy polling (`napi_busy_loop` in
//! net/core/dev.c).
//!
//! A CPU that sleeps lends its worker. A thread of the application that is about to wait for its sockets borrows the
//! worker and turns it: packets are received and delivered without waking another thread. After such a
//! wait, arriving packets wake the CPU's own thread at most once until a thread of the application sleeps again (as with
//! `irq_suspend_timeout`): it sleeps without its descriptors, unless other threads wait. A borrower that finds none lets packets wake it again before it waits itself.
//!
//! A CPU that other programs want also sleeps while the readers of its packets are behind, 100 µs at a time, and receives
//! in larger bursts: under overload, receiving what sockets have no room for would take the CPU from their readers
//! (receive livelock).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use forebay_rx::Handler;

use super::cpu_thread::{acting_as_cpu, is_cpu};
use super::queue::Activity;
use super::shared::EngineState;
use super::worker::{ThreadState, Worker};

/// Time from the end of a wait in which arriving packets do not wake the CPU's thread: the application is expected to
/// wait again before.
const SUSPEND_NS: u64 = 1_000_000;

/// Time after a borrower's turn that found packets in which the CPU's thread does not spin.
const IN_USE_NS: u64 = 10_000_000;

/// Turns of one borrower: a CPU with more work is woken.
const TURNS_MAX: u32 = 4;

/// Time by which the CPU may be late for a timer, as the kernel's threads are (`timer_slack_ns`). Times until the same
/// timer that were taken from two reads of the clock differ by less.
const TIMER_SLACK_NS: u64 = 50_000;

/// Turns by threads of the application that wait for packets.
pub trait BusyPoll: Send + Sync {
    /// Begins a wait: counts the calling thread as waiting, and turns the sleeping CPUs that poll queues. Returns true if
    /// packets were received. A caller that then sleeps all the same calls [`resume`](Self::resume).
    fn before_wait(&self) -> bool;

    /// True while a CPU sleeps to let readers catch up: the caller's sockets may be readable already.
    fn is_moderated(&self) -> bool;

    /// Lets arriving packets wake the CPUs' threads again.
    fn resume(&self);

    /// Ends the wait that [`before_wait`](Self::before_wait) began.
    fn after_wait(&self);

    /// Ends a wait that found something: for 1 ms, or until a thread waits again, arriving packets wake no CPU's
    /// thread. No effect while other threads wait.
    fn suspend(&self);
}

/// Packets that arrive while a CPU sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrivals {
    /// Wake-up of the CPU's thread, unless that is suspended.
    Wake,
    /// Wait for the end of the sleep, as readers are behind.
    Wait,
}

/// Worker of one CPU, which others may turn while the CPU sleeps.
pub(super) struct Loan<H> {
    shared: Arc<EngineState>,
    /// Index of the CPU in the engine.
    index: usize,
    lent: Mutex<Option<Lent<H>>>,
    /// True once the worker was lent: its CPU polls a queue.
    was_lent: AtomicBool,
    /// Time up to which arriving packets do not wake the CPU's thread; 0 if they do.
    suspended_until_ns: AtomicU64,
    /// True while the CPU's thread sleeps until that time, without the queues' descriptors.
    sleeps_suspended: AtomicBool,
    /// Time of the last turn of a borrower that found packets.
    used_ns: AtomicU64,
    /// True while arriving packets wait because readers are behind.
    is_moderated: AtomicBool,
}

/// Loans of all CPUs, by their indices.
pub(super) type Loans<H> = Arc<[Arc<Loan<H>>]>;

/// The loans of an engine, for threads of the application.
pub(super) struct Borrowers<H> {
    loans: Loans<H>,
    /// Number of threads that wait, or are about to.
    waiting: AtomicU32,
}

impl<H> Borrowers<H> {
    pub(super) fn new(loans: Loans<H>) -> Self {
        Self { loans, waiting: AtomicU32::new(0) }
    }
}

impl<H: Handler> BusyPoll for Borrowers<H> {
    fn before_wait(&self) -> bool {
        // First: a thread that ends its wait then leaves the CPUs awake for this one.
        let is_alone = self.waiting.fetch_add(1, Ordering::SeqCst) == 0;
        // A CPU's own thread turns its own.
        !is_cpu()
            && self.loans.iter().fold(false, |has_found, loan| loan.turn(is_alone) | has_found)
    }

    fn is_moderated(&self) -> bool {
        self.loans.iter().any(|loan| loan.is_moderated())
    }

    fn resume(&self) {
        self.loans.iter().for_each(|loan| loan.resume());
    }

    fn after_wait(&self) {
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    fn suspend(&self) {
        if is_cpu() || self.waiting.load(Ordering::SeqCst) > 0 {
            return;
        }
        self.loans.iter().for_each(|loan| loan.suspend());
        fence(Ordering::SeqCst); // pairs with the count in `before_wait`
        // A thread that begins to wait just now may have turned the CPUs before.
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.resume();
        }
    }
}

/// Worker of a CPU that sleeps.
struct Lent<H> {
    worker: Box<Worker<H>>,
    /// Time at which the CPU wakes by itself.
    until_ns: Option<u64>,
}

impl<H: Handler> Loan<H> {
    pub(super) fn new(shared: Arc<EngineState>, index: usize) -> Self {
        Self {
            shared,
            index,
            lent: Mutex::new(None),
            was_lent: AtomicBool::new(false),
            suspended_until_ns: AtomicU64::new(0),
            sleeps_suspended: AtomicBool::new(false),
            used_ns: AtomicU64::new(0),
            is_moderated: AtomicBool::new(false),
        }
    }

    /// Lends the worker, sleeps until the CPU has something to do, at most until `until_ns`, and takes the worker back.
    /// The CPU has announced that it sleeps on descriptors.
    pub(super) fn sleep(
        &self,
        worker: Box<Worker<H>>,
        until_ns: Option<u64>,
        arrivals: Arrivals,
    ) -> Box<Worker<H>> {
        self.is_moderated.store(arrivals == Arrivals::Wait, Ordering::Relaxed);
        let numbers = worker.descriptors().iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>();
        *self.lent() = Some(Lent { worker, until_ns });
        self.was_lent.store(true, Ordering::Relaxed);
        self.wait(until_ns, &numbers);
        self.is_moderated.store(false, Ordering::Relaxed);
        let lent = self.lent().take();
        lent.unwrap_or_else(|| unreachable!("borrowers leave it in its place")).worker
    }

    /// True once after a borrower's turn has panicked.
    pub(super) fn take_panic(&self) -> bool {
        let has_panicked = self.lent.is_poisoned();
        self.lent.clear_poison();
        has_panicked
    }

    /// Sleeps until a wake-up, until a descriptor is readable while packets are to wake the CPU, or the time is over.
    fn wait(&self, until_ns: Option<u64>, numbers: &[RawFd]) {
        let (waker, clock) = (self.shared.cpu_waker(self.index), &self.shared.clock);
        let mut now_ns = clock.now_ns();
        loop {
            self.sleeps_suspended.store(true, Ordering::Relaxed);
            // SeqCst: either a borrower that lets packets wake the CPU sees that it sleeps so, or this sees that they may.
            fence(Ordering::SeqCst);
            let suspended = Some(self.suspended_until_ns()).filter(|&until_ns| until_ns > now_ns);
            let is_suspended = suspended.is_some() || self.is_moderated();
            self.sleeps_suspended.store(is_suspended, Ordering::Relaxed);
            let readable = if is_suspended { &[] } else { numbers };
            let wake_ns = until_ns.into_iter().chain(suspended).min();
            let at_most_ns = wake_ns.map(|wake_ns| wake_ns.saturating_sub(now_ns));
            waker.wait_by_number(at_most_ns.map(Duration::from_nanos), readable);
            self.sleeps_suspended.store(false, Ordering::Relaxed);
            now_ns = clock.now_ns();
            let is_over = wake_ns.is_some_and(|wake_ns| wake_ns <= now_ns);
            if is_over || !waker.is_asleep() || self.suspended_until_ns() <= now_ns {
                return;
            }
        }
    }

    /// Records that a thread of the application ends a wait, and is expected to wait again.
    fn suspend(&self) {
        if !self.was_lent.load(Ordering::Relaxed) {
            return;
        }
        let now_ns = self.shared.clock.now_ns();
        // Others that end a wait do not make it longer: only a turn receives what came meanwhile.
        if self.suspended_until_ns() <= now_ns {
            self.suspended_until_ns.store(now_ns.saturating_add(SUSPEND_NS), Ordering::Relaxed);
        }
    }

    /// Lets a suspension begin anew, after a turn that has received what came meanwhile.
    fn prolong(&self) {
        if self.suspended_until_ns() > 0 {
            let used_ns = self.used_ns.load(Ordering::Relaxed);
            self.suspended_until_ns.store(used_ns + SUSPEND_NS, Ordering::Relaxed);
        }
    }

    /// True if a borrower has found packets a short time ago.
    pub(super) fn is_in_use(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.used_ns.load(Ordering::Relaxed)) < IN_USE_NS
    }

    /// Turns the CPU on the calling thread if it sleeps; returns true if that found packets. Those that arrive from now
    /// on wake the CPU, unless there were some and no other thread waits.
    fn turn(&self, is_alone: bool) -> bool {
        if !self.was_lent.load(Ordering::Relaxed) {
            return false;
        }
        let turned = self.try_turn();
        if turned.has_found && is_alone {
            self.prolong();
        } else {
            self.resume();
        }
        if turned.must_wake {
            self.shared.cpu_waker(self.index).wake();
        }
        turned.has_found
    }

    fn try_turn(&self) -> Turned {
        let mut lent = match self.lent.try_lock() {
            Ok(lent) => lent,
            // The CPU's own thread takes back a worker whose turn has panicked.
            Err(TryLockError::Poisoned(_)) => return Turned { has_found: false, must_wake: true },
            // Another thread turns it, or its own takes it back.
            Err(TryLockError::WouldBlock) => return Turned::default(),
        };
        match lent.as_mut() {
            Some(lent) if self.may_turn(lent) => acting_as_cpu(|| self.turn_lent(lent)),
            _ => Turned::default(),
        }
    }

    /// False if the CPU's own thread was woken, which takes the worker back, or must end.
    fn may_turn(&self, lent: &Lent<H>) -> bool {
        self.shared.cpu_waker(self.index).is_asleep() && lent.worker.life != ThreadState::Terminated
    }

    fn turn_lent(&self, Lent { worker, until_ns }: &mut Lent<H>) -> Turned {
        let mut now_ns = self.shared.clock.now_ns();
        let (mut has_found, mut activity) = (false, Activity::Worked(0));
        for _ in 0..TURNS_MAX {
            (activity, now_ns) = worker.timed_turn(now_ns);
            if worker.life == ThreadState::Terminated || !matches!(activity, Activity::Worked(_)) {
                break;
            }
            has_found = true;
            // Unreleased packets take up room until the CPU's thread, which reads them, comes back.
            if worker.delivery.has_unreleased() {
                break;
            }
        }
        if has_found {
            self.used_ns.store(now_ns, Ordering::Relaxed);
        }
        Turned { has_found, must_wake: must_wake(worker, activity, *until_ns, now_ns) }
    }

    /// Lets packets wake the CPU's thread, which is woken if it sleeps whatever arrives.
    fn resume(&self) {
        self.suspended_until_ns.store(0, Ordering::Relaxed);
        self.is_moderated.store(false, Ordering::Relaxed);
        fence(Ordering::SeqCst); // pairs with that in `wait`
        if self.sleeps_suspended.load(Ordering::Relaxed) {
            self.shared.cpu_waker(self.index).wake();
        }
    }

    fn is_moderated(&self) -> bool {
        self.is_moderated.load(Ordering::Relaxed)
    }

    fn suspended_until_ns(&self) -> u64 {
        self.suspended_until_ns.load(Ordering::Relaxed)
    }

    fn lent(&self) -> MutexGuard<'_, Option<Lent<H>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Result of a borrower's turns.
#[derive(Clone, Copy, Default)]
struct Turned {
    has_found: bool,
    /// True if the CPU's own thread has something to do.
    must_wake: bool,
}

/// True if the CPU has to do something before the time at which it wakes by itself, other than to receive packets that
/// arrive from now on.
fn must_wake<H: Handler>(
    worker: &mut Worker<H>,
    activity: Activity,
    until_ns: Option<u64>,
    now_ns: u64,
) -> bool {
    let Activity::IdleUntil(due_ns) = activity else { return true };
    let timer_ns = worker.handler.sleep_max_ns().map(|timer_ns| now_ns.saturating_add(timer_ns));
    let due_ns = due_ns.into_iter().chain(timer_ns).min();
    let late_ns = due_ns.map(|due_ns| due_ns.saturating_add(TIMER_SLACK_NS));
    let is_earlier =
        late_ns.is_some_and(|late_ns| until_ns.is_none_or(|until_ns| late_ns < until_ns));
    // Unreleased packets are read, and declared processed, by the CPU's thread.
    is_earlier || worker.has_pending_work() || worker.delivery.has_unreleased()
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread::{self, JoinHandle, ThreadId};

    use forebay_buf::Pool;
    use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
    use forebay_rx::delivery::Batch;
    use forebay_rx::packet::Arrival;
    use forebay_rx::parse::Link;
    use forebay_rx::{CpuId, Packet, Source};
    use forebay_sys::Event;
    use forebay_sys::clock::Clock;
    use forebay_sys::cpu_list::CpuList;

    use super::*;
    use crate::cpu_thread::CpuThread;
    use crate::idle::{SPIN_ALWAYS_NS, SPIN_MAX_NS};
    use crate::knobs::Change;
    use crate::{Config, Engine, Stopper};

    /// Frames that a test puts into a source.
    #[derive(Default)]
    struct Fed {
        frames: AtomicU64,
        /// Number of polls.
        polls: AtomicU64,
        /// Number of frames handled, and the threads that did.
        handled: Mutex<(u64, Vec<ThreadId>)>,
        /// True while a handler is to panic.
        panics: AtomicBool,
        /// True while readers are behind.
        are_behind: AtomicBool,
    }

    /// Source with a descriptor, which only the test makes readable.
    struct FedSource {
        fed: Arc<Fed>,
        event: Arc<Event>,
        taken: u64,
    }

    impl Source for FedSource {
        fn poll(
            &mut self,
            ask: PollRequest,
            pool: &mut Pool,
            burst: &mut Burst,
        ) -> Result<Polled, SourceError> {
            self.event.clear();
            self.fed.polls.fetch_add(1, Ordering::Relaxed);
            while self.taken < self.fed.frames.load(Ordering::Acquire) && burst.len() < ask.max {
                let Some(mut frame) = pool.allocate(60) else { break };
                frame.set_len(60);
                frame.data_mut()[..8].copy_from_slice(&self.taken.to_be_bytes());
                let arrival = Arrival::of_frame(self.taken);
                burst.packets.push(Packet::received(frame, arrival, 60, Link::Ethernet));
                self.taken += 1;
            }
            Ok(match burst.is_empty() {
                true if ask.is_last => Polled::Exhausted,
                false if burst.len() == ask.max => Polled::Ready,
                _ => Polled::Idle,
            })
        }

        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            Some(self.event.descriptor())
        }
    }

    /// Handler that checks the order of the frames.
    struct Ordered(Arc<Fed>);

    impl Handler for Ordered {
        fn handle(&mut self, batch: &mut Batch<'_>) {
            assert!(!self.0.panics.swap(false, Ordering::Relaxed), "as the test asks");
            let mut handled = self.0.handled.lock().unwrap();
            for packet in batch.packets.iter() {
                assert_eq!(packet.frame.data()[..8], handled.0.to_be_bytes(), "out of order");
                handled.0 += 1;
            }
            handled.1.push(thread::current().id());
        }

        fn are_readers_behind(&mut self) -> bool {
            self.0.are_behind.load(Ordering::Relaxed)
        }
    }

    /// A running engine of one CPU, whose worker is lent.
    struct Rig {
        fed: Arc<Fed>,
        event: Arc<Event>,
        state: Arc<EngineState>,
        busy_poll: Arc<dyn BusyPoll>,
        stopper: Stopper,
        run: JoinHandle<u64>,
    }

    impl Rig {
        fn start() -> Self {
            Self::start_with(CpuThread::turn_to_the_end)
        }

        fn start_with(
            application: impl Fn(&mut CpuThread<Ordered>) + Send + Sync + 'static,
        ) -> Self {
            let (fed, event) = (Arc::<Fed>::default(), Arc::new(Event::new().unwrap()));
            let source = FedSource { fed: Arc::clone(&fed), event: Arc::clone(&event), taken: 0 };
            let config =
                Config { cpus: CpuList::new([CpuId(0)]), spin_max_ns: 0, ..Config::live() };
            let handler = |_| Ordered(Arc::clone(&fed));
            let sources: Vec<Box<dyn Source>> = vec![Box::new(source)];
            let mut engine = Engine::build(&config, sources, Clock::machine(), handler).unwrap();
            let busy_poll = engine.busy_poll();
            let (state, stopper) = (engine.state(), engine.stopper());
            let run = thread::spawn(move || engine.run_with(application).unwrap().cpus[0].replaced);
            Self { fed, event, state, busy_poll, stopper, run }
        }

        /// Waits until the CPU's thread sleeps, or is about to.
        fn until_asleep(&self) {
            while !self.state.has_started() || !self.state.cpu_waker(0).is_asleep() {
                thread::yield_now();
            }
        }

        fn put(&self, frames: u64) {
            self.fed.frames.fetch_add(frames, Ordering::Release);
        }

        fn handled(&self) -> u64 {
            self.fed.handled.lock().unwrap().0
        }

        fn until_handled(&self, frames: u64) {
            while self.handled() < frames {
                thread::yield_now();
            }
        }

        /// Puts frames in without a signal, and turns the CPU until they are handled.
        fn handle_here(&self, frames: u64) {
            let before = self.handled();
            self.put(frames);
            while self.handled() < before + frames {
                self.busy_poll.before_wait();
                self.busy_poll.after_wait();
                thread::yield_now();
            }
        }

        /// Ends the run, and returns how often the CPU got a new thread.
        fn end(self) -> u64 {
            self.stopper.stop();
            self.run.join().unwrap()
        }
    }

    /// A CPU that the test turns, and what its threads and the application share.
    fn lone_cpu(spin_max_ns: u64, fed: &Arc<Fed>) -> (CpuThread<Ordered>, impl BusyPoll + 'static) {
        let event = Arc::new(Event::new().unwrap());
        let source = FedSource { fed: Arc::clone(fed), event, taken: 0 };
        let config = Config { cpus: CpuList::new([CpuId(0)]), spin_max_ns, ..Config::live() };
        let handler = |_| Ordered(Arc::clone(fed));
        let sources: Vec<Box<dyn Source>> = vec![Box::new(source)];
        let mut engine =
            Engine::build(&config, sources, Clock::virtual_at_zero(), handler).unwrap();
        let loan = Arc::new(Loan::new(engine.state(), 0));
        let borrowers = Borrowers::new(Arc::new([Arc::clone(&loan)]));
        (CpuThread::new(Box::new(engine.workers.remove(0)), Some(loan)), borrowers)
    }

    #[test]
    fn exe_9_contended_cpu_lets_readers_catch_up() {
        for (are_behind, is_contended, frames, spin_max_ns, sleeps) in [
            (true, true, 3, SPIN_MAX_NS, true),
            (true, true, 63, SPIN_MAX_NS, true),
            (true, true, 200, SPIN_MAX_NS, false), // more are pending
            (true, true, 3, SPIN_ALWAYS_NS, false),
            (true, false, 3, SPIN_MAX_NS, false),
            (false, true, 3, SPIN_MAX_NS, false),
        ] {
            let fed = Arc::<Fed>::default();
            let (mut cpu, _borrowers) = lone_cpu(spin_max_ns, &fed);
            cpu.set_contended(is_contended);
            fed.are_behind.store(are_behind, Ordering::Relaxed);
            fed.frames.store(frames, Ordering::Relaxed);
            let mut polls = Vec::new();
            cpu.turn_until(|| {
                polls.push(fed.polls.load(Ordering::Relaxed));
                polls.len() >= 2
            });
            // It is asked at the end of each turn, and before each sleep.
            let expected = if sleeps { [1, 1] } else { [1, 2] };
            assert_eq!(
                polls[..2],
                expected,
                "{:?}",
                (are_behind, is_contended, frames, spin_max_ns)
            );
        }
    }

    #[test]
    fn rfs_6_own_reader_declares_packets_processed() {
        let fed = Arc::<Fed>::default();
        let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, &fed);
        // (frames until then, turns until the caller has something to read, whether it was given packets)
        for (frames, turns, has_some) in [(3, 1, true), (3, 1, false), (6, 2, false), (9, 1, true)]
        {
            fed.frames.store(frames, Ordering::Relaxed);
            let mut left = turns;
            cpu.turn_until(|| {
                left -= 1;
                left == 0
            });
            assert_eq!(fed.handled.lock().unwrap().0, frames);
            assert_eq!(cpu.worker().delivery.has_unreleased(), has_some, "{frames} frames");
        }
        cpu.turn_once();
        assert!(!cpu.worker().delivery.has_unreleased(), "the caller has come back");
    }

    /// A CPU whose thread reads what it delivers.
    fn inline_cpu(fed: &Arc<Fed>) -> CpuThread<Ordered> {
        let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, fed);
        cpu.turn_until(|| true);
        cpu
    }

    fn handled(fed: &Fed) -> u64 {
        fed.handled.lock().unwrap().0
    }

    #[test]
    fn rfs_6_packets_wait_for_sent_answers() {
        let fed = Arc::<Fed>::default();
        let mut cpu = inline_cpu(&fed);
        fed.frames.store(3, Ordering::Relaxed);
        cpu.turn_until(|| true);
        let (mut turns, mut looks) = (0, 0);
        let is_ready = || {
            turns += 1;
            turns == 3
        };
        let has_answered = || {
            looks += 1;
            false
        };
        cpu.turn_until_answered(is_ready, has_answered);
        assert_eq!((looks, cpu.worker().delivery.has_unreleased()), (3, true));
        cpu.turn_until_answered(|| true, || true);
        assert!(!cpu.worker().delivery.has_unreleased());
    }

    #[test]
    fn promise_2_run_ends_behind_grown_ring() {
        let fed = Arc::<Fed>::default();
        let mut cpu = inline_cpu(&fed);
        let state = Arc::clone(&cpu.worker().shared);
        // Turns by a borrower, before and after the ring has grown; then the source ends.
        fed.frames.store(3, Ordering::Relaxed);
        cpu.worker().timed_turn(0);
        state.change(&Change::NetdevMaxBacklog(3000)).unwrap();
        fed.frames.store(6, Ordering::Relaxed);
        cpu.worker().timed_turn(0);
        state.stop();
        cpu.worker().timed_turn(0);
        assert!(!cpu.worker().has_ended(), "the larger ring has three");
        while cpu.turn_until(|| true) {}
        assert_eq!(handled(&fed), 6);
    }

    #[test]
    fn promise_2_borrower_leaves_room_for_reader() {
        let fed = Arc::<Fed>::default();
        let mut cpu = inline_cpu(&fed);
        let state = Arc::clone(&cpu.worker().shared);
        state.change(&Change::NetdevMaxBacklog(63)).unwrap();
        fed.frames.store(200, Ordering::Relaxed);
        let loan = Loan::new(state, 0);
        for round in 1..=3 {
            let mut worker = cpu.into_worker();
            let mut lent = Lent { worker, until_ns: None };
            assert!(loan.turn_lent(&mut lent).must_wake);
            worker = lent.worker;
            assert_eq!((handled(&fed), worker.delivery.has_unreleased()), (round * 64, true));
            worker.delivery.release(); // the reader has come back
            cpu = CpuThread::new(worker, None);
        }
    }

    #[test]
    fn rfs_6_dead_threads_release_nothing_unread() {
        let fed = Arc::<Fed>::default();
        let mut cpu = inline_cpu(&fed);
        fed.frames.store(3, Ordering::Relaxed);
        cpu.worker().timed_turn(0);
        fed.panics.store(true, Ordering::Relaxed);
        fed.frames.store(4, Ordering::Relaxed);
        let turn = AssertUnwindSafe(|| cpu.worker().timed_turn(0));
        catch_unwind(turn).unwrap_err();
        cpu.worker().recover(Some("as the test asks".into()));
        assert!(cpu.worker().delivery.has_unreleased(), "three packets wait in the socket");
        cpu.turn_until(|| true);
        assert!(!cpu.worker().delivery.has_unreleased(), "the new thread has read them");
    }

    #[test]
    fn rfs_6_killed_batch_is_not_processed() {
        let fed = Arc::<Fed>::default();
        let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, &fed);
        cpu.worker().shared.change(&Change::Kill(CpuId(0))).unwrap();
        fed.frames.store(3, Ordering::Relaxed);
        for _ in 0..2 {
            // The application, then what a thread does after it.
            cpu.turn_to_the_end();
            assert_eq!(cpu.worker().life, ThreadState::Terminated);
            assert!(cpu.worker().delivery.has_unreleased());
        }
    }

    #[test]
    fn rfs_6_borrower_wakes_cpu_that_reads() {
        let looks = Arc::new(AtomicU64::new(0));
        let looked = Arc::clone(&looks);
        let rig = Rig::start_with(move |cpu| {
            cpu.turn_until(|| {
                looked.fetch_add(1, Ordering::Relaxed);
                false
            });
        });
        for _ in 0..20 {
            rig.until_asleep();
            let before = looks.load(Ordering::Relaxed);
            rig.handle_here(1);
            while looks.load(Ordering::Relaxed) == before {
                thread::yield_now();
            }
        }
        rig.end();
    }

    #[test]
    fn exe_9_threads_learn_that_readers_are_behind() {
        let fed = Arc::<Fed>::default();
        let (mut cpu, borrowers) = lone_cpu(SPIN_MAX_NS, &fed);
        cpu.set_contended(true);
        fed.are_behind.store(true, Ordering::Relaxed);
        let has_seen = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&has_seen);
        let watcher = thread::spawn(move || {
            while !borrowers.is_moderated() {
                thread::yield_now();
            }
            seen.store(true, Ordering::Relaxed);
            borrowers
        });
        fed.frames.store(1, Ordering::Relaxed);
        cpu.turn_until(|| {
            fed.frames.fetch_add(1, Ordering::Relaxed);
            has_seen.load(Ordering::Relaxed)
        });
        let borrowers = watcher.join().unwrap();
        assert!(!borrowers.is_moderated(), "only while the CPU sleeps");
    }

    #[test]
    fn exe_9_waiting_thread_receives_for_itself() {
        let rig = Rig::start();
        for round in 1..=100 {
            rig.until_asleep();
            rig.handle_here(3);
            assert_eq!(rig.handled(), round * 3);
        }
        // Nothing has woken the CPU's thread for the first.
        assert_eq!(rig.fed.handled.lock().unwrap().1[0], thread::current().id());
        rig.end();
    }

    #[test]
    fn exe_9_packets_wake_cpu_after_last_borrower() {
        let rig = Rig::start();
        for round in 0..200_u64 {
            rig.until_asleep();
            // Arriving packets then do not wake the CPU, until a turn finds none or a thread sleeps.
            (0..round % 4).for_each(|_| rig.handle_here(1));
            if round % 3 == 0 {
                rig.busy_poll.suspend();
            }
            if round % 2 == 0 {
                rig.busy_poll.before_wait();
                rig.busy_poll.resume();
                rig.busy_poll.after_wait();
            }
            let before = rig.handled();
            rig.put(1);
            rig.event.signal();
            // By the CPU's own thread, since this one turns it no more.
            rig.until_handled(before + 1);
        }
        rig.end();
    }

    #[test]
    fn exe_9_panic_of_borrower_is_the_handlers() {
        let rig = Rig::start();
        rig.until_asleep();
        rig.fed.panics.store(true, Ordering::Relaxed);
        rig.put(1);
        let panicking = AssertUnwindSafe(|| {
            while rig.fed.panics.load(Ordering::Relaxed) {
                rig.busy_poll.before_wait();
                thread::yield_now();
            }
        });
        catch_unwind(panicking).unwrap_err();
        assert!(!is_cpu());
        // The frame is lost with the batch; the CPU goes on by a new thread.
        rig.busy_poll.before_wait();
        rig.fed.handled.lock().unwrap().0 = 1;
        rig.put(1);
        rig.event.signal();
        rig.until_handled(2);
        assert_eq!(rig.end(), 1);
    }

    #[test]
    fn exe_9_borrowers_and_cpu_keep_order() {
        let rig = Rig::start();
        let is_over = Arc::new(AtomicBool::new(false));
        let borrower = || {
            let (busy_poll, is_over) = (Arc::clone(&rig.busy_poll), Arc::clone(&is_over));
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    busy_poll.before_wait();
                    busy_poll.after_wait();
                    busy_poll.suspend();
                    thread::yield_now();
                }
            })
        };
        let borrowers = [borrower(), borrower()];
        let frames = 20_000;
        for frame in 0..frames {
            rig.put(1);
            if frame % 3 == 0 {
                rig.event.signal();
            }
            if frame % 64 == 0 {
                thread::yield_now();
            }
        }
        rig.event.signal();
        rig.until_handled(frames);
        is_over.store(true, Ordering::Relaxed);
        borrowers.into_iter().for_each(|borrower| borrower.join().unwrap());
        rig.end();
    }
}
