//! State of a connection for observers, in the words of `ss -i`.

use super::recovery::Phase;
use super::{Connection, State};

/// State of a connection (`TCP_INFO`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpInfo {
    /// State.
    pub state: State,
    /// Phase of loss recovery.
    pub phase: Phase,
    /// Smoothed round-trip time, in µs; 0 before the first sample.
    pub rtt_us: u64,
    /// Deviation of the round-trip time, in µs.
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
    /// The peer's window.
    pub send_window_bytes: u32,
    /// Window that is announced.
    pub receive_window_bytes: u32,
    /// Bytes written and not sent (`notsent`).
    pub unsent_bytes: u32,
    /// Bytes received and not read.
    pub unread_bytes: u32,
    /// Memory of the receive buffer.
    pub receive_buffer_bytes: u32,
    /// Size of the send buffer.
    pub send_buffer_bytes: u32,
    /// Features: timestamps, SACK, ECN, window scaling.
    pub timestamps: bool,
    /// SACK is in use.
    pub sack: bool,
    /// ECN is in use.
    pub ecn: bool,
    /// Shift of the peer's windows, and of ours.
    pub window_scales: Option<(u8, u8)>,
}

impl Connection {
    pub(in crate::tcp) fn info(&self) -> TcpInfo {
        TcpInfo {
            state: self.state,
            phase: self.phase(),
            rtt_us: self.rtt.smoothed_us().unwrap_or(0),
            rttvar_us: self.rtt.deviation_us(),
            minrtt_us: self.rtt.min_us().unwrap_or(0),
            rto_us: self.timeout_us(),
            backoff: self.recovery.backoff,
            retransmits: self.recovery.retransmits,
            cwnd: self.congestion.cwnd,
            ssthresh: self.congestion.ssthresh,
            mss_bytes: self.send.mss,
            unacked: self.sent.len(),
            sacked: self.sent.sacked_out(),
            lost: self.sent.lost,
            retransmitted: self.sent.retransmitted,
            reordering: self.recovery.reordering,
            send_window_bytes: self.send.window,
            receive_window_bytes: self.usable_window(),
            unsent_bytes: self.unsent_bytes(),
            unread_bytes: self.receive.queue.len_bytes(),
            receive_buffer_bytes: self.receive.buffer.bytes(),
            send_buffer_bytes: self.send.buffer_bytes,
            timestamps: self.agreed.timestamps,
            sack: self.agreed.sack,
            ecn: self.agreed.ecn,
            window_scales: self.agreed.scales,
        }
    }
}
