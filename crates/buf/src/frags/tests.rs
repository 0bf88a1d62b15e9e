use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::frame::BEFORE_PACKET_BYTES;
use crate::page_frag::PageFragCache;
use crate::pool::{ChunkClass, Pool, carve, region_bytes};
use crate::sync::Arc;
use crate::{DeviceOwned, Region};

const BLOCK_BYTES: u32 = 4096;

/// Class of the heads' chunks: 256 bytes of a packet, and the table.
const HEAD: ChunkClass = ChunkClass { chunk_bytes: 1088, chunks: 8 };

fn pools() -> [Pool; 2] {
    let shares = [vec![HEAD], vec![HEAD]];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().try_into().unwrap()
}

fn cache(blocks: u32) -> PageFragCache {
    let region = Arc::new(Region::allocate_shared((BLOCK_BYTES * blocks) as usize));
    PageFragCache::new(&region, 0, BLOCK_BYTES, blocks)
}

fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}

fn head(pool: &mut Pool, bytes: &[u8]) -> Frame {
    let mut frame = pool.allocate(0).unwrap();
    frame.copy_from(bytes);
    frame
}

/// A piece whose data is `bytes`, at the beginning of a room of at least `room_bytes`.
fn piece(cache: &mut PageFragCache, room_bytes: u32, bytes: &[u8]) -> PageFrag {
    let mut frag = cache.cut(room_bytes).unwrap();
    frag.copy_out(0, bytes);
    frag.set_len(len(bytes));
    frag
}

fn bytes(frame: &Frame) -> Vec<u8> {
    [frame.data()].into_iter().chain(frame.frags()).collect::<Vec<_>>().concat()
}

#[test]
fn promise_4_pieces_return_with_their_frame() {
    let ([mut pool, mut other], mut cache) = (pools(), cache(4));
    for way in 0..4 {
        let mut frame = head(&mut pool, b"head");
        frame.attach(piece(&mut cache, 1536, b"one")).unwrap();
        let mut follower = head(&mut other, b"next");
        follower.attach(piece(&mut cache, 1536, b"two")).unwrap();
        assert_eq!(frame.truesize(), 1088 + 1536);
        frame.append(follower);
        assert_eq!(frame.truesize(), 2 * 1088 + BLOCK_BYTES);
        assert_eq!((frame.total_len_bytes(), frame.follower_count()), (7, 1));
        assert_eq!(bytes(frame.followers().next().unwrap()), b"nexttwo");
        assert_eq!(cache.away_blocks(), 1);
        match way {
            0 => pool.put(frame),
            1 => drop(frame),
            2 => {
                let follower = frame.take_followers().next().unwrap();
                let apart = (bytes(&frame), bytes(&follower));
                assert_eq!(apart, (b"headone".to_vec(), b"nexttwo".to_vec()));
                pool.put(follower);
                pool.put(frame);
            }
            _ => pool.return_handle().put(frame),
        }
        pool.flush();
        assert_eq!((pool.in_use(), other.in_use(), cache.away_blocks()), (0, 0, 0));
    }
}

#[test]
fn pieces_batch_by_block_and_turn() {
    let ([mut pool, _], mut cache) = (pools(), cache(2));
    let mut packets: Vec<_> = (0..3)
        .map(|_| {
            let mut frame = head(&mut pool, b"head");
            frame.attach(piece(&mut cache, 2048, b"tail")).unwrap();
            frame
        })
        .collect();
    let (last, second) = (packets.pop().unwrap(), packets.pop().unwrap());
    pool.put(packets.pop().unwrap());
    pool.put(second);
    assert_eq!(cache.away_blocks(), 2);
    pool.put(last);
    assert_eq!(cache.away_blocks(), 1, "of the second block");
    pool.flush();
    assert_eq!(cache.away_blocks(), 0);
    let mut frame = head(&mut pool, b"head");
    frame.attach(piece(&mut cache, 2048, b"tail")).unwrap();
    pool.put(frame);
    drop(pool);
    assert_eq!(cache.away_blocks(), 0, "a pool that ends keeps none");
}

#[test]
fn pieces_of_two_homes_return_separately() {
    let ([mut pool, _], mut here, mut there) = (pools(), cache(1), cache(1));
    for cache in [&mut here, &mut there] {
        let mut frame = head(&mut pool, b"head");
        frame.attach(piece(cache, 64, b"tail")).unwrap();
        pool.put(frame);
    }
    pool.flush();
    assert_eq!((here.away_blocks(), there.away_blocks()), (0, 0));
}

#[test]
fn nonlinear_frame_is_not_posted() {
    let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 1 }]];
    let region = Region::allocate(region_bytes(&shares));
    let mut pool = carve(region, &shares).unwrap().remove(0);
    let (mut lent, mut cache) = (DeviceOwned::new(&pool, 2048), cache(1));
    let mut frame = pool.allocate(0).unwrap();
    frame.attach(piece(&mut cache, 64, b"piece")).unwrap();
    assert!(!lent.takes(&frame));
    let mut frame = lent.lend(frame).unwrap_err();
    let offset = u64::from(BEFORE_PACKET_BYTES);
    assert!(!frame.place(offset, 2048 - BEFORE_PACKET_BYTES), "over the table");
    assert!(frame.place(offset, 2048 - BEFORE_PACKET_BYTES - FRAG_TABLE_BYTES));
    assert_eq!(frame.frags().collect::<Vec<_>>(), [b"piece"]);
    frame.cut_to(0);
    assert!(lent.lend(frame).is_ok());
}

#[test]
fn frame_takes_pieces_until_table_full() {
    let ([mut pool, _], mut here, mut there) = (pools(), cache(4), cache(1));
    let mut full = head(&mut pool, &[7; 257]);
    let refused = full.attach(piece(&mut here, 64, b"here")).unwrap_err();
    assert_eq!((refused.data(), full.frag_count()), (&b"here"[..], 0));
    full.set_len(256);
    full.attach(refused).unwrap();
    assert_eq!(full.room_mut().len(), 256);

    let mut frame = head(&mut pool, b"head");
    for number in 0..FRAGS_MAX {
        assert_eq!(frame.frag_count(), number);
        frame.attach(piece(&mut here, 64, &[1; 63])).unwrap(); // never adjacent
        let empty = here.cut(64).unwrap();
        frame.attach(empty).unwrap();
    }
    let refused = frame.attach(piece(&mut here, 64, b"one too many")).unwrap_err();
    assert_eq!((frame.frag_count(), frame.total_len_bytes()), (FRAGS_MAX, 4 + 46 * 63));
    frame.cut_to(100);
    assert_eq!((frame.frag_count(), frame.total_len_bytes()), (2, 100));
    let stranger = frame.attach(piece(&mut there, 64, b"there")).unwrap_err();
    frame.attach(refused).unwrap();
    drop((full, frame, stranger));
    assert_eq!((pool.in_use(), here.away_blocks(), there.away_blocks()), (0, 0, 0));
}

/// Reference model of a frame with pieces.
#[derive(Debug, Default)]
struct Twin {
    own: Vec<u8>,
    pieces: VecDeque<Piece>,
    /// Bytes that can be pushed back to the first piece.
    pulled: Vec<u8>,
}

#[derive(Debug)]
struct Piece {
    /// Address of the data.
    address: u64,
    bytes: Vec<u8>,
    truesize: u32,
}

impl Twin {
    fn attach(&mut self, frag: &PageFrag, pulled: &[u8], base: u64) {
        let address = frag.address() + pulled.len() as u64;
        let block = |address: u64| (address - base) / u64::from(BLOCK_BYTES);
        match self.pieces.back_mut() {
            Some(last)
                if last.address + last.bytes.len() as u64 == address
                    && block(last.address) == block(address) =>
            {
                last.bytes.extend(frag.data());
                last.truesize += frag.truesize();
            }
            last => {
                if last.is_none() {
                    self.pulled = pulled.to_vec();
                }
                let (bytes, truesize) = (frag.data().to_vec(), frag.truesize());
                self.pieces.push_back(Piece { address, bytes, truesize });
            }
        }
    }

    fn pull(&mut self, count: usize) {
        let mut left = count;
        while left > 0 {
            let Some(piece) = self.pieces.front_mut() else { return };
            let pulled: Vec<u8> = piece.bytes.drain(..left.min(piece.bytes.len())).collect();
            left -= pulled.len();
            piece.address += pulled.len() as u64;
            self.own.extend(&pulled);
            self.pulled.extend(&pulled);
            if piece.bytes.is_empty() {
                self.pieces.pop_front();
                self.pulled.clear();
            }
        }
    }

    fn push(&mut self, count: usize) {
        let bytes = self.pulled.split_off(self.pulled.len() - count);
        self.own.truncate(self.own.len() - count);
        if let Some(piece) = self.pieces.front_mut() {
            piece.bytes.splice(0..0, bytes);
            piece.address -= count as u64;
        }
    }

    fn cut_to(&mut self, total: usize) {
        loop {
            let pieces_len = self.pieces_len();
            let Some(last) = self.pieces.back_mut() else { break };
            if self.own.len() + pieces_len <= total {
                break;
            }
            let excess = self.own.len() + pieces_len - total;
            last.bytes.truncate(last.bytes.len().saturating_sub(excess));
            if last.bytes.is_empty() {
                self.pieces.pop_back();
            }
        }
        self.own.truncate(total);
    }

    fn pieces_len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes.len()).sum()
    }

    fn bytes(&self) -> Vec<u8> {
        let pieces = self.pieces.iter().map(|piece| &piece.bytes[..]);
        [&self.own[..]].into_iter().chain(pieces).collect::<Vec<_>>().concat()
    }
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Attach { lines: u32, fill: u32, pull: u32 },
    Pull { count: u32 },
    Push { count: u32 },
    CutBy { count: u32 },
    CutTo { total: u32 },
}

fn operation() -> impl Strategy<Value = Operation> {
    // Half of the pieces are full, so that they join; half are not pulled.
    let part = |most: u32| prop_oneof![Just(0), 0..most];
    prop_oneof![
        6 => (1u32..8, part(64), part(200))
            .prop_map(|(lines, fill, pull)| Operation::Attach { lines, fill, pull }),
        2 => (0u32..150).prop_map(|count| Operation::Pull { count }),
        1 => (0u32..60).prop_map(|count| Operation::Push { count }),
        1 => (0u32..600).prop_map(|count| Operation::CutBy { count }),
        1 => (0u32..600).prop_map(|total| Operation::CutTo { total }),
    ]
}

/// Applies an operation to a frame and to its reference model.
fn apply(operation: Operation, frame: &mut Frame, twin: &mut Twin, pieces: &mut Pieces) {
    match operation {
        Operation::Attach { lines, fill, pull } => {
            let Some(mut frag) = pieces.cache.cut(64 * lines) else { return };
            let len_bytes = frag.room_bytes() - fill;
            let marks: Vec<u8> = (0..len_bytes).map(|_| pieces.next_mark()).collect();
            frag.copy_out(0, &marks);
            frag.set_len(len_bytes);
            let pull = pull.min(len_bytes);
            frag.pull(pull);
            let fits = twin.own.len() <= 256;
            if fits && !frag.data().is_empty() {
                twin.attach(&frag, &marks[..pull as usize], pieces.base);
            }
            let is_empty = frag.data().is_empty();
            assert_eq!(frame.attach(frag).is_ok(), fits || is_empty);
        }
        Operation::Pull { count } => {
            let fits = count as usize <= twin.pieces_len()
                && (count == 0 || twin.own.len() + count as usize <= 256);
            assert_eq!(frame.pull_from_frags(count), fits);
            if fits {
                twin.pull(count as usize);
            }
        }
        Operation::Push { count } => {
            let most = if twin.pieces.is_empty() { 0 } else { twin.pulled.len() };
            let fits = count as usize <= most.min(twin.own.len());
            assert_eq!(frame.push_to_frags(count), fits);
            if fits {
                twin.push(count as usize);
            }
        }
        Operation::CutBy { count } => {
            let total = frame.total_len_bytes().saturating_sub(count);
            frame.cut_to(total);
            twin.cut_to(total as usize);
        }
        Operation::CutTo { total } => {
            frame.cut_to(total);
            twin.cut_to(total as usize);
        }
    }
}

struct Pieces {
    cache: PageFragCache,
    base: u64,
    mark: u8,
}

impl Pieces {
    fn next_mark(&mut self) -> u8 {
        self.mark = self.mark.wrapping_add(1);
        self.mark
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 600 }))]
    /// A frame with pieces equals a plain list of bytes, whatever is attached, pulled, pushed back
    /// and cut; every piece returns home as soon as no byte of it belongs to the packet.
    #[test]
    fn vio_7_frame_with_pieces_equals_linear(
        own in 0usize..=280,
        operations in proptest::collection::vec(operation(), 0..if cfg!(miri) { 12 } else { 60 }),
        way in 0..3,
    ) {
        let ([mut pool, mut other], region) =
            (pools(), Arc::new(Region::allocate_shared(6 * BLOCK_BYTES as usize)));
        let base = region.span().0.addr().get() as u64;
        let cache = PageFragCache::new(&region, 0, BLOCK_BYTES, 6);
        let mut pieces = Pieces { cache, base, mark: 0 };
        let own: Vec<u8> = (0..own).map(|_| pieces.next_mark()).collect();
        let (mut frame, mut twin) = (head(&mut pool, &own), Twin { own, ..Twin::default() });
        for operation in operations {
            apply(operation, &mut frame, &mut twin, &mut pieces);
            prop_assert_eq!(bytes(&frame), twin.bytes());
            prop_assert_eq!(frame.len_bytes() as usize, twin.own.len());
            prop_assert_eq!(frame.total_len_bytes() as usize, twin.own.len() + twin.pieces_len());
            prop_assert_eq!(frame.frag_count(), twin.pieces.len());
            prop_assert_eq!(frame.frags().len(), twin.pieces.len());
            let truesize = twin.pieces.iter().map(|piece| piece.truesize).sum::<u32>();
            prop_assert_eq!(frame.truesize(), 1088 + truesize);
            let mut blocks: Vec<_> = twin
                .pieces
                .iter()
                .map(|piece| (piece.address - base) / u64::from(BLOCK_BYTES))
                .collect();
            blocks.sort_unstable();
            blocks.dedup();
            prop_assert_eq!(pieces.cache.away_blocks(), blocks.len());
        }
        match way {
            0 => drop(frame),
            1 => pool.put(frame),
            _ => other.put(frame),
        }
        drop(other);
        pool.flush();
        prop_assert_eq!((pool.in_use(), pieces.cache.away_blocks()), (0, 0));
    }
}
