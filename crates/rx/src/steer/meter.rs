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
    /// Notes the tails of the backlogs, once a window.
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

    /// Ends a window and begins the next. Returns its length. The first window began at time 0.
    pub(super) fn end_window(
        &mut self,
        now_ns: u64,
        loads: &[CpuLoad],
        heads: impl Iterator<Item = (CpuId, Position)>,
        polling_cpu: CpuId,
    ) -> u64 {
        let past_ns = now_ns.saturating_sub(std::mem::replace(&mut self.since_ns, now_ns));
        self.cpus.resize(loads.len(), Metered::default());
        self.is_marked = false;
        for (cpu, head) in heads {
            let index = cpu.index();
            if let (Some(metered), Some(load)) = (self.cpus.get_mut(index), loads.get(index)) {
                metered.end_window(*load, head, cpu == polling_cpu);
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
        // Work besides delivery is polling: for this queue on its polling CPU, for others elsewhere.
        let part = u128::from(self.busy_ns) * u128::from(done) / u128::from(packets.max(1));
        let part_ns = u64::try_from(part).unwrap_or(u64::MAX).min(self.busy_ns);
        self.own_ns = if polls { self.busy_ns } else { part_ns };
        let behind = self.mark.take().map_or(0, |mark| mark.since(head));
        self.waits = (1..=u32::MAX / 2).contains(&behind);
    }
}
