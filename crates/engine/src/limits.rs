//! Budgets of a CPU before it looks elsewhere.

use forebay_rx::intake::DEV_WEIGHT;

use crate::knobs::Change;

/// The most frames that are taken from a queue at once, whatever the `dev_weight`: a burst is in
/// hand as a whole.
pub const BURST_MAX: u32 = 1024;

/// Frames that wait at most to be sent home together, whatever the `skb_defer_max`: a batch.
pub const DEFER_MAX: u32 = 32;

/// The kernel's knobs of that, by their names, as they were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Frames from one queue.
    pub dev_weight: u32,
    /// Packets from the backlogs, as a multiple of that.
    pub dev_weight_rx_bias: u32,
    /// Frames and packets in one turn, over all queues and backlogs.
    pub netdev_budget: u32,
    /// Microseconds that a turn may last.
    pub netdev_budget_usecs: u32,
    /// Frames that wait to be sent home together; 0 sends each at once.
    pub skb_defer_max: u32,
}

impl Default for Limits {
    /// The kernel's, two of its shortest ticks for a turn.
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
    /// The same after a change, if it is about one of these.
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

    /// Frames that are taken from one queue at once: at least one.
    #[must_use]
    pub fn burst(&self) -> usize {
        self.dev_weight.clamp(1, BURST_MAX) as usize
    }

    /// Packets that are taken from the backlogs in a turn: at least one.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.dev_weight.saturating_mul(self.dev_weight_rx_bias).max(1) as usize
    }

    /// Frames that wait at most to be sent home together.
    #[must_use]
    pub fn deferred(&self) -> usize {
        self.skb_defer_max.min(DEFER_MAX) as usize
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
    /// True if somebody got less than there was work for.
    is_squeezed: bool,
}

impl Budget {
    /// Part of `wanted` that may be taken at `now_ns`.
    pub(super) fn grant(&self, wanted: usize, now_ns: u64) -> usize {
        let is_over = now_ns.saturating_sub(self.since_ns) >= self.time_ns;
        if is_over { 0 } else { wanted.min(self.left) }
    }

    /// Notes that `taken` were.
    pub(super) fn spend(&mut self, taken: usize) {
        self.left = self.left.saturating_sub(taken);
    }

    /// Notes that there was more work than was granted, if so.
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
        let most = Limits { dev_weight: 1 << 30, dev_weight_rx_bias: 1 << 30, ..least };
        assert_eq!((most.burst(), most.packets()), (1024, u32::MAX as usize));
    }
}
