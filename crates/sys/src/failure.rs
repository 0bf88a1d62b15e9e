//! Failures that a run survives or ends by, kept for whoever reports them.

use std::sync::{Arc, OnceLock};

use crate::error::Error;

/// First failure of a part of a run, set without waiting and read by another thread.
pub type FirstFailure = Arc<OnceLock<FailureNote>>;

/// Failure, as it is reported when it happens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FailureNote {
    /// Description of the failure, with the file or device.
    pub problem: String,
    /// Consequence for the run.
    pub consequence: &'static str,
    /// Advice.
    pub help: String,
}

impl FailureNote {
    /// Note of an error.
    #[must_use]
    pub fn of(error: &Error, consequence: &'static str) -> Self {
        Self { problem: error.to_string(), consequence, help: error.help() }
    }
}
