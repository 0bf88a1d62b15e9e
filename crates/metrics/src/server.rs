//! HTTP server of metrics, on a thread of its own. A client can neither hold more than a connection
//! for a while nor make the server work more than now and then.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_sys::error::{Error, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::format::TextFormat;
use crate::host;
use crate::metrics::Metrics;

/// Upper bound of connections at once; one more ends the oldest.
pub const CONNECTIONS_MAX: usize = 16;

/// Upper bound of a request's line and headers, in bytes.
const HEADERS_BYTES_MAX: usize = 8192;

/// Upper bound of a request's headers.
const HEADERS_MAX: usize = 64;

/// Longest time from a connection's begin to its end. It serves one request.
const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Age up to which a text is sent again, so that many requests cost little.
const TEXT_AGE: Duration = Duration::from_millis(100);

/// Pause after a connection could not be accepted, as when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server of metrics. Dropping it ends the server.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    done: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Listens at `address`. Requests must name an address, `localhost` or one of `hosts` in their
    /// `Host` header.
    ///
    /// # Errors
    /// If the address cannot be listened at, or the thread not started.
    pub fn bind(address: SocketAddr, hosts: &[String], metrics: Metrics) -> Result<Self> {
        let refused = |source| Error::Listen { what: "metrics", address, source };
        let listener = TcpListener::bind(address).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(refused)?;
        let done = Arc::new(Notify::new());
        let ended = Arc::clone(&done);
        let desk = Arc::new(ScrapeDesk { metrics, hosts: hosts.to_vec(), last: Mutex::default() });
        let serve = move || {
            runtime.spawn(accept(listener, desk));
            // All connections end with the runtime.
            runtime.block_on(ended.notified());
        };
        let thread = thread::Builder::new().name("metrics".to_owned()).spawn(serve);
        Ok(Self { address, done, thread: Some(thread.map_err(refused)?) })
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
async fn accept(listener: TcpListener, desk: Arc<ScrapeDesk>) -> io::Result<Infallible> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections: VecDeque<AbortHandle> = VecDeque::with_capacity(CONNECTIONS_MAX);
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        connections.retain(|connection| !connection.is_finished());
        if connections.len() >= CONNECTIONS_MAX
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        let serve = tokio::time::timeout(CONNECTION_TIME, serve(stream, Arc::clone(&desk)));
        connections.push_back(tokio::spawn(serve).abort_handle());
        // A request that is there already is answered before the next connection can end this one.
        tokio::task::yield_now().await;
    }
}

/// Answers the one request of a connection.
async fn serve(stream: TcpStream, desk: Arc<ScrapeDesk>) {
    let answer = |request: Request<Incoming>| {
        let response = desk.answer(request.method(), request.uri().path(), request.headers());
        async { Ok::<_, Infallible>(response) }
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
    // Ignored: a client that goes, or sends no HTTP, is no matter of the run.
    let _ = connection.await;
}

/// Answers requests.
struct ScrapeDesk {
    metrics: Metrics,
    hosts: Vec<String>,
    /// Last texts, by format.
    last: Mutex<Vec<KeptText>>,
}

/// Text of a scrape, sent again while it is recent.
struct KeptText {
    format: TextFormat,
    text: Bytes,
    made: Instant,
}

impl ScrapeDesk {
    fn answer(&self, method: &Method, path: &str, headers: &HeaderMap) -> Response<Full<Bytes>> {
        let header = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        if headers.get_all(HOST).iter().count() != 1 {
            return plain(StatusCode::BAD_REQUEST, "a request has one Host header\n");
        }
        if !header(HOST).is_some_and(|host| host::is_allowed(host, &self.hosts)) {
            let why = "this server is reached by an address, localhost, or a name allowed by --metrics-host\n";
            return plain(StatusCode::MISDIRECTED_REQUEST, why);
        }
        if ![Method::GET, Method::HEAD].contains(method) {
            let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        match path {
            "/metrics" => {
                let format = TextFormat::accepted(header(ACCEPT).unwrap_or_default());
                response(StatusCode::OK, format.content_type(), self.text(format))
            }
            "/healthz" => plain(StatusCode::OK, "ok\n"),
            _ => plain(StatusCode::NOT_FOUND, "there are /metrics and /healthz\n"),
        }
    }

    /// Text of all metrics, or the last one if it is recent.
    fn text(&self, format: TextFormat) -> Bytes {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|kept| kept.made.elapsed() < TEXT_AGE);
        if let Some(kept) = last.iter().find(|kept| kept.format == format) {
            return kept.text.clone();
        }
        let text = Bytes::from(self.metrics.text(format));
        last.push(KeptText { format, text: text.clone(), made: Instant::now() });
        text
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    response(status, "text/plain; charset=utf-8", Bytes::from_static(text.as_bytes()))
}

fn response(status: StatusCode, content_type: &'static str, text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert(hyper::header::X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}
