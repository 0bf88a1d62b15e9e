//! Mounts that killed runs have left: recognized as ours, and removed.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_sys as sys;

use super::NAME;

/// True if a killed run of this user has left its mount on a directory. Changes nothing.
pub(super) fn is_there(directory: &Path) -> bool {
    // ENOTCONN is the answer of a FUSE file system whose process is gone, and of no other.
    let is_dead =
        fs::read_dir(directory).is_err_and(|error| error.kind() == ErrorKind::NotConnected);
    let mount = if is_dead { mount_of(directory).ok().flatten() } else { None };
    mount.is_some_and(|mount| is_ours(&mount, sys::user().uid))
}

/// Removes all mounts that killed runs of this user have left on a directory, one above the other.
pub(super) fn remove(directory: &Path) -> io::Result<()> {
    while is_there(directory) {
        let whole = fs::read_link(link_to(&path_only(directory)?))?;
        match sys::unmount_lazily(&whole) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => by_fusermount(&whole)?,
            unmounted => unmounted?,
        }
    }
    Ok(())
}

/// Unmounts by `fusermount3`, by which a user without the right to unmount has mounted.
fn by_fusermount(directory: &Path) -> io::Result<()> {
    let mut command = Command::new("fusermount3");
    command.args(["-u", "-z", "-q", "--"]).arg(directory).stdin(Stdio::null());
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if status.success() { Ok(()) } else { Err(ErrorKind::PermissionDenied.into()) }
}

/// Descriptor of a directory, opened without any request to its file system.
fn path_only(directory: &Path) -> io::Result<fs::File> {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(directory)
}

fn link_to(file: &fs::File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Line of `/proc/self/mountinfo` for the topmost mount on a directory, if there is one.
fn mount_of(directory: &Path) -> io::Result<Option<String>> {
    let file = path_only(directory)?;
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let number = about.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let of_number = |line: &&str| line.split(' ').next() == number;
    Ok(mounts.lines().find(of_number).map(str::to_owned))
}

/// True if a line of `/proc/self/mountinfo` is that of a control tree mounted by `uid`.
fn is_ours(line: &str, uid: u32) -> bool {
    // Behind the dash: the type, the source, and the mount options.
    let Some((_, described)) = line.split_once(" - ") else { return false };
    let mut words = described.split(' ');
    let is_fuse = words.next().is_some_and(|kind| kind == "fuse" || kind.starts_with("fuse."));
    let is_named = words.next() == Some(NAME);
    let user = format!("user_id={uid}");
    let is_of_user = words.next().is_some_and(|options| options.split(',').any(|at| at == user));
    is_fuse && is_named && is_of_user
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_control_tree_is_unmounted() {
        let of = |kind, source, user| {
            let options = format!("rw,user_id={user},group_id=0,default_permissions,allow_other");
            format!("91 29 0:53 / /mnt/fb rw,nosuid shared:7 - {kind} {source} {options}")
        };
        assert!(is_ours(&of("fuse", "forebay", 0), 0));
        assert!(is_ours(&of("fuse.forebay", "forebay", 1000), 1000));
        for (kind, source, user) in [
            ("fuse", "forebay", 10),
            ("fuse", "forebay", 1),
            ("fuse.sshfs", "host:/forebay", 0),
            ("fuseblk", "forebay", 0),
            ("ext4", "forebay", 0),
            ("fuse", "forebay2", 0),
        ] {
            assert!(!is_ours(&of(kind, source, user), 0), "{kind} {source} {user}");
        }
        for line in ["", "91 29 0:53 / /mnt/fb rw", "1 - fuse", "1 - fuse forebay"] {
            assert!(!is_ours(line, 0), "{line}");
        }
    }

    #[test]
    fn what_answers_leaves_nothing_to_remove() {
        let here = std::env::current_dir().unwrap();
        assert!(!is_there(&here) && !is_there(&here.join("nowhere")));
        assert_eq!(remove(&here).ok(), Some(()));
    }
}
