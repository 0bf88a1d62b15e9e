use proptest::prelude::*;

use super::*;

const SMALL: ChunkClass = ChunkClass { chunk_bytes: 512, chunks: 40 };
const LARGE: ChunkClass = ChunkClass { chunk_bytes: 2048, chunks: 3 };

fn pools(shares: &[Vec<ChunkClass>]) -> Vec<Pool> {
    carve(Region::allocate(region_bytes(shares)), shares).unwrap()
}

fn pair() -> [Pool; 2] {
    pools(&[vec![SMALL, LARGE], vec![LARGE, SMALL]]).try_into().unwrap()
}

fn filled(pool: &mut Pool, mark: u8) -> Option<Frame> {
    let mut frame = pool.allocate(64)?;
    frame.copy_from(&[mark; 64]);
    Some(frame)
}

#[test]
fn small_region_error_has_both_sizes() {
    let refused = carve(Region::allocate(4096), &[vec![SMALL]]).unwrap_err();
    assert_eq!(refused, RegionTooSmall { need_bytes: 40 * 512, have_bytes: 4096 });
}

#[test]
fn smallest_fitting_chunks_come_first() {
    let [mut pool, _] = pair();
    let frames: Vec<_> = std::iter::from_fn(|| pool.allocate(256)).collect();
    let sizes: Vec<_> = frames.iter().map(Frame::truesize).collect();
    assert_eq!(sizes, [[512; 40].as_slice(), &[2048; 3]].concat());
    assert!(pool.allocate(1).is_none(), "all away");
    assert!(pool.allocate(u32::MAX).is_none());
    assert_eq!(pool.largest_frame_bytes(), 2048 - BEFORE_PACKET_BYTES);
    assert_eq!(pool.in_use(), 43);
}

#[test]
fn largest_free_frame_counts_those_returned() {
    let [mut pool, mut other] = pair();
    let [small, large] = [512, 2048].map(|bytes| bytes - BEFORE_PACKET_BYTES);
    assert_eq!(pool.largest_free_bytes(), large);
    let mut frames: Vec<_> = std::iter::from_fn(|| pool.allocate(large)).collect();
    assert_eq!(pool.largest_free_bytes(), small);
    other.put(frames.pop().unwrap());
    other.flush();
    assert_eq!(pool.largest_free_bytes(), large);
    frames.extend(std::iter::from_fn(|| pool.allocate(1)));
    assert_eq!(pool.largest_free_bytes(), 0);
    assert_eq!(other.return_handle().largest_free_bytes(), 0);
}

#[test]
fn impossible_shares_are_refused() {
    let most = ChunkClass { chunk_bytes: u32::MAX - 63, chunks: u32::MAX };
    let shares = [vec![most; 3], vec![ChunkClass { chunk_bytes: 4096, chunks: 1 }]];
    assert_eq!(region_bytes(&shares), usize::MAX);
    let refused = carve(Region::allocate(4096), &shares).unwrap_err();
    assert_eq!(refused.need_bytes, usize::MAX);
}

#[test]
#[cfg(not(miri))] // nothing but 65,536 empty classes
#[should_panic(expected = "too many shares")]
fn excess_classes_are_refused() {
    let none = ChunkClass { chunk_bytes: 512, chunks: 0 };
    let _ = carve(Region::allocate(512), &[vec![none; 1 << 16]]);
}

#[test]
fn udp_r6_full_batch_returns_at_once() {
    let [mut owner, mut other] = pair();
    let frames: Vec<_> = (0..40).map(|mark| filled(&mut owner, mark).unwrap()).collect();
    for frame in frames {
        other.put(frame);
    }
    assert_eq!(owner.in_use(), 40 - FREE_BATCH_FRAMES);
    other.flush();
    assert_eq!(owner.in_use(), 0);
    other.flush();
    assert_eq!(other.in_use(), 0);
}

#[test]
fn udp_r5_thread_without_pool_returns_frames() {
    let mut pools = pools(&[vec![SMALL, LARGE], vec![], vec![LARGE, SMALL]]);
    let mut way_home = pools[1].return_handle();
    assert!(way_home.allocate(1).is_none());
    assert_eq!((way_home.in_use(), way_home.largest_frame_bytes()), (0, 0));
    let mut another = way_home.return_handle();
    for mark in 0..43 {
        let first = filled(&mut pools[0], mark).unwrap();
        let mut second = filled(&mut pools[2], mark).unwrap();
        second.append(first);
        if mark % 2 == 0 { way_home.put(second) } else { another.put(second) }
    }
    let reader = std::thread::spawn(move || drop(way_home));
    reader.join().unwrap();
    assert_eq!((pools[0].in_use(), pools[2].in_use()), (21, 21));
    another.flush();
    assert_eq!((pools[0].in_use(), pools[2].in_use()), (0, 0));
}

#[test]
fn a_dropped_frame_goes_home_too() {
    let [mut owner, _other] = pair();
    drop(filled(&mut owner, 1));
    assert_eq!(owner.in_use(), 0);
}

#[test]
fn frames_outlive_their_owner() {
    let [mut owner, mut other] = pair();
    let kept: Vec<_> = (0..40).map(|mark| filled(&mut owner, mark).unwrap()).collect();
    drop(owner);
    for (mark, frame) in (0..).zip(kept) {
        assert_eq!(frame.data(), [mark; 64]);
        if mark % 3 == 0 { drop(frame) } else { other.put(frame) }
    }
    // The last batch frees the dropped owner's home; miri and the leak check watch.
    drop(other);
}

/// Every owner is this thread, so a return that waited for one would never end.
#[test]
fn promise_4_returning_waits_for_no_owner() {
    let cpus = if cfg!(miri) { 5 } else { 65 };
    let mut owners = pools(&vec![vec![SMALL]; cpus]);
    let mut other = owners.pop().unwrap();
    let mut frames = Vec::new();
    for owner in &mut owners {
        frames.extend(std::iter::from_fn(|| filled(owner, 1)));
    }
    assert_eq!(frames.len(), (cpus - 1) * 40, "all frames are away");
    let mut alive = Vec::new();
    for (at, owner) in owners.into_iter().enumerate() {
        if at % 2 == 0 { alive.push(owner) } else { drop(owner) }
    }
    for frame in frames {
        other.put(frame);
        other.flush(); // a batch for each frame, the most that an inbox can get
    }
    for owner in &mut alive {
        assert_eq!(owner.in_use(), 0);
        let again: Vec<_> = std::iter::from_fn(|| filled(owner, 2)).collect();
        assert_eq!(again.len(), 40, "each frame is home, once");
    }
}

#[test]
fn foreign_frame_returns_by_itself() {
    let [mut here, _] = pair();
    let [mut there, _] = pair();
    here.put(filled(&mut there, 1).unwrap());
    assert_eq!((here.in_use(), there.in_use()), (0, 0));
}

#[test]
fn lengths_are_held_to_the_room() {
    let [mut pool, _] = pair();
    let mut frame = pool.allocate(0).unwrap();
    assert_eq!(frame.room_mut().len(), 512 - 256);
    frame.set_len(256);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| frame.set_len(257)));
    assert!(refused.is_err());
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Allocate { cpu: usize },
    Put { cpu: usize, which: usize },
    Drop { which: usize },
    Flush { cpu: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    let (cpu, which) = (0usize..3, any::<usize>());
    prop_oneof![
        4 => cpu.clone().prop_map(|cpu| Operation::Allocate { cpu }),
        4 => (cpu.clone(), which).prop_map(|(cpu, which)| Operation::Put { cpu, which }),
        1 => any::<usize>().prop_map(|which| Operation::Drop { which }),
        1 => cpu.prop_map(|cpu| Operation::Flush { cpu }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 256 }))]
    /// Every frame keeps its bytes while it is held, no chunk has two holders, and all frames
    /// are returned in the end.
    #[test]
    fn pools_neither_lose_nor_share_frames(
        operations in proptest::collection::vec(operation(), 0..if cfg!(miri) { 80 } else { 400 }),
    ) {
        let share = vec![ChunkClass { chunk_bytes: 512, chunks: 37 }];
        let mut pools = pools(&[share.clone(), share, vec![]]);
        let mut held: Vec<(Frame, [u8; 4])> = Vec::new();
        let mut stamp = 0u32;
        for operation in operations {
            match operation {
                Operation::Allocate { cpu } => {
                    if let Some(mut frame) = pools[cpu].allocate(4) {
                        stamp += 1;
                        frame.copy_from(&stamp.to_ne_bytes());
                        prop_assert_eq!(usize::from(frame.owner()), cpu);
                        held.push((frame, stamp.to_ne_bytes()));
                    }
                }
                Operation::Put { cpu, which } if !held.is_empty() => {
                    let (frame, stamp) = held.swap_remove(which % held.len());
                    prop_assert_eq!(frame.data(), &stamp);
                    pools[cpu].put(frame);
                }
                Operation::Drop { which } if !held.is_empty() => {
                    held.swap_remove(which % held.len());
                }
                Operation::Flush { cpu } => pools[cpu].flush(),
                Operation::Put { .. } | Operation::Drop { .. } => {}
            }
        }
        for (frame, stamp) in held.drain(..) {
            prop_assert_eq!(frame.data(), &stamp);
            pools[2].put(frame);
        }
        for pool in &mut pools {
            pool.flush();
        }
        for pool in &mut pools {
            prop_assert_eq!(pool.in_use(), 0);
        }
    }
}

#[test]
fn frames_cross_threads_and_come_home() {
    let rounds = if cfg!(miri) { 40 } else { 20_000 };
    let [mut owner, mut other] = pair();
    let (mut producer, mut consumer) = crate::ring::ring(16, crate::Position(0));
    let reader = std::thread::spawn(move || {
        let (mut batch, mut read) = (Vec::new(), 0);
        while read < rounds {
            if consumer.take(8, &mut batch) == 0 {
                other.flush();
                std::thread::yield_now();
            }
            for frame in batch.drain(..) {
                let frame: Frame = frame;
                assert_eq!(frame.data(), [u8::try_from(read % 251).unwrap(); 64]);
                read += 1;
                if read % 17 == 0 { drop(frame) } else { other.put(frame) }
            }
            consumer.release();
        }
    });
    for round in 0..rounds {
        let frame = loop {
            match filled(&mut owner, u8::try_from(round % 251).unwrap()) {
                Some(frame) => break frame,
                None => std::thread::yield_now(),
            }
        };
        let mut waiting = Some(frame);
        while let Some(frame) = waiting.take() {
            waiting = producer.push(frame).err();
            producer.publish();
        }
    }
    reader.join().unwrap();
    assert_eq!(owner.in_use(), 0);
}
