//! The engine on real threads.
//!
//! A thread may die: its handler panics, or a fault is injected (`kill`). A new thread then
//! continues its CPU with the same handler, and only the dead thread's batch is lost.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use forebay_rx::{CpuId, Handler};
use forebay_sys as sys;
use forebay_sys::error::{Error, Result};

use super::busy_poll::Loans;
use super::cpu_thread::CpuThread;
use super::outcome::Outcome;
use super::shared::EngineState;
use super::worker::{ThreadState, Worker};

/// Number of panics of a CPU's handler, without a handled batch in between, that end the run.
pub const PANICS_IN_A_ROW: u32 = 8;

/// Code that each thread runs with its CPU.
pub(super) type Application<H> = Arc<dyn Fn(&mut CpuThread<H>) + Send + Sync>;

/// Runs each worker on a thread of its own, under control of the application, until all of them
/// end.
pub(super) fn run<H: Handler + 'static>(
    workers: Vec<Worker<H>>,
    loans: Option<Loans<H>>,
    shared: &Arc<EngineState>,
    application: Application<H>,
) -> Result<Outcome<H>> {
    // Not before: a child may run a copy of an engine that its parent does not.
    if let Some(worker) = workers.first() {
        sys::wipe_on_fork(worker.returns.region());
    }
    let mut crew = WorkerThreads::new(application, loans);
    for worker in workers {
        if !crew.start(Box::new(worker), shared) {
            break;
        }
    }
    let started_ns = shared.start_when_ready(crew.running);
    let ended = crew.supervise(shared)?;
    Ok(Outcome::of(ended, shared, shared.clock.now_ns() - started_ns))
}

/// Worker threads, and the receiver of their ends.
struct WorkerThreads<H: Handler> {
    application: Application<H>,
    loans: Option<Loans<H>>,
    threads: Vec<JoinHandle<()>>,
    /// Number of CPUs whose thread has not ended for good.
    running: usize,
    /// Sender that is cloned for each thread.
    tells: Sender<ThreadEnd<H>>,
    told: Receiver<ThreadEnd<H>>,
    failed: Option<Error>,
}

/// End of a thread.
enum ThreadEnd<H> {
    /// All work is done.
    Done(Box<Worker<H>>),
    /// The thread died, and its CPU continues on a new one; with the message of the panic, if any.
    Died(Box<Worker<H>>, Option<String>),
    /// The thread failed, and the run with it; with the message of the panic.
    Failed(CpuId, String),
}

impl<H: Handler + 'static> WorkerThreads<H> {
    fn new(application: Application<H>, loans: Option<Loans<H>>) -> Self {
        let (tells, told) = mpsc::channel();
        Self { application, loans, threads: Vec::new(), running: 0, tells, told, failed: None }
    }

    /// Starts a CPU's thread. Returns false if that failed; the run then ends.
    fn start(&mut self, worker: Box<Worker<H>>, shared: &EngineState) -> bool {
        let (cpu, tells) = (worker.cpu, self.tells.clone());
        let application = Arc::clone(&self.application);
        let loan = self.loans.as_ref().map(|loans| Arc::clone(&loans[worker.index]));
        let name = format!("forebay-cpu{cpu}");
        let spawned = thread::Builder::new().name(name).spawn(move || {
            // The receiver is gone only if the run is over.
            let _ = tells.send(live(CpuThread::new(worker, loan), &application));
        });
        match spawned {
            Ok(thread) => {
                self.threads.push(thread);
                self.running += 1;
                true
            }
            Err(source) => {
                self.failed = Some(Error::Thread { cpu, source });
                shared.abort();
                false
            }
        }
    }

    /// Replaces threads that die until all have ended, and returns their workers.
    fn supervise(mut self, shared: &EngineState) -> Result<Vec<Worker<H>>> {
        let mut ended = Vec::new();
        while self.running > 0 {
            let Ok(end) = self.told.recv() else { break };
            self.running -= 1;
            match end {
                ThreadEnd::Done(worker) => ended.push(*worker),
                // An aborted run replaces no threads.
                ThreadEnd::Died(worker, _) if shared.is_aborted() => ended.push(*worker),
                ThreadEnd::Died(worker, panic) => self.replace(worker, panic, shared),
                ThreadEnd::Failed(cpu, message) => self.fail(cpu, message, shared),
            }
            self.threads.retain(|thread| !thread.is_finished());
        }
        for thread in self.threads {
            // The thread's end, a panic included, has come through the channel.
            let _ = thread.join();
        }
        self.failed.map_or(Ok(ended), Err)
    }

    fn replace(&mut self, mut worker: Box<Worker<H>>, panic: Option<String>, shared: &EngineState) {
        worker.recover(panic);
        if worker.restarts.in_a_row >= PANICS_IN_A_ROW {
            let message = worker.restarts.last_panic.take().unwrap_or_default();
            self.fail(worker.cpu, message, shared);
        } else {
            self.start(worker, shared);
        }
    }

    fn fail(&mut self, cpu: CpuId, message: String, shared: &EngineState) {
        self.failed = Some(Error::Panicked { cpu, message });
        shared.abort();
    }
}

/// Runs a thread's life. Panics are caught in programs built with unwinding, as tests are; where a
/// panic aborts, as in releases of the `forebay` program, it ends the process. A panic outside the
/// handler is fatal: a source or an intake stopped within a burst cannot continue, and an
/// application is not restarted after its own panic.
fn live<H: Handler>(mut thread: CpuThread<H>, application: &Application<H>) -> ThreadEnd<H> {
    let lived = panic::catch_unwind(AssertUnwindSafe(|| {
        thread.begin();
        application(&mut thread);
        // Packets that the application left are delivered all the same.
        thread.turn_to_the_end();
    }));
    let worker = thread.into_worker();
    match lived {
        Ok(()) if worker.life == ThreadState::Terminated => ThreadEnd::Died(worker, None),
        Ok(()) => ThreadEnd::Done(worker),
        Err(payload) if worker.life == ThreadState::Handling => {
            ThreadEnd::Died(worker, Some(words(&*payload)))
        }
        Err(payload) => {
            // Nothing drains this CPU's backlogs any more, so the other threads end at once.
            worker.shared.abort();
            ThreadEnd::Failed(worker.cpu, words(&*payload))
        }
    }
}

/// Message of a panic.
fn words(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
}
