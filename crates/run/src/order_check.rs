//! Order check: every flow of an rx queue must be delivered in the order of arrival.
//!
//! One entry for each queue and flow hash, shared by all CPUs: the arrival number of the flow's last packet.
//! A CPU that delivers a packet exchanges that number for the packet's own, and finds either an
//! older one or a violation. The exchanges on one entry have a total order, which is the order of
//! delivery.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::{CpuId, Packet, RxQueue};

/// Number of entries for flows, in equal parts for the queues; a power of two.
pub const CHECKED_FLOWS_MAX: usize = 1 << 17;

/// Smallest part of a queue; a power of two.
const QUEUE_FLOWS_MIN: usize = 1 << 12;

/// Number of entries probed before a flow goes unchecked.
const PROBES: usize = 32;

/// Order in which flows were delivered, and the number of packets of each.
#[derive(Debug)]
pub struct OrderCheck {
    /// Entries for flows, by rx queue.
    parts: Box<[Box<[FlowRecord]>]>,
    /// Packets without a hash, by rx queue: all of one queue count as one flow.
    unsteered: Box<[FlowRecord]>,
    reordered: AtomicU64,
    unchecked: AtomicU64,
}

/// One flow, on a cache line of its own: other CPUs write the neighbours.
#[derive(Debug, Default)]
#[repr(align(64))]
struct FlowRecord {
    /// Hash in the upper half, arrival number of the last packet in the lower; 0 if free.
    last: AtomicU64,
    /// CPU of the last packet in the upper 16 bits, number of packets in the lower 48.
    tally: AtomicU64,
}

const CPU_SHIFT: u32 = 48;

/// Key of packets without a hash, which have entries of their own.
const UNSTEERED_KEY: u32 = 1;

/// Counts of an order check.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FlowOrder {
    /// Number of flows with a hash.
    pub flows: u64,
    /// Number of flows whose last packet each CPU delivered, by [`CpuId::index`].
    pub per_cpu: Vec<u64>,
    /// Number of packets of the largest flow.
    pub largest: u64,
    /// Number of packets delivered after a later one of their flow.
    pub reordered: u64,
    /// Number of packets that were not checked, since their flow found no entry.
    pub unchecked: u64,
}

impl FlowOrder {
    /// Adds the counts of another check for the same CPUs.
    #[must_use]
    pub fn plus(mut self, other: &Self) -> Self {
        self.per_cpu.resize(self.per_cpu.len().max(other.per_cpu.len()), 0);
        for (sum, flows) in self.per_cpu.iter_mut().zip(&other.per_cpu) {
            *sum += flows;
        }
        Self {
            flows: self.flows + other.flows,
            largest: self.largest.max(other.largest),
            reordered: self.reordered + other.reordered,
            unchecked: self.unchecked + other.unchecked,
            per_cpu: self.per_cpu,
        }
    }
}

impl OrderCheck {
    /// An order check without flows, for `queues` rx queues.
    #[must_use]
    pub fn new(queues: u16) -> Self {
        let entries = |count| -> Box<[_]> { (0..count).map(|_| FlowRecord::default()).collect() };
        let queues = usize::from(queues);
        let part = (CHECKED_FLOWS_MAX / queues.next_power_of_two()).max(QUEUE_FLOWS_MIN);
        Self {
            parts: (0..queues).map(|_| entries(part)).collect(),
            unsteered: entries(queues),
            reordered: AtomicU64::new(0),
            unchecked: AtomicU64::new(0),
        }
    }

    /// Records that `cpu` delivers a packet of `queue` now.
    pub fn deliver(&self, packet: &Packet, queue: RxQueue, cpu: CpuId) {
        let key = if packet.hash.is_some() { packet.hash.0 } else { UNSTEERED_KEY };
        let (last, frames) = (packet.last_arrival(), u64::from(packet.segment_count()));
        let candidates = self.candidates(packet.hash, queue).into_iter();
        let found =
            candidates.into_iter().find_map(|entry| Some((entry, entry.exchange(key, last)?)));
        let Some((entry, before)) = found else {
            // All entries that the flow may use belong to other flows.
            self.unchecked.fetch_add(frames, Ordering::Relaxed);
            return;
        };
        if let FlowBefore::Packet(before) = before
            && !packet.arrival.is_after(before)
        {
            self.reordered.fetch_add(1, Ordering::Relaxed);
        }
        // Two CPUs can meet here only after a violation of order; the count may then be inexact.
        let packets = entry.tally.load(Ordering::Relaxed) & ((1 << CPU_SHIFT) - 1);
        entry.tally.store(u64::from(cpu.0) << CPU_SHIFT | (packets + frames), Ordering::Relaxed);
    }

    /// Counts of the packets delivered so far.
    #[must_use]
    pub fn flows(&self, cpus: usize) -> FlowOrder {
        let mut flows = FlowOrder {
            per_cpu: vec![0; cpus],
            reordered: self.reordered.load(Ordering::Relaxed),
            unchecked: self.unchecked.load(Ordering::Relaxed),
            ..FlowOrder::default()
        };
        for entry in self.parts.iter().flatten() {
            let tally = entry.tally.load(Ordering::Relaxed);
            if tally == 0 {
                continue;
            }
            flows.flows += 1;
            flows.largest = flows.largest.max(tally & ((1 << CPU_SHIFT) - 1));
            let cpu = usize::try_from(tally >> CPU_SHIFT).unwrap_or(usize::MAX);
            if let Some(count) = flows.per_cpu.get_mut(cpu) {
                *count += 1;
            }
        }
        flows
    }

    /// Entries that a flow may use.
    fn candidates(&self, hash: FlowHash, queue: RxQueue) -> impl IntoIterator<Item = &FlowRecord> {
        let queue = usize::from(queue.0);
        let (entries, start, count) = if hash.is_some() {
            let part: &[_] = self.parts.get(queue).map_or(&[], |part| part);
            // Indexed by the upper bits, by which the RPS map assigns hashes, too: neighbours are
            // mostly those of one CPU, so a probe seldom reads a line that another CPU writes.
            let bits = part.len().max(1).trailing_zeros();
            (part, (u64::from(hash.0) << bits >> u32::BITS) as usize, PROBES)
        } else {
            (&*self.unsteered, queue, 1)
        };
        (start..start + count).filter_map(move |at| entries.get(at % entries.len().max(1)))
    }
}

/// State of an entry before a packet.
enum FlowBefore {
    /// No packet: this one is the flow's first.
    Nothing,
    /// Arrival number of the flow's last packet.
    Packet(Arrival),
}

impl FlowRecord {
    /// Replaces the arrival number of the flow's last packet, in one step. `None` if the entry
    /// belongs to another flow.
    fn exchange(&self, key: u32, arrival: Arrival) -> Option<FlowBefore> {
        let ours = u64::from(key) << 32 | u64::from(arrival.0);
        let mut seen = self.last.load(Ordering::Relaxed);
        if seen == 0 {
            match self.last.compare_exchange(0, ours, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(FlowBefore::Nothing),
                Err(now) => seen = now,
            }
        }
        if seen >> 32 != u64::from(key) {
            return None;
        }
        let before = self.last.swap(ours, Ordering::Relaxed);
        Some(FlowBefore::Packet(Arrival::of_frame(before)))
    }
}

#[cfg(test)]
mod tests {
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use forebay_buf::{Pool, Region};
    use forebay_rx::parse::Link;

    use super::*;

    fn pool() -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: 512, chunks: 1 }]];
        carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
    }

    /// Delivers packets of one queue, given as (hash, frame number, cpu).
    fn delivered(packets: &[(u32, u64, u16)]) -> FlowOrder {
        let (check, mut pool) = (OrderCheck::new(1), pool());
        for &(hash, number, cpu) in packets {
            deliver(&check, &mut pool, RxQueue(0), (hash, number, cpu));
        }
        check.flows(2)
    }

    fn deliver(
        check: &OrderCheck,
        pool: &mut Pool,
        queue: RxQueue,
        (hash, number, cpu): (u32, u64, u16),
    ) {
        let (frame, arrival) = (pool.allocate(1).unwrap(), Arrival::of_frame(number));
        let received = Packet::received(frame, arrival, 60, Link::Ethernet);
        let packet = Packet { hash: FlowHash(hash), ..received };
        check.deliver(&packet, queue, CpuId(cpu));
    }

    #[test]
    fn promise_1_late_packet_is_counted() {
        let flows = delivered(&[(9, 0, 0), (9, 2, 0), (7, 1, 1), (9, 1, 1), (9, 3, 1)]);
        assert_eq!((flows.reordered, flows.flows, flows.largest), (1, 2, 4));
        assert_eq!(flows.per_cpu, [0, 2]);
    }

    /// The order of packets that arrived in different queues is nobody's promise.
    #[test]
    fn promise_1_order_is_of_one_queue() {
        for queues in [2, 3, 128] {
            let (check, mut pool) = (OrderCheck::new(queues), pool());
            let mut deliver = |queue, number| {
                deliver(&check, &mut pool, RxQueue(queue), (u32::MAX, number, 0));
            };
            deliver(0, 5);
            deliver(queues - 1, 4);
            assert_eq!((check.flows(1).reordered, check.flows(1).flows), (0, 2));
            deliver(queues - 1, 3);
            assert_eq!(check.flows(1).reordered, 1);
        }
    }

    #[test]
    fn unhashed_packets_form_one_flow() {
        let flows = delivered(&[(0, 0, 0), (0, 5, 0), (0, 4, 0)]);
        assert_eq!((flows.reordered, flows.flows, flows.unchecked), (1, 0, 0));
    }

    #[test]
    fn arrival_numbers_may_wrap() {
        let near = (1u64 << 32) - 2;
        let flows =
            delivered(&[(9, near, 0), (9, near + 1, 0), (9, near + 2, 0), (9, near + 3, 0)]);
        assert_eq!(flows.reordered, 0);
    }

    #[test]
    fn excess_flows_counted_as_unchecked() {
        let hashes = 1..u32::try_from(CHECKED_FLOWS_MAX * 2).unwrap();
        let packets: Vec<_> = hashes.map(|hash| (hash, u64::from(hash), 0)).collect();
        let flows = delivered(&packets);
        assert!(flows.unchecked > 0);
        assert_eq!(flows.flows + flows.unchecked, packets.len() as u64);
    }
}
