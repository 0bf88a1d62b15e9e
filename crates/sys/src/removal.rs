//! Removal of files and mounts.

use std::io;
use std::path::Path;

use rustix::mount::{self, UnmountFlags};

use super::error::{Error, Result};

/// Removes a file. One that is not there is fine.
///
/// # Errors
/// If it is there and cannot be removed.
pub fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::file("remove", path)),
    }
}

/// Detaches the mount at a directory even if it is in use (`MNT_DETACH`): the file system is
/// released once nothing uses it any more.
///
/// # Errors
/// If it is not allowed, or nothing is mounted there.
pub fn unmount_lazily(directory: &Path) -> io::Result<()> {
    Ok(mount::unmount(directory, UnmountFlags::DETACH)?)
}
