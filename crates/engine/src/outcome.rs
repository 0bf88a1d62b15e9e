//! Outcome of a run.

use std::sync::Arc;

use forebay_buf::Pool;
use forebay_rx::counters::{DeliveryCounters, IntakeCounters};
use forebay_rx::{CpuId, Handler};
use forebay_sys::error::Error;

use super::mailbox::Mailbox;
use super::question::Explained;
use super::queue::Queue;
use super::shared::EngineState;
use super::worker::Worker;

/// Outcome of a run.
#[derive(Debug)]
pub struct Outcome<H> {
    /// Handlers, in the order of the CPUs.
    pub handlers: Vec<H>,
    /// Counters of each queue's intake.
    pub queues: Vec<Arc<IntakeCounters>>,
    /// Counters of each CPU.
    pub cpus: Vec<CpuOutcome>,
    /// Duration of the run, in engine time.
    pub elapsed_ns: u64,
    /// Number of packets still queued or held; 0 after a run that ended.
    pub queued: u64,
    /// Number of frames not returned to their owners at the end of the run: queued in sockets, or
    /// leaked. See [`frames_still_away`](Self::frames_still_away).
    pub frames_away: usize,
    /// State of each [explained](super::Config::explain) flow, per queue.
    pub explained: Vec<Vec<Explained>>,
    /// Errors of sources, in the order of the queues, and of the script.
    pub errors: Vec<Error>,
    /// Packet memory of the run.
    pools: Vec<Pool>,
}

/// Counters of one CPU.
#[derive(Clone, Debug)]
pub struct CpuOutcome {
    /// Id of the CPU.
    pub cpu: CpuId,
    /// Counters of its delivery.
    pub delivery: Arc<DeliveryCounters>,
    /// Time spent on packets, not on empty polls, in nanoseconds.
    pub busy_ns: u64,
    /// Number of times the CPU was woken.
    pub wakeups: u64,
    /// Number of its threads that died and were replaced.
    pub replaced: u64,
    /// Message of the last panic.
    pub last_panic: Option<String>,
}

impl<H: Handler> Outcome<H> {
    /// Collects the outcome from workers that have ended.
    pub(super) fn of(mut workers: Vec<Worker<H>>, shared: &EngineState, elapsed_ns: u64) -> Self {
        workers.sort_by_key(|worker| worker.index);
        let mut queues = Vec::new();
        for worker in &mut workers {
            worker.flush();
            queues.append(&mut worker.queues);
        }
        if let Some(worker) = workers.first() {
            queues.extend(worker.mailboxes.iter().flat_map(Mailbox::take));
        }
        queues.sort_by_key(Queue::number);
        queues.iter_mut().for_each(|queue| queue.close(shared));
        let at_ns = shared.clock.now_ns();
        let explained = shared.explain.iter().map(|&flow| {
            let queues = queues.iter_mut();
            queues.map(|queue| queue.explain(flow, at_ns)).collect()
        });
        let explained = explained.collect();
        let queued = queues.iter_mut().map(Queue::queued).sum();
        let errors = queues.iter_mut().filter_map(Queue::take_error);
        let errors = errors.chain(shared.take_refused()).collect();
        let counted = queues.iter().map(|queue| Arc::clone(queue.counters())).collect();
        let cpus = workers.iter_mut().map(|worker| CpuOutcome::of(worker, shared)).collect();
        let (handlers, returns): (Vec<H>, Vec<Pool>) =
            workers.into_iter().map(|worker| (worker.handler, worker.returns)).unzip();
        let mut pools: Vec<_> = queues.into_iter().map(|queue| queue.pool).collect();
        pools.extend(returns);
        let frames_away = pools.iter_mut().map(Pool::in_use).sum();
        Self {
            handlers,
            queues: counted,
            cpus,
            elapsed_ns,
            queued,
            frames_away,
            explained,
            errors,
            pools,
        }
    }
}

impl<H> Outcome<H> {
    /// Number of frames not returned so far; 0 once all queued datagrams have been read.
    pub fn frames_still_away(&mut self) -> usize {
        self.pools.iter_mut().map(Pool::in_use).sum()
    }

    /// One more than the highest CPU.
    #[must_use]
    pub fn cpu_count(&self) -> usize {
        self.cpus.iter().map(|cpu| cpu.cpu.index() + 1).max().unwrap_or(0)
    }
}

impl CpuOutcome {
    fn of<H: Handler>(worker: &mut Worker<H>, shared: &EngineState) -> Self {
        Self {
            cpu: worker.cpu,
            delivery: Arc::clone(worker.delivery.counters()),
            busy_ns: shared.busy_ns(worker.index),
            wakeups: shared.cpu_waker(worker.index).wakeups(),
            replaced: worker.restarts.count,
            last_panic: worker.restarts.last_panic.take(),
        }
    }
}
