use super::*;
use crate::page_frag::PageFragCache;
use crate::pool::{ChunkClass, Pool, carve, region_bytes};
use crate::sync::Arc;
use crate::{Lent, Region};

const HEAD: ChunkClass = ChunkClass { chunk_bytes: 1088, chunks: 8 };

fn pool() -> Pool {
    let shares = [vec![HEAD]];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
}

fn cache(blocks: u32) -> PageFragCache {
    let region = Arc::new(Region::allocate_shared(4096 * blocks as usize));
    PageFragCache::new(&region, 0, 4096, blocks)
}

fn head(pool: &mut Pool, bytes: &[u8]) -> Frame {
    let mut frame = pool.allocate(0).unwrap();
    frame.copy_from(bytes);
    frame
}

/// A piece whose data is `bytes`, in a room of `room_bytes`.
fn piece(cache: &mut PageFragCache, room_bytes: u32, bytes: &[u8]) -> PageFrag {
    let mut frag = cache.cut(room_bytes).unwrap();
    frag.copy_out(0, bytes);
    frag.set_len(u32::try_from(bytes.len()).unwrap());
    frag
}

fn bytes(frame: &Frame) -> Vec<u8> {
    [frame.data()].into_iter().chain(frame.frags()).collect::<Vec<_>>().concat()
}

#[test]
fn promise_4_pieces_go_home_with_their_frame_however_it_ends() {
    let (mut pool, mut cache) = (pool(), cache(4));
    for way in 0..4 {
        let mut frame = head(&mut pool, b"head");
        frame.attach(piece(&mut cache, 1536, b"one")).unwrap();
        let mut follower = head(&mut pool, b"next");
        follower.attach(piece(&mut cache, 1536, b"two")).unwrap();
        assert_eq!(frame.truesize(), 1088 + 1536);
        frame.append(follower);
        assert_eq!(frame.truesize(), 2 * 1088 + 4096);
        assert_eq!((frame.total_len_bytes(), frame.follower_count()), (7, 1));
        assert_eq!(bytes(frame.followers().next().unwrap()), b"nexttwo");
        assert_eq!(cache.away_blocks(), 1);
        match way {
            0 => pool.put(frame),
            1 => drop(frame),
            2 => {
                let follower = frame.take_followers().next().unwrap();
                assert_eq!(
                    (bytes(&frame), bytes(&follower)),
                    (b"headone".into(), b"nexttwo".into())
                );
                pool.put(follower);
                pool.put(frame);
            }
            _ => pool.way_home().put(frame),
        }
        assert_eq!(pool.away(), 0);
        pool.flush();
        assert_eq!(cache.away_blocks(), 0);
    }
}

#[test]
fn a_frame_with_pieces_is_not_lent() {
    let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 1 }]];
    let region = Region::allocate(region_bytes(&shares));
    let mut pool = carve(region, &shares).unwrap().remove(0);
    let (mut lent, mut cache) = (Lent::new(&pool, 2048), cache(1));
    let mut frame = pool.allocate(0).unwrap();
    frame.attach(piece(&mut cache, 64, b"piece")).unwrap();
    assert!(!lent.takes(&frame));
    let mut frame = lent.lend(frame).unwrap_err();
    frame.cut_to(0);
    assert!(lent.lend(frame).is_ok());
}
