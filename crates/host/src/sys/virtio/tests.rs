//! Both layouts against the device of `twin.rs`.

use super::twin::{Got, Twin, memory};
use super::*;

const LAYOUTS: [Layout; 2] = [Layout::Split, Layout::Packed];

fn pair(config: RingConfig) -> (Virtqueue, Twin) {
    let memory = memory(config);
    (Virtqueue::new(&memory, 0, config), Twin::new(&memory, 0, config))
}

fn config(layout: Layout, size: u16) -> RingConfig {
    RingConfig { layout, size, event_idx: false }
}

fn piece(number: u64) -> Descriptor {
    Descriptor { address: number << 12, len_bytes: 1536 }
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
fn what_does_not_fit_is_refused_and_nothing_is_posted() {
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
fn vq_1_the_parts_of_a_ring_are_aligned_and_within() {
    for layout in LAYOUTS {
        for bits in 0..=15 {
            let config = config(layout, 1 << bits);
            let memory = memory(config);
            let (base, len_bytes) = memory.span();
            let base = memory::address(base);
            let RingAddresses { descriptors, driver, device } =
                Virtqueue::new(&memory, 0, config).addresses();
            assert_eq!((descriptors, driver % 64, device % 4), (base, 0, 0));
            assert!(descriptors + (16 << bits) <= driver && driver < device);
            assert!(device < base + u64::try_from(len_bytes).unwrap());
            let is_split = layout == Layout::Split;
            assert!(!is_split || (device + 4).is_multiple_of(64), "used entries begin a line");
        }
    }
}
