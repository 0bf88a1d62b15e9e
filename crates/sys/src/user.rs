//! User who runs this process.

use std::io;
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::process;

/// A user and its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

impl User {
    /// True if this is root.
    #[must_use]
    pub fn is_root(self) -> bool {
        self.uid == 0
    }
}

/// Effective user and group of this process.
#[must_use]
pub fn user() -> User {
    User { uid: process::geteuid().as_raw(), gid: process::getegid().as_raw() }
}

/// Checks that this process can create files in a directory.
///
/// # Errors
/// The kernel's refusal.
pub fn may_make_files_in(directory: &Path) -> io::Result<()> {
    Ok(access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
}
