use super::*;

const PAGE: u32 = 4096;

fn cache(block_bytes: u32, blocks: u32) -> PageFragCache {
    let region = Arc::new(Region::allocate_shared((block_bytes * blocks) as usize));
    PageFragCache::new(&region, 0, block_bytes, blocks)
}

/// A piece with `mark` in all of its room, declared to be data.
fn filled(cache: &mut PageFragCache, len_bytes: u32, mark: u8) -> Option<PageFrag> {
    let mut frag = cache.cut(len_bytes)?;
    frag.copy_out(0, &vec![mark; frag.room_bytes() as usize]);
    frag.set_len(frag.room_bytes());
    Some(frag)
}

#[test]
fn vio_6_the_hole_at_a_blocks_end_is_the_last_pieces_and_counted() {
    let mut cache = cache(PAGE, 2);
    let sizes = |frags: &[PageFrag]| frags.iter().map(PageFrag::truesize).collect::<Vec<_>>();
    let frags: Vec<_> = (0..4).map(|mark| filled(&mut cache, 1536, mark).unwrap()).collect();
    assert_eq!(sizes(&frags), [1536, 2560, 1536, 2560]);
    assert_eq!(frags[1].room_bytes(), 2560);
    assert!(cache.cut(64).is_none());
    for (mark, frag) in (0..).zip(&frags) {
        assert_eq!(frag.data(), vec![mark; frag.room_bytes() as usize]);
    }
    assert_eq!(cache.away_blocks(), 2);
    drop(frags);
    assert_eq!(cache.away_blocks(), 0);
}

#[test]
fn vio_r3_a_cut_that_is_rolled_back_is_cut_again() {
    let mut cache = cache(PAGE, 1);
    let first = cache.cut(1024).unwrap();
    let second = cache.cut(1600).unwrap();
    let (at, last_at) = (first.address(), second.address());
    assert_eq!((last_at - at, second.truesize()), (1024, 3072));
    cache.roll_back(second);
    let second = cache.cut(64).unwrap();
    assert_eq!((second.address(), second.truesize()), (last_at, 64));
    cache.roll_back(first); // not the last: it goes home, and its space waits for the block
    let third = cache.cut(64).unwrap();
    assert_eq!(third.address(), last_at + 64);
    cache.roll_back(third);
    cache.roll_back(second);
    assert_eq!(cache.away_blocks(), 0);
    assert_eq!(cache.cut(PAGE).unwrap().address(), at);
}

#[test]
fn a_block_that_nothing_is_away_of_is_cut_from_the_beginning_again() {
    let mut cache = cache(PAGE, 1);
    for _ in 0..3 {
        drop(cache.cut(2048).unwrap());
        let whole = cache.cut(PAGE).unwrap();
        assert!(cache.cut(64).is_none());
        drop(whole);
    }
}
