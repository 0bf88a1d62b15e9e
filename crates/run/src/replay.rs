//! Replay: a capture, or synthetic traffic, through the whole path, with every packet checked.

mod handler; //  work on each packet, check of its order, files
mod observer; // thread that records the timeline
mod report; //   numbers of a replay

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_control::{Control, Explanation, FlowName};
use forebay_device::pcap::{Capture, KEPT_BYTES_MAX, PcapSource, ReplayPlan, Rotation};
use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
use forebay_device::{Progress, QueueShare};
use forebay_engine::timeline::Timeline;
use forebay_engine::trace::Trace;
pub use forebay_engine::trace::TracePlan;
use forebay_engine::{Config, Engine, Measured, Outcome, Stopper, VirtualCosts};
use forebay_metrics::Metrics;
use forebay_rx::hash::Indirection;
use forebay_rx::{RxQueue, Source};
use forebay_sys as sys;
use forebay_sys::clock::Clock;
use forebay_sys::error::{Error, Result};
use forebay_sys::failure::FirstFailure;
use handler::ReplayHandler;
use observer::{Observer, VIRTUAL_PERIOD_NS};
pub use report::ReplayReport;

use crate::order_check::OrderCheck;
use crate::outputs::{DirectoryLocks, Outputs};

/// Input of the replay.
#[derive(Clone, Debug)]
pub enum Input {
    /// Captures.
    Captures(ReplayPlan),
    /// Synthetic traffic.
    Synthetic(SyntheticPlan),
}

/// Mode in which the engine runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// On threads, by the machine's clock.
    Live,
    /// On one thread, in virtual time, in an order that the seed determines.
    Stepped {
        /// Seed that determines the order.
        seed: u64,
    },
}

/// Configuration of a replay.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Input of the replay.
    pub input: Input,
    /// Number of rx queues that the input is distributed over.
    pub queues: NonZeroU16,
    /// Configuration of the engine; the trace is added to it.
    pub engine: Config,
    /// Mode in which the engine runs.
    pub mode: Mode,
    /// Work of the application on each packet, in nanoseconds.
    pub work_ns: u64,
    /// Directory for delivered packets, one capture for each CPU.
    pub write_pcap: Option<PathBuf>,
    /// True if merged packets are written as the frames that they were merged from.
    pub resegment: bool,
    /// Limits of the files of captures.
    pub rotation: Rotation,
    /// Directory of the trace.
    pub trace: Option<TracePlan>,
    /// Files that the caller draws the run's timeline into. Without any, no timeline is recorded.
    pub plots: Vec<PathBuf>,
    /// Flows that are recorded from the first packet on, and explained in the report.
    pub explain: Vec<FlowName>,
}

/// A replay, ready to run.
pub struct Replay {
    engine: Engine<ReplayHandler>,
    plan: ReplayConfig,
    ledger: Arc<OrderCheck>,
    progress: Arc<Progress>,
    trace: Option<Arc<Trace>>,
    failure: FirstFailure,
    _locks: DirectoryLocks,
}

impl Replay {
    /// Opens everything that the configuration names. Files of earlier runs stay until
    /// [`run`](Self::run) begins.
    ///
    /// # Errors
    /// If a capture cannot be replayed, a file cannot be created or would overwrite a capture, or
    /// there is no memory.
    pub fn open(mut plan: ReplayConfig) -> Result<Self> {
        let clock = match plan.mode {
            Mode::Live => Clock::machine(),
            Mode::Stepped { .. } => Clock::virtual_at_zero(),
        };
        check_inputs_can_be_read_again(&plan)?;
        let (sources, progress) = open_sources(&plan)?;
        let outputs = outputs_of(&plan);
        let locks = outputs.lock()?;
        outputs.refuse_inputs(inputs(&plan))?;
        let trace = plan.trace.as_ref().map(|trace| trace.open(&mut plan.engine)).transpose()?;
        let flows = plan.explain.iter().map(|flow| flow.hash(&plan.engine.hasher));
        plan.engine.explain = flows.collect();
        let ledger = Arc::new(OrderCheck::new(plan.queues.get()));
        let failure = FirstFailure::default();
        let engine = Engine::build(&plan.engine, sources, clock.clone(), |cpu| {
            ReplayHandler::new(cpu, &plan, &clock, &ledger, trace.as_ref(), &failure)
        })?;
        Ok(Self { engine, plan, ledger, progress, trace, failure, _locks: locks })
    }

    /// Progress of the run.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// First failure to write delivered packets, and to write the trace, each set as soon as it
    /// happens.
    #[must_use]
    pub fn failures(&self) -> Vec<FirstFailure> {
        let of_trace = self.trace.iter().map(|trace| trace.failure());
        [&self.failure].into_iter().chain(of_trace).map(Arc::clone).collect()
    }

    /// Handle that ends the run early; every packet taken in is delivered all the same.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.engine.stopper()
    }

    /// Handle that changes the run while it lasts.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::of(&self.engine)
    }

    /// Metrics of the replay's engine. From now on it measures times of delivery, too.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        Metrics::new().with_engine(self.control())
    }

    /// Metrics of the replay's engine without asking it to measure times.
    #[must_use]
    pub fn counts(&self) -> Metrics {
        Metrics::new().with_counted_engine(self.control())
    }

    /// Runs to the end. Captures and the trace of an earlier run are deleted first.
    ///
    /// # Errors
    /// If an earlier file cannot be deleted, or a thread fails. Errors of the input, or of a file that is written, are part of the
    /// report.
    pub fn run(self) -> Result<ReplayReport> {
        outputs_of(&self.plan).clear_captures()?;
        self.trace.iter().try_for_each(|trace| trace.begin())?;
        let cpu_ns = sys::process_cpu_ns();
        let (mut outcome, timeline) = if self.plan.plots.is_empty() {
            (run_engine(self.engine, &self.plan, |_| ())?, None)
        } else {
            run_observed(self.engine, &self.plan)?
        };
        let cpu_ns = sys::process_cpu_ns() - cpu_ns;
        finish_handlers(&mut outcome);
        let mut report = ReplayReport::of(&outcome, &self.ledger, &self.progress, cpu_ns);
        report.timeline = timeline;
        report.errors = outcome.errors;
        let ReplayConfig { explain: names, engine, .. } = &self.plan;
        let flows = names.iter().zip(&engine.explain).zip(outcome.explained);
        let flow_key = *engine.hasher.rules();
        let told = flows.map(|((name, hash), queues)| Explanation {
            name: *name,
            hash: *hash,
            flow_key,
            queues,
            connections: Vec::new(),
        });
        report.explain = told.collect();
        if let Some(trace) = &self.trace {
            report.errors.extend(trace.finish(&report.path.counters_json()));
            report.trace_rows_lost = Some(trace.rows_lost());
        }
        report.error = report.errors.first().map(ToString::to_string);
        Ok(report)
    }
}

/// Runs the engine to the end. In virtual time, `observe` is called with the time after every step.
fn run_engine(
    engine: Engine<ReplayHandler>,
    plan: &ReplayConfig,
    observe: impl FnMut(u64),
) -> Result<Outcome<ReplayHandler>> {
    match plan.mode {
        Mode::Live => engine.run(),
        Mode::Stepped { seed } => {
            let costs = VirtualCosts { work_ns: plan.work_ns, ..VirtualCosts::default() };
            Ok(engine.run_stepped_observed(seed, costs, observe))
        }
    }
}

/// Runs the engine to the end, and records a timeline.
fn run_observed(
    engine: Engine<ReplayHandler>,
    plan: &ReplayConfig,
) -> Result<(Outcome<ReplayHandler>, Option<Timeline>)> {
    let control = Control::of(&engine);
    let state = engine.state();
    state.measure(Measured::Times);
    match plan.mode {
        Mode::Live => {
            let observer = Observer::of(control)?;
            let outcome = run_engine(engine, plan, |_| ());
            let timeline = observer.finish(state.now_ns());
            Ok((outcome?, timeline))
        }
        Mode::Stepped { .. } => {
            let mut recorder = state.timeline(VIRTUAL_PERIOD_NS);
            let observe = |now_ns| recorder.iter_mut().for_each(|it| it.observe(now_ns));
            let outcome = run_engine(engine, plan, observe)?;
            Ok((outcome, recorder.map(|recorder| recorder.finish(state.now_ns()))))
        }
    }
}

/// Ends the handlers, which write out what they hold; continues after an error.
fn finish_handlers(outcome: &mut Outcome<ReplayHandler>) {
    let finished = outcome.handlers.drain(..).map(ReplayHandler::finish);
    outcome.errors.extend(finished.filter_map(Result::err));
}

/// Refuses several queues or loops for an input that can be read only once, such as a pipe: each
/// queue and each loop opens a capture anew.
fn check_inputs_can_be_read_again(plan: &ReplayConfig) -> Result<()> {
    let Input::Captures(replay) = &plan.input else { return Ok(()) };
    if replay.captures.iter().filter(|capture| matches!(capture, Capture::Stdin)).count() > 1 {
        let why = "standard input can be read only once; name it once".to_owned();
        return Err(Error::Setting { what: "files", value: "-".to_owned(), why });
    }
    let (what, value) = match (plan.queues.get(), replay.loops) {
        (queues @ 2.., _) => ("queues", u64::from(queues)),
        (_, loops @ 2..) => ("loops", loops),
        _ => return Ok(()),
    };
    match replay.captures.iter().find(|capture| capture.is_read_once()) {
        Some(capture) => {
            let name = capture.name();
            let why = match capture {
                Capture::Stdin => format!("{name} can be read only once; copy it to a file"),
                _ => format!("{name} is not a regular file and can be read only once; copy it"),
            };
            Err(Error::Setting { what, value: value.to_string(), why })
        }
        None => Ok(()),
    }
}

/// Files that the replay writes.
fn outputs_of(plan: &ReplayConfig) -> Outputs<'_> {
    let captures = plan.write_pcap.iter().map(|directory| ("write_pcap", directory.as_path()));
    Outputs { captures: captures.collect(), trace: plan.trace.as_ref(), plots: &plan.plots }
}

/// Files that are replayed.
fn inputs(plan: &ReplayConfig) -> impl Iterator<Item = &Path> {
    let captures = match &plan.input {
        Input::Captures(replay) => replay.captures.as_slice(),
        Input::Synthetic(_) => &[],
    };
    captures.iter().filter_map(|capture| match capture {
        Capture::File(path) | Capture::Kept(path, _) => Some(path.as_path()),
        // Standard input may be a file all the same.
        Capture::Stdin => Some(Path::new("/proc/self/fd/0")),
        Capture::Bundled(..) => None,
    })
}

type Sources = Vec<Box<dyn Source>>;

/// Opens a source for each queue; the first one's progress counts for all.
fn open_sources(plan: &ReplayConfig) -> Result<(Sources, Arc<Progress>)> {
    let queues = plan.queues.get();
    let mut progress = None;
    let mut sources = Sources::new();
    let input = match &plan.input {
        // Read before the run begins: reading takes half as long as a packet's whole path, and a
        // file that cannot be replayed is reported before any packet is handled.
        Input::Captures(replay) => {
            let mut left_bytes = KEPT_BYTES_MAX;
            let captures = replay.captures.iter().cloned();
            let captures: Vec<_> = captures.map(|capture| capture.kept(&mut left_bytes)).collect();
            captures.iter().try_for_each(Capture::judge)?;
            Input::Captures(ReplayPlan { captures, ..replay.clone() })
        }
        Input::Synthetic(_) => plan.input.clone(),
    };
    for queue in 0..queues {
        let share = (queues > 1).then(|| QueueShare {
            queue: RxQueue(queue),
            indirection: Indirection::new(queues),
            hasher: Arc::clone(&plan.engine.hasher),
        });
        match &input {
            Input::Captures(replay) => {
                let source = PcapSource::open(replay.clone(), share, plan.engine.verify)?;
                let source = match plan.mode {
                    Mode::Live => source.never_waiting(),
                    // Virtual time does not advance while nothing happens.
                    Mode::Stepped { .. } => source,
                };
                progress.get_or_insert_with(|| Arc::clone(source.progress()));
                sources.push(Box::new(source));
            }
            Input::Synthetic(synthetic) => {
                let source = SyntheticSource::new(synthetic.clone(), share.as_ref());
                progress.get_or_insert_with(|| Arc::clone(source.progress()));
                sources.push(Box::new(source));
            }
        }
    }
    Ok((sources, progress.unwrap_or_default()))
}

/// Capture that is bundled with the program: 32,000 DNS queries of 64 flows.
#[must_use]
pub fn bundled_capture() -> Capture {
    Capture::Bundled("dnsflood.pcap (bundled)", include_bytes!("../captures/dnsflood.pcap"))
}
