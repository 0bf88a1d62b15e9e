//! The socket-flow table: the CPU of each flow's application (RFS-1, RFS-3).
//!
//! All queues and all applications share the table without locks or ordering, so a value may be
//! stale. A stale value costs locality, never order: a change of the desired CPU moves a flow by the
//! drain rule only.
//!
//! Many flows share an entry, and anybody may send to an unconnected socket. An entry therefore has
//! a *trust*: the number of times that returning flows must request the entry until its flow gives
//! way. Flows of connected sockets have the highest trust and need no request. A flow of an
//! unconnected socket that is seen once changes nothing: strangers do not return, or not often
//! enough while the entry's own flow does. An entry out of use loses its trust to flows in use.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Default number of entries, as suggested by the kernel's documentation.
pub const RPS_SOCK_FLOW_ENTRIES: u32 = 32_768;

/// Maximum number of entries, as in the kernel.
pub const RPS_SOCK_FLOW_ENTRIES_MAX: u32 = 1 << 29;

/// Trust of a flow of a connected socket, whose application chose its peer.
const CONNECTED_TRUST: u8 = u8::MAX;

/// Maximum trust of any other flow, reached with its fourth record.
const UNCONNECTED_TRUST_MAX: u8 = 15;

/// CPU of each flow's application (`rps_sock_flow_table`).
#[derive(Debug)]
pub struct SockFlowTable {
    /// By the lower bits of the hash. Written by the threads of applications.
    entries: Box<[AtomicU64]>,
    /// Highest CPU id plus one.
    cpus: u16,
}

/// Entry, from the upper bits to the lower: hash of a flow (32 bits), CPU of its application (16),
/// upper bits of the hash of the flow that requested the entry last (8), and trust (8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SockFlowEntry(u64);

impl SockFlowEntry {
    /// Free entry: no flow has the hash 0, and no CPU this number.
    const NONE: Self = Self((NO_CPU as u64) << CPU_SHIFT);

    fn new(flow: FlowHash, cpu: CpuId, trust: u8) -> Self {
        debug_assert!(flow.is_some() && cpu.0 != NO_CPU, "the fields of a free entry");
        debug_assert!(trust > 0, "an entry without trust has no flow");
        Self(u64::from(flow.0) << FLOW_SHIFT | u64::from(cpu.0) << CPU_SHIFT | u64::from(trust))
    }

    fn flow(self) -> FlowHash {
        let [a, b, c, d, ..] = self.0.to_be_bytes();
        FlowHash(u32::from_be_bytes([a, b, c, d]))
    }

    fn cpu(self) -> Option<CpuId> {
        let [_, _, _, _, high, low, _, _] = self.0.to_be_bytes();
        Some(u16::from_be_bytes([high, low])).filter(|&cpu| cpu != NO_CPU).map(CpuId)
    }

    fn trust(self) -> u8 {
        let [.., trust] = self.0.to_be_bytes();
        trust
    }

    /// Entry without the flow that requested it last.
    fn without_candidate(self) -> Self {
        Self(self.0 & !(u64::from(u8::MAX) << CANDIDATE_SHIFT))
    }

    /// Entry after a request by another flow.
    fn asked_by(self, flow: FlowHash, cpu: CpuId) -> Self {
        debug_assert_ne!(self.flow(), flow, "a flow does not request its own entry");
        let candidate = u64::from(flow.0 >> 24) << CANDIDATE_SHIFT;
        let asked = Self(self.without_candidate().0 | candidate);
        if self == Self::NONE {
            Self::new(flow, cpu, 1)
        } else if self != asked {
            asked // first request: the flow may never return
        } else if self.trust() > 1 {
            Self(asked.0 - 1)
        } else {
            Self::new(flow, cpu, 1)
        }
    }
}

/// `RPS_NO_CPU`.
const NO_CPU: u16 = u16::MAX;

const FLOW_SHIFT: u32 = 32;
const CPU_SHIFT: u32 = 16;
const CANDIDATE_SHIFT: u32 = 8;

const _: () = assert!(RPS_SOCK_FLOW_ENTRIES_MAX.is_power_of_two(), "entries round up to it");
const _: () = assert!(CONNECTED_TRUST > UNCONNECTED_TRUST_MAX, "a connected flow outlasts others");

impl SockFlowTable {
    /// Size of an entry, in bytes.
    pub const ENTRY_BYTES: usize = size_of::<AtomicU64>();

    /// Creates an empty table of at least `rps_sock_flow_entries` entries, rounded up to a power of
    /// two (RFS-9), for CPU ids below `cpus`.
    #[must_use]
    pub fn new(rps_sock_flow_entries: u32, cpus: usize) -> Self {
        let entries = rps_sock_flow_entries.clamp(1, RPS_SOCK_FLOW_ENTRIES_MAX);
        let entries =
            (0..entries.next_power_of_two()).map(|_| AtomicU64::new(SockFlowEntry::NONE.0));
        Self { entries: entries.collect(), cpus: u16::try_from(cpus).unwrap_or(NO_CPU) }
    }

    /// Records that the application of `flow`, a flow of a connected socket, runs on `cpu`. Called
    /// by `recvmsg` and `sendmsg` of that socket.
    pub fn record(&self, flow: FlowHash, cpu: CpuId) {
        if !flow.is_some() || cpu.0 >= self.cpus {
            return;
        }
        let entry = self.entry(flow);
        let now = SockFlowEntry::new(flow, cpu, CONNECTED_TRUST);
        // Only a change is stored, because a store takes the cache line from all readers.
        if SockFlowEntry(entry.load(Ordering::Relaxed)).without_candidate() != now {
            entry.store(now.0, Ordering::Relaxed);
        }
    }

    /// Records the CPU for a flow that anybody may have begun. The flow gets the entry if that is
    /// free or already its own, or after it has requested it more often than the entry is trusted.
    pub fn record_unconnected(&self, flow: FlowHash, cpu: CpuId) {
        if !flow.is_some() || cpu.0 >= self.cpus {
            return;
        }
        let entry = self.entry(flow);
        let before = SockFlowEntry(entry.load(Ordering::Relaxed));
        if before.flow() != flow {
            let now = before.asked_by(flow, cpu);
            // Fails if another thread has recorded meanwhile; the flow may return.
            let _ = entry.compare_exchange(before.0, now.0, Ordering::Relaxed, Ordering::Relaxed);
            return;
        }
        let more = before.trust().saturating_mul(2).saturating_add(1).min(UNCONNECTED_TRUST_MAX);
        let now = SockFlowEntry::new(flow, cpu, more.max(before.trust()));
        if before.without_candidate() != now {
            entry.store(now.0, Ordering::Relaxed);
        }
    }

    /// CPU of the application of `flow`, if the entry is the flow's own.
    #[must_use]
    pub fn desired(&self, flow: FlowHash) -> Option<CpuId> {
        let entry = SockFlowEntry(self.entry(flow).load(Ordering::Relaxed));
        if entry.flow() == flow { entry.cpu() } else { None }
    }

    /// Prefetches the entry of a flow.
    #[inline]
    pub fn prefetch(&self, flow: FlowHash) {
        forebay_buf::prefetch_value(self.entry(flow));
    }

    /// Copies entries of another table to entries that are free here. To be called once
    /// applications record in this table.
    pub fn carry_over(&self, from: &Self) {
        debug_assert_eq!(self.cpus, from.cpus, "tables of one engine");
        for entry in &from.entries {
            let known = SockFlowEntry(entry.load(Ordering::Relaxed));
            if known != SockFlowEntry::NONE {
                let entry = self.entry(known.flow());
                let none = SockFlowEntry::NONE.0;
                // Fails if an application has recorded meanwhile, which is newer.
                let _ = entry.compare_exchange(none, known.0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Number of entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    fn index_mask(&self) -> u32 {
        u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
    }

    fn entry(&self, flow: FlowHash) -> &AtomicU64 {
        &self.entries[(flow.0 & self.index_mask()) as usize]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rfs_9_entries_round_to_power_of_two() {
        let entries = |entries| SockFlowTable::new(entries, 2).entries();
        assert_eq!([0, 4, 5, 32_768, 40_000].map(entries), [1, 4, 8, 32_768, 65_536]);
    }

    #[test]
    fn rfs_1_entry_belongs_until_taken() {
        let table = SockFlowTable::new(16, 4);
        let [first, second] = [FlowHash(0xaaaa_0001), FlowHash(0xbbbb_0001)];
        assert_eq!(table.desired(first), None);
        table.record(first, CpuId(3));
        assert_eq!((table.desired(first), table.desired(second)), (Some(CpuId(3)), None));
        table.record(second, CpuId(0));
        assert_eq!((table.desired(first), table.desired(second)), (None, Some(CpuId(0))));
        table.record(second, CpuId(4));
        table.record_unconnected(second, CpuId(4));
        assert_eq!(table.desired(second), Some(CpuId(0)), "a CPU that cannot be is not recorded");
    }

    #[test]
    fn empty_entry_matches_no_hash() {
        for cpus in [1, 2, 3, 7, 8, 200] {
            let table = SockFlowTable::new(8, cpus);
            for flow in [FlowHash::NONE, FlowHash(u32::MAX)] {
                table.record(FlowHash::NONE, CpuId(0));
                table.record_unconnected(FlowHash::NONE, CpuId(0));
                assert_eq!(table.desired(flow), None, "{cpus} CPUs");
            }
        }
    }

    #[test]
    fn rfs_1_moving_application_is_followed() {
        let table = SockFlowTable::new(16, 4);
        let (connected, other) = (FlowHash(0xaaaa_0001), FlowHash(0xaaaa_0002));
        for cpu in [3, 0, 0, 1, 2, 1].map(CpuId) {
            table.record(connected, cpu);
            table.record_unconnected(other, cpu);
            assert_eq!([connected, other].map(|flow| table.desired(flow)), [Some(cpu); 2]);
            // A request by another flow does not change the recorded CPU.
            table.record_unconnected(FlowHash(0xbbbb_0001), CpuId(2));
            table.record_unconnected(FlowHash(0xbbbb_0002), CpuId(2));
            assert_eq!([connected, other].map(|flow| table.desired(flow)), [Some(cpu); 2]);
        }
    }

    #[test]
    fn promise_3_entry_yields_to_returning_flow() {
        // Records of the entry's flow, and requests of the next one until it has the entry.
        let cases = [(1, 2), (2, 4), (3, 8), (4, 16), (100, 16)];
        let [dead, alive] = [FlowHash(0xaaaa_0001), FlowHash(0xbbbb_0001)];
        let takes = |table: &SockFlowTable| {
            let mut count = 0;
            while table.desired(alive).is_none() {
                assert!(table.desired(dead).is_some());
                table.record_unconnected(alive, CpuId(2));
                count += 1;
            }
            count
        };
        for (seen, expected) in cases {
            let table = SockFlowTable::new(16, 4);
            (0..seen).for_each(|_| table.record_unconnected(dead, CpuId(1)));
            assert_eq!(takes(&table), expected, "seen {seen} times");
        }
        let table = SockFlowTable::new(16, 4);
        table.record(dead, CpuId(1));
        assert_eq!(takes(&table), 256, "of a connected socket");
        // A connected flow needs no request, and keeps its trust after a record without connection.
        table.record(dead, CpuId(1));
        table.record_unconnected(dead, CpuId(3));
        assert_eq!((table.desired(dead), takes(&table)), (Some(CpuId(3)), 256));
    }

    /// Number of flows, of a thousand, that are still known after a hundred thousand strangers with
    /// this many datagrams each. The thousand flows send now and then.
    fn known_after_strangers(
        seed: u64,
        datagrams: u32,
        record: fn(&SockFlowTable, FlowHash),
    ) -> usize {
        const STRANGERS: usize = 100_000;
        let mut state = seed;
        let mut flow = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            FlowHash(u32::try_from(state >> 32).unwrap() | 1 << 31)
        };
        let table = SockFlowTable::new(RPS_SOCK_FLOW_ENTRIES, 4);
        let good: Vec<_> = (0..1000).map(|_| flow()).collect();
        for _ in 0..4 {
            good.iter().for_each(|&flow| record(&table, flow));
        }
        for number in 0..STRANGERS {
            let stranger = flow();
            (0..datagrams).for_each(|_| table.record_unconnected(stranger, CpuId(1)));
            if number.is_multiple_of(10) {
                record(&table, good[number / 10 % good.len()]);
            }
        }
        good.iter().filter(|&&flow| table.desired(flow) == Some(CpuId(3))).count()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 8 }))]

        #[test]
        fn promise_3_strangers_cost_no_flow_its_entry(seed: u64, datagrams in 1u32..3) {
            let connected = |table: &SockFlowTable, flow| table.record(flow, CpuId(3));
            let other = |table: &SockFlowTable, flow| table.record_unconnected(flow, CpuId(3));
            for record in [connected, other] {
                let known = known_after_strangers(seed, datagrams, record);
                prop_assert!(known >= 950, "{known} of 1000 are known");
            }
        }
    }

    proptest! {
        #[test]
        fn rfs_9_resized_table_keeps_knowledge(
            flows in prop::collection::vec((1u32.., 0u16..6), 1..40),
            sizes in (0u32..10, 0u32..10),
        ) {
            let (old, new) =
                (SockFlowTable::new(1 << sizes.0, 6), SockFlowTable::new(1 << sizes.1, 6));
            for &(flow, cpu) in &flows {
                old.record(FlowHash(flow), CpuId(cpu));
            }
            let newer = FlowHash(flows[0].0);
            new.record(newer, CpuId(5));
            new.carry_over(&old);
            prop_assert_eq!(new.desired(newer), Some(CpuId(5)), "what is newer stays");
            for &(flow, _) in &flows {
                let (known, before) = (new.desired(FlowHash(flow)), old.desired(FlowHash(flow)));
                let is_newer = flow == newer.0;
                prop_assert!(is_newer || known.is_none() || known == before);
                let grows = new.entries() >= old.entries();
                let is_taken = new.entry(FlowHash(flow)).as_ptr() == new.entry(newer).as_ptr();
                prop_assert!(!grows || is_taken || known == before, "a larger table loses nothing");
            }
        }
    }
}
