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

/// Name in [`SentReport::dropped`] of packets handed to a device that was gone.
const GONE: &str = "gone";

/// Result of a run; its JSON form is what `--json` prints.
#[derive(Debug, Serialize)]
pub struct RunReport {
    /// Work of the path.
    #[serde(flatten)]
    pub path: PathReport,
    /// Number of frames that the kernel dropped before they could be received. They are not
    /// included in the frames received.
    pub kernel_dropped: u64,
    /// Devices, in the order of their rx queues.
    pub devices: Vec<DeviceReport>,
    /// Destinations of packets, except those where packets are only counted.
    pub sent: Vec<SentReport>,
    /// Number of packets delivered after a later one of their flow. This number and the next three
    /// are `None` if order was not checked.
    pub reordered: Option<u64>,
    /// Number of packets whose order was not checked, since their flow found no entry.
    pub order_unchecked: Option<u64>,
    /// Number of flows with a hash, counted at each queue.
    pub flows: Option<u64>,
    /// Number of packets of the largest flow.
    pub largest_flow: Option<u64>,
    /// Number of rows that could not be written to the trace. `None` without a trace.
    pub trace_rows_lost: Option<u64>,
    /// Reason for the end of the run.
    pub stopped_by: StoppedBy,
    /// First error, if any. Frames received before were still delivered.
    pub error: Option<String>,
    /// All errors.
    #[serde(skip)]
    pub errors: Vec<Error>,
}

/// Reason for the end of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StoppedBy {
    /// A request.
    Request,
    /// The time of the run was over.
    Duration,
    /// A device failed.
    Failure,
    /// All sources were exhausted.
    Sources,
}

/// Outcome for one device.
#[derive(Debug, Serialize)]
pub struct DeviceReport {
    /// Name of the device, or path of its socket.
    pub name: String,
    /// Kind of access to the device.
    pub via: &'static str,
    /// Queues.
    pub queues: Vec<QueueReport>,
    /// Facts found when the device was opened.
    pub facts: BTreeMap<&'static str, String>,
    /// Counters of the kernel during the run, if the device is an interface and still exists.
    pub interface: Option<InterfaceReport>,
}

/// Packets of one queue of a device.
#[derive(Debug, Serialize)]
pub struct QueueReport {
    /// Number of the queue at the device.
    pub rx_queue: u16,
    /// Number of frames that the queue gave.
    pub packets: u64,
    /// Number of frames that the kernel dropped before they could be received, by the kernel's
    /// names; not included in `packets`. Empty unless the device is an interface.
    pub kernel_dropped: BTreeMap<&'static str, u64>,
    /// Counters of a driver in this process, by the names of kernel drivers. Empty if the device is
    /// an interface. No further drops: these frames are included in `packets`, and in the path's
    /// own drops.
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

/// Packets of one destination.
#[derive(Debug, Serialize)]
pub struct SentReport {
    /// Destination, as on the command line.
    pub to: String,
    /// Number of packets handed over.
    pub handed: u64,
    /// Number of packets that the destination took.
    pub packets: u64,
    /// Number of frames in these packets.
    pub frames: u64,
    /// Number of bytes of these packets; a merged packet's headers count once.
    pub bytes: u64,
    /// Number of packets that the destination did not take, by the name of the reason.
    pub dropped: BTreeMap<&'static str, u64>,
}

/// State of a device before a run, for comparison at its end.
pub(super) struct DeviceWatch {
    name: String,
    via: Via,
    facts: Facts,
    queues: usize,
    /// Counters of each queue, if the kernel or a driver counts there.
    counts: Vec<Arc<KernelCounts>>,
    /// Interface and its counters before the run; `None` if the device is not an interface.
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
            trace_rows_lost: None,
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
    /// Sums the counters of the CPUs' sinks, for `handed` packets. Packets handed to a device that
    /// was gone are not counted by any sink.
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
