//! Times of delivery that are measured on request.

use forebay_buf::Pool;
use forebay_rx::delivery::BatchObserver;
use forebay_rx::{Delivery, Handler};
use forebay_sys::clock::{Clock, now_since_1970_ns};

/// Times that are measured besides counting, at a cost of some nanoseconds per batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[repr(u8)]
pub enum Measured {
    /// None.
    #[default]
    Nothing = 0,
    /// Waits in backlogs, and the time of the handler.
    Times = 1,
    /// Waits, the time of the handler, and the age of packets when the handler gets them: for devices
    /// that stamp packets with the time of day.
    TimesAndLatency = 2,
}

impl Measured {
    /// Value that was stored as a number.
    pub(super) fn of_bits(bits: u8) -> Self {
        match bits {
            0 => Self::Nothing,
            1 => Self::Times,
            _ => Self::TimesAndLatency,
        }
    }

    /// Delivers up to `budget` packets, as [`Delivery::turn`] does, and records the times of each
    /// batch.
    pub(super) fn turn(
        self,
        (delivery, handler): (&mut Delivery, &mut impl Handler),
        budget: usize,
        pool: &mut Pool,
        clock: &Clock,
    ) -> usize {
        if self == Self::Nothing {
            return delivery.turn(budget, pool, handler);
        }
        let has_latency = self == Self::TimesAndLatency;
        let mut times = BatchTimes { clock, has_latency, began_ns: 0 };
        delivery.observed_turn(budget, pool, handler, &mut times)
    }
}

/// Recorder of a batch's times.
struct BatchTimes<'a> {
    clock: &'a Clock,
    /// True if the age of packets is recorded.
    has_latency: bool,
    began_ns: u64,
}

impl BatchObserver for BatchTimes<'_> {
    fn batch_is_taken(&mut self, delivery: &mut Delivery) {
        self.began_ns = self.clock.now_ns();
        delivery.record_waits(self.began_ns);
        if self.has_latency {
            delivery.record_latency(now_since_1970_ns());
        }
    }

    fn batch_is_handled(&mut self, delivery: &mut Delivery) {
        delivery.record_handler(self.clock.now_ns() - self.began_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn met_5_measured_is_stored_as_number() {
        for measured in [Measured::Nothing, Measured::Times, Measured::TimesAndLatency] {
            assert_eq!(Measured::of_bits(measured as u8), measured);
        }
    }
}
