//! Limit of the answers to segments out of the window (`tcp_oow_rate_limited`): the ACKs of two sides that
//! disagree about their windows would answer each other for ever.

/// Time of the last such answer of one connection.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct InvalidLimit {
    /// `last_oow_ack_time`, in µs; 0 for never.
    answered_us: u64,
}

impl InvalidLimit {
    /// True if an answer may be sent now, which is taken as sent. At most one is in an interval.
    pub(super) fn admits(&mut self, now_us: u64, interval_us: u64) -> bool {
        let since_us = now_us.saturating_sub(self.answered_us);
        if self.answered_us != 0 && since_us < interval_us {
            return false;
        }
        self.answered_us = now_us.max(1);
        true
    }
}
