//! Segments that may be sent now: by the peer's window, the congestion window and Nagle's rule
//! (`tcp_write_xmit`).

use super::super::config::{INITIAL_CWND, MS, RTO_MIN_US};
use super::super::seq::Seq;
use super::busy_time::Sending;
use super::info::Cause;
use super::mtu_search::Probing;
use super::scoreboard::MergeLimits;
use super::sent::{Ending, Marks, Sent};
use super::{Connection, Context, ms_since};

/// Packets last this part of a second at the connection's rate (`sk_pacing_shift`).
const PACING_SHIFT: u32 = 10;
/// Time within which a further ACK is worth waiting for, in µs.
const SOON_US: u64 = 1_000;
/// Payload of the packets that are written while the path is probed, at least.
const PROBED_PACKET_BYTES: u32 = 60_000;
/// Shift of the minimum round trip, in µs: each step halves the packets to nearby peers (`tcp_tso_rtt_log`).
const RTT_SHIFT: u32 = 9;

/// Packets that one call may send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Push {
    /// All that the windows and Nagle's rule allow.
    Queued,
    /// Full segments alone, as of a corked connection.
    Full,
    /// A single packet, as full as it is, which does not wait for the next ACK (`tcp_push_one`).
    One,
}

/// Reason to stop sending.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Halt {
    Empty,
    CongestionWindow,
    PeerWindow,
    Pacing,
    /// More may be written before the next ACK.
    MoreToCome,
    Nagle,
    NoFrame,
}

/// Next segment of the send queue.
#[derive(Clone, Copy, Debug)]
struct NextSegment {
    len_bytes: u32,
    is_last: bool,
    has_fin: bool,
    /// Payload of a full segment.
    room: u32,
    /// Marks of its end.
    ending: Ending,
}

impl NextSegment {
    /// The first bytes of a segment that has more.
    fn cut(self, len_bytes: u32) -> Self {
        Self { len_bytes, is_last: false, has_fin: false, ending: Ending::Plain, ..self }
    }
}

impl Connection {
    /// Bytes that were written and never sent.
    pub(super) fn unsent_bytes(&self) -> u32 {
        self.send.queue.end().bytes_since(self.send.next)
    }

    pub(super) fn has_unsent_fin(&self) -> bool {
        self.send.fin && !self.send.next.is_after(self.send.queue.end())
    }

    /// True if bytes or a FIN were never sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.unsent_bytes() > 0 || self.has_unsent_fin()
    }

    /// Sends what may be sent.
    pub(in crate::tcp) fn send_queued(&mut self, cx: &mut Context<'_>) {
        self.send_packets(if self.options.cork { Push::Full } else { Push::Queued }, cx);
    }

    /// Sends full segments: more is about to be written.
    pub(super) fn send_full(&mut self, cx: &mut Context<'_>) {
        self.send_packets(Push::Full, cx);
    }

    /// Sends one packet: more is being written behind it.
    pub(super) fn push_one(&mut self, cx: &mut Context<'_>) {
        self.send_packets(Push::One, cx);
    }

    fn send_packets(&mut self, push: Push, cx: &mut Context<'_>) {
        if !self.can_send() || !self.has_unsent() {
            return;
        }
        let (before, room) = (self.sent.len(), self.segment_room());
        let may_probe = self.send.search.is_some() && push != Push::One;
        if may_probe && self.send_mtu_probe(cx) == Probing::Waits {
            return;
        }
        let halt = loop {
            if let Err(halt) = self.send_next(push, room, cx) {
                break halt;
            }
            if push == Push::One {
                break Halt::Empty;
            }
        };
        if self.note_use(before, halt, cx) {
            self.schedule_loss_probe(false, cx);
        }
        // Nothing comes back that could open the window, end Nagle's wait or free a frame.
        let is_waiting = halt != Halt::Pacing && self.has_unsent() || halt == Halt::NoFrame;
        if self.sent.is_empty() && is_waiting && self.timers.is_retransmit_idle() {
            let wait_us = self.rtt.rto_us().max(RTO_MIN_US);
            self.timers.set_probe(cx.now_us + wait_us);
        }
    }

    /// Notes what was sent since there were `before` segments, and what halts more. Returns true if it is something.
    fn note_use(&mut self, before: u32, halt: Halt, cx: &Context<'_>) -> bool {
        let sent = self.sent.len() - before;
        self.recovery.note_sent(sent);
        if halt == Halt::PeerWindow {
            self.begin_sending(Sending::PeerWindow, cx.now_us);
        } else {
            self.end_sending(Sending::PeerWindow, cx.now_us);
        }
        let is_full = self.sent.in_flight() >= self.congestion.cwnd;
        let is_limited = halt == Halt::CongestionWindow || is_full;
        if sent > 0 || is_limited {
            self.note_window_use(is_limited, cx);
        }
        sent > 0
    }

    /// Notes how far the window is used: the strongest sign of each round trip (`tcp_cwnd_validate`).
    fn note_window_use(&mut self, is_limited: bool, cx: &Context<'_>) {
        let now_us = cx.now_us;
        let (outstanding, recovery) = (self.sent.len(), &mut self.recovery);
        let is_new_round = !self.send.una.is_before(recovery.use_round_end);
        let is_more = !recovery.is_window_limited && outstanding > recovery.max_outstanding;
        if is_new_round || is_limited || is_more {
            recovery.is_window_limited = is_limited;
            recovery.max_outstanding = outstanding;
            recovery.use_round_end = self.send.next;
        }
        if self.is_window_limiting() {
            self.recovery.window_used = 0;
            return self.recovery.stamp_window(now_us);
        }
        self.recovery.window_used = self.recovery.window_used.max(outstanding);
        let since_ms = ms_since(self.recovery.window_stamp_ms, now_us);
        self.note_small_buffer(now_us);
        if cx.config.restarts_after_idle && u64::from(since_ms) * MS >= self.rtt.rto_us() {
            self.shrink_unused_window(now_us);
        }
    }

    /// Shrinks a window that was not used for a time-out towards what was (RFC 2861, section 3;
    /// `tcp_cwnd_application_limited`).
    fn shrink_unused_window(&mut self, now_us: u64) {
        // As the kernel: not for a writer that waits for memory.
        if self.recovery.is_open() && !self.is_orphan && !self.send.is_full {
            let used = self.recovery.window_used.max(INITIAL_CWND);
            if used < self.congestion.cwnd {
                self.congestion.ssthresh = self.current_ssthresh();
                self.congestion.cwnd = u32::midpoint(self.congestion.cwnd, used);
            }
            self.recovery.window_used = 0;
        }
        self.recovery.stamp_window(now_us);
    }

    /// Sends the next packet: one segment of `room` bytes at most, or several that the device cuts.
    fn send_next(&mut self, push: Push, room: u32, cx: &mut Context<'_>) -> Result<(), Halt> {
        if !self.has_unsent() {
            return Err(Halt::Empty);
        }
        let most = self.burst_segments(cx);
        if most == 0 {
            return Err(Halt::CongestionWindow);
        }
        if self.waits_for_pace(cx) {
            return Err(Halt::Pacing);
        }
        self.send.queue.grow_packet(self.send.next, room.saturating_mul(most));
        let next = self.next_segment(most, room).ok_or(Halt::Empty)?;
        if push != Push::One
            && let Some(halt) = self.wait_for_next_ack(room, cx)
        {
            return Err(halt);
        }
        let first_end = self.send.next + next.len_bytes.min(room);
        let fin = u32::from(next.has_fin && next.len_bytes <= room);
        if (first_end + fin).is_after(self.window_end()) {
            return Err(Halt::PeerWindow);
        }
        let full_only = push == Push::Full;
        let next = self.within_window(next, full_only);
        let next = self.within_free_frame(next, cx).ok_or(Halt::NoFrame)?;
        if next.is_last && self.is_held_by_nagle(&next, full_only) {
            let whole = next.len_bytes / room * room;
            if whole == 0 {
                return Err(Halt::Nagle);
            }
            return self.send_new(&next.cut(whole), cx);
        }
        let ends = next.ending.is_pushed() || next.has_fin;
        if next.len_bytes > room && ends && !cx.config.pushes_large_packets {
            return self.send_new(&next.cut((next.len_bytes - 1) / room * room), cx);
        }
        self.send_new(&next, cx)
    }

    /// Reason to wait for the next ACK, which comes soon and will let a larger packet out
    /// (`tcp_tso_should_defer`).
    fn wait_for_next_ack(&self, room: u32, cx: &Context<'_>) -> Option<Halt> {
        let packet = self.send.queue.packet_at(self.send.next);
        let unsent = packet.end.bytes_since(self.send.next);
        let (first, srtt_us) = (self.sent.first()?, self.rtt.smoothed_us()?);
        let since_us = cx.now_us.saturating_sub(self.send.last_data_us);
        if unsent <= room || self.recovery.is_recovering() || since_us > SOON_US {
            return None;
        }
        let left = self.congestion.cwnd.saturating_sub(self.sent.in_flight());
        let by_congestion = left.saturating_mul(self.send.mss);
        let by_peer = self.window_end().bytes_since(self.send.next);
        let limit = by_congestion.min(by_peer);
        let whole = self.congestion.cwnd.saturating_mul(self.send.mss).min(self.send.window);
        if limit >= self.largest_burst(cx).saturating_mul(self.send.mss)
            || !packet.is_last && limit >= unsent
            || limit >= whole / 3
        {
            return None;
        }
        let ack_us = (first.sent_us + srtt_us).saturating_sub(cx.now_us);
        if ack_us > SOON_US.min(srtt_us / 2) {
            return None;
        }
        match limit <= unsent {
            true if by_congestion < by_peer => Some(Halt::CongestionWindow),
            true => Some(Halt::PeerWindow),
            false => {
                let is_end = packet.marks.ends_record || self.has_unsent_fin();
                (!is_end).then_some(Halt::MoreToCome)
            }
        }
    }

    /// Segments that one packet may have now: by the congestion window, of which half is kept for
    /// another packet, and by the rate (`tcp_cwnd_test`, `tcp_tso_autosize`).
    fn burst_segments(&self, cx: &Context<'_>) -> u32 {
        let left = self.congestion.cwnd.saturating_sub(self.sent.in_flight());
        let half = (self.congestion.cwnd / 2).max(1);
        left.min(half).min(self.largest_burst(cx))
    }

    /// Segments that one packet may have at most.
    fn largest_burst(&self, cx: &Context<'_>) -> u32 {
        if self.send.urgent.is_some() {
            // Each segment has an urgent pointer of its own.
            return 1;
        }
        (cx.config.gso_bytes / self.send.mss.max(1)).min(self.autosized_segments(cx)).max(1)
    }

    /// Segments of about a millisecond at the pacing rate, more to nearby peers (`tcp_tso_autosize`); `min_gso_segments` at least.
    fn autosized_segments(&self, cx: &Context<'_>) -> u32 {
        let mss = u64::from(self.send.mss.max(1));
        let initial_rate = u64::from(2 * self.congestion.cwnd) * mss * 1_000;
        let mut bytes = self.pacing_rate().unwrap_or(initial_rate) >> PACING_SHIFT;
        // Nearby peers get more at once.
        let rtt_steps = self.rtt.min_us().unwrap_or(u64::MAX) >> RTT_SHIFT;
        if rtt_steps < 32 {
            bytes += u64::from(cx.config.gso_bytes) >> rtt_steps;
        }
        u32::try_from(bytes / mss).unwrap_or(u32::MAX).max(cx.config.min_gso_segments)
    }

    /// Payload of the packets that are written, at most (`tcp_xmit_size_goal`).
    pub(super) fn packet_goal(&self, cx: &Context<'_>) -> u32 {
        let room = self.segment_room();
        let largest = match self.send.search {
            // More than a segment is queued at once, as in the kernel without a device that cuts: a probe takes
            // more than a segment.
            Some(_) => cx.config.gso_bytes.max(PROBED_PACKET_BYTES),
            None => cx.config.gso_bytes,
        };
        (largest.min(self.half_window()) / room * room).max(room)
    }

    /// Unsent bytes of one packet, at most `most` segments of `room` bytes.
    fn next_segment(&self, most: u32, room: u32) -> Option<NextSegment> {
        let packet = self.send.queue.packet_at(self.send.next);
        let unsent = packet.end.bytes_since(self.send.next);
        let len_bytes = unsent.min(room.saturating_mul(most));
        let is_end = len_bytes == unsent;
        let has_fin = is_end && packet.is_last && self.has_unsent_fin();
        (len_bytes > 0 || has_fin).then_some(NextSegment {
            len_bytes,
            is_last: is_end && packet.is_last,
            has_fin,
            room,
            ending: if is_end { Ending::of(packet.marks) } else { Ending::Plain },
        })
    }

    /// Shortens a packet of several segments to the peer's window (`tcp_mss_split_point`).
    fn within_window(&self, next: NextSegment, full_only: bool) -> NextSegment {
        let left = self.window_end().bytes_since(self.send.next);
        if next.len_bytes + u32::from(next.has_fin) <= left || next.len_bytes <= next.room {
            return next;
        }
        let len_bytes = next.len_bytes.min(left);
        let partial = len_bytes % next.room;
        let is_held = partial > 0 && self.holds_small(full_only);
        next.cut(if is_held { len_bytes - partial } else { len_bytes })
    }

    /// Shortens a packet of several segments to the largest frame that is free. `None` if that has room for one only, while
    /// others have more and something is in flight: the next ACK sends on, not many packets of one segment.
    fn within_free_frame(&self, next: NextSegment, cx: &mut Context<'_>) -> Option<NextSegment> {
        let free_bytes = cx.free_payload_bytes();
        if next.len_bytes <= free_bytes {
            return Some(next);
        }
        let whole = free_bytes / next.room * next.room;
        if whole > next.room {
            return Some(next.cut(whole));
        }
        let has_larger = cx.has_frame(next.len_bytes.min(2 * next.room));
        let may_send = self.sent.is_empty() || !has_larger && whole > 0;
        may_send.then_some(next)
    }

    fn is_held_by_nagle(&self, next: &NextSegment, full_only: bool) -> bool {
        let is_full = next.len_bytes.is_multiple_of(next.room);
        !next.has_fin && !is_full && self.send.urgent.is_none() && self.holds_small(full_only)
    }

    /// Nagle's rule in Minshall's form: a small segment waits while another one is in flight.
    pub(super) fn holds_small(&self, full_only: bool) -> bool {
        full_only
            || !self.options.nodelay
                && !self.sent.is_empty()
                && self.send.small_end.is_after(self.send.una)
                && !self.send.small_end.is_after(self.send.next)
    }

    /// Sends segments that were never sent, as one packet. Those without a frame stay unsent.
    fn send_new(&mut self, next: &NextSegment, cx: &mut Context<'_>) -> Result<(), Halt> {
        let seq = self.send.next;
        let data_end = seq + next.len_bytes;
        let mut end = data_end + u32::from(next.has_fin);
        if self.sent.in_flight() == 0 && next.len_bytes > 0 {
            let pause_us = cx.now_us.saturating_sub(self.send.last_data_us);
            self.congestion.pause(pause_us, cx.now_us);
        }
        let was_empty = self.sent.is_empty();
        let first = self.sent.len() as usize;
        let mut at = seq;
        loop {
            let piece_end = data_end.earlier(at + next.room);
            let is_last = piece_end == data_end;
            let marks = Marks {
                is_fin: next.has_fin && is_last,
                ending: if is_last && next.len_bytes > 0 { next.ending } else { Ending::Plain },
                is_joined: at != seq,
                ..Marks::default()
            };
            self.record_sent(at, if is_last { end } else { piece_end }, marks, cx);
            at = piece_end;
            if is_last {
                break;
            }
        }
        let (count, left) = (self.sent.len() as usize - first, self.transmit_new(first, cx));
        if left < count {
            cx.counters.no_frame.add(1);
            self.sent.truncate(first + left);
            if left == 0 {
                return Err(Halt::NoFrame);
            }
            end = self.sent.at(first + left - 1).map_or(seq, |last| last.end);
        }
        self.send.next = end;
        self.send.queue.forget_packets(end);
        if left == count && !next.len_bytes.is_multiple_of(next.room) {
            self.send.small_end = end;
        }
        if next.len_bytes > 0 {
            self.note_paced(end - seq, cx);
            self.note_data_sent(cx.now_us);
        }
        if was_empty || self.timers.is_loss_probe() {
            self.rearm_retransmit(cx.now_us);
        }
        if left == count { Ok(()) } else { Err(Halt::NoFrame) }
    }

    /// Notes that data are sent, for the first time or again (`tcp_event_data_sent`).
    fn note_data_sent(&mut self, now_us: u64) {
        self.delayed.note_reply(now_us);
        self.send.last_data_us = now_us;
    }

    /// Sends a single new segment of this length, which may be longer than others. Returns false without a frame.
    pub(super) fn send_longer(&mut self, len_bytes: u32, cx: &mut Context<'_>) -> bool {
        let next = self.next_segment(1, len_bytes);
        next.is_some_and(|next| self.send_new(&next, cx).is_ok())
    }

    pub(super) fn record_sent(&mut self, seq: Seq, end: Seq, marks: Marks, cx: &Context<'_>) {
        let (is_first, delivered) = (self.sent.is_empty(), self.tally.delivered);
        let (deliveries, is_app_limited) =
            self.sent.clock.note_sent(is_first, delivered, cx.now_us);
        let marks = Marks { is_app_limited, ..marks };
        self.sent.push(Sent { seq, end, sent_us: cx.now_us, deliveries, marks });
    }

    /// Tail loss probe with new data, whatever the congestion window says.
    pub(super) fn send_probe_segment(&mut self, cx: &mut Context<'_>) {
        let (before, room) = (self.sent.len(), self.segment_room());
        self.send.queue.grow_packet(self.send.next, room);
        if let Some(next) = self.next_segment(1, room) {
            // Ignored: without a frame, the next probe tries again.
            let _ = self.send_new(&next, cx);
        }
        self.note_use(before, Halt::Empty, cx);
    }

    /// Sends a segment again that is deemed lost. Returns false if it could not be sent now.
    pub(super) fn retransmit(&mut self, index: usize, cause: Cause, cx: &mut Context<'_>) -> bool {
        let was_sent = self.send_again(index, cause, cx);
        if was_sent {
            self.note_retransmitted(index, cx.now_us);
        }
        was_sent
    }

    /// Sends a segment again that is deemed lost, with those after it that were sent in one packet with
    /// it: `most` segments at most. Returns the number of segments sent.
    pub(super) fn retransmit_packet(
        &mut self,
        index: usize,
        most: u32,
        cause: Cause,
        cx: &mut Context<'_>,
    ) -> u32 {
        let packet = index..=*self.sent.packet_of(index).end();
        let room = self.segment_room();
        let with_frame = (cx.free_payload_bytes() / room).max(1);
        let most = most.min(self.largest_burst(cx)).min(with_frame) as usize;
        let most = most.min(packet.clone().count());
        self.sent.set_segment_size(packet, room);
        let count = self.sent.cut_packet(index, most);
        let last = index + count - 1;
        let is_within = self.sent.at(last).is_some_and(|sent| {
            let fin = u32::from(sent.marks.is_fin);
            !(sent.end - fin).is_after(self.window_end())
        });
        let before = self.tally.bytes_sent;
        if count == 1 || !is_within || !self.transmit_together(index, last, cx) {
            return u32::from(self.retransmit(index, cause, cx));
        }
        let len_bytes = self.tally.bytes_sent - before;
        self.tally.bytes_retrans += len_bytes;
        self.note_paced(u32::try_from(len_bytes).unwrap_or(u32::MAX), cx);
        self.note_data_sent(cx.now_us);
        for index in index..=last {
            self.note_sent_again(index, cause, cx);
            self.note_retransmitted(index, cx.now_us);
        }
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn note_retransmitted(&mut self, index: usize, now_us: u64) {
        if self.recovery.repair.retransmit_stamp_us == 0 {
            self.recovery.repair.retransmit_stamp_us = now_us;
        }
        let undo = self.recovery.repair.undo_retransmits.unwrap_or(0) + 1;
        self.recovery.repair.undo_retransmits = Some(undo);
        self.sent.mark(index, |marks| marks.retransmitted = true);
    }

    fn note_sent_again(&mut self, index: usize, cause: Cause, cx: &Context<'_>) {
        let deliveries = self.sent.clock.note_sent(false, self.tally.delivered, cx.now_us);
        self.sent.sent_again(index, cx.now_us, deliveries);
        self.forget_mtu_probe();
        cx.counters.retrans_segs.add(1);
        self.resent.count(cause);
    }

    /// Sends a segment again (`__tcp_retransmit_skb`). Returns false if the peer's window forbids it, or no frame is free.
    pub(super) fn send_again(&mut self, index: usize, cause: Cause, cx: &mut Context<'_>) -> bool {
        let packet = index..=*self.sent.packet_of(index).end();
        let room = self.segment_room();
        self.sent.set_segment_size(packet, room);
        let Some(&sent) = self.sent.at(index) else { return false };
        let window_end = self.window_end();
        if !sent.seq.is_before(window_end) && sent.seq != self.send.una {
            // The peer's window shrank: only its first byte may be tried.
            return false;
        }
        // Part of a segment if the window shrank into it.
        let left = window_end.bytes_since(sent.seq);
        let most = if left > 0 { room.min(left) } else { room };
        if sent.data_bytes() > most {
            self.sent.split(index, sent.seq + most);
        } else if sent.data_bytes() < most {
            let held_us = (!self.send.is_last_empty).then_some(self.send.last_data_us);
            let limits = MergeLimits { most_bytes: most, window_end, held_us };
            let merged = self.sent.merge_behind(index, limits);
            if !self.agreed.sack {
                // As the kernel: a segment less takes a duplicate ACK along (`tcp_adjust_pcount`).
                self.sent.reno_dup_acks = self.sent.reno_dup_acks.saturating_sub(merged);
            }
        }
        self.sent.cut_packet(index, 1);
        self.note_sent_again(index, cause, cx);
        let payload = self.sent.at(index).map_or(0, Sent::data_bytes);
        self.note_paced(payload, cx);
        let before = self.tally.bytes_sent;
        let was_sent = self.transmit_sent(index, cx);
        if !was_sent {
            cx.counters.no_frame.add(1);
        } else if payload > 0 {
            self.note_data_sent(cx.now_us);
        }
        self.tally.bytes_retrans += self.tally.bytes_sent - before;
        was_sent
    }

    /// Sends a segment although the window is closed, or a probe without data
    /// (`tcp_write_wakeup`). Returns false without a frame.
    pub(super) fn send_window_probe(&mut self, cx: &mut Context<'_>) -> bool {
        let window_left = self.window_end().bytes_since(self.send.next);
        if let Some(next) = self.next_segment(1, self.segment_room())
            && window_left > 0
        {
            let len_bytes = next.len_bytes.min(window_left);
            let is_whole = len_bytes == next.len_bytes;
            let has_fin = next.has_fin && is_whole && window_left > len_bytes;
            if len_bytes > 0 || has_fin {
                // As the kernel: a small one does not hold back the next (`tcp_minshall_update` is not called).
                let small_end = self.send.small_end;
                let sent = self.send_new(
                    &NextSegment {
                        len_bytes,
                        is_last: is_whole && next.is_last,
                        has_fin,
                        ending: if is_whole { next.ending.pushed() } else { Ending::Pushed },
                        ..next
                    },
                    cx,
                );
                self.send.small_end = small_end;
                return sent != Err(Halt::NoFrame);
            }
            return true;
        }
        if self.is_urgent_near() {
            // As the kernel: the number that the pointer counts from first.
            cx.counters.win_probe.add(1);
            self.send_empty(self.send.una, cx);
        }
        cx.counters.win_probe.add(1);
        self.send_empty(self.send.una - 1, cx)
    }

    /// True if an urgent byte of ours is not acknowledged, and a pointer reaches it.
    fn is_urgent_near(&self) -> bool {
        let una = self.send.una;
        self.send.urgent.is_some_and(|urgent| {
            urgent.is_after(una) && urgent.bytes_since(una) <= u32::from(u16::MAX)
        })
    }

    /// Shrinks an unproven window after a pause (RFC 5681, section 4.1; `tcp_cwnd_restart`).
    pub(super) fn restart_after_idle(&mut self, cx: &Context<'_>) {
        let idle_us = cx.now_us.saturating_sub(self.send.last_data_us);
        let rto_us = self.rtt.rto_us();
        if !cx.config.restarts_after_idle || !self.sent.is_empty() || idle_us <= rto_us {
            return;
        }
        let floor = INITIAL_CWND.min(self.congestion.cwnd);
        let halvings = u32::try_from(idle_us / rto_us).unwrap_or(31).min(31);
        self.congestion.ssthresh = self.current_ssthresh();
        self.congestion.cwnd = (self.congestion.cwnd >> halvings).max(floor);
        self.recovery.window_used = 0;
        self.recovery.stamp_window(cx.now_us);
    }
}
