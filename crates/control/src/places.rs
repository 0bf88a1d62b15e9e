//! Discovery of runs: each has a socket of its name in a directory that runs and clients agree on.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_sys::error::{Error, Result};
use forebay_sys::unix_peer::unix_peer;
use forebay_sys::{self as sys, User};

use super::client::reach;

/// Name of the directory of sockets, below a runtime directory.
const DIRECTORY: &str = "forebay";
/// Runtime directory of root.
const ROOTS: &str = "/run";
/// Extension of a socket's name.
const ENDING: &str = "sock";
/// Maximum length of a run's name, in bytes: less than a file name's.
const NAME_BYTES_MAX: usize = 64;
/// Maximum length of a derived name, in bytes: a number may follow it.
const MADE_UP_BYTES_MAX: usize = 60;
/// Maximum time to connect, to see if a run listens.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// A run that listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunPlace {
    /// Name of the run.
    pub name: String,
    /// Path of the socket.
    pub path: PathBuf,
}

/// Directories for the sockets of runs. The candidates, in order, are `$RUNTIME_DIRECTORY`, which a
/// service manager gives to one service; a directory below `$XDG_RUNTIME_DIR`, which belongs to a
/// user; and, for root, one below `/run`. A run uses the first.
#[must_use]
pub fn directories() -> Vec<PathBuf> {
    of_environment(
        variable("RUNTIME_DIRECTORY").as_deref(),
        variable("XDG_RUNTIME_DIR").as_deref(),
        sys::user().is_root(),
    )
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn of_environment(service: Option<&OsStr>, user: Option<&OsStr>, is_root: bool) -> Vec<PathBuf> {
    // The first of several, separated by colons.
    let first = |list: &OsStr| std::env::split_paths(list).next();
    let roots = is_root.then(|| Path::new(ROOTS).join(DIRECTORY));
    let users = user.map(|user| Path::new(user).join(DIRECTORY));
    let mut all: Vec<_> = service.and_then(first).into_iter().chain(users).chain(roots).collect();
    all.dedup();
    all
}

/// Directory for the sockets of a run, which exists now. A run that becomes the user `later` has a
/// directory of that user's in it, so that it can remove its socket in the end.
///
/// # Errors
/// If the environment names no directory, or the directory cannot be made.
pub fn directory_of_run(later: Option<User>) -> Result<PathBuf> {
    let later = later.filter(|later| later.uid != sys::user().uid);
    let user = variable("XDG_RUNTIME_DIR").filter(|_| later.is_none());
    let service = variable("RUNTIME_DIRECTORY");
    let all = of_environment(service.as_deref(), user.as_deref(), sys::user().is_root());
    let Some(directory) = all.into_iter().next() else {
        return Err(Error::NoRuns { looked: Vec::new() });
    };
    match DirBuilder::new().mode(0o755).create(&directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(Error::file("create", &directory)(error));
        }
        _ => {}
    }
    later.map_or(Ok(directory.clone()), |later| sys::directory_of(later, &directory))
}

/// Path for the socket of a run of this name in a [directory of sockets](directory_of_run).
///
/// # Errors
/// If the name is invalid.
pub fn socket_path(directory: &Path, name: &str) -> Result<PathBuf> {
    check_name(name)?;
    Ok(socket_in(directory, name))
}

/// Checks that no run of this name listens where clients look, among those that this user may ask.
///
/// # Errors
/// [`Error::InUse`] if one does.
pub fn check_free(name: &str) -> Result<()> {
    let places = sockets_in(&directories()).into_iter().filter(|place| place.name == name);
    for RunPlace { path, .. } in places {
        let process = match reach(&path, PROBE_TIMEOUT) {
            Ok(stream) => unix_peer(&stream)
                .ok()
                .and_then(|run| run.process)
                .map(|run| run.as_raw_nonzero().get()),
            // A process that accepts nobody listens, too.
            Err(rustix::io::Errno::AGAIN) => None,
            Err(_) => continue,
        };
        return Err(Error::InUse { what: "the control socket", path, process });
    }
    Ok(())
}

/// Path of the socket of the run of this name; without a name, of the only run.
///
/// # Errors
/// If none listens, or several do and there is no name.
pub fn find(name: Option<&str>) -> Result<PathBuf> {
    let looked = directories();
    let mut runs = listening_in(&looked);
    if let Some(name) = name {
        runs.retain(|run| run.name == name);
    }
    match &runs[..] {
        [run] => Ok(run.path.clone()),
        [first, ..] if name.is_some() => Ok(first.path.clone()),
        [] => match (name, looked.first()) {
            // The attempt to connect there fails with the reason.
            (Some(name), Some(directory)) => {
                check_name(name)?;
                Ok(socket_in(directory, name))
            }
            _ => Err(Error::NoRuns { looked }),
        },
        _ => Err(Error::SeveralRuns { names: runs.into_iter().map(|run| run.name).collect() }),
    }
}

/// All runs that listen in these directories and that this user may connect to.
fn listening_in(directories: &[PathBuf]) -> Vec<RunPlace> {
    let mut places = sockets_in(directories);
    // The socket that a dead run has left refuses connections.
    places.retain(|place| {
        matches!(reach(&place.path, PROBE_TIMEOUT), Ok(_) | Err(rustix::io::Errno::AGAIN))
    });
    places.sort_by(|one, other| one.name.cmp(&other.name));
    places
}

/// All sockets in these directories, and in the directories of users in them.
fn sockets_in(directories: &[PathBuf]) -> Vec<RunPlace> {
    let entries = directories.iter().flat_map(|directory| entries_of(directory));
    let (users, mut paths): (Vec<_>, Vec<_>) = entries.partition(|path| is_of_user(path));
    paths.extend(users.iter().flat_map(|directory| entries_of(directory)));
    let place = |path: PathBuf| {
        let is_socket = path.extension() == Some(OsStr::new(ENDING));
        let name = path.file_stem().filter(|_| is_socket)?.to_str()?.to_owned();
        Some(RunPlace { name, path })
    };
    paths.into_iter().filter_map(place).collect()
}

fn entries_of(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// True for a directory that is named after its owner.
fn is_of_user(path: &Path) -> bool {
    let metadata = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_dir);
    metadata.is_some_and(|of| path.file_name() == Some(OsStr::new(&of.uid().to_string())))
}

fn socket_in(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.{ENDING}"))
}

/// Valid name of a run, made from the names of its devices or files.
#[must_use]
pub fn name_of<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let last = |part: &'a str| part.rsplit('/').next().unwrap_or(part);
    let parts: Vec<_> = parts.into_iter().map(last).collect();
    let mut name = parts.join("+").replace(|letter: char| !is_plain(letter), "_");
    name.truncate(MADE_UP_BYTES_MAX);
    if check_name(&name).is_ok() { name } else { "run".to_owned() }
}

fn is_plain(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "._-+".contains(letter)
}

fn check_name(name: &str) -> Result<()> {
    let is_name = (1..=NAME_BYTES_MAX).contains(&name.len());
    if is_name && !name.starts_with('.') && name.chars().all(is_plain) {
        return Ok(());
    }
    Err(Error::Setting {
        what: "name",
        value: name.to_owned(),
        why: format!("it has 1 to {NAME_BYTES_MAX} letters, digits and ._-+, and no dot first"),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runtime_directory_order_service_user_system() {
        let of = |service: Option<&str>, user: Option<&str>, is_root| {
            let paths = of_environment(service.map(OsStr::new), user.map(OsStr::new), is_root);
            paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of(None, None, false), "");
        assert_eq!(of(None, None, true), "/run/forebay");
        assert_eq!(of(None, Some("/run/user/7"), false), "/run/user/7/forebay");
        assert_eq!(of(None, Some("/run/user/0"), true), "/run/user/0/forebay /run/forebay");
        assert_eq!(of(Some("/run/a:/run/b"), None, false), "/run/a");
        assert_eq!(of(Some("/run/forebay"), None, true), "/run/forebay");
    }

    #[test]
    fn run_is_named_after_devices() {
        assert_eq!(name_of(["eth1"]), "eth1");
        assert_eq!(name_of(["eth1", "/run/a b.sock"]), "eth1+a_b.sock");
        assert_eq!(name_of([]), "run");
        assert_eq!(name_of([".."]), "run");
        for name in ["", ".", "..", ".a", "a/b", "a b", "ä", "a\0"] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn run_names_are_file_names(parts in prop::collection::vec("\\PC{0,90}", 0..5)) {
            prop_assert!(check_name(&name_of(parts.iter().map(String::as_str))).is_ok());
        }
    }
}
