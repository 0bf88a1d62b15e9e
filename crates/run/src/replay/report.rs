//! Numbers of a replay.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use forebay_control::Explanation;
use forebay_device::Progress;
use forebay_engine::Outcome;
use forebay_engine::timeline::Timeline;
use forebay_sys::error::Error;
use serde::Serialize;

use crate::order_check::OrderCheck;
use crate::report::PathReport;

/// Result of a replay; its JSON form is what `--json` prints.
#[derive(Debug, Serialize)]
pub struct ReplayReport {
    /// Work of the path.
    #[serde(flatten)]
    pub path: PathReport,
    /// Number of packets delivered after a later one of their flow.
    pub reordered: u64,
    /// Number of packets whose order was not checked, since their flow found no entry.
    pub order_unchecked: u64,
    /// Number of flows with a hash; those without an entry among
    /// [`CHECKED_FLOWS_MAX`](crate::order_check::CHECKED_FLOWS_MAX) are not counted.
    pub flows: u64,
    /// Number of packets of the largest flow.
    pub largest_flow: u64,
    /// Number of records of the capture that were skipped as damaged.
    pub damaged_records: u64,
    /// First damage, if any.
    pub first_damage: Option<String>,
    /// Number of records dropped as `link_type`, by the name of their link type.
    pub unread_link_types: BTreeMap<String, u64>,
    /// Number of rows that could not be written to the trace. `None` without a trace.
    pub trace_rows_lost: Option<u64>,
    /// First error that ended the input early, or of writing, if any. Frames received before were
    /// still delivered.
    pub error: Option<String>,
    /// Flows that the configuration asks to [explain](super::ReplayConfig::explain).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub explain: Vec<Explanation>,
    /// Timeline, if one was [recorded](super::ReplayConfig::plots).
    #[serde(skip)]
    pub timeline: Option<Timeline>,
    /// All errors.
    #[serde(skip)]
    pub errors: Vec<Error>,
}

impl ReplayReport {
    pub(super) fn of<H>(
        outcome: &Outcome<H>,
        ledger: &OrderCheck,
        progress: &Progress,
        cpu_ns: u64,
    ) -> Self {
        let flows = ledger.flows(outcome.cpu_count());
        Self {
            path: PathReport::of(outcome, Some(&flows), cpu_ns),
            reordered: flows.reordered,
            order_unchecked: flows.unchecked,
            flows: flows.flows,
            largest_flow: flows.largest,
            damaged_records: progress.damaged.load(Ordering::Relaxed),
            first_damage: progress.first_damage.get().cloned(),
            unread_link_types: progress
                .unread
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone(),
            trace_rows_lost: None,
            error: None,
            explain: Vec::new(),
            timeline: None,
            errors: Vec::new(),
        }
    }

    /// Promises that this run broke, in words; none if all is well.
    #[must_use]
    pub fn broken_promises(&self) -> Vec<String> {
        let order = (self.reordered > 0)
            .then(|| format!("order: {} packets came after a later one", self.reordered));
        order.into_iter().chain(self.path.broken_promises()).collect()
    }
}
