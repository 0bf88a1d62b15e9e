//! Live changes on their way to the threads: checked, prepared and numbered, in one order for all.

mod memory; // memory that a change allocates

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use forebay_rx::backlog::{BACKLOG_CAPACITY_MAX, FlowLimit, capacity_for};
use forebay_rx::hash::Hasher;
use forebay_rx::steer::{FlowTables, SockFlowTable};
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::errno::Errno;
use forebay_sys::error::Error;
use forebay_sys::refused::{Refused, Written};

use super::config::Config;
use super::deferred_free::{Reclaimer, Retired};
use super::log::{LogCursor, Writer};
use super::question::Question;
use super::settings::Settings;
use crate::knobs::{Change, CoalesceChange, Queues, Script};
use crate::trace::Trace;

/// Maximum number of entries that wait for a thread; further changes are refused.
pub const CHANGES_MAX: usize = 4096;

/// Number of waiting entries from which on questions are refused.
pub const QUESTIONS_MAX: usize = 256;

/// Entry of the log.
#[derive(Clone, Debug)]
pub(super) enum LogEntry {
    /// A change.
    Change(Arc<Made>),
    /// A question.
    Ask(Arc<Question>),
}

/// A prepared change, ready to be applied.
#[derive(Debug)]
pub(super) struct Made {
    /// Epoch that begins with the change.
    pub(super) epoch: u32,
    /// The change; `None` if a scripted one could not be made.
    pub(super) change: Option<Change>,
    /// Tables made for the change.
    pub(super) parts: ChangedParts,
    /// Rows of a trace for the change: each knob whose value in force is another now, and that
    /// value as it reads back.
    pub(super) rows: Vec<(String, String)>,
    /// True if the change comes from the script, not from a live request.
    pub(super) is_scripted: bool,
}

/// Tables made for a change, by its requester.
#[derive(Debug)]
pub(super) enum ChangedParts {
    /// No tables.
    None,
    /// New socket-flow table, in which applications already record; `None` if it is removed.
    SockFlows(Option<Arc<SockFlowTable>>),
    /// An empty flow table for each queue that needs one.
    FlowTables(ByQueue<FlowTables>),
    /// Hash function with a new key or rules, and an empty flow table for each queue.
    Hasher(Arc<Hasher>, ByQueue<FlowTables>),
    /// A flow limit for each queue, used while a CPU that has one polls the queue.
    FlowLimits(ByQueue<FlowLimit>),
}

/// Tables made by the requester of a change, each for one queue to take.
#[derive(Debug)]
pub(super) struct ByQueue<T>(Vec<Mutex<Option<T>>>);

impl<T> ByQueue<T> {
    fn new(tables: impl Iterator<Item = Option<T>>) -> Self {
        Self(tables.map(Mutex::new).collect())
    }

    /// Takes a queue's table. The lock is never contended, since only that queue takes it.
    pub(super) fn take(&self, queue: RxQueue) -> Option<T> {
        let table = self.0.get(usize::from(queue.0))?;
        table.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A thread's position in the log.
pub(super) type Follower = LogCursor<LogEntry>;

/// Writer of the log and state of all knobs, behind a lock.
#[derive(Debug)]
pub(super) struct Changes {
    log: Writer<LogEntry>,
    /// Number of changes so far.
    epoch: u32,
    /// Number of scripted changes so far.
    scripted: usize,
    settings: Settings,
    hasher: Arc<Hasher>,
    sock_flows: Arc<ArcSwapOption<SockFlowTable>>,
    /// CPUs of the engine.
    cpus: CpuList,
    /// One more than the highest CPU.
    cpu_count: u16,
    devices: usize,
    trace: Option<Arc<Trace>>,
    /// Backlog length that packet memory was made for, in packets.
    backlog_made: u32,
    /// Slots of each backlog ring; 0 until the rings are made.
    ring_slots: u32,
    /// Errors of scripted changes that could not be made.
    refused: Vec<Error>,
    reclaimer: Arc<Reclaimer>,
}

impl Changes {
    pub(super) fn new(config: &Config, queues: usize, reclaimer: Arc<Reclaimer>) -> Self {
        let cpu_count = config.cpu_count();
        let entries = config.rps_sock_flow_entries;
        let sock_flows = (entries > 0).then(|| Arc::new(SockFlowTable::new(entries, cpu_count)));
        Self {
            log: Writer::default(),
            epoch: 0,
            scripted: 0,
            settings: Settings::of(config, queues),
            hasher: Arc::clone(&config.hasher),
            sock_flows: Arc::new(ArcSwapOption::new(sock_flows)),
            cpus: config.cpus.clone(),
            cpu_count: u16::try_from(cpu_count).unwrap_or(u16::MAX),
            devices: config.devices.len(),
            trace: config.trace.clone(),
            backlog_made: config.backlog_capacity(),
            ring_slots: 0,
            refused: Vec::new(),
            reclaimer,
        }
    }

    /// Records that the backlog rings are made.
    pub(super) fn rings_made(&mut self, slots: u32) {
        self.ring_slots = self.ring_slots.max(slots);
    }

    /// Takes the errors of scripted changes that could not be made.
    pub(super) fn take_refused(&mut self) -> Vec<Error> {
        std::mem::take(&mut self.refused)
    }

    /// Follower of all changes from now on.
    pub(super) fn follower(&self) -> Follower {
        self.log.cursor()
    }

    /// Current settings.
    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Hash function of flows.
    pub(super) fn hasher(&self) -> &Arc<Hasher> {
        &self.hasher
    }

    /// Table in which applications record the CPU that they run on.
    pub(super) fn sock_flows(&self) -> &Arc<ArcSwapOption<SockFlowTable>> {
        &self.sock_flows
    }

    /// CPUs of a list that packets can go to now.
    pub(super) fn in_force(&self, cpus: &CpuList) -> CpuList {
        cpus.split_by(&self.settings.cpus).0
    }

    /// Makes the next changes of the script until `count` of them are made. Returns true if any was
    /// left to make.
    pub(super) fn make_scripted(&mut self, script: &Script, count: usize) -> bool {
        let due = script.changes().iter().take(count).skip(self.scripted);
        let due: Vec<_> = due.map(|scripted| scripted.change.clone()).collect();
        self.scripted += due.len();
        for change in &due {
            let made = self.make(change).map_err(|refused| {
                let (what, value) = (change.knob(), change.value(self.cpu_count));
                self.refused.push(Error::Setting { what, value, why: refused.to_string() });
            });
            self.append(made.ok(), true);
        }
        !due.is_empty()
    }

    /// Makes a change for all threads to apply, and returns the part that is in force.
    pub(super) fn change(&mut self, change: &Change) -> Result<Written, Refused> {
        if self.log.pending() >= CHANGES_MAX {
            return Err(Refused::new(
                Errno::Busy,
                format!("the engine has not come to the last {CHANGES_MAX} changes yet"),
            ));
        }
        let made = self.make(change)?;
        self.append(Some(made), false);
        Ok(self.written(change))
    }

    /// Puts a question to all queues, unless too many entries wait for them.
    pub(super) fn ask(&mut self, question: Question) -> Result<(), Refused> {
        if self.log.pending() >= QUESTIONS_MAX {
            let why = format!("too many changes and questions are waiting ({QUESTIONS_MAX})");
            return Err(Refused::new(Errno::Busy, why));
        }
        self.log.append(LogEntry::Ask(Arc::new(question)));
        Ok(())
    }

    /// Checks that a change is possible with the current settings.
    pub(super) fn check(&self, change: &Change) -> Result<(), Refused> {
        let invalid = |why: String| Err(Refused::new(Errno::Inval, why));
        match change {
            Change::RpsCpus(queues, _) | Change::RpsFlowCnt(queues, _)
                if !self.settings.has(*queues) =>
            {
                let count = self.settings.queues.len();
                return Err(Refused::new(Errno::NoEnt, format!("there are {count} queues")));
            }
            Change::RfsDesired { cpu, .. }
            | Change::Online(cpu, _)
            | Change::Pause(cpu)
            | Change::Resume(cpu)
            | Change::Kill(cpu)
                if !self.cpus.contains(*cpu) =>
            {
                return invalid(format!(
                    "CPU {cpu} is not among those of the engine, {}",
                    self.cpus
                ));
            }
            Change::HashKey(key) => {
                if let Err(wrong) = self.hasher.rekeyed(key) {
                    return invalid(wrong.to_string());
                }
            }
            _ => {}
        }
        match self.running_after(change) {
            Some(cpus) if cpus.is_empty() => {
                let why = "no CPU would be left to run: the last one stays";
                Err(Refused::new(Errno::Busy, why))
            }
            _ => self.check_memory(change),
        }
    }

    /// CPUs that run after a change of them; `None` for any other change.
    fn running_after(&self, change: &Change) -> Option<CpuList> {
        match change {
            Change::Cpus(cpus) => Some(cpus.split_by(&self.cpus).0),
            Change::Online(cpu, runs) => Some(self.settings.cpus.with(*cpu, *runs)),
            _ => None,
        }
    }

    /// Makes a change and its tables. A change of one CPU's state becomes one of all running CPUs.
    fn make(&mut self, change: &Change) -> Result<(Change, ChangedParts), Refused> {
        self.check(change)?;
        let change = self.running_after(change).map_or_else(|| change.clone(), Change::Cpus);
        let parts = match &change {
            Change::RpsSockFlowEntries(entries) => {
                ChangedParts::SockFlows(self.replace_table(*entries))
            }
            Change::RfsDesired { flow, cpu } => {
                if let Some(table) = &*self.sock_flows.load() {
                    table.record(*flow, *cpu);
                }
                ChangedParts::None
            }
            Change::HashKey(key) => {
                let rekeyed = self.hasher.rekeyed(key);
                self.replace_hasher(rekeyed.unwrap_or_else(|_| Hasher::clone(&self.hasher)))
            }
            // The tables of flows that hash as before stay.
            Change::FlowKey(rules) if rules == self.hasher.rules() => ChangedParts::None,
            Change::FlowKey(rules) => self.replace_hasher(self.hasher.with_rules(*rules)),
            Change::RpsFlowCnt(queues, count) => {
                let all = (0..).map(RxQueue).take(self.settings.queues.len());
                self.reclaimer.start();
                ChangedParts::FlowTables(ByQueue::new(
                    all.map(|queue| queues.contain(queue).then(|| FlowTables::new(*count))),
                ))
            }
            Change::FlowLimitCpuBitmap(cpus) if !cpus.is_empty() => {
                let len = self.settings.flow_limit_table_len;
                self.reclaimer.start();
                let queues = self.settings.queues.iter();
                ChangedParts::FlowLimits(ByQueue::new(queues.map(|_| FlowLimit::new(len))))
            }
            _ => ChangedParts::None,
        };
        Ok((change, parts))
    }

    /// Replaces the hash function. Flows that hash differently have other slots, so every queue
    /// takes an empty table.
    fn replace_hasher(&mut self, hasher: Hasher) -> ChangedParts {
        self.hasher = Arc::new(hasher);
        let settings = self.settings.queues.iter();
        let alike = ByQueue::new(settings.map(|queue| Some(FlowTables::new(queue.rps_flow_cnt))));
        self.reclaimer.start();
        ChangedParts::Hasher(Arc::clone(&self.hasher), alike)
    }

    /// Replaces the socket-flow table. Applications record in the new one first, so that carrying
    /// over old entries overwrites nothing newer.
    fn replace_table(&self, entries: u32) -> Option<Arc<SockFlowTable>> {
        let table = || Arc::new(SockFlowTable::new(entries, self.cpu_count.into()));
        let table = (entries > 0).then(table);
        let old = self.sock_flows.swap(table.clone());
        if let (Some(table), Some(old)) = (&table, &old) {
            table.carry_over(old);
        }
        if let Some(old) = old {
            self.reclaimer.start();
            self.reclaimer.take(Retired::SockFlows(old));
        }
        table
    }

    fn append(&mut self, made: Option<(Change, ChangedParts)>, is_scripted: bool) {
        self.epoch += 1;
        let (change, parts) = made.unzip();
        if let Some(change) = &change {
            self.settings.apply(change);
        }
        match &change {
            Some(Change::NetdevMaxBacklog(packets)) => self.rings_made(capacity_for(*packets)),
            Some(Change::Coalesce(_)) if self.settings.coalesce.is_on => {
                self.trace.iter().for_each(|trace| trace.coalesces());
            }
            _ => {}
        }
        let rows = change.as_ref().map(|change| self.rows(change)).unwrap_or_default();
        let parts = parts.unwrap_or(ChangedParts::None);
        let made = Made { epoch: self.epoch, change, parts, rows, is_scripted };
        self.log.append(LogEntry::Change(Arc::new(made)));
    }

    /// Names and values that a trace records for a change. The set of running CPUs also changes
    /// masks.
    fn rows(&self, change: &Change) -> Vec<(String, String)> {
        let mut rows = vec![(change.what(), self.value_of(change))];
        if let Change::Cpus(_) = change {
            let queues = &self.settings.queues;
            let masks = queues.iter().map(|queue| &queue.rps_cpus);
            let is_one = masks.clone().all(|mask| Some(mask) == masks.clone().next());
            let masks = (0..).zip(masks).map(|(queue, mask)| {
                let queues = if is_one { Queues::All } else { Queues::One(RxQueue(queue)) };
                Change::RpsCpus(queues, mask.clone())
            });
            let masks = masks.take(if is_one { 1 } else { queues.len() });
            rows.extend(masks.map(|mask| (mask.what(), self.value_of(&mask))));
        }
        rows
    }

    /// Value of a change as in force. An empty mask sets no limit: packets go to the CPU that polls
    /// the queue, or to one where an application runs.
    fn value_of(&self, change: &Change) -> String {
        match change {
            Change::RpsCpus(_, cpus) => {
                let in_force = self.in_force(cpus);
                let cpus = if in_force.is_empty() { &self.cpus } else { &in_force };
                cpus.to_mask(self.cpu_count)
            }
            Change::FlowLimitCpuBitmap(cpus) => self.in_force(cpus).to_mask(self.cpu_count),
            Change::RfsDesired { flow, cpu } => match &self.trace {
                Some(trace) => format!("{}:{cpu}", trace.flow_number(*flow)),
                None => change.value(self.cpu_count),
            },
            _ => change.value(self.cpu_count),
        }
    }

    /// True if RFS can steer packets of some queue to this CPU.
    fn is_followed(&self, cpu: CpuId) -> bool {
        self.settings.cpus.contains(cpu)
            && self.settings.queues.iter().any(|queue| {
                let mask = self.in_force(&queue.rps_cpus);
                queue.rps_flow_cnt > 0 && (mask.is_empty() || mask.contains(cpu))
            })
    }

    /// Part of a change that is in force, if not all of it is.
    fn written(&self, change: &Change) -> Written {
        let ignored = change.cpus().map_or_else(CpuList::default, |cpus| match change {
            Change::RpsCpus(..) => cpus.split_by(&self.settings.cpus).1,
            _ => cpus.split_by(&self.cpus).1,
        });
        let in_effect = match change {
            Change::RpsCpus(_, cpus) if self.in_force(cpus).is_empty() => {
                "RPS is off: no CPU of the mask runs".to_owned()
            }
            Change::NetdevMaxBacklog(BACKLOG_CAPACITY_MAX..) => {
                format!("{}: no ring is larger", BACKLOG_CAPACITY_MAX - 1)
            }
            Change::NetdevMaxBacklog(packets) if *packets >= self.backlog_made => format!(
                "{packets}, as far as there is packet memory, which was made for {}: what finds none \
                 is dropped as no_buffer; begin the run with a larger one",
                self.backlog_made
            ),
            Change::DevWeight(_) | Change::DevWeightRxBias(_) | Change::SkbDeferMax(_) => {
                self.settings.limits.in_effect(change)
            }
            Change::RfsDesired { .. } | Change::RpsFlowCnt(_, 1..)
                if self.settings.rps_sock_flow_entries == 0 =>
            {
                "RFS is off: rps_sock_flow_entries is 0".to_owned()
            }
            Change::RfsDesired { cpu, .. } if !self.is_followed(*cpu) => {
                format!("no queue follows to CPU {cpu}: it is not in rps_cpus, or does not run")
            }
            Change::RpsDefaultMask(_) => "for queues that are made later, of which there are none \
                                          in this run"
                .to_owned(),
            Change::Coalesce(CoalesceChange::NapiDeferHardIrqs(1..))
                if self.settings.coalesce.config.gro_flush_timeout_ns == 0 =>
            {
                "once gro_flush_timeout is not 0".to_owned()
            }
            Change::Coalesce(change)
                if !self.settings.coalesce.is_on
                    && !matches!(change, CoalesceChange::Mode(_))
                    && !self.settings.coalesce.is_deferral(*change) =>
            {
                "once coalesce is gro or lro".to_owned()
            }
            Change::Coalesce(
                CoalesceChange::Mtu(_)
                | CoalesceChange::GroFlushTimeout(_)
                | CoalesceChange::NapiDeferHardIrqs(_),
            ) if self.devices > 1 => "for all devices of the run, which share it".to_owned(),
            _ => String::new(),
        };
        Written { in_effect, ignored, len_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes of an engine with this many queues on CPUs 0 and 1.
    fn changes(queues: usize) -> Changes {
        let cpus = CpuList::new([0, 1].map(CpuId));
        let config = Config::new(cpus, Arc::new(Hasher::keyed(&[0; 16], false)));
        Changes::new(&config, queues, Arc::default())
    }

    #[test]
    fn flow_limits_without_memory_are_refused() {
        let mut changes = changes(100_000);
        changes.settings.flow_limit_table_len = 1 << 31;
        let bitmap = |cpus: &[u16]| {
            Change::FlowLimitCpuBitmap(CpuList::new(cpus.iter().copied().map(CpuId)))
        };
        let refused = changes.change(&bitmap(&[1])).unwrap_err();
        assert_eq!(refused.errno, Errno::NoMem, "{refused}");
        assert_eq!(changes.change(&bitmap(&[])).unwrap().in_effect, "");
    }

    #[test]
    fn flow_limits_are_made_by_requester() {
        let mut changes = changes(2);
        let made = changes.make(&"flow_limit_cpu_bitmap=2".parse().unwrap()).unwrap();
        let (_, ChangedParts::FlowLimits(limits)) = made else { panic!("{made:?}") };
        assert!([0, 1].map(RxQueue).iter().all(|queue| limits.take(*queue).is_some()));
    }
}
