//! Engine: one pinned thread per CPU, or one seeded scheduler in place of all.
//!
//! A turn of a CPU runs the intakes of the queues that it polls, then its delivery, 64 packets
//! each; an idle CPU sleeps. [`threads`] runs turns on threads; [`stepped`] runs the same turns on
//! one thread, in an order that a seed determines.
#![forbid(unsafe_code)]

pub mod knobs; //  settings that can be changed, and the answer to a write
pub mod trace; //  plain files from which external tools can judge a run
pub mod timeline; // counters at several times of a run, for pictures

mod config; //     configuration of an engine
mod devices; //    numbers of the devices' queues
mod memory; //     packet memory: its size, the sizes of its chunks

mod threads; //    a thread for each CPU
mod start_barrier; // begin of all threads at once
mod stepped; //    one seeded scheduler in place of the threads
mod cpu_thread; // one CPU's loop: turns, spinning, sleep
mod worker; //     one CPU's turn: its queues, its delivery, its handler
mod queue; //      one rx queue: source, memory, intake, changes
mod pollers; //    the CPU that polls each queue, of those that run
mod idle; //       time to spin before a sleep
mod busy_poll; //  turns of a sleeping CPU by threads of the application
mod cpu_waker; //  wake-ups of CPUs
pub(crate) mod mailbox; // queues handed over to a CPU
mod limits; //     budgets of a turn
mod policies; //   balance and spread, by the load of the CPUs
mod measured; //   times that are measured on request
mod flows; //      recorder of the CPUs that applications run on

mod changes; //    live changes: checked, prepared, numbered
pub mod log; //    the changes in one order for all threads
mod settings; //   settings of all knobs, in force or not
mod question; //   questions to the queues, between their turns
mod deferred_free; // replaced tables, freed on a thread of its own
mod shared; //     state that the threads share
mod outcome; //    outcome of a run

use std::path::Path;
use std::sync::Arc;

pub use busy_poll::{Arrived, BusyPoll};
use busy_poll::{Borrowers, Loan, Loans};
pub use changes::{CHANGES_MAX, QUESTIONS_MAX};
pub use config::{Config, SPARE_FRAMES, WhenFull};
pub use cpu_thread::{CpuThread, is_cpu};
pub use devices::{DeviceQueues, Devices};
pub use flows::Flows;
use forebay_buf::{Pool, Position};
use forebay_device::Device;
use forebay_rx::arrive::{Attachment, Numbering, Waker};
use forebay_rx::backlog::BacklogRing;
use forebay_rx::intake::IntakeConfig;
use forebay_rx::steer::{RPS_FLOW_CNT, SteerConfig};
use forebay_rx::{CpuId, Delivery, Handler, Intake, RxQueue, Source};
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::MAX_CPUS;
use forebay_sys::error::{Error, Result};
use forebay_sys::topology::SYSFS;
pub use idle::{SPIN_ALWAYS_NS, SPIN_MAX_NS};
pub use limits::{BURST_MAX, DEFER_MAX, Limits};
use mailbox::Mailbox;
pub use measured::Measured;
pub use memory::kept_bytes;
pub use outcome::{CpuOutcome, Outcome};
use policies::Policies;
pub use question::{
    BURST_REQUESTS_MAX, Explained, HASH_RANGES, Question, QueueRanges, SampledBurst, SampledPacket,
};
use queue::Queue;
pub use settings::{QueueSettings, Settings};
use shared::EngineCounters;
pub use shared::{CpuProgress, EngineState};
pub use stepped::VirtualCosts;
pub use threads::PANICS_IN_A_ROW;
use worker::{Mailboxes, ThreadRestarts, ThreadState, Worker};

/// An engine, ready to run.
pub struct Engine<H> {
    workers: Vec<Worker<H>>,
    loans: Option<Loans<H>>,
    senders: Vec<Pool>,
    small: Vec<Pool>,
    shared: Arc<EngineState>,
}

impl<H: Handler + 'static> Engine<H> {
    /// Builds an engine: one rx queue per source, in the order of the devices, assigned to the CPUs
    /// round-robin, and one handler per CPU. A handler outlives the threads of its CPU: if it
    /// panics, its current batch is lost, and the next thread hands it the next batch.
    ///
    /// # Errors
    /// If there are no CPUs, the devices do not match the sources, packet memory cannot be
    /// allocated, a source cannot be attached, or the script has an impossible change.
    pub fn build(
        config: &Config,
        sources: Vec<Box<dyn Source>>,
        clock: Clock,
        mut handler: impl FnMut(CpuId) -> H,
    ) -> Result<Self> {
        let cpus = config.cpus.cpus();
        if cpus.is_empty() {
            return Err(Error::Setting {
                what: "cpus",
                value: String::new(),
                why: "an engine runs on at least one CPU".to_owned(),
            });
        }
        let config = &config.completed(sources.len(), Path::new(SYSFS));
        let devices = Devices::of(&config.devices, sources.len())?;
        let shared = Arc::new(EngineState::new(config, clock, devices));
        for scripted in config.script.changes() {
            shared.check(&scripted.change).map_err(|refused| {
                let (what, why) = (scripted.change.knob(), refused.to_string());
                Error::Setting { what, value: scripted.change.value(MAX_CPUS), why }
            })?;
        }
        let mut pools = memory::pools(config, &sources)?;
        let mut queues: Vec<Vec<Queue>> = cpus.iter().map(|_| Vec::new()).collect();
        let mut lanes: Vec<Vec<BacklogRing>> = cpus.iter().map(|_| Vec::new()).collect();
        for (index, (source, pool)) in sources.into_iter().zip(pools.queues.drain(..)).enumerate() {
            let polling = index % cpus.len();
            let (queue, queue_lanes) = open_queue(config, index, (source, pool), &shared)?;
            queues[polling].push(queue);
            for (lane, lanes) in queue_lanes.into_iter().zip(&mut lanes) {
                lanes.push(lane);
            }
        }
        shared.rings_made(config.backlog_capacity());
        let mut counters: Vec<_> = queues.iter().flatten().map(Queue::counted).collect();
        counters.sort_by_key(|(queue, _)| *queue);
        let mailboxes: Mailboxes = cpus.iter().map(|_| Mailbox::default()).collect();
        let workers = cpus.iter().zip(queues).zip(lanes).zip(pools.cpus).enumerate().map(
            |(index, (((&cpu, queues), lanes), returns))| {
                let own = (queues, lanes, returns);
                open_worker(config, (cpu, index), own, handler(cpu), (&mailboxes, &shared))
            },
        );
        let workers: Vec<_> = workers.collect();
        shared.set_counters(EngineCounters {
            queues: counters.into_iter().map(|(_, counters)| counters).collect(),
            cpus: workers.iter().map(|worker| Arc::clone(worker.delivery.counters())).collect(),
        });
        Ok(Self { workers, loans: None, senders: pools.senders, small: pools.small, shared })
    }

    /// Builds an engine over open devices, as [`build`](Self::build) does, on the machine's clock.
    /// Takes the sources out of the devices; each device can still open [sinks](Device::sink) and
    /// report its properties.
    ///
    /// # Errors
    /// As `build`; and if a device cannot use the packet memory.
    pub fn over(
        config: &Config,
        devices: &mut [Device],
        handler: impl FnMut(CpuId) -> H,
    ) -> Result<Self> {
        let sources = devices.iter_mut().flat_map(|device| device.sources.drain(..)).collect();
        Self::build(config, sources, Clock::machine(), handler)
    }

    /// Handler of a CPU, by its index.
    ///
    /// # Panics
    /// If there are fewer CPUs.
    pub fn handler_mut(&mut self, index: usize) -> &mut H {
        &mut self.workers[index].handler
    }

    /// Takes the pools of [other threads](Config::senders) that make packets. Frames still in use
    /// at the end of the run are returned when the pool is dropped.
    #[must_use]
    pub fn take_senders(&mut self) -> Vec<Pool> {
        std::mem::take(&mut self.senders)
    }

    /// Takes the [smallest frames](Config::small_frames), in the order of the CPUs.
    #[must_use]
    pub fn take_small(&mut self) -> Vec<Pool> {
        std::mem::take(&mut self.small)
    }

    /// Handles that wake the CPUs, in their order. Cheap while a CPU is awake.
    #[must_use]
    pub fn wakers(&self) -> Vec<Waker> {
        let waker = |index: usize| -> Waker {
            let shared = Arc::clone(&self.shared);
            Arc::new(move || shared.cpu_waker(index).wake())
        };
        (0..self.workers.len()).map(waker).collect()
    }

    /// Turns by threads of the application, which from now on may turn CPUs that sleep.
    pub fn busy_poll(&mut self) -> Arc<dyn BusyPoll> {
        let (shared, cpus) = (&self.shared, 0..self.workers.len());
        let loan = |index| Arc::new(Loan::new(Arc::clone(shared), index));
        let loans = self.loans.get_or_insert_with(|| cpus.map(loan).collect());
        Arc::new(Borrowers::new(Arc::clone(loans)))
    }

    /// State shared with handles, such as the one that changes the engine while it runs.
    #[must_use]
    pub fn state(&self) -> Arc<EngineState> {
        Arc::clone(&self.shared)
    }

    /// Table in which applications record the CPU that they run on, for RFS.
    #[must_use]
    pub fn flows(&self) -> Flows {
        self.shared.flows()
    }

    /// Handle to stop a running engine: the engine stops receiving, delivers what it has received,
    /// and ends.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Runs on one thread for each CPU until every source is exhausted and every packet handled.
    ///
    /// # Errors
    /// If a thread cannot be started, a thread panics outside its handler, or a handler panics
    /// [`PANICS_IN_A_ROW`] times without handling a batch in between. Errors of sources and
    /// replaced threads are part of the outcome.
    pub fn run(self) -> Result<Outcome<H>> {
        self.run_with(CpuThread::turn_to_the_end)
    }

    /// Runs with `application` in control of every CPU's thread. The application calls for turns of
    /// its CPU whenever it has nothing else to do. After it returns, the engine turns the CPU until
    /// the run ends. If the thread dies, `application` is called again on the replacement thread.
    ///
    /// # Errors
    /// As [`run`](Self::run); and if the application panics.
    pub fn run_with(
        self,
        application: impl Fn(&mut CpuThread<H>) + Send + Sync + 'static,
    ) -> Result<Outcome<H>> {
        let workers = begun(self.workers);
        threads::run(workers, self.loans, &self.shared, Arc::new(application))
    }

    /// Runs on the calling thread, in virtual time, in an order that `seed` determines.
    ///
    /// # Panics
    /// If the engine was built with the machine's clock.
    pub fn run_stepped(self, seed: u64, costs: VirtualCosts) -> Outcome<H> {
        self.run_stepped_observed(seed, costs, |_| ())
    }

    /// Runs as [`run_stepped`](Self::run_stepped) does, and calls `observe` with the time after
    /// every step.
    ///
    /// # Panics
    /// If the engine was built with the machine's clock.
    pub fn run_stepped_observed(
        self,
        seed: u64,
        costs: VirtualCosts,
        observe: impl FnMut(u64),
    ) -> Outcome<H> {
        stepped::run(begun(self.workers), &self.shared, (seed, costs), observe)
    }
}

/// The CPUs as a run begins, each with the changes that were made before.
fn begun<H: Handler>(mut workers: Vec<Worker<H>>) -> Vec<Worker<H>> {
    workers.iter_mut().for_each(Worker::begin);
    workers
}

/// Handle that stops a running engine.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<EngineState>);

impl Stopper {
    /// Requests the stop.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// True if a stop was requested.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.0.is_stopping()
    }
}

/// Makes a queue, and the consumer ends of its backlog rings in the order of the CPUs. Queues are
/// assigned to the CPUs round-robin.
fn open_queue(
    config: &Config,
    index: usize,
    (mut source, mut pool): (Box<dyn Source>, Pool),
    shared: &Arc<EngineState>,
) -> Result<(Queue, Vec<BacklogRing>)> {
    let queue = RxQueue(u16::try_from(index).unwrap_or(u16::MAX));
    let numbering = Numbering::of_queue(queue, shared.queues());
    let wake = shared.waker(queue);
    let attachment = Attachment { pool: &mut pool, numbering, wake };
    source
        .attach(attachment)
        .map_err(|error| Error::of_source(shared.devices().name_of(queue), error))?;
    let cpus = config.cpus.cpus();
    let polling_cpu = config.polls(index);
    let has_rfs = config.rps_flow_cnt > 0;
    let mut intake = Intake::new(IntakeConfig {
        queue,
        cpus: config.cpu_count(),
        verify: config.verify,
        completes_checksums: source.needs().may_be_partial,
        hasher: Arc::clone(&config.hasher),
        coalesce: config.coalesce.on_arrival(),
        steer: SteerConfig {
            polling_cpu,
            rps_flow_cnt: if has_rfs { config.rps_flow_cnt } else { RPS_FLOW_CNT },
            move_after: config.move_after,
            hold_max: config.hold_max,
            spread: config.spread,
            batch_max: config.batches(&shared.clock).max_with(&config.coalesce),
        },
        netdev_max_backlog: config.netdev_max_backlog,
    });
    let (capacity, start) = (config.backlog_capacity(), Position(config.start_counters));
    let noted = config.trace.is_some();
    let lanes = cpus.iter().map(|&cpu| intake.connect(cpu, capacity, start, noted)).collect();
    intake.set_rps_cpus(config.rps_map().cpus().iter().copied(), 0);
    intake.set_sock_flows(shared.flows().table(), 0);
    intake.set_board(Arc::clone(shared.balance_board()));
    intake.set_balance(config.balance, 0);
    if !has_rfs {
        intake.set_rps_flow_cnt(0, 0);
    }
    let name = shared.devices().name_of(queue);
    let mut queue =
        Queue::new(name, intake, (source, pool), polling_cpu, config, shared.follower());
    config.explain.iter().for_each(|&flow| queue.watch(flow));
    Ok((queue, lanes))
}

/// Makes the worker of one CPU from its queues, its ends of all backlogs, and its pool for
/// returning frames to their owners.
fn open_worker<H: Handler>(
    config: &Config,
    (cpu, index): (CpuId, usize),
    (queues, lanes, returns): (Vec<Queue>, Vec<BacklogRing>, Pool),
    handler: H,
    (mailboxes, shared): (&Mailboxes, &Arc<EngineState>),
) -> Worker<H> {
    let batches = config.batches(&shared.clock);
    let batch_max = batches.max_with(&config.coalesce) as usize;
    let mut delivery = Delivery::new(cpu, lanes, batch_max);
    delivery.set_coalesce(config.coalesce.on_delivery());
    Worker {
        cpu,
        index,
        queues,
        returns,
        delivery,
        handler,
        changes: shared.follower(),
        coalesce: config.coalesce,
        batches,
        mailboxes: Arc::clone(mailboxes),
        policies: Policies { balance: config.balance.policy, spread: config.spread },
        delivering_since_ns: None,
        limits: config.limits,
        pollers: None,
        budget: config.limits.budget(0),
        now_ns: 0,
        turns: 0,
        first_queue: 0,
        has_polled_all: false,
        backlogs_first: false,
        life: ThreadState::default(),
        delivered: false,
        restarts: ThreadRestarts::default(),
        trace: config.intake_trace(),
        shared: Arc::clone(shared),
    }
}
