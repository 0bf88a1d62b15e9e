//! Files that results are written to: one that is there stays as it is until there is a result.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat, fstat};
use rustix::io::Errno;
use tempfile::NamedTempFile;

/// Mode of a new file, less what the umask of the process takes.
const MODE: u32 = 0o666;

/// Checks that a result can be written, before the work that leads to it. What is there stays as it is.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    let allows = |path: &Path, access| Ok(accessat(CWD, path, access, AtFlags::EACCESS)?);
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(Errno::ISDIR.into()),
        Ok(_) => allows(path, Access::WRITE_OK),
        Err(error) if error.kind() == ErrorKind::NotFound && path.file_name().is_some() => {
            if path.as_os_str().as_bytes().ends_with(b"/") {
                return Err(Errno::ISDIR.into());
            }
            if is_link(path) {
                File::create(path)?;
                return fs::remove_file(path.canonicalize()?);
            }
            allows(&directory_of(path), Access::WRITE_OK | Access::EXEC_OK)?;
            // Some file systems take no files, whoever asks.
            new_beside(path, None).map(drop).map_err(|error| error.kind().into())
        }
        Err(error) => Err(error),
    }
}

/// Writes a result: to a new file that takes the place of one that is there, with its owner, group and mode. What is no
/// regular file, or cannot be replaced, is written to itself; standard output behind what is there.
pub(crate) fn write(path: &Path, result: &[u8]) -> io::Result<()> {
    let old = fs::metadata(path).ok();
    if old.as_ref().is_some_and(is_standard_output) {
        let mut output = io::stdout().lock();
        return output.write_all(result).and_then(|()| output.flush());
    }
    // A link stays.
    let real = if old.is_some() { path.canonicalize().ok() } else { Some(path.to_owned()) };
    let is_regular = old.as_ref().is_none_or(Metadata::is_file);
    let Some(real) = real.filter(|real| is_regular && !is_link(real)) else {
        return fs::write(path, result);
    };
    let Ok(mut new) = new_beside(&real, old.as_ref()) else { return fs::write(path, result) };
    new.write_all(result)?;
    match new.persist(&real) {
        Ok(_) => Ok(()),
        // A mount point, as a file that a container was given.
        Err(_) => fs::write(path, result),
    }
}

fn is_standard_output(found: &Metadata) -> bool {
    fstat(io::stdout()).is_ok_and(|output| {
        // A device is written to anew.
        !found.file_type().is_char_device()
            && (output.st_dev, output.st_ino) == (found.dev(), found.ino())
    })
}

fn is_link(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink())
}

fn new_beside(path: &Path, old: Option<&Metadata>) -> io::Result<NamedTempFile> {
    let mut new = tempfile::Builder::new();
    let new = new.prefix(".forebay-").permissions(Permissions::from_mode(MODE));
    let new = new.tempfile_in(directory_of(path))?;
    if let Some(old) = old {
        fchown(&new, Some(old.uid()), Some(old.gid()))?;
        new.as_file().set_permissions(old.permissions())?;
    }
    Ok(new)
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => ".".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn result_replaces_only_when_there() {
        let dir = tempfile::tempdir().unwrap();
        let [path, link, dangling] =
            ["a.svg", "link", "dangling"].map(|name| dir.path().join(name));
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        symlink("a.svg", &link).unwrap();
        check(&link).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        write(&link, b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("a.svg"));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        symlink("b.svg", &dangling).unwrap();
        check(&dangling).unwrap();
        assert!(!dangling.exists());
        write(&dangling, b"of a link").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("b.svg")).unwrap(), "of a link");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
    }

    /// The link of a pipe, as of a process substitution, tells a name that is no path.
    #[test]
    fn pipe_takes_result_by_number() {
        let (mut from, into) = io::pipe().unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", into.as_raw_fd()));
        check(&path).unwrap();
        write(&path, b"picture").unwrap();
        drop(into);
        let mut read = String::new();
        from.read_to_string(&mut read).unwrap();
        assert_eq!(read, "picture");
    }

    #[test]
    fn unwritable_places_are_refused_before() {
        let dir = tempfile::tempdir().unwrap();
        let kind = |path: &Path| check(path).unwrap_err().kind();
        assert_eq!(kind(dir.path()), ErrorKind::IsADirectory);
        assert_eq!(kind(&dir.path().join("none/a.svg")), ErrorKind::NotFound);
        assert_eq!(kind(Path::new("")), ErrorKind::NotFound);
        assert_eq!(kind(&dir.path().join("none/")), ErrorKind::IsADirectory);
        symlink("absent/a.svg", dir.path().join("link")).unwrap();
        assert_eq!(kind(&dir.path().join("link")), ErrorKind::NotFound);
        fs::remove_file(dir.path().join("link")).unwrap();
        assert!(check(Path::new("/proc/a.svg")).is_err());
        check(&dir.path().join("a.svg")).unwrap();
        check(Path::new("/dev/null")).unwrap();
        write(Path::new("/dev/null"), b"a device stays one").unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}
