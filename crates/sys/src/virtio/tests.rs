//! Both layouts against the device of `reference.rs`.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use forebay_buf::Region;

use super::reference::{Got, ReferenceDevice};
use super::*;

const LAYOUTS: [VirtqueueLayout; 2] = [VirtqueueLayout::Split, VirtqueueLayout::Packed];

fn pair(config: RingConfig) -> (Virtqueue, ReferenceDevice) {
    let memory = memory(config);
    let queue = Virtqueue::new(&memory, config);
    let device = ReferenceDevice::of(&queue);
    (queue, device)
}

/// Memory for one ring.
fn memory(config: RingConfig) -> Arc<Claim> {
    let len_bytes = ring_bytes(config.layout, config.size);
    let region = Arc::new(Region::allocate_shared(len_bytes));
    Arc::new(Region::claim(&region, 0..len_bytes).unwrap())
}

fn config(layout: VirtqueueLayout, size: u16) -> RingConfig {
    RingConfig { layout, size, event_idx: false }
}

fn piece(number: u64) -> RingDescriptor {
    RingDescriptor { address: number << 12, len_bytes: 1536 }
}

#[test]
fn a_buffer_goes_there_and_back() {
    for layout in LAYOUTS {
        let (mut queue, mut device) = pair(config(layout, 4));
        let id = queue.post(&[piece(7)], Direction::ToDriver).unwrap();
        assert!(device.take().is_none(), "it is not shown yet");
        assert!(queue.publish(), "a device that has not said otherwise is kicked");
        assert!(!queue.publish(), "there is nothing new");
        let Some(got) = device.take() else { panic!("it is shown") };
        assert_eq!(got.pieces, [(7 << 12, 1536, true)]);
        assert_eq!(queue.next_used(), Ok(None));
        device.give(got.id, 60);
        let used = queue.next_used().unwrap().unwrap();
        assert_eq!(used.len_bytes, 60);
        assert_eq!(queue.take(used.id), Some(id));
        assert_eq!(queue.take(used.id), None, "once");
        assert_eq!((queue.free(), queue.next_used()), (4, Ok(None)));
        queue.post_again(id);
        let _ = queue.publish();
        assert_eq!(device.take().unwrap().pieces, got.pieces);
    }
}

#[test]
fn oversized_is_refused_unposted() {
    for layout in LAYOUTS {
        let (mut queue, mut device) = pair(config(layout, 4));
        queue.post(&[piece(1), piece(2), piece(3)], Direction::ToDevice).unwrap();
        let refused = queue.post(&[piece(4), piece(5)], Direction::ToDevice);
        assert_eq!(refused, Err(Full { needed: 2, free: 1 }));
        queue.post_request(&[], &[piece(6)]).unwrap();
        assert!(queue.post(&[piece(7)], Direction::ToDriver).is_err());
        let _ = queue.publish();
        let pieces = |got: Option<Got>| got.map_or(0, |got| got.pieces.len());
        assert_eq!((pieces(device.take()), pieces(device.take())), (3, 1));
        assert!(device.take().is_none());
    }
}

#[test]
fn vq_1_ring_parts_aligned_and_within() {
    for layout in LAYOUTS {
        for bits in 0..=15 {
            let config = config(layout, 1 << bits);
            let memory = memory(config);
            let (base, len_bytes) = (memory::address(memory.base()), memory.part().len());
            let RingAddresses { descriptors, driver, device } =
                Virtqueue::new(&memory, config).addresses();
            assert_eq!((descriptors, driver % 64, device % 4), (base, 0, 0));
            assert!(descriptors + (16 << bits) <= driver && driver < device);
            assert!(device < base + u64::try_from(len_bytes).unwrap());
            let is_split = layout == VirtqueueLayout::Split;
            assert!(!is_split || (device + 4).is_multiple_of(64), "used entries begin a line");
        }
    }
}

#[test]
fn promise_5_excessive_used_index_ends_ring() {
    let (mut queue, device) = pair(config(VirtqueueLayout::Split, 256));
    let ReferenceDevice::Split(device) = device else { unreachable!("made as a split ring") };
    (0..256).for_each(|n| _ = queue.post(&[piece(n)], Direction::ToDriver).unwrap());
    let _ = queue.publish();
    device.used_index().store(5, Ordering::Relaxed);
    for id in 0..5 {
        // Entries that were never written name buffer 0.
        assert_eq!(queue.next_used().unwrap().unwrap().id, 0);
        assert_eq!(queue.take(0).is_some(), id == 0);
    }
    device.used_index().store(261, Ordering::Relaxed);
    let lie = queue.next_used().unwrap_err();
    assert_eq!(lie.to_string(), "the used index went from 5 to 261 with 255 buffers posted");
    // The error persists, though the index is valid again.
    device.used_index().store(6, Ordering::Relaxed);
    assert_eq!(queue.next_used(), Err(lie));
    queue.reset(false);
    assert_eq!(queue.next_used(), Ok(None));
    assert_eq!((queue.free(), device.used_index().load(Ordering::Relaxed)), (256, 0));
}

#[test]
fn promise_5_backward_used_index_ends_ring() {
    let (mut queue, device) = pair(config(VirtqueueLayout::Split, 8));
    let ReferenceDevice::Split(mut device) = device else { unreachable!("made as a split ring") };
    (0..8).for_each(|n| _ = queue.post(&[piece(n)], Direction::ToDriver).unwrap());
    let _ = queue.publish();
    device.give(0, 60);
    assert!(queue.next_used().unwrap().is_some());
    device.used_index().store(0, Ordering::Relaxed);
    assert_eq!(queue.next_used(), Err(InvalidRing::UsedIndex { from: 1, to: 0, posted: 8 }));
}

#[test]
fn hidden_buffer_cannot_be_used() {
    for layout in LAYOUTS {
        let (mut queue, mut device) = pair(config(layout, 8));
        queue.post(&[piece(1)], Direction::ToDriver).unwrap();
        let _ = queue.publish();
        queue.post(&[piece(2)], Direction::ToDriver).unwrap();
        let id = device.take().unwrap().id;
        device.give(id, 60);
        assert!(queue.next_used().unwrap().is_some());
        assert!(queue.take(u32::from(id)).is_some());
        // The device reports the second buffer as used, which it cannot see.
        device.give(id, 60);
        assert!(!matches!(queue.next_used(), Ok(Some(_))), "{layout:?}");
    }
}

#[test]
fn promise_5_bad_ids_are_no_buffers() {
    for layout in LAYOUTS {
        let (mut queue, mut device) = pair(config(layout, 8));
        (0..6).for_each(|n| _ = queue.post(&[piece(n)], Direction::ToDriver).unwrap());
        let _ = queue.publish();
        let ids: Vec<u16> = std::iter::from_fn(|| device.take().map(|got| got.id)).collect();
        device.give(ids[0], 100);
        device.give_bad(8);
        device.give_bad(u16::MAX);
        device.give(ids[0], 101);
        device.give(ids[5], 102);
        let mut taken = Vec::new();
        while let Some(used) = queue.next_used().unwrap() {
            taken.push((used.len_bytes, queue.take(used.id).map(BufferId::index)));
        }
        let index = |id: u16| Some(usize::from(id));
        let expected =
            [(100, index(ids[0])), (7, None), (7, None), (101, None), (102, index(ids[5]))];
        assert_eq!(taken, expected, "{layout:?}");
        for id in [8, 65_536, u32::MAX] {
            assert_eq!(queue.take(id), None);
        }
    }
}

#[test]
fn promise_5_reposted_buffer_hidden_until_published() {
    for layout in LAYOUTS {
        let (mut queue, mut device) = pair(config(layout, 8));
        (0..6).for_each(|n| _ = queue.post(&[piece(n)], Direction::ToDriver).unwrap());
        let _ = queue.publish();
        let ids: Vec<u16> = std::iter::from_fn(|| device.take().map(|got| got.id)).collect();
        for _ in 0..4 {
            device.give(ids[2], 60);
        }
        let mut next = || {
            let used = queue.next_used().unwrap().unwrap();
            let id = queue.take(used.id);
            id.into_iter().for_each(|id| queue.post_again(id));
            id.is_some()
        };
        assert_eq!([next(), next()], [true, false], "{layout:?}");
        let _ = queue.publish();
        // In a split ring, all four were reported before.
        let used = queue.next_used().unwrap().unwrap();
        assert_eq!(queue.take(used.id).is_some(), layout == VirtqueueLayout::Packed);
        // The device receives the buffer as usual.
        let _ = queue.next_used();
        device.take().unwrap();
        device.give(ids[2], 60);
        if layout == VirtqueueLayout::Split {
            let used = queue.next_used().unwrap().unwrap();
            assert_eq!(queue.take(used.id).map(BufferId::index), Some(usize::from(ids[2])));
        }
    }
}

#[test]
#[should_panic(expected = "posted again")]
fn posted_buffer_is_not_reposted() {
    let (mut queue, _) = pair(config(VirtqueueLayout::Split, 8));
    let id = queue.post(&[piece(1)], Direction::ToDriver).unwrap();
    queue.post_again(id);
}

#[test]
#[should_panic(expected = "posted again")]
fn chain_part_is_not_reposted() {
    let (mut queue, mut device) = pair(config(VirtqueueLayout::Split, 8));
    queue.post(&[piece(1)], Direction::ToDriver).unwrap();
    let _ = queue.publish();
    let id = device.take().unwrap().id;
    device.give(id, 60);
    let id = queue.next_used().unwrap().and_then(|used| queue.take(used.id)).unwrap();
    // Its descriptor becomes the last of the chain, which its slot still records when it is free
    // again.
    let chain = queue.post(&[piece(2), piece(3)], Direction::ToDevice).unwrap();
    let _ = queue.publish();
    assert_ne!(chain, id);
    let got = device.take().unwrap().id;
    device.give(got, 0);
    assert_eq!(queue.next_used().unwrap().and_then(|used| queue.take(used.id)), Some(chain));
    queue.post_again(id);
}

#[test]
fn vq_10_ring_is_zero_after_reset() {
    for layout in LAYOUTS {
        let config = config(layout, 8);
        let memory = memory(config);
        for _ in 0..2 {
            let mut queue = Virtqueue::new(&memory, config);
            let words = ReferenceDevice::of(&queue).overlay();
            let is_zero = || words.all().iter().all(|word| word.load(Ordering::Relaxed) == 0);
            assert!(is_zero(), "new");
            let scribble =
                || words.all().iter().for_each(|word| word.store(0xA5A5, Ordering::Relaxed));
            scribble();
            queue.reset(false);
            assert!(is_zero(), "reset");
            assert_eq!((queue.next_used(), queue.free()), (Ok(None), 8));
            scribble();
        }
    }
}

/// An event is reached exactly if it is one of the positions passed.
#[test]
fn packed_event_reached_on_any_path() {
    use super::packed::PackedPosition;
    for size in [1u16, 2, 4, 8] {
        let all = |wrap| (0..size).map(move |index| PackedPosition { index, wrap });
        for start in all(true).chain(all(false)) {
            for event in all(true).chain(all(false)) {
                for places in 0..=size {
                    let over = (0..places).any(|n| start.after(n, size) == event);
                    let end = start.after(places, size);
                    assert_eq!(end.reaches(event, places, size), over, "{start:?} {event:?}");
                }
            }
        }
    }
}

/// Barrier for two threads that begin each turn at nearly the same time.
#[derive(Default)]
struct Start([AtomicU32; 2]);

impl Start {
    fn wait(&self, who: usize, turn: u32) {
        self.0[who].store(turn, Ordering::Release);
        let mut looks = 0;
        while self.0[1 - who].load(Ordering::Acquire) < turn {
            looks += 1;
            if looks < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Delays one of the two threads by a varying time, alternately.
    fn lag(who: usize, turn: u32) {
        let lag = turn / 2 % 64;
        let is_late = turn % 2 == u32::from(who == 0);
        (0..if is_late { lag } else { 0 }).for_each(|_| std::hint::spin_loop());
    }
}

/// VQ7: one side does something while the other is about to sleep. Either the sleeper sees it, or
/// the other side sees that it must notify. Returns the number of turns in which neither happened.
fn lost_wake_ups(config: RingConfig, does_driver_sleep: bool) -> u32 {
    let mut lost = 0;
    let (mut queue, mut device) = pair(config);
    let mut id = queue.post(&[piece(1)], Direction::ToDriver).unwrap();
    let start = Start::default();
    // Observation of each side, visible to the other once the turn is over.
    let saw = [AtomicBool::new(false), AtomicBool::new(false)];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 1..=TURNS {
                if !does_driver_sleep {
                    device.ask_for_kick(false);
                    start.wait(1, 4 * turn);
                    Start::lag(1, turn);
                    saw[1].store(device.ask_for_kick(true), Ordering::Relaxed);
                }
                start.wait(1, 4 * turn + 1);
                let got = device.take().unwrap();
                if does_driver_sleep {
                    device.calls();
                    start.wait(1, 4 * turn + 2);
                    Start::lag(1, turn);
                }
                device.give(got.id, 60);
                if does_driver_sleep {
                    saw[1].store(device.calls(), Ordering::Relaxed);
                }
                start.wait(1, 4 * turn + 3);
            }
        });
        for turn in 1..=TURNS {
            if !does_driver_sleep {
                start.wait(0, 4 * turn);
                Start::lag(0, turn);
            }
            saw[0].store(queue.publish(), Ordering::Relaxed);
            start.wait(0, 4 * turn + 1);
            if does_driver_sleep {
                let _ = queue.ask_for_call(false);
                start.wait(0, 4 * turn + 2);
                Start::lag(0, turn);
                saw[0].store(queue.ask_for_call(true), Ordering::Relaxed);
            }
            start.wait(0, 4 * turn + 3);
            let [driver, device] = &saw;
            let somebody = driver.load(Ordering::Relaxed) || device.load(Ordering::Relaxed);
            lost += u32::from(!somebody);
            let used = queue.next_used().unwrap().unwrap();
            id = queue.take(used.id).unwrap_or(id);
            queue.post_again(id);
        }
    });
    lost
}

const TURNS: u32 = 10_000;

#[test]
fn vq_7_no_wakeup_is_lost() {
    for layout in LAYOUTS {
        for event_idx in [false, true] {
            for does_driver_sleep in [false, true] {
                let config = RingConfig { layout, size: 4, event_idx };
                let lost = lost_wake_ups(config, does_driver_sleep);
                assert_eq!(lost, 0, "{config:?}, driver sleeps: {does_driver_sleep}");
            }
        }
    }
}
