//! SYN cookies: handshakes that a full listener does not have to remember (RFC 4987, section 3.6).

use forebay_rx::packet::Packet;

use super::super::config::TcpOptions;
use super::super::connection::{Agreed, Answer, ReceiveWindow, WindowScales, scale_for, stamp_ms};
use super::super::flow::Flow;
use super::super::isn::CookieOptions;
use super::super::seq::Seq;
use super::super::wire::{Flags, Segment};
use super::request::{Request, UNKNOWN};
use super::{Tcp, TcpOut, TcpSocket};

/// Time after an overflow during which cookies are believed (`TCP_SYNCOOKIE_VALID`), in µs.
const COOKIES_VALID_US: u64 = 2 * 60_000_000;

impl Tcp {
    /// True if a SYN at a full listener is answered.
    pub(super) fn may_send_cookie(&mut self, flow: &Flow, sequence: Seq, now_us: u64) -> bool {
        let hash = self.secret.syn_hash(flow, sequence);
        self.syn_filter.admits(hash, self.config.cookies_per_s, now_us)
    }

    /// Answers a SYN by a cookie. Scale, SACK and ECN travel in the timestamp, if there is one.
    pub(super) fn send_cookie(
        &mut self,
        request: &Request,
        options: &TcpOptions,
        out: &mut TcpOut<'_>,
    ) {
        self.cookies_us = out.now_us.max(1);
        if let Some(division) = &self.division {
            division.note_cookie(self.cookies_us);
        }
        self.counters.syncookies_sent.add(1);
        let agreed = request.agreed;
        let mut request = *request;
        let mut stamp = self.stamp_of(&request, out.now_us);
        if agreed.timestamps {
            let said = CookieOptions {
                window_scale: agreed.scales.map(|scales| scales.send),
                sack: agreed.sack,
                ecn: agreed.ecn,
            };
            let base = said.into_timestamp(stamp_ms(out.now_us));
            stamp = base.wrapping_add(request.timestamp_offset);
        } else {
            request.agreed = Agreed::default();
        }
        let (flow, theirs) = (request.flow, request.peer_sequence);
        request.sequence = self.secret.cookie(&flow, theirs, request.peer_mss, out.now_us);
        self.send_syn_ack(&request, options, stamp, None, out);
    }

    /// An ACK at a listener that no request awaits: of a cookie, or of nothing.
    pub(super) fn receive_cookie(
        &mut self,
        listener: u32,
        flow: &Flow,
        packet: Packet,
        segment: &Segment,
        mtu_bytes: u32,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        if !self.takes(listener, flow) {
            out.pool.put(packet.frame);
            return Answer::None;
        }
        let Some(request) = self.request_of_cookie(listener, flow, segment, mtu_bytes, out.now_us)
        else {
            out.pool.put(packet.frame);
            return Answer::reset_if(self.answers(listener, flow));
        };
        self.accept_by_cookie(&request, packet, segment, out)
    }

    /// The handshake of an ACK that confirms a cookie, where a later SYN of its flow found room for a request
    /// (`tcp_v4_cookie_check`, which the kernel also calls then).
    pub(super) fn cookie_before(
        &self,
        request: &Request,
        segment: &Segment,
        now_us: u64,
    ) -> Option<Request> {
        let listener = request.listener.index;
        self.options_of(request)?;
        self.request_of_cookie(listener, &request.flow, segment, request.mtu_bytes, now_us)
    }

    pub(super) fn accept_by_cookie(
        &mut self,
        request: &Request,
        packet: Packet,
        segment: &Segment,
        out: &mut TcpOut<'_>,
    ) -> Answer {
        let listener = request.listener.index;
        if self.refuse_if_full(listener) || !self.claim(&request.flow, request.peer_sequence) {
            out.pool.put(packet.frame);
            return Answer::None;
        }
        self.accept_connection(listener, request, packet, segment, out);
        Answer::None
    }

    fn request_of_cookie(
        &self,
        listener: u32,
        flow: &Flow,
        segment: &Segment,
        mtu_bytes: u32,
        now_us: u64,
    ) -> Option<Request> {
        // Another process may have sent the cookie.
        let by_others_us = self.division.as_ref().map_or(0, |division| division.cookie_us());
        let cookies_us = self.cookies_us.max(by_others_us);
        let is_recent = cookies_us != 0 && now_us.saturating_sub(cookies_us) < COOKIES_VALID_US;
        if !is_recent || segment.has(Flags::SYN) {
            return None;
        }
        let (cookie, theirs) = (segment.ack - 1, segment.seq - 1);
        let Some(peer_mss) = self.secret.check_cookie(flow, cookie, theirs, now_us) else {
            self.counters.syncookies_failed.add(1);
            return None;
        };
        self.counters.syncookies_recv.add(1);
        let entry = self.sockets.at(listener)?;
        let options = entry.options().inherited(flow.is_ipv6());
        let offset = self.secret.timestamp_offset(flow);
        let stamps = segment.options.timestamps.filter(|_| self.config.timestamps);
        let agreed = stamps.map_or_else(Agreed::default, |stamps| {
            let said = CookieOptions::of_timestamp(stamps.echo.wrapping_sub(offset));
            let receive = scale_for(&options, &self.config);
            Agreed {
                timestamps: true,
                sack: said.sack,
                ecn: said.ecn,
                scales: said.window_scale.map(|send| WindowScales { send, receive }),
            }
        });
        let socket = TcpSocket { index: listener, generation: entry.generation };
        let new = Request::new(flow, socket, agreed, &options, &self.config, mtu_bytes, now_us);
        let receive = ReceiveWindow::new(&options, &self.config);
        Some(Request {
            // As the kernel: by the peer's segments, not by those that were announced.
            window: receive.initial_window(peer_mss.into()),
            sequence: cookie,
            peer_sequence: theirs,
            peer_mss,
            timestamp: stamps.map_or(0, |stamps| stamps.value),
            timestamp_offset: offset,
            // The round trip is not known.
            resent: UNKNOWN,
            ..new
        })
    }
}
