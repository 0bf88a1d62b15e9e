//! RACK: losses found by the times of transmission (RFC 8985), and tail loss probes.

use super::super::config::{RTO_INITIAL_US, RTO_MIN_US, TIMEOUT_MIN_US, us_u32};
use super::super::seq::Seq;
use super::ack::AckFacts;
use super::info::Cause;
use super::recovery::Phase;
use super::sent::Sent;
use super::{Connection, Context};

/// Round trip that losses are judged by, and reordering window, as D-SACKs have widened it: for the life of a connection.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Rack {
    /// Round trip of the latest segment that is known to be delivered, in µs; 0 before the first.
    rtt_us: u32,
    /// `snd_nxt` when the reordering window was last widened.
    widened_at: Seq,
    /// Steps by which the window is widened, and recoveries for which it stays so.
    wider_steps: u8,
    wider_recoveries: u8,
}

/// Latest segment that is known to be delivered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delivered {
    /// Time of its last transmission, in µs.
    sent_us: u64,
    end: Seq,
    /// True if an ACK delivered one since losses were looked for.
    advanced: bool,
}

impl Delivered {
    pub(super) const INITIAL: Self = Self { sent_us: 0, end: Seq(0), advanced: false };

    /// Has the next ACK look for losses again.
    pub(super) fn look_again(&mut self) {
        self.advanced = true;
    }
}

/// Recoveries after which a reordering window is as narrow as at first (RFC 8985, section 6.2).
const WIDER_RECOVERIES: u8 = 16;

impl Rack {
    /// A retransmission was unnecessary: segments overtake each other by more than was assumed
    /// (`tcp_rack_update_reo_wnd`). The window widens once each round trip.
    pub(super) fn note_duplicate(&mut self, una: Seq, next: Seq) {
        if self.wider_steps == 0 || !una.is_before(self.widened_at) {
            self.wider_steps = self.wider_steps.saturating_add(1);
            self.wider_recoveries = WIDER_RECOVERIES;
            self.widened_at = next;
        }
    }

    /// A recovery is over.
    pub(super) fn note_recovery(&mut self) {
        self.wider_recoveries = self.wider_recoveries.saturating_sub(1);
        if self.wider_recoveries == 0 {
            self.wider_steps = 0;
        }
    }
}

/// Outstanding tail loss probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LossProbe {
    /// `snd_nxt` when it was sent.
    pub(super) high_seq: Seq,
    /// True if it sent a segment again; else it was new.
    pub(super) was_sent_before: bool,
}

impl Connection {
    /// `tcp_rack_advance`.
    pub(super) fn advance_rack(&mut self, sent: &Sent, now_us: u64) {
        let rtt_us = now_us.saturating_sub(sent.sent_us);
        // A steady path varies a little.
        let fastest_us = self.rtt.min_us().map_or(0, |min_us| min_us - min_us / 16);
        if sent.marks.ever_retransmitted && rtt_us < fastest_us {
            // Faster than any round trip: the ACK is of the first transmission.
            return;
        }
        self.recovery.rack.rtt_us = us_u32(rtt_us);
        let latest = &mut self.recovery.repair.delivered;
        latest.advanced = true;
        if is_later((sent.sent_us, sent.end), (latest.sent_us, latest.end)) {
            (latest.sent_us, latest.end) = (sent.sent_us, sent.end);
        }
    }

    /// Marks segments lost that were sent well before a delivered one. Returns the time to wait
    /// for others, in µs (`tcp_rack_detect_loss`).
    pub(super) fn detect_losses(&mut self, now_us: u64, facts: &mut AckFacts) -> Option<u64> {
        let Delivered { sent_us, end, .. } = self.recovery.repair.delivered;
        let lost_after_us = u64::from(self.recovery.rack.rtt_us) + self.reorder_window_us();
        let left_us = |sent: &Sent| (sent.sent_us + lost_after_us).saturating_sub(now_us);
        self.sent.overtake(|sent| is_later((sent_us, end), (sent.sent_us, sent.end)));
        while let Some(index) = self.sent.first_overtaken()
            && self.sent.at(index).is_some_and(|sent| left_us(sent) == 0)
        {
            self.mark_lost(index, facts);
        }
        self.sent.last_overtaken().map(left_us)
    }

    /// `tcp_rack_mark_lost`. Arms the reordering timer for segments that may still come.
    pub(super) fn mark_losses_by_time(&mut self, now_us: u64, facts: &mut AckFacts) {
        if !std::mem::take(&mut self.recovery.repair.delivered.advanced) {
            return;
        }
        if let Some(wait_us) = self.detect_losses(now_us, facts) {
            facts.sets_timer = false;
            self.timers.set_reorder(now_us + wait_us + TIMEOUT_MIN_US);
        }
    }

    /// Time that segments may overtake each other (`tcp_rack_reo_wnd`).
    fn reorder_window_us(&self) -> u64 {
        let recovery = &self.recovery;
        if recovery.reorderings == 0
            && (recovery.is_recovering() || self.sent.sacked >= recovery.reordering)
        {
            return 0;
        }
        let steps = 1 + u64::from(recovery.rack.wider_steps);
        let quarters = self.rtt.min_us().unwrap_or(0) * steps / 4;
        quarters.min(self.rtt.smoothed_us().unwrap_or(0))
    }

    pub(super) fn mark_lost(&mut self, index: usize, facts: &mut AckFacts) {
        let Some(&sent) = self.sent.at(index) else { return };
        if sent.marks.sacked || sent.marks.lost && !sent.marks.retransmitted {
            return;
        }
        self.sent.mark(index, |marks| (marks.lost, marks.retransmitted) = (true, false));
        let hint = self.recovery.repair.resend_from;
        self.recovery.repair.resend_from =
            Some(hint.map_or(sent.seq, |hint| hint.earlier(sent.seq)));
        facts.lost += 1;
    }

    /// True if RACK alone would not call the segment lost at a time-out.
    pub(super) fn is_recent(&self, sent: &Sent, now_us: u64) -> bool {
        let age_us = now_us.saturating_sub(sent.sent_us);
        self.agreed.sack && u64::from(self.recovery.rack.rtt_us) > age_us
    }

    /// The reordering timer fired (`tcp_rack_reo_timeout`).
    pub(super) fn on_reorder_timer(&mut self, cx: &mut Context<'_>) {
        let mut facts = AckFacts::default();
        let prior_in_flight = self.sent.in_flight();
        self.detect_losses(cx.now_us, &mut facts);
        if prior_in_flight != self.sent.in_flight() && !self.has_mtu_probe_failed(cx) {
            if self.phase() != Phase::Recovery {
                self.enter_recovery(false, cx);
                self.reduce_window(1, facts.lost, &facts);
            }
            self.resend_lost(cx);
        }
        if self.timers.is_reorder() {
            self.rearm_retransmit(cx.now_us);
        }
    }

    /// Arms a tail loss probe instead of the retransmission timer, if one is due
    /// (`tcp_schedule_loss_probe`). Returns false if not.
    pub(super) fn schedule_loss_probe(&mut self, is_progress: bool, cx: &Context<'_>) -> bool {
        let now_us = cx.now_us;
        if !cx.config.loss_probes {
            return false;
        }
        if self.sent.is_empty() || !self.agreed.sack || !self.recovery.allows_probe() {
            return false;
        }
        if self.awaits_ack() {
            return false;
        }
        let mut wait_us = match self.rtt.smoothed_us() {
            Some(srtt_us) if self.sent.len() == 1 => 2 * srtt_us + RTO_MIN_US,
            Some(srtt_us) => 2 * srtt_us + TIMEOUT_MIN_US,
            None => RTO_INITIAL_US,
        };
        let rto_us = if is_progress {
            self.rtt.rto_us()
        } else {
            let head_us = self.sent.first().map_or(now_us, |sent| sent.sent_us);
            (head_us + self.rtt.rto_us()).saturating_sub(now_us)
        };
        if rto_us > 0 {
            wait_us = wait_us.min(rto_us);
        }
        self.timers.set_loss_probe(now_us + wait_us);
        true
    }

    /// The probe timer fired (`tcp_send_loss_probe`): sends new data, or the last segment again. A probe
    /// starts the retransmission timer anew; without one, it counts from the oldest segment.
    pub(super) fn on_loss_probe_timer(&mut self, cx: &mut Context<'_>) {
        if self.recovery.loss_probe.is_none() && self.send_loss_probe(cx) {
            cx.counters.loss_probes.add(1);
            self.timers.clear_retransmit();
        }
        self.rearm_retransmit(cx.now_us);
    }

    /// Returns false if nothing could be sent.
    fn send_loss_probe(&mut self, cx: &mut Context<'_>) -> bool {
        let (had, count) = (self.send.next, self.sent.len());
        let Some(last) = count.checked_sub(1) else { return false };
        let (unsent, room) = (self.unsent_bytes(), self.segment_room());
        let fin = u32::from(self.has_unsent_fin() && unsent <= room);
        let first_end = had + unsent.min(room) + fin;
        let is_new = first_end != had && !first_end.is_after(self.window_end());
        let was_sent = if is_new {
            self.send_probe_segment(cx);
            self.send.next != had
        } else {
            let (last, room) = (last as usize, self.segment_room());
            let packet = self.sent.packet_of(last);
            self.sent.set_segment_size(packet, room);
            // As many segments as before, if not fewer: the kernel's may leave a rest behind, too.
            let last = last.min(self.sent.len().saturating_sub(1) as usize);
            self.send_again(last, Cause::Probe, cx)
        };
        if was_sent {
            let high_seq = self.send.next;
            self.recovery.loss_probe = Some(LossProbe { high_seq, was_sent_before: !is_new });
        }
        was_sent
    }

    /// `tcp_process_tlp_ack`.
    pub(super) fn end_loss_probe(&mut self, ack: Seq, facts: &AckFacts, cx: &mut Context<'_>) {
        let Some(probe) = self.recovery.loss_probe else { return };
        if ack.is_before(probe.high_seq) {
            return;
        }
        if !probe.was_sent_before || facts.probe_duplicated {
            self.recovery.loss_probe = None;
        } else if ack.is_after(probe.high_seq) {
            // The probe repaired a loss that nobody else saw: it counts as congestion.
            cx.counters.loss_probe_recovery.add(1);
            self.recovery.loss_probe = None;
            self.shrink_once();
        } else if !facts.una_advanced && !facts.is_not_duplicate && !facts.data_sacked {
            self.recovery.loss_probe = None;
        }
    }
}

/// True if the first transmission came after the second; of one time, the later number.
fn is_later(first: (u64, Seq), second: (u64, Seq)) -> bool {
    first.0 > second.0 || first.0 == second.0 && first.1.is_after(second.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_26_window_widens_once_per_round() {
        let mut rack = Rack::default();
        rack.note_duplicate(Seq(100), Seq(200));
        rack.note_duplicate(Seq(199), Seq(300));
        assert_eq!(rack.wider_steps, 1, "of the same round trip");
        rack.note_duplicate(Seq(200), Seq(300));
        assert_eq!(rack.wider_steps, 2);
        for round in 3..1000 {
            rack.note_duplicate(Seq(round * 100), Seq(round * 100 + 100));
        }
        assert_eq!(rack.wider_steps, u8::MAX);
    }

    #[test]
    fn tcp_26_window_narrows_after_sixteen_recoveries() {
        let mut rack = Rack::default();
        rack.note_duplicate(Seq(100), Seq(200));
        (1..WIDER_RECOVERIES).for_each(|_| rack.note_recovery());
        assert_eq!(rack.wider_steps, 1);
        // A duplicate of the same round trip makes it last no longer.
        rack.note_duplicate(Seq(150), Seq(300));
        rack.note_recovery();
        assert_eq!(rack.wider_steps, 0);
    }
}
