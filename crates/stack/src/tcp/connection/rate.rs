//! Rate at which the path delivers segments (`tcp_rate.c`): per ACK, from the segment among those delivered that was sent last.

use super::super::seq::Seq;
use super::Connection;
use super::ack::AckFacts;
use super::sent::Sent;

/// Microseconds of a second.
const SECOND_US: u64 = 1_000_000;

/// Times that samples begin with. They have no meaning while nothing is in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeliveryClock {
    /// Time when the first segment of the sampled ones was sent (`first_tx_mstamp`).
    first_sent: Stamp,
    /// Time of the last delivery (`delivered_mstamp`).
    delivered_at: Stamp,
    /// Number of deliveries at which what was sent while the application had no more is over (`app_limited`); 0 if it
    /// had enough.
    limited_until: u32,
}

/// Last sample that counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeliveryRate {
    /// Segments; the highest bit is not set if the application had no more to send meanwhile (`rate_app_limited`).
    segments: u32,
    /// Time, in µs.
    interval_us: u32,
}

/// Bit of a sample during which the application had enough to send.
const UNLIMITED: u32 = 1 << 31;

/// Time in µs modulo 2^32.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Stamp(u32);

impl Stamp {
    fn of(us: u64) -> Self {
        Self(u32::try_from(us & u64::from(u32::MAX)).unwrap_or(0))
    }

    /// Time since an earlier stamp, in µs. 0 of one that is a little ahead, as the clock of a write is.
    fn since(self, earlier: Self) -> u32 {
        u32::try_from(self.0.wrapping_sub(earlier.0).cast_signed()).unwrap_or(0)
    }
}

/// State of deliveries as a segment was sent.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Deliveries {
    first_sent: Stamp,
    delivered_at: Stamp,
    delivered: u32,
}

/// Sample of one ACK.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct RateSample {
    before: Deliveries,
    /// Time when the segment was sent, and its end.
    sent_us: u64,
    end: Seq,
    /// Time in which the segments were sent, in µs.
    sent_in_us: u32,
    is_limited: bool,
    has_some: bool,
}

impl DeliveryClock {
    pub(super) const INITIAL: Self =
        Self { first_sent: Stamp(0), delivered_at: Stamp(0), limited_until: u32::MAX };

    /// Notes that a segment is sent, the first in flight perhaps, after `delivered` deliveries. Returns what its sample needs,
    /// and if the application has no more to send (`tcp_rate_skb_sent`).
    pub(super) fn note_sent(
        &mut self,
        is_first: bool,
        delivered: u32,
        now_us: u64,
    ) -> (Deliveries, bool) {
        if is_first {
            (self.first_sent, self.delivered_at) = (Stamp::of(now_us), Stamp::of(now_us));
        }
        let &mut Self { first_sent, delivered_at, .. } = self;
        (Deliveries { first_sent, delivered_at, delivered }, self.limited_until != 0)
    }

    /// Notes that a segment is delivered (`tcp_rate_skb_delivered`). The last one sent of those that an ACK delivers makes its sample
    /// (`tcp_skb_sent_after`).
    pub(super) fn note_delivered(&mut self, sent: &Sent, sample: &mut RateSample) {
        let before = sent.deliveries;
        let is_later = sent.sent_us > sample.sent_us
            || sent.sent_us == sample.sent_us && sent.end.is_after(sample.end);
        if !sample.has_some || sample.before.delivered == 0 || is_later {
            self.first_sent = Stamp::of(sent.sent_us);
            *sample = RateSample {
                before,
                sent_us: sent.sent_us,
                end: sent.end,
                sent_in_us: self.first_sent.since(before.first_sent),
                is_limited: sent.marks.is_app_limited,
                has_some: true,
            };
        }
    }

    /// Notes an ACK by which `newly` segments were delivered, `delivered` in all.
    fn note_ack(&mut self, newly: u32, delivered: u32, now_us: u64) {
        let is_over = |until: u32| delivered.wrapping_sub(until).cast_signed() > 0;
        if self.limited_until != 0 && is_over(self.limited_until) {
            self.limited_until = 0;
        }
        if newly > 0 {
            self.delivered_at = Stamp::of(now_us);
        }
    }
}

impl DeliveryRate {
    pub(super) const INITIAL: Self = Self { segments: 0, interval_us: 0 };

    /// Takes the sample of an ACK, after `delivered` deliveries (`tcp_rate_gen`). It is none if it took less than the
    /// smallest round trip.
    fn take(&mut self, sample: &RateSample, delivered: u32, now_us: u64, min_us: u64) {
        let segments = delivered.wrapping_sub(sample.before.delivered) & !UNLIMITED;
        let acked_in_us = Stamp::of(now_us).since(sample.before.delivered_at);
        let interval_us = sample.sent_in_us.max(acked_in_us);
        if !sample.has_some || u64::from(interval_us) < min_us {
            return;
        }
        let is_faster = u64::from(segments) * u64::from(self.interval_us)
            >= u64::from(self.segments()) * u64::from(interval_us);
        if !sample.is_limited {
            (self.segments, self.interval_us) = (segments | UNLIMITED, interval_us);
        } else if is_faster {
            (self.segments, self.interval_us) = (segments, interval_us);
        }
    }

    fn segments(self) -> u32 {
        self.segments & !UNLIMITED
    }

    /// Rate in bytes per second (`tcp_compute_delivery_rate`); 0 before the first sample.
    pub(super) fn bytes_per_s(self, mss: u32) -> u64 {
        let bytes = u64::from(self.segments()) * u64::from(mss);
        bytes.saturating_mul(SECOND_US).checked_div(self.interval_us.into()).unwrap_or(0)
    }

    /// True if the application had no more to send during the sample.
    pub(super) fn is_limited(self) -> bool {
        self.segments & UNLIMITED == 0
    }
}

impl Connection {
    /// Takes the sample of an ACK, whose deliveries are counted.
    pub(super) fn sample_rate(&mut self, facts: &AckFacts, now_us: u64) {
        let delivered = self.tally.delivered;
        self.sent.clock.note_ack(facts.delivered, delivered, now_us);
        let min_us = self.rtt.min_us().unwrap_or(u64::from(u32::MAX));
        if !facts.is_reneging {
            self.rate.take(&facts.rate, delivered, now_us, min_us);
        }
    }

    /// Notes at a write if the path waits for it (`tcp_rate_check_app_limited`): nothing else holds bytes back, and what was
    /// lost is sent again.
    pub(super) fn note_application_limit(&mut self) {
        let in_flight = self.sent.in_flight();
        if self.unsent_bytes() < self.send.mss
            && in_flight < self.congestion.cwnd
            && self.sent.lost <= self.sent.retransmitted
        {
            self.sent.clock.limited_until = self.tally.delivered.wrapping_add(in_flight).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sent::Marks;
    use super::*;

    const MSS: u32 = 1000;

    fn segment(clock: &mut DeliveryClock, is_first: bool, delivered: u32, sent_us: u64) -> Sent {
        let (deliveries, is_app_limited) = clock.note_sent(is_first, delivered, sent_us);
        let marks = Marks { is_app_limited, ..Marks::default() };
        Sent { seq: Seq(0), end: Seq(MSS), sent_us, deliveries, marks }
    }

    #[test]
    fn tcp_53_rate_is_of_longer_phase() {
        let (mut clock, mut rate) = (DeliveryClock::INITIAL, DeliveryRate::INITIAL);
        let begin_us = u64::from(u32::MAX) - 5_000;
        let flight = [0, 1, 2, 3].map(|at| segment(&mut clock, at == 0, 1, begin_us + at * 10));
        assert!(flight[0].marks.is_app_limited && rate.is_limited());
        let mut sample = RateSample::default();
        flight.iter().for_each(|sent| clock.note_delivered(sent, &mut sample));
        clock.note_ack(4, 5, begin_us + 20_000);
        rate.take(&sample, 5, begin_us + 20_000, 10_000);
        assert_eq!(rate.bytes_per_s(MSS), 200_000, "4 segments in 20 ms");
        let next = segment(&mut clock, false, 5, begin_us + 30_030);
        assert!(!next.marks.is_app_limited, "the first flight is over");
        let mut sample = RateSample::default();
        clock.note_delivered(&next, &mut sample);
        rate.take(&sample, 6, begin_us + 31_000, 10_000);
        assert_eq!(rate.bytes_per_s(MSS), 33_333, "sent in 30 ms, and acknowledged in 11");
        assert!(!rate.is_limited());
        rate.take(&sample, 9, begin_us + 31_000, 50_000);
        assert_eq!(rate.bytes_per_s(MSS), 33_333, "in less than the smallest round trip");
    }

    #[test]
    fn tcp_53_sample_is_of_last_sent_segment() {
        let mut clock = DeliveryClock::INITIAL;
        let flight = [0, 4_000, 9_000, 9_000].map(|at| segment(&mut clock, at == 0, 1, 1_000 + at));
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]] {
            let mut sample = RateSample::default();
            order.iter().for_each(|&at| clock.note_delivered(&flight[at], &mut sample));
            assert_eq!(sample.sent_in_us, 9_000, "{order:?}");
        }
    }

    #[test]
    fn tcp_53_rate_does_not_overflow() {
        let mut rate = DeliveryRate { segments: u32::MAX, ..DeliveryRate::INITIAL };
        rate.interval_us = 1;
        assert_eq!(rate.bytes_per_s(u32::MAX), u64::MAX);
        rate.segments = 0;
        assert_eq!(rate.bytes_per_s(MSS), 0);
    }

    #[test]
    fn tcp_53_limited_samples_only_raise_rate() {
        let mut rate = DeliveryRate::INITIAL;
        for (now_us, segments, is_limited, expected) in [
            (10_000, 10, false, (1_000_000, false)),
            (10_000, 5, true, (1_000_000, false)),
            (5_000, 10, true, (2_000_000, true)),
            (10_000, 1, false, (100_000, false)),
        ] {
            let sample = RateSample { has_some: true, is_limited, ..RateSample::default() };
            rate.take(&sample, segments, now_us, 0);
            assert_eq!((rate.bytes_per_s(MSS), rate.is_limited()), expected);
        }
    }
}
