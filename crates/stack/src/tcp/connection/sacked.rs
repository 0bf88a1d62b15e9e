//! Selective acknowledgements received (`tcp_sacktag_write_queue`).

use super::super::seq::Seq;
use super::super::wire::{SackBlock, Segment};
use super::ack::AckFacts;
use super::{Connection, Context};

impl Connection {
    /// Marks the segments that blocks acknowledge. Blocks that lie are ignored.
    pub(super) fn take_sacks(
        &mut self,
        segment: &Segment,
        prior_una: Seq,
        facts: &mut AckFacts,
        cx: &Context<'_>,
    ) {
        let blocks = segment.options.sacks;
        let mut blocks = blocks.as_slice();
        if let Some((first, rest)) = blocks.split_first()
            && is_duplicate(first, rest, segment.ack)
        {
            cx.counters.dsack_recv.add(1);
            if self.take_duplicate_sack(first, prior_una, facts) {
                facts.duplicate_sacked = true;
                blocks = rest;
            }
        }
        let place = self.recovery.known_blocks.get_or_insert_default();
        let known = std::mem::take(&mut **place);
        for block in blocks {
            if !self.is_valid(block) {
                continue;
            }
            if let Some(blocks) = &mut self.recovery.known_blocks {
                blocks.push(*block);
            }
            self.mark_block(block, new_part(block, known.as_slice()), facts, cx.now_us);
        }
    }

    /// `tcp_is_sackblock_valid`: within what is in flight.
    fn is_valid(&self, block: &SackBlock) -> bool {
        block.end.is_after(block.start)
            && !block.end.is_after(self.send.next)
            && block.end.is_after(self.send.una)
            && !block.start.is_before(self.send.una)
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
        let left = u32::from(self.recovery.resent).checked_sub(duplicates);
        self.recovery.resent = left.and_then(|left| u16::try_from(left).ok()).unwrap_or(0);
        if left.is_none() {
            // More duplicates than retransmissions are the network's.
            return false;
        }
        let told = u16::try_from(duplicates).unwrap_or(u16::MAX);
        self.tally.dsack_dups = self.tally.dsack_dups.saturating_add(told);
        // What came twice was delivered.
        facts.delivered += duplicates;
        if self.recovery.undo_marker.is_some_and(|marker| block.end.is_after(marker)) {
            let segments =
                if block.end.is_after(prior_una) { self.resent_within(block) } else { duplicates };
            let left = &mut self.recovery.undo_retransmits;
            *left = left.map(|left| left.saturating_sub(segments));
        }
        let recovery = &mut self.recovery;
        // A probe overtakes nothing.
        let is_probe = recovery.loss_probe.is_some_and(|probe| probe.high_seq == block.end);
        if duplicates > 1 || !is_probe {
            recovery.rack.note_duplicate(self.send.una, self.send.next);
        }
        true
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

    /// `tcp_sacktag_one`.
    fn mark_sacked(&mut self, index: usize, facts: &mut AckFacts, now_us: u64) {
        let Some(&sent) = self.sent.at(index) else { return };
        self.advance_rack(&sent, now_us);
        if !sent.marks.retransmitted && !sent.marks.ever_retransmitted {
            if self.recovery.highest_sacked.is_some_and(|highest| sent.seq.is_before(highest)) {
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
        let highest = self.recovery.highest_sacked;
        self.recovery.highest_sacked =
            Some(highest.map_or(sent.end, |highest| highest.later(sent.end)));
        facts.data_sacked = true;
        facts.delivered += 1;
    }

    /// Learns how far segments overtake each other (`tcp_check_sack_reordering`).
    pub(super) fn note_reordering(&mut self, facts: &AckFacts) {
        let (Some(lowest), Some(highest)) = (facts.reordered, self.recovery.highest_sacked) else {
            return;
        };
        if !lowest.is_before(highest) {
            return;
        }
        let segments = (highest - lowest).div_ceil(self.send.mss);
        self.recovery.reordering = self.recovery.reordering.max(segments).min(MAX_REORDERING);
        self.recovery.saw_reordering = true;
    }
}

/// Reordering that is tolerated, at most (`tcp_max_reordering`), in segments.
const MAX_REORDERING: u32 = 300;

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
