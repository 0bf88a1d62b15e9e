//! Payload: into the receive queue, in order or out of order; FIN (`tcp_data_queue`).

use forebay_rx::packet::Packet;

use super::super::receive_queue::{Payload, Queued};
use super::super::seq::Seq;
use super::super::wire::{Flags, Segment};
use super::open::Answer;
use super::{Connection, Context, State};

/// Payload below which a packet does not let the window grow.
const SMALL_BYTES: u32 = 128;
/// Memory that a connection is charged for at once.
const PAGE_BYTES: u32 = 4096;
/// Memory of received bytes that a connection has whatever others have (least of `tcp_rmem`).
const KEPT_BYTES: u32 = 4096;
/// ACKs sent at once after a mark.
const ECN_QUICKACKS: u8 = 2;

impl Connection {
    pub(super) fn take_payload(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> Answer {
        if segment.len() == 0 {
            return Answer::None;
        }
        match self.state {
            State::CloseWait | State::Closing | State::LastAck
                if !segment.seq.is_before(self.receive.next) =>
            {
                // Nothing can follow the peer's FIN.
                return Answer::None;
            }
            State::Closed => return Answer::None,
            State::SynReceived | State::Established => {}
            _ if self.shut.receive => {
                let data_end = segment.end() - u32::from(segment.has(Flags::FIN));
                if data_end.is_after(self.receive.next) {
                    // Nobody will read this, or what the FIN follows (RFC 2525, section 2.17).
                    cx.counters.abort_on_data.add(1);
                    self.reset(cx);
                    return Answer::Reset;
                }
            }
            _ => {}
        }
        self.queue_payload(packet, segment, cx);
        Answer::None
    }

    pub(super) fn queue_payload(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) {
        let (next, window) = (self.receive.next, self.usable_window());
        self.note_echo(segment, cx.now_us);
        if !packet.as_ref().is_some_and(|packet| self.is_charged(segment, packet.frame.truesize()))
        {
            self.receive.sacks.forget_duplicate();
        }
        if !segment.end().is_after(next) {
            // All of it came before: the peer may have lost our ACK.
            cx.counters.delayed_ack_lost.add(1);
            self.report_duplicate(segment.seq, segment.end(), cx);
            return self.refuse_payload();
        }
        if segment.seq.is_after(next) {
            if !segment.seq.is_before(next + window) {
                return self.refuse_payload();
            }
            return self.queue_behind_gap(packet, segment, cx);
        }
        if segment.seq.is_before(next) {
            self.report_duplicate(segment.seq, next, cx);
        }
        if window == 0 && segment.payload_len > 0 {
            cx.counters.zero_window_drop.add(1);
            return self.refuse_payload();
        }
        self.queue_in_order(packet, segment, cx);
    }

    /// Acknowledges at once a segment that was not taken.
    fn refuse_payload(&mut self) {
        self.delayed.enter_quick(self.receive.window);
        self.delayed.schedule();
    }

    fn queue_in_order(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) {
        let Some(packet) = packet.take() else { return };
        let is_fin = segment.has(Flags::FIN);
        let payload = Payload::of(packet, segment.seq, segment.payload_len, is_fin);
        let truesize = payload.truesize();
        let has_room = self.has_room(cx)
            || self.is_charged(segment, truesize)
            || self.make_room(segment.seq, truesize, cx);
        if !has_room {
            self.delayed.schedule_without_memory();
            if segment.payload_len > 0 && self.receive.queue.len_bytes() > 0 {
                cx.counters.rcv_q_drop.add(1);
                return payload.free(cx.pool);
            }
            // An empty queue always takes one packet, or the reader would never get any.
        }
        let had_gap = self.receive.queue.has_gap();
        self.receive.next = self.receive.queue.append(payload, self.receive.next, cx.pool);
        if segment.payload_len > 0 {
            self.note_data(segment, truesize, cx);
        }
        if is_fin {
            self.receive.next += 1;
            self.take_fin(cx);
            return;
        }
        if had_gap {
            let filled = self.receive.queue.append_contiguous(self.receive.next, cx.pool);
            self.receive.next = filled.next;
            if let Some((start, end)) = filled.duplicate {
                self.report_duplicate(start, end, cx);
            }
            if !self.receive.queue.has_gap() {
                // RFC 5681, section 4.2: the gap is filled.
                self.delayed.schedule_now();
            }
            if filled.is_fin {
                return self.take_fin(cx);
            }
        }
        self.receive.sacks.acknowledge(self.receive.next);
    }

    /// `tcp_data_queue_ofo`.
    fn queue_behind_gap(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) {
        let Some(packet) = packet.take() else { return };
        let payload =
            Payload::of(packet, segment.seq, segment.payload_len, segment.has(Flags::FIN));
        self.note_mark(segment);
        if !self.make_room(segment.seq, payload.truesize(), cx) {
            // As the kernel, without an ACK: the peer sends it again after what is missing.
            cx.counters.ofo_drop.add(1);
            return payload.free(cx.pool);
        }
        self.delayed.schedule();
        cx.counters.ofo_queue.add(1);
        let truesize = payload.truesize();
        self.measure_segment(segment, truesize);
        self.tally.rcv_ooopack = self.tally.rcv_ooopack.saturating_add(1);
        match self.receive.queue.insert_out_of_order(payload, cx.pool) {
            Queued::Kept { around, duplicate } => {
                if self.agreed.sack {
                    self.flush_compressed(around, cx);
                    self.receive.sacks.note(around);
                    if let Some((start, end)) = duplicate {
                        self.report_duplicate(start, end, cx);
                    }
                    self.grow_window(segment.payload_len, truesize, truesize, cx);
                }
            }
            Queued::Duplicate(payload) => {
                if self.agreed.sack {
                    self.receive.sacks.note_again((segment.seq, segment.end()));
                }
                self.report_duplicate(segment.seq, segment.end(), cx);
                payload.free(cx.pool);
            }
            Queued::Full(payload) => {
                cx.counters.ofo_drop.add(1);
                payload.free(cx.pool);
            }
        }
    }

    /// True of a segment without surprises that fits in the page of memory that the connection is charged for
    /// already: it is taken whatever the queue has (`tcp_rcv_established`, `sk_forward_alloc`).
    fn is_charged(&self, segment: &Segment, truesize: u32) -> bool {
        let used = self.receive.queue.truesize().saturating_add(self.queued_memory());
        self.is_expected(segment) && truesize <= used.next_multiple_of(PAGE_BYTES) - used
    }

    /// True of a segment with the next number, of a connection without a gap or an urgent byte (`tcp_fast_path_check`).
    fn is_expected(&self, segment: &Segment) -> bool {
        segment.flags.with(Flags::PSH) == Flags::ACK.with(Flags::PSH)
            && segment.seq == self.receive.next
            && self.receive.window > 0
            && self.receive.urgent.is_none()
            && !self.receive.queue.has_gap()
    }

    /// True of data that the kernel queues before it looks at their ACK (`tcp_rcv_established`).
    pub(super) fn is_predicted(&self, packet: Option<&Packet>, segment: &Segment) -> bool {
        self.is_of_fast_path(segment)
            && segment.payload_len > 0
            && packet.is_some_and(|packet| self.is_charged(segment, packet.frame.truesize()))
    }

    /// True of an ACK without data that takes the kernel's fast path.
    pub(super) fn is_predicted_ack(&self, segment: &Segment) -> bool {
        self.is_of_fast_path(segment) && segment.payload_len == 0 && self.is_expected(segment)
    }

    /// True of a segment with the usual options and the window that is known, of an open connection.
    fn is_of_fast_path(&self, segment: &Segment) -> bool {
        let has_usual_options = match self.agreed.timestamps {
            true => segment.has_aligned_timestamps,
            false => segment.options_len == 0,
        };
        self.state == State::Established
            && has_usual_options
            && self.scaled_window(segment) == self.send.window
    }

    /// True if the queue takes a packet, as it and all others are within their limits (`tcp_can_ingest`,
    /// `sk_rmem_schedule`).
    fn has_room(&self, cx: &Context<'_>) -> bool {
        let truesize = self.receive.queue.truesize();
        truesize <= self.receive.buffer.bytes() && (!cx.memory.is_full || truesize < KEPT_BYTES)
    }

    /// Makes room for a packet that begins at `seq` (`tcp_try_rmem_schedule`). Returns false without.
    fn make_room(&mut self, seq: Seq, truesize: u32, cx: &mut Context<'_>) -> bool {
        if self.has_room(cx) {
            return true;
        }
        if self.receive.queue.truesize() > self.receive.buffer.bytes() {
            self.clamp_buffer(cx);
        }
        if self.has_room(cx) {
            return true;
        }
        let (queue, buffer) = (&mut self.receive.queue, &self.receive.buffer);
        let limit = match cx.memory.is_full {
            // With the packet, no more than before.
            true => buffer.bytes().min(queue.truesize().saturating_sub(truesize)),
            false => buffer.bytes(),
        };
        if queue.len_bytes() > 0 {
            cx.counters.rcv_collapsed.add(1);
            queue.collapse(|len, truesize| buffer.of_memory(truesize) > len, cx.pool);
        }
        if queue.truesize() <= limit {
            return true;
        }
        let pruned = queue.prune(seq, limit, cx.pool);
        if pruned > 0 {
            cx.counters.ofo_pruned.add(pruned as u64);
            // Blocks that were reported are not kept: the peer sends them again (RFC 2018,
            // section 8).
            self.receive.sacks.clear();
        }
        queue.truesize() <= limit
    }

    /// The peer's FIN, in order (`tcp_fin`).
    pub(super) fn take_fin(&mut self, cx: &mut Context<'_>) {
        self.receive.has_fin = true;
        self.delayed.schedule();
        self.shut.receive = true;
        match self.state {
            State::SynReceived | State::Established => {
                self.state = State::CloseWait;
                self.delayed.enter_pingpong();
            }
            State::FinWait1 => {
                self.send_ack(cx);
                self.state = State::Closing;
            }
            State::FinWait2 => {
                self.send_ack(cx);
                self.enter_time_wait(cx);
            }
            _ => {}
        }
        // Behind the ACK, which tells what came twice.
        self.receive.queue.drop_out_of_order(cx.pool);
        self.receive.sacks.clear();
    }

    /// Bookkeeping of data in order (`tcp_event_data_recv`).
    fn note_data(&mut self, segment: &Segment, truesize: u32, cx: &Context<'_>) {
        self.note_window(cx.now_us);
        self.measure_segment(segment, truesize);
        self.delayed.note_data(cx.now_us, self.receive.window, self.rtt.rto_us());
        self.note_mark(segment);
        if segment.payload_len >= SMALL_BYTES {
            self.grow_window(segment.payload_len, truesize, 0, cx);
        }
    }

    /// The peer has reduced its window, as the echo of a mark asked for: also an ACK without data may say so
    /// (`tcp_ecn_accept_cwr`).
    pub(super) fn note_reduction(&mut self, segment: &Segment) {
        if self.agreed.ecn && segment.has(Flags::CWR) {
            self.receive.is_marked = false;
            if segment.len() > 0 {
                // Its window may be one segment.
                self.delayed.hasten();
            }
        }
    }

    /// Counts a packet capable of ECN that came to an open connection (`tcp_ecn_received_counters`).
    pub(super) fn count_capable(&mut self, segment: &Segment, segments: u32) {
        if !segment.is_capable() {
            return;
        }
        // As the kernel: where ECN was agreed on, only one with data tells that its field survives.
        self.receive.was_capable |= !self.agreed.ecn;
        let capable = &mut *self.capable;
        if segment.is_marked() {
            capable.marked = capable.marked.wrapping_add(segments);
        }
        let bytes = capable.bytes.get_mut(usize::from(segment.ecn()) - 1);
        if let Some(bytes) = bytes {
            *bytes = bytes.wrapping_add(segment.payload_len);
        }
    }

    /// ECN (RFC 3168, section 6.1.3): marks are echoed until the peer confirms.
    fn note_mark(&mut self, segment: &Segment) {
        if !self.agreed.ecn {
            return;
        }
        let is_new = segment.is_marked() && !self.receive.is_marked;
        // As the kernel: one that is not capable was sent again.
        let was_sent_again = !segment.is_capable() && self.receive.was_capable;
        if is_new || was_sent_again {
            self.delayed.enter_quick_for(ECN_QUICKACKS, self.receive.window);
        }
        self.receive.is_marked |= segment.is_marked();
        self.receive.was_capable |= segment.is_capable();
    }

    /// Sequence number of the next byte to be read (`copied_seq`).
    pub(super) fn read_seq(&self) -> Seq {
        let fin = u32::from(self.receive.has_fin);
        self.receive.next - fin - self.receive.queue.len_bytes()
    }
}
