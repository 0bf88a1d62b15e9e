//! Reduction of the congestion window after a loss or a mark, and its growth otherwise
//! (`tcp_cong_control`; RFC 6937).

use super::ack::AckFacts;
use super::recovery::Phase;
use super::{Connection, Context};

impl Connection {
    /// Reduces the window once for a mark of congestion (`tcp_enter_cwr`).
    pub(super) fn enter_cwr(&mut self) {
        self.recovery.repair.prior_ssthresh = 0;
        if self.recovery.phase < Phase::Cwr {
            self.recovery.repair.undo_marker = None;
            self.begin_reduction();
            self.recovery.phase = Phase::Cwr;
        }
    }

    /// Reduces the window for a loss that is repaired already.
    pub(super) fn shrink_once(&mut self) {
        self.begin_reduction();
        self.recovery.phase = Phase::Cwr;
        self.end_reduction();
        self.keep_open();
    }

    /// `tcp_init_cwnd_reduction`.
    pub(super) fn begin_reduction(&mut self) {
        let recovery = &mut self.recovery;
        recovery.high_seq = self.send.next;
        recovery.loss_probe = None;
        recovery.repair.prior_cwnd = self.congestion.cwnd;
        (recovery.repair.prr_delivered, recovery.repair.prr_out) = (0, 0);
        self.congestion.ssthresh = self.congestion.reduced();
        self.cwr_is_due = self.agreed.ecn;
    }

    pub(super) fn end_reduction(&mut self) {
        if self.congestion.ssthresh < u32::MAX
            && (self.recovery.phase == Phase::Cwr || self.recovery.repair.undo_marker.is_some())
        {
            self.congestion.set(self.congestion.ssthresh);
        }
    }

    /// Threshold that would be restored (`tcp_current_ssthresh`).
    pub(super) fn current_ssthresh(&self) -> u32 {
        let congestion = &self.congestion;
        if self.recovery.is_reducing() {
            congestion.ssthresh
        } else {
            congestion.ssthresh.max((congestion.cwnd / 2).max(1) + (congestion.cwnd / 4))
        }
    }

    /// Proportional rate reduction (RFC 6937; `tcp_cwnd_reduction`).
    pub(super) fn reduce_window(&mut self, delivered: u32, lost: u32, facts: &AckFacts) {
        if delivered == 0 || self.recovery.repair.prior_cwnd == 0 {
            return;
        }
        let in_flight = self.sent.in_flight();
        let recovery = &mut self.recovery;
        recovery.repair.prr_delivered = recovery.repair.prr_delivered.saturating_add(delivered);
        let ssthresh = self.congestion.ssthresh;
        let allowed = if in_flight > ssthresh {
            let share = u64::from(ssthresh) * u64::from(recovery.repair.prr_delivered);
            let share = share.div_ceil(u64::from(recovery.repair.prior_cwnd));
            u32::try_from(share).unwrap_or(u32::MAX).saturating_sub(recovery.repair.prr_out)
        } else {
            let mut more = delivered
                .max(recovery.repair.prr_delivered.saturating_sub(recovery.repair.prr_out));
            if facts.una_advanced && lost == 0 {
                more += 1;
            }
            more.min(ssthresh - in_flight)
        };
        // The first lost segment is sent again at once.
        let allowed = allowed.max(u32::from(recovery.repair.prr_out == 0));
        self.congestion.cwnd = in_flight + allowed;
    }

    /// Adjusts the window after an ACK (`tcp_cong_control`).
    pub(super) fn control_window(&mut self, facts: &AckFacts, cx: &Context<'_>) {
        let now_us = cx.now_us;
        self.count_delivered(facts);
        self.sample_rate(facts, now_us);
        // As `tcp_may_raise_cwnd`.
        let tolerates_reordering = self.recovery.reordering > cx.config.reordering;
        if self.recovery.is_reducing() {
            self.reduce_window(facts.delivered, facts.lost, facts);
        } else if (facts.data_acked || facts.data_sacked && tolerates_reordering)
            && facts.delivered > 0
        {
            self.recovery.stamp_window(now_us);
            if self.is_window_limiting() {
                let rtt_us = self.rtt.min_us().unwrap_or(0);
                self.congestion.acknowledged(facts.delivered, now_us, rtt_us);
            }
        }
    }

    /// True if the window, and not the application, held back segments (`tcp_is_cwnd_limited`).
    pub(super) fn is_window_limiting(&self) -> bool {
        if self.recovery.is_window_limited {
            return true;
        }
        self.congestion.is_slow_start() && self.congestion.cwnd < 2 * self.recovery.max_outstanding
    }
}
