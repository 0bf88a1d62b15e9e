//! Acknowledgements at once or later (RFC 1122, section 4.2.3.2), with the kernel's quick and
//! interactive modes (`__tcp_ack_snd_check`).

use super::super::config::{
    DEFAULT_MSS, DELACK_MAX_US, DELACK_MIN_US, DUP_THRESHOLD, MAX_QUICKACKS, MS, RTO_MAX_US,
    SECOND, us_u32,
};
use super::super::seq::Seq;
use super::super::wire::options::TIMESTAMPS_BYTES;
use super::super::wire::{Flags, Segment};
use super::{Connection, Context};

/// Smallest segment size that is assumed of a peer (`TCP_MIN_MSS`).
pub(super) const SEGMENT_MIN: u32 = 88;

/// Time until the kernel's next tick, in µs, when a timer without a delay fires: at 1000 Hz.
const TICK_US: u64 = MS;
/// ACKs that one stands for, at most (`tcp_comp_sack_nr`), and the time that it waits (`tcp_comp_sack_delay_ns`).
const COMPRESSED_MAX: u8 = 44;
const COMPRESSED_MAX_US: u64 = 1_000;
/// Part of the round trip that such an ACK waits, at most: 5 %.
const COMPRESSED_RTT_PART: u64 = 20;

/// State of delayed acknowledgements (`icsk_ack`).
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct DelayedAck {
    is_scheduled: bool,
    /// The next check sends it at once.
    is_due: bool,
    /// The buffer had no room: the next one tells a window of 0 (`ICSK_ACK_NOMEM`).
    lacks_memory: bool,
    /// A small segment came, and a second one.
    pushed: bool,
    pushed_twice: bool,
    /// ACKs to be sent at once.
    quick: u8,
    /// Delay, in µs; 0 before the first data.
    delay_us: u32,
    /// Interactive: ACKs travel with replies.
    is_pingpong: bool,
    /// Time of the last data, in µs.
    last_us: u64,
    /// Estimate of the peer's segment size (`rcv_mss`), and the last one that was smaller (`last_seg_size`).
    segment_bytes: u16,
    last_segment_bytes: u16,
    /// Segment size that our SYN announced; 0 until the connection is open.
    announced_bytes: u16,
    /// Gap of which ACKs were sent at once, and their number (`dup_ack_counter`).
    duplicates_of: Seq,
    duplicates: u8,
    /// ACKs that the next one stands for (`compressed_ack`).
    compressed: u8,
    /// Times that there was no frame for it (`icsk_ack.retry`).
    retries: u8,
}

impl DelayedAck {
    /// Begins with a window, segments that are assumed to be as long as `mss`, and those that were announced.
    pub(super) fn begin(&mut self, window: u32, mss: u32, announced: u32) {
        let segment = mss.min(window / 2).min(DEFAULT_MSS.into());
        self.set_segment(segment.max(SEGMENT_MIN));
        self.announced_bytes = u16::try_from(announced).unwrap_or(u16::MAX);
    }

    /// Segment size that our SYN announced; `None` until the connection is open.
    pub(super) fn announced(&self) -> Option<u32> {
        (self.announced_bytes > 0).then_some(self.announced_bytes.into())
    }

    fn delay_us(&self) -> u64 {
        self.delay_us.into()
    }

    /// Delay, in µs; 0 before the first data.
    pub(super) fn interval_us(&self) -> u32 {
        self.delay_us
    }

    /// Time of the last data, in µs; `None` before the first.
    pub(super) fn last_us(&self) -> Option<u64> {
        (self.last_us > 0).then_some(self.last_us)
    }

    fn set_delay(&mut self, delay_us: u64) {
        self.delay_us = us_u32(delay_us);
    }

    pub(super) fn segment_bytes(&self) -> u32 {
        self.segment_bytes.into()
    }

    fn set_segment(&mut self, len_bytes: u32) {
        self.segment_bytes = u16::try_from(len_bytes).unwrap_or(u16::MAX);
    }

    pub(super) fn schedule(&mut self) {
        self.is_scheduled = true;
    }

    pub(super) fn schedule_now(&mut self) {
        (self.is_scheduled, self.is_due) = (true, true);
    }

    /// Schedules an ACK for which there was no frame, and returns the time until the next attempt, in µs.
    pub(super) fn schedule_again(&mut self) -> u64 {
        let wait_us = DELACK_MAX_US << self.retries;
        if wait_us < RTO_MAX_US {
            self.retries += 1;
        }
        self.is_scheduled = true;
        self.set_delay(DELACK_MIN_US);
        wait_us
    }

    /// Schedules an ACK that tells a window of 0, at once.
    pub(super) fn schedule_without_memory(&mut self) {
        self.schedule_now();
        self.lacks_memory = true;
    }

    pub(super) fn lacks_memory(&self) -> bool {
        self.lacks_memory
    }

    /// Acknowledges no longer at once.
    pub(super) fn leave_quick(&mut self) {
        self.quick = 0;
    }

    /// The next check sends an ACK at once, if one is scheduled.
    pub(super) fn hasten(&mut self) {
        self.is_due = true;
    }

    pub(super) fn is_scheduled(&self) -> bool {
        self.is_scheduled
    }

    pub(super) fn enter_pingpong(&mut self) {
        self.is_pingpong = true;
    }

    pub(super) fn is_interactive(&self) -> bool {
        self.is_pingpong
    }

    /// `TCP_QUICKACK`: acknowledges at once from now on, or not.
    pub(super) fn set_quick(&mut self, on: bool) {
        self.is_pingpong = !on;
    }

    pub(super) fn enter_quick(&mut self, window: u32) {
        self.enter_quick_for(MAX_QUICKACKS, window);
    }

    /// Acknowledges at once, at most so many times (`tcp_enter_quickack_mode`).
    pub(super) fn enter_quick_for(&mut self, most: u8, window: u32) {
        self.raise_quick(window, most);
        self.is_pingpong = false;
        self.set_delay(DELACK_MIN_US);
    }

    /// The window grew: the peer shall know at once.
    pub(super) fn raise_quick_by_growth(&mut self) {
        self.quick |= 1;
    }

    fn raise_quick(&mut self, window: u32, most: u8) {
        let halves = window / (2 * self.segment_bytes().max(1));
        let acks = if halves == 0 { 2 } else { halves }.min(most.into());
        self.quick = self.quick.max(u8::try_from(acks).unwrap_or(most));
    }

    /// Learns the peer's segment size (`tcp_measure_rcv_mss`), at most `largest`; options of each segment take
    /// `fixed` bytes. Returns true if the segment is larger than the estimate was.
    fn measure(&mut self, segment: &Segment, largest: u32, fixed: u32) -> bool {
        let len = segment.segment_len;
        let last = std::mem::take(&mut self.last_segment_bytes);
        if len >= self.segment_bytes() {
            let is_larger = len > self.segment_bytes();
            self.set_segment(len.min(largest));
            self.pushed |= segment.has(Flags::PSH);
            return is_larger;
        }
        // Without SACK blocks, which take from the payload.
        let whole = (len + segment.options_len).saturating_sub(fixed);
        let ends = [Flags::FIN, Flags::URG, Flags::SYN, Flags::PSH];
        let is_end = ends.into_iter().any(|flag| segment.has(flag));
        let least = if is_end { DEFAULT_MSS.into() } else { SEGMENT_MIN };
        if len + segment.options_len >= least {
            self.last_segment_bytes = u16::try_from(whole).unwrap_or(u16::MAX);
            if u32::from(last) == whole {
                // Two in a row: it sends smaller ones.
                self.set_segment(whole);
                return false;
            }
        }
        self.pushed_twice |= self.pushed;
        self.pushed = true;
        false
    }

    /// Adapts the delay to the distance of data (`tcp_event_data_recv`).
    pub(super) fn note_data(&mut self, now_us: u64, window: u32, rto_us: u64) {
        self.is_scheduled = true;
        if self.delay_us == 0 {
            self.raise_quick(window, MAX_QUICKACKS);
            self.set_delay(DELACK_MIN_US);
        } else {
            let distance_us = now_us.saturating_sub(self.last_us);
            if distance_us <= DELACK_MIN_US / 2 {
                self.set_delay(self.delay_us() / 2 + DELACK_MIN_US / 2);
            } else if distance_us < self.delay_us() {
                self.set_delay((self.delay_us() / 2 + distance_us).min(rto_us));
            } else if distance_us > rto_us {
                // Too long: the window may have shrunk at the sender.
                self.raise_quick(window, MAX_QUICKACKS);
            }
        }
        self.last_us = now_us;
    }

    /// The connection is open: what is sent soon is a reply (`tcp_finish_connect`).
    pub(super) fn note_open(&mut self, now_us: u64) {
        self.last_us = now_us;
    }

    /// Data are sent: soon after data came, this is a dialogue.
    pub(super) fn note_reply(&mut self, now_us: u64) {
        if now_us.saturating_sub(self.last_us) < self.delay_us() {
            self.is_pingpong = true;
        }
    }

    fn is_quick(&self) -> bool {
        self.quick > 0 && !self.is_pingpong
    }

    /// True if `TCP_QUICKACK` calls for an ACK: as after a read of a segment with PSH.
    pub(super) fn is_due_by_option(&mut self, unacked: u32, is_empty: bool) -> bool {
        self.pushed |= self.is_scheduled;
        self.is_due_after_read(unacked, is_empty)
    }

    /// True if reading calls for an ACK (`tcp_cleanup_rbuf`).
    pub(super) fn is_due_after_read(&self, unacked: u32, is_empty: bool) -> bool {
        self.is_scheduled
            && (unacked > self.segment_bytes()
                || is_empty && (self.pushed_twice || self.pushed && !self.is_pingpong))
    }

    /// An ACK was sent.
    pub(super) fn sent(&mut self) {
        if self.quick > 0 && self.is_scheduled {
            self.quick -= 1;
            if self.quick == 0 {
                self.set_delay(DELACK_MIN_US);
            }
        }
        (self.is_scheduled, self.is_due, self.lacks_memory) = (false, false, false);
        (self.compressed, self.retries) = (0, 0);
        (self.pushed, self.pushed_twice) = (false, false);
    }
}

impl Connection {
    /// Learns the peer's segment size, and what of its memory a packet fills.
    pub(super) fn measure_segment(&mut self, segment: &Segment, truesize: u32) {
        let fixed = if self.agreed.timestamps { TIMESTAMPS_BYTES } else { 0 };
        if self.delayed.measure(segment, self.announced_payload(), fixed) {
            let announced = self.receive.window;
            self.receive.buffer.note_ratio(segment.payload_len, truesize, announced);
        }
    }

    /// Sends the scheduled ACK, or arms its timer.
    pub(super) fn acknowledge_if_due(&mut self, cx: &mut Context<'_>) {
        if !self.delayed.is_scheduled || matches!(self.state, super::State::Closed) {
            return;
        }
        let unacked = self.receive.next.bytes_since(self.receive.acked);
        // A reader that waits for more does not open the window.
        let unread = self.receive.next - self.read_seq();
        let is_second = unacked > self.delayed.segment_bytes()
            && (unread < self.options.rare.low_water_bytes
                || self.free_window(cx) >= self.receive.window);
        if is_second || self.delayed.is_due || self.delayed.is_quick() {
            return self.send_ack(cx);
        }
        if self.receive.queue.has_gap() {
            return self.acknowledge_gap(cx);
        }
        self.delay_ack(cx);
    }

    /// Acknowledges an out-of-order segment: at once, but from the fourth on several together, within a
    /// part of the round trip.
    fn acknowledge_gap(&mut self, cx: &mut Context<'_>) {
        let next = self.receive.next;
        let delayed = &mut self.delayed;
        if !self.agreed.sack || delayed.compressed >= COMPRESSED_MAX {
            return self.send_ack(cx);
        }
        if delayed.duplicates_of != next {
            (delayed.duplicates_of, delayed.duplicates) = (next, 0);
        }
        if u32::from(delayed.duplicates) < DUP_THRESHOLD {
            delayed.duplicates += 1;
            return self.send_ack(cx);
        }
        let by_receiver_us = self.receive.buffer.round_trip_us().unwrap_or(0);
        let smoothed_us = self.rtt.smoothed_us();
        let rtt_us = smoothed_us.map_or(by_receiver_us, |srtt_us| srtt_us.min(by_receiver_us));
        let wait_us = (rtt_us / COMPRESSED_RTT_PART).min(COMPRESSED_MAX_US);
        if wait_us == 0 {
            return self.send_ack(cx);
        }
        self.delayed.compressed += 1;
        if self.delayed.compressed == 1 {
            self.timers.set_delayed_ack(cx.now_us + wait_us);
        }
    }

    /// Sends the ACK that stands for several, if `around`, the block of the segment that just came, might leave it
    /// no room for theirs (`tcp_sack_compress_send_ack`).
    pub(super) fn flush_compressed(&mut self, around: (Seq, Seq), cx: &mut Context<'_>) {
        if self.delayed.compressed > 0 && self.receive.sacks.pushes_out(around) {
            self.send_ack(cx);
            self.delayed.schedule(); // for the segment that just came
        }
    }

    /// `tcp_send_delayed_ack`.
    fn delay_ack(&mut self, cx: &mut Context<'_>) {
        // No data yet, but a FIN: what is written, or closed, at once takes its ACK along.
        let is_of_fin = self.delayed.delay_us() == 0;
        let mut delay_us = self.delayed.delay_us().max(TICK_US);
        if delay_us > DELACK_MIN_US {
            let interactive = self.delayed.is_pingpong || self.delayed.pushed;
            let mut most_us = if interactive { DELACK_MAX_US } else { SECOND / 2 };
            if let Some(srtt_us) = self.rtt.smoothed_us() {
                most_us = most_us.min(srtt_us.max(DELACK_MIN_US));
            }
            delay_us = delay_us.min(most_us);
        }
        let at_us = cx.now_us + delay_us.min(DELACK_MAX_US);
        match self.timers.delayed_ack_us() {
            // The next segment does not wait for the tick.
            Some(_) if is_of_fin => self.send_ack(cx),
            // About to expire: no reason to wait.
            Some(armed_us) if armed_us <= cx.now_us + delay_us / 4 => self.send_ack(cx),
            Some(armed_us) if armed_us <= at_us => {}
            _ => self.timers.set_delayed_ack(at_us),
        }
    }

    /// The timer of a delayed ACK fired (`tcp_delack_timer_handler`).
    pub(super) fn on_delayed_ack_timer(&mut self, cx: &mut Context<'_>) {
        if !self.delayed.is_scheduled {
            return;
        }
        if self.delayed.compressed > 0 {
            return self.send_ack(cx);
        }
        if self.delayed.is_pingpong {
            self.delayed.is_pingpong = false;
            self.delayed.set_delay(DELACK_MIN_US);
        } else {
            // No reply in time: the next may take longer.
            self.delayed.set_delay((self.delayed.delay_us() * 2).min(self.rtt.rto_us()));
        }
        cx.counters.delayed_acks.add(1);
        self.send_ack(cx);
    }
}
