//! Captures in files, pipes, standard input, memory.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use flate2::read::MultiGzDecoder;
use forebay_sys::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, access};

use super::reader::CaptureReader;
use super::window::GZIP_MAGIC;

/// Place of a capture's bytes.
#[derive(Clone, Debug)]
pub enum Capture {
    /// In a file.
    File(PathBuf),
    /// Bytes of standard input.
    Stdin,
    /// In the program: a name and the bytes.
    Bundled(&'static str, &'static [u8]),
    /// In memory, read from this file and unpacked.
    Kept(PathBuf, Arc<Vec<u8>>),
}

impl Capture {
    /// The file of this name; `-` is standard input.
    #[must_use]
    pub fn named(path: PathBuf) -> Self {
        if path.as_os_str() == "-" { Self::Stdin } else { Self::File(path) }
    }

    /// The name for messages.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File(path) | Self::Kept(path, _) => path.display().to_string(),
            Self::Stdin => "standard input".to_owned(),
            Self::Bundled(name, _) => (*name).to_owned(),
        }
    }

    /// Size, unpacked, if it can be known.
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

    /// True if it gives what it holds only once, as a pipe does.
    #[must_use]
    pub fn is_read_once(&self) -> bool {
        match self {
            Self::File(path) => is_read_once(path),
            Self::Stdin => true,
            Self::Bundled(..) | Self::Kept(..) => false,
        }
    }

    /// Opens it from the start.
    ///
    /// # Errors
    /// When it cannot be read or is no capture.
    pub fn open(&self) -> Result<CaptureReader> {
        let reader: Box<dyn Read + Send> = match self {
            Self::File(path) => Box::new(open(path)?),
            Self::Stdin => Box::new(stdin()?),
            Self::Bundled(_, bytes) => Box::new(io::Cursor::new(*bytes)),
            Self::Kept(_, bytes) => return CaptureReader::of_bytes(self.name(), Arc::clone(bytes)),
        };
        CaptureReader::new(self.name(), reader)
    }

    /// Opens what is read once, to be read without waiting; what it is shows when there is something.
    /// `None` if it is read at will.
    pub(super) fn open_inlet(&self) -> Result<Option<(CaptureReader, CaptureInlet)>> {
        let file = match self {
            Self::File(path) if is_read_once(path) => open(path)?,
            Self::Stdin => stdin()?,
            _ => return Ok(None),
        };
        let descriptor = file.as_fd().try_clone_to_owned();
        let descriptor = descriptor.map_err(Error::file("read", self.name()))?;
        let inlet = CaptureInlet { descriptor, waits: Arc::new(AtomicBool::new(true)) };
        let pipe = Pipe { file, waits: Arc::clone(&inlet.waits) };
        Ok(Some((CaptureReader::begun_later(self.name(), Box::new(pipe)), inlet)))
    }

    /// Sees whether it can be replayed: whether it is a capture, and no damage that ends the reading
    /// comes before the first record that can be delivered. What is read once is judged when it is.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn judge(&self) -> Result<()> {
        match self {
            Self::Stdin => Ok(()),
            Self::File(path) if is_read_once(path) => access(path, Access::READ_OK)
                .map_err(|error| Error::file("open", path)(error.into())),
            _ => self.open()?.judge(),
        }
    }

    /// The same, in memory if it is a file that has no more than `left_bytes`, unpacked, which then
    /// are fewer. One that cannot be read stays what it is, and says why when it is opened.
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

/// All of a file, unpacked, if it is a file of no more than `most_bytes` and all is well with it.
fn keep(path: &Path, most_bytes: u64) -> Option<Vec<u8>> {
    let metadata = path.metadata().ok()?;
    if !metadata.is_file() {
        return None;
    }
    if !is_packed(path) {
        return (metadata.len() <= most_bytes).then(|| std::fs::read(path).ok()).flatten();
    }
    let mut unpacked = MultiGzDecoder::new(File::open(path).ok()?);
    let mut bytes = Vec::new();
    unpacked.by_ref().take(most_bytes).read_to_end(&mut bytes).ok()?;
    let is_all = unpacked.read(&mut [0]).ok()? == 0;
    bytes.shrink_to_fit();
    is_all.then_some(bytes)
}

/// True if a file is one of gzip's, by its first bytes.
fn is_packed(path: &Path) -> bool {
    let mut magic = [0; GZIP_MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == GZIP_MAGIC
}

/// A directory, or what is not there, is told when it is opened.
fn is_read_once(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(Error::file("open", path))
}

/// Standard input, past the buffer of the standard library: nobody else here reads it.
fn stdin() -> Result<File> {
    let descriptor = io::stdin().as_fd().try_clone_to_owned();
    descriptor.map(File::from).map_err(Error::file("read", "standard input"))
}

/// Descriptor that a CPU sleeps on while there is nothing to be read.
pub(super) struct CaptureInlet {
    descriptor: OwnedFd,
    waits: Arc<AtomicBool>,
}

impl CaptureInlet {
    /// From now on there is an error of the kind `WouldBlock` where there is nothing to be read yet.
    pub(super) fn never_wait(&self) {
        self.waits.store(false, Ordering::Relaxed);
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A file that has no more at times. Its other users need not have it made non-blocking for them.
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
