//! Control socket, on which a run listens for clients that query or change it.
//!
//! The control socket is a Unix stream socket that only its owner and root may use;
//! [`request`](super::request) describes the requests. Every client has a thread of its own, so
//! that none waits for another; at most [`CLIENTS_MAX`](super::clients::CLIENTS_MAX) are served.
//! Nothing here is on the path of packets.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_sys::errno::Errno;
use forebay_sys::error::{Error, Result};
use forebay_sys::hidden::Hidden;
use forebay_sys::private_listener::PrivateListener;
use forebay_sys::refused::Refused;
use forebay_sys::unix_peer::unix_peer;
use rustix::net::SendFlags;
use rustix::process::geteuid;

use super::clients::ClientSlots;
use super::handle::Control;
use super::session::{ControlSession, MetricsText, SessionContext};

/// Pause after a client could not be accepted, for want of descriptors or threads.
const REFUSED_PAUSE: Duration = Duration::from_millis(10);

/// An open control socket, closed and removed on drop.
#[derive(Debug)]
pub struct ControlSocket {
    listener: Arc<PrivateListener>,
    slots: Arc<ClientSlots>,
    accept_thread: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Listens at `path`, and answers from `control`. Replaces the socket of a dead run. `config`
    /// is the answer to requests for the run's config file.
    ///
    /// # Errors
    /// If a live run listens there, a file of another kind is there, or the system refuses.
    pub fn open(control: Control, path: &Path, config: Option<PathBuf>) -> Result<Self> {
        Self::bind(path)?.serve(control, config)
    }

    /// Binds the socket at `path`, to be served later. Replaces that of a dead run.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn bind(path: &Path) -> Result<BoundSocket> {
        BoundSocket::bind(path)
    }
}

/// Control socket that nobody serves yet. It is bound while the process has the privileges for its
/// directory, and served once they are dropped. Clients wait until then.
pub struct BoundSocket {
    /// `None` once it is served.
    listener: Option<PrivateListener>,
    path: PathBuf,
    metrics: Option<MetricsText>,
}

impl BoundSocket {
    /// Binds the socket at `path`. Replaces that of a dead run.
    ///
    /// # Errors
    /// As [`ControlSocket::open`].
    pub fn bind(path: &Path) -> Result<Self> {
        let listener = PrivateListener::bind(path, "the control socket")?;
        Ok(Self { listener: Some(listener), path: path.to_owned(), metrics: None })
    }

    /// Adds the answer to requests for the run's metrics: their text, in the OpenMetrics format.
    #[must_use]
    pub fn with_metrics(mut self, text: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.metrics = Some(Box::new(text));
        self
    }

    /// Serves clients from `control`.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn serve(mut self, control: Control, config: Option<PathBuf>) -> Result<ControlSocket> {
        let bound = self.listener.take().expect("a socket is served once, as serving takes it");
        let listener = Arc::new(bound);
        let slots = Arc::new(ClientSlots::default());
        let mut socket = ControlSocket {
            listener: Arc::clone(&listener),
            slots: Arc::clone(&slots),
            accept_thread: None,
        };
        let context = Arc::new(SessionContext { control, config, metrics: self.metrics.take() });
        let refused = |source| Error::Helper { work: "serves the control socket", source };
        let accept_thread = spawn(move || accept(&listener, &context, &slots));
        socket.accept_thread = Some(accept_thread.map_err(refused)?);
        Ok(socket)
    }
}

impl fmt::Debug for BoundSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BoundSocket").field(&self.path).finish()
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if let Some(listener) = &self.listener {
            listener.remove();
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.listener.remove();
        self.slots.close();
        // Makes a waiting `accept` return an error.
        let closed = rustix::net::shutdown(self.listener.socket(), rustix::net::Shutdown::Both);
        if let Some(accept_thread) = self.accept_thread.take()
            && closed.is_ok()
        {
            let _ = accept_thread.join();
        }
    }
}

/// Accepts clients until the socket is shut down.
fn accept(listener: &PrivateListener, context: &Arc<SessionContext>, slots: &Arc<ClientSlots>) {
    loop {
        let stream = match listener.socket().accept() {
            Ok((stream, _)) => stream,
            // EINVAL: the socket was shut down, by drop.
            Err(error) if error.kind() == ErrorKind::InvalidInput => return,
            Err(_) => {
                thread::sleep(REFUSED_PAUSE);
                continue;
            }
        };
        // An error concerns this client's connection only.
        let hidden = Hidden::new(stream).map_err(Into::into);
        let _ = hidden.and_then(|stream| serve_client(stream, context, slots));
    }
}

/// Gives a client a slot and a thread, or sends it the reason for refusing.
pub(super) fn serve_client(
    stream: Hidden<UnixStream>,
    context: &Arc<SessionContext>,
    slots: &Arc<ClientSlots>,
) -> io::Result<()> {
    if let Err(refused) = check_peer(&stream)? {
        return refuse(&stream, &refused);
    }
    let Some(slot) = slots.take(&stream)? else {
        let why = "too many clients are connected; end one of them, then try again";
        return refuse(&stream, &Refused::new(Errno::Busy, why));
    };
    let context = Arc::clone(context);
    spawn(move || {
        // An error means that the client has gone within an answer.
        let _ = ControlSession::new(&context, slot, stream).serve();
    })?;
    Ok(())
}

/// Checks that the peer is the owner of the run, or root.
fn check_peer(stream: &UnixStream) -> io::Result<Result<(), Refused>> {
    let (peer, owner) = (unix_peer(stream)?.user, geteuid().as_raw());
    if peer == owner || peer == 0 {
        return Ok(Ok(()));
    }
    let why =
        format!("user {peer} may not control a run of user {owner}; ask as that user or root");
    Ok(Err(Refused::new(Errno::Perm, why)))
}

/// Sends bytes to a client by a system call of its own: in a program with the preloaded library, `write` refuses descriptors
/// that the program does not know.
pub(super) fn send_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends a refusal without waiting: the socket buffer of a new client holds a line.
fn refuse(stream: &UnixStream, refused: &Refused) -> io::Result<()> {
    rustix::io::ioctl_fionbio(stream, true)?; // by itself, as `send_all`
    send_all(stream, format!("error {refused}\n").as_bytes())?;
    stream.shutdown(Shutdown::Write)
}

pub(super) fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("forebay-control".to_owned()).spawn(work)
}
