//! Handle that changes an engine while it runs.

use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use forebay_engine::knobs::change::{Change, Queues};
use forebay_engine::knobs::machine::Machine;
use forebay_engine::{Engine, EngineState, Explained, Question, QueueRanges, Settings};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::{CpuId, Handler, RxQueue};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::refused::{Refused, Written};

use super::connection::{FindConnections, FlowConnection};
use super::flow::FlowName;
use super::names::{self, Names};
use super::tree::Tree;

/// Maximum time for the queues to answer.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Knobs of an engine, before, during and after its run. Cheap to clone; usable from any thread.
///
/// A change is in the change log when a method returns. The CPUs apply it at their next turns.
#[derive(Clone)]
pub struct Control {
    shared: Arc<EngineState>,
    machine: Machine,
    /// Finds the connections of a flow, if packets go to sockets.
    find_connections: Option<FindConnections>,
}

impl Control {
    /// Handle on an engine that is about to run.
    #[must_use]
    pub fn of<H: Handler + 'static>(engine: &Engine<H>) -> Self {
        let shared = engine.state();
        let machine = Machine::with(shared.cpus());
        Self { shared, machine, find_connections: None }
    }

    /// Adds the connections of sockets to what is told of a flow.
    #[must_use]
    pub fn with_connections(self, find: FindConnections) -> Self {
        Self { find_connections: Some(find), ..self }
    }

    pub(super) fn connections_of(&self, name: &FlowName, hash: FlowHash) -> Vec<FlowConnection> {
        self.find_connections.as_ref().map_or_else(Vec::new, |find| find(name, hash))
    }

    /// State of the engine.
    #[must_use]
    pub fn state(&self) -> &EngineState {
        &self.shared
    }

    /// Facts of the machine that the answers of knobs depend on.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    pub(super) fn tree(&self) -> Tree {
        Tree { devices: self.shared.devices().clone(), cpus: self.shared.cpus().clone() }
    }

    /// Makes a change.
    ///
    /// # Errors
    /// `EINVAL` for an invalid CPU or key, `ENOENT` for a queue that does not exist, `EBUSY` for
    /// the last running CPU and while [`CHANGES_MAX`](forebay_engine::CHANGES_MAX) changes wait for
    /// the engine, `ENOMEM` for a table too large.
    #[expect(clippy::needless_pass_by_value, reason = "a change is made for this")]
    pub fn change(&self, change: Change) -> Result<Written, Refused> {
        self.shared.change(&change)
    }

    /// Writes a knob as on the command line, and as `echo VALUE > FILE` would. Its name stands
    /// alone (`rps_cpus`, of all queues), follows its queue or CPU (`rx-0/rps_cpus`), or is its
    /// path in the tree.
    ///
    /// # Errors
    /// If there is no such knob, or it refuses the value: the kernel's errno, with the reason, and the names of the files
    /// that have taken it.
    pub fn set(&self, knob: &str, value: &str) -> Result<(), Refused> {
        let paths = names::find_for_writing(self, knob)?;
        for (index, path) in paths.iter().enumerate() {
            let written = self.echo(path, value);
            written.map_err(|refused| Names::in_run(self).after(refused, &paths[..index]))?;
        }
        Ok(())
    }

    /// Reads a knob by such a name, without its newline; the first one if the name fits several.
    ///
    /// # Errors
    /// If there is none, or it cannot be read.
    pub fn knob(&self, knob: &str) -> Result<String, Refused> {
        let paths = names::find(self, knob)?;
        let text = paths.first().map_or(Ok(String::new()), |path| self.read(path));
        Ok(text
            .map_err(|errno| Refused { errno, why: format!("{knob} cannot be read") })?
            .trim_end()
            .to_owned())
    }

    /// Sets the CPUs that packets may go to. Returns those that are ignored, because the engine
    /// does not have them or they do not run (RPS-9).
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn set_rps_cpus(&self, queues: Queues, cpus: CpuList) -> Result<CpuList, Refused> {
        self.change(Change::RpsCpus(queues, cpus)).map(|written| written.ignored)
    }

    /// Takes a CPU out of service, or puts it back. A CPU out of service delivers the packets it
    /// has; its flows leave by the drain rule, and another CPU polls its queues.
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn set_online(&self, cpu: CpuId, runs: bool) -> Result<(), Refused> {
        self.change(Change::Online(cpu, runs)).map(|_| ())
    }

    /// Records that the application of a flow runs on `cpu`, as the application's own calls would.
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn rfs_desired(&self, flow: FlowHash, cpu: CpuId) -> Result<Written, Refused> {
        self.change(Change::RfsDesired { flow, cpu })
    }

    /// Pauses a CPU, which then leaves its backlogs alone.
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn pause(&self, cpu: CpuId) -> Result<(), Refused> {
        self.change(Change::Pause(cpu)).map(|_| ())
    }

    /// Ends a CPU's pause.
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn resume(&self, cpu: CpuId) -> Result<(), Refused> {
        self.change(Change::Resume(cpu)).map(|_| ())
    }

    /// Ends a CPU's thread after it dequeues its next batch; a new thread replaces it (fault
    /// injection).
    ///
    /// # Errors
    /// As [`change`](Self::change).
    pub fn kill(&self, cpu: CpuId) -> Result<(), Refused> {
        self.change(Change::Kill(cpu)).map(|_| ())
    }

    /// Current settings.
    #[must_use]
    pub fn settings(&self) -> Settings {
        self.shared.settings()
    }

    /// Current hash function of flows.
    #[must_use]
    pub fn hasher(&self) -> Arc<Hasher> {
        self.shared.hasher()
    }

    /// Answers about a flow, in the order of the queues, from those that answer within five seconds
    /// while the engine runs. Flows that share the flow's slot are recorded from the first request
    /// on.
    ///
    /// # Errors
    /// `EBUSY` if too many changes and questions wait for the engine.
    pub fn explain(&self, flow: FlowHash) -> Result<Vec<Explained>, Refused> {
        let mut answers: Vec<Explained> =
            self.ask(ANSWER_TIME, |answers| Question::Flow { flow, answers })?;
        answers.sort_by_key(|explained| explained.queue);
        Ok(answers)
    }

    /// CPUs of all hash values, in the order of the queues, from those that answer within five seconds
    /// while the engine runs.
    ///
    /// # Errors
    /// As [`explain`](Self::explain).
    pub fn hash_ranges(&self) -> Result<Vec<QueueRanges>, Refused> {
        let mut answers: Vec<QueueRanges> =
            self.ask(ANSWER_TIME, |answers| Question::Ranges { answers })?;
        answers.sort_by_key(|ranges| ranges.queue);
        Ok(answers)
    }

    /// Answers of the queues to a question, from those that answer within `time`.
    pub(super) fn ask<A>(
        &self,
        time: Duration,
        question: impl FnOnce(mpsc::Sender<A>) -> Question,
    ) -> Result<Vec<A>, Refused> {
        let queues = self.shared.settings().queues.len();
        let (answers, answered) = mpsc::channel();
        self.shared.ask(question(answers))?;
        let until = Instant::now() + time;
        let left = || until.saturating_duration_since(Instant::now());
        Ok((0..queues).map_while(|_| answered.recv_timeout(left()).ok()).collect())
    }

    /// CPUs that packets of a queue go to: those of its mask that run. `None` if there is no such
    /// queue.
    #[must_use]
    pub fn rps_cpus_in_force(&self, queue: RxQueue) -> Option<CpuList> {
        let settings = self.settings();
        Some(self.shared.in_force(&settings.queue(queue)?.rps_cpus))
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Control").field(&self.shared.settings()).finish()
    }
}
