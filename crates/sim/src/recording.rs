//! Recording of a run for independent checkers: a trace, and the number of packets sent in each
//! flow.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_engine::trace::{DeliverTrace, IntakeTrace, Trace};
use forebay_rx::counters::{DeliveryCounters, IntakeCounters};
use forebay_rx::delivery::Batch;
use forebay_rx::hash::{Hasher, KEYED_KEY_BYTES};
use forebay_rx::intake::Dropped;
use forebay_rx::parse::Verify;
use forebay_rx::{DropReason, RxQueue};
use serde::Serialize;

use crate::traffic::Traffic;

/// File next to those of the trace: a line `flow,packets` for each flow that has a hash.
pub(crate) const SENT_FILE: &str = "sent.csv";

/// A trace being written.
pub(crate) struct Recording {
    directory: PathBuf,
    trace: Arc<Trace>,
    /// Writers by CPU.
    deliver: Vec<DeliverTrace>,
    intake: IntakeTrace,
}

impl Recording {
    /// Creates the directory and opens its files.
    pub(crate) fn create(directory: &Path, cpus: usize) -> forebay_sys::Result<Self> {
        let trace = Trace::open(directory, false, false)?;
        trace.begin()?;
        let deliver = (0..cpus).map(|_| DeliverTrace::new(Arc::clone(&trace))).collect();
        // Nothing is hashed for a trace without parse.csv.
        let hasher = Arc::new(Hasher::keyed(&[0; KEYED_KEY_BYTES], false));
        let intake = IntakeTrace::new(Arc::clone(&trace), hasher, Verify::Nothing);
        Ok(Self { directory: directory.to_owned(), trace, deliver, intake })
    }

    pub(crate) fn delivered(&mut self, batch: &Batch<'_>, index: usize, now_ns: u64) {
        self.deliver[batch.cpu.index()].delivered(batch, index, now_ns);
    }

    pub(crate) fn dropped(&mut self, dropped: &Dropped, queue: RxQueue) {
        self.intake.dropped(dropped, queue);
    }

    pub(crate) fn changed(&self, now_ns: u64, epoch: u32, what: &str, value: &str) {
        self.trace.changed(now_ns, epoch, what, value);
    }

    /// Writes the remaining files.
    pub(crate) fn finish(
        self,
        intakes: &[&IntakeCounters],
        deliveries: &[&DeliveryCounters],
        delivered: u64,
        traffic: &Traffic,
    ) -> forebay_sys::Result<()> {
        drop(self.deliver);
        let counters = RecordedCounters::new(intakes, deliveries, delivered);
        let counters = serde_json::to_string(&counters).unwrap_or_default();
        if let Some(error) = self.trace.finish(&counters).into_iter().next() {
            return Err(error);
        }
        let mut sent = String::new();
        for (id, flow) in traffic.flows().iter().enumerate() {
            // A frame without addresses is not named by its stamp in a trace.
            if flow.hash.is_some() {
                // Writing to a string cannot fail.
                let _ = writeln!(sent, "{id},{}", flow.sequence);
            }
        }
        let path = self.directory.join(SENT_FILE);
        fs::write(&path, sent).map_err(|source| forebay_sys::Error::File {
            action: "write",
            path,
            source,
        })
    }
}

/// Contents of `counters.json`.
#[derive(Serialize)]
struct RecordedCounters {
    rx_frames: u64,
    delivered: u64,
    drops: std::collections::BTreeMap<&'static str, u64>,
    per_cpu: Vec<CpuCounters>,
    rfs: MoveCounters,
}

#[derive(Serialize)]
struct CpuCounters {
    cpu: usize,
    enq: u64,
    deq: u64,
    drop: u64,
}

#[derive(Serialize)]
struct MoveCounters {
    moves: u64,
    deferred: u64,
    held: u64,
    held_max_ns: u64,
}

impl RecordedCounters {
    fn new(intakes: &[&IntakeCounters], deliveries: &[&DeliveryCounters], delivered: u64) -> Self {
        let sum = |of: fn(&IntakeCounters) -> u64| intakes.iter().map(|it| of(it)).sum();
        let lost: u64 = deliveries.iter().map(|it| it.lost.get()).sum();
        let dropped = |reason: DropReason| {
            let index = reason.index();
            let dropped: u64 = intakes.iter().map(|it| it.drops[index].get()).sum();
            (reason.name(), if reason == DropReason::CpuLost { lost } else { dropped })
        };
        let per_cpu = deliveries.iter().enumerate().map(|(cpu, delivery)| {
            let targets = || intakes.iter().map(|it| &it.per_cpu[cpu]);
            CpuCounters {
                cpu,
                enq: targets().map(|it| it.enqueued()).sum(),
                deq: delivery.frames.get(),
                drop: targets().map(|it| it.dropped.get()).sum(),
            }
        });
        Self {
            rx_frames: sum(|it| it.frames.get()),
            delivered,
            drops: DropReason::ALL.into_iter().map(dropped).filter(|drop| drop.1 > 0).collect(),
            per_cpu: per_cpu.collect(),
            rfs: MoveCounters {
                moves: sum(|it| it.moves.get()),
                deferred: sum(|it| it.stays.get()),
                held: sum(|it| it.holds.get()),
                held_max_ns: intakes.iter().map(|it| it.held_max_ns.get()).max().unwrap_or(0),
            },
        }
    }
}
