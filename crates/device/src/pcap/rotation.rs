//! Rotation of a capture: a new file by size or time, and the oldest ones deleted.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::num::{NonZeroU16, NonZeroU64};
use std::path::{Path, PathBuf};

use forebay_sys::error::{Error, Result};
use forebay_sys::remove_file;

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
    /// the times of its first packet and of this one, in either order: clocks are set back.
    pub(super) fn is_due(&self, file: &FileSpan, packet_bytes: u64, now_ns: u64) -> bool {
        let is_full = |limit: NonZeroU64| file.len_bytes + packet_bytes > limit.get();
        let is_over = |period: NonZeroU64| now_ns.abs_diff(file.began_ns) >= period.get();
        self.len_bytes.is_some_and(is_full) || self.period_ns.is_some_and(is_over)
    }
}

/// Length of a file, with its buffered records, and time of its first packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileSpan {
    pub(super) len_bytes: u64,
    pub(super) began_ns: u64,
}

/// Names of a capture's files, in order, after those of earlier runs. Those to be deleted are kept in
/// mind.
#[derive(Debug)]
pub(super) struct FileNames {
    stem: PathBuf,
    rotation: Rotation,
    next: u64,
    /// Files that exist, the oldest first: at most as many as are kept once there is a name; none if
    /// all are kept.
    existing: VecDeque<PathBuf>,
    /// True once the files that were there have been found.
    has_looked: bool,
}

impl FileNames {
    /// Names that begin with `stem`.
    pub(super) fn new(stem: &Path, rotation: Rotation) -> Self {
        // The files that are there may still be deleted before the first name is asked for.
        let has_looked = !rotation.is_on();
        Self { stem: stem.to_owned(), rotation, next: 0, existing: VecDeque::new(), has_looked }
    }

    fn find_existing(&mut self) -> Result<()> {
        let directory = self.stem.parent().unwrap_or(Path::new("."));
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(Error::file("read", directory))?,
        };
        let mut numbered = Vec::new();
        for entry in entries {
            let path = entry.map_err(Error::file("read", directory))?.path();
            numbered.extend(self.number_of(&path).map(|number| (number, path)));
        }
        numbered.sort_unstable();
        self.next = numbered.last().map_or(0, |(newest, _)| newest + 1);
        if self.rotation.kept.is_some() {
            self.existing.extend(numbered.into_iter().map(|(_, path)| path));
        }
        Ok(())
    }

    /// Number of a file of this capture; `None` for all other files, and for numbers that nothing
    /// could follow.
    fn number_of(&self, path: &Path) -> Option<u64> {
        let stem = self.stem.file_name()?.to_str()?;
        let name = path.file_name().and_then(OsStr::to_str)?;
        let digits = name.strip_prefix(stem)?.strip_prefix('.')?.strip_suffix(".pcap")?;
        let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
        let number = is_number.then(|| digits.parse().ok())??;
        (number < u64::MAX).then_some(number)
    }

    pub(super) fn rotation(&self) -> Rotation {
        self.rotation
    }

    /// Name of the next file. The oldest files are deleted first, so that there are never more than
    /// are kept.
    ///
    /// # Errors
    /// If a file cannot be deleted, or the names that are there could not be read.
    pub(super) fn next(&mut self) -> Result<PathBuf> {
        if !self.has_looked {
            self.find_existing()?;
            self.has_looked = true;
        }
        let mut name = self.stem.as_os_str().to_owned();
        if self.rotation.is_on() {
            name.push(format!(".{:0NUMBER_DIGITS$}", self.next));
        }
        name.push(".pcap");
        if let Some(kept) = self.rotation.kept {
            while self.existing.len() >= usize::from(kept.get()) {
                self.existing.pop_front().map_or(Ok(()), |oldest| remove_file(&oldest))?;
            }
            self.existing.push_back(PathBuf::from(&name));
        }
        self.next += 1;
        Ok(name.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_packet_does_not_end_rotation() {
        let period_ns = NonZeroU64::new(1_000);
        let rotation = Rotation { period_ns, ..Rotation::default() };
        let is_due =
            |began_ns, now_ns| rotation.is_due(&FileSpan { len_bytes: 24, began_ns }, 100, now_ns);
        assert!(is_due(5_000, 6_000) && !is_due(5_000, 5_999));
        // Clocks are set back, and captures are joined.
        assert!(is_due(90_000, 5_000) && !is_due(5_000, 4_001));
    }
}
