//! Scoreboard: segments that were sent and not acknowledged, oldest first.

use std::collections::VecDeque;

use super::super::seq::Seq;

/// A segment that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) seq: Seq,
    pub(super) end: Seq,
    /// Time of the last transmission, in µs.
    pub(super) sent_us: u64,
    pub(super) marks: Marks,
}

/// Facts about a segment that was sent.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Marks {
    pub(super) sacked: bool,
    pub(super) lost: bool,
    /// Sent again, and that transmission is outstanding.
    pub(super) retransmitted: bool,
    /// Sent again at any time.
    pub(super) ever_retransmitted: bool,
    pub(super) is_syn: bool,
    pub(super) is_fin: bool,
    /// PSH was set.
    pub(super) push: bool,
}

/// Segments in flight, and their numbers by mark.
#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    segments: VecDeque<Sent>,
    pub(super) sacked: u32,
    pub(super) lost: u32,
    pub(super) retransmitted: u32,
    /// Segments that duplicate ACKs stand for, without SACK.
    pub(super) reno_dup_acks: u32,
}

impl Scoreboard {
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.segments.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Segments that left the network, acknowledged selectively or by duplicate ACKs.
    pub(super) fn sacked_out(&self) -> u32 {
        self.sacked + self.reno_dup_acks
    }

    /// Estimate of segments in the network (`tcp_packets_in_flight`).
    pub(super) fn in_flight(&self) -> u32 {
        (self.len() + self.retransmitted).saturating_sub(self.sacked_out() + self.lost)
    }

    pub(super) fn first(&self) -> Option<&Sent> {
        self.segments.front()
    }

    pub(super) fn at(&self, index: usize) -> Option<&Sent> {
        self.segments.get(index)
    }

    pub(super) fn push(&mut self, sent: Sent) {
        self.segments.push_back(sent);
    }

    /// Keeps the first `len` segments. The others were not sent.
    pub(super) fn truncate(&mut self, len: usize) {
        self.segments.truncate(len);
    }

    /// Removes the oldest segment.
    pub(super) fn pop(&mut self) -> Option<Sent> {
        let sent = self.segments.pop_front()?;
        self.uncount(sent.marks);
        if self.segments.is_empty() && self.segments.capacity() > 16 {
            // An idle connection keeps no memory.
            self.segments = VecDeque::new();
        }
        Some(sent)
    }

    /// Splits the segment at `index`, so that its first part ends at `at`.
    pub(super) fn split(&mut self, index: usize, at: Seq) {
        let Some(&sent) = self.segments.get(index) else { return };
        let mut behind = Sent { seq: at, ..sent };
        behind.marks.is_syn = false;
        let here = Sent { end: at, ..sent };
        if let Some(place) = self.segments.get_mut(index) {
            *place = here;
            place.marks.is_fin = false;
            place.marks.push = false;
        }
        self.segments.insert(index + 1, behind);
        self.count(behind.marks);
    }

    /// Merges the next segment into that at `index`, if both fit in `most` bytes: one a transmission,
    /// and the last one not at first, as the kernel (`tcp_retrans_try_collapse`), whose device holds
    /// the last packet.
    pub(super) fn merge_next(&mut self, index: usize, most: u32) {
        let (Some(&here), Some(&next)) = (self.at(index), self.at(index + 1)) else { return };
        let len_bytes = next.end - here.seq - u32::from(next.marks.is_fin);
        let is_held = index + 2 == self.segments.len() && !here.marks.ever_retransmitted;
        if is_held
            || here.marks.is_syn
            || here.marks.is_fin
            || next.marks.sacked
            || len_bytes > most
        {
            return;
        }
        self.segments.remove(index + 1);
        self.uncount(next.marks);
        if let Some(place) = self.segments.get_mut(index) {
            place.end = next.end;
            place.marks.is_fin = next.marks.is_fin;
            place.marks.push |= next.marks.push;
            place.marks.ever_retransmitted |= next.marks.ever_retransmitted;
        }
    }

    /// Index of the first segment that ends behind `seq`.
    pub(super) fn index_of(&self, seq: Seq) -> usize {
        self.segments.partition_point(|sent| !sent.end.is_after(seq))
    }

    /// Changes the marks of a segment, and the numbers with them.
    pub(super) fn mark(&mut self, index: usize, change: impl FnOnce(&mut Marks)) {
        let Some(sent) = self.segments.get_mut(index) else { return };
        let before = sent.marks;
        change(&mut sent.marks);
        let after = sent.marks;
        self.uncount(before);
        self.count(after);
    }

    /// Changes the marks of all segments.
    pub(super) fn mark_all(&mut self, mut change: impl FnMut(&mut Sent)) {
        self.segments.iter_mut().for_each(&mut change);
        (self.sacked, self.lost, self.retransmitted) = (0, 0, 0);
        for index in 0..self.segments.len() {
            let marks = self.segments[index].marks;
            self.count(marks);
        }
    }

    /// Trims the acknowledged part off the oldest segment.
    pub(super) fn trim(&mut self, una: Seq) {
        if let Some(first) = self.segments.front_mut()
            && first.seq.is_before(una)
        {
            first.seq = una;
        }
    }

    /// Notes a further transmission of a segment.
    pub(super) fn sent_again(&mut self, index: usize, now_us: u64) {
        if let Some(sent) = self.segments.get_mut(index) {
            sent.sent_us = now_us;
            sent.marks.ever_retransmitted = true;
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn count(&mut self, marks: Marks) {
        self.sacked += u32::from(marks.sacked);
        self.lost += u32::from(marks.lost);
        self.retransmitted += u32::from(marks.retransmitted);
    }

    fn uncount(&mut self, marks: Marks) {
        self.sacked -= u32::from(marks.sacked);
        self.lost -= u32::from(marks.lost);
        self.retransmitted -= u32::from(marks.retransmitted);
    }
}
