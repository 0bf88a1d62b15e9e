//! Handler of delivered packets: checks their order, if configured, and passes them on to their
//! destinations.

use std::sync::Arc;

use forebay_engine::trace::{DeliverTrace, Trace};
use forebay_rx::delivery::Batch;
use forebay_rx::{Handler, RxQueue};
use forebay_sys::clock::Clock;
use forebay_sys::error::Error;

use super::destination::{DestinationWay, Ways};
use super::ending::{Alarm, Ending};
use crate::order_check::OrderCheck;

/// One CPU's part of the handler.
pub(super) struct RunHandler {
    ways: Ways,
    /// Order checks by queue; empty if order is not checked.
    ledgers: Arc<[OrderCheck]>,
    trace: Option<DeliverTrace>,
    clock: Clock,
    alarm: Alarm,
    failed: Vec<Error>,
}

impl RunHandler {
    pub(super) fn new(
        ways: Ways,
        ledgers: &Arc<[OrderCheck]>,
        trace: Option<&Arc<Trace>>,
        clock: &Clock,
        ending: &Ending,
    ) -> Self {
        Self {
            ways,
            ledgers: Arc::clone(ledgers),
            trace: trace.map(|trace| DeliverTrace::new(Arc::clone(trace))),
            clock: clock.clone(),
            alarm: ending.alarm(),
            failed: Vec::new(),
        }
    }

    /// Writes out buffered packets, so that all of them are counted.
    pub(super) fn flush(&mut self) {
        self.ways.flush();
    }

    /// Ways to the destinations, with the number of packets handed to each.
    pub(super) fn ways(&self) -> &Ways {
        &self.ways
    }

    /// Writes out buffered packets, and returns all errors.
    pub(super) fn finish(self) -> impl Iterator<Item = Error> {
        self.failed.into_iter().chain(self.ways.finish())
    }

    fn check(&mut self, batch: &Batch<'_>) {
        let Some(ledger) = self.ledgers.get(usize::from(batch.rx_queue.0)) else { return };
        for (index, packet) in batch.packets.iter().enumerate() {
            ledger.deliver(packet, RxQueue(0), batch.cpu);
            if let Some(trace) = &mut self.trace {
                trace.delivered(batch, index, self.clock.now_ns());
            }
        }
    }
}

impl Handler for RunHandler {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.check(batch);
        let Some(way) = self.ways.of(batch.rx_queue) else { return };
        way.handed += batch.packets.len() as u64;
        match &mut way.way {
            // A destination that is gone takes nothing; the report counts what was handed to it.
            DestinationWay::Count | DestinationWay::Gone => {}
            DestinationWay::Capture(capture) => capture.write(batch.packets),
            DestinationWay::Sink(sink) => {
                if let Err(error) = sink.send(batch.packets) {
                    // Each further send would fail as well.
                    way.way = DestinationWay::Gone;
                    let error = Error::of_sink(error);
                    self.alarm.ring(&error);
                    self.failed.push(error);
                }
            }
        }
    }
}
