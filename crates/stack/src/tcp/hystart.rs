//! End of the first slow start before it loses packets: HyStart++ (RFC 9406). The round trip grows as
//! soon as a queue does.
//!
//! Acknowledged segments count without the RFC's limit L, as for a paced sender: a burst is at most one
//! packet, as long as about a millisecond of the connection's rate.

use super::config::{MS, us_u32};

/// Growth of the round trip that counts: an eighth, within limits, in µs.
const RTT_THRESHOLD_MIN_US: u32 = 4 * us_u32(MS);
const RTT_THRESHOLD_MAX_US: u32 = 16 * us_u32(MS);
const MIN_RTT_DIVISOR: u32 = 8;
/// Samples of a round before it is judged.
const SAMPLES: u8 = 8;
/// Growth in conservative slow start, as a part of that in slow start.
const GROWTH_DIVISOR: u32 = 4;
/// Rounds of conservative slow start.
const CONSERVATIVE_ROUNDS: u8 = 5;

/// State of the first slow start.
#[derive(Clone, Copy, Debug)]
pub(super) struct HyStart {
    /// Smallest round trips of the last round and of this one, in µs; `u32::MAX` without one.
    last_min_us: u32,
    current_min_us: u32,
    samples: u8,
    /// Conservative slow start: rounds so far, and the smallest round trip when it began.
    conservative: Option<u8>,
    baseline_us: u32,
    /// Segments acknowledged in conservative slow start that did not enlarge the window yet.
    credit: u8,
}

/// Outcome of a sample.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlowStart {
    GoesOn,
    IsOver,
}

impl HyStart {
    pub(super) fn new() -> Self {
        Self {
            last_min_us: u32::MAX,
            current_min_us: u32::MAX,
            samples: 0,
            conservative: None,
            baseline_us: u32::MAX,
            credit: 0,
        }
    }

    /// Takes a sample of the round trip; `is_new_round` if it is the first of its round.
    pub(super) fn sample(&mut self, rtt_us: u64, is_new_round: bool) -> SlowStart {
        if is_new_round {
            self.last_min_us = self.current_min_us;
            (self.current_min_us, self.samples) = (u32::MAX, 0);
            if let Some(rounds) = &mut self.conservative {
                *rounds += 1;
                if *rounds >= CONSERVATIVE_ROUNDS {
                    return SlowStart::IsOver;
                }
            }
        }
        self.current_min_us = self.current_min_us.min(us_u32(rtt_us));
        self.samples = self.samples.saturating_add(1);
        if self.samples >= SAMPLES {
            self.judge();
        }
        SlowStart::GoesOn
    }

    fn judge(&mut self) {
        if self.conservative.is_some() {
            if self.current_min_us < self.baseline_us {
                // The round trip did not grow for good: it was no queue.
                (self.conservative, self.baseline_us) = (None, u32::MAX);
            }
        } else if self.last_min_us < u32::MAX {
            let threshold = (self.last_min_us / MIN_RTT_DIVISOR)
                .clamp(RTT_THRESHOLD_MIN_US, RTT_THRESHOLD_MAX_US);
            if self.current_min_us >= self.last_min_us.saturating_add(threshold) {
                (self.conservative, self.baseline_us) = (Some(0), self.current_min_us);
            }
        }
    }

    /// Segments by which the window grows after `acked` were acknowledged.
    pub(super) fn growth(&mut self, acked: u32) -> u32 {
        if self.conservative.is_none() {
            return acked;
        }
        let credit = acked.saturating_add(self.credit.into());
        self.credit = u8::try_from(credit % GROWTH_DIVISOR).unwrap_or(0);
        credit / GROWTH_DIVISOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a round of samples. Returns true if slow start is over.
    fn round(hystart: &mut HyStart, rtt_us: u64, samples: u8) -> bool {
        (0..samples).any(|at| hystart.sample(rtt_us, at == 0) == SlowStart::IsOver)
    }

    #[test]
    fn tcp_25_growing_round_trip_slows_growth() {
        let mut hystart = HyStart::new();
        assert!(!round(&mut hystart, 40_000, 8));
        assert!(!round(&mut hystart, 44_999, 8));
        assert_eq!(hystart.growth(8), 8, "less than an eighth more");
        assert!(!round(&mut hystart, 44_999 + 5_624, 7));
        assert_eq!(hystart.growth(8), 8, "too few samples");
        assert!(!round(&mut hystart, 44_999 + 5_624, 1));
        assert!(!round(&mut hystart, 60_000, 8));
        assert_eq!((hystart.growth(8), hystart.growth(3), hystart.growth(1)), (2, 0, 1));
    }

    #[test]
    fn tcp_25_five_slow_rounds_end_it() {
        let mut hystart = HyStart::new();
        let rounds = [10_000, 20_000, 20_000, 20_000, 20_000, 20_000, 20_000];
        let over: Vec<_> = rounds.map(|rtt_us| round(&mut hystart, rtt_us, 8)).into();
        assert_eq!(over, [false, false, false, false, false, false, true]);
    }

    #[test]
    fn tcp_25_jitter_resumes_slow_start() {
        let mut hystart = HyStart::new();
        assert!(!round(&mut hystart, 10_000, 8) && !round(&mut hystart, 20_000, 8));
        assert_eq!(hystart.growth(8), 2);
        assert!(!round(&mut hystart, 12_000, 8));
        assert_eq!(hystart.growth(8), 8);
    }

    #[test]
    fn tcp_25_short_paths_have_a_threshold() {
        let mut hystart = HyStart::new();
        assert!(!round(&mut hystart, 100, 8) && !round(&mut hystart, 4_099, 8));
        assert_eq!(hystart.growth(8), 8, "4 ms at least");
        let mut hystart = HyStart::new();
        assert!(!round(&mut hystart, 400_000, 8) && !round(&mut hystart, 416_000, 8));
        assert_eq!(hystart.growth(8), 2, "16 ms at most");
    }
}
