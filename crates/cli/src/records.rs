//! Warnings of records that a capture's reader passed over.

use tracing::warn;

use crate::table;

/// Warns of damaged records, of which `first` describes the first one.
pub(crate) fn warn_of_damaged(records: u64, first: Option<&str>) {
    let Some(first) = first else { return };
    let counted = table::counted(records, "damaged record");
    warn!(records, "{counted} passed over: {first}");
}

/// Warns of the records of a link type that cannot be read; `done` says what became of them.
pub(crate) fn warn_of_unread(link_type: &str, records: u64, done: &str) {
    let counted = table::counted(records, "record");
    warn!(records, link_type, "{counted} {done}: of link type {link_type}");
}
