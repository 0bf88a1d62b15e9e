//! Decision to spread: a queue that one CPU can serve alone stays on that CPU.
//!
//! Waking another CPU costs more than handling a packet, so at light load RPS is a loss (RPS-C2).
//! The polling CPU, if it is in the map, keeps the queue to itself until the map's CPUs together
//! are busy for half of a window, or its bursts have been full many times in a row. The queue is
//! gathered again after they were busy for less than a quarter of one CPU in every window of a
//! second. Either way packets move by the drain rule.
//!
//! Both directions need time, so that bursts of one sender do not move the flows of others: a rare
//! burst spreads nothing, and load that does spread keeps the queue spread for a second.

/// Condition on which packets leave the polling CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpreadPolicy {
    /// Only while the CPUs are busy.
    #[default]
    WhenBusy,
    /// Always, as in the kernel.
    Always,
}

/// Length of a window in which the load is measured, in ns; also the quiet time before a new queue
/// is first gathered.
pub const SPREAD_WINDOW_NS: u64 = 10_000_000;

/// Quiet time before a queue that was spread is gathered again, in ns: the load moves flows at most
/// twice in this time.
pub const GATHER_AFTER_NS: u64 = 1_000_000_000;

/// Number of full bursts in a row that spread a queue before its window ends: about a thousand
/// packets without a pause.
pub const FULL_BURSTS_TO_SPREAD: u32 = 16;

/// Measurements of the engine for the path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tick {
    /// The engine's time, read after [`Intake::observe`](crate::Intake::observe).
    pub now_ns: u64,
    /// Busy time of the queue's CPUs since the start, all together.
    pub busy_ns: u64,
}

/// Spreading state of one queue: initially spread, as its map requests, until it is known to be
/// quiet.
#[derive(Debug)]
pub(super) struct Spread {
    policy: SpreadPolicy,
    spreading: bool,
    window_start: Tick,
    /// Recent full bursts: incremented by each, and halved by each burst that is not full.
    full_bursts: u32,
    /// Last time with a reason to spread.
    busy_until_ns: u64,
    /// Time for which the queue must be quiet to be gathered.
    gather_after_ns: u64,
}

impl Spread {
    pub(super) fn new(policy: SpreadPolicy) -> Self {
        Self {
            policy,
            spreading: true,
            window_start: Tick::default(),
            full_bursts: 0,
            busy_until_ns: 0,
            gather_after_ns: SPREAD_WINDOW_NS,
        }
    }

    pub(super) fn is_spreading(&self) -> bool {
        self.spreading
    }

    /// Evaluates the load, once a turn; `full_burst` is true if the source gave a whole budget of
    /// frames. Returns true if [`is_spreading`](Self::is_spreading) changed.
    pub(super) fn update(&mut self, tick: Tick, full_burst: bool) -> bool {
        if self.policy == SpreadPolicy::Always {
            return false;
        }
        self.full_bursts = if full_burst { self.full_bursts + 1 } else { self.full_bursts / 2 };
        let is_flooded = self.full_bursts >= FULL_BURSTS_TO_SPREAD;
        let window_ns = tick.now_ns.saturating_sub(self.window_start.now_ns);
        if !is_flooded && window_ns < SPREAD_WINDOW_NS {
            return false;
        }
        if is_flooded {
            self.full_bursts = 0;
        }
        let busy_ns = tick.busy_ns.saturating_sub(self.window_start.busy_ns);
        self.window_start = tick;
        if self.spreading {
            self.gather(tick, is_flooded || busy_ns >= window_ns / 4)
        } else {
            self.spread(tick, is_flooded || busy_ns >= window_ns / 2)
        }
    }

    /// Gathers the queue if it has been quiet for long enough.
    fn gather(&mut self, tick: Tick, is_busy: bool) -> bool {
        if is_busy {
            self.busy_until_ns = tick.now_ns;
        }
        let quiet_ns = tick.now_ns.saturating_sub(self.busy_until_ns);
        self.spreading = quiet_ns < self.gather_after_ns;
        !self.spreading
    }

    /// Spreads the queue if it is busy.
    fn spread(&mut self, tick: Tick, is_busy: bool) -> bool {
        if is_busy {
            self.spreading = true;
            (self.busy_until_ns, self.gather_after_ns) = (tick.now_ns, GATHER_AFTER_NS);
        }
        is_busy
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// State after each of some windows, which have these loads in percent.
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
    fn rps_c2_gather_and_spread_have_gap() {
        let states = after_windows(&[100, 30, 20, 30, 49, 60, 30, 24]);
        assert_eq!(states, [true, true, false, false, false, true, true, true]);
        let quiet = usize::try_from(GATHER_AFTER_NS / SPREAD_WINDOW_NS).unwrap();
        let loads = [&[20, 60], &[24].repeat(quiet)[..]].concat();
        let spread_for = after_windows(&loads).iter().skip(1).take_while(|is| **is).count();
        assert_eq!(spread_for, quiet, "and is gathered with the last of them");
    }

    #[test]
    fn rps_c2_endless_bursts_spread() {
        let mut spread = Spread::new(SpreadPolicy::WhenBusy);
        let mut tick = Tick { now_ns: SPREAD_WINDOW_NS, busy_ns: 0 };
        assert!(spread.update(tick, false) && !spread.is_spreading());
        for burst in 1..=FULL_BURSTS_TO_SPREAD {
            tick.now_ns += 20_000;
            assert_eq!(spread.update(tick, true), burst == FULL_BURSTS_TO_SPREAD);
        }
        assert!(spread.is_spreading());
    }

    #[test]
    fn rps_c2_pause_halves_the_bursts() {
        let mut spread = Spread::new(SpreadPolicy::WhenBusy);
        let mut tick = Tick { now_ns: SPREAD_WINDOW_NS, busy_ns: 0 };
        spread.update(tick, false);
        let mut turn = |is_full| {
            tick.now_ns += 20_000;
            spread.update(tick, is_full)
        };
        assert!((1..FULL_BURSTS_TO_SPREAD).all(|_| !turn(true)));
        assert!(!turn(false));
        let left = FULL_BURSTS_TO_SPREAD - (FULL_BURSTS_TO_SPREAD - 1) / 2;
        assert!((1..left).all(|_| !turn(true)) && turn(true));
    }

    /// Turns of one queue, 10 µs apart, in runs: number of full ones, number of others, and load in
    /// percent.
    fn runs() -> impl Strategy<Value = Vec<(u32, u32, u64)>> {
        prop::collection::vec((0u32..40, 1u32..4000, 0u64..=200), 1..200)
    }

    proptest! {
        /// Bursts of any length and period move other flows at most twice a second.
        #[test]
        fn rps_c2_load_moves_twice_a_second(runs in runs()) {
            let mut spread = Spread::new(SpreadPolicy::WhenBusy);
            let (mut tick, mut changes) = (Tick { now_ns: 1, busy_ns: 0 }, Vec::new());
            for (full, quiet, load) in runs {
                for turn in 0..full + quiet {
                    tick.now_ns += 10_000;
                    tick.busy_ns += 10_000 * load / 100;
                    if spread.update(tick, turn < full) {
                        changes.push(tick.now_ns);
                    }
                }
            }
            // The first change gathers a queue that has never been busy.
            for three in changes.get(1..).unwrap_or_default().windows(3) {
                prop_assert!(three[2] - three[0] >= GATHER_AFTER_NS, "{:?}", changes);
            }
        }

        #[test]
        fn rps_c2_rare_bursts_spread_nothing(
            full in 1..FULL_BURSTS_TO_SPREAD / 2,
            pause in 10u32..1000,
        ) {
            let mut spread = Spread::new(SpreadPolicy::WhenBusy);
            let mut tick = Tick { now_ns: SPREAD_WINDOW_NS, busy_ns: 0 };
            spread.update(tick, false);
            for turn in 0..20_000 {
                tick.now_ns += 20_000;
                spread.update(tick, turn % (full + pause) < full);
                prop_assert!(!spread.is_spreading());
            }
        }
    }

    #[test]
    fn the_kernels_policy_never_gathers() {
        let mut spread = Spread::new(SpreadPolicy::Always);
        assert!(!spread.update(Tick { now_ns: 1 << 40, busy_ns: 0 }, false));
        assert!(spread.is_spreading());
    }
}
