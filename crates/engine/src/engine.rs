//! An engine: its handles before it runs, and its ways to run.

use std::sync::Arc;

use forebay_buf::Pool;
use forebay_rx::Handler;
use forebay_rx::arrive::Waker;
use forebay_sys::error::Result;

use super::busy_poll::{Borrowers, BusyPoll, Loan, Loans};
use super::cpu_thread::CpuThread;
use super::flows::Flows;
use super::outcome::Outcome;
use super::shared::EngineState;
use super::stepped::{self, VirtualCosts};
use super::threads;
use super::worker::Worker;

/// An engine, ready to run.
pub struct Engine<H> {
    pub(super) workers: Vec<Worker<H>>,
    pub(super) loans: Option<Loans<H>>,
    pub(super) senders: Vec<Pool>,
    pub(super) small: Vec<Pool>,
    pub(super) shared: Arc<EngineState>,
}

impl<H: Handler + 'static> Engine<H> {
    /// Handler of a CPU, by its index.
    ///
    /// # Panics
    /// If there are fewer CPUs.
    pub fn handler_mut(&mut self, index: usize) -> &mut H {
        &mut self.workers[index].handler
    }

    /// Takes the pools of [other threads](crate::Config::senders) that make packets. Frames still in use
    /// at the end of the run are returned when the pool is dropped.
    #[must_use]
    pub fn take_senders(&mut self) -> Vec<Pool> {
        std::mem::take(&mut self.senders)
    }

    /// Takes the [smallest frames](crate::Config::small_frames), in the order of the CPUs.
    #[must_use]
    pub fn take_small(&mut self) -> Vec<Pool> {
        std::mem::take(&mut self.small)
    }

    /// Handles that wake the CPUs, in their order. Cheap while a CPU is awake.
    #[must_use]
    pub fn wakers(&self) -> Vec<Waker> {
        let waker = |index: usize| -> Waker {
            let shared = Arc::clone(&self.shared);
            Arc::new(move || shared.cpu_waker(index).wake())
        };
        (0..self.workers.len()).map(waker).collect()
    }

    /// Turns by threads of the application, which from now on may turn CPUs that sleep.
    pub fn busy_poll(&mut self) -> Arc<dyn BusyPoll> {
        let (shared, cpus) = (&self.shared, 0..self.workers.len());
        let loan = |index| {
            let loan = Arc::new(Loan::new(Arc::clone(shared), index));
            shared.set_loan(index, Arc::downgrade(&loan) as _);
            loan
        };
        let loans = self.loans.get_or_insert_with(|| cpus.map(loan).collect());
        Arc::new(Borrowers::new(Arc::clone(loans)))
    }

    /// State shared with handles, such as the one that changes the engine while it runs.
    #[must_use]
    pub fn state(&self) -> Arc<EngineState> {
        Arc::clone(&self.shared)
    }

    /// Table in which applications record the CPU that they run on, for RFS.
    #[must_use]
    pub fn flows(&self) -> Flows {
        self.shared.flows()
    }

    /// Handle to stop a running engine: the engine stops receiving, delivers what it has received,
    /// and ends.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Runs on one thread for each CPU until every source is exhausted and every packet handled.
    ///
    /// # Errors
    /// If a thread cannot be started, a thread panics outside its handler, or a handler panics
    /// [`PANICS_IN_A_ROW`](crate::PANICS_IN_A_ROW) times without handling a batch in between. Errors of sources and
    /// replaced threads are part of the outcome.
    pub fn run(self) -> Result<Outcome<H>> {
        self.run_with(CpuThread::turn_to_the_end)
    }

    /// Runs with `application` in control of every CPU's thread. The application calls for turns of
    /// its CPU whenever it has nothing else to do. After it returns, the engine turns the CPU until
    /// the run ends. If the thread dies, `application` is called again on the replacement thread.
    ///
    /// # Errors
    /// As [`run`](Self::run); and if the application panics.
    pub fn run_with(
        self,
        application: impl Fn(&mut CpuThread<H>) + Send + Sync + 'static,
    ) -> Result<Outcome<H>> {
        let workers = begun(self.workers);
        threads::run(workers, self.loans, &self.shared, Arc::new(application))
    }

    /// Runs on the calling thread, in virtual time, in an order that `seed` determines.
    ///
    /// # Panics
    /// If the engine was built with the machine's clock.
    pub fn run_stepped(self, seed: u64, costs: VirtualCosts) -> Outcome<H> {
        self.run_stepped_observed(seed, costs, |_| ())
    }

    /// Runs as [`run_stepped`](Self::run_stepped) does, and calls `observe` with the time after
    /// every step.
    ///
    /// # Panics
    /// If the engine was built with the machine's clock.
    pub fn run_stepped_observed(
        self,
        seed: u64,
        costs: VirtualCosts,
        observe: impl FnMut(u64),
    ) -> Outcome<H> {
        stepped::run(begun(self.workers), &self.shared, (seed, costs), observe)
    }
}

/// The CPUs as a run begins, each with the changes that were made before.
fn begun<H: Handler>(mut workers: Vec<Worker<H>>) -> Vec<Worker<H>> {
    workers.iter_mut().for_each(Worker::begin);
    workers
}

/// Handle that stops a running engine.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<EngineState>);

impl Stopper {
    /// Requests the stop.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// True if a stop was requested.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.0.is_stopping()
    }
}
