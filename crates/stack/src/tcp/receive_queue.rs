//! Received bytes, in the frames that they came in: those in order for the reader, and payloads
//! that came out of order.

use std::collections::VecDeque;
use std::ops::Range;

use forebay_buf::{Frame, Pool};
use forebay_rx::packet::Packet;

use super::on_demand::{Initial, OnDemand};
use super::seq::{Seq, len_u32};

/// Out-of-order payloads, at most; more are dropped, and sent again by the peer. The memory of the
/// largest buffer ends before, unless segments are small.
const OUT_OF_ORDER_MAX: usize = 16_384;
/// Bytes of a copy that takes the place of several frames.
const COPY_BYTES: usize = 16 << 10;

/// Payload of one packet, perhaps merged: a chain of frames.
#[derive(Debug)]
pub(super) struct Payload {
    pub(super) start: Seq,
    /// First sequence number behind the payload; FIN not counted.
    pub(super) end: Seq,
    pub(super) is_fin: bool,
    /// Start of the run of payloads without a gap that this one ends, and end of the run that it begins.
    run_start: Seq,
    run_end: Seq,
    /// First frame of the chain.
    frame: Frame,
    /// Bytes of the payload in the first frame.
    range: Range<usize>,
    /// Payload of each following frame but the last: bytes behind it are padding.
    size: usize,
}

impl Payload {
    /// Payload of a packet whose segment begins at `start`.
    pub(super) fn of(packet: Packet, start: Seq, len_bytes: u32, is_fin: bool) -> Self {
        let offset = usize::from(packet.headers.payload_offset);
        let first = packet.view().payload().len();
        let range = offset..offset + first;
        let size = match packet.gso_size() {
            0 => usize::MAX,
            size => size.into(),
        };
        let end = start + len_bytes;
        let (run_start, run_end) = (start, end + u32::from(is_fin));
        let frame = packet.frame;
        Self { start, end, is_fin, run_start, run_end, frame, range, size }
    }

    /// First sequence number behind the payload and its FIN.
    pub(super) fn end_with_fin(&self) -> Seq {
        self.end + u32::from(self.is_fin)
    }

    /// Memory that the payload occupies.
    pub(super) fn truesize(&self) -> u32 {
        self.frame.truesize()
    }

    /// Returns the frames.
    pub(super) fn free(self, pool: &mut Pool) {
        pool.put(self.frame);
    }
}

/// Bytes in order that the reader has not read.
#[derive(Debug)]
struct Chunk {
    bytes: Bytes,
    /// Bytes that the reader has not read.
    range: Range<usize>,
    truesize: u32,
}

#[derive(Debug)]
enum Bytes {
    Frame(Frame),
    Copied(Vec<u8>),
}

impl Chunk {
    fn unread(&self) -> &[u8] {
        let bytes = match &self.bytes {
            Bytes::Frame(frame) => frame.data(),
            Bytes::Copied(bytes) => bytes,
        };
        bytes.get(self.range.clone()).unwrap_or_default()
    }

    fn free(self, pool: &mut Pool) {
        if let Bytes::Frame(frame) = self.bytes {
            pool.put(frame);
        }
    }
}

/// Outcome of adding an out-of-order payload.
#[must_use]
#[derive(Debug)]
pub(super) enum Queued {
    /// Kept. The range of bytes that are there around it, and one that came twice.
    Kept { around: (Seq, Seq), duplicate: Option<(Seq, Seq)> },
    /// Nothing new.
    Duplicate(Payload),
    /// No room for more payloads.
    Full(Payload),
}

/// Outcome of a gap that was filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    /// Sequence number that is next now.
    pub(super) next: Seq,
    /// True if that is behind a FIN.
    pub(super) is_fin: bool,
    /// Bytes of the payloads that the segment that filled the gap had, too.
    pub(super) duplicate: Option<(Seq, Seq)>,
}

impl Filled {
    fn note_duplicate(&mut self, (start, end): (Seq, Seq)) {
        self.duplicate = Some(extended(self.duplicate, (start, end)));
    }
}

/// Bytes that came twice, with a later range of such: one that does not touch them is not told, as a
/// block has no gaps (RFC 2883, section 4; `tcp_dsack_extend`).
fn extended(known: Option<(Seq, Seq)>, (start, end): (Seq, Seq)) -> (Seq, Seq) {
    match known {
        Some((first, last)) if !start.is_after(last) => (first, last.later(end)),
        Some(known) => known,
        None => (start, end),
    }
}

/// Receive queue of a connection.
#[derive(Debug, Default)]
pub(super) struct ReceiveQueue {
    held: OnDemand<Held>,
    /// Unread bytes in order.
    len_bytes: u32,
    /// Memory of chunks and payloads.
    truesize: u32,
}

/// Bytes in order, and out-of-order payloads.
#[derive(Debug)]
struct Held {
    chunks: VecDeque<Chunk>,
    /// By their start (`out_of_order_queue`); each ends behind the one before.
    out_of_order: VecDeque<Payload>,
}

impl Initial for Held {
    const INITIAL: Self = Self { chunks: VecDeque::new(), out_of_order: VecDeque::new() };

    fn initial() -> &'static Self {
        static EMPTY: Held = Held::INITIAL;
        &EMPTY
    }
}

impl ReceiveQueue {
    pub(super) fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Memory that all frames occupy.
    pub(super) fn truesize(&self) -> u32 {
        self.truesize
    }

    pub(super) fn has_gap(&self) -> bool {
        !self.held.out_of_order.is_empty()
    }

    /// True if it takes memory although there is nothing in it.
    pub(super) fn is_spare(&self) -> bool {
        self.held.is_allocated() && self.held.chunks.is_empty() && !self.has_gap()
    }

    /// Gives the memory of an empty queue back.
    pub(super) fn release(&mut self) {
        if self.is_spare() {
            self.held.release();
        }
    }

    /// Appends a payload that begins at or before `next`, and returns the sequence number behind
    /// it. Bytes before `next` are skipped.
    pub(super) fn append(&mut self, mut payload: Payload, next: Seq, pool: &mut Pool) -> Seq {
        let mut skip = next.bytes_since(payload.start) as usize;
        let followers = payload.frame.take_followers();
        let mut left = ((payload.end - payload.start) as usize).saturating_sub(payload.range.len());
        let first = std::iter::once((payload.frame, payload.range));
        let rest = followers.map(|frame| {
            let len = frame.data().len().min(payload.size).min(left);
            left -= len;
            (frame, 0..len)
        });
        for (frame, range) in first.chain(rest) {
            let skipped = skip.min(range.len());
            skip -= skipped;
            let range = range.start + skipped..range.end;
            if range.is_empty() {
                pool.put(frame);
                continue;
            }
            let truesize = frame.truesize();
            self.len_bytes += len_u32(range.len());
            self.truesize += truesize;
            self.held.chunks.push_back(Chunk { bytes: Bytes::Frame(frame), range, truesize });
        }
        payload.end.later(next)
    }

    /// Adds a payload that begins behind `next`, as `tcp_data_queue_ofo` does: of bytes that came
    /// twice, those of the payload with the earlier start count, and those of the later payload if both
    /// start together.
    pub(super) fn insert_out_of_order(&mut self, payload: Payload, pool: &mut Pool) -> Queued {
        let (start, end) = (payload.start, payload.end_with_fin());
        // First payload that begins at or behind this one.
        let at = self.held.out_of_order.partition_point(|other| other.start.is_before(start));
        let mut duplicate = None;
        if let Some(before) = at.checked_sub(1).and_then(|at| self.held.out_of_order.get(at)) {
            let before_end = before.end_with_fin();
            if !end.is_after(before_end) {
                return Queued::Duplicate(payload);
            }
            if start.is_before(before_end) {
                duplicate = Some((start, before_end));
            }
        }
        if let Some(same) = self.held.out_of_order.get(at)
            && same.start == start
            && !end.is_after(same.end_with_fin())
        {
            return Queued::Duplicate(payload);
        }
        while let Some(covered) = self.held.out_of_order.get(at) {
            if !end.is_after(covered.start) {
                break;
            }
            let covered_end = covered.end_with_fin();
            duplicate = Some(extended(duplicate, (covered.start, covered_end.earlier(end))));
            if end.is_before(covered_end) {
                break;
            }
            self.remove_out_of_order(at, pool);
        }
        if self.held.out_of_order.len() >= OUT_OF_ORDER_MAX {
            return Queued::Full(payload);
        }
        self.truesize += payload.truesize();
        self.held.out_of_order.insert(at, payload);
        let around =
            if duplicate.is_none() { self.join_run(at, (start, end)) } else { self.walk_run(at) };
        self.mark_run(around);
        Queued::Kept { around, duplicate }
    }

    /// Run of a payload that fills a gap without overlap: its neighbours know how far theirs reach.
    fn join_run(&self, at: usize, (start, end): (Seq, Seq)) -> (Seq, Seq) {
        let before = at.checked_sub(1).and_then(|at| self.held.out_of_order.get(at));
        let after = self.held.out_of_order.get(at + 1);
        let first = before.filter(|before| before.end_with_fin() == start);
        let last = after.filter(|after| after.start == end);
        (first.map_or(start, |before| before.run_start), last.map_or(end, |after| after.run_end))
    }

    /// Run of a payload, found one by one.
    fn walk_run(&self, at: usize) -> (Seq, Seq) {
        let (mut first, mut last) = (at, at);
        while let Some(next) = self.held.out_of_order.get(last + 1)
            && !next.start.is_after(self.held.out_of_order[last].end_with_fin())
        {
            last += 1;
        }
        while let Some(before) = first.checked_sub(1).and_then(|at| self.held.out_of_order.get(at))
            && !self.held.out_of_order[first].start.is_after(before.end_with_fin())
        {
            first -= 1;
        }
        (self.held.out_of_order[first].start, self.held.out_of_order[last].end_with_fin())
    }

    /// Tells the first and the last payload of a run how far it reaches.
    fn mark_run(&mut self, (start, end): (Seq, Seq)) {
        let first =
            self.held.out_of_order.partition_point(|payload| payload.start.is_before(start));
        if let Some(payload) = self.held.out_of_order.get_mut(first) {
            payload.run_end = end;
        }
        let behind = self.held.out_of_order.partition_point(|payload| payload.start.is_before(end));
        if let Some(payload) =
            behind.checked_sub(1).and_then(|at| self.held.out_of_order.get_mut(at))
        {
            payload.run_start = start;
        }
    }

    /// Appends the payloads that the gap before them no longer separates from `next`.
    pub(super) fn append_contiguous(&mut self, next: Seq, pool: &mut Pool) -> Filled {
        let mut filled = Filled { next, is_fin: false, duplicate: None };
        while let Some(payload) = self.held.out_of_order.front() {
            if payload.start.is_after(filled.next) {
                break;
            }
            let Some(payload) = self.held.out_of_order.pop_front() else { break };
            self.truesize -= payload.truesize();
            if payload.start.is_before(next) {
                filled.note_duplicate((payload.start, payload.end_with_fin().earlier(next)));
            }
            if !payload.end_with_fin().is_after(filled.next) {
                payload.free(pool);
                continue;
            }
            filled.is_fin = payload.is_fin;
            filled.next = self.append(payload, filled.next, pool);
            if filled.is_fin {
                self.drop_out_of_order(pool);
                filled.next += 1;
                return filled;
            }
        }
        if self.held.out_of_order.is_empty() && self.held.out_of_order.capacity() > 16 {
            self.held.out_of_order = VecDeque::new();
        }
        filled
    }

    /// Drops all out-of-order payloads. Returns their number.
    pub(super) fn drop_out_of_order(&mut self, pool: &mut Pool) -> usize {
        let count = self.held.out_of_order.len();
        while !self.held.out_of_order.is_empty() {
            self.remove_out_of_order(self.held.out_of_order.len() - 1, pool);
        }
        count
    }

    /// Drops the payloads that are furthest ahead, but none before `seq`, until the memory is at most `limit`: an
    /// eighth of that at a time. Returns their number (`tcp_prune_ofo_queue`).
    pub(super) fn prune(&mut self, seq: Seq, limit: u32, pool: &mut Pool) -> usize {
        let before = self.held.out_of_order.len();
        let mut goal = self.truesize.saturating_sub(limit / 8);
        while let Some(last) = self.held.out_of_order.back()
            && !last.start.is_before(seq)
            && (self.truesize > limit || self.truesize > goal)
        {
            self.remove_out_of_order(self.held.out_of_order.len() - 1, pool);
            if self.truesize <= goal && self.truesize > limit {
                goal = self.truesize.saturating_sub(limit / 8);
            }
        }
        let pruned = before - self.held.out_of_order.len();
        if let Some(last) = self.held.out_of_order.len().checked_sub(1).filter(|_| pruned > 0) {
            let run = self.walk_run(last);
            self.mark_run(run);
        }
        pruned
    }

    fn remove_out_of_order(&mut self, at: usize, pool: &mut Pool) {
        if let Some(payload) = self.held.out_of_order.remove(at) {
            self.truesize -= payload.truesize();
            payload.free(pool);
        }
    }

    /// Copies unread bytes together, so that they occupy little more memory than they are long: those from the
    /// first packet on that `is_bloated`, of the bytes of its payload and of its memory (`tcp_collapse`).
    pub(super) fn collapse(&mut self, is_bloated: impl Fn(u32, u32) -> bool, pool: &mut Pool) {
        let is_first = |chunk: &Chunk| is_bloated(len_u32(chunk.range.len()), chunk.truesize);
        let Some(first) = self.held.chunks.iter().position(is_first) else { return };
        let bloated = self.held.chunks.split_off(first);
        let kept = std::mem::take(&mut self.held.chunks);
        let mut packed: VecDeque<Chunk> = VecDeque::new();
        for chunk in bloated {
            let len = chunk.range.len();
            if chunk.truesize as usize <= len + len / 2 {
                packed.push_back(chunk);
                continue;
            }
            let room = |chunk: &Chunk| match &chunk.bytes {
                Bytes::Copied(bytes) => bytes.capacity() - bytes.len(),
                Bytes::Frame(_) => 0,
            };
            if packed.back().is_none_or(|last| room(last) < len) {
                packed.push_back(Chunk {
                    bytes: Bytes::Copied(Vec::with_capacity(COPY_BYTES.max(len))),
                    range: 0..0,
                    truesize: 0,
                });
            }
            if let Some(Chunk { bytes: Bytes::Copied(bytes), range, .. }) = packed.back_mut() {
                bytes.extend_from_slice(chunk.unread());
                range.end = bytes.len();
            }
            chunk.free(pool);
        }
        for chunk in &mut packed {
            if let Bytes::Copied(bytes) = &mut chunk.bytes {
                bytes.shrink_to_fit();
                chunk.truesize = len_u32(bytes.capacity());
            }
        }
        self.held.chunks = kept;
        self.held.chunks.extend(packed);
        let chunks = self.held.chunks.iter().map(|chunk| chunk.truesize);
        self.truesize = chunks.chain(self.held.out_of_order.iter().map(Payload::truesize)).sum();
    }

    /// First stretch of unread bytes; empty if there are none.
    pub(super) fn first(&self) -> &[u8] {
        self.held.chunks.front().map(Chunk::unread).unwrap_or_default()
    }

    /// Copies unread bytes, `skip` bytes behind the first one. Returns their number.
    pub(super) fn peek(&self, skip: usize, room: &mut [u8]) -> usize {
        let (mut skip, mut copied) = (skip, 0);
        for chunk in &self.held.chunks {
            let bytes = chunk.unread();
            let bytes = bytes.get(skip.min(bytes.len())..).unwrap_or_default();
            skip -= skip.min(chunk.range.len());
            let len = bytes.len().min(room.len() - copied);
            room[copied..copied + len].copy_from_slice(&bytes[..len]);
            copied += len;
            if copied == room.len() {
                break;
            }
        }
        copied
    }

    /// Removes `len` unread bytes, or all.
    pub(super) fn consume(&mut self, mut len: usize, pool: &mut Pool) {
        if self.held.chunks.is_empty() {
            return;
        }
        while let Some(chunk) = self.held.chunks.front_mut() {
            let here = len.min(chunk.range.len());
            chunk.range.start += here;
            len -= here;
            self.len_bytes -= len_u32(here);
            if !chunk.range.is_empty() {
                return;
            }
            if let Some(chunk) = self.held.chunks.pop_front() {
                self.truesize -= chunk.truesize;
                chunk.free(pool);
            }
        }
        // An idle connection keeps no memory.
        if self.held.chunks.capacity() > 16 {
            self.held.chunks = VecDeque::new();
        }
    }

    /// Returns all frames.
    pub(super) fn clear(&mut self, pool: &mut Pool) {
        self.drop_out_of_order(pool);
        self.consume(usize::MAX, pool);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use proptest::prelude::*;

    use super::*;

    fn payload(pool: &mut Pool, at: u32, len: u32) -> Payload {
        let frame = pool.allocate(len).unwrap();
        let (start, end) = (Seq(at), Seq(at + len));
        let (range, size) = (0..len as usize, usize::MAX);
        Payload { start, end, is_fin: false, run_start: start, run_end: end, frame, range, size }
    }

    proptest! {
        #[test]
        fn tcp_8_run_is_that_of_bytes(
            steps in prop::collection::vec((1_u32..300, 1_u32..20, 0_u32..12), 1..80),
        ) {
            let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 128 }]];
            let mut pool =
                carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0);
            let (mut queue, mut bytes) = (ReceiveQueue::default(), BTreeSet::new());
            for (at, len, rare) in steps {
                if rare == 0 {
                    queue.prune(Seq(0), queue.truesize / 2, &mut pool);
                    let waiting = queue.held.out_of_order.iter();
                    let kept = waiting.flat_map(|payload| payload.start.0..payload.end.0);
                    bytes = kept.collect();
                }
                let is_new = (at..at + len).any(|byte| !bytes.contains(&byte));
                let before = bytes.clone();
                bytes.extend(at..at + len);
                match queue.insert_out_of_order(payload(&mut pool, at, len), &mut pool) {
                    Queued::Kept { around: (start, end), duplicate } => {
                        if let Some((first, last)) = duplicate {
                            let has_gap = (first.0..last.0).any(|byte| !before.contains(&byte));
                            prop_assert!(!has_gap, "bytes that came once are told as duplicates");
                        }
                        let mut run = at..at + len;
                        while bytes.contains(&run.start.wrapping_sub(1)) {
                            run.start -= 1;
                        }
                        while bytes.contains(&run.end) {
                            run.end += 1;
                        }
                        prop_assert_eq!(start.0..end.0, run);
                    }
                    Queued::Duplicate(payload) => {
                        prop_assert!(!is_new);
                        payload.free(&mut pool);
                    }
                    Queued::Full(_) => prop_assert!(false, "there is room"),
                }
            }
            queue.drop_out_of_order(&mut pool);
            prop_assert_eq!(queue.truesize, 0);
        }
    }
}
