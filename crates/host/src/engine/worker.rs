//! One CPU at work: the queues it polls, its delivery, its handler.

use std::sync::Arc;

use mem::Pool;
use path::intake::DEV_WEIGHT;
use path::{CpuId, Delivery, Handler};

use super::changes::Follower;
use super::queue::{Activity, Queue};
use super::shared::Shared;
use super::{CpuOutcome, Outcome};
use crate::control::{Change, Coalesce};
use crate::error::Error;

/// All that belongs to one CPU.
pub(super) struct Worker<H> {
    pub(super) cpu: CpuId,
    /// Its place in the engine.
    pub(super) index: usize,
    pub(super) pool: Pool,
    pub(super) queues: Vec<Queue>,
    pub(super) delivery: Delivery,
    pub(super) handler: H,
    /// The changes that the delivery follows.
    pub(super) changes: Follower,
    /// How packets are coalesced in it.
    pub(super) coalesce: Coalesce,
    pub(super) shared: Arc<Shared>,
}

impl<H: Handler> Worker<H> {
    /// One turn: each queue once, then the backlogs, then frames home.
    pub(super) fn turn(&mut self) -> Activity {
        self.follow_changes();
        let mut activity = self.intake_turn();
        let delivered = self.delivery_turn(DEV_WEIGHT);
        self.pool.flush();
        if delivered > 0 {
            activity = activity.and(Activity::Worked(delivered));
        }
        activity
    }

    /// Polls each queue once.
    pub(super) fn intake_turn(&mut self) -> Activity {
        let queues = self.queues.iter_mut();
        queues
            .map(|queue| queue.turn(&mut self.pool, &self.shared))
            .fold(Activity::Ended, Activity::and)
    }

    /// Delivers up to `budget` packets, unless the CPU is paused.
    fn delivery_turn(&mut self, budget: usize) -> usize {
        if self.shared.is_paused(self.index) {
            return 0;
        }
        self.delivery.turn(budget, &mut self.pool, &mut self.handler)
    }

    /// Has the delivery work as the latest changes say. Nothing is in hand.
    pub(super) fn follow_changes(&mut self) {
        while let Some(entry) = self.changes.next() {
            if let Change::Coalesce(change) = entry.change {
                let before = self.coalesce.on_delivery();
                self.coalesce = self.coalesce.after(change);
                if self.coalesce.on_delivery() != before {
                    self.delivery.set_coalesce(self.coalesce.on_delivery());
                }
            }
        }
    }

    /// Whether there is a reason not to sleep, other than what a source may have.
    pub(super) fn has_business(&mut self) -> bool {
        let may_deliver = !self.shared.is_paused(self.index) && self.delivery.has_work();
        let must_stop = self.shared.is_stopping() && !self.queues.iter().all(Queue::has_ended);
        let must_follow = self.changes.has_next() || self.queues.iter().any(Queue::must_follow);
        may_deliver || must_stop || must_follow || self.has_ended() || self.shared.is_aborted()
    }

    /// Whether nothing will ever come again.
    pub(super) fn has_ended(&mut self) -> bool {
        // The order matters: what the last queue published is seen once it is seen to have ended.
        !self.shared.has_live_queues() && !self.delivery.has_work()
    }
}

impl Activity {
    /// What two parts of a turn come to together.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Worked(some), Self::Worked(more)) => Self::Worked(some + more),
            (Self::Worked(some), _) | (_, Self::Worked(some)) => Self::Worked(some),
            (Self::Blocked, _) | (_, Self::Blocked) => Self::Blocked,
            (Self::IdleUntil(one), Self::IdleUntil(other)) => {
                Self::IdleUntil(one.into_iter().chain(other).min())
            }
            (Self::Ended, other) | (other, Self::Ended) => other,
        }
    }
}

/// Puts together what a run leaves, from workers that have ended.
pub(super) fn outcome<H: Handler>(
    mut workers: Vec<Worker<H>>,
    shared: &Shared,
    elapsed_ns: u64,
) -> Outcome<H> {
    workers.sort_by_key(|worker| worker.index);
    let mut queues: Vec<_> = Vec::new();
    for worker in &mut workers {
        worker.pool.flush();
        for queue in &mut worker.queues {
            queues.push((Arc::clone(queue.counters()), queue.queued(), queue.take_error()));
        }
    }
    let frames_away = workers.iter_mut().map(|worker| worker.pool.away()).sum();
    let cpus = workers.iter().map(|worker| CpuOutcome {
        cpu: worker.cpu,
        delivery: Arc::clone(worker.delivery.counters()),
        busy_ns: shared.busy_ns(worker.index),
        wakeups: shared.bell(worker.index).rung(),
    });
    let cpus = cpus.collect();
    let queued = queues.iter().map(|(_, queued, _)| queued).sum();
    let mut errors: Vec<Error> = Vec::new();
    let queues = queues.into_iter().map(|(counters, _, error)| {
        errors.extend(error);
        counters
    });
    let queues = queues.collect();
    let handlers = workers.into_iter().map(|worker| worker.handler).collect();
    Outcome { handlers, queues, cpus, elapsed_ns, queued, frames_away, errors }
}
