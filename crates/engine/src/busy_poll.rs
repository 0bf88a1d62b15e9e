//! Turns of a sleeping CPU by threads of the application, as the kernel's busy polling (`napi_busy_loop` in
//! net/core/dev.c).
//!
//! A CPU that sleeps lends its worker. A thread of the application that is about to wait for its sockets borrows the
//! worker and turns it: packets are received and delivered without waking another thread. After such a
//! wait, arriving packets wake the CPU's own thread at most once until a thread of the application sleeps again (as with
//! `irq_suspend_timeout`): it sleeps without its descriptors, unless other threads wait. A borrower that finds none spins as
//! the CPU's thread would, and then lets packets wake that one again before it waits itself.
//!
//! A thread of the application that sends borrows the worker of a CPU in such use, too, and transmits: the CPU's own would take a
//! CPU from the application for each send.
//!
//! A CPU that other programs want also sleeps while the readers of its packets are behind, 100 µs at a time, and receives
//! in larger bursts: under overload, receiving what sockets have no room for would take the CPU from their readers
//! (receive livelock).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use forebay_rx::Handler;
use forebay_sys as sys;

use super::cpu_thread::{acting_as_cpu, is_cpu};
use super::idle::{Idle, SPIN_ALWAYS_NS, SPIN_MAX_NS};
use super::queue::{Activity, Queue};
use super::shared::EngineState;
use super::worker::{ThreadState, Worker};

/// Time from the end of a wait in which arriving packets do not wake the CPU's thread: the application is expected to
/// wait again before.
const SUSPEND_NS: u64 = 1_000_000;

/// Time after a borrower's turn that found packets in which the CPU's thread does not spin.
const IN_USE_NS: u64 = 10_000_000;

/// Time after the attempt of a borrower that spins and finds the CPU awake, in which the CPU's thread does not spin: the borrower
/// tries again.
const WANTED_NS: u64 = 50_000;

/// Turns of one borrower: a CPU with more work is woken.
const TURNS_MAX: u32 = 4;

/// Time by which the CPU may be late for a timer, as the kernel's threads are (`timer_slack_ns`). Times until the same
/// timer that were taken from two reads of the clock differ by less.
const TIMER_SLACK_NS: u64 = 50_000;

/// Turns by threads of the application that wait for packets.
pub trait BusyPoll: Send + Sync {
    /// Begins a wait: counts the calling thread as waiting, and turns the sleeping CPUs that poll queues. A caller that
    /// sleeps although this returns another value than [`Arrived::Nothing`] calls [`resume`](Self::resume) first. A wait
    /// whose turns panic has ended.
    fn before_wait(&self) -> Arrived;

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

/// Transmission for a CPU that sleeps, by the thread that has queued the packets. Where the application's threads turn the CPU
/// anyway, waking its own for each send costs more than the send.
pub(super) trait TransmitLent: Send + Sync {
    /// Transmits what is queued for the CPU, if it sleeps and a borrower has found packets a short time ago.
    fn transmit(&self) -> Transmitted;
}

/// Outcome of such a transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Transmitted {
    /// All packets that the caller has queued.
    All,
    /// Not all of them, or their frames have not come back: the CPU is to be woken.
    InPart,
}

/// Outcome of the turns before a wait.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Arrived {
    /// No packets. Those that arrive from now on wake the CPU.
    Nothing,
    /// No packets yet, or the CPU's own thread is about to deliver some. The last pauses were short: the caller looks for what
    /// it waits for, and begins the wait again instead of sleeping.
    Soon,
    /// Packets, which the caller's sockets may have.
    Packets,
}

/// State of a CPU's thread that is awake, or that arriving packets wake.
const WAKEABLE: u8 = 0;
/// State before a sleep, until the thread knows which of the two others it is.
const UNDECIDED: u8 = 1;
/// State of a sleep without the queues' descriptors, until the end of a suspension that the thread has read, at the latest.
const SUSPENDED: u8 = 2;

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
    /// State of the CPU's thread: [`WAKEABLE`], [`UNDECIDED`] or [`SUSPENDED`].
    sleep_state: AtomicU8,
    /// Time of the last turn of a borrower that found packets.
    used_ns: AtomicU64,
    /// Time at which a borrower that spins last found the CPU awake.
    wanted_ns: AtomicU64,
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
    /// Pauses of the thread that waits alone. Another thread's preemptions may be taken for this one's: it spins for a
    /// shorter time then.
    idle: Mutex<Idle>,
}

impl<H> Borrowers<H> {
    pub(super) fn new(loans: Loans<H>) -> Self {
        let spin_max_ns = loans.first().map_or(0, |loan| loan.shared.spin_max_ns);
        // Time-outs and signals end a wait only after its spin.
        let idle = Mutex::new(Idle::new(spin_max_ns.min(SPIN_MAX_NS)));
        Self { loans, waiting: AtomicU32::new(0), idle }
    }

    /// True if the calling thread, which waits alone, spins rather than sleeps.
    fn should_spin(&self) -> bool {
        let Some(now_ns) = self.now_ns() else { return false };
        let mut idle = self.idle();
        idle.look(now_ns, sys::preemptions);
        !idle.should_sleep(now_ns, false)
    }

    /// Records the end of a pause.
    fn end_pause(&self) {
        if let Some(now_ns) = self.now_ns() {
            self.idle().worked(now_ns);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time, if CPUs are lent.
    fn now_ns(&self) -> Option<u64> {
        let mut lent = self.loans.iter().filter(|loan| loan.was_lent.load(Ordering::Relaxed));
        lent.next().map(|loan| loan.shared.clock.now_ns())
    }
}

impl<H: Handler> BusyPoll for Borrowers<H> {
    fn before_wait(&self) -> Arrived {
        // First: a thread that ends its wait then leaves the CPUs awake for this one.
        let is_alone = self.waiting.fetch_add(1, Ordering::SeqCst) == 0;
        fence(Ordering::SeqCst); // pairs with that in `suspend`
        // A CPU's own thread turns its own.
        if is_cpu() {
            return Arrived::Nothing;
        }
        let counted = OnPanic(|| self.after_wait());
        let ahead = match is_alone {
            true if self.should_spin() => Ahead::Spin,
            true => Ahead::Sleep,
            false => Ahead::Others,
        };
        let of_each = self.loans.iter().map(|loan| loan.turn(ahead));
        let arrived = of_each.fold(Arrived::Nothing, Arrived::max);
        counted.disarm();
        if arrived == Arrived::Packets {
            self.end_pause();
        }
        arrived
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
        self.end_pause();
        self.loans.iter().for_each(|loan| loan.suspend());
        fence(Ordering::SeqCst); // pairs with that in `before_wait`
        // A thread that begins to wait just now may have turned the CPUs before.
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.resume();
        }
    }
}

/// Continuation after a borrower's turn that finds no packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ahead {
    /// Another turn of this thread, which waits alone.
    Spin,
    /// Sleep of this thread, which waits alone.
    Sleep,
    /// Sleep of this thread, beside others that wait.
    Others,
}

/// Action for when a panic unwinds past this value.
struct OnPanic<F: Fn()>(F);

impl<F: Fn()> OnPanic<F> {
    fn disarm(self) {
        std::mem::forget(self);
    }
}

impl<F: Fn()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        (self.0)();
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
            sleep_state: AtomicU8::new(WAKEABLE),
            used_ns: AtomicU64::new(0),
            wanted_ns: AtomicU64::new(0),
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
            self.sleep_state.store(UNDECIDED, Ordering::Relaxed);
            // SeqCst: either a borrower that lets packets wake the CPU sees that it sleeps so, or this sees that they may.
            fence(Ordering::SeqCst);
            let suspended = Some(self.suspended_until_ns()).filter(|&until_ns| until_ns > now_ns);
            let is_suspended = suspended.is_some() || self.is_moderated();
            let state = if is_suspended { SUSPENDED } else { WAKEABLE };
            self.sleep_state.store(state, Ordering::Relaxed);
            let readable = if is_suspended { &[] } else { numbers };
            let wake_ns = until_ns.into_iter().chain(suspended).min();
            let at_most_ns = wake_ns.map(|wake_ns| wake_ns.saturating_sub(now_ns));
            waker.wait_by_number(at_most_ns.map(Duration::from_nanos), readable);
            self.sleep_state.store(WAKEABLE, Ordering::Relaxed);
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

    /// Lets the suspension until `until_ns` begin anew, after a turn that has received what came meanwhile. No effect if
    /// another thread has ended it.
    fn prolong(&self, until_ns: u64) {
        if until_ns > 0 {
            let later_ns = self.used_ns.load(Ordering::Relaxed) + SUSPEND_NS;
            let until = &self.suspended_until_ns;
            let _ =
                until.compare_exchange(until_ns, later_ns, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// True if a borrower has found packets a short time ago.
    fn is_in_use(&self, now_ns: u64) -> bool {
        let used_ns = self.used_ns.load(Ordering::Relaxed);
        used_ns > 0 && now_ns.saturating_sub(used_ns) < IN_USE_NS
    }

    /// True if borrowers turn the CPU while it sleeps, or try to: its thread then sleeps instead of spinning, unless it never
    /// sleeps.
    pub(super) fn is_sought(&self, now_ns: u64) -> bool {
        let wanted_ns = self.wanted_ns.load(Ordering::Relaxed);
        let is_wanted = wanted_ns > 0 && now_ns.saturating_sub(wanted_ns) < WANTED_NS;
        self.is_in_use(now_ns) || is_wanted && self.shared.spin_max_ns != SPIN_ALWAYS_NS
    }

    /// Turns the CPU on the calling thread if it sleeps. Packets that arrive from now on wake the CPU, unless this thread
    /// waits alone, and there were some or it spins.
    fn turn(&self, ahead: Ahead) -> Arrived {
        if !self.was_lent.load(Ordering::Relaxed) {
            return Arrived::Nothing;
        }
        // The CPU's own thread may have no other reason to look: the source's descriptor has been emptied.
        let woken = OnPanic(|| self.wake());
        let turned = self.try_turn(ahead);
        woken.disarm();
        let arrived = match turned.has_found {
            true => Arrived::Packets,
            false if ahead == Ahead::Spin => Arrived::Soon,
            false => Arrived::Nothing,
        };
        match arrived {
            Arrived::Packets if ahead != Ahead::Others => self.prolong(self.suspended_until_ns()),
            Arrived::Soon => {}
            Arrived::Packets | Arrived::Nothing => self.resume(),
        }
        // A thread that sleeps until the end of a suspension is back in time, even if no borrower is.
        let is_early = turned.needed == Needed::Soon && self.is_suspended();
        if turned.needed != Needed::Nothing && !is_early {
            self.wake();
        }
        arrived
    }

    fn try_turn(&self, ahead: Ahead) -> Turned {
        let mut lent = match self.lent.try_lock() {
            Ok(lent) => lent,
            // The CPU's own thread takes back a worker whose turn has panicked.
            Err(TryLockError::Poisoned(_)) => {
                return Turned { has_found: false, needed: Needed::Now };
            }
            // Another thread turns it, or its own takes it back.
            Err(TryLockError::WouldBlock) => return Turned::default(),
        };
        match lent.as_mut() {
            Some(lent) if self.may_turn(lent) => acting_as_cpu(|| self.turn_lent(lent)),
            _ => {
                if ahead == Ahead::Spin {
                    self.wanted_ns.store(self.shared.clock.now_ns(), Ordering::Relaxed);
                }
                Turned::default()
            }
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
        Turned { has_found, needed: Needed::after(worker, activity, *until_ns, now_ns) }
    }

    /// Lets packets wake the CPU's thread, which is woken if it sleeps whatever arrives.
    fn resume(&self) {
        self.suspended_until_ns.store(0, Ordering::Relaxed);
        self.is_moderated.store(false, Ordering::Relaxed);
        fence(Ordering::SeqCst); // pairs with that in `wait`
        if self.sleep_state.load(Ordering::Relaxed) != WAKEABLE {
            self.wake();
        }
    }

    fn wake(&self) {
        self.shared.cpu_waker(self.index).wake();
    }

    /// True if the CPU's thread sleeps until the end of a suspension at the latest.
    fn is_suspended(&self) -> bool {
        self.sleep_state.load(Ordering::Relaxed) == SUSPENDED
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

impl<H: Handler> TransmitLent for Loan<H> {
    fn transmit(&self) -> Transmitted {
        let now_ns = self.shared.clock.now_ns();
        if is_cpu() || !self.is_in_use(now_ns) {
            return Transmitted::InPart;
        }
        let woken = OnPanic(|| self.wake());
        let transmitted = self.try_transmit(now_ns);
        woken.disarm();
        transmitted
    }
}

impl<H: Handler> Loan<H> {
    fn try_transmit(&self, began_ns: u64) -> Transmitted {
        // Another thread that turns it may have looked before the packets came. The CPU's own takes it back.
        let Ok(mut lent) = self.lent.try_lock() else { return Transmitted::InPart };
        let Some(lent) = lent.as_mut().filter(|lent| self.may_turn(lent)) else {
            return Transmitted::InPart;
        };
        let Lent { worker, .. } = lent;
        worker.transmit(began_ns);
        let has_more = worker.queues.iter_mut().any(Queue::has_unsent);
        let is_sending = worker.queues.iter().any(Queue::is_sending);
        // A thread that sleeps until the end of a suspension is back in time for frames that are on their way.
        if has_more || is_sending && !self.is_suspended() {
            return Transmitted::InPart;
        }
        Transmitted::All
    }
}

/// Result of a borrower's turns.
#[derive(Clone, Copy, Default)]
struct Turned {
    has_found: bool,
    needed: Needed,
}

/// Turn that a CPU needs next, other than for packets that arrive from now on.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Needed {
    /// None before the time at which it wakes by itself.
    #[default]
    Nothing,
    /// By any thread, as for packets that arrive.
    Soon,
    /// By the CPU's own thread.
    Now,
}

impl Needed {
    fn after<H: Handler>(
        worker: &mut Worker<H>,
        activity: Activity,
        until_ns: Option<u64>,
        now_ns: u64,
    ) -> Self {
        // Unreleased packets are read, and declared processed, by the CPU's thread.
        if worker.delivery.has_unreleased() || worker.life == ThreadState::Terminated {
            return Self::Now;
        }
        let due_ns = match activity {
            Activity::Worked(_) => return Self::Soon,
            Activity::IdleUntil(due_ns) if !worker.has_pending_work() => due_ns,
            _ => return Self::Now,
        };
        let sleep_ns = worker.handler.sleep_max_ns();
        let timer_ns = sleep_ns.map(|sleep_ns| now_ns.saturating_add(sleep_ns));
        let due_ns = due_ns.into_iter().chain(timer_ns).min();
        let late_ns = due_ns.map(|due_ns| due_ns.saturating_add(TIMER_SLACK_NS));
        let is_earlier =
            late_ns.is_some_and(|late_ns| until_ns.is_none_or(|until_ns| late_ns < until_ns));
        if is_earlier { Self::Soon } else { Self::Nothing }
    }
}

#[cfg(test)]
mod tests;
