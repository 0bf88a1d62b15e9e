//! Descriptors: number of flows held at once, and treatment of the others.

use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{
    CoalesceConfig, FlushReason, LRO_DESCRIPTORS, LRO_DESCRIPTORS_MAX, MergeRefusal,
};
use forebay_rx::packet::Packet;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::coalescing::frames::{IP, Segment, Wire, tcp};
use crate::coalescing::rig::{Rig, pool, taken_apart};

/// First segment of a flow.
fn flow(number: u32) -> Segment {
    tcp().with(|segment| segment.port = u16::try_from(number).unwrap())
}

fn segment(number: u32, nth: u32) -> Wire {
    flow(number).nth(nth).wire().hashed(hash(number))
}

/// Hash of one rx queue, by the lowest seven bits, and of one CPU, by the highest ones: only the
/// bits in between differ.
fn hash(number: u32) -> u32 {
    number << 7 | 0x55
}

fn rig(descriptors: u32) -> Rig {
    Rig::new(CoalesceConfig { descriptors, ..CoalesceConfig::default() })
}

#[test]
fn lro_9_descriptors_rounded_to_power_of_two() {
    let cases = [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (LRO_DESCRIPTORS, 8), (9, 16), (100, 128)];
    for (descriptors, expected) in
        cases.into_iter().chain([(LRO_DESCRIPTORS_MAX, 4096), (u32::MAX, 4096)])
    {
        let mut rig = rig(descriptors);
        rig.pool = pool(4200);
        // Consecutive numbers spread evenly over the sets.
        for number in 1..=4100 {
            rig.feed(&[segment(number, 0)]);
            rig.out.clear();
        }
        assert_eq!(rig.coalescer.held(), expected, "{descriptors} asked for");
        rig.end_poll(PollStatus::Drained);
        assert_eq!((rig.coalescer.held(), rig.out.len()), (0, expected));
    }
}

#[test]
fn full_table_evicts_after_16_idle() {
    for (between, is_evicted) in [(0, false), (15, false), (16, true)] {
        let mut rig = rig(1);
        rig.feed(&[segment(1, 0), segment(1, 1)]);
        let pure = flow(2).with(|pure| pure.payload.clear()).wire().hashed(hash(2));
        rig.feed(&vec![pure; between]);
        rig.out.clear();
        rig.feed(&[segment(3, 0)]);
        let expected = if is_evicted { vec![(FlushReason::Evicted, 1)] } else { vec![] };
        assert_eq!(rig.verdicts().1, expected, "{between} packets between");
        let is_full = rig.verdicts().0.contains(&(MergeRefusal::TableFull, 1));
        assert_eq!(is_full, !is_evicted);
        assert_eq!(rig.counts(), if is_evicted { [2] } else { [1] });
        assert_eq!(rig.coalescer.held(), 1);
    }
}

#[test]
fn longest_idle_descriptor_makes_room() {
    let mut rig = rig(8);
    (1..=8).for_each(|number| rig.feed(&[segment(number, 0)]));
    rig.feed(&[segment(1, 1)]);
    let pure = flow(9).with(|pure| pure.payload.clear()).wire().hashed(hash(9));
    rig.feed(&vec![pure; 64]);
    rig.out.clear();
    rig.feed(&[segment(10, 0), segment(1, 2)]);
    let out = taken_apart(std::mem::take(&mut rig.out));
    assert_eq!(out.iter().map(|frame| frame.hash.0).collect::<Vec<_>>(), [hash(2)]);
    rig.end_poll(PollStatus::Drained);
    assert_eq!(rig.counts(), [3, 1, 1, 1, 1, 1, 1, 1], "the oldest first");
}

#[test]
fn sixteen_flows_need_sixteen_descriptors() {
    const ROUNDS: u32 = 20;
    let mut rig = rig(LRO_DESCRIPTORS);
    for nth in 0..ROUNDS {
        let round: Vec<_> = (1..=16).map(|number| segment(number, nth)).collect();
        rig.feed(&round);
        rig.end_poll(PollStatus::MorePending);
    }
    rig.end_poll(PollStatus::Last);
    let counts = rig.counts();
    let whole = counts.iter().filter(|&&count| count == ROUNDS).count();
    assert_eq!(whole, LRO_DESCRIPTORS as usize);
    assert_eq!(counts.iter().sum::<u32>(), 16 * ROUNDS);
}

#[test]
fn flush_is_oldest_first_despite_collisions() {
    let mut rig = rig(16);
    // Even numbers belong to one set, which they fill; then two of the other set follow.
    let numbers = [14, 2, 1, 16, 4, 6, 3, 8, 12, 10];
    let firsts = numbers.map(|number| segment(number, 0));
    let mut seconds = numbers.map(|number| segment(number, 1));
    seconds.reverse();
    rig.feed(&firsts);
    rig.feed(&seconds);
    assert_eq!((rig.coalescer.held(), rig.out.len()), (numbers.len(), 0));
    rig.coalescer.flush(FlushReason::PollEnd, &mut rig.out);
    assert_eq!(rig.coalescer.held(), 0);
    let hashes: Vec<_> = rig.out.iter().map(|packet| packet.hash.0).collect();
    assert_eq!(hashes, numbers.map(hash));
    assert_eq!(rig.counts(), [2; 10]);
    assert_eq!(rig.pool.in_use(), 0);
}

#[test]
fn promise_1_same_hash_flows_stay_ordered() {
    let order = [(1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (1, 3)];
    let mut rig = rig(LRO_DESCRIPTORS);
    for (number, nth) in order {
        rig.feed(&[flow(number).nth(nth).wire().hashed(77)]);
        assert_eq!(rig.coalescer.held(), 1, "at most one of a hash");
    }
    rig.end_poll(PollStatus::Drained);
    let counts: Vec<_> = rig.out.iter().map(Packet::segment_count).collect();
    assert_eq!(counts, [1, 1, 2, 3, 1]);
    assert_eq!(taken_apart(rig.out), rig.fed);
}

/// Segment of the flow `port` from one of several hosts to one host.
fn segment_from(host: u8, port: u32, nth: u32) -> Wire {
    let wire = flow(1 + port).nth(nth).wire().edit(IP + 15, &[host]).resummed();
    wire.hashed(hash_from(host, port))
}

fn hash_from(host: u8, port: u32) -> u32 {
    hash(1 + port * 8 + u32::from(host))
}

fn fragment_from(host: u8) -> Wire {
    segment_from(host, 0, 0).edit(IP + 6, &[0x20, 0]).resummed().hashed(hash_from(host, 1 << 10))
}

proptest! {
    /// Compares with a scan of a whole list.
    #[test]
    fn promise_1_fragment_release_matches_scan(
        seed: u64,
        steps in vec((0u8..6, 0u32..8, proptest::bool::weighted(0.2)), 0..120),
    ) {
        let mut rig =
            Rig::new(CoalesceConfig { descriptors: 256, seed, ..CoalesceConfig::default() });
        // Host, port and number of segments of each, in the order in which they were first held.
        let mut twin: Vec<(u8, u32, u32)> = Vec::new();
        for (host, port, is_fragment) in steps {
            if is_fragment {
                rig.feed(&[fragment_from(host)]);
                let gone = twin.extract_if(.., |held| held.0 == host);
                let gone = gone.map(|(host, port, count)| (hash_from(host, port), count));
                let expected: Vec<_> = gone.chain([(hash_from(host, 1 << 10), 1)]).collect();
                let out = rig.out.drain(..).map(|packet| (packet.hash.0, packet.segment_count()));
                prop_assert_eq!(out.collect::<Vec<_>>(), expected);
                continue;
            }
            let nth = match twin.iter_mut().find(|held| (held.0, held.1) == (host, port)) {
                Some((_, _, count)) => {
                    *count += 1;
                    *count - 1
                }
                None => {
                    twin.push((host, port, 1));
                    0
                }
            };
            rig.feed(&[segment_from(host, port, nth)]);
            prop_assert_eq!((rig.coalescer.held(), rig.out.len()), (twin.len(), 0));
        }
    }
}
