//! An HTTP/1.1 server of files and counters, by hyper: `http --root /srv --listen 10.0.0.2:80 eth1`.
//!
//! ```text
//! GET /NAME       a file of the directory
//! PUT /NAME       stores one
//! GET /counters   counters of TCP, as JSON
//! ```
//!
//! `--kernel` serves the same over the kernel's sockets, to compare with.

mod files; //    files as bodies
mod service; //  requests and answers
#[path = "../../../forebay/examples/ending/mod.rs"]
mod ending;

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::{io, thread};

use clap::Parser;
use forebay::net::Net;
use forebay_tokio::TcpListener;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Builder, Runtime};

use crate::ending::From;
use crate::service::{Site, answer};

/// Pause after a connection that could not be taken: descriptors may be free by then.
const PAUSE: Duration = Duration::from_millis(100);

/// An HTTP server of files and counters
#[derive(Debug, Parser)]
struct Options {
    /// The directory
    #[arg(long, value_name = "DIR")]
    root: PathBuf,

    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:80")]
    listen: SocketAddr,

    /// Threads that serve
    #[arg(long, value_name = "N", default_value_t = 2)]
    workers: usize,

    /// Serves over the kernel's sockets
    #[arg(long)]
    kernel: bool,

    #[command(flatten)]
    from: From,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let runtime =
        Builder::new_multi_thread().worker_threads(options.workers.max(1)).enable_all().build()?;
    if options.kernel {
        let site = Arc::new(Site { root: options.root, net: None });
        return Ok(runtime.block_on(serve_by_kernel(options.listen, site))?);
    }
    let mut config = options.from.config();
    config.coalesce.is_on = true; // TCP takes a merged packet whole
    let mut devices = [options.from.open(&format!("tcp:{}", options.listen.port()))?];
    let (net, engine) = Net::over(&config, &options.from.net(), &mut devices)?;
    ending::stop_on_signals(engine.stopper())?;
    let serving = start(runtime, &net, options.listen, options.root)?;
    let outcome = engine.run()?;
    serving.join().map_err(|_| "the server's thread has panicked")?;
    ending::report(&net, outcome)
}

/// Serves until the run ends.
fn start(
    runtime: Runtime,
    net: &Net,
    listen: SocketAddr,
    root: PathBuf,
) -> io::Result<thread::JoinHandle<()>> {
    let listener = {
        let _inside = runtime.enter();
        TcpListener::bind(net, listen)?
    };
    eprintln!("serving at {listen}; Ctrl-C ends it");
    let site = Arc::new(Site { root, net: Some(net.clone()) });
    Ok(thread::spawn(move || {
        runtime.block_on(async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        stream.set_nodelay(true).ok(); // else the connection is gone already
                        spawn(stream, &site);
                    }
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
                    Err(error) => pause_after(&error).await,
                }
            }
        });
        drop(listener);
        runtime.shutdown_background();
    }))
}

async fn serve_by_kernel(listen: SocketAddr, site: Arc<Site>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::bind(listen).await?;
    eprintln!("serving at {listen} by the kernel; Ctrl-C ends it");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                stream.set_nodelay(true).ok(); // else the connection is gone already
                spawn(stream, &site);
            }
            Err(error) => pause_after(&error).await,
        }
    }
}

/// Tells why a connection was not taken, and waits before the next attempt.
async fn pause_after(error: &io::Error) {
    eprintln!("a connection could not be taken: {error}");
    tokio::time::sleep(PAUSE).await;
}

/// Serves a connection. A client that leaves early ends only its own.
fn spawn(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, site: &Arc<Site>) {
    let site = Arc::clone(site);
    tokio::spawn(async move {
        let service = service_fn(|request| answer(request, &site));
        http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
    });
}
