//! Meter: the work of a queue's CPUs in a window, from which the number of CPUs follows.

use forebay_buf::Position;

use super::balance::CpuLoad;
use super::rps::RpsMap;
use super::spread::SpreadLoad;
use crate::cpu::CpuId;

/// Work of each CPU, by [`CpuId::index`].
#[derive(Debug, Default)]
pub(super) struct Meter {
    cpus: Vec<Metered>,
    /// Number of the queue's frames at the start of the window.
    last_frames: u64,
    since_ns: u64,
    is_marked: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Metered {
    /// Work at the start of the window.
    last: CpuLoad,
    /// Head of the queue's backlog at that time.
    last_head: Option<Position>,
    /// Busy time in the window.
    busy_ns: u64,
    /// Part of the busy time spent on this queue.
    own_ns: u64,
    /// Tail of the backlog at the time before the window's end that equals the longest allowed wait.
    mark: Option<Position>,
    /// True if packets in front of that tail were still queued at the window's end.
    waits: bool,
}

impl Meter {
    /// Notes where the backlog of a CPU begins.
    pub(super) fn connect(&mut self, cpu: CpuId, start: Position) {
        if self.cpus.len() <= cpu.index() {
            self.cpus.resize(cpu.index() + 1, Metered::default());
        }
        self.cpus[cpu.index()].last_head = Some(start);
    }

    /// Notes the tails of the backlogs when the wait until the window's end is the longest allowed, once a window.
    pub(super) fn mark(&mut self, tails: impl Iterator<Item = (CpuId, Position)>) {
        if std::mem::replace(&mut self.is_marked, true) {
            return;
        }
        for (cpu, tail) in tails {
            if let Some(metered) = self.cpus.get_mut(cpu.index()) {
                metered.mark = Some(tail);
            }
        }
    }

    /// Ends a window and begins the next. Returns its length. The first window began at time 0. `ends` are heads and tails
    /// of the backlogs; the queue has taken in `frames` since the start, on its polling CPU.
    pub(super) fn end_window(
        &mut self,
        now_ns: u64,
        loads: &[CpuLoad],
        ends: impl Iterator<Item = (CpuId, [Position; 2])>,
        (polling_cpu, frames): (CpuId, u64),
    ) -> u64 {
        let past_ns = now_ns.saturating_sub(std::mem::replace(&mut self.since_ns, now_ns));
        let frames = frames.saturating_sub(std::mem::replace(&mut self.last_frames, frames));
        self.cpus.resize(loads.len(), Metered::default());
        self.is_marked = false;
        for (cpu, [head, tail]) in ends {
            let index = cpu.index();
            if let (Some(metered), Some(load)) = (self.cpus.get_mut(index), loads.get(index)) {
                let polled = if cpu == polling_cpu { frames } else { 0 };
                metered.end_window(*load, head, polled);
                // Replaced by a later one, unless turns are as far apart as windows.
                metered.mark = Some(tail);
            }
        }
        past_ns
    }

    /// Load in the window of this length, where `active` of the CPUs of `map` get packets.
    pub(super) fn load(&self, past_ns: u64, map: &RpsMap, active: &RpsMap) -> SpreadLoad {
        let mille = |ns: u64| ns.saturating_mul(1_000) / past_ns.max(1);
        let of = |cpu: &CpuId| self.cpus.get(cpu.index()).copied().unwrap_or_default();
        SpreadLoad {
            busiest: active.cpus().iter().map(|cpu| mille(of(cpu).busy_ns)).max().unwrap_or(0),
            own: mille(map.cpus().iter().map(|cpu| of(cpu).own_ns).sum()),
            waits: active.cpus().iter().any(|cpu| of(cpu).waits),
            cpus: map.cpus().len(),
        }
    }

    /// Busy time of a CPU in the window that was not for this queue.
    pub(super) fn others_ns(&self, cpu: CpuId) -> u64 {
        self.cpus.get(cpu.index()).map_or(0, |cpu| cpu.busy_ns.saturating_sub(cpu.own_ns))
    }
}

impl Metered {
    /// Ends a window in which the CPU polled this many of the queue's frames.
    fn end_window(&mut self, load: CpuLoad, head: Position, polled: u64) {
        let last = std::mem::replace(&mut self.last, load);
        let done = self.last_head.replace(head).map_or(0, |last| head.since(last));
        let packets = load.packets.saturating_sub(last.packets);
        let frames = load.frames.saturating_sub(last.frames);
        self.busy_ns = load.busy_ns.saturating_sub(last.busy_ns);
        let delivering_ns = load.delivering_ns.saturating_sub(last.delivering_ns).min(self.busy_ns);
        // Work besides delivery is polling.
        let polling_ns = part(self.busy_ns - delivering_ns, polled, frames);
        self.own_ns = polling_ns + part(delivering_ns, done.into(), packets);
        let behind = self.mark.take().map_or(0, |mark| mark.since(head));
        self.waits = (1..=u32::MAX / 2).contains(&behind);
    }
}

/// Part of a time that `own` of `all` packets took.
fn part(ns: u64, own: u64, all: u64) -> u64 {
    let part = u128::from(ns) * u128::from(own) / u128::from(all.max(1));
    u64::try_from(part).unwrap_or(u64::MAX).min(ns)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const CPU: CpuId = CpuId(0);

    /// Ends a window with a backlog between these positions.
    fn end_window(meter: &mut Meter, now_ns: u64, ends: [u32; 2]) -> SpreadLoad {
        let loads = [CpuLoad { busy_ns: now_ns / 2, packets: now_ns, ..CpuLoad::default() }];
        let ends = ends.map(Position);
        let past_ns = meter.end_window(now_ns, &loads, std::iter::once((CPU, ends)), (CPU, 0));
        let map = RpsMap::new([CPU]);
        meter.load(past_ns, &map, &map)
    }

    /// Turns that are as far apart as windows see a wait, too.
    #[test]
    fn rps_s3_wait_is_seen_between_turns() {
        let mut meter = Meter::default();
        end_window(&mut meter, 10, [0, 5]);
        assert!(end_window(&mut meter, 20, [4, 9]).waits, "packet 4 was queued throughout");
        assert!(!end_window(&mut meter, 30, [9, 12]).waits);
        meter.mark(std::iter::once((CPU, Position(20))));
        assert!(end_window(&mut meter, 40, [15, 30]).waits, "a later mark counts");
    }

    #[test]
    fn rps_s1_others_delivery_is_not_own() {
        let mut meter = Meter::default();
        let map = RpsMap::new([CPU]);
        let load = |busy_ns, delivering_ns, packets, frames| {
            [CpuLoad { busy_ns, delivering_ns, packets, frames }]
        };
        let ends = |head| std::iter::once((CPU, [Position(head); 2]));
        meter.end_window(100, &load(0, 0, 0, 0), ends(0), (CPU, 0));
        let past_ns = meter.end_window(200, &load(90, 80, 40, 50), ends(10), (CPU, 25));
        // Of 80 ns of delivery a quarter was for this queue, and half of the polling.
        let SpreadLoad { busiest, own, .. } = meter.load(past_ns, &map, &map);
        assert_eq!((busiest, own), (900, 250));
    }

    proptest! {
        /// The parts of all queues are the busy time of all CPUs, whichever CPU polls which queue.
        #[test]
        fn rps_s1_parts_of_queues_are_load(
            // By queue: its polling CPU, and its packets for each of two CPUs.
            queues in vec((0_u16..2, [0_u32..5_000, 0_u32..5_000]), 1..5),
            costs in [1_u64..2_000, 1_u64..2_000],
        ) {
            let map = RpsMap::new([0, 1].map(CpuId));
            let mut loads = [CpuLoad::default(); 2];
            for (polling, packets) in &queues {
                let polling = &mut loads[usize::from(*polling)];
                let frames: u64 = packets.iter().map(|packets| u64::from(*packets)).sum();
                polling.frames += frames;
                polling.busy_ns += frames * 70;
                for ((load, packets), cost_ns) in loads.iter_mut().zip(packets).zip(costs) {
                    let packets = u64::from(*packets);
                    load.packets += packets;
                    load.delivering_ns += packets * cost_ns;
                    load.busy_ns += packets * cost_ns;
                }
            }
            let mut own = 0;
            for (polling, packets) in &queues {
                let ends = |heads: [u32; 2]| {
                    let ends = heads.map(|head| [Position(head); 2]);
                    [0, 1].map(CpuId).into_iter().zip(ends)
                };
                let (mut meter, cpu) = (Meter::default(), CpuId(*polling));
                map.cpus().iter().for_each(|cpu| meter.connect(*cpu, Position(0)));
                let frames = packets.iter().map(|packets| u64::from(*packets)).sum();
                meter.end_window(1, &loads, ends(*packets), (cpu, frames));
                // A window of a microsecond makes thousandths of it nanoseconds.
                own += meter.load(1_000, &map, &map).own;
            }
            let busy: u64 = loads.iter().map(|load| load.busy_ns).sum();
            let rounding = 4 * queues.len() as u64;
            prop_assert!((busy - rounding.min(busy)..=busy).contains(&own), "{} of {}", own, busy);
        }
    }
}
