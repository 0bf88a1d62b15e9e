//! Handshakes at a listener: requests without buffers, until their ACK comes
//! (`tcp_conn_request`, `tcp_check_req`).

use std::num::NonZeroU8;
use std::sync::atomic::Ordering;

use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;

use super::super::config::{RTO_INITIAL_US, SynCookies, TcpOptions};
use super::super::connection::{
    Accepted, Agreed, Answer, Connection, WindowScales, scale_for, stamp_ms,
};
use super::super::fast_open::CookieOption;
use super::super::flow::Flow;
use super::super::seq::Seq;
use super::super::wire::{Flags, Options, Outgoing, Segment, Timestamps};
use super::fast_open::FastOpening;
use super::request::{Request, UNKNOWN, announced_mss};
use super::{Kind, Listener, SocketEntry, Target, Tcp, TcpOut, TcpSocket, is_too_far};

/// A SYN at a listener.
pub(super) struct Syn<'a> {
    /// Taken if its data are.
    pub(super) packet: &'a mut Option<Packet>,
    pub(super) segment: &'a Segment,
    /// MTU of the path.
    pub(super) mtu_bytes: u32,
    /// Sequence number to begin with, behind those of a connection in TIME-WAIT that the SYN reopens.
    pub(super) continues_at: Option<Seq>,
}

impl Tcp {
    pub(super) fn receive_at_listener(
        &mut self,
        listener: u32,
        flow: &Flow,
        packet: Packet,
        segment: &Segment,
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        if segment.has(Flags::RST) || self.is_too_far_for(listener, Some(&packet)) {
            out.pool.put(packet.frame);
            return Answer::None;
        }
        if segment.has(Flags::ACK) {
            return self.receive_cookie(listener, flow, packet, segment, mtu_bytes, out);
        }
        let mut packet = Some(packet);
        if segment.has(Flags::SYN) && !segment.has(Flags::FIN) {
            let syn = Syn { packet: &mut packet, segment, mtu_bytes, continues_at: None };
            self.begin_request(listener, flow, syn, out);
        }
        if let Some(packet) = packet {
            out.pool.put(packet.frame);
        }
        Answer::None
    }

    /// True if a segment comes from farther away than a listener permits (`IP_MINTTL`); counts it.
    pub(super) fn is_too_far_for(&self, listener: u32, packet: Option<&Packet>) -> bool {
        let is_too_far = match (self.sockets.at(listener).map(|entry| &entry.kind), packet) {
            (Some(Kind::Listener(listener)), Some(packet)) => {
                let is_ipv6 = packet.headers.network == Network::Ipv6;
                is_too_far(packet, listener.options.inherited(is_ipv6).min_ttl)
            }
            _ => false,
        };
        if is_too_far {
            self.counters.min_ttl_drop.add(1);
        }
        is_too_far
    }

    /// Begins the handshake of a SYN, or answers it by a cookie, or drops it.
    pub(super) fn begin_request(
        &mut self,
        index: u32,
        flow: &Flow,
        syn: Syn<'_>,
        out: &mut TcpOut<'_>,
    ) {
        let Syn { packet, segment, mtu_bytes, continues_at } = syn;
        let Some(SocketEntry { kind: Kind::Listener(listener), generation, .. }) =
            self.sockets.at(index)
        else {
            return;
        };
        let options = listener.options.inherited(flow.is_ipv6());
        let socket = TcpSocket { index, generation: *generation };
        let requests = listener.queues.requests.load(Ordering::Relaxed);
        // A SYN that reopens a connection in TIME-WAIT has a place in any case (`tcp_conn_request`). One more than the
        // backlog fits, as in the kernel since 6.13 (`inet_csk_reqsk_queue_is_full`).
        let cookies = self.config.syncookies;
        let is_full = continues_at.is_none()
            && (requests > listener.backlog || requests >= self.config.max_syn_backlog.max(1));
        if !self.takes(index, flow) || self.refuse_if_full(index) {
            return;
        }
        // Where another process may have had the flow until now, only a claim tells who answers.
        let is_asked = match cookies {
            SynCookies::Off => false,
            SynCookies::WhenFull => is_full,
            SynCookies::Always => continues_at.is_none(),
        };
        let wants_cookie = is_asked && self.answers(index, flow);
        let is_answered = match wants_cookie {
            true => self.may_send_cookie(flow, segment.seq, out.now_us),
            false => !is_full,
        };
        if !is_answered {
            self.counters.req_q_full_drop.add(1);
            self.counters.listen_drops.add(1);
            return;
        }
        let mut request = self.request_of(socket, flow, segment, &options, mtu_bytes, out.now_us);
        request.sequence =
            continues_at.unwrap_or_else(|| self.secret.initial_sequence(flow, out.now_us));
        if wants_cookie {
            return self.send_cookie(&request, &options, out);
        }
        // Before the claim, as nobody answers for a flow that is claimed.
        request.is_sole = self.answers(index, flow);
        if !self.claim(flow, segment.seq) {
            return;
        }
        let cookie =
            match self.judge_fast_open(index, &request, packet.as_ref(), segment, out.now_us) {
                FastOpening::Handshake(cookie) => cookie,
                FastOpening::WithSyn(cookie) => {
                    if let Some(packet) = packet.take() {
                        self.accept_fast_open(&request, packet, segment, cookie.as_ref(), out);
                    }
                    return;
                }
            };
        if let Some(SocketEntry { kind: Kind::Listener(listener), .. }) = self.sockets.at_mut(index)
        {
            listener.queues.requests.fetch_add(1, Ordering::Relaxed);
        }
        let stamp = self.stamp_of(&request, out.now_us);
        request.stamps = (stamp, stamp);
        self.send_syn_ack(&request, &options, stamp, cookie.as_ref(), out);
        let at = self.requests.insert(request);
        self.levels.set_requests(self.requests.len());
        self.targets.insert(flow, Target::Request(at));
        self.request_timers.arm(at, out.now_us + RTO_INITIAL_US, out.now_us);
    }

    /// The facts that a SYN tells, and our answers to its offers.
    fn request_of(
        &self,
        listener: TcpSocket,
        flow: &Flow,
        segment: &Segment,
        options: &TcpOptions,
        mtu_bytes: u32,
        now_us: u64,
    ) -> Request {
        let (config, offers) = (&self.config, &segment.options);
        let asks_ecn = segment.has(Flags::ECE) && segment.has(Flags::CWR);
        let agreed = Agreed {
            timestamps: config.timestamps && offers.timestamps.is_some(),
            sack: config.sack && offers.sack_permitted,
            // As the kernel: a capable SYN is that of a newer ECN, of which other bits tell (`tcp_ecn_create_request`).
            ecn: (config.accepts_ecn || config.asks_ecn)
                && asks_ecn
                && (!segment.is_capable() || segment.has_reserved),
            scales: offers
                .window_scale
                .filter(|_| config.window_scaling)
                .map(|send| WindowScales { send, receive: scale_for(options, config) }),
        };
        let new = Request::new(flow, listener, agreed, options, config, mtu_bytes, now_us);
        Request {
            peer_sequence: segment.seq,
            peer_mss: offers.mss_within(options.max_segment).unwrap_or(new.peer_mss),
            timestamp: offers.timestamps.map_or(0, |stamps| stamps.value),
            timestamp_offset: self.secret.timestamp_offset(flow),
            ..new
        }
    }

    pub(super) fn stamp_of(&self, request: &Request, now_us: u64) -> u32 {
        stamp_ms(now_us).wrapping_add(request.timestamp_offset)
    }

    pub(super) fn send_syn_ack(
        &self,
        request: &Request,
        options: &TcpOptions,
        stamp: u32,
        cookie: Option<&CookieOption>,
        out: &mut TcpOut<'_>,
    ) {
        let mss = announced_mss(&request.flow, options, request.mtu_bytes);
        let stamps = Timestamps { value: stamp, echo: request.timestamp };
        let (flags, offers) = request.agreed.syn_ack(mss, stamps);
        let outgoing = Outgoing {
            ack: request.peer_sequence + 1,
            flags,
            window: request.told_window(),
            options: offers,
            fast_open: cookie,
            tos: options.tos,
            ttl: options.ttl,
            ..Outgoing::empty(&request.flow, request.sequence)
        };
        self.send(&outgoing, out);
    }

    /// Bounds the path of a handshake by the MTU that the device has now.
    pub(super) fn bound_request(&mut self, at: u32, mtu_bytes: u32) {
        if let Some(request) = self.requests.at_mut(at) {
            request.mtu_bytes = request.mtu_bytes.min(mtu_bytes);
        }
    }

    /// Processes a segment of a handshake (`tcp_check_req`).
    pub(super) fn receive_request(
        &mut self,
        at: u32,
        packet: Packet,
        segment: &Segment,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        let Some(&request) = self.requests.at(at) else {
            out.pool.put(packet.frame);
            return Answer::None;
        };
        match self.judge(&request, segment) {
            Judgement::Complete => return self.complete(at, &request, packet, segment, out),
            Judgement::Again => self.answer_again(at, &request, out),
            Judgement::Outside | Judgement::Challenge => {
                self.answer_outside(at, &request, segment, out);
            }
            Judgement::Ignore => {}
            Judgement::Reset => {
                if let Some(by_cookie) = self.cookie_before(&request, segment, out.now_us) {
                    self.drop_request(at);
                    return self.accept_by_cookie(&by_cookie, packet, segment, out);
                }
                out.pool.put(packet.frame);
                if !request.is_sole && is_in_window(&request, segment) {
                    // The handshake was completed with another process.
                    self.drop_request(at);
                }
                return Answer::reset_if(request.is_sole);
            }
            Judgement::Abort => {
                self.counters.attempt_fails.add(1);
                self.drop_request(at);
                out.pool.put(packet.frame);
                return Answer::reset_if(!segment.has(Flags::RST) && request.is_sole);
            }
        }
        out.pool.put(packet.frame);
        Answer::None
    }

    fn judge(&self, request: &Request, segment: &Segment) -> Judgement {
        let (syn, ack, rst) =
            (segment.has(Flags::SYN), segment.has(Flags::ACK), segment.has(Flags::RST));
        let stamps = segment.options.timestamps.filter(|_| request.agreed.timestamps);
        let is_old = stamps.is_some_and(|stamps| {
            request.timestamp != 0 && request.timestamp.wrapping_sub(stamps.value).cast_signed() > 0
        });
        if syn && !ack && !rst && segment.seq == request.peer_sequence && !is_old {
            return Judgement::Again;
        }
        if ack && !rst && segment.ack != request.sequence + 1 {
            return Judgement::Reset;
        }
        let is_foreign = stamps.is_some_and(|stamps| {
            let (first, last) = request.stamps;
            stamps.echo != 0 && stamps.echo.wrapping_sub(first) > last.wrapping_sub(first)
        });
        if is_foreign && !is_old {
            self.counters.tsecr_rejected.add(1);
        }
        if is_old || is_foreign || !is_in_window(request, segment) {
            return if rst { Judgement::Ignore } else { Judgement::Outside };
        }
        let start = request.peer_sequence + 1;
        if rst && segment.seq != start {
            // RFC 5961, section 3.2, as in later states.
            let is_beyond = segment.end().is_after(start) || segment.seq.is_after(start);
            return if is_beyond { Judgement::Challenge } else { Judgement::Ignore };
        }
        if rst || syn && segment.seq != request.peer_sequence {
            return Judgement::Abort;
        }
        if ack { Judgement::Complete } else { Judgement::Ignore }
    }

    /// Retransmits the SYN-ACK for a repeated SYN, at most once per `invalid_ratelimit_us`.
    fn answer_again(&mut self, at: u32, request: &Request, out: &mut TcpOut<'_>) {
        if self.may_answer(at, out.now_us)
            && let Some(options) = self.options_of(request)
        {
            let stamp = self.stamp_of(request, out.now_us);
            self.send_syn_ack(request, &options, stamp, None, out);
            self.counters.retrans_segs.add(1);
            if let Some(request) = self.requests.at_mut(at) {
                request.stamps.1 = stamp;
                request.resent = request.resent.saturating_add(1);
                let wait_us = request.timeout_us();
                self.request_timers.arm(at, out.now_us + wait_us, out.now_us);
            }
        }
    }

    fn answer_outside(
        &mut self,
        at: u32,
        request: &Request,
        segment: &Segment,
        out: &mut TcpOut<'_>,
    ) {
        if !segment.carries_data() && !self.may_answer(at, out.now_us) {
            return;
        }
        let scale = request.agreed.receive_scale();
        let stamp = self.stamp_of(request, out.now_us);
        let outgoing = Outgoing {
            ack: request.peer_sequence + 1,
            flags: Flags::ACK,
            window: request.told_window() >> scale,
            options: Options {
                // As the kernel, none without a timestamp to echo.
                timestamps: (request.agreed.timestamps && request.timestamp != 0)
                    .then_some(Timestamps { value: stamp, echo: request.timestamp }),
                ..Options::default()
            },
            tos: segment.dscp(),
            ..Outgoing::empty(&request.flow, request.sequence + 1)
        };
        self.send(&outgoing, out);
    }

    fn may_answer(&mut self, at: u32, now_us: u64) -> bool {
        let Some(request) = self.requests.at_mut(at) else { return false };
        let may = request.invalid_limit.admits(now_us, self.config.invalid_ratelimit_us);
        self.counters.ack_skipped_syn_recv.add(u64::from(!may));
        may
    }

    /// Completes the handshake by its ACK, if the accept queue has room.
    fn complete(
        &mut self,
        at: u32,
        request: &Request,
        packet: Packet,
        segment: &Segment,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        let listener = request.listener.index;
        let Some(options) = self.options_of(request) else {
            // The listener was closed: the handshake came too late.
            self.drop_request(at);
            out.pool.put(packet.frame);
            return Answer::Reset;
        };
        if request.timeouts < options.defer_retries && segment.end() == request.peer_sequence + 1 {
            if let Some(request) = self.requests.at_mut(at) {
                request.is_acked = true;
            }
            out.pool.put(packet.frame);
            return Answer::None;
        }
        if self.refuse_if_full(listener) {
            // As the kernel without `tcp_abort_on_overflow`: the peer sends its ACK again.
            out.pool.put(packet.frame);
            return Answer::None;
        }
        self.take_request(at);
        self.accept_connection(listener, request, packet, segment, out);
        Answer::None
    }

    /// True if the SYN-ACK went out more than twice, and the first one was lost (`tcp_try_undo_spurious_syn`).
    fn was_answer_lost(&self, request: &Request, segment: &Segment) -> bool {
        let first = self.stamp_of(request, request.sent_us);
        let stamps = segment.options.timestamps.filter(|_| request.agreed.timestamps);
        request.timeouts > 0
            && (2..UNKNOWN).contains(&request.resent)
            && stamps.is_none_or(|stamps| stamps.echo != first)
    }

    /// Refuses a further connection of a listener, and counts that, if its accept queue is full or there are
    /// too many sockets. Returns true if so.
    pub(super) fn refuse_if_full(&self, listener: u32) -> bool {
        let is_full = match self.sockets.at(listener) {
            Some(SocketEntry { kind: Kind::Listener(listener), .. }) => listener.is_overflowing(),
            _ => true,
        };
        if is_full || self.sockets.len() >= self.config.max_sockets {
            self.counters.listen_overflows.add(1);
            self.counters.listen_drops.add(1);
            return true;
        }
        false
    }

    /// Creates the connection of a finished handshake, and hands it the segment.
    pub(super) fn accept_connection(
        &mut self,
        listener: u32,
        request: &Request,
        packet: Packet,
        segment: &Segment,
        out: &mut TcpOut<'_>,
    ) {
        let is_ipv6 = request.flow.is_ipv6();
        let entry = self.sockets.at(listener);
        let Some(options) = entry.map(|entry| entry.options().inherited(is_ipv6)) else {
            self.forget_flow(&request.flow);
            out.pool.put(packet.frame);
            return;
        };
        let accepted = Accepted {
            sent_us: (request.resent == 0).then_some(request.sent_us),
            was_answer_lost: self.was_answer_lost(request, segment),
            ..request.accepted(out.now_us)
        };
        let begin = request.begin(options, out.now_us);
        let connection = {
            let mut cx = self.context(self.pressure(), out);
            Connection::accept(&begin, &accepted, &mut cx)
        };
        let index = self.insert(Kind::Connection(Box::new(connection)));
        self.targets.insert(&request.flow, Target::Connection(index));
        if let Some(SocketEntry { kind: Kind::Listener(listener), .. }) =
            self.sockets.at_mut(listener)
        {
            listener.accepted.push_back(index);
            listener.queues.accepted.fetch_add(1, Ordering::Relaxed);
        }
        self.receive_connected(index, packet, segment, out);
        self.notify_listener(listener);
    }

    pub(super) fn options_of(&self, request: &Request) -> Option<TcpOptions> {
        let entry = self.entry(request.listener).ok()?;
        Some(entry.options().inherited(request.flow.is_ipv6()))
    }

    /// Forgets a handshake, and its flow.
    pub(super) fn drop_request(&mut self, at: u32) {
        if let Some(request) = self.take_request(at) {
            self.forget_flow(&request.flow);
        }
    }

    /// Takes a handshake, whose flow stays this process's, but for what is behind it.
    fn take_request(&mut self, at: u32) -> Option<Request> {
        self.request_timers.cancel(at);
        let request = self.requests.remove(at)?;
        self.levels.set_requests(self.requests.len());
        self.targets.remove(&request.flow);
        if let Ok(SocketEntry { kind: Kind::Listener(listener), .. }) =
            self.entry_mut(request.listener)
        {
            listener.queues.requests.fetch_sub(1, Ordering::Relaxed);
        }
        Some(request)
    }

    /// Retransmits the SYN-ACK, or gives the handshake up (`reqsk_timer_handler`).
    pub(super) fn on_request_timer(&mut self, at: u32, out: &mut TcpOut<'_>) {
        let Some(&request) = self.requests.at(at) else { return };
        let options = self.options_of(&request);
        let timeouts = request.timeouts;
        self.counters.timeouts.add(options.is_some().into());
        let is_over = |options: &TcpOptions| {
            timeouts >= options.syn_retries.map_or(self.config.synack_retries, NonZeroU8::get)
                && (!request.is_acked || timeouts >= options.defer_retries)
        };
        let Some(options) = options.filter(|options| !is_over(options)) else {
            self.counters.attempt_fails.add(1);
            return self.drop_request(at);
        };
        // The peer acknowledged, and is asked once more before the wait for data ends
        // (`syn_ack_recalc`).
        let stamp = self.stamp_of(&request, out.now_us);
        let is_sent = !request.is_acked || timeouts + 1 >= options.defer_retries;
        if is_sent {
            self.send_syn_ack(&request, &options, stamp, None, out);
            self.counters.retrans_segs.add(1);
        }
        if let Some(request) = self.requests.at_mut(at) {
            if is_sent {
                request.stamps.1 = stamp;
                request.resent = request.resent.saturating_add(1);
            }
            request.timeouts += 1;
            let wait_us = request.timeout_us();
            self.request_timers.arm(at, out.now_us + wait_us, out.now_us);
        }
    }
}

/// Outcome of looking at a segment of a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Judgement {
    /// The ACK that was awaited.
    Complete,
    /// The SYN once more.
    Again,
    /// Not in the window, or with stamps of another connection: answered by an ACK.
    Outside,
    /// A reset in the window, but not the exact one: answered by an ACK.
    Challenge,
    Ignore,
    /// An ACK of something else: answered by a reset; the request stays.
    Reset,
    /// A reset, or another SYN: ends the request.
    Abort,
}

/// `tcp_in_window`.
fn is_in_window(request: &Request, segment: &Segment) -> bool {
    let start = request.peer_sequence + 1;
    let end = start + u32::from(request.told_window());
    let (seq, seq_end) = (segment.seq, segment.end());
    seq == start || seq_end.is_after(start) && seq.is_before(end) || seq == end && seq == seq_end
}

impl Listener {
    /// True if more connections wait than the backlog allows (`sk_acceptq_is_full`).
    pub(super) fn is_overflowing(&self) -> bool {
        self.queues.accepted.load(Ordering::Relaxed) > self.backlog
    }
}
