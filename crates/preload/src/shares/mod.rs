//! Table in memory that all processes of a program share: which of them takes which new connections, and which has
//! which flow. A process may be killed at any time, so the only lock is one that assigns rows to addresses: when its holder
//! dies, another process takes it.
//!
//! Flows fall into buckets by a hash, which the filters of the devices' sockets know, too. For each address of listeners
//! each bucket has an owner, which takes its new connections. A process that is to own a bucket makes itself the owner.
//! For a while it and the owner before it both take new connections, since a SYN lies in the rings of both and either may
//! be late; then it takes them alone. Whoever claims a flow first has it until its end, so that each SYN is answered once.
//!
//! For each address of UDP sockets each bucket has an owner, too, which takes its datagrams alone: the one before until the
//! handover ends, then the other.

mod table; //  words of the memory
mod rows; //   addresses, and their rows
mod owner; //  process that takes a bucket's new connections
mod claims; // whose each flow is
mod taking; // what this process takes and answers

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use forebay_device::rx_filter::{BUCKETS, FlowShare};
use forebay_stack::tcp::{Flow, FlowHasher};

use self::claims::DatagramClaim;
use self::owner::{Owner, heir};
use self::rows::{IS_ROW, LockedRows, OF_DATAGRAMS};
pub(crate) use self::table::SharedTable;
use self::table::{INCARNATIONS, KEY, OCCUPIED, ROWLESS, ROWS, UNCLAIMED};

/// Processes that may receive at the same time.
pub(crate) const SLOTS: usize = 64;

/// Number of a process's slot while it has none.
const NO_SLOT: u32 = u32::MAX;

/// Place of one process in the table.
pub(crate) struct Shares {
    table: SharedTable,
    hasher: FlowHasher,
    slot: AtomicU32,
    /// Flows of this process in each bucket.
    held: [AtomicU32; BUCKETS],
    /// Flows of datagrams that it has claimed in each bucket.
    held_datagrams: [AtomicU32; BUCKETS],
    /// Buckets that this process has owned alone for so long that no segment from before is in its rings.
    settled: AtomicU64,
    /// Addresses without a row that this process serves.
    rowless: AtomicUsize,
}

/// Address that processes divide.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum DividedAddress {
    /// New connections to it, among the processes that have a listener there.
    OfListeners(SocketAddr),
    /// Datagrams to it, among the processes that have a UDP socket there.
    OfDatagrams(SocketAddr),
}

impl From<SocketAddr> for DividedAddress {
    fn from(listener: SocketAddr) -> Self {
        Self::OfListeners(listener)
    }
}

/// Bucket of an address that has a new owner, and still the one before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Handover {
    row: usize,
    bucket: usize,
}

impl Shares {
    pub(crate) fn new(table: SharedTable) -> Self {
        Self {
            table,
            hasher: FlowHasher::new(table.secret()),
            slot: AtomicU32::new(NO_SLOT),
            held: [const { AtomicU32::new(0) }; BUCKETS],
            held_datagrams: [const { AtomicU32::new(0) }; BUCKETS],
            settled: AtomicU64::new(0),
            rowless: AtomicUsize::new(0),
        }
    }

    /// Place of another process.
    pub(crate) fn next(&self) -> Self {
        Self::new(self.table)
    }

    /// Key of the hash by which flows fall into buckets.
    pub(crate) fn key(&self) -> u32 {
        u32::try_from(self.table.0[KEY].load(SeqCst)).unwrap_or(0)
    }

    /// Takes a slot, which this process has [locked](crate::engine_lock::EngineLock). Nobody else has it.
    pub(crate) fn enter(&self, slot: usize) {
        if self.table.0[INCARNATIONS + slot].load(SeqCst) > 0 {
            self.table.clear(slot);
        }
        self.table.0[INCARNATIONS + slot].fetch_add(1, SeqCst);
        self.table.0[OCCUPIED].fetch_or(1 << slot, SeqCst);
        self.slot.store(u32::try_from(slot).unwrap_or(NO_SLOT), SeqCst);
    }

    /// Slots of other processes, which may have ended.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> {
        let (occupied, own) = (self.table.0[OCCUPIED].load(SeqCst), self.own());
        (0..SLOTS).filter(move |slot| occupied & 1 << slot != 0 && own != Some(*slot))
    }

    /// Removes a process that has ended, and whose slot this process has locked. False if another one has done so.
    pub(crate) fn evict(&self, slot: usize) -> bool {
        if self.table.0[OCCUPIED].load(SeqCst) & 1 << slot == 0 {
            return false;
        }
        self.table.clear(slot);
        self.table.0[OCCUPIED].fetch_and(!(1 << slot), SeqCst);
        true
    }

    /// Serves an address, which it does not so far.
    pub(crate) fn join(&self, address: impl Into<DividedAddress>) {
        self.enter_row(address.into(), |_, _| {});
    }

    /// Joins an address with a socket that is not used yet: it serves the address if no other process does.
    pub(crate) fn join_idle(&self, address: DividedAddress) {
        self.enter_row(address, |row, own| self.mark_row_idle(row, own));
    }

    /// Serves an address beside the others that do, as it uses its socket.
    pub(crate) fn begin_use(&self, address: DividedAddress) {
        if let (Some(own), Some(row)) = (self.own(), self.row_of(address)) {
            self.table.idle(row).fetch_and(!(1 << own), SeqCst);
        }
    }

    /// True if another process uses a socket that is connected to a flow.
    pub(crate) fn has_other_user_of(&self, flow: &Flow) -> bool {
        let claim = self.own().and_then(|own| self.datagram_claim(flow, own));
        claim == Some(DatagramClaim::Others)
    }

    /// True if another process uses a socket at an address.
    pub(crate) fn has_other_users(&self, address: DividedAddress) -> bool {
        let own = self.own().map_or(0, |own| 1 << own);
        self.row_of(address).is_some_and(|row| {
            let idle = self.table.idle(row).load(SeqCst);
            self.table.members(row).load(SeqCst) & !idle & !own != 0
        })
    }

    /// Becomes a member of an address's row, after `before`.
    fn enter_row(&self, address: DividedAddress, before: impl Fn(usize, usize)) {
        let Some(own) = self.own() else { return };
        if !self.try_enter_row(address, own, before) {
            self.rowless.fetch_add(1, SeqCst);
            self.table.0[ROWLESS].fetch_or(1 << own, SeqCst);
        }
    }

    /// Becomes a member of an address's row, after `before`. False if it has none, and there is none to be had now.
    fn try_enter_row(
        &self,
        address: DividedAddress,
        own: usize,
        before: impl Fn(usize, usize),
    ) -> bool {
        let rows = LockedRows::lock(self.table, own);
        let row = rows.as_ref().and_then(|rows| rows.row_for(self.key_of(address)));
        if let Some(row) = row {
            before(row, own);
            self.table.members(row).fetch_or(1 << own, SeqCst);
        }
        row.is_some()
    }

    /// Becomes a member of the rows of addresses that this process serves without one, where others have made rows since, or
    /// some are free now. `is_idle` is true for those whose sockets are not used yet.
    pub(crate) fn enter_late<'a>(
        &self,
        served: impl Iterator<Item = &'a DividedAddress>,
        is_idle: impl Fn(&DividedAddress) -> bool,
    ) {
        let Some(own) = self.own().filter(|_| self.is_rowless()) else { return };
        for address in served.filter(|address| !self.is_member(**address, own)) {
            let before = |row, own| {
                if is_idle(address) {
                    self.mark_row_idle(row, own);
                }
            };
            if self.try_enter_row(*address, own, before) {
                self.forget_rowless(own);
            }
        }
    }

    fn mark_row_idle(&self, row: usize, own: usize) {
        self.table.idle(row).fetch_or(1 << own, SeqCst);
    }

    /// Serves an address no longer. What is new there is still taken until others do.
    pub(crate) fn leave(&self, address: impl Into<DividedAddress>) {
        let Some(own) = self.own() else { return };
        let address = address.into();
        match self.row_of(address) {
            Some(row) if self.is_member(address, own) => {
                self.table.members(row).fetch_and(!(1 << own), SeqCst);
                self.table.idle(row).fetch_and(!(1 << own), SeqCst);
            }
            _ => self.forget_rowless(own),
        }
    }

    fn is_member(&self, address: DividedAddress, own: usize) -> bool {
        let members = self.row_of(address).map(|row| self.table.members(row).load(SeqCst));
        members.is_some_and(|members| members & 1 << own != 0)
    }

    /// Serves an address less that has no row.
    fn forget_rowless(&self, own: usize) {
        let before = self.rowless.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
        if before == Ok(1) {
            self.table.0[ROWLESS].fetch_and(!(1 << own), SeqCst);
        }
    }

    /// True if another process serves an address.
    pub(crate) fn has_other_members(&self, listener: SocketAddr) -> bool {
        let own = self.own().map_or(0, |own| 1 << own);
        self.members_of(listener) & !own != 0
    }

    /// True if some process serves this address.
    pub(crate) fn has_members(&self, listener: SocketAddr) -> bool {
        self.members_of(listener) != 0
    }

    /// Slots of the processes that serve this address; of one without a row, those that serve any such.
    fn members_of(&self, listener: SocketAddr) -> u64 {
        let rowless = &self.table.0[ROWLESS];
        self.row_of(listener).map_or(rowless, |row| self.table.members(row)).load(SeqCst)
    }

    /// True if some process has a listener.
    pub(crate) fn any_served(&self) -> bool {
        let is_of_listeners = |row| self.table.key_of(row).load(SeqCst) & OF_DATAGRAMS == 0;
        let is_served = |row| is_of_listeners(row) && self.table.members(row).load(SeqCst) != 0;
        self.table.0[ROWLESS].load(SeqCst) != 0 || self.rows().any(is_served)
    }

    /// True if this process takes what is new at an address.
    pub(crate) fn owns_some(&self, address: impl Into<DividedAddress>) -> bool {
        let (Some(own), Some(row)) = (self.own(), self.row_of(address)) else { return false };
        (0..BUCKETS).any(|bucket| self.owner(row, bucket).has(own))
    }

    /// Gives up all buckets of an address at once: no process took them over in time.
    pub(crate) fn abandon(&self, address: impl Into<DividedAddress>) {
        if let (Some(own), Some(row)) = (self.own(), self.row_of(address)) {
            self.table.give_up(row, own);
        }
    }

    /// Buckets whose segments this process needs: where it takes new connections or is to, and where it has some.
    pub(crate) fn needed(&self) -> u64 {
        let Some(own) = self.own() else { return 0 };
        if self.is_rowless() {
            return u64::MAX;
        }
        let mut needed = 0;
        for row in self.rows() {
            let heirs = self.heirs(row);
            for bucket in 0..BUCKETS {
                let is_own = self.owner(row, bucket).has(own) || heir(heirs, bucket) == Some(own);
                needed |= u64::from(is_own) << bucket;
            }
        }
        needed | self.busy() | buckets_of(&self.held_datagrams)
    }

    /// True if this process serves an address without a row, which is not divided.
    fn is_rowless(&self) -> bool {
        self.rowless.load(SeqCst) > 0
    }

    /// Buckets where this process has flows.
    fn busy(&self) -> u64 {
        buckets_of(&self.held)
    }

    /// Clears this process's marks of flows that the table had no room for, in the buckets where it has no flows any more.
    pub(crate) fn clear_unclaimed(&self) {
        if let Some(own) = self.own() {
            self.clear_marks_except(own, self.busy());
        }
    }

    /// Clears the marks of buckets that were not busy.
    fn clear_marks_except(&self, own: usize, busy: u64) {
        let cleared = self.table.0[UNCLAIMED + own].fetch_and(busy, SeqCst) & !busy;
        // Another thread may have claimed a flow there since.
        self.table.0[UNCLAIMED + own].fetch_or(cleared & self.busy(), SeqCst);
    }

    /// Buckets that this process owns alone at each address where it owns them.
    pub(crate) fn owned_alone(&self) -> u64 {
        let Some(own) = self.own() else { return 0 };
        let alone = Owner { current: Some(own), before: None };
        let is_owned = |bucket: usize| {
            let mut owners =
                self.rows().map(|row| self.owner(row, bucket)).filter(|it| it.has(own));
            let first = owners.next();
            first.map_or(self.is_rowless(), |first| first == alone) && owners.all(|it| it == alone)
        };
        (0..BUCKETS).fold(0, |owned, bucket| owned | u64::from(is_owned(bucket)) << bucket)
    }

    /// Sets the buckets where this process answers the segments of no connection.
    pub(crate) fn set_settled(&self, buckets: u64) {
        self.settled.store(buckets, SeqCst);
    }

    /// Bit of a flow's bucket.
    pub(crate) fn bucket_bit(&self, flow: &Flow) -> u64 {
        1 << self.bucket_of(flow)
    }

    /// Becomes the owner of all buckets that it is to own and that nobody has.
    pub(crate) fn take_free(&self) {
        self.take(|owner, own, _| {
            (owner == Owner::default()).then_some(Owner { current: Some(own), before: None })
        });
    }

    /// Becomes the owner of all buckets that it is to own, together with the owners before. Returns all that are
    /// shared so.
    pub(crate) fn take_shared(&self) -> Vec<Handover> {
        self.take(|owner, own, idle| {
            // One handover at a time, and none to a process that does not use its socket.
            let is_due =
                owner.current != Some(own) && owner.before.is_none() && idle & 1 << own == 0;
            // One that does not use its socket gives the bucket up at once.
            let before = owner.current.filter(|slot| idle & 1 << slot == 0);
            is_due.then_some(Owner { current: Some(own), before })
        });
        let Some(own) = self.own() else { return Vec::new() };
        let all =
            self.rows().flat_map(|row| (0..BUCKETS).map(move |bucket| Handover { row, bucket }));
        let is_shared = |handover: &Handover| {
            let owner = self.owner(handover.row, handover.bucket);
            owner.current == Some(own) && owner.before.is_some()
        };
        all.filter(is_shared).collect()
    }

    /// Ends a handover: this process is the only owner.
    pub(crate) fn complete(&self, handover: Handover) {
        let Some(own) = self.own() else { return };
        let place = self.table.owner(handover.row, handover.bucket);
        let alone = |word| {
            let owner = Owner::of(word);
            let is_shared = owner.current == Some(own) && owner.before.is_some();
            is_shared.then_some(Owner { before: None, ..owner }.word())
        };
        // Ignored: it is no longer one.
        let _ = place.fetch_update(SeqCst, SeqCst, alone);
    }

    /// Changes the owner of each bucket that this process is to own, as `change` says from the owner, this process's slot and
    /// the slots of those that do not use their sockets.
    fn take(&self, change: impl Fn(Owner, usize, u64) -> Option<Owner>) {
        let Some(own) = self.own() else { return };
        for row in self.rows() {
            let (heirs, idle) = (self.heirs(row), self.table.idle(row).load(SeqCst));
            for bucket in (0..BUCKETS).filter(|bucket| heir(heirs, *bucket) == Some(own)) {
                let place = self.table.owner(row, bucket);
                let changed = |word| change(Owner::of(word), own, idle).map(Owner::word);
                // Ignored: there is nothing to change.
                let _ = place.fetch_update(SeqCst, SeqCst, changed);
            }
        }
    }

    /// Members of a row that are to own its buckets: those that use their sockets, if there are such.
    fn heirs(&self, row: usize) -> u64 {
        let (members, idle) = (self.table.members(row), self.table.idle(row));
        let members = members.load(SeqCst);
        match members & !idle.load(SeqCst) {
            0 => members,
            users => users,
        }
    }

    /// Slot of this process.
    pub(crate) fn own(&self) -> Option<usize> {
        let slot = self.slot.load(SeqCst);
        (slot != NO_SLOT).then_some(slot as usize)
    }

    /// Rows of addresses of listeners, and of addresses that UDP sockets have: nobody takes datagrams to others.
    fn rows(&self) -> impl Iterator<Item = usize> {
        let table = self.table;
        (0..ROWS).filter(move |row| {
            let key = table.key_of(*row).load(SeqCst);
            let is_of_listeners = key & OF_DATAGRAMS == 0;
            key != 0 && (is_of_listeners || table.members(*row).load(SeqCst) != 0)
        })
    }

    fn owner(&self, row: usize, bucket: usize) -> Owner {
        Owner::of(self.table.owner(row, bucket).load(SeqCst))
    }

    fn key_of(&self, address: DividedAddress) -> u64 {
        let (at, mark) = match address {
            DividedAddress::OfListeners(at) => (at, 0),
            DividedAddress::OfDatagrams(at) => (at, OF_DATAGRAMS),
        };
        let hash = self.hasher.hashed(&Flow { ours: at, theirs: at }).hash();
        hash & !OF_DATAGRAMS | mark | IS_ROW
    }

    fn row_of(&self, address: impl Into<DividedAddress>) -> Option<usize> {
        let found = self.table.row(self.key_of(address.into()));
        found.filter(|(_, is_free)| !is_free).map(|(row, _)| row)
    }

    fn bucket_of(&self, flow: &Flow) -> usize {
        FlowShare::bucket(self.key(), flow.theirs, flow.ours.port())
    }

    /// Owner of the new connections of a flow. `None` of an address without a row: whoever claims a flow first.
    fn owner_of(&self, listener: SocketAddr, flow: &Flow) -> Option<Owner> {
        if listener.ip().is_unspecified() && self.is_served(flow.ours) {
            // By a listener at this very address, which comes before those at all addresses.
            return Some(Owner::default());
        }
        self.row_of(listener).map(|row| self.owner(row, self.bucket_of(flow)))
    }

    /// True if some process has a listener at an address that has a row.
    fn is_served(&self, address: SocketAddr) -> bool {
        self.row_of(address).is_some_and(|row| self.table.members(row).load(SeqCst) != 0)
    }

    /// Row of the UDP sockets that datagrams to an address go to: those at this very address come first.
    fn row_of_datagrams(&self, ours: SocketAddr) -> Option<usize> {
        let any: IpAddr = match ours.ip() {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let at = [ours.ip(), any].map(|ip| SocketAddr::new(ip, ours.port()));
        let mut rows = at.into_iter().filter_map(|at| self.row_of(DividedAddress::OfDatagrams(at)));
        rows.find(|row| self.table.members(*row).load(SeqCst) != 0)
    }
}

/// Buckets where something is held.
fn buckets_of(held: &[AtomicU32; BUCKETS]) -> u64 {
    let bits = held.iter().enumerate();
    bits.fold(0, |buckets, (bucket, held)| buckets | u64::from(held.load(SeqCst) > 0) << bucket)
}

impl fmt::Debug for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shares({:?})", self.own())
    }
}

#[cfg(test)]
mod tests;
