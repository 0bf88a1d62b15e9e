//! From one interface to another.

/// The tests.
pub(crate) const TRIALS: &[(&str, fn())] = &[];
