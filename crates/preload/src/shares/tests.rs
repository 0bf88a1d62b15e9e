//! Tests of the table that processes share.

use std::os::fd::AsFd;
use std::sync::Barrier;
use std::thread;

use forebay_stack::Division;
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

const LISTENER: &str = "192.0.2.1:80";
const SYN: u32 = 7;

fn table() -> SharedTable {
    let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    SharedTable::new(file.as_fd()).unwrap()
}

fn process(table: SharedTable, slot: usize) -> Shares {
    let shares = Shares::new(table);
    shares.enter(slot);
    shares.set_settled(u64::MAX);
    shares
}

fn flow(port: u16) -> Flow {
    let theirs = SocketAddr::new([192, 0, 2, 9].into(), port);
    Flow { ours: LISTENER.parse::<SocketAddr>().unwrap(), theirs }
}

fn takes(shares: &Shares, flow: &Flow) -> bool {
    shares.takes(flow.ours, flow)
}

fn answers(shares: &Shares, flow: &Flow) -> bool {
    shares.answers(flow.ours, flow)
}

/// Step of a process, in the model of one SYN that comes while the owner of its bucket changes from process 0 to 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Check of a process whether it takes the SYN.
    Look(usize),
    /// Claim of the flow, if so.
    Claim(usize),
    TakeShared,
    Complete,
}

const STEPS: [Step; 6] = [
    Step::Look(0),
    Step::Claim(0),
    Step::Look(1),
    Step::Claim(1),
    Step::TakeShared,
    Step::Complete,
];

/// All orders of the steps in which each process looks before it claims, and none is later by a whole handover.
fn orders() -> Vec<Vec<Step>> {
    let mut orders = vec![Vec::new()];
    for _ in STEPS {
        orders = orders
            .iter()
            .flat_map(|order: &Vec<Step>| {
                let left = STEPS.into_iter().filter(|step| !order.contains(step));
                left.map(|step| [&order[..], &[step]].concat())
            })
            .collect();
    }
    let at = |order: &[Step], step| order.iter().position(|other| *other == step).unwrap();
    orders.retain(|order| {
        let [look_0, claim_0, look_1, claim_1, shared, alone] = STEPS.map(|step| at(order, step));
        let is_late = look_0.min(look_1) < shared && look_0.max(look_1) > alone;
        look_0 < claim_0 && look_1 < claim_1 && shared < alone && !is_late
    });
    orders
}

/// Runs the steps with two new processes. Returns these, and which of them answer the SYN.
fn run(table: SharedTable, order: &[Step], flow: &Flow, leaves: bool) -> ([Shares; 2], [bool; 2]) {
    let of = [0, 1].map(|slot| process(table, slot));
    of[0].join(flow.ours);
    of[0].take_free();
    of[1].join(flow.ours);
    if leaves {
        of[0].leave(flow.ours);
    }
    let (mut looked, mut answered) = ([false; 2], [false; 2]);
    for step in order {
        match *step {
            Step::Look(process) => looked[process] = takes(&of[process], flow),
            Step::Claim(process) => {
                answered[process] = looked[process] && of[process].claim(flow, SYN);
            }
            Step::TakeShared => drop(of[1].take_shared()),
            Step::Complete => of[1].take_shared().into_iter().for_each(|it| of[1].complete(it)),
        }
    }
    (of, answered)
}

#[test]
fn exe_8_syn_is_answered_once() {
    let (table, orders) = (table(), orders());
    assert!(orders.len() > 40, "{}", orders.len());
    for leaves in [false, true] {
        // Of a bucket that the second process is to own.
        let heir_of = |flow: &Flow| Shares::new(table).bucket_of(flow) % 2;
        assert!((1..100).any(|port| heir_of(&flow(port)) == 1));
        for order in &orders {
            for port in 1..5 {
                let flow = flow(port);
                let (of, answered) = run(table, order, &flow, leaves);
                let is_handed = leaves || of[0].bucket_of(&flow) % 2 == 1;
                let count = answered.iter().filter(|answered| **answered).count();
                assert_eq!(count, 1, "{order:?} {is_handed}");
                let (holder, other) = if answered[0] { (0, 1) } else { (1, 0) };
                // The SYN again, and any other segment: the holder's alone.
                assert!(!(takes(&of[other], &flow) && of[other].claim(&flow, SYN)), "{order:?}");
                assert!(!answers(&of[0], &flow) && !answers(&of[1], &flow));
                of[other].evict(holder);
                of[other].join(flow.ours);
                of[other].take_free();
                assert!(answers(&of[other], &flow), "killed: {order:?}");
                assert!(takes(&of[other], &flow) && of[other].claim(&flow, SYN));
                of[holder].evict(other);
            }
        }
    }
}

#[test]
fn exe_8_flow_is_claimed_once() {
    let table = table();
    let of = [0, 1].map(|slot| process(table, slot));
    let start = Barrier::new(2);
    let claim = |shares: &Shares| {
        start.wait();
        let claims: Vec<bool> = (1..20_000).map(|port| shares.claim(&flow(port), SYN)).collect();
        claims
    };
    let claims = thread::scope(|scope| {
        let threads = [&of[0], &of[1]].map(|shares| scope.spawn(|| claim(shares)));
        threads.map(|thread| thread.join().unwrap())
    });
    let both = claims[0].iter().zip(&claims[1]).filter(|(one, other)| **one && **other);
    assert_eq!(both.count(), 0);
    // Both give way in a race of two places. The SYN comes again, and is answered once.
    for (port, (one, other)) in (1..).zip(claims[0].iter().zip(&claims[1])) {
        let again = [0, 1].map(|process: usize| of[process].claim(&flow(port), SYN));
        let expected = if *one || *other { [*one, *other] } else { [true, false] };
        assert_eq!(again, expected, "port {port}");
    }
}

#[test]
fn exe_8_ended_flow_is_the_next_owners() {
    let table = table();
    let of = [0, 1].map(|slot| process(table, slot));
    let flow = flow(1);
    assert!(of[0].claim(&flow, SYN) && of[0].claim(&flow, SYN) && !of[1].claim(&flow, SYN));
    assert_eq!(of[0].needed(), of[0].bucket_bit(&flow), "it has a connection");
    of[0].mark_ended(&flow);
    assert!(!of[1].claim(&flow, SYN), "a late copy of the SYN");
    assert!(of[1].claim(&flow, SYN + 1) && !of[0].claim(&flow, SYN));
    of[0].release(&flow);
    assert!(!of[0].claim(&flow, SYN), "it was another's by then");
    assert_eq!(of.each_ref().map(Shares::needed), [0, of[1].bucket_bit(&flow)]);
    of[1].pass_on(&flow);
    assert!(!of[0].claim(&flow, SYN), "nobody's SYN");
    assert!(of[0].adopt(&flow, SYN + 1) && !of[1].adopt(&flow, SYN + 1));
    of[0].release(&flow);
    assert!(of[1].claim(&flow, SYN));
}

#[test]
fn exe_8_buckets_are_divided_evenly() {
    let table = table();
    let of = [0, 1, 2].map(|slot| process(table, slot));
    let listener: SocketAddr = LISTENER.parse::<SocketAddr>().unwrap();
    let count = |shares: &Shares| (1..10_000).filter(|port| answers(shares, &flow(*port))).count();
    for (members, expected) in [(1, 9999), (2, 5000), (3, 3333)] {
        of[members - 1].join(listener);
        for shares in of.iter().chain(&of).chain(&of) {
            shares.take_free();
            shares.take_shared().into_iter().for_each(|handover| shares.complete(handover));
        }
        let counts = of.each_ref().map(count);
        assert_eq!(counts.iter().sum::<usize>(), 9999);
        let is_even = |count: &usize| count.abs_diff(expected) < expected / 10;
        assert!(counts[..members].iter().all(is_even), "{counts:?}");
    }
    assert!(of[0].has_other_members(listener));
    of[2].evict(0);
    of[2].evict(1);
    of[2].take_free();
    assert!(!of[2].has_other_members(listener));
    assert_eq!(count(&of[2]), 9999);
    assert_eq!(of[2].needed(), u64::MAX);
}

#[test]
fn exe_8_killed_processes_flows_are_answered() {
    let table = table();
    let of = [0, 1, 2].map(|slot| process(table, slot));
    let alike =
        |one: &u16, other: &u16| of[0].bucket_of(&flow(*one)) == of[0].bucket_of(&flow(*other));
    let other = (2..).find(|other| alike(&1, other)).unwrap();
    assert!(of[0].claim(&flow(1), SYN) && of[1].claim(&flow(other), SYN));
    of[2].join(LISTENER.parse::<SocketAddr>().unwrap());
    of[2].take_free();
    assert!(!answers(&of[2], &flow(1)) && !answers(&of[2], &flow(other)));
    of[2].evict(0);
    assert!(answers(&of[2], &flow(1)), "another process has connections in the bucket");
    assert!(!answers(&of[2], &flow(other)), "it is one of them");
}

#[test]
fn exe_8_passed_flow_outlives_its_process() {
    let table = table();
    let of = [0, 1, 2].map(|slot| process(table, slot));
    of[2].join(LISTENER.parse::<SocketAddr>().unwrap());
    of[2].take_free();
    assert!(of[0].claim(&flow(1), SYN));
    of[0].pass_on(&flow(1));
    of[2].evict(0);
    assert!(!answers(&of[2], &flow(1)), "it is on its way");
    assert!(of[1].adopt(&flow(1), SYN));
    of[1].pass_on(&flow(1));
    assert_eq!(of[1].needed(), 0);
    of[1].release(&flow(1));
    assert!(answers(&of[2], &flow(1)), "nobody went on with it");
}

#[test]
fn exe_8_listener_at_address_comes_first() {
    let table = table();
    let of = [0, 1].map(|slot| process(table, slot));
    let any: SocketAddr = "0.0.0.0:80".parse().unwrap();
    of[0].join(any);
    of[0].take_free();
    assert!(of[0].takes(any, &flow(1)) && of[0].answers(any, &flow(1)));
    of[1].join(LISTENER.parse::<SocketAddr>().unwrap());
    of[1].take_free();
    let elsewhere = Flow { ours: "192.0.2.2:80".parse().unwrap(), ..flow(1) };
    for (flow, is_first) in [(flow(1), false), (elsewhere, true)] {
        assert_eq!((of[0].takes(any, &flow), of[0].answers(any, &flow)), (is_first, is_first));
    }
    assert!(takes(&of[1], &flow(1)) && answers(&of[1], &flow(1)));
    of[1].leave(LISTENER.parse::<SocketAddr>().unwrap());
    assert!(of[0].takes(any, &flow(1)), "the other is closed");
}

#[test]
fn exe_8_flows_without_room_are_left_alone() {
    let table = table();
    let of = [0, 1].map(|slot| process(table, slot));
    let flows = (0..5).flat_map(|host| {
        (1..=60_000)
            .map(move |port| Flow { theirs: ([198, 51, 100, host], port).into(), ..flow(1) })
    });
    let flows: Vec<_> = flows.collect();
    assert!(flows.iter().all(|flow| of[0].claim(flow, SYN)));
    of[1].join(LISTENER.parse::<SocketAddr>().unwrap());
    of[1].take_free();
    of[0].clear_unclaimed();
    assert!(!flows.iter().any(|flow| answers(&of[1], flow)), "some have no words");
    flows.iter().for_each(|flow| of[0].release(flow));
    of[0].clear_unclaimed();
    assert!(flows.iter().all(|flow| answers(&of[1], flow)));
}

#[test]
fn exe_8_full_table_leaves_connections_to_one() {
    let table = table();
    let of = [0, 1, 2].map(|slot| process(table, slot));
    for port in 1..=u16::try_from(ROWS).unwrap() {
        of[0].join(SocketAddr::new([192, 0, 2, 1].into(), port));
    }
    of[0].take_free();
    let [last, other] = [9999, 9998].map(|port| ([192, 0, 2, 1], port).into());
    of[1].join(last);
    assert!(!of[1].has_other_members(last));
    of[2].join(last);
    assert!(of[1].has_other_members(last) && of[2].has_other_members(last));
    of[1].take_free();
    assert_eq!(of.each_ref().map(Shares::needed), [u64::MAX; 3], "the filters let it pass");
    assert_eq!(of.each_ref().map(Shares::owned_alone), [u64::MAX; 3], "and it settles");
    let count = |shares: &Shares, syn: u32| {
        let flow = |port: u16| Flow { ours: last, ..flow(port) };
        (1..100)
            .filter(|port| takes(shares, &flow(*port)) && shares.claim(&flow(*port), syn))
            .count()
    };
    assert_eq!([&of[1], &of[2]].map(|shares| count(shares, SYN)), [99, 0], "claimed once");
    let stray = Flow { ours: last, ..flow(1000) };
    assert_eq!(of.each_ref().map(|shares| answers(shares, &stray)), [false, true, false]);
    of[2].evict(1);
    assert_eq!(count(&of[2], SYN + 1), 99, "of a process that has ended");
    assert!(answers(&of[2], &stray));
    of[2].join(other);
    of[2].leave(last);
    assert!(of[2].needed() == u64::MAX && of[2].any_served());
    of[2].leave(other);
    of[0].evict(2);
    assert!(of[2].needed() != u64::MAX, "{:x}", of[2].needed());
}

#[test]
fn exe_8_unused_rows_have_other_addresses() {
    let table = table();
    let of = [0, 1, 2].map(|slot| process(table, slot));
    let at = |port| DividedAddress::OfDatagrams(([192, 0, 2, 1], port).into());
    for port in 1..2000 {
        of[usize::from(port % 2)].join(at(port));
        of.iter().for_each(Shares::take_free);
        of[usize::from(port % 2)].leave(at(port));
    }
    assert!(of.iter().all(|process| process.needed() == 0), "of rows that nobody serves");
    let listener = |port| SocketAddr::from(([192, 0, 2, 1], port));
    // Of sockets that stay some have no rows, and listeners have some.
    (5000..5500).for_each(|port| of[2].join(at(port)));
    assert!(of[2].is_rowless());
    (1..40).for_each(|port| of[0].join(listener(port)));
    assert!(!of[0].is_rowless());
    of[0].take_free();
    of[0].leave(listener(1));
    of[1].take_free();
    (40..=100).for_each(|port| of[0].join(listener(port)));
    assert!(of[0].is_rowless() && of[0].owns_some(listener(1)), "nobody else takes over");
    (5000..5500).for_each(|port| of[2].leave(at(port)));
    assert!(!of[2].is_rowless());
    of[1].join(listener(100));
    assert!(!of[1].is_rowless(), "the other process has no row there");
    let flow = Flow { ours: listener(100), ..flow(1) };
    of[1].take_free();
    assert!(!takes(&of[0], &flow) && takes(&of[1], &flow));
    let served: Vec<_> = (40..=100).map(|port| DividedAddress::from(listener(port))).collect();
    of[0].enter_late(served.iter(), |_| false);
    assert!(!of[0].is_rowless());
    of[1].leave(listener(100));
    of[0].take_shared();
    assert!(takes(&of[0], &flow), "the only one that serves it");
    (40..=100).for_each(|port| of[0].leave(listener(port)));
    assert!(!of[0].is_rowless());
}

#[test]
fn exe_8_killed_process_leaves_rows_usable() {
    let table = table();
    let of = [0, 1].map(|slot| process(table, slot));
    std::mem::forget(LockedRows::lock(table, 0).unwrap());
    of[1].join(flow(1).ours);
    assert!(of[1].is_rowless(), "it may go on with them");
    of[1].evict(0);
    of[1].enter_late([DividedAddress::from(flow(1).ours)].iter(), |_| false);
    of[1].take_free();
    assert!(!of[1].is_rowless() && of[1].owns_some(flow(1).ours));
}

#[test]
fn exe_8_idle_socket_enters_late_and_idle() {
    let table = table();
    let of = [0, 1].map(|slot| process(table, slot));
    let address = DividedAddress::OfDatagrams(LISTENER.parse().unwrap());
    let rows = LockedRows::lock(table, 1).unwrap();
    of[0].join_idle(address);
    drop(rows);
    assert!(of[0].is_rowless());
    join_datagrams(&of[1], LISTENER);
    of[0].enter_late([address].iter(), |_| true);
    assert!(!of[0].is_rowless() && of[0].take_shared().is_empty());
    assert!(takers(&of).iter().all(|takers| takers == &[1]), "the other one reads");
}

#[test]
fn exe_8_flow_without_room_stays_told() {
    let of = process(table(), 0);
    let word = &of.table.0[UNCLAIMED];
    let bit = of.bucket_bit(&flow(1));
    of.held[of.bucket_of(&flow(1))].store(1, SeqCst);
    word.store(u64::MAX, SeqCst);
    // Another thread has claimed it since these were looked at.
    of.clear_marks_except(0, 0);
    assert_eq!(word.load(SeqCst), bit);
}

const ADDRESSES: [&str; 2] = ["0.0.0.0:80", LISTENER];

/// Processes that take the datagrams of each flow.
fn takers(of: &[Shares]) -> Vec<Vec<usize>> {
    let takers = |port| {
        let takes = |process: &usize| of[*process].takes_datagrams(&flow(port));
        (0..of.len()).filter(takes).collect()
    };
    (1..500).map(takers).collect()
}

fn each_has_one(of: &[Shares]) {
    let takers = takers(of);
    assert!(takers.iter().all(|takers| takers.len() == 1), "{takers:?}");
}

fn join_datagrams(process: &Shares, address: &str) {
    let address = DividedAddress::OfDatagrams(address.parse().unwrap());
    process.join_idle(address);
    process.take_free();
    process.begin_use(address);
}

#[test]
fn exe_8_datagram_has_one_taker() {
    for at in ADDRESSES {
        let table = table();
        let of: Vec<_> = (0..3).map(|slot| process(table, slot)).collect();
        let refusers = |port| of.iter().filter(|it| it.refuses_datagrams(&flow(port))).count();
        assert!((1..500).all(|port| refusers(port) == 1), "nobody has a socket there");
        for process in &of {
            join_datagrams(process, at);
            each_has_one(&of);
            for other in &of {
                let handovers = other.take_shared();
                each_has_one(&of);
                handovers.into_iter().for_each(|handover| other.complete(handover));
                each_has_one(&of);
            }
        }
        assert!((1..500).all(|port| refusers(port) == 0));
        let of_each = |process| takers(&of).iter().filter(|takers| **takers == [process]).count();
        assert!((0..3).all(|process| of_each(process) > 100), "each has a part");
    }
}

#[test]
fn exe_8_specific_address_has_its_datagrams() {
    let table = table();
    let of: Vec<_> = (0..2).map(|slot| process(table, slot)).collect();
    for (process, at) in of.iter().zip(ADDRESSES) {
        join_datagrams(process, at);
    }
    assert!(takers(&of).iter().all(|takers| takers == &[1]));
    of[1].leave(DividedAddress::OfDatagrams(LISTENER.parse().unwrap()));
    assert!(takers(&of).iter().all(|takers| takers == &[0]));
}

#[test]
fn exe_8_idle_socket_gets_no_datagrams() {
    let table = table();
    let of: Vec<_> = (0..2).map(|slot| process(table, slot)).collect();
    let address = DividedAddress::OfDatagrams(LISTENER.parse().unwrap());
    of[0].join_idle(address);
    of[0].take_free();
    assert!(takers(&of).iter().all(|takers| takers == &[0]), "nobody else has a socket");
    join_datagrams(&of[1], LISTENER);
    assert!(of[1].take_shared().is_empty(), "taken over at once");
    assert!(takers(&of).iter().all(|takers| takers == &[1]));
    assert_eq!(of[0].needed(), 0);
    assert!(of[0].has_other_users(address));
    table.clear(1);
    of[0].take_free();
    assert!(takers(&of[..1]).iter().all(|takers| takers == &[0]), "the other has ended");
}

#[test]
fn exe_8_connected_flow_has_its_datagrams() {
    let table = table();
    let of: Vec<_> = (0..2).map(|slot| process(table, slot)).collect();
    join_datagrams(&of[0], LISTENER);
    assert!(of[1].claim_datagrams(&flow(7)) && !of[0].claim_datagrams(&flow(7)));
    assert_eq!(of[1].needed(), of[1].bucket_bit(&flow(7)));
    let connected = |port: usize| usize::from(port == 7);
    let takers = takers(&of);
    assert!((1..500).zip(&takers).all(|(port, takers)| takers == &[connected(port)]));
    assert!(of[0].claim(&flow(7), SYN), "a connection of the same ends is another flow");
    of[0].leave(DividedAddress::OfDatagrams(LISTENER.parse().unwrap()));
    let refusers = |port| of.iter().filter(|it| it.refuses_datagrams(&flow(port))).count();
    assert!(
        (1..500).all(|port| refusers(port) == usize::from(port != 7)),
        "nobody refuses the flow"
    );
    of[1].mark_idle(&flow(7));
    assert!(of[0].claim_datagrams(&flow(7)) && of[1].has_other_user_of(&flow(7)));
    assert!(of[0].takes_datagrams(&flow(7)) && !of[1].takes_datagrams(&flow(7)));
    of[1].release_datagrams(&flow(7));
    assert!(of[0].takes_datagrams(&flow(7)), "the claim is another's by now");
    assert_eq!(of[1].needed(), 0);
}
