//! Rules that a run is under.

use std::fmt;

use serde::Serialize;

/// Rules that packets are steered by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rules {
    /// Forebay's rules: the real path.
    Forebay,
    /// Rules of Linux 6.18, in a small model.
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
