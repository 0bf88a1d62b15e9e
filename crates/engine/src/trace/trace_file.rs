//! One file of a trace, written a few rows at a time.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use forebay_sys::error::{Error, Result};
use forebay_sys::failure::{FailureNote, FirstFailure};

use super::{ROWS_BYTES, locked};

/// Consequence of a failure, as it is reported.
const CONSEQUENCE: &str = "its further rows are left out, and counted";

/// File of a trace. After a failure, it has whole rows only, and nothing more is written.
#[derive(Debug)]
pub(super) struct TraceFile {
    path: PathBuf,
    state: Mutex<Rows<RowFile>>,
    told: FirstFailure,
}

/// File that rows are written to.
#[derive(Debug)]
enum RowFile {
    /// An open file.
    Open(File),
    /// A file that is created with its first rows.
    Later(PathBuf),
}

/// Buffered rows of a file.
#[derive(Debug)]
struct Rows<W> {
    file: W,
    waiting: Vec<u8>,
    /// Length of the file up to the end of its last whole row.
    whole_bytes: u64,
    /// Number of rows that are not in the file, and never will be.
    lost: u64,
    failed: Option<io::Error>,
}

impl TraceFile {
    /// Opens or creates a file, which is to have this header. What it has stays until the trace
    /// [begins](Self::begin). Its first failure is stored in `told` at once.
    ///
    /// # Errors
    /// If it cannot be opened or created.
    pub(super) fn open(path: PathBuf, header: &str, told: &FirstFailure) -> Result<Self> {
        let mut options = File::options();
        options.write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(Error::file("create", &path))?;
        let file = Self::of(path, RowFile::Open(file), told);
        file.write(header);
        Ok(file)
    }

    /// A file that is created with its first rows, if there are any. It has no header.
    pub(super) fn later(path: PathBuf, told: &FirstFailure) -> Self {
        Self::of(path.clone(), RowFile::Later(path), told)
    }

    fn of(path: PathBuf, file: RowFile, told: &FirstFailure) -> Self {
        Self { path, state: Mutex::new(Rows::of(file)), told: FirstFailure::clone(told) }
    }

    /// True if the file is open, and not yet to be created.
    pub(super) fn is_open(&self) -> bool {
        matches!(locked(&self.state).file, RowFile::Open(_))
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the rows of an earlier run.
    ///
    /// # Errors
    /// If it cannot be truncated.
    pub(super) fn begin(&self) -> Result<()> {
        let state = locked(&self.state);
        debug_assert_eq!(state.whole_bytes, 0, "rows are written once the trace has begun");
        let RowFile::Open(file) = &state.file else { return Ok(()) };
        let truncate = |metadata: Metadata| {
            // Pipes and devices have no length.
            if metadata.is_file() { file.set_len(0) } else { Ok(()) }
        };
        let truncated = file.metadata().and_then(truncate);
        truncated.map_err(Error::file("truncate", &self.path))
    }

    /// Adds rows, each with its line feed.
    pub(super) fn write(&self, rows: &str) {
        let mut state = locked(&self.state);
        state.add(rows.as_bytes());
        if state.waiting.len() >= ROWS_BYTES {
            self.write_out(&mut state);
        }
    }

    /// Number of rows that could not be written.
    pub(super) fn lost(&self) -> u64 {
        locked(&self.state).lost
    }

    /// Writes the buffered rows.
    ///
    /// # Errors
    /// If this write or any before it failed.
    pub(super) fn finish(&self) -> Result<()> {
        let mut state = locked(&self.state);
        self.write_out(&mut state);
        state.failed.take().map_or(Ok(()), |error| Err(self.error(error)))
    }

    fn write_out(&self, state: &mut Rows<RowFile>) {
        if state.failed.is_some() {
            return;
        }
        if let Err(error) = state.flush() {
            if let RowFile::Open(file) = &state.file {
                // Half a row is removed. A file that cannot be truncated stays as it is.
                let _ = file.set_len(state.whole_bytes);
            }
            // Only the first failure is kept.
            let _ = self.told.set(FailureNote::of(&self.error(copy_of(&error)), CONSEQUENCE));
            state.failed = Some(error);
        }
    }

    fn error(&self, source: io::Error) -> Error {
        Error::file("write", Path::new(&self.path))(source)
    }
}

impl Write for RowFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Self::Later(path) = self {
            *self = Self::Open(File::create(path)?);
        }
        match self {
            Self::Open(file) => file.write(bytes),
            Self::Later(_) => Ok(0),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Open(file) => file.flush(),
            Self::Later(_) => Ok(()),
        }
    }
}

impl<W: Write> Rows<W> {
    fn of(file: W) -> Self {
        Self { file, waiting: Vec::new(), whole_bytes: 0, lost: 0, failed: None }
    }

    fn add(&mut self, rows: &[u8]) {
        if self.failed.is_some() {
            self.lost += count(rows);
        } else {
            self.waiting.extend_from_slice(rows);
        }
    }

    /// Writes the buffered rows until an error, and counts those that are not whole in the file.
    fn flush(&mut self) -> io::Result<()> {
        let (mut taken, mut result) = (0, Ok(()));
        while taken < self.waiting.len() && result.is_ok() {
            match self.file.write(&self.waiting[taken..]) {
                Ok(0) => result = Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => taken += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => result = Err(error),
            }
        }
        let last = self.waiting[..taken].iter().rposition(|byte| *byte == b'\n');
        let whole = last.map_or(0, |last| last + 1);
        self.whole_bytes += whole as u64;
        self.lost += count(&self.waiting[whole..]);
        self.waiting.clear();
        result
    }
}

fn count(rows: &[u8]) -> u64 {
    rows.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Copy of an error: one is reported now, the other at the end.
fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use forebay_testkit::disk::Disk;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// With any room, rows in the file and lost rows are all that were added.
        #[test]
        fn ops_2_rows_are_whole_or_counted(
            room_bytes in 0usize..600,
            at_once in 1usize..50,
            flushes in prop::collection::vec(prop::collection::vec(1usize..40, 0..6), 1..8),
        ) {
            let mut rows = Rows::of(Disk { room_bytes, at_once, has: Vec::new() });
            let mut added = 0;
            for lens in flushes {
                for len in lens {
                    rows.add(format!("{}\n", "x".repeat(len)).as_bytes());
                    added += 1;
                }
                if rows.failed.is_none() {
                    rows.failed = rows.flush().err();
                }
            }
            let whole = usize::try_from(rows.whole_bytes).unwrap();
            let file = &rows.file.has[..whole];
            prop_assert!(file.is_empty() || file.ends_with(b"\n"));
            prop_assert_eq!(count(file) + rows.lost, added);
            prop_assert_eq!(rows.lost > 0, rows.failed.is_some());
        }
    }
}
