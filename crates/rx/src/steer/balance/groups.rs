//! Groups: hash ranges of equal length, each with its weight and its CPU.

use super::super::rps::RpsMap;
use super::REST_NS;
use super::shares::Gap;
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Shift from a hash to its group, if slots are no larger: 4,096 groups.
const GROUP_SHIFT: u32 = 20;

/// Part of a new measurement in a weight: one in this many. Flows are bursty, and moving a group
/// that is heavy by chance does not help.
const SMOOTHING: u64 = 8;

/// Groups of one queue. Each group has the same index in all arrays.
#[derive(Debug)]
pub(in super::super) struct Groups {
    shift: u32,
    /// Number of packets since the window began.
    fresh: Box<[u32]>,
    /// Packets a second, smoothed.
    weights: Box<[u32]>,
    /// CPU by the RPS map.
    homes: Box<[u16]>,
    /// CPU that the group is assigned to instead, or [`NO_CPU`].
    assigned: Box<[u16]>,
    /// Time of the last move, in ms, or 0.
    moved_ms: Box<[u64]>,
    is_measured: bool,
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
            weights: vec![0; count].into(),
            homes: vec![NO_CPU; count].into(),
            assigned: vec![NO_CPU; count].into(),
            moved_ms: vec![0; count].into(),
            is_measured: false,
        };
        groups.set_map(map);
        groups
    }

    /// True if every slot of a flow table with this shift is inside one group.
    pub(super) fn suit(&self, table_shift: u32) -> bool {
        self.shift == table_shift.max(GROUP_SHIFT)
    }

    pub(super) fn set_map(&mut self, map: &RpsMap) {
        let half = 1 << (self.shift - 1);
        for (index, (home, assigned)) in
            (0_u32..).zip(self.homes.iter_mut().zip(&mut self.assigned))
        {
            let cpu = map.select(FlowHash((index << self.shift) | half));
            *home = cpu.map_or(NO_CPU, |cpu| cpu.0);
            if !map.contains(CpuId(*assigned)) {
                *assigned = NO_CPU;
            }
        }
    }

    #[inline]
    pub(super) fn weigh(&mut self, hash: FlowHash) {
        let fresh = &mut self.fresh[(hash.0 >> self.shift) as usize];
        *fresh = fresh.saturating_add(1);
    }

    #[inline]
    pub(super) fn cpu_of(&self, hash: FlowHash) -> Option<CpuId> {
        let cpu = self.assigned[(hash.0 >> self.shift) as usize];
        (cpu != NO_CPU).then_some(CpuId(cpu))
    }

    /// CPU of a group, assigned or by the map.
    fn cpu_at(&self, group: usize) -> u16 {
        if self.assigned[group] == NO_CPU { self.homes[group] } else { self.assigned[group] }
    }

    /// CPU and weight of each group.
    pub(super) fn each(&self) -> impl Iterator<Item = GroupWeight> {
        (0..self.weights.len()).map(|group| GroupWeight {
            cpu: self.cpu_at(group),
            packets_per_s: self.weights[group],
        })
    }

    /// Smooths the packets of a window of this length into the weights.
    pub(super) fn end_window(&mut self, past_ns: u64) {
        let smoothing = if std::mem::replace(&mut self.is_measured, true) { SMOOTHING } else { 1 };
        for (weight, fresh) in self.weights.iter_mut().zip(&self.fresh) {
            let rate = u64::from(*fresh) * super::NS_PER_S / past_ns.max(1);
            let smoothed = (u64::from(*weight) * (smoothing - 1) + rate) / smoothing;
            *weight = u32::try_from(smoothed).unwrap_or(u32::MAX);
        }
        self.begin_window();
    }

    pub(super) fn begin_window(&mut self) {
        self.fresh.fill(0);
    }

    /// Group of the busiest CPU whose move comes nearest to the aim, except groups whose move would
    /// only swap the roles of the two CPUs.
    pub(super) fn best_of(&self, gap: &Gap, now_ns: u64) -> Option<usize> {
        let rests = |moved_ms| moved_ms > 0 && now_ns / NS_PER_MS < moved_ms + REST_NS / NS_PER_MS;
        let most_ns = gap.gap_ns - gap.gap_ns / 8;
        let fits = (0..self.weights.len()).filter_map(|group| {
            let weight_ns = u64::from(self.weights[group]) * gap.cost_ns;
            let is_candidate = weight_ns > 0
                && weight_ns <= most_ns
                && self.cpu_at(group) == gap.busiest.0
                && !rests(self.moved_ms[group]);
            is_candidate.then(|| (weight_ns.abs_diff(gap.aim_ns), group))
        });
        fits.min().map(|(_, group)| group)
    }

    /// Assigns a group, and returns its weight in ns of work a second.
    pub(super) fn assign(&mut self, group: usize, to: CpuId, cost_ns: u64, now_ns: u64) -> u64 {
        debug_assert_ne!(self.cpu_at(group), to.0, "a group moves to another CPU");
        self.assigned[group] = if self.homes[group] == to.0 { NO_CPU } else { to.0 };
        self.moved_ms[group] = (now_ns / NS_PER_MS).max(1);
        u64::from(self.weights[group]) * cost_ns
    }
}

/// Weight of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupWeight {
    pub(super) cpu: u16,
    pub(super) packets_per_s: u32,
}

const NS_PER_MS: u64 = 1_000_000;
