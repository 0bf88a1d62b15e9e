//! The laws of a run: order, conservation, bounds, counters. Liveness is in `liveness`.

use std::collections::BTreeMap;

use forebay_rx::CpuId;
use serde::Serialize;

use crate::census::Census;
use crate::traffic::FlowId;

/// A law that a run can violate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Law {
    /// The packets of a flow reach the application in the order of arrival (promise 1).
    Order,
    /// Every frame is in exactly one place (promise 2).
    Conservation,
    /// Every backlog, hold and batch stays within its limit (promise 3).
    Bounds,
    /// A flow reaches its desired CPU in a bounded time (promise 3).
    Liveness,
    /// Counters agree with the observed values.
    Counters,
    /// The load moves no flow twice in a second (RPS-B4).
    Rest,
}

impl Law {
    /// All laws.
    pub const ALL: [Self; 6] =
        [Self::Order, Self::Conservation, Self::Bounds, Self::Liveness, Self::Counters, Self::Rest];

    /// Name of the law in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Conservation => "conservation",
            Self::Bounds => "bounds",
            Self::Liveness => "liveness",
            Self::Counters => "counters",
            Self::Rest => "rest",
        }
    }
}

/// Observations of a run, and the number of violations of each law.
#[derive(Debug, Default)]
pub(crate) struct Laws {
    /// Frames by number.
    packets: Vec<PacketRecord>,
    /// Flows by number.
    flows: Vec<FlowRecord>,
    pub(crate) frames_in: u64,
    pub(crate) delivered: u64,
    pub(crate) dropped: u64,
    /// Number of datagrams reassembled from their fragments.
    whole: u64,
    broken: [u64; Law::ALL.len()],
    /// The first violation: its law, and a description.
    pub(crate) first: Option<(Law, String)>,
    /// Digest of all deliveries: frame, time and CPU.
    pub(crate) digest: u64,
    /// Length of each backlog at the previous check.
    backlogs_before: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct PacketRecord {
    /// Flow of the frame; `None` if it was refused before it was parsed.
    flow: Option<FlowId>,
    sequence: u64,
    fate: Fate,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    OnItsWay,
    Delivered,
    Dropped,
}

/// Observations of a flow.
#[derive(Clone, Copy, Debug, Default)]
struct FlowRecord {
    /// The highest sequence number delivered, plus one.
    next: u64,
    /// Number of packets that arrived and are neither delivered nor dropped.
    on_their_way: u64,
    /// CPU of the last delivery.
    cpu: Option<CpuId>,
    /// Number of times that this CPU changed.
    moves: u64,
}

/// A packet as the application receives it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivered {
    /// Number of the frame, from the packet's metadata.
    pub(crate) number: u64,
    /// Flow and position in it, from the packet's bytes.
    pub(crate) flow: FlowId,
    pub(crate) sequence: u64,
    pub(crate) cpu: CpuId,
    pub(crate) now_ns: u64,
}

impl Laws {
    /// Records a frame that was taken in.
    pub(crate) fn arrived(&mut self, number: u64, flow: FlowId, sequence: u64) {
        self.frames_in += 1;
        self.push(number, PacketRecord { flow: Some(flow), sequence, fate: Fate::OnItsWay });
        if self.flows.len() <= flow.index() {
            self.flows.resize(flow.index() + 1, FlowRecord::default());
        }
        self.flows[flow.index()].on_their_way += 1;
    }

    /// Records a frame that found no memory.
    pub(crate) fn refused(&mut self, number: u64) {
        self.frames_in += 1;
        self.push(number, PacketRecord { flow: None, sequence: 0, fate: Fate::OnItsWay });
    }

    fn push(&mut self, number: u64, record: PacketRecord) {
        debug_assert_eq!(number, self.packets.len() as u64, "frames are numbered as they come");
        self.packets.push(record);
    }

    /// Records a packet that an application received.
    pub(crate) fn delivered(&mut self, packet: Delivered) {
        let Delivered { number, flow, sequence, cpu, now_ns } = packet;
        self.delivered += 1;
        self.digest_in(number);
        self.digest_in(now_ns);
        self.digest_in(cpu.0.into());
        let Some(record) = self.end(number, Fate::Delivered) else { return };
        if record.flow != Some(flow) || record.sequence != sequence {
            self.broke(Law::Conservation, || {
                format!("frame {number} came as {record:?}, and holds {sequence} of {flow:?}")
            });
            return;
        }
        let seen = &mut self.flows[flow.index()];
        seen.moves += u64::from(seen.cpu.is_some_and(|before| before != cpu));
        seen.cpu = Some(cpu);
        let next = seen.next;
        seen.next = next.max(sequence + 1);
        if sequence < next {
            self.broke(Law::Order, || {
                format!(
                    "at {now_ns} ns {cpu:?} delivers packet {sequence} of flow {} after its packet \
                     {}",
                    flow.0,
                    next - 1,
                )
            });
        }
    }

    /// Records a datagram reassembled from these two frames of a flow.
    pub(crate) fn became_whole(&mut self, [first, second]: [Option<(FlowId, u64)>; 2]) {
        self.whole += 1;
        let behind = first.map(|(flow, sequence)| (flow, sequence + 1));
        if behind.is_none() || behind != second {
            self.broke(Law::Conservation, || {
                format!("a datagram is made of {first:?} and {second:?}")
            });
        }
    }

    /// Checks that all datagrams were reassembled of which both fragments were delivered, on
    /// whichever CPU.
    pub(crate) fn check_whole(&mut self) {
        let delivered = self.packets.iter().filter(|packet| packet.fate == Fate::Delivered);
        let mut halves = BTreeMap::new();
        for packet in delivered {
            *halves.entry((packet.flow, packet.sequence / 2)).or_insert(0) += 1;
        }
        let expected = halves.values().filter(|&&halves| halves == 2).count() as u64;
        self.agree(Law::Conservation, "whole datagrams", self.whole, expected);
    }

    /// Records a frame that was dropped and accounted for.
    pub(crate) fn dropped(&mut self, number: u64) {
        self.dropped += 1;
        self.end(number, Fate::Dropped);
    }

    /// Records the fate of a frame, unless it has one already.
    fn end(&mut self, number: u64, fate: Fate) -> Option<PacketRecord> {
        let record = usize::try_from(number).ok().and_then(|index| self.packets.get_mut(index));
        let Some(record) = record.filter(|record| record.fate == Fate::OnItsWay) else {
            let before = usize::try_from(number).ok().and_then(|index| self.packets.get(index));
            let text = format!("frame {number} is {fate:?}, and was {before:?}");
            self.broke(Law::Conservation, || text);
            return None;
        };
        record.fate = fate;
        let record = *record;
        if let Some(flow) = record.flow {
            self.flows[flow.index()].on_their_way -= 1;
        }
        Some(record)
    }

    /// Number of packets of a flow that are queued, held or in a current batch.
    pub(crate) fn on_their_way(&self, flow: FlowId) -> u64 {
        self.flows.get(flow.index()).map_or(0, |flow| flow.on_their_way)
    }

    /// Number of times that the CPU changed on which a flow is delivered.
    pub(crate) fn moves_of(&self, flow: FlowId) -> u64 {
        self.flows.get(flow.index()).map_or(0, |flow| flow.moves)
    }

    /// Records a violation of a law.
    pub(crate) fn broke(&mut self, law: Law, text: impl FnOnce() -> String) {
        self.broken[law as usize] += 1;
        if self.first.is_none() {
            self.first = Some((law, text()));
        }
    }

    /// Number of violations of a law.
    pub(crate) fn broken(&self, law: Law) -> u64 {
        self.broken[law as usize]
    }

    /// Checks that a reported number equals the observed one.
    pub(crate) fn agree(&mut self, law: Law, what: &str, said: u64, seen: u64) {
        if said != seen {
            self.broke(law, || format!("{what}: {said}, but {seen} were seen"));
        }
    }

    /// Checks the laws that hold at any time.
    pub(crate) fn check(&mut self, census: &Census) {
        let on_their_way = census.frames_away - census.frames_done;
        let accounted = self.delivered + self.dropped + on_their_way;
        self.agree(Law::Conservation, "frames accounted for", accounted, self.frames_in);
        let packets = census.queued + census.held + census.coalescing;
        if packets > on_their_way || (!census.merges && packets < on_their_way) {
            self.broke(Law::Conservation, || {
                format!("{packets} packets are queued or held, in {on_their_way} frames in use")
            });
        }
        self.check_bounds(census);
    }

    fn check_bounds(&mut self, census: &Census) {
        let Census { held, hold_max, batch_max, backlog_max, .. } = *census;
        if held > hold_max {
            self.broke(Law::Bounds, || format!("{held} packets are held, {hold_max} may be"));
        }
        for (cpu, &in_hand) in census.in_hand.iter().enumerate() {
            if in_hand > batch_max {
                self.broke(Law::Bounds, || {
                    format!("cpu{cpu} has {in_hand} packets in hand, {batch_max} may be")
                });
            }
        }
        self.backlogs_before.resize(census.backlogs.len(), 0);
        for (index, backlog) in census.backlogs.iter().enumerate() {
            let before = std::mem::replace(&mut self.backlogs_before[index], backlog.packets);
            // A limit that was lowered takes effect as the backlog drains.
            if backlog.packets > backlog_max.max(before) {
                self.broke(Law::Bounds, || format!("{backlog:?}, {backlog_max} may be"));
            }
        }
    }

    /// Checks the laws that hold at the end of a run.
    pub(crate) fn check_rest(&mut self, census: &Census) {
        self.agree(Law::Conservation, "frames not home at the end", census.frames_away, 0);
        let lost = self.packets.iter().position(|packet| packet.fate == Fate::OnItsWay);
        if let Some(number) = lost {
            self.broke(Law::Conservation, || format!("frame {number} was never seen again"));
        }
    }

    fn digest_in(&mut self, number: u64) {
        // FNV-1a, a word at a time.
        const PRIME: u64 = 0x0100_0000_01b3;
        self.digest = (self.digest ^ number).wrapping_mul(PRIME);
    }
}

#[cfg(test)]
mod tests {
    use forebay_rx::RxQueue;

    use super::*;
    use crate::census::Backlog;

    fn packet(number: u64, flow: u32, sequence: u64) -> Delivered {
        Delivered { number, flow: FlowId(flow), sequence, cpu: CpuId(1), now_ns: 5 }
    }

    /// Records after two packets of flow 7 have arrived, with one of flow 3 in between.
    fn laws() -> Laws {
        let mut laws = Laws::default();
        for (number, flow, sequence) in [(0, 7, 0), (1, 3, 0), (2, 7, 1)] {
            laws.arrived(number, FlowId(flow), sequence);
        }
        laws
    }

    fn broken(laws: &Laws) -> [u64; Law::ALL.len()] {
        Law::ALL.map(|law| laws.broken(law))
    }

    /// A census with just enough room for everything in `laws`.
    fn census() -> Census {
        Census {
            backlogs: vec![Backlog { queue: RxQueue(0), cpu: CpuId(1), frames: 3, packets: 3 }],
            backlog_max: 3,
            in_hand: vec![2],
            batch_max: 2,
            hold_max: 1,
            queued: 3,
            frames_away: 3,
            ..Census::default()
        }
    }

    #[test]
    fn promise_1_late_packet_is_seen_exactly() {
        let mut laws = laws();
        laws.delivered(packet(2, 7, 1));
        laws.delivered(packet(1, 3, 0));
        assert_eq!(broken(&laws), [0; 6], "flows may overtake each other");
        laws.delivered(packet(0, 7, 0));
        assert_eq!(broken(&laws), [1, 0, 0, 0, 0, 0]);
        assert!(laws.first.is_some_and(|(law, _)| law == Law::Order));
    }

    #[test]
    fn promise_2_frame_ends_once() {
        for end in [
            |laws: &mut Laws| laws.delivered(packet(0, 7, 0)),
            |laws: &mut Laws| laws.dropped(0),
            |laws: &mut Laws| laws.delivered(packet(1, 7, 1)),
            |laws: &mut Laws| laws.delivered(packet(9, 7, 1)),
        ] {
            let mut laws = laws();
            laws.delivered(packet(0, 7, 0));
            end(&mut laws);
            assert_eq!(broken(&laws), [0, 1, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn promise_2_frames_are_always_accounted() {
        let mut laws = laws();
        laws.check(&census());
        assert_eq!(broken(&laws), [0; 6]);
        laws.check(&Census { frames_away: 2, queued: 2, ..census() });
        laws.check(&Census { queued: 2, ..census() });
        laws.check(&Census { held: 1, ..census() });
        assert_eq!(broken(&laws), [0, 3, 0, 0, 0, 0]);
        laws.check_rest(&census());
        assert_eq!(broken(&laws), [0, 5, 0, 0, 0, 0], "frames are away, and have no end");
    }

    #[test]
    fn promise_3_exceeded_limits_seen_unless_lowered() {
        let mut laws = laws();
        laws.check(&census());
        laws.check(&Census { backlog_max: 2, ..census() });
        assert_eq!(broken(&laws), [0; 6]);
        let mut fuller = Census { backlog_max: 2, ..census() };
        fuller.backlogs[0].packets = 4;
        laws.check(&fuller);
        laws.check(&Census { in_hand: vec![0, 3], ..census() });
        laws.check(&Census { held: 2, queued: 1, ..census() });
        assert_eq!(broken(&laws), [0, 0, 3, 0, 0, 0]);
    }
}
