use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

/// Stands for a block's bytes, each time that somebody uses them: whoever has a piece, or the owner
/// who cuts them again.
struct Bytes(UnsafeCell<u32>);

// SAFETY: the models below ask loom whether two threads ever use them at once.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn use_them(&self) {
        // SAFETY: loom reports it when another thread does the same.
        self.0.with_mut(|bytes| unsafe { *bytes += 1 });
    }
}

fn cache(blocks: u32) -> PageFragCache {
    let region = Arc::new(Region::allocate_shared((MIN_BLOCK_BYTES * blocks) as usize));
    PageFragCache::new(&region, 0, MIN_BLOCK_BYTES, blocks)
}

/// Cuts a block as soon as one is home. Yields meanwhile: where two threads read a word before they
/// change it, loom does not think of all orders by itself.
fn wait_for_block(cache: &mut PageFragCache) -> PageFrag {
    loop {
        if let Some(frag) = cache.cut(MIN_BLOCK_BYTES) {
            return frag;
        }
        thread::yield_now();
    }
}

/// Two holders give the halves of a block back: the owner cuts it again only after both.
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

/// A block that was not cut to its end, given back while the owner looks whether it can begin it
/// anew, or leaves the rest.
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

/// Two blocks come home at once while the owner takes them in.
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

/// The owner ends while pieces are given back: whoever is last frees the home and the claim on the
/// region, once (loom reports an `Arc` that leaks or is dropped twice).
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
