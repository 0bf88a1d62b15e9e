//! What is known of neighbours, for how long, and what waits for them.

use std::net::{IpAddr, Ipv4Addr};

use mem::Pool;
use path::network::neighbours::{
    NEIGHBOURS_MAX, Neighbours, Replaces, Resolved, Sighting, WAITING_MAX,
};

use crate::rig::{OTHERS, OURS, THEIRS, identity, ip, packet, pool, read_arp, read_ndisc};

const SECOND_NS: u64 = 1_000_000_000;
const NEIGHBOUR: &str = "10.9.0.2";

/// What came of asking where a neighbour is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    There([u8; 6]),
    Probing([u8; 6]),
    Asking,
    Waiting,
}

struct Rig {
    neighbours: Neighbours,
    pool: Pool,
}

impl Rig {
    fn new() -> Self {
        Self { neighbours: Neighbours::new([7; 16]), pool: pool(64) }
    }

    fn resolve(&mut self, address: &str, now_ns: u64) -> Found {
        self.resolve_ip(ip(address), now_ns)
    }

    fn resolve_ip(&mut self, address: IpAddr, now_ns: u64) -> Found {
        let resolved = self.neighbours.resolve(address, &identity(), now_ns, &mut self.pool);
        let (found, packet) = match resolved {
            Resolved::Mac(mac) => return Found::There(mac),
            Resolved::Wait => return Found::Waiting,
            Resolved::Probe(mac, packet) => (Found::Probing(mac), packet),
            Resolved::Ask(packet) => (Found::Asking, packet),
        };
        let to = match address {
            IpAddr::V4(_) => read_arp(&packet).0[0],
            IpAddr::V6(_) => read_ndisc(&packet).stations[0],
        };
        match found {
            Found::Probing(mac) => assert_eq!(to, mac, "it is asked itself"),
            _ => assert_eq!(to[0] & 1, 1, "all are asked"),
        }
        self.pool.put(packet.frame);
        found
    }

    fn hear(&mut self, sighting: Sighting, now_ns: u64) -> usize {
        let mut released = Vec::new();
        self.neighbours.hear(&sighting, now_ns, &mut released);
        let count = released.len();
        for packet in released {
            assert_eq!(Some(packet.frame.data()[..6].try_into().unwrap()), sighting.mac);
            self.pool.put(packet.frame);
        }
        count
    }

    /// One has something to say to it.
    fn hold(&mut self, address: &str, mark: u8, now_ns: u64) -> Vec<u8> {
        let bytes = [&[0; 6], OURS.as_slice(), &[8, 0, mark]].concat();
        let packet = packet(&mut self.pool, &bytes);
        let mut dropped = Vec::new();
        self.neighbours.hold(ip(address), packet, now_ns, &mut dropped);
        self.marks(dropped)
    }

    fn marks(&mut self, packets: Vec<path::Packet>) -> Vec<u8> {
        let mark = |packet: path::Packet| {
            let mark = packet.frame.data()[14];
            self.pool.put(packet.frame);
            mark
        };
        packets.into_iter().map(mark).collect()
    }

    /// Asks that are sent, and marks of packets that are given up.
    fn tick(&mut self, now_ns: u64) -> (usize, Vec<u8>) {
        let (mut asks, mut dropped) = (Vec::new(), Vec::new());
        let Self { neighbours, pool } = self;
        neighbours.tick(&identity(), now_ns, (pool, &mut asks), &mut dropped);
        let count = asks.len();
        asks.into_iter().for_each(|packet| self.pool.put(packet.frame));
        (count, self.marks(dropped))
    }
}

/// It answered us.
fn answer(mac: [u8; 6]) -> Sighting {
    Sighting {
        address: ip(NEIGHBOUR),
        mac: Some(mac),
        is_welcome: false,
        replaces: Replaces::WhenSettled,
        is_confirmed: true,
    }
}

#[test]
fn a_neighbour_is_asked_for_once_a_second_until_it_answers() {
    for address in [NEIGHBOUR, "fd00::2"] {
        let mut rig = Rig::new();
        assert_eq!(rig.resolve(address, 5), Found::Asking);
        assert_eq!(rig.resolve(address, SECOND_NS), Found::Waiting);
        assert_eq!(rig.resolve(address, SECOND_NS + 5), Found::Asking);
        assert_eq!(rig.resolve(address, SECOND_NS + 6), Found::Waiting);
        rig.hear(Sighting { address: ip(address), ..answer(THEIRS) }, SECOND_NS + 7);
        assert_eq!(rig.resolve(address, SECOND_NS + 8), Found::There(THEIRS));
        assert_eq!(rig.pool.away(), 0);
    }
}

#[test]
fn one_that_is_used_is_asked_again_and_forgotten_when_it_does_not_answer() {
    let mut rig = Rig::new();
    let at = |second: u64| second * SECOND_NS;
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    rig.hear(answer(THEIRS), 0);
    // Reachable for 30 seconds; then five seconds pass before it is asked.
    assert_eq!(rig.resolve(NEIGHBOUR, at(29)), Found::There(THEIRS));
    assert_eq!(rig.resolve(NEIGHBOUR, at(40)), Found::There(THEIRS));
    assert_eq!(rig.resolve(NEIGHBOUR, at(44)), Found::There(THEIRS));
    assert_eq!(rig.resolve(NEIGHBOUR, at(45)), Found::Probing(THEIRS));
    assert_eq!(rig.resolve(NEIGHBOUR, at(45) + 1), Found::There(THEIRS));
    rig.hear(answer(THEIRS), at(46));
    assert_eq!(rig.resolve(NEIGHBOUR, at(75)), Found::There(THEIRS));
    assert_eq!(rig.resolve(NEIGHBOUR, at(76)), Found::There(THEIRS));
    for second in 81..84 {
        assert_eq!(rig.resolve(NEIGHBOUR, at(second)), Found::Probing(THEIRS));
    }
    assert_eq!(rig.resolve(NEIGHBOUR, at(84) - 1), Found::There(THEIRS));
    assert_eq!(rig.resolve(NEIGHBOUR, at(84)), Found::Asking);
    assert_eq!(rig.resolve(NEIGHBOUR, at(84) + 1), Found::Waiting);
}

#[test]
fn who_takes_the_place_of_whom() {
    let cases = [
        // Answers back to back: the first counts. Later, another one does.
        (answer(OTHERS), SECOND_NS, Found::There(THEIRS)),
        (answer(OTHERS), SECOND_NS + 1, Found::There(OTHERS)),
        (Sighting { replaces: Replaces::Now, ..answer(OTHERS) }, 1, Found::There(OTHERS)),
        (Sighting { replaces: Replaces::Never, ..answer(OTHERS) }, 9 * SECOND_NS, {
            Found::There(THEIRS)
        }),
        (Sighting { mac: None, ..answer(OTHERS) }, 9 * SECOND_NS, Found::There(THEIRS)),
    ];
    for (sighting, now_ns, expected) in cases {
        let mut rig = Rig::new();
        assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
        rig.hear(answer(THEIRS), 0);
        rig.hear(sighting, now_ns);
        assert_eq!(rig.resolve(NEIGHBOUR, now_ns), expected, "{sighting:?}");
        // One that is contradicted is asked, well before its time is over.
        let is_doubted = sighting.replaces == Replaces::Never;
        let later = rig.resolve(NEIGHBOUR, now_ns + 5 * SECOND_NS);
        assert_eq!(later == Found::Probing(THEIRS), is_doubted, "{later:?}");
    }
}

#[test]
fn strangers_are_remembered_only_if_they_speak_to_us() {
    let mut rig = Rig::new();
    rig.hear(answer(THEIRS), 0);
    assert_eq!(rig.neighbours.count(), 0);
    rig.hear(Sighting { is_welcome: true, is_confirmed: false, ..answer(THEIRS) }, 0);
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::There(THEIRS));
    // They did not answer us: they are asked as soon as they are used for a while.
    assert_eq!(rig.resolve(NEIGHBOUR, 5 * SECOND_NS), Found::Probing(THEIRS));
}

#[test]
fn a_flood_of_strangers_costs_no_neighbour_that_is_used() {
    let mut rig = Rig::new();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    rig.hear(answer(THEIRS), 0);
    for number in 0..5000u16 {
        let [high, low] = number.to_be_bytes();
        let address = IpAddr::from(Ipv4Addr::new(10, 10, high, low));
        let stranger = Sighting { address, is_welcome: true, ..answer(OTHERS) };
        rig.hear(Sighting { is_confirmed: false, ..stranger }, 1);
        assert!(rig.neighbours.count() <= NEIGHBOURS_MAX);
    }
    assert_eq!(rig.resolve(NEIGHBOUR, 2), Found::There(THEIRS));
    // Those whom we seek ourselves make room for each other.
    for number in 0..5000u16 {
        let [high, low] = number.to_be_bytes();
        let address = IpAddr::from(Ipv4Addr::new(10, 11, high, low));
        assert_eq!(rig.resolve_ip(address, 3), Found::Asking);
        assert!(rig.neighbours.count() <= NEIGHBOURS_MAX);
    }
}

#[test]
fn three_packets_wait_for_a_neighbour_and_the_oldest_makes_room() {
    let mut rig = Rig::new();
    assert_eq!(rig.hold(NEIGHBOUR, 9, 0), [9], "nobody has asked for it");
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    for mark in 0..3 {
        assert!(rig.hold(NEIGHBOUR, mark, 0).is_empty());
    }
    assert_eq!(rig.hold(NEIGHBOUR, 3, 1), [0]);
    assert_eq!((rig.neighbours.waiting(), WAITING_MAX), (3, 3));
    assert_eq!(rig.hear(answer(THEIRS), 2), 3);
    assert_eq!((rig.neighbours.waiting(), rig.pool.away()), (0, 0));
    assert_eq!(rig.hold(NEIGHBOUR, 4, 3), [4], "it need not wait");
}

#[test]
fn a_packet_waits_while_its_neighbour_is_asked_for_three_times() {
    let mut rig = Rig::new();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    assert!(rig.hold(NEIGHBOUR, 7, 0).is_empty());
    assert_eq!(rig.tick(SECOND_NS - 1), (0, vec![]));
    assert_eq!(rig.tick(SECOND_NS), (1, vec![]));
    assert_eq!(rig.tick(2 * SECOND_NS), (1, vec![]));
    assert_eq!(rig.tick(3 * SECOND_NS), (0, vec![7]));
    assert_eq!(rig.tick(4 * SECOND_NS), (0, vec![]));
    assert_eq!((rig.neighbours.waiting(), rig.pool.away()), (0, 0));
    // Nobody wants it any more.
    assert_eq!(rig.neighbours.count(), 1);
    rig.tick(60 * SECOND_NS);
    assert_eq!(rig.neighbours.count(), 0);
}

#[test]
fn without_a_frame_to_ask_with_it_is_asked_for_next_time() {
    let mut rig = Rig::new();
    let taken: Vec<_> = std::iter::from_fn(|| rig.pool.allocate(0)).collect();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Waiting);
    taken.into_iter().for_each(|frame| rig.pool.put(frame));
    assert_eq!(rig.resolve(NEIGHBOUR, 1), Found::Asking);
}
