//! Numbers of a replay.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use forebay_control::Explanation;
use forebay_device::Progress;
use forebay_engine::Outcome;
use forebay_sys::error::Error;
use serde::Serialize;

use crate::order_check::OrderCheck;
use crate::report::PathReport;

/// The result of a replay; its JSON form is what `--json` prints.
#[derive(Debug, Serialize)]
pub struct ReplayReport {
    /// Work of the path.
    #[serde(flatten)]
    pub path: PathReport,
    /// Packets delivered after a later one of their flow.
    pub reordered: u64,
    /// Packets whose order was not checked: of more flows than are told apart.
    pub order_unchecked: u64,
    /// Flows seen; those beyond [`CHECKED_FLOWS_MAX`](crate::order_check::CHECKED_FLOWS_MAX) are not told apart,
    /// and not counted here.
    pub flows: u64,
    /// Packets of the largest flow.
    pub largest_flow: u64,
    /// Records of the capture that were passed over as damaged.
    pub damaged_records: u64,
    /// The first of them.
    pub first_damage: Option<String>,
    /// Records that were dropped as `link_type`, by what their link type is called.
    pub unread_link_types: BTreeMap<String, u64>,
    /// First failure that ended the input early, or of writing, if any. What
    /// came in before was still delivered.
    pub error: Option<String>,
    /// The flows that were to be [explained](super::ReplayConfig::explain).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub explain: Vec<Explanation>,
    /// All of what went wrong.
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
            error: None,
            explain: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// The promises that this run broke, in words; none if all is well.
    #[must_use]
    pub fn broken_promises(&self) -> Vec<String> {
        let order = (self.reordered > 0)
            .then(|| format!("order: {} packets came after a later one", self.reordered));
        order.into_iter().chain(self.path.broken_promises()).collect()
    }
}
