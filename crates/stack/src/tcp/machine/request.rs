//! A handshake that a listener remembers (`request_sock`).

use super::super::config::{MS, RTO_INITIAL_US, RTO_MAX_US, TcpConfig, TcpOptions, us_u32};
use super::super::connection::{Accepted, Agreed, Begin, ReceiveWindow};
use super::super::flow::Flow;
use super::super::invalid_limit::InvalidLimit;
use super::super::seq::Seq;
use super::super::wire::TIMESTAMPS_BYTES;
use super::TcpSocket;

/// Doublings of the time-out of a SYN-ACK, at most.
const MAX_DOUBLINGS: u8 = 7;

/// Number of times that a SYN-ACK was sent again, of a handshake that was not remembered.
pub(super) const UNKNOWN: u8 = u8::MAX;

/// A handshake whose ACK has not come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) flow: Flow,
    pub(super) listener: TcpSocket,
    pub(super) sequence: Seq,
    pub(super) peer_sequence: Seq,
    pub(super) peer_mss: u16,
    pub(super) mtu_bytes: u32,
    pub(super) agreed: Agreed,
    pub(super) timestamp: u32,
    pub(super) timestamp_offset: u32,
    /// Timestamps of ours in the first and in the last SYN-ACK.
    pub(super) stamps: (u32, u32),
    pub(super) window: u32,
    /// Time of the first SYN-ACK, in µs.
    pub(super) sent_us: u64,
    pub(super) invalid_limit: InvalidLimit,
    /// Times that the timer has fired.
    pub(super) timeouts: u8,
    /// Times that the SYN-ACK was sent again, by the timer or as an answer: without any, the round trip can
    /// be told. `UNKNOWN` if nothing is remembered.
    pub(super) resent: u8,
    /// True once the ACK came, if the listener waits for data (`TCP_DEFER_ACCEPT`).
    pub(super) is_acked: bool,
    /// False if another process may have answered the SYN, too, for which the table of claims may have had no room.
    pub(super) is_sole: bool,
}

impl Request {
    /// A handshake of which nothing was sent yet.
    pub(super) fn new(
        flow: &Flow,
        listener: TcpSocket,
        agreed: Agreed,
        options: &TcpOptions,
        config: &TcpConfig,
        mtu_bytes: u32,
        now_us: u64,
    ) -> Self {
        let mss = u32::from(announced_mss(flow, options, mtu_bytes));
        let segment = mss - if agreed.timestamps { TIMESTAMPS_BYTES.min(mss) } else { 0 };
        Self {
            flow: *flow,
            listener,
            sequence: Seq(0),
            peer_sequence: Seq(0),
            peer_mss: flow.default_mss(),
            mtu_bytes,
            agreed,
            timestamp: 0,
            timestamp_offset: 0,
            stamps: (0, 0),
            window: ReceiveWindow::new(options, config).initial_window(segment),
            sent_us: now_us,
            invalid_limit: InvalidLimit::default(),
            timeouts: 0,
            resent: 0,
            is_acked: false,
            is_sole: false,
        }
    }

    /// Window that the SYN-ACK tells, which is not scaled (`tcp_synack_window`).
    pub(super) fn told_window(&self) -> u16 {
        u16::try_from(self.window).unwrap_or(u16::MAX)
    }

    /// Time until the SYN-ACK is sent again (`tcp_reqsk_timeout`).
    pub(super) fn timeout_us(&self) -> u64 {
        (RTO_INITIAL_US << self.timeouts.min(MAX_DOUBLINGS)).min(RTO_MAX_US)
    }

    /// Numbers that its connection begins with.
    pub(super) fn begin(&self, options: TcpOptions, now_us: u64) -> Begin {
        Begin {
            flow: self.flow,
            options,
            sequence: self.sequence,
            timestamp_offset: self.timestamp_offset,
            mtu_bytes: self.mtu_bytes,
            now_us,
        }
    }

    /// Facts that its connection begins with, without those of a SYN-ACK that was acknowledged.
    pub(super) fn accepted(&self, now_us: u64) -> Accepted {
        let since_us = if self.timeouts > 0 { now_us.saturating_sub(self.sent_us) } else { 0 };
        Accepted {
            peer_sequence: self.peer_sequence,
            peer_mss: self.peer_mss,
            agreed: self.agreed,
            timestamp: self.timestamp,
            window: self.window,
            sent_us: None,
            timeouts: self.timeouts,
            timeouts_ms: us_u32(since_us / MS),
            was_answer_lost: false,
            resent: if self.resent == UNKNOWN { 0 } else { self.resent },
        }
    }
}

/// Largest segment that this end announces.
pub(super) fn announced_mss(flow: &Flow, options: &TcpOptions, mtu_bytes: u32) -> u16 {
    let mss = mtu_bytes.saturating_sub(flow.header_bytes());
    let mss = mss.min(options.max_segment.map_or(u32::MAX, u32::from));
    u16::try_from(mss).unwrap_or(u16::MAX)
}
