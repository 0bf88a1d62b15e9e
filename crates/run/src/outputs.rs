//! Files that a run may overwrite: those of earlier runs, and never its own inputs.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use forebay_engine::trace::{self, TracePlan};
use forebay_sys::error::{Error, Result};
use forebay_sys::remove_file;

/// Directories that a run writes to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outputs<'a> {
    /// Captures of the packets that each CPU delivered, each with the name of its setting.
    pub(crate) captures: Vec<(&'static str, &'a Path)>,
    /// Trace.
    pub(crate) trace: Option<&'a TracePlan>,
    /// Pictures, which are overwritten.
    pub(crate) plots: &'a [PathBuf],
}

/// Directories that no other run writes to while this lives.
#[derive(Debug, Default)]
pub(crate) struct DirectoryLocks {
    /// Each directory once, with a lock of its own.
    locked: Vec<((u64, u64), File)>,
}

/// A file that this run may overwrite or remove.
struct Output<'a> {
    what: &'static str,
    directory: &'a Path,
    path: PathBuf,
}

impl Outputs<'_> {
    /// Creates the directories, and keeps other runs from them. Nothing in them changes.
    ///
    /// # Errors
    /// If another run writes to one of them, or one cannot be created or opened.
    pub(crate) fn lock(&self) -> Result<DirectoryLocks> {
        let mut locks = DirectoryLocks::default();
        for (_, directory) in &self.captures {
            locks.add("the directory of captures", directory)?;
        }
        if let Some(TracePlan { directory, .. }) = self.trace {
            locks.add("the directory of the trace", directory)?;
        }
        Ok(locks)
    }

    /// Fails if one of `inputs`, which this run reads, would be overwritten. Touches nothing.
    ///
    /// # Errors
    /// If a file to be overwritten is one of `inputs`, or a directory cannot be read.
    pub(crate) fn refuse_inputs<'p>(&self, inputs: impl Iterator<Item = &'p Path>) -> Result<()> {
        let inputs: Vec<_> = inputs.filter_map(identity).collect();
        for Output { what, directory, path } in self.files()? {
            if identity(&path).is_some_and(|file| inputs.contains(&file)) {
                return Err(Error::Setting {
                    what,
                    value: directory.display().to_string(),
                    why: format!("{} is to be replayed and would be lost", path.display()),
                });
            }
        }
        Ok(())
    }

    /// Removes the captures of an earlier run, so that all files there are of one run afterwards. To
    /// be called when nothing can keep the run from starting any more. A trace [clears its own
    /// files](trace::Trace::begin).
    ///
    /// # Errors
    /// If a directory cannot be read, or a file cannot be removed.
    pub(crate) fn clear_captures(&self) -> Result<()> {
        self.capture_files()?.iter().try_for_each(|output| remove_file(&output.path))
    }

    fn capture_files(&self) -> Result<Vec<Output<'_>>> {
        let mut outputs = Vec::new();
        for &(what, directory) in &self.captures {
            let written = entries(directory)?.into_iter().filter(|path| is_written(path));
            // Each capture is created with its first packet, if there is one.
            outputs.extend(written.map(|path| Output { what, directory, path }));
        }
        Ok(outputs)
    }

    fn files(&self) -> Result<Vec<Output<'_>>> {
        let mut outputs = self.capture_files()?;
        if let Some(TracePlan { directory, .. }) = self.trace {
            outputs.extend(trace::FILES.iter().map(|&name| Output {
                what: "trace",
                directory,
                path: directory.join(name),
            }));
        }
        outputs.extend(self.plots.iter().map(|path| Output {
            what: "plot",
            directory: path.parent().unwrap_or(path),
            path: path.clone(),
        }));
        Ok(outputs)
    }
}

impl DirectoryLocks {
    fn add(&mut self, what: &'static str, path: &Path) -> Result<()> {
        fs::create_dir_all(path).map_err(Error::file("create", path))?;
        let directory = File::open(path).map_err(Error::file("open", path))?;
        let metadata = directory.metadata().map_err(Error::file("open", path))?;
        let own = (metadata.dev(), metadata.ino());
        if self.locked.iter().any(|(locked, _)| *locked == own) {
            // A second lock of this run would wait for its first.
            return Ok(());
        }
        match directory.try_lock() {
            Err(TryLockError::WouldBlock) => {
                Err(Error::InUse { what, path: path.to_owned(), process: None })
            }
            // Some file systems of networks do not lock directories.
            Ok(()) | Err(TryLockError::Error(_)) => {
                self.locked.push((own, directory));
                Ok(())
            }
        }
    }
}

/// True if the path has a name that a run gives to captures: `cpuN.pcap` or `cpuN-ip.pcap`, with the
/// number of the file before `.pcap` if files are rotated.
fn is_written(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    let stem = name.and_then(|name| name.strip_prefix("cpu")?.strip_suffix(".pcap"));
    stem.is_some_and(|stem| {
        let (stem, number) = stem.split_once('.').unwrap_or((stem, "0"));
        is_number(stem.strip_suffix("-ip").unwrap_or(stem)) && is_number(number)
    })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit())
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::file("read", directory))?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().map_err(Error::file("read", directory))
}

/// Identity of a file under any name: its device and inode.
pub(crate) fn identity(path: impl AsRef<Path>) -> Option<(u64, u64)> {
    let identity = |metadata: Metadata| (metadata.dev(), metadata.ino());
    path.as_ref().metadata().ok().map(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_differ_from_others() {
        for name in [
            "cpu0.pcap",
            "d/cpu17.pcap",
            "cpu4095-ip.pcap",
            "cpu3.000017.pcap",
            "cpu3-ip.1000000.pcap",
        ] {
            assert!(is_written(Path::new(name)), "{name}");
        }
        for name in [
            "cpu.pcap",
            "cpu-ip.pcap",
            "cpu1..pcap",
            "cpu1.0.0.pcap",
            "cpu1.x.pcap",
            "cpu1.pcapng",
            "mycpu1.pcap",
            "cpu1-ipx.pcap",
            "f",
        ] {
            assert!(!is_written(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn ops_4_directory_has_one_writer() {
        let parent = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| parent.path().join(name));
        let same = parent.path().join("other/../one");
        let plan = TracePlan { directory: one.clone(), parse: true };
        let captures = vec![("to", one.as_path()), ("to", other.as_path()), ("to", &same)];
        let outputs = Outputs { captures, trace: Some(&plan), plots: &[] };
        let locks = outputs.lock().unwrap();
        let second = Outputs { captures: vec![("to", &same)], ..Outputs::default() };
        let error = second.lock().unwrap_err();
        let told = format!("the directory of captures {} is in use", same.display());
        assert_eq!(error.to_string(), told);
        let traced = Outputs { trace: Some(&plan), ..Outputs::default() };
        assert!(matches!(traced.lock(), Err(Error::InUse { .. })));
        drop(locks);
        second.lock().unwrap();
    }

    #[test]
    fn inputs_are_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let plan = TracePlan { directory: directory.path().to_owned(), parse: true };
        for name in trace::FILES {
            let input = directory.path().join(name);
            fs::write(&input, "a capture").unwrap();
            let outputs = Outputs { captures: Vec::new(), trace: Some(&plan), plots: &[] };
            assert!(outputs.refuse_inputs([input.as_path()].into_iter()).is_err(), "{name}");
            assert!(input.exists());
        }
    }
}
