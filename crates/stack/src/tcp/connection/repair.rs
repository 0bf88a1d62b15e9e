//! State of loss recovery that only segments in flight need, and reductions that may be undone.

use super::super::on_demand::Initial;
use super::super::seq::Seq;
use super::super::wire::SackBlocks;
use super::rack::Delivered;

/// State of what is in flight, and of a reduction that may be undone. Nothing of it matters once all was acknowledged in
/// [`Phase::Open`](super::Phase::Open) some time-outs ago: no D-SACK comes any more that would undo a reduction.
#[derive(Debug)]
pub(super) struct Repair {
    /// Time of the first retransmission of the phase, in µs; 0 without one (`retrans_stamp`).
    pub(super) retransmit_stamp_us: u64,
    /// `snd_una` when the window was reduced, while that may be undone.
    pub(super) undo_marker: Option<Seq>,
    /// Retransmissions that may prove unnecessary; `None` before the first one.
    pub(super) undo_retransmits: Option<u32>,
    /// Threshold before the reduction.
    pub(super) prior_ssthresh: u32,
    /// Window before the reduction.
    pub(super) prior_cwnd: u32,
    /// Proportional rate reduction: segments delivered and sent since the reduction.
    pub(super) prr_delivered: u32,
    pub(super) prr_out: u32,
    /// The time-out that the phase began with found that the peer threw away what it had acknowledged selectively.
    pub(super) has_reneged: bool,
    pub(super) delivered: Delivered,
    pub(super) highest_sacked: Option<Seq>,
    /// Blocks of the last ACK that had some, while segments are in flight.
    pub(super) known_blocks: Option<Box<SackBlocks>>,
    /// No segment before this one is lost and not sent again.
    pub(super) resend_from: Option<Seq>,
    /// True while a time-out may prove spurious (F-RTO).
    pub(super) is_frto: bool,
    /// Window that the SYN-ACK told, of a connection that began with its SYN (`tcp_synack_window`), until that is acknowledged.
    pub(super) first_window: u16,
    /// Time of the time-out that the present recovery began with, in µs; 0 without one (`rto_stamp`).
    pub(super) timeout_us: u64,
}

impl Initial for Repair {
    const INITIAL: Self = Self {
        retransmit_stamp_us: 0,
        undo_marker: None,
        undo_retransmits: None,
        prior_ssthresh: 0,
        prior_cwnd: 0,
        prr_delivered: 0,
        prr_out: 0,
        has_reneged: false,
        delivered: Delivered::INITIAL,
        highest_sacked: None,
        known_blocks: None,
        resend_from: None,
        is_frto: false,
        first_window: 0,
        timeout_us: 0,
    };

    fn initial() -> &'static Self {
        static INITIAL: Repair = Repair::INITIAL;
        &INITIAL
    }
}
