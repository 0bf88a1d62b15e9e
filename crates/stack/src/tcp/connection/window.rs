//! Receive window: from the free part of a buffer that grows with what the reader takes
//! (`__tcp_select_window`, `tcp_rcv_space_adjust`).

use super::super::config::{MAX_WINDOW_SCALE, TcpConfig, TcpOptions};
use super::super::seq::Seq;
use super::{Connection, Context};

/// Receive buffer of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct ReceiveWindow {
    /// Memory that received packets may occupy (`sk_rcvbuf`).
    bytes: u32,
    /// Largest size that it grows to; the size itself if an option fixed that.
    largest: u32,
    /// Largest window (`TCP_WINDOW_CLAMP`).
    clamp: u32,
    /// Measurement of what the reader takes in a round trip.
    measured_from: Seq,
    measured_us: u64,
    /// Bytes that it took in the best round trip.
    space: u32,
}

/// Shift of the windows that we announce: enough for the largest buffer.
pub(in crate::tcp) fn scale_for(options: &TcpOptions, config: &TcpConfig) -> u8 {
    let largest = options.rcvbuf.unwrap_or(config.rmem.1).max(config.rmem.0);
    let largest = largest.min(options.window_clamp.unwrap_or(u32::MAX)).max(1);
    let bits = u8::try_from(largest.ilog2()).unwrap_or(0);
    bits.saturating_sub(15).min(MAX_WINDOW_SCALE)
}

impl ReceiveWindow {
    pub(in crate::tcp) fn new(options: &TcpOptions, config: &TcpConfig) -> Self {
        Self {
            bytes: options.rcvbuf.unwrap_or(config.rmem.0),
            largest: options.rcvbuf.unwrap_or(config.rmem.1),
            clamp: options.window_clamp.unwrap_or(u32::MAX),
            measured_from: Seq(0),
            measured_us: 0,
            space: 0,
        }
    }

    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Window for a memory of `bytes`: half of it, as packets occupy more than their payload.
    fn of_memory(bytes: u32) -> u32 {
        bytes / 2
    }

    /// Window of a SYN: not scaled, in whole segments.
    pub(in crate::tcp) fn initial_window(&self, mss: u32) -> u32 {
        let window = Self::of_memory(self.bytes).min(self.clamp).min(u16::MAX.into());
        if window > mss { window / mss * mss } else { window }
    }

    pub(super) fn begin(&mut self, next: Seq, mss: u32, now_us: u64) {
        (self.measured_from, self.measured_us) = (next, now_us);
        self.space = 10 * mss;
    }

    /// Grows the buffer if the reader took more in this round trip than in any before.
    fn adjust(&mut self, read: Seq, (rtt_us, mss): (u64, u32), now_us: u64, may_grow: bool) {
        if now_us.saturating_sub(self.measured_us) < rtt_us {
            return;
        }
        let taken = read.bytes_since(self.measured_from);
        if taken > self.space {
            if may_grow {
                // Twice what was taken, and the growth of slow start until then.
                let grown = u64::from(taken) * 2 + 16 * u64::from(mss);
                let slow_start =
                    grown * u64::from(taken - self.space) / u64::from(self.space.max(1));
                let memory = (grown + 2 * slow_start) * 2;
                let memory = u32::try_from(memory).unwrap_or(u32::MAX).min(self.largest);
                self.bytes = self.bytes.max(memory);
            }
            self.space = taken;
        }
        (self.measured_from, self.measured_us) = (read, now_us);
    }
}

impl Connection {
    /// Window to announce, not below what was announced before; also notes it as announced.
    pub(super) fn select_window(&mut self, cx: &Context<'_>) -> u32 {
        let current = self.usable_window();
        let scale = self.agreed.scales.map_or(0, |(_, ours)| ours);
        let step = 1_u32 << scale;
        let mut window = self.free_window();
        if window < current {
            // RFC 9293, section 3.8.6.2.1: a window never shrinks.
            window = current.div_ceil(step) * step;
        }
        window = window.min(u32::from(u16::MAX) << scale);
        if window >> scale == 0 && self.receive.window > 0 {
            cx.counters.to_zero_window.add(1);
        }
        self.receive.window = window;
        self.receive.acked = self.receive.next;
        window >> scale
    }

    /// Window by the free part of the buffer, without silly sizes (RFC 9293, section 3.8.6.2.2).
    pub(super) fn free_window(&self) -> u32 {
        let buffer = &self.receive.buffer;
        let full = ReceiveWindow::of_memory(buffer.bytes).min(buffer.clamp);
        let free = buffer.bytes.saturating_sub(self.receive.queue.truesize());
        let mut free = ReceiveWindow::of_memory(free).min(full);
        let segment = self.delayed.segment_bytes().min(full);
        if free < full / 2 {
            if let Some((_, scale)) = self.agreed.scales {
                free = free >> scale << scale;
            }
            if free < full >> 4 || free < segment {
                return 0;
            }
        }
        match self.agreed.scales {
            // Rounded up, or a window of full size would never be announced.
            Some((_, scale)) => free.div_ceil(1 << scale) << scale,
            None => {
                let window = self.receive.window;
                if segment > 0 && (window + segment <= free || window > free) {
                    free / segment * segment
                } else {
                    window
                }
            }
        }
    }

    /// After the reader took bytes: grows the buffer, and tells the peer of a window that opened
    /// (`tcp_cleanup_rbuf`).
    pub(super) fn after_read(&mut self, taken: usize, cx: &mut Context<'_>) {
        let rtt_us = self.rtt.smoothed_us().unwrap_or(0);
        let (read, mss) = (self.read_seq(), self.announced_mss());
        let may_grow = !cx.is_memory_tight;
        self.receive.buffer.adjust(read, (rtt_us, mss), cx.now_us, may_grow);
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
                let window = self.free_window();
                if window > 0 && window >= 2 * current {
                    self.send_ack(cx);
                }
            }
        }
    }
}
