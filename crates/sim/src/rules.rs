//! Whose rules a run is under.

use std::fmt;

use serde::Serialize;

/// Whose rules packets are steered by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rules {
    /// Ours: the real path.
    Forebay,
    /// Linux 6.18's, in a small model.
    Kernel,
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forebay => "forebay",
            Self::Kernel => "kernel",
        })
    }
}
