//! Segments merged into one that is sent again (`tcp_retrans_try_collapse`).

use super::super::super::seq::Seq;
use super::{Node, Scoreboard};

/// Limits of a merged segment.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp::connection) struct MergeLimits {
    /// Payload, at most.
    pub(in crate::tcp::connection) most_bytes: u32,
    /// End of the peer's window.
    pub(in crate::tcp::connection) window_end: Seq,
    /// Time of the last transmission, if it had data: the device still holds what was sent last then.
    pub(in crate::tcp::connection) held_us: Option<u64>,
}

impl Scoreboard {
    /// Merges the next segment into that at `index`, if both fit. As in the kernel, not one that the device still holds.
    /// Returns true if it is merged.
    pub(in crate::tcp::connection) fn merge_next(
        &mut self,
        index: usize,
        limits: MergeLimits,
    ) -> bool {
        let (Some(&here), Some(&next)) = (self.at(index), self.at(index + 1)) else { return false };
        let len_bytes = next.end - here.seq - u32::from(next.marks.is_fin);
        let is_latest = self.at(index + 2).is_none_or(|after| after.sent_us < next.sent_us);
        let is_held = is_latest && limits.held_us.is_some_and(|us| next.sent_us >= us);
        if is_held
            || here.marks.is_syn
            || here.marks.is_fin
            || here.marks.ending.ends_record()
            || next.marks.sacked
            || len_bytes > limits.most_bytes
            || next.end.is_after(limits.window_end)
        {
            return false;
        }
        self.unlink(index + 1);
        self.segments.remove(index + 1);
        self.uncount(next.marks);
        if let Some(Node { sent, .. }) = self.segments.get_mut(index) {
            sent.end = next.end;
            sent.marks.is_fin = next.marks.is_fin;
            sent.marks.ending = sent.marks.ending.followed_by(next.marks.ending);
            sent.marks.ever_retransmitted |= next.marks.ever_retransmitted;
        }
        true
    }
}
