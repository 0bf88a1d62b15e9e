//! Options in the form in which programs read and write them by the kernel's calls.

use super::config::{DEFAULT_MSS, DUP_THRESHOLD, INITIAL_CWND, RTO_INITIAL_US};
use super::connection::{Phase, State, TcpInfo, WindowScales};
use super::error::TcpError;
use super::error_queue::{SentEvent, TcpReport};
use super::machine::Listening;

/// `TCP_CLOSE`, the state of what is not connected.
const CLOSED: u8 = 7;
/// `TCP_LISTEN`.
const LISTENING: u8 = 10;

/// Bytes of `struct tcp_info`.
const INFO_BYTES: usize = 280;
/// Initial deviation of the round trip, in µs.
const RTTVAR_INITIAL_US: u64 = 250_000;

/// `struct tcp_info` of a connection; of `None`, that of a socket without one. Ages are those at
/// `now_us`, and 0 without.
#[must_use]
pub fn tcp_info(info: Option<&TcpInfo>, now_us: Option<u64>) -> [u8; INFO_BYTES] {
    let mut form = Form::begin();
    let Some(info) = info else {
        form.put(0, &[CLOSED, 0, 0, 0, 0, 0, 0, 1]);
        let words = [(8, RTO_INITIAL_US), (16, DEFAULT_MSS.into()), (72, RTTVAR_INITIAL_US)];
        words.into_iter().for_each(|(at, word)| form.word(at, word));
        form.word(76, i32::MAX.unsigned_abs().into());
        form.word(148, u32::MAX.into());
        return form.0;
    };
    let features = u8::from(info.timestamps)
        | u8::from(info.sack) << 1
        | u8::from(info.window_scales.is_some()) << 2
        | u8::from(info.ecn) << 3
        | u8::from(info.ecn_seen) << 4
        | u8::from(info.syn_data) << 5
        | u8::from(info.began_with_syn) << 7;
    let WindowScales { send, receive } = info.window_scales.unwrap_or_default();
    let (state, phase, scales) =
        (number_of(info.state), phase_of(info.phase), send & 15 | receive << 4);
    form.put(0, &[state, phase, info.retransmits, info.probes, info.backoff, features, scales]);
    // tcpi_delivery_rate_app_limited
    form.put(7, &[info.is_delivery_limited.into()]);
    let age_ms = |at_us: u64| now_us.map_or(0, |now_us| now_us.saturating_sub(at_us) / 1000);
    // Without a sample, the variables hold four deviations.
    let rttvar_us = if info.rtt_us == 0 { info.rttvar_us / 4 } else { info.rttvar_us };
    let min_rtt_us = if info.minrtt_us == 0 { u32::MAX.into() } else { info.minrtt_us };
    let tally = &info.tally;
    let words = [
        (8, info.rto_us),
        (12, info.ack_delay_us.into()),
        (16, info.mss_bytes.into()),
        (20, info.receive_mss_bytes.into()),
        (24, info.unacked.into()),
        (28, info.sacked.into()),
        (32, info.lost.into()),
        (36, info.retransmitted.into()),
        (44, age_ms(info.data_sent_us)),
        (52, age_ms(info.data_received_us)),
        (56, age_ms(info.segment_received_us)),
        (60, info.path_mtu_bytes.into()),
        (64, info.receive_threshold_bytes.into()),
        (68, info.rtt_us),
        (72, rttvar_us),
        (76, info.ssthresh.min(i32::MAX.unsigned_abs()).into()),
        (80, info.cwnd.into()),
        (84, info.announced_mss_bytes.into()),
        (88, info.reordering.into()),
        (92, info.receive_rtt_us),
        (96, info.receive_space_bytes.into()),
        (100, info.resent.total().into()),
        (136, tally.segs_out.into()),
        (140, tally.segs_in.into()),
        (144, info.unsent_bytes.into()),
        (148, min_rtt_us),
        (152, tally.data_segs_in.into()),
        (156, tally.data_segs_out.into()),
        (192, tally.delivered.into()),
        (196, tally.delivered_ce.into()),
        (216, tally.dsack_dups.into()),
        (220, info.reorderings.into()),
        (224, tally.rcv_ooopack.into()),
        (228, info.send_window_bytes.into()),
        (232, info.announced_window_bytes.into()),
    ];
    words.into_iter().for_each(|(at, word)| form.word(at, word));
    form.put(104, &info.pacing_rate.unwrap_or(u64::MAX).to_ne_bytes());
    form.put(120, &tally.bytes_acked.to_ne_bytes());
    form.put(128, &tally.bytes_received.to_ne_bytes());
    form.put(160, &info.delivery_rate.to_ne_bytes());
    let now_us = now_us.unwrap_or(0);
    if now_us > 0 {
        form.put(168, &info.busy.total_us(now_us).to_ne_bytes());
        form.put(176, &info.busy.by_peer_window_us(now_us).to_ne_bytes());
        form.put(184, &info.busy.by_send_buffer_us(now_us).to_ne_bytes());
    }
    form.put(200, &tally.bytes_sent.to_ne_bytes());
    form.put(208, &tally.bytes_retrans.to_ne_bytes());
    form.put(240, &tally.timeouts.to_ne_bytes());
    form.put(242, &tally.timeout_recoveries.to_ne_bytes());
    let recovering_ms = info.timeout_us.map_or(0, age_ms);
    form.word(244, u64::from(info.timeouts_ms) + recovering_ms);
    form.word(248, info.received_ce.into());
    let bytes = [264, 268, 272].into_iter().zip(info.received_ecn_bytes);
    bytes.for_each(|(at, bytes)| form.word(at, bytes.into()));
    form.0
}

/// `SO_EE_ORIGIN_ICMP`, `SO_EE_ORIGIN_ICMP6`, `SO_EE_ORIGIN_TIMESTAMPING`, `SO_EE_ORIGIN_ZEROCOPY` and
/// `SO_EE_CODE_ZEROCOPY_COPIED`.
const BY_ICMP: u8 = 2;
const BY_ICMP_V6: u8 = 3;
const TIMESTAMPING: u8 = 4;
const ZERO_COPY: u8 = 5;
const COPIED: u8 = 1;
/// Error of a report of a time (`ENOMSG`).
const NO_MESSAGE: u32 = 42;

/// `struct sock_extended_err` of a report, with the numbers of errors by `number_of`.
#[must_use]
pub fn extended_error(report: &TcpReport, number_of: impl Fn(TcpError) -> u32) -> [u8; 16] {
    let (error, origin, code, info, data) = match *report {
        TcpReport::ZeroCopy { first, last } => (0, ZERO_COPY, COPIED, first, last),
        TcpReport::Path { error, message, to } => {
            let origin = if to.is_ipv6() { BY_ICMP_V6 } else { BY_ICMP };
            (number_of(error), origin, message.code, 0, 0)
        }
        TcpReport::Time { event, byte, .. } => {
            let event = match event {
                SentEvent::Sent => 0,
                SentEvent::Scheduled => 1,
                SentEvent::Acknowledged => 2,
            };
            (NO_MESSAGE, TIMESTAMPING, 0, event, byte)
        }
    };
    let mut form = [0; 16];
    form[..4].copy_from_slice(&error.to_ne_bytes());
    (form[4], form[6]) = (origin, code);
    if let TcpReport::Path { message, .. } = report {
        form[5] = message.kind;
    }
    form[8..12].copy_from_slice(&u32::to_ne_bytes(info));
    form[12..].copy_from_slice(&data.to_ne_bytes());
    form
}

/// `struct tcp_info` of a listener: its queue of connections, and how many may wait there.
#[must_use]
pub fn listener_info(listening: &Listening) -> [u8; INFO_BYTES] {
    let mut form = Form::begin();
    form.put(0, &[LISTENING]);
    form.word(24, listening.queues.waiting().into());
    form.word(28, listening.backlog.into());
    form.0
}

/// The structure as it is filled in.
struct Form([u8; INFO_BYTES]);

impl Form {
    /// Begins with values of all sockets: no limit of the rate, the window and reordering at first.
    fn begin() -> Self {
        let mut form = Self([0; INFO_BYTES]);
        form.put(104, &[u8::MAX; 16]);
        form.word(80, INITIAL_CWND.into());
        form.word(88, DUP_THRESHOLD.into());
        form
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn word(&mut self, at: usize, value: u64) {
        self.put(at, &u32::try_from(value).unwrap_or(u32::MAX).to_ne_bytes());
    }
}

fn number_of(state: State) -> u8 {
    match state {
        State::Established => 1,
        State::SynSent => 2,
        State::SynReceived => 3,
        State::FinWait1 => 4,
        State::FinWait2 => 5,
        State::Closed => CLOSED,
        State::CloseWait => 8,
        State::LastAck => 9,
        State::Closing => 11,
    }
}

fn phase_of(phase: Phase) -> u8 {
    match phase {
        Phase::Open => 0,
        Phase::Disorder => 1,
        Phase::Cwr => 2,
        Phase::Recovery => 3,
        Phase::Loss => 4,
    }
}

/// Retransmissions of a SYN-ACK within a number of seconds, as `TCP_DEFER_ACCEPT` is stored
/// (`secs_to_retrans`).
#[must_use]
pub fn retransmissions_in(seconds: u32) -> u8 {
    let lasts = |&count: &u8| seconds_of(count) >= seconds.into();
    (0..=u8::MAX).find(lasts).unwrap_or(u8::MAX)
}

/// Seconds that a number of retransmissions takes, as `TCP_DEFER_ACCEPT` is told (`retrans_to_secs`).
#[must_use]
pub fn seconds_of(retransmissions: u8) -> u64 {
    (0..u32::from(retransmissions)).map(|count| (1 << count.min(7)).min(120)).sum()
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::super::Algorithm;
    use super::super::connection::{BusyTime, Limit, Resent, Tally};
    use super::*;

    #[test]
    fn tcp_14_defer_accept_counts_retransmissions() {
        for (seconds, count) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)] {
            assert_eq!(retransmissions_in(seconds), count, "{seconds} s");
        }
        assert_eq!([0, 1, 2, 3, 9].map(seconds_of), [0, 1, 3, 7, 367]);
    }

    #[test]
    fn tcp_14_unconnected_socket_is_closed() {
        let told = tcp_info(None, None);
        assert_eq!(told[0], CLOSED);
        // tcpi_rto, tcpi_snd_cwnd
        assert_eq!(told[8..12], 1_000_000_u32.to_ne_bytes());
        assert_eq!(told[80..84], 10_u32.to_ne_bytes());
    }

    /// Fields of `struct tcp_info` behind `tcpi_total_retrans`, which not every `libc` has, in their order, and their
    /// bytes (linux/tcp.h).
    const LATER_FIELDS: [(&str, usize); 34] = [
        ("pacing_rate", 8),
        ("max_pacing_rate", 8),
        ("bytes_acked", 8),
        ("bytes_received", 8),
        ("segs_out", 4),
        ("segs_in", 4),
        ("notsent_bytes", 4),
        ("min_rtt", 4),
        ("data_segs_in", 4),
        ("data_segs_out", 4),
        ("delivery_rate", 8),
        ("busy_time", 8),
        ("rwnd_limited", 8),
        ("sndbuf_limited", 8),
        ("delivered", 4),
        ("delivered_ce", 4),
        ("bytes_sent", 8),
        ("bytes_retrans", 8),
        ("dsack_dups", 4),
        ("reord_seen", 4),
        ("rcv_ooopack", 4),
        ("snd_wnd", 4),
        ("rcv_wnd", 4), // since Linux 6.2
        ("rehash", 4),
        ("total_rto", 2), // since Linux 6.7
        ("total_rto_recoveries", 2),
        ("total_rto_time", 4),
        ("received_ce", 4), // since Linux 6.18
        ("delivered_e1_bytes", 4),
        ("delivered_e0_bytes", 4),
        ("delivered_ce_bytes", 4),
        ("received_e1_bytes", 4),
        ("received_e0_bytes", 4),
        ("received_ce_bytes", 4),
    ];

    /// A connection all of whose numbers differ.
    fn example() -> TcpInfo {
        TcpInfo {
            state: State::CloseWait,
            phase: Phase::Recovery,
            rtt_us: 101,
            rttvar_us: 102,
            minrtt_us: 103,
            rto_us: 104,
            backoff: 21,
            retransmits: 22,
            cwnd: 105,
            ssthresh: 106,
            mss_bytes: 107,
            path_mtu_bytes: 108,
            mtu_search: None,
            probes: 23,
            ack_delay_us: 109,
            receive_mss_bytes: 110,
            announced_mss_bytes: 111,
            receive_rtt_us: 112,
            receive_space_bytes: 113,
            receive_threshold_bytes: 114,
            announced_window_bytes: 115,
            window_clamp_bytes: 142,
            pacing_rate: Some(116 << 32),
            data_sent_us: 1_000,
            data_received_us: 2_000,
            segment_received_us: 3_000,
            unacked: 117,
            sacked: 118,
            lost: 119,
            retransmitted: 120,
            reordering: 121,
            reorderings: 141,
            send_window_bytes: 122,
            receive_window_bytes: 123,
            resent: Resent { by_timeout: 1000, in_slow_start: 200, fast: 30, as_probe: 4 },
            timeouts_ms: 145,
            timeout_us: Some(4_000),
            tally: Tally {
                bytes_sent: 124 << 32,
                bytes_retrans: 125 << 32,
                bytes_acked: 126 << 32,
                bytes_received: 127 << 32,
                segs_out: 128,
                segs_in: 129,
                data_segs_out: 130,
                data_segs_in: 131,
                delivered: 132,
                delivered_ce: 143,
                dsack_dups: 133,
                rcv_ooopack: 134,
                timeouts: 143,
                timeout_recoveries: 144,
            },
            busy: BusyTime::default(),
            congestion: Algorithm::Cubic,
            unacked_bytes: 135,
            unsent_bytes: 136,
            limit: Limit::Turn,
            unread_bytes: 137,
            receive_memory_bytes: 138,
            has_gap: false,
            receive_buffer_bytes: 139,
            send_buffer_bytes: 140,
            timestamps: true,
            sack: false,
            ecn: true,
            ecn_seen: true,
            received_ce: 146,
            received_ecn_bytes: [147, 148, 149],
            syn_data: false,
            began_with_syn: true,
            window_scales: Some(WindowScales { send: 3, receive: 9 }),
            delivery_rate: 144 << 32,
            is_delivery_limited: false,
        }
    }

    #[test]
    fn tcp_14_info_has_the_kernels_places() {
        macro_rules! early {
            ($($field:ident: $bytes:literal = $value:literal,)*) => {
                [$((offset_of!(libc::tcp_info, $field), $bytes, $value),)*]
            };
        }
        let early = early! {
            tcpi_state: 1 = 8,
            tcpi_ca_state: 1 = 3,
            tcpi_retransmits: 1 = 22,
            tcpi_probes: 1 = 23,
            tcpi_backoff: 1 = 21,
            tcpi_options: 1 = 0b1001_1101,
            tcpi_snd_rcv_wscale: 1 = 0x93,
            tcpi_rto: 4 = 104,
            tcpi_ato: 4 = 109,
            tcpi_snd_mss: 4 = 107,
            tcpi_rcv_mss: 4 = 110,
            tcpi_unacked: 4 = 117,
            tcpi_sacked: 4 = 118,
            tcpi_lost: 4 = 119,
            tcpi_retrans: 4 = 120,
            tcpi_last_data_sent: 4 = 9,
            tcpi_last_data_recv: 4 = 8,
            tcpi_last_ack_recv: 4 = 7,
            tcpi_pmtu: 4 = 108,
            tcpi_rcv_ssthresh: 4 = 114,
            tcpi_rtt: 4 = 101,
            tcpi_rttvar: 4 = 102,
            tcpi_snd_ssthresh: 4 = 106,
            tcpi_snd_cwnd: 4 = 105,
            tcpi_advmss: 4 = 111,
            tcpi_reordering: 4 = 121,
            tcpi_rcv_rtt: 4 = 112,
            tcpi_rcv_space: 4 = 113,
            tcpi_total_retrans: 4 = 1234,
        };
        let later = [
            ("pacing_rate", 116 << 32),
            ("max_pacing_rate", u64::MAX),
            ("bytes_acked", 126 << 32),
            ("bytes_received", 127 << 32),
            ("segs_out", 128),
            ("segs_in", 129),
            ("notsent_bytes", 136),
            ("min_rtt", 103),
            ("data_segs_in", 131),
            ("data_segs_out", 130),
            ("delivery_rate", 144 << 32),
            ("delivered", 132),
            ("delivered_ce", 143),
            ("bytes_sent", 124 << 32),
            ("bytes_retrans", 125 << 32),
            ("dsack_dups", 133),
            ("reord_seen", 141),
            ("rcv_ooopack", 134),
            ("snd_wnd", 122),
            ("rcv_wnd", 115),
            ("total_rto", 143),
            ("total_rto_recoveries", 144),
            ("total_rto_time", 145 + 6),
            ("received_ce", 146),
            ("received_e1_bytes", 147),
            ("received_e0_bytes", 148),
            ("received_ce_bytes", 149),
        ];
        let mut at = offset_of!(libc::tcp_info, tcpi_total_retrans) + 4;
        let later = LATER_FIELDS.into_iter().filter_map(|(name, bytes)| {
            let begin = at;
            at += bytes;
            let (_, value) = later.iter().find(|(field, _)| *field == name)?;
            Some((begin, bytes, *value))
        });
        let mut expected = [0; INFO_BYTES];
        for (at, bytes, value) in early.into_iter().chain(later) {
            let value: u64 = value;
            expected[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        }
        assert_eq!(tcp_info(Some(&example()), Some(10_000)), expected);
    }
}
