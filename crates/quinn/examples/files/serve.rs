//! The server: an endpoint on each CPU.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use forebay::CpuId;
use forebay::net::Net;
use forebay::net::connection_id::EndpointIndex;
use forebay::net::counters::SocketCounts;
use forebay_quinn::{EndpointGroup, EndpointIds};
use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, Incoming, ServerConfig, TokioRuntime};

/// Bytes of a file that are read at once.
const CHUNK_BYTES: usize = 256 << 10;

/// Endpoints at work.
pub(crate) struct Server(Vec<Worker>);

struct Worker {
    cpu: CpuId,
    connections: Arc<AtomicU64>,
    socket: forebay::net::UdpSocket,
    thread: JoinHandle<io::Result<()>>,
}

/// Counters of an endpoint.
pub(crate) struct Counts {
    pub(crate) connections: u64,
    pub(crate) socket: SocketCounts,
}

impl Server {
    /// Starts an endpoint on each CPU of the engine's. They end with the engine.
    pub(crate) fn start(
        net: &Net,
        group: &EndpointGroup,
        root: &Path,
        config: &ServerConfig,
    ) -> Result<Self, Box<dyn Error>> {
        let start = |(place, &cpu): (u16, &CpuId)| {
            let connections = Arc::new(AtomicU64::new(0));
            let (bound, has_bound) = mpsc::channel();
            let (group, config, root) = (group.clone(), config.clone(), root.to_owned());
            let accepted = Arc::clone(&connections);
            let work = move || {
                on_cpu(cpu, async move {
                    let place = EndpointIndex(place);
                    let socket = Arc::new(group.bind(place)?);
                    // Nobody waits for it any more if there is nobody.
                    let _ = bound.send(socket.inner().clone());
                    let mut endpoint = EndpointConfig::default();
                    let ids = EndpointIds::new(Arc::clone(group.ids()), place);
                    endpoint.cid_generator(move || Box::new(ids.clone()));
                    accept(endpoint, config, socket, (root, accepted)).await
                })
            };
            let thread = thread::Builder::new().name(format!("files-{cpu}")).spawn(work)?;
            let socket = match has_bound.recv() {
                Ok(socket) => socket,
                Err(_) => return Err(ended_early(thread)),
            };
            Ok(Worker { cpu, connections, socket, thread })
        };
        let workers =
            (0..).zip(net.cpus()).map(start).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        Ok(Self(workers))
    }

    /// Counters of each endpoint until now.
    pub(crate) fn counts(&self) -> Vec<(CpuId, Counts)> {
        self.0.iter().map(|worker| (worker.cpu, worker.counts())).collect()
    }

    /// Waits for the endpoints to end, once the engine has.
    pub(crate) fn end(self) -> Vec<(CpuId, Counts)> {
        let counts = self.counts();
        for worker in self.0 {
            // Its error is that of the engine's end.
            let _ = worker.thread.join();
        }
        counts
    }
}

impl Worker {
    fn counts(&self) -> Counts {
        let connections = self.connections.load(Ordering::Relaxed);
        Counts { connections, socket: self.socket.counts() }
    }
}

fn ended_early(thread: JoinHandle<io::Result<()>>) -> Box<dyn Error> {
    match thread.join() {
        Ok(Err(why)) => why.into(),
        Ok(Ok(())) | Err(_) => "an endpoint has ended before it began".into(),
    }
}

/// An endpoint on each CPU over the kernel's sockets, which share the port.
pub(crate) fn by_kernel(
    local: SocketAddr,
    root: &Path,
    config: &ServerConfig,
) -> Result<Vec<JoinHandle<io::Result<()>>>, Box<dyn Error>> {
    let start = |&cpu: &CpuId| {
        let (config, root) = (config.clone(), root.to_owned());
        thread::spawn(move || {
            on_cpu(cpu, async move {
                let socket = sharing(local)?;
                let socket = quinn::Runtime::wrap_udp_socket(&TokioRuntime, socket)?;
                accept(EndpointConfig::default(), config, socket, (root, Arc::default())).await
            })
        })
    };
    Ok(forebay_sys::allowed_cpus().iter().map(start).collect())
}

fn sharing(local: SocketAddr) -> io::Result<UdpSocket> {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let shared = socket(family, SocketType::DGRAM, None)?;
    sockopt::set_socket_reuseport(&shared, true)?;
    bind(&shared, &local)?;
    Ok(shared.into())
}

fn on_cpu<T>(cpu: CpuId, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    forebay_sys::pin_to(cpu)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

async fn accept(
    endpoint: EndpointConfig,
    config: ServerConfig,
    socket: Arc<dyn AsyncUdpSocket>,
    (root, connections): (PathBuf, Arc<AtomicU64>),
) -> io::Result<()> {
    let runtime = Arc::new(TokioRuntime);
    let endpoint = Endpoint::new_with_abstract_socket(endpoint, Some(config), socket, runtime)?;
    let root = Arc::new(root);
    while let Some(incoming) = endpoint.accept().await {
        connections.fetch_add(1, Ordering::Relaxed);
        let root = Arc::clone(&root);
        tokio::spawn(async move {
            // A client that is gone does not concern the others.
            let _ = serve(incoming, &root).await;
        });
    }
    Ok(())
}

async fn serve(incoming: Incoming, root: &Path) -> Result<(), Box<dyn Error + Send + Sync>> {
    let connection = incoming.await?;
    loop {
        let (mut answer, mut ask) = connection.accept_bi().await?;
        let name = String::from_utf8(ask.read_to_end(1000).await?)?;
        // A name is a file's in this directory, not a way out of it.
        let Some(name) = Path::new(&name).file_name() else { continue };
        let mut file = File::open(root.join(name))?;
        answer.write_all(&file.metadata()?.len().to_be_bytes()).await?;
        loop {
            let mut chunk = vec![0; CHUNK_BYTES];
            let len = file.read(&mut chunk)?;
            if len == 0 {
                break;
            }
            chunk.truncate(len);
            answer.write_chunk(chunk.into()).await?;
        }
        answer.finish()?;
    }
}
