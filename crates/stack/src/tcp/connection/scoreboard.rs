//! Scoreboard: segments that were sent and not acknowledged, oldest first.
//!
//! Segments that may still turn out lost are also listed by the time of their last transmission
//! (`tsorted_sent_queue`), so that losses are found without a look at the others.

mod merge; // segments merged into one that is sent again

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use super::super::on_demand::Initial;
use super::super::seq::Seq;
use super::rate::{Deliveries, DeliveryClock};
use super::sent::{Ending, Marks, Sent};
pub(super) use merge::MergeLimits;

/// A segment and its neighbours in the list by time, which only segments that are not settled are in.
/// Links are the numbers that segments begin with: these stay when indices change. The links of the
/// list's ends have no meaning.
#[derive(Clone, Copy, Debug)]
struct Node {
    sent: Sent,
    earlier: Seq,
    later: Seq,
}

/// List by time: its ends, and the last one that a delivered segment has overtaken. Flags take less room
/// than options.
#[derive(Clone, Copy, Debug)]
struct ByTime {
    earliest: Seq,
    latest: Seq,
    last_overtaken: Seq,
    has_some: bool,
    has_overtaken: bool,
}

impl ByTime {
    const EMPTY: Self = Self {
        earliest: Seq(0),
        latest: Seq(0),
        last_overtaken: Seq(0),
        has_some: false,
        has_overtaken: false,
    };

    fn overtaken(&self) -> Option<Seq> {
        self.has_overtaken.then_some(self.last_overtaken)
    }
}

/// Segments in flight, and their numbers by mark.
#[derive(Debug)]
pub(super) struct Scoreboard {
    segments: VecDeque<Node>,
    by_time: ByTime,
    pub(super) sacked: u32,
    pub(super) lost: u32,
    pub(super) retransmitted: u32,
    /// Lost segments that are not sent again yet.
    pub(super) awaiting_resend: u32,
    /// Segments that begin a packet.
    heads: u32,
    /// Segments that duplicate ACKs stand for, without SACK.
    pub(super) reno_dup_acks: u32,
    /// Times of deliveries.
    pub(super) clock: DeliveryClock,
}

impl Initial for Scoreboard {
    const INITIAL: Self = Self {
        segments: VecDeque::new(),
        by_time: ByTime::EMPTY,
        sacked: 0,
        lost: 0,
        retransmitted: 0,
        awaiting_resend: 0,
        heads: 0,
        reno_dup_acks: 0,
        clock: DeliveryClock::INITIAL,
    };

    fn initial() -> &'static Self {
        static EMPTY: Scoreboard = Scoreboard::INITIAL;
        &EMPTY
    }
}

impl Scoreboard {
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.segments.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Packets that the segments were sent in. The first one's beginning may be acknowledged.
    pub(super) fn packets(&self) -> u32 {
        self.heads + u32::from(self.first().is_some_and(|first| first.marks.is_joined))
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
        self.at(0)
    }

    pub(super) fn at(&self, index: usize) -> Option<&Sent> {
        self.segments.get(index).map(|node| &node.sent)
    }

    pub(super) fn push(&mut self, sent: Sent) {
        self.append(sent);
        self.count(sent.marks);
        self.link_if_open(self.segments.len() - 1);
    }

    /// Keeps the first `len` segments. The others were not sent.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.segments.len() > len {
            self.unlink(self.segments.len() - 1);
            if let Some(node) = self.segments.pop_back() {
                self.uncount(node.sent.marks);
            }
        }
    }

    /// Removes the oldest segment.
    pub(super) fn pop(&mut self) -> Option<Sent> {
        self.unlink(0);
        let sent = self.segments.pop_front()?.sent;
        self.uncount(sent.marks);
        if self.segments.is_empty() && self.segments.capacity() > 16 {
            // An idle connection keeps no memory.
            self.segments = VecDeque::new();
        }
        Some(sent)
    }

    /// Splits the segment at `index`, so that its first part ends at `at`.
    pub(super) fn split(&mut self, index: usize, at: Seq) {
        let Some(&node) = self.segments.get(index) else { return };
        let mut behind = Node { sent: Sent { seq: at, ..node.sent }, ..node };
        let marks = &mut behind.sent.marks;
        (marks.is_syn, marks.is_joined) = (false, false);
        if let Some(here) = self.segments.get_mut(index) {
            here.sent.end = at;
            here.sent.marks.is_fin = false;
            here.sent.marks.ending = Ending::Plain;
        }
        self.segments.insert(index + 1, behind);
        self.count(behind.sent.marks);
        self.link_rest(index);
    }

    /// Splits all segments that are to be sent again and are longer than `most` bytes, after the path has
    /// become narrower: in one pass, where each split by itself would move the segments behind it. Those that were
    /// one packet stay one, all as long as each other but for its end.
    pub(super) fn split_all(&mut self, most: u32) {
        if most == 0 {
            return;
        }
        let before = std::mem::take(&mut self.segments);
        let mut is_cut = false;
        for Node { mut sent, .. } in before {
            let is_meant = sent.marks.awaits_resend() && !sent.marks.is_syn;
            is_cut &= is_meant && sent.marks.is_joined;
            if is_cut {
                sent = self.joined_to_rest(sent, most);
            }
            while is_meant && sent.payload_bytes() > most {
                let at = sent.seq + most;
                let marks = Marks { is_fin: false, ending: Ending::Plain, ..sent.marks };
                self.append(Sent { end: at, marks, ..sent });
                sent = Sent { seq: at, marks: Marks { is_joined: true, ..sent.marks }, ..sent };
                is_cut = true;
            }
            self.append(sent);
        }
        self.count_anew();
        self.list_anew();
    }

    /// A segment with the one before, the rest of another one of its packet, if that has less than `most` bytes.
    fn joined_to_rest(&mut self, sent: Sent, most: u32) -> Sent {
        match self.segments.back() {
            Some(&Node { sent: rest, .. }) if rest.end - rest.seq < most => {
                self.segments.pop_back();
                let ever_retransmitted =
                    rest.marks.ever_retransmitted || sent.marks.ever_retransmitted;
                let is_joined = rest.marks.is_joined;
                let ending = rest.marks.ending.followed_by(sent.marks.ending);
                let marks = Marks { ever_retransmitted, is_joined, ending, ..sent.marks };
                Sent { seq: rest.seq, marks, ..sent }
            }
            _ => sent,
        }
    }

    /// Moves the borders of segments that were one packet so that each but the last has `size_bytes`, as a device
    /// cuts it (`tcp_set_skb_tso_segs`). Their number may change.
    pub(super) fn set_segment_size(&mut self, packet: RangeInclusive<usize>, size_bytes: u32) {
        let (first, last) = (*packet.start(), *packet.end());
        let (Some(&head), Some(&tail)) = (self.at(first), self.at(last)) else { return };
        if first == last || size_bytes == 0 || self.has_even_segments(&packet, size_bytes) {
            return;
        }
        let before: Vec<Marks> = self.segments.range(packet).map(|node| node.sent.marks).collect();
        before.iter().for_each(|&marks| self.uncount(marks));
        let data_bytes = tail.seq - head.seq + tail.payload_bytes();
        let count = data_bytes.div_ceil(size_bytes).max(1) as usize;
        self.segments.drain((first + count).min(last + 1)..=last);
        for _ in before.len()..count {
            self.segments.insert(last, Node { sent: tail, earlier: Seq(0), later: Seq(0) });
        }
        let inner = Marks {
            ever_retransmitted: before.iter().any(|marks| marks.ever_retransmitted),
            is_fin: false,
            ending: Ending::Plain,
            ..head.marks
        };
        let mut seq = head.seq;
        for index in first..first + count {
            let is_last = index + 1 == first + count;
            let (is_fin, ending) = (tail.marks.is_fin, tail.marks.ending);
            let inner = Marks { is_joined: index > first || head.marks.is_joined, ..inner };
            let marks = if is_last { Marks { is_fin, ending, ..inner } } else { inner };
            let end = if is_last { tail.end } else { seq + size_bytes };
            self.segments[index].sent = Sent { seq, end, marks, ..head };
            self.count(marks);
            seq = end;
        }
        if before.iter().any(|marks| !marks.is_settled()) {
            self.list_anew();
        }
    }

    fn has_even_segments(&self, packet: &RangeInclusive<usize>, size_bytes: u32) -> bool {
        let (first, last) = (*packet.start(), *packet.end());
        let is_even = |node: &Node| node.sent.end - node.sent.seq == size_bytes;
        self.segments.range(first..last).all(is_even)
            && self.at(last).is_some_and(|tail| tail.payload_bytes() <= size_bytes)
    }

    /// Segments that were one packet with that at `index`, as far as their marks agree.
    pub(super) fn packet_of(&self, index: usize) -> RangeInclusive<usize> {
        let is_same = |before: usize| {
            let (before, here) = (self.at(before), self.at(before + 1));
            before.zip(here).is_some_and(|(before, here)| {
                let [before, here] = [before, here].map(|sent| sent.marks);
                here.is_joined
                    && (before.sacked, before.lost, before.retransmitted)
                        == (here.sacked, here.lost, here.retransmitted)
            })
        };
        let first =
            (0..index).rev().find(|&before| !is_same(before)).map_or(0, |before| before + 1);
        let last = (index..self.segments.len()).find(|&before| !is_same(before)).unwrap_or(index);
        first..=last
    }

    fn append(&mut self, sent: Sent) {
        self.segments.push_back(Node { sent, earlier: Seq(0), later: Seq(0) });
    }

    /// Index of the first segment that ends behind `seq`.
    pub(super) fn index_of(&self, seq: Seq) -> usize {
        self.segments.partition_point(|node| !node.sent.end.is_after(seq))
    }

    /// Changes the marks of a segment, and the numbers with them.
    pub(super) fn mark(&mut self, index: usize, change: impl FnOnce(&mut Marks)) {
        let Some(Node { sent, .. }) = self.segments.get_mut(index) else { return };
        let before = sent.marks;
        let mut after = before;
        change(&mut after);
        if before.is_settled() != after.is_settled() {
            self.unlink(index);
        }
        if let Some(node) = self.segments.get_mut(index) {
            node.sent.marks = after;
        }
        self.uncount(before);
        self.count(after);
        if before.is_settled() {
            self.link_if_open(index);
        }
    }

    /// Changes the marks of all segments.
    pub(super) fn mark_all(&mut self, mut change: impl FnMut(&mut Sent)) {
        self.segments.iter_mut().for_each(|node| change(&mut node.sent));
        self.count_anew();
        self.list_anew();
    }

    /// Trims the acknowledged part off the oldest segment.
    pub(super) fn trim(&mut self, una: Seq) {
        let Some(&Node { sent, earlier, later }) = self.segments.front() else { return };
        if !sent.seq.is_before(una) {
            return;
        }
        self.segments[0].sent.seq = una;
        if sent.marks.is_settled() {
            return;
        }
        if sent.seq != self.by_time.earliest {
            let before = self.index_at(earlier, 0);
            self.segments[before].later = una;
        }
        if sent.seq != self.by_time.latest {
            let behind = self.index_at(later, 1);
            self.segments[behind].earlier = una;
        }
        let ByTime { earliest, latest, last_overtaken, .. } = &mut self.by_time;
        for link in [earliest, latest, last_overtaken] {
            if *link == sent.seq {
                *link = una;
            }
        }
    }

    /// Notes a further transmission of a segment.
    pub(super) fn sent_again(
        &mut self,
        index: usize,
        now_us: u64,
        (deliveries, is_app_limited): (Deliveries, bool),
    ) {
        self.unlink(index);
        if let Some(Node { sent, .. }) = self.segments.get_mut(index) {
            sent.sent_us = now_us;
            sent.deliveries = deliveries;
            (sent.marks.ever_retransmitted, sent.marks.is_app_limited) = (true, is_app_limited);
        }
        self.link_if_open(index);
    }

    /// Moves the mark of what is overtaken on, to the last segment in the list by time for which
    /// `is_overtaken`. What was overtaken once stays so.
    pub(super) fn overtake(&mut self, mut is_overtaken: impl FnMut(&Sent) -> bool) {
        let list = self.by_time;
        let mut next = match list.overtaken() {
            Some(last) => self.later_than(self.index_at(last, 0)),
            None => list.has_some.then(|| self.index_at(list.earliest, 0)),
        };
        while let Some(index) = next
            && let Some(sent) = self.at(index)
            && is_overtaken(sent)
        {
            (self.by_time.last_overtaken, self.by_time.has_overtaken) = (sent.seq, true);
            next = self.later_than(index);
        }
    }

    /// Index of the overtaken segment that was sent first.
    pub(super) fn first_overtaken(&self) -> Option<usize> {
        self.by_time.overtaken().map(|_| self.index_at(self.by_time.earliest, 0))
    }

    /// Overtaken segment that was sent last.
    pub(super) fn last_overtaken(&self) -> Option<&Sent> {
        self.by_time.overtaken().and_then(|last| self.at(self.index_at(last, 0)))
    }

    /// Segments from `index` on that were one packet and are to be sent again, `most` of them at most.
    /// The rest of the packet is one of its own from now on (`tcp_fragment`).
    pub(super) fn cut_packet(&mut self, index: usize, most: usize) -> usize {
        let is_same = |node: &&Node| {
            let marks = node.sent.marks;
            marks.is_joined && marks.awaits_resend()
        };
        let behind = self.segments.range((index + 1).min(self.segments.len())..);
        let count = 1 + behind.take_while(is_same).take(most.saturating_sub(1)).count();
        for edge in [index, index + count] {
            self.mark(edge, |marks| marks.is_joined = false);
        }
        count
    }

    fn count_anew(&mut self) {
        (self.sacked, self.lost, self.retransmitted, self.awaiting_resend) = (0, 0, 0, 0);
        self.heads = 0;
        for index in 0..self.segments.len() {
            self.count(self.segments[index].sent.marks);
        }
    }

    fn count(&mut self, marks: Marks) {
        self.sacked += u32::from(marks.sacked);
        self.lost += u32::from(marks.lost);
        self.retransmitted += u32::from(marks.retransmitted);
        self.awaiting_resend += u32::from(marks.awaits_resend());
        self.heads += u32::from(!marks.is_joined);
    }

    fn uncount(&mut self, marks: Marks) {
        self.sacked -= u32::from(marks.sacked);
        self.lost -= u32::from(marks.lost);
        self.retransmitted -= u32::from(marks.retransmitted);
        self.awaiting_resend -= u32::from(marks.awaits_resend());
        self.heads -= u32::from(!marks.is_joined);
    }
}

/// The list by time.
impl Scoreboard {
    /// Index of the segment that begins with `seq`. It is mostly at, or next to, `near`.
    fn index_at(&self, seq: Seq, near: usize) -> usize {
        let begins =
            |&index: &usize| self.segments.get(index).is_some_and(|node| node.sent.seq == seq);
        let around = [near, near.wrapping_sub(1), near + 1];
        around.into_iter().find(begins).unwrap_or_else(|| {
            self.segments.partition_point(|node| {
                #[cfg(test)]
                tests::LOOKS.set(tests::LOOKS.get() + 1);
                node.sent.seq.is_before(seq)
            })
        })
    }

    fn later_than(&self, index: usize) -> Option<usize> {
        let node = self.segments.get(index)?;
        (node.sent.seq != self.by_time.latest).then(|| self.index_at(node.later, index))
    }

    /// Puts a segment that was just sent, and is not settled, at the end.
    fn link_if_open(&mut self, index: usize) {
        let latest = self.by_time.latest;
        let Some(node) = self.segments.get_mut(index) else { return };
        if node.sent.marks.is_settled() {
            return;
        }
        node.earlier = latest;
        let seq = node.sent.seq;
        if self.by_time.has_some {
            let before = self.index_at(latest, index);
            self.segments[before].later = seq;
        } else {
            self.by_time.earliest = seq;
        }
        self.by_time.latest = seq;
        self.by_time.has_some = true;
    }

    /// Puts the segment behind that at `index`, which was a part of it, behind it in the list too.
    fn link_rest(&mut self, index: usize) {
        let (Some(here), Some(rest)) = (self.segments.get(index), self.segments.get(index + 1))
        else {
            return;
        };
        if here.sent.marks.is_settled() {
            return;
        }
        let (seq, rest, later) = (here.sent.seq, rest.sent.seq, here.later);
        self.segments[index].later = rest;
        self.segments[index + 1].earlier = seq;
        self.segments[index + 1].later = later;
        if self.by_time.latest == seq {
            self.by_time.latest = rest;
        } else {
            let behind = self.index_at(later, index + 2);
            self.segments[behind].earlier = rest;
        }
        if self.by_time.overtaken() == Some(seq) {
            self.by_time.last_overtaken = rest;
        }
    }

    /// Takes a segment out, if it is in.
    fn unlink(&mut self, index: usize) {
        let Some(&Node { sent, earlier, later }) = self.segments.get(index) else { return };
        if sent.marks.is_settled() {
            return;
        }
        let seq = sent.seq;
        let (is_first, is_last) = (seq == self.by_time.earliest, seq == self.by_time.latest);
        if self.by_time.overtaken() == Some(seq) {
            (self.by_time.last_overtaken, self.by_time.has_overtaken) = (earlier, !is_first);
        }
        if is_first {
            self.by_time.earliest = later;
        } else {
            let before = self.index_at(earlier, index);
            self.segments[before].later = later;
        }
        if is_last {
            self.by_time.latest = earlier;
        } else {
            let behind = self.index_at(later, index);
            self.segments[behind].earlier = earlier;
        }
        self.by_time.has_some = !(is_first && is_last);
    }

    /// Makes the list anew, after a rare change of many segments.
    fn list_anew(&mut self) {
        self.by_time = ByTime::EMPTY;
        let mut open: Vec<usize> = (0..self.segments.len()).collect();
        open.sort_by_key(|&index| self.segments[index].sent.sent_us);
        open.into_iter().for_each(|index| self.link_if_open(index));
    }
}

#[cfg(test)]
mod tests;
