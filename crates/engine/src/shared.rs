//! State that the threads of an engine share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use forebay_buf::wake::Poller;
use forebay_rx::arrive::Waker;
use forebay_rx::counters::{DeliveryCounters, IntakeCounters};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::steer::CpuLoad;
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::error::Error;
use forebay_sys::refused::{Refused, Written};

use super::bell::Bell;
use super::changes::{Changes, Follower};
use super::config::Config;
use super::devices::Devices;
use super::flows::Flows;
use super::question::Question;
use super::reclaim::Reclaimer;
use super::settings::Settings;
use crate::knobs::{Change, Script};

/// Flags, counts and bells, all by the CPU's place in the engine.
#[derive(Debug)]
pub struct EngineState {
    pub(super) clock: Clock,
    cpus: CpuList,
    devices: Devices,
    bells: Box<[Bell]>,
    /// Pause of each CPU: the lowest bit, and above it the epoch since which.
    paused: Box<[AtomicU64]>,
    /// Written by each CPU for itself.
    busy_ns: Box<[AtomicU64]>,
    /// Part of it in delivery, while the load is balanced; written by each CPU for itself.
    delivering_ns: Box<[AtomicU64]>,
    /// Turns that ended for want of budget; written by each CPU for itself.
    squeezed: Box<[AtomicU64]>,
    /// The CPU that polls each queue. Written by that CPU.
    polling: Box<[Poller]>,
    /// Counters, by queue and by the CPU's place.
    counters: OnceLock<EngineCounters>,
    /// Threads that stand ready on their CPUs, and whether they may begin.
    ready: AtomicUsize,
    started: AtomicBool,
    stop: AtomicBool,
    aborted: AtomicBool,
    /// Queues whose source is not exhausted.
    live_sources: AtomicUsize,
    /// Queues that still have packets to give, held ones included.
    live_queues: AtomicUsize,
    /// CPUs that may still deliver packets.
    undelivered_cpus: AtomicUsize,
    /// Scripted changes during the run.
    pub(super) script: Script,
    /// All changes, scripted and asked for, on their way to the threads.
    changes: Mutex<Changes>,
    /// Destination of tables that changes have replaced.
    pub(super) reclaimer: Arc<Reclaimer>,
    /// The latest epoch that has begun on any queue.
    announced: AtomicU32,
    pub(super) spin_max_ns: u64,
    /// The flows that the outcome tells of.
    pub(super) explain: Vec<FlowHash>,
}

/// Counters of an engine.
#[derive(Debug)]
pub struct EngineCounters {
    pub queues: Vec<Arc<IntakeCounters>>,
    pub cpus: Vec<Arc<DeliveryCounters>>,
}

impl EngineState {
    pub(super) fn new(config: &Config, clock: Clock, devices: Devices) -> Self {
        let queues = devices.iter().map(|(_, queues)| queues.len()).sum();
        let cpus = config.cpus.cpus().len();
        let reclaimer = Arc::<Reclaimer>::default();
        if let Some(trace) = &config.trace {
            let (in_force, _) = config.rps_cpus.split_by(&config.cpus);
            let limit = if in_force.is_empty() { &config.cpus } else { &in_force };
            let mask = limit.to_mask(mask_width(config));
            trace.changed(clock.now_ns(), 0, "rps_cpus", &mask);
        }
        Self {
            clock,
            cpus: config.cpus.clone(),
            devices,
            bells: (0..cpus).map(|_| Bell::default()).collect(),
            paused: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            busy_ns: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            delivering_ns: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            squeezed: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            polling: (0..queues).map(|queue| Poller::new(config.polls(queue).0)).collect(),
            counters: OnceLock::new(),
            ready: AtomicUsize::new(0),
            started: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            live_sources: AtomicUsize::new(queues),
            live_queues: AtomicUsize::new(queues),
            undelivered_cpus: AtomicUsize::new(cpus),
            script: config.script.clone(),
            changes: Mutex::new(Changes::new(config, queues, Arc::clone(&reclaimer))),
            reclaimer,
            explain: config.explain.clone(),
            announced: AtomicU32::new(0),
            spin_max_ns: config.spin_max_ns,
        }
    }

    /// Bell of a CPU, by its place.
    pub fn bell(&self, index: usize) -> &Bell {
        &self.bells[index]
    }

    /// Wakes a CPU that has new packets.
    pub(super) fn wake(&self, cpu: CpuId) {
        if let Some(index) = self.index_of(cpu) {
            self.bells[index].ring_for_packets();
        }
    }

    /// Stands ready on this CPU, and returns when all do: a run begins with every CPU awake.
    pub(super) fn ready_to_start(&self) {
        self.ready.fetch_add(1, Ordering::Release);
        while !self.started.load(Ordering::Acquire) {
            thread::yield_now();
        }
    }

    /// Lets the threads begin once `threads` of them stand ready, and returns when that was.
    pub(super) fn start_when_ready(&self, threads: usize) -> u64 {
        while self.ready.load(Ordering::Acquire) < threads {
            thread::yield_now();
        }
        let started_ns = self.clock.now_ns();
        self.started.store(true, Ordering::Release);
        started_ns
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake_all();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Ends all threads where they stand: one of them is lost.
    pub(super) fn abort(&self) {
        self.aborted.store(true, Ordering::Relaxed);
        self.wake_all();
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }

    /// Sets or lifts a CPU's pause as of `epoch`; a CPU that the engine does not run on has none.
    /// Every queue says it when it comes to that epoch, and the latest epoch counts.
    pub(super) fn set_paused(&self, cpu: CpuId, paused: bool, epoch: u32) {
        if let Some(index) = self.index_of(cpu) {
            let since = u64::from(epoch) << 1 | u64::from(paused);
            if self.paused[index].fetch_max(since, Ordering::Relaxed) < since {
                self.bells[index].ring();
            }
        }
    }

    /// True if a CPU is to leave its backlogs alone. Pauses end with the last source, for what is
    /// queued must be delivered.
    pub(super) fn is_paused(&self, index: usize) -> bool {
        self.paused[index].load(Ordering::Relaxed) & 1 == 1 && self.has_live_sources()
    }

    pub(super) fn is_any_paused(&self) -> bool {
        (0..self.paused.len()).any(|index| self.is_paused(index))
    }

    pub(super) fn add_busy(&self, index: usize, ns: u64) {
        let busy = &self.busy_ns[index];
        busy.store(busy.load(Ordering::Relaxed) + ns, Ordering::Relaxed);
    }

    pub(super) fn add_delivering(&self, index: usize, ns: u64) {
        let delivering = &self.delivering_ns[index];
        delivering.store(delivering.load(Ordering::Relaxed) + ns, Ordering::Relaxed);
    }

    /// Loads of all CPUs, by [`CpuId::index`], in place of what `loads` has.
    pub(super) fn cpu_loads(&self, loads: &mut Vec<CpuLoad>) {
        loads.clear();
        let Some(counters) = self.counters() else { return };
        for (place, (cpu, delivery)) in self.cpus.cpus().iter().zip(&counters.cpus).enumerate() {
            loads.resize(cpu.index(), CpuLoad::default());
            loads.push(CpuLoad {
                busy_ns: self.busy_ns(place),
                delivering_ns: self.delivering_ns[place].load(Ordering::Relaxed),
                packets: delivery.taken.get(),
            });
        }
    }

    /// Time that a CPU has been busy, by its place, in nanoseconds.
    pub fn busy_ns(&self, index: usize) -> u64 {
        self.busy_ns[index].load(Ordering::Relaxed)
    }

    /// Busy time of all CPUs together.
    pub(super) fn total_busy_ns(&self) -> u64 {
        self.busy_ns.iter().map(|busy| busy.load(Ordering::Relaxed)).sum()
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

    /// Notes that a CPU has delivered all that there will be.
    pub(super) fn cpu_delivered(&self) {
        if self.undelivered_cpus.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_all();
        }
    }

    /// True if every CPU has delivered all that there will be.
    pub(super) fn all_delivered(&self) -> bool {
        self.undelivered_cpus.load(Ordering::Acquire) == 0
    }

    pub(super) fn has_live_queues(&self) -> bool {
        self.live_queues.load(Ordering::Acquire) > 0
    }

    /// A follower of all changes from now on.
    pub(super) fn follower(&self) -> Follower {
        self.changes().follower()
    }

    /// Makes a change, wakes all CPUs to follow it, and says what of it is in force.
    pub fn change(&self, change: &Change) -> Result<Written, Refused> {
        let written = self.changes().change(change);
        self.wake_all();
        written
    }

    /// Objection to a change as things stand, if any.
    pub(super) fn check(&self, change: &Change) -> Result<(), Refused> {
        self.changes().check(change)
    }

    /// Asks all queues, and wakes the CPUs that poll them.
    pub fn ask(&self, question: Question) {
        self.changes().ask(question);
        self.wake_all();
    }

    /// Takes what is to be told of changes that the script asked for and that could not be.
    pub(super) fn take_refused(&self) -> Vec<Error> {
        self.changes().take_refused()
    }

    /// Settings now.
    pub fn settings(&self) -> Settings {
        self.changes().settings().clone()
    }

    /// Hash function of flows now.
    pub fn hasher(&self) -> Arc<Hasher> {
        Arc::clone(self.changes().hasher())
    }

    /// The CPUs of a list that packets can go to now.
    pub fn in_force(&self, cpus: &CpuList) -> CpuList {
        self.changes().in_force(cpus)
    }

    /// Table in which applications record the CPU that they run on.
    pub(super) fn flows(&self) -> Flows {
        Flows(Arc::clone(self.changes().sock_flows()))
    }

    /// Says where everything is counted, once.
    pub(super) fn set_counters(&self, counters: EngineCounters) {
        let set = self.counters.set(counters);
        debug_assert!(set.is_ok(), "an engine is built once");
    }

    /// Counters of everything.
    pub fn counters(&self) -> Option<&EngineCounters> {
        self.counters.get()
    }

    /// Notes that `cpu` polls a queue from now on.
    pub(super) fn set_polls(&self, queue: RxQueue, cpu: CpuId) {
        self.polling[usize::from(queue.0)].take_over(cpu.0);
    }

    /// Number of queues.
    pub(super) fn queues(&self) -> u16 {
        u16::try_from(self.polling.len()).unwrap_or(u16::MAX)
    }

    /// Wakes the CPU that polls a queue, whichever that is then. Call it after publishing what that CPU
    /// is to find.
    pub(super) fn waker(self: &Arc<Self>, queue: RxQueue) -> Waker {
        let shared = Arc::clone(self);
        Arc::new(move || {
            let polling = shared.polling.get(usize::from(queue.0));
            let cpu = polling.map(|poller| CpuId(poller.next_to_wake()));
            if let Some(index) = cpu.and_then(|cpu| shared.index_of(cpu)) {
                shared.bells[index].ring();
            }
        })
    }

    /// The CPU that polls a queue.
    pub fn polls(&self, queue: u16) -> Option<CpuId> {
        Some(CpuId(self.polling.get(usize::from(queue))?.cpu()))
    }

    /// The devices, and whose each queue is.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// The CPUs of the engine.
    pub fn cpus(&self) -> &CpuList {
        &self.cpus
    }

    /// Turns of a CPU that ended for want of budget.
    pub fn squeezed(&self, index: usize) -> u64 {
        self.squeezed[index].load(Ordering::Relaxed)
    }

    pub(super) fn add_squeezed(&self, index: usize) {
        let squeezed = &self.squeezed[index];
        squeezed.store(squeezed.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Makes the first `count` changes of the script, as far as nobody has made them: the first
    /// queue that reaches a change's frame makes it for all.
    pub(super) fn make_scripted(&self, count: usize) {
        let made = self.changes().make_scripted(&self.script, count);
        if made {
            self.wake_all();
        }
    }

    /// A lock whose holder panicked guards nothing that could be half done here.
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the caller is the first to see this epoch begin.
    pub(super) fn announces(&self, epoch: u32) -> bool {
        self.announced.fetch_max(epoch, Ordering::Relaxed) < epoch
    }

    fn wake_all(&self) {
        for bell in &self.bells {
            bell.ring();
        }
    }

    pub(super) fn index_of(&self, cpu: CpuId) -> Option<usize> {
        self.cpus.cpus().binary_search(&cpu).ok()
    }
}

/// Bits of a mask of this engine's CPUs.
fn mask_width(config: &Config) -> u16 {
    u16::try_from(config.cpu_count()).unwrap_or(u16::MAX)
}
