//! Receive-side scaling of sources that have no queues of their own.

use std::sync::Arc;

use forebay_rx::RxQueue;
use forebay_rx::hash::{FlowHash, Hasher, Indirection};
use forebay_rx::parse::{Link, Verify, View, parse};

/// Frames of a source examined for each that a poll may take, so that it ends even if all belong to other queues.
pub(super) const LOOKS_PER_FRAME: usize = 8;

/// One rx queue's part of a source, as distributed by receive-side scaling. As with a device whose hash
/// is not used, frames do not carry it: the path computes its own.
#[derive(Clone, Debug)]
pub struct QueueShare {
    /// The queue.
    pub queue: RxQueue,
    /// The device's indirection table.
    pub indirection: Indirection,
    /// The device's hash function, which no change of a run changes.
    pub hasher: Arc<Hasher>,
}

impl QueueShare {
    /// True if a frame belongs to this queue. One that the device cannot parse belongs to the first.
    pub(super) fn has(&self, bytes: &[u8], wire_len: u32, link: Option<Link>) -> bool {
        let hash = link.map_or(FlowHash::NONE, |link| {
            let headers = parse(bytes, wire_len, link, Verify::Nothing);
            self.hasher.hash_of(&View::new(bytes, &headers), wire_len, FlowHash::NONE)
        });
        self.indirection.queue(hash) == self.queue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment in IPv6 behind an MPLS label, with this payload.
    fn labelled(payload_bytes: usize) -> Vec<u8> {
        let tcp = [&[0x13, 0x88, 0, 80][..], &[0; 8], &[0x50, 0x10, 1, 0, 0, 0, 0, 0]].concat();
        let len_bytes = u16::try_from(tcp.len() + payload_bytes).unwrap().to_be_bytes();
        let addresses = [[0x20; 16], [0x30; 16]].concat();
        let ipv6 = [&[0x60, 0, 0, 0][..], &len_bytes, &[6, 64], &addresses].concat();
        let ethernet = [&[2; 12][..], &[0x88, 0x47], &[0, 1, 1, 64]].concat();
        [ethernet, ipv6, tcp, vec![7; payload_bytes]].concat()
    }

    #[test]
    fn flk_2_frame_cut_short_keeps_queue() {
        let hasher = Hasher::keyed(&[7; 16], false).with_rules("inner".parse().unwrap());
        let share = |queue| QueueShare {
            queue: RxQueue(queue),
            indirection: Indirection::new(64),
            hasher: Arc::new(hasher.clone()),
        };
        let queue_of = |frame: &[u8], captured: usize| {
            let wire_len = u32::try_from(frame.len()).unwrap();
            let has =
                |queue: &u16| share(*queue).has(&frame[..captured], wire_len, Some(Link::Ethernet));
            (0..64).find(has).unwrap()
        };
        let (short, long) = (labelled(10), labelled(1000));
        let queue = queue_of(&short, short.len());
        assert_ne!(queue, 0, "the queue of frames without a hash");
        for captured in [120, 500, long.len()] {
            assert_eq!(queue_of(&long, captured), queue, "{captured} bytes captured");
        }
    }
}
