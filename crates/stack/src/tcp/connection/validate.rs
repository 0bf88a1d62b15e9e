//! Checks of a segment before anything of it is believed (`tcp_validate_incoming`; RFC 9293, section
//! 3.10.7.4; RFC 7323, section 5; RFC 5961).

use super::super::config::PAWS_IDLE_US;
use super::super::error::TcpError;
use super::super::seq::Seq;
use super::super::wire::{Flags, Segment};
use super::fast_open::Opening;
use super::{Connection, Context, State};
use crate::counter::StackCounter;

/// Outcome of the checks.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Validation {
    Continue,
    Discard,
}

impl Connection {
    pub(super) fn validate(&mut self, segment: &Segment, cx: &mut Context<'_>) -> Validation {
        if self.is_old_by_timestamp(segment, cx.now_us) && !segment.has(Flags::RST) {
            if segment.has(Flags::SYN) {
                return self.challenge_syn(cx);
            }
            if is_pure_ack(segment) && segment.seq.is_before(self.receive.next) {
                // An ACK that was overtaken tells nothing.
                return Validation::Discard;
            }
            let counters = cx.counters;
            counters.paws_estab.add(1);
            self.answer_invalid(segment, &counters.ack_skipped_paws, cx);
            return Validation::Discard;
        }
        if !self.is_acceptable(segment, cx) {
            if segment.has(Flags::RST) {
                // RFC 9293: a reset after our FIN's ACK may be one number early.
                if self.is_reset_after_fin(segment) {
                    self.reset(cx);
                }
            } else if segment.has(Flags::SYN) {
                return self.challenge_syn(cx);
            } else {
                let counters = cx.counters;
                self.answer_invalid(segment, &counters.ack_skipped_seq, cx);
            }
            return Validation::Discard;
        }
        if segment.has(Flags::RST) {
            if self.is_reset_exact(segment) {
                self.reset(cx);
            } else {
                self.challenge(cx);
            }
            return Validation::Discard;
        }
        if segment.has(Flags::SYN) && !self.is_crossed_syn_ack(segment) {
            return self.challenge_syn(cx);
        }
        Validation::Continue
    }

    /// PAWS: the timestamp is older than the last one (`tcp_paws_discard`).
    fn is_old_by_timestamp(&self, segment: &Segment, now_us: u64) -> bool {
        let Some(stamps) = segment.options.timestamps.filter(|_| self.agreed.timestamps) else {
            return false;
        };
        let behind = self.receive.timestamp.wrapping_sub(stamps.value).cast_signed();
        if behind <= 1
            || self.receive.timestamp == 0
            || now_us.saturating_sub(self.receive.timestamp_us) > PAWS_IDLE_US
        {
            return false;
        }
        !self.is_reordered_ack(segment, behind)
    }

    /// A pure duplicate ACK that was overtaken (`tcp_disordered_ack`).
    fn is_reordered_ack(&self, segment: &Segment, behind: i32) -> bool {
        // Of a clock of up to 1200 Hz.
        let replayed = self.rtt.rto_us() * 1200 / 1_000_000;
        is_pure_ack(segment)
            && segment.seq == self.receive.next
            && segment.ack == self.send.una
            && !self.may_update_window(segment)
            && i64::from(behind) <= i64::try_from(replayed).unwrap_or(0)
    }

    /// True if a part of the segment is in the window (`tcp_sequence`).
    fn is_acceptable(&self, segment: &Segment, cx: &Context<'_>) -> bool {
        let window_end = self.receive.next + self.usable_window();
        if segment.end().is_before(self.receive.acked) {
            return false;
        }
        // A FIN may follow the last byte of the window.
        let data_end = segment.end() - u32::from(segment.has(Flags::FIN));
        if data_end.is_after(window_end) {
            if segment.seq.is_after(window_end) {
                return false;
            }
            // More than was announced is taken by an empty queue only.
            if self.receive.queue.len_bytes() > 0 {
                cx.counters.beyond_window.add(1);
                return false;
            }
        }
        true
    }

    /// Rest of the window that was announced last (`tcp_receive_window`).
    pub(super) fn usable_window(&self) -> u32 {
        (self.receive.acked + self.receive.window).bytes_since(self.receive.next)
    }

    fn is_reset_after_fin(&self, segment: &Segment) -> bool {
        segment.seq == self.receive.next - 1
            && matches!(self.state, State::CloseWait | State::LastAck | State::Closing)
    }

    /// RFC 5961, section 3.2: the exact next number, or that behind the last block of a gap.
    fn is_reset_exact(&self, segment: &Segment) -> bool {
        segment.seq == self.receive.next
            || self.is_reset_after_fin(segment)
            || self.agreed.sack
                && self.receive.sacks.highest().is_some_and(|end| end == segment.seq)
    }

    /// The SYN-ACK of a simultaneous open. A listener's connection gets none.
    fn is_crossed_syn_ack(&self, segment: &Segment) -> bool {
        self.state == State::SynReceived
            && self.opening.has(Opening::CONNECTING)
            && segment.has(Flags::ACK)
            && segment.seq + 1 == segment.end()
            && segment.seq + 1 == self.receive.next
            && segment.ack == self.send.next
    }

    /// The peer reset the connection (`tcp_reset`).
    pub(super) fn reset(&mut self, cx: &mut Context<'_>) {
        let error = match self.state {
            State::SynSent => TcpError::Refused,
            State::CloseWait => TcpError::BrokenPipe,
            _ => TcpError::Reset,
        };
        self.fail(error, cx);
    }

    fn challenge_syn(&mut self, cx: &mut Context<'_>) -> Validation {
        cx.counters.syn_challenge.add(1);
        self.challenge(cx);
        Validation::Discard
    }

    /// Challenge ACK (RFC 5961). Each connection has a limit of its own, so that none tells about
    /// another.
    pub(super) fn challenge(&mut self, cx: &mut Context<'_>) {
        if self.may_answer_invalid(cx) {
            cx.counters.challenge_ack.add(1);
            self.send_ack(cx);
        } else {
            cx.counters.challenge_ack_skipped.add(1);
        }
    }

    /// ACK of a segment outside of the window, with a D-SACK of what came twice (`tcp_send_dupack`).
    /// `skipped` counts those that the rate limit forbids.
    fn answer_invalid(&mut self, segment: &Segment, skipped: &StackCounter, cx: &mut Context<'_>) {
        if !segment.carries_data() && !self.may_answer_invalid(cx) {
            return skipped.add(1);
        }
        if segment.len() > 0 && segment.seq.is_before(self.receive.next) {
            cx.counters.delayed_ack_lost.add(1);
            self.delayed.enter_quick(self.receive.window);
            if self.agreed.sack {
                let end = segment.end().earlier(self.receive.next);
                self.report_duplicate(segment.seq, end, cx);
            }
        }
        self.send_ack(cx);
    }

    pub(super) fn may_answer_invalid(&mut self, cx: &Context<'_>) -> bool {
        self.invalid_limit.admits(cx.now_us, cx.config.invalid_ratelimit_us)
    }

    /// Reports bytes that were received before (D-SACK, RFC 2883).
    pub(super) fn report_duplicate(&mut self, start: Seq, end: Seq, cx: &Context<'_>) {
        if self.agreed.sack && cx.config.dsack && end.is_after(start) {
            if start.is_before(self.receive.next) {
                cx.counters.dsack_old_sent.add(1);
            } else {
                cx.counters.dsack_ofo_sent.add(1);
            }
            self.receive.sacks.note_duplicate((start, end));
        }
    }

    /// Remembers the timestamp to be echoed (RFC 7323, section 4.3). A peer whose SYN had 0 may go on with any
    /// (`tcp_paws_check`).
    pub(super) fn note_timestamp(&mut self, segment: &Segment, now_us: u64) {
        if let Some(stamps) = segment.options.timestamps.filter(|_| self.agreed.timestamps)
            && !segment.seq.is_after(self.receive.acked)
            && (self.receive.timestamp.wrapping_sub(stamps.value).cast_signed() <= 0
                || self.receive.timestamp == 0
                || now_us.saturating_sub(self.receive.timestamp_us) > PAWS_IDLE_US)
        {
            (self.receive.timestamp, self.receive.timestamp_us) = (stamps.value, now_us);
        }
    }
}

fn is_pure_ack(segment: &Segment) -> bool {
    segment.has(Flags::ACK) && segment.len() == 0
}
