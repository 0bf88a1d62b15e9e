//! Every reason to flush, and its time.

use std::collections::BTreeSet;

use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{CoalesceConfig, FlushReason, HELD_NS_MAX};

use crate::coalescing::frames::{PSH, Segment, Wire, tcp, udp};
use crate::coalescing::rig::{Rig, taken_apart};

const TIMEOUT_NS: u64 = 20_000;

/// Reason, number of descriptors, cause, and number of segments of each packet that comes out.
type Case = (FlushReason, u32, fn(&mut Rig), &'static [u32]);

const CASES: [Case; 9] = [
    (FlushReason::PollEnd, 8, |rig| rig.end_poll(PollStatus::Last), &[2]),
    (FlushReason::Timeout, 8, wait, &[2]),
    (FlushReason::Mismatch, 8, |rig| rig.feed(&[third(|next| next.payload.clear())]), &[2, 1]),
    (FlushReason::Push, 8, |rig| rig.feed(&[third(|next| next.flags |= PSH)]), &[3]),
    (FlushReason::Short, 8, |rig| rig.feed(&[third(|next| next.payload.truncate(99))]), &[3]),
    (FlushReason::Size, 8, fill, &[5]),
    (FlushReason::Count, 8, count, &[64]),
    (FlushReason::Evicted, 1, evict, &[2]),
    (FlushReason::Switch, 8, switch, &[2]),
];

fn third(change: fn(&mut Segment)) -> Wire {
    tcp().nth(2).with(change).wire()
}

fn wait(rig: &mut Rig) {
    rig.now_ns += TIMEOUT_NS;
    rig.end_poll(PollStatus::Drained);
}

/// Feeds another flow, in parts that fill the largest IP packet to its last byte.
fn fill(rig: &mut Rig) {
    let parts = tcp().sized((65_535 - 40) / 5).with(|segment| segment.port = 7);
    rig.feed(&parts.run(5));
}

/// Feeds the maximum number of datagrams of another flow.
fn count(rig: &mut Rig) {
    rig.feed(&udp().with(|datagram| datagram.port = 7).run(64));
}

/// Feeds acknowledgements of another flow, then a segment with data.
fn evict(rig: &mut Rig) {
    let other = tcp().with(|segment| segment.port = 7);
    let pure = other.clone().with(|segment| segment.payload.clear()).wire();
    rig.feed(&vec![pure; 64]);
    rig.out.clear();
    rig.feed(&[other.wire()]);
}

fn switch(rig: &mut Rig) {
    let config = *rig.coalescer.config();
    rig.coalescer.set_config(config, &mut rig.out);
}

#[test]
fn every_flush_has_its_reason() {
    for (reason, descriptors, lead, expected) in CASES {
        let config = CoalesceConfig {
            descriptors,
            gro_flush_timeout_ns: TIMEOUT_NS,
            ..CoalesceConfig::default()
        };
        let mut rig = Rig::new(config);
        rig.feed(&tcp().run(2));
        assert_eq!(rig.out.len(), 0);
        lead(&mut rig);
        assert_eq!(rig.verdicts().1, [(reason, 1)]);
        assert_eq!(rig.counts(), expected, "{reason:?}");
    }
    // A held move needs an intake: see `spines`.
    let covered: BTreeSet<_> = CASES.map(|(reason, ..)| reason.name()).into();
    let all = FlushReason::ALL.into_iter().filter(|&reason| reason != FlushReason::HeldMove);
    assert_eq!(covered, all.map(FlushReason::name).collect());
}

#[test]
fn poll_status_decides_hold_time() {
    use FlushReason::{PollEnd, Timeout};
    let cases = [
        (PollStatus::Last, 0, PollEnd, 0),
        (PollStatus::Last, TIMEOUT_NS, PollEnd, 0),
        (PollStatus::Drained, 0, PollEnd, 0),
        (PollStatus::Drained, TIMEOUT_NS, Timeout, TIMEOUT_NS),
        (PollStatus::MorePending, 0, Timeout, HELD_NS_MAX),
        (PollStatus::MorePending, TIMEOUT_NS, Timeout, TIMEOUT_NS),
    ];
    for (status, gro_flush_timeout_ns, reason, held_ns) in cases {
        let mut rig =
            Rig::new(CoalesceConfig { gro_flush_timeout_ns, ..CoalesceConfig::default() });
        let since_ns = rig.now_ns;
        assert_eq!(rig.coalescer.next_timeout_ns(), None, "nothing is held");
        rig.feed(&tcp().run(1));
        assert_eq!(rig.coalescer.next_timeout_ns(), Some(since_ns + gro_flush_timeout_ns));
        if let Some(just_before_ns) = held_ns.checked_sub(1) {
            rig.now_ns = since_ns + just_before_ns;
            // The time runs from the first segment.
            rig.feed(&[tcp().nth(1).wire()]);
            rig.end_poll(status);
            assert_eq!((rig.coalescer.held(), rig.out.len()), (1, 0), "{status:?}");
        }
        rig.now_ns = since_ns + held_ns;
        rig.end_poll(status);
        assert_eq!((rig.coalescer.held(), rig.out.len()), (0, 1), "{status:?}");
        assert_eq!(rig.verdicts().1, [(reason, 1)], "{status:?}, {gro_flush_timeout_ns}");
    }
}

#[test]
fn only_long_held_is_released() {
    let config = CoalesceConfig { gro_flush_timeout_ns: TIMEOUT_NS, ..CoalesceConfig::default() };
    let mut rig = Rig::new(config);
    for (flow, at_ns) in [(1, 300), (2, 100), (3, 200)] {
        rig.now_ns = at_ns;
        rig.feed(&[tcp().with(|segment| segment.port = flow).wire()]);
    }
    assert_eq!(rig.coalescer.next_timeout_ns(), Some(100 + TIMEOUT_NS));
    rig.now_ns = 200 + TIMEOUT_NS;
    rig.end_poll(PollStatus::Drained);
    let out = taken_apart(std::mem::take(&mut rig.out));
    assert_eq!(out, rig.fed[1..]);
    assert_eq!(rig.coalescer.next_timeout_ns(), Some(300 + TIMEOUT_NS));
}

#[test]
fn recorded_polls_merge_by_any_clock() {
    for (first_ns, second_ns) in [(5, 50_000_005), (50_000_005, 5), (0, u64::MAX), (u64::MAX, 0)] {
        let [first, second] = [0, 1].map(|number| tcp().nth(number).wire());
        let mut rig = Rig::gro();
        rig.feed(&[first.recorded(first_ns), second.recorded(second_ns)]);
        rig.end_poll(PollStatus::Drained);
        assert_eq!(rig.counts(), [2], "{first_ns} and {second_ns}");
    }
}
