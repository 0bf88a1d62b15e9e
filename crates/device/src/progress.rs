//! Progress of a source that ends.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, OnceLock};

/// Progress of a source, updated while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Part that is done, in the source's unit (bytes or frames).
    pub done: AtomicU64,
    /// Total in the same unit, if known.
    pub total: Option<u64>,
    /// Number of records skipped as damaged.
    pub damaged: AtomicU64,
    /// Description of the first damaged record.
    pub first_damage: OnceLock<String>,
    /// Number of unreadable records by the name of their link type: neither that type nor the
    /// protocol behind its header can be read. Locked only when another record is added.
    pub unread: Mutex<BTreeMap<String, u64>>,
}
