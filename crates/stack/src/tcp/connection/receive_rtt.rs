//! Round trip of a connection that only receives, and so gets no ACKs to measure by (`rcv_rtt_est`).

use super::super::config::us_u32;
use super::super::seq::Seq;

/// Weight of a sample in the average: an eighth.
const WEIGHT: u32 = 8;

/// Estimate of the round trip, by echoes of timestamps or by windows.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ReceiveRoundTrip {
    /// Eight times the average, in µs; 0 before the first sample.
    eightfold_us: u32,
    /// Last timestamp that was echoed: later segments with it came later.
    echo: u32,
    /// End of the window that was announced at a time, in µs: bytes behind it take a round trip.
    window_end: Seq,
    window_us: u64,
}

impl ReceiveRoundTrip {
    /// Round trip in µs; `None` before the first sample.
    pub(super) fn us(&self) -> Option<u64> {
        (self.eightfold_us > 0).then_some(u64::from(self.eightfold_us / WEIGHT))
    }

    /// Takes the first segment that echoes a timestamp; `rtt_us` is the age of that
    /// (`tcp_rcv_rtt_measure_ts`). An application that does not read delays it.
    pub(super) fn note_echo(&mut self, echo: u32, rtt_us: u64, is_read: bool) {
        if echo != self.echo {
            self.echo = echo;
            self.add(rtt_us, is_read);
        }
    }

    /// Takes data up to `next`, of which `window` more may come (`tcp_rcv_rtt_measure`). The peer may
    /// not fill the window at once: only a shorter time is better.
    pub(super) fn note_data(&mut self, next: Seq, window: u32, now_us: u64) {
        if self.window_us > 0 {
            if next.is_before(self.window_end) {
                return;
            }
            self.add(now_us.saturating_sub(self.window_us).max(1), false);
        }
        (self.window_end, self.window_us) = (next + window, now_us.max(1));
    }

    fn add(&mut self, rtt_us: u64, may_grow: bool) {
        let rtt_us = us_u32(rtt_us);
        let sample = rtt_us.saturating_mul(WEIGHT);
        if rtt_us == 0 {
            return;
        }
        if self.eightfold_us == 0 || sample < self.eightfold_us {
            self.eightfold_us = sample;
        } else if may_grow {
            let kept = self.eightfold_us - self.eightfold_us / WEIGHT;
            self.eightfold_us = kept.saturating_add(rtt_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_33_echoes_follow_round_trip() {
        let mut rtt = ReceiveRoundTrip::default();
        assert_eq!(rtt.us(), None);
        rtt.note_echo(7, 10_000, true);
        rtt.note_echo(7, 50_000, true);
        assert_eq!(rtt.us(), Some(10_000), "the first segment with an echo counts");
        (8..200).for_each(|echo| rtt.note_echo(echo, 20_000, true));
        assert!((19_000..=20_000).contains(&rtt.us().unwrap()), "{rtt:?}");
        rtt.note_echo(200, 90_000, false);
        assert!(rtt.us().unwrap() <= 20_000, "the application did not read: {rtt:?}");
        rtt.note_echo(201, 5_000, false);
        assert_eq!(rtt.us(), Some(5_000));
    }

    #[test]
    fn tcp_33_windows_give_shortest_round_trip() {
        let mut rtt = ReceiveRoundTrip::default();
        for (next, now_us) in [(0, 1_000), (999, 5_000), (1_000, 9_000), (2_000, 30_000)] {
            rtt.note_data(Seq(next), 1_000, now_us);
        }
        assert_eq!(rtt.us(), Some(8_000), "without timestamps");
    }
}
