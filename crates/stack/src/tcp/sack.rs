//! Selective acknowledgements to be sent (RFC 2018): the newest block first, and a duplicate before
//! it (RFC 2883).

use super::seq::Seq;
use super::wire::{SackBlock, SackBlocks};

/// Blocks that a connection reports.
const BLOCKS: usize = 4;
/// Blocks that an ACK that waits may gather.
const BLOCKS_EXPECTED: usize = 2;

/// Ranges that were received out of order, by the time of their last change. Without any, they take
/// no memory.
#[derive(Default, Debug)]
pub(super) struct SackReport(Option<Box<Ranges>>);

#[derive(Default, Debug)]
struct Ranges {
    blocks: [SackBlock; BLOCKS],
    count: u8,
    /// Range that came twice; reported once.
    duplicate: Option<SackBlock>,
}

impl SackReport {
    /// Notes that the bytes of a range are there; of a block that was enlarged, the whole block.
    pub(super) fn note(&mut self, (start, end): (Seq, Seq)) {
        let new = SackBlock { start, end };
        let is_apart = |block: &SackBlock| block.end.is_before(start) || block.start.is_after(end);
        let mut blocks = [new; BLOCKS];
        let mut count = 1;
        for block in self.blocks() {
            if is_apart(block) && count < BLOCKS {
                blocks[count] = *block;
                count += 1;
            }
        }
        let ranges = self.0.get_or_insert_default();
        (ranges.blocks, ranges.count) = (blocks, count_u8(count));
    }

    fn blocks(&self) -> &[SackBlock] {
        self.0.as_ref().map_or(&[], |ranges| &ranges.blocks[..ranges.count.into()])
    }

    /// Notes that the bytes of a range, which are there, came again: their block is then the first one,
    /// behind the D-SACK, which would be taken for a block of its own otherwise (RFC 2883, section 4.2).
    pub(super) fn note_again(&mut self, (start, end): (Seq, Seq)) {
        let holds = |block: &&SackBlock| !block.start.is_after(start) && !block.end.is_before(end);
        let whole = self.blocks().iter().find(holds);
        self.note(whole.map_or((start, end), |block| (block.start, block.end)));
    }

    /// Notes that a range came twice.
    pub(super) fn note_duplicate(&mut self, (start, end): (Seq, Seq)) {
        let ranges = self.0.get_or_insert_default();
        ranges.duplicate = Some(match ranges.duplicate {
            Some(block) if !(end.is_before(block.start) || start.is_after(block.end)) => {
                SackBlock { start: block.start.earlier(start), end: block.end.later(end) }
            }
            Some(block) => block,
            None => SackBlock { start, end },
        });
    }

    /// Forgets a range that came twice, as the kernel does when other data come before it is told.
    pub(super) fn forget_duplicate(&mut self) {
        if let Some(ranges) = &mut self.0 {
            ranges.duplicate = None;
        }
    }

    /// True if a range would be placed in front of at least `TCP_SACK_BLOCKS_EXPECTED` blocks: a compressed ACK
    /// might not have room for all.
    pub(super) fn pushes_out(&self, (start, end): (Seq, Seq)) -> bool {
        let is_joined =
            |block: &SackBlock| !start.is_after(block.end) && !block.start.is_after(end);
        let blocks = self.blocks();
        blocks.iter().position(is_joined).unwrap_or(blocks.len()) >= BLOCKS_EXPECTED
    }

    /// Forgets blocks before `next`, which is acknowledged cumulatively.
    pub(super) fn acknowledge(&mut self, next: Seq) {
        let Some(ranges) = &mut self.0 else { return };
        let mut count = 0;
        for at in 0..ranges.count.into() {
            if ranges.blocks[at].start.is_after(next) {
                ranges.blocks[count] = ranges.blocks[at];
                count += 1;
            }
        }
        ranges.count = count_u8(count);
        self.release();
    }

    /// Forgets all blocks: the payloads were dropped (`tcp_sack_reset`).
    pub(super) fn clear(&mut self) {
        self.0 = None;
    }

    /// Highest end of a block.
    pub(super) fn highest(&self) -> Option<Seq> {
        self.blocks().iter().map(|block| block.end).reduce(Seq::later)
    }

    /// Bytes that the blocks of the next segment take, at most `limit`, in its options.
    pub(super) fn option_bytes(&self, limit: usize) -> u32 {
        let Some(ranges) = &self.0 else { return 0 };
        let duplicate = usize::from(ranges.duplicate.is_some());
        match u32::from(count_u8((usize::from(ranges.count) + duplicate).min(limit))) {
            0 => 0,
            blocks => 4 + 8 * blocks,
        }
    }

    /// Range that came twice, which the next segment tells.
    pub(super) fn duplicate(&self) -> Option<SackBlock> {
        self.0.as_ref().and_then(|ranges| ranges.duplicate)
    }

    /// Notes again a range that was taken for a segment that did not leave.
    pub(super) fn put_back(&mut self, duplicate: Option<SackBlock>) {
        if duplicate.is_some() {
            self.0.get_or_insert_default().duplicate = duplicate;
        }
    }

    /// Blocks of the next segment, at most `limit`.
    pub(super) fn take(&mut self, limit: usize) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        let Some(ranges) = &mut self.0 else { return blocks };
        let duplicate = ranges.duplicate.take();
        for block in duplicate.iter().chain(self.blocks()).take(limit) {
            blocks.push(*block);
        }
        self.release();
        blocks
    }

    fn release(&mut self) {
        self.0.take_if(|ranges| ranges.count == 0 && ranges.duplicate.is_none());
    }
}

fn count_u8(blocks: usize) -> u8 {
    u8::try_from(blocks).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(report: &mut SackReport) -> Vec<(u32, u32)> {
        report.take(4).as_slice().iter().map(|block| (block.start.0, block.end.0)).collect()
    }

    #[test]
    fn tcp_8_newest_block_is_first() {
        let mut report = SackReport::default();
        for start in [100, 300, 500] {
            report.note((Seq(start), Seq(start + 50)));
        }
        assert_eq!(ranges(&mut report), [(500, 550), (300, 350), (100, 150)]);
        report.note((Seq(100), Seq(170)));
        assert_eq!(ranges(&mut report), [(100, 170), (500, 550), (300, 350)]);
        report.note((Seq(100), Seq(350)));
        assert_eq!(ranges(&mut report), [(100, 350), (500, 550)]);
        report.acknowledge(Seq(400));
        assert_eq!(ranges(&mut report), [(500, 550)]);
    }

    #[test]
    fn tcp_8_duplicate_precedes_its_block() {
        let mut report = SackReport::default();
        for start in [100, 300, 500, 700] {
            report.note((Seq(start), Seq(start + 90)));
        }
        report.note_again((Seq(310), Seq(330)));
        report.note_duplicate((Seq(310), Seq(330)));
        assert_eq!(ranges(&mut report), [(310, 330), (300, 390), (700, 790), (500, 590)]);
    }

    #[test]
    fn tcp_8_duplicate_is_reported_once_and_first() {
        let mut report = SackReport::default();
        report.note((Seq(300), Seq(350)));
        report.note_duplicate((Seq(100), Seq(150)));
        assert_eq!(ranges(&mut report), [(100, 150), (300, 350)]);
        assert_eq!(ranges(&mut report), [(300, 350)]);
    }
}
