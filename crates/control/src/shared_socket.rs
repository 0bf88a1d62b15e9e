//! Control socket that several processes have, since they were forked: one at a time accepts clients.

use std::path::Path;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use forebay_sys::error::{Error, Result};
use forebay_sys::hidden::Hidden;
use forebay_sys::private_listener::PrivateListener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::clients::ClientSlots;
use super::handle::Control;
use super::session::SessionContext;
use super::socket::{serve_client, spawn};

/// Time between two looks at which process has the turn.
const TURN_LOOK: Duration = Duration::from_millis(100);

/// Listening control socket, to be bound before a fork and served after it.
#[derive(Debug)]
pub struct SharedControlSocket {
    listener: Arc<PrivateListener>,
    /// Process that bound it.
    owner: u32,
}

impl SharedControlSocket {
    /// Binds the socket at `path`. Replaces that of a dead run, even if children of it that serve nothing still have
    /// it. Clients wait until a process serves them.
    ///
    /// # Errors
    /// If a live run listens there, a file of another kind is there, or the system refuses.
    pub fn bind(path: &Path) -> Result<Self> {
        let listener = PrivateListener::bind(path, "the control socket")?;
        // A process that was late finds that another one has accepted the client. The preloaded library's `ioctl` refuses
        // descriptors that the program does not know.
        rustix::io::ioctl_fionbio(listener.socket(), true)
            .map_err(|error| Error::file("create", path)(error.into()))?;
        Ok(Self { listener: Arc::new(listener), owner: process::id() })
    }

    /// Serves clients of this process from `control`, and from `metrics`: their text, in the OpenMetrics format.
    /// Accepts clients while `has_turn` is true, until the process ends.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn serve(
        &self,
        control: Control,
        metrics: impl Fn() -> String + Send + Sync + 'static,
        has_turn: impl Fn() -> bool + Send + 'static,
    ) -> std::io::Result<()> {
        let context = SessionContext { control, config: None, metrics: Some(Box::new(metrics)) };
        let listener = Arc::clone(&self.listener);
        spawn(move || accept_in_turn(&listener, &Arc::new(context), has_turn)).map(drop)
    }

    /// Removes the socket's file, if this is the process that bound it. Does not allocate: signal handlers may
    /// call it.
    pub fn remove(&self) {
        if self.owner == process::id() {
            self.listener.remove();
        }
    }
}

fn accept_in_turn(
    listener: &PrivateListener,
    context: &Arc<SessionContext>,
    has_turn: impl Fn() -> bool,
) {
    let slots = Arc::<ClientSlots>::default();
    let look = Timespec::try_from(TURN_LOOK).ok();
    let mut had_turn = false;
    loop {
        let is_its = has_turn();
        if is_its && !had_turn {
            listener.own();
        }
        had_turn = is_its;
        let mut polled = [PollFd::new(listener.socket(), PollFlags::IN)];
        let is_ready = is_its && poll(&mut polled, look.as_ref()) == Ok(1) && has_turn();
        let accepted = is_ready.then(|| listener.socket().accept());
        match accepted {
            // An error concerns this client's connection only.
            Some(Ok((stream, _))) => {
                let hidden = Hidden::new(stream).map_err(Into::into);
                drop(hidden.and_then(|stream| serve_client(stream, context, &slots)));
            }
            None if has_turn() => {} // the time is over
            _ => thread::sleep(TURN_LOOK),
        }
    }
}
