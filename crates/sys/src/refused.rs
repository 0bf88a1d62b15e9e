//! Outcome of a write to the control tree.

use super::errno::Errno;
use crate::cpu_list::CpuList;

/// Outcome of an accepted write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Written {
    /// Value in force and the reason, if it is not the one requested.
    pub in_effect: String,
    /// Requested CPUs that do not exist: the kernel drops them silently.
    pub ignored: CpuList,
    /// Number of bytes of the text consumed: the writer continues with the rest, as with files.
    pub len_bytes: usize,
}

/// Reason for refusing a write or a change.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{errno}: {why}")]
pub struct Refused {
    /// Errno that a system call would return.
    pub errno: Errno,
    /// Reason in words.
    pub why: String,
}

impl Refused {
    /// Creates a refusal from the kernel's name and words.
    pub fn new(errno: Errno, why: impl Into<String>) -> Self {
        Self { errno, why: why.into() }
    }

    /// Parses the output of [`Display`](std::fmt::Display).
    pub fn from_line(line: &str) -> Option<Self> {
        let (errno, why) = line.split_once(": ")?;
        Some(Self::new(Errno::named(errno)?, why))
    }
}
