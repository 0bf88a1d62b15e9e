//! Counters of sockets by CPU: in each CPU's part those of all sockets are side by side, by slot.
//!
//! Reading the counters of many sockets goes through memory in order, and no CPU writes a line of another.

use std::sync::OnceLock;

use forebay_buf::cache::{OwnLine, prefetch_value};

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
type CpuCounters = Box<[OnceLock<Box<Block>>]>;

/// Counters of sockets whose slots follow each other.
type Block = OwnLine<[LaneCounters; BLOCK_SOCKETS]>;

/// Sockets of a block: it takes a page.
const BLOCK_SOCKETS: usize = 256;

/// Counters of a cache line.
const LINE_COUNTERS: usize = 64 / size_of::<LaneCounters>();

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

    /// Counters of a socket on a CPU. Sockets of one slot have them in turn: only the CPU itself writes them, and it
    /// [begins](LaneCounters::begin) anew with the first packet for another socket.
    pub(super) fn at(&self, cpu: usize, id: SocketId) -> &LaneCounters {
        let empty = || Box::new(OwnLine(std::array::from_fn(|_| LaneCounters::default())));
        &self.cpus[cpu][id.block()].get_or_init(empty).0[id.place()]
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
    /// Begins at zero, for the socket that has the slot now.
    pub(super) fn begin(&self) {
        self.queued.reset();
        self.dropped.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_counters_of_their_own() {
        let (cpus, sockets) = (3_u32, 600);
        let table = CounterTable::new(3, 600);
        let each = || (0..cpus).flat_map(|cpu| (0..sockets).map(move |slot| (cpu, slot)));
        let at = |(cpu, slot)| table.at(cpu as usize, SocketId::new(slot, 0));
        for (cpu, slot) in each() {
            at((cpu, slot)).queued.add(u64::from(cpu * sockets + slot));
            at((cpu, slot)).dropped.add(1);
        }
        for (number, place) in each().enumerate() {
            assert_eq!((at(place).queued.get(), at(place).dropped.get()), (number as u64, 1));
        }
    }
}
