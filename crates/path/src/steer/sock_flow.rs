//! The socket-flow table: where the application of each flow runs (RFS-1, RFS-3).
//!
//! All queues and all applications share it, without a lock and without an order: what is read may
//! be a moment old or another flow's. That costs locality, never order, for a wish only ever moves a
//! flow by the drain rule.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::cpu::CpuId;
use crate::hash::FlowHash;

/// Entries when nobody says otherwise: what the kernel's documentation suggests.
pub const RPS_SOCK_FLOW_ENTRIES: u32 = 32_768;

/// The most entries that the kernel allows.
pub const RPS_SOCK_FLOW_ENTRIES_MAX: u32 = 1 << 29;

/// `rps_sock_flow_table`: an entry is the upper bits of a flow's hash, which tell it from most that
/// share its entry, and below them the CPU that its application runs on.
#[derive(Debug)]
pub struct SockFlowTable {
    /// By the lower bits of the hash. Written by whoever runs an application.
    entries: Box<[AtomicU32]>,
    /// `rps_cpu_mask`: the bits of an entry that are the CPU. All of them set is no CPU's number.
    cpu_mask: u32,
}

/// `RPS_NO_CPU` of no flow.
const NONE: u32 = u32::MAX;

impl SockFlowTable {
    /// An empty table of at least `rps_sock_flow_entries` entries, rounded up to a power of two
    /// (RFS-9), for CPUs below `cpus`.
    #[must_use]
    pub fn new(rps_sock_flow_entries: u32, cpus: usize) -> Self {
        let cpus = u32::try_from(cpus).unwrap_or(u32::MAX).min(1 << 16);
        let cpu_mask = (cpus + 1).next_power_of_two() - 1;
        // With an entry for each value of the lower bits, an entry's place and its upper bits are
        // its flow's whole hash: a table of another size can take it over.
        let entries = rps_sock_flow_entries.clamp(cpu_mask + 1, RPS_SOCK_FLOW_ENTRIES_MAX);
        let entries = (0..entries.next_power_of_two()).map(|_| AtomicU32::new(NONE));
        Self { entries: entries.collect(), cpu_mask }
    }

    /// Notes that the application of `flow` runs on `cpu`: its `recvmsg` and `sendmsg` call this.
    pub fn record(&self, flow: FlowHash, cpu: CpuId) {
        let cpu = u32::from(cpu.0);
        if !flow.is_some() || cpu >= self.cpu_mask {
            return;
        }
        let entry = self.entry(flow);
        let value = flow.0 & !self.cpu_mask | cpu;
        // The line is only taken from its readers when something changes.
        if entry.load(Ordering::Relaxed) != value {
            entry.store(value, Ordering::Relaxed);
        }
    }

    /// The CPU that the application of `flow` runs on, if the flow's entry is not another's.
    #[must_use]
    pub fn desired(&self, flow: FlowHash) -> Option<CpuId> {
        let entry = self.entry(flow).load(Ordering::Relaxed);
        let is_its_own = (entry ^ flow.0) & !self.cpu_mask == 0;
        let cpu = entry & self.cpu_mask;
        if is_its_own && cpu != self.cpu_mask { u16::try_from(cpu).ok().map(CpuId) } else { None }
    }

    /// Asks for the entry of a flow, to read it a little later.
    #[inline]
    pub fn prefetch(&self, flow: FlowHash) {
        mem::prefetch_value(self.entry(flow));
    }

    /// Takes over what another table knows, where this one knows nothing newer. Call it once
    /// applications record here.
    pub fn carry_over(&self, from: &Self) {
        debug_assert_eq!(self.cpu_mask, from.cpu_mask, "tables of one engine");
        for (lower, entry) in (0..).zip(&from.entries) {
            let value = entry.load(Ordering::Relaxed);
            if value != NONE {
                let entry = self.entry(FlowHash(value & !from.cpu_mask | lower & from.cpu_mask));
                // Refused where an application has recorded meanwhile.
                let _ = entry.compare_exchange(NONE, value, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// The number of entries.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    fn index_mask(&self) -> u32 {
        u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
    }

    fn entry(&self, flow: FlowHash) -> &AtomicU32 {
        &self.entries[(flow.0 & self.index_mask()) as usize]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rfs_9_entries_are_rounded_up_to_a_power_of_two() {
        let entries = |entries| SockFlowTable::new(entries, 2).entries();
        assert_eq!([0, 4, 5, 32_768, 40_000].map(entries), [4, 4, 8, 32_768, 65_536]);
    }

    #[test]
    fn rfs_1_an_entry_is_its_flow_s_until_another_takes_it() {
        let table = SockFlowTable::new(16, 4);
        let [first, second] = [FlowHash(0xaaaa_0001), FlowHash(0xbbbb_0001)];
        assert_eq!(table.desired(first), None);
        table.record(first, CpuId(3));
        assert_eq!((table.desired(first), table.desired(second)), (Some(CpuId(3)), None));
        table.record(second, CpuId(0));
        assert_eq!((table.desired(first), table.desired(second)), (None, Some(CpuId(0))));
        table.record(second, CpuId(7));
        assert_eq!(table.desired(second), Some(CpuId(0)), "a CPU that cannot be is not recorded");
    }

    #[test]
    fn an_empty_entry_is_nobody_s_whatever_the_hash() {
        for cpus in [1, 2, 3, 7, 8, 200] {
            let table = SockFlowTable::new(8, cpus);
            assert_eq!(table.desired(FlowHash(u32::MAX)), None, "{cpus} CPUs");
        }
    }

    proptest! {
        #[test]
        fn rfs_9_a_table_of_another_size_knows_what_the_old_one_knew(
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
