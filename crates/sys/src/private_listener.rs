//! Unix sockets that this process listens at, for its own user only.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, test_kill_process};

use crate::error::{Error, Result};
use crate::hidden::Hidden;
use crate::unix_peer::unix_peer;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Listening socket that only programs of its user can connect to.
#[derive(Debug)]
pub struct PrivateListener {
    listener: Hidden<UnixListener>,
    path: PathBuf,
    /// Device and inode of the socket's file, which may have been removed, or replaced by another.
    identity: (u64, u64),
}

impl PrivateListener {
    /// Listens at `path`. The file is accessible to this user only from its creation on. A socket
    /// left by a dead process is replaced, even if children of it that were forked still have it. `what` names the socket in errors.
    ///
    /// # Errors
    /// If a live process listens there, a file of another kind is there, or the system refuses.
    pub fn bind(path: &Path, what: &'static str) -> Result<Self> {
        let listener = listen_at(path, what)?;
        let identity = identity(path).map_err(Error::file("create", path))?;
        Ok(Self { listener, path: path.to_owned(), identity })
    }

    /// Listening socket.
    pub fn socket(&self) -> &UnixListener {
        &self.listener
    }

    /// Makes the calling process the socket's owner, in place of the one that bound it before a fork: a socket whose
    /// owner has ended is replaced.
    pub fn own(&self) {
        // Ignored: it listens already.
        let _ = listen(&*self.listener, BACKLOG);
    }

    /// True if the socket's file is at its path. Without it, nobody can connect.
    #[must_use]
    pub fn is_at_its_path(&self) -> bool {
        identity(&self.path).is_ok_and(|identity| identity == self.identity)
    }

    /// Removes the socket's file, if it is still ours. To be called when no client should connect
    /// any more.
    pub fn remove(&self) {
        if self.is_at_its_path() {
            // A file that cannot be removed is replaced by the next process that listens there.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Address of a socket at `path`, which `what` names in errors.
///
/// # Errors
/// If the path is too long for a socket.
pub fn address_of(path: &Path, what: &'static str) -> Result<SocketAddrUnix> {
    // One byte less than the kernel takes: clients append a NUL.
    let fits = SocketAddr::from_pathname(path).is_ok();
    SocketAddrUnix::new(path).ok().filter(|_| fits).ok_or_else(|| Error::Setting {
        what,
        value: path.display().to_string(),
        why: "the path of a socket has 1 to 107 bytes".to_owned(),
    })
}

/// Attempts to lock the directory: a second in all. Another run holds the lock while it binds.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Binds a socket that is private from its creation on.
fn listen_at(path: &Path, what: &'static str) -> Result<Hidden<UnixListener>> {
    let refused = || Error::file("create", path);
    let address = address_of(path, what)?;
    // Two runs that start at once check and bind one after the other.
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let directory = File::open(above.unwrap_or(Path::new("."))).map_err(refused())?;
    lock(&directory).map_err(Error::file("lock", above.unwrap_or(Path::new("."))))?;
    remove_stale(path, what, &address)?;
    let bound = || {
        let socket = Hidden::<UnixListener>::new(stream_socket(SocketFlags::CLOEXEC)?.into())?;
        // Linux gives the file the mode that the socket has (unix_bind_bsd in net/unix/af_unix.c).
        fchmod(&*socket, Mode::RUSR | Mode::WUSR)?;
        bind(&*socket, &address)?;
        listen(&*socket, BACKLOG)?;
        Ok(socket)
    };
    bound().map_err(|errno: Errno| refused()(errno.into()))
}

/// Takes a lock that another run holds for a moment. Any process that can open the directory can
/// hold it forever, so the wait is bounded.
fn lock(directory: &File) -> io::Result<()> {
    for _ in 0..LOCK_TRIES {
        match flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => thread::sleep(LOCK_PAUSE),
            locked => return Ok(locked?),
        }
    }
    Err(io::Error::new(ErrorKind::WouldBlock, "another process holds a lock on the directory"))
}

/// Removes the socket of a dead run; refuses to touch anything else.
fn remove_stale(path: &Path, what: &'static str, address: &SocketAddrUnix) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        metadata => metadata.map_err(Error::file("create", path))?,
    };
    if !metadata.file_type().is_socket() {
        // A file of another kind is not ours to remove.
        return Err(Error::Setting {
            what,
            value: path.display().to_string(),
            why: "there is a file that is not a socket; give another path".to_owned(),
        });
    }
    // Non-blocking: a live run may be too busy to accept.
    let probe = stream_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let probe = probe.map_err(|errno| Error::file("create", path)(errno.into()))?;
    let connected = connect(&probe, address);
    let owner = connected.ok().and_then(|()| unix_peer(&probe).ok()?.process);
    if connected == Err(Errno::CONNREFUSED) || owner.is_some_and(has_ended) {
        return fs::remove_file(path).map_err(Error::file("remove", path));
    }
    let process = owner.map(|owner| owner.as_raw_nonzero().get());
    Err(Error::InUse { what, path: path.to_owned(), process })
}

/// True if no process has this number.
fn has_ended(process: Pid) -> bool {
    test_kill_process(process) == Err(Errno::SRCH)
}

fn stream_socket(flags: SocketFlags) -> rustix::io::Result<rustix::fd::OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
