#[cfg(not(miri))]
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::*;

const PAGE: u32 = MIN_BLOCK_BYTES;

fn cache(block_bytes: u32, blocks: u32) -> PageFragCache {
    let region = Arc::new(Region::allocate_shared((block_bytes * blocks) as usize));
    PageFragCache::new(&region, 0, block_bytes, blocks)
}

/// A piece whose room is filled with `mark` and declared to be data.
fn filled(cache: &mut PageFragCache, len_bytes: u32, mark: u8) -> Option<PageFrag> {
    let mut frag = cache.cut(len_bytes)?;
    frag.copy_out(0, &vec![mark; frag.room_bytes() as usize]);
    frag.set_len(frag.room_bytes());
    Some(frag)
}

fn is_filled(frag: &PageFrag, mark: u8) -> bool {
    frag.data() == vec![mark; frag.data().len()]
}

#[test]
fn vio_6_block_end_hole_is_counted() {
    let mut cache = cache(PAGE, 2);
    let frags: Vec<_> = (0..4).map(|mark| filled(&mut cache, 1536, mark).unwrap()).collect();
    let sizes: Vec<_> = frags.iter().map(|frag| (frag.room_bytes(), frag.truesize())).collect();
    assert_eq!(sizes, [(1536, 1536), (2560, 2560), (1536, 1536), (2560, 2560)]);
    assert!(cache.cut(64).is_none());
    assert!((0..).zip(&frags).all(|(mark, frag)| is_filled(frag, mark)));
    assert_eq!(cache.away_blocks(), 2);
    drop(frags);
    assert_eq!(cache.away_blocks(), 0);
}

/// Reference rule, for every length: as many pieces as fit, each of the length requested; the rest
/// of the block belongs to the last one.
#[test]
fn vio_6_hole_is_smaller_than_piece() {
    for len_bytes in (FRAG_ALIGN_BYTES..=PAGE).step_by(FRAG_ALIGN_BYTES as usize) {
        let mut cache = cache(PAGE, 1);
        let pieces: Vec<_> = std::iter::from_fn(|| cache.cut(len_bytes)).collect();
        let mut expected = vec![len_bytes; (PAGE / len_bytes) as usize];
        *expected.last_mut().unwrap() += PAGE % len_bytes;
        let sizes: Vec<_> = pieces.iter().map(PageFrag::truesize).collect();
        assert_eq!(sizes, expected, "{len_bytes}");
    }
}

#[test]
fn oversized_piece_retires_the_block() {
    let mut cache = cache(PAGE, 2);
    let first = cache.cut(64).unwrap();
    let second = cache.cut(PAGE).unwrap();
    assert_eq!((first.truesize(), second.truesize()), (64, PAGE));
    assert!(cache.cut(PAGE).is_none());
    assert!(cache.cut(64).is_none(), "the rest was left");
    drop(first);
    assert_eq!(cache.away_blocks(), 1);
    assert!(cache.cut(PAGE).is_some());
}

#[test]
fn failed_cut_leaves_room_for_smaller() {
    let mut cache = cache(PAGE, 1);
    let first = cache.cut(64).unwrap();
    assert!(cache.cut(PAGE).is_none());
    assert_eq!(cache.cut(64).unwrap().address(), first.address() + 64);
}

#[test]
fn vio_r3_rolled_back_cut_is_recut() {
    let mut cache = cache(PAGE, 1);
    let first = cache.cut(1024).unwrap();
    let second = cache.cut(1600).unwrap();
    let (at, last_at) = (first.address(), second.address());
    assert_eq!((last_at - at, second.truesize()), (1024, 3072));
    cache.roll_back(second);
    let second = cache.cut(64).unwrap();
    assert_eq!((second.address(), second.truesize()), (last_at, 64));
    cache.roll_back(first); // not the last: returned, and its space is reused with the block
    let third = cache.cut(64).unwrap();
    assert_eq!(third.address(), last_at + 64);
    cache.roll_back(third);
    cache.roll_back(second);
    assert_eq!(cache.away_blocks(), 0);
    assert_eq!(cache.cut(PAGE).unwrap().address(), at);
}

#[test]
fn previous_block_is_not_rolled_back() {
    let mut cache = cache(PAGE, 2);
    let before = cache.cut(PAGE).unwrap();
    let first = cache.cut(64).unwrap();
    assert_eq!(before.address() + u64::from(PAGE), first.address());
    cache.roll_back(first);
    cache.roll_back(before);
    assert_eq!(cache.away_blocks(), 0);
    let both = [cache.cut(PAGE).unwrap(), cache.cut(PAGE).unwrap()];
    assert_ne!(both[0].address(), both[1].address());
}

#[test]
fn foreign_piece_is_not_rolled_back() {
    let (mut here, mut there) = (cache(PAGE, 1), cache(PAGE, 1));
    let (kept, stranger) = (here.cut(64).unwrap(), there.cut(64).unwrap());
    here.roll_back(stranger);
    assert_eq!((here.away_blocks(), there.away_blocks()), (1, 0));
    assert_eq!(here.cut(64).unwrap().address(), kept.address() + 64);
}

#[test]
fn idle_block_is_cut_from_start() {
    let mut cache = cache(PAGE, 1);
    for _ in 0..3 {
        drop(cache.cut(2048 - 64).unwrap());
        let whole = cache.cut(PAGE).unwrap();
        assert!(cache.cut(64).is_none());
        drop(whole);
    }
}

#[test]
fn last_used_block_is_next() {
    let mut cache = cache(PAGE, 4);
    let mut frags: Vec<_> = (0..4).map(|_| cache.cut(PAGE).unwrap()).collect();
    let warm = frags.remove(2).address();
    let [warmer, warmest] = [frags.remove(0), frags.remove(0)].map(|frag| frag.address());
    let again: Vec<_> = (0..3).map(|_| cache.cut(PAGE).unwrap().address()).collect();
    assert_eq!(again, [warmest, warmest, warmest], "each is back before the next");
    let again: Vec<_> = std::iter::from_fn(|| cache.cut(PAGE)).collect();
    let again: Vec<_> = again.iter().map(PageFrag::address).collect();
    assert_eq!(again, [warmest, warmer, warm]);
}

#[test]
fn pieces_outlive_their_cache() {
    let region = Arc::new(Region::allocate_shared(4 * PAGE as usize));
    let mut cache = PageFragCache::new(&region, PAGE as usize, PAGE, 2);
    let kept: Vec<_> = (0..3).map(|mark| filled(&mut cache, 1024, mark).unwrap()).collect();
    drop(cache);
    assert!(Region::claim(&region, 0..PAGE as usize).is_some());
    assert!((0..).zip(&kept).all(|(mark, frag)| is_filled(frag, mark)));
    let first_block = PAGE as usize..PAGE as usize + 1;
    for frag in kept {
        assert!(Region::claim(&region, first_block.clone()).is_none());
        drop(frag);
    }
    assert!(Region::claim(&region, first_block).is_some());
}

/// Blocks that are free, in the inbox, and outstanding.
#[test]
fn ended_cache_counts_its_inbox() {
    for away in 0..=3 {
        let region = Arc::new(Region::allocate_shared(4 * PAGE as usize));
        let mut cache = PageFragCache::new(&region, 0, PAGE, 4);
        let mut pieces: Vec<_> = (0..3).map(|_| cache.cut(PAGE).unwrap()).collect();
        let kept = pieces.split_off(3 - away);
        drop(pieces); // no cut follows: they stay in the inbox
        drop(cache);
        for piece in kept {
            assert!(Region::claim(&region, 0..1).is_none(), "{away} away");
            drop(piece);
        }
        assert!(Region::claim(&region, 0..1).is_some(), "{away} away");
    }
}

/// Attempt that must panic, and the reason.
#[cfg(not(miri))]
type Attempt<'a> = (&'a str, Box<dyn Fn() + 'a>);

#[test]
#[cfg(not(miri))] // a panic takes seconds in miri, and no memory is touched
fn frag_cache_needs_shared_memory() {
    use crate::RecycleRing;
    use crate::pool::{ChunkClass, carve};
    let shared = || Region::allocate_shared(PAGE as usize);
    let whole = 0..PAGE as usize;
    let private = Arc::new(Region::allocate(PAGE as usize));
    assert!(!private.is_shared() && Region::claim(&private, whole.clone()).is_none());
    let share = [vec![ChunkClass { chunk_bytes: 512, chunks: 1 }]];
    let attempts: [Attempt<'_>; 8] = [
        ("private memory", Box::new(|| drop(PageFragCache::new(&private, 0, PAGE, 1)))),
        ("beyond", Box::new(|| drop(PageFragCache::new(&Arc::new(shared()), 0, PAGE, 2)))),
        ("far beyond", Box::new(|| drop(PageFragCache::new(&Arc::new(shared()), !63, PAGE, 2)))),
        ("4 GiB", Box::new(|| drop(PageFragCache::new(&Arc::new(shared()), 0, PAGE, 1 << 20)))),
        ("half a page", Box::new(|| drop(PageFragCache::new(&Arc::new(shared()), 0, 2048, 1)))),
        ("3 pages", Box::new(|| drop(PageFragCache::new(&Arc::new(shared()), 0, 3 * PAGE, 0)))),
        ("frames", Box::new(|| drop(carve(shared(), &share)))),
        ("a carousel", Box::new(|| drop(RecycleRing::new(shared(), 512, 0)))),
    ];
    for (what, attempt) in &attempts {
        assert!(catch_unwind(AssertUnwindSafe(attempt)).is_err(), "{what}");
    }
    let region = Arc::new(shared());
    let claim = Region::claim(&region, whole.clone()).unwrap();
    assert!(Region::claim(&region, PAGE as usize - 1..PAGE as usize).is_none());
    assert!(Region::claim(&region, 1..PAGE as usize + 1).is_none());
    drop(claim);
    assert!(Region::claim(&region, whole).is_some());
}

#[test]
#[cfg(not(miri))] // as above
fn promise_5_lengths_are_held_to_the_room() {
    let mut cache = cache(PAGE, 1);
    for len_bytes in [0, 32, 65, PAGE + 64, u32::MAX - 63] {
        let refused = catch_unwind(AssertUnwindSafe(|| cache.cut(len_bytes)));
        assert!(refused.is_err(), "{len_bytes}");
    }
    let mut frag = cache.cut(64).unwrap();
    frag.set_len(64);
    frag.pull(10);
    assert_eq!((frag.len_bytes(), frag.room_bytes()), (54, 64));
    frag.set_len(54);
    let frag = std::cell::RefCell::new(frag);
    let attempts: [Box<dyn Fn()>; 6] = [
        Box::new(|| frag.borrow_mut().set_len(55)),
        Box::new(|| frag.borrow_mut().pull(55)),
        Box::new(|| frag.borrow().copy_in(1, &mut [0; 64])),
        Box::new(|| frag.borrow().copy_in(65, &mut [])),
        Box::new(|| frag.borrow().copy_in(u32::MAX, &mut [0])),
        Box::new(|| frag.borrow_mut().copy_out(63, &[1, 2])),
    ];
    for (number, attempt) in attempts.iter().enumerate() {
        assert!(catch_unwind(AssertUnwindSafe(attempt)).is_err(), "attempt {number}");
    }
    frag.borrow_mut().copy_out(62, &[1, 2]);
    assert_eq!(frag.borrow().data()[50..], [0, 0, 1, 2]);
    let mut end = [0; 4];
    frag.borrow().copy_in(60, &mut end);
    frag.borrow().copy_in(64, &mut []);
    assert_eq!(end, [0, 0, 1, 2]);
}

#[test]
fn vio_7_adjacent_pieces_join() {
    let mut cache = cache(PAGE, 2);
    let frags = |cache: &mut PageFragCache| -> [PageFrag; 3] {
        [1, 2, 3].map(|mark| filled(cache, 1024, mark).unwrap())
    };
    let [mut first, second, third] = frags(&mut cache);
    let third = first.join(third).unwrap_err(); // not adjacent
    first.join(second).unwrap();
    assert_eq!((first.len_bytes(), first.truesize()), (2048, 2048));
    assert!(first.data() == [[1; 1024], [2; 1024]].concat());
    first.set_len(2047);
    let mut third = first.join(third).unwrap_err(); // the data ends before the room
    first.set_len(2048);
    third.pull(1);
    let third = first.join(third).unwrap_err(); // the data begins behind the room's beginning
    drop((first, third));

    let last = filled(&mut cache, 1024, 4).unwrap();
    drop(last);
    let (mut before, behind) = (cache.cut(PAGE).unwrap(), cache.cut(PAGE).unwrap());
    before.set_len(PAGE);
    assert_eq!(before.address() + u64::from(PAGE), behind.address());
    assert!(before.join(behind).is_err(), "of another block");
}

/// Reference model: the holder of each cache line.
struct Twin {
    first_byte: u64,
    block_bytes: u32,
    /// Number of the cut that has each line; 0 for none.
    lines: Vec<u32>,
}

impl Twin {
    fn lines_of(&mut self, frag: &PageFrag) -> &mut [u32] {
        let from = usize::try_from(frag.address() - self.first_byte).unwrap() / LINE_BYTES;
        &mut self.lines[from..from + frag.truesize() as usize / LINE_BYTES]
    }

    fn blocks_held(&self) -> usize {
        let blocks = self.lines.chunks(self.block_bytes as usize / LINE_BYTES);
        blocks.filter(|lines| lines.iter().any(|&holder| holder != 0)).count()
    }

    fn blocks(&self) -> usize {
        self.lines.len() * LINE_BYTES / self.block_bytes as usize
    }
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Cut { lines: u32 },
    Drop { which: usize },
    RollBack { which: usize },
    RollBackLast,
    Join { which: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (1u32..=64, 0u32..3).prop_map(|(lines, shift)| Operation::Cut { lines: lines >> (2 * shift) }),
        4 => any::<usize>().prop_map(|which| Operation::Drop { which }),
        1 => any::<usize>().prop_map(|which| Operation::RollBack { which }),
        1 => Just(Operation::RollBackLast),
        2 => any::<usize>().prop_map(|which| Operation::Join { which }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 400 }))]
    /// For any order of cuts and returns: no byte has two holders, held bytes do not change, a
    /// block without outstanding pieces can be cut, and all blocks are returned in the end.
    #[test]
    fn promise_4_pieces_never_overlap_blocks_return(
        (blocks, double) in (1u32..5, any::<bool>()),
        operations in proptest::collection::vec(operation(), 0..if cfg!(miri) { 12 } else { 300 }),
    ) {
        let block_bytes = if double { 2 * PAGE } else { PAGE };
        let region = Arc::new(Region::allocate_shared((block_bytes * blocks) as usize));
        let first_byte = region.span().0.addr().get() as u64;
        let mut cache = PageFragCache::new(&region, 0, block_bytes, blocks);
        let lines = (block_bytes * blocks) as usize / LINE_BYTES;
        let mut twin = Twin { first_byte, block_bytes, lines: vec![0; lines] };
        let mut held: Vec<PageFrag> = Vec::new();
        for (operation, stamp) in operations.into_iter().zip(1u32..) {
            match operation {
                Operation::Cut { lines: 0 } => {}
                Operation::Cut { lines } => {
                    let len_bytes = lines * FRAG_ALIGN_BYTES;
                    let Some(mut frag) = cache.cut(len_bytes) else {
                        prop_assert_eq!(twin.blocks_held(), twin.blocks(), "a free block unused");
                        continue;
                    };
                    prop_assert!((len_bytes..2 * len_bytes).contains(&frag.truesize()));
                    prop_assert!(twin.lines_of(&frag).iter().all(|&holder| holder == 0));
                    twin.lines_of(&frag).fill(stamp);
                    frag.set_len(frag.room_bytes());
                    let stamped = stamp.to_ne_bytes().repeat(frag.room_bytes() as usize / 4);
                    frag.copy_out(0, &stamped);
                    held.push(frag);
                }
                Operation::Drop { which } | Operation::RollBack { which } if !held.is_empty() => {
                    let frag = held.swap_remove(which % held.len());
                    twin.lines_of(&frag).fill(0);
                    match operation {
                        Operation::Drop { .. } => drop(frag),
                        _ => cache.roll_back(frag),
                    }
                }
                Operation::RollBackLast => {
                    let Some(frag) = held.pop() else { continue };
                    twin.lines_of(&frag).fill(0);
                    cache.roll_back(frag);
                }
                Operation::Join { which } if held.len() > 1 => {
                    let mut frag = held.remove(which % held.len());
                    let next = held.remove(which % held.len());
                    if let Err(next) = frag.join(next) {
                        held.push(next);
                    }
                    held.push(frag);
                }
                _ => {}
            }
            prop_assert_eq!(cache.away_blocks(), twin.blocks_held());
        }
        for frag in &held {
            for (line, stamp) in frag.data().chunks(LINE_BYTES).zip(twin.lines_of(frag)) {
                prop_assert_eq!(line, stamp.to_ne_bytes().repeat(LINE_BYTES / 4));
            }
        }
        drop(held);
        prop_assert_eq!(cache.away_blocks(), 0);
    }
}

/// Readers return pieces on their threads, in any order, while the owner cuts; held bytes never
/// change.
#[test]
fn promise_4_remotely_returned_pieces_reused_once() {
    let rounds: u32 = if cfg!(miri) { 20 } else { 50_000 };
    let mut cache = cache(PAGE, 3);
    let (senders, readers): (Vec<_>, Vec<_>) = (0..2)
        .map(|lag| {
            let (sender, receiver) = std::sync::mpsc::channel::<(PageFrag, u8)>();
            let reader = std::thread::spawn(move || {
                let mut late = std::collections::VecDeque::new();
                for piece in receiver {
                    late.push_back(piece);
                    if late.len() > lag
                        && let Some((frag, mark)) = late.pop_front()
                    {
                        assert!(is_filled(&frag, mark));
                    }
                }
            });
            (sender, reader)
        })
        .unzip();
    for round in 0..rounds {
        let mark = u8::try_from(round % 251).unwrap();
        let frag = loop {
            match filled(&mut cache, 64 * (1 + round % 9), mark) {
                Some(frag) => break frag,
                None => std::thread::yield_now(),
            }
        };
        senders[(round / 3) as usize % 2].send((frag, mark)).unwrap();
    }
    drop(senders);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!(cache.away_blocks(), 0);
}

#[test]
fn last_reader_frees_dead_cache() {
    let mut cache = cache(PAGE, 3);
    let readers: Vec<_> = (0..5)
        .map(|mark| {
            let frag = filled(&mut cache, 2048, mark).unwrap();
            std::thread::spawn(move || assert!(is_filled(&frag, mark)))
        })
        .collect();
    drop(cache);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    // Miri and the leak check watch.
}
