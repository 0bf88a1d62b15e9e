//! Time-outs of a connection (`tcp_timer.c`).

use std::num::{NonZeroU8, NonZeroU64};

use super::super::config::{MS, RTO_INITIAL_US, RTO_MIN_US, TIMEOUT_MIN_US};
use super::super::error::TcpError;
use super::info::Cause;
use super::{Connection, Context, State, ms_since, stamp_ms};

/// Time after which a window probe that found no frame is tried again (`TCP_RESOURCE_PROBE_INTERVAL`), in µs.
const FRAME_WAIT_US: u64 = 500 * MS;
/// Retransmissions of a connection without an owner if the settings tell none.
const ORPHAN_RETRIES: u8 = 8;
/// Segments in flight below which a connection is thin, and its time-outs of one length (`TCP_THIN_LINEAR_RETRIES`).
const THIN_SEGMENTS: u32 = 4;
const THIN_LINEAR_RETRIES: u8 = 6;

/// Purpose of the timer that waits for the peer (`icsk_pending`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Waiting {
    Retransmit,
    LossProbe,
    Reorder,
    WindowProbe,
}

/// Lowest bits of a word, which tell the purpose.
const WAITING_BITS: u32 = 2;
const WAITING_MASK: u64 = (1 << WAITING_BITS) - 1;

/// Time at which a wait for the peer ends, in µs, and its purpose in the lowest bits; or none. One word instead of two.
#[derive(Clone, Copy, Default, Debug)]
struct PeerDeadline(Option<NonZeroU64>);

impl PeerDeadline {
    fn at(waiting: Waiting, us: u64) -> Self {
        Self(NonZeroU64::new(us.max(1) << WAITING_BITS | waiting as u64))
    }

    fn us(self) -> Option<u64> {
        self.0.map(|word| word.get() >> WAITING_BITS)
    }

    fn waiting(self) -> Option<Waiting> {
        self.0.map(|word| match word.get() & WAITING_MASK {
            0 => Waiting::Retransmit,
            1 => Waiting::LossProbe,
            2 => Waiting::Reorder,
            _ => Waiting::WindowProbe,
        })
    }
}

/// A time in µs, or none: half the size of an `Option<u64>`.
#[derive(Clone, Copy, Default, Debug)]
struct Deadline(Option<NonZeroU64>);

impl Deadline {
    fn at(us: u64) -> Self {
        Self(NonZeroU64::new(us.max(1)))
    }

    fn us(self) -> Option<u64> {
        self.0.map(NonZeroU64::get)
    }

    /// Clears the deadline, and returns true if it is over.
    fn take_if_over(&mut self, now_us: u64) -> bool {
        self.0.take_if(|at_us| at_us.get() <= now_us).is_some()
    }
}

/// Deadlines, in µs.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Timers {
    peer: PeerDeadline,
    delayed_ack: Deadline,
    pacing: Deadline,
    /// Keep-alive; of a connection without owner in FIN-WAIT-2, its end.
    keepalive: Deadline,
}

impl Timers {
    /// Earliest deadline.
    pub(super) fn next_us(&self) -> Option<u64> {
        let peer = self.peer.us();
        let others = [self.delayed_ack, self.pacing, self.keepalive];
        peer.into_iter().chain(others.into_iter().filter_map(Deadline::us)).min()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn set_retransmit(&mut self, at_us: u64) {
        self.peer = PeerDeadline::at(Waiting::Retransmit, at_us);
    }

    pub(super) fn set_loss_probe(&mut self, at_us: u64) {
        self.peer = PeerDeadline::at(Waiting::LossProbe, at_us);
    }

    pub(super) fn set_reorder(&mut self, at_us: u64) {
        self.peer = PeerDeadline::at(Waiting::Reorder, at_us);
    }

    pub(super) fn set_probe(&mut self, at_us: u64) {
        self.peer = PeerDeadline::at(Waiting::WindowProbe, at_us);
    }

    pub(super) fn clear_retransmit(&mut self) {
        self.peer = PeerDeadline::default();
    }

    pub(super) fn is_retransmit_idle(&self) -> bool {
        self.peer.0.is_none()
    }

    pub(super) fn is_loss_probe(&self) -> bool {
        self.peer.waiting() == Some(Waiting::LossProbe)
    }

    pub(super) fn is_reorder(&self) -> bool {
        self.peer.waiting() == Some(Waiting::Reorder)
    }

    pub(super) fn set_delayed_ack(&mut self, at_us: u64) {
        self.delayed_ack = Deadline::at(at_us);
    }

    pub(super) fn clear_delayed_ack(&mut self) {
        self.delayed_ack = Deadline::default();
    }

    pub(super) fn set_pacing(&mut self, at_us: u64) {
        self.pacing = Deadline::at(at_us);
    }

    pub(super) fn clear_pacing(&mut self) {
        self.pacing = Deadline::default();
    }

    pub(super) fn is_pacing(&self) -> bool {
        self.pacing.us().is_some()
    }

    pub(super) fn delayed_ack_us(&self) -> Option<u64> {
        self.delayed_ack.us()
    }

    /// Purpose of the timer that is due. One that only looks for losses stays armed, for
    /// `rearm_retransmit` to know.
    fn take_peer(&mut self, now_us: u64) -> Option<Waiting> {
        self.peer.us().filter(|at_us| *at_us <= now_us)?;
        let waiting = self.peer.waiting()?;
        if matches!(waiting, Waiting::Retransmit | Waiting::WindowProbe) {
            self.peer = PeerDeadline::default();
        }
        Some(waiting)
    }
}

impl Connection {
    /// Earliest deadline, in µs.
    pub(in crate::tcp) fn next_timer_us(&self) -> Option<u64> {
        self.timers.next_us()
    }

    /// Runs the timers that are due.
    pub(in crate::tcp) fn on_timer(&mut self, cx: &mut Context<'_>) {
        if self.timers.delayed_ack.take_if_over(cx.now_us) {
            self.on_delayed_ack_timer(cx);
        }
        match self.timers.take_peer(cx.now_us) {
            Some(Waiting::Retransmit) => self.on_retransmit_timer(cx),
            Some(Waiting::LossProbe) => self.on_loss_probe_timer(cx),
            Some(Waiting::Reorder) => self.on_reorder_timer(cx),
            Some(Waiting::WindowProbe) => self.on_probe_timer(cx),
            None => {}
        }
        if self.timers.pacing.take_if_over(cx.now_us) {
            self.on_pacing_timer(cx);
        }
        if self.timers.keepalive.take_if_over(cx.now_us) {
            self.on_keepalive_timer(cx);
        }
        self.release_if_idle(cx.now_us);
    }

    /// Arms the retransmission timer for what is in flight (`tcp_rearm_rto`).
    pub(super) fn rearm_retransmit(&mut self, now_us: u64) {
        if self.awaits_ack() {
            // The timer is that of the SYN-ACK.
            return;
        }
        let Some(first) = self.sent.first() else { return self.timers.clear_retransmit() };
        let mut at_us = now_us + self.rtt.rto_us();
        if self.timers.is_reorder() || self.timers.is_loss_probe() {
            at_us = (first.sent_us + self.rtt.rto_us()).max(now_us + 1);
        }
        self.timers.set_retransmit(at_us);
    }

    /// After an ACK that moved something (`tcp_set_xmit_timer`).
    pub(super) fn set_transmit_timer(&mut self, cx: &Context<'_>) {
        if !self.schedule_loss_probe(true, cx) && !self.awaits_ack() {
            self.timers.clear_retransmit();
            self.rearm_retransmit(cx.now_us);
        }
    }

    /// `tcp_retransmit_timer`.
    pub(super) fn on_retransmit_timer(&mut self, cx: &mut Context<'_>) {
        if self.awaits_ack() {
            return self.on_answer_timer(cx);
        }
        if self.sent.is_empty() {
            return;
        }
        let is_opening = matches!(self.state, State::SynSent | State::SynReceived);
        if self.send.window == 0 && !self.is_orphan && !is_opening {
            return self.on_shrunk_window(cx);
        }
        cx.counters.timeouts.add(1);
        let is_over = self.has_timed_out(cx);
        self.detect_black_hole(is_over, cx);
        if is_over {
            return self.give_up(cx);
        }
        if is_opening {
            self.recovery.syn_timeouts = self.recovery.syn_timeouts.saturating_add(1);
            self.cwr_is_due = self.agreed.ecn;
        } else {
            let is_narrower = self.suspect_black_hole(cx);
            self.enter_loss(cx);
            if is_narrower {
                let room = self.segment_room();
                self.sent.split_all(room);
            }
        }
        self.count_timeout(cx.now_us);
        self.retransmit(0, Cause::Timeout, cx);
        self.set_next_timeout(cx);
    }

    /// Sets the timer anew after a time-out, for twice as long unless that stays as it is.
    fn set_next_timeout(&mut self, cx: &Context<'_>) {
        let is_linear = self.state == State::SynSent
            && self.recovery.syn_timeouts <= cx.config.syn_linear_timeouts;
        if self.is_thin() {
            self.recovery.backoff = 0;
            self.rtt.set_backoff(0);
        } else if !is_linear {
            self.back_off();
        }
        let at_us = cx.now_us + self.clamp_to_user_timeout(self.rtt.rto_us(), cx.now_us);
        self.timers.set_retransmit(at_us);
    }

    /// True if the time-out stays as it is: so few segments are in flight that their loss is found by time-outs only, and the
    /// option says so (`tcp_stream_is_thin`).
    fn is_thin(&self) -> bool {
        self.options.rare.thin_linear_timeouts
            && self.state == State::Established
            && self.sent.len() < THIN_SEGMENTS
            && self.congestion.ssthresh < u32::MAX
            && self.recovery.retransmits <= THIN_LINEAR_RETRIES
    }

    /// The window shrank to nothing with data in flight: the head is tried on.
    fn on_shrunk_window(&mut self, cx: &mut Context<'_>) {
        if self.is_shrunk_too_long(cx.now_us) {
            return self.give_up(cx);
        }
        self.enter_loss(cx);
        self.retransmit(0, Cause::Timeout, cx);
        self.set_next_timeout(cx);
    }

    /// Doubles the time-out.
    fn back_off(&mut self) {
        self.recovery.backoff = self.recovery.backoff.saturating_add(1);
        self.rtt.back_off();
    }

    /// `tcp_rtx_probe0_timed_out`: the peer is silent, or the user does not want its answers to count.
    fn is_shrunk_too_long(&self, now_us: u64) -> bool {
        let since_us = match self.recovery.repair.retransmit_stamp_us {
            0 => self.sent.first().map_or(now_us, |sent| sent.sent_us),
            stamp_us => stamp_us,
        };
        let (tried_us, silent_us) =
            (now_us.saturating_sub(since_us), now_us.saturating_sub(self.receive.last_us));
        match self.options.rare.user_timeout_us {
            0 => tried_us.min(silent_us) > 2 * self.rtt.max_us(),
            user_us => tried_us >= user_us,
        }
    }

    /// `tcp_write_timeout`.
    fn has_timed_out(&mut self, cx: &Context<'_>) -> bool {
        let retransmits = self.recovery.retransmits;
        let is_opening = matches!(self.state, State::SynSent | State::SynReceived);
        let (limit, base_us) = if is_opening {
            (
                self.options.rare.syn_retries.map_or(cx.config.syn_retries, NonZeroU8::get),
                RTO_INITIAL_US,
            )
        } else if self.is_orphan {
            let is_alive = self.rtt.rto_us() < self.rtt.max_us();
            (self.orphan_retries(is_alive, cx), RTO_MIN_US)
        } else {
            (cx.config.retries2, RTO_MIN_US)
        };
        let linear = if self.state == State::SynSent { cx.config.syn_linear_timeouts } else { 0 };
        if is_opening && retransmits >= limit.saturating_add(linear) {
            return true;
        }
        let timeout_us = match self.options.rare.user_timeout_us {
            0 => retransmission_time_us(limit, base_us, self.rtt.max_us()),
            timeout_us => timeout_us,
        };
        let since_us = self.recovery.repair.retransmit_stamp_us;
        retransmits > 0 && since_us > 0 && cx.now_us.saturating_sub(since_us) >= timeout_us
    }

    /// Retransmissions or probes of a connection without an owner. Once its time-outs are of the
    /// highest length, these are those of the settings, and none if a router told of an error
    /// (`tcp_orphan_retries`).
    fn orphan_retries(&self, is_alive: bool, cx: &Context<'_>) -> u8 {
        match cx.config.orphan_retries {
            0 if is_alive => ORPHAN_RETRIES,
            _ if !is_alive && self.soft_error.is_some() => 0,
            retries => retries,
        }
    }

    /// Shortens a time-out that would overrun the user's (`tcp_clamp_rto_to_user_timeout`).
    fn clamp_to_user_timeout(&self, timeout_us: u64, now_us: u64) -> u64 {
        let since_us = self.recovery.repair.retransmit_stamp_us;
        if self.options.rare.user_timeout_us == 0 || since_us == 0 {
            return timeout_us;
        }
        let left_us = (since_us + self.options.rare.user_timeout_us).saturating_sub(now_us);
        timeout_us.min(left_us.max(1))
    }

    /// The peer does not answer (`tcp_write_err`).
    pub(super) fn give_up(&mut self, cx: &mut Context<'_>) {
        cx.counters.abort_on_timeout.add(1);
        let error = self.soft_error.take().unwrap_or(TcpError::TimedOut);
        self.fail(error, cx);
    }

    /// Interval of window probes, with backoff, in µs (`tcp_probe0_when`).
    fn probe_interval_us(&self) -> u64 {
        self.rtt.backed_off_us(self.recovery.backoff).max(RTO_MIN_US)
    }

    /// `tcp_probe_timer`.
    fn on_probe_timer(&mut self, cx: &mut Context<'_>) {
        let has_data = self.unsent_bytes() > 0 || self.has_unsent_fin();
        if !self.sent.is_empty() || !has_data {
            (self.recovery.probes_out, self.recovery.probing_since_ms) = (0, 0);
            return;
        }
        if self.recovery.probing_since_ms == 0 {
            self.recovery.probing_since_ms = stamp_ms(cx.now_us).max(1);
        }
        // From the first probe on, whatever the peer answers.
        let user_us = self.options.rare.user_timeout_us;
        let is_over = user_us > 0 && self.probing_us(cx.now_us) >= user_us;
        let is_alive = self.probe_interval_us() < self.rtt.max_us();
        let limit =
            if self.is_orphan { self.orphan_retries(is_alive, cx) } else { cx.config.retries2 };
        // Answers do not keep an orphan alive for ever: its peer may never open the window.
        let is_stale = self.is_orphan && !is_alive && self.recovery.backoff >= limit;
        if is_over || is_stale || self.recovery.probes_out >= limit {
            return self.give_up(cx);
        }
        let was_sent = self.send_window_probe(cx);
        if !self.sent.is_empty() {
            (self.recovery.probes_out, self.recovery.backoff) = (0, 0);
            self.recovery.probing_since_ms = 0;
            return;
        }
        if !was_sent {
            // Soon again, and uncounted: the peer was not asked.
            return self.arm_probe_in(FRAME_WAIT_US, cx.now_us);
        }
        self.recovery.probes_out = self.recovery.probes_out.saturating_add(1);
        self.recovery.backoff = self.recovery.backoff.saturating_add(1).min(cx.config.retries2);
        self.arm_probe(cx.now_us);
    }

    /// Time since probing began, in µs, as exact as the kernel tells it.
    fn probing_us(&self, now_us: u64) -> u64 {
        u64::from(ms_since(self.recovery.probing_since_ms, now_us)) * MS
    }

    pub(super) fn arm_probe(&mut self, now_us: u64) {
        self.arm_probe_in(self.probe_interval_us(), now_us);
    }

    /// Arms the next probe, not later than the user's time-out (`tcp_clamp_probe0_to_user_timeout`).
    fn arm_probe_in(&mut self, mut wait_us: u64, now_us: u64) {
        let user_us = self.options.rare.user_timeout_us;
        if user_us > 0 && self.recovery.probing_since_ms > 0 {
            let left_us = user_us.saturating_sub(self.probing_us(now_us));
            wait_us = wait_us.min(left_us.max(TIMEOUT_MIN_US));
        }
        self.timers.set_probe(now_us + wait_us);
    }

    /// Counts the idle time from a moment on.
    pub(super) fn arm_keepalive(&mut self, from_us: u64) {
        self.timers.keepalive = match self.options.keepalive {
            true => Deadline::at(from_us + self.options.rare.keepalive_idle_us),
            false => Deadline::default(),
        };
    }

    /// A connection without owner in FIN-WAIT-2 ends at a time.
    pub(super) fn set_end(&mut self, at_us: u64) {
        self.timers.keepalive = Deadline::at(at_us);
    }

    /// `tcp_keepalive_timer`.
    fn on_keepalive_timer(&mut self, cx: &mut Context<'_>) {
        if self.state == State::FinWait2 && self.is_orphan {
            return self.end_wait_without_owner(cx);
        }
        if !self.options.keepalive || matches!(self.state, State::Closed | State::SynSent) {
            return;
        }
        if !self.sent.is_empty() || self.unsent_bytes() > 0 {
            self.timers.keepalive = Deadline::at(cx.now_us + self.options.rare.keepalive_idle_us);
            return;
        }
        let last_us = self.receive.last_us.max(self.send.last_data_us);
        let idle_us = cx.now_us.saturating_sub(last_us);
        if idle_us < self.options.rare.keepalive_idle_us {
            self.timers.keepalive = Deadline::at(last_us + self.options.rare.keepalive_idle_us);
            return;
        }
        let user_us = self.options.rare.user_timeout_us;
        let probes_out = self.recovery.probes_out;
        let is_over = if user_us > 0 {
            probes_out > 0 && idle_us >= user_us
        } else {
            probes_out >= self.options.rare.keepalive_probes
        };
        if is_over {
            self.send_reset(cx);
            return self.give_up(cx);
        }
        cx.counters.keepalive.add(1);
        self.send_empty(self.send.una - 1, cx);
        self.recovery.probes_out = probes_out.saturating_add(1);
        self.timers.keepalive = Deadline::at(cx.now_us + self.options.rare.keepalive_interval_us);
    }
}

/// Time that a number of retransmissions takes from a time-out on (`tcp_model_timeout`), in µs.
pub(super) fn retransmission_time_us(retransmissions: u8, base_us: u64, max_us: u64) -> u64 {
    let doublings = (max_us / base_us).max(1).ilog2();
    let count = u32::from(retransmissions);
    if count <= doublings {
        ((2 << count) - 1) * base_us
    } else {
        ((2 << doublings) - 1) * base_us + u64::from(count - doublings) * max_us
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::config::RTO_MAX_US;
    use super::*;

    #[test]
    fn tcp_9_fifteen_retransmissions_take_924_s() {
        assert_eq!(retransmission_time_us(15, RTO_MIN_US, RTO_MAX_US), 924_600_000);
        assert_eq!(retransmission_time_us(0, RTO_MIN_US, RTO_MAX_US), RTO_MIN_US);
        assert_eq!(retransmission_time_us(6, RTO_INITIAL_US, RTO_MAX_US), 127_000_000);
    }
}
