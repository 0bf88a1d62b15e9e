//! Two pools that exchange frames, with owners that may be dropped early: every frame keeps its
//! bytes while it is held, no chunk has two holders, and all frames are returned (promise 4).
#![no_main]

use arbitrary::Arbitrary;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Frame, Pool, Region};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Operation {
    Allocate {
        second: bool,
        len_bytes: u16,
    },
    Put {
        second: bool,
        which: u16,
    },
    Drop {
        which: u16,
    },
    Flush {
        second: bool,
    },
    Collect {
        second: bool,
    },
    /// The CPU's pool is dropped; its frames outlive their owner.
    Close {
        second: bool,
    },
}

const SMALL: ChunkClass = ChunkClass { chunk_bytes: 512, chunks: 40 };
const LARGE: ChunkClass = ChunkClass { chunk_bytes: 2048, chunks: 3 };

/// Frame that is held, and the value of its bytes.
struct Held {
    frame: Frame,
    mark: u8,
}

impl Held {
    fn is_intact(&self) -> bool {
        self.frame.data().iter().all(|&byte| byte == self.mark)
    }
}

fuzz_target!(|operations: Vec<Operation>| {
    let shares = [vec![LARGE, SMALL], vec![SMALL]];
    let region = Region::allocate(region_bytes(&shares));
    let mut pools: Vec<_> =
        carve(region, &shares).expect("as large as needed").into_iter().map(Some).collect();
    let mut held: Vec<Held> = Vec::new();
    let mut mark = 0u8;
    for operation in operations {
        match operation {
            Operation::Allocate { second, len_bytes } => {
                mark = mark.wrapping_add(1);
                let pool = pools[usize::from(second)].as_mut();
                held.extend(pool.and_then(|pool| marked(pool, len_bytes, mark)));
            }
            Operation::Put { second, which } => {
                let Some(held) = pick(&mut held, which) else { continue };
                assert!(held.is_intact());
                match &mut pools[usize::from(second)] {
                    Some(pool) => pool.put(held.frame),
                    None => drop(held),
                }
            }
            Operation::Drop { which } => drop(pick(&mut held, which)),
            Operation::Flush { second } => with(&mut pools, second, Pool::flush),
            Operation::Collect { second } => with(&mut pools, second, Pool::collect),
            Operation::Close { second } => pools[usize::from(second)] = None,
        }
    }
    for pool in pools.iter_mut().flatten() {
        pool.flush();
    }
    for (owner, pool) in (0u16..).zip(&mut pools) {
        let away = held.iter().filter(|held| held.frame.owner() == owner).count();
        assert!(pool.as_mut().is_none_or(|pool| pool.in_use() == away));
    }
    assert!(held.iter().all(Held::is_intact));
    drop(held);
    assert!(pools.iter_mut().flatten().all(|pool| pool.in_use() == 0));
});

fn marked(pool: &mut Pool, len_bytes: u16, mark: u8) -> Option<Held> {
    let len_bytes = u32::from(len_bytes) % (LARGE.chunk_bytes + 1);
    let mut frame = pool.allocate(len_bytes)?;
    frame.set_len(len_bytes);
    frame.data_mut().fill(mark);
    Some(Held { frame, mark })
}

fn pick(held: &mut Vec<Held>, which: u16) -> Option<Held> {
    (!held.is_empty()).then(|| held.swap_remove(usize::from(which) % held.len()))
}

fn with(pools: &mut [Option<Pool>], second: bool, act: impl FnOnce(&mut Pool)) {
    if let Some(pool) = &mut pools[usize::from(second)] {
        act(pool);
    }
}
