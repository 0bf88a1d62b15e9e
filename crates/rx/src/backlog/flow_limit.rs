//! Flow limit of the kernel (`skb_flow_limit` in net/core/dev.c): a backlog that is at least half
//! full drops packets of the flows that fill it.

use crate::hash::FlowHash;

/// Length of the history, in packets.
pub const FLOW_LIMIT_HISTORY: usize = 128;

/// Maximum number of packets in the history per bucket; a packet beyond it is dropped.
const FLOW_SHARE: u8 = 64;

const _: () = assert!(FLOW_LIMIT_HISTORY <= u8::MAX as usize, "a bucket counts all of the history");
const _: () = assert!((FLOW_SHARE as usize) < FLOW_LIMIT_HISTORY, "a share that can be exceeded");

/// Flows of the last [`FLOW_LIMIT_HISTORY`] packets, counted by bucket.
#[derive(Debug)]
pub struct FlowLimit {
    history: Box<[u32; FLOW_LIMIT_HISTORY]>,
    next: usize,
    /// Number of packets in the history per bucket, at most [`FLOW_LIMIT_HISTORY`].
    buckets: Box<[u8]>,
}

impl FlowLimit {
    /// Creates a limit with `flow_limit_table_len` buckets; `None` unless that is a power of two.
    #[must_use]
    pub fn new(flow_limit_table_len: u32) -> Option<Self> {
        flow_limit_table_len.is_power_of_two().then(|| Self {
            history: Box::new([0; FLOW_LIMIT_HISTORY]),
            next: 0,
            buckets: vec![0; flow_limit_table_len as usize].into(),
        })
    }

    /// Records a packet that found the backlog at least half full. Returns true if its flow exceeds
    /// its share.
    pub fn exceeds(&mut self, hash: FlowHash) -> bool {
        let bucket = hash.0 & (u32::try_from(self.buckets.len()).unwrap_or(1) - 1);
        let forgotten = std::mem::replace(&mut self.history[self.next], bucket);
        self.next = (self.next + 1) % FLOW_LIMIT_HISTORY;

        let forgotten = &mut self.buckets[forgotten as usize];
        *forgotten = forgotten.saturating_sub(1);
        let recent = &mut self.buckets[bucket as usize];
        *recent = recent.saturating_add(1);
        debug_assert!(
            usize::from(*recent) <= FLOW_LIMIT_HISTORY,
            "more packets than are remembered"
        );
        *recent > FLOW_SHARE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_limit_starts_at_packet_65() {
        let mut limit = FlowLimit::new(4096).unwrap();
        let hog = FlowHash(77);
        let verdicts: Vec<_> = (0..70).map(|_| limit.exceeds(hog)).collect();
        assert_eq!(verdicts.iter().position(|&exceeds| exceeds), Some(64));
        for other in 1000..1000 + 128 {
            assert!(!limit.exceeds(FlowHash(other)), "others pass");
        }
        assert!(!limit.exceeds(hog), "and push the hog out of the history");
    }

    #[test]
    fn half_share_flow_is_not_limited() {
        let mut limit = FlowLimit::new(4096).unwrap();
        for packet in 0..1000 {
            assert!(!limit.exceeds(FlowHash(77)));
            assert!(!limit.exceeds(FlowHash(10_000 + packet)));
        }
    }

    #[test]
    fn table_length_is_power_of_two() {
        assert!(FlowLimit::new(0).is_none() && FlowLimit::new(3000).is_none());
    }
}
