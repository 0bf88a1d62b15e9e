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
//! All queues balance together. One at a time, they plan from the plans of all on a board, and record their own there. Work
//! that cannot be moved counts as well: polling, and flows that follow their application. A group heavier than the gap
//! between two CPUs stays, and the others leave its CPU. A group moves at most once in [`REST_NS`], and only after two
//! windows in a row have asked for it. Nothing moves while all CPUs are mostly idle.

mod groups; //   hash ranges: their weights and CPUs
mod shares; //   CPUs: their loads
mod unpolled; // work of polls that CPUs have no time for
mod board; //    plans of all queues
mod preview; //  loads with and without balancing

use std::sync::Arc;

pub use board::BalanceBoard;
use board::{BoardClaim, STALE_NS_MIN};
pub(super) use groups::Groups;
pub use preview::{BalancePreview, QueueTraffic};
pub use shares::CpuLoad;
use shares::{Gap, Shares};
use unpolled::Unpolled;

use super::rps::RpsMap;
use crate::arrive::PollStatus;
use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Time for which a group that has moved stays where it is.
pub const REST_NS: u64 = 1_000_000_000;

/// Load of the busiest CPU, in ns of work a second, below which nothing is balanced.
pub const BALANCE_LOAD_MIN_NS: u64 = 250_000_000;

/// Number of windows for which unused moves are saved, if they are no longer than [`SAVED_NS_MAX`].
const SAVED_WINDOWS: u64 = 2;

/// Longest time for which unused moves are saved.
const SAVED_NS_MAX: u64 = NS_PER_S;

/// Time until another attempt if another queue is planning.
const RETRY_NS: u64 = 100_000;

/// Number of windows after which a queue that has not planned counts as idle.
const STALE_WINDOWS: u64 = 3;

/// Change of [`Balance::awaited`] by a window that is held back; any other takes 1 away. So bursts of many flows hold back one
/// window in five at most.
const AWAITED: u8 = 4;

/// Maximum of [`Balance::awaited`]. Two windows in a row await a weight: one heavy flow ends, and another begins.
const AWAITED_MAX: u8 = 2 * AWAITED;

/// Maximum number of groups that one round assigns anew.
pub const BALANCE_ROUND_MAX: u32 = 64;

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
    /// Maximum number of groups assigned anew in a second, by all queues together.
    pub moves_per_second: u32,
    /// Time between two measurements, in µs.
    pub window_us: u32,
}

impl Default for BalanceConfig {
    fn default() -> Self {
        Self {
            policy: BalancePolicy::Off,
            target_percent: 103,
            moves_per_second: 10_000,
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
    /// Hash ranges. `None` if balancing is off.
    groups: Option<Box<Groups>>,
    shares: Shares,
    unpolled: Unpolled,
    /// Board of all queues, and the queue's number on it. A queue without one is alone.
    board: Option<(Arc<BalanceBoard>, usize)>,
    window_start_ns: u64,
    /// Time before which no round is attempted.
    retry_at_ns: u64,
    /// True if the last window asked for moves.
    was_beyond: bool,
    /// Windows lately that made no moves because the next one was to confirm how heavy a group is: [`AWAITED`] for each.
    awaited: u8,
}

impl Balance {
    /// Joins the board of all queues under this number.
    pub(super) fn set_board(&mut self, board: Arc<BalanceBoard>, queue: usize) {
        self.board = Some((board, queue));
    }

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
            groups.set_map(map, self.window_start_ns);
        }
    }

    fn restart(&mut self, shift: u32, map: &RpsMap) {
        self.groups = Some(Box::new(Groups::new(shift, map)));
        (self.shares, self.window_start_ns) = (Shares::default(), 0);
        (self.was_beyond, self.awaited) = (false, 0);
        self.unpolled.begin();
    }

    /// Takes note of a poll by this CPU, and of the state of its source afterwards.
    pub(super) fn note_poll(&mut self, cpu: CpuId, status: PollStatus) {
        self.unpolled.note_poll(cpu, status);
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
            groups.weigh(hash, 1);
        }
    }

    /// Weighs a packet that goes to this CPU whatever the CPU of its group is.
    pub(super) fn weigh_fixed(&mut self, cpu: CpuId) {
        if let Some(groups) = &mut self.groups {
            groups.weigh_fixed(cpu);
        }
    }

    /// CPU that a flow's group is assigned to, if any.
    #[inline]
    pub(super) fn cpu_of(&self, hash: FlowHash) -> Option<CpuId> {
        self.groups.as_ref()?.cpu_of(hash)
    }

    /// True if a window has passed since the last measurement.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.groups.is_some()
            && now_ns >= self.retry_at_ns
            && now_ns.saturating_sub(self.window_start_ns) >= self.window_ns()
    }

    /// Measures the loads of all CPUs, by [`CpuId::index`], and assigns groups anew. Returns `None` in the first window, which
    /// has no earlier one to compare with, and while another queue is planning; the round is then due again soon. A pause
    /// makes a window the first one.
    pub(super) fn round(
        &mut self,
        now_ns: u64,
        loads: &[CpuLoad],
        map: &RpsMap,
    ) -> Option<BalanceRound> {
        let alone = || (Arc::new(BalanceBoard::new(1, loads.len())), 0);
        let (board, queue) = self.board.get_or_insert_with(alone).clone();
        let Some(claim) = board.claim() else {
            self.retry_at_ns = now_ns + RETRY_NS;
            return None;
        };
        let past_ns = now_ns.saturating_sub(self.window_start_ns);
        let stale_ns = STALE_NS_MIN.max(self.window_ns() * STALE_WINDOWS);
        let before_ns = std::mem::replace(&mut self.window_start_ns, now_ns);
        let is_first = before_ns == 0 || past_ns > stale_ns;
        let groups = self.groups.as_mut()?;
        if is_first {
            groups.begin_first_window();
            self.shares.begin(loads);
            self.unpolled.begin();
            (self.was_beyond, self.awaited) = (false, 0);
            return None;
        }
        groups.end_window(past_ns);
        self.shares.measure(loads, past_ns);
        claim.forget_stale(now_ns, stale_ns);
        self.shares.load(groups, map, |cpu| claim.others(queue, cpu));
        if let Some(cpu) = self.unpolled.cpu() {
            let missing_ns = self.shares.missing_ns(cpu);
            self.shares.add_unpolled(cpu, self.unpolled.end_window(missing_ns));
        }
        let saved_max_ns = (self.window_ns() * SAVED_WINDOWS).min(SAVED_NS_MAX);
        claim.add_moves(now_ns, self.config.moves_per_second, saved_max_ns);
        let before_percent = self.shares.imbalance_percent();
        let moves = self.move_groups(&claim, now_ns);
        if let Some(groups) = &self.groups {
            claim.record(queue, self.shares.own(groups, now_ns), now_ns);
        }
        let after_percent =
            if moves > 0 { self.shares.imbalance_percent() } else { before_percent };
        (map.cpus().len() > 1).then_some(BalanceRound { moves, before_percent, after_percent })
    }

    /// Moves groups from busy CPUs to others until no CPU exceeds the target. The first move needs twice that excess in two
    /// windows in a row, because a single window is short enough to be chance.
    fn move_groups(&mut self, claim: &BoardClaim<'_>, now_ns: u64) -> u32 {
        let Some(groups) = &mut self.groups else { return 0 };
        let awaited_before = self.awaited;
        self.awaited = awaited_before.saturating_sub(1);
        if !claim.may_move() {
            return 0; // for lack of moves, not of reasons
        }
        let target_percent = self.config.target_percent;
        let mut percent = target_percent.saturating_mul(2).saturating_sub(100);
        let is_busy = self.shares.load_max_ns() >= BALANCE_LOAD_MIN_NS;
        if !is_busy || self.shares.gap(percent).is_none() {
            self.was_beyond = false;
            return 0;
        }
        if awaited_before <= AWAITED_MAX - AWAITED && self.shares.awaits_heavy(groups) {
            self.awaited = awaited_before + AWAITED;
            return 0;
        }
        groups.begin_round();
        let (mut moves, mut is_beyond) = (0, false);
        while moves < BALANCE_ROUND_MAX
            && claim.may_move()
            && let Some(gap) = self.shares.gap(percent)
        {
            let moves_left = claim.moves_left().min((BALANCE_ROUND_MAX - moves).into());
            let moves_left = usize::try_from(moves_left).unwrap_or(usize::MAX);
            let best_across = |gap: Gap| groups.best_of(&gap, now_ns).map(|group| (group, gap));
            let best = || best_across(gap);
            let with_room = || self.shares.gaps_with_room(&gap).find_map(best_across);
            let isolate = || self.shares.isolate_heaviest(groups, &gap, moves_left, now_ns);
            // Of two CPUs: the groups that leave the heavy one's CPU would fill the other one, and rest there.
            let next = if self.shares.is_pair() {
                isolate().or_else(best)
            } else {
                best().or_else(with_room).or_else(isolate)
            };
            let Some((group, gap)) = next else {
                self.shares.settle(gap.busiest);
                continue;
            };
            is_beyond = true;
            if !self.was_beyond {
                break;
            }
            percent = target_percent;
            let weight_ns = groups.assign(group, gap.least_busy, gap.cost_ns, now_ns);
            self.shares.apply_move(&gap, weight_ns);
            claim.moved();
            moves += 1;
        }
        self.was_beyond = is_beyond;
        moves
    }

    fn window_ns(&self) -> u64 {
        u64::from(self.config.window_us) * 1_000
    }
}

const NS_PER_S: u64 = 1_000_000_000;

#[cfg(test)]
mod tests;
