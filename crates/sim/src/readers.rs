//! The applications: each flow is read on a CPU that need not be the one it is delivered on.

use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_sys::random::Random;

use crate::cpu_set::CpuSet;
use crate::scenario::ReaderPlan;
use crate::traffic::FlowId;

/// The reader of each flow, and its CPU.
#[derive(Debug)]
pub(crate) struct Readers {
    plan: ReaderPlan,
    random: Random,
    flows: Vec<FlowReader>,
}

/// The reader of one flow.
#[derive(Clone, Copy, Debug)]
struct FlowReader {
    cpu: CpuId,
    /// Hash that its packets were steered by, as known to its socket.
    hash: FlowHash,
    /// True if a read is scheduled.
    is_due: bool,
    has_read: bool,
}

impl Readers {
    pub(crate) fn new(plan: ReaderPlan, random: Random) -> Self {
        Self { plan, random, flows: Vec::new() }
    }

    /// Creates a reader for each of the first `flows` flows, on a random online CPU, or where RPS
    /// sends the flow.
    pub(crate) fn begin(
        &mut self,
        flows: u32,
        online: CpuSet,
        by_rps: impl Fn(FlowId) -> Option<CpuId>,
    ) {
        let first = u32::try_from(self.flows.len()).unwrap_or(u32::MAX);
        for flow in first..flows {
            let drawn = online.pick(&mut self.random);
            let by_rps = by_rps(FlowId(flow)).filter(|_| self.plan.settled);
            let cpu = by_rps.unwrap_or(drawn);
            self.flows.push(FlowReader {
                cpu,
                hash: FlowHash::NONE,
                is_due: false,
                has_read: false,
            });
        }
    }

    /// Notifies a reader of a packet. Returns the delay of the read, unless one is scheduled
    /// already.
    pub(crate) fn wake(&mut self, flow: FlowId, hash: FlowHash) -> Option<u64> {
        let reader = &mut self.flows[flow.index()];
        reader.hash = hash;
        if std::mem::replace(&mut reader.is_due, true) {
            return None;
        }
        let until = if reader.has_read { self.plan.again_ns } else { self.plan.first_ns };
        Some(until.draw(&mut self.random))
    }

    /// Reads all available packets. Returns the hash and the CPU to be recorded.
    pub(crate) fn read(&mut self, flow: FlowId) -> (FlowHash, CpuId) {
        let reader = &mut self.flows[flow.index()];
        (reader.is_due, reader.has_read) = (false, true);
        (reader.hash, reader.cpu)
    }

    /// Moves the reader to another online CPU, if there is one; returns it.
    pub(crate) fn move_one(&mut self, flow: FlowId, online: CpuSet) -> Option<CpuId> {
        let reader = self.flows.get_mut(flow.index())?;
        let others = online.without(reader.cpu);
        if others.len() == 0 {
            return None;
        }
        reader.cpu = others.pick(&mut self.random);
        Some(reader.cpu)
    }

    /// Moves the readers of a CPU that is taken offline elsewhere.
    pub(crate) fn leave(&mut self, cpu: CpuId, online: CpuSet) {
        for reader in self.flows.iter_mut().filter(|reader| reader.cpu == cpu) {
            reader.cpu = online.pick(&mut self.random);
        }
    }
}
