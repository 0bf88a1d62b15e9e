//! Outcome of a change.

use super::errno::Errno;
use crate::cpu_list::CpuList;

/// A write that was taken.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Written {
    /// Value in force, if it is not the one that was asked for, and the reason.
    pub in_effect: String,
    /// The CPUs that were asked for in vain: the kernel drops them without a word.
    pub ignored: CpuList,
    /// Bytes of a text that were taken: a writer goes on with the rest, as it does with files.
    pub len_bytes: usize,
}

/// Reason for refusing a write or a change.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{errno}: {why}")]
pub struct Refused {
    /// As a system call would say it.
    pub errno: Errno,
    /// As a person would.
    pub why: String,
}

impl Refused {
    /// A refusal, by the kernel's name and in words.
    pub fn new(errno: Errno, why: impl Into<String>) -> Self {
        Self { errno, why: why.into() }
    }

    /// Reads what [`Display`](std::fmt::Display) wrote.
    pub fn from_line(line: &str) -> Option<Self> {
        let (errno, why) = line.split_once(": ")?;
        Some(Self::new(Errno::named(errno)?, why))
    }
}
