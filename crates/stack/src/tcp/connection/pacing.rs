//! Pacing: segments are spread over the round trip, so that a bunch of ACKs is not answered by a burst
//! that a short queue of the path cannot take (`sk_pacing_rate`, `tcp_internal_pacing`).

use super::super::config::{INITIAL_CWND, MS, SECOND};
use super::{Connection, Context};

/// Time at the pacing rate that may be sent ahead, in µs: a tick of the timers, and what the kernel
/// gives a packet (`sk_pacing_shift`).
const AHEAD_US: u64 = MS;
/// Nanoseconds of a microsecond.
const US: u64 = 1_000;

impl Connection {
    /// Rate of the connection in bytes per second: the window in a round trip, and twice that in slow
    /// start, which doubles the window; else a fifth more, as the window may grow
    /// (`tcp_update_pacing_rate`). `None` before the first round trip is known.
    pub(super) fn pacing_rate(&self) -> Option<u64> {
        let srtt_us = self.rtt.smoothed_us()?;
        let congestion = &self.congestion;
        let ratio = if congestion.cwnd < congestion.ssthresh / 2 { 200 } else { 120 };
        let window = congestion.cwnd.max(self.sent.len());
        let window_bytes = u64::from(window) * u64::from(self.send.mss);
        Some(window_bytes * ratio / 100 * SECOND / srtt_us)
    }

    /// Counts a transmission. As many segments as an initial window has (RFC 6928) may be sent at once if
    /// nothing is in flight before: short answers do not wait.
    pub(super) fn note_paced(&mut self, len_bytes: u32, cx: &Context<'_>) {
        let in_flight = self.send.next - self.send.una;
        if in_flight <= len_bytes {
            self.send.burst = self.send.una;
        }
        if !cx.config.pacing || self.send.next - self.send.burst <= INITIAL_CWND * self.send.mss {
            return;
        }
        let Some(rate) = self.pacing_rate() else { return };
        let lasts_ns = u64::from(len_bytes) * SECOND * US / rate.max(1);
        // Late timers are made up for (`tcp_update_skb_after_send`).
        let start_ns = self.send.paced_ns.max(cx.now_us * US);
        let late_ns = start_ns - self.send.paced_ns;
        self.send.paced_ns = start_ns + lasts_ns - late_ns.min(lasts_ns / 2);
    }

    /// True if nothing may be sent now: what was sent takes longer than is allowed ahead. Sending goes
    /// on by a timer (`tcp_pacing_check`).
    pub(super) fn waits_for_pace(&mut self, cx: &Context<'_>) -> bool {
        let may_send_us = (self.send.paced_ns / US).saturating_sub(AHEAD_US);
        if may_send_us <= cx.now_us {
            self.timers.clear_pacing();
            return false;
        }
        self.timers.set_pacing(may_send_us);
        true
    }

    /// The pacing timer fired.
    pub(super) fn on_pacing_timer(&mut self, cx: &mut Context<'_>) {
        self.resend_lost(cx);
        self.send_queued(cx);
    }
}
