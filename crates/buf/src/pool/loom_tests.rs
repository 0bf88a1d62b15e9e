use loom::thread;

use super::*;

fn pair(chunks: u32) -> [Pool; 2] {
    let shares = [vec![ChunkClass { chunk_bytes: 512, chunks }], vec![]];
    let region = Region::allocate(region_bytes(&shares));
    carve(region, &shares).unwrap().try_into().unwrap()
}

/// Two threads return frames while the owner collects them.
#[test]
fn frames_return_while_owner_collects() {
    loom::model(|| {
        let [mut owner, mut other] = pair(2);
        let (first, second) = (owner.allocate(1).unwrap(), owner.allocate(1).unwrap());
        let worker = thread::spawn(move || {
            other.put(first);
            other.flush();
        });
        let stranger = thread::spawn(move || drop(second));
        owner.collect();
        worker.join().unwrap();
        stranger.join().unwrap();
        assert_eq!(owner.in_use(), 0);
    });
}

/// The owner is dropped while frames are being returned: the last return frees the region, once
/// (loom reports an `Arc` that leaks or is dropped twice).
#[test]
fn last_frame_frees_dead_pool() {
    loom::model(|| {
        let [mut owner, mut other] = pair(2);
        let (first, second) = (owner.allocate(1).unwrap(), owner.allocate(1).unwrap());
        let worker = thread::spawn(move || other.put(first));
        let stranger = thread::spawn(move || drop(second));
        drop(owner);
        worker.join().unwrap();
        stranger.join().unwrap();
    });
}
