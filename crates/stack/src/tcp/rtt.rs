//! Round-trip time and retransmission time-out (RFC 6298), as `tcp_rtt_estimator` computes them.

use super::config::{RTO_INITIAL_US, RTO_MAX_US, RTO_MIN_US, SECOND, us_u32};

/// Window of the smallest round trip (`tcp_min_rtt_wlen`), in s.
const MIN_RTT_WINDOW_S: u32 = 300;

/// Longest sample that counts, in µs: sums of eight fit.
const SAMPLE_MAX_US: u32 = 500_000_000;
/// Limits of the time-out, in µs.
const MIN_US: u32 = us_u32(RTO_MIN_US);
const MAX_US: u32 = us_u32(RTO_MAX_US);
const INITIAL_US: u32 = us_u32(RTO_INITIAL_US);

/// Estimate of a connection's round-trip time.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundTrip {
    /// Smoothed round-trip time, in µs; 0 before the first sample.
    srtt_us: u32,
    /// Smoothed mean deviation, in µs.
    mdev_us: u32,
    /// Largest deviation of the current round trip, in µs.
    mdev_max_us: u32,
    /// Deviation that counts, at least [`RTO_MIN_US`].
    rttvar_us: u32,
    /// Smallest round trip of the window that began at `min_since_s`, in µs.
    min_us: u32,
    min_since_s: u32,
    /// Time-out, with its doublings since the last sample, in µs (`icsk_rto`).
    rto_us: u32,
    /// Highest time-out, in µs (`icsk_rto_max`).
    max_us: u32,
}

impl Default for RoundTrip {
    fn default() -> Self {
        Self {
            srtt_us: 0,
            mdev_us: INITIAL_US,
            mdev_max_us: INITIAL_US,
            rttvar_us: INITIAL_US,
            min_us: u32::MAX,
            min_since_s: 0,
            rto_us: INITIAL_US,
            max_us: MAX_US,
        }
    }
}

impl RoundTrip {
    /// Creates the estimate of a connection whose time-out is limited.
    pub(super) fn limited(max_us: u32) -> Self {
        Self { max_us, ..Self::default() }
    }

    /// Sets the highest time-out.
    pub(super) fn set_max(&mut self, max_us: u32) {
        self.max_us = max_us;
        self.rto_us = self.rto_us.min(max_us);
    }

    /// Highest time-out, in µs.
    pub(super) fn max_us(&self) -> u64 {
        self.max_us.into()
    }

    /// Adds a sample. `is_new_round` once per round trip: the deviation may then shrink.
    pub(super) fn add(&mut self, sample_us: u64, now_us: u64, is_new_round: bool) {
        self.note_smallest(sample_us, now_us);
        self.estimate(sample_us, is_new_round);
    }

    /// Adds a sample that counts for the smallest round trip only (`tcp_update_rtt_min`).
    pub(super) fn note_smallest(&mut self, sample_us: u64, now_us: u64) {
        let sample_us = us_u32(sample_us).clamp(1, SAMPLE_MAX_US);
        let now_s = u32::try_from(now_us / SECOND).unwrap_or(u32::MAX);
        if sample_us <= self.min_us || now_s.saturating_sub(self.min_since_s) > MIN_RTT_WINDOW_S {
            (self.min_us, self.min_since_s) = (sample_us, now_s);
        }
    }

    /// Adds a sample that does not count for the smallest round trip (`tcp_rtt_estimator`).
    pub(super) fn estimate(&mut self, sample_us: u64, is_new_round: bool) {
        let sample_us = us_u32(sample_us).clamp(1, SAMPLE_MAX_US);
        if self.srtt_us == 0 {
            self.srtt_us = sample_us;
            self.mdev_us = sample_us / 2;
            self.rttvar_us = (4 * self.mdev_us).max(MIN_US);
            self.mdev_max_us = self.rttvar_us;
        } else {
            self.smooth(sample_us, is_new_round);
        }
        self.rto_us = self.base_us();
    }

    /// Time-out without doublings, by the samples.
    fn base_us(&self) -> u32 {
        match self.srtt_us {
            0 => INITIAL_US,
            srtt_us => (srtt_us + self.rttvar_us).min(self.max_us),
        }
    }

    fn smooth(&mut self, sample_us: u32, is_new_round: bool) {
        let deviation = sample_us.abs_diff(self.srtt_us);
        // A smaller sample moves the deviation less (Eifel's rule, as in the kernel): a sudden
        // drop of the round trip must not raise the time-out.
        if sample_us < self.srtt_us && deviation > self.mdev_us {
            self.mdev_us += (deviation - self.mdev_us) / 32;
        } else {
            self.mdev_us = (self.mdev_us * 3 + deviation) / 4;
        }
        self.srtt_us = (self.srtt_us * 7 + sample_us) / 8;
        self.mdev_max_us = self.mdev_max_us.max(4 * self.mdev_us);
        self.rttvar_us = self.rttvar_us.max(self.mdev_max_us);
        if is_new_round {
            if self.mdev_max_us < self.rttvar_us {
                self.rttvar_us -= (self.rttvar_us - self.mdev_max_us) / 4;
            }
            self.mdev_max_us = MIN_US;
        }
    }

    /// Smoothed round-trip time in µs; `None` before the first sample.
    pub(super) fn smoothed_us(&self) -> Option<u64> {
        (self.srtt_us > 0).then_some(self.srtt_us.into())
    }

    /// Smallest round trip of the last five minutes in µs; `None` before the first sample.
    pub(super) fn min_us(&self) -> Option<u64> {
        (self.min_us < u32::MAX).then_some(self.min_us.into())
    }

    /// Mean deviation, in µs.
    pub(super) fn deviation_us(&self) -> u64 {
        self.mdev_us.into()
    }

    /// Retransmission time-out, in µs. Only a sample ends its doublings (RFC 6298, section 5.7; Karn's rule).
    pub(super) fn rto_us(&self) -> u64 {
        self.rto_us.into()
    }

    /// Doubles the time-out, as it is over.
    pub(super) fn back_off(&mut self) {
        self.rto_us = self.rto_us.saturating_mul(2).min(self.max_us);
    }

    /// Sets the time-out to that of the samples, after `backoff` doublings.
    pub(super) fn set_backoff(&mut self, backoff: u8) {
        self.rto_us = self.base_us();
        self.rto_us = us_u32(self.backed_off_us(backoff));
    }

    /// Interval of `backoff` doublings that begins with the time-out, in µs (`inet_csk_rto_backoff`).
    pub(super) fn backed_off_us(&self, backoff: u8) -> u64 {
        let factor = 1_u64.checked_shl(backoff.into()).unwrap_or(u64::MAX);
        u64::from(self.rto_us).saturating_mul(factor).min(self.max_us())
    }

    /// Falls back to a time-out of three seconds, without a sample when the handshake is over: the SYN or its
    /// answer had to be sent again (RFC 6298, section 5.7).
    pub(super) fn set_fallback(&mut self) {
        if self.srtt_us == 0 {
            self.rto_us = 3 * INITIAL_US;
            [self.rttvar_us, self.mdev_max_us, self.mdev_us] = [self.rto_us; 3];
            self.rto_us = self.rto_us.min(self.max_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_2_timeout_follows_samples() {
        let mut rtt = RoundTrip::default();
        assert_eq!((rtt.rto_us(), rtt.smoothed_us()), (1_000_000, None));
        rtt.add(100_000, 0, true);
        assert_eq!((rtt.rto_us(), rtt.smoothed_us()), (300_000, Some(100_000)));
        for round in 1..200 {
            rtt.add(100_000, round * 100_000, true);
        }
        assert_eq!(rtt.rto_us(), 300_000, "the deviation counts as 200 ms at least");
        rtt.add(900_000, 30_000_000, true);
        assert!(rtt.rto_us() > 900_000, "a late sample raises the time-out: {}", rtt.rto_us());
        assert_eq!(rtt.min_us(), Some(100_000));
    }

    #[test]
    fn tcp_2_backoff_doubles_up_to_limit() {
        let mut rtt = RoundTrip::default();
        rtt.add(50_000, 0, true);
        let times: Vec<_> = (0..4).map(|backoff| rtt.backed_off_us(backoff)).collect();
        assert_eq!(times, [250_000, 500_000, 1_000_000, 2_000_000]);
        assert_eq!(rtt.backed_off_us(255), RTO_MAX_US);
    }

    #[test]
    fn tcp_2_highest_timeout_can_be_set() {
        let mut rtt = RoundTrip::default();
        rtt.add(600_000, 0, true);
        (0..3).for_each(|_| rtt.back_off());
        rtt.set_max(1_500_000);
        assert_eq!((rtt.rto_us(), rtt.backed_off_us(1)), (1_500_000, 1_500_000));
        rtt.add(600_000, 1, true);
        (0..3).for_each(|_| rtt.back_off());
        assert_eq!(rtt.rto_us(), 1_500_000);
    }

    #[test]
    fn tcp_2_only_sample_ends_doublings() {
        let mut rtt = RoundTrip::default();
        rtt.add(50_000, 0, true);
        rtt.back_off();
        rtt.back_off();
        assert_eq!((rtt.rto_us(), rtt.backed_off_us(1)), (1_000_000, 2_000_000));
        rtt.set_backoff(1);
        assert_eq!(rtt.rto_us(), 500_000);
        rtt.note_smallest(40_000, 1);
        assert_eq!(rtt.rto_us(), 500_000);
        rtt.estimate(50_000, true);
        assert_eq!(rtt.rto_us(), 250_000);
        (0..20).for_each(|_| rtt.back_off());
        assert_eq!(rtt.rto_us(), RTO_MAX_US);
    }

    #[test]
    fn tcp_2_sudden_fast_sample_keeps_timeout() {
        let mut rtt = RoundTrip::default();
        for round in 0..50 {
            rtt.add(400_000, round, true);
        }
        let before = rtt.rto_us();
        rtt.add(1_000, 51, true);
        assert!(rtt.rto_us() <= before + 200_000, "{} after {before}", rtt.rto_us());
    }
}
