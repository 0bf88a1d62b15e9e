//! The control socket: where a run listens for those who ask it or change it.
//!
//! It is a Unix stream socket that only its owner may connect to. What is said there is in
//! [`request`](super::request). Every client has a thread of its own, so that none waits for
//! another; at most [`CLIENTS_MAX`](super::seats::CLIENTS_MAX) are served, and nothing here is on
//! the path of packets.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::geteuid;

use super::errno::Errno;
use super::live::Control;
use super::refused::Refused;
use super::seats::Seats;
use super::session::{Desk, Session};
use crate::error::{Error, Result};

/// Clients that wait to be let in.
const BACKLOG: i32 = 64;

/// How long the door stays shut when a client cannot be let in for want of descriptors or threads.
const REFUSED_PAUSE: Duration = Duration::from_millis(10);

/// An open control socket: it is closed and removed when this is dropped.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
    /// The socket's file, by device and inode: another may have taken the path.
    identity: (u64, u64),
    listener: Arc<UnixListener>,
    seats: Arc<Seats>,
    door: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Listens at `path`, and answers from `control`. What a dead run left there is replaced.
    /// Clients are told `config` when they ask for the run's config file.
    ///
    /// # Errors
    /// When a live run listens there, there is a file of another kind, or the system refuses.
    pub fn open(control: Control, path: &Path, config: Option<PathBuf>) -> Result<Self> {
        let listener = Arc::new(listen_at(path)?);
        let seats = Arc::new(Seats::default());
        let mut socket = Self {
            path: path.to_owned(),
            identity: identity(path).map_err(Error::file("create", path))?,
            listener: Arc::clone(&listener),
            seats: Arc::clone(&seats),
            door: None,
        };
        let desk = Arc::new(Desk { control, config });
        let door = spawn(move || let_in(&listener, &desk, &seats));
        socket.door = Some(door.map_err(Error::file("create", path))?);
        Ok(socket)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|identity| identity == self.identity) {
            // What cannot be removed now is replaced by the next run.
            let _ = fs::remove_file(&self.path);
        }
        self.seats.close();
        // Whoever waits in `accept` is told that there is nothing more to come.
        let closed = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(door) = self.door.take()
            && closed.is_ok()
        {
            let _ = door.join();
        }
    }
}

/// Lets clients in until the doors are closed.
fn let_in(listener: &UnixListener, desk: &Arc<Desk>, seats: &Arc<Seats>) {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::InvalidInput => return,
            Err(_) => {
                thread::sleep(REFUSED_PAUSE);
                continue;
            }
        };
        // Only a client's own connection is lost.
        let _ = seat(stream, desk, seats);
    }
}

/// Gives a client a place and a thread, or tells it why not.
fn seat(stream: UnixStream, desk: &Arc<Desk>, seats: &Arc<Seats>) -> io::Result<()> {
    if let Err(refused) = check_peer(&stream)? {
        return turn_away(&stream, &refused);
    }
    let Some(seat) = seats.take(&stream)? else {
        let why = "as many clients are connected as may be; end one of them, then try again";
        return turn_away(&stream, &Refused::new(Errno::Busy, why));
    };
    let desk = Arc::clone(desk);
    spawn(move || {
        // A client that has gone in the middle of an answer wants no more of it.
        let _ = Session::new(&desk, seat, stream).serve();
    })?;
    Ok(())
}

/// The owner of the run may ask, and root.
fn check_peer(stream: &UnixStream) -> io::Result<Result<(), Refused>> {
    let (peer, owner) = (socket_peercred(stream)?.uid, geteuid());
    if peer == owner || peer.is_root() {
        return Ok(Ok(()));
    }
    let (peer, owner) = (peer.as_raw(), owner.as_raw());
    let why =
        format!("user {peer} may not control a run of user {owner}; ask as that user or root");
    Ok(Err(Refused::new(Errno::Perm, why)))
}

/// The socket of a new client holds a line, so that this does not wait.
fn turn_away(mut stream: &UnixStream, refused: &Refused) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.write_all(format!("error {refused}\n").as_bytes())?;
    stream.shutdown(Shutdown::Write)
}

fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("forebay-control".to_owned()).spawn(work)
}

/// How long a run waits for another that looks for its socket just now: a second.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Binds a socket that is private from the first moment on.
fn listen_at(path: &Path) -> Result<UnixListener> {
    let refused = || Error::file("create", path);
    // One byte less than the kernel takes: clients want to end it with a zero.
    let fits = SocketAddr::from_pathname(path).is_ok();
    let address = SocketAddrUnix::new(path).ok().filter(|_| fits);
    let address = address.ok_or_else(|| Error::Setting {
        what: "the control socket",
        value: path.display().to_string(),
        why: "the path of a socket has 1 to 107 bytes".to_owned(),
    })?;
    // Two runs that begin at once look and bind one after the other.
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let directory = File::open(above.unwrap_or(Path::new("."))).map_err(refused())?;
    lock(&directory).map_err(Error::file("lock", above.unwrap_or(Path::new("."))))?;
    remove_stale(path, &address)?;
    let bound = || {
        let socket = stream_socket(SocketFlags::CLOEXEC)?;
        // Linux gives the file the mode that the socket has (unix_bind_bsd in net/unix/af_unix.c).
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        bind(&socket, &address)?;
        listen(&socket, BACKLOG)?;
        Ok(socket)
    };
    let socket = bound().map_err(|errno: rustix::io::Errno| refused()(errno.into()))?;
    Ok(socket.into())
}

/// Takes a lock that another run holds for a moment. Anybody who can open the directory can hold it for
/// ever, so it is not waited for without end.
fn lock(directory: &File) -> io::Result<()> {
    for _ in 0..LOCK_TRIES {
        match flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => thread::sleep(LOCK_PAUSE),
            locked => return Ok(locked?),
        }
    }
    Err(io::Error::new(ErrorKind::WouldBlock, "another process holds a lock on the directory"))
}

/// Removes the socket of a run that has died; refuses to touch anything else.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        metadata => metadata.map_err(Error::file("create", path))?,
    };
    if !metadata.file_type().is_socket() {
        return Err(Error::Setting {
            what: "the control socket",
            value: path.display().to_string(),
            why: "there is a file that is no socket; give another path".to_owned(),
        });
    }
    // Not to wait for a run that is too busy to listen.
    let probe = stream_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let probe = probe.map_err(|errno| Error::file("create", path)(errno.into()))?;
    match connect(&probe, address) {
        Err(rustix::io::Errno::CONNREFUSED) => {
            fs::remove_file(path).map_err(Error::file("remove", path))
        }
        connected => {
            let owner = connected.ok().and_then(|()| socket_peercred(&probe).ok());
            let process = owner.map(|owner| owner.pid.as_raw_nonzero().get());
            Err(Error::InUse { path: path.to_owned(), process })
        }
    }
}

fn stream_socket(flags: SocketFlags) -> rustix::io::Result<rustix::fd::OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
