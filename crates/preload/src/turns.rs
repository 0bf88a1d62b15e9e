//! Division of new connections among the processes that serve the same listeners: a thread of each follows the table
//! of [`shares`](crate::shares), and lets its part of the packets pass to this process.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{process, thread};

use forebay::Device;
use forebay_device::rx_filter::{BUCKETS, FlowShare, nothing};
use forebay_stack::tcp::PassedConnection;
use forebay_sys::socket_filter::{FilterInstruction, attach, attached};

use crate::claim::Claim;
use crate::shares::Handover;
use crate::{passing, protected};

/// Time between two checks of whether the devices' filters are attached, and the number of checks: 10 s.
const ATTACHED_LOOK: Duration = Duration::from_millis(1);
const ATTACHED_LOOKS_MAX: u32 = 10_000;

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

/// Looks of each process at a connection that none can go on with, 100 ms apart, before that is reset.
const ATTEMPTS_MAX: usize = 8;

/// Longest wait for handshakes that have begun at a closed listener.
const HANDSHAKES_MAX: Duration = Duration::from_secs(1);

/// Sockets that the packets of an engine come from.
pub(crate) struct Rings(Vec<OwnedFd>);

/// Part of this process in the new connections.
pub(crate) struct Turns {
    claim: Arc<Claim>,
    rings: Rings,
    state: Mutex<State>,
}

struct State {
    /// Filters that the engine has attached, which let all buckets pass.
    filters: Option<Vec<Vec<FilterInstruction>>>,
    /// Buckets that the filters leave out now.
    left_out: u64,
    /// Handovers to this process, since when.
    handovers: HashMap<Handover, Instant>,
    /// Time since when each bucket is owned alone, unless there never were other processes.
    alone_since: [Option<Instant>; BUCKETS],
    have_been_others: bool,
    /// Listeners of this process at each address.
    served: HashMap<SocketAddr, usize>,
}

impl Rings {
    /// Sockets of the devices.
    pub(crate) fn of(devices: &[Device]) -> io::Result<Self> {
        let sources = devices.iter().flat_map(|device| &device.sources);
        let sockets = sources.filter_map(|source| source.descriptor());
        let rings = sockets.map(protected::duplicate).collect::<Result<Vec<_>, _>>()?;
        rings.iter().for_each(|ring| protected::protect(ring.as_fd()));
        Ok(Self(rings))
    }

    /// Filters of all, once they are attached.
    fn filters(&self) -> Option<Vec<Vec<FilterInstruction>>> {
        let filters = self.0.iter().map(|ring| attached(ring.as_fd()).ok());
        let filters: Vec<_> = filters.collect::<Option<_>>()?;
        filters.iter().all(|filter| *filter != nothing()).then_some(filters)
    }
}

impl Turns {
    pub(crate) fn new(claim: Arc<Claim>, rings: Rings) -> Self {
        let state = State {
            filters: None,
            left_out: 0,
            handovers: HashMap::new(),
            alone_since: [None; BUCKETS],
            have_been_others: false,
            served: HashMap::new(),
        };
        Self { claim, rings, state: Mutex::new(state) }
    }

    /// Follows the table as long as the process lives.
    pub(crate) fn follow(&self) {
        let looks = || {
            thread::sleep(ATTACHED_LOOK);
            self.rings.filters()
        };
        let Some(filters) = (0..ATTACHED_LOOKS_MAX).find_map(|_| looks()) else {
            return eprintln!(
                "forebay: process {} takes no part in what other processes of the program receive, as its engine \
                 attached no filters for 10 s: start it again, with less load on the machine",
                process::id()
            );
        };
        self.state().filters = Some(filters);
        loop {
            let seen = self.claim.changes();
            self.settle();
            self.adopt_passed();
            // Once there were others, what they have left is looked at until the end.
            let looks = self.state().have_been_others;
            self.claim.await_change(seen, looks.then_some(OTHERS_LOOK));
        }
    }

    /// Serves an address: this process takes a part of its new connections, all of them if no other one does.
    pub(crate) fn join(&self, listener: SocketAddr) {
        let mut state = self.state();
        let count = state.served.entry(listener).or_default();
        *count += 1;
        if *count == 1 {
            self.claim.shares().join(listener);
        }
        // Before: nobody else answers a SYN that the filters leave out.
        self.let_needed_pass(&mut state, self.claim.shares().needed());
        self.claim.shares().take_free();
        self.settle_alone(&mut state, Instant::now());
        drop(state);
        self.claim.tell_change();
    }

    /// Ends one of the listeners at an address. Returns true if it was the last one, after which this process is to
    /// [`leave`](Self::leave).
    pub(crate) fn close(&self, listener: SocketAddr) -> bool {
        let mut state = self.state();
        let Some(count) = state.served.get_mut(&listener) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            state.served.remove(&listener);
            self.claim.shares().leave(listener);
        }
        is_last
    }

    /// Gives up the new connections of an address, unless this process serves it anew.
    pub(crate) fn abandon(&self, listener: SocketAddr) {
        let (state, shares) = (self.state(), self.claim.shares());
        if !state.served.contains_key(&listener) && shares.owns_some(listener) {
            shares.abandon(listener);
            // Nobody takes the new connections until others look.
            if shares.others().next().is_some() {
                self.claim.tell_change();
            }
        }
    }

    /// True if other processes serve an address.
    pub(crate) fn has_others(&self, listener: SocketAddr) -> bool {
        self.claim.evict_dead();
        self.claim.shares().has_other_members(listener)
    }

    /// Lets other processes take over the new connections of an address, if there are such, and the handshakes that
    /// have begun, until `is_stopped`. Meanwhile `pass_on` is called, which returns a connection for them.
    pub(crate) fn leave(
        &self,
        listener: SocketAddr,
        is_stopped: &dyn Fn() -> bool,
        pass_on: &dyn Fn() -> Option<PassedConnection>,
    ) {
        let shares = self.claim.shares();
        self.claim.tell_change();
        let began = Instant::now();
        let (mut left, mut without_room) = (None, None);
        while self.has_others(listener) && !self.state().served.contains_key(&listener) {
            // First: what has come before is passed on, too.
            let is_last = is_stopped();
            without_room = self.pass_all(without_room, pass_on);
            if began.elapsed() > LEAVE_MAX {
                self.abandon(listener);
            }
            let is_over = !shares.owns_some(listener)
                && left.get_or_insert_with(Instant::now).elapsed() > HANDSHAKES_MAX;
            if is_over || is_last {
                break;
            }
            thread::sleep(LEAVE_LOOK);
        }
        without_room.iter().for_each(passing::reset);
        self.abandon(listener);
    }

    /// Passes on connections, beginning with `first`. Returns the one for which there is no room.
    fn pass_all(
        &self,
        first: Option<PassedConnection>,
        pass_on: &dyn Fn() -> Option<PassedConnection>,
    ) -> Option<PassedConnection> {
        let mut is_some = false;
        let mut passed = first.into_iter().chain(std::iter::from_fn(pass_on));
        let without_room = passed.find(|passed| {
            let is_left = self.claim.mailbox().leave(passed, 0);
            is_some |= is_left;
            !is_left
        });
        if is_some {
            self.claim.tell_change();
        }
        without_room
    }

    /// Goes on with connections that others have passed on.
    fn adopt_passed(&self) {
        let (mailbox, shares) = (self.claim.mailbox(), self.claim.shares());
        // Without any process that serves an address each one may find that.
        let is_its = || !self.state().served.is_empty() || !shares.are_some_served();
        let mut refused = Vec::new();
        while is_its()
            && let Some((passed, attempts)) = mailbox.take()
        {
            let bucket = shares.bucket_bit(passed.flow());
            self.let_needed_pass(&mut self.state(), shares.needed() | bucket);
            if !passing::adopt(&passed) {
                refused.push((passed, attempts));
            }
        }
        let processes = 1 + shares.others().count();
        for (passed, attempts) in refused {
            let is_last = usize::from(attempts) >= ATTEMPTS_MAX * processes;
            // Another process serves the address, or has room, and is told at its next look.
            if is_last || !mailbox.leave(&passed, attempts + 1) {
                passing::reset(&passed);
            }
        }
    }

    /// Becomes the owner of buckets, alone after a time, and lets their segments pass.
    fn settle(&self) {
        let (claim, shares) = (&self.claim, self.claim.shares());
        if claim.evict_dead() {
            claim.tell_change();
        }
        let mut state = self.state();
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
        shares.tell_unclaimed();
        let has_others = shares.others().next().is_some();
        let needed = shares.needed();
        if has_others && needed != !state.left_out {
            self.let_pass(&mut state, needed);
        }
    }

    /// Finds the buckets that this process has owned alone for long.
    fn settle_alone(&self, state: &mut State, now: Instant) {
        let shares = self.claim.shares();
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

    /// Has the filters let these buckets pass, if they leave out one of them.
    fn let_needed_pass(&self, state: &mut State, needed: u64) {
        if state.left_out & needed != 0 {
            self.let_pass(state, needed);
        }
    }

    /// Has the filters let these buckets pass, and no others.
    fn let_pass(&self, state: &mut State, buckets: u64) {
        let share = FlowShare { key: self.claim.shares().key(), buckets };
        let Some(filters) = &state.filters else { return };
        let rings = || self.rings.0.iter().zip(filters);
        let attached =
            rings().try_for_each(|(ring, filter)| attach(ring.as_fd(), &share.narrow(filter)));
        if let Err(error) = &attached {
            eprintln!(
                "forebay: process {} receives the packets of other processes of the program, too, as its filters cannot \
                 be changed: {error}; it loses time, but no connections: raise net.core.optmem_max",
                process::id()
            );
            // As they were: one of them may leave out what this process needs.
            let _ = rings().try_for_each(|(ring, filter)| attach(ring.as_fd(), filter));
            state.filters = None;
        }
        state.left_out = if attached.is_ok() { !buckets } else { 0 };
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::claim::tests::Other;

    fn listener() -> SocketAddr {
        "192.0.2.1:80".parse().unwrap()
    }

    fn turns() -> (Arc<Claim>, Turns) {
        let claim = Arc::new(Claim::new().unwrap());
        assert!(claim.enter());
        let turns = Turns::new(Arc::clone(&claim), Rings(Vec::new()));
        turns.join(listener());
        (claim, turns)
    }

    /// Connection that is passed on, with so many bytes.
    fn passed(bytes: usize) -> PassedConnection {
        PassedConnection::of_bytes(&vec![0; 62 + bytes]).unwrap()
    }

    #[test]
    fn exe_8_passed_connections_await_room() {
        for (count, bytes) in [(400, 0), (12, 64 << 10)] {
            let (claim, turns) = turns();
            let next = claim.next();
            let _lives = Other::new(&claim, 1).unwrap();
            next.shares().enter(1);
            next.shares().join(listener());
            assert!(turns.close(listener()) && turns.has_others(listener()));
            let (waiting, taken) = (Cell::new(count), Cell::new(0));
            let pass_on = || {
                let count = waiting.get();
                waiting.set(i32::max(count - 1, 0));
                (count > 0).then(|| passed(bytes))
            };
            // Called at each look.
            let is_stopped = || {
                let takes = std::iter::from_fn(|| claim.mailbox().take());
                taken.set(taken.get() + takes.count());
                waiting.get() == 0
            };
            turns.leave(listener(), &is_stopped, &pass_on);
            taken.set(taken.get() + std::iter::from_fn(|| claim.mailbox().take()).count());
            assert_eq!(taken.get(), usize::try_from(count).unwrap());
        }
    }

    #[test]
    fn exe_8_refused_connection_ends() {
        let (claim, turns) = turns();
        assert!(claim.mailbox().leave(&passed(0), 0) && claim.mailbox().leave(&passed(1), 0));
        for _ in 0..ATTEMPTS_MAX {
            turns.adopt_passed();
        }
        let left = std::iter::from_fn(|| claim.mailbox().take()).map(|(_, attempts)| attempts);
        let left: Vec<_> = left.map(usize::from).collect();
        assert_eq!(left, [ATTEMPTS_MAX; 2], "neither delays the other");
        let attempts = u16::try_from(ATTEMPTS_MAX).unwrap();
        assert!(claim.mailbox().leave(&passed(0), attempts));
        assert!(turns.close(listener()));
        turns.adopt_passed();
        assert!(claim.mailbox().take().is_none(), "nobody serves any address");
    }

    #[test]
    fn exe_8_abandoned_buckets_are_told() {
        let (claim, turns) = turns();
        assert!(turns.close(listener()));
        let changes = claim.changes();
        turns.abandon(listener());
        assert_eq!(claim.changes(), changes, "it is alone");
        turns.join(listener());
        claim.next().shares().enter(1);
        assert!(turns.close(listener()));
        let changes = claim.changes();
        turns.abandon(listener());
        turns.abandon(listener());
        assert_eq!(claim.changes(), changes + 1);
    }

    #[test]
    fn exe_8_filters_pass_what_is_joined() {
        let (claim, turns) = turns();
        let mut state = turns.state();
        state.filters = Some(Vec::new());
        turns.let_pass(&mut state, 0);
        assert_eq!(state.left_out, u64::MAX);
        drop(state);
        turns.join("192.0.2.1:81".parse().unwrap());
        assert_eq!((turns.state().left_out, claim.shares().needed()), (0, u64::MAX));
    }

    #[test]
    fn exe_8_reopened_listener_keeps_its_part() {
        let claim = Arc::new(Claim::new().unwrap());
        assert!(claim.enter());
        let turns = Turns::new(Arc::clone(&claim), Rings(Vec::new()));
        let listener: SocketAddr = "192.0.2.1:80".parse().unwrap();
        turns.join(listener);
        assert!(claim.shares().owns_some(listener));
        assert!(turns.close(listener), "the last one");
        turns.join(listener);
        // A thread that still had the closed one lets go of it.
        turns.abandon(listener);
        assert!(claim.shares().owns_some(listener), "of the new one");
        turns.join(listener);
        assert!(!turns.close(listener), "one is left");
        assert!(turns.close(listener));
        turns.abandon(listener);
        assert!(!claim.shares().owns_some(listener));
    }
}
