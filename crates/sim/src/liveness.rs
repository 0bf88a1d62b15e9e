//! The law of liveness: a wish is granted in a bounded time.
//!
//! A wish is watched from the first turn on in which a packet comes that should go elsewhere than
//! the flow's last one did. While it stays the same, it may take
//!
//! 1. until it is *due*: more than `move_after` packets came since, or one came after `move_after`
//!    of time. From then on the old CPU must be fed no more.
//! 2. the time that CPU needs for what was queued for it then,
//! 3. a turn of the polling CPU, and one more for every 64 packets that are held,
//! 4. where one of both CPUs is full: the time it needs for what is held, most of all for itself. A
//!    move to the old CPU may not have ended, and what it holds still goes there,
//! 5. where packets are merged, which has them due by time only: as long as they wait for more segments,
//!    and the time that the old CPU needs for what waits so.
//!
//! While a packet that should move stays because no more can be held, its queue's moves begin anew:
//! time counts from the last turn in which that happened.
//!
//! Where a fence was raised, it may take the time that the slowest CPU needs for what was queued,
//! and that one CPU needs for what was held, until it is lifted.
//!
//! Times that a CPU lost to pauses, stalls and slowness are apart. It is judged while packets wait for
//! it, and whenever one comes for which there is room: a flow without packets waits for nothing. Flows that share a slot and
//! disagree are not judged.

use std::collections::BTreeMap;

use path::hash::FlowHash;
use path::steer::MoveAfter;
use path::{CpuId, RxQueue};

use crate::census::Census;
use crate::laws::{Law, Laws};
use crate::machine::Standing;
use crate::virtual_cpu::{Pace, VirtualCpu};

/// Held packets, or moves, that are looked at in one turn of the path.
const MOVES_A_TURN: u64 = 64;

/// Frames in a packet.
const COALESCED_MAX: u64 = 64;

/// The wishes that are not granted yet.
#[derive(Debug)]
pub(crate) struct Liveness {
    move_after: MoveAfter,
    open: BTreeMap<(RxQueue, u32), Wish>,
    /// By queue.
    fences: Vec<Option<Fence>>,
    /// By queue: packets that could not be held, as of the last look.
    unheld: Vec<u64>,
    /// Wishes that were granted while packets of the flow were on their way to its old CPU, or in
    /// its hands, when it was known.
    pub(crate) hazardous: u64,
    /// The longest wait, and what it was bounded by.
    pub(crate) longest: Wait,
}

/// A wait, lost time apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wait {
    /// How long it took.
    pub ns: u64,
    /// How long it might have taken.
    pub bound_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Wish {
    hash: FlowHash,
    from: CpuId,
    to: CpuId,
    since: Moment,
    packets: u32,
    hazardous: bool,
    /// From when on `bound_ns` counts: the turn in which it was due, or until then, that in which
    /// its last packet came. A move that has not begun by then waits for another packet.
    counts_from: Moment,
    bound_ns: u64,
    /// What one of both CPUs may need to make room, if it was seen to be full.
    room_ns: u64,
    is_due: bool,
    /// A packet came in this turn.
    has_come: bool,
    is_overdue: bool,
}

/// A fence that was raised.
#[derive(Clone, Copy, Debug)]
struct Fence {
    since: Moment,
    bound_ns: u64,
    is_overdue: bool,
}

/// A time, and how much of it the CPUs concerned had lost by then.
#[derive(Clone, Copy, Debug)]
struct Moment {
    ns: u64,
    lost_ns: u64,
}

impl Moment {
    /// Time that nobody lost, from `earlier` on.
    fn since(self, earlier: Self) -> u64 {
        (self.ns - earlier.ns).saturating_sub(self.lost_ns - earlier.lost_ns)
    }
}

/// A packet came: how its flow stood before the turn, and how it stands now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Came {
    pub(crate) queue: RxQueue,
    pub(crate) hash: FlowHash,
    pub(crate) at_before: Option<CpuId>,
    /// Packets of the flow were on their way before the turn.
    pub(crate) was_on_its_way: bool,
    pub(crate) stands: Standing,
    pub(crate) packets: u32,
}

/// What bounds are computed from.
#[derive(Clone, Copy)]
pub(crate) struct Circumstances<'a> {
    pub(crate) now_ns: u64,
    pub(crate) cpus: &'a [VirtualCpu],
    pub(crate) pace: &'a Pace,
    pub(crate) census: &'a Census,
}

impl Liveness {
    pub(crate) fn new(move_after: MoveAfter, queues: u16) -> Self {
        let (fences, unheld) = (vec![None; queues.into()], vec![0; queues.into()]);
        let (open, longest) = (BTreeMap::new(), Wait::default());
        Self { move_after, open, fences, unheld, hazardous: 0, longest }
    }

    /// Packets of a flow came in this turn.
    pub(crate) fn came(&mut self, came: Came, around: Circumstances<'_>) {
        let Came { queue, hash, at_before, was_on_its_way, stands, packets } = came;
        let Standing { key, at, wish: to, .. } = stands;
        let key = (queue, key);
        let before = self.open.remove(&key).filter(|open| open.to == to);
        let Some(from) = before.map(|open| open.from).or(at_before) else { return };
        if from == to {
            return;
        }
        if before.is_none() && at == Some(to) {
            self.hazardous += u64::from(was_on_its_way); // granted at once, whatever the hazard
            return;
        }
        let now = around.moment(queue, [from, to]);
        let mut open = before.unwrap_or(Wish {
            hash,
            from,
            to,
            since: now,
            packets: 0,
            hazardous: was_on_its_way,
            counts_from: now,
            bound_ns: 0,
            room_ns: 0,
            is_due: false,
            has_come: false,
            is_overdue: false,
        });
        open.has_come = true;
        open.packets = open.packets.saturating_add(packets);
        if !open.is_due {
            let MoveAfter { packets: most, time_ns } = self.move_after;
            // Those that are merged count as one.
            let are_enough = open.packets > most && !around.census.merges;
            open.is_due = are_enough || now.ns - open.since.ns >= time_ns;
            (open.counts_from, open.bound_ns) = (now, around.move_bound_ns(queue, from));
        }
        self.open.insert(key, open);
    }

    /// Looks which wishes of a queue are granted by now, and which should be.
    pub(crate) fn look(
        &mut self,
        queue: RxQueue,
        standing: impl Fn(FlowHash) -> Option<Standing>,
        has_fence: bool,
        around: Circumstances<'_>,
        laws: &mut Laws,
    ) {
        let Self { hazardous, longest, .. } = self;
        let unheld = around.census.unheld.get(usize::from(queue.0)).copied().unwrap_or(0);
        let begins_anew =
            unheld > std::mem::replace(&mut self.unheld[usize::from(queue.0)], unheld);
        self.open.retain(|(of, _), open| {
            if *of != queue {
                return true;
            }
            let Some(stands) = standing(open.hash).filter(|stands| stands.wish == open.to) else {
                return false; // another wish: watched when its first packet comes
            };
            let is_granted = stands.at == Some(open.to);
            if stands.at != Some(open.from) && !is_granted {
                return false; // it went elsewhere meanwhile: that is another wait
            }
            for cpu in [open.from, open.to] {
                open.room_ns = open.room_ns.max(around.room_ns(queue, cpu));
            }
            if begins_anew && !is_granted {
                open.counts_from = around.moment(queue, [open.from, open.to]);
                open.bound_ns = around.move_bound_ns(queue, open.from);
            }
            let wait = open.wait(around.moment(queue, [open.from, open.to]));
            // What comes where there is no room is dropped and does not move.
            let has_come = std::mem::take(&mut open.has_come) && around.has_room(queue, open.to);
            let has_packets = has_come || stands.is_held;
            let is_late = wait.ns > wait.bound_ns && open.is_due;
            if is_late && has_packets && !is_granted && !open.is_overdue {
                open.is_overdue = true;
                laws.broke(Law::Liveness, || {
                    format!("at {} ns {open:?} has {stands:?}: {wait:?}", around.now_ns)
                });
            }
            let counts = (is_granted && !is_late) || open.is_overdue;
            if counts && wait.ns > longest.ns {
                *longest = wait;
            }
            *hazardous += u64::from(is_granted && open.hazardous);
            !is_granted
        });
        self.look_at_fence(queue, has_fence, around, laws);
    }

    fn look_at_fence(
        &mut self,
        queue: RxQueue,
        has_fence: bool,
        around: Circumstances<'_>,
        laws: &mut Laws,
    ) {
        let fence = &mut self.fences[usize::from(queue.0)];
        if !has_fence {
            *fence = None;
            return;
        }
        // A fence may be raised only in the turn after the change.
        let fence = fence.get_or_insert_with(|| around.fence(queue));
        let waited_ns = around.moment_of_all().since(fence.since);
        if waited_ns > fence.bound_ns && !fence.is_overdue {
            fence.is_overdue = true;
            laws.broke(Law::Liveness, || {
                format!("at {} ns the fence of {queue} lasts: {fence:?}", around.now_ns)
            });
        }
    }

    /// Slots are others from now on, or others' times count: what is under way is watched anew.
    pub(crate) fn begin_anew(
        &mut self,
        queue: RxQueue,
        has_fence: bool,
        around: Circumstances<'_>,
    ) {
        self.open.retain(|(of, _), _| *of != queue);
        self.fences[usize::from(queue.0)] = has_fence.then(|| around.fence(queue));
    }
}

impl Wish {
    fn wait(&self, now: Moment) -> Wait {
        let before_ns = self.counts_from.ns - self.since.ns;
        let bound_ns = before_ns + self.bound_ns + self.room_ns;
        Wait { ns: before_ns + now.since(self.counts_from), bound_ns }
    }
}

impl Circumstances<'_> {
    /// Now, and what these CPUs and the polling one have lost.
    fn moment(&self, queue: RxQueue, [from, to]: [CpuId; 2]) -> Moment {
        let cpus = [from, to, self.polling(queue)];
        let lost_ns = cpus.iter().map(|cpu| self.cpus[cpu.index()].lost_ns(self.now_ns)).sum();
        Moment { ns: self.now_ns, lost_ns }
    }

    fn moment_of_all(&self) -> Moment {
        let lost_ns = self.cpus.iter().map(|cpu| cpu.lost_ns(self.now_ns)).sum();
        Moment { ns: self.now_ns, lost_ns }
    }

    fn polling(&self, queue: RxQueue) -> CpuId {
        self.pace.polling[usize::from(queue.0)]
    }

    fn queued(&self, queue: RxQueue, cpu: CpuId) -> u64 {
        let backlogs = self.census.backlogs.iter();
        backlogs.filter(|it| (it.queue, it.cpu) == (queue, cpu)).map(|it| it.frames).sum()
    }

    /// What a move may take that begins now.
    fn move_bound_ns(&self, queue: RxQueue, from: CpuId) -> u64 {
        let Census { coalesce_ns, coalescing, .. } = *self.census;
        let queued = self.queued(queue, from) + coalescing * COALESCED_MAX;
        self.pace.drain_ns(from, queued) + self.turns_ns(queue) + coalesce_ns
    }

    /// What a CPU may need to make room for a packet that was held; nothing where it has room.
    fn room_ns(&self, queue: RxQueue, cpu: CpuId) -> u64 {
        let is_full = self.queued(queue, cpu) >= self.census.backlog_max;
        if is_full { self.held_ns(queue, cpu) } else { 0 }
    }

    /// True if a packet that goes there is sure to be taken: a flow limit drops from half on.
    fn has_room(&self, queue: RxQueue, cpu: CpuId) -> bool {
        let mut backlogs = self.census.backlogs.iter();
        let backlog = backlogs.find(|it| (it.queue, it.cpu) == (queue, cpu));
        // As many as there are frames, or fewer.
        let packets = backlog.map_or(0, |it| it.packets.min(it.frames));
        packets < self.census.backlog_max / 2
    }

    /// A fence that is raised now. What it holds back may have a seam, where what comes behind waits
    /// until what is before it has been processed.
    fn fence(&self, queue: RxQueue) -> Fence {
        let cpus = || (0..).map(CpuId).take(self.cpus.len());
        let drains_ns = cpus().map(|cpu| self.pace.drain_ns(cpu, self.queued(queue, cpu)));
        let line_ns = cpus().map(|cpu| self.held_ns(queue, cpu));
        let (drain_ns, line_ns) = (drains_ns.max().unwrap_or(0), line_ns.max().unwrap_or(0));
        let bound_ns = drain_ns + 2 * line_ns + 3 * self.turns_ns(queue);
        Fence { since: self.moment_of_all(), bound_ns, is_overdue: false }
    }

    /// The turns that all that is held may need.
    fn turns_ns(&self, queue: RxQueue) -> u64 {
        let turns = 2 + self.census.held / MOVES_A_TURN;
        turns * self.pace.turn_ns(self.polling(queue))
    }

    /// What a CPU needs for a full backlog, and for all that is held.
    fn held_ns(&self, queue: RxQueue, cpu: CpuId) -> u64 {
        // A limit that was lowered takes effect as the backlog drains.
        let backlog = self.census.backlog_max.max(self.queued(queue, cpu));
        self.pace.drain_ns(cpu, backlog + self.census.held)
    }
}
