//! State that the threads of an engine share.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use forebay_buf::wake::Poller;
use forebay_rx::arrive::Waker;
use forebay_rx::counters::{DeliveryCounters, IntakeCounters};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::steer::{BalanceBoard, CpuLoad};
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::error::Error;
use forebay_sys::refused::{Refused, Written};

use super::busy_poll::{TransmitLent, Transmitted};
use super::changes::{Changes, Follower};
use super::config::Config;
use super::cpu_waker::CpuWaker;
use super::deferred_free::Reclaimer;
use super::devices::Devices;
use super::flows::Flows;
use super::measured::Measured;
use super::question::Question;
use super::settings::Settings;
use super::start_barrier::StartBarrier;
use crate::knobs::{Change, Script};
use crate::timeline::TimelineRecorder;

/// State that the threads of an engine share. CPUs are indexed by their position in the engine.
#[derive(Debug)]
pub struct EngineState {
    pub(super) clock: Clock,
    cpus: CpuList,
    devices: Devices,
    cpu_wakers: Box<[CpuWaker]>,
    /// Loan of each CPU, if threads of the application may turn it.
    loans: Box<[OnceLock<Weak<dyn TransmitLent>>]>,
    /// Pause of each CPU: bit 0 is set while the CPU is paused; the bits above are the epoch of the
    /// last change.
    paused: Box<[AtomicU64]>,
    /// Busy time of each CPU, in nanoseconds; written by that CPU only.
    busy_ns: Box<[AtomicU64]>,
    /// End of a recent turn of each CPU, on the clock; written by that CPU.
    turned_ns: Box<[AtomicU64]>,
    /// Part of `busy_ns` spent in delivery, while a policy [needs it](super::policies::Policies); written by that
    /// CPU only.
    delivering_ns: Box<[AtomicU64]>,
    /// Number of frames that each CPU has polled; written by that CPU only.
    polled: Box<[AtomicU64]>,
    /// Loads that the queues plan, where they are balanced.
    balance_board: Arc<BalanceBoard>,
    /// Number of turns that ran out of budget (`time_squeeze`); written by that CPU only.
    squeezed: Box<[AtomicU64]>,
    /// Number of frames that flow limits have refused while each CPU polled; written by that CPU only.
    flow_limited: Box<[AtomicU64]>,
    /// CPU that polls each queue; written by that CPU.
    polling: Box<[Poller]>,
    /// Number of a recent frame of each queue, while a trace is recorded; written by the CPU that polls it.
    recent_frames: Box<[AtomicU64]>,
    /// Counters, by queue and by the CPU's index.
    counters: OnceLock<EngineCounters>,
    start: StartBarrier,
    stop: AtomicBool,
    aborted: AtomicBool,
    /// Number of queues whose source is not exhausted.
    live_sources: AtomicUsize,
    /// Number of queues that still have packets to pass on, held ones included.
    live_queues: AtomicUsize,
    /// Number of CPUs that may still deliver packets.
    undelivered_cpus: AtomicUsize,
    /// Scripted changes during the run.
    pub(super) script: Script,
    /// All changes, scripted and live, for the threads to apply.
    changes: Mutex<Changes>,
    /// Destination of replaced tables.
    pub(super) reclaimer: Arc<Reclaimer>,
    /// Latest epoch that has begun on any queue.
    announced: AtomicU32,
    pub(super) spin_max_ns: u64,
    /// Flows that the outcome explains.
    pub(super) explain: Vec<FlowHash>,
    /// Times that are [measured](Self::measure), as a number.
    measured: AtomicU8,
}

/// Counters of an engine.
#[derive(Debug)]
pub struct EngineCounters {
    pub queues: Vec<Arc<IntakeCounters>>,
    pub cpus: Vec<Arc<DeliveryCounters>>,
}

/// Interval at which a CPU records that its turns end.
pub(crate) const TURN_SEEN_NS: u64 = 10_000_000;

/// Progress of one CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuProgress {
    /// End of a recent turn, on the engine's clock, in nanoseconds: renewed by a turn that
    /// ends 10 ms after it.
    pub turned_ns: u64,
    /// True if the CPU sleeps until it is woken.
    pub is_asleep: bool,
}

impl EngineState {
    pub(super) fn new(config: &Config, clock: Clock, devices: Devices) -> Self {
        let queues = devices.iter().map(|(_, queues)| queues.len()).sum();
        let cpus = config.cpus.cpus().len();
        let reclaimer = Arc::<Reclaimer>::default();
        if let Some(trace) = &config.trace {
            let (in_force, _) = config.rps_map().split_by(&config.cpus);
            let limit = if in_force.is_empty() { &config.cpus } else { &in_force };
            let mask = limit.to_mask(mask_width(config));
            trace.changed(clock.now_ns(), 0, "rps_cpus", &mask);
        }
        Self {
            clock,
            cpus: config.cpus.clone(),
            devices,
            cpu_wakers: (0..cpus).map(|_| CpuWaker::default()).collect(),
            loans: (0..cpus).map(|_| OnceLock::new()).collect(),
            paused: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            busy_ns: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            turned_ns: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            delivering_ns: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            polled: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            balance_board: Arc::new(BalanceBoard::new(queues, config.cpu_count())),
            squeezed: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            flow_limited: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            polling: (0..queues).map(|queue| Poller::new(config.polls(queue).0)).collect(),
            recent_frames: (0..queues).map(|_| AtomicU64::new(0)).collect(),
            counters: OnceLock::new(),
            start: StartBarrier::default(),
            stop: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            live_sources: AtomicUsize::new(queues),
            live_queues: AtomicUsize::new(queues),
            undelivered_cpus: AtomicUsize::new(cpus),
            script: config.script.clone(),
            changes: Mutex::new(Changes::new(config, queues, Arc::clone(&reclaimer))),
            reclaimer,
            explain: config.explain.clone(),
            measured: AtomicU8::new(Measured::Nothing as u8),
            announced: AtomicU32::new(0),
            spin_max_ns: config.spin_max_ns,
        }
    }

    /// Waker of a CPU, by its index.
    pub fn cpu_waker(&self, index: usize) -> &CpuWaker {
        &self.cpu_wakers[index]
    }

    /// Wakes a CPU that has new packets.
    pub(super) fn wake(&self, cpu: CpuId) {
        if let Some(index) = self.index_of(cpu) {
            self.cpu_wakers[index].wake_for_packets();
        }
    }

    /// Marks this CPU as ready, and returns when all are: a run begins with every CPU awake.
    pub(super) fn ready_to_start(&self) {
        self.start.arrive();
    }

    /// Lets the threads begin once `threads` of them are ready, and returns the time at which they
    /// begin.
    pub(super) fn start_when_ready(&self, threads: usize) -> u64 {
        self.start.release_when_ready(threads, || self.clock.now_ns())
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake_all();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Ends all threads without draining their queues: one thread has failed.
    pub(super) fn abort(&self) {
        self.aborted.store(true, Ordering::Relaxed);
        self.wake_all();
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }

    /// Sets or lifts a CPU's pause as of `epoch`; no effect for a CPU outside the engine. Every
    /// queue calls this when it reaches that epoch, and the latest epoch counts.
    pub(super) fn set_paused(&self, cpu: CpuId, paused: bool, epoch: u32) {
        if let Some(index) = self.index_of(cpu) {
            let since = u64::from(epoch) << 1 | u64::from(paused);
            if self.paused[index].fetch_max(since, Ordering::Relaxed) < since {
                self.cpu_wakers[index].wake();
            }
        }
    }

    /// True if a CPU must leave its backlogs alone. Pauses end with the last source, since queued
    /// packets must be delivered.
    pub(super) fn is_paused(&self, index: usize) -> bool {
        self.paused[index].load(Ordering::Relaxed) & 1 == 1 && self.has_live_sources()
    }

    pub(super) fn is_any_paused(&self) -> bool {
        (0..self.paused.len()).any(|index| self.is_paused(index))
    }

    /// Records that a CPU has ended a turn, if the last record is [`TURN_SEEN_NS`] old.
    pub(super) fn turn_ended(&self, index: usize, now_ns: u64) {
        let turned = &self.turned_ns[index];
        if now_ns.saturating_sub(turned.load(Ordering::Relaxed)) >= TURN_SEEN_NS {
            turned.store(now_ns, Ordering::Relaxed);
        }
    }

    pub(super) fn add_busy(&self, index: usize, ns: u64) {
        let busy = &self.busy_ns[index];
        busy.store(busy.load(Ordering::Relaxed) + ns, Ordering::Relaxed);
    }

    pub(super) fn add_delivering(&self, index: usize, ns: u64) {
        let delivering = &self.delivering_ns[index];
        delivering.store(delivering.load(Ordering::Relaxed) + ns, Ordering::Relaxed);
    }

    pub(super) fn add_polled(&self, index: usize, frames: usize) {
        let polled = &self.polled[index];
        polled.store(polled.load(Ordering::Relaxed) + frames as u64, Ordering::Relaxed);
    }

    /// Replaces the contents of `loads` with the loads of all CPUs, by [`CpuId::index`].
    pub(super) fn cpu_loads(&self, loads: &mut Vec<CpuLoad>) {
        loads.clear();
        // Loads are known once the engine is built.
        let Some(counters) = self.counters() else { return };
        for (place, (cpu, delivery)) in self.cpus.cpus().iter().zip(&counters.cpus).enumerate() {
            loads.resize(cpu.index(), CpuLoad::default());
            loads.push(CpuLoad {
                busy_ns: self.busy_ns(place),
                delivering_ns: self.delivering_ns[place].load(Ordering::Relaxed),
                packets: delivery.taken.get(),
                frames: self.polled[place].load(Ordering::Relaxed),
            });
        }
    }

    /// Board on which all queues balance together.
    pub(super) fn balance_board(&self) -> &Arc<BalanceBoard> {
        &self.balance_board
    }

    /// True once the threads begin.
    pub fn has_started(&self) -> bool {
        self.start.is_released()
    }

    /// Waits until the threads begin, `timeout` at most.
    pub fn wait_for_start(&self, timeout: Duration) {
        self.start.wait(timeout);
    }

    /// Progress of each CPU. A CPU that neither sleeps nor ends a turn from one look to the next, more
    /// than 10 ms later, is within one turn all the while.
    pub fn progress(&self) -> Vec<CpuProgress> {
        let cpus = self.cpu_wakers.iter().zip(&self.turned_ns);
        let progress = cpus.map(|(waker, turned_ns)| CpuProgress {
            turned_ns: turned_ns.load(Ordering::Relaxed),
            is_asleep: waker.is_asleep(),
        });
        progress.collect()
    }

    /// Busy time of a CPU, by its index, in nanoseconds.
    pub fn busy_ns(&self, index: usize) -> u64 {
        self.busy_ns[index].load(Ordering::Relaxed)
    }

    /// Sets what is measured from now on. In virtual time only waits in backlogs are.
    pub fn measure(&self, measured: Measured) {
        self.measured.store(measured as u8, Ordering::Relaxed);
    }

    pub(super) fn measured(&self) -> Measured {
        Measured::of_bits(self.measured.load(Ordering::Relaxed))
    }

    pub(super) fn source_ended(&self) {
        if self.live_sources.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_all(); // pauses are lifted
        }
    }

    fn has_live_sources(&self) -> bool {
        self.live_sources.load(Ordering::Acquire) > 0
    }

    pub(super) fn queue_ended(&self) {
        // Release: whoever sees the last queue end sees all that it published.
        if self.live_queues.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_all();
        }
    }

    /// Records that a CPU has delivered its last packet.
    pub(super) fn cpu_delivered(&self) {
        if self.undelivered_cpus.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_all();
        }
    }

    /// True if every CPU has delivered its last packet.
    pub(super) fn all_delivered(&self) -> bool {
        self.undelivered_cpus.load(Ordering::Acquire) == 0
    }

    pub(super) fn has_live_queues(&self) -> bool {
        self.live_queues.load(Ordering::Acquire) > 0
    }

    /// Follower of all changes from now on.
    pub(super) fn follower(&self) -> Follower {
        self.changes().follower()
    }

    /// Records that backlog rings of this many slots are made.
    pub(super) fn rings_made(&self, slots: u32) {
        self.changes().rings_made(slots);
    }

    /// Makes a change, wakes all CPUs to apply it, and returns the part that is in force.
    pub fn change(&self, change: &Change) -> Result<Written, Refused> {
        let written = self.changes().change(change);
        self.wake_all();
        written
    }

    /// Checks that a change is possible with the current settings.
    pub(super) fn check(&self, change: &Change) -> Result<(), Refused> {
        self.changes().check(change)
    }

    /// Puts a question to all queues, and wakes the CPUs that poll them.
    ///
    /// # Errors
    /// `EBUSY` if [`QUESTIONS_MAX`](super::QUESTIONS_MAX) changes and questions wait already.
    pub fn ask(&self, question: Question) -> Result<(), Refused> {
        let asked = self.changes().ask(question);
        self.wake_all();
        asked
    }

    /// Takes the errors of scripted changes that could not be made.
    pub(super) fn take_refused(&self) -> Vec<Error> {
        self.changes().take_refused()
    }

    /// Current settings.
    pub fn settings(&self) -> Settings {
        self.changes().settings().clone()
    }

    /// Current hash function of flows.
    pub fn hasher(&self) -> Arc<Hasher> {
        Arc::clone(self.changes().hasher())
    }

    /// CPUs of a list that packets can go to now.
    pub fn in_force(&self, cpus: &CpuList) -> CpuList {
        self.changes().in_force(cpus)
    }

    /// Table in which applications record the CPU that they run on.
    pub(super) fn flows(&self) -> Flows {
        Flows(Arc::clone(self.changes().sock_flows()))
    }

    /// Publishes the counters; called once, when the engine is built.
    pub(super) fn set_counters(&self, counters: EngineCounters) {
        let set = self.counters.set(counters);
        debug_assert!(set.is_ok(), "an engine is built once");
    }

    /// Recorder of a timeline that begins with the run, or now if the run has not begun; `None` until
    /// the engine is built. Waits are recorded while they are [measured](Self::measure).
    pub fn timeline(&self, period_ns: u64) -> Option<TimelineRecorder> {
        let counters = self.counters()?;
        let cpus = self.cpus.cpus().iter().copied().zip(counters.cpus.iter().cloned());
        let began_ns = self.start.released_ns().unwrap_or_else(|| self.now_ns());
        Some(TimelineRecorder::new(counters.queues.clone(), cpus.collect(), began_ns, period_ns))
    }

    /// Time on the engine's clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Counters of all queues and CPUs; `None` until the engine is built.
    pub fn counters(&self) -> Option<&EngineCounters> {
        self.counters.get()
    }

    /// Records that `cpu` polls a queue from now on.
    pub(super) fn set_polls(&self, queue: RxQueue, cpu: CpuId) {
        self.polling[usize::from(queue.0)].take_over(cpu.0);
    }

    pub(super) fn set_recent_frame(&self, queue: RxQueue, frame: u64) {
        self.recent_frames[usize::from(queue.0)].store(frame, Ordering::Relaxed);
    }

    /// Number of a recent frame of a queue, while a trace is recorded.
    pub(super) fn recent_frame(&self, queue: RxQueue) -> u64 {
        self.recent_frames[usize::from(queue.0)].load(Ordering::Relaxed)
    }

    /// Number of queues.
    pub(super) fn queues(&self) -> u16 {
        u16::try_from(self.polling.len()).unwrap_or(u16::MAX)
    }

    /// Handle that wakes whichever CPU polls a queue at the time of the call. Call it after
    /// publishing what that CPU is to find.
    pub(super) fn waker(self: &Arc<Self>, queue: RxQueue) -> Waker {
        let shared = Arc::clone(self);
        Arc::new(move || {
            if let Some(index) = shared.index_to_wake(queue) {
                shared.cpu_wakers[index].wake();
            }
        })
    }

    /// As [`waker`](Self::waker), for a thread that has queued packets for transmission. If threads of the application turn
    /// that CPU while it sleeps, the caller transmits them itself.
    pub(super) fn waker_to_send(self: &Arc<Self>, queue: RxQueue) -> Waker {
        let shared = Arc::clone(self);
        Arc::new(move || {
            let Some(index) = shared.index_to_wake(queue) else { return };
            let loan = shared.loans[index].get().and_then(Weak::upgrade);
            if loan.is_none_or(|loan| loan.transmit() == Transmitted::InPart) {
                shared.cpu_wakers[index].wake();
            }
        })
    }

    /// Index of the CPU to be woken for a queue.
    fn index_to_wake(&self, queue: RxQueue) -> Option<usize> {
        let poller = self.polling.get(usize::from(queue.0))?;
        self.index_of(CpuId(poller.next_to_wake()))
    }

    /// Lets threads that have queued packets for a CPU transmit them by its loan. Only the first one has an effect.
    pub(super) fn set_loan(&self, index: usize, loan: Weak<dyn TransmitLent>) {
        // A second one would be the same.
        let _ = self.loans[index].set(loan);
    }

    /// CPU that polls a queue.
    pub fn polls(&self, queue: u16) -> Option<CpuId> {
        Some(CpuId(self.polling.get(usize::from(queue))?.cpu()))
    }

    /// Devices, each with its queues.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// CPUs of the engine.
    pub fn cpus(&self) -> &CpuList {
        &self.cpus
    }

    /// Number of a CPU's turns that ran out of budget (`time_squeeze`).
    pub fn squeezed(&self, index: usize) -> u64 {
        self.squeezed[index].load(Ordering::Relaxed)
    }

    pub(super) fn add_squeezed(&self, index: usize) {
        let squeezed = &self.squeezed[index];
        squeezed.store(squeezed.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Number of frames that flow limits refused while a CPU polled.
    pub fn flow_limited(&self, index: usize) -> u64 {
        self.flow_limited[index].load(Ordering::Relaxed)
    }

    pub(super) fn add_flow_limited(&self, cpu: CpuId, frames: u32) {
        let Some(index) = self.index_of(cpu) else { return };
        self.flow_limited[index].fetch_add(frames.into(), Ordering::Relaxed);
    }

    /// Makes the first `count` changes of the script, unless already made: the first queue that
    /// reaches a change's frame makes it for all.
    pub(super) fn make_scripted(&self, count: usize) {
        let made = self.changes().make_scripted(&self.script, count);
        if made {
            self.wake_all();
        }
    }

    /// Locks the changes. Poison is ignored: no panic leaves them half changed.
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the caller is the first to see this epoch begin.
    pub(super) fn announces(&self, epoch: u32) -> bool {
        self.announced.fetch_max(epoch, Ordering::Relaxed) < epoch
    }

    fn wake_all(&self) {
        for waker in &self.cpu_wakers {
            waker.wake();
        }
    }

    pub(super) fn index_of(&self, cpu: CpuId) -> Option<usize> {
        self.cpus.cpus().binary_search(&cpu).ok()
    }
}

/// Number of bits in a mask of this engine's CPUs.
fn mask_width(config: &Config) -> u16 {
    u16::try_from(config.cpu_count()).unwrap_or(u16::MAX)
}
