//! Handshakes: a client's SYN, a server's connection made of its request, simultaneous open.

use forebay_rx::packet::Packet;

use super::super::config::{
    DEFAULT_MSS, DELACK_MAX_US, MIN_MSS, TIMEOUT_MIN_US, TcpConfig, TcpOptions,
};
use super::super::congestion::Congestion;
use super::super::error::TcpError;
use super::super::flow::{Flow, PackedFlow};
use super::super::invalid_limit::InvalidLimit;
use super::super::on_demand::OnDemand;
use super::super::receive_queue::ReceiveQueue;
use super::super::rtt::RoundTrip;
use super::super::sack::SackReport;
use super::super::send_queue::SendQueue;
use super::super::seq::Seq;
use super::super::wire::{Flags, Options, Segment};
use super::busy_time::BusyTime;
use super::fast_open::{FastConnect, Opening};
use super::info::Resent;
use super::options::ConnectionOptions;
use super::rate::DeliveryRate;
use super::sent::Marks;
use super::tally::Tally;
use super::window::{ReceiveWindow, scale_for};
use super::{
    Agreed, Connection, Context, DelayedAck, ReceiveState, Recovery, SendState, Shut, State,
    Timers, WindowScales,
};

/// Size of a packet to which a tiny window cannot push the segments, and of a header.
const SMALLEST_PACKET_BYTES: u32 = 68;
const TCP_HEADER_BYTES: u32 = 20;

/// Numbers that a connection begins with.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Begin {
    pub(in crate::tcp) flow: Flow,
    pub(in crate::tcp) options: TcpOptions,
    pub(in crate::tcp) sequence: Seq,
    pub(in crate::tcp) timestamp_offset: u32,
    pub(in crate::tcp) mtu_bytes: u32,
    pub(in crate::tcp) now_us: u64,
}

/// Facts of a handshake that a server completed.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Accepted {
    /// The peer's initial sequence number.
    pub(in crate::tcp) peer_sequence: Seq,
    pub(in crate::tcp) peer_mss: u16,
    pub(in crate::tcp) agreed: Agreed,
    /// The peer's timestamp.
    pub(in crate::tcp) timestamp: u32,
    /// Window that the SYN-ACK announced.
    pub(in crate::tcp) window: u32,
    /// Time when the SYN-ACK was sent, in µs; `None` if it was sent more than once.
    pub(in crate::tcp) sent_us: Option<u64>,
    /// Time-outs of the SYN-ACK (`num_timeout`), and the time since it was sent first, in ms, if there are any.
    pub(in crate::tcp) timeouts: u8,
    pub(in crate::tcp) timeouts_ms: u32,
    /// True if SYN-ACKs were lost, the first one among them.
    pub(in crate::tcp) was_answer_lost: bool,
    /// Times that the SYN-ACK was sent again (`num_retrans`).
    pub(in crate::tcp) resent: u8,
}

impl Connection {
    fn new(begin: &Begin, config: &TcpConfig) -> Self {
        let Begin { flow, options, sequence, now_us, .. } = *begin;
        let send = SendState {
            initial: sequence,
            una: sequence,
            next: sequence,
            window: 0,
            window_seq: Seq(0),
            max_window: 0,
            mss: u32::from(DEFAULT_MSS),
            peer_mss: u32::from(DEFAULT_MSS),
            path_mtu: begin.mtu_bytes,
            search: None,
            queue: SendQueue::new(sequence + 1),
            fin: false,
            small_end: sequence,
            pushed: sequence,
            urgent: None,
            burst: sequence,
            paced_ns: 0,
            last_data_us: now_us,
            buffer_bytes: options.sndbuf.unwrap_or(config.wmem.0),
            is_full: false,
            is_last_empty: false,
        };
        let receive = ReceiveState {
            initial: Seq(0),
            next: Seq(0),
            acked: Seq(0),
            window: 0,
            queue: ReceiveQueue::default(),
            sacks: SackReport::default(),
            buffer: ReceiveWindow::new(&options, config),
            timestamp: 0,
            timestamp_us: 0,
            has_fin: false,
            urgent: None,
            is_marked: false,
            was_capable: false,
            last_us: now_us,
        };
        Self {
            ends: PackedFlow::of(&flow),
            state: State::Closed,
            options: ConnectionOptions::of(&options),
            agreed: Agreed::default(),
            timestamp_offset: begin.timestamp_offset,
            send,
            receive,
            sent: OnDemand::default(),
            recovery: Recovery::new(sequence, config.reordering),
            congestion: Congestion::new(options.congestion.unwrap_or(config.congestion)),
            rtt: RoundTrip::limited(options.rto_max_us(config)),
            delayed: DelayedAck::default(),
            timers: Timers::default(),
            shut: Shut::default(),
            error: None,
            soft_error: None,
            errors: OnDemand::default(),
            capable: OnDemand::default(),
            opening: Opening::default(),
            is_orphan: false,
            invalid_limit: InvalidLimit::default(),
            cwr_is_due: false,
            resent: Resent::default(),
            tally: Tally::default(),
            busy: BusyTime::default(),
            rate: DeliveryRate::INITIAL,
            leaving: None,
        }
    }

    /// Opens a connection, whose SYN is sent by [`Self::send_syn`], and echoes `recent`: the peer's last timestamp, of an
    /// earlier connection with the same ends, or 0.
    pub(in crate::tcp) fn connect(begin: &Begin, recent: u32, cx: &mut Context<'_>) -> Self {
        let mut connection = Self::new(begin, cx.config);
        (connection.receive.timestamp, connection.receive.timestamp_us) = (recent, cx.now_us);
        connection.agreed = Agreed {
            timestamps: cx.config.timestamps,
            sack: cx.config.sack,
            ecn: cx.config.asks_ecn,
            scales: cx
                .config
                .window_scaling
                .then(|| WindowScales { send: 0, receive: scale_for(&begin.options, cx.config) }),
        };
        connection.send.peer_mss = begin
            .options
            .max_segment
            .map_or_else(|| u32::from(begin.flow.default_mss()), u32::from)
            .max(MIN_MSS);
        // As the kernel: what is offered counts for the first segments, even if the peer does not agree.
        connection.begin_mtu_search(cx);
        connection.state = State::SynSent;
        connection.opening.note(Opening::CONNECTING);
        connection.delayed.set_quick(begin.options.quick_acks);
        connection.receive.window =
            connection.receive.buffer.initial_window(connection.announced_mss());
        connection.receive.buffer.raise_threshold(connection.receive.window);
        connection.opening.note(Opening::WAITS_FOR_DATA);
        connection.set_mss(cx.config);
        connection
    }

    /// Sends the SYN, perhaps with data. Returns the number of bytes.
    pub(in crate::tcp) fn send_syn(
        &mut self,
        fast: &FastConnect<'_>,
        cx: &mut Context<'_>,
    ) -> usize {
        cx.counters.active_opens.add(1);
        self.opening.forget(Opening::WAITS_FOR_DATA);
        let end = self.send.initial + 1;
        (self.send.next, self.send.pushed) = (end, end);
        self.recovery.repair.retransmit_stamp_us = cx.now_us;
        let marks = Marks { is_syn: true, ..Marks::default() };
        self.record_sent(self.send.initial, end, marks, cx);
        let len_bytes = self.put_into_syn(fast, cx);
        self.transmit_syn(fast.option.as_ref(), len_bytes, cx);
        self.timers.set_retransmit(cx.now_us + self.rtt.rto_us());
        len_bytes as usize
    }

    /// Connection of a handshake that the listener completed; the ACK itself is still to be
    /// processed.
    pub(in crate::tcp) fn accept(begin: &Begin, accepted: &Accepted, cx: &mut Context<'_>) -> Self {
        let mut connection = Self::new(begin, cx.config);
        connection.agreed = accepted.agreed;
        connection.state = State::SynReceived;
        let send = &mut connection.send;
        send.next = begin.sequence + 1;
        send.small_end = send.next;
        send.pushed = send.next;
        send.peer_mss = u32::from(accepted.peer_mss).max(MIN_MSS);
        let receive = &mut connection.receive;
        receive.initial = accepted.peer_sequence;
        receive.next = accepted.peer_sequence + 1;
        receive.acked = receive.next;
        receive.window = accepted.window;
        receive.buffer.raise_threshold(accepted.window);
        (receive.timestamp, receive.timestamp_us) = (accepted.timestamp, cx.now_us);
        connection.send.window_seq = connection.receive.initial;
        if let Some(sent_us) = accepted.sent_us {
            connection.rtt.add(cx.now_us.saturating_sub(sent_us), cx.now_us, true);
        }
        if accepted.was_answer_lost {
            // RFC 5681, section 3.1, as for a client.
            connection.congestion.set(1);
        }
        connection.resent.by_timeout = accepted.resent.into();
        connection.recovery.restart(connection.send.next);
        // The SYN.
        connection.tally.segs_in = 1;
        connection.tally.timeouts = accepted.timeouts.into();
        connection.tally.timeout_recoveries = u16::from(accepted.timeouts > 0);
        connection.recovery.timeouts_ms = accepted.timeouts_ms;
        cx.counters.passive_opens.add(1);
        connection.set_mss(cx.config);
        connection
    }

    /// Segment size that our SYNs announce, by the path as it is then.
    pub(super) fn announced_mss(&self) -> u32 {
        if let Some(announced) = self.delayed.announced() {
            return announced;
        }
        let of_path = self.send.path_mtu.saturating_sub(self.flow().header_bytes());
        of_path.min(self.options.rare.max_segment.map_or(u32::MAX, u32::from)).max(MIN_MSS)
    }

    /// Payload of the peer's full segments, by what our SYN announced (`advmss`).
    pub(super) fn announced_payload(&self) -> u32 {
        self.announced_mss().saturating_sub(self.option_bytes())
    }

    /// Sets the segment size by the path, the peer and the options that each segment has.
    pub(super) fn set_mss(&mut self, config: &TcpConfig) {
        // Half of a small window, so that the peer need not close it (`tcp_bound_to_half_wnd`).
        let smallest = SMALLEST_PACKET_BYTES - TCP_HEADER_BYTES - self.option_bytes();
        let largest = self.half_window().max(smallest);
        self.send.mss = self.payload_in_path(config).min(largest);
    }

    /// Half of the largest window that the peer announced; all of a tiny one.
    pub(super) fn half_window(&self) -> u32 {
        match self.send.max_window {
            0 => u32::MAX,
            window if window > u32::from(DEFAULT_MSS) => window / 2,
            window => window,
        }
    }

    /// Notes what both sides agree on, by the options of the peer's SYN.
    fn agree(&mut self, options: &Options, cx: &Context<'_>) {
        let ours = self.agreed;
        self.agreed.timestamps = ours.timestamps && options.timestamps.is_some();
        self.agreed.sack = ours.sack && options.sack_permitted;
        self.agreed.scales = match (ours.scales, options.window_scale) {
            (Some(WindowScales { receive, .. }), Some(send)) => {
                Some(WindowScales { send, receive })
            }
            _ => None,
        };
        if let Some(stamps) = options.timestamps {
            (self.receive.timestamp, self.receive.timestamp_us) = (stamps.value, cx.now_us);
        }
        // As the kernel: to a peer that announces none, as much as the user allows, which is more than the default perhaps.
        let of_user = self.options.rare.max_segment;
        let mss = options.mss_within(of_user).or(of_user);
        self.send.peer_mss =
            u32::from(mss.unwrap_or_else(|| self.flow().default_mss())).max(MIN_MSS);
        self.set_mss(cx.config);
    }

    /// A segment in SYN-SENT (RFC 9293, section 3.10.7.3; `tcp_rcv_synsent_state_process`).
    pub(super) fn receive_in_syn_sent(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) -> Answer {
        if segment.has(Flags::ACK) {
            if !segment.ack.is_after(self.send.una) || segment.ack.is_after(self.send.next) {
                // An old duplicate: the peer must forget that connection, and ours goes on soon.
                if self.recovery.retransmits == 0 {
                    self.timers.set_retransmit(cx.now_us + TIMEOUT_MIN_US);
                }
                return if segment.has(Flags::RST) { Answer::None } else { Answer::Reset };
            }
            let is_stale = segment.options.timestamps.is_some_and(|stamps| {
                let sent = self.first_stamp();
                let now = self.timestamp(cx.now_us);
                stamps.echo != 0 && now.wrapping_sub(stamps.echo) > now.wrapping_sub(sent)
            });
            if self.agreed.timestamps && is_stale {
                return if segment.has(Flags::RST) { Answer::None } else { Answer::Reset };
            }
            if segment.has(Flags::RST) {
                self.fail(TcpError::Refused, cx);
                return Answer::None;
            }
            if !segment.has(Flags::SYN) {
                return Answer::None;
            }
            self.open_as_client(packet, segment, cx);
            return Answer::None;
        }
        if segment.has(Flags::RST) {
            // Only a reset that acknowledges the SYN is believed.
            return Answer::None;
        }
        if segment.has(Flags::SYN) {
            self.open_simultaneously(segment, cx);
        }
        Answer::None
    }

    /// A SYN-ACK: the connection is open.
    fn open_as_client(
        &mut self,
        packet: &mut Option<Packet>,
        segment: &Segment,
        cx: &mut Context<'_>,
    ) {
        self.agree(&segment.options, cx);
        // ECN: the peer accepts by ECE alone (RFC 3168, section 6.1.1).
        self.agreed.ecn &= segment.has(Flags::ECE) && !segment.has(Flags::CWR);
        self.begin_receiving(segment);
        self.send.window = u32::from(segment.window);
        self.send.max_window = self.send.window;
        self.send.window_seq = segment.seq;
        self.set_mss(cx.config);
        self.begin_mtu_search(cx);
        let was_retransmitted = self.sent.first().is_some_and(|sent| sent.marks.ever_retransmitted);
        if let Some(sent) = self.sent.pop() {
            let sample = self.echo_sample(segment, cx.now_us);
            if let Some(sample_us) =
                sample.or((!was_retransmitted).then(|| cx.now_us - sent.sent_us))
            {
                self.rtt.add(sample_us, cx.now_us, true);
            }
        }
        self.tally.bytes_acked += u64::from(segment.ack - self.send.una);
        self.send.una = segment.ack;
        self.acknowledge_syn_data(segment.ack, cx.now_us);
        self.sent.reno_dup_acks = 0;
        if self.recovery.syn_timeouts > 1 && self.was_first_syn_lost(segment) {
            // RFC 5681, section 3.1: lost SYNs leave one segment; as in the kernel, more than one.
            self.congestion.set(1);
        }
        self.become_established(cx);
        let is_fast = self.opening.has(Opening::OFFERED) || self.has_syn_data();
        if is_fast && self.end_fast_connect(packet, segment, cx) {
            return self.send_queued(cx);
        }
        let has_data = self.send.queue.len_bytes() > 0 || self.send.fin;
        let awaits_more =
            self.options.rare.defer_retries > 0 || self.opening.has(Opening::WRITER_WAITS);
        if !has_data && (awaits_more || self.delayed.is_interactive()) {
            // Saves an ACK: data are announced.
            self.delayed.schedule();
            self.delayed.enter_quick(self.receive.window);
            self.delayed.note_open(cx.now_us);
            self.timers.set_delayed_ack(cx.now_us + DELACK_MAX_US);
        } else if !has_data {
            self.send_ack(cx);
        }
        self.send_queued(cx);
        if has_data && self.receive.acked != self.receive.next {
            self.send_ack(cx);
        }
    }

    /// Timestamp of the first SYN.
    fn first_stamp(&self) -> u32 {
        self.timestamp(self.recovery.repair.retransmit_stamp_us)
    }

    /// True if the peer did not answer the first SYN, as far as can be told (`tcp_try_undo_spurious_syn`).
    fn was_first_syn_lost(&self, segment: &Segment) -> bool {
        let stamps = segment.options.timestamps.filter(|_| self.agreed.timestamps);
        stamps.is_none_or(|stamps| stamps.echo != self.first_stamp())
    }

    /// A SYN that crossed ours.
    fn open_simultaneously(&mut self, segment: &Segment, cx: &mut Context<'_>) {
        self.agree(&segment.options, cx);
        // Unlike the kernel, not after a SYN that no longer asked: nor will the answer say so.
        let has_asked = self.recovery.syn_timeouts == 0 || !cx.config.ecn_fallback;
        self.agreed.ecn &= has_asked && segment.has(Flags::ECE) && segment.has(Flags::CWR);
        self.begin_receiving(segment);
        self.send.window = u32::from(segment.window);
        self.send.max_window = self.send.window;
        self.send.window_seq = segment.seq;
        self.set_mss(cx.config);
        self.state = State::SynReceived;
        self.transmit_sent(0, cx);
    }

    fn begin_receiving(&mut self, segment: &Segment) {
        let receive = &mut self.receive;
        receive.initial = segment.seq;
        receive.next = segment.seq + 1;
        receive.acked = receive.next;
    }

    /// Transition to ESTABLISHED, of clients and of servers.
    pub(super) fn become_established(&mut self, cx: &mut Context<'_>) {
        self.state = State::Established;
        // The SYN.
        self.tally.delivered = 1;
        (self.recovery.retransmits, self.recovery.backoff) = (0, 0);
        self.end_timeout_recovery(cx.now_us);
        self.receive.last_us = cx.now_us;
        self.begin_transfer(cx);
        if self.recovery.syn_timeouts > 0 && self.opening.has(Opening::CONNECTING) {
            self.hold_timeout_of_syn(cx);
        }
        self.rearm_retransmit(cx.now_us);
    }

    /// Prepares for data (`tcp_init_transfer`).
    pub(super) fn begin_transfer(&mut self, cx: &mut Context<'_>) {
        self.recovery.restart(self.send.next);
        self.recovery.stamp_window(cx.now_us);
        self.send.last_data_us = cx.now_us;
        let announced = self.announced_payload();
        let mss = announced.min(self.send.mss);
        let (next, window) = (self.receive.next, self.receive.window);
        let scale = self.agreed.receive_scale();
        self.receive.buffer.begin(next, window, announced, scale, cx.now_us);
        if self.options.rare.sndbuf.is_none() {
            self.expand_send_buffer(cx);
        }
        self.delayed.begin(self.receive.window, mss, self.announced_mss());
        self.arm_keepalive(cx.now_us);
        self.rtt.set_fallback();
    }
}

/// Answer that the machine is to send for a connection.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::tcp) enum Answer {
    None,
    /// A reset of the segment received (`tcp_v4_send_reset`).
    Reset,
}

impl Answer {
    /// A reset if `is_due`.
    pub(in crate::tcp) fn reset_if(is_due: bool) -> Self {
        if is_due { Self::Reset } else { Self::None }
    }
}
