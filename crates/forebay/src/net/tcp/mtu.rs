//! Connections whose device has another MTU than before, told a few at a time.

use std::mem::take;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_stack::tcp::{Tcp, TcpOut};

use super::super::shared::NetState;
use super::shards::ShardIndex;

/// Sockets that are told while a shard is locked, and in a turn of the CPU, so that a segment waits for a few microseconds at
/// most.
const SOCKETS_A_CALL: u32 = 32;

/// Former MTUs of a device that are remembered at most.
const BEFORE_MAX: usize = 8;

/// MTUs of a device, in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(in crate::net) struct MtuChange {
    /// Former ones that connections may still have; none if it has not changed.
    pub(in crate::net) before: Vec<u32>,
    pub(in crate::net) now: u32,
}

impl MtuChange {
    pub(in crate::net) fn new(before: u32, now: u32) -> Self {
        Self { before: Vec::from_iter((before != now).then_some(before)), now }
    }

    /// Path MTU of a connection that had another one (`fib_nhc_update_mtu`): a router may have told of a smaller link.
    /// `None` if it stays.
    fn of_path(&self, path_mtu_bytes: u32) -> Option<u32> {
        let is_smaller = !self.before.is_empty() && path_mtu_bytes > self.now;
        let is_other = is_smaller || self.before.contains(&path_mtu_bytes);
        (is_other && path_mtu_bytes != self.now).then_some(self.now)
    }

    /// Both changes, of which this is the earlier.
    fn then(mut self, later: &Self) -> Self {
        self.before.retain(|before| !later.before.contains(before));
        self.before.extend(&later.before);
        let excess = self.before.len().saturating_sub(BEFORE_MAX);
        self.before.drain(..excess);
        Self { now: later.now, ..self }
    }
}

/// Walk over all connections, which goes on in turns of one CPU.
#[derive(Debug, Default)]
pub(in crate::net) struct MtuWalk {
    is_under_way: AtomicBool,
    place: Mutex<WalkPlace>,
}

#[derive(Debug, Default)]
struct WalkPlace {
    /// In the order of the devices.
    changes: Vec<MtuChange>,
    shard: usize,
    slot: u32,
    /// Shards to be looked through to their ends, this one included.
    shards_left: usize,
}

impl MtuWalk {
    /// Begins a walk, or has the one that is under way go over all connections once more.
    pub(in crate::net) fn begin(&self, changes: &[MtuChange], shards: usize) {
        if changes.iter().all(|change| change.before.is_empty()) {
            return;
        }
        let mut place = self.place();
        let earlier = take(&mut place.changes);
        let none = || MtuChange::default();
        let earlier = earlier.into_iter().chain(std::iter::repeat_with(none));
        place.changes = earlier.zip(changes).map(|(earlier, later)| earlier.then(later)).collect();
        place.shards_left = shards + usize::from(place.slot > 0);
        self.is_under_way.store(true, Ordering::Release);
    }

    /// True until all connections are told.
    pub(in crate::net) fn is_under_way(&self) -> bool {
        self.is_under_way.load(Ordering::Acquire)
    }

    fn place(&self) -> MutexGuard<'_, WalkPlace> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetState {
    /// Tells a few connections of the changes of their devices.
    pub(in crate::net) fn walk_mtus(&self) {
        let mut place = self.mtu_walk.place();
        let WalkPlace { changes, shard, slot, shards_left } = &mut *place;
        let has_more = self.call_tcp(ShardIndex(*shard), |tcp, out| {
            let end = tcp.slots().min(slot.saturating_add(SOCKETS_A_CALL));
            (*slot..end).for_each(|slot| self.change_mtu(slot, changes, tcp, out));
            *slot = end;
            end < tcp.slots()
        });
        if !has_more {
            (*shard, *slot) = ((*shard + 1) % self.tcp.shard_count(), 0);
            *shards_left = shards_left.saturating_sub(1);
        }
        if *shards_left == 0 {
            changes.clear();
            self.mtu_walk.is_under_way.store(false, Ordering::Release);
        }
    }

    fn change_mtu(&self, slot: u32, changes: &[MtuChange], tcp: &mut Tcp, out: &mut TcpOut<'_>) {
        let Some(socket) = tcp.socket_at(slot as usize) else { return };
        let (Ok(flow), Ok(Some(info))) = (tcp.flow(socket), tcp.info(socket)) else { return };
        let device = self.routes().find_between(Some(flow.ours.ip()), flow.theirs.ip());
        let change = device.and_then(|device| changes.get(device));
        if let Some(mtu_bytes) = change.and_then(|change| change.of_path(info.path_mtu_bytes)) {
            // It is a connection.
            let _ = tcp.set_route_mtu(socket, mtu_bytes, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::super::rig::{Recording, host, neighbour};
    use super::super::super::{Net, NetConfig, TcpStream};
    use super::*;

    #[test]
    fn tcp_54_smaller_path_stays_known() {
        let [grows, shrinks] =
            [(1500, 9000), (9000, 1500)].map(|(before, now)| MtuChange::new(before, now));
        let (back, unchanged) = (grows.clone().then(&shrinks), MtuChange::new(1500, 1500));
        for (change, path, expected) in [
            (&grows, 1500, Some(9000)),
            (&grows, 1400, None),
            (&shrinks, 9000, Some(1500)),
            (&shrinks, 4000, Some(1500)),
            (&shrinks, 1400, None),
            (&back, 9000, Some(1500)),
            (&back, 1500, None),
            (&grows.clone().then(&MtuChange::new(9000, 8000)), 1500, Some(8000)),
            (&grows.clone().then(&MtuChange::new(9000, 8000)), 9000, Some(8000)),
            (&grows.clone().then(&MtuChange::new(9000, 9000)), 1500, Some(9000)),
            (&unchanged, 1500, None),
            (&unchanged, 9000, None),
        ] {
            assert_eq!(change.of_path(path), expected, "{change:?} of {path}");
        }
    }

    #[test]
    fn tcp_54_former_mtus_are_bounded() {
        let changes = (1000..2000).map(|mtu| MtuChange::new(mtu, mtu + 1));
        let all = changes.reduce(|all, later| all.then(&later)).unwrap();
        assert_eq!((all.before.len(), all.now), (BEFORE_MAX, 2000));
    }

    /// A change that comes meanwhile is told to those before the place, too.
    #[test]
    fn tcp_54_connections_are_told_in_turns() {
        const CONNECTIONS: u16 = 200;
        let sinks = || vec![Box::<Recording>::default() as _];
        let net = Net(host(vec![sinks(), sinks()], NetConfig::TCP));
        let to = |port| (neighbour(0).ip(), port).into();
        let streams: Vec<_> = (1..=CONNECTIONS)
            .map(|port| TcpStream::begin_connect(&net, to(port)).unwrap())
            .collect();
        let mtus = || streams.iter().map(|stream| stream.info().unwrap().path_mtu_bytes);
        let shards = net.0.tcp.shard_count();
        let (state, walk) = (Arc::clone(&net.0), &net.0.mtu_walk);
        let set = |before, now| walk.begin(&[MtuChange::new(before, now)], shards);
        set(1500, 1300);
        state.walk_mtus();
        let told = mtus().filter(|&mtu| mtu == 1300).count();
        assert!((1..=SOCKETS_A_CALL as usize).contains(&told) && walk.is_under_way(), "{told}");
        set(1300, 1400);
        let turns = (0..1000).take_while(|_| {
            state.walk_mtus();
            walk.is_under_way()
        });
        assert!(turns.count() < 100);
        assert!(mtus().all(|mtu| mtu == 1400), "{:?}", mtus().collect::<Vec<_>>());
        assert!(walk.place().changes.is_empty());
    }
}
