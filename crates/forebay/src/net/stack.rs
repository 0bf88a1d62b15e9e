//! The stack of one CPU, as an engine's handler.

use std::fmt;
use std::sync::Arc;

use arc_swap::Cache;
use forebay_buf::Pool;
use forebay_rx::delivery::Batch;
use forebay_rx::{Handler, Packet};
use forebay_stack::ingress::{RxContext, Stack};
use forebay_stack::network::neighbours::NeighbourObservation;
use forebay_stack::network::{Identity, NetworkCounters};
use forebay_stack::socket::table::SocketTable;
use forebay_sys::clock::Clock;

use super::shared::NetState;

/// Reassembly is asked this often what has waited too long.
const EXPIRE_NS: u64 = 100_000_000;

/// Brings what is delivered to one CPU to the sockets.
pub struct NetStack {
    /// The CPU's place.
    index: usize,
    shared: Arc<NetState>,
    stack: Stack,
    table: Cache<Arc<arc_swap::ArcSwap<SocketTable>>, Arc<SocketTable>>,
    /// The table that the stack goes by.
    seen: Arc<SocketTable>,
    clock: Clock,
    expired_ns: u64,
    answers: Vec<Packet>,
    sightings: Vec<NeighbourObservation>,
}

impl NetStack {
    pub(super) fn new(index: usize, shared: Arc<NetState>, stack: Stack) -> Self {
        let table = Cache::new(Arc::clone(&shared.table));
        let seen = shared.table.load_full();
        let clock = Clock::machine();
        let expired_ns = clock.now_ns();
        Self {
            index,
            shared,
            stack,
            table,
            seen,
            clock,
            expired_ns,
            answers: Vec::new(),
            sightings: Vec::new(),
        }
    }

    /// Counters of this CPU's network layer.
    #[must_use]
    pub fn counters(&self) -> &Arc<NetworkCounters> {
        self.stack.network().counters()
    }

    /// Frames of this CPU's own that have not come home.
    pub(super) fn frames_away(&mut self) -> usize {
        self.stack.frames_away()
    }

    /// Gives up what waits for packets, of which no more will come.
    pub(super) fn end(&mut self) {
        self.stack.end();
    }

    /// Gives this CPU small frames, that datagrams of slow readers are moved to.
    pub(super) fn set_small(&mut self, small: Pool) {
        self.stack.set_small(small);
    }

    /// Asks for neighbours again that packets wait for, and gives up those that waited in vain.
    fn tend(&mut self, device: usize, on: &Identity, now_ns: u64, pool: &mut Pool) {
        let mut learned = self.shared.devices[device].learned();
        let mut given_up = Vec::new();
        learned.tick(on, now_ns, (pool, &mut self.answers), &mut given_up);
        given_up.drain(..).for_each(|packet| pool.put(packet.frame));
    }

    /// Learns of sockets that were bound or closed.
    fn follow(&mut self) {
        let table = self.table.load();
        if !Arc::ptr_eq(table, &self.seen) {
            self.seen = Arc::clone(table);
            self.stack.set_table(Arc::clone(&self.seen));
        }
    }
}

impl Handler for NetStack {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.follow();
        let now_ns = self.clock.now_ns();
        let device = self.shared.device_of(batch.rx_queue);
        let identity = self.shared.devices[device].identity.load();
        let mut around = RxContext {
            identity: &identity,
            now_ns,
            pool: batch.pool,
            policy: self.shared.policy.load(),
            answers: &mut self.answers,
            sightings: &mut self.sightings,
        };
        self.stack.turn(batch.packets, &mut around);
        if now_ns.saturating_sub(self.expired_ns) >= EXPIRE_NS {
            self.expired_ns = now_ns;
            self.stack.expire(now_ns, batch.pool);
            self.tend(device, &identity, now_ns, batch.pool);
        }
        if !self.sightings.is_empty() {
            let mut learned = self.shared.devices[device].learned();
            for sighting in self.sightings.drain(..) {
                learned.hear(&sighting, now_ns, &mut self.answers);
            }
        }
        if !self.answers.is_empty() {
            // A device that is gone ends its source.
            let _ = self.shared.transmitter_of(self.index).send_as_is(device, &mut self.answers);
        }
    }
}

impl fmt::Debug for NetStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetStack({:?})", self.stack.network())
    }
}
