//! The law of liveness: a flow reaches its desired CPU in a bounded time.
//!
//! A move is observed from the first turn in which a packet arrives that should go to another CPU
//! than the flow's last one did. While the desired CPU stays the same, it may take:
//!
//! 1. the time until it is *due*: more than `move_after` packets came since, or one came after
//!    `move_after` of time. From then on no more packets may go to the old CPU,
//! 2. the time that the old CPU needs for the packets queued for it then,
//! 3. a turn of the polling CPU, and one more for every 64 packets that are held,
//! 4. if either CPU is full: the time it needs for the held packets, all of which may be for it.
//!    A move to the old CPU may not have ended, and the packets it holds still go there,
//! 5. if packets are merged, which makes moves due by time only: the time that they wait for more
//!    segments, and the time that the old CPU needs for the packets that wait.
//!
//! While a packet that should move stays because no more can be held, the moves of its queue start
//! over: time counts from the last turn in which that happened.
//!
//! A fence that was raised may last for the time that the slowest CPU needs for its queued packets
//! and that one CPU needs for the held ones.
//!
//! Time that a CPU lost to pauses, stalls and slowness does not count. A move is judged while
//! packets wait for it, and whenever one arrives for which there is room: a flow without packets
//! waits for nothing. Flows that share a slot and have different desired CPUs are not judged.

use std::collections::BTreeMap;

use forebay_rx::hash::FlowHash;
use forebay_rx::steer::MoveAfter;
use forebay_rx::{CpuId, RxQueue};

use crate::census::Census;
use crate::laws::{Law, Laws};
use crate::machine::FlowStanding;
use crate::virtual_cpu::{CpuPace, VirtualCpu};

/// Held packets, or moves, examined in one turn of the path.
const MOVES_A_TURN: u64 = 64;

/// Most frames in a packet.
const COALESCED_MAX: u64 = 64;

/// Moves that are not done yet.
#[derive(Debug)]
pub(crate) struct Liveness {
    move_after: MoveAfter,
    open: BTreeMap<(RxQueue, u32), PendingMove>,
    /// Fences by queue.
    fences: Vec<Option<LivenessFence>>,
    /// Packets that could not be held, by queue, as of the last check.
    unheld: Vec<u64>,
    /// Number of moves for which packets of the flow were on their way to its old CPU, or in its
    /// current batch, when the desired CPU changed.
    pub(crate) hazardous: u64,
    /// The longest wait, and its bound.
    pub(crate) longest: Wait,
}

/// A wait, without lost time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wait {
    /// Duration, in ns.
    pub ns: u64,
    /// Upper bound on the duration, in ns.
    pub bound_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct PendingMove {
    hash: FlowHash,
    from: CpuId,
    to: CpuId,
    since: Moment,
    packets: u32,
    hazardous: bool,
    /// Start of `bound_ns`: the turn in which the move was due, or before that, the turn in which
    /// its last packet came. A move that has not begun by then waits for another packet.
    counts_from: Moment,
    bound_ns: u64,
    /// Time that either CPU may need to make room, if it was seen to be full.
    room_ns: u64,
    is_due: bool,
    /// True if a packet came in this turn.
    has_come: bool,
    is_overdue: bool,
}

/// A fence that was raised.
#[derive(Clone, Copy, Debug)]
struct LivenessFence {
    since: Moment,
    bound_ns: u64,
    is_overdue: bool,
}

/// A point in time, and the time that the CPUs concerned had lost by then.
#[derive(Clone, Copy, Debug)]
struct Moment {
    ns: u64,
    lost_ns: u64,
}

impl Moment {
    /// Time since `earlier`, without lost time.
    fn since(self, earlier: Self) -> u64 {
        (self.ns - earlier.ns).saturating_sub(self.lost_ns - earlier.lost_ns)
    }
}

/// Arrival of a flow's packets: its state before the turn, and now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Came {
    pub(crate) queue: RxQueue,
    pub(crate) hash: FlowHash,
    pub(crate) at_before: Option<CpuId>,
    /// True if packets of the flow were on their way before the turn.
    pub(crate) was_on_its_way: bool,
    pub(crate) stands: FlowStanding,
    pub(crate) packets: u32,
}

/// Inputs for the computation of bounds.
#[derive(Clone, Copy)]
pub(crate) struct Circumstances<'a> {
    pub(crate) now_ns: u64,
    pub(crate) cpus: &'a [VirtualCpu],
    pub(crate) pace: &'a CpuPace,
    pub(crate) census: &'a Census,
}

impl Liveness {
    pub(crate) fn new(move_after: MoveAfter, queues: u16) -> Self {
        let (fences, unheld) = (vec![None; queues.into()], vec![0; queues.into()]);
        let (open, longest) = (BTreeMap::new(), Wait::default());
        Self { move_after, open, fences, unheld, hazardous: 0, longest }
    }

    /// Registers the arrival of a flow's packets in this turn.
    pub(crate) fn came(&mut self, came: Came, around: Circumstances<'_>) {
        let Came { queue, hash, at_before, was_on_its_way, stands, packets } = came;
        let FlowStanding { key, at, desired_cpu: to, .. } = stands;
        let key = (queue, key);
        let before = self.open.remove(&key).filter(|open| open.to == to);
        let Some(from) = before.map(|open| open.from).or(at_before) else { return };
        if from == to {
            return;
        }
        if before.is_none() && at == Some(to) {
            self.hazardous += u64::from(was_on_its_way); // moved at once, in spite of the hazard
            return;
        }
        let now = around.moment(queue, [from, to]);
        let mut open = before.unwrap_or(PendingMove {
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
            // Merged packets count as one, so their number is not used.
            let are_enough = open.packets > most && !around.census.merges;
            open.is_due = are_enough || now.ns - open.since.ns >= time_ns;
            (open.counts_from, open.bound_ns) = (now, around.move_bound_ns(queue, from));
        }
        self.open.insert(key, open);
    }

    /// Checks which moves of a queue are done by now, and which should be.
    pub(crate) fn look(
        &mut self,
        queue: RxQueue,
        standing: impl Fn(FlowHash) -> Option<FlowStanding>,
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
            let Some(stands) = standing(open.hash).filter(|stands| stands.desired_cpu == open.to)
            else {
                return false; // another desired CPU: watched when its first packet comes
            };
            let has_moved = stands.at == Some(open.to);
            if stands.at != Some(open.from) && !has_moved {
                return false; // the flow moved elsewhere meanwhile: another wait
            }
            for cpu in [open.from, open.to] {
                open.room_ns = open.room_ns.max(around.room_ns(queue, cpu));
            }
            if begins_anew && !has_moved {
                open.counts_from = around.moment(queue, [open.from, open.to]);
                open.bound_ns = around.move_bound_ns(queue, open.from);
            }
            let wait = open.wait(around.moment(queue, [open.from, open.to]));
            // A packet without room is dropped, and does not move its flow.
            let has_come = std::mem::take(&mut open.has_come) && around.has_room(queue, open.to);
            let has_packets = has_come || stands.is_held;
            let is_late = wait.ns > wait.bound_ns && open.is_due;
            if is_late && has_packets && !has_moved && !open.is_overdue {
                open.is_overdue = true;
                laws.broke(Law::Liveness, || {
                    format!("at {} ns {open:?} has {stands:?}: {wait:?}", around.now_ns)
                });
            }
            let counts = (has_moved && !is_late) || open.is_overdue;
            if counts && wait.ns > longest.ns {
                *longest = wait;
            }
            *hazardous += u64::from(has_moved && open.hazardous);
            !has_moved
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

    /// Restarts the observation of a queue, after its slots were replaced or its polling CPU
    /// changed.
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

impl PendingMove {
    fn wait(&self, now: Moment) -> Wait {
        let before_ns = self.counts_from.ns - self.since.ns;
        let bound_ns = before_ns + self.bound_ns + self.room_ns;
        Wait { ns: before_ns + now.since(self.counts_from), bound_ns }
    }
}

impl Circumstances<'_> {
    /// The current time, with the time lost by these CPUs and the polling one.
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
        self.census.backlog(queue, cpu).map_or(0, |backlog| backlog.frames)
    }

    /// Bound on a move that begins now.
    fn move_bound_ns(&self, queue: RxQueue, from: CpuId) -> u64 {
        let Census { coalesce_ns, coalescing, .. } = *self.census;
        let queued = self.queued(queue, from) + coalescing * COALESCED_MAX;
        self.pace.drain_ns(from, queued) + self.turns_ns(queue) + coalesce_ns
    }

    /// Time that a CPU may need to make room for a held packet; 0 if it has room.
    fn room_ns(&self, queue: RxQueue, cpu: CpuId) -> u64 {
        let is_full = self.queued(queue, cpu) >= self.census.backlog_max;
        if is_full { self.held_ns(queue, cpu) } else { 0 }
    }

    /// True if a packet for this CPU is certain to be accepted: a flow limit drops from half of the
    /// backlog on.
    fn has_room(&self, queue: RxQueue, cpu: CpuId) -> bool {
        let backlog = self.census.backlog(queue, cpu);
        // There are at most as many packets as frames.
        let packets = backlog.map_or(0, |it| it.packets.min(it.frames));
        packets < self.census.backlog_max / 2
    }

    /// A fence raised now. The packets it holds back may contain a second boundary, where later
    /// packets wait until earlier ones have been processed.
    fn fence(&self, queue: RxQueue) -> LivenessFence {
        let cpus = || (0..).map(CpuId).take(self.cpus.len());
        let drains_ns = cpus().map(|cpu| self.pace.drain_ns(cpu, self.queued(queue, cpu)));
        let line_ns = cpus().map(|cpu| self.held_ns(queue, cpu));
        let (drain_ns, line_ns) = (drains_ns.max().unwrap_or(0), line_ns.max().unwrap_or(0));
        let bound_ns = drain_ns + 2 * line_ns + 3 * self.turns_ns(queue);
        LivenessFence { since: self.moment_of_all(), bound_ns, is_overdue: false }
    }

    /// Time for the turns that all held packets may need.
    fn turns_ns(&self, queue: RxQueue) -> u64 {
        let turns = 2 + self.census.held / MOVES_A_TURN;
        turns * self.pace.turn_ns(self.polling(queue))
    }

    /// Time that a CPU needs for a full backlog and all held packets.
    fn held_ns(&self, queue: RxQueue, cpu: CpuId) -> u64 {
        // A limit that was lowered takes effect as the backlog drains.
        let backlog = self.census.backlog_max.max(self.queued(queue, cpu));
        self.pace.drain_ns(cpu, backlog + self.census.held)
    }
}
