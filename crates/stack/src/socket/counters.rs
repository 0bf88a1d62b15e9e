//! Counters of sockets by CPU. Each CPU has its own memory for them, in which those of all sockets are in the order of
//! their slots: many are read in the order of memory, and no CPU writes a cache line of another.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use forebay_buf::cache::{LINE_BYTES, OwnLine, prefetch_value};

use super::SocketId;
use crate::counter::StackCounter;

/// One CPU's counters of one socket, in datagrams as on the wire: each segment of a merged or GSO
/// packet counts.
#[derive(Debug, Default)]
pub struct LaneCounters {
    /// Datagrams queued.
    pub queued: StackCounter,
    /// Datagrams that the socket had no room for: the kernel's `RcvbufErrors`.
    pub dropped: StackCounter,
}

/// Counters of all sockets of a host, by CPU and by the sockets' slots.
#[derive(Debug)]
pub struct CounterTable {
    cpus: Box<[CpuCounters]>,
}

/// One CPU's blocks. The first packet for a socket of a block creates it.
type CpuCounters = Box<[OnceLock<Arc<Block>>]>;

/// Counters of sockets whose slots follow each other.
type Block = OwnLine<[LaneCounters; BLOCK_SOCKETS]>;

/// Number of sockets in a block, which takes a page.
pub const BLOCK_SOCKETS: usize = 256;

/// Number of counters in a cache line.
const LINE_COUNTERS: usize = LINE_BYTES / size_of::<LaneCounters>();

/// Counters of a socket that a CPU writes.
#[derive(Debug)]
pub(super) struct OwnCounters {
    block: Arc<Block>,
    place: usize,
}

impl Deref for OwnCounters {
    type Target = LaneCounters;

    fn deref(&self) -> &LaneCounters {
        &self.block.0[self.place]
    }
}

impl CounterTable {
    /// Creates the table of a host whose `cpus` CPUs put packets into at most `sockets` sockets.
    #[must_use]
    pub fn new(cpus: usize, sockets: usize) -> Self {
        let blocks = || (0..sockets.div_ceil(BLOCK_SOCKETS)).map(|_| OnceLock::new()).collect();
        Self { cpus: (0..cpus).map(|_| blocks()).collect() }
    }

    /// Number of CPUs.
    pub(super) fn cpus(&self) -> usize {
        self.cpus.len()
    }

    /// Counters of a socket for the CPU that writes them. The next socket of the slot gets the same ones: its first
    /// packet on the CPU [resets](LaneCounters::reset) them.
    pub(super) fn own(&self, cpu: usize, id: SocketId) -> OwnCounters {
        let empty = || Arc::new(OwnLine(std::array::from_fn(|_| LaneCounters::default())));
        let block = Arc::clone(self.cpus[cpu][id.block()].get_or_init(empty));
        OwnCounters { block, place: id.place() }
    }

    /// Counters on a CPU of a socket and of all others in its block; `None` if the CPU has put a packet into none.
    pub(super) fn block(&self, cpu: usize, id: SocketId) -> Option<&[LaneCounters; BLOCK_SOCKETS]> {
        Some(&self.cpus.get(cpu)?[id.block()].get()?.0)
    }

    /// Prefetches that block.
    pub(super) fn prefetch(&self, cpu: usize, id: SocketId) {
        let block = self.block(cpu, id).into_iter().flatten();
        block.step_by(LINE_COUNTERS).for_each(prefetch_value);
    }
}

impl SocketId {
    /// Block of each CPU that has the socket's counters.
    pub(super) fn block(self) -> usize {
        self.index() / BLOCK_SOCKETS
    }

    /// Place of the counters in a block.
    pub(super) fn place(self) -> usize {
        self.index() % BLOCK_SOCKETS
    }
}

impl LaneCounters {
    /// Sets them to zero, for the socket that has the slot now.
    pub(super) fn reset(&self) {
        self.queued.reset();
        self.dropped.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_counters_of_their_own() {
        const CPUS: u32 = 3;
        const SOCKETS: u32 = 600;
        let table = CounterTable::new(CPUS as usize, SOCKETS as usize);
        let each = || (0..CPUS).flat_map(|cpu| (0..SOCKETS).map(move |slot| (cpu, slot)));
        let own = |(cpu, slot)| table.own(cpu as usize, SocketId::new(slot, 0));
        for (cpu, slot) in each() {
            let own = own((cpu, slot));
            own.queued.add(u64::from(cpu * SOCKETS + slot));
            own.dropped.add(1);
        }
        for (number, place) in each().enumerate() {
            assert_eq!((own(place).queued.get(), own(place).dropped.get()), (number as u64, 1));
        }
    }
}
