//! State of a connection for observers, in the words of `ss -i`.

use std::fmt;

use super::super::config::Algorithm;
use super::busy_time::BusyTime;
use super::delayed_ack::SEGMENT_MIN;
use super::fast_open::Opening;
use super::recovery::Phase;
use super::tally::Tally;
use super::{Agreed, Connection, State, WindowScales};

/// Cause of a retransmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    Timeout,
    SlowStart,
    Fast,
    Probe,
}

/// Segments that were sent again, by cause.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Resent {
    /// As their time-out fired.
    pub by_timeout: u32,
    /// After a time-out, as the window opened again (`TCPSlowStartRetrans`).
    pub in_slow_start: u32,
    /// Since ACKs, SACKs or the time told that they were lost (`TCPFastRetrans`).
    pub fast: u32,
    /// To find out if the last segments were lost (`TCPLossProbes`).
    pub as_probe: u32,
}

impl Resent {
    pub(super) fn count(&mut self, cause: Cause) {
        let count = match cause {
            Cause::Timeout => &mut self.by_timeout,
            Cause::SlowStart => &mut self.in_slow_start,
            Cause::Fast => &mut self.fast,
            Cause::Probe => &mut self.as_probe,
        };
        *count = count.saturating_add(1);
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u32 {
        [self.by_timeout, self.in_slow_start, self.fast, self.as_probe]
            .into_iter()
            .fold(0, u32::saturating_add)
    }
}

/// Reason why unsent bytes wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// None waits: the application has written no more.
    Application,
    /// The connection is not open yet.
    Handshake,
    /// The peer's window is full.
    PeerWindow,
    /// The congestion window is full.
    CongestionWindow,
    /// A small segment waits for more data (`TCP_CORK`), or for an ACK (Nagle).
    SmallSegment,
    /// The pacing rate: what was sent takes longer.
    Pacing,
    /// A frame to send them in, or the next ACK, is awaited.
    Turn,
}

impl Limit {
    /// Name, the kernel's where it has one.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Application => "app_limited",
            Self::Handshake => "handshake",
            Self::PeerWindow => "rwnd_limited",
            Self::CongestionWindow => "cwnd_limited",
            Self::SmallSegment => "nagle",
            Self::Pacing => "pacing",
            Self::Turn => "turn",
        }
    }

    /// Name in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Application => "the application has written no more",
            Self::Handshake => "the connection is not open yet",
            Self::PeerWindow => "the peer's window is full",
            Self::CongestionWindow => "the congestion window is full",
            Self::SmallSegment => "less than a segment, which waits for more or for an ACK",
            Self::Pacing => "the pacing rate spreads them over the round trip",
            Self::Turn => "a frame to send them in or the next ACK is awaited",
        }
    }
}

/// State of a connection (`TCP_INFO`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpInfo {
    /// State.
    pub state: State,
    /// Phase of loss recovery.
    pub phase: Phase,
    /// Smoothed round-trip time, in µs; 0 before the first sample.
    pub rtt_us: u64,
    /// Mean deviation of the round-trip time, in µs.
    pub rttvar_us: u64,
    /// Smallest round-trip time, in µs; 0 before the first sample.
    pub minrtt_us: u64,
    /// Retransmission time-out with backoff, in µs.
    pub rto_us: u64,
    /// Doublings of the time-out.
    pub backoff: u8,
    /// Time-outs without progress.
    pub retransmits: u8,
    /// Congestion window, in segments.
    pub cwnd: u32,
    /// Slow start threshold, in segments; `u32::MAX` before the first loss.
    pub ssthresh: u32,
    /// Payload of a full segment.
    pub mss_bytes: u32,
    /// Largest packet that the path takes (`pmtu`).
    pub path_mtu_bytes: u32,
    /// Packets between which the search for the path's MTU is, in bytes: the largest that arrives, and the largest
    /// that may; `None` without a search.
    pub mtu_search: Option<(u32, u32)>,
    /// Probes of a closed window or of an idle peer without an answer.
    pub probes: u8,
    /// Delay of ACKs, in µs; 0 before the first data (`ato`).
    pub ack_delay_us: u32,
    /// Estimate of the peer's segment size (`rcv_mss`).
    pub receive_mss_bytes: u32,
    /// Payload of the peer's full segments, by what our SYN announced (`advmss`).
    pub announced_mss_bytes: u32,
    /// Round trip that the receiver measured, in µs; 0 before the first sample (`rcv_rtt`).
    pub receive_rtt_us: u64,
    /// Bytes that the reader took in the best round trip (`rcv_space`).
    pub receive_space_bytes: u32,
    /// Window that is announced at most now (`rcv_ssthresh`).
    pub receive_threshold_bytes: u32,
    /// Window that the last ACK announced (`rcv_wnd`).
    pub announced_window_bytes: u32,
    /// Largest window that may be announced (`TCP_WINDOW_CLAMP`).
    pub window_clamp_bytes: u32,
    /// Rate of sending, in bytes per second; `None` before the first round trip (`pacing_rate`).
    pub pacing_rate: Option<u64>,
    /// Time when payload was sent last, in µs of the calls' clock; that of the handshake before.
    pub data_sent_us: u64,
    /// Time when payload was received last, likewise; before the first, that of what was sent.
    pub data_received_us: u64,
    /// Time when a segment was received last, likewise.
    pub segment_received_us: u64,
    /// Segments in flight or lost (`unacked`).
    pub unacked: u32,
    /// Segments acknowledged selectively.
    pub sacked: u32,
    /// Segments deemed lost.
    pub lost: u32,
    /// Segments sent again and outstanding.
    pub retransmitted: u32,
    /// Reordering that is tolerated, in segments.
    pub reordering: u32,
    /// Times that reordering was seen, up to 255 (`reord_seen`).
    pub reorderings: u8,
    /// The peer's window.
    pub send_window_bytes: u32,
    /// Window that is announced.
    pub receive_window_bytes: u32,
    /// Segments sent again, by cause.
    pub resent: Resent,
    /// Time of recoveries that began with a time-out and are over, in ms (`total_rto_time`).
    pub timeouts_ms: u32,
    /// Time of the time-out that the present recovery began with, in µs of the calls' clock; `None` without one.
    pub timeout_us: Option<u64>,
    /// Bytes and segments sent and received.
    pub tally: Tally,
    /// Times for which bytes waited to be acknowledged (`busy`).
    pub busy: BusyTime,
    /// Congestion control.
    pub congestion: Algorithm,
    /// Bytes sent and not acknowledged.
    pub unacked_bytes: u32,
    /// Bytes written and not sent, an unsent FIN counted as one (`notsent`).
    pub unsent_bytes: u32,
    /// Reason why those wait.
    pub limit: Limit,
    /// Bytes received and not read.
    pub unread_bytes: u32,
    /// Memory of received bytes, those out of order included.
    pub receive_memory_bytes: u32,
    /// True if out-of-order bytes wait for those before them.
    pub has_gap: bool,
    /// Memory of the receive buffer.
    pub receive_buffer_bytes: u32,
    /// Size of the send buffer.
    pub send_buffer_bytes: u32,
    /// Timestamps are in use.
    pub timestamps: bool,
    /// SACK is in use.
    pub sack: bool,
    /// ECN is in use.
    pub ecn: bool,
    /// Packets came that routers may mark (`ecnseen`).
    pub ecn_seen: bool,
    /// Segments received that routers had marked (`received_ce`).
    pub received_ce: u32,
    /// Bytes received in packets capable of ECN: with ECT(1), ECT(0), and marked (`received_e1_bytes` and its
    /// companions).
    pub received_ecn_bytes: [u32; 3],
    /// The SYN carried data that were taken (RFC 7413).
    pub syn_data: bool,
    /// The connection is a listener's, and began with its SYN (`TCPI_OPT_TFO_CHILD`).
    pub began_with_syn: bool,
    /// Shifts of the windows; `None` without scaling.
    pub window_scales: Option<WindowScales>,
    /// Rate at which the path delivered segments last, in bytes a second; 0 before the first sample.
    pub delivery_rate: u64,
    /// The application had no more to send during that sample.
    pub is_delivery_limited: bool,
}

impl Connection {
    pub(in crate::tcp) fn info(&self) -> TcpInfo {
        // Nothing is agreed on before the peer has answered.
        let is_unanswered = self.is_unanswered();
        let of_ecn = Agreed { ecn: self.agreed.ecn, ..Agreed::default() };
        let agreed = if is_unanswered { of_ecn } else { self.agreed };
        let mut info = TcpInfo {
            state: self.state,
            phase: self.phase(),
            rtt_us: self.rtt.smoothed_us().unwrap_or(0),
            rttvar_us: self.rtt.deviation_us(),
            minrtt_us: self.rtt.min_us().unwrap_or(0),
            rto_us: self.rtt.rto_us(),
            backoff: self.recovery.backoff,
            retransmits: self.recovery.retransmits,
            cwnd: self.congestion.cwnd,
            ssthresh: self.congestion.ssthresh,
            mss_bytes: self.send.mss,
            path_mtu_bytes: self.send.path_mtu,
            mtu_search: self.send.search.as_ref().map(|search| (search.low, search.high)),
            probes: self.recovery.probes_out,
            ack_delay_us: self.delayed.interval_us(),
            receive_mss_bytes: self.delayed.segment_bytes(),
            announced_mss_bytes: self.told_announced_mss(),
            receive_rtt_us: self.receive.buffer.round_trip_us().unwrap_or(0),
            receive_space_bytes: self.receive.buffer.space(),
            receive_threshold_bytes: self.receive.buffer.threshold(),
            announced_window_bytes: self.receive.window,
            window_clamp_bytes: self.receive.buffer.clamp(),
            pacing_rate: self.pacing_rate(),
            data_sent_us: self.send.last_data_us,
            data_received_us: self.delayed.last_us().unwrap_or(self.send.last_data_us),
            segment_received_us: self.receive.last_us,
            unacked: self.sent.len(),
            sacked: self.sent.sacked_out(),
            lost: self.sent.lost,
            retransmitted: self.sent.retransmitted,
            reordering: self.recovery.reordering,
            reorderings: self.recovery.reorderings,
            send_window_bytes: self.send.window,
            receive_window_bytes: self.usable_window(),
            resent: self.resent,
            timeouts_ms: self.recovery.timeouts_ms,
            timeout_us: Some(self.recovery.repair.timeout_us).filter(|at_us| *at_us > 0),
            tally: self.tally,
            busy: self.busy,
            congestion: self.congestion.algorithm(),
            unacked_bytes: self.unacknowledged_bytes().saturating_sub(self.unsent_bytes()),
            unsent_bytes: self.unsent_bytes() + u32::from(self.has_unsent_fin()),
            limit: self.limit(),
            unread_bytes: self.receive.queue.len_bytes(),
            receive_memory_bytes: self.receive.queue.truesize(),
            has_gap: self.receive.queue.has_gap(),
            receive_buffer_bytes: self.receive.buffer.bytes(),
            send_buffer_bytes: self.send.buffer_bytes,
            timestamps: agreed.timestamps,
            sack: agreed.sack,
            ecn: agreed.ecn,
            ecn_seen: self.receive.was_capable,
            received_ce: self.capable.marked,
            received_ecn_bytes: self.capable.bytes,
            syn_data: self.opening.has(Opening::DATA_TAKEN),
            began_with_syn: self.opening.began_with_syn(),
            window_scales: agreed.scales,
            delivery_rate: self.rate.bytes_per_s(self.send.mss),
            is_delivery_limited: self.rate.is_limited(),
        };
        if is_unanswered {
            self.report_opening(&mut info);
        }
        info
    }

    /// True of a client whose SYN is not answered, or was refused. One that the peer's SYN has crossed keeps what was agreed.
    fn is_unanswered(&self) -> bool {
        let has_crossed = self.receive.next != self.receive.initial;
        let was_refused = self.has_failed_to_open() && self.tally.delivered == 0 && !has_crossed;
        self.state == State::SynSent || was_refused
    }

    /// Payload that is announced: as in the kernel, it leaves room for timestamps once the connection is open.
    fn told_announced_mss(&self) -> u32 {
        let is_opening = self.state == State::SynReceived || self.is_unanswered();
        if is_opening { self.announced_mss() } else { self.announced_payload() }
    }

    /// Reports a connection whose SYN is not answered, as the kernel does: nothing of the peer is known, and a SYN that
    /// was sent again counts as lost.
    fn report_opening(&self, info: &mut TcpInfo) {
        info.receive_mss_bytes = SEGMENT_MIN;
        if self.recovery.retransmits > 0 {
            (info.phase, info.lost, info.cwnd) = (Phase::Loss, 1, 1);
            info.ssthresh = self.congestion.threshold();
        }
    }

    fn limit(&self) -> Limit {
        let unsent = self.unsent_bytes();
        if unsent == 0 {
            return Limit::Application;
        }
        let segment_end = self.send.next + unsent.min(self.send.mss);
        if !self.can_send() {
            Limit::Handshake
        } else if segment_end.is_after(self.window_end()) {
            Limit::PeerWindow
        } else if self.sent.in_flight() >= self.congestion.cwnd {
            Limit::CongestionWindow
        } else if unsent < self.send.mss && self.holds_small(self.options.cork) {
            Limit::SmallSegment
        } else if self.timers.is_pacing() {
            Limit::Pacing
        } else {
            Limit::Turn
        }
    }
}

impl State {
    /// Name in `ss`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "UNCONN",
            Self::SynSent => "SYN-SENT",
            Self::SynReceived => "SYN-RECV",
            Self::Established => "ESTAB",
            Self::FinWait1 => "FIN-WAIT-1",
            Self::FinWait2 => "FIN-WAIT-2",
            Self::CloseWait => "CLOSE-WAIT",
            Self::Closing => "CLOSING",
            Self::LastAck => "LAST-ACK",
        }
    }
}

impl TcpInfo {
    /// Names and values as in `ss -i`, in its order. Features have no value, and figures that are not
    /// known yet are left out.
    #[must_use]
    pub fn words(&self) -> Vec<(&'static str, String)> {
        let mut words = Words::default();
        words.flag("ts", self.timestamps);
        words.flag("sack", self.sack);
        words.flag("ecn", self.ecn);
        words.flag("fastopen", self.syn_data);
        words.flag(
            match self.congestion {
                Algorithm::Cubic => "cubic",
                Algorithm::NewReno => "reno",
            },
            true,
        );
        if let Some(WindowScales { send, receive }) = self.window_scales {
            words.add("wscale", format!("{send},{receive}"));
        }
        words.add("rto", milliseconds(self.rto_us));
        words.count("backoff", self.backoff.into());
        if self.rtt_us > 0 {
            let [rtt, rttvar] = [self.rtt_us, self.rttvar_us].map(milliseconds);
            words.add("rtt", format!("{rtt}/{rttvar}"));
        }
        words.add("mss", self.mss_bytes.to_string());
        words.add("pmtu", self.path_mtu_bytes.to_string());
        if let Some((low, high)) = self.mtu_search {
            words.add("mtu_search", format!("{low},{high}"));
        }
        words.add("cwnd", self.cwnd.to_string());
        if self.ssthresh != u32::MAX {
            words.add("ssthresh", self.ssthresh.to_string());
        }
        self.tally_words(&mut words);
        words.add("ca_state", format!("{:?}", self.phase));
        words.count("unacked", self.unacked.into());
        let resent = self.resent;
        if resent.total() > 0 {
            words.add("retrans", format!("{}/{}", self.retransmitted, resent.total()));
            words.count("retrans_timeout", resent.by_timeout.into());
            words.count("retrans_slow_start", resent.in_slow_start.into());
            words.count("retrans_fast", resent.fast.into());
            words.count("retrans_probe", resent.as_probe.into());
        }
        words.count("lost", self.lost.into());
        words.count("sacked", self.sacked.into());
        words.add("reordering", self.reordering.to_string());
        words.add("snd_wnd", self.send_window_bytes.to_string());
        words.add("rcv_wnd", self.receive_window_bytes.to_string());
        words.add("rcvbuf", self.receive_buffer_bytes.to_string());
        words.add("sndbuf", self.send_buffer_bytes.to_string());
        words.count("notsent", self.unsent_bytes.into());
        words.flag(self.limit.name(), true);
        if self.minrtt_us > 0 {
            words.add("minrtt", milliseconds(self.minrtt_us));
        }
        words.0
    }

    fn tally_words(&self, words: &mut Words) {
        let tally = self.tally;
        words.count("bytes_sent", tally.bytes_sent);
        words.count("bytes_retrans", tally.bytes_retrans);
        words.count("bytes_acked", tally.bytes_acked);
        words.count("bytes_received", tally.bytes_received);
        words.count("segs_out", tally.segs_out.into());
        words.count("segs_in", tally.segs_in.into());
        words.count("data_segs_out", tally.data_segs_out.into());
        words.count("data_segs_in", tally.data_segs_in.into());
    }

    /// Places where bytes of the connection wait, in words.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        let mut waits = Vec::new();
        if self.unread_bytes > 0 {
            waits.push(format!("{} bytes for the application to read them", self.unread_bytes));
        }
        if self.has_gap {
            waits.push("out-of-order bytes for the peer to send those before them".to_owned());
        }
        if self.unacked_bytes > 0 {
            waits.push(format!("{} bytes sent, for the peer's ACK", self.unacked_bytes));
        }
        if self.unsent_bytes > 0 {
            let (unsent, why) = (self.unsent_bytes, self.limit.words());
            waits.push(format!("{unsent} bytes not sent: {why} ({})", self.limit.name()));
        }
        waits
    }
}

/// Words that were gathered.
#[derive(Default)]
struct Words(Vec<(&'static str, String)>);

impl Words {
    fn add(&mut self, name: &'static str, value: String) {
        self.0.push((name, value));
    }

    /// Adds a number that is not zero.
    fn count(&mut self, name: &'static str, count: u64) {
        if count > 0 {
            self.add(name, count.to_string());
        }
    }

    fn flag(&mut self, name: &'static str, is_set: bool) {
        if is_set {
            self.add(name, String::new());
        }
    }
}

/// Time in ms, with as many decimals as it has.
fn milliseconds(us: u64) -> String {
    let (whole, part) = (us / 1000, us % 1000);
    if part == 0 { whole.to_string() } else { format!("{whole}.{part:03}") }
}

impl fmt::Display for TcpInfo {
    /// Writes one line, as `ss -i` does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.words().iter().enumerate() {
            let blank = if index > 0 { " " } else { "" };
            let colon = if value.is_empty() { "" } else { ":" };
            write!(f, "{blank}{name}{colon}{value}")?;
        }
        Ok(())
    }
}
