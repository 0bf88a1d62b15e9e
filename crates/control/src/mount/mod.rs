//! Control tree as a file system (FUSE), whose files answer as those of sysfs and procfs do:
//! scripts that are written for these run unchanged, with a path prefix.

mod files; //    requests of the kernel, and their answers
mod like; //     the kernel's file system that a file behaves like
mod inodes; //   numbers for paths
mod readings; // texts that open files are being read from
mod dead; //     mounts that killed runs have left

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
/// A thread of its own serves it. If the caller is root, all users may read and only root may
/// write, as in sysfs; otherwise only the caller has access.
pub struct Mount {
    directory: PathBuf,
    /// Device number of the file system.
    device: u64,
    knobs: MountedKnobs,
    session: Option<BackgroundSession>,
}

impl Mount {
    /// Mounts the tree on an empty directory. Removes a mount that a killed run of this user has
    /// left there.
    ///
    /// # Errors
    /// If the directory cannot be mounted on, see [`check`](Self::check), or the system refuses.
    pub fn new(control: Control, directory: &Path) -> Result<Self> {
        let refused = |source| Error::Mount { directory: directory.to_owned(), source };
        dead::remove(directory).map_err(refused)?;
        Self::check(directory)?;
        let whole = directory.canonicalize().map_err(refused)?;
        let knobs = MountedKnobs(Arc::new(RwLock::new(Some(control))));
        let mut config = Config::default();
        // The kernel checks modes and owners.
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

    /// Checks that a directory can be mounted on: it exists and is empty, or a killed run of this
    /// user has left its mount there.
    ///
    /// # Errors
    /// If it cannot, with a remedy.
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
            // The process that served the mount is gone.
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

    /// True if the directory still has this file system: another process may have unmounted it.
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
        // A process uses the mount: a lazy unmount hides it from all others, and ends with its last
        // user.
        if self.is_mounted() {
            // A failure of this cannot be reported from drop.
            let _ = sys::unmount_lazily(&self.directory);
        }
        // Dropping the session would unmount whatever is mounted there instead.
        mem::forget(self.session.take());
        self.knobs.close();
    }
}

/// Knobs behind the files, while the tree is mounted. Files can be open for longer, and other mount
/// namespaces keep the mount: the thread that serves them ends with the program, and answers all
/// requests with ENODEV, as sysfs does.
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
