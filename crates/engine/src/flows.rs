//! CPUs of applications: what `recvmsg` and `sendmsg` record in the kernel (RFS-1).

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use forebay_rx::CpuId;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::SockFlowTable;
use forebay_sys as sys;

/// Records where the application of each flow runs. Cheap to clone and to call, from any thread.
/// While `rps_sock_flow_entries` is 0 nothing is recorded.
#[derive(Clone, Debug)]
pub struct Flows(pub(super) Arc<ArcSwapOption<SockFlowTable>>);

impl Flows {
    /// The table as it is now.
    pub(super) fn table(&self) -> Option<Arc<SockFlowTable>> {
        self.0.load_full()
    }

    /// The application of `flow` runs on the calling CPU: its next packets should come here.
    pub fn touch(&self, flow: FlowHash) {
        self.touch_on(flow, sys::current_cpu());
    }

    /// The application of `flow` runs on `cpu`.
    pub fn touch_on(&self, flow: FlowHash, cpu: CpuId) {
        if let Some(table) = &*self.0.load() {
            table.record(flow, cpu);
        }
    }

    /// Datagrams of these flows were read on the calling CPU. Flows to a socket that is not connected
    /// are anybody's, and have less right to be known.
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
