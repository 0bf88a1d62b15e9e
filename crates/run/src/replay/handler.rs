//! Application of a replay: works on each packet for a while, checks its order, and writes the
//! requested files.

use std::path::PathBuf;
use std::sync::Arc;

use forebay_device::pcap::{CaptureOptions, DeliveredCapture};
use forebay_engine::trace::{DeliverTrace, Trace};
use forebay_rx::delivery::Batch;
use forebay_rx::{CpuId, Handler};
use forebay_sys::clock::Clock;
use forebay_sys::error::Result;
use forebay_sys::failure::FirstFailure;

use super::{Mode, ReplayConfig};
use crate::order_check::OrderCheck;

/// One CPU's part of the application.
pub(super) struct ReplayHandler {
    clock: Clock,
    /// Time spent on each packet; 0 in virtual time, where the scheduler accounts for it.
    work_ns: u64,
    ledger: Arc<OrderCheck>,
    trace: Option<DeliverTrace>,
    capture: Option<DeliveredCapture>,
}

impl ReplayHandler {
    pub(super) fn new(
        cpu: CpuId,
        plan: &ReplayConfig,
        clock: &Clock,
        ledger: &Arc<OrderCheck>,
        trace: Option<&Arc<Trace>>,
        failure: &FirstFailure,
    ) -> Self {
        let capture = |directory: &PathBuf| {
            let options = CaptureOptions { resegments: plan.resegment, rotation: plan.rotation };
            DeliveredCapture::new(directory, cpu, options, Arc::clone(failure))
        };
        Self {
            clock: clock.clone(),
            work_ns: if plan.mode == Mode::Live { plan.work_ns } else { 0 },
            ledger: Arc::clone(ledger),
            trace: trace.map(|trace| DeliverTrace::new(Arc::clone(trace))),
            capture: plan.write_pcap.as_ref().map(capture),
        }
    }

    /// Writes out buffered packets.
    pub(super) fn finish(self) -> Result<()> {
        self.capture.map_or(Ok(()), DeliveredCapture::finish)
    }

    /// Spends the time that an application would need for a packet.
    fn work(&self) {
        if self.work_ns > 0 {
            let done_ns = self.clock.now_ns().saturating_add(self.work_ns);
            // No pause instruction in this loop: an application works, and a hypervisor takes
            // pauses for waiting and runs another guest.
            while self.clock.now_ns() < done_ns {}
        }
    }
}

impl Handler for ReplayHandler {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        for packet in batch.packets.iter() {
            packet.frame.prefetch();
        }
        for (index, packet) in batch.packets.iter().enumerate() {
            self.work();
            self.ledger.deliver(packet, batch.rx_queue, batch.cpu);
            if let Some(trace) = &mut self.trace {
                trace.delivered(batch, index, self.clock.now_ns());
            }
        }
        if let Some(capture) = &mut self.capture {
            capture.write(batch.packets);
        }
    }
}
