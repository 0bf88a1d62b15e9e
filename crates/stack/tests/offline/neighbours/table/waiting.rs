//! Packets that wait for a neighbour to answer.

use super::*;

#[test]
fn most_waiting_packets_give_way_first() {
    let mut rig = Rig::with(1024);
    let sought = |number| numbered(11, number);
    // Two packets wait for each of 128 neighbours: no slot is left.
    for number in 0..128 {
        assert_eq!(rig.resolve_ip(sought(number), 0), Found::Asking);
        assert!(rig.hold_ip(sought(number), 1, 0).is_empty());
        assert!(rig.hold_ip(sought(number), 2, 0).is_empty());
    }
    assert_eq!(rig.neighbours.waiting(), WAITING_IN_ALL_MAX);
    // A third packet for a neighbour displaces its own oldest one, never another neighbour's.
    assert_eq!(rig.hold_ip(sought(5), 3, 0), [1]);
    assert_eq!(rig.hear(NeighbourObservation { address: sought(5), ..answer(THEIRS) }, 0), 2);
    assert!(rig.hold_ip(sought(9), 3, 0).is_empty());
    assert_eq!(rig.resolve_ip(sought(200), 0), Found::Asking);
    assert!(rig.hold_ip(sought(200), 4, 0).is_empty());
    // Once three packets wait for a neighbour, it loses its oldest one; then the others lose theirs
    // in turn.
    assert_eq!(rig.hold_ip(sought(200), 5, 0), [1]);
    assert_eq!(rig.hear(NeighbourObservation { address: sought(9), ..answer(THEIRS) }, 0), 2);
}

#[test]
fn three_packets_wait_oldest_goes() {
    let mut rig = Rig::new();
    assert_eq!(rig.hold(NEIGHBOUR, 9, 0), [9], "nobody has asked for it");
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    for mark in 0..3 {
        assert!(rig.hold(NEIGHBOUR, mark, 0).is_empty());
    }
    assert_eq!(rig.hold(NEIGHBOUR, 3, 1), [0]);
    assert_eq!((rig.neighbours.waiting(), WAITING_MAX), (3, 3));
    assert_eq!(rig.hear(answer(THEIRS), 2), 3);
    assert_eq!((rig.neighbours.waiting(), rig.pool.in_use()), (0, 0));
    // It need not wait: its header is complete, and it is given back.
    let mut packets = vec![packet(&mut rig.pool, &[&[0; 6], OURS.as_slice(), &[8, 0, 4]].concat())];
    let mut dropped = Vec::new();
    rig.neighbours.hold(ip(NEIGHBOUR), &mut packets, 3, &mut dropped);
    assert_eq!((packets.len(), dropped.len()), (1, 0));
    assert_eq!(packets[0].frame.data()[..6], THEIRS);
    assert_eq!(rig.neighbours.drops().neigh_dead, 1, "the one that nobody had asked for");
}

/// The fragments of a datagram wait in one slot, and leave or are dropped together.
#[test]
fn udp_14_fragments_wait_as_one() {
    let mut rig = Rig::with(1024);
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    for mark in 0..3 {
        assert!(rig.hold_send(ip(NEIGHBOUR), mark, 45, 0).is_empty());
    }
    assert_eq!((rig.neighbours.waiting(), rig.neighbours.waiting_more()), (3, 3 * 44));
    assert_eq!(rig.hold_send(ip(NEIGHBOUR), 3, 2, 0), [0; 45]);
    assert_eq!(rig.neighbours.drops().neigh_queuefull, 45);
    assert_eq!(rig.hear(answer(THEIRS), 2), 45 + 45 + 2);
    // Large sends displace older ones to the same neighbour, unless they have no room even then.
    let (own, other) = (numbered(12, 1), numbered(12, 2));
    for address in [own, other] {
        assert_eq!(rig.resolve_ip(address, 3), Found::Asking);
        assert!(rig.hold_send(address, 7, 100, 3).is_empty());
    }
    assert_eq!(rig.hold_send(own, 8, 157, 3), [7; 100]);
    assert_eq!(rig.hold_send(own, 9, 200, 3), [9; 200]);
    assert_eq!(rig.hear(NeighbourObservation { address: own, ..answer(THEIRS) }, 4), 157);
    assert_eq!(rig.hear(NeighbourObservation { address: other, ..answer(THEIRS) }, 4), 100);
    let left = (rig.neighbours.waiting(), rig.neighbours.waiting_more(), rig.pool.in_use());
    assert_eq!(left, (0, 0, 0));
}

#[test]
fn packet_waits_for_three_solicitations() {
    let mut rig = Rig::new();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    assert!(rig.hold(NEIGHBOUR, 7, 0).is_empty());
    assert_eq!(rig.tick(SECOND_NS - 1), (0, vec![]));
    assert_eq!(rig.tick(SECOND_NS), (1, vec![]));
    assert_eq!(rig.tick(2 * SECOND_NS), (1, vec![]));
    assert_eq!(rig.tick(3 * SECOND_NS), (0, vec![7]));
    assert_eq!(rig.tick(4 * SECOND_NS), (0, vec![]));
    assert_eq!((rig.neighbours.waiting(), rig.pool.in_use()), (0, 0));
    // The neighbour is no longer wanted by any sender.
    assert_eq!(rig.neighbours.count(), 1);
    rig.tick(60 * SECOND_NS);
    assert_eq!(rig.neighbours.count(), 0);
}

#[test]
fn frameless_solicitation_is_retried() {
    let mut rig = Rig::new();
    let taken: Vec<_> = std::iter::from_fn(|| rig.pool.allocate(0)).collect();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Waiting);
    taken.into_iter().for_each(|frame| rig.pool.put(frame));
    assert_eq!(rig.resolve(NEIGHBOUR, 1), Found::Asking);
}

#[test]
fn promise_2_waiting_packets_expire_by_name() {
    let mut rig = Rig::new();
    let [full, silent, forgotten] = [1, 2, 3].map(|number| numbered(12, number));
    for address in [full, silent, forgotten] {
        assert_eq!(rig.resolve_ip(address, 0), Found::Asking);
    }
    for mark in 0..5 {
        rig.hold_ip(full, mark, 0);
    }
    assert_eq!(rig.hear(NeighbourObservation { address: full, ..answer(THEIRS) }, 0), WAITING_MAX);
    let mut drops = NeighbourDrops { neigh_queuefull: 2, ..NeighbourDrops::default() };
    assert_eq!(rig.neighbours.drops(), drops);
    assert!(rig.hold_ip(silent, 7, 0).is_empty());
    assert_eq!(rig.tick(3 * SECOND_NS).1, [7]);
    drops.neigh_failed = 1;
    assert_eq!(rig.neighbours.drops(), drops);
    // After closing, no packet is queued, as no answer can arrive.
    assert_eq!(rig.resolve_ip(forgotten, 4 * SECOND_NS), Found::Asking);
    assert!(rig.hold_ip(forgotten, 8, 4 * SECOND_NS).is_empty());
    let mut dropped = Vec::new();
    rig.neighbours.close(&mut dropped);
    assert_eq!(rig.marks(dropped), [8]);
    assert_eq!(rig.hold_ip(forgotten, 9, 4 * SECOND_NS), [9]);
    drops.neigh_dead = 2;
    assert_eq!(rig.neighbours.drops(), drops);
    assert_eq!((rig.neighbours.waiting(), rig.pool.in_use()), (0, 0));
}

/// An answer releases the sends of its flow only, wherever they wait.
#[test]
fn udp_14_answer_releases_its_flow() {
    for neighbour in [Some(ip(NEIGHBOUR)), None] {
        let mut rig = Rig::new();
        for address in [NEIGHBOUR, "10.9.0.3"] {
            assert_eq!(rig.resolve(address, 0), Found::Asking);
        }
        for (mark, count) in [(1, 2), (2, 3), (1, 1)] {
            assert!(rig.hold_send(ip(NEIGHBOUR), mark, count, 0).is_empty());
        }
        assert!(rig.hold("10.9.0.3", 2, 0).is_empty());
        let (is_of_flow, mut released) = (|it: &Packet| it.frame.data()[14] == 1, Vec::new());
        rig.neighbours.release_flow(neighbour, is_of_flow, OTHERS, &mut released);
        assert!(released.iter().all(|packet| packet.frame.data()[..6] == OTHERS));
        assert_eq!(rig.marks(released), [1, 1, 1]);
        assert_eq!((rig.neighbours.waiting(), rig.neighbours.waiting_more()), (2, 2));
        assert_eq!(rig.hear(answer(THEIRS), 1), 3, "the other flow waits for the neighbour");
        assert_eq!(rig.tick(4 * SECOND_NS), (0, vec![2]));
        assert_eq!((rig.neighbours.waiting(), rig.neighbours.waiting_more()), (0, 0));
        assert_eq!(rig.pool.in_use(), 0);
    }
}
