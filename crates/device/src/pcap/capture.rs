//! Captures in files, pipes, standard input and memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_sys::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, access};

use super::gzip::Gunzip;
use super::reader::CaptureReader;
use super::window::GZIP_MAGIC;

/// Location of a capture.
#[derive(Clone, Debug)]
pub enum Capture {
    /// File.
    File(PathBuf),
    /// Standard input.
    Stdin,
    /// Bytes compiled into the program, with a name.
    Bundled(&'static str, &'static [u8]),
    /// Bytes in memory, read from this file and unpacked.
    Kept(PathBuf, Arc<Vec<u8>>),
}

impl Capture {
    /// Returns the capture with this file name; `-` is standard input.
    #[must_use]
    pub fn named(path: PathBuf) -> Self {
        if path.as_os_str() == "-" { Self::Stdin } else { Self::File(path) }
    }

    /// Returns the name for messages.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File(path) | Self::Kept(path, _) => path.display().to_string(),
            Self::Stdin => "standard input".to_owned(),
            Self::Bundled(name, _) => (*name).to_owned(),
        }
    }

    /// Returns the unpacked size in bytes, if known.
    #[must_use]
    pub fn len_bytes(&self) -> Option<u64> {
        match self {
            Self::File(path) => {
                let metadata = path.metadata().ok()?;
                (metadata.is_file() && !is_packed(path)).then_some(metadata.len())
            }
            Self::Stdin => None,
            Self::Bundled(_, bytes) => Some(bytes.len() as u64),
            Self::Kept(_, bytes) => Some(bytes.len() as u64),
        }
    }

    /// True if the capture can be read only once, as a pipe.
    #[must_use]
    pub fn is_read_once(&self) -> bool {
        match self {
            Self::File(path) => is_read_once(path),
            Self::Stdin => true,
            Self::Bundled(..) | Self::Kept(..) => false,
        }
    }

    /// Opens the capture from its start.
    ///
    /// # Errors
    /// If it cannot be read or is not a capture.
    pub fn open(&self) -> Result<CaptureReader> {
        let reader: Box<dyn Read + Send> = match self {
            Self::File(path) => Box::new(open(path)?),
            Self::Stdin => Box::new(stdin()?),
            Self::Bundled(_, bytes) => Box::new(io::Cursor::new(*bytes)),
            Self::Kept(_, bytes) => return CaptureReader::of_bytes(self.name(), Arc::clone(bytes)),
        };
        CaptureReader::new(self.name(), reader)
    }

    /// Opens a capture that can be read only once, for reads that do not block. Its format is
    /// detected with its first bytes. `None` for captures that can be read at any time.
    pub(super) fn open_pipe(&self) -> Result<Option<(CaptureReader, PipeControl)>> {
        let file = match self {
            Self::File(path) if is_read_once(path) => open(path)?,
            Self::Stdin => stdin()?,
            _ => return Ok(None),
        };
        let descriptor = file.as_fd().try_clone_to_owned();
        let descriptor = descriptor.map_err(Error::file("read", self.name()))?;
        let control = PipeControl { descriptor, waits: Arc::new(AtomicBool::new(true)) };
        let pipe = Pipe { file, waits: Arc::clone(&control.waits) };
        Ok(Some((CaptureReader::begun_later(self.name(), Box::new(pipe)), control)))
    }

    /// Checks that the capture can be replayed: it is a capture, and no damage that ends the
    /// reading precedes the first record that can be delivered. A capture that can be read only
    /// once is checked for access only.
    ///
    /// # Errors
    /// If it cannot be replayed.
    pub fn judge(&self) -> Result<()> {
        match self {
            Self::Stdin => Ok(()),
            Self::File(path) if is_read_once(path) => access(path, Access::READ_OK)
                .map_err(|error| Error::file("open", path)(error.into())),
            _ => self.open()?.judge(),
        }
    }

    /// Loads a file into memory if its unpacked size is at most `left_bytes`, and subtracts that
    /// size. A file that cannot be read stays as it is; opening it reports the error.
    #[must_use]
    pub fn kept(self, left_bytes: &mut u64) -> Self {
        match self {
            Self::File(path) => match keep(&path, *left_bytes) {
                Some(bytes) => {
                    *left_bytes = left_bytes.saturating_sub(bytes.len() as u64);
                    Self::Kept(path, Arc::new(bytes))
                }
                None => Self::File(path),
            },
            other => other,
        }
    }
}

/// Reads and unpacks a regular file of at most `most_bytes` unpacked; `None` if it is larger, is
/// packed twice, or cannot be read.
fn keep(path: &Path, most_bytes: u64) -> Option<Vec<u8>> {
    let metadata = path.metadata().ok()?;
    if !metadata.is_file() {
        return None;
    }
    if !is_packed(path) {
        return (metadata.len() <= most_bytes).then(|| std::fs::read(path).ok()).flatten();
    }
    let mut unpacked = Gunzip::new(File::open(path).ok()?);
    let mut bytes = Vec::new();
    unpacked.by_ref().take(most_bytes).read_to_end(&mut bytes).ok()?;
    let is_all = unpacked.read(&mut [0]).ok()? == 0;
    bytes.shrink_to_fit();
    // What is packed twice is no capture. Of kept bytes, the reader could not tell.
    (is_all && !bytes.starts_with(&GZIP_MAGIC)).then_some(bytes)
}

/// True if a file begins as a gzip file does.
fn is_packed(path: &Path) -> bool {
    let mut magic = [0; GZIP_MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == GZIP_MAGIC
}

/// True for pipes, sockets and devices. Opening reports a directory or a missing file.
fn is_read_once(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(Error::file("open", path))
}

/// Duplicates standard input, past the buffer of the standard library: nothing else here reads it.
fn stdin() -> Result<File> {
    let descriptor = io::stdin().as_fd().try_clone_to_owned();
    descriptor.map(File::from).map_err(Error::file("read", "standard input"))
}

/// Control of a capture whose reads may block: a descriptor to sleep on, and the choice to wait.
pub(super) struct PipeControl {
    descriptor: OwnedFd,
    waits: Arc<AtomicBool>,
}

impl PipeControl {
    /// Makes reads without data fail with `WouldBlock` from now on.
    pub(super) fn never_wait(&self) {
        self.waits.store(false, Ordering::Relaxed);
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// File whose reads may block. `poll(2)` avoids blocking, because `O_NONBLOCK` would also affect
/// other processes that share the file.
struct Pipe {
    file: File,
    waits: Arc<AtomicBool>,
}

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.waits.load(Ordering::Relaxed) {
            let mut readable = [PollFd::new(&self.file, PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(&mut readable, Some(&now))? == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        self.file.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::gzip::tests::packed;
    use super::*;

    #[test]
    fn kept_capture_is_unpacked_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("packed.pcap");
        let header = [
            0xa1, 0xb2, 0xc3, 0xd4, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 0, 0, 0, 1,
        ];
        for (times, is_capture) in [(0, true), (1, true), (2, false)] {
            let bytes = (0..times).fold(header.to_vec(), |bytes, _| packed(&bytes));
            std::fs::write(&path, &bytes).unwrap();
            let capture = Capture::named(path.clone());
            assert_eq!(capture.open().is_ok(), is_capture, "{times}");
            assert_eq!(capture.kept(&mut 1_000).open().is_ok(), is_capture, "{times}, kept");
        }
    }
}
