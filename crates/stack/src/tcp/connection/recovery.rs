//! Loss recovery: its phases, and what ends them (`tcp_fastretrans_alert`; RFC 5681, 6582, 6675,
//! 5682, 3522).

use super::super::config::{MS, us_u32};
use super::super::on_demand::OnDemand;
use super::super::seq::Seq;
use super::ack::AckFacts;
use super::info::Cause;
use super::rack::{LossProbe, Rack};
use super::repair::Repair;
use super::sent::Sent;
use super::{Connection, Context, stamp_ms};

/// Phases (`tcp_ca_state`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// Nothing is wrong.
    Open,
    /// Duplicates or blocks came, and nothing is known to be lost.
    Disorder,
    /// The window is being reduced without a loss (ECN).
    Cwr,
    /// Lost segments are sent again.
    Recovery,
    /// A time-out: all that was sent may be lost.
    Loss,
}

/// State of loss recovery.
#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) phase: Phase,
    /// `snd_nxt` when the phase began: the phase ends when that is acknowledged.
    pub(super) high_seq: Seq,
    /// Time-outs since the last progress, and doublings of the time-out, or of the interval of probes (`icsk_backoff`).
    pub(super) retransmits: u8,
    pub(super) backoff: u8,
    /// Time-outs of the SYN.
    pub(super) syn_timeouts: u8,
    /// Zero window or keep-alive probes that were not answered.
    pub(super) probes_out: u8,
    /// Time when probing began, in ms modulo 2^32; 0 if it did not.
    pub(super) probing_since_ms: u32,
    pub(super) rack: Rack,
    pub(super) reordering: u32,
    /// Times that segments were seen to overtake each other (`reord_seen`).
    pub(super) reorderings: u8,
    /// `snd_nxt` at the last new round trip of the estimate.
    pub(super) round_end: Seq,
    /// Segments outstanding at most in the round trip that ends with this number, and if the window
    /// held back others.
    pub(super) max_outstanding: u32,
    pub(super) use_round_end: Seq,
    pub(super) is_window_limited: bool,
    /// Segments outstanding at most since the window was not fully used, and the time since, in ms modulo 2^32
    /// (`snd_cwnd_used`, `snd_cwnd_stamp`).
    pub(super) window_used: u32,
    pub(super) window_stamp_ms: u32,
    /// Time of recoveries that began with a time-out and are over, in ms (`total_rto_time`).
    pub(super) timeouts_ms: u32,
    pub(super) loss_probe: Option<LossProbe>,
    pub(super) repair: OnDemand<Repair>,
}

/// Segments to be sent after an ACK (`REXMIT_*`).
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Resend {
    Nothing,
    Lost,
    /// New ones first: they show if the time-out was spurious.
    New,
}

impl Recovery {
    pub(super) fn new(start: Seq, reordering: u32) -> Self {
        Self {
            phase: Phase::Open,
            high_seq: start,
            retransmits: 0,
            backoff: 0,
            syn_timeouts: 0,
            probes_out: 0,
            probing_since_ms: 0,
            rack: Rack::default(),
            reordering,
            reorderings: 0,
            round_end: start,
            max_outstanding: 0,
            use_round_end: start,
            is_window_limited: false,
            window_used: 0,
            window_stamp_ms: 0,
            timeouts_ms: 0,
            loss_probe: None,
            repair: OnDemand::default(),
        }
    }

    /// Begins anew at `next`, when the handshake is over.
    pub(super) fn restart(&mut self, next: Seq) {
        (self.phase, self.high_seq, self.round_end) = (Phase::Open, next, next);
        if self.repair.is_allocated() {
            (self.repair.undo_marker, self.repair.retransmit_stamp_us) = (None, 0);
        }
    }

    /// True if it keeps what nobody needs any more, once a connection is idle.
    pub(super) fn has_spare(&self) -> bool {
        self.repair.is_allocated() && self.phase == Phase::Open
    }

    /// Gives that back.
    pub(super) fn release(&mut self) {
        if self.has_spare() {
            self.repair.release();
        }
    }

    /// The window was set, or is used: it counts as unused from now on only.
    pub(super) fn stamp_window(&mut self, now_us: u64) {
        self.window_stamp_ms = stamp_ms(now_us);
    }

    pub(super) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// True while what the peer threw away is sent again (`is_sack_reneg`).
    pub(super) fn is_reneging(&self) -> bool {
        self.phase == Phase::Loss && self.repair.has_reneged
    }

    /// True while lost segments are sent again.
    pub(super) fn is_recovering(&self) -> bool {
        self.phase >= Phase::Recovery
    }

    /// True if a tail loss probe may be sent.
    pub(super) fn allows_probe(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Cwr)
    }

    /// `tcp_init_undo`.
    fn begin_undo(&mut self, una: Seq, retransmitted: u32) {
        let probe = self.loss_probe.is_some_and(|probe| probe.was_sent_before);
        let outstanding = retransmitted + u32::from(probe);
        self.repair.undo_marker = Some(una);
        self.repair.undo_retransmits = (outstanding > 0).then_some(outstanding);
    }

    /// Counts segments that were sent while the window is reduced.
    pub(super) fn note_sent(&mut self, segments: u32) {
        if self.is_reducing() {
            self.repair.prr_out += segments;
        }
    }

    pub(super) fn is_reducing(&self) -> bool {
        matches!(self.phase, Phase::Cwr | Phase::Recovery)
    }
}

impl Connection {
    /// Decides after a dubious ACK. Returns what is to be sent.
    pub(super) fn recover(
        &mut self,
        prior_una: Seq,
        facts: &mut AckFacts,
        cx: &mut Context<'_>,
    ) -> Resend {
        let resend = self.recover_by_phase(prior_una, facts, cx);
        if !self.recovery.is_recovering() {
            self.end_timeout_recovery(cx.now_us);
        }
        resend
    }

    fn recover_by_phase(
        &mut self,
        prior_una: Seq,
        facts: &mut AckFacts,
        cx: &mut Context<'_>,
    ) -> Resend {
        if facts.ece {
            self.recovery.repair.prior_ssthresh = 0;
        }
        if self.sent.is_empty() {
            self.sent.reno_dup_acks = 0;
        }
        if self.check_reneging(facts, cx) || self.leave_finished_phase(facts, cx) {
            return Resend::Nothing;
        }
        match self.recovery.phase {
            Phase::Recovery => self.continue_recovery(prior_una, facts, cx),
            Phase::Loss => {
                let resend = self.continue_loss(facts, cx);
                if self.recovery.phase != Phase::Loss {
                    self.end_timeout_recovery(cx.now_us);
                }
                self.find_losses(facts, cx);
                if self.recovery.phase == Phase::Loss && !facts.retransmission_lost {
                    return resend;
                }
                // The time-out was spurious, or is over, or what it sent is lost too: what was lost is
                // recovered as usual.
                self.begin_recovery(facts, cx)
            }
            _ => self.begin_recovery(facts, cx),
        }
    }

    /// Begins to recover if something was lost.
    fn begin_recovery(&mut self, facts: &mut AckFacts, cx: &mut Context<'_>) -> Resend {
        if !self.agreed.sack {
            if facts.una_advanced {
                self.sent.reno_dup_acks = 0;
            }
            self.count_dup_acks(facts);
        }
        if self.recovery.phase <= Phase::Disorder {
            self.undo_by_duplicates(cx);
        }
        self.find_losses(facts, cx);
        if self.sent.lost == 0 {
            self.try_to_open(facts);
            return Resend::Nothing;
        }
        if self.has_mtu_probe_failed(cx) {
            return Resend::Nothing;
        }
        self.enter_recovery(facts.ece, cx);
        Resend::Lost
    }

    /// Has everything sent again, soon, if the peer threw away what it had acknowledged selectively
    /// (`tcp_check_sack_reneging`). Returns true if so.
    fn check_reneging(&mut self, facts: &mut AckFacts, cx: &Context<'_>) -> bool {
        let head_sacked = self.sent.first().is_some_and(|sent| sent.marks.sacked);
        if !head_sacked || !facts.una_advanced {
            return false;
        }
        let wait_us = (self.rtt.smoothed_us().unwrap_or(0) / 2).max(10_000);
        self.timers.set_retransmit(cx.now_us + wait_us);
        facts.sets_timer = false;
        true
    }

    /// Ends a phase whose end was acknowledged. Returns true if the ACK says nothing else.
    fn leave_finished_phase(&mut self, facts: &AckFacts, cx: &mut Context<'_>) -> bool {
        if self.recovery.phase == Phase::Open || self.send.una.is_before(self.recovery.high_seq) {
            if self.recovery.phase == Phase::Open {
                self.recovery.repair.retransmit_stamp_us = 0;
            }
            return false;
        }
        match self.recovery.phase {
            Phase::Cwr if self.send.una != self.recovery.high_seq => {
                self.end_reduction();
                self.recovery.phase = Phase::Open;
            }
            Phase::Recovery => {
                if !self.agreed.sack {
                    self.sent.reno_dup_acks = 0;
                }
                if self.undo_recovery(facts, cx) {
                    return true;
                }
                // It may still be undone: the D-SACK of the last retransmission comes later.
                self.end_reduction();
            }
            _ => {}
        }
        false
    }

    /// RFC 6582, section 4: without SACK, duplicates of the recovery itself would be taken for a new loss
    /// until something behind it is acknowledged (`tcp_is_non_sack_preventing_reopen`).
    pub(super) fn holds_phase(&mut self) -> bool {
        let holds = !self.agreed.sack && self.send.una == self.recovery.high_seq;
        if holds {
            self.forget_retransmission();
        }
        holds
    }

    /// Without SACK, the recovery from time-outs of the SYN lasts until data are acknowledged, so that duplicates before
    /// that do not begin another one.
    pub(super) fn hold_timeout_of_syn(&mut self, cx: &Context<'_>) {
        if !self.agreed.sack && self.sent.is_empty() {
            self.recovery.phase = Phase::Loss;
            self.recovery.repair.is_frto = cx.config.frto;
        }
    }

    /// Forgets when the first retransmission was, if none is outstanding (`tcp_retrans_stamp_cleanup`).
    fn forget_retransmission(&mut self) {
        if !self.has_retransmitted() {
            self.recovery.repair.retransmit_stamp_us = 0;
        }
    }

    fn continue_recovery(
        &mut self,
        prior_una: Seq,
        facts: &mut AckFacts,
        cx: &mut Context<'_>,
    ) -> Resend {
        if !facts.una_advanced {
            if !self.agreed.sack {
                self.count_dup_acks(facts);
            }
        } else if self.recovery.repair.undo_marker.is_some() && self.is_ack_of_first(facts) {
            // The hole was filled by what was late, not by what was sent again.
            self.note_reordering(Some(prior_una));
            if self.sent.retransmitted > 0 {
                // New segments instead: more of what was sent may only be late.
                return Resend::Nothing;
            }
            self.forget_retransmission();
            self.undo_reduction(true);
            self.keep_open();
        }
        if self.undo_by_duplicates(cx) {
            self.try_to_open(facts);
        }
        self.find_losses(facts, cx);
        if self.recovery.phase != Phase::Recovery {
            if self.sent.lost == 0 {
                return Resend::Nothing;
            }
            self.enter_recovery(facts.ece, cx);
        }
        Resend::Lost
    }

    /// `tcp_process_loss`, with F-RTO (RFC 5682).
    fn continue_loss(&mut self, facts: &mut AckFacts, cx: &mut Context<'_>) -> Resend {
        let is_over = !self.send.una.is_before(self.recovery.high_seq);
        if facts.una_advanced && self.undo_loss(facts, false, cx) {
            return Resend::Nothing;
        }
        if self.recovery.repair.is_frto {
            if facts.original_acked && self.undo_loss(facts, true, cx) {
                return Resend::Nothing;
            }
            if self.send.next.is_after(self.recovery.high_seq) {
                if facts.data_sacked || facts.duplicates > 0 {
                    self.recovery.repair.is_frto = false;
                }
            } else if facts.una_advanced && !is_over {
                self.recovery.high_seq = self.send.next;
                let can_send =
                    self.unsent_bytes() > 0 && self.window_end().is_after(self.send.next);
                if can_send {
                    return Resend::New;
                }
                self.recovery.repair.is_frto = false;
            }
        }
        if is_over {
            self.undo_recovery(facts, cx);
            return Resend::Nothing;
        }
        if !self.agreed.sack {
            if self.send.next.is_after(self.recovery.high_seq) && facts.duplicates > 0 {
                self.count_dup_acks(facts);
            } else if facts.una_advanced {
                self.sent.reno_dup_acks = 0;
            }
        }
        Resend::Lost
    }

    /// `tcp_identify_packet_loss`.
    fn find_losses(&mut self, facts: &mut AckFacts, cx: &Context<'_>) {
        if self.sent.is_empty() {
            return;
        }
        if self.agreed.sack {
            let before = self.sent.retransmitted;
            self.mark_losses_by_time(cx.now_us, facts);
            if before > self.sent.retransmitted {
                cx.counters.lost_retransmit.add(u64::from(before - self.sent.retransmitted));
                facts.retransmission_lost = true;
            }
            return;
        }
        // A partial ACK names the next hole (RFC 6582, section 3.2; `tcp_newreno_mark_lost`).
        let is_hole = match self.recovery.phase {
            Phase::Loss => false,
            Phase::Recovery => facts.una_advanced,
            _ => self.sent.reno_dup_acks >= self.recovery.reordering,
        };
        if is_hole && self.sent.first().is_some_and(|head| !head.marks.lost) {
            self.mark_lost(0, facts);
        }
    }

    /// True if something outstanding was sent again (`tcp_any_retrans_done`).
    fn has_retransmitted(&self) -> bool {
        let is_head_again = |sent: &Sent| sent.marks.ever_retransmitted;
        self.sent.retransmitted > 0 || self.sent.first().is_some_and(is_head_again)
    }

    /// `tcp_try_to_open`.
    fn try_to_open(&mut self, facts: &AckFacts) {
        self.forget_retransmission();
        if facts.ece {
            self.enter_cwr();
        }
        if self.recovery.phase != Phase::Cwr {
            self.keep_open();
        }
    }

    /// `tcp_try_keep_open`.
    pub(super) fn keep_open(&mut self) {
        let is_disordered =
            self.sent.sacked_out() > 0 || self.sent.lost > 0 || self.has_retransmitted();
        let phase = if is_disordered { Phase::Disorder } else { Phase::Open };
        if self.recovery.phase != phase {
            self.recovery.phase = phase;
            self.recovery.high_seq = self.send.next;
        }
    }

    pub(super) fn enter_recovery(&mut self, by_mark: bool, cx: &mut Context<'_>) {
        self.forget_retransmission();
        let counter =
            if self.agreed.sack { &cx.counters.sack_recovery } else { &cx.counters.reno_recovery };
        counter.add(1);
        let prior_ssthresh = if by_mark { 0 } else { self.current_ssthresh() };
        let retransmitted = self.sent.retransmitted;
        self.recovery.begin_undo(self.send.una, retransmitted);
        if !self.recovery.is_reducing() {
            self.recovery.repair.prior_ssthresh = prior_ssthresh;
            self.begin_reduction();
        }
        self.recovery.phase = Phase::Recovery;
    }

    /// Sends what an ACK called for (`tcp_xmit_recovery`).
    pub(super) fn resend(&mut self, resend: Resend, cx: &mut Context<'_>) {
        match resend {
            Resend::Nothing => {}
            Resend::Lost => self.resend_lost(cx),
            Resend::New => {
                self.push(cx);
                if !self.send.next.is_after(self.recovery.high_seq) {
                    self.recovery.repair.is_frto = false;
                    self.resend_lost(cx);
                }
            }
        }
    }

    /// Sends lost segments again, as far as the window allows (`tcp_xmit_retransmit_queue`).
    pub(super) fn resend_lost(&mut self, cx: &mut Context<'_>) {
        let Some(from) = self.recovery.repair.resend_from else { return };
        let mut index = self.sent.index_of(from);
        let cause = match self.recovery.phase {
            Phase::Loss => Cause::SlowStart,
            _ => Cause::Fast,
        };
        while self.sent.awaiting_resend > 0
            && let Some(&sent) = self.sent.at(index)
        {
            if self.sent.retransmitted >= self.sent.lost {
                // `retrans_out >= lost_out`: after an undo, unnecessary retransmissions in flight count against
                // new losses.
                self.recovery.repair.resend_from = Some(sent.seq);
                return;
            }
            let mut count = 0;
            if sent.marks.lost && !sent.marks.retransmitted && !sent.marks.sacked {
                let room = self.congestion.cwnd.saturating_sub(self.sent.in_flight());
                if room > 0 && !self.waits_for_pace(cx) {
                    count = self.retransmit_packet(index, room, cause, cx);
                }
                if count == 0 {
                    self.recovery.repair.resend_from = Some(sent.seq);
                    return;
                }
                self.recovery.note_sent(count);
                let counter = match cause {
                    Cause::SlowStart => &cx.counters.slow_start_retrans,
                    _ => &cx.counters.fast_retrans,
                };
                counter.add(count.into());
                if index == 0 && !self.timers.is_reorder() {
                    self.timers.set_retransmit(cx.now_us + self.rtt.rto_us());
                }
            }
            index += count.max(1) as usize;
        }
        self.recovery.repair.resend_from = None;
    }

    /// A time-out: all that is not known to have arrived counts as lost (`tcp_enter_loss`).
    pub(super) fn enter_loss(&mut self, cx: &mut Context<'_>) {
        let is_reneging = self.sent.first().is_some_and(|sent| sent.marks.sacked);
        self.recovery.repair.has_reneged = is_reneging || self.recovery.is_reneging();
        if is_reneging {
            cx.counters.sack_reneging.add(1);
            self.sent.mark_all(|sent| sent.marks.sacked = false);
            (self.recovery.repair.highest_sacked, self.recovery.repair.known_blocks) = (None, None);
        }
        self.sent.reno_dup_acks = 0;
        let mut facts = AckFacts::default();
        for index in 0..self.sent.len() as usize {
            let Some(&sent) = self.sent.at(index) else { break };
            if index == 0 || is_reneging || !self.is_recent(&sent, cx.now_us) {
                self.mark_lost(index, &mut facts);
            }
        }
        let was_open = self.recovery.phase < Phase::Recovery;
        let usual = cx.config.reordering;
        if self.recovery.phase <= Phase::Disorder && self.sent.sacked >= usual {
            // Segments overtake each other less than was thought.
            self.recovery.reordering = self.recovery.reordering.min(usual);
        }
        let is_new = self.recovery.phase <= Phase::Disorder
            || !self.recovery.high_seq.is_after(self.send.una)
            || self.recovery.phase == Phase::Loss && self.recovery.retransmits == 0;
        if is_new {
            self.recovery.repair.prior_ssthresh = self.current_ssthresh();
            self.recovery.repair.prior_cwnd = self.congestion.cwnd;
            self.congestion.ssthresh = self.congestion.reduced();
            let retransmitted = self.sent.retransmitted;
            self.recovery.begin_undo(self.send.una, retransmitted);
        }
        self.congestion.set(self.sent.in_flight() + 1);
        self.recovery.stamp_window(cx.now_us);
        self.congestion.restart();
        self.recovery.phase = Phase::Loss;
        self.recovery.high_seq = self.send.next;
        self.recovery.repair.is_frto =
            cx.config.frto && (was_open || self.recovery.retransmits > 0);
        self.recovery.loss_probe = None;
        self.cwr_is_due = self.agreed.ecn;
    }

    /// Counts a time-out, whose recovery begins if it is the first without progress (`tcp_update_rto_stats`).
    pub(super) fn count_timeout(&mut self, now_us: u64) {
        let is_first = self.recovery.retransmits == 0;
        if is_first {
            self.recovery.repair.timeout_us = now_us;
        }
        self.tally.count_timeout(is_first);
        self.recovery.retransmits = self.recovery.retransmits.saturating_add(1);
    }

    /// Counts the time of a recovery that began with a time-out, if there is one (`tcp_update_rto_time`).
    pub(super) fn end_timeout_recovery(&mut self, now_us: u64) {
        let since_us = self.recovery.repair.timeout_us;
        if since_us > 0 {
            let spent_ms = us_u32(now_us.saturating_sub(since_us) / MS);
            self.recovery.timeouts_ms = self.recovery.timeouts_ms.wrapping_add(spent_ms);
            self.recovery.repair.timeout_us = 0;
        }
    }

    /// Has what is lost sent again, as after a time-out, without a smaller window.
    pub(super) fn enter_simple_recovery(&mut self) {
        if self.recovery.phase == Phase::Loss {
            return;
        }
        self.congestion.ssthresh = self.current_ssthresh();
        self.recovery.high_seq = self.send.next;
        (self.recovery.repair.prior_ssthresh, self.recovery.repair.undo_marker) = (0, None);
        (self.recovery.phase, self.recovery.repair.is_frto) = (Phase::Loss, false);
    }

    /// Phase, for observers.
    pub(super) fn phase(&self) -> Phase {
        self.recovery.phase
    }
}
