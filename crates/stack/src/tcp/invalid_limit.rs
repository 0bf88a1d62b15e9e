//! Limit of the answers to segments out of the window (`tcp_oow_rate_limited`): the ACKs of two sides that
//! disagree about their windows would answer each other for ever.

use super::connection::stamp_ms;

/// Time of the last such answer of one connection.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct InvalidLimit {
    /// `last_oow_ack_time`, in ms modulo 2^32; 0 for never.
    answered_ms: u32,
}

impl InvalidLimit {
    /// True if an answer may be sent now, which is taken as sent. At most one is in an interval.
    pub(super) fn admits(&mut self, now_us: u64, interval_us: u64) -> bool {
        let now_ms = stamp_ms(now_us).max(1);
        let since_us = u64::from(now_ms.wrapping_sub(self.answered_ms)) * 1000;
        if self.answered_ms != 0 && since_us < interval_us {
            return false;
        }
        self.answered_ms = now_ms;
        true
    }
}
