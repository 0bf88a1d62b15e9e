//! Writes: bytes into packets, as long as the send buffer has memory for these (`tcp_sendmsg_locked`).

use std::num::NonZeroU32;

use super::super::config::INITIAL_CWND;
use super::super::error::TcpError;
use super::busy_time::Sending;
use super::{Connection, Context, State};

/// Memory of a packet beside its payload, in bytes: its headers, `skb_shared_info` and `sk_buff`
/// (`tcp_stream_alloc_skb`).
const SHARED_INFO_BYTES: u32 = 320;
const SK_BUFF_BYTES: u32 = 256;
const HEADERS_BYTES: u32 = 256;
const PACKET_BYTES: u32 = HEADERS_BYTES + SHARED_INFO_BYTES + SK_BUFF_BYTES;

/// Time in µs by which the clock of a write may be ahead of that of the next call.
const WRITE_SKEW_MAX_US: u64 = 8;

/// Flags of a write.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WriteFlags {
    /// The last byte is urgent, or the last one that is taken (`MSG_OOB`).
    pub is_urgent: bool,
    /// More follows at once: a segment that is not full waits for it (`MSG_MORE`).
    pub more_follows: bool,
    /// A record ends here: later bytes are not merged with these into a packet (`MSG_EOR`).
    pub ends_record: bool,
    /// The packet ends here with PSH, however short it is: the kernel's has no place for more pieces of memory
    /// (`MAX_SKB_FRAGS`).
    pub ends_packet: bool,
    /// Asks for a report once the bytes are needed no more, if the socket gives such (`MSG_ZEROCOPY`).
    pub zero_copy: bool,
    /// The caller goes on with what is not taken: times are those of the end.
    pub waits: bool,
    /// Rest of the bytes of a call that has written others before.
    pub is_rest: bool,
}

impl Connection {
    /// Memory of the packets that are not acknowledged (`sk_wmem_queued`).
    pub(super) fn queued_memory(&self) -> u32 {
        let packets = self.sent.packets() + self.send.queue.unsent_packets(self.send.next);
        self.send.queue.len_bytes().saturating_add(packets.saturating_mul(PACKET_BYTES))
    }

    /// True if another packet may be begun (`sk_stream_memory_free`).
    pub(super) fn has_write_memory(&self) -> bool {
        let is_few = |limit: NonZeroU32| self.unsent_bytes() < limit.get();
        self.queued_memory() < self.send.buffer_bytes
            && self.options.rare.unsent_limit.is_none_or(is_few)
    }

    /// Bytes that a write in packets of `goal` bytes may add, unless it is sent meanwhile.
    fn write_room(&self, goal: u32) -> u32 {
        let free = self.send.buffer_bytes.saturating_sub(self.queued_memory());
        let few = |limit: NonZeroU32| limit.get().saturating_sub(self.unsent_bytes());
        free.min(self.options.rare.unsent_limit.map_or(u32::MAX, few)).saturating_add(goal)
    }

    /// True if a poll tells that bytes can be written: a third of the buffer is free
    /// (`sk_stream_is_writeable`).
    pub(super) fn is_writable(&self) -> bool {
        let (queued, buffer) = (self.queued_memory(), self.send.buffer_bytes);
        let few_unsent = |limit: NonZeroU32| self.unsent_bytes().saturating_mul(2) < limit.get();
        queued < buffer
            && buffer - queued >= queued / 2
            && self.options.rare.unsent_limit.is_none_or(few_unsent)
    }

    /// Queues bytes to be sent, and returns their number.
    pub(in crate::tcp) fn write(
        &mut self,
        bytes: &[u8],
        flags: WriteFlags,
        cx: &mut Context<'_>,
    ) -> Result<usize, TcpError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        match self.state {
            State::Established | State::CloseWait if !self.shut.send => {}
            State::SynReceived if self.awaits_ack() && !self.shut.send => {}
            State::SynSent | State::SynReceived if !self.awaits_ack() => {
                return Err(TcpError::WouldBlock);
            }
            _ => return Err(TcpError::BrokenPipe),
        }
        if !flags.is_rest {
            self.note_application_limit();
        }
        if bytes.is_empty() {
            return Ok(0);
        }
        self.check_reports(flags)?;
        self.restart_after_idle(cx);
        let appends = self.appends_to_zero_copy(flags);
        let len = self.fill_packets(bytes, flags, cx);
        let is_whole = len == bytes.len();
        self.send.is_full |= !is_whole;
        if len == 0 {
            return Err(TcpError::WouldBlock);
        }
        self.note_zero_copy(len, appends, flags);
        if is_whole && !flags.ends_packet || !flags.waits {
            self.ask_times();
        }
        let more_follows = flags.more_follows && is_whole;
        let is_pushed = !more_follows || flags.ends_packet || self.is_push_forced();
        if self.unsent_bytes() > 0 && is_pushed {
            self.mark_push();
        }
        if flags.is_urgent {
            self.send.urgent = Some(self.send.queue.end());
        }
        if more_follows {
            self.send_full(cx);
        } else if is_whole {
            self.send_queued(cx);
        } else {
            // The writer waits for memory: what there is shall not wait for it.
            self.push(cx);
        }
        Ok(len)
    }

    /// Writes bytes into packets, and sends those that are full. Returns the number of bytes.
    fn fill_packets(&mut self, bytes: &[u8], flags: WriteFlags, cx: &mut Context<'_>) -> usize {
        let goal = if flags.is_urgent { self.segment_room() } else { self.packet_goal(cx) };
        let (began_us, is_zero_copy) = (cx.now_us, self.is_zero_copy(flags));
        let (mut left, mut is_first) = (bytes, true);
        while !left.is_empty() {
            let is_last_full = self.send.queue.is_last_full(self.send.next, goal);
            if is_last_full && !self.has_write_memory() {
                break;
            }
            if is_first {
                self.send.queue.reserve(bytes.len().min(self.write_room(goal) as usize));
            }
            if self.unsent_bytes() == 0 {
                self.begin_sending(Sending::Busy, cx.now_us);
            }
            let room = self.send.queue.begin_packet(self.send.next, goal, is_first) as usize;
            let (now, later) = left.split_at(room.min(left.len()));
            self.send.queue.write(now);
            if is_zero_copy {
                self.send.queue.last_marks().is_zero_copy = true;
            }
            (left, is_first) = (later, false);
            if left.is_empty() || flags.is_urgent {
                continue;
            }
            if self.is_push_forced() {
                self.mark_push();
                self.push(cx);
            } else if self.send.queue.packet_at(self.send.next).is_last {
                self.push_one(cx);
            } else {
                continue;
            }
            // As in the kernel, each packet has a later time than the one before, by which RACK orders them; never so
            // far ahead that it distorts a round trip.
            if cx.now_us < began_us + WRITE_SKEW_MAX_US {
                cx.now_us += 1;
            }
        }
        if (flags.ends_record || flags.ends_packet) && left.is_empty() {
            self.send.queue.last_marks().ends_record = true;
        }
        bytes.len() - left.len()
    }

    /// True if more than half of the peer's largest window was written since the last PSH (`forced_push`): a
    /// reader is woken twice per window at least.
    fn is_push_forced(&self) -> bool {
        self.send.queue.end().is_after(self.send.pushed + self.send.max_window / 2)
    }

    /// Has the last packet end with PSH (`tcp_mark_push`).
    fn mark_push(&mut self) {
        self.send.pushed = self.send.queue.end();
        self.send.queue.last_marks().is_pushed = true;
    }

    /// After an ACK: gives a writer that waits for memory a larger buffer, if the congestion window is larger than
    /// it holds (`tcp_check_space`).
    pub(super) fn check_send_buffer(&mut self, cx: &Context<'_>) {
        if !self.send.is_full && self.is_writable() {
            return;
        }
        let may_grow = self.options.rare.sndbuf.is_none() && !cx.memory.is_tight;
        if may_grow && self.sent.in_flight() < self.congestion.cwnd {
            self.expand_send_buffer(cx);
            self.recovery.stamp_window(cx.now_us);
        }
        if self.is_writable() {
            self.send.is_full = false;
            self.end_sending(Sending::SendBuffer, cx.now_us);
        }
    }

    /// Enlarges the send buffer to what the congestion window needs, twice (`tcp_sndbuf_expand`).
    pub(super) fn expand_send_buffer(&mut self, cx: &Context<'_>) {
        let mss = self.send.mss.max(self.send.peer_mss);
        let data_bytes = (mss + HEADERS_BYTES + SHARED_INFO_BYTES).next_power_of_two();
        let segments =
            self.congestion.cwnd.max(INITIAL_CWND).max(self.recovery.reordering.saturating_add(1));
        let wanted = u64::from(segments) * 2 * u64::from(data_bytes + SK_BUFF_BYTES);
        let wanted = u32::try_from(wanted).unwrap_or(u32::MAX).min(cx.config.wmem.1);
        self.send.buffer_bytes = self.send.buffer_bytes.max(wanted);
    }
}
