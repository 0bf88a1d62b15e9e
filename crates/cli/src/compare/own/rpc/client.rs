//! Client: connections over the kernel's sockets, each of which asks again once it has its answer.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use forebay_sys as sys;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::net::sockopt::set_socket_linger;
use serde::Serialize;

use super::message::MessageSizes;

/// Time to wait for a connection, and for the next answer of any.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_SPEC: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Events taken at once.
const EVENTS_MAX: usize = 256;

/// Load that a client makes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadPlan {
    pub(crate) to: SocketAddr,
    pub(crate) connections: u16,
    pub(crate) sizes: MessageSizes,
    /// Time of exchanges before the window.
    pub(crate) warm_up: Duration,
    /// Time that is measured.
    pub(crate) window: Duration,
}

/// Connections of a client.
pub(crate) struct Client {
    plan: LoadPlan,
    epoll: OwnedFd,
    open: Vec<Asking>,
}

/// Connection with a request on its way.
struct Asking {
    stream: TcpStream,
    asked: Instant,
    /// Bytes of the answer that have arrived.
    len: usize,
}

/// Figures of a window.
#[derive(Debug, Serialize)]
pub(crate) struct RpcFigures {
    transactions: usize,
    transactions_per_s: f64,
    p50_ns: u64,
    p90_ns: u64,
    p99_ns: u64,
    /// Transactions before the window.
    warm_up_transactions: usize,
    /// CPU time of the client, with the warm-up.
    cpu_ns: u64,
}

impl Client {
    /// Opens all connections.
    pub(crate) fn connect(plan: LoadPlan) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut open = Vec::new();
        for place in 0..plan.connections {
            let stream = TcpStream::connect_timeout(&plan.to, PATIENCE)?;
            stream.set_nodelay(true)?;
            // Reset when closed: many clients in a row must not use up the ports.
            set_socket_linger(&stream, Some(Duration::ZERO))?;
            let event = epoll::EventData::new_u64(place.into());
            epoll::add(&epoll, stream.as_fd(), event, epoll::EventFlags::IN)?;
            open.push(Asking { stream, asked: Instant::now(), len: 0 });
        }
        Ok(Self { plan, epoll, open })
    }

    /// Exchanges requests and answers, and measures the window.
    pub(crate) fn measure(mut self) -> io::Result<RpcFigures> {
        let request = self.plan.sizes.request();
        let cpu_ns = sys::process_cpu_ns();
        for asking in &mut self.open {
            asking.ask(&request)?;
        }
        let warm_up_transactions = self.exchange(&request, self.plan.warm_up)?.len();
        let began = Instant::now();
        let mut times = self.exchange(&request, self.plan.window)?;
        let lasted = began.elapsed();
        times.sort_unstable();
        Ok(RpcFigures {
            transactions: times.len(),
            transactions_per_s: f64::from(u32::try_from(times.len()).unwrap_or(u32::MAX))
                / lasted.as_secs_f64(),
            p50_ns: at_ns(&times, 50),
            p90_ns: at_ns(&times, 90),
            p99_ns: at_ns(&times, 99),
            warm_up_transactions,
            cpu_ns: sys::process_cpu_ns() - cpu_ns,
        })
    }

    /// Goes on for a while. Returns the time of each transaction that ended meanwhile.
    fn exchange(&mut self, request: &[u8], lasts: Duration) -> io::Result<Vec<Duration>> {
        let (began, mut times) = (Instant::now(), Vec::new());
        let mut answer = self.plan.sizes.answer();
        let mut events = Vec::with_capacity(EVENTS_MAX);
        while began.elapsed() < lasts {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&PATIENCE_SPEC)) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer came")),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let place = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
                let Some(asking) = self.open.get_mut(place) else { continue };
                if asking.hear(&mut answer)? {
                    times.push(asking.asked.elapsed());
                    asking.ask(request)?;
                }
            }
        }
        Ok(times)
    }
}

impl Asking {
    fn ask(&mut self, request: &[u8]) -> io::Result<()> {
        (self.asked, self.len) = (Instant::now(), 0);
        self.stream.write_all(request)
    }

    /// Reads once. Returns true if the answer is complete.
    fn hear(&mut self, answer: &mut [u8]) -> io::Result<bool> {
        match self.stream.read(&mut answer[self.len..])? {
            0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed")),
            read => {
                self.len += read;
                Ok(self.len == answer.len())
            }
        }
    }
}

/// Percentile of sorted times, in ns.
pub(super) fn at_ns(times: &[Duration], percent: usize) -> u64 {
    let time = times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
    time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
