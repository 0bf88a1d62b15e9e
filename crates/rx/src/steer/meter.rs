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
    since_ns: u64,
    is_marked: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Metered {
    /// Work at the begin of the window.
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
    /// of the backlogs.
    pub(super) fn end_window(
        &mut self,
        now_ns: u64,
        loads: &[CpuLoad],
        ends: impl Iterator<Item = (CpuId, [Position; 2])>,
        polling_cpu: CpuId,
    ) -> u64 {
        let past_ns = now_ns.saturating_sub(std::mem::replace(&mut self.since_ns, now_ns));
        self.cpus.resize(loads.len(), Metered::default());
        self.is_marked = false;
        for (cpu, [head, tail]) in ends {
            let index = cpu.index();
            if let (Some(metered), Some(load)) = (self.cpus.get_mut(index), loads.get(index)) {
                metered.end_window(*load, head, cpu == polling_cpu);
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
    fn end_window(&mut self, load: CpuLoad, head: Position, polls: bool) {
        let last = std::mem::replace(&mut self.last, load);
        let done = self.last_head.replace(head).map_or(0, |last| head.since(last));
        let packets = load.packets.saturating_sub(last.packets);
        self.busy_ns = load.busy_ns.saturating_sub(last.busy_ns);
        let delivering_ns = load.delivering_ns.saturating_sub(last.delivering_ns).min(self.busy_ns);
        let part = u128::from(delivering_ns) * u128::from(done) / u128::from(packets.max(1));
        let part_ns = u64::try_from(part).unwrap_or(u64::MAX).min(delivering_ns);
        // Work besides delivery is polling: for this queue on its polling CPU, for others elsewhere.
        let polling_ns = if polls { self.busy_ns - delivering_ns } else { 0 };
        self.own_ns = polling_ns + part_ns;
        let behind = self.mark.take().map_or(0, |mark| mark.since(head));
        self.waits = (1..=u32::MAX / 2).contains(&behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: CpuId = CpuId(0);

    /// Ends a window with a backlog between these positions.
    fn end_window(meter: &mut Meter, now_ns: u64, ends: [u32; 2]) -> SpreadLoad {
        let loads = [CpuLoad { busy_ns: now_ns / 2, delivering_ns: 0, packets: now_ns }];
        let ends = ends.map(Position);
        let past_ns = meter.end_window(now_ns, &loads, std::iter::once((CPU, ends)), CPU);
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
        let load = |busy_ns, delivering_ns, packets| [CpuLoad { busy_ns, delivering_ns, packets }];
        let ends = |head| std::iter::once((CPU, [Position(head); 2]));
        meter.end_window(100, &load(0, 0, 0), ends(0), CPU);
        let past_ns = meter.end_window(200, &load(90, 80, 40), ends(10), CPU);
        // Of 80 ns of delivery a quarter was for this queue, and polling was.
        let SpreadLoad { busiest, own, .. } = meter.load(past_ns, &map, &map);
        assert_eq!((busiest, own), (900, 300));
    }
}
