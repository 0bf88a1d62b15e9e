//! Files that results are written to: one that is there stays as it is until there is a result.

use std::fs::{self, Metadata, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat};
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
            allows(&directory_of(path), Access::WRITE_OK | Access::EXEC_OK)?;
            // Some file systems take no files, whoever asks.
            new_beside(path, None).map(drop).map_err(|error| error.kind().into())
        }
        Err(error) => Err(error),
    }
}

/// Writes a result: to a new file that takes the place of one that is there, with its owner, group and mode. What is no
/// regular file, or has no room beside it, is written to itself.
pub(crate) fn write(path: &Path, result: &[u8]) -> io::Result<()> {
    let old = fs::metadata(path).ok();
    // A link stays.
    let real = if old.is_some() { path.canonicalize()? } else { path.to_owned() };
    let is_link = fs::symlink_metadata(&real).is_ok_and(|found| found.is_symlink());
    if is_link || old.as_ref().is_some_and(|old| !old.is_file()) {
        return fs::write(path, result);
    }
    let Ok(mut new) = new_beside(&real, old.as_ref()) else { return fs::write(path, result) };
    new.write_all(result)?;
    new.persist(&real).map_err(|failed| failed.error)?;
    Ok(())
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
        write(&dangling, b"of a link").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("b.svg")).unwrap(), "of a link");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
    }

    #[test]
    fn unwritable_places_are_refused_before() {
        let dir = tempfile::tempdir().unwrap();
        let kind = |path: &Path| check(path).unwrap_err().kind();
        assert_eq!(kind(dir.path()), ErrorKind::IsADirectory);
        assert_eq!(kind(&dir.path().join("none/a.svg")), ErrorKind::NotFound);
        assert_eq!(kind(Path::new("")), ErrorKind::NotFound);
        assert!(check(Path::new("/proc/a.svg")).is_err());
        check(&dir.path().join("a.svg")).unwrap();
        check(Path::new("/dev/null")).unwrap();
        write(Path::new("/dev/null"), b"a device stays one").unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}
