//! Tests of the division of new connections.

use std::cell::Cell;

use super::passed::{ATTEMPTS_MAX, HEIR_MAX, LATER_ATTEMPTS_MAX};
use super::*;
use crate::engine_lock::tests::Other;
use crate::listener::Copies;

fn listener() -> SocketAddr {
    "192.0.2.1:80".parse().unwrap()
}

fn membership() -> (Arc<EngineLock>, Membership) {
    let engine_lock = Arc::new(EngineLock::new().unwrap());
    engine_lock.enter(engine_lock.reserve().unwrap());
    let membership = Membership::new(Arc::clone(&engine_lock), Rings(Vec::new()));
    membership.join(listener());
    (engine_lock, membership)
}

/// Connection that is passed on, with so many bytes.
fn passed(bytes: usize) -> PassedConnection {
    let mut said = vec![0; 62 + bytes];
    said[46] = 8; // the path's MTU
    PassedConnection::of_bytes(&said).unwrap()
}

/// Closed listener with connections of so many bytes. All that is passed on is taken at each look.
struct Waiting<'a> {
    engine_lock: &'a EngineLock,
    count: Cell<usize>,
    bytes: usize,
    taken: Cell<usize>,
}

impl Waiting<'_> {
    fn take(&self) {
        let taken = std::iter::from_fn(|| self.engine_lock.mailbox().take()).count();
        self.taken.set(self.taken.get() + taken);
    }
}

impl Closed for Waiting<'_> {
    fn is_stopped(&self) -> bool {
        self.take();
        false
    }

    fn is_open_elsewhere(&self) -> bool {
        false
    }

    fn handshake_count(&self) -> u32 {
        0
    }

    fn pass_on(&self) -> Option<PassedConnection> {
        let left = self.count.get().checked_sub(1)?;
        self.count.set(left);
        Some(passed(self.bytes))
    }
}

#[test]
fn exe_8_passed_connections_await_room() {
    for (count, bytes) in [(400, 0), (12, 64 << 10)] {
        let (engine_lock, membership) = membership();
        let next = engine_lock.next();
        let _lives = Other::new(&engine_lock, 1).unwrap();
        next.shares().enter(1);
        next.shares().join(listener());
        assert!(membership.close(listener()) && membership.has_others(listener()));
        let (count_left, taken) = (Cell::new(count), Cell::new(0));
        let waiting = Waiting { engine_lock: &engine_lock, count: count_left, bytes, taken };
        // The other one takes the buckets over.
        engine_lock.shares().abandon(listener());
        membership.leave(listener(), &waiting);
        waiting.take();
        assert_eq!(waiting.taken.get(), count);
    }
}

#[test]
fn exe_8_refused_connections_await_room() {
    let (engine_lock, membership) = membership();
    let fills = (0..10_000).take_while(|_| engine_lock.mailbox().put(&passed(0), 0)).count();
    membership.state().refused = vec![(passed(1), 3), (passed(2), 4)];
    membership.leave_refused();
    assert_eq!(membership.state().refused.len(), 2, "kept");
    let take = || engine_lock.mailbox().take().map(|(_, attempts)| attempts);
    assert!(std::iter::from_fn(take).take(fills / 2).all(|attempts| attempts == 0));
    membership.leave_refused();
    assert!(membership.state().refused.is_empty());
    let left: Vec<_> = std::iter::from_fn(take).filter(|attempts| *attempts > 0).collect();
    assert_eq!(left, [3, 4]);
}

#[test]
fn exe_8_refused_connection_ends() {
    let (engine_lock, membership) = membership();
    assert!(engine_lock.mailbox().put(&passed(0), 0) && engine_lock.mailbox().put(&passed(1), 0));
    for _ in 0..ATTEMPTS_MAX {
        membership.state().counted = Some(Instant::now());
        membership.adopt_passed(); // of a change: no attempt
        membership.state().counted = None;
        membership.adopt_passed();
    }
    let left = std::iter::from_fn(|| engine_lock.mailbox().take()).map(|(_, attempts)| attempts);
    let left: Vec<_> = left.map(usize::from).collect();
    assert_eq!(left, [ATTEMPTS_MAX; 2], "neither delays the other");
    let attempts = u16::try_from(ATTEMPTS_MAX).unwrap();
    assert!(engine_lock.mailbox().put(&passed(0), attempts));
    assert!(membership.close(listener()));
    membership.adopt_passed();
    assert!(engine_lock.mailbox().take().is_none(), "nobody serves any address");
}

/// A process that has a copy of the listener may serve it.
#[test]
fn exe_8_passed_connection_awaits_copy() {
    let (engine_lock, membership) = membership();
    assert!(membership.close(listener()));
    let (own, childs) = (Copies::new().unwrap(), Copies::new().unwrap());
    membership.note_copies(own.close_own());
    let attempts = u16::try_from(ATTEMPTS_MAX).unwrap();
    assert!(engine_lock.mailbox().put(&passed(0), attempts));
    membership.adopt_passed();
    assert!(engine_lock.mailbox().take().is_none(), "the last copy was closed");
    membership.note_copies(childs.others());
    assert!(engine_lock.mailbox().put(&passed(0), attempts));
    membership.adopt_passed();
    membership.end();
    let (passed, _) = engine_lock.mailbox().take().expect("the child may serve it");
    assert_eq!(membership.attempts_max(listener()), LATER_ATTEMPTS_MAX);
    assert!(engine_lock.mailbox().put(&passed, attempts));
    membership.state().unserved_since = Instant::now().checked_sub(HEIR_MAX);
    membership.adopt_passed();
    assert!(engine_lock.mailbox().take().is_none(), "it does not");
    assert!(engine_lock.mailbox().put(&passed, 0));
    drop(childs);
    membership.end();
    assert!(engine_lock.mailbox().take().is_none(), "nobody is left");
}

#[test]
fn exe_8_abandoned_buckets_are_told() {
    let (engine_lock, membership) = membership();
    assert!(membership.close(listener()));
    let changes = engine_lock.changes();
    membership.abandon(listener());
    assert_eq!(engine_lock.changes(), changes, "it is alone");
    membership.join(listener());
    engine_lock.next().shares().enter(1);
    assert!(membership.close(listener()));
    let changes = engine_lock.changes();
    membership.abandon(listener());
    membership.abandon(listener());
    assert_eq!(engine_lock.changes(), changes + 1);
}

#[test]
fn exe_8_filters_pass_what_is_joined() {
    let (engine_lock, membership) = membership();
    let mut state = membership.state();
    state.filters = Some(Vec::new());
    membership.let_pass(&mut state, 0);
    assert_eq!(state.left_out, u64::MAX);
    drop(state);
    membership.join("192.0.2.1:81".parse::<SocketAddr>().unwrap());
    assert_eq!((membership.state().left_out, engine_lock.shares().needed()), (0, u64::MAX));
}

#[test]
fn exe_8_reopened_listener_keeps_its_part() {
    let engine_lock = Arc::new(EngineLock::new().unwrap());
    engine_lock.enter(engine_lock.reserve().unwrap());
    let membership = Membership::new(Arc::clone(&engine_lock), Rings(Vec::new()));
    let listener: SocketAddr = "192.0.2.1:80".parse().unwrap();
    membership.join(listener);
    assert!(engine_lock.shares().owns_some(listener));
    assert!(membership.close(listener), "the last one");
    membership.join(listener);
    // A thread that still had the closed one lets go of it.
    membership.abandon(listener);
    assert!(engine_lock.shares().owns_some(listener), "of the new one");
    membership.join(listener);
    assert!(!membership.close(listener), "one is left");
    assert!(membership.close(listener));
    membership.abandon(listener);
    assert!(!engine_lock.shares().owns_some(listener));
}
