//! One segment: its header, options and window (`__tcp_transmit_skb`).

use super::super::fast_open::CookieOption;
use super::super::seq::Seq;
use super::super::wire::{Flags, Options, Outgoing, Timestamps, emit};
use super::sent::Sent;
use super::window::scale_for;
use super::{Connection, Context, State};

/// ECN field of an IP header: capable, not marked.
const ECT_0: u8 = 2;
/// Bytes of the longest headers in front of a payload.
const HEADERS_BYTES: u32 = 14 + 40 + 60;
/// SACK blocks beside timestamps, and without.
const BLOCKS_WITH_STAMPS: usize = 3;
const BLOCKS_ALONE: usize = 4;
/// Payload that options always leave room for.
const SMALLEST_PAYLOAD_BYTES: u32 = 8;

impl Connection {
    /// Sends the segments from `first` on, which are new, as one packet; each by itself if no frame is
    /// large enough. Returns the number of those for which there were frames.
    pub(super) fn transmit_new(&mut self, first: usize, cx: &mut Context<'_>) -> usize {
        let count = self.sent.len() as usize - first;
        if count > 1 && self.transmit_together(first, first + count - 1, cx) {
            return count;
        }
        (first..first + count).take_while(|&index| self.transmit_sent(index, cx)).count()
    }

    /// Sends segments of the scoreboard as one packet. Returns false if no frame is large enough.
    pub(super) fn transmit_together(
        &mut self,
        first: usize,
        last: usize,
        cx: &mut Context<'_>,
    ) -> bool {
        let (Some(&head), Some(&tail)) = (self.sent.at(first), self.sent.at(last)) else {
            return false;
        };
        let len_bytes = tail.end - head.seq - u32::from(tail.marks.is_fin);
        if !cx.has_frame(len_bytes) {
            return false;
        }
        let (flags, ecn) = self.flags_of(&tail, len_bytes);
        // As the kernel: the receiver's GRO need not wait for more.
        let flags = if cx.config.pushes_large_packets { flags.with(Flags::PSH) } else { flags };
        self.transmit(head.seq, len_bytes, head.end - head.seq, flags, ecn, cx)
    }

    /// Sends a segment of the scoreboard. Returns false if no frame was free.
    pub(super) fn transmit_sent(&mut self, index: usize, cx: &mut Context<'_>) -> bool {
        let Some(&sent) = self.sent.at(index) else { return false };
        if sent.marks.is_syn {
            return self.transmit_syn(None, 0, cx);
        }
        let len_bytes = sent.payload_bytes();
        let (flags, ecn) = self.flags_of(&sent, len_bytes);
        self.transmit(sent.seq, len_bytes, len_bytes, flags, ecn, cx)
    }

    /// Flags of a segment, and its ECN field.
    fn flags_of(&mut self, sent: &Sent, len_bytes: u32) -> (Flags, u8) {
        let mut flags = Flags::ACK;
        if sent.marks.is_fin {
            flags = flags.with(Flags::FIN);
        }
        if sent.marks.ending.is_pushed() {
            flags = flags.with(Flags::PSH);
        }
        // RFC 3168, section 6.1.5: a retransmission is not ECN-capable, and carries no CWR.
        let is_new = !sent.seq.is_before(self.send.next) && len_bytes > 0;
        if is_new && self.agreed.ecn && std::mem::take(&mut self.cwr_is_due) {
            flags = flags.with(Flags::CWR);
        }
        (flags, if is_new && self.agreed.ecn { ECT_0 } else { 0 })
    }

    /// SYN or SYN-ACK. The first SYN may have data, and an option of Fast Open.
    pub(super) fn transmit_syn(
        &mut self,
        fast_open: Option<&CookieOption>,
        len_bytes: u32,
        cx: &mut Context<'_>,
    ) -> bool {
        let is_answer = self.state != State::SynSent;
        let (mut flags, ack) = (Flags::SYN, if is_answer { self.receive.next } else { Seq(0) });
        if is_answer {
            flags = flags.with(Flags::ACK);
            if self.agreed.ecn {
                flags = flags.with(Flags::ECE);
            }
            self.receive.acked = self.receive.next;
        } else if self.agreed.ecn && (self.recovery.syn_timeouts == 0 || !cx.config.ecn_fallback) {
            flags = flags.with(Flags::ECE).with(Flags::CWR);
        }
        let stamp = self.timestamp(cx.now_us);
        let echo = self.receive.timestamp;
        // As the kernel: the SYN-ACK of a simultaneous open offers what the SYN did. A scale that was offered once stays,
        // whatever the buffer is now: the peer may have the first SYN.
        let config = cx.config;
        let offered = self.agreed.scales.map(|scales| scales.receive);
        let options = Options {
            mss: u16::try_from(self.announced_mss()).ok(),
            window_scale: config
                .window_scaling
                .then(|| offered.unwrap_or_else(|| scale_for(&self.options.get(), config))),
            sack_permitted: config.sack,
            timestamps: config.timestamps.then_some(Timestamps { value: stamp, echo }),
            ..Options::default()
        };
        let window = u16::try_from(self.receive.window).unwrap_or(u16::MAX);
        let outgoing = Outgoing {
            flow: &self.flow(),
            seq: self.send.initial,
            ack,
            flags,
            window,
            urgent: 0,
            options,
            fast_open,
            tos: self.options.tos,
            ttl: self.options.ttl,
            payload: self.send.queue.range(self.send.initial + 1, len_bytes),
            segment_bytes: 0,
        };
        let is_first = !is_answer && self.recovery.syn_timeouts == 0;
        let was_sent = if is_first { cx.send(&outgoing) } else { cx.send_again(&outgoing) };
        if was_sent {
            self.tally.count_sent(len_bytes, len_bytes.max(self.send.mss));
        }
        was_sent
    }

    /// Payload of a full segment that is sent now: SACK blocks take some of its room (RFC 6691, section 2;
    /// `tcp_current_mss`).
    pub(super) fn segment_room(&self) -> u32 {
        let blocks_bytes = self.receive.sacks.option_bytes(self.most_blocks());
        self.send.mss.saturating_sub(blocks_bytes).max(SMALLEST_PAYLOAD_BYTES)
    }

    /// SACK blocks that a segment has at most.
    fn most_blocks(&self) -> usize {
        if self.agreed.timestamps { BLOCKS_WITH_STAMPS } else { BLOCKS_ALONE }
    }

    /// Sends a packet of `len_bytes`, in segments of `size_bytes` each.
    fn transmit(
        &mut self,
        seq: Seq,
        len_bytes: u32,
        size_bytes: u32,
        mut flags: Flags,
        ecn: u8,
        cx: &mut Context<'_>,
    ) -> bool {
        let before = (self.receive.window, self.receive.acked);
        let duplicate = self.receive.sacks.duplicate();
        let window = self.select_window(cx);
        if self.receive.is_marked {
            flags = flags.with(Flags::ECE);
        }
        let timestamps = self
            .agreed
            .timestamps
            .then(|| Timestamps { value: self.timestamp(cx.now_us), echo: self.receive.timestamp });
        debug_assert!(
            len_bytes.min(size_bytes) <= self.segment_room() || self.is_mtu_probe(seq),
            "TCP-14: a segment with its options fits in a packet of the path"
        );
        let sacks = self.receive.sacks.take(self.most_blocks());
        let urgent = self.urgent_pointer(seq);
        if urgent > 0 {
            flags = flags.with(Flags::URG);
        }
        let outgoing = Outgoing {
            flow: &self.flow(),
            seq,
            ack: self.receive.next,
            flags,
            window: u16::try_from(window).unwrap_or(u16::MAX),
            urgent,
            options: Options { timestamps, sacks, ..Options::default() },
            fast_open: None,
            tos: self.options.tos | ecn,
            ttl: self.options.ttl,
            payload: self.send.queue.range(seq, len_bytes),
            segment_bytes: if len_bytes > size_bytes { size_bytes } else { 0 },
        };
        let has_bytes = len_bytes > 0 || flags.has(Flags::FIN);
        let is_again = has_bytes && seq.is_before(self.send.next);
        if !(if is_again { cx.send_again(&outgoing) } else { cx.send(&outgoing) }) {
            // Nothing was told: neither a window, nor what came, twice perhaps, nor a smaller window of ours.
            (self.receive.window, self.receive.acked) = before;
            self.receive.sacks.put_back(duplicate);
            self.cwr_is_due |= flags.has(Flags::CWR);
            return false;
        }
        self.send.is_last_empty = !has_bytes;
        self.tally.count_sent(len_bytes, size_bytes);
        self.report_sent(seq, len_bytes, cx.now_us);
        self.delayed.sent();
        self.timers.clear_delayed_ack();
        true
    }

    fn urgent_pointer(&self, seq: Seq) -> u16 {
        match self.send.urgent {
            Some(urgent) if seq.is_before(urgent) => match u16::try_from(urgent - seq) {
                Ok(pointer) => pointer,
                // Too far: what follows will tell, if it is not sent already.
                Err(_) if (seq + u32::from(u16::MAX)).is_after(self.send.next) => u16::MAX,
                Err(_) => 0,
            },
            _ => 0,
        }
    }

    /// Sends an ACK without data; without a frame, a timer tries again (`__tcp_send_ack`).
    pub(super) fn send_ack(&mut self, cx: &mut Context<'_>) {
        if matches!(self.state, State::Closed | State::SynSent) {
            return;
        }
        if !self.transmit(self.acceptable_seq(), 0, 0, Flags::ACK, 0, cx) {
            cx.counters.no_frame.add(1);
            let wait_us = self.delayed.schedule_again();
            self.timers.set_delayed_ack(cx.now_us + wait_us);
        }
    }

    /// Number of a segment without data. If the peer's window shrank below what was sent, it takes none beyond that, but
    /// for what a scaled window leaves unsaid (`tcp_acceptable_seq`).
    fn acceptable_seq(&self) -> Seq {
        // Our SYN was acknowledged if the peer's ACK made this connection, before its window is known.
        let end = self.window_end().later(self.send.una.later(self.send.initial + 1));
        let unsaid = self.agreed.scales.map_or(0, |scales| 1_u32 << scales.receive);
        if self.send.next.bytes_since(end) < unsaid {
            self.send.next
        } else {
            self.send.next.earlier(end)
        }
    }

    /// Sends an ACK with a number that was used before, which the peer must answer. Returns false without a frame.
    pub(super) fn send_empty(&mut self, seq: Seq, cx: &mut Context<'_>) -> bool {
        self.transmit(seq, 0, 0, Flags::ACK, 0, cx)
    }

    /// Sends a reset (`tcp_send_active_reset`).
    pub(super) fn send_reset(&mut self, cx: &mut Context<'_>) {
        cx.counters.out_rsts.add(1);
        self.transmit(self.acceptable_seq(), 0, 0, Flags::RST.with(Flags::ACK), 0, cx);
    }
}

impl Context<'_> {
    /// True if there are frames, free or not, for a payload of this length.
    pub(super) fn has_frame(&self, len_bytes: u32) -> bool {
        len_bytes + HEADERS_BYTES <= self.pool.largest_frame_bytes()
    }

    /// Longest payload for which a frame is free.
    pub(super) fn free_payload_bytes(&mut self) -> u32 {
        self.pool.largest_free_bytes().saturating_sub(HEADERS_BYTES)
    }

    /// Queues a packet to be sent. Returns false if no frame was free.
    pub(in crate::tcp) fn send(&mut self, outgoing: &Outgoing<'_>) -> bool {
        let was_sent = self.send_again(outgoing);
        if was_sent {
            self.counters.out_segs.add(outgoing.segments());
        }
        was_sent
    }

    /// Queues a packet whose segments counted as sent before.
    fn send_again(&mut self, outgoing: &Outgoing<'_>) -> bool {
        let packet = emit(outgoing, self.pool);
        packet.map(|packet| self.out.push(packet)).is_some()
    }
}
