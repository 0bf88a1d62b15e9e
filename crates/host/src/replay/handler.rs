//! The application of a replay: it works on each packet for a while, checks its order, and keeps
//! what it was asked to keep.

use std::sync::Arc;

use path::coalesce::resegment;
use path::delivery::Batch;
use path::{CpuId, Handler, Packet};

use super::{Mode, Plan};
use crate::clock::Clock;
use crate::device::pcap::CaptureWriter;
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::trace::{DeliverTrace, Trace};

/// One CPU's part of the application.
pub(super) struct ReplayHandler {
    clock: Clock,
    /// Spent on each packet; in virtual time the scheduler does that.
    work_ns: u64,
    ledger: Arc<Ledger>,
    trace: Option<DeliverTrace>,
    writer: Option<CaptureWriter>,
    /// Whether merged packets are written as the frames that they were merged of.
    resegments: bool,
    failed: Option<Error>,
}

impl ReplayHandler {
    pub(super) fn new(
        cpu: CpuId,
        plan: &Plan,
        clock: &Clock,
        ledger: &Arc<Ledger>,
        trace: Option<&Arc<Trace>>,
    ) -> Self {
        let stem = |directory: &std::path::PathBuf| directory.join(format!("cpu{cpu}"));
        Self {
            clock: clock.clone(),
            work_ns: if plan.mode == Mode::Live { plan.work_ns } else { 0 },
            ledger: Arc::clone(ledger),
            trace: trace.map(|trace| DeliverTrace::new(Arc::clone(trace))),
            writer: plan.write_pcap.as_ref().map(stem).map(CaptureWriter::new),
            resegments: plan.resegment,
            failed: None,
        }
    }

    /// Writes out what is still buffered.
    pub(super) fn finish(self) -> Result<()> {
        match (self.failed, self.writer) {
            (Some(error), _) => Err(error),
            (None, Some(writer)) => writer.finish(),
            (None, None) => Ok(()),
        }
    }

    /// Stands for what an application does with a packet.
    fn work(&self) {
        if self.work_ns > 0 {
            let done_ns = self.clock.now_ns().saturating_add(self.work_ns);
            // No pause in this loop: an application works, and a hypervisor takes pauses for
            // waiting and runs somebody else.
            while self.clock.now_ns() < done_ns {}
        }
    }
}

/// Has the frames that packets were merged of take their places.
fn take_apart(packets: &mut Vec<Packet>) {
    let mut frames = Vec::with_capacity(packets.len());
    packets.drain(..).for_each(|packet| resegment(packet, &mut frames));
    *packets = frames;
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
        if let Some(writer) = &mut self.writer
            && self.failed.is_none()
        {
            if self.resegments {
                take_apart(batch.packets);
            }
            self.failed = batch.packets.iter().find_map(|packet| writer.write(packet).err());
        }
    }
}
