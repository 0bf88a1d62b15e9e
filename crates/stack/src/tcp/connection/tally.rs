//! Numbers of bytes and segments of a connection (`tcpi_segs_out` and its companions).

use super::super::on_demand::Initial;

/// Packets capable of ECN that an open connection received (`received_ce` and `received_ecn_bytes`).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct CapablePackets {
    /// Segments that routers had marked.
    pub(super) marked: u32,
    /// Bytes of payload by the ECN field: ECT(1), ECT(0) and CE.
    pub(super) bytes: [u32; 3],
}

impl Initial for CapablePackets {
    const INITIAL: Self = Self { marked: 0, bytes: [0; 3] };

    fn initial() -> &'static Self {
        &Self::INITIAL
    }
}

/// Bytes and segments that a connection has sent and received so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tally {
    /// Bytes of payload sent, those sent again counted each time.
    pub bytes_sent: u64,
    /// Bytes of payload that were sent again.
    pub bytes_retrans: u64,
    /// Sequence numbers that the peer acknowledged: payload, the FIN, and the SYN of a client.
    pub bytes_acked: u64,
    /// Sequence numbers received in order: payload and the FIN.
    pub bytes_received: u64,
    /// Segments sent. A SYN-ACK is its listener's, as in the kernel.
    pub segs_out: u32,
    /// Segments received.
    pub segs_in: u32,
    /// Segments with payload sent.
    pub data_segs_out: u32,
    /// Segments with payload received.
    pub data_segs_in: u32,
    /// Segments delivered to the peer, the SYN counted.
    pub delivered: u32,
    /// Number of those among them whose ACKs told of congestion (`delivered_ce`).
    pub delivered_ce: u32,
    /// Segments that the peer says to have got twice (`dsack_dups`).
    pub dsack_dups: u16,
    /// Segments received out of order (`rcv_ooopack`).
    pub rcv_ooopack: u16,
    /// Time-outs of retransmission, those of SYNs and SYN-ACKs among them (`total_rto`).
    pub timeouts: u16,
    /// Recoveries that began with one (`total_rto_recoveries`).
    pub timeout_recoveries: u16,
}

impl Tally {
    /// Counts a packet that was sent, which carries segments of at most `mss` bytes.
    pub(super) fn count_sent(&mut self, len_bytes: u32, mss: u32) {
        let segments = len_bytes.div_ceil(mss.max(1)).max(1);
        self.segs_out = self.segs_out.wrapping_add(segments);
        if len_bytes > 0 {
            self.data_segs_out = self.data_segs_out.wrapping_add(segments);
            self.bytes_sent += u64::from(len_bytes);
        }
    }

    /// Counts a time-out, and the recovery that begins with it if it is the first without progress.
    pub(super) fn count_timeout(&mut self, is_first: bool) {
        self.timeouts = self.timeouts.wrapping_add(1);
        self.timeout_recoveries = self.timeout_recoveries.wrapping_add(is_first.into());
    }

    /// Counts a packet that was received, which was merged from this number of segments.
    pub(super) fn count_received(&mut self, segments: u32, payload_len: u32) {
        self.segs_in = self.segs_in.wrapping_add(segments);
        if payload_len > 0 {
            self.data_segs_in = self.data_segs_in.wrapping_add(segments);
        }
    }
}
