//! Control socket of the program. Of several processes the newest serves it.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use forebay::net::{Net, NetEngine};
use forebay_control::SharedControlSocket;
use forebay_metrics::Metrics;

use crate::engine_lock::EngineLock;

/// Socket of this process and of those that it was forked from; `None` if it could not be bound.
static SOCKET: OnceLock<Option<SharedControlSocket>> = OnceLock::new();

/// Binds the socket, while the process may have privileges that it gives up later. The program goes on without it if
/// that fails, which is told.
pub(crate) fn bind(path: &Path) {
    SOCKET.get_or_init(|| {
        let bound = SharedControlSocket::bind(path);
        let report = |error: &forebay::Error| {
            let help = error.help();
            report!("forebay: the program has no control socket: {error}; {help}");
        };
        bound.inspect_err(report).ok()
    });
}

/// Serves clients as long as the process lives.
///
/// # Errors
/// If a thread cannot be started.
pub(crate) fn serve(
    metrics: Metrics,
    engine: &NetEngine,
    net: &Net,
    engine_lock: &Arc<EngineLock>,
) -> std::io::Result<()> {
    let Some(Some(socket)) = SOCKET.get() else { return Ok(()) };
    let metrics = metrics.with_counted_engine(engine.control()).with_sockets(net.clone());
    let engine_lock = Arc::clone(engine_lock);
    socket.serve(engine.control(), move || metrics.view_text(), move || !engine_lock.has_newer())
}

/// Removes the socket's file at the end of a process that serves it, if it is the one that bound it: others may
/// have children that serve it.
pub(crate) fn remove() {
    if let Some(Some(socket)) = SOCKET.get() {
        socket.remove();
    }
}
