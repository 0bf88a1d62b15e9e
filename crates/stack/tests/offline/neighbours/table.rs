//! Entries of the neighbour table, their lifetime, and the packets that wait for them.

mod waiting; // packets that wait for a neighbour to answer

use std::net::{IpAddr, Ipv4Addr};

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_stack::network::neighbours::{
    ANSWERED_MAX, NEIGHBOURS_MAX, NeighbourDrops, NeighbourObservation, Neighbours, Replaces,
    Resolved, WAITING_IN_ALL_MAX, WAITING_MAX, WAITING_MORE_MAX,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::neighbours::rig::{
    OTHERS, OURS, THEIRS, identity, ip, packet, pool, read_arp, read_ndisc,
};

const SECOND_NS: u64 = 1_000_000_000;
const NEIGHBOUR: &str = "10.9.0.2";

/// Entries for neighbours that have not answered: 256 unresolved, 128 only observed, 128 used.
const STRANGERS_MAX: usize = 512;

/// Result of resolving a neighbour.
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
        Self::with(64)
    }

    fn with(chunks: u32) -> Self {
        Self { neighbours: Neighbours::new([7; 16]), pool: pool(chunks) }
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
            IpAddr::V6(_) => read_ndisc(&packet).link_addresses[0],
        };
        match found {
            Found::Probing(mac) => assert_eq!(to, mac, "it is asked itself"),
            _ => assert_eq!(to[0] & 1, 1, "all are asked"),
        }
        self.pool.put(packet.frame);
        found
    }

    /// Resolves a neighbour for an answer to it. True if it is solicited.
    fn answer_to(&mut self, address: IpAddr, now_ns: u64) -> bool {
        let on = identity();
        match self.neighbours.resolve_answered(address, &on, now_ns, &mut self.pool) {
            Some(Resolved::Ask(packet)) => {
                self.pool.put(packet.frame);
                true
            }
            Some(Resolved::Mac(_) | Resolved::Probe(..)) => panic!("it has not answered"),
            Some(Resolved::Wait) | None => false,
        }
    }

    /// Resolves a neighbour, and lets it answer.
    fn prove(&mut self, address: IpAddr, now_ns: u64) {
        assert_eq!(self.resolve_ip(address, now_ns), Found::Asking);
        self.hear(NeighbourObservation { address, ..answer(THEIRS) }, now_ns);
        assert_eq!(self.resolve_ip(address, now_ns), Found::There(THEIRS));
    }

    fn hear(&mut self, sighting: NeighbourObservation, now_ns: u64) -> usize {
        let mut released = Vec::new();
        self.neighbours.hear(&sighting, now_ns, &mut released);
        let count = released.len();
        for packet in released {
            assert_eq!(Some(packet.frame.data()[..6].try_into().unwrap()), sighting.mac);
            self.pool.put(packet.frame);
        }
        count
    }

    /// Queues a packet for a neighbour.
    fn hold(&mut self, address: &str, mark: u8, now_ns: u64) -> Vec<u8> {
        self.hold_ip(ip(address), mark, now_ns)
    }

    fn hold_ip(&mut self, address: IpAddr, mark: u8, now_ns: u64) -> Vec<u8> {
        self.hold_send(address, mark, 1, now_ns)
    }

    /// Queues several packets of one send.
    fn hold_send(&mut self, address: IpAddr, mark: u8, count: usize, now_ns: u64) -> Vec<u8> {
        let bytes = [&[0; 6], OURS.as_slice(), &[8, 0, mark]].concat();
        let mut packets = (0..count).map(|_| packet(&mut self.pool, &bytes)).collect();
        let mut dropped = Vec::new();
        self.neighbours.hold(address, &mut packets, now_ns, &mut dropped);
        self.marks(dropped)
    }

    fn marks(&mut self, packets: Vec<forebay_rx::Packet>) -> Vec<u8> {
        let mark = |packet: forebay_rx::Packet| {
            let mark = packet.frame.data()[14];
            self.pool.put(packet.frame);
            mark
        };
        packets.into_iter().map(mark).collect()
    }

    /// Number of solicitations sent, and marks of packets dropped.
    fn tick(&mut self, now_ns: u64) -> (usize, Vec<u8>) {
        let (mut asks, mut dropped) = (Vec::new(), Vec::new());
        let Self { neighbours, pool } = self;
        neighbours.tick(&identity(), now_ns, pool, &mut asks, &mut dropped);
        let count = asks.len();
        asks.into_iter().for_each(|packet| self.pool.put(packet.frame));
        (count, self.marks(dropped))
    }
}

/// An answer to our solicitation.
fn answer(mac: [u8; 6]) -> NeighbourObservation {
    NeighbourObservation {
        address: ip(NEIGHBOUR),
        mac: Some(mac),
        is_welcome: false,
        replaces: Replaces::WhenSettled,
        is_confirmed: true,
    }
}

#[test]
fn neighbour_is_solicited_each_second() {
    for address in [NEIGHBOUR, "fd00::2"] {
        let mut rig = Rig::new();
        assert_eq!(rig.resolve(address, 5), Found::Asking);
        assert_eq!(rig.resolve(address, SECOND_NS), Found::Waiting);
        assert_eq!(rig.resolve(address, SECOND_NS + 5), Found::Asking);
        assert_eq!(rig.resolve(address, SECOND_NS + 6), Found::Waiting);
        rig.hear(NeighbourObservation { address: ip(address), ..answer(THEIRS) }, SECOND_NS + 7);
        assert_eq!(rig.resolve(address, SECOND_NS + 8), Found::There(THEIRS));
        assert_eq!(rig.pool.in_use(), 0);
    }
}

#[test]
fn used_neighbour_reprobed_then_forgotten() {
    let mut rig = Rig::new();
    let at = |second: u64| second * SECOND_NS;
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    rig.hear(answer(THEIRS), 0);
    // Reachable for 30 seconds, then used for five seconds before the probe.
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
        // Of answers in quick succession, the first one counts; a later one replaces it.
        (answer(OTHERS), SECOND_NS, Found::There(THEIRS)),
        (answer(OTHERS), SECOND_NS + 1, Found::There(OTHERS)),
        (
            NeighbourObservation { replaces: Replaces::Now, ..answer(OTHERS) },
            1,
            Found::There(OTHERS),
        ),
        (NeighbourObservation { replaces: Replaces::Never, ..answer(OTHERS) }, 9 * SECOND_NS, {
            Found::There(THEIRS)
        }),
        (NeighbourObservation { mac: None, ..answer(OTHERS) }, 9 * SECOND_NS, Found::There(THEIRS)),
    ];
    for (sighting, now_ns, expected) in cases {
        let mut rig = Rig::new();
        assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
        rig.hear(answer(THEIRS), 0);
        rig.hear(sighting, now_ns);
        assert_eq!(rig.resolve(NEIGHBOUR, now_ns), expected, "{sighting:?}");
        // A contradicted entry is probed well before its lifetime ends.
        let is_doubted = sighting.replaces == Replaces::Never;
        let later = rig.resolve(NEIGHBOUR, now_ns + 5 * SECOND_NS);
        assert_eq!(later == Found::Probing(THEIRS), is_doubted, "{later:?}");
    }
}

/// Other claims to the address are ignored once the entry is stale (RFC 4861, section 7.2.5).
#[test]
fn promise_8_claims_postpone_no_probe() {
    let mut rig = Rig::new();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    rig.hear(answer(THEIRS), 0);
    let claim = NeighbourObservation { replaces: Replaces::Never, ..answer(OTHERS) };
    let mut probes = 0;
    let until = (0..20).find(|second| {
        let now_ns = second * SECOND_NS;
        rig.hear(claim, now_ns);
        let found = rig.resolve(NEIGHBOUR, now_ns);
        probes += usize::from(found == Found::Probing(THEIRS));
        found == Found::Asking
    });
    assert_eq!((until, probes), (Some(8), 3));
}

#[test]
fn strangers_remembered_only_if_addressing_us() {
    let mut rig = Rig::new();
    rig.hear(answer(THEIRS), 0);
    assert_eq!(rig.neighbours.count(), 0);
    rig.hear(NeighbourObservation { is_welcome: true, is_confirmed: false, ..answer(THEIRS) }, 0);
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::There(THEIRS));
    // The neighbour has not answered us, so it is probed once used for five seconds.
    assert_eq!(rig.resolve(NEIGHBOUR, 5 * SECOND_NS), Found::Probing(THEIRS));
}

#[test]
fn stranger_flood_keeps_used_neighbours() {
    let mut rig = Rig::new();
    assert_eq!(rig.resolve(NEIGHBOUR, 0), Found::Asking);
    rig.hear(answer(THEIRS), 0);
    for number in 0..5000u16 {
        let [high, low] = number.to_be_bytes();
        let address = IpAddr::from(Ipv4Addr::new(10, 10, high, low));
        let stranger = NeighbourObservation { address, is_welcome: true, ..answer(OTHERS) };
        rig.hear(NeighbourObservation { is_confirmed: false, ..stranger }, 1);
        assert!(rig.neighbours.count() <= NEIGHBOURS_MAX);
    }
    assert_eq!(rig.resolve(NEIGHBOUR, 2), Found::There(THEIRS));
    // Unresolved neighbours evict each other only.
    for number in 0..5000u16 {
        let [high, low] = number.to_be_bytes();
        let address = IpAddr::from(Ipv4Addr::new(10, 11, high, low));
        assert_eq!(rig.resolve_ip(address, 3), Found::Asking);
        assert!(rig.neighbours.count() <= NEIGHBOURS_MAX);
    }
}

/// One of many addresses on the link.
fn numbered(net: u8, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(10, net, high, low).into()
}

/// Messages of a flood from many addresses.
#[derive(Clone, Copy, Debug)]
enum Flood {
    /// Packets that we answer, from spoofed addresses.
    Answered,
    /// Solicitations of our address.
    Heard,
    /// Solicitations of our address, and packets that we answer.
    Both,
    /// As `Both`, and unsolicited confirmations of their address as well.
    Confirmed,
}

fn flood() -> impl Strategy<Value = (Flood, u8, u16)> {
    let kinds = [Flood::Answered, Flood::Heard, Flood::Both, Flood::Confirmed];
    (prop::sample::select(kinds.to_vec()), 20u8..24, prop_oneof![1u16..10, 200u16..1500])
}

impl Rig {
    fn flood(&mut self, (kind, net, count): (Flood, u8, u16), now_ns: u64) {
        for address in (0..count).map(|number| numbered(net, number)) {
            let heard = NeighbourObservation {
                address,
                is_welcome: true,
                is_confirmed: false,
                ..answer(OTHERS)
            };
            if !matches!(kind, Flood::Answered) {
                self.hear(heard, now_ns);
            }
            if matches!(kind, Flood::Confirmed) {
                self.hear(NeighbourObservation { is_confirmed: true, ..heard }, now_ns);
            }
            if !matches!(kind, Flood::Heard)
                && !matches!(self.resolve_ip(address, now_ns), Found::There(_))
            {
                self.hold_ip(address, u8::MAX, now_ns);
            }
            assert!(self.neighbours.count() <= NEIGHBOURS_MAX + STRANGERS_MAX);
            assert!(self.neighbours.waiting() <= WAITING_IN_ALL_MAX);
            assert!(self.neighbours.waiting_more() <= WAITING_MORE_MAX);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn promise_3_strangers_cost_no_proven_neighbour(
        good in 1u16..=1024,
        floods in vec(flood(), 1..8),
    ) {
        let mut rig = Rig::with(1024);
        (0..good).for_each(|number| rig.prove(numbered(11, number), 0));
        for (now_ns, flood) in (1..).zip(floods) {
            rig.flood(flood, now_ns);
        }
        for number in 0..good {
            prop_assert_eq!(rig.resolve_ip(numbered(11, number), 9), Found::There(THEIRS));
        }
    }

    #[test]
    fn promise_3_first_packet_always_finds_room(
        floods in vec(flood(), 1..8),
        held in vec((0u16..300, 1u8..4, 1usize..40), 0..400),
        within in 0u16..255,
    ) {
        let mut rig = Rig::with(1024);
        floods.into_iter().for_each(|flood| rig.flood(flood, 1));
        for (number, count, packets) in held {
            let address = numbered(20, number);
            if !matches!(rig.resolve_ip(address, 2), Found::There(_)) {
                (0..count).for_each(|_| drop(rig.hold_send(address, u8::MAX, packets, 2)));
                prop_assert!(rig.neighbours.waiting_more() <= WAITING_MORE_MAX);
            }
        }
        let good = numbered(11, 7);
        prop_assert_eq!(rig.resolve_ip(good, 3), Found::Asking);
        let given_up = rig.hold_ip(good, 1, 3);
        prop_assert!(!given_up.contains(&1));
        // The entry stays until the neighbour answers, unless more neighbours are solicited than
        // the limit.
        rig.flood((Flood::Answered, 30, within), 4);
        prop_assert_eq!(rig.hear(NeighbourObservation { address: good, ..answer(THEIRS) }, 5), 1);
        rig.tick(60 * SECOND_NS);
        rig.tick(120 * SECOND_NS);
        prop_assert_eq!((rig.neighbours.count(), rig.neighbours.waiting()), (0, 0));
        prop_assert_eq!(rig.neighbours.waiting_more(), 0);
        prop_assert_eq!(rig.pool.in_use(), 0);
    }
}

#[test]
fn promise_3_silent_addresses_evict_no_neighbour() {
    let mut rig = Rig::with(1024);
    rig.prove(ip(NEIGHBOUR), 0);
    // 1024 look-ups within ten milliseconds.
    for number in 100..100 + 1024 {
        assert_eq!(rig.resolve_ip(numbered(9, number), u64::from(number) * 10_000), Found::Asking);
    }
    assert_eq!(rig.resolve(NEIGHBOUR, 11_240_000), Found::There(THEIRS));
}

#[test]
fn promise_3_spoofed_answers_solicit_few() {
    let mut rig = Rig::with(1024);
    let all = u16::try_from(NEIGHBOURS_MAX).unwrap();
    (0..all).for_each(|number| rig.prove(numbered(11, number), 0));
    let sought = numbered(12, 1);
    assert_eq!(rig.resolve_ip(sought, 0), Found::Asking);
    assert!(rig.hold_ip(sought, 7, 0).is_empty());
    // Answers to 10,000 spoofed addresses, in ten milliseconds.
    let mut asked = 0;
    for number in 0..10_000 {
        asked += u32::from(rig.answer_to(numbered(20, number), u64::from(number) * 1000));
        assert!(rig.neighbours.count() <= NEIGHBOURS_MAX + STRANGERS_MAX);
    }
    assert!((ANSWERED_MAX..=ANSWERED_MAX + 2).contains(&asked), "{asked}");
    for number in 0..all {
        let found = rig.resolve_ip(numbered(11, number), 11_000_000);
        assert_eq!(found, Found::There(THEIRS), "{number}");
    }
    // For a minute.
    let now_ns = |number: u16| SECOND_NS + u64::from(number) * 6_000_000;
    let mut asked = (0..10_000).map(|number| rig.answer_to(numbered(21, number), now_ns(number)));
    let asked = asked.by_ref().filter(|&is_asked| is_asked).count();
    assert!(asked <= 62 * ANSWERED_MAX as usize, "{asked}");
    // Packets wait for it: it is not evicted for others.
    assert_eq!(rig.hear(NeighbourObservation { address: sought, ..answer(THEIRS) }, SECOND_NS), 1);
}

#[test]
fn promise_3_answers_leave_waiting_packets() {
    let mut rig = Rig::with(1024);
    let most = u16::try_from(WAITING_IN_ALL_MAX).unwrap();
    for number in 0..most {
        assert_eq!(rig.resolve_ip(numbered(11, number), 0), Found::Asking);
        assert!(number == 9 || rig.hold_ip(numbered(11, number), 7, 0).is_empty());
    }
    // The one that nothing waits for gives way.
    assert!(rig.answer_to(numbered(20, 0), 0));
    assert!(rig.answer_to(numbered(20, 1), 0));
    assert!(!rig.answer_to(numbered(20, 1), 0), "it is asked already");
    assert!(rig.hold_ip(numbered(20, 1), 8, 0).is_empty());
    assert!(!rig.answer_to(numbered(20, 2), 0));
    for number in (0..most).filter(|&number| number != 9) {
        let address = numbered(11, number);
        assert_eq!(rig.hear(NeighbourObservation { address, ..answer(THEIRS) }, 1), 1);
    }
    assert_eq!(rig.hold_ip(numbered(11, 9), 7, 1), [7]);
}

#[test]
fn excess_neighbours_evict_each_other() {
    let mut rig = Rig::with(1024);
    let all = u16::try_from(NEIGHBOURS_MAX).unwrap() + 10;
    (0..all).for_each(|number| rig.prove(numbered(11, number), 1));
    assert_eq!(rig.neighbours.count(), NEIGHBOURS_MAX);
    // The most recently used entries stay.
    for number in (11..all).rev() {
        assert_eq!(rig.resolve_ip(numbered(11, number), 2), Found::There(THEIRS), "{number}");
    }
    assert_eq!(rig.resolve_ip(numbered(11, 0), 3), Found::Asking);
}
