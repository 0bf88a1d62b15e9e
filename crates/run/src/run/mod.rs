//! Run: live devices through the path, and on to the destinations of packets.

mod to; //          destinations of packets, as on the command line
mod destination; // open destinations
mod handler; //     check of the order, and hand-over to destinations
mod ending; //      end of a run by itself
mod watch; //       state of a run while it lasts
mod report; //      numbers of a run

use std::sync::Arc;
use std::time::Duration;

use destination::{DestinationOptions, Destinations};
use ending::{Ending, WatchedSource};
use forebay_control::Control;
use forebay_device::pcap::{CaptureOptions, Rotation};
use forebay_device::{Device, DeviceConfig, DeviceLink};
use forebay_engine::trace::{Trace, TracePlan};
use forebay_engine::{Config, DeviceQueues, Engine, Stopper, WhenFull};
use forebay_metrics::Metrics;
use forebay_rx::Source;
use forebay_sys as sys;
use forebay_sys::clock::Clock;
use forebay_sys::error::Result;
use handler::RunHandler;
use report::DeviceWatch;
pub use report::{DeviceReport, InterfaceReport, QueueReport, RunReport, SentReport, StoppedBy};
pub use to::To;
pub use watch::{CpuSnapshot, Snapshot, Watch};

use crate::order_check::{FlowOrder, OrderCheck};
use crate::outputs::{DirectoryLocks, Outputs};

/// Configuration of a run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Devices that packets are received from, in the order of their rx queues.
    pub devices: Vec<DeviceConfig>,
    /// Configuration of the engine; the trace is added to it. A full backlog always drops, since a
    /// device does not wait.
    pub engine: Config,
    /// Destinations: one for all devices, or one for each. Empty: packets are counted.
    pub to: Vec<To>,
    /// True if merged packets are written to captures as the frames that they were merged from.
    pub resegment: bool,
    /// True if a destination `tun:NAME` is opened as a TAP that takes packets merged inside VXLAN and
    /// GENEVE whole.
    pub whole_tunnels: bool,
    /// Limits of the files of captures.
    pub rotation: Rotation,
    /// Directory of the trace.
    pub trace: Option<TracePlan>,
    /// True if the order of delivery is checked for every flow. With a trace, order is always
    /// checked.
    pub check_order: bool,
    /// Maximum duration; `None` for no limit.
    pub duration: Option<Duration>,
}

impl RunConfig {
    /// Configuration in which all packets of `devices` pass through `engine` and are only counted.
    #[must_use]
    pub fn new(devices: Vec<DeviceConfig>, engine: Config) -> Self {
        Self {
            devices,
            engine,
            to: Vec::new(),
            resegment: false,
            whole_tunnels: false,
            rotation: Rotation::default(),
            trace: None,
            check_order: false,
            duration: None,
        }
    }
}

/// A run with open devices, ready to begin.
pub struct Run {
    engine: Engine<RunHandler>,
    devices: Vec<DeviceWatch>,
    destinations: Destinations,
    metrics: Metrics,
    /// Links of the devices that packets are received from, by name.
    links: Vec<(String, DeviceLink)>,
    /// One check for each queue, since a flow may come by several; empty if order is not checked.
    ledgers: Arc<[OrderCheck]>,
    trace: Option<Arc<Trace>>,
    ending: Ending,
    duration: Option<Duration>,
    /// Destinations whose earlier captures are deleted when the run begins.
    cleared: Vec<To>,
    _locks: DirectoryLocks,
}

impl Run {
    /// Opens everything that the configuration names. Captures and traces of earlier runs stay until
    /// [`run`](Self::run) begins.
    ///
    /// # Errors
    /// If a device cannot be opened or used, a file cannot be created, another run writes to the
    /// same directory, or there is no memory.
    pub fn open(plan: RunConfig) -> Result<Self> {
        DeviceConfig::check_named_once(&plan.devices)?;
        let devices = plan.devices.iter().map(Device::open).collect::<Result<Vec<_>>>()?;
        Self::with_devices(plan, devices)
    }

    /// Prepares a run with open devices, in place of those that the configuration names.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn with_devices(mut plan: RunConfig, mut devices: Vec<Device>) -> Result<Self> {
        plan.engine.when_full = WhenFull::Drop;
        plan.engine.devices = DeviceQueues::of(&devices);
        let cpus = plan.engine.cpus.cpus();
        let captures = CaptureOptions { resegments: plan.resegment, rotation: plan.rotation };
        let options = DestinationOptions { captures, whole_tunnels: plan.whole_tunnels };
        let outputs = Outputs { trace: plan.trace.as_ref(), ..captures_of(&plan.to) };
        let locks = outputs.lock()?;
        let (destinations, ways) = Destinations::open(&plan.to, &devices, cpus, options)?;
        let trace = plan.trace.as_ref().map(|trace| trace.open(&mut plan.engine)).transpose()?;
        let ending = Ending::default();
        let watched = devices.iter().map(DeviceWatch::new).collect();
        let metrics = destinations.add_to(Metrics::new().with_devices(&devices));
        let named = devices.iter().filter_map(|it| Some((it.name.clone(), it.link()?)));
        let links = named.collect();
        let sources = take_sources(&mut devices, &ending);
        let checked = if plan.check_order || trace.is_some() { sources.len() } else { 0 };
        let ledgers: Arc<[OrderCheck]> = (0..checked).map(|_| OrderCheck::new(1)).collect();
        let clock = Clock::machine();
        let mut ways = ways.into_iter();
        let engine = Engine::build(&plan.engine, sources, clock.clone(), |_| {
            let ways = ways.next().unwrap_or_default();
            RunHandler::new(ways, &ledgers, trace.as_ref(), &clock, &ending)
        })?;
        let duration = plan.duration;
        let devices = watched;
        // Captures that rotate go on after those that are there.
        let cleared = if plan.rotation.is_on() { Vec::new() } else { plan.to };
        Ok(Self {
            engine,
            devices,
            destinations,
            metrics,
            links,
            ledgers,
            trace,
            ending,
            duration,
            cleared,
            _locks: locks,
        })
    }

    /// Handle that changes the run while it lasts.
    #[must_use]
    pub fn control(&self) -> Control {
        Control::of(&self.engine)
    }

    /// Handle that ends the run: nothing more is received from the devices, and packets already
    /// received still go to their destinations.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.engine.stopper()
    }

    /// Handle that reads the state of the run while it lasts.
    #[must_use]
    pub fn watch(&self) -> Watch {
        let of_trace = self.trace.iter().map(|trace| trace.failure());
        let failures = self.destinations.failures().chain(of_trace).chain([self.ending.failure()]);
        let failures = failures.map(Arc::clone).collect();
        Watch::new(Control::of(&self.engine), self.destinations.counters(), failures)
    }

    /// Links of the devices that packets are received from, by name.
    #[must_use]
    pub fn links(&self) -> &[(String, DeviceLink)] {
        &self.links
    }

    /// Metrics of the run: its devices, engine and destinations. From now on the engine measures
    /// times of delivery, too.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.metrics.clone().with_engine(self.control())
    }

    /// Metrics of the run without asking the engine to measure times.
    #[must_use]
    pub fn counts(&self) -> Metrics {
        self.metrics.clone().with_counted_engine(self.control())
    }

    /// Runs until it is stopped, its time is over, every source is exhausted, or a device fails.
    /// The trace of an earlier run is deleted first, and its captures, unless the run's own rotate.
    ///
    /// # Errors
    /// If an earlier file cannot be deleted, or a thread fails. Errors of a device, or of a file that is written, are part of the report.
    pub fn run(self) -> Result<RunReport> {
        captures_of(&self.cleared).clear_captures()?;
        self.trace.iter().try_for_each(|trace| trace.begin())?;
        let Self { engine, devices, destinations, ledgers, trace, ending, duration, .. } = self;
        let stopper = engine.stopper();
        let guard = ending.guard(stopper.clone(), duration)?;
        let cpu_ns = sys::process_cpu_ns();
        let outcome = engine.run();
        let ended_by = guard.finish();
        let mut outcome = outcome?;
        outcome.handlers.iter_mut().for_each(RunHandler::flush);
        let cpu_ns = sys::process_cpu_ns() - cpu_ns;
        let stopped_by = match ended_by {
            Some(stopped_by) => stopped_by,
            None if stopper.is_asked() => StoppedBy::Request,
            None => StoppedBy::Sources,
        };
        let sent = destinations.report(outcome.handlers.iter().map(RunHandler::ways));
        let flows = (!ledgers.is_empty()).then(|| {
            let cpus = outcome.cpu_count();
            ledgers.iter().fold(FlowOrder::default(), |sum, ledger| sum.plus(&ledger.flows(cpus)))
        });
        let mut report = RunReport::of(&outcome, flows.as_ref(), &devices, cpu_ns);
        (report.sent, report.stopped_by) = (sent, stopped_by);
        report.errors = outcome.errors;
        report.errors.extend(outcome.handlers.into_iter().flat_map(RunHandler::finish));
        if let Some(trace) = &trace {
            report.errors.extend(trace.finish(&report.path.counters_json()));
            report.trace_rows_lost = Some(trace.rows_lost());
        }
        report.error = report.errors.first().map(ToString::to_string);
        Ok(report)
    }
}

/// Takes the sources of all devices, in order; a failure of one ends the run.
fn take_sources(devices: &mut [Device], ending: &Ending) -> Vec<Box<dyn Source>> {
    let sources = devices.iter_mut().flat_map(|device| device.sources.drain(..));
    let watched =
        sources.map(|source| Box::new(WatchedSource::new(source, ending)) as Box<dyn Source>);
    watched.collect()
}

/// Directories that the run writes captures to.
fn captures_of(to: &[To]) -> Outputs<'_> {
    let directories = to.iter().filter_map(|to| match to {
        To::Pcap(directory) => Some(("to", directory.as_path())),
        To::Count | To::Tun(_) | To::Dev(_) => None,
    });
    Outputs { captures: directories.collect(), ..Outputs::default() }
}
