//! Selective acknowledgements received (`tcp_sacktag_write_queue`).

use super::super::seq::Seq;
use super::super::wire::{SackBlock, SackBlocks, Segment};
use super::ack::AckFacts;
use super::rack::LossProbe;
use super::recovery::Phase;
use super::{Connection, Context};

impl Connection {
    /// Marks the segments that blocks acknowledge, those of the lowest block first. Blocks that lie are
    /// ignored.
    pub(super) fn take_sacks(
        &mut self,
        segment: &Segment,
        prior_una: Seq,
        facts: &mut AckFacts,
        cx: &Context<'_>,
    ) {
        let blocks = segment.options.sacks;
        let mut blocks = blocks.as_slice();
        let mut duplicate = None;
        if let Some((first, rest)) = blocks.split_first()
            && is_duplicate(first, rest, segment.ack)
        {
            cx.counters.dsack_recv.add(1);
            if self.take_duplicate_sack(first, prior_una, facts) {
                facts.duplicate_sacked = true;
                (duplicate, blocks) = (Some(first), rest);
            }
        }
        if self.sent.is_empty() {
            return;
        }
        let una = prior_una.later(segment.ack);
        let mut valid = SackBlocks::default();
        for block in blocks.iter().filter(|block| self.is_valid(block, una)) {
            valid.push(*block);
        }
        valid.sort();
        let place = self.recovery.repair.known_blocks.get_or_insert_default();
        let known = std::mem::replace(&mut **place, valid);
        for block in valid.as_slice() {
            self.mark_block(block, new_part(block, known.as_slice()), facts, cx.now_us);
        }
        if let Some(block) = duplicate {
            self.take_back_retransmissions(block, una, facts);
        }
        if self.recovery.phase != Phase::Loss || self.recovery.repair.undo_marker.is_some() {
            self.note_reordering(facts.reordered.take());
        }
    }

    /// `tcp_is_sackblock_valid`: within what is in flight. One that begins with the first number of that is
    /// the peer's contradiction.
    fn is_valid(&self, block: &SackBlock, una: Seq) -> bool {
        block.end.is_after(block.start)
            && !block.end.is_after(self.send.next)
            && block.start.is_after(una)
    }

    /// Counts retransmissions that the peer calls unnecessary (`tcp_dsack_seen`). Returns false if that is
    /// dubious: the block is then as any other.
    fn take_duplicate_sack(
        &mut self,
        block: &SackBlock,
        prior_una: Seq,
        facts: &mut AckFacts,
    ) -> bool {
        let len_bytes = block.end - block.start;
        if !block.end.is_after(block.start) || len_bytes > self.send.max_window {
            return false;
        }
        let duplicates = len_bytes.div_ceil(self.send.mss);
        // A probe overtakes nothing.
        let is_probe = |probe: LossProbe| probe.high_seq == block.end;
        facts.probe_duplicated = duplicates == 1 && self.recovery.loss_probe.is_some_and(is_probe);
        let told = u16::try_from(duplicates).unwrap_or(u16::MAX);
        self.tally.dsack_dups = self.tally.dsack_dups.saturating_add(told);
        if u32::from(self.tally.dsack_dups) > self.resent.total() {
            // More duplicates than retransmissions are the network's.
            return false;
        }
        // What came twice was delivered.
        facts.delivered += duplicates;
        if self.recovery.repair.undo_marker.is_some_and(|marker| block.end.is_after(marker)) {
            let segments =
                if block.end.is_after(prior_una) { self.resent_within(block) } else { duplicates };
            let left = &mut self.recovery.repair.undo_retransmits;
            *left = left.map(|left| left.saturating_sub(segments));
        }
        let recovery = &mut self.recovery;
        if recovery.reorderings > 0 && !facts.probe_duplicated {
            recovery.rack.note_duplicate(self.send.una, self.send.next);
        }
        true
    }

    /// Retransmissions of segments that came twice are no longer in flight, and what was acknowledged
    /// selectively before was overtaken (`tcp_sacktag_one`).
    fn take_back_retransmissions(&mut self, block: &SackBlock, una: Seq, facts: &mut AckFacts) {
        if block.end.is_after(una) && !block.start.is_after(una) {
            return;
        }
        let mut index = self.sent.index_of(block.start);
        while let Some(&sent) = self.sent.at(index)
            && !sent.end.is_after(block.end)
        {
            if sent.marks.ever_retransmitted && sent.marks.sacked && !facts.data_sacked {
                facts.note_reordered(sent.seq);
            }
            if sent.marks.retransmitted && !sent.marks.lost {
                self.sent.mark(index, |marks| marks.retransmitted = false);
            }
            index += 1;
        }
    }

    /// Outstanding segments within a block that were sent again.
    fn resent_within(&self, block: &SackBlock) -> u32 {
        let first = self.sent.index_of(block.start);
        let within = (first..).map_while(|index| self.sent.at(index));
        let within = within.take_while(|sent| !sent.end.is_after(block.end));
        let resent = within.filter(|sent| sent.marks.ever_retransmitted).count();
        u32::try_from(resent).unwrap_or(u32::MAX)
    }

    /// Marks the segments within a block, of which a part is new. A segment that began to be told before may
    /// be whole now.
    fn mark_block(&mut self, block: &SackBlock, new: SackBlock, facts: &mut AckFacts, now_us: u64) {
        let mut index = self.sent.index_of(new.start);
        while let Some(&sent) = self.sent.at(index) {
            if !sent.seq.is_before(new.end) {
                break;
            }
            let is_inside = !sent.seq.is_before(block.start) && !sent.end.is_after(block.end);
            if is_inside && !sent.marks.sacked {
                self.mark_sacked(index, facts, now_us);
            }
            index += 1;
        }
    }

    /// End of the last segment that is acknowledged selectively (`tcp_highest_sack_seq`). Without such a segment the
    /// number that is kept may be from 2 GiB ago.
    pub(super) fn highest_sacked(&self) -> Option<Seq> {
        self.recovery.repair.highest_sacked.filter(|_| self.sent.sacked > 0)
    }

    /// `tcp_sacktag_one`.
    fn mark_sacked(&mut self, index: usize, facts: &mut AckFacts, now_us: u64) {
        let Some(&sent) = self.sent.at(index) else { return };
        self.advance_rack(&sent, now_us);
        self.sent.clock.note_delivered(&sent, &mut facts.rate);
        let highest = self.highest_sacked();
        if !sent.marks.retransmitted && !sent.marks.ever_retransmitted {
            if highest.is_some_and(|highest| sent.seq.is_before(highest)) {
                facts.note_reordered(sent.seq);
            }
            if !sent.end.is_after(self.recovery.high_seq) {
                facts.original_acked = true;
            }
            facts.first_sacked_us.get_or_insert(sent.sent_us);
            facts.last_sacked_us = Some(sent.sent_us);
        }
        self.sent.mark(index, |marks| {
            marks.sacked = true;
            if marks.lost {
                (marks.lost, marks.retransmitted) = (false, false);
            }
        });
        self.recovery.repair.highest_sacked =
            Some(highest.map_or(sent.end, |highest| highest.later(sent.end)));
        facts.data_sacked = true;
        facts.delivered += 1;
    }

    /// Learns how far segments overtake each other (`tcp_check_sack_reordering`).
    pub(super) fn note_reordering(&mut self, lowest: Option<Seq>) {
        let Some(lowest) = lowest else { return };
        let highest = self.highest_sacked();
        let highest = highest.unwrap_or(self.send.una);
        if !lowest.is_before(highest) {
            return;
        }
        let segments = (highest - lowest).div_ceil(self.send.mss);
        self.recovery.reordering = self.recovery.reordering.max(segments).min(MAX_REORDERING);
        self.recovery.reorderings = self.recovery.reorderings.saturating_add(1);
    }
}

/// Reordering that is tolerated, at most (`tcp_max_reordering`), in segments.
pub(super) const MAX_REORDERING: u32 = 300;

/// D-SACK: a first block below the ACK, or inside of the second (RFC 2883, section 4).
fn is_duplicate(first: &SackBlock, rest: &[SackBlock], ack: Seq) -> bool {
    first.start.is_before(ack)
        || rest.first().is_some_and(|second| {
            !first.end.is_after(second.end) && !first.start.is_before(second.start)
        })
}

/// Part of a block that the blocks of the ACK before did not tell.
fn new_part(block: &SackBlock, known: &[SackBlock]) -> SackBlock {
    let SackBlock { mut start, mut end } = *block;
    for known in known {
        if !known.start.is_after(start) && known.end.is_after(start) {
            start = known.end.earlier(end);
        }
        if !known.end.is_before(end) && known.start.is_before(end) {
            end = known.start.later(start);
        }
    }
    SackBlock { start, end }
}
