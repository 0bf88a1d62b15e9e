//! Undo of a reduction that proved unnecessary: by timestamps (Eifel, RFC 3522), D-SACK, F-RTO (RFC 5682).

use super::ack::AckFacts;
use super::recovery::Phase;
use super::sent::Sent;
use super::{Connection, Context};

impl Connection {
    /// Ends recovery, and restores the window if nothing was lost. Returns true if the phase stays
    /// for now.
    pub(super) fn undo_recovery(&mut self, facts: &AckFacts, cx: &mut Context<'_>) -> bool {
        if self.may_undo(facts) {
            self.undo_reduction(false);
            let counters = cx.counters;
            let is_loss = self.recovery.phase == Phase::Loss;
            if is_loss { &counters.loss_undo } else { &counters.full_undo }.add(1);
        } else {
            self.recovery.rack.note_recovery();
        }
        if self.holds_phase() {
            return true;
        }
        self.recovery.phase = Phase::Open;
        false
    }

    /// True if the retransmissions of the phase proved unnecessary (`tcp_may_undo`).
    fn may_undo(&self, facts: &AckFacts) -> bool {
        let recovery = &self.recovery;
        recovery.repair.undo_marker.is_some()
            && (recovery.repair.undo_retransmits == Some(0) || self.is_ack_of_first(facts))
    }

    /// Eifel: the ACK echoes a timestamp older than the first retransmission (`tcp_packet_delayed`).
    pub(super) fn is_ack_of_first(&self, facts: &AckFacts) -> bool {
        facts.una_advanced
            && self.recovery.repair.retransmit_stamp_us > 0
            && self.is_echo_before(self.recovery.repair.retransmit_stamp_us, facts)
    }

    /// True if the ACK is of an earlier transmission of the segment (`tcp_skb_spurious_retrans`).
    pub(super) fn is_echo_of_earlier(&self, sent: &Sent, facts: &AckFacts) -> bool {
        sent.marks.ever_retransmitted && self.is_echo_before(sent.sent_us, facts)
    }

    /// True if the ACK echoes a timestamp older than that of a time (`tcp_tsopt_ecr_before`).
    fn is_echo_before(&self, time_us: u64, facts: &AckFacts) -> bool {
        let stamp = self.timestamp(time_us);
        facts.echo.is_some_and(|echo| echo.wrapping_sub(stamp).cast_signed() < 0)
    }

    /// Restores the window if D-SACKs tell that every retransmission was unnecessary (`tcp_try_undo_dsack`).
    pub(super) fn undo_by_duplicates(&mut self, cx: &Context<'_>) -> bool {
        let is_undone = self.recovery.repair.undo_marker.is_some()
            && self.recovery.repair.undo_retransmits == Some(0);
        if is_undone {
            self.undo_reduction(false);
            // Nothing was lost: segments overtook each other. Else three of them would count as a loss
            // again, before any is seen to be late.
            self.recovery.reorderings = self.recovery.reorderings.max(1);
            cx.counters.dsack_undo.add(1);
        }
        is_undone
    }

    /// Ends a recovery from a time-out that was spurious (`tcp_try_undo_loss`).
    pub(super) fn undo_loss(&mut self, facts: &AckFacts, by_frto: bool, cx: &Context<'_>) -> bool {
        if !by_frto && !self.may_undo(facts) {
            return false;
        }
        self.undo_reduction(true);
        cx.counters.loss_undo.add(1);
        if by_frto {
            cx.counters.spurious_rtos.add(1);
        }
        self.recovery.retransmits = 0;
        if !self.holds_phase() && (by_frto || self.agreed.sack) {
            self.recovery.phase = Phase::Open;
            self.recovery.repair.is_frto = false;
        }
        true
    }

    /// Restores the window as it was before the reduction (`tcp_undo_cwnd_reduction`).
    pub(super) fn undo_reduction(&mut self, unmarks_lost: bool) {
        if unmarks_lost {
            self.sent.mark_all(|sent| sent.marks.lost = false);
            self.recovery.repair.resend_from = None;
        }
        if self.recovery.repair.prior_ssthresh > 0 {
            let before = self.recovery.repair.prior_cwnd;
            self.congestion.set(self.congestion.cwnd.max(before));
            if self.recovery.repair.prior_ssthresh > self.congestion.ssthresh {
                self.congestion.ssthresh = self.recovery.repair.prior_ssthresh;
                self.cwr_is_due = false;
            }
        }
        self.recovery.repair.undo_marker = None;
        self.recovery.repair.delivered.look_again();
    }
}
