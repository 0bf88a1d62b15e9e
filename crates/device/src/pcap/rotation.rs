//! Rotation of a capture: a new file by size or time, and the oldest ones deleted.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::num::{NonZeroU16, NonZeroU64};
use std::path::{Path, PathBuf};

use forebay_sys::error::{Error, Result};

/// Number of digits of a file's number. Larger numbers have more.
const NUMBER_DIGITS: usize = 6;

/// Limits of the files of a capture; without any, it is one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rotation {
    /// Size that a file does not exceed, in bytes, unless its only packet does.
    pub len_bytes: Option<NonZeroU64>,
    /// Time that a file covers, by the times of its packets, in nanoseconds.
    pub period_ns: Option<NonZeroU64>,
    /// Number of files that are kept. `None` to keep all.
    pub kept: Option<NonZeroU16>,
}

impl Rotation {
    /// True if there is more than one file.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.len_bytes.is_some() || self.period_ns.is_some()
    }

    /// True if a packet of this length goes to a new file, by the length of the current one and by
    /// the times of its first packet and of this one.
    pub(super) fn is_due(&self, file: &FileSpan, packet_bytes: u64, now_ns: u64) -> bool {
        let is_full = |limit: NonZeroU64| file.len_bytes + packet_bytes > limit.get();
        let is_over = |period: NonZeroU64| now_ns.saturating_sub(file.began_ns) >= period.get();
        self.len_bytes.is_some_and(is_full) || self.period_ns.is_some_and(is_over)
    }
}

/// Length of a file, with its buffered records, and time of its first packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileSpan {
    pub(super) len_bytes: u64,
    pub(super) began_ns: u64,
}

/// Names of a capture's files, in order. Those to be deleted are kept in mind.
#[derive(Debug)]
pub(super) struct FileNames {
    stem: PathBuf,
    rotation: Rotation,
    next: u64,
    /// Files that exist, the oldest first: at most as many as are kept; none if all are.
    existing: VecDeque<PathBuf>,
}

impl FileNames {
    /// Names that begin with `stem`.
    pub(super) fn new(stem: &Path, rotation: Rotation) -> Self {
        Self { stem: stem.to_owned(), rotation, next: 0, existing: VecDeque::new() }
    }

    pub(super) fn rotation(&self) -> Rotation {
        self.rotation
    }

    /// Name of the next file. The oldest files are deleted first, so that there are never more than
    /// are kept.
    ///
    /// # Errors
    /// If a file cannot be deleted.
    pub(super) fn next(&mut self) -> Result<PathBuf> {
        let mut name = self.stem.as_os_str().to_owned();
        if self.rotation.is_on() {
            name.push(format!(".{:0NUMBER_DIGITS$}", self.next));
        }
        name.push(".pcap");
        if let Some(kept) = self.rotation.kept {
            while self.existing.len() >= usize::from(kept.get()) {
                self.existing.pop_front().map_or(Ok(()), |oldest| delete(&oldest))?;
            }
            self.existing.push_back(PathBuf::from(&name));
        }
        self.next += 1;
        Ok(name.into())
    }
}

/// Deletes a file, which may be gone already.
fn delete(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        deleted => deleted.map_err(Error::file("remove", path)),
    }
}
