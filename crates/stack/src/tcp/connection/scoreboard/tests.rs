use std::cell::Cell;

use proptest::prelude::*;

use super::*;

/// Bytes of a segment.
const MSS: u32 = 1000;

thread_local! {
    /// Segments that were looked at to find one by its number.
    pub(super) static LOOKS: Cell<u32> = const { Cell::new(0) };
    /// Segments that moved when others were merged.
    pub(super) static MOVES: Cell<usize> = const { Cell::new(0) };
}

/// Numbers wrap after twenty segments.
fn sent(number: u32, sent_us: u64) -> Sent {
    let seq = Seq(0) - 20 * MSS + number * MSS;
    Sent {
        seq,
        end: seq + MSS,
        sent_us,
        deliveries: Deliveries::default(),
        marks: Marks::default(),
    }
}

/// Limits of merged segments, within the peer's window, of which the device holds none.
fn limits(most_bytes: u32) -> MergeLimits {
    MergeLimits { most_bytes, window_end: Seq(u32::MAX / 4), held_us: None }
}

fn mark_sacked(marks: &mut Marks) {
    (marks.sacked, marks.lost, marks.retransmitted) = (true, false, false);
}

fn mark_lost(marks: &mut Marks) {
    if !marks.sacked {
        (marks.lost, marks.retransmitted) = (true, false);
    }
}

/// Segments that are not settled and were sent before a time, in the order of time.
fn scanned(scoreboard: &Scoreboard, before_us: u64) -> Vec<Seq> {
    let mut found: Vec<_> = (0..scoreboard.segments.len())
        .map(|index| scoreboard.segments[index].sent)
        .filter(|sent| !sent.marks.is_settled() && sent.sent_us < before_us)
        .collect();
    found.sort_by_key(|sent| sent.sent_us);
    found.iter().map(|sent| sent.seq).collect()
}

/// Segments up to the last overtaken one, as the list by time has them.
fn listed(scoreboard: &Scoreboard) -> Vec<Seq> {
    let Some(overtaken) = scoreboard.by_time.overtaken() else { return Vec::new() };
    let mut index = scoreboard.index_at(scoreboard.by_time.earliest, 0);
    let mut found = Vec::new();
    loop {
        found.extend(scoreboard.at(index).map(|sent| sent.seq));
        if found.last() == Some(&overtaken) {
            return found;
        }
        index = scoreboard.later_than(index).unwrap();
    }
}

proptest! {
    #[test]
    fn tcp_34_overtaken_listed_as_by_scan(
        steps in prop::collection::vec((0_u32..10, any::<prop::sample::Index>()), 1..200),
    ) {
        let mut scoreboard = Scoreboard::INITIAL;
        let (mut number, mut delivered_us) = (0, 0);
        for (now_us, (what, which)) in (1..).zip(steps) {
            let len = scoreboard.segments.len();
            let index = if len == 0 { 0 } else { which.index(len) };
            match what {
                0..=3 => {
                    scoreboard.push(sent(number, now_us));
                    number += 1;
                }
                4 => drop(scoreboard.pop()),
                5 => scoreboard.mark(index, mark_sacked),
                6 => scoreboard.mark(index, mark_lost),
                7 => {
                    scoreboard.sent_again(index, now_us, Default::default());
                    scoreboard.mark(index, |marks| marks.retransmitted |= marks.lost);
                }
                8 => match which.index(7) {
                    5 if len > 0 => {
                        scoreboard.mark(index, |marks| marks.is_joined = true);
                        let size_bytes = [MSS / 3, 2 * MSS / 3, 3 * MSS / 2][which.index(3)];
                        scoreboard.set_segment_size(scoreboard.packet_of(index), size_bytes);
                    }
                    0 => scoreboard.mark_all(|sent| sent.marks.lost = false),
                    1 => scoreboard.truncate(len.saturating_sub(1)),
                    2 => {
                        let held_us = (now_us % 2 == 0).then_some(now_us - 1);
                        let most_bytes = MSS * u32::try_from(2 + now_us % 4).unwrap();
                        let limits = MergeLimits { held_us, ..limits(most_bytes) };
                        scoreboard.merge_behind(index, limits);
                    }
                    3 => scoreboard.split_all(2 * MSS / 3),
                    4 if len > 0 => {
                        let first = *scoreboard.first().unwrap();
                        scoreboard.trim(first.seq + (first.end - first.seq) / 2);
                    }
                    _ => {
                        let at = scoreboard.at(index).copied();
                        if let Some(at) = at.filter(|at| at.end - at.seq > 1) {
                            scoreboard.split(index, at.seq + (at.end - at.seq) / 2);
                        }
                    }
                },
                _ => {
                    let most = usize::try_from(now_us).unwrap();
                    delivered_us = delivered_us.max(which.index(most) as u64);
                }
            }
            scoreboard.overtake(|sent| sent.sent_us < delivered_us);
            prop_assert_eq!(listed(&scoreboard), scanned(&scoreboard, delivered_us));
            let first = scoreboard.first_overtaken().and_then(|index| scoreboard.at(index));
            let expected = scanned(&scoreboard, delivered_us);
            prop_assert_eq!(first.map(|sent| sent.seq), expected.first().copied());
            let last = scoreboard.last_overtaken().map(|sent| sent.seq);
            prop_assert_eq!(last, expected.last().copied());
            let open = scanned(&scoreboard, u64::MAX).len();
            prop_assert_eq!(scoreboard.by_time.has_some, open > 0);
            let waiting = (0..scoreboard.segments.len())
                .filter(|&index| scoreboard.at(index).unwrap().marks.awaits_resend())
                .count();
            prop_assert_eq!(scoreboard.awaiting_resend as usize, waiting);
            let is_head = |node: &&Node| !node.sent.marks.is_joined;
            let heads = scoreboard.segments.iter().filter(is_head).count();
            prop_assert_eq!(scoreboard.heads as usize, heads);
        }
    }
}

/// Segments of packets that are to be sent again in smaller ones.
#[test]
fn tcp_48_narrower_packets_stay_even() {
    let mut scoreboard = Scoreboard::INITIAL;
    (0..6).for_each(|number| scoreboard.push(sent(number, number.into())));
    // A packet of three, one that arrived, one of two of which the second waits, too.
    for (index, is_joined) in [false, true, true, false, false, true].into_iter().enumerate() {
        scoreboard.mark(index, |marks| (marks.is_joined, marks.lost) = (is_joined, index != 3));
    }
    scoreboard.mark(3, mark_sacked);
    scoreboard.split_all(MSS * 2 / 3);
    let told = |node: &Node| (node.sent.end - node.sent.seq, node.sent.marks.is_joined);
    let even = MSS * 2 / 3;
    let told: Vec<_> = scoreboard.segments.iter().map(told).collect();
    let first =
        [(even, false), (even, true), (even, true), (even, true), (3 * MSS - 4 * even, true)];
    assert_eq!(told[..5], first);
    assert_eq!(told[5], (MSS, false));
    assert_eq!(told[6..], [(even, false), (even, true), (even, true), (2 * MSS - 3 * even, true)]);
    assert_eq!((scoreboard.lost, scoreboard.awaiting_resend, scoreboard.sacked), (9, 9, 1));
}

/// A packet of which an ACK took a part of the first segment: a device cuts it from its beginning on.
#[test]
fn tcp_14_rest_of_packet_is_even() {
    for (taken, size, expected) in [
        (999, MSS, &[1000, 1000, 1][..]),
        (1, MSS, &[1000, 1000, 999]),
        (0, MSS, &[1000, 1000, 1000]),
        (0, 988, &[988, 988, 988, 36]),
        (988, 988, &[988, 988, 36]),
        (700, 1150, &[1150, 1150]),
        (600, 3 * MSS, &[2400]),
        (0, 400, &[400, 400, 400, 400, 400, 400, 400, 200]),
    ] {
        let mut scoreboard = Scoreboard::INITIAL;
        (0..5).for_each(|number| scoreboard.push(sent(number, 0)));
        for index in [2, 3] {
            scoreboard.mark(index, |marks| marks.is_joined = true);
        }
        for index in 1..4 {
            scoreboard.mark(index, mark_lost);
        }
        scoreboard.mark(3, |marks| marks.ending = Ending::Pushed);
        scoreboard.pop();
        scoreboard.trim(sent(1, 0).seq + taken);
        scoreboard.set_segment_size(scoreboard.packet_of(0), size);
        let packet = scoreboard.packet_of(0);
        let segments: Vec<_> = packet.clone().map(|index| *scoreboard.at(index).unwrap()).collect();
        let told: Vec<_> = segments.iter().map(|sent| sent.end - sent.seq).collect();
        assert_eq!(told, expected, "after {taken} bytes, by {size}");
        assert!(segments.windows(2).all(|two| two[0].end == two[1].seq));
        let pushed: Vec<_> = segments.iter().map(|sent| sent.marks.ending.is_pushed()).collect();
        assert_eq!(pushed.iter().position(|&is_pushed| is_pushed), Some(expected.len() - 1));
        assert_eq!(scoreboard.at(expected.len()).unwrap().seq, segments[expected.len() - 1].end);
        let lost = u32::try_from(expected.len()).unwrap();
        assert_eq!((scoreboard.lost, scoreboard.awaiting_resend), (lost, lost));
        assert_eq!((scoreboard.len(), scoreboard.packets()), (lost + 1, 2));
    }
}

/// A window with a hole in every tenth place, of which each ACK acknowledges one segment: each
/// segment is looked at once, and one more for each ACK.
#[test]
fn tcp_34_window_size_costs_no_work() {
    for window in [100_u32, 10_000] {
        let mut scoreboard = Scoreboard::INITIAL;
        (0..window).for_each(|number| scoreboard.push(sent(number, number.into())));
        let (mut looks, mut acks) = (0, 0);
        for index in (0..window as usize).filter(|index| index % 10 != 0) {
            let now_us = scoreboard.at(index).unwrap().sent_us;
            scoreboard.mark(index, mark_sacked);
            scoreboard.overtake(|sent| {
                looks += 1;
                sent.sent_us < now_us
            });
            acks += 1;
        }
        assert!(looks <= window + acks, "{looks} looks at {window} segments in {acks} ACKs");
        assert_eq!(listed(&scoreboard).len(), window as usize / 10);
    }
}

/// Segments that are split, merged and partly acknowledged in turn, each from another place: the list by
/// time is searched for their neighbours, and never made anew.
#[test]
fn tcp_34_splitting_and_merging_cost_little() {
    for window in [1_000_u32, 16_000] {
        let mut scoreboard = Scoreboard::INITIAL;
        (0..window).for_each(|number| scoreboard.push(sent(number, number.into())));
        for number in 0..window as usize {
            scoreboard.sent_again(number * 7 % window as usize, number as u64, Default::default());
        }
        LOOKS.set(0);
        for number in 0..window as usize {
            let index = number * 13 % window as usize;
            let at = *scoreboard.at(index).unwrap();
            scoreboard.split(index, at.seq + MSS / 2);
            scoreboard.sent_again(index, u64::from(window) + number as u64, Default::default());
            scoreboard.merge_behind(index, limits(MSS));
        }
        let searches = 8 * window;
        let (looks, most) = (LOOKS.get(), searches * (window.ilog2() + 2));
        assert!(looks <= most, "{looks} looks for {window} segments");
    }
}

/// Segments of a byte in the middle of as many others, which all merge into one: the others move once.
#[test]
fn tcp_34_many_merged_move_others_once() {
    for window in [1_000, 16_000] {
        let mut scoreboard = Scoreboard::INITIAL;
        let first = sent(0, 0);
        (0..window).for_each(|number| {
            let seq = first.seq + number;
            scoreboard.push(Sent { seq, end: seq + 1, ..first });
        });
        MOVES.set(0);
        let index = window as usize / 4;
        assert_eq!(scoreboard.merge_behind(index, limits(window / 2)), window / 2 - 1);
        assert_eq!(scoreboard.len(), window / 2 + 1);
        assert!(MOVES.get() <= window as usize / 4, "{} moves", MOVES.get());
    }
}

proptest! {
    /// Segment that was sent last, the last one of those of that time: held, if limits say so.
    #[test]
    fn tcp_14_merged_within_all_limits(
        gaps_us in prop::collection::vec(0_u64..3, 1..12),
        sacked in prop::collection::vec(any::<prop::sample::Index>(), 0..2),
        again in prop::option::of(any::<prop::sample::Index>()),
        which in any::<prop::sample::Index>(),
        (most, window, is_held) in (1_u32..8, 0_u32..14, any::<bool>()),
    ) {
        let (mut scoreboard, count) = (Scoreboard::INITIAL, gaps_us.len());
        let mut now_us = 1;
        for (number, gap_us) in (0..).zip(gaps_us) {
            now_us += gap_us;
            scoreboard.push(sent(number, now_us));
        }
        sacked.iter().for_each(|it| scoreboard.mark(it.index(count), mark_sacked));
        if let Some(again) = again {
            now_us += 1;
            scoreboard.sent_again(again.index(count), now_us, Default::default());
        }
        let before: Vec<Sent> = scoreboard.segments.iter().map(|node| node.sent).collect();
        let held = (0..count).max_by_key(|&index| before[index].sent_us);
        let index = which.index(count);
        let is_merged = |&at: &usize| {
            !before[at].marks.sacked
                && at < index + most as usize
                && at < window as usize
                && (!is_held || Some(at) != held)
        };
        let merged = (index + 1..count).take_while(is_merged).count();
        let limits = MergeLimits {
            most_bytes: most * MSS,
            window_end: before[0].seq + window * MSS,
            held_us: is_held.then_some(now_us),
        };
        prop_assert_eq!(scoreboard.merge_behind(index, limits) as usize, merged);
        let expected = before[..=index].iter().chain(&before[index + merged + 1..]);
        let seqs: Vec<_> = scoreboard.segments.iter().map(|node| node.sent.seq).collect();
        prop_assert_eq!(seqs, expected.map(|sent| sent.seq).collect::<Vec<_>>());
        prop_assert_eq!(scoreboard.at(index).unwrap().end, before[index + merged].end);
        scoreboard.overtake(|_| true);
        prop_assert_eq!(listed(&scoreboard), scanned(&scoreboard, u64::MAX));
    }
}
