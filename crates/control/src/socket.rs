//! The control socket: where a run listens for those who ask it or change it.
//!
//! The control socket is a Unix stream socket that only its owner may connect to. What is said there is in
//! [`request`](super::request). Every client has a thread of its own, so that none waits for
//! another; at most [`CLIENTS_MAX`](super::clients::CLIENTS_MAX) are served, and nothing here is on
//! the path of packets.

use std::io::{self, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_sys::errno::Errno;
use forebay_sys::error::{Error, Result};
use forebay_sys::private_listener::PrivateListener;
use forebay_sys::refused::Refused;
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use super::clients::ClientSlots;
use super::handle::Control;
use super::session::{ControlSession, Desk};

/// Time for which nobody is let in after a client could not be, for want of descriptors or threads.
const REFUSED_PAUSE: Duration = Duration::from_millis(10);

/// An open control socket: it is closed and removed when this is dropped.
#[derive(Debug)]
pub struct ControlSocket {
    listener: Arc<PrivateListener>,
    seats: Arc<ClientSlots>,
    door: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Listens at `path`, and answers from `control`. What a dead run left there is replaced.
    /// Clients are told `config` when they ask for the run's config file.
    ///
    /// # Errors
    /// When a live run listens there, there is a file of another kind, or the system refuses.
    pub fn open(control: Control, path: &Path, config: Option<PathBuf>) -> Result<Self> {
        let listener = Arc::new(PrivateListener::bind(path, "the control socket")?);
        let seats = Arc::new(ClientSlots::default());
        let mut socket =
            Self { listener: Arc::clone(&listener), seats: Arc::clone(&seats), door: None };
        let desk = Arc::new(Desk { control, config });
        let door = spawn(move || let_in(&listener, &desk, &seats));
        socket.door = Some(door.map_err(Error::file("create", path))?);
        Ok(socket)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.listener.remove();
        self.seats.close();
        // Whoever waits in `accept` is told that there is nothing more to come.
        let closed = rustix::net::shutdown(self.listener.socket(), rustix::net::Shutdown::Both);
        if let Some(door) = self.door.take()
            && closed.is_ok()
        {
            let _ = door.join();
        }
    }
}

/// Lets clients in until the doors are closed.
fn let_in(listener: &PrivateListener, desk: &Arc<Desk>, seats: &Arc<ClientSlots>) {
    loop {
        let stream = match listener.socket().accept() {
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
fn seat(stream: UnixStream, desk: &Arc<Desk>, seats: &Arc<ClientSlots>) -> io::Result<()> {
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
        let _ = ControlSession::new(&desk, seat, stream).serve();
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
