//! Budgets of a CPU's turn.

use forebay_rx::intake::DEV_WEIGHT;

use crate::knobs::Change;

/// Maximum number of frames taken from a queue at once, and of packets from the backlogs in a turn, whatever the
/// `dev_weight` and its bias: a burst is processed as a whole.
pub const BURST_MAX: u32 = 1024;

/// Maximum number of changes that a queue, or a CPU, applies in one turn, so that none is longer than a burst; the
/// tables that they replace fit among those that another thread frees.
pub(crate) const CHANGES_A_TURN: usize = 4;

/// Maximum number of frames that wait to be returned together, whatever the `skb_defer_max`: one
/// batch.
pub const DEFER_MAX: u32 = 32;

/// The kernel's budget knobs under its names, with the values as written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum number of frames from one queue at once.
    pub dev_weight: u32,
    /// Maximum number of packets from the backlogs, as a multiple of `dev_weight`.
    pub dev_weight_rx_bias: u32,
    /// Maximum number of frames and packets in one turn, over all queues and backlogs.
    pub netdev_budget: u32,
    /// Maximum duration of a turn, in microseconds.
    pub netdev_budget_usecs: u32,
    /// Maximum number of frames that wait to be returned together; 0 returns each at once.
    pub skb_defer_max: u32,
}

impl Default for Limits {
    /// The kernel's defaults; a turn lasts two of its shortest ticks.
    fn default() -> Self {
        Self {
            dev_weight: u32::try_from(DEV_WEIGHT).unwrap_or(u32::MAX),
            dev_weight_rx_bias: 1,
            netdev_budget: 300,
            netdev_budget_usecs: 2_000,
            skb_defer_max: 128,
        }
    }
}

impl Limits {
    /// Limits after a change, which may be of another knob.
    #[must_use]
    pub fn after(mut self, change: &Change) -> Self {
        match change {
            Change::DevWeight(frames) => self.dev_weight = *frames,
            Change::DevWeightRxBias(times) => self.dev_weight_rx_bias = *times,
            Change::NetdevBudget(packets) => self.netdev_budget = *packets,
            Change::NetdevBudgetUsecs(us) => self.netdev_budget_usecs = *us,
            Change::SkbDeferMax(frames) => self.skb_defer_max = *frames,
            _ => {}
        }
        self
    }

    /// Maximum number of frames taken from one queue at once, at least 1.
    #[must_use]
    pub fn burst(&self) -> usize {
        self.dev_weight.clamp(1, BURST_MAX) as usize
    }

    /// Maximum number of packets taken from the backlogs in a turn, at least 1: backlogs that other CPUs fill meanwhile
    /// do not keep a CPU from its queues.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.biased_weight().clamp(1, BURST_MAX) as usize
    }

    /// `dev_weight` for backlogs, as written.
    fn biased_weight(&self) -> u32 {
        self.dev_weight.saturating_mul(self.dev_weight_rx_bias)
    }

    /// Maximum number of frames that wait to be returned together.
    #[must_use]
    pub fn deferred(&self) -> usize {
        self.skb_defer_max.min(DEFER_MAX) as usize
    }

    /// Part in force of a change after which these are the limits; empty if all of it is.
    pub(super) fn in_effect(&self, change: &Change) -> String {
        match change {
            Change::DevWeight(frames) if *frames > BURST_MAX => {
                format!("{BURST_MAX}: no more frames are taken from a queue at once")
            }
            Change::DevWeight(_) | Change::DevWeightRxBias(_)
                if self.biased_weight() > BURST_MAX =>
            {
                format!("{BURST_MAX} packets of backlogs: no more are delivered in a turn")
            }
            Change::SkbDeferMax(frames) if *frames > DEFER_MAX => {
                format!("{DEFER_MAX}: frames go home in batches")
            }
            _ => String::new(),
        }
    }

    /// Budget of a turn that begins at `now_ns`.
    pub(super) fn budget(&self, now_ns: u64) -> Budget {
        let time_ns = u64::from(self.netdev_budget_usecs.max(1)) * 1000;
        Budget {
            left: self.netdev_budget.max(1) as usize,
            since_ns: now_ns,
            time_ns,
            is_squeezed: false,
        }
    }
}

/// Budget left of a turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    left: usize,
    since_ns: u64,
    time_ns: u64,
    /// True if a queue or the delivery was granted less than it had work for.
    is_squeezed: bool,
}

impl Budget {
    /// Part of `wanted` that may be taken at `now_ns`.
    pub(super) fn grant(&self, wanted: usize, now_ns: u64) -> usize {
        let is_over = now_ns.saturating_sub(self.since_ns) >= self.time_ns;
        if is_over { 0 } else { wanted.min(self.left) }
    }

    /// Reduces the budget by `taken` frames or packets.
    pub(super) fn spend(&mut self, taken: usize) {
        self.left = self.left.saturating_sub(taken);
    }

    /// Records, if `is_short`, that there was more work than granted.
    pub(super) fn squeeze_if(&mut self, is_short: bool) {
        self.is_squeezed |= is_short;
    }

    pub(super) fn is_squeezed(&self) -> bool {
        self.is_squeezed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turn_ends_by_packets_or_time() {
        let limits = Limits { netdev_budget: 100, netdev_budget_usecs: 5, ..Limits::default() };
        let mut budget = limits.budget(1_000);
        assert_eq!(budget.grant(64, 1_000), 64);
        budget.spend(64);
        assert_eq!(budget.grant(64, 5_999), 36);
        assert_eq!(budget.grant(64, 6_000), 0);
        budget.spend(40);
        assert_eq!(budget.grant(64, 2_000), 0);
        assert_eq!(limits.budget(u64::MAX).grant(64, u64::MAX), 64, "at the end of time too");
    }

    #[test]
    fn advised_moves_end_bursts() {
        let least = Limits { dev_weight: 0, dev_weight_rx_bias: 0, ..Limits::default() };
        assert_eq!((least.burst(), least.packets()), (1, 1));
        for (dev_weight, dev_weight_rx_bias, burst) in
            [(1 << 30, 1 << 30, 1024), (1 << 31, 1, 1024), (64, 1 << 31, 64), (600, 2, 600)]
        {
            let most = Limits { dev_weight, dev_weight_rx_bias, ..least };
            assert_eq!((most.burst(), most.packets()), (burst, 1024));
        }
    }

    #[test]
    fn limited_values_are_told() {
        let mut limits = Limits::default();
        for (change, told) in [
            ("dev_weight=1024", ""),
            ("dev_weight=1025", "1024: "),
            ("dev_weight=512", ""),
            ("dev_weight_rx_bias=2", ""),
            ("dev_weight_rx_bias=3", "1024 packets of backlogs: "),
            ("dev_weight=341", ""),
            ("dev_weight=342", "1024 packets of backlogs: "),
            ("dev_weight=2147483647", "1024: "),
            ("netdev_budget=2147483647", ""),
            ("skb_defer_max=32", ""),
            ("skb_defer_max=33", "32: "),
        ] {
            let parsed = change.parse().unwrap();
            limits = limits.after(&parsed);
            let in_effect = limits.in_effect(&parsed);
            assert!(in_effect.starts_with(told), "{change}: {in_effect}");
            assert_eq!(in_effect.is_empty(), told.is_empty(), "{change}: {in_effect}");
        }
    }
}
