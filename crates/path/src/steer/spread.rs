//! Whether spreading pays: a queue that one CPU serves with ease stays on that CPU.
//!
//! Waking another CPU costs more than handling a packet, so at light load RPS is a loss (RPS-C2).
//! The polling CPU, if it is in the map, keeps the queue to itself until it is busy for half of
//! the time or finds a full burst waiting, and takes it back when all of the map's CPUs together
//! are busy for less than a quarter of one. Either way packets move by the drain rule.

/// When packets leave the polling CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpreadPolicy {
    /// When it is busy.
    #[default]
    WhenBusy,
    /// Always: as the kernel does it.
    Always,
}

/// How long the load is watched before packets are spread or gathered.
pub const SPREAD_WINDOW_NS: u64 = 10_000_000;

/// What the engine measures for the path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tick {
    /// The engine's time, read after [`Intake::observe`](crate::Intake::observe).
    pub now_ns: u64,
    /// How long the queue's CPUs have been busy since the start, all together.
    pub busy_ns: u64,
}

/// The state of one queue. It begins spread, as its map says, until it is known to be quiet.
#[derive(Debug)]
pub(super) struct Spread {
    policy: SpreadPolicy,
    spreading: bool,
    window_start: Tick,
}

impl Spread {
    pub(super) fn new(policy: SpreadPolicy) -> Self {
        Self { policy, spreading: true, window_start: Tick::default() }
    }

    pub(super) fn is_spreading(&self) -> bool {
        self.spreading
    }

    /// Looks at the load once a turn; `full_burst` says that the source had a whole budget of
    /// frames waiting. Returns whether the answer of [`is_spreading`](Self::is_spreading) changed.
    pub(super) fn update(&mut self, tick: Tick, full_burst: bool) -> bool {
        if self.policy == SpreadPolicy::Always {
            return false;
        }
        let spread_now = !self.spreading && full_burst;
        let window_ns = tick.now_ns.saturating_sub(self.window_start.now_ns);
        if !spread_now && window_ns < SPREAD_WINDOW_NS {
            return false;
        }
        let busy_ns = tick.busy_ns.saturating_sub(self.window_start.busy_ns);
        self.window_start = tick;
        let spreading = if self.spreading {
            busy_ns >= window_ns / 4
        } else {
            full_burst || busy_ns >= window_ns / 2
        };
        std::mem::replace(&mut self.spreading, spreading) != spreading
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows of a given load in percent, and whether packets are spread after each.
    fn after_windows(loads: &[u64]) -> Vec<bool> {
        let mut spread = Spread::new(SpreadPolicy::WhenBusy);
        let mut tick = Tick::default();
        let mut states = Vec::new();
        for load in loads {
            tick.now_ns += SPREAD_WINDOW_NS;
            tick.busy_ns += SPREAD_WINDOW_NS * load / 100;
            spread.update(tick, false);
            states.push(spread.is_spreading());
        }
        states
    }

    #[test]
    fn rps_c2_light_load_gathers_and_heavy_load_spreads_with_a_gap_between() {
        let states = after_windows(&[100, 30, 20, 30, 49, 60, 30, 24]);
        assert_eq!(states, [true, true, false, false, false, true, true, false]);
    }

    #[test]
    fn a_full_burst_spreads_at_once() {
        let mut spread = Spread::new(SpreadPolicy::WhenBusy);
        let tick = Tick { now_ns: SPREAD_WINDOW_NS, busy_ns: 0 };
        assert!(spread.update(tick, false) && !spread.is_spreading());
        let tick = Tick { now_ns: SPREAD_WINDOW_NS + 1, busy_ns: 0 };
        assert!(spread.update(tick, true) && spread.is_spreading());
    }

    #[test]
    fn the_kernels_policy_never_gathers() {
        let mut spread = Spread::new(SpreadPolicy::Always);
        assert!(!spread.update(Tick { now_ns: 1 << 40, busy_ns: 0 }, false));
        assert!(spread.is_spreading());
    }
}
