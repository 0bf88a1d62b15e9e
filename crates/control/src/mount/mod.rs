//! The control tree as a file system (FUSE), whose files answer as those of sysfs and procfs do:
//! scripts that are written for these run unchanged, with a prefix.

mod files; //    what the kernel asks, and what it is answered
mod like; //     which of the kernel's file systems a file behaves like
mod inodes; //   numbers for paths
mod readings; // what open files are in the middle of being read from
mod dead; //     what a killed run has left

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::{fs, io, mem};

use forebay_sys as sys;
use forebay_sys::errno::Errno;
use forebay_sys::error::{Error, Result};
use fuser::{BackgroundSession, Config, MountOption, SessionACL};

use self::files::Files;
use super::Control;

/// Name in the system's list of mounts.
const NAME: &str = "forebay";

/// A control tree that is mounted on a directory until this is dropped.
///
/// Served by a thread of its own. Where the caller is root, everybody may look and only root
/// may change anything, as in sysfs; anybody else keeps it to themselves.
pub struct Mount {
    directory: PathBuf,
    /// The number that the kernel has for the file system.
    device: u64,
    knobs: MountedKnobs,
    session: Option<BackgroundSession>,
}

impl Mount {
    /// Mounts the tree on an empty directory. What a killed run of this user has left mounted there
    /// is taken away before.
    ///
    /// # Errors
    /// When the directory cannot be mounted on, see [`check`](Self::check), or the system refuses.
    pub fn new(control: Control, directory: &Path) -> Result<Self> {
        let refused = |source| Error::Mount { directory: directory.to_owned(), source };
        dead::remove(directory).map_err(refused)?;
        Self::check(directory)?;
        let whole = directory.canonicalize().map_err(refused)?;
        let knobs = MountedKnobs(Arc::new(RwLock::new(Some(control))));
        let mut config = Config::default();
        // Modes and owners are for the kernel to judge by.
        config.mount_options = vec![
            MountOption::FSName(NAME.to_owned()),
            MountOption::DefaultPermissions,
            MountOption::NoAtime,
            MountOption::NoDev,
            MountOption::NoExec,
            MountOption::NoSuid,
        ];
        config.acl = if sys::user().is_root() { SessionACL::All } else { SessionACL::Owner };
        let files = Files::new(knobs.clone());
        let session = fuser::spawn_mount(files, &whole, &config).map_err(refused)?;
        let device = fs::metadata(&whole).map_err(refused)?.dev();
        Ok(Self { directory: whole, device, knobs, session: Some(session) })
    }

    /// Says whether a directory can be mounted on: one that is there, and empty, or that a killed run
    /// of this user has left mounted.
    ///
    /// # Errors
    /// When it is not, with what to do.
    pub fn check(directory: &Path) -> Result<()> {
        let refused = |problem: &str, help: String| {
            let problem = problem.to_owned();
            Err(Error::Mountpoint { directory: directory.to_owned(), problem, help })
        };
        let name = directory.display();
        if dead::is_there(directory) {
            return Ok(());
        }
        let first = fs::read_dir(directory).and_then(|mut entries| entries.next().transpose());
        match first.map_err(|error| (error.kind(), error)) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => {
                let help = "give an empty directory: what is in this one would be hidden";
                refused("it is not empty", help.to_owned())
            }
            // Nobody answers for what is mounted there.
            Err((io::ErrorKind::NotConnected, _)) => refused(
                "the process that has mounted something there is gone, and it was no run of yours",
                format!("give another directory, or remove it with `umount -l {name}`"),
            ),
            Err((io::ErrorKind::NotFound, _)) => {
                refused("there is no such directory", format!("make it with `mkdir -p {name}`"))
            }
            Err((_, error)) => {
                refused(&error.to_string(), "give an empty directory of yours".to_owned())
            }
        }
    }

    /// True if the directory still is our file system: anybody may have unmounted it.
    fn is_mounted(&self) -> bool {
        match fs::metadata(&self.directory) {
            Ok(metadata) => metadata.dev() == self.device,
            Err(error) => error.kind() == io::ErrorKind::NotConnected,
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted() {
            drop(self.session.take());
        }
        // A shell stands in it, or a file is open: gone for all others, and for these when they leave.
        if self.is_mounted() {
            // If even this is refused, nobody is left to be told.
            let _ = sys::unmount_lazily(&self.directory);
        }
        // It would unmount whatever is mounted there instead.
        mem::forget(self.session.take());
        self.knobs.close();
    }
}

/// The knobs behind the files, for as long as the mount lasts. Files can be open for longer, and
/// other mount namespaces keep what they have seen: the thread that serves them ends with the
/// program, and all that it answers is that the device is gone, as sysfs does.
#[derive(Clone)]
struct MountedKnobs(Arc<RwLock<Option<Control>>>);

impl MountedKnobs {
    fn ask<T>(
        &self,
        question: impl FnOnce(&Control) -> Result<T, Errno>,
    ) -> Result<T, fuser::Errno> {
        let control = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let control = control.as_ref().ok_or(fuser::Errno::ENODEV)?;
        question(control).map_err(|errno| fuser::Errno::from_i32(errno.code()))
    }

    fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    fn told(directory: &Path) -> (String, String) {
        let error = Mount::check(directory).unwrap_err();
        assert!(!error.is_refusal(), "{error}");
        (error.to_string(), error.help())
    }

    #[test]
    fn unmountable_directory_error_says_remedy() {
        let here = env::current_dir().unwrap();
        let (problem, help) = told(&here);
        assert!(problem.contains("is not empty") && help.contains("empty directory"), "{problem}");
        let nowhere = here.join("nowhere");
        let (problem, help) = told(&nowhere);
        assert!(problem.contains("no such directory"), "{problem}");
        assert!(help.contains(&format!("mkdir -p {}", nowhere.display())), "{help}");
        let (problem, _) = told(&here.join("Cargo.toml"));
        assert!(problem.contains("Not a directory"), "{problem}");
    }
}
