//! One rx queue: its source, its packet memory, its intake, and the changes to be applied.

mod apply; //   effect of a change on a queue
mod sampled; // flows of a burst, for an observer

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use forebay_buf::Pool;
use forebay_rx::arrive::{Burst, PollRequest, PollStatus, Polled, RefusedFrame, SourceError};
use forebay_rx::backlog::FlowLimit;
use forebay_rx::counters::IntakeCounters;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{BalanceConfig, CpuLoad, SpreadConfig};
use forebay_rx::{CpuId, DropReason, Intake, Packet, RxQueue, Source};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::error::Error;

use super::changes::{Follower, LogEntry};
use super::config::{Config, WhenFull};
use super::deferred_free::Retired;
use super::limits::CHANGES_A_TURN;
use super::measured::Measured;
use super::question::{Explained, Question, QueueRanges, SampledBurst, SampledPacket, middles};
use super::shared::EngineState;
use crate::knobs::{Coalesce, ScriptedChange};
use crate::trace::IntakeTrace;

/// Longest time for a source to give its last frames at the end of a run.
const LAST_FRAMES_NS: u64 = 2_000_000_000;

/// Longest time for a source to transmit its last packets after the run.
const LINGER_NS: u64 = 100_000_000;

/// Time until an idle queue looks again whether a fence is passed: no CPU announces that.
const FENCE_LOOK_NS: u64 = 1_000_000;

/// An rx queue with its source and intake.
pub(super) struct Queue {
    /// Name in reports; prefixed with the device's name if there are several devices.
    name: String,
    intake: Intake,
    /// `None` once the run is over.
    source: Option<Box<dyn Source>>,
    /// Packet memory to receive into.
    pub(super) pool: Pool,
    polling_cpu: CpuId,
    burst: Burst,
    /// Lower bound of the next frame's number.
    next_frame: u64,
    changes: Follower,
    /// Number of scripted changes applied.
    scripted: usize,
    /// Latest change applied.
    epoch: u32,
    coalesce: Coalesce,
    balance: BalanceConfig,
    spread: SpreadConfig,
    /// Loads of all CPUs.
    cpu_loads: Vec<CpuLoad>,
    flow_limit_cpus: CpuList,
    /// Flow limit for when a CPU in that bitmap polls the queue.
    spare_flow_limit: Option<FlowLimit>,
    when_full: WhenFull,
    trace: Option<IntakeTrace>,
    /// Requests for the flows of the next burst.
    burst_requests: Vec<Sender<SampledBurst>>,
    /// Time of the last turn.
    now_ns: u64,
    /// Number of frames that the last turn received.
    received: usize,
    /// True if the last poll found as many frames as it could take.
    was_filled: bool,
    /// True if the last poll left frames in the source, for want of room or memory.
    was_refused: bool,
    /// True if packets of the last poll went to other CPUs.
    woke_others: bool,
    /// Time of the first poll that asked for the last frames (`is_last`).
    last_since_ns: Option<u64>,
    source_ended: bool,
    ended: bool,
    failed: Option<SourceError>,
}

/// Outcome of a queue's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Activity {
    /// Work was done on this number of frames or packets, received, delivered or sent.
    Worked(usize),
    /// No work now; the time at which more is due, if known.
    IdleUntil(Option<u64>),
    /// Work pending, but other CPUs must make room first.
    Blocked,
    /// No more work, ever.
    Ended,
}

impl Activity {
    /// Combines this outcome with a number of packets transmitted before.
    fn after(self, sent: usize) -> Self {
        match self {
            Self::Worked(frames) => Self::Worked(frames + sent),
            _ if sent > 0 => Self::Worked(sent),
            other => other,
        }
    }
}

impl Queue {
    pub(super) fn new(
        name: String,
        intake: Intake,
        (source, pool): (Box<dyn Source>, Pool),
        polling_cpu: CpuId,
        config: &Config,
        changes: Follower,
    ) -> Self {
        Self {
            name,
            intake,
            source: Some(source),
            pool,
            polling_cpu,
            burst: Burst::default(),
            next_frame: 0,
            changes,
            scripted: 0,
            epoch: 0,
            flow_limit_cpus: CpuList::default(),
            coalesce: config.coalesce,
            balance: config.balance,
            spread: SpreadConfig { policy: config.spread, ..SpreadConfig::default() },
            cpu_loads: Vec::new(),
            spare_flow_limit: None,
            when_full: config.when_full,
            trace: config.intake_trace(),
            burst_requests: Vec::new(),
            now_ns: 0,
            received: 0,
            was_filled: false,
            was_refused: false,
            woke_others: false,
            last_since_ns: None,
            source_ended: false,
            ended: false,
            failed: None,
        }
    }

    /// Sends what is queued, polls the source once for at most `frames_max` frames, and passes these through the intake.
    pub(super) fn turn(&mut self, frames_max: usize, shared: &EngineState) -> Activity {
        self.follow_changes(shared);
        self.intake.set_stamped(shared.measured() != Measured::Nothing);
        self.received = 0;
        let sent = self.transmit();
        if self.ended {
            return Activity::Ended.after(sent);
        }
        let activity = self.poll_once(frames_max, shared).after(sent);
        self.retire_tables(shared);
        activity
    }

    /// Transmits what is queued, recycles what was sent, and returns the number of frames.
    pub(super) fn transmit(&mut self) -> usize {
        self.source.as_mut().map_or(0, |source| source.transmit(&mut self.pool))
    }

    /// Applies all changes that were made before the run: they hold from the first frame on.
    pub(super) fn begin(&mut self, shared: &EngineState) {
        while self.changes.has_next() {
            self.retire_tables(shared);
            self.follow_changes(shared);
        }
    }

    fn retire_tables(&mut self, shared: &EngineState) {
        while let Some(tables) = self.intake.take_retired() {
            shared.reclaimer.take(Retired::FlowTables(tables));
        }
    }

    fn poll_once(&mut self, frames_max: usize, shared: &EngineState) -> Activity {
        self.pool.collect();
        let polled = self.poll(frames_max, shared);
        let frames = self.burst.len();
        (self.received, self.woke_others) = (frames, false);
        self.was_filled = frames >= self.burst.asked;
        self.was_refused = polled == Activity::Blocked;
        self.process_burst(shared);
        match polled {
            Activity::Ended if self.intake.held() == 0 => {
                self.ended = true;
                shared.queue_ended();
                Activity::Worked(frames)
            }
            _ if frames > 0 => Activity::Worked(frames),
            // Held packets must leave before the queue ends, and wait for other CPUs.
            Activity::Ended => Activity::Blocked,
            _ if self.intake.held() > 0 => Activity::Blocked,
            Activity::IdleUntil(due_ns) => {
                let look_ns = self.now_ns.saturating_add(FENCE_LOOK_NS);
                let look = self.intake.is_waiting().then_some(look_ns);
                let due = due_ns.into_iter().chain(self.intake.next_timeout_ns()).chain(look);
                Activity::IdleUntil(due.min())
            }
            blocked => blocked,
        }
    }

    /// Fills the burst, if there is room for it, and records in it whether more frames are pending.
    fn poll(&mut self, frames_max: usize, shared: &EngineState) -> Activity {
        self.burst.poll_status = PollStatus::MorePending;
        let Some(source) = self.source.as_mut().filter(|_| !self.source_ended) else {
            self.burst.poll_status = PollStatus::Last;
            return Activity::Ended;
        };
        let waits = self.when_full == WhenFull::Wait && !shared.is_any_paused();
        let mut burst = u32::try_from(frames_max).unwrap_or(u32::MAX);
        if waits {
            burst = self.intake.room_for(burst);
            if burst == 0 {
                if self.intake.queued() == 0 {
                    // No CPU can make room: packets held here take it up. `Last` lets held segments
                    // go.
                    self.burst.poll_status = PollStatus::Last;
                }
                return Activity::Blocked;
            }
        }
        let now_ns = shared.clock.now_ns();
        let is_last = shared.is_stopping();
        if is_last {
            let since_ns = *self.last_since_ns.get_or_insert(now_ns);
            if now_ns.saturating_sub(since_ns) > LAST_FRAMES_NS {
                // The source ignores the request for its last frames, and a run must end.
                self.end_source(shared);
                return Activity::Ended;
            }
        }
        self.burst.asked = burst as usize;
        let ask = PollRequest { now_ns, max: burst as usize, may_wait: waits, is_last };
        let activity = match source.poll(ask, &mut self.pool, &mut self.burst) {
            Ok(Polled::Ready) if self.burst.is_empty() => {
                self.burst.poll_status = PollStatus::Last; // no buffer was free, as below
                Activity::Blocked
            }
            Ok(Polled::Ready) => Activity::Worked(0),
            Ok(Polled::IdleUntil { now_ns }) => {
                self.burst.poll_status = PollStatus::Drained;
                Activity::IdleUntil(Some(now_ns))
            }
            Ok(Polled::BehindUntil { now_ns }) => {
                self.burst.poll_status = PollStatus::Last;
                Activity::IdleUntil(Some(now_ns))
            }
            Ok(Polled::Idle) => {
                self.burst.poll_status = PollStatus::Drained;
                Activity::IdleUntil(None)
            }
            Ok(Polled::Exhausted) => {
                self.end_source(shared);
                Activity::Ended
            }
            Err(error) => {
                self.failed = Some(error);
                self.end_source(shared);
                Activity::Ended
            }
        };
        let mut refused = self.burst.refused.iter();
        if refused.any(|refused| refused.reason == DropReason::NoBuffer) {
            // Held segments may have the missing buffers: let them go.
            self.burst.poll_status = PollStatus::Last;
        }
        activity
    }

    /// True if the last poll took all frames that it had buffers for, and none is held or went to another CPU; also once the
    /// source has ended.
    pub(super) fn is_drained_here(&self) -> bool {
        self.ended || (!self.was_filled && !self.woke_others && self.intake.held() == 0)
    }

    /// Time at which held segments are due, if any.
    pub(super) fn next_timeout_ns(&self) -> Option<u64> {
        self.intake.next_timeout_ns()
    }

    fn end_source(&mut self, shared: &EngineState) {
        self.burst.poll_status = PollStatus::Last;
        if !std::mem::replace(&mut self.source_ended, true) {
            shared.source_ended();
        }
    }

    /// Passes the burst through the intake, in parts if a change takes effect inside it.
    fn process_burst(&mut self, shared: &EngineState) {
        let poll_status = self.burst.poll_status;
        while let Some(at) = self.next_change(shared) {
            let rest = self.split_burst(at);
            self.burst.poll_status = PollStatus::MorePending;
            self.intake_turn(shared);
            self.apply_script_until(shared);
            (self.burst.packets, self.burst.refused) = rest;
        }
        self.burst.poll_status = poll_status;
        if let Some(last) = self.burst.packets.last() {
            self.next_frame = last.arrival.unwrap_near(self.next_frame) + 1;
            if self.trace.is_some() {
                shared.set_recent_frame(self.number(), self.next_frame);
            }
        }
        self.intake_turn(shared);
    }

    /// Splits the burst before its packet at `at`. Returns that packet and all later frames.
    fn split_burst(&mut self, at: usize) -> (Vec<Packet>, Vec<RefusedFrame>) {
        let packets = self.burst.packets.split_off(at);
        let is_before = |refused: &RefusedFrame| {
            packets.first().is_some_and(|first| first.arrival.is_after(refused.arrival))
        };
        let refused_before = self.burst.refused.partition_point(is_before);
        (packets, self.burst.refused.split_off(refused_before))
    }

    /// Applies pending changes, some a turn, and scripted ones due before the next frame. Of questions, the log has few.
    fn follow_changes(&mut self, shared: &EngineState) {
        let mut changes = 0;
        while changes < CHANGES_A_TURN
            && let Some(entry) = self.changes.next()
        {
            changes += usize::from(matches!(entry, LogEntry::Change(_)));
            self.apply_entry(&entry, shared);
        }
        let next_frame = self.next_frame;
        let is_due = |change: &ScriptedChange| change.frame <= next_frame;
        while self.scripted_next(shared).is_some_and(is_due) {
            self.apply_script_until(shared);
        }
    }

    /// First scripted change not yet applied.
    fn scripted_next<'a>(&self, shared: &'a EngineState) -> Option<&'a ScriptedChange> {
        shared.script.changes().get(self.scripted)
    }

    /// Applies log entries up to and including the next scripted change.
    fn apply_script_until(&mut self, shared: &EngineState) {
        let count = self.scripted + 1;
        shared.make_scripted(count);
        while self.scripted < count
            && let Some(entry) = self.changes.next()
        {
            self.apply_entry(&entry, shared);
        }
    }

    fn apply_entry(&mut self, entry: &LogEntry, shared: &EngineState) {
        match entry {
            LogEntry::Change(made) => self.apply(made, shared),
            LogEntry::Ask(question) => self.answer(question, shared.clock.now_ns()),
        }
    }

    fn answer(&mut self, question: &Question, now_ns: u64) {
        match question {
            Question::Flow { flow, answers } => {
                let explained = self.explain(*flow, now_ns);
                // The requester may have dropped the receiver.
                let _ = answers.send(explained);
                // Flows that share this flow's slot are recorded from now on, for the next
                // question.
                self.watch(*flow);
            }
            Question::Ranges { answers } => {
                // As above.
                let _ = answers.send(self.ranges(now_ns));
            }
            Question::Burst { answers } => self.keep_burst_request(answers),
        }
    }

    fn ranges(&self, at_ns: u64) -> QueueRanges {
        QueueRanges {
            queue: self.number(),
            name: self.name.clone(),
            polling_cpu: self.polling_cpu,
            at_ns,
            desired: middles().map(|flow| self.intake.desired_of(flow)).collect(),
        }
    }

    /// Starts to record the flows that share this flow's slot, unless already started.
    pub(super) fn watch(&mut self, flow: FlowHash) {
        self.intake.watch(flow);
    }

    /// Explains a flow: its CPU, the reason, its drops.
    pub(super) fn explain(&mut self, flow: FlowHash, at_ns: u64) -> Explained {
        Explained {
            queue: self.number(),
            name: self.name.clone(),
            polling_cpu: self.polling_cpu,
            at_ns,
            state: self.intake.state_of(flow),
            drops: self.intake.drops_of(flow).collect(),
        }
    }

    /// Sets the polling CPU.
    pub(super) fn move_to(&mut self, cpu: CpuId, shared: &EngineState) {
        shared.set_polls(self.number(), cpu);
        self.polling_cpu = cpu;
        self.intake.set_polling_cpu(cpu, self.epoch);
        self.update_flow_limit();
    }

    /// Index in the burst at which the next change takes effect.
    fn next_change(&self, shared: &EngineState) -> Option<usize> {
        let change = self.scripted_next(shared)?;
        let frame = |packet: &Packet| packet.arrival.unwrap_near(self.next_frame);
        self.burst.packets.iter().position(|packet| frame(packet) >= change.frame)
    }

    fn intake_turn(&mut self, shared: &EngineState) {
        if let Some(trace) = &mut self.trace {
            trace.received(&self.burst);
        }
        self.intake.observe();
        let now_ns = self.follow_load(shared);
        let merges_later = self.coalesce.on_delivery().is_some();
        let trace = self.trace.as_mut().filter(|_| !merges_later);
        let is_sampled = !self.burst_requests.is_empty();
        let mut sampled = Vec::new();
        let show = |packets: &[Packet]| {
            if let Some(trace) = trace {
                packets.iter().for_each(|packet| trace.left(packet));
            }
            if is_sampled {
                sampled = packets.iter().map(SampledPacket::of).collect();
            }
        };
        for cpu in self.intake.turn_with_tap(now_ns, &mut self.burst, &mut self.pool, show) {
            if cpu != self.polling_cpu {
                shared.wake(cpu);
                self.woke_others = true;
            }
        }
        if !sampled.is_empty() {
            self.answer_burst_requests(sampled);
        }
        let queue = self.intake.queue();
        for dropped in self.intake.drain_dropped() {
            if let Some(trace) = &self.trace {
                trace.dropped(&dropped, queue);
            }
            if let Some(packet) = dropped.packet {
                if dropped.reason == DropReason::FlowLimit {
                    shared.add_flow_limited(self.polling_cpu, packet.segment_count());
                }
                self.pool.put(packet.frame);
            }
        }
    }

    /// Lets the path follow the loads of all CPUs, if that is due. Reading them touches every CPU's cache line. Returns
    /// the current time.
    fn follow_load(&mut self, shared: &EngineState) -> u64 {
        let now_ns = shared.clock.now_ns();
        self.now_ns = now_ns;
        if self.intake.is_load_due(now_ns) {
            shared.cpu_loads(&mut self.cpu_loads);
            self.intake.follow_load(now_ns, &self.cpu_loads);
        }
        now_ns
    }

    /// Number and counters of the queue.
    pub(super) fn counted(&self) -> (RxQueue, Arc<IntakeCounters>) {
        (self.number(), Arc::clone(self.counters()))
    }

    pub(super) fn counters(&self) -> &Arc<IntakeCounters> {
        self.intake.counters()
    }

    /// Number of packets not delivered yet.
    pub(super) fn queued(&mut self) -> u64 {
        let held = self.intake.held() + self.intake.coalescing();
        u64::from(self.intake.queued()) + held as u64
    }

    pub(super) fn number(&self) -> RxQueue {
        self.intake.queue()
    }

    /// Time of the last turn.
    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Number of frames that the last turn received: the part of its work that a budget limits, and that counts as polled.
    pub(super) fn received(&self) -> usize {
        self.received
    }

    /// Closes the source, once no CPU transmits through it any more: sends its last packets for at
    /// most [`LINGER_NS`], then drops it.
    pub(super) fn close(&mut self, shared: &EngineState) {
        let Some(mut source) = self.source.take() else { return };
        let late_ns = shared.clock.now_ns().saturating_add(LINGER_NS);
        while source.has_work() && shared.clock.now_ns() < late_ns {
            source.transmit(&mut self.pool);
        }
    }

    /// Descriptor that is readable once frames are pending in the source. `None` after a poll that left some there: the CPU
    /// would not sleep beside it.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let is_awaited = !self.source_ended && !self.was_refused;
        self.source.as_ref().filter(|_| is_awaited)?.descriptor()
    }

    /// True if the source has packets to transmit.
    pub(super) fn has_to_send(&mut self) -> bool {
        self.source.as_mut().is_some_and(|source| source.has_work())
    }

    /// True if [`transmit`](Self::transmit) has left packets that could be sent now.
    pub(super) fn has_unsent(&mut self) -> bool {
        self.source.as_mut().is_some_and(|source| source.has_unsent())
    }

    /// True if frames that were sent have not come back yet.
    pub(super) fn is_sending(&self) -> bool {
        self.source.as_ref().is_some_and(|source| source.is_sending())
    }

    /// Error of the source, if it failed.
    pub(super) fn take_error(&mut self) -> Option<Error> {
        let failed = self.failed.take()?;
        Some(Error::of_source(self.name.clone(), failed))
    }

    /// True if changes are pending for this queue.
    pub(super) fn must_follow(&self) -> bool {
        self.changes.has_next()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }
}
