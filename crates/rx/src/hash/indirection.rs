//! RSS indirection: the rx queue that a device selects by hash.

use crate::cpu::RxQueue;
use crate::hash::FlowHash;

/// Number of entries of the table, as in most network cards.
pub const RETA_ENTRIES: u16 = 128;

/// Indirection table that assigns its entries to all queues in turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Indirection {
    queues: u16,
}

impl Indirection {
    /// Creates a table over `queues` queues, at least one.
    #[must_use]
    pub fn new(queues: u16) -> Self {
        Self { queues: queues.max(1) }
    }

    /// Queue of a flow; queue 0 for frames without a hash.
    #[must_use]
    pub fn queue(self, hash: FlowHash) -> RxQueue {
        RxQueue(entry(hash, RETA_ENTRIES) % self.queues)
    }
}

/// Index of a hash in a table of `entries` entries, a power of two.
fn entry(hash: FlowHash, entries: u16) -> u16 {
    let low = hash.0 & (u32::from(entries) - 1);
    u16::try_from(low).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rss_entry_is_low_hash_bits() {
        let rows = [
            (0x51cc_c178, [56, 120, 376]),
            (0xc626_b0ea, [42, 106, 234]),
            (0xafc7_327f, [63, 127, 127]),
            (0xdde5_1bbf, [63, 63, 447]),
            (0xffff_ffff, [63, 127, 511]),
            (0, [0, 0, 0]),
        ];
        for (hash, indexes) in rows {
            assert_eq!([64, 128, 512].map(|entries| entry(FlowHash(hash), entries)), indexes);
        }
    }

    #[test]
    fn entries_are_dealt_out_in_turn() {
        let table = Indirection::new(3);
        let queues: Vec<_> = (0..6).map(|hash| table.queue(FlowHash(hash)).0).collect();
        assert_eq!(queues, [0, 1, 2, 0, 1, 2]);
        assert_eq!(Indirection::new(0).queue(FlowHash(5)), RxQueue(0));
    }
}
