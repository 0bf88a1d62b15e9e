//! Connections that are opened by data in a SYN (RFC 7413): those of a listener begin before their handshake is over.

use std::num::NonZeroU8;

use forebay_rx::packet::Packet;

use super::super::config::{MIN_MSS, RTO_INITIAL_US};
use super::super::error::TcpError;
use super::super::fast_open::{CookieOption, Refused};
use super::super::receive_queue::Payload;
use super::super::seq::Seq;
use super::super::wire::{Flags, Outgoing, Segment, Timestamps};
use super::ack::AckFacts;
use super::busy_time::Sending;
use super::info::Cause;
use super::open::{Accepted, Answer, Begin};
use super::sent::{Ending, Marks};
use super::{Connection, Context, Phase, State, WriteFlags};

/// Bytes of the longest options of a header (`MAX_TCP_OPTION_SPACE`).
const MAX_OPTION_BYTES: u32 = 40;

/// Facts about how a connection is or was opened, in one byte.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Opening(u8);

impl Opening {
    /// `connect` was called, and no second one has told the outcome (`SS_CONNECTING`).
    pub(super) const CONNECTING: Self = Self(1);
    /// Connection of a listener, whose SYN-ACK is not acknowledged (`fastopen_rsk`).
    pub(super) const AWAITS_ACK: Self = Self(1 << 1);
    /// Connection of a listener, which the application has accepted. Shares its bit with
    /// [`NO_COOKIE`](Self::NO_COOKIE) of clients: a connection is a listener's or a client's.
    pub(super) const ACCEPTED: Self = Self(1 << 2);
    /// The SYN had data, and they were taken (`syn_data_acked`).
    pub(super) const DATA_TAKEN: Self = Self(1 << 3);
    /// Connection of a client, whose SYN is sent with the first data (`DEFER_CONNECT`).
    pub(super) const WAITS_FOR_DATA: Self = Self(1 << 4);
    /// Connection of a client, whose SYN needs no cookie to have data. Shares its bit with
    /// [`ACCEPTED`](Self::ACCEPTED) of listeners.
    pub(super) const NO_COOKIE: Self = Self(1 << 2);
    /// Connection of a client, whose SYN had an option of Fast Open (`syn_fastopen`).
    pub(super) const OFFERED: Self = Self(1 << 5);
    /// The option was in the experimental form (`syn_fastopen_exp`). Shares its bit with
    /// [`BEGAN_WITH_SYN`](Self::BEGAN_WITH_SYN) of listeners.
    pub(super) const EXPERIMENTAL: Self = Self(1 << 6);
    /// Connection of a client, whose caller waits to write more: the ACK of the SYN-ACK waits for that
    /// (`sk_write_pending`).
    pub(super) const WRITER_WAITS: Self = Self(1 << 7);
    /// Connection of a listener, which began with its SYN. Shares its bit with [`EXPERIMENTAL`](Self::EXPERIMENTAL) of
    /// clients, of which a SYN was [`OFFERED`](Self::OFFERED).
    const BEGAN_WITH_SYN: Self = Self(1 << 6);

    pub(super) const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True of a connection of a listener that began with its SYN (`syn_fastopen_child`).
    pub(super) fn began_with_syn(self) -> bool {
        self.has(Self::BEGAN_WITH_SYN) && !self.has(Self::OFFERED)
    }

    /// True if one of the facts holds.
    pub(super) fn has(self, fact: Self) -> bool {
        self.0 & fact.0 != 0
    }

    pub(super) fn note(&mut self, fact: Self) {
        self.0 |= fact.0;
    }

    pub(super) fn forget(&mut self, fact: Self) {
        self.0 &= !fact.0;
    }
}

/// Fast Open of a client's SYN: none by default.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::tcp) struct FastConnect<'a> {
    /// Cookie of the server, or the request for one.
    pub(in crate::tcp) option: Option<CookieOption>,
    /// Segment size that the server announced before.
    pub(in crate::tcp) mss: Option<u16>,
    /// Data to send, as many as fit with the SYN.
    pub(in crate::tcp) bytes: &'a [u8],
    /// True if data may go with the SYN: a cookie is known, or none is needed, and Fast Open does not pause.
    pub(in crate::tcp) takes_data: bool,
    /// Flags of the write of the data.
    pub(in crate::tcp) flags: WriteFlags,
}

impl Connection {
    /// True of a listener's connection that began with its SYN, until the SYN-ACK is acknowledged.
    pub(in crate::tcp) fn awaits_ack(&self) -> bool {
        self.opening.has(Opening::AWAITS_ACK)
    }

    /// Notes that the application has the connection.
    pub(in crate::tcp) fn note_accepted(&mut self) {
        self.opening.note(Opening::ACCEPTED);
    }

    /// True of a connection that the application had accepted, and the peer has reset.
    pub(in crate::tcp) fn was_reset_after_accept(&self) -> bool {
        self.opening.has(Opening::ACCEPTED) && self.error == Some(TcpError::Reset)
    }

    /// Creates the connection of a SYN whose cookie is valid, or that needs none: takes its data, and sends the SYN-ACK
    /// (`tcp_fastopen_create_child`).
    pub(in crate::tcp) fn accept_fast_open(
        begin: &Begin,
        accepted: &Accepted,
        packet: Packet,
        segment: &Segment,
        cookie: Option<&CookieOption>,
        cx: &mut Context<'_>,
    ) -> Self {
        let mut connection = Self::accept(begin, accepted, cx);
        connection.opening.note(Opening::AWAITS_ACK.with(Opening::BEGAN_WITH_SYN));
        let send = &mut connection.send;
        send.una = send.next;
        (send.window, send.max_window) = (segment.window.into(), segment.window.into());
        connection.begin_transfer(cx);
        connection.begin_mtu_search(cx);
        connection.tally.data_segs_in = u32::from(segment.payload_len > 0);
        connection.take_syn_data(packet, segment, cx);
        connection.receive.acked = connection.receive.next;
        let first_window = u16::try_from(accepted.window).unwrap_or(u16::MAX);
        connection.recovery.repair.first_window = first_window;
        connection.transmit_answer(cookie, cx);
        connection.timers.set_retransmit(cx.now_us + RTO_INITIAL_US);
        connection
    }

    /// Queues the data of a SYN, or of a SYN-ACK, which may have a FIN (`tcp_fastopen_add_skb`).
    pub(super) fn take_syn_data(
        &mut self,
        packet: Packet,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) {
        let has_fin = segment.has(Flags::FIN);
        if segment.payload_len == 0 && !has_fin {
            return cx.pool.put(packet.frame);
        }
        let payload = Payload::of(packet, segment.seq + 1, segment.payload_len, false);
        self.receive.next = self.receive.queue.append(payload, self.receive.next, cx.pool);
        self.receive.next += u32::from(has_fin);
        self.tally.bytes_received = segment.payload_len.into();
        self.opening.note(Opening::DATA_TAKEN);
        if has_fin {
            self.take_fin(cx);
        }
    }

    /// Sends the SYN-ACK of a listener's connection.
    fn transmit_answer(&mut self, cookie: Option<&CookieOption>, cx: &mut Context<'_>) {
        let flow = self.flow();
        let mss = u16::try_from(self.announced_mss()).unwrap_or(u16::MAX);
        let stamps = Timestamps { value: self.timestamp(cx.now_us), echo: self.receive.timestamp };
        let (flags, options) = self.agreed.syn_ack(mss, stamps);
        let outgoing = Outgoing {
            ack: self.receive.next,
            flags,
            window: self.recovery.repair.first_window,
            options,
            fast_open: cookie,
            tos: self.options.tos,
            ttl: self.options.ttl,
            ..Outgoing::empty(&flow, self.send.initial)
        };
        if !cx.send(&outgoing) {
            cx.counters.no_frame.add(1);
        }
    }

    fn resend_answer(&mut self, cx: &mut Context<'_>) {
        self.transmit_answer(None, cx);
        cx.counters.retrans_segs.add(1);
        self.resent.count(Cause::Timeout);
    }

    /// Looks at a segment before the handshake is over, as a listener does at one of a request (`tcp_check_req`). An
    /// answer ends the segment's way.
    pub(super) fn check_opening(
        &mut self,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> Option<Answer> {
        let (has_ack, has_rst) = (segment.has(Flags::ACK), segment.has(Flags::RST));
        let recent = self.receive.timestamp;
        let stamps = segment.options.timestamps.filter(|_| self.agreed.timestamps && recent != 0);
        let is_old = stamps.is_some_and(|it| recent.wrapping_sub(it.value).cast_signed() > 0);
        let is_first = segment.seq == self.receive.initial;
        if is_first && segment.has(Flags::SYN) && !has_ack && !has_rst && !is_old {
            if self.may_answer_invalid(cx) {
                self.resend_answer(cx);
            }
            return Some(Answer::None);
        }
        if is_old || !self.is_in_first_window(segment) {
            if !has_rst && (segment.carries_data() || self.may_answer_invalid(cx)) {
                self.send_ack(cx);
            }
            if is_old {
                cx.counters.paws_estab.add(1);
            }
            return Some(Answer::None);
        }
        if has_rst {
            // The listener's limit counts it: its sender's address may be false, and the host there resets.
            if segment.seq == self.receive.next {
                self.reset(cx);
            } else {
                self.challenge(cx);
            }
            return Some(Answer::None);
        }
        if segment.has(Flags::SYN) && !is_first {
            // Another SYN does not end the connection: anybody may send it.
            cx.counters.attempt_fails.add(1);
            return Some(Answer::Reset);
        }
        (!has_ack).then_some(Answer::None)
    }

    /// `tcp_in_window`, with the window that the SYN-ACK announced.
    fn is_in_first_window(&self, segment: &Segment) -> bool {
        let (start, (seq, seq_end)) = (self.receive.next, (segment.seq, segment.end()));
        let end = start + u32::from(self.recovery.repair.first_window);
        seq == start
            || seq_end.is_after(start) && seq.is_before(end)
            || seq == end && seq == seq_end
    }

    /// The SYN-ACK was not acknowledged in time (`tcp_fastopen_synack_timer`). Data that were sent meanwhile wait for that,
    /// too.
    pub(super) fn on_answer_timer(&mut self, cx: &mut Context<'_>) {
        cx.counters.timeouts.add(1);
        // One more than of a handshake: an application may work on it already.
        let of_host = cx.config.synack_retries.saturating_add(1);
        let timeouts = self.recovery.syn_timeouts;
        if timeouts >= self.options.rare.syn_retries.map_or(of_host, NonZeroU8::get) {
            return self.give_up(cx);
        }
        if self.recovery.retransmits == 1 {
            self.enter_loss(cx);
        }
        self.resend_answer(cx);
        self.recovery.syn_timeouts = timeouts + 1;
        self.count_timeout(cx.now_us);
        if self.recovery.repair.retransmit_stamp_us == 0 {
            self.recovery.repair.retransmit_stamp_us = cx.now_us;
        }
        let wait_us = RTO_INITIAL_US << (timeouts + 1).min(7);
        self.timers.set_retransmit(cx.now_us + wait_us.min(self.rtt.max_us()));
    }

    /// The SYN-ACK, which was sent at `began_us`, is acknowledged (`tcp_rcv_synrecv_state_fastopen`).
    pub(super) fn end_fast_opening(
        &mut self,
        segment: &Segment,
        began_us: u64,
        cx: &mut Context<'_>,
    ) {
        self.opening.forget(Opening::AWAITS_ACK);
        if self.state == State::SynReceived {
            self.establish(segment, began_us, cx);
        }
        if self.recovery.phase == Phase::Loss && self.sent.is_empty() {
            let stamps = segment.options.timestamps.filter(|stamps| stamps.echo != 0);
            let echo = stamps.map(|stamps| stamps.echo);
            let facts = AckFacts { una_advanced: true, echo, ..AckFacts::default() };
            // Ignored: nothing is in flight that the phase could be about.
            let _ = self.undo_recovery(&facts, cx);
        }
        self.end_timeout_recovery(cx.now_us);
        self.recovery.retransmits = 0;
        if self.recovery.phase != Phase::Recovery && self.sent.retransmitted == 0 {
            self.recovery.repair.retransmit_stamp_us = 0;
        }
        self.rearm_retransmit(cx.now_us);
    }

    /// Transition to ESTABLISHED of a connection that has transferred data before.
    fn establish(&mut self, segment: &Segment, began_us: u64, cx: &mut Context<'_>) {
        // The SYN-ACK.
        self.tally.delivered += 1;
        if self.rtt.smoothed_us().is_none() && self.resent.total() == 0 {
            self.rtt.add(cx.now_us.saturating_sub(began_us), cx.now_us, true);
        }
        self.sample_answer(segment, cx.now_us);
        self.state = State::Established;
        self.send.window = u32::from(segment.window) << self.agreed.send_scale();
        self.send.max_window = self.send.max_window.max(self.send.window);
        self.send.window_seq = segment.seq;
        self.set_mss(cx.config);
        self.send.last_data_us = cx.now_us;
        let mss = self.announced_payload().min(self.send.mss);
        self.delayed.begin(self.receive.window, mss, self.announced_mss());
        if self.shut.send {
            // Shut down before: the FIN goes out now.
            self.close_sending(cx);
        }
    }

    /// True of a client's connection whose SYN is sent with the first data.
    pub(in crate::tcp) fn waits_for_data(&self) -> bool {
        self.opening.has(Opening::WAITS_FOR_DATA)
    }

    /// Lets data go with the SYN of a client's connection without a cookie.
    pub(in crate::tcp) fn allow_no_cookie(&mut self) {
        self.opening.note(Opening::NO_COOKIE);
    }

    /// True of a client's connection whose SYN may have data without a cookie.
    pub(in crate::tcp) fn needs_no_cookie(&self) -> bool {
        self.opening.has(Opening::NO_COOKIE)
    }

    /// True if the SYN, which is not answered, had data.
    pub(super) fn has_syn_data(&self) -> bool {
        self.send.next.is_after(self.send.initial + 1)
    }

    /// Queues data of a SYN, as many as fit, and records them as sent (`tcp_send_syn_data`). Returns their number.
    pub(super) fn put_into_syn(&mut self, fast: &FastConnect<'_>, cx: &Context<'_>) -> u32 {
        if let Some(mss) = fast.mss.filter(|_| fast.takes_data) {
            // Until the server's answer: as much as it announced before.
            let of_user = self.options.rare.max_segment.unwrap_or(u16::MAX);
            self.send.peer_mss = u32::from(mss.min(of_user)).max(MIN_MSS);
            self.set_mss(cx.config);
        }
        let room = if fast.takes_data { self.syn_room(fast.mss) as usize } else { 0 };
        let bytes = fast.bytes.get(..room).unwrap_or(fast.bytes);
        if let Some(option) = fast.option {
            self.opening.note(Opening::OFFERED);
            if option.is_experimental {
                self.opening.note(Opening::EXPERIMENTAL);
            }
        }
        if fast.flags.waits && bytes.len() < fast.bytes.len() {
            self.opening.note(Opening::WRITER_WAITS);
        }
        if bytes.is_empty() {
            return 0;
        }
        self.begin_sending(Sending::Busy, cx.now_us);
        let begin = self.send.next;
        self.send.queue.write(bytes);
        self.note_zero_copy(bytes.len(), false, fast.flags);
        let end = self.send.queue.end();
        (self.send.next, self.send.pushed) = (end, end);
        let marks = Marks { ending: Ending::Pushed, ..Marks::default() };
        self.record_sent(begin, end, marks, cx);
        end - begin
    }

    /// Payload of a SYN at most: by what the server announced before, and with room for all options that there can be, some
    /// of which others on the way may add.
    fn syn_room(&self, mss: Option<u16>) -> u32 {
        let of_server = mss.map_or(u32::MAX, u32::from);
        self.announced_mss().min(of_server).saturating_sub(MAX_OPTION_BYTES)
    }

    /// Removes data of the SYN that a SYN-ACK acknowledges.
    pub(super) fn acknowledge_syn_data(&mut self, ack: Seq, now_us: u64) {
        while self.sent.first().is_some_and(|sent| !sent.end.is_after(ack)) {
            self.sent.pop();
        }
        self.sent.trim(ack);
        self.send.queue.acknowledge(ack);
        self.report_acknowledged(ack, now_us);
        if self.sent.is_empty() {
            self.end_sending(Sending::Busy, now_us);
        }
    }

    /// Notes what the SYN-ACK tells of the server, and takes its data (`tcp_rcv_fastopen_synack`). Data of the SYN that it
    /// does not acknowledge are sent again: returns true if so.
    pub(super) fn end_fast_connect(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> bool {
        let (has_offered, has_data) = (self.opening.has(Opening::OFFERED), self.has_syn_data());
        // A cookie that was not asked for is none.
        let offer = packet.as_ref().and_then(Segment::fast_open_of).filter(|_| has_offered);
        let is_refused = has_offered && offer.is_none() && self.resent.total() == 0 && !has_data;
        let refused = match is_refused {
            true if self.opening.has(Opening::EXPERIMENTAL) => Refused::Both,
            true => Refused::Standard,
            false => Refused::Neither,
        };
        let cookie = offer.filter(|offer| !offer.cookie.is_request());
        // Without the option, it is the default (RFC 7413, section 4.1.3.1).
        let mss = segment.options.mss.unwrap_or_else(|| self.flow().default_mss());
        cx.fast_open.learn(&self.flow(), Some(mss), cookie, refused, cx.now_us);
        if !self.sent.is_empty() {
            cx.counters.fast_open_active_fail.add(1);
            self.resend_syn_data(cx);
            return true;
        }
        if has_data {
            self.opening.note(Opening::DATA_TAKEN);
            cx.counters.fast_open_active.add(1);
            cx.fast_open.forget_black_holes();
        }
        if let Some(packet) = packet.take() {
            self.take_syn_data(packet, segment, cx);
        }
        false
    }

    /// Has data of the SYN sent again at once, as nothing else: their loss says nothing about the path.
    pub(super) fn resend_syn_data(&mut self, cx: &mut Context<'_>) {
        let mut facts = AckFacts::default();
        for index in 0..self.sent.len() as usize {
            self.mark_lost(index, &mut facts);
        }
        let room = self.segment_room();
        self.sent.split_all(room);
        self.enter_simple_recovery();
        self.resend_lost(cx);
    }

    /// Pauses Fast Open of all clients once a path seems to swallow its SYNs or what follows them
    /// (`tcp_fastopen_active_detect_blackhole`).
    pub(super) fn detect_black_hole(&self, is_over: bool, cx: &Context<'_>) {
        let retransmits = self.recovery.retransmits;
        let is_third = retransmits == 2 || retransmits < 2 && is_over;
        let is_client = self.opening.has(Opening::OFFERED)
            || self.state == State::SynSent && self.has_syn_data();
        if is_client && is_third && cx.config.fast_open_blackhole_timeout_us > 0 {
            cx.counters.fast_open_blackhole.add(1);
            cx.fast_open.note_black_hole(cx.now_us);
        }
    }

    /// First sequence number of ours that an error of the path may be about.
    pub(super) fn first_outstanding(&self) -> Seq {
        if self.awaits_ack() { self.send.initial } else { self.send.una }
    }
}
