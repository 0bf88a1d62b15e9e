//! One rx queue at work: its source, its intake, and the changes on their way to it.

use std::sync::Arc;

use mem::Pool;
use path::arrive::{Ask, Behind, Burst, Polled, SourceError};
use path::backlog::FlowLimit;
use path::counters::IntakeCounters;
use path::intake::DEV_WEIGHT;
use path::steer::Tick;
use path::{CpuId, DropReason, Intake, Packet, Source};

use super::changes::{Entry, Follower};
use super::shared::Shared;
use super::{Config, WhenFull};
use crate::control::{Change, Coalesce, ScriptedChange};
use crate::error::Error;
use crate::trace::IntakeTrace;

/// How old the engine's load may be when the path looks at it.
const LOAD_AGE_NS: u64 = 1_000_000;

/// Buckets of a flow limit when nobody says otherwise: the kernel's default.
const FLOW_LIMIT_TABLE_LEN: u32 = 4096;

/// A queue and what it takes to poll it.
pub(super) struct Queue {
    intake: Intake,
    source: Box<dyn Source>,
    polling_cpu: CpuId,
    burst: Burst,
    /// No frame below this number is still to come.
    next_frame: u64,
    changes: Follower,
    /// Changes of the script that this queue has come to.
    scripted: usize,
    coalesce: Coalesce,
    flow_limit_table_len: u32,
    when_full: WhenFull,
    trace: Option<IntakeTrace>,
    load: Tick,
    source_ended: bool,
    ended: bool,
    failed: Option<SourceError>,
}

/// What a turn of a queue came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Activity {
    /// There was work, this many frames of it.
    Worked(usize),
    /// There is none before this time, if ever.
    IdleUntil(Option<u64>),
    /// There is, but it waits for other CPUs.
    Blocked,
    /// There will be none.
    Ended,
}

impl Queue {
    pub(super) fn new(
        intake: Intake,
        source: Box<dyn Source>,
        polling_cpu: CpuId,
        config: &Config,
        trace: Option<IntakeTrace>,
        changes: Follower,
    ) -> Self {
        Self {
            intake,
            source,
            polling_cpu,
            burst: Burst::default(),
            next_frame: 0,
            changes,
            scripted: 0,
            coalesce: config.coalesce,
            flow_limit_table_len: FLOW_LIMIT_TABLE_LEN,
            when_full: config.when_full,
            trace,
            load: Tick::default(),
            source_ended: false,
            ended: false,
            failed: None,
        }
    }

    /// Polls the source once and takes what comes through the intake.
    pub(super) fn turn(&mut self, pool: &mut Pool, shared: &Shared) -> Activity {
        self.follow_changes(shared);
        if self.ended {
            return Activity::Ended;
        }
        pool.collect();
        let polled = self.poll(pool, shared);
        let frames = self.burst.len();
        self.take_in(pool, shared);
        match polled {
            Activity::Ended if self.intake.held() == 0 => {
                self.ended = true;
                shared.queue_ended();
                Activity::Worked(frames)
            }
            _ if frames > 0 => Activity::Worked(frames),
            Activity::Ended => Activity::Blocked,
            _ if self.intake.held() > 0 => Activity::Blocked,
            Activity::IdleUntil(due_ns) => {
                Activity::IdleUntil(due_ns.into_iter().chain(self.intake.next_timeout_ns()).min())
            }
            blocked => blocked,
        }
    }

    /// Fills the burst, unless there would be no room for it, and says what is behind it.
    fn poll(&mut self, pool: &mut Pool, shared: &Shared) -> Activity {
        self.burst.behind = Behind::More;
        if self.source_ended || shared.is_stopping() {
            self.end_source(shared);
            return Activity::Ended;
        }
        let waits = self.when_full == WhenFull::Wait && !shared.is_any_paused();
        let mut burst = u32::try_from(DEV_WEIGHT).unwrap_or(u32::MAX);
        if waits {
            burst = self.intake.room_for(burst);
            if burst == 0 {
                if self.intake.queued() == 0 {
                    // No CPU will make room: what is missing is what is held here.
                    self.burst.behind = Behind::End;
                }
                return Activity::Blocked;
            }
        }
        let now_ns = shared.clock.now_ns();
        let ask = Ask { now_ns, max: burst as usize, may_wait: waits };
        let activity = match self.source.poll(ask, pool, &mut self.burst) {
            Ok(Polled::Ready) if self.burst.is_empty() => {
                self.burst.behind = Behind::End; // no memory was free, as below
                Activity::Blocked
            }
            Ok(Polled::Ready) => Activity::Worked(0),
            Ok(Polled::IdleUntil { now_ns }) => {
                self.burst.behind = Behind::Nothing;
                Activity::IdleUntil(Some(now_ns))
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
            // What is held here may be the memory that is missing.
            self.burst.behind = Behind::End;
        }
        activity
    }

    fn end_source(&mut self, shared: &Shared) {
        self.burst.behind = Behind::End;
        if !std::mem::replace(&mut self.source_ended, true) {
            shared.source_ended();
        }
    }

    /// Takes the burst through the intake, in parts where a change takes effect inside it.
    fn take_in(&mut self, pool: &mut Pool, shared: &Shared) {
        if let Some(trace) = &mut self.trace {
            self.burst.packets.iter().for_each(|packet| trace.received(packet));
            self.burst.refused.iter().for_each(|refused| trace.refused(refused));
        }
        let behind = self.burst.behind;
        while let Some(at) = self.next_change(shared) {
            let rest = self.burst.packets.split_off(at);
            self.burst.behind = Behind::More;
            self.intake_turn(pool, shared);
            self.reach_scripted(shared);
            self.burst.packets = rest;
        }
        self.burst.behind = behind;
        if let Some(last) = self.burst.packets.last() {
            self.next_frame = last.arrival.unwrap_near(self.next_frame) + 1;
        }
        self.intake_turn(pool, shared);
    }

    /// Applies what has changed, and what the script changes before the next frame, whichever that
    /// is: it counts for the poll.
    fn follow_changes(&mut self, shared: &Shared) {
        while let Some(entry) = self.changes.next() {
            self.apply(&entry, shared);
        }
        let next_frame = self.next_frame;
        let is_due = |change: &ScriptedChange| change.frame <= next_frame;
        while self.scripted_next(shared).is_some_and(is_due) {
            self.reach_scripted(shared);
        }
    }

    /// The first change of the script that this queue has not come to.
    fn scripted_next<'a>(&self, shared: &'a Shared) -> Option<&'a ScriptedChange> {
        shared.script.changes().get(self.scripted)
    }

    /// Comes to the next change of the script, and to all that was changed before it.
    fn reach_scripted(&mut self, shared: &Shared) {
        let count = self.scripted + 1;
        shared.make_scripted(count);
        while self.scripted < count
            && let Some(entry) = self.changes.next()
        {
            self.apply(&entry, shared);
        }
    }

    /// Where in the burst the next change takes effect.
    fn next_change(&self, shared: &Shared) -> Option<usize> {
        let change = self.scripted_next(shared)?;
        let frame = |packet: &Packet| packet.arrival.unwrap_near(self.next_frame);
        self.burst.packets.iter().position(|packet| frame(packet) >= change.frame)
    }

    fn intake_turn(&mut self, pool: &mut Pool, shared: &Shared) {
        self.intake.observe();
        let tick = self.tick(shared);
        let merges_later = self.coalesce.on_delivery().is_some();
        let trace = self.trace.as_mut().filter(|_| !merges_later);
        let show = |packets: &[Packet]| {
            if let Some(trace) = trace {
                packets.iter().for_each(|packet| trace.left(packet));
            }
        };
        for cpu in self.intake.turn_showing(tick, &mut self.burst, show) {
            if cpu != self.polling_cpu {
                shared.wake(cpu);
            }
        }
        let queue = self.intake.queue();
        for dropped in self.intake.drain_dropped() {
            if let Some(trace) = &self.trace {
                trace.dropped(&dropped, queue);
            }
            if let Some(packet) = dropped.packet {
                pool.put(packet.frame);
            }
        }
    }

    /// The time now, and a load that is recent enough: reading it touches every CPU's line.
    fn tick(&mut self, shared: &Shared) -> Tick {
        let now_ns = shared.clock.now_ns();
        if now_ns.saturating_sub(self.load.now_ns) >= LOAD_AGE_NS {
            self.load = Tick { now_ns, busy_ns: shared.total_busy_ns() };
        }
        Tick { now_ns, busy_ns: self.load.busy_ns }
    }

    fn apply(&mut self, entry: &Entry, shared: &Shared) {
        self.scripted += usize::from(entry.is_scripted);
        let (change, epoch) = (&entry.change, entry.epoch);
        match change {
            Change::RpsCpus(cpus) => {
                self.intake.set_rps_cpus(cpus.cpus().iter().copied(), epoch);
            }
            Change::NetdevMaxBacklog(packets) => {
                self.intake.set_netdev_max_backlog(*packets, epoch);
            }
            Change::FlowLimitCpuBitmap(cpus) => {
                let limits = cpus.contains(self.polling_cpu);
                let limit = limits.then(|| FlowLimit::new(self.flow_limit_table_len)).flatten();
                self.intake.set_flow_limit(limit, epoch);
            }
            Change::FlowLimitTableLen(len) => {
                self.flow_limit_table_len = *len;
                self.intake.set_epoch(epoch);
            }
            Change::Coalesce(change) => {
                self.coalesce = self.coalesce.after(*change);
                self.intake.set_coalesce(self.coalesce.on_arrival(), epoch);
            }
            Change::Pause(cpu) => {
                shared.set_paused(*cpu, true, epoch);
                self.intake.set_epoch(epoch);
            }
            Change::Resume(cpu) => {
                shared.set_paused(*cpu, false, epoch);
                self.intake.set_epoch(epoch);
            }
        }
        if shared.announces(epoch)
            && let Some(trace) = &self.trace
        {
            let now_ns = shared.clock.now_ns();
            trace.trace().changed(now_ns, epoch, change.knob(), &shared.value_of(change));
        }
    }

    pub(super) fn counters(&self) -> &Arc<IntakeCounters> {
        self.intake.counters()
    }

    /// Packets that have not been delivered.
    pub(super) fn queued(&mut self) -> u64 {
        let held = self.intake.held() + self.intake.coalescing();
        u64::from(self.intake.queued()) + held as u64
    }

    /// What went wrong with the source.
    pub(super) fn take_error(&mut self) -> Option<Error> {
        let queue = self.intake.queue();
        let error = self.failed.take()?;
        Some(match error.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::Source { queue, source },
        })
    }

    /// Whether there is a change that this queue has not come to.
    pub(super) fn must_follow(&self) -> bool {
        self.changes.has_next()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }
}
