//! HTTP server of metrics and of the page, on a thread of its own. A client can neither hold more than a connection
//! for a while nor make the server work more than now and then.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_sys::error::{Error, Result};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::metrics::Metrics;
use crate::page::PageToken;
use crate::responder::{Access, QUESTIONS_MAX, Responder};

/// Upper bound of connections at once; one more ends the oldest of those that have not asked for
/// anything yet, or is closed.
pub const CONNECTIONS_MAX: usize = 16;

/// Upper bound of a request's line and headers, in bytes.
const HEADERS_BYTES_MAX: usize = 8192;

/// Upper bound of a request's headers.
const HEADERS_MAX: usize = 64;

/// Longest time from a connection's begin to its end. It serves one request.
const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Pause after a connection could not be accepted, as when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Clients that the server answers.
#[derive(Clone, Debug, Default)]
pub struct ServerAccess {
    /// Names by which clients may reach the server, besides addresses and `localhost`: a request must
    /// have one of them in its `Host` header.
    pub hosts: Vec<String>,
    /// Secret of those who may change knobs on the page, and search for flows. Without one, knobs are
    /// read-only, and flows are searched on this machine only.
    pub page_token: Option<PageToken>,
}

/// A server of metrics and of the page. Dropping it ends the server.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    done: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Listens at `address`.
    ///
    /// # Errors
    /// If the address cannot be listened at, or the thread not started.
    pub fn bind(address: SocketAddr, access: &ServerAccess, metrics: Metrics) -> Result<Self> {
        let refused = |source| Error::Listen { what: "metrics", address, source };
        let listener = TcpListener::bind(address).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(QUESTIONS_MAX)
            .build();
        let runtime = runtime.map_err(refused)?;
        let done = Arc::new(Notify::new());
        let ended = Arc::clone(&done);
        let ServerAccess { hosts, page_token } = access;
        // Who allows a name has clients elsewhere, whom a proxy serves.
        let is_local = address.ip().is_loopback() && hosts.is_empty();
        let access = Access { hosts: hosts.clone(), token: page_token.clone(), is_local };
        let responder = Arc::new(Responder::new(metrics, access));
        let serve = move || {
            runtime.spawn(accept(listener, responder));
            runtime.block_on(ended.notified());
            // All connections end with the runtime; a question that queues no longer answer goes on
            // for at most five seconds.
            runtime.shutdown_background();
        };
        let unstarted = |source| Error::Helper { work: "serves the metrics", source };
        let thread = thread::Builder::new().name("metrics".to_owned()).spawn(serve);
        Ok(Self { address, done, thread: Some(thread.map_err(unstarted)?) })
    }

    /// Address that the server listens at.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.done.notify_one();
        if let Some(thread) = self.thread.take() {
            // Ignored: a panic of the server does not affect the run.
            let _ = thread.join();
        }
    }
}

/// Accepts connections, each on a task of its own. Ends only if the listener cannot be used.
async fn accept(listener: TcpListener, responder: Arc<Responder>) -> io::Result<Infallible> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections: VecDeque<Connection> = VecDeque::with_capacity(CONNECTIONS_MAX);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        connections.retain(|connection| !connection.task.is_finished());
        if connections.len() < CONNECTIONS_MAX || end_silent(&mut connections) {
            let has_asked = Arc::default();
            let serve = serve(stream, Arc::clone(&responder), Arc::clone(&has_asked));
            let task = tokio::spawn(tokio::time::timeout(CONNECTION_TIME, serve)).abort_handle();
            connections.push_back(Connection { task, has_asked });
        }
        // A request that is there already is answered before the next connection can end this one.
        tokio::task::yield_now().await;
    }
}

/// A connection that is served.
struct Connection {
    task: AbortHandle,
    /// True once its request is there as a whole.
    has_asked: Arc<AtomicBool>,
}

/// Ends the oldest connection whose request is not there yet. Returns false if there is none: answers
/// are never cut, not even for a client that takes its time.
fn end_silent(connections: &mut VecDeque<Connection>) -> bool {
    let is_silent = |of: &Connection| !of.has_asked.load(Ordering::Relaxed);
    let silent = connections.iter().position(is_silent);
    let ended = silent.and_then(|index| connections.remove(index));
    ended.inspect(|connection| connection.task.abort()).is_some()
}

/// Answers the one request of a connection.
async fn serve(stream: TcpStream, responder: Arc<Responder>, has_asked: Arc<AtomicBool>) {
    let answer = move |request: Request<Incoming>| {
        let (responder, has_asked) = (Arc::clone(&responder), Arc::clone(&has_asked));
        async move { Ok::<_, Infallible>(responder.answer(request, &has_asked).await) }
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CONNECTION_TIME)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEADERS_BYTES_MAX)
        .keep_alive(false)
        // A client may end its side once it has asked.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    // Ignored: a client that goes, or sends no HTTP, does not concern the run.
    let _ = connection.await;
}
