//! Changes in a world while packets flow, and the rules of each packet's epoch.

use std::sync::Arc;

use forebay_rx::CpuId;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::steer::{RPS_FLOW_CNT, SockFlowTable};

use crate::steering::world::{CPUS, Flow, KEY, POLLING, Settings, World, cpus_of};

/// Rules of an epoch, to judge its packets afterwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    rps_cpus: u8,
    running: u8,
    has_sock_flows: bool,
    has_flow_table: bool,
    pub(crate) polling: CpuId,
    /// Number of replacements of the flow table or of the hash key so far.
    pub(crate) table: u32,
    slot_shift: u32,
}

impl Epoch {
    pub(crate) fn first(settings: &Settings) -> Self {
        Self {
            rps_cpus: settings.rps_cpus,
            running: u8::MAX,
            has_sock_flows: true,
            has_flow_table: true,
            polling: POLLING,
            table: 0,
            slot_shift: slot_shift(settings.rps_flow_cnt),
        }
    }

    /// True if the mask sends packets to `cpu`.
    pub(crate) fn is_mapped(&self, cpu: CpuId) -> bool {
        is_in(self.rps_cpus & self.running, cpu)
    }

    /// True if an application is followed to `cpu`.
    pub(crate) fn is_followed(&self, cpu: CpuId) -> bool {
        self.has_sock_flows && self.has_flow_table && self.is_allowed(cpu)
    }

    /// True if packets may go to `cpu` without predecessors there.
    pub(crate) fn is_allowed(&self, cpu: CpuId) -> bool {
        let map = self.rps_cpus & self.running;
        is_in(if map == 0 { self.running } else { map }, cpu)
    }

    /// Slot of a hash; `None` is the slot of packets without one.
    pub(crate) fn slot(&self, hash: FlowHash) -> Option<u32> {
        hash.is_some().then(|| hash.0 >> self.slot_shift)
    }
}

/// Live changes.
impl World {
    pub(crate) fn set_mask(&mut self, mask: u8) {
        let epoch = self.begin_epoch(|epoch| epoch.rps_cpus = mask);
        self.intake.set_rps_cpus(cpus_of(mask), epoch);
    }

    pub(crate) fn set_running(&mut self, mask: u8) {
        let epoch = self.begin_epoch(|epoch| epoch.running = mask);
        self.intake.set_running(cpus_of(mask), epoch);
    }

    pub(crate) fn set_polling_cpu(&mut self, cpu: CpuId) {
        let epoch = self.begin_epoch(|epoch| epoch.polling = cpu);
        self.intake.set_polling_cpu(cpu, epoch);
    }

    pub(crate) fn set_rps_flow_cnt(&mut self, rps_flow_cnt: u32) {
        let slots = if rps_flow_cnt == 0 { RPS_FLOW_CNT } else { rps_flow_cnt };
        let epoch = self.begin_epoch(|epoch| {
            epoch.table += 1;
            epoch.has_flow_table = rps_flow_cnt > 0;
            epoch.slot_shift = slot_shift(slots);
        });
        self.intake.set_rps_flow_cnt(rps_flow_cnt, epoch);
    }

    /// Changes the key of the device and the intake's hasher.
    pub(crate) fn rekey(&mut self) {
        self.key += 1;
        let epoch = self.begin_epoch(|epoch| epoch.table += 1);
        self.intake.set_hasher(Arc::new(Hasher::keyed(&KEY, true)), epoch);
    }

    /// Records that the application of a flow runs on `cpu`.
    pub(crate) fn application(&self, flow: Flow, cpu: u16) {
        self.sock_flows.record(self.hash_of(flow), CpuId(cpu));
    }

    /// Replaces the socket-flow table in which applications record; `None` hides it from steering.
    pub(crate) fn set_sock_flows(&mut self, entries: Option<u32>) {
        let epoch = self.begin_epoch(|epoch| epoch.has_sock_flows = entries.is_some());
        if let Some(entries) = entries {
            let table = SockFlowTable::new(entries, CPUS.into());
            table.carry_over(&self.sock_flows);
            self.sock_flows = Arc::new(table);
        }
        let looked_at = entries.map(|_| Arc::clone(&self.sock_flows));
        self.intake.set_sock_flows(looked_at, epoch);
    }

    /// Begins an epoch, and returns its number.
    pub(crate) fn begin_epoch(&mut self, change: impl FnOnce(&mut Epoch)) -> u32 {
        let mut epoch = *self.epochs.last().unwrap();
        change(&mut epoch);
        self.epochs.push(epoch);
        u32::try_from(self.epochs.len() - 1).unwrap()
    }
}

/// Number of bits of a hash that do not select its slot.
fn slot_shift(slots: u32) -> u32 {
    u32::BITS - slots.max(2).next_power_of_two().trailing_zeros()
}

fn is_in(mask: u8, cpu: CpuId) -> bool {
    mask >> cpu.0 & 1 == 1
}
