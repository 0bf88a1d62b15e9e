//! Scoreboard: segments that were sent and not acknowledged, oldest first.
//!
//! Segments that may still turn out lost are also listed by the time of their last transmission
//! (`tsorted_sent_queue`), so that losses are found without a look at the others.

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
    /// Was sent in one packet with the segment before.
    pub(super) is_joined: bool,
}

impl Marks {
    /// True if time says no more about the segment: it arrived, or is to be sent again.
    fn is_settled(self) -> bool {
        self.sacked || self.awaits_resend()
    }

    fn awaits_resend(self) -> bool {
        self.lost && !self.retransmitted && !self.sacked
    }
}

/// A segment and its neighbours in the list by time, which only segments that are not settled are in.
/// The links of its ends have no meaning.
#[derive(Clone, Copy, Debug)]
struct Place {
    sent: Sent,
    earlier: Serial,
    later: Serial,
}

/// Number of a segment, counted from the connection's first one modulo 2^32.
type Serial = u32;

/// List by time: its ends, and the last one that a delivered segment has overtaken. Flags take less room
/// than options.
#[derive(Clone, Copy, Debug, Default)]
struct ByTime {
    earliest: Serial,
    latest: Serial,
    last_overtaken: Serial,
    has_some: bool,
    has_overtaken: bool,
}

impl ByTime {
    fn overtaken(&self) -> Option<Serial> {
        self.has_overtaken.then_some(self.last_overtaken)
    }
}

/// Segments in flight, and their numbers by mark.
#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    segments: VecDeque<Place>,
    /// Serial of the oldest one.
    first_serial: Serial,
    by_time: ByTime,
    pub(super) sacked: u32,
    pub(super) lost: u32,
    pub(super) retransmitted: u32,
    /// Lost segments that are not sent again yet.
    pub(super) awaiting_resend: u32,
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
        self.at(0)
    }

    pub(super) fn at(&self, index: usize) -> Option<&Sent> {
        self.segments.get(index).map(|place| &place.sent)
    }

    pub(super) fn push(&mut self, sent: Sent) {
        self.segments.push_back(Place { sent, earlier: 0, later: 0 });
        self.count(sent.marks);
        self.link_if_open(self.segments.len() - 1);
    }

    /// Keeps the first `len` segments. The others were not sent.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.segments.len() > len {
            self.unlink(self.segments.len() - 1);
            if let Some(place) = self.segments.pop_back() {
                self.uncount(place.sent.marks);
            }
        }
    }

    /// Removes the oldest segment.
    pub(super) fn pop(&mut self) -> Option<Sent> {
        self.unlink(0);
        let sent = self.segments.pop_front()?.sent;
        self.first_serial = self.first_serial.wrapping_add(1);
        self.uncount(sent.marks);
        if self.segments.is_empty() && self.segments.capacity() > 16 {
            // An idle connection keeps no memory.
            self.segments = VecDeque::new();
        }
        Some(sent)
    }

    /// Splits the segment at `index`, so that its first part ends at `at`.
    pub(super) fn split(&mut self, index: usize, at: Seq) {
        let Some(&place) = self.segments.get(index) else { return };
        let mut behind = Place { sent: Sent { seq: at, ..place.sent }, ..place };
        let marks = &mut behind.sent.marks;
        (marks.is_syn, marks.is_joined) = (false, false);
        if let Some(here) = self.segments.get_mut(index) {
            here.sent.end = at;
            here.sent.marks.is_fin = false;
            here.sent.marks.push = false;
        }
        self.segments.insert(index + 1, behind);
        self.count(behind.sent.marks);
        self.list_anew();
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
        if let Some(Place { sent, .. }) = self.segments.get_mut(index) {
            sent.end = next.end;
            sent.marks.is_fin = next.marks.is_fin;
            sent.marks.push |= next.marks.push;
            sent.marks.ever_retransmitted |= next.marks.ever_retransmitted;
        }
        self.list_anew();
    }

    /// Index of the first segment that ends behind `seq`.
    pub(super) fn index_of(&self, seq: Seq) -> usize {
        self.segments.partition_point(|place| !place.sent.end.is_after(seq))
    }

    /// Changes the marks of a segment, and the numbers with them.
    pub(super) fn mark(&mut self, index: usize, change: impl FnOnce(&mut Marks)) {
        let Some(Place { sent, .. }) = self.segments.get_mut(index) else { return };
        let before = sent.marks;
        let mut after = before;
        change(&mut after);
        if before.is_settled() != after.is_settled() {
            self.unlink(index);
        }
        if let Some(place) = self.segments.get_mut(index) {
            place.sent.marks = after;
        }
        self.uncount(before);
        self.count(after);
        if before.is_settled() {
            self.link_if_open(index);
        }
    }

    /// Changes the marks of all segments.
    pub(super) fn mark_all(&mut self, mut change: impl FnMut(&mut Sent)) {
        self.segments.iter_mut().for_each(|place| change(&mut place.sent));
        (self.sacked, self.lost, self.retransmitted, self.awaiting_resend) = (0, 0, 0, 0);
        for index in 0..self.segments.len() {
            self.count(self.segments[index].sent.marks);
        }
        self.list_anew();
    }

    /// Trims the acknowledged part off the oldest segment.
    pub(super) fn trim(&mut self, una: Seq) {
        if let Some(Place { sent, .. }) = self.segments.front_mut()
            && sent.seq.is_before(una)
        {
            sent.seq = una;
        }
    }

    /// Notes a further transmission of a segment.
    pub(super) fn sent_again(&mut self, index: usize, now_us: u64) {
        self.unlink(index);
        if let Some(Place { sent, .. }) = self.segments.get_mut(index) {
            sent.sent_us = now_us;
            sent.marks.ever_retransmitted = true;
        }
        self.link_if_open(index);
    }

    /// Moves the mark of what is overtaken on, to the last segment in the list by time for which
    /// `is_overtaken`. What was overtaken once stays so.
    pub(super) fn overtake(&mut self, mut is_overtaken: impl FnMut(&Sent) -> bool) {
        let list = self.by_time;
        let mut next = match list.overtaken() {
            Some(last) => self.later_than(last),
            None => list.has_some.then_some(list.earliest),
        };
        while let Some(serial) = next
            && self.at(self.index_by(serial)).is_some_and(&mut is_overtaken)
        {
            (self.by_time.last_overtaken, self.by_time.has_overtaken) = (serial, true);
            next = self.later_than(serial);
        }
    }

    /// Index of the overtaken segment that was sent first.
    pub(super) fn first_overtaken(&self) -> Option<usize> {
        self.by_time.overtaken().map(|_| self.index_by(self.by_time.earliest))
    }

    /// Overtaken segment that was sent last.
    pub(super) fn last_overtaken(&self) -> Option<&Sent> {
        self.by_time.overtaken().and_then(|serial| self.at(self.index_by(serial)))
    }

    /// Segments from `index` on that were one packet and are to be sent again, `most` of them at most.
    /// The rest of the packet is one of its own from now on (`tcp_fragment`).
    pub(super) fn cut_packet(&mut self, index: usize, most: usize) -> usize {
        let is_same = |place: &&Place| {
            let marks = place.sent.marks;
            marks.is_joined && marks.awaits_resend()
        };
        let behind = self.segments.range((index + 1).min(self.segments.len())..);
        let count = 1 + behind.take_while(is_same).take(most.saturating_sub(1)).count();
        for edge in [index, index + count] {
            self.mark(edge, |marks| marks.is_joined = false);
        }
        count
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn count(&mut self, marks: Marks) {
        self.sacked += u32::from(marks.sacked);
        self.lost += u32::from(marks.lost);
        self.retransmitted += u32::from(marks.retransmitted);
        self.awaiting_resend += u32::from(marks.awaits_resend());
    }

    fn uncount(&mut self, marks: Marks) {
        self.sacked -= u32::from(marks.sacked);
        self.lost -= u32::from(marks.lost);
        self.retransmitted -= u32::from(marks.retransmitted);
        self.awaiting_resend -= u32::from(marks.awaits_resend());
    }
}

/// The list by time.
impl Scoreboard {
    fn index_by(&self, serial: Serial) -> usize {
        serial.wrapping_sub(self.first_serial) as usize
    }

    fn serial_of(&self, index: usize) -> Serial {
        self.first_serial.wrapping_add(u32::try_from(index).unwrap_or(u32::MAX))
    }

    fn later_than(&self, serial: Serial) -> Option<Serial> {
        let place = self.segments.get(self.index_by(serial))?;
        (serial != self.by_time.latest).then_some(place.later)
    }

    /// Puts a segment that was just sent, and is not settled, at the end.
    fn link_if_open(&mut self, index: usize) {
        let (serial, latest) = (self.serial_of(index), self.by_time.latest);
        let Some(place) = self.segments.get_mut(index) else { return };
        if place.sent.marks.is_settled() {
            return;
        }
        place.earlier = latest;
        if self.by_time.has_some {
            let before = self.index_by(latest);
            self.segments[before].later = serial;
        } else {
            self.by_time.earliest = serial;
        }
        self.by_time.latest = serial;
        self.by_time.has_some = true;
    }

    /// Takes a segment out, if it is in.
    fn unlink(&mut self, index: usize) {
        let serial = self.serial_of(index);
        let Some(&Place { sent, earlier, later }) = self.segments.get(index) else { return };
        if sent.marks.is_settled() {
            return;
        }
        let (is_first, is_last) = (serial == self.by_time.earliest, serial == self.by_time.latest);
        if self.by_time.overtaken() == Some(serial) {
            (self.by_time.last_overtaken, self.by_time.has_overtaken) = (earlier, !is_first);
        }
        if is_first {
            self.by_time.earliest = later;
        } else {
            let before = self.index_by(earlier);
            self.segments[before].later = later;
        }
        if is_last {
            self.by_time.latest = earlier;
        } else {
            let behind = self.index_by(later);
            self.segments[behind].earlier = earlier;
        }
        self.by_time.has_some = !(is_first && is_last);
    }

    /// Makes the list anew, after a rare change of many segments or of their serials.
    fn list_anew(&mut self) {
        self.by_time = ByTime::default();
        let mut open: Vec<usize> = (0..self.segments.len()).collect();
        open.sort_by_key(|&index| self.segments[index].sent.sent_us);
        open.into_iter().for_each(|index| self.link_if_open(index));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes of a segment.
    const MSS: u32 = 1000;

    fn sent(number: u32, sent_us: u64) -> Sent {
        let (seq, end) = (Seq(number * MSS), Seq((number + 1) * MSS));
        Sent { seq, end, sent_us, marks: Marks::default() }
    }

    fn mark_sacked(marks: &mut Marks) {
        (marks.sacked, marks.lost, marks.retransmitted) = (true, false, false);
    }

    fn mark_lost(marks: &mut Marks) {
        if !marks.sacked {
            (marks.lost, marks.retransmitted) = (true, false);
        }
    }

    /// Segments that are not settled and were sent before a time, in the order of time.
    fn scanned(scoreboard: &Scoreboard, before_us: u64) -> Vec<Seq> {
        let mut found: Vec<_> = (0..scoreboard.segments.len())
            .map(|index| scoreboard.segments[index].sent)
            .filter(|sent| !sent.marks.is_settled() && sent.sent_us < before_us)
            .collect();
        found.sort_by_key(|sent| sent.sent_us);
        found.iter().map(|sent| sent.seq).collect()
    }

    /// The same by the list.
    fn listed(scoreboard: &Scoreboard) -> Vec<Seq> {
        let Some(overtaken) = scoreboard.by_time.overtaken() else { return Vec::new() };
        let mut serial = scoreboard.by_time.earliest;
        let mut found = Vec::new();
        loop {
            found.extend(scoreboard.at(scoreboard.index_by(serial)).map(|sent| sent.seq));
            if serial == overtaken {
                return found;
            }
            serial = scoreboard.later_than(serial).unwrap();
        }
    }

    proptest! {
        #[test]
        fn tcp_34_overtaken_listed_as_by_scan(
            steps in prop::collection::vec((0_u32..10, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut scoreboard = Scoreboard { first_serial: u32::MAX - 20, ..Scoreboard::default() };
            let (mut number, mut delivered_us) = (0, 0);
            for (now_us, (what, which)) in (1..).zip(steps) {
                let len = scoreboard.segments.len();
                let index = if len == 0 { 0 } else { which.index(len) };
                match what {
                    0..=3 => {
                        scoreboard.push(sent(number, now_us));
                        number += 1;
                    }
                    4 => drop(scoreboard.pop()),
                    5 => scoreboard.mark(index, mark_sacked),
                    6 => scoreboard.mark(index, mark_lost),
                    7 => {
                        scoreboard.sent_again(index, now_us);
                        scoreboard.mark(index, |marks| marks.retransmitted |= marks.lost);
                    }
                    8 => match which.index(4) {
                        0 => scoreboard.mark_all(|sent| sent.marks.lost = false),
                        1 => scoreboard.truncate(len.saturating_sub(1)),
                        2 => scoreboard.merge_next(index, 2 * MSS),
                        _ if len > 0 => {
                            let at = *scoreboard.at(index).unwrap();
                            scoreboard.split(index, at.seq + (at.end - at.seq) / 2);
                        }
                        _ => {}
                    },
                    _ => {
                        let most = usize::try_from(now_us).unwrap();
                        delivered_us = delivered_us.max(which.index(most) as u64);
                    }
                }
                scoreboard.overtake(|sent| sent.sent_us < delivered_us);
                prop_assert_eq!(listed(&scoreboard), scanned(&scoreboard, delivered_us));
                let first = scoreboard.first_overtaken().and_then(|index| scoreboard.at(index));
                let expected = scanned(&scoreboard, delivered_us);
                prop_assert_eq!(first.map(|sent| sent.seq), expected.first().copied());
                let last = scoreboard.last_overtaken().map(|sent| sent.seq);
                prop_assert_eq!(last, expected.last().copied());
                let open = scanned(&scoreboard, u64::MAX).len();
                prop_assert_eq!(scoreboard.by_time.has_some, open > 0);
                let waiting = (0..scoreboard.segments.len())
                    .filter(|&index| scoreboard.at(index).unwrap().marks.awaits_resend())
                    .count();
                prop_assert_eq!(scoreboard.awaiting_resend as usize, waiting);
            }
        }
    }

    /// A window with a hole in every tenth place, of which each ACK acknowledges one segment: each
    /// segment is looked at once, and one more for each ACK.
    #[test]
    fn tcp_34_window_size_costs_no_work() {
        for window in [100_u32, 10_000] {
            let mut scoreboard = Scoreboard::default();
            (0..window).for_each(|number| scoreboard.push(sent(number, number.into())));
            let (mut looks, mut acks) = (0, 0);
            for index in (0..window as usize).filter(|index| index % 10 != 0) {
                let now_us = scoreboard.at(index).unwrap().sent_us;
                scoreboard.mark(index, mark_sacked);
                scoreboard.overtake(|sent| {
                    looks += 1;
                    sent.sent_us < now_us
                });
                acks += 1;
            }
            assert!(looks <= window + acks, "{looks} looks at {window} segments in {acks} ACKs");
            assert_eq!(listed(&scoreboard).len(), window as usize / 10);
        }
    }
}
