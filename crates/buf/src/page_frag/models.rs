use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

/// Stands for a block's bytes and each access to them, by the holder of a piece or by the owner who
/// cuts them again.
struct Bytes(UnsafeCell<u32>);

// SAFETY: the models below let loom check that no two threads use them at once.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn use_them(&self) {
        // SAFETY: loom reports a concurrent access of another thread.
        self.0.with_mut(|bytes| unsafe { *bytes += 1 });
    }
}

fn cache(blocks: u32) -> PageFragCache {
    let region = Arc::new(Region::allocate_shared((MIN_BLOCK_BYTES * blocks) as usize));
    PageFragCache::new(&region, 0, MIN_BLOCK_BYTES, blocks)
}

/// Cuts a block as soon as one is returned. Yields meanwhile: loom does not explore all orders of
/// two threads that read a word before they change it.
fn wait_for_block(cache: &mut PageFragCache) -> PageFrag {
    loop {
        if let Some(frag) = cache.cut(MIN_BLOCK_BYTES) {
            return frag;
        }
        thread::yield_now();
    }
}

/// Two holders return the halves of a block: the owner cuts it again only after both.
#[test]
fn block_is_recut_once_returned() {
    loom::model(|| {
        let mut cache = cache(1);
        let holders = [cache.cut(2048).unwrap(), cache.cut(2048).unwrap()].map(|frag| {
            let bytes = Bytes::new();
            let used = bytes.clone();
            let holder = thread::spawn(move || {
                used.use_them();
                drop(frag);
            });
            (bytes, holder)
        });
        let again = wait_for_block(&mut cache);
        holders.iter().for_each(|(bytes, _)| bytes.use_them());
        drop(again);
        for (_, holder) in holders {
            holder.join().unwrap();
        }
        assert_eq!(cache.away_blocks(), 0);
    });
}

/// A block that was not cut to its end is returned while the owner checks if it can begin the block
/// anew, or returns the rest.
#[test]
fn block_rest_belongs_to_owner() {
    loom::model(|| {
        let mut cache = cache(2);
        let frag = cache.cut(1024).unwrap();
        let first_byte = frag.address();
        let bytes = Bytes::new();
        let used = bytes.clone();
        let holder = thread::spawn(move || {
            used.use_them();
            drop(frag);
        });
        let whole = cache.cut(MIN_BLOCK_BYTES).unwrap();
        if whole.address() == first_byte {
            bytes.use_them();
        } else {
            assert_eq!(wait_for_block(&mut cache).address(), first_byte);
            bytes.use_them();
        }
        holder.join().unwrap();
        drop(whole);
        assert_eq!(cache.away_blocks(), 0);
    });
}

/// Two blocks are returned at once while the owner collects.
#[test]
fn blocks_return_while_owner_collects() {
    loom::model(|| {
        let mut cache = cache(2);
        let holders = [cache.cut(MIN_BLOCK_BYTES).unwrap(), cache.cut(MIN_BLOCK_BYTES).unwrap()]
            .map(|frag| thread::spawn(move || drop(frag)));
        let again = [wait_for_block(&mut cache), wait_for_block(&mut cache)];
        assert_ne!(again[0].address(), again[1].address());
        drop(again);
        for holder in holders {
            holder.join().unwrap();
        }
        assert_eq!(cache.away_blocks(), 0);
    });
}

/// The owner is dropped while pieces are returned: the last return frees the home and the claim on
/// the region, once (loom reports an `Arc` that leaks or is dropped twice).
#[test]
fn last_piece_frees_dead_cache() {
    loom::model(|| {
        let region = Arc::new(Region::allocate_shared(2 * MIN_BLOCK_BYTES as usize));
        let mut cache = PageFragCache::new(&region, 0, MIN_BLOCK_BYTES, 2);
        let holders = [cache.cut(MIN_BLOCK_BYTES).unwrap(), cache.cut(1024).unwrap()]
            .map(|frag| thread::spawn(move || drop(frag)));
        drop(cache);
        for holder in holders {
            holder.join().unwrap();
        }
        assert!(Region::claim(&region, 0..1).is_some());
    });
}
