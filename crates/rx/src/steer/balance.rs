//! Balance: CPUs for hash ranges by what they weigh, where `rps_balance` is `load` (RPS-B1 to
//! RPS-B5).
//!
//! The RPS map gives each CPU an equal range of hash values, whatever its load. Here the values are
//! split into groups, none smaller than a slot of the flow table. Each group is weighed: packets a
//! second, times the time that its CPU takes for one. Once a window, groups of the busiest CPU are
//! assigned to the least busy one, those first whose weight is nearest to half of the gap, until no
//! CPU exceeds the mean by more than the target. Flows then move by the drain rule, as for any
//! other change of the desired CPU.
//!
//! Work that this queue cannot move counts as well: polling, other queues, flows that follow their
//! application. A group heavier than the gap between two CPUs stays, and the others are moved off
//! its CPU. A group moves at most once in [`REST_NS`], two windows in a row must exceed the target,
//! and nothing moves while all CPUs are mostly idle.

mod groups; //  weights and CPUs of hash ranges
mod shares; //  loads of CPUs

use forebay_buf::Position;
pub(super) use groups::Groups;
pub use shares::CpuLoad;
use shares::Shares;

use super::rps::RpsMap;
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Time for which a group that has moved stays where it is.
pub const REST_NS: u64 = 1_000_000_000;

/// Load of the busiest CPU, in ns of work a second, below which nothing is balanced.
pub const BALANCE_LOAD_MIN_NS: u64 = 250_000_000;

/// Number of windows for which unused moves are saved.
const SAVED_WINDOWS: u64 = 2;

/// Assignment of hash ranges to CPUs (`rps_balance`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BalancePolicy {
    /// By equal ranges, as in the kernel.
    #[default]
    Off,
    /// By measured load.
    Load,
}

/// Configuration of the balance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BalanceConfig {
    /// Assignment.
    pub policy: BalancePolicy,
    /// Load of the busiest CPU to reach, in percent of the mean. Balancing begins at twice that
    /// excess.
    pub target_percent: u32,
    /// Maximum number of groups assigned anew in a second.
    pub moves_per_second: u32,
    /// Time between two measurements, in µs.
    pub window_us: u32,
}

impl Default for BalanceConfig {
    fn default() -> Self {
        Self {
            policy: BalancePolicy::Off,
            target_percent: 105,
            moves_per_second: 2_000,
            window_us: 10_000,
        }
    }
}

/// Outcome of a balancing round.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BalanceRound {
    /// Number of groups assigned anew.
    pub moves: u32,
    /// Load of the busiest CPU before, in percent of the mean.
    pub before_percent: u32,
    /// Expected load of the busiest CPU afterwards, in percent of the mean.
    pub after_percent: u32,
}

/// Balance of one queue.
#[derive(Debug, Default)]
pub(super) struct Balance {
    config: BalanceConfig,
    /// `None`: off.
    groups: Option<Box<Groups>>,
    shares: Shares,
    window_start_ns: u64,
    /// True if the imbalance of the last window was large enough to move groups.
    was_beyond: bool,
    /// Number of moves allowed now, in billionths.
    allowance: u64,
}

impl Balance {
    /// Replaces the configuration. `shift` is that of the flow table.
    pub(super) fn set_config(&mut self, config: BalanceConfig, shift: u32, map: &RpsMap) {
        self.config = config;
        match (config.policy, &self.groups) {
            (BalancePolicy::Off, _) => self.groups = None,
            (BalancePolicy::Load, Some(_)) => {}
            (BalancePolicy::Load, None) => self.restart(shift, map),
        }
    }

    /// Resets all groups, if the balance is on: their hash ranges or the hashes have changed.
    pub(super) fn reset(&mut self, shift: u32, map: &RpsMap) {
        if self.groups.is_some() {
            self.restart(shift, map);
        }
    }

    /// Adapts the groups to a flow table, which may have fewer slots than there are groups.
    pub(super) fn set_table(&mut self, shift: u32, map: &RpsMap) {
        if self.groups.as_ref().is_some_and(|groups| !groups.suit(shift)) {
            self.restart(shift, map);
        }
    }

    /// Removes assignments to CPUs that are no longer in the map.
    pub(super) fn set_map(&mut self, map: &RpsMap) {
        if let Some(groups) = &mut self.groups {
            groups.set_map(map);
        }
    }

    fn restart(&mut self, shift: u32, map: &RpsMap) {
        self.groups = Some(Box::new(Groups::new(shift, map)));
        (self.shares, self.window_start_ns, self.allowance) = (Shares::default(), 0, 0);
    }

    /// True if packets are weighed.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.groups.is_some()
    }

    /// Weighs a packet.
    #[inline]
    pub(super) fn weigh(&mut self, hash: FlowHash) {
        if let Some(groups) = &mut self.groups {
            groups.weigh(hash);
        }
    }

    /// CPU that a flow's group is assigned to, if any.
    #[inline]
    pub(super) fn cpu_of(&self, hash: FlowHash) -> Option<CpuId> {
        self.groups.as_ref()?.cpu_of(hash)
    }

    /// True if a window has passed since the last measurement.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.groups.is_some() && now_ns.saturating_sub(self.window_start_ns) >= self.window_ns()
    }

    /// Measures the loads of all CPUs, by [`CpuId::index`], and assigns groups anew; `heads` are
    /// those of the queue's backlogs. `None` if there is nothing to compare with yet.
    pub(super) fn round(
        &mut self,
        now_ns: u64,
        loads: &[CpuLoad],
        heads: impl Iterator<Item = (CpuId, Position)>,
        map: &RpsMap,
    ) -> Option<BalanceRound> {
        let past_ns = now_ns.saturating_sub(self.window_start_ns);
        let is_first = std::mem::replace(&mut self.window_start_ns, now_ns) == 0;
        let groups = self.groups.as_mut()?;
        if is_first {
            groups.begin_window();
            self.shares.measure(loads, heads, 0);
            return None;
        }
        groups.end_window(past_ns);
        self.shares.measure(loads, heads, past_ns);
        if map.cpus().len() < 2 {
            return None;
        }
        self.shares.load(groups, map);
        self.save_up(past_ns);
        let before_percent = self.shares.imbalance_percent();
        let mut round = BalanceRound { before_percent, after_percent: before_percent, moves: 0 };
        let begins_at = self.config.target_percent.saturating_mul(2).saturating_sub(100);
        let is_beyond =
            self.shares.load_max_ns() >= BALANCE_LOAD_MIN_NS && before_percent > begins_at;
        // Two windows in a row are required: the imbalance of one short window may be chance.
        if std::mem::replace(&mut self.was_beyond, is_beyond) && is_beyond {
            round.moves = self.move_groups(now_ns);
            round.after_percent = self.shares.imbalance_percent();
        }
        Some(round)
    }

    /// Makes the next measurement begin a window, after a time without balancing.
    pub(super) fn pause(&mut self) {
        self.window_start_ns = 0;
    }

    /// Adds the moves of this period to those allowed now.
    fn save_up(&mut self, past_ns: u64) {
        let rate = u64::from(self.config.moves_per_second);
        let saved_max = (rate * self.window_ns() * SAVED_WINDOWS).max(NS_PER_S);
        let saved = rate.saturating_mul(past_ns);
        self.allowance = self.allowance.saturating_add(saved).min(saved_max);
    }

    fn move_groups(&mut self, now_ns: u64) -> u32 {
        let Some(groups) = &mut self.groups else { return 0 };
        let mut moves = 0;
        while self.allowance >= NS_PER_S
            && let Some(gap) = self.shares.gap(self.config.target_percent)
        {
            let Some(group) = groups.best_of(&gap, now_ns) else {
                self.shares.settle(gap.busiest);
                continue;
            };
            let weight_ns = groups.assign(group, gap.least_busy, gap.cost_ns, now_ns);
            self.shares.shift(&gap, weight_ns);
            self.allowance -= NS_PER_S;
            moves += 1;
        }
        moves
    }

    fn window_ns(&self) -> u64 {
        u64::from(self.config.window_us) * 1_000
    }
}

const NS_PER_S: u64 = 1_000_000_000;

#[cfg(test)]
mod tests;
