//! Threads that answer requests: each blocks in its only connection, or polls several.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use clap::Args;
use forebay_rx::CpuId;
use forebay_sys as sys;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fd::OwnedFd;

use super::message::MessageSizes;
use super::sockets::{RpcListener, RpcStream};
use super::work::{WorkPlan, WorkingSet};

/// Stack of a thread that answers.
const STACK_BYTES: usize = 128 << 10;

/// Events taken at once.
const EVENTS_MAX: usize = 64;

/// Event of the listener; others have the place of their connection.
const LISTENER: u64 = u64::MAX;

/// Threads of a server, and what they do for a request.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ServicePlan {
    /// Threads that answer
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    readers: u16,

    /// Connections of each thread at a time: with one it blocks in its calls, with more it polls
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    per_thread: u16,

    /// Pin the threads to the CPUs, one after the other; otherwise the scheduler places them
    #[arg(long)]
    pinned: bool,

    #[command(flatten)]
    pub(crate) sizes: MessageSizes,

    #[command(flatten)]
    work: WorkPlan,
}

/// Threads that have been started.
pub(crate) struct ServiceThreads {
    threads: Vec<JoinHandle<io::Result<()>>>,
    answers: Arc<AtomicU64>,
}

/// One thread's part in the service.
struct ServiceThread {
    listener: Arc<RpcListener>,
    plan: ServicePlan,
    answers: Arc<AtomicU64>,
}

/// Connection with its working set, and its next request.
struct Served {
    stream: RpcStream,
    set: WorkingSet,
    request: Vec<u8>,
    /// Bytes of the request that have arrived.
    len: usize,
    answer: Vec<u8>,
}

/// Starts the threads. They end with the run of the listener's engine.
pub(crate) fn start(
    listener: RpcListener,
    plan: ServicePlan,
    cpus: &[CpuId],
) -> io::Result<ServiceThreads> {
    if plan.per_thread > 1 {
        listener.set_nonblocking()?;
    }
    let (listener, answers) = (Arc::new(listener), Arc::<AtomicU64>::default());
    let pins = cpus.iter().copied().cycle().map(|cpu| plan.pinned.then_some(cpu));
    let spawn = |(index, pin): (u16, Option<CpuId>)| {
        let listener = Arc::clone(&listener);
        let thread = ServiceThread { listener, plan, answers: Arc::clone(&answers) };
        let builder = thread::Builder::new().name(format!("rpc-{index}")).stack_size(STACK_BYTES);
        builder.spawn(move || {
            pin.map_or(Ok(()), sys::pin_to)?;
            if thread.plan.per_thread == 1 { thread.block() } else { thread.poll() }
        })
    };
    let threads = (0..plan.readers).zip(pins).map(spawn).collect::<io::Result<Vec<_>>>()?;
    Ok(ServiceThreads { threads, answers })
}

impl ServiceThreads {
    /// Waits until all threads have ended. Returns the number of answers.
    pub(crate) fn join(self) -> io::Result<u64> {
        for thread in self.threads {
            thread.join().map_err(|_| io::Error::other("a thread has panicked"))??;
        }
        Ok(self.answers.load(Ordering::Relaxed))
    }
}

impl ServiceThread {
    /// Serves one connection after the other.
    fn block(&self) -> io::Result<()> {
        while let Some(mut served) = self.accept()? {
            while self.step(&mut served) {}
        }
        Ok(())
    }

    /// Serves up to `per_thread` connections at a time.
    fn poll(&self) -> io::Result<()> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut places: Vec<Option<Served>> = (0..self.plan.per_thread).map(|_| None).collect();
        let mut events = Vec::with_capacity(EVENTS_MAX);
        self.listen(&epoll)?;
        loop {
            events.clear();
            wait(&epoll, &mut events)?;
            for event in &events {
                match event.data.u64() {
                    LISTENER => {
                        if !self.fill(&epoll, &mut places)? {
                            return Ok(());
                        }
                    }
                    place => self.serve(&epoll, &mut places, place)?,
                }
            }
        }
    }

    /// Takes connections while there are some, and room for them. Returns false once the run has
    /// ended.
    fn fill(&self, epoll: &OwnedFd, places: &mut [Option<Served>]) -> io::Result<bool> {
        while let Some(free) = places.iter().position(Option::is_none) {
            let served = match self.accept() {
                Ok(Some(served)) => served,
                Ok(None) => return Ok(false),
                // Another thread was faster.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            };
            let event = epoll::EventData::new_u64(free as u64);
            epoll::add(epoll, served.stream.descriptor()?, event, epoll::EventFlags::IN)?;
            places[free] = Some(served);
        }
        epoll::delete(epoll, self.listener.descriptor()?)?;
        Ok(true)
    }

    /// Serves a connection that is readable. A place that becomes free takes the next connection.
    fn serve(&self, epoll: &OwnedFd, places: &mut [Option<Served>], place: u64) -> io::Result<()> {
        let was_full = places.iter().all(Option::is_some);
        let place = usize::try_from(place).ok().and_then(|place| places.get_mut(place));
        let Some(place) = place else { return Ok(()) };
        let Some(served) = place else { return Ok(()) };
        if !self.step(served) {
            epoll::delete(epoll, served.stream.descriptor()?)?;
            *place = None;
            if was_full {
                self.listen(epoll)?;
            }
        }
        Ok(())
    }

    fn listen(&self, epoll: &OwnedFd) -> io::Result<()> {
        let event = epoll::EventData::new_u64(LISTENER);
        Ok(epoll::add(epoll, self.listener.descriptor()?, event, epoll::EventFlags::IN)?)
    }

    /// Takes a connection; `None` once the run has ended.
    fn accept(&self) -> io::Result<Option<Served>> {
        match self.listener.accept() {
            Ok(stream) => Ok(Some(Served::new(stream, self.plan))),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads once, and answers if the request is complete. Returns false at the connection's end.
    fn step(&self, served: &mut Served) -> bool {
        match served.step() {
            Ok(None) => false,
            Ok(Some(answers)) => {
                self.answers.fetch_add(answers, Ordering::Relaxed);
                true
            }
            // A client that leaves early ends only its own connection.
            Err(_) => false,
        }
    }
}

impl Served {
    fn new(stream: RpcStream, plan: ServicePlan) -> Self {
        let ServicePlan { sizes, work, .. } = plan;
        let (request, answer) = (sizes.request(), sizes.answer());
        Self { stream, set: WorkingSet::new(work), request, len: 0, answer }
    }

    /// Reads once, and answers if the request is complete. Returns the number of answers; `None` at
    /// the end of the stream.
    fn step(&mut self) -> io::Result<Option<u64>> {
        let read = self.stream.read(&mut self.request[self.len..])?;
        if read == 0 {
            return Ok(None);
        }
        self.len += read;
        if self.len < self.request.len() {
            return Ok(Some(0));
        }
        self.len = 0;
        let done = self.set.work().to_le_bytes();
        for (byte, done) in self.answer.iter_mut().zip(done) {
            *byte = done;
        }
        self.stream.write_all(&self.answer)?;
        Ok(Some(1))
    }
}

/// Waits for events, also across signals.
pub(super) fn wait(epoll: &OwnedFd, events: &mut Vec<epoll::Event>) -> io::Result<()> {
    match epoll::wait(epoll, spare_capacity(events), None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
