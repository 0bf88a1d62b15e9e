//! Recorder of the CPUs that applications run on, as `recvmsg` and `sendmsg` record them in the
//! kernel (RFS-1).

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::SockFlowTable;
use forebay_sys as sys;

/// Records the CPU that the application of each flow runs on. Cheap to clone and to call, from any
/// thread. Nothing is recorded while `rps_sock_flow_entries` is 0.
#[derive(Clone, Debug, Default)]
pub struct Flows(pub(super) Arc<ArcSwapOption<SockFlowTable>>);

impl Flows {
    /// Current table.
    pub(super) fn table(&self) -> Option<Arc<SockFlowTable>> {
        self.0.load_full()
    }

    /// Records that the application of `flow` runs on the calling CPU, so that its next packets are
    /// steered here.
    pub fn touch(&self, flow: FlowHash) {
        self.touch_on(flow, sys::current_cpu());
    }

    /// Records that the application of `flow` runs on `cpu`.
    pub fn touch_on(&self, flow: FlowHash, cpu: CpuId) {
        if let Some(table) = &*self.0.load() {
            table.record(flow, cpu);
        }
    }

    /// Records that datagrams of these flows were read on the calling CPU. Flows of an unconnected
    /// socket may be read by any thread, and are recorded with lower priority.
    pub fn read_here(&self, flows: impl Iterator<Item = FlowHash>, is_connected: bool) {
        let Some(table) = &*self.0.load() else { return };
        let cpu = sys::current_cpu();
        if is_connected {
            flows.for_each(|flow| table.record(flow, cpu));
        } else {
            flows.for_each(|flow| table.record_unconnected(flow, cpu));
        }
    }
}
