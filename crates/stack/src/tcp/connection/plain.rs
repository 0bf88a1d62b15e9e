//! Duplicate ACKs that stand for segments, on connections without SACK (RFC 5681, 6582).

use super::Connection;
use super::ack::AckFacts;
use super::sacked::MAX_REORDERING;

impl Connection {
    /// Duplicate ACKs stand for segments that arrived (`tcp_add_reno_sack`).
    pub(super) fn count_dup_acks(&mut self, facts: &mut AckFacts) {
        if facts.duplicates == 0 {
            return;
        }
        let before = self.sent.reno_dup_acks;
        self.sent.reno_dup_acks += facts.duplicates;
        self.note_plain_reordering(0);
        facts.delivered += self.sent.reno_dup_acks.saturating_sub(before);
    }

    /// An ACK that advances also covers what duplicates stood for (`tcp_remove_reno_sacks`).
    pub(super) fn uncount_dup_acks(&mut self, facts: &mut AckFacts) {
        facts.reordered = None;
        let (acked, told) = (facts.delivered, self.sent.reno_dup_acks);
        if acked == 0 {
            return;
        }
        facts.delivered = acked.saturating_sub(told).max(1);
        self.sent.reno_dup_acks = told.saturating_sub(acked - 1);
        self.note_plain_reordering(acked);
        if facts.retransmitted_acked {
            // Nobody can tell what arrived of what was sent once.
            facts.original_acked = false;
        }
    }

    /// More duplicates than segments that can have arrived mean that these overtake each other
    /// (`tcp_check_reno_reordering`).
    fn note_plain_reordering(&mut self, acked: u32) {
        if self.limit_dup_acks() {
            self.recovery.reordering = (self.sent.len() + acked).min(MAX_REORDERING);
            self.recovery.reorderings = self.recovery.reorderings.saturating_add(1);
        }
    }

    /// Has duplicates stand for no more segments than can have arrived. Returns true if they did
    /// (`tcp_limit_reno_sacked`).
    pub(super) fn limit_dup_acks(&mut self) -> bool {
        let most = self.sent.len() - self.sent.lost.max(1).min(self.sent.len());
        let is_beyond = self.sent.reno_dup_acks > most;
        self.sent.reno_dup_acks = self.sent.reno_dup_acks.min(most);
        is_beyond
    }
}
