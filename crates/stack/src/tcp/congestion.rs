//! Congestion window: slow start, and avoidance of `NewReno` (RFC 5681) and CUBIC (RFC 9438).

use super::config::{Algorithm, INITIAL_CWND, MS, us_u32};
use super::hystart::{HyStart, SlowStart};

/// CUBIC's share that a window keeps after a loss, in 1/1024 (`beta`).
const CUBIC_BETA: u64 = 717;
/// CUBIC's constant C, in 1/1024 (RFC 9438, section 4.1: 0.4; `cube_rtt_scale`).
const CUBIC_C: u64 = 410;
/// Units of time of the curve in a second (`BICTCP_HZ`), as a shift; those of its cube and of C.
const UNIT_SHIFT: u32 = 10;
const CURVE_SHIFT: u32 = 10 + 3 * UNIT_SHIFT;
/// Eight times 1 / alpha of Reno with CUBIC's reduction: (1 + beta) / (3 (1 - beta)) (`beta_scale`).
const RENO_SCALE: u32 = 15;
/// Time in µs within which the curve is not looked at again while the window stays, and round trips.
const UPDATE_US: u64 = 31 * MS;
const UPDATE_ROUNDS: u64 = 8;
/// Smallest slow start threshold, in segments.
const SSTHRESH_MIN: u32 = 2;

/// Congestion window of a connection, in segments.
#[derive(Debug)]
pub(super) struct Congestion {
    algorithm: Algorithm,
    pub(super) cwnd: u32,
    pub(super) ssthresh: u32,
    /// Acknowledged segments that did not enlarge the window yet.
    credit: u32,
    stage: Stage,
}

/// Stage of a connection. A later slow start has a threshold, and needs no other end. Most connections that are idle
/// have never come so far.
#[derive(Debug)]
enum Stage {
    FirstSlowStart(HyStart),
    Later(Box<Cubic>),
}

/// State of CUBIC.
#[derive(Clone, Copy, Debug, Default)]
struct Cubic {
    /// Window before the last reduction (W_max).
    last_max: u32,
    /// Start of the epoch, in ms modulo 2^32; 0 without one.
    epoch_ms: u32,
    /// Window at the origin of the curve.
    origin: u32,
    /// Time from the epoch's begin to the origin (K), in 1/1024 s.
    origin_units: u32,
    /// Segments acknowledged in the epoch.
    acked: u32,
    /// Window that Reno would have (W_est).
    reno: u32,
    /// Window and time in ms when the curve was last looked at, and what that told: acknowledged segments after
    /// which the window grows by one (`cnt`).
    last_cwnd: u32,
    last_ms: u32,
    per_segment: u32,
    /// Smallest round trip since a time-out, in µs (`delay_min`); [`NO_SAMPLE`] before the first, 0 without a
    /// time-out.
    delay_us: u32,
}

/// No sample since a time-out.
const NO_SAMPLE: u32 = u32::MAX;
/// Age of an epoch, in ms, before its round trips count.
const SETTLED_MS: u32 = 1_000;

impl Congestion {
    pub(super) fn new(algorithm: Algorithm) -> Self {
        let stage = Stage::FirstSlowStart(HyStart::new());
        Self { algorithm, cwnd: INITIAL_CWND, ssthresh: u32::MAX, credit: 0, stage }
    }

    /// Goes on with another algorithm, and with the window as it is.
    pub(super) fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.algorithm = algorithm;
        if let Stage::Later(cubic) = &mut self.stage {
            **cubic = Cubic::default();
        }
    }

    /// State of CUBIC, which begins when the first slow start is over.
    fn cubic(&mut self) -> &mut Cubic {
        if let Stage::FirstSlowStart(_) = self.stage {
            self.stage = Stage::Later(Box::default());
        }
        match &mut self.stage {
            Stage::Later(cubic) => cubic,
            Stage::FirstSlowStart(_) => unreachable!("it is over"),
        }
    }

    /// Takes a sample of the round trip, which may end the first slow start.
    pub(super) fn sample_round_trip(&mut self, rtt_us: u64, is_new_round: bool, now_us: u64) {
        let is_slow_start = self.is_slow_start();
        match &mut self.stage {
            Stage::FirstSlowStart(hystart) => {
                if is_slow_start && hystart.sample(rtt_us, is_new_round) == SlowStart::IsOver {
                    self.ssthresh = self.cwnd;
                    // The later ones, after a pause, go on up to there (RFC 9406, section 4.3).
                    self.stage = Stage::Later(Box::default());
                }
            }
            Stage::Later(cubic) => cubic.sample(rtt_us, ms(now_us)),
        }
    }

    pub(super) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    pub(super) fn is_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh
    }

    /// Threshold that a loss would set.
    pub(super) fn threshold(&self) -> u32 {
        let threshold = match self.algorithm {
            Algorithm::NewReno => self.cwnd / 2,
            Algorithm::Cubic => scaled(self.cwnd, CUBIC_BETA, 1024),
        };
        threshold.max(SSTHRESH_MIN)
    }

    /// Threshold after a loss, with the window as it is now.
    pub(super) fn reduced(&mut self) -> u32 {
        let (algorithm, cwnd) = (self.algorithm, self.cwnd);
        let cubic = self.cubic();
        if algorithm == Algorithm::Cubic {
            cubic.epoch_ms = 0;
            // Fast convergence: a flow that did not reach its last maximum makes room.
            cubic.last_max =
                if cwnd < cubic.last_max { scaled(cwnd, 1024 + CUBIC_BETA, 2048) } else { cwnd };
        }
        self.threshold()
    }

    /// Forgets the maximum and the epoch, after a time-out (`bictcp_reset`).
    pub(super) fn restart(&mut self) {
        if let Stage::Later(cubic) = &mut self.stage {
            **cubic = Cubic { delay_us: NO_SAMPLE, ..Cubic::default() };
        }
    }

    /// Goes on after a pause, which does not count towards the epoch (`CA_EVENT_TX_START`).
    pub(super) fn pause(&mut self, pause_us: u64, now_us: u64) {
        if let Stage::Later(cubic) = &mut self.stage
            && cubic.epoch_ms != 0
        {
            let age_ms = ms(now_us).wrapping_sub(cubic.epoch_ms);
            cubic.epoch_ms = cubic.epoch_ms.wrapping_add(ms(pause_us).min(age_ms)).max(1);
        }
    }

    /// Enlarges the window after `acked` segments were acknowledged.
    pub(super) fn acknowledged(&mut self, mut acked: u32, now_us: u64, rtt_us: u64) {
        if self.is_slow_start() {
            let growth = match &mut self.stage {
                Stage::FirstSlowStart(hystart) => hystart.growth(acked),
                Stage::Later(_) => acked,
            };
            let grown = self.cwnd.saturating_add(growth).min(self.ssthresh);
            acked = growth - (grown - self.cwnd);
            self.cwnd = grown;
            if acked == 0 {
                return;
            }
        }
        let per_segment = match self.algorithm {
            Algorithm::NewReno => self.cwnd,
            Algorithm::Cubic => {
                let cwnd = self.cwnd;
                self.cubic().acks_per_segment(cwnd, acked, now_us, rtt_us)
            }
        };
        self.avoid(per_segment.max(1), acked);
    }

    /// `tcp_cong_avoid_ai`: one segment more for each `per_segment` acknowledged.
    fn avoid(&mut self, per_segment: u32, acked: u32) {
        if self.credit >= per_segment {
            self.credit = 0;
            self.cwnd = self.cwnd.saturating_add(1);
        }
        self.credit = self.credit.saturating_add(acked);
        if self.credit >= per_segment {
            self.cwnd = self.cwnd.saturating_add(self.credit / per_segment);
            self.credit %= per_segment;
        }
    }

    /// Sets the window, and forgets what was acknowledged towards the next segment.
    pub(super) fn set(&mut self, cwnd: u32) {
        self.cwnd = cwnd.max(1);
        self.credit = 0;
    }
}

impl Cubic {
    /// Takes a sample of the round trip (`cubictcp_acked`).
    fn sample(&mut self, rtt_us: u64, now_ms: u32) {
        let is_settled = self.epoch_ms == 0 || now_ms.wrapping_sub(self.epoch_ms) >= SETTLED_MS;
        if self.delay_us > 0 && is_settled {
            self.delay_us = self.delay_us.min(us_u32(rtt_us).max(1));
        }
    }

    /// Acknowledged segments after which the window grows by one (`bictcp_update`).
    fn acks_per_segment(&mut self, cwnd: u32, acked: u32, now_us: u64, rtt_us: u64) -> u32 {
        self.acked = self.acked.saturating_add(acked);
        let now_ms = ms(now_us).max(1);
        let since_ms = now_ms.wrapping_sub(self.last_ms);
        // Unlike the kernel, as often on a short path as its round trips ask for: it would not be filled.
        let update_us = (UPDATE_ROUNDS * rtt_us).min(UPDATE_US);
        if self.last_cwnd == cwnd && u64::from(since_ms) * MS <= update_us {
            return self.per_segment;
        }
        if self.epoch_ms == 0 || since_ms > 0 {
            (self.last_cwnd, self.last_ms) = (cwnd, now_ms);
            if self.epoch_ms == 0 {
                self.begin_epoch(cwnd, acked, now_ms);
            }
            let delay_us = match self.delay_us {
                0 => rtt_us,
                NO_SAMPLE => 0,
                delay_us => delay_us.into(),
            };
            self.per_segment = self.by_curve(cwnd, now_ms, delay_us);
        }
        self.per_segment = self.friendly(cwnd, self.per_segment).max(2);
        self.per_segment
    }

    fn by_curve(&self, cwnd: u32, now_ms: u32, rtt_us: u64) -> u32 {
        // The window is compared with the curve one round trip ahead.
        let at_ms = u64::from(now_ms.wrapping_sub(self.epoch_ms)) + rtt_us.div_ceil(MS);
        let at = (at_ms << UNIT_SHIFT) / 1000;
        let distance = at.abs_diff(self.origin_units.into()).min(1 << 17);
        let offset = (CUBIC_C * distance.pow(3)) >> CURVE_SHIFT;
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let target = if at < self.origin_units.into() {
            self.origin.saturating_sub(offset)
        } else {
            self.origin.saturating_add(offset)
        };
        let curve = match target.checked_sub(cwnd) {
            Some(missing) if missing > 0 => cwnd / missing,
            _ => cwnd.saturating_mul(100),
        };
        if self.last_max == 0 { curve.min(20) } else { curve }
    }

    fn begin_epoch(&mut self, cwnd: u32, acked: u32, now_ms: u32) {
        (self.epoch_ms, self.acked, self.reno) = (now_ms, acked, cwnd);
        if self.last_max <= cwnd {
            (self.origin, self.origin_units) = (cwnd, 0);
        } else {
            // K = cbrt(W_max (1 - beta) / C).
            let missing = u64::from(self.last_max - cwnd);
            let units = cube_root(missing.saturating_mul((1 << CURVE_SHIFT) / CUBIC_C));
            self.origin_units = u32::try_from(units).unwrap_or(u32::MAX);
            self.origin = self.last_max;
        }
    }

    /// At least as fast as Reno with the same reduction (RFC 9438, section 4.3).
    fn friendly(&mut self, cwnd: u32, per_segment: u32) -> u32 {
        let delta = (cwnd.saturating_mul(RENO_SCALE) >> 3).max(1);
        // As the kernel: one more than delta.
        let grown = self.acked.saturating_sub(1) / delta;
        self.acked -= grown * delta;
        self.reno = self.reno.saturating_add(grown);
        match self.reno.checked_sub(cwnd) {
            Some(ahead) if ahead > 0 => per_segment.min(cwnd / ahead),
            _ => per_segment,
        }
    }
}

/// A time in ms, modulo 2^32.
fn ms(us: u64) -> u32 {
    u32::try_from((us / MS) & u64::from(u32::MAX)).unwrap_or(0)
}

/// Cube root, rounded down.
fn cube_root(value: u64) -> u64 {
    let mut root = 0_u64;
    for bit in (0..=21).rev() {
        let larger = root | 1 << bit;
        if larger.checked_pow(3).is_some_and(|cube| cube <= value) {
            root = larger;
        }
    }
    root
}

fn scaled(value: u32, by: u64, of: u64) -> u32 {
    u32::try_from(u64::from(value) * by / of).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT_US: u64 = 100_000;

    /// Acknowledges whole windows, one each round trip, and returns the window after each.
    fn rounds(congestion: &mut Congestion, from_us: u64, count: u64) -> Vec<u32> {
        let mut windows = Vec::new();
        for round in 0..count {
            for _ in 0..congestion.cwnd {
                congestion.acknowledged(1, from_us + round * RTT_US, RTT_US);
            }
            windows.push(congestion.cwnd);
        }
        windows
    }

    #[test]
    fn tcp_7_slow_start_doubles_per_round() {
        for algorithm in [Algorithm::NewReno, Algorithm::Cubic] {
            let mut congestion = Congestion::new(algorithm);
            assert_eq!(rounds(&mut congestion, 1, 3), [20, 40, 80]);
        }
    }

    #[test]
    fn tcp_7_reno_adds_one_per_round() {
        let mut congestion = Congestion::new(Algorithm::NewReno);
        congestion.cwnd = 20;
        congestion.ssthresh = congestion.reduced();
        congestion.set(congestion.ssthresh);
        assert_eq!(rounds(&mut congestion, 1, 4), [11, 12, 13, 14]);
    }

    #[test]
    fn tcp_7_cubic_returns_to_its_maximum() {
        let mut congestion = Congestion::new(Algorithm::Cubic);
        congestion.cwnd = 1000;
        congestion.ssthresh = congestion.reduced();
        assert_eq!(congestion.ssthresh, 700);
        congestion.set(congestion.ssthresh);
        // K = cbrt(300 / 0.4) = 9.1 s.
        let windows = rounds(&mut congestion, 1_000_000, 150);
        assert!(windows[45] > 900 && windows[45] < 1000, "concave first: {}", windows[45]);
        assert!((985..=1015).contains(&windows[90]), "back after K: {}", windows[90]);
        assert!(windows[149] > 1050, "then convex: {}", windows[149]);
    }

    #[test]
    fn tcp_7_cubic_follows_reno_when_small() {
        let mut congestion = Congestion::new(Algorithm::Cubic);
        congestion.cwnd = 10;
        congestion.ssthresh = congestion.reduced();
        congestion.set(congestion.ssthresh);
        let windows = rounds(&mut congestion, 1_000_000, 20);
        assert!(windows[19] >= 7 + 20 * 3 / 10, "alpha is about 0.53: {windows:?}");
    }

    /// HyStart++ ends the first slow start only (RFC 9406, section 4.3; RFC 5681, section 4.1).
    #[test]
    fn tcp_25_later_slow_starts_are_whole() {
        for algorithm in [Algorithm::NewReno, Algorithm::Cubic] {
            let mut congestion = Congestion::new(algorithm);
            congestion.cwnd = 40;
            for (round, rtt_us) in [10_000].into_iter().chain([20_000; 6]).enumerate() {
                let now_us = 1_000_000 * round as u64;
                (0..8).for_each(|at| congestion.sample_round_trip(rtt_us, at == 0, now_us));
            }
            assert_eq!(congestion.ssthresh, 40, "the first one is over");
            congestion.acknowledged(8, 8_000_000, 20_000);
            // After pauses (`restart_after_idle`).
            for pause in 0..300 {
                congestion.cwnd = 10;
                congestion.sample_round_trip(10_000, true, 9_000_000 + pause);
                assert_eq!(congestion.ssthresh, 40, "{algorithm:?}: what the path took before");
            }
        }
    }

    /// Acknowledges 18 segments in 18 ms, and another one 40 ms after the first. Returns the windows then.
    fn burst(rtt_us: u64) -> [u32; 2] {
        let mut congestion = Congestion::new(Algorithm::Cubic);
        congestion.ssthresh = congestion.reduced();
        congestion.restart();
        congestion.set(congestion.ssthresh);
        (0..18).for_each(|ack| congestion.acknowledged(1, 1_000_000 + ack * MS, rtt_us));
        let before = congestion.cwnd;
        congestion.acknowledged(1, 1_040_000, rtt_us);
        [before, congestion.cwnd]
    }

    #[test]
    fn tcp_7_cubic_grows_as_seldom_as_kernels() {
        assert_eq!(burst(40_000), [7, 8], "32 looks at the curve a second");
        assert_eq!(burst(500), [8, 8], "more on a near path");
    }

    #[test]
    fn cube_roots_are_floors() {
        for (value, root) in
            [(0, 0), (1, 1), (7, 1), (8, 2), (26, 2), (27, 3), (u64::MAX, 2_642_245)]
        {
            assert_eq!(cube_root(value), root, "of {value}");
        }
    }
}
