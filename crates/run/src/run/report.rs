//! Numbers of a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_device::{Device, Facts, KernelCounts, Via};
use forebay_engine::Outcome;
use forebay_rx::counters::IntakeCounters;
use forebay_rx::sink::{SendDrop, SinkCounters};
use forebay_sys::error::Error;
use forebay_sys::interface::{Interface, InterfaceCounters};
use serde::Serialize;

use crate::order_check::FlowOrder;
use crate::report::PathReport;

/// Name in [`SentReport::dropped`] of packets that came to a device that was gone.
const GONE: &str = "gone";

/// The result of a run; its JSON form is what `--json` prints.
#[derive(Debug, Serialize)]
pub struct RunReport {
    /// Work of the path.
    #[serde(flatten)]
    pub path: PathReport,
    /// Frames that the kernel dropped before they could be taken. They are not among those that
    /// came in.
    pub kernel_dropped: u64,
    /// The devices, in the order of their rx queues.
    pub devices: Vec<DeviceReport>,
    /// Destinations of packets, but for those that were only counted.
    pub sent: Vec<SentReport>,
    /// Packets delivered after a later one of their flow; none of these four if that was not
    /// checked.
    pub reordered: Option<u64>,
    /// Packets whose order was not checked: of more flows than are told apart.
    pub order_unchecked: Option<u64>,
    /// Flows seen by each queue.
    pub flows: Option<u64>,
    /// Packets of the largest flow.
    pub largest_flow: Option<u64>,
    /// Reason why it ended.
    pub stopped_by: StoppedBy,
    /// First failure, if any. What came in before was still delivered.
    pub error: Option<String>,
    /// All of what went wrong.
    #[serde(skip)]
    pub errors: Vec<Error>,
}

/// Reason why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StoppedBy {
    /// Asked to.
    Request,
    /// The time of the run was over.
    Duration,
    /// A device failed.
    Failure,
    /// No source had anything more to give.
    Sources,
}

/// Outcome for one device.
#[derive(Debug, Serialize)]
pub struct DeviceReport {
    /// Name, or the path of its socket.
    pub name: String,
    /// Way in which it was opened.
    pub via: &'static str,
    /// Queues.
    pub queues: Vec<QueueReport>,
    /// Facts found while opening it.
    pub facts: BTreeMap<&'static str, String>,
    /// Counters of the kernel on the interface meanwhile, if it is one and still there.
    pub interface: Option<InterfaceReport>,
}

/// Packets of one queue of a device.
#[derive(Debug, Serialize)]
pub struct QueueReport {
    /// Number at the device.
    pub rx_queue: u16,
    /// Frames that it gave.
    pub packets: u64,
    /// Frames that the kernel dropped before they could be taken, by its own names. Only the queues
    /// of interfaces have any: they are not among `packets`.
    pub kernel_dropped: BTreeMap<&'static str, u64>,
    /// Counters of a driver in this process for a device that is no interface, by the names of kernel
    /// drivers. No further drops: the frames that are among them are among `packets`, and among the
    /// path's own drops.
    pub driver: BTreeMap<&'static str, u64>,
}

/// Counters of the kernel on an interface during the run, by its own names.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "they are the kernel's")]
pub struct InterfaceReport {
    pub rx_packets: u64,
    pub rx_dropped: u64,
    pub rx_missed_errors: u64,
    pub rx_nohandler: u64,
    pub tx_packets: u64,
    pub tx_dropped: u64,
}

/// Packets that got to one place.
#[derive(Debug, Serialize)]
pub struct SentReport {
    /// The place, as on the command line.
    pub to: String,
    /// Packets that were handed to it.
    pub handed: u64,
    /// Packets that it took.
    pub packets: u64,
    /// The frames in them.
    pub frames: u64,
    /// Bytes of them, a merged packet's headers counted once.
    pub bytes: u64,
    /// Packets that it did not take, by the name of the reason.
    pub dropped: BTreeMap<&'static str, u64>,
}

/// State that is looked at again when a run ends.
pub(super) struct DeviceWatch {
    name: String,
    via: Via,
    facts: Facts,
    queues: usize,
    /// For each queue, if the kernel or a driver counts there.
    counts: Vec<Arc<KernelCounts>>,
    /// The interface, and what was counted there before. A source of another kind has none.
    interface: Option<(Interface, InterfaceCounters)>,
}

impl RunReport {
    pub(super) fn of<H>(
        outcome: &Outcome<H>,
        flows: Option<&FlowOrder>,
        devices: &[DeviceWatch],
        cpu_ns: u64,
    ) -> Self {
        let queues = outcome.queues.iter();
        let mut left = outcome.queues.as_slice();
        let devices = devices.iter().map(|device| {
            let (queues, others) = left.split_at(device.queues.min(left.len()));
            left = others;
            device.report(queues)
        });
        Self {
            devices: devices.collect(),
            path: PathReport::of(outcome, flows, cpu_ns),
            kernel_dropped: queues.map(|queue| queue.kernel_dropped.get()).sum(),
            sent: Vec::new(),
            reordered: flows.map(|flows| flows.reordered),
            order_unchecked: flows.map(|flows| flows.unchecked),
            flows: flows.map(|flows| flows.flows),
            largest_flow: flows.map(|flows| flows.largest),
            stopped_by: StoppedBy::Sources,
            error: None,
            errors: Vec::new(),
        }
    }

    /// The promises that this run broke, in words; none if all is well.
    #[must_use]
    pub fn broken_promises(&self) -> Vec<String> {
        let reordered = self.reordered.filter(|reordered| *reordered > 0);
        let order =
            reordered.map(|packets| format!("order: {packets} packets came after a later one"));
        let sent = self.sent.iter().filter_map(SentReport::broken_promise);
        order.into_iter().chain(self.path.broken_promises()).chain(sent).collect()
    }
}

impl SentReport {
    /// Sum of what the CPUs' sinks counted, of `handed` packets. What came to a device that
    /// was gone nobody has counted.
    pub(super) fn of(
        to: String,
        counters: &[Arc<SinkCounters>],
        handed: u64,
        is_gone: bool,
    ) -> Self {
        let sum = |count: &dyn Fn(&SinkCounters) -> u64| counters.iter().map(|at| count(at)).sum();
        let dropped = SendDrop::ALL.map(|reason| (reason.name(), sum(&|at| at.dropped(reason))));
        let mut report = Self {
            to,
            handed,
            packets: sum(&SinkCounters::packets),
            frames: sum(&SinkCounters::frames),
            bytes: sum(&SinkCounters::bytes),
            dropped: dropped.into(),
        };
        if is_gone {
            let gone = handed.saturating_sub(report.accounted());
            report.dropped.insert(GONE, gone);
        }
        report
    }

    fn accounted(&self) -> u64 {
        self.packets + self.dropped.values().sum::<u64>()
    }

    fn broken_promise(&self) -> Option<String> {
        let Self { to, handed, .. } = self;
        let accounted = self.accounted();
        (accounted != *handed).then(|| {
            format!("conservation: {handed} packets went to {to}, {accounted} are accounted for")
        })
    }
}

impl DeviceWatch {
    pub(super) fn new(device: &Device) -> Self {
        let interface = device.interface().and_then(Result::ok);
        let interface = interface.and_then(|interface| {
            let counters = interface.counters().ok()?;
            Some((interface, counters))
        });
        Self {
            via: device.via,
            facts: device.facts.clone(),
            queues: device.sources.len(),
            counts: device.counts.clone(),
            interface,
            name: device.name.clone(),
        }
    }

    fn report(&self, intakes: &[Arc<IntakeCounters>]) -> DeviceReport {
        let queues = (0..).zip(intakes).map(|(rx_queue, intake)| {
            let counts = self.counts.get(usize::from(rx_queue));
            let counts = counts.map(|counts| counts.iter().collect()).unwrap_or_default();
            let (kernel_dropped, driver) = if self.via.is_interface() {
                (counts, BTreeMap::new())
            } else {
                (BTreeMap::new(), counts)
            };
            QueueReport { rx_queue, packets: intake.frames.get(), kernel_dropped, driver }
        });
        let now = self.interface.as_ref().and_then(|(interface, before)| {
            Some(InterfaceReport::between(before, &interface.counters().ok()?))
        });
        DeviceReport {
            name: self.name.clone(),
            via: self.via.name(),
            queues: queues.collect(),
            facts: self.facts.all(),
            interface: now,
        }
    }
}

impl InterfaceReport {
    fn between(before: &InterfaceCounters, after: &InterfaceCounters) -> Self {
        let grown = |count: fn(&InterfaceCounters) -> u64| count(after).wrapping_sub(count(before));
        Self {
            rx_packets: grown(|counters| counters.rx_packets),
            rx_dropped: grown(|counters| counters.rx_dropped),
            rx_missed_errors: grown(|counters| counters.rx_missed_errors),
            rx_nohandler: grown(|counters| counters.rx_nohandler),
            tx_packets: grown(|counters| counters.tx_packets),
            tx_dropped: grown(|counters| counters.tx_dropped),
        }
    }
}
