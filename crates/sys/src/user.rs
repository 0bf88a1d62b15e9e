//! User who runs this process.

use std::io;
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::process;

/// A user, and the group that its files belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct User {
    /// The user's number.
    pub uid: u32,
    /// The group's.
    pub gid: u32,
}

impl User {
    /// True if this is the one that may do anything.
    #[must_use]
    pub fn is_root(self) -> bool {
        self.uid == 0
    }
}

/// User who runs this process.
#[must_use]
pub fn user() -> User {
    User { uid: process::geteuid().as_raw(), gid: process::getegid().as_raw() }
}

/// Says why this process could not make files in a directory, if it could not.
///
/// # Errors
/// What the kernel says.
pub fn may_make_files_in(directory: &Path) -> io::Result<()> {
    Ok(access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
}
