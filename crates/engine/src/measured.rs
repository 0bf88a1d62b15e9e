//! Times of delivery that are measured on request.

use forebay_buf::Pool;
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
        let mut done = 0;
        while done < budget {
            let taken = delivery.take(budget - done);
            if taken == 0 {
                break;
            }
            let began_ns = clock.now_ns();
            delivery.record_waits(began_ns);
            if self == Self::TimesAndLatency {
                delivery.record_latency(now_since_1970_ns());
            }
            delivery.coalesce();
            delivery.handle(pool, handler);
            delivery.record_handler(clock.now_ns() - began_ns);
            delivery.complete(pool);
            done += taken;
        }
        done
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
