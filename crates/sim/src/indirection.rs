//! Indirection table of RSS++ (Barbette et al., CoNEXT 2019), in a small model. The device's table gives the CPU for each
//! hash, and its entries are reassigned by load at once, so later packets overtake those queued on the old CPU.

use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::{CpuLoad, RpsMap};

/// Number of entries.
const ENTRIES: u32 = 512;

/// Time between two assignments: a tenth of a second, the shortest that the paper uses.
const INTERVAL_NS: u64 = 100_000_000;

/// Entries, and their packets since the last assignment.
pub(crate) struct Indirection {
    entries: Vec<(CpuId, u64)>,
    /// CPUs that entries may have.
    cpus: Vec<CpuId>,
    last: Vec<CpuLoad>,
    assigned_ns: u64,
}

impl Indirection {
    pub(crate) fn new(map: &RpsMap) -> Self {
        let cpus = map.cpus().to_vec();
        let cpu = |entry: usize| cpus.get(entry % cpus.len().max(1)).copied().unwrap_or(CpuId(0));
        let entries = (0..ENTRIES as usize).map(|entry| (cpu(entry), 0)).collect();
        Self { entries, cpus, last: Vec::new(), assigned_ns: 0 }
    }

    /// Shares out the entries of all other CPUs anew, as after a write of the mask.
    pub(crate) fn keep_within(&mut self, map: &RpsMap) {
        let anew = Self::new(map);
        for (entry, (cpu, _)) in self.entries.iter_mut().zip(&anew.entries) {
            if self.cpus.is_empty() || !anew.cpus.contains(&entry.0) {
                entry.0 = *cpu;
            }
        }
        self.cpus = anew.cpus;
    }

    /// CPU of a hash. `None` if the map is empty.
    pub(crate) fn cpu_of(&self, hash: FlowHash) -> Option<CpuId> {
        (!self.cpus.is_empty()).then(|| self.entries[entry_of(hash)].0)
    }

    pub(crate) fn count(&mut self, hash: FlowHash) {
        self.entries[entry_of(hash)].1 += 1;
    }

    /// Moves entries from CPUs above the mean to the one with the least load, if an assignment is due.
    pub(crate) fn assign(&mut self, now_ns: u64, loads: &[CpuLoad]) {
        if now_ns - self.assigned_ns < INTERVAL_NS {
            return;
        }
        self.assigned_ns = now_ns;
        self.last.resize(loads.len(), CpuLoad::default());
        let busy = |(now, last): (&CpuLoad, &CpuLoad)| now.busy_ns - last.busy_ns;
        let mut busy_ns: Vec<_> = loads.iter().zip(&self.last).map(busy).collect();
        self.last.copy_from_slice(loads);
        let mut packets = vec![0; loads.len()];
        self.entries.iter().for_each(|(cpu, count)| packets[cpu.index()] += count);
        // An entry's part in its CPU's load is that of its packets.
        let weight =
            |(cpu, count): (CpuId, u64)| busy_ns[cpu.index()] * count / packets[cpu.index()].max(1);
        let weights: Vec<_> = self.entries.iter().copied().map(weight).collect();
        let sum_ns: u64 = self.cpus.iter().map(|cpu| busy_ns[cpu.index()]).sum();
        let mean_ns = sum_ns / self.cpus.len().max(1) as u64;
        let mut order: Vec<_> = (0..self.entries.len()).collect();
        order.sort_by_key(|entry| std::cmp::Reverse(weights[*entry]));
        for entry in order {
            let from = self.entries[entry].0.index();
            let least = self.cpus.iter().copied().min_by_key(|cpu| busy_ns[cpu.index()]);
            let Some(least) = least else { break };
            let to = least.index();
            let is_over = busy_ns[from] > mean_ns && busy_ns[from] - mean_ns >= weights[entry] / 2;
            if is_over && weights[entry] > 0 && busy_ns[to] + weights[entry] < busy_ns[from] {
                busy_ns[from] -= weights[entry];
                busy_ns[to] += weights[entry];
                self.entries[entry].0 = least;
            }
        }
        self.entries.iter_mut().for_each(|(_, count)| *count = 0);
    }
}

fn entry_of(hash: FlowHash) -> usize {
    (hash.0 % ENTRIES) as usize
}
