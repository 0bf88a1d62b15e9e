//! Division of new connections and datagrams among the processes that serve the same addresses: a thread of each process
//! follows the table of [`shares`](crate::shares), and sets the filters that let the packets of its process pass.

mod connected; // flows that UDP sockets are connected to
mod passed; //    connections of other processes

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{mem, process, thread};

use forebay::{Device, Via};
use forebay_device::rx_filter::{BUCKETS, FlowShare, nothing};
use forebay_stack::tcp::{Flow, PassedConnection};
use forebay_sys::hidden::Hidden;
use forebay_sys::socket_filter::{FilterInstruction, attach, attached};

use self::connected::FlowClaim;
use crate::engine_lock::EngineLock;
use crate::listener::OtherCopies;
use crate::shares::{DividedAddress, Handover, Shares};

/// Time between two checks of whether the devices' filters are attached, and the time after which their absence is told.
const ATTACHED_LOOK: Duration = Duration::from_micros(100);
const ATTACHED_MAX: Duration = Duration::from_secs(10);

/// Time in which two processes take the new connections of a bucket, and the longest time by which one of them may be
/// later than the other to process the same packet.
const OVERLAP: Duration = Duration::from_millis(500);

/// Time for which a bucket is owned alone before segments of no connection are answered.
const SETTLED: Duration = Duration::from_secs(1);

/// Time between two checks of whether other processes have ended.
const OTHERS_LOOK: Duration = Duration::from_millis(100);

/// Longest wait for others that take over the new connections of a listener, and pause between two looks.
const LEAVE_MAX: Duration = Duration::from_secs(2);
const LEAVE_LOOK: Duration = Duration::from_millis(2);

/// Longest wait for handshakes that have begun at a closed listener.
const HANDSHAKES_MAX: Duration = Duration::from_secs(1);

/// Sockets that the packets of an engine come from.
pub(crate) struct Rings(Vec<Hidden>);

/// Part of this process in the new connections.
pub(crate) struct Membership {
    engine_lock: Arc<EngineLock>,
    rings: Rings,
    state: Mutex<State>,
}

/// A closed listener whose connections others take over.
pub(crate) trait Closed {
    /// True once this process listens at its address anew.
    fn is_stopped(&self) -> bool;

    /// True if another process has a copy, which it may serve later.
    fn is_open_elsewhere(&self) -> bool;

    /// Handshakes whose ACK may still come.
    fn handshake_count(&self) -> u32;

    /// Connection for another process.
    fn pass_on(&self) -> Option<PassedConnection>;
}

/// Connections that were put into the mailbox, and the one for which it had no room.
struct Passed {
    count: usize,
    without_room: Option<PassedConnection>,
}

struct State {
    /// Filters that the engine has attached, which let all buckets pass.
    filters: Option<Vec<Vec<FilterInstruction>>>,
    /// Buckets that the filters leave out now.
    left_out: u64,
    is_failure_told: bool,
    /// Handovers to this process, since when.
    handovers: HashMap<Handover, Instant>,
    /// Time since when each bucket is owned alone, unless there never were other processes.
    alone_since: [Option<Instant>; BUCKETS],
    have_been_others: bool,
    /// Listeners and UDP sockets of this process at each address.
    served: HashMap<DividedAddress, usize>,
    /// Addresses among them at which this process has not used a socket yet.
    idle: HashSet<DividedAddress>,
    /// Flows that UDP sockets of this process are connected to.
    claims: HashMap<Flow, FlowClaim>,
    /// Copies that other processes have of listeners which this one has closed, and the time since when no process serves
    /// any address.
    copies: Vec<OtherCopies>,
    unserved_since: Option<Instant>,
    /// Time of the last look at which attempts were counted.
    counted: Option<Instant>,
    /// Connections that others have passed on, which this process claims and cannot go on with, and the attempts so far.
    refused: Vec<(PassedConnection, u16)>,
}

impl Rings {
    /// Packet sockets whose filters divide what arrives between processes: none over `AF_XDP`.
    pub(crate) fn of(devices: &[Device]) -> io::Result<Self> {
        let devices = devices.iter().filter(|device| device.via == Via::AfPacket);
        let sources = devices.flat_map(|device| &device.sources);
        let sockets = sources.filter_map(|source| source.descriptor());
        Ok(Self(sockets.map(Hidden::duplicate).collect::<Result<_, _>>()?))
    }

    /// Waits until the engine has attached the filters, from when on the sockets of its process receive. `None` if that takes
    /// longer than `at_most`.
    pub(crate) fn await_attached(&self, at_most: Duration) -> Option<Vec<Vec<FilterInstruction>>> {
        let began = Instant::now();
        loop {
            match self.filters() {
                None if began.elapsed() < at_most => thread::sleep(ATTACHED_LOOK),
                filters => return filters,
            }
        }
    }

    /// Filters of all, once they are attached.
    fn filters(&self) -> Option<Vec<Vec<FilterInstruction>>> {
        let filters = self.0.iter().map(|ring| attached(ring.as_fd()).ok());
        let filters: Vec<_> = filters.collect::<Option<_>>()?;
        filters.iter().all(|filter| *filter != nothing()).then_some(filters)
    }
}

impl Membership {
    pub(crate) fn new(engine_lock: Arc<EngineLock>, rings: Rings) -> Self {
        let state = State {
            filters: None,
            left_out: 0,
            is_failure_told: false,
            handovers: HashMap::new(),
            alone_since: [None; BUCKETS],
            have_been_others: false,
            served: HashMap::new(),
            idle: HashSet::new(),
            claims: HashMap::new(),
            copies: Vec::new(),
            unserved_since: None,
            counted: None,
            refused: Vec::new(),
        };
        Self { engine_lock, rings, state: Mutex::new(state) }
    }

    /// Follows the table as long as the process lives.
    pub(crate) fn follow(&self) {
        self.state().filters = Some(self.await_filters());
        loop {
            let seen = self.engine_lock.changes();
            self.settle();
            self.adopt_passed();
            // Once there were others, what they have left is looked at until the end.
            let looks = {
                let state = self.state();
                state.have_been_others || !state.copies.is_empty() || !state.refused.is_empty()
            };
            self.engine_lock.await_change(seen, looks.then_some(OTHERS_LOOK));
        }
    }

    /// Waits until the engine has attached the filters.
    fn await_filters(&self) -> Vec<Vec<FilterInstruction>> {
        if let Some(filters) = self.rings.await_attached(ATTACHED_MAX) {
            return filters;
        }
        report!(
            "forebay: process {} receives nothing yet: its engine has attached no packet filter for 10 s; check that the \
             machine is not overloaded (uptime), and restart the program if this persists",
            process::id()
        );
        loop {
            if let Some(filters) = self.rings.await_attached(ATTACHED_MAX) {
                return filters;
            }
        }
    }

    /// Serves an address: this process takes a part of its new connections, all of them if no other one does.
    pub(crate) fn join(&self, address: impl Into<DividedAddress>) {
        self.join_by(address.into(), |shares, address| shares.join(address));
    }

    /// Joins an address with a UDP socket that is not used yet: this process takes the datagrams if no other one does.
    pub(crate) fn join_idle(&self, address: DividedAddress) {
        self.state().idle.insert(address);
        self.join_by(address, Shares::join_idle);
    }

    /// Takes a part of the datagrams to an address, as it uses its socket.
    pub(crate) fn begin_use(&self, address: DividedAddress) {
        self.state().idle.remove(&address);
        self.engine_lock.shares().begin_use(address);
        self.settle();
        self.engine_lock.notify_change();
    }

    /// True if another process uses a UDP socket at an address.
    pub(crate) fn has_other_users(&self, address: DividedAddress) -> bool {
        self.engine_lock.evict_dead();
        self.engine_lock.shares().has_other_users(address)
    }

    fn join_by(&self, address: DividedAddress, join: impl Fn(&Shares, DividedAddress)) {
        let mut state = self.state();
        let count = state.served.entry(address).or_default();
        *count += 1;
        if *count == 1 {
            join(self.engine_lock.shares(), address);
        }
        // Before: nobody else answers a SYN that the filters leave out.
        self.let_needed_pass(&mut state, self.engine_lock.shares().needed());
        self.engine_lock.shares().take_free();
        self.settle_alone(&mut state, Instant::now());
        drop(state);
        self.engine_lock.notify_change();
    }

    /// Ends one of the sockets at an address. Returns true if it was the last one, after which this process is to
    /// [`leave`](Self::leave), or to [`abandon`](Self::abandon) the address.
    pub(crate) fn close(&self, address: impl Into<DividedAddress>) -> bool {
        let address = address.into();
        let mut state = self.state();
        let Some(count) = state.served.get_mut(&address) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            state.served.remove(&address);
            state.idle.remove(&address);
            self.engine_lock.shares().leave(address);
        }
        is_last
    }

    /// Gives up what is new at an address, unless this process serves it anew.
    pub(crate) fn abandon(&self, address: impl Into<DividedAddress>) {
        let address = address.into();
        let (state, shares) = (self.state(), self.engine_lock.shares());
        if !state.served.contains_key(&address) && shares.owns_some(address) {
            shares.abandon(address);
            // Nobody takes the new connections until others look.
            if shares.others().next().is_some() {
                self.engine_lock.notify_change();
            }
        }
    }

    /// True if other processes serve an address.
    pub(crate) fn has_others(&self, listener: SocketAddr) -> bool {
        self.engine_lock.evict_dead();
        self.engine_lock.shares().has_other_members(listener)
    }

    /// Lets other processes take over the new connections of an address, if there are such, and the handshakes that
    /// have begun. If none serves it so far, but one has a copy of the listener, what has come waits for that: in the kernel
    /// a listener lives as long as a copy.
    pub(crate) fn leave(&self, listener: SocketAddr, closed: &dyn Closed) {
        let shares = self.engine_lock.shares();
        self.engine_lock.notify_change();
        let began = Instant::now();
        let (mut left, mut without_room, mut was_quiet) = (None, None, false);
        while !self.state().served.contains_key(&listener.into()) {
            let has_heir = self.has_others(listener);
            if !has_heir && !closed.is_open_elsewhere() {
                break;
            }
            // First: what has come before is passed on, too.
            let (is_last, owned) = (closed.is_stopped(), shares.owns_some(listener));
            let handshakes = closed.handshake_count();
            let passed = self.pass_all(without_room.take(), closed);
            without_room = passed.without_room;
            if !has_heir || began.elapsed() > LEAVE_MAX {
                self.abandon(listener);
            }
            // A handshake that has just ended is neither counted nor passed on, for a moment.
            let is_quiet = !owned && handshakes == 0 && passed.count == 0 && without_room.is_none();
            let is_late =
                !owned && left.get_or_insert_with(Instant::now).elapsed() > HANDSHAKES_MAX;
            if is_quiet && was_quiet || is_late || is_last {
                break;
            }
            was_quiet = is_quiet;
            thread::sleep(LEAVE_LOOK);
        }
        without_room.iter().for_each(|passed| self.reset(passed));
        self.abandon(listener);
    }

    /// Passes on connections, beginning with `first`.
    fn pass_all(&self, first: Option<PassedConnection>, closed: &dyn Closed) -> Passed {
        let mut count = 0;
        let mut passed = first.into_iter().chain(std::iter::from_fn(|| closed.pass_on()));
        let without_room = passed.find(|passed| {
            let is_put = self.engine_lock.mailbox().put(passed, 0);
            count += usize::from(is_put);
            !is_put
        });
        if count > 0 {
            self.engine_lock.notify_change();
        }
        Passed { count, without_room }
    }

    /// Becomes the owner of buckets, alone after a time, and lets their segments pass.
    fn settle(&self) {
        let (engine_lock, shares) = (&self.engine_lock, self.engine_lock.shares());
        if engine_lock.evict_dead() {
            engine_lock.notify_change();
        }
        let mut state = self.state();
        self.claim_free(&mut state);
        shares.enter_late(state.served.keys(), |address| state.idle.contains(address));
        self.let_needed_pass(&mut state, shares.needed());
        shares.take_free();
        let now = Instant::now();
        let mut handovers = HashMap::new();
        for handover in shares.take_shared() {
            let since = state.handovers.get(&handover).copied().unwrap_or(now);
            if now.duration_since(since) < OVERLAP {
                handovers.insert(handover, since);
            } else {
                shares.complete(handover);
            }
        }
        state.handovers = handovers;
        self.settle_alone(&mut state, now);
        shares.clear_unclaimed();
        let needed = shares.needed();
        if shares.others().next().is_some() && needed != !state.left_out {
            self.let_pass(&mut state, needed);
            // A flow may have been claimed since.
            self.let_needed_pass(&mut state, shares.needed());
        }
    }

    /// Finds the buckets that this process has owned alone for long.
    fn settle_alone(&self, state: &mut State, now: Instant) {
        let shares = self.engine_lock.shares();
        state.have_been_others |= shares.others().next().is_some();
        let owned = shares.owned_alone();
        let mut settled = 0;
        for (bucket, since) in state.alone_since.iter_mut().enumerate() {
            let is_owned = owned & 1 << bucket != 0;
            *since = is_owned.then(|| since.unwrap_or(now));
            let is_long = |since: Instant| now.duration_since(since) >= SETTLED;
            let is_settled = !state.have_been_others || since.is_some_and(is_long);
            settled |= u64::from(is_owned && is_settled) << bucket;
        }
        shares.set_settled(settled);
    }

    /// Widens the filters to these buckets, if they leave one out.
    fn let_needed_pass(&self, state: &mut State, needed: u64) {
        if state.left_out & needed != 0 {
            self.let_pass(state, needed);
        }
    }

    /// Sets the filters to pass these buckets, and no others.
    fn let_pass(&self, state: &mut State, buckets: u64) {
        let share = FlowShare { key: self.engine_lock.shares().key(), buckets };
        let Some(filters) = &state.filters else { return };
        let rings = || self.rings.0.iter().zip(filters);
        let attached =
            rings().try_for_each(|(ring, filter)| attach(ring.as_fd(), &share.narrow(filter)));
        let Err(error) = attached else {
            state.left_out = !buckets;
            return;
        };
        if !mem::replace(&mut state.is_failure_told, true) {
            report!(
                "forebay: process {} receives the packets of other processes of the program, too, as its filters cannot \
                 be changed: {error}; it loses time, but no connections: raise net.core.optmem_max",
                process::id()
            );
        }
        // As they were: one of them may leave out what this process needs.
        let narrow = rings().filter(|(ring, filter)| attach(ring.as_fd(), filter).is_err());
        if narrow.count() == 0 {
            (state.filters, state.left_out) = (None, 0);
        } else {
            // Tried again at each look.
            state.left_out = u64::MAX;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
