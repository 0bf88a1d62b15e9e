//! One CPU's loop: turns while there is work, sleeps while there is none.
//!
//! By default, a thread of the engine runs this loop until the run ends. An application can run it
//! instead: its thread, which reads the packets of its CPU, turns that CPU's delivery whenever it
//! has nothing to read, as `sk_busy_loop` does in the kernel. A packet is then received, delivered
//! and answered without waking another thread.

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use forebay_rx::arrive::Waker;
use forebay_rx::{CpuId, Handler};
use forebay_sys as sys;

use super::busy_poll::{Arrivals, Loan};
use super::cpu_waker::SleepOn;
use super::idle::{Deferral, Idle};
use super::queue::{Activity, Queue};
use super::shared::EngineState;
use super::worker::{ThreadState, Worker};

/// Longest sleep of a CPU while its queues wait for other CPUs, which do not wake it.
const BLOCKED_SLEEP_NS: u64 = 50_000;

/// Longest sleep of a CPU while readers are behind (interrupt moderation). A queue of 2,048 frames has room for what
/// arrives meanwhile at 20 million a second.
const MODERATION_NS: u64 = 100_000;

/// A CPU of a running engine, owned by the thread that turns it.
///
/// The CPU delivers nothing while its thread does something else. It counts as busy then, if its last turn has given packets
/// to the application.
pub struct CpuThread<H: Handler> {
    worker: OwnWorker<H>,
    /// Place where the worker is lent while the CPU sleeps, if it is.
    loan: Option<Arc<Loan<H>>>,
    shared: Arc<EngineState>,
    idle: Idle,
    deferral: Deferral,
    /// Time at which the next turn begins, or the last pause or the application's work began.
    turn_ns: u64,
    /// True if the application was told of something after a turn that worked, and has not come back.
    has_given: bool,
    /// True once no packet can arrive any more, or this thread must end.
    is_over: bool,
}

/// Worker of the CPU, which is elsewhere only while the CPU sleeps.
struct OwnWorker<H>(Option<Box<Worker<H>>>);

thread_local! {
    static IS_CPU: Cell<bool> = const { Cell::new(false) };
}

/// True if the calling thread turns a CPU of an engine. Such a thread must not block: only its own
/// turns would deliver what it waits for.
pub fn is_cpu() -> bool {
    IS_CPU.get()
}

/// Runs `act` on a thread that turns a CPU for as long as that takes, or until it panics.
pub(super) fn acting_as_cpu<R>(act: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_CPU.set(self.0);
        }
    }
    let _restore = Restore(IS_CPU.replace(true));
    act()
}

impl<H: Handler> CpuThread<H> {
    pub(super) fn new(worker: Box<Worker<H>>, loan: Option<Arc<Loan<H>>>) -> Self {
        let shared = Arc::clone(&worker.shared);
        let idle = Idle::new(shared.spin_max_ns);
        Self {
            worker: OwnWorker(Some(worker)),
            loan,
            shared,
            idle,
            deferral: Deferral::default(),
            turn_ns: 0,
            has_given: false,
            is_over: false,
        }
    }

    /// Worker of a thread that ends.
    pub(super) fn into_worker(self) -> Box<Worker<H>> {
        self.worker.0.unwrap_or_else(|| unreachable!("{LENT}"))
    }

    /// Makes the calling thread the thread of this CPU, and waits until all CPUs are ready.
    pub(super) fn begin(&mut self) {
        // Pinning fails if the CPU does not exist here or is not allowed: the kernel then places
        // the thread.
        let _ = sys::pin_to(self.worker.cpu);
        sys::set_timer_slack();
        sys::set_sched_slice();
        IS_CPU.set(true);
        self.shared.cpu_waker(self.worker.index).bind_to_current_thread();
        self.shared.ready_to_start();
        self.turn_ns = self.shared.clock.now_ns();
    }

    /// The CPU of this thread.
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.worker.cpu
    }

    /// Handler of this CPU.
    #[must_use]
    pub fn handler(&mut self) -> &mut H {
        &mut self.worker.handler
    }

    /// Handle that wakes this CPU when it sleeps in [`turn_until`](Self::turn_until). Can be called
    /// from any thread; cheap while the CPU is awake.
    #[must_use]
    pub fn waker(&self) -> Waker {
        let (shared, index) = (Arc::clone(&self.shared), self.worker.index);
        Arc::new(move || shared.cpu_waker(index).wake())
    }

    /// Turns the CPU until `is_ready` returns true, and then returns true; returns false once no
    /// packet can arrive any more. Sleeps while there is nothing to do. `is_ready` is checked right
    /// before each sleep: code that makes it true must call the [waker](Self::waker) afterwards,
    /// unless it runs in this CPU's own turns.
    ///
    /// Packets that were delivered before the call count as processed from then on, and their flows may move to other
    /// CPUs: a caller that has read them all, and then calls, keeps its answers in order too.
    pub fn turn_until(&mut self, is_ready: impl FnMut() -> bool) -> bool {
        self.turn_until_answered(is_ready, || true)
    }

    /// As [`turn_until`](Self::turn_until), for a caller whose answers other threads may be sending: packets count as
    /// processed once `has_answered` returns true. Until then the CPU does not sleep.
    pub fn turn_until_answered(
        &mut self,
        is_ready: impl FnMut() -> bool,
        has_answered: impl FnMut() -> bool,
    ) -> bool {
        // The batch of a thread that has died is lost, not processed.
        if self.is_over {
            return false;
        }
        self.worker.delivery.set_read_inline(true);
        self.turn_loop(is_ready, has_answered)
    }

    fn turn_loop(
        &mut self,
        mut is_ready: impl FnMut() -> bool,
        mut has_answered: impl FnMut() -> bool,
    ) -> bool {
        self.end_application_work();
        self.release_answered(&mut has_answered);
        while !self.is_over {
            let activity = self.turn();
            if is_ready() {
                self.has_given = matches!(activity, Activity::Worked(_));
                return true;
            }
            if !self.is_over && !self.release_answered(&mut has_answered) {
                thread::yield_now();
                self.end_application_work();
                continue;
            }
            match activity {
                _ if self.is_over => break,
                Activity::Worked(_) if self.should_moderate() => self.moderate(&mut is_ready),
                Activity::Worked(_) => {}
                _ => self.pause(activity, &mut is_ready),
            }
        }
        false
    }

    /// Begins turns anew after the application had the thread. Its time is no turn's. Until it comes back for more, it works
    /// on the packets that it was given, even if it sleeps meanwhile: nobody else can deliver here. With packets of this CPU
    /// among them that counts as delivery. If it was given none, it does something else.
    fn end_application_work(&mut self) {
        let began_ns = std::mem::replace(&mut self.turn_ns, self.shared.clock.now_ns());
        self.idle.forget_pause();
        let is_delivery = self.worker.delivery.has_unreleased();
        if std::mem::take(&mut self.has_given) || is_delivery {
            let ns = self.turn_ns.saturating_sub(began_ns);
            self.worker.add_application_work(ns, is_delivery);
        }
    }

    /// Lets the CPU count as wanted by other programs, or not, for ever.
    #[cfg(test)]
    pub(super) fn set_contended(&mut self, is_contended: bool) {
        self.idle.set_contended(is_contended);
    }

    /// Declares what was delivered processed, if it is answered. Returns false if it is not.
    fn release_answered(&mut self, has_answered: &mut impl FnMut() -> bool) -> bool {
        let delivery = &mut self.worker.delivery;
        if !delivery.has_unreleased() {
            return true;
        }
        let may_release = has_answered();
        if may_release {
            delivery.release();
        }
        may_release
    }

    /// Number of turns of this CPU so far, whichever thread ran them.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.worker.turns
    }

    #[cfg(test)]
    pub(super) fn worker(&mut self) -> &mut Worker<H> {
        &mut self.worker
    }

    /// Turns the CPU once; returns false once no packet can arrive any more. Never sleeps. Packets that were delivered
    /// before the call count as processed, as in [`turn_until`](Self::turn_until).
    pub fn turn_once(&mut self) -> bool {
        if !self.is_over {
            self.worker.delivery.set_read_inline(true);
            self.end_application_work();
            self.worker.delivery.release();
            self.turn();
        }
        !self.is_over
    }

    /// Turns the CPU until the run ends.
    pub fn turn_to_the_end(&mut self) {
        if !self.is_over {
            self.worker.delivery.set_read_inline(false);
            self.turn_loop(|| false, || true);
        }
    }

    fn turn(&mut self) -> Activity {
        if self.shared.is_aborted() {
            self.is_over = true;
            return Activity::Ended;
        }
        // A borrower's turn dequeued the batch that is lost with the thread.
        if self.worker.life == ThreadState::Terminated {
            self.is_over = true;
            return Activity::Ended;
        }
        let began_ns = self.turn_ns;
        let (activity, now_ns) = self.worker.timed_turn(began_ns);
        self.turn_ns = now_ns;
        // Fault injection: the thread ends with its dequeued batch, and the supervisor replaces it.
        if self.worker.life == ThreadState::Terminated {
            self.is_over = true;
        } else if let Activity::Worked(_) = activity {
            self.idle.worked(began_ns);
            self.deferral.worked();
        } else {
            self.is_over = self.worker.has_ended();
        }
        activity
    }

    /// True if others want this CPU, and nobody waits for more packets: all that were pending are received, and their
    /// readers have many others to read first.
    fn should_moderate(&mut self) -> bool {
        if self.loan.is_none() || self.worker.queues.is_empty() {
            return false;
        }
        self.idle.look(self.turn_ns, sys::preemptions);
        self.worker.handler.are_readers_behind()
            && self.idle.is_contended(self.turn_ns)
            && self.worker.has_received_all()
    }

    /// Sleeps while packets arrive, so that readers have the CPU. A thread that has read all of them turns it meanwhile.
    fn moderate(&mut self, is_ready: &mut impl FnMut() -> bool) {
        self.sleep_unless_ready(SleepOn::Descriptors, is_ready, |cpu| {
            let timer_ns = cpu.worker.handler.sleep_max_ns().unwrap_or(MODERATION_NS);
            let end_ns = cpu.turn_ns.saturating_add(timer_ns.min(MODERATION_NS));
            let timeouts = cpu.worker.queues.iter().filter_map(Queue::next_timeout_ns);
            let until_ns = timeouts.fold(end_ns, u64::min);
            if let Some(loan) = &cpu.loan {
                cpu.worker.sleep_on(loan, Some(until_ns), Arrivals::Wait);
            }
        });
        self.turn_ns = self.shared.clock.now_ns();
    }

    /// Spins or sleeps after a turn that found no work.
    fn pause(&mut self, activity: Activity, is_ready: &mut impl FnMut() -> bool) {
        let now_ns = self.turn_ns;
        self.idle.look(now_ns, sys::preemptions);
        let is_sought = self.loan.as_ref().is_some_and(|loan| loan.is_sought(now_ns));
        if self.idle.should_sleep(now_ns, activity == Activity::Blocked) || is_sought {
            self.sleep(activity, is_ready);
        } else {
            std::hint::spin_loop();
        }
        self.turn_ns = self.shared.clock.now_ns();
    }

    fn sleep(&mut self, activity: Activity, is_ready: &mut impl FnMut() -> bool) {
        let until_ns = match activity {
            Activity::Worked(_) => return,
            Activity::Blocked => Some(self.turn_ns.saturating_add(BLOCKED_SLEEP_NS)),
            Activity::IdleUntil(due_ns) => due_ns,
            Activity::Ended => None,
        };
        let is_polling = self.worker.has_descriptors();
        let deferred = match activity {
            Activity::IdleUntil(_) if is_polling => self.deferral.next_ns(&self.worker.coalesce),
            _ => None,
        };
        let on_descriptors = is_polling && deferred.is_none();
        let on = if on_descriptors { SleepOn::Descriptors } else { SleepOn::Wakeup };
        self.sleep_unless_ready(on, is_ready, |cpu| {
            let due = until_ns.map(|due_ns| due_ns.saturating_sub(cpu.turn_ns));
            let limits = due.into_iter().chain(deferred).chain(cpu.worker.handler.sleep_max_ns());
            let at_most_ns = limits.min();
            match &cpu.loan {
                Some(loan) if on_descriptors => {
                    let until_ns = at_most_ns.map(|ns| cpu.turn_ns.saturating_add(ns));
                    cpu.worker.sleep_on(loan, until_ns, Arrivals::Wake);
                }
                _ => {
                    let descriptors =
                        if on_descriptors { cpu.worker.descriptors() } else { Vec::new() };
                    let waker = cpu.shared.cpu_waker(cpu.worker.index);
                    waker.wait(at_most_ns.map(Duration::from_nanos), &descriptors);
                }
            }
        });
    }

    /// Calls `sleep` once others can wake the CPU, unless there is something to do.
    fn sleep_unless_ready(
        &mut self,
        on: SleepOn,
        is_ready: &mut impl FnMut() -> bool,
        sleep: impl FnOnce(&mut Self),
    ) {
        let index = self.worker.index;
        self.shared.cpu_waker(index).prepare_to_wait(on);
        if !self.worker.has_pending_work() && !is_ready() {
            sleep(self);
        }
        self.shared.cpu_waker(index).finish_wait();
    }
}

/// Reason why a worker is in its place.
const LENT: &str = "the worker is lent only within a sleep";

impl<H> OwnWorker<H> {
    /// Sleeps while threads of the application may turn the worker.
    fn sleep_on(&mut self, loan: &Loan<H>, until_ns: Option<u64>, arrivals: Arrivals)
    where
        H: Handler,
    {
        self.0 = self.0.take().map(|worker| loan.sleep(worker, until_ns, arrivals));
        // The supervisor decides, as on a panic of this thread.
        assert!(!loan.take_panic(), "a turn panicked on a thread of the application");
    }
}

impl<H> Deref for OwnWorker<H> {
    type Target = Worker<H>;

    fn deref(&self) -> &Worker<H> {
        self.0.as_ref().unwrap_or_else(|| unreachable!("{LENT}"))
    }
}

impl<H> DerefMut for OwnWorker<H> {
    fn deref_mut(&mut self) -> &mut Worker<H> {
        self.0.as_mut().unwrap_or_else(|| unreachable!("{LENT}"))
    }
}

impl<H: Handler> fmt::Debug for CpuThread<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuThread(CPU {})", self.worker.cpu)
    }
}
