//! Acknowledgements: what they acknowledge, the round trip, the peer's window (`tcp_ack`).

use super::super::seq::Seq;
use super::super::wire::{Flags, Segment};
use super::busy_time::Sending;
use super::rate::RateSample;
use super::{Connection, Context, State};

/// Outcome of an ACK.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Acknowledged {
    Yes,
    /// Far too old: answered by a challenge, if by anything.
    Discard,
    /// Of bytes that were not sent.
    Unsent,
}

/// Facts that one ACK revealed (the `FLAG_*` of the kernel).
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct AckFacts {
    /// The segment carries data, or enlarges the window: no duplicate ACK.
    pub(super) is_not_duplicate: bool,
    /// The oldest unacknowledged number advanced (`FLAG_SND_UNA_ADVANCED`).
    pub(super) una_advanced: bool,
    /// A segment was acknowledged whole (`FLAG_ACKED`).
    pub(super) acked: bool,
    /// Data were acknowledged, SYN aside (`FLAG_DATA_ACKED`).
    pub(super) data_acked: bool,
    /// Data that had been sent again were acknowledged (`FLAG_RETRANS_DATA_ACKED`).
    pub(super) retransmitted_acked: bool,
    /// Data below the recovery point that were sent once were delivered (`FLAG_ORIG_SACK_ACKED`).
    pub(super) original_acked: bool,
    /// A block acknowledged something new (`FLAG_DATA_SACKED`).
    pub(super) data_sacked: bool,
    /// A block told of a duplicate (`FLAG_DSACKING_ACK`).
    pub(super) duplicate_sacked: bool,
    /// The loss probe was such a duplicate (`FLAG_DSACK_TLP`).
    pub(super) probe_duplicated: bool,
    /// The peer saw a mark of congestion (`FLAG_ECE`).
    pub(super) ece: bool,
    /// The retransmission timer starts anew (`FLAG_SET_XMIT_TIMER`).
    pub(super) sets_timer: bool,
    /// Segments delivered, cumulatively or selectively.
    pub(super) delivered: u32,
    /// The peer threw away what it had acknowledged selectively, which is not over: it is delivered twice, and no sample.
    pub(super) is_reneging: bool,
    /// Sample of their rate.
    pub(super) rate: RateSample,
    /// Segments found lost.
    pub(super) lost: u32,
    /// One of them had been sent again (`FLAG_LOST_RETRANS`).
    pub(super) retransmission_lost: bool,
    /// Times of the first and of the last delivered segment that was sent once, in µs.
    pub(super) first_sent_us: Option<u64>,
    pub(super) last_sent_us: Option<u64>,
    /// Times of the first and of the last segment acknowledged selectively that was sent once, in µs.
    pub(super) first_sacked_us: Option<u64>,
    pub(super) last_sacked_us: Option<u64>,
    /// Lowest number delivered out of order.
    pub(super) reordered: Option<Seq>,
    /// Duplicate ACKs that the segment stands for.
    pub(super) duplicates: u32,
    /// Timestamp of ours that the segment echoes.
    pub(super) echo: Option<u32>,
}

impl Connection {
    pub(super) fn acknowledge(&mut self, segment: &Segment, cx: &mut Context<'_>) -> Acknowledged {
        let prior_una = self.send.una;
        if segment.ack.is_before(prior_una) {
            return self.acknowledge_old(segment, cx);
        }
        if segment.ack.is_after(self.send.next) {
            if self.state != State::SynReceived {
                self.challenge(cx);
            }
            return Acknowledged::Unsent;
        }
        self.note_timestamp(segment, cx.now_us);
        let mut facts = AckFacts {
            una_advanced: segment.ack.is_after(prior_una),
            is_not_duplicate: segment.payload_len > 0 || segment.has(Flags::FIN),
            ece: self.agreed.ecn && segment.has(Flags::ECE),
            is_reneging: self.recovery.is_reneging(),
            echo: segment
                .options
                .timestamps
                .filter(|stamps| self.agreed.timestamps && stamps.echo != 0)
                .map(|stamps| stamps.echo),
            ..AckFacts::default()
        };
        if facts.una_advanced {
            self.recovery.retransmits = 0;
        }
        facts.is_not_duplicate |= self.update_window(segment, cx);
        let prior_highest = self.highest_sacked();
        if self.agreed.sack && !segment.options.sacks.is_empty() {
            self.take_sacks(segment, prior_una, &mut facts, cx);
        }
        self.note_reduction(segment);
        // Something gets through: what a router said is over.
        (self.soft_error, self.recovery.probes_out) = (None, 0);
        if self.sent.is_empty() {
            self.send.una = segment.ack;
            self.finish_idle_ack(prior_una, &mut facts, cx);
            return Acknowledged::Yes;
        }
        self.clean(segment.ack, prior_highest, &mut facts, cx);
        self.sample_round_trip(segment, prior_una, &mut facts, cx.now_us);
        self.note_reordering(facts.reordered.take());
        self.finish_ack(segment, prior_una, &mut facts, cx);
        Acknowledged::Yes
    }

    /// With nothing in flight, a duplicate that the peer tells of may still undo a reduction, and an ACK ends
    /// the loss probe.
    fn finish_idle_ack(&mut self, prior_una: Seq, facts: &mut AckFacts, cx: &mut Context<'_>) {
        if facts.duplicate_sacked {
            self.count_delivered(facts);
            // Ignored: nothing could be sent again.
            let _ = self.recover(prior_una, facts, cx);
        }
        self.acknowledge_probe(cx.now_us);
        self.end_loss_probe(self.send.una, facts, cx);
    }

    /// Loss recovery and the window's growth, after the scoreboard is up to date.
    fn finish_ack(
        &mut self,
        segment: &Segment,
        prior_una: Seq,
        facts: &mut AckFacts,
        cx: &mut Context<'_>,
    ) {
        self.end_loss_probe(segment.ack, facts, cx);
        let is_news = facts.una_advanced || facts.is_not_duplicate;
        if !is_news && !facts.duplicate_sacked {
            facts.duplicates = 1;
        }
        let is_dubious = !(facts.is_not_duplicate || facts.una_advanced)
            || facts.data_sacked
            || facts.duplicate_sacked
            || facts.ece
            || !self.recovery.is_open();
        let resend = if is_dubious {
            self.recover(prior_una, facts, cx)
        } else {
            super::recovery::Resend::Nothing
        };
        if facts.sets_timer {
            self.set_transmit_timer(cx);
        }
        self.control_window(facts, cx);
        self.resend(resend, cx);
    }

    /// Counts what an ACK told to be delivered (`tcp_count_delivered`).
    pub(super) fn count_delivered(&mut self, facts: &AckFacts) {
        let tally = &mut self.tally;
        tally.delivered = tally.delivered.wrapping_add(facts.delivered);
        if facts.ece {
            tally.delivered_ce = tally.delivered_ce.wrapping_add(facts.delivered);
        }
    }

    /// An ACK of what was acknowledged before: only its blocks may be news.
    fn acknowledge_old(&mut self, segment: &Segment, cx: &mut Context<'_>) -> Acknowledged {
        let prior_una = self.send.una;
        if self.is_predicted_ack(segment) {
            // As the kernel, whose fast path takes the timestamp before it looks at the number.
            self.note_timestamp(segment, cx.now_us);
        }
        if self.is_too_old(segment.ack) {
            if self.state != State::SynReceived {
                self.challenge(cx);
            }
            return Acknowledged::Discard;
        }
        if self.agreed.sack && !segment.options.sacks.is_empty() {
            let mut facts = AckFacts::default();
            self.take_sacks(segment, prior_una, &mut facts, cx);
            self.count_delivered(&facts);
            let resend = self.recover(prior_una, &mut facts, cx);
            self.resend(resend, cx);
        }
        Acknowledged::Yes
    }

    /// RFC 5961, section 5.2; and no byte before the first one was ever sent.
    pub(super) fn is_too_old(&self, ack: Seq) -> bool {
        let acked = u32::try_from(self.tally.bytes_acked).unwrap_or(u32::MAX);
        ack.is_before(self.send.una - self.send.max_window.min(acked))
    }

    pub(super) fn scaled_window(&self, segment: &Segment) -> u32 {
        let scale = if segment.has(Flags::SYN) { 0 } else { self.agreed.send_scale() };
        u32::from(segment.window) << scale
    }

    /// True if no later segment told the peer's window (`tcp_may_update_window`).
    pub(super) fn may_update_window(&self, segment: &Segment) -> bool {
        let (window, send) = (self.scaled_window(segment), &self.send);
        segment.ack.is_after(send.una)
            || segment.seq.is_after(send.window_seq)
            || segment.seq == send.window_seq && (window > send.window || window == 0)
    }

    /// Takes the peer's window, unless a later segment told it (RFC 9293, section 3.10.7.4).
    /// Returns true if this was an update.
    fn update_window(&mut self, segment: &Segment, cx: &Context<'_>) -> bool {
        if !self.may_update_window(segment) {
            return false;
        }
        let window = self.scaled_window(segment);
        let send = &mut self.send;
        send.window_seq = segment.seq;
        if window == send.window {
            // As the kernel: the first ACK behind data of the peer is not a duplicate (RFC 5681, section 2).
            return true;
        }
        send.window = window;
        if window > send.max_window {
            send.max_window = window;
            self.set_mss(cx.config);
        }
        if self.unsent_bytes() > 0 {
            self.restart_after_idle(cx);
        }
        true
    }

    /// Removes what was acknowledged (`tcp_clean_rtx_queue`). `prior_highest` is the end of what was
    /// acknowledged selectively before.
    fn clean(
        &mut self,
        ack: Seq,
        prior_highest: Option<Seq>,
        facts: &mut AckFacts,
        cx: &Context<'_>,
    ) {
        while let Some(first) = self.sent.first() {
            if first.end.is_after(ack) {
                break;
            }
            let Some(sent) = self.sent.pop() else { break };
            if sent.marks.ever_retransmitted {
                facts.retransmitted_acked = true;
            } else if !sent.marks.sacked {
                facts.last_sent_us = Some(sent.sent_us);
                facts.first_sent_us.get_or_insert(sent.sent_us);
                if prior_highest.is_some_and(|highest| sent.seq.is_before(highest)) {
                    // A hole that was filled by what was sent once.
                    facts.note_reordered(sent.seq);
                }
                if !sent.end.is_after(self.recovery.high_seq) {
                    facts.original_acked = true;
                }
            }
            if !sent.marks.sacked {
                facts.delivered += 1;
                self.sent.clock.note_delivered(&sent, &mut facts.rate);
                if !self.is_echo_of_earlier(&sent, facts) {
                    self.advance_rack(&sent, cx.now_us);
                }
            }
            facts.acked = true;
            facts.data_acked |= !sent.marks.is_syn;
            facts.sets_timer = true;
        }
        self.sent.trim(ack);
        if self.sent.is_empty() {
            self.recovery.repair.known_blocks = None;
            self.end_sending(Sending::Busy, cx.now_us);
        }
        if !facts.una_advanced {
            return;
        }
        self.send.una = ack;
        self.send.queue.acknowledge(ack);
        self.report_acknowledged(ack, cx.now_us);
        if self.send.search.is_some() {
            self.acknowledge_mtu_probe(ack, cx);
        }
        if self.send.urgent.is_some_and(|urgent| !urgent.is_after(ack)) {
            self.send.urgent = None;
        }
        if !self.agreed.sack {
            self.uncount_dup_acks(facts);
        }
    }

    /// `tcp_ack_update_rtt`: Karn's rule, then timestamps. The first segment that the ACK covers counts for the
    /// time-out, the last one for the path: it waited least for its ACK.
    fn sample_round_trip(
        &mut self,
        segment: &Segment,
        prior_una: Seq,
        facts: &mut AckFacts,
        now_us: u64,
    ) {
        let since = |sent_us: u64| now_us.saturating_sub(sent_us);
        let is_once = !facts.retransmitted_acked;
        let by_ack = facts.first_sent_us.filter(|_| is_once).map(since);
        let by_sack = facts.first_sacked_us.map(since);
        if !facts.data_acked && by_sack.is_some() {
            // The timer starts anew only if the head was sent before what was just acknowledged.
            let head = self.sent.first().map(|sent| since(sent.sent_us));
            facts.sets_timer |= by_sack > head;
        }
        let by_echo = || facts.acked.then(|| self.echo_sample(segment, now_us)).flatten();
        if let Some(sample_us) = by_ack.or(by_sack).or_else(by_echo) {
            let is_new_round = self.send.una.is_after(self.recovery.round_end);
            if is_new_round {
                self.recovery.round_end = self.send.next;
            }
            let last_us = facts.last_sacked_us.or(facts.last_sent_us.filter(|_| is_once));
            let last_us = last_us.map_or(sample_us, since);
            let is_smallest = self.rtt.min_us().is_none_or(|min_us| last_us <= min_us);
            if is_smallest || !self.is_delayed(prior_una, facts) {
                self.rtt.note_smallest(last_us, now_us);
            }
            self.rtt.estimate(sample_us, is_new_round);
            self.congestion.sample_round_trip(last_us, is_new_round, now_us);
            self.recovery.backoff = 0;
        }
    }

    /// True if the peer may have delayed the ACK: it is of one small segment, beside which nothing was in
    /// flight (`FLAG_ACK_MAYBE_DELAYED`).
    fn is_delayed(&self, prior_una: Seq, facts: &AckFacts) -> bool {
        let has_alert = facts.data_sacked || facts.duplicate_sacked || facts.ece;
        let is_small = self.send.una - prior_una < self.send.mss;
        facts.delivered == 1 && !has_alert && is_small && prior_una == self.send.burst
    }

    /// Takes a round trip from the echo of a SYN-ACK, if there is none (`tcp_synack_rtt_meas`).
    pub(super) fn sample_answer(&mut self, segment: &Segment, now_us: u64) {
        if self.rtt.smoothed_us().is_none()
            && let Some(sample_us) = self.echo_sample(segment, now_us)
        {
            self.rtt.add(sample_us, now_us, true);
        }
    }

    /// Round trip by the echo of our timestamp, in µs.
    pub(super) fn echo_sample(&self, segment: &Segment, now_us: u64) -> Option<u64> {
        let stamps = segment.options.timestamps.filter(|_| self.agreed.timestamps)?;
        let age_ms = self.timestamp(now_us).wrapping_sub(stamps.echo);
        // An echo of nothing, or of the future.
        let is_sane = stamps.echo != 0 && age_ms < 1 << 24;
        is_sane.then(|| u64::from(age_ms).max(1) * 1000)
    }

    /// An ACK with nothing in flight: the probe timer follows the window, until that takes the whole first packet
    /// (`tcp_ack_probe`).
    fn acknowledge_probe(&mut self, now_us: u64) {
        if !self.has_unsent() {
            return;
        }
        let packet = self.send.queue.packet_at(self.send.next);
        let has_fin = packet.is_last && self.has_unsent_fin();
        if (packet.end + u32::from(has_fin)).is_after(self.window_end()) {
            self.arm_probe(now_us);
        } else {
            (self.recovery.backoff, self.recovery.probing_since_ms) = (0, 0);
            self.timers.clear_retransmit();
        }
    }

    /// End of the peer's window (`tcp_wnd_end`).
    pub(super) fn window_end(&self) -> Seq {
        self.send.una + self.send.window
    }
}

impl AckFacts {
    pub(super) fn note_reordered(&mut self, seq: Seq) {
        self.reordered = Some(self.reordered.map_or(seq, |lowest| lowest.earlier(seq)));
    }
}
