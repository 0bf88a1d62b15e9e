//! Memory that an active connection keeps from one segment to the next, and that an idle one gives back.

use super::super::config::SECOND;
use super::Connection;

/// Time without a segment after which a connection counts as idle, in µs, unless two of its time-outs are longer: no
/// segment of a transfer allocates what the one before gave back.
pub(in crate::tcp) const IDLE_US: u64 = SECOND;

impl Connection {
    /// True if something could be given back, once the connection is idle.
    pub(in crate::tcp) fn has_spare(&self) -> bool {
        self.sent.is_empty()
            && !self.awaits_ack()
            && (self.sent.is_allocated() && self.may_forget_sent()
                || self.recovery.has_spare()
                || self.errors.has_spare()
                || self.receive.queue.is_spare())
    }

    /// True if nothing that was sent matters any more. While bytes wait for a window, it is known that the application had enough
    /// to send.
    fn may_forget_sent(&self) -> bool {
        self.sent.reno_dup_acks == 0 && self.unsent_bytes() == 0
    }

    /// Gives back what an idle connection does not need.
    pub(super) fn release_if_idle(&mut self, now_us: u64) {
        let last_us = self.receive.last_us.max(self.send.last_data_us);
        let idle_us = IDLE_US.max(2 * self.rtt.rto_us());
        if !self.sent.is_empty() || self.awaits_ack() || now_us.saturating_sub(last_us) < idle_us {
            return;
        }
        if self.may_forget_sent() {
            self.sent.release();
        }
        self.recovery.release();
        if self.errors.has_spare() {
            self.errors.release_spare();
        }
        self.receive.queue.release();
    }
}
