//! Construction of an engine: its queues, their backlogs, and the worker of each CPU.

use std::path::Path;
use std::sync::Arc;

use forebay_buf::{Pool, Position};
use forebay_device::Device;
use forebay_rx::arrive::{Attachment, Numbering};
use forebay_rx::backlog::BacklogRing;
use forebay_rx::intake::IntakeConfig;
use forebay_rx::steer::{RPS_FLOW_CNT, SteerConfig};
use forebay_rx::{CpuId, Delivery, Handler, Intake, RxQueue, Source};
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::MAX_CPUS;
use forebay_sys::error::{Error, Result};
use forebay_sys::topology::SYSFS;

use super::config::Config;
use super::devices::Devices;
use super::engine::Engine;
use super::mailbox::Mailbox;
use super::memory;
use super::policies::Policies;
use super::queue::Queue;
use super::shared::{EngineCounters, EngineState};
use super::worker::{Mailboxes, ThreadRestarts, ThreadState, Worker};

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
        let mut backlogs: Vec<Vec<BacklogRing>> = cpus.iter().map(|_| Vec::new()).collect();
        for (index, (source, pool)) in sources.into_iter().zip(pools.queues.drain(..)).enumerate() {
            let polling = index % cpus.len();
            let (queue, queue_backlogs) = open_queue(config, index, (source, pool), &shared)?;
            queues[polling].push(queue);
            for (backlog, backlogs) in queue_backlogs.into_iter().zip(&mut backlogs) {
                backlogs.push(backlog);
            }
        }
        shared.rings_made(config.backlog_capacity());
        let mut counters: Vec<_> = queues.iter().flatten().map(Queue::counted).collect();
        counters.sort_by_key(|(queue, _)| *queue);
        let mailboxes: Mailboxes = cpus.iter().map(|_| Mailbox::default()).collect();
        let workers = cpus.iter().zip(queues).zip(backlogs).zip(pools.cpus).enumerate().map(
            |(index, (((&cpu, queues), backlogs), returns))| {
                let own = (queues, backlogs, returns);
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
    let (wake, wake_to_send) = (shared.waker(queue), shared.waker_to_send(queue));
    source
        .attach(Attachment { pool: &mut pool, numbering, wake, wake_to_send })
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
    let backlogs = cpus.iter().map(|&cpu| intake.connect(cpu, capacity, start, noted)).collect();
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
    Ok((queue, backlogs))
}

/// Makes the worker of one CPU from its queues, its ends of all backlogs, and its pool for
/// returning frames to their owners.
fn open_worker<H: Handler>(
    config: &Config,
    (cpu, index): (CpuId, usize),
    (queues, backlogs, returns): (Vec<Queue>, Vec<BacklogRing>, Pool),
    handler: H,
    (mailboxes, shared): (&Mailboxes, &Arc<EngineState>),
) -> Worker<H> {
    let batches = config.batches(&shared.clock);
    let batch_max = batches.max_with(&config.coalesce) as usize;
    let mut delivery = Delivery::new(cpu, backlogs, batch_max);
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
