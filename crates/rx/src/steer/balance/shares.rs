//! Shares: the load of each CPU, as measured and as expected after moves.

use super::super::rps::RpsMap;
use super::NS_PER_S;
use super::board::Planned;
use super::groups::{Groups, Weight, most_ns};
use crate::cpu::CpuId;

/// Work of a CPU since the start, as the engine measures it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuLoad {
    /// Busy time, in ns.
    pub busy_ns: u64,
    /// Part of the busy time spent in delivery, in ns.
    pub delivering_ns: u64,
    /// Number of packets taken from backlogs.
    pub packets: u64,
    /// Number of frames taken from the queues that the CPU polls.
    pub frames: u64,
}

/// Maximum work of a light group, in ns a second: an eighth of a CPU.
const LIGHT_NS_MAX: u64 = NS_PER_S / 8;

/// Part of a new measurement in the work besides delivery: one in this many. A CPU without time left polls less than its
/// queues need, and what they need shows only once it has time again.
const OTHER_SMOOTHING: u64 = 4;

/// Busy time of a CPU without time left, in ns a second.
const BUSY_NS_MIN: u64 = NS_PER_S / 20 * 19;

/// Part of a new measurement in the smoothed cost of a packet: one in this many.
const COST_SMOOTHING: u64 = 32;

/// Square of the number of standard errors by which a CPU's cost must differ from the mean cost to
/// count. Of a hundred CPUs, the farthest is three off by chance alone.
const COST_ERRORS_SQUARED: u64 = 9;

/// Loads of all CPUs, by [`CpuId::index`].
#[derive(Debug, Default)]
pub(super) struct Shares {
    cpus: Vec<Share>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// Work at the start of the window.
    last: CpuLoad,
    /// Cost of a packet, smoothed, in 256ths of a ns. 0 if it is unknown.
    cost: u64,
    /// Mean square of its deviations from single windows, in 2^-16 of a square ns.
    cost_variance: u64,
    /// Number of windows with packets.
    windows: u64,
    /// Cost of a packet, corrected for chance, in 256ths of a ns.
    fair_cost: u64,
    /// Work besides delivery, in ns a second, smoothed.
    other_ns: u64,
    /// Busy time in the last window, in ns a second.
    busy_ns: u64,
    /// Delivery of this queue's packets and its unpolled work, in ns a second.
    own_ns: u64,
    /// Unpolled part of it.
    unpolled_ns: u64,
    /// All work, in ns a second.
    load_ns: u64,
    /// Part of it that no balancing moves: all but hash ranges of this queue, and light ones of others.
    fixed_ns: u64,
    /// Part of it that other queues will move if this becomes the busiest CPU.
    others_light_ns: u64,
    /// True if the map has the CPU, and groups may still leave it.
    is_open: bool,
    is_mapped: bool,
}

/// Distance between the busiest CPU and the least busy one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gap {
    pub(super) busiest: CpuId,
    pub(super) least_busy: CpuId,
    /// Most work of a group that may move, in ns a second.
    pub(super) most_ns: u64,
    /// Work that should move, in ns a second.
    pub(super) aim_ns: u64,
    /// Time that the busiest CPU takes for a packet, in ns.
    pub(super) cost_ns: u64,
    /// Work of other queues that must leave the least busy CPU afterwards, in ns a second.
    pub(super) leaving_ns: u64,
}

/// Binary places of [`Share::cost`].
const COST_SHIFT: u32 = 8;

impl Share {
    /// Work of a group with its part of the unpolled work: what a CPU without time loses is not weighed.
    fn with_unpolled(self, work_ns: u64) -> u64 {
        let part = u128::from(self.unpolled_ns) * u128::from(work_ns)
            / u128::from(self.own_ns.saturating_sub(self.unpolled_ns).max(1));
        work_ns.saturating_add(u64::try_from(part).unwrap_or(u64::MAX))
    }

    fn cost_ns(self) -> u64 {
        (self.fair_cost >> COST_SHIFT).max(1)
    }
}

impl Shares {
    /// Begins the first window. Costs of packets are kept, if they are known.
    pub(super) fn begin(&mut self, loads: &[CpuLoad]) {
        self.cpus.resize(loads.len(), Share::default());
        for (share, load) in self.cpus.iter_mut().zip(loads) {
            (share.last, share.other_ns) = (*load, 0);
        }
    }

    /// Takes the measurements of a window of this length.
    pub(super) fn measure(&mut self, loads: &[CpuLoad], past_ns: u64) {
        self.cpus.resize(loads.len(), Share::default());
        let pairs = || self.cpus.iter().zip(loads);
        let costs = pairs().filter_map(|(share, load)| load.since(share.last).cost());
        let typical = median(costs.collect());
        for (share, load) in self.cpus.iter_mut().zip(loads) {
            share.measure(*load, past_ns, typical);
        }
        self.judge_costs();
    }

    /// Sets each CPU's cost to the mean, plus the part of its deviation that chance does not explain.
    fn judge_costs(&mut self) {
        let known = || self.cpus.iter().filter(|share| share.cost > 0);
        let mean = known().map(|share| share.cost).sum::<u64>() / (known().count() as u64).max(1);
        for share in &mut self.cpus {
            let off = share.cost.abs_diff(mean);
            let chance = share.chance_squared() / off.max(1);
            // A single window says nothing about chance.
            let is_known = share.windows > 1;
            let surplus = if is_known { off.saturating_sub(chance) } else { 0 };
            share.fair_cost = if share.cost < mean { mean - surplus } else { mean + surplus };
        }
    }

    /// Computes the expected loads. `others` gives the load that other queues plan for a CPU.
    pub(super) fn load(
        &mut self,
        groups: &Groups,
        map: &RpsMap,
        others: impl Fn(usize) -> Planned,
    ) {
        for (index, share) in (0..).zip(&mut self.cpus) {
            share.own_ns = groups.fixed(CpuId(index)).work_ns(share.cost_ns());
            share.fixed_ns = share.other_ns.saturating_add(share.own_ns);
            share.unpolled_ns = 0;
            share.is_mapped = map.contains(CpuId(index));
            share.is_open = share.is_mapped;
        }
        for (cpu, weight) in groups.each() {
            if let Some(share) = self.cpus.get_mut(usize::from(cpu)) {
                share.own_ns += weight.work_ns(share.cost_ns());
            }
        }
        for (index, share) in self.cpus.iter_mut().enumerate() {
            let others = others(index);
            share.others_light_ns = others.light_ns;
            share.fixed_ns += others.all_ns.saturating_sub(others.light_ns);
            share.load_ns =
                share.other_ns.saturating_add(others.all_ns).saturating_add(share.own_ns);
        }
    }

    /// Work that the expected load of a CPU lacks to fill it, in ns a second. `None` if the CPU has time left, or all CPUs
    /// together have none.
    pub(super) fn missing_ns(&self, cpu: CpuId) -> Option<u64> {
        let share = self.cpus.get(cpu.index()).filter(|share| share.is_mapped)?;
        let all_ns: u64 = self.mapped().map(|share| share.busy_ns).sum();
        let others_have_time = all_ns < BUSY_NS_MIN * self.mapped().count() as u64;
        (share.busy_ns >= BUSY_NS_MIN && others_have_time)
            .then(|| NS_PER_S.saturating_sub(share.load_ns))
    }

    /// Adds unpolled work of this queue to the expected load of a CPU.
    pub(super) fn add_unpolled(&mut self, cpu: CpuId, work_ns: u64) {
        if let Some(share) = self.cpus.get_mut(cpu.index()) {
            share.own_ns += work_ns;
            share.load_ns += work_ns;
            share.unpolled_ns = work_ns;
        }
    }

    /// Load of this queue on each CPU, in order.
    pub(super) fn own(&self, groups: &Groups, now_ns: u64) -> impl Iterator<Item = Planned> {
        let cost_ns = |cpu: u16| self.cpus.get(usize::from(cpu)).map_or(0, |share| share.cost_ns());
        let mut light = vec![0_u64; self.cpus.len()];
        for (cpu, weight) in groups.each_that_may_move(now_ns) {
            let work_ns = weight.work_ns(cost_ns(cpu));
            if let Some(light_ns) =
                light.get_mut(usize::from(cpu)).filter(|_| work_ns <= LIGHT_NS_MAX)
            {
                *light_ns += work_ns;
            }
        }
        let own = self.cpus.iter().zip(light);
        own.map(|(share, light_ns)| Planned { all_ns: share.own_ns, light_ns })
    }

    fn mapped(&self) -> impl Iterator<Item = &Share> {
        self.cpus.iter().filter(|share| share.is_mapped)
    }

    pub(super) fn load_max_ns(&self) -> u64 {
        self.mapped().map(|share| share.load_ns).max().unwrap_or(0)
    }

    /// Load of the busiest CPU in percent of the mean.
    pub(super) fn imbalance_percent(&self) -> u32 {
        let count = self.mapped().count() as u64;
        let sum: u64 = self.mapped().map(|share| share.load_ns).sum();
        let percent = u128::from(self.load_max_ns()) * 100 * u128::from(count);
        u32::try_from(percent / u128::from(sum.max(1))).unwrap_or(u32::MAX)
    }

    /// True if the map has two CPUs.
    pub(super) fn is_pair(&self) -> bool {
        self.mapped().count() == 2
    }

    /// True if the map has two CPUs, and the next window is to confirm how heavy a group is. What moves across their gap now
    /// would rest where it leaves no room for that group.
    pub(super) fn awaits_heavy(&self, groups: &Groups) -> bool {
        let work_ns = |(cpu, weight): (u16, Weight)| {
            let share = self.cpus.get(usize::from(cpu)).filter(|share| share.is_mapped);
            share.map_or(0, |share| weight.work_ns(share.cost_ns()))
        };
        self.is_pair() && groups.unknown().any(|group| work_ns(group) > LIGHT_NS_MAX)
    }

    fn open(&self) -> impl Iterator<Item = (CpuId, &Share)> {
        (0..).map(CpuId).zip(&self.cpus).filter(|(_, share)| share.is_open)
    }

    fn open_mean_ns(&self) -> u64 {
        let sum: u128 = self.open().map(|(_, share)| u128::from(share.load_ns)).sum();
        u64::try_from(sum / (self.open().count() as u128).max(1)).unwrap_or(u64::MAX)
    }

    /// Gap between the busiest and the least busy of the open CPUs, if it is beyond the target.
    pub(super) fn gap(&self, target_percent: u32) -> Option<Gap> {
        let least_first = |(cpu, share): &(CpuId, &Share)| (share.load_ns, *cpu);
        let (least_busy, least) = self.open().min_by_key(least_first)?;
        let (busiest, most) =
            self.open().max_by_key(|(cpu, share)| (share.load_ns, std::cmp::Reverse(*cpu)))?;
        let sum: u128 = self.open().map(|(_, share)| u128::from(share.load_ns)).sum();
        let is_beyond = u128::from(most.load_ns) * 100 * self.open().count() as u128
            > sum * u128::from(target_percent);
        // A heavy group would rest beside work that cannot leave: of more than two CPUs, others take those that leave its CPU.
        let has_less_room = !self.is_pair() && least.fixed_ns > most.fixed_ns;
        let room_ns = self.open_mean_ns().saturating_sub(least.fixed_ns);
        let room_ns = if has_less_room { room_ns } else { u64::MAX };
        is_beyond.then(|| self.gap_between(busiest, least_busy, room_ns))
    }

    /// Gaps that take what has no room on the least busy CPU: to the least busy one of those with no more work that cannot
    /// leave than the busiest, and to the one that takes the heaviest group, if that and such work are then no more than what
    /// stays.
    pub(super) fn gaps_with_room(&self, gap: &Gap) -> impl Iterator<Item = Gap> {
        let (from, least) = (self.cpus[gap.busiest.index()], self.cpus[gap.least_busy.index()]);
        let is_tight = !self.is_pair() && least.fixed_ns > from.fixed_ns;
        let others = || self.open().filter(|(cpu, _)| *cpu != gap.busiest);
        let roomy = others().filter(|(_, share)| share.fixed_ns <= from.fixed_ns);
        let roomy = roomy.min_by_key(|(cpu, share)| (share.load_ns, *cpu));
        let roomy = roomy.map(|(cpu, _)| self.gap_between(gap.busiest, cpu, u64::MAX));
        let tight = others().map(|(cpu, share)| {
            let room_ns = from.load_ns.saturating_sub(share.fixed_ns) / 2;
            self.gap_between(gap.busiest, cpu, room_ns)
        });
        let tight = tight.max_by_key(|gap| (gap.most_ns, std::cmp::Reverse(gap.least_busy)));
        roomy.into_iter().chain(tight).filter(move |_| is_tight)
    }

    /// Gap from the busiest CPU to another, which has room for groups with this much work.
    fn gap_between(&self, busiest: CpuId, least_busy: CpuId, room_ns: u64) -> Gap {
        let [most, least] = [busiest, least_busy].map(|cpu| self.cpus[cpu.index()]);
        let gap_ns = most.load_ns.saturating_sub(least.load_ns);
        // The excess over the mean, but no more than makes the two equal.
        let aim_ns = most.load_ns.saturating_sub(self.open_mean_ns()).min(gap_ns / 2);
        let (most_ns, cost_ns) = (most_ns(gap_ns).min(room_ns), most.cost_ns());
        Gap { busiest, least_busy, most_ns, aim_ns, cost_ns, leaving_ns: 0 }
    }

    /// Next move that gives a flow a CPU of its own. If the heaviest group of the busiest CPU fills a
    /// CPU by itself, it moves to a CPU with less work that cannot be moved. If that CPU still has too
    /// many other groups, one of them leaves first, so that no move makes the busiest CPU busier.
    /// Light groups of other queues leave afterwards: those queues see the CPU become the busiest. All other load of
    /// theirs counts as work that cannot be moved: heavy groups of two queues would chase each other from CPU to CPU.
    /// `moves_left` is the number of moves that the round may still make.
    pub(super) fn isolate_heaviest(
        &self,
        groups: &Groups,
        gap: &Gap,
        moves_left: usize,
        now_ns: u64,
    ) -> Option<(usize, Gap)> {
        let (group, weight) = groups.heaviest_of(gap.busiest, now_ns)?;
        let weighed_ns = weight.work_ns(gap.cost_ns);
        let from = self.cpus[gap.busiest.index()];
        let weight_ns = from.with_unpolled(weighed_ns);
        let calm = self.open().filter(|(_, share)| share.other_ns + weight_ns / 16 < from.other_ns);
        let (to, share) = calm.min_by_key(|(cpu, share)| (share.load_ns, *cpu))?;
        let movable_ns = groups.movable_ns(to, share.cost_ns(), now_ns);
        let without_others_ns = share.load_ns.saturating_sub(share.others_light_ns);
        let left_ns = without_others_ns.saturating_sub(movable_ns);
        if weight_ns <= from.load_ns / 2 || left_ns + weight_ns >= from.load_ns {
            return None;
        }
        if without_others_ns + weight_ns < from.load_ns {
            let leaving_ns = (share.load_ns + weight_ns).saturating_sub(from.load_ns);
            return Some((group, Gap { least_busy: to, leaving_ns, ..*gap }));
        }
        if self.is_pair() {
            // No third CPU takes the other groups first: they change places with the heavy one, in the same round. Light groups of
            // other queues leave in none.
            let count = moves_left.saturating_sub(1);
            let gap_ns = (share.load_ns + 2 * weighed_ns).saturating_sub(from.load_ns);
            let leaving_ns = groups.leaving_ns((to, share.cost_ns()), gap_ns, count, now_ns);
            let is_lighter = share.load_ns + weight_ns < from.load_ns + leaving_ns;
            return is_lighter.then_some((group, Gap { least_busy: to, ..*gap }));
        }
        let others = self.open().filter(|(cpu, _)| *cpu != to && *cpu != gap.busiest);
        let (least_busy, least) = others.min_by_key(|(cpu, share)| (share.load_ns, *cpu))?;
        let gap_ns = from.load_ns.saturating_sub(least.load_ns);
        let cost_ns = share.cost_ns();
        let (most_ns, aim_ns) = (most_ns(gap_ns), gap_ns);
        let gap = Gap { busiest: to, least_busy, most_ns, aim_ns, cost_ns, leaving_ns: 0 };
        groups.best_of(&gap, now_ns).map(|group| (group, gap))
    }

    /// Excludes a CPU from this round, because moving any of its groups would not help.
    pub(super) fn settle(&mut self, cpu: CpuId) {
        self.cpus[cpu.index()].is_open = false;
    }

    /// Accounts for the move of this much work, in ns a second, across the gap. What leaves for it is expected where the most
    /// room is then.
    pub(super) fn apply_move(&mut self, gap: &Gap, weight_ns: u64) {
        let from = &mut self.cpus[gap.busiest.index()];
        from.load_ns = from.load_ns.saturating_sub(weight_ns) + gap.leaving_ns;
        from.own_ns = from.own_ns.saturating_sub(weight_ns);
        let to = &mut self.cpus[gap.least_busy.index()];
        to.load_ns = (to.load_ns + weight_ns).saturating_sub(gap.leaving_ns);
        to.others_light_ns = to.others_light_ns.saturating_sub(gap.leaving_ns);
        to.own_ns += weight_ns;
    }
}

impl Share {
    /// Takes the work of a CPU in a window. `typical` is the cost of a packet on the CPUs in that window.
    fn measure(&mut self, load: CpuLoad, past_ns: u64, typical: u64) {
        let last = std::mem::replace(&mut self.last, load);
        let CpuLoad { busy_ns, delivering_ns, .. } = load.since(last);
        if let Some(cost) = load.since(last).cost() {
            self.measure_cost(cost, typical);
        }
        let a_second = |ns: u64| {
            let ns = u128::from(ns) * u128::from(NS_PER_S) / u128::from(past_ns.max(1));
            u64::try_from(ns).unwrap_or(u64::MAX)
        };
        self.busy_ns = a_second(busy_ns);
        let other_ns = a_second(busy_ns.saturating_sub(delivering_ns));
        self.other_ns = if self.other_ns == 0 {
            other_ns
        } else {
            smoothed(self.other_ns, other_ns, OTHER_SMOOTHING)
        };
    }
}

impl Share {
    /// Takes the cost of a packet in a window.
    fn measure_cost(&mut self, cost: u64, typical: u64) {
        self.windows += 1;
        // An outlier is due to an interrupt or another process, not to the packets.
        let known = if self.cost == 0 { typical } else { self.cost };
        let plausible = cost.clamp(known / 3 * 2, known / 2 * 3);
        if self.cost == 0 {
            self.cost = plausible;
            return;
        }
        let smoothing = self.windows.min(COST_SMOOTHING);
        let off = plausible.abs_diff(self.cost);
        self.cost = smoothed(self.cost, plausible, smoothing);
        self.cost_variance = smoothed(self.cost_variance, off.saturating_mul(off), smoothing);
    }

    /// Square of the deviation from the mean cost that chance explains.
    fn chance_squared(self) -> u64 {
        let windows = self.windows.clamp(1, 2 * COST_SMOOTHING - 1);
        self.cost_variance.saturating_mul(COST_ERRORS_SQUARED) / windows
    }
}

impl CpuLoad {
    /// Work since an earlier time.
    fn since(self, before: Self) -> Self {
        Self {
            busy_ns: self.busy_ns.saturating_sub(before.busy_ns),
            delivering_ns: self.delivering_ns.saturating_sub(before.delivering_ns),
            packets: self.packets.saturating_sub(before.packets),
            frames: self.frames.saturating_sub(before.frames),
        }
    }

    /// Cost of a packet, in 256ths of a ns; `None` without packets.
    fn cost(self) -> Option<u64> {
        (self.delivering_ns << COST_SHIFT).checked_div(self.packets)
    }
}

/// Median, or 0 of nothing. Of two in the middle, the lower one: outliers are high.
fn median(mut costs: Vec<u64>) -> u64 {
    costs.sort_unstable();
    costs.get(costs.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

fn smoothed(before: u64, now: u64, smoothing: u64) -> u64 {
    (before.saturating_mul(smoothing - 1).saturating_add(now)) / smoothing
}
