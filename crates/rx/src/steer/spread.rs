//! Spread: the number of CPUs that a queue's packets go to, the fewest that keep each below a set busy share (RPS-S1 to
//! RPS-S4).
//!
//! Waking another CPU costs more than handling a packet, so at light load RPS is a loss (RPS-C2). The set of CPUs begins
//! with the polling CPU, if that is in the map. It grows if one of its CPUs is busy for half of a window, if packets wait
//! too long, or after many full bursts in a row. It grows to as many CPUs as the work needs, and to the whole map if that
//! was not enough or bursts are full. It shrinks after a second in which fewer CPUs would each have been busy for less
//! than a quarter. Packets move by the drain rule.
//!
//! Both directions take time, so that strangers' bursts do not move all other flows: occasional bursts spread nothing,
//! and the set changes at most twice in a second.

/// Condition on which packets leave the polling CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpreadPolicy {
    /// Only while the CPUs are busy.
    #[default]
    WhenBusy,
    /// Always, as in the kernel.
    Always,
}

/// Configuration of the spread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpreadConfig {
    /// Condition on which packets leave the polling CPU.
    pub policy: SpreadPolicy,
    /// Busy share of a CPU from which more CPUs are needed, in percent.
    pub busy_percent: u32,
    /// Wait on a CPU from which more are needed, in µs.
    pub wait_us: u32,
    /// Time for which the load is watched, in µs.
    pub window_us: u32,
}

impl Default for SpreadConfig {
    fn default() -> Self {
        Self {
            policy: SpreadPolicy::default(),
            busy_percent: 50,
            wait_us: 2_000,
            window_us: 10_000,
        }
    }
}

/// Default time for which the load is watched before packets are spread, or first gathered.
pub const SPREAD_WINDOW_NS: u64 = 10_000_000;

/// Time for which a spread queue must have been quiet before it uses fewer CPUs. The set changes at most twice in this
/// time.
pub const GATHER_AFTER_NS: u64 = 1_000_000_000;

/// Number of full bursts in a row that spread a queue before its window ends: about a thousand
/// packets without a pause.
pub const FULL_BURSTS_TO_SPREAD: u32 = 16;

/// Number of CPUs that stands for all of the map.
const ALL: usize = usize::MAX;

/// Load of a queue's CPUs in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SpreadLoad {
    /// Busy share of the busiest CPU of the set, in thousandths.
    pub(super) busiest: u64,
    /// Busy time for this queue on all CPUs together, in thousandths of one CPU.
    pub(super) own: u64,
    /// True if packets have waited on a CPU of the set for longer than they may.
    pub(super) waits: bool,
    /// Number of CPUs of the map.
    pub(super) cpus: usize,
}

/// Spreading state of one queue: initially spread, as its map requests, until it is known to be
/// quiet.
#[derive(Debug)]
pub(super) struct Spread {
    config: SpreadConfig,
    /// Number of CPUs, or [`ALL`].
    size: usize,
    window_start_ns: u64,
    /// Recent full bursts: incremented by each, and halved by each burst that is not full.
    full_bursts: u32,
    /// True if packets waited for too long in the last window.
    was_waiting: bool,
    /// Time at which all CPUs of the set were last needed.
    busy_until_ns: u64,
    /// The most CPUs that were needed since.
    needed: usize,
    /// Time of the last change, if there was one.
    changed_ns: Option<u64>,
    /// True until the first window ends in which the load is followed again.
    is_resumed: bool,
}

impl Spread {
    pub(super) fn new(policy: SpreadPolicy) -> Self {
        Self {
            config: SpreadConfig { policy, ..SpreadConfig::default() },
            size: ALL,
            window_start_ns: 0,
            full_bursts: 0,
            was_waiting: false,
            busy_until_ns: 0,
            needed: 1,
            changed_ns: None,
            is_resumed: false,
        }
    }

    /// Replaces the configuration.
    pub(super) fn set_config(&mut self, config: SpreadConfig) {
        let was_followed = self.is_followed();
        self.config = config;
        if config.policy == SpreadPolicy::Always {
            self.size = ALL;
        }
        self.is_resumed |= !was_followed;
    }

    /// Number of CPUs of a map of `cpus` that packets go to.
    pub(super) fn size(&self, cpus: usize) -> usize {
        self.size.min(cpus)
    }

    /// True if packets that are not steered otherwise stay on the polling CPU.
    pub(super) fn is_gathered(&self) -> bool {
        self.size == 1
    }

    /// Evaluates the bursts, once a turn. `full_burst` is true if the source had a whole budget of
    /// frames waiting. Returns true if more CPUs are needed at once.
    pub(super) fn update(&mut self, now_ns: u64, full_burst: bool) -> bool {
        self.full_bursts = if full_burst { self.full_bursts + 1 } else { self.full_bursts / 2 };
        if self.full_bursts < FULL_BURSTS_TO_SPREAD {
            return false;
        }
        self.full_bursts = 0;
        self.busy_until_ns = now_ns;
        self.resize(ALL, now_ns)
    }

    /// True if the number of CPUs follows the load.
    pub(super) fn is_followed(&self) -> bool {
        self.config.policy == SpreadPolicy::WhenBusy
    }

    /// True if packets queued now will have waited too long if they are still queued at the end of the window.
    pub(super) fn is_mark_due(&self, now_ns: u64) -> bool {
        let wait_ns = (u64::from(self.config.wait_us) * 1_000).min(self.window_ns());
        now_ns.saturating_sub(self.window_start_ns) >= self.window_ns() - wait_ns
    }

    /// True if a window has passed.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.is_followed() && now_ns.saturating_sub(self.window_start_ns) >= self.window_ns()
    }

    /// Ends a window with this load. Returns whether the number of CPUs has changed.
    pub(super) fn end_window(&mut self, now_ns: u64, load: SpreadLoad) -> bool {
        self.window_start_ns = now_ns;
        if std::mem::take(&mut self.is_resumed) {
            // The load was not followed before, so this window has no defined start.
            (self.busy_until_ns, self.needed) = (now_ns, 1);
            return false;
        }
        let busy = u64::from(self.config.busy_percent) * 10;
        let is_waiting = std::mem::replace(&mut self.was_waiting, load.waits) && load.waits;
        let size = self.size(load.cpus);
        if load.busiest >= busy || is_waiting {
            self.busy_until_ns = now_ns;
            self.needed = 1;
            let needed = if is_waiting { ALL } else { needed_above(size, load, busy) };
            return size < load.cpus && self.grow(needed, now_ns, load.cpus);
        }
        let needed = usize::try_from(load.own / (busy / 2).max(1)).unwrap_or(ALL - 1) + 1;
        if needed >= size {
            (self.busy_until_ns, self.needed) = (now_ns, 1);
            return false;
        }
        self.needed = self.needed.max(needed);
        let quiet_ns = now_ns.saturating_sub(self.busy_until_ns);
        let quiet_min_ns = self.changed_ns.map_or(self.window_ns(), |_| GATHER_AFTER_NS);
        if quiet_ns < quiet_min_ns || self.has_changed_within(GATHER_AFTER_NS, now_ns) {
            return false;
        }
        let needed = std::mem::replace(&mut self.needed, 1);
        self.busy_until_ns = now_ns;
        self.resize(needed, now_ns)
    }

    /// Grows the set, to the whole map if it has changed recently.
    fn grow(&mut self, needed: usize, now_ns: u64, cpus: usize) -> bool {
        let is_hasty = self.has_changed_within(GATHER_AFTER_NS, now_ns);
        let size = if is_hasty || needed >= cpus { ALL } else { needed };
        self.resize(size, now_ns)
    }

    fn resize(&mut self, size: usize, now_ns: u64) -> bool {
        if self.size == size {
            return false;
        }
        self.size = size;
        self.changed_ns = Some(now_ns);
        true
    }

    fn has_changed_within(&self, time_ns: u64, now_ns: u64) -> bool {
        self.changed_ns.is_some_and(|changed_ns| now_ns.saturating_sub(changed_ns) < time_ns)
    }

    fn window_ns(&self) -> u64 {
        u64::from(self.config.window_us) * 1_000
    }
}

/// Number of CPUs that bring each to three quarters of the busy share, more than `size`.
fn needed_above(size: usize, load: SpreadLoad, busy: u64) -> usize {
    let share = (busy * 3 / 4).max(1);
    let by_work = load.own.div_ceil(share);
    let by_busiest = (load.busiest * size as u64).div_ceil(share);
    usize::try_from(by_work.max(by_busiest)).unwrap_or(ALL).max(size + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A queue of two CPUs after its first window, in which it was quiet: gathered.
    fn gathered() -> (Spread, u64) {
        let mut spread = Spread::new(SpreadPolicy::WhenBusy);
        assert!(
            spread.end_window(SPREAD_WINDOW_NS, SpreadLoad { cpus: 2, ..SpreadLoad::default() })
        );
        assert!(spread.is_gathered());
        (spread, SPREAD_WINDOW_NS)
    }

    /// Measured load if this many percent of one CPU arrive, evenly on the set. Work beyond its capacity is not seen.
    fn even(spread: &Spread, percent: u64, cpus: usize) -> SpreadLoad {
        let size = spread.size(cpus) as u64;
        let own = (percent * 10).min(size * 1_000);
        SpreadLoad { busiest: own / size, own, waits: false, cpus }
    }

    /// Number of CPUs after each window, of a map of `cpus`.
    fn after_windows(loads: impl IntoIterator<Item = u64>, cpus: usize) -> Vec<usize> {
        let mut spread = Spread::new(SpreadPolicy::WhenBusy);
        let sizes = (1..).zip(loads).map(|(window, percent)| {
            let load = even(&spread, percent, cpus);
            spread.end_window(window * SPREAD_WINDOW_NS, load);
            spread.size(cpus)
        });
        sizes.collect()
    }

    const QUIET_WINDOWS: usize = 100;

    #[test]
    fn rps_c2_gather_and_spread_have_gap() {
        let sizes = after_windows([100, 30, 20, 30, 49, 60, 30, 24], 2);
        assert_eq!(sizes, [2, 2, 1, 1, 1, 2, 2, 2]);
        let loads = [&[20, 60], &[24].repeat(QUIET_WINDOWS)[..]].concat();
        let spread_for =
            after_windows(loads, 2).iter().skip(1).take_while(|size| **size == 2).count();
        assert_eq!(spread_for, QUIET_WINDOWS, "and is gathered with the last of them");
    }

    #[test]
    fn rps_c2_endless_bursts_spread() {
        let (mut spread, mut now_ns) = gathered();
        for burst in 1..=FULL_BURSTS_TO_SPREAD {
            now_ns += 20_000;
            assert_eq!(spread.update(now_ns, true), burst == FULL_BURSTS_TO_SPREAD);
        }
        assert_eq!(spread.size(64), 64);
    }

    #[test]
    fn rps_c2_pause_halves_the_bursts() {
        let (mut spread, mut now_ns) = gathered();
        let mut turn = |is_full| {
            now_ns += 20_000;
            spread.update(now_ns, is_full)
        };
        assert!((1..FULL_BURSTS_TO_SPREAD).all(|_| !turn(true)));
        assert!(!turn(false));
        let left = FULL_BURSTS_TO_SPREAD - (FULL_BURSTS_TO_SPREAD - 1) / 2;
        assert!((1..left).all(|_| !turn(true)) && turn(true));
    }

    #[test]
    fn rps_s1_load_gets_fewest_cpus() {
        // Work for so many percent of a CPU, and the CPUs of 64 that it ends up with after a quiet time.
        for (percent, from_one) in
            [(10, 1), (24, 1), (60, 2), (120, 3), (300, 13), (1_000, 41), (6_400, 64)]
        {
            let steady = || std::iter::repeat_n(percent, 3 * QUIET_WINDOWS);
            let quiet = std::iter::repeat_n(1, 2 * QUIET_WINDOWS);
            let busy = std::iter::repeat_n(6_400, 2);
            let end = |loads: Vec<u64>| after_windows(loads, 64).pop().unwrap();
            assert_eq!(end(quiet.chain(steady()).collect()), from_one, "{percent} %, from one");
            let from_all = end(busy.chain(steady()).collect());
            let fits = usize::try_from(percent / 25 + 1).unwrap().min(64);
            assert_eq!(from_all, fits, "{percent} %, from all");
        }
    }

    #[test]
    fn rps_s2_burst_is_spread_within_two_windows() {
        let loads = [&[1; 2 * QUIET_WINDOWS], &[6_400; 3][..]].concat();
        let sizes = after_windows(loads, 64);
        // Load behind a saturated CPU cannot be seen, so the set first grows to three.
        assert_eq!(sizes[2 * QUIET_WINDOWS - 1..], [1, 3, 64, 64]);
    }

    #[test]
    fn rps_s3_long_wait_needs_more_cpus() {
        let (mut spread, now_ns) = gathered();
        let mut window = |number, waits| {
            let load = SpreadLoad { busiest: 100, own: 100, waits, cpus: 8 };
            spread.end_window(now_ns + number * SPREAD_WINDOW_NS, load)
        };
        assert!(!window(1, true) && !window(2, false) && !window(3, true), "once is chance");
        assert!(window(4, true));
        assert_eq!(spread.size(8), 8);
    }

    #[test]
    fn rps_s1_followed_again_begins_anew() {
        let config = |policy| SpreadConfig { policy, ..SpreadConfig::default() };
        let (mut spread, _) = gathered();
        spread.set_config(config(SpreadPolicy::Always));
        spread.set_config(config(SpreadPolicy::WhenBusy));
        let hour_ns = 3_600_000_000_000;
        let quiet = SpreadLoad { cpus: 8, ..SpreadLoad::default() };
        assert!(spread.is_due(hour_ns) && !spread.end_window(hour_ns, quiet));
        let second_later = hour_ns + GATHER_AFTER_NS;
        assert!(!spread.end_window(hour_ns + SPREAD_WINDOW_NS, quiet));
        assert_eq!(spread.size(8), 8);
        assert!(spread.end_window(second_later, quiet) && spread.is_gathered());
    }

    /// Turns of one queue, 10 µs apart: full ones and others, in runs, how busy its CPUs are, and how long packets wait.
    fn runs() -> impl Strategy<Value = Vec<(u32, u32, u64, bool)>> {
        prop::collection::vec((0u32..40, 1u32..4000, 0u64..=2_000, any::<bool>()), 1..200)
    }

    proptest! {
        /// Bursts of any length and period move other flows at most twice a second.
        #[test]
        fn rps_c2_load_moves_twice_a_second(runs in runs(), cpus in 2usize..40) {
            let mut spread = Spread::new(SpreadPolicy::WhenBusy);
            let (mut now_ns, mut changes) = (1, Vec::new());
            for (full, quiet, percent, waits) in runs {
                for turn in 0..full + quiet {
                    now_ns += 10_000;
                    let load = SpreadLoad { waits, ..even(&spread, percent, cpus) };
                    let is_changed = spread.is_due(now_ns) && spread.end_window(now_ns, load);
                    if spread.update(now_ns, turn < full) || is_changed {
                        changes.push(now_ns);
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
            let (mut spread, mut now_ns) = gathered();
            for turn in 0..20_000 {
                now_ns += 20_000;
                spread.update(now_ns, turn % (full + pause) < full);
                prop_assert!(spread.is_gathered());
            }
        }

        /// Any set that load leaves is needed: with fewer CPUs each would be busy for a quarter or more.
        #[test]
        fn rps_s4_steady_load_ends_between_bounds(percent in 0u64..8_000, cpus in 1usize..80) {
            let sizes = after_windows(std::iter::repeat_n(percent, 4 * QUIET_WINDOWS), cpus);
            let size = *sizes.last().unwrap();
            let busy_percent = percent / size as u64;
            prop_assert!(busy_percent < 50 || size == cpus, "{} CPUs at {} %", size, busy_percent);
            prop_assert!(size == 1 || percent >= 25 * (size as u64 - 1), "{} CPUs for {} %", size, percent);
        }
    }

    #[test]
    fn the_kernels_policy_never_gathers() {
        let spread = Spread::new(SpreadPolicy::Always);
        assert!(!spread.is_due(1 << 40) && !spread.is_gathered());
    }
}
