//! Receive window: from the free part of a buffer that grows with what the reader takes
//! (`__tcp_select_window`, `tcp_rcv_space_adjust`).

use std::num::NonZeroU32;

use super::super::config::{INITIAL_CWND, MAX_WINDOW_SCALE, MS, TcpConfig, TcpOptions};
use super::super::seq::Seq;
use super::super::wire::Segment;
use super::receive_rtt::ReceiveRoundTrip;
use super::{Connection, Context};

/// Receive buffer of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct ReceiveWindow {
    /// Memory that received packets may occupy (`sk_rcvbuf`).
    bytes: u32,
    /// Largest size that it grows to; the size itself if an option fixed that.
    largest: u32,
    /// Largest window (`window_clamp`).
    clamp: u32,
    /// Payload that fits in 256 bytes of memory, by the packets that came (`scaling_ratio`).
    ratio: u8,
    /// Window that is announced at most now; it grows with what comes (`rcv_ssthresh`).
    threshold: u32,
    /// Measurement of what the reader takes in a round trip.
    measured_from: Seq,
    measured_us: u64,
    /// Bytes that it took in the best round trip.
    space: u32,
    round_trip: ReceiveRoundTrip,
}

/// Payload assumed in 256 bytes of memory, before packets came.
const FIRST_RATIO: u8 = 128;

/// Smallest window that an option may set as the largest (`SOCK_MIN_RCVBUF / 2`).
const CLAMP_MIN_BYTES: u32 = 1152;

/// Segments of the window of a buffer that is half full while memory is tight (`tcp_adjust_rcv_ssthresh`).
const TIGHT_SEGMENTS: u32 = 4;

/// Shift of the windows that we announce: enough for the largest buffer, or for the window of one
/// that does not grow (`tcp_select_initial_window`).
pub(in crate::tcp) fn scale_for(options: &TcpOptions, config: &TcpConfig) -> u8 {
    let largest = options.rcvbuf.map_or(config.rmem.1, |bytes| payload_of(bytes, FIRST_RATIO));
    let largest = largest.min(options.window_clamp.map_or(u32::MAX, NonZeroU32::get)).max(1);
    let bits = u8::try_from(largest.ilog2()).unwrap_or(0);
    bits.saturating_sub(15).min(MAX_WINDOW_SCALE)
}

/// Payload that fits in a memory of `bytes`.
fn payload_of(bytes: u32, ratio: u8) -> u32 {
    u32::try_from((u64::from(bytes) * u64::from(ratio)) >> 8).unwrap_or(u32::MAX)
}

/// Sizes by which a window grows.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Largest segment that we announced.
    mss: u32,
    /// Segments that the peer sends.
    segment: u32,
    /// Memory that a buffer grows to at most (`tcp_rmem`).
    largest_memory: u32,
}

impl ReceiveWindow {
    pub(in crate::tcp) fn new(options: &TcpOptions, config: &TcpConfig) -> Self {
        let mut this = Self {
            bytes: options.rcvbuf.unwrap_or(config.rmem.0),
            largest: options.rcvbuf.unwrap_or(config.rmem.1),
            clamp: options.window_clamp.map_or(u32::MAX, |clamp| clamp.get().max(CLAMP_MIN_BYTES)),
            ratio: FIRST_RATIO,
            threshold: 0,
            measured_from: Seq(0),
            measured_us: 0,
            space: 0,
            round_trip: ReceiveRoundTrip::default(),
        };
        this.fit_low_water(options, config);
        this
    }

    /// Gives the buffer a size that it keeps.
    pub(super) fn fix(&mut self, bytes: u32) {
        (self.bytes, self.largest) = (bytes, bytes);
    }

    /// Grows a buffer of no fixed size so that it holds the bytes that a reader waits for (`tcp_set_rcvlowat`).
    pub(super) fn fit_low_water(&mut self, options: &TcpOptions, config: &TcpConfig) {
        if options.rcvbuf.is_some() {
            return;
        }
        let len = options.low_water_bytes.min(config.rmem.1 / 2);
        let memory = (u64::from(len) << 8) / u64::from(self.ratio.max(1));
        let memory = u32::try_from(memory).unwrap_or(u32::MAX);
        if memory > self.bytes {
            (self.bytes, self.clamp) = (memory, self.clamp.max(len));
        }
    }

    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Bytes that the reader took in the best round trip.
    pub(super) fn space(&self) -> u32 {
        self.space
    }

    /// Largest window.
    pub(super) fn clamp(&self) -> u32 {
        self.clamp
    }

    /// Window that is announced at most now.
    pub(super) fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Round trip that the receiver measured, in µs.
    pub(super) fn round_trip_us(&self) -> Option<u64> {
        self.round_trip.us()
    }

    /// Window for a memory of `bytes`: packets occupy more than their payload (`tcp_win_from_space`).
    pub(super) fn of_memory(&self, bytes: u32) -> u32 {
        payload_of(bytes, self.ratio)
    }

    /// Learns how much of its memory a packet fills with payload (`tcp_measure_rcv_mss`).
    pub(super) fn note_ratio(&mut self, len: u32, truesize: u32, announced: u32) {
        let ratio = (u64::from(len) << 8) / u64::from(truesize.max(1));
        let ratio = u8::try_from(ratio).unwrap_or(u8::MAX).max(1);
        if ratio != self.ratio {
            self.ratio = ratio;
            self.set_clamp(self.of_memory(self.bytes), announced);
            // A reader cannot take more: the buffer would never grow.
            self.space = self.space.min(self.clamp);
        }
    }

    /// Sets the largest window (`tcp_set_window_clamp`). A larger one takes what is announced already.
    pub(super) fn set_clamp(&mut self, clamp: u32, announced: u32) {
        let before = std::mem::replace(&mut self.clamp, clamp.max(CLAMP_MIN_BYTES));
        if self.clamp < before {
            self.threshold = self.threshold.min(self.clamp);
        } else if self.clamp > before {
            self.raise_threshold(announced);
        }
    }

    /// Raises `rcv_ssthresh` to the announced window, within the clamp.
    pub(super) fn raise_threshold(&mut self, announced: u32) {
        self.threshold = self.threshold.max(announced.min(self.clamp));
    }

    /// Window to begin with, in whole segments. A SYN tells 65,535 bytes of it at most.
    pub(in crate::tcp) fn initial_window(&self, mss: u32) -> u32 {
        let window = self.of_memory(self.bytes).min(self.clamp);
        if window > mss { window / mss * mss } else { window }
    }

    /// Begins with the window that the handshake announced.
    pub(super) fn begin(
        &mut self,
        next: Seq,
        window: u32,
        announced_mss: u32,
        scale: u8,
        now_us: u64,
    ) {
        (self.measured_from, self.measured_us) = (next, now_us);
        // As `tcp_init_buffer_space`: room for one segment is kept.
        let full = self.of_memory(self.bytes);
        self.clamp = self.clamp.min(full).min(u32::from(u16::MAX) << scale);
        if self.clamp > 2 * announced_mss && self.clamp + announced_mss > full {
            self.clamp = full.saturating_sub(announced_mss).max(2 * announced_mss);
        }
        self.threshold = window.min(self.clamp);
        self.space = (INITIAL_CWND * announced_mss).min(window).min(self.threshold);
    }

    /// Grows the window after a packet, as far as the buffer has room for packets of this kind
    /// (`tcp_grow_window`). Returns true if it grew.
    fn grow(&mut self, len: u32, truesize: u32, free: u32, sizes: Sizes) -> bool {
        let Sizes { mss, segment, largest_memory } = sizes;
        let room = free.min(self.clamp).saturating_sub(self.threshold);
        let grown = if self.of_memory(truesize) <= len {
            2 * mss
        } else if self.fits(len, truesize, largest_memory) {
            2 * segment
        } else {
            0
        };
        if room == 0 || grown == 0 {
            return false;
        }
        self.threshold += grown.max(2 * len).min(room);
        true
    }

    /// True if packets of this kind fill a buffer of the largest size with enough payload for the
    /// present window (`__tcp_grow_window`).
    fn fits(&self, len: u32, truesize: u32, largest_memory: u32) -> bool {
        let mut truesize = self.of_memory(truesize) >> 1;
        let mut window = self.of_memory(largest_memory) >> 1;
        while truesize > len && window > 0 {
            (truesize, window) = (truesize >> 1, window >> 1);
        }
        self.threshold <= window
    }

    /// Grows the buffer to the memory of what is queued, unless its size is fixed; beyond that the window is
    /// `smallest` from now on.
    fn admit(&mut self, queued: u32, is_fixed: bool, smallest: u32) {
        if !is_fixed {
            self.bytes = self.bytes.max(queued.min(self.largest));
        }
        if queued > self.bytes {
            self.threshold = self.clamp.min(smallest);
        }
    }

    /// Grows the buffer if the reader took more in this round trip than in any before.
    fn adjust(&mut self, read: Seq, mss: u32, now_us: u64, may_grow: bool) {
        let elapsed_us = now_us.saturating_sub(self.measured_us);
        if self.round_trip.us().is_none_or(|rtt_us| elapsed_us < rtt_us) {
            return;
        }
        let taken = read.bytes_since(self.measured_from);
        if taken > self.space {
            if may_grow {
                // Twice what was taken, and the growth of slow start until then.
                let grown = u64::from(taken) * 2 + 16 * u64::from(mss);
                let slow_start =
                    grown * u64::from(taken - self.space) / u64::from(self.space.max(1));
                let memory = ((grown + 2 * slow_start) << 8) / u64::from(self.ratio.max(1));
                let memory = u32::try_from(memory).unwrap_or(u32::MAX).min(self.largest);
                if memory > self.bytes {
                    self.bytes = memory;
                    self.clamp = self.of_memory(memory);
                }
            }
            self.space = taken;
        }
        (self.measured_from, self.measured_us) = (read, now_us);
    }
}

impl Connection {
    /// Takes the echo of a segment with data as a sample of the round trip.
    pub(super) fn note_echo(&mut self, segment: &Segment, now_us: u64) {
        if let Some(stamps) = segment.options.timestamps.filter(|_| self.agreed.timestamps)
            && segment.payload_len >= self.delayed.segment_bytes()
        {
            let age_ms = self.timestamp(now_us).wrapping_sub(stamps.echo);
            // An echo of the future is none.
            let rtt_us = if age_ms < 1 << 24 { u64::from(age_ms) * MS } else { 0 };
            let is_read = self.receive.queue.len_bytes() == 0;
            self.receive.buffer.round_trip.note_echo(stamps.echo, rtt_us, is_read);
        }
    }

    /// Takes data in order as a sample of the round trip.
    pub(super) fn note_window(&mut self, now_us: u64) {
        let (next, window) = (self.receive.next, self.receive.window);
        self.receive.buffer.round_trip.note_data(next, window, now_us);
    }

    /// Lets the window grow after a packet with `len` bytes of payload. Of its memory, `uncharged` bytes do not count yet.
    pub(super) fn grow_window(
        &mut self,
        len: u32,
        truesize: u32,
        uncharged: u32,
        cx: &Context<'_>,
    ) {
        if cx.memory.is_tight {
            return;
        }
        let sizes = Sizes {
            mss: self.announced_payload(),
            segment: self.delayed.segment_bytes(),
            largest_memory: cx.config.rmem.1,
        };
        let queued = self.receive.queue.truesize().saturating_sub(uncharged);
        let buffer = &self.receive.buffer;
        let free = buffer.of_memory(buffer.bytes.saturating_sub(queued));
        if self.receive.buffer.grow(len, truesize, free, sizes) {
            self.delayed.raise_quick_by_growth();
        }
    }

    /// Packets occupy more memory than the buffer has: it grows, or else its window shrinks
    /// (`tcp_clamp_window`).
    pub(super) fn clamp_buffer(&mut self, cx: &Context<'_>) {
        self.delayed.leave_quick();
        let segment = self.announced_payload().max(self.delayed.segment_bytes());
        let (queued, smallest) = (self.receive.queue.truesize(), 2 * segment);
        let is_fixed = self.options.rare.rcvbuf.is_some() || cx.memory.is_tight;
        self.receive.buffer.admit(queued, is_fixed, smallest);
    }

    /// Window to announce, not below what was announced before; also notes it as announced.
    pub(super) fn select_window(&mut self, cx: &Context<'_>) -> u32 {
        let scale = self.agreed.receive_scale();
        if self.delayed.lacks_memory() {
            (self.receive.window, self.receive.acked) = (0, self.receive.next);
            return 0;
        }
        let current = self.usable_window();
        let step = 1_u32 << scale;
        let mut window = self.free_window(cx);
        debug_assert!(
            window > 0 || self.receive.queue.truesize() > 0,
            "TCP-6: an empty buffer announces a window, or the peer waits for ever"
        );
        if window < current {
            // RFC 9293, section 3.8.6.2.1: a window never shrinks.
            window = current.div_ceil(step) * step;
        }
        window = window.min(self.largest_window());
        if window >> scale == 0 && self.receive.window > 0 {
            cx.counters.to_zero_window.add(1);
        }
        self.receive.window = window;
        self.receive.acked = self.receive.next;
        window >> scale
    }

    /// Largest window that a header can tell.
    fn largest_window(&self) -> u32 {
        u32::from(u16::MAX) << self.agreed.receive_scale()
    }

    /// Window by the free part of the buffer, without silly sizes (RFC 9293, section 3.8.6.2.2;
    /// `__tcp_select_window`). Leaves quick ACK mode if less than half is free.
    pub(super) fn free_window(&mut self, cx: &Context<'_>) -> u32 {
        let buffer = self.receive.buffer;
        let allowed = buffer.of_memory(buffer.bytes);
        let full = allowed.min(buffer.clamp);
        let mut free = buffer.of_memory(buffer.bytes.saturating_sub(self.receive.queue.truesize()));
        let segment = self.delayed.segment_bytes().min(full);
        let scale = self.agreed.receive_scale();
        if free < full / 2 {
            // Memory runs low: leave quick ACK mode (`__tcp_select_window`).
            self.delayed.leave_quick();
            if cx.memory.is_tight {
                let few = TIGHT_SEGMENTS * self.announced_mss();
                self.receive.buffer.threshold = buffer.threshold.min(few);
            }
            free = free >> scale << scale;
            if free < allowed >> 4 || free < segment {
                return 0;
            }
        }
        // Behind the check: a window that may grow yet is small, but not silly.
        free = free.min(self.receive.buffer.threshold);
        if scale > 0 {
            // Rounded up, or a window of full size would never be announced.
            return free.div_ceil(1 << scale) << scale;
        }
        // The threshold may be below a segment: in whole segments, no window would then be announced.
        let segment = segment.min(self.receive.buffer.threshold).max(1);
        let window = self.receive.window;
        if window + segment <= free || window > free {
            free / segment * segment
        } else if segment == full && free > window + full / 2 {
            free
        } else {
            window
        }
    }

    /// After the reader took bytes: grows the buffer, and tells the peer of a window that opened
    /// (`tcp_cleanup_rbuf`).
    pub(super) fn after_read(&mut self, taken: usize, cx: &mut Context<'_>) {
        let (read, mss) = (self.read_seq(), self.announced_mss());
        let may_grow = !cx.memory.is_tight;
        self.receive.buffer.adjust(read, mss, cx.now_us, may_grow);
        if !self.can_receive() && !self.delayed.is_scheduled() {
            return;
        }
        let is_empty = self.receive.queue.len_bytes() == 0;
        let unacked = self.receive.next.bytes_since(self.receive.acked);
        if taken > 0 && self.delayed.is_due_after_read(unacked, is_empty) {
            return self.send_ack(cx);
        }
        if taken > 0 && !self.shut.receive {
            let current = self.usable_window();
            if u64::from(current) * 2
                <= u64::from(self.receive.buffer.clamp.min(self.receive.buffer.bytes))
            {
                let window = self.free_window(cx).min(self.largest_window());
                if window > 0 && window >= 2 * current {
                    self.send_ack(cx);
                }
            }
        }
    }
}
