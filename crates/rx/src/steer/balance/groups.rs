//! Groups: hash ranges of equal length, each with its weight and its CPU.

use super::super::rps::RpsMap;
use super::REST_NS;
use super::shares::Gap;
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Shift from a hash to its group, if slots are no larger: 4,096 groups.
const GROUP_SHIFT: u32 = 20;

/// Maximum number of windows that a weight averages. Flows are bursty, and moving a group that is
/// heavy by chance does not help.
const AVERAGED_MAX: u8 = 32;

/// Number of windows averaged after one that chance does not explain: a burst has come, or a flow has begun or ended. If the
/// next one shows the same change, it was no burst, and the weight is that of the next one alone.
const AVERAGED_CHANGED: u8 = 4;

/// Number of windows averaged if chance does not explain the sum of a CPU's groups: many light flows have begun or ended.
const AVERAGED_SHIFTED: u8 = 8;

/// Change of a group's bursts by a change of its rate that is not confirmed; a window without one takes 1 away.
const BURST: u8 = 4;

/// Bursts from which on a group counts as one that always has some. It moves by its mean weight: else it never would.
const BURSTS_USUAL: u8 = 4 * BURST;

/// Variance of the number of packets in a window, in parts of their expected number: flows come in runs.
const VARIANCE: u64 = 3;

/// Square of the number of standard deviations beyond which a difference is not chance.
const CHANCE_SQUARED: u64 = 16;

/// Packets added to those expected in a window, because small numbers deviate by more.
const EXPECTED_MARGIN: u64 = 8;

/// Part of a new window in the smoothed surplus of a CPU: one in this many.
const SURPLUS_SMOOTHING: i64 = 4;

/// Square of a CPU's surplus that chance explains, per expected packet. The smoothing leaves a seventh of the variance.
const SURPLUS_SQUARED_MAX: u64 = CHANCE_SQUARED * VARIANCE / 7;

/// Groups of one queue. Each group has the same index in all arrays.
#[derive(Debug)]
pub(in super::super) struct Groups {
    shift: u32,
    /// Number of packets since the window began.
    fresh: Box<[u32]>,
    weights: Box<[Weight]>,
    /// Number of windows that the weight averages.
    averaged: Box<[u8]>,
    /// Change that the last window showed.
    changes: Box<[Option<Change>]>,
    /// Bursts lately, up to twice [`BURSTS_USUAL`].
    bursts: Box<[u8]>,
    /// CPU by the RPS map.
    mapped_cpus: Box<[u16]>,
    /// CPU that the group is assigned to instead, or [`NO_CPU`].
    assigned: Box<[u16]>,
    /// True if a boundary of the RPS map is inside the group. Where the map has it, such a group is
    /// assigned as well: otherwise, the map would send a part of its flows elsewhere.
    straddles: Box<[bool]>,
    /// Time of the last move, in ms, or 0.
    moved_ms: Box<[u64]>,
    /// Packets that are not steered by their group, by [`CpuId::index`]: weights, and counts since the window began.
    fixed: Vec<(Weight, u32)>,
    /// Excess of the groups' packets over those expected, per window and CPU, smoothed, in 16ths.
    surpluses: Vec<i64>,
    /// Number of windows that the weights in `fixed` average.
    fixed_averaged: u8,
    by_cpu: GroupsByCpu,
}

/// Groups in order of their CPUs, so that a round with moves does not scan all for each of them.
#[derive(Debug, Default)]
struct GroupsByCpu {
    /// Groups as they were at the start of the round.
    sorted: Vec<usize>,
    /// End of each CPU's part of `sorted`, by [`CpuId::index`].
    ends: Vec<usize>,
    /// Groups assigned in the round, at most [`BALANCE_ROUND_MAX`](super::BALANCE_ROUND_MAX).
    assigned: Vec<usize>,
}

const NO_CPU: u16 = u16::MAX;

impl Groups {
    /// Creates groups without weights, for a flow table of this shift.
    pub(super) fn new(table_shift: u32, map: &RpsMap) -> Self {
        let shift = table_shift.max(GROUP_SHIFT);
        debug_assert!(shift < u32::BITS, "a hash selects one of two groups at least");
        let count = 1_usize << (u32::BITS - shift);
        let mut groups = Self {
            shift,
            fresh: vec![0; count].into(),
            weights: vec![Weight::default(); count].into(),
            averaged: vec![0; count].into(),
            changes: vec![None; count].into(),
            bursts: vec![0; count].into(),
            mapped_cpus: vec![NO_CPU; count].into(),
            assigned: vec![NO_CPU; count].into(),
            straddles: vec![false; count].into(),
            moved_ms: vec![0; count].into(),
            fixed: Vec::new(),
            surpluses: Vec::new(),
            fixed_averaged: 0,
            by_cpu: GroupsByCpu::default(),
        };
        groups.set_map(map, 0);
        groups
    }

    /// True if every slot of a flow table with this shift is inside one group.
    pub(super) fn suit(&self, table_shift: u32) -> bool {
        self.shift == table_shift.max(GROUP_SHIFT)
    }

    /// Takes groups away from CPUs that are not in the map. Groups that this moves rest.
    pub(super) fn set_map(&mut self, map: &RpsMap, now_ns: u64) {
        let (shift, half, last) = (self.shift, 1 << (self.shift - 1), (1 << self.shift) - 1);
        for (index, group) in (0..self.mapped_cpus.len()).zip(0_u32..) {
            let first = group << shift;
            let [first, middle, last] =
                [first, first | half, first | last].map(|hash| map.select(FlowHash(hash)));
            let (before, mapped_before) = (self.cpu_at(index), self.mapped_cpus[index]);
            self.mapped_cpus[index] = middle.map_or(NO_CPU, |cpu| cpu.0);
            self.straddles[index] = first != last;
            let assigned = self.assigned[index];
            let stays = assigned != mapped_before && map.contains(CpuId(assigned));
            self.assign_to(index, if stays { assigned } else { self.mapped_cpus[index] });
            if self.cpu_at(index) != before && now_ns > 0 {
                self.moved_ms[index] = ms_after(now_ns);
            }
        }
    }

    /// Sets the CPU of a group.
    fn assign_to(&mut self, group: usize, cpu: u16) {
        let is_by_map = self.mapped_cpus[group] == cpu && !self.straddles[group];
        self.assigned[group] = if is_by_map { NO_CPU } else { cpu };
    }

    #[inline]
    pub(super) fn weigh(&mut self, hash: FlowHash, packets: u32) {
        let fresh = &mut self.fresh[(hash.0 >> self.shift) as usize];
        *fresh = fresh.saturating_add(packets);
    }

    /// Weighs a packet that goes to this CPU whatever the CPU of its group is.
    pub(super) fn weigh_fixed(&mut self, cpu: CpuId) {
        if self.fixed.len() <= cpu.index() {
            self.fixed.resize(cpu.index() + 1, (Weight::default(), 0));
        }
        let (_, fresh) = &mut self.fixed[cpu.index()];
        *fresh = fresh.saturating_add(1);
    }

    /// Weight of the packets that go to a CPU whatever the CPU of their group is.
    pub(super) fn fixed(&self, cpu: CpuId) -> Weight {
        self.fixed.get(cpu.index()).map_or(Weight::default(), |(weight, _)| *weight)
    }

    #[inline]
    pub(super) fn cpu_of(&self, hash: FlowHash) -> Option<CpuId> {
        let cpu = self.assigned[(hash.0 >> self.shift) as usize];
        (cpu != NO_CPU).then_some(CpuId(cpu))
    }

    /// CPU of a group, assigned or by the map.
    fn cpu_at(&self, group: usize) -> u16 {
        match self.assigned[group] {
            NO_CPU => self.mapped_cpus[group],
            assigned => assigned,
        }
    }

    /// CPU and weight of each group.
    pub(super) fn each(&self) -> impl Iterator<Item = (u16, Weight)> {
        (0..self.weights.len()).map(|group| (self.cpu_at(group), self.weights[group]))
    }

    /// CPU and weight of each group that does not rest.
    pub(super) fn each_that_may_move(&self, now_ns: u64) -> impl Iterator<Item = (u16, Weight)> {
        let groups = (0..self.weights.len()).filter(move |group| !self.rests(*group, now_ns));
        groups.map(|group| (self.cpu_at(group), self.weights[group]))
    }

    /// Takes the packets of a window of this length into the weights. Each weight is the mean of more and more windows, so that
    /// chance has less and less part in it; after a change, the mean begins with the last few.
    pub(super) fn end_window(&mut self, past_ns: u64) {
        let shifted = self.shifted_cpus(past_ns);
        for group in 0..self.weights.len() {
            let is_shifted = shifted.get(usize::from(self.cpu_at(group))).is_some_and(|is| *is);
            let (weight, averaged) = (&mut self.weights[group], &mut self.averaged[group]);
            let fresh = self.fresh[group];
            // The first window has nothing to be compared with.
            let direction = weight.change(fresh, past_ns).filter(|_| *averaged > 0);
            let before = self.changes[group].map(|change| change.direction);
            let is_confirmed = direction == before;
            let change = direction.map(|direction| Change { direction, is_confirmed });
            self.changes[group] = change;
            let bursts_before = self.bursts[group];
            self.bursts[group] = bursts_before.saturating_sub(1);
            let averaged_max = match change {
                Some(_) if is_confirmed => 1,
                Some(_) => {
                    self.bursts[group] = (bursts_before + BURST).min(2 * BURSTS_USUAL);
                    AVERAGED_CHANGED
                }
                None if is_shifted => AVERAGED_SHIFTED,
                None => AVERAGED_MAX,
            };
            *averaged = (*averaged + 1).min(averaged_max);
            *weight = weight.with(fresh, past_ns, *averaged);
        }
        self.fixed_averaged = (self.fixed_averaged + 1).min(AVERAGED_SHIFTED);
        for (weight, fresh) in &mut self.fixed {
            let has_changed = weight.change(*fresh, past_ns).is_some();
            let averaged_max = if has_changed { AVERAGED_CHANGED } else { AVERAGED_SHIFTED };
            *weight = weight.with(*fresh, past_ns, self.fixed_averaged.min(averaged_max));
        }
        self.begin_window();
    }

    /// True for each CPU whose groups' sum deviates by more than chance, by [`CpuId::index`].
    fn shifted_cpus(&mut self, past_ns: u64) -> Vec<bool> {
        let mut sums: Vec<(u64, u64)> = Vec::new();
        for group in 0..self.weights.len() {
            let cpu = usize::from(self.cpu_at(group));
            if cpu == usize::from(NO_CPU) {
                continue;
            }
            if sums.len() <= cpu {
                sums.resize(cpu + 1, (0, 0));
            }
            let (came, rate) = &mut sums[cpu];
            *came += u64::from(self.fresh[group]);
            *rate += u64::from(self.weights[group].0);
        }
        self.surpluses.resize(sums.len(), 0);
        let with_surpluses = sums.iter().zip(&mut self.surpluses);
        let is_shifted = |((came, rate), surplus): (&(u64, u64), &mut i64)| {
            let expected = packets_in(*rate, past_ns);
            let off = came.cast_signed().saturating_sub(expected.cast_signed());
            let sum = *surplus * (SURPLUS_SMOOTHING - 1) + off * SURPLUS_PARTS;
            *surplus = sum / SURPLUS_SMOOTHING;
            let packets = (*surplus / SURPLUS_PARTS).unsigned_abs();
            packets.saturating_mul(packets)
                > SURPLUS_SQUARED_MAX * expected.saturating_add(EXPECTED_MARGIN)
        };
        with_surpluses.map(is_shifted).collect()
    }

    /// Begins the first window, after which the weights are those of this window alone.
    pub(super) fn begin_first_window(&mut self) {
        self.averaged.fill(0);
        self.changes.fill(None);
        self.bursts.fill(0);
        self.fixed_averaged = 0;
        self.surpluses.clear();
        self.begin_window();
    }

    fn begin_window(&mut self) {
        self.fresh.fill(0);
        self.fixed.iter_mut().for_each(|(_, fresh)| *fresh = 0);
    }

    /// Begins a round of moves: sorts the groups by their CPUs.
    pub(super) fn begin_round(&mut self) {
        let GroupsByCpu { mut sorted, mut ends, mut assigned } = std::mem::take(&mut self.by_cpu);
        ends.clear();
        for cpu in (0..self.weights.len()).map(|group| usize::from(self.cpu_at(group))) {
            if ends.len() <= cpu {
                ends.resize(cpu + 1, 0);
            }
            ends[cpu] += 1;
        }
        let mut begin = 0;
        for end in &mut ends {
            begin += std::mem::replace(end, begin);
        }
        sorted.resize(self.weights.len(), 0);
        for group in 0..self.weights.len() {
            let end = &mut ends[usize::from(self.cpu_at(group))];
            sorted[*end] = group;
            *end += 1;
        }
        assigned.clear();
        self.by_cpu = GroupsByCpu { sorted, ends, assigned };
    }

    /// Groups of a CPU, in any order. A round must have begun.
    fn of_cpu(&self, cpu: CpuId) -> impl Iterator<Item = usize> {
        let GroupsByCpu { sorted, ends, assigned } = &self.by_cpu;
        let end_of = |index: usize| ends.get(index).copied().unwrap_or(sorted.len());
        let begin = cpu.index().checked_sub(1).map_or(0, end_of);
        let before = &sorted[begin..end_of(cpu.index())];
        let is_of_cpu = move |group: &usize| self.cpu_at(*group) == cpu.0;
        // A group is assigned once in a round, and not to the CPU that it was on.
        before.iter().chain(assigned).copied().filter(is_of_cpu)
    }

    /// Group of the busiest CPU whose move comes nearest to the aim, except groups whose move would
    /// only swap the roles of the two CPUs.
    pub(super) fn best_of(&self, gap: &Gap, now_ns: u64) -> Option<usize> {
        let fits = self.of_cpu(gap.busiest).filter_map(|group| {
            let weight_ns = self.weights[group].work_ns(gap.cost_ns);
            let is_candidate =
                weight_ns > 0 && weight_ns <= gap.most_ns && self.may_move(group, now_ns);
            is_candidate.then(|| (weight_ns.abs_diff(gap.aim_ns), group))
        });
        fits.min().map(|(_, group)| group)
    }

    /// Heaviest group of a CPU, if it may move, and its weight.
    pub(super) fn heaviest_of(&self, cpu: CpuId, now_ns: u64) -> Option<(usize, Weight)> {
        let heaviest = self.of_cpu(cpu).max_by_key(|group| (self.weights[*group], *group))?;
        self.may_move(heaviest, now_ns).then_some((heaviest, self.weights[heaviest]))
    }

    /// Work in ns a second that may leave a CPU now, if a packet takes this long.
    pub(super) fn movable_ns(&self, cpu: CpuId, cost_ns: u64, now_ns: u64) -> u64 {
        let movable = self.of_cpu(cpu).filter(|group| self.may_move(*group, now_ns));
        movable.map(|group| self.weights[group].work_ns(cost_ns)).sum()
    }

    /// Work in ns a second that `count` moves across a gap of this width take away from a CPU of two, if a packet takes this
    /// long. They are those that [`best_of`](Self::best_of) selects.
    pub(super) fn leaving_ns(
        &self,
        (cpu, cost_ns): (CpuId, u64),
        mut gap_ns: u64,
        count: usize,
        now_ns: u64,
    ) -> u64 {
        let movable = self.of_cpu(cpu).filter(|group| self.may_move(*group, now_ns));
        let works = movable.map(|group| (self.weights[group].work_ns(cost_ns), group));
        let mut works: Vec<_> = works.filter(|(work_ns, _)| *work_ns > 0).collect();
        let mut leaving_ns = 0;
        for _ in 0..count {
            let fits = works.iter().enumerate().filter(|(_, (ns, _))| *ns <= most_ns(gap_ns));
            let best = fits.min_by_key(|(_, (ns, group))| (ns.abs_diff(gap_ns / 2), *group));
            let Some((index, &(work_ns, _))) = best else { break };
            works.swap_remove(index);
            leaving_ns += work_ns;
            gap_ns = gap_ns.saturating_sub(2 * work_ns);
        }
        leaving_ns
    }

    /// True if a group may be assigned anew: it does not rest, and its weight is known.
    fn may_move(&self, group: usize, now_ns: u64) -> bool {
        self.is_known(group) && !self.rests(group, now_ns)
    }

    /// True unless a change of a group's rate is to be confirmed by the next window.
    fn is_known(&self, group: usize) -> bool {
        self.changes[group].is_none_or(|change| change.is_confirmed)
            || self.bursts[group] >= BURSTS_USUAL
    }

    /// CPU and weight of each group whose weight is not known.
    pub(super) fn unknown(&self) -> impl Iterator<Item = (u16, Weight)> {
        let groups = (0..self.weights.len()).filter(|group| !self.is_known(*group));
        groups.map(|group| (self.cpu_at(group), self.weights[group]))
    }

    /// True if a group has moved recently.
    fn rests(&self, group: usize, now_ns: u64) -> bool {
        let moved_ms = self.moved_ms[group];
        moved_ms > 0 && now_ns / NS_PER_MS < moved_ms + REST_NS / NS_PER_MS
    }

    /// Assigns a group, and returns its weight in ns of work a second.
    pub(super) fn assign(&mut self, group: usize, to: CpuId, cost_ns: u64, now_ns: u64) -> u64 {
        debug_assert_ne!(self.cpu_at(group), to.0, "a group moves to another CPU");
        self.assign_to(group, to.0);
        self.moved_ms[group] = ms_after(now_ns);
        self.by_cpu.assigned.push(group);
        self.weights[group].work_ns(cost_ns)
    }
}

/// Change of a group's rate that chance does not explain.
#[derive(Clone, Copy, Debug)]
struct Change {
    direction: Direction,
    /// True if the window before showed a change in the same direction.
    is_confirmed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Rise,
    Fall,
}

/// Packets a second, smoothed, in 256ths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct Weight(u32);

impl Weight {
    /// Direction in which the rate has changed, if chance does not explain this number of packets in a window.
    fn change(self, fresh: u32, past_ns: u64) -> Option<Direction> {
        let (expected, fresh) = (self.expected(past_ns), u64::from(fresh));
        let off = expected.abs_diff(fresh);
        let explained = CHANCE_SQUARED * VARIANCE * expected.saturating_add(EXPECTED_MARGIN);
        let direction = if fresh > expected { Direction::Rise } else { Direction::Fall };
        (off.saturating_mul(off) > explained).then_some(direction)
    }

    /// Number of packets that a window of this length should have.
    fn expected(self, past_ns: u64) -> u64 {
        packets_in(self.0.into(), past_ns)
    }

    /// Weight after a window with `fresh` packets, which is one of `averaged`.
    fn with(self, fresh: u32, past_ns: u64, averaged: u8) -> Self {
        // In a window of ten seconds, there are more than a u64 has room for.
        let parts = u128::from(fresh) * u128::from(super::NS_PER_S * WEIGHT_PARTS);
        let rate = parts / u128::from(past_ns.max(1));
        let averaged = u128::from(averaged.max(1));
        let sum = u128::from(self.0) * (averaged - 1) + rate;
        Self(u32::try_from(sum / averaged).unwrap_or(u32::MAX))
    }

    /// Work in ns a second, if a packet takes this long.
    pub(super) fn work_ns(self, cost_ns: u64) -> u64 {
        u64::from(self.0).saturating_mul(cost_ns) / WEIGHT_PARTS
    }
}

/// Units per packet of [`Groups::surpluses`].
const SURPLUS_PARTS: i64 = 16;

/// Units of weights per packet a second.
const WEIGHT_PARTS: u64 = 256;

/// Number of packets in a window of this length at a rate, in 256ths of a packet a second.
fn packets_in(rate: u64, past_ns: u64) -> u64 {
    let parts = u128::from(rate) * u128::from(past_ns);
    u64::try_from(parts / u128::from(super::NS_PER_S * WEIGHT_PARTS)).unwrap_or(u64::MAX)
}

/// Time in ms, rounded up, so that a group never rests for less than it should.
fn ms_after(now_ns: u64) -> u64 {
    now_ns.div_ceil(NS_PER_MS).max(1)
}

/// Most work of a group that may move across a gap: more would only swap the roles of the two CPUs.
pub(super) fn most_ns(gap_ns: u64) -> u64 {
    gap_ns - gap_ns / 8
}

const NS_PER_MS: u64 = 1_000_000;
