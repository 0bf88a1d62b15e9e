//! Place of a run's control socket.

use std::iter;
use std::path::{Path, PathBuf};

use forebay_control::{BoundSocket, places};
use forebay_sys::{self as sys, Error, Result, User};
use tracing::{info, warn};

use super::remover::SocketRemover;

/// Upper bound on runs with the same default name, which are told apart by a number.
const SAME_NAME_MAX: u32 = 16;

/// Place of a control socket. A path that was given is bound with the privileges that the run begins
/// with; any other is in a directory where the run can bind and remove it without them.
pub(crate) enum SocketPlace {
    /// Bound at a path, and a process that may remove it, if this one will become another user.
    Bound(BoundSocket, PathBuf, Option<SocketRemover>),
    /// To be bound at a path.
    Path(PathBuf),
    /// To be bound in a directory, under the default name, or with a number appended; `free` are
    /// these names but for those that other runs have.
    Default { directory: PathBuf, name: String, free: Vec<String> },
}

impl SocketPlace {
    pub(crate) fn bound(path: &Path, later: Option<User>) -> Result<Self> {
        let socket = BoundSocket::bind(path)?;
        let is_another = later.is_some_and(|later| later.uid != sys::user().uid);
        // Without one, the run warns of the socket that stays.
        let remover = is_another.then(|| SocketRemover::begin(path).ok()).flatten();
        Ok(Self::Bound(socket, path.to_owned(), remover))
    }

    pub(crate) fn named(name: &str, later: Option<User>) -> Result<Self> {
        let path = places::socket_path(&places::directory_of_run(later)?, name)?;
        places::check_free(name)?;
        Ok(Self::Path(path))
    }

    /// Default place. Nobody requested the socket, so a failure is logged but does not end the run.
    pub(crate) fn by_default(name: &str, later: Option<User>) -> Option<Self> {
        let directory =
            places::directory_of_run(later).map_err(|error| log_absence(&error)).ok()?;
        let numbered = (2..=SAME_NAME_MAX).map(|number| format!("{name}-{number}"));
        let names = iter::once(name.to_owned()).chain(numbered);
        // Now, because the user may not be allowed to ask the other runs.
        let free = names.filter(|name| places::check_free(name).is_ok()).collect();
        Some(Self::Default { directory, name: name.to_owned(), free })
    }

    /// Binds the socket, once the run has the user that it goes on as.
    pub(crate) fn bind(self) -> Result<Option<BoundSocket>> {
        match self {
            Self::Bound(socket, path, remover) => {
                match (sys::may_remove(&path), remover) {
                    (Ok(()), remover) => remover.map_or((), SocketRemover::end),
                    (Err(_), Some(remover)) => remover.keep(),
                    (Err(error), None) => {
                        let path = path.display();
                        warn!(%error, "{path} stays when the run ends, as it may not remove it: \
                                       {error}; leave --control out, or give a directory of its user");
                    }
                }
                Ok(Some(socket))
            }
            Self::Path(path) => BoundSocket::bind(&path).map(Some),
            Self::Default { directory, name, free } => Ok(bind_first(&directory, &name, &free)),
        }
    }
}

fn bind_first(directory: &Path, name: &str, free: &[String]) -> Option<BoundSocket> {
    for own in free {
        match places::socket_path(directory, own).and_then(|path| BoundSocket::bind(&path)) {
            // Another run has begun in the meantime.
            Err(Error::InUse { .. }) => {}
            Err(error) => {
                log_absence(&error);
                return None;
            }
            Ok(socket) => {
                if own != name {
                    info!(name = own, "another run is called {name}: this one is called {own}");
                }
                return Some(socket);
            }
        }
    }
    warn!(name, "nobody can ask this run: too many are called {name}; see --name");
    None
}

/// Logs why a socket that was not requested is not there.
fn log_absence(error: &Error) {
    warn!(%error, "nobody can ask this run: {error}; see --control, --no-control");
}
