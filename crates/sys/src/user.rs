//! User who runs this process.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, Gid, Mode, OFlags, Uid, access, fchmod, fchown, fstat, open};
use rustix::process;

use crate::error::{Error, Result};
use crate::privilege;

/// Mode of a user's directory.
const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);

/// Mode bit of a directory in which each user removes only files of its own.
const STICKY: u32 = 0o1000;

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

/// Checks that this process can remove a file.
///
/// # Errors
/// The kernel's refusal.
pub fn may_remove(path: &Path) -> io::Result<()> {
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let above = above.unwrap_or(Path::new("."));
    may_make_files_in(above)?;
    let (directory, own) = (fs::metadata(above)?, user());
    let is_kept = directory.mode() & STICKY != 0 && !own.is_root();
    if is_kept && ![directory.uid(), fs::symlink_metadata(path)?.uid()].contains(&own.uid) {
        return Err(ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

/// Directory of another user below `above`, named by its number; made and given to the user unless
/// it is there. To be called before the process becomes that user.
///
/// # Errors
/// If the process may not make it, or somebody else has made it.
pub fn directory_of(user: User, above: &Path) -> Result<PathBuf> {
    let path = above.join(user.uid.to_string());
    let refused = || Error::file("create", &path);
    let errno = |errno: rustix::io::Errno| refused()(errno.into());
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(refused()(error)),
        _ => {}
    }
    // By descriptor: a link in its place, which others may make where all may write, is refused.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(&path, flags, Mode::empty()).map_err(errno)?;
    let owner = fstat(&directory).map_err(errno)?.st_uid;
    if owner == user.uid {
        return Ok(path);
    }
    if owner != self::user().uid {
        let why = format!("user {owner} has made it");
        return Err(refused()(io::Error::new(ErrorKind::PermissionDenied, why)));
    }
    privilege::for_giving_away(&path)?;
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    fchmod(&directory, DIRECTORY_MODE).map_err(errno)?;
    fchown(&directory, Some(uid), Some(gid)).map_err(errno)?;
    Ok(path)
}
