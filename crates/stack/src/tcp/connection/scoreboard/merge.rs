//! Segments merged into one that is sent again (`tcp_retrans_try_collapse`).

use std::ops::Range;

use super::super::super::seq::Seq;
use super::Scoreboard;

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
    /// Merges the segments behind that at `index` into it, as many as fit. Returns their number.
    pub(in crate::tcp::connection) fn merge_behind(
        &mut self,
        index: usize,
        limits: MergeLimits,
    ) -> u32 {
        let Some(&here) = self.at(index) else { return 0 };
        let (first, mut last, mut merged) = (index + 1, index, here);
        while self.is_mergeable(here.seq, last + 1, limits)
            && let Some(&next) = self.at(last + 1)
        {
            last += 1;
            self.unlink(last);
            self.uncount(next.marks);
            merged.end = next.end;
            merged.marks.is_fin = next.marks.is_fin;
            merged.marks.ending = merged.marks.ending.followed_by(next.marks.ending);
            merged.marks.ever_retransmitted |= next.marks.ever_retransmitted;
        }
        self.remove(first..last + 1);
        self.segments[index].sent = merged;
        u32::try_from(last - index).unwrap_or(u32::MAX)
    }

    /// True if the segment at `index` fits behind what begins with `seq`. As in the kernel, not one that the device still
    /// holds.
    fn is_mergeable(&self, seq: Seq, index: usize, limits: MergeLimits) -> bool {
        let (Some(before), Some(next)) = (self.at(index - 1), self.at(index)) else { return false };
        let len_bytes = next.end - seq - u32::from(next.marks.is_fin);
        let is_latest = self.at(index + 1).is_none_or(|after| after.sent_us < next.sent_us);
        let is_held = is_latest && limits.held_us.is_some_and(|us| next.sent_us >= us);
        !is_held
            && !before.marks.is_syn
            && !before.marks.is_fin
            && !before.marks.ending.ends_record()
            && !next.marks.sacked
            && len_bytes <= limits.most_bytes
            && !next.end.is_after(limits.window_end)
    }

    /// Removes segments: those on the shorter side of them move.
    fn remove(&mut self, range: Range<usize>) {
        #[cfg(test)]
        super::tests::MOVES.with(|moves| {
            let behind = self.segments.len() - range.end;
            moves.set(moves.get() + if range.is_empty() { 0 } else { range.start.min(behind) });
        });
        self.segments.drain(range);
    }
}
