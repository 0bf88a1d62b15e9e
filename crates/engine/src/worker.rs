//! Worker of one CPU: the queues that it polls, its delivery, its handler.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_buf::Pool;
use forebay_rx::{CpuId, Delivery, Handler};

use super::changes::{Follower, LogEntry};
use super::config::BatchSizes;
use super::limits::{Budget, CHANGES_A_TURN, DEFER_MAX, Limits};
use super::mailbox::Mailbox;
use super::policies::Policies;
use super::pollers::pollers;
use super::queue::{Activity, Queue};
use super::shared::EngineState;
use crate::knobs::{Change, Coalesce};
use crate::trace::IntakeTrace;

/// Queues handed to each CPU, by the CPU's index.
pub(super) type Mailboxes = Arc<[Mailbox<Queue>]>;

/// State of one CPU. Outlives the CPU's threads.
pub(super) struct Worker<H> {
    pub(super) cpu: CpuId,
    /// Index of the CPU in the engine.
    pub(super) index: usize,
    /// Queues that it polls.
    pub(super) queues: Vec<Queue>,
    /// Pool without frames, by which a CPU without a queue returns frames to their owners.
    pub(super) returns: Pool,
    pub(super) delivery: Delivery,
    pub(super) handler: H,
    /// Changes to be applied to the delivery.
    pub(super) changes: Follower,
    /// Coalescing on delivery.
    pub(super) coalesce: Coalesce,
    pub(super) batches: BatchSizes,
    /// Queues being handed over to each CPU.
    pub(super) mailboxes: Mailboxes,
    /// Policies that may need the time of delivery.
    pub(super) policies: Policies,
    /// Start of the delivery in the current turn, until its end is known.
    pub(super) delivering_since_ns: Option<u64>,
    /// Budgets of a turn.
    pub(super) limits: Limits,
    /// Index of the CPU that polls each queue, once the running CPUs have changed.
    pub(super) pollers: Option<Vec<usize>>,
    /// Budget left of the turn.
    pub(super) budget: Budget,
    /// Time at the last read of the clock.
    pub(super) now_ns: u64,
    /// Number of turns begun.
    pub(super) turns: u64,
    /// Queue to start with next turn; the last turn ran out of budget there.
    pub(super) first_queue: usize,
    /// True if the last turn had no budget left for the backlogs: the next one delivers first.
    pub(super) backlogs_first: bool,
    /// True if the last turn polled all queues.
    pub(super) has_polled_all: bool,
    pub(super) life: ThreadState,
    /// True if this CPU has announced that its delivery is complete.
    pub(super) delivered: bool,
    pub(super) restarts: ThreadRestarts,
    pub(super) trace: Option<IntakeTrace>,
    pub(super) shared: Arc<EngineState>,
}

/// State of the CPU's thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum ThreadState {
    /// Alive.
    #[default]
    Alive,
    /// The thread terminates after it dequeues its next batch (fault injection).
    Terminating,
    /// The thread terminated with a dequeued batch, which is lost.
    Terminated,
    /// The handler has the batch: a panic now is the handler's.
    Handling,
}

/// Threads that a CPU has lost.
#[derive(Debug, Default)]
pub(super) struct ThreadRestarts {
    pub(super) count: u64,
    /// Number of panics without a batch handled in between.
    pub(super) in_a_row: u32,
    /// Number of batches handled at the last panic.
    batches: u64,
    pub(super) last_panic: Option<String>,
}

impl<H: Handler> Worker<H> {
    /// Runs a turn that begins at `now_ns`: polls each queue once, delivers, then returns frames. After a turn whose budget
    /// left the backlogs unserved, delivers first.
    pub(super) fn turn(&mut self, now_ns: u64) -> Activity {
        self.begin_turn(now_ns);
        let (activity, delivered) = if self.backlogs_first {
            self.backlogs_first = false;
            let delivered = self.delivery_turn();
            self.now_ns = self.shared.clock.now_ns();
            self.end_delivery(self.now_ns);
            (self.intake_turn(), delivered)
        } else {
            let activity = self.intake_turn();
            // Otherwise the time is recent.
            if self.policies.need_delivery_time() && matches!(activity, Activity::Worked(_)) {
                self.now_ns = self.shared.clock.now_ns();
            }
            (activity, self.delivery_turn())
        };
        self.end_turn();
        if delivered > 0 { activity.and(Activity::Worked(delivered)) } else { activity }
    }

    /// Runs a turn that begins at `began_ns`, records its times, and returns the time at its end.
    pub(super) fn timed_turn(&mut self, began_ns: u64) -> (Activity, u64) {
        let activity = self.turn(began_ns);
        if self.life == ThreadState::Terminated {
            return (activity, began_ns);
        }
        let now_ns = self.shared.clock.now_ns();
        self.end_delivery(now_ns);
        self.shared.turn_ended(self.index, now_ns);
        if let Activity::Worked(_) = activity {
            self.shared.add_busy(self.index, now_ns - began_ns);
        }
        (activity, now_ns)
    }

    /// Transmits what the CPU's queues have, while it sleeps, from `began_ns` on.
    pub(super) fn transmit(&mut self, began_ns: u64) {
        for queue in &mut self.queues {
            queue.transmit();
            queue.pool.flush();
        }
        let now_ns = self.shared.clock.now_ns();
        self.shared.add_busy(self.index, now_ns.saturating_sub(began_ns));
    }

    /// Records the time of the delivery that has ended now, if it is needed.
    pub(super) fn end_delivery(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.delivering_since_ns.take() {
            self.shared.add_delivering(self.index, now_ns.saturating_sub(since_ns));
        }
    }

    /// Records time that the application took, on the thread of this CPU, for packets delivered there.
    pub(super) fn add_application_work(&self, ns: u64, is_delivery: bool) {
        self.shared.add_busy(self.index, ns);
        if is_delivery && self.policies.need_delivery_time() {
            self.shared.add_delivering(self.index, ns);
        }
    }

    /// Applies all changes that were made before the run, of the CPU and of its queues.
    pub(super) fn begin(&mut self) {
        while self.changes.has_next() {
            self.follow_changes();
        }
        self.queues.iter_mut().for_each(|queue| queue.begin(&self.shared));
    }

    /// Applies changes and sets the budget of this turn.
    pub(super) fn begin_turn(&mut self, now_ns: u64) {
        self.follow_changes();
        self.adopt_queues();
        self.now_ns = now_ns;
        self.turns += 1;
        self.budget = self.limits.budget(now_ns);
        // A panic in a tick is the handler's, as in a batch.
        let life = std::mem::replace(&mut self.life, ThreadState::Handling);
        self.handler.tick(now_ns);
        self.life = life;
    }

    /// Returns frames to their owners, and counts a turn that ran out of budget (`time_squeeze`).
    pub(super) fn end_turn(&mut self) {
        self.flush();
        if self.budget.is_squeezed() {
            self.shared.add_squeezed(self.index);
        }
    }

    /// Polls each queue once, within the budget.
    pub(super) fn intake_turn(&mut self) -> Activity {
        let count = self.queues.len();
        let first = std::mem::take(&mut self.first_queue);
        self.has_polled_all = true;
        let mut activity = Activity::Ended;
        for at in (0..count).map(|step| (first + step) % count) {
            let queue = &mut self.queues[at];
            let wanted = self.limits.burst();
            let granted = self.budget.grant(wanted, self.now_ns);
            if granted == 0 {
                // Queues that got no budget go first in the next turn.
                (self.first_queue, self.has_polled_all) = (at, false);
                self.budget.squeeze_if(queue.received() > 0);
                return activity.and(Activity::Worked(0));
            }
            let turned = queue.turn(granted, &self.shared);
            self.now_ns = queue.now_ns().max(self.now_ns);
            let frames = queue.received();
            if frames > 0 {
                self.budget.spend(frames);
                self.shared.add_polled(self.index, frames);
                self.budget.squeeze_if(granted < wanted && frames == granted);
            }
            activity = activity.and(turned);
        }
        activity
    }

    /// True if the last turn received all packets that were pending, for this CPU.
    pub(super) fn has_received_all(&self) -> bool {
        self.has_polled_all && self.queues.iter().all(Queue::is_drained_here)
    }

    /// Number of packets that may be taken from the backlogs now.
    pub(super) fn grant_delivery(&mut self) -> usize {
        // A paused CPU leaves its backlogs alone until it is resumed.
        if self.shared.is_paused(self.index) {
            return 0;
        }
        let granted = self.budget.grant(self.limits.packets(), self.now_ns);
        if granted == 0 && self.delivery.has_work() {
            self.backlogs_first = true;
            self.budget.squeeze_if(true);
        }
        granted
    }

    /// Delivers packets within the budget.
    fn delivery_turn(&mut self) -> usize {
        let granted = self.grant_delivery();
        if granted == 0 {
            return 0;
        }
        if self.life == ThreadState::Terminating {
            return self.take_last_batch(granted);
        }
        self.life = ThreadState::Handling;
        let delivered = self.deliver(granted);
        let is_timed = delivered > 0 && self.policies.need_delivery_time();
        self.delivering_since_ns = is_timed.then_some(self.now_ns);
        self.life = ThreadState::Alive;
        self.budget.spend(delivered);
        let is_short = delivered == granted && granted < self.limits.packets();
        self.budget.squeeze_if(is_short && self.delivery.has_work());
        delivered
    }

    /// Delivers `granted` packets. If `skb_defer_max` is below a batch, returns frames after every
    /// so many packets.
    fn deliver(&mut self, granted: usize) -> usize {
        let pool = self.queues.first_mut().map_or(&mut self.returns, |queue| &mut queue.pool);
        let deferred = self.limits.deferred();
        let (measured, clock) = (self.shared.measured(), &self.shared.clock);
        if deferred == DEFER_MAX as usize {
            let ends = (&mut self.delivery, &mut self.handler);
            return measured.turn(ends, granted, pool, clock);
        }
        let mut delivered = 0;
        while delivered < granted {
            let portion = deferred.max(1).min(granted - delivered);
            let ends = (&mut self.delivery, &mut self.handler);
            let done = measured.turn(ends, portion, pool, clock);
            pool.flush();
            delivered += done;
            if done == 0 {
                break;
            }
        }
        delivered
    }

    /// Dequeues the batch that is lost with the thread (fault injection), if any is queued.
    pub(super) fn take_last_batch(&mut self, packets_max: usize) -> usize {
        let taken = self.delivery.take(packets_max);
        if taken > 0 {
            self.life = ThreadState::Terminated;
        }
        taken
    }

    /// Recovers after a thread died: its current batch is lost, and nothing else.
    pub(super) fn recover(&mut self, panic: Option<String>) {
        let batches = self.delivery.counters().batches.get();
        self.restarts.count += 1;
        if panic.is_some() {
            let is_in_a_row = batches == self.restarts.batches;
            self.restarts.in_a_row = if is_in_a_row { self.restarts.in_a_row + 1 } else { 1 };
            self.restarts.batches = batches;
            self.restarts.last_panic = panic;
        }
        self.life = ThreadState::Alive;
        let Some((queue, lost)) = self.delivery.abandon_batch() else { return };
        if let Some(trace) = &mut self.trace {
            trace.set_last_frame(self.shared.recent_frame(queue));
        }
        for dropped in lost {
            if let Some(trace) = &self.trace {
                trace.dropped(&dropped, queue);
            }
            if let Some(packet) = dropped.packet {
                self.returns.put(packet.frame);
            }
        }
        self.flush();
    }

    /// Applies pending changes, some a turn; called between batches.
    fn follow_changes(&mut self) {
        for entry in self.changes.by_ref().take(CHANGES_A_TURN) {
            let LogEntry::Change(made) = entry else { continue };
            let Some(change) = &made.change else { continue };
            match change {
                Change::Coalesce(change) => {
                    let before = self.coalesce.on_delivery();
                    self.coalesce = self.coalesce.after(*change);
                    if self.coalesce.on_delivery() != before {
                        self.delivery.set_coalesce(self.coalesce.on_delivery());
                        let batch_max = self.batches.max_with(&self.coalesce) as usize;
                        self.delivery.set_batch_max(batch_max);
                    }
                }
                Change::Kill(cpu) if *cpu == self.cpu => self.life = ThreadState::Terminating,
                Change::Balance(_) | Change::Spread(_) => {
                    self.policies = self.policies.after(change);
                }
                Change::Cpus(cpus) => {
                    let queues = self.shared.queues().into();
                    self.pollers = Some(pollers(self.shared.cpus(), queues, cpus));
                }
                _ => self.limits = self.limits.after(change),
            }
        }
    }

    /// Takes over queues handed to this CPU, and hands on those that another must poll.
    fn adopt_queues(&mut self) {
        if self.mailboxes[self.index].has_mail() {
            for mut queue in self.mailboxes[self.index].take() {
                queue.move_to(self.cpu, &self.shared);
                self.queues.push(queue);
            }
        }
        // Others may have followed later changes than this CPU, and have handed queues over by them.
        if self.changes.has_next() {
            return;
        }
        let Some(pollers) = &self.pollers else { return };
        // Ended queues are not handed over: nothing is polled from them any more.
        let leaves = |queue: &Queue| {
            !queue.has_ended() && pollers[usize::from(queue.number().0)] != self.index
        };
        if !self.queues.iter().any(leaves) {
            return;
        }
        // The pools' return bins hold frames of other owners.
        self.queues.iter_mut().for_each(|queue| queue.pool.flush());
        for queue in self.queues.extract_if(.., |queue| leaves(queue)) {
            let to = pollers[usize::from(queue.number().0)];
            self.mailboxes[to].put(queue);
            self.shared.cpu_waker(to).wake();
        }
    }

    /// Returns all batched frames to their owners.
    pub(super) fn flush(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.pool.flush());
        self.returns.flush();
    }

    /// True if there is work other than frames of a source, so that the CPU must not sleep.
    pub(super) fn has_pending_work(&mut self) -> bool {
        let may_deliver = !self.shared.is_paused(self.index) && self.delivery.has_work();
        let must_stop = self.shared.is_stopping() && !self.queues.iter().all(Queue::has_ended);
        may_deliver
            || self.queues.iter_mut().any(Queue::has_to_send)
            || must_stop
            || self.must_follow()
            || self.has_ended()
            || self.shared.is_aborted()
    }

    /// True if changes are pending for this CPU or its queues.
    pub(super) fn must_follow(&self) -> bool {
        self.changes.has_next()
            || self.queues.iter().any(Queue::must_follow)
            || self.mailboxes[self.index].has_mail()
    }

    /// True once no packet can reach this CPU and no other CPU has any left to transmit here.
    pub(super) fn has_ended(&mut self) -> bool {
        // Order matters: once the last queue is seen to have ended, all packets that it published
        // are visible to `has_work`; but those of a grown ring are not while others are unreleased.
        let may_end = !self.delivered && !self.shared.has_live_queues();
        if may_end && !self.delivery.has_unreleased() && !self.delivery.has_work() {
            self.delivered = true;
            self.shared.cpu_delivered();
        }
        self.delivered && self.shared.all_delivered()
    }

    /// True if there are [descriptors](Self::descriptors).
    pub(super) fn has_descriptors(&self) -> bool {
        let has_one = self.queues.iter().any(|queue| queue.descriptor().is_some());
        has_one || self.handler.descriptor().is_some()
    }

    /// Descriptors that are readable once frames are pending for this CPU, or something else for its handler.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let of_queues = self.queues.iter().filter_map(Queue::descriptor);
        of_queues.chain(self.handler.descriptor()).collect()
    }
}

impl Activity {
    /// Combined progress of two parts of a turn.
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

#[cfg(test)]
mod tests;
