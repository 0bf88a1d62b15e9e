//! Flows, their frames, and arrival times.
//!
//! A frame is a stamped UDP datagram, so that its flow and its position in the flow can be
//! identified regardless of its hash: flows may share one.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_device::synthetic::{STAMP_BYTES, stamped_udp};
use forebay_rx::RxQueue;
use forebay_rx::hash::{FlowHash, Hasher, KEYED_KEY_BYTES};
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{Link, Verify, View, parse};
use forebay_sys::random::Random;

use crate::action::Span;
use crate::scenario::{Hashes, TrafficPlan};
use crate::shift::PPM;

/// A flow by the number in its stamps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct FlowId(pub(crate) u32);

impl FlowId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Length of a frame.
pub(crate) const FRAME_BYTES: usize = 42 + STAMP_BYTES;

/// Offsets in a frame of its EtherType, its UDP checksum, and its sequence number.
const ETHERTYPE_AT: usize = 12;
const CHECKSUM_AT: usize = 40;
const SEQUENCE_AT: usize = FRAME_BYTES - 8;

/// Offsets in a frame of its IPv4 header, and of its UDP length.
const IPV4: std::ops::Range<usize> = 14..34;
const UDP_LENGTH_AT: usize = 38;

/// The "more fragments" flag.
const MORE_FRAGMENTS: u8 = 0x20;

/// Bytes of the datagram in each fragment: a frame's length without Ethernet and IPv4 headers.
const FRAGMENT_BYTES: usize = FRAME_BYTES - IPV4.end;

/// EtherType for local experiments: no addresses, so no hash.
const NO_IP: [u8; 2] = [0x88, 0xb5];

/// Ring size of a device; frames that arrive while the ring is full are missed.
const DEVICE_RING: usize = 1_024;

/// Parts that the load is counted in.
pub(crate) const BILLION: u64 = 1_000_000_000;

/// Number of equal low hash bits in a pair of flows that share an entry of the socket-flow table.
const SOCK_SLOT_BITS: u32 = 15;

/// Number of hash bits that vary freely among flows that share slots of the flow table.
const FEW_SLOTS_SHIFT: u32 = 14;

/// One flow.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) queue: RxQueue,
    /// Hash that its packets are steered by at present.
    pub(crate) hash: FlowHash,
    /// True if the device supplies the hash; else the path computes it.
    pub(crate) device_hash: bool,
    /// Number of frames so far.
    pub(crate) sequence: u64,
    frame: [u8; FRAME_BYTES],
    /// True if every two of its frames are the fragments of one datagram.
    is_in_fragments: bool,
}

impl Flow {
    /// Writes the flow's next frame, and returns its position in the flow.
    pub(crate) fn write_next(&mut self, bytes: &mut [u8]) -> u64 {
        let sequence = self.sequence;
        self.sequence += 1;
        bytes.copy_from_slice(&self.frame);
        let stamp = sequence.to_be_bytes();
        bytes[SEQUENCE_AT..].copy_from_slice(&stamp);
        if self.is_in_fragments {
            make_fragment(bytes, sequence);
            return sequence;
        }
        let checksum = &mut bytes[CHECKSUM_AT..CHECKSUM_AT + 2];
        let before = !u16::from_be_bytes([checksum[0], checksum[1]]);
        let sum = !Sum::of(&stamp).plus_word(before).fold();
        let sum = if sum == 0 { u16::MAX } else { sum };
        checksum.copy_from_slice(&sum.to_be_bytes());
        sequence
    }
}

/// Frames waiting in the devices, and the generator of further ones.
#[derive(Debug)]
pub(crate) struct Traffic {
    plan: TrafficPlan,
    random: Random,
    flows: Vec<Flow>,
    /// Sums of the weights of the first flows, in order, if flows differ in weight.
    weights: Vec<u64>,
    /// Flows that still send, each with its number of packets left.
    live: Vec<(FlowId, u64)>,
    rings: Vec<VecDeque<FlowId>>,
    /// Number of packets of the run.
    packets: u64,
    /// Number of packets still to arrive at the devices.
    left: u64,
    /// Arrival time of the next one.
    next_ns: u64,
    /// Index in `live` of the current run's flow, and the number of packets left in the run.
    run: (usize, u64),
    /// Packets left of a burst: they arrive at once.
    burst: u64,
    hasher: Arc<Hasher>,
    /// Number of frames handed out so far.
    frames: u64,
    missed: u64,
}

impl Traffic {
    pub(crate) fn new(plan: TrafficPlan, packets: u64, queues: u16, mut random: Random) -> Self {
        let hasher = draw_hasher(&mut random);
        let flows = plan.flows;
        let mut traffic = Self {
            plan,
            random,
            flows: Vec::new(),
            weights: Vec::new(),
            live: Vec::new(),
            rings: (0..queues).map(|_| VecDeque::new()).collect(),
            packets,
            left: packets,
            next_ns: 0,
            run: (0, 0),
            burst: 0,
            hasher,
            frames: 0,
            missed: 0,
        };
        if let Some(flat_ranks) = traffic.plan.zipf {
            traffic.weights = zipf(flows, flat_ranks);
        }
        for _ in 0..flows {
            let flow = traffic.begin_flow();
            traffic.live.push(flow);
        }
        traffic
    }

    /// A flow by its number.
    pub(crate) fn flow(&self, flow: FlowId) -> &Flow {
        &self.flows[flow.index()]
    }

    pub(crate) fn flow_mut(&mut self, flow: FlowId) -> &mut Flow {
        &mut self.flows[flow.index()]
    }

    pub(crate) fn flows(&self) -> &[Flow] {
        &self.flows
    }

    pub(crate) fn hasher(&self) -> &Arc<Hasher> {
        &self.hasher
    }

    /// A random flow that still sends; with an elephant, that one every other time.
    pub(crate) fn pick(&self, random: &mut Random) -> FlowId {
        if self.plan.elephant_percent > 0 && random.below(2) == 0 {
            return FlowId(0);
        }
        let index = random.below(self.live.len() as u64);
        self.live[usize::try_from(index).unwrap_or(0)].0
    }

    /// Number of the next frame to be handed out.
    pub(crate) fn next_frame(&mut self) -> u64 {
        self.frames += 1;
        self.frames - 1
    }

    /// Takes up to `max` frames of a queue that have arrived by now.
    pub(crate) fn poll(&mut self, queue: RxQueue, max: usize, now_ns: u64, out: &mut Vec<FlowId>) {
        self.arrive(now_ns);
        let ring = &mut self.rings[usize::from(queue.0)];
        out.extend(ring.drain(..max.min(ring.len())));
    }

    /// Time when a queue next has frames to poll, if ever.
    pub(crate) fn due_ns(&self, queue: RxQueue) -> Option<u64> {
        if self.waits_in(queue) {
            return Some(0);
        }
        (self.left > 0).then_some(self.next_ns)
    }

    pub(crate) fn waits_in(&self, queue: RxQueue) -> bool {
        !self.rings[usize::from(queue.0)].is_empty()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.left == 0 && self.rings.iter().all(VecDeque::is_empty)
    }

    /// Lets this many packets arrive at once.
    pub(crate) fn burst(&mut self, packets: u64) {
        self.burst += packets;
    }

    /// Hashes all flows under another key; returns the new hasher for the path.
    pub(crate) fn rehash(&mut self) -> Arc<Hasher> {
        self.hasher = draw_hasher(&mut self.random);
        for flow in &mut self.flows {
            if !flow.device_hash {
                flow.hash = computed_hash(&self.hasher, &flow.frame);
            }
        }
        Arc::clone(&self.hasher)
    }

    /// Generates the frames that arrive by now.
    fn arrive(&mut self, now_ns: u64) {
        while self.left > 0 && self.next_ns <= now_ns {
            self.left -= 1;
            let flow = self.next_flow();
            let ring = &mut self.rings[usize::from(self.flows[flow.index()].queue.0)];
            if ring.len() < DEVICE_RING {
                ring.push_back(flow);
            } else {
                self.missed += 1;
            }
            if self.burst > 0 {
                self.burst -= 1;
            } else {
                let load = self.plan.load_percent * self.load_ppm();
                let mean_ns = self.plan.service_ns * 100 * PPM / load.max(1);
                self.next_ns += self.random.between(0, 2 * mean_ns);
            }
        }
    }

    fn next_flow(&mut self) -> FlowId {
        let TrafficPlan { load_percent, elephant_percent, .. } = self.plan;
        let is_heavy = self.random.below(load_percent) < elephant_percent;
        let heavy = self.plan.shift.heavy(self.phase());
        if is_heavy && !heavy.is_empty() {
            let count = u64::from(heavy.end - heavy.start);
            let index = if count > 1 { self.random.below(count) } else { 0 };
            return FlowId(heavy.start + u32::try_from(index).unwrap_or(0));
        }
        if self.run.1 == 0 {
            self.run = (self.draw_place(), self.plan.run.draw(&mut self.random));
        }
        self.run.1 = self.run.1.saturating_sub(1);
        let place = self.run.0;
        let (flow, left) = &mut self.live[place];
        let flow = *flow;
        *left -= 1;
        if *left == 0 {
            self.live[place] = self.begin_flow();
        }
        flow
    }

    /// Index in `live` of the flow that sends next.
    fn draw_place(&mut self) -> usize {
        match self.weights.last() {
            Some(&all) => {
                let drawn = self.random.below(all);
                let rank = self.weights.partition_point(|sum| *sum <= drawn);
                self.place_of(rank)
            }
            None => {
                let drawn = self.random.below(self.live.len() as u64);
                usize::try_from(drawn).unwrap_or(0)
            }
        }
    }

    /// Index in `live` of the flow with this rank.
    fn place_of(&self, rank: usize) -> usize {
        let (so_far, flows) = ((self.came(), self.packets), self.live.len() as u64);
        let place = self.plan.shift.place(rank as u64, so_far, flows);
        usize::try_from(place).unwrap_or(0)
    }

    /// Load in millionths of the plan's.
    fn load_ppm(&self) -> u64 {
        let TrafficPlan { load_percent, elephant_percent, shift, .. } = self.plan;
        let heavy_mille = elephant_percent * 1_000 / load_percent.max(1);
        shift.load_ppm(self.came(), self.packets, heavy_mille.min(1_000), load_percent)
    }

    /// Work of delivering the packets that come at present, in ns a second.
    pub(crate) fn work_ns(&self) -> u64 {
        self.plan.load_percent * self.load_ppm() * (BILLION / PPM / 100)
    }

    fn came(&self) -> u64 {
        self.packets - self.left
    }

    /// Phase of the run.
    pub(crate) fn phase(&self) -> u64 {
        self.plan.shift.phase(self.came(), self.packets)
    }

    /// Part of each of the first flows in the load at present, in billionths.
    pub(crate) fn shares(&self) -> Vec<u64> {
        let TrafficPlan { load_percent, elephant_percent, .. } = self.plan;
        let heavy = self.plan.shift.heavy(self.phase());
        let heavy_share =
            if heavy.is_empty() { 0 } else { BILLION * elephant_percent / load_percent.max(1) };
        let sum = u128::from(self.weights.last().copied().unwrap_or(1));
        let rest = u128::from(BILLION - heavy_share);
        let mut shares = vec![0; self.live.len()];
        let mut before = 0;
        for (rank, &until) in self.weights.iter().enumerate() {
            let share = u128::from(until - before) * rest / sum;
            shares[self.place_of(rank)] = u64::try_from(share).unwrap_or(BILLION);
            before = until;
        }
        let count = u64::from(heavy.end - heavy.start);
        heavy.for_each(|flow| shares[flow as usize] += heavy_share / count);
        shares
    }

    fn begin_flow(&mut self) -> (FlowId, u64) {
        let id = u32::try_from(self.flows.len()).unwrap_or(u32::MAX);
        let mut frame = [0; FRAME_BYTES];
        frame.copy_from_slice(&stamped_udp(id, 0, STAMP_BYTES, false));
        let is_in_fragments = self.plan.fragments;
        if is_in_fragments {
            make_fragment(&mut frame, 0);
        }
        let (hash, device_hash) = self.draw_hash(id, &mut frame);
        let queues = u32::try_from(self.rings.len()).unwrap_or(1);
        let queue = RxQueue(u16::try_from(id % queues).unwrap_or(0));
        self.flows.push(Flow { queue, hash, device_hash, sequence: 0, frame, is_in_fragments });
        let forever = Span(u64::MAX, u64::MAX);
        (FlowId(id), self.plan.lifetime.unwrap_or(forever).draw(&mut self.random).max(1))
    }

    /// Hash of a new flow, and true if the device supplies it.
    fn draw_hash(&mut self, id: u32, frame: &mut [u8; FRAME_BYTES]) -> (FlowHash, bool) {
        let drawn = u32::try_from(self.random.bits() >> 32).unwrap_or(1);
        if self.random.below(100) < self.plan.without_hash_percent {
            frame[ETHERTYPE_AT..ETHERTYPE_AT + 2].copy_from_slice(&NO_IP);
            return (FlowHash::NONE, false);
        }
        let queues = u32::try_from(self.rings.len()).unwrap_or(1);
        // The partner is a flow of the same queue.
        let partner = id.checked_sub(queues).filter(|_| (id / queues) % 2 == 1);
        let partner = partner.map(|partner| self.flows[partner as usize].hash.0);
        let low_bits = (1 << SOCK_SLOT_BITS) - 1;
        let hash = match (self.plan.hashes, partner) {
            (Hashes::Computed, _) => return (computed_hash(&self.hasher, frame), false),
            (Hashes::SockSlotPairs, Some(partner)) => (drawn & !low_bits) | (partner & low_bits),
            (Hashes::SamePairs, Some(partner)) => partner,
            (Hashes::FewFlowSlots, _) => {
                (drawn >> 30 << 30) | (drawn & ((1 << FEW_SLOTS_SHIFT) - 1))
            }
            _ => self.plan.shift.hash(FlowId(id), drawn),
        };
        (FlowHash::computed(hash), true)
    }
}

/// Sums of the weights of flows by rank: 1 / (rank + `flat_ranks`), so that few are heavy and many
/// light.
fn zipf(flows: u32, flat_ranks: u32) -> Vec<u64> {
    let weights = (1..=u64::from(flows)).map(|rank| 1_000_000_000 / (rank + u64::from(flat_ranks)));
    let sums = weights.scan(0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    });
    sums.collect()
}

/// Turns a frame into the first or second fragment of a datagram without a checksum. Both end with
/// their own stamps.
fn make_fragment(frame: &mut [u8], sequence: u64) {
    let id = u16::try_from(sequence / 2 % (1 << 16)).unwrap_or(0);
    let (place, units) = (IPV4.start, u8::try_from(FRAGMENT_BYTES / 8).unwrap_or(0));
    frame[place + 4..place + 6].copy_from_slice(&id.to_be_bytes());
    if sequence.is_multiple_of(2) {
        [frame[place + 6], frame[place + 7]] = [MORE_FRAGMENTS, 0];
        let len = u16::try_from(2 * FRAGMENT_BYTES).unwrap_or(0);
        frame[UDP_LENGTH_AT..CHECKSUM_AT].copy_from_slice(&len.to_be_bytes());
        frame[CHECKSUM_AT..CHECKSUM_AT + 2].fill(0);
    } else {
        [frame[place + 6], frame[place + 7]] = [0, units];
        frame[IPV4.end..FRAME_BYTES - STAMP_BYTES].fill(0);
    }
    frame[place + 10..place + 12].fill(0);
    let checksum = !Sum::of(&frame[IPV4]).fold();
    frame[place + 10..place + 12].copy_from_slice(&checksum.to_be_bytes());
}

fn draw_hasher(random: &mut Random) -> Arc<Hasher> {
    let mut key = [0; KEYED_KEY_BYTES];
    for half in key.chunks_mut(8) {
        half.copy_from_slice(&random.bits().to_le_bytes());
    }
    Arc::new(Hasher::keyed(&key, false))
}

fn computed_hash(hasher: &Hasher, frame: &[u8; FRAME_BYTES]) -> FlowHash {
    let wire_len = u32::try_from(FRAME_BYTES).unwrap_or(u32::MAX);
    let headers = parse(frame, wire_len, Link::Ethernet, Verify::Nothing);
    hasher.hash(&View::new(frame, &headers))
}

#[cfg(test)]
mod tests {
    use forebay_rx::parse::Checksum;

    use super::*;

    #[test]
    fn frames_numbered_with_right_checksums() {
        let plan = crate::scenario::Situation::RpsStable
            .draw(crate::Overrides::default(), &mut Random::new(1))
            .traffic;
        let mut traffic = Traffic::new(plan, 10, 1, Random::new(1));
        let mut bytes = [0; FRAME_BYTES];
        let wire_len = u32::try_from(FRAME_BYTES).unwrap();
        for sequence in 0..70_000 {
            assert_eq!(traffic.flow_mut(FlowId(3)).write_next(&mut bytes), sequence);
            let headers = parse(&bytes, wire_len, Link::Ethernet, Verify::Checksums);
            assert_eq!(headers.l4_checksum, Checksum::Good, "{sequence}");
            assert_eq!(bytes[..], stamped_udp(3, sequence, STAMP_BYTES, false)[..]);
        }
    }
}
