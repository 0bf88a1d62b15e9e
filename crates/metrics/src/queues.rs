//! Families of rx queues and devices.

use std::fmt;

use forebay_engine::EngineState;
use forebay_rx::counters::{Counter, IntakeCounters};
use forebay_rx::{DropReason, RxQueue};
use forebay_sys::interface::LinkState;
use prometheus_client::registry::Unit;

use crate::families::{Families, Label, gauge};
use crate::metrics::MeasuredDevice;

/// Rx queue, by the number that its device gives it.
struct NamedQueue<'a> {
    device: &'a str,
    number: String,
    /// Number of the queue in the engine.
    queue: RxQueue,
    counters: &'a IntakeCounters,
}

impl NamedQueue<'_> {
    fn labels(&self) -> [Label<'_>; 2] {
        [("device", self.device), ("queue", &self.number)]
    }
}

/// Name, help text and counter of a family.
type QueueCounter = (&'static str, &'static str, fn(&IntakeCounters) -> &Counter);

const COUNTERS: [QueueCounter; 13] = [
    ("packets_received", "Frames that the queue gave, refused ones included", |of| &of.frames),
    (
        "packets_kernel_dropped",
        "Frames that the kernel dropped before they could be received; not among those received",
        |of| &of.kernel_dropped,
    ),
    ("packets_flawed", "Frames with inconsistent headers", |of| &of.flawed),
    ("ip_checksum_errors", "Frames with a wrong IPv4 header checksum", |of| &of.ip_checksum_bad),
    ("l4_checksum_errors", "Frames with a wrong TCP or UDP checksum", |of| &of.l4_checksum_bad),
    ("checksums_completed", "Partial TCP or UDP checksums that were completed", |of| {
        &of.checksums_completed
    }),
    ("packets_unsteered", "Packets without a hash, which stay on the polling CPU", |of| {
        &of.unsteered
    }),
    ("flow_moves", "Changes of CPU of the slots of the flow table", |of| &of.moves),
    ("packets_stayed", "Packets that followed their flow to a CPU that it should leave", |of| {
        &of.stays
    }),
    ("flow_holds", "Held moves begun", |of| &of.holds),
    ("packets_unheld", "Packets that stayed because no more could be held", |of| &of.unheld),
    ("active_cpu_changes", "Changes of the number of CPUs that the load needs", |of| &of.resized),
    ("hash_ranges_balanced", "Hash ranges assigned to another CPU because of the load", |of| {
        &of.balanced
    }),
];

/// Adds the families of all queues.
pub(crate) fn encode(shared: &EngineState, families: &mut Families<'_>) -> fmt::Result {
    let queues = queues(shared);
    let each = |count: fn(&IntakeCounters) -> &Counter| {
        queues.iter().map(move |queue| (queue.labels(), count(queue.counters).get()))
    };
    for (name, help, count) in COUNTERS {
        families.counters((name, help), None, each(count))?;
    }
    let received = ("received", "Bytes of these frames on the wire");
    families.counters(received, Some(&Unit::Bytes), each(|of| &of.bytes))?;
    encode_drops(&queues, families)?;
    let held = ("flow_hold", "Duration of a held move");
    let each = queues.iter().map(|queue| (queue.labels(), &*queue.counters.held_ns));
    families.time_histograms(held, each)?;
    let active = ("active_cpus", "CPUs that packets of the queue go to now");
    let each = queues.iter().map(|queue| (queue.labels(), gauge(queue.counters.active_cpus.get())));
    families.gauges(active, None, each)?;
    let polling = ("polling_cpu", "CPU that polls the queue");
    let each = queues
        .iter()
        .filter_map(|queue| Some((queue.labels(), f64::from(shared.polls(queue.queue.0)?.0))));
    families.gauges(polling, None, each)?;
    let imbalance = (
        "load_imbalance",
        "Load of the busiest CPU over the mean, as expected after the last balancing; 0 before it",
    );
    let ratio = |queue: &NamedQueue<'_>| gauge(queue.counters.imbalance_percent.get()) / 100.0;
    let each = queues.iter().map(|queue| (queue.labels(), ratio(queue)));
    families.gauges(imbalance, Some(&Unit::Other("ratio".to_owned())), each)?;
    encode_buffers(shared, &queues, families)
}

/// Adds the drops of each queue, by name. [`DropReason::CpuLost`] is a drop of a CPU.
fn encode_drops(queues: &[NamedQueue<'_>], families: &mut Families<'_>) -> fmt::Result {
    let reasons = DropReason::ALL.into_iter().filter(|reason| *reason != DropReason::CpuLost);
    let reasons: Vec<_> = reasons.collect();
    let drops = queues.iter().flat_map(|queue| {
        reasons.iter().map(|reason| {
            let [device, number] = queue.labels();
            let count = queue.counters.drops[reason.index()].get();
            ([device, number, ("reason", reason.name())], count)
        })
    });
    let dropped = ("packets_dropped", "Frames dropped on the polling CPU, by reason");
    families.counters(dropped, None, drops)
}

fn encode_buffers(
    shared: &EngineState,
    queues: &[NamedQueue<'_>],
    families: &mut Families<'_>,
) -> fmt::Result {
    let size = ("rx_buffer_size", "Size of the receive buffers of a virtio queue");
    let sizes = queues.iter().filter_map(|queue| {
        let buffers = shared.devices().rx_buffers(queue.queue)?;
        Some((queue.labels(), f64::from(buffers.size_bytes())))
    });
    families.gauges(size, Some(&Unit::Bytes), sizes)
}

fn queues(shared: &EngineState) -> Vec<NamedQueue<'_>> {
    let Some(counters) = shared.counters() else { return Vec::new() };
    let of_devices = shared.devices().iter().flat_map(|(device, own)| {
        let first = own.start;
        own.filter_map(move |queue| {
            Some(NamedQueue {
                device,
                number: (queue - first).to_string(),
                queue: RxQueue(queue),
                counters: counters.queues.get(usize::from(queue))?,
            })
        })
    });
    of_devices.collect()
}

/// Adds the links of devices: of interfaces as the kernel reports them now, and of back ends.
fn encode_links(devices: &[MeasuredDevice], families: &mut Families<'_>) -> fmt::Result {
    let links: Vec<_> = devices
        .iter()
        .filter_map(|device| {
            let (link, losses_before) = device.link.as_ref()?;
            // Gone, or not answered for: packets do not pass.
            let status = link.status().ok().flatten();
            Some((device.name.as_str(), status, *losses_before))
        })
        .collect();
    let running =
        ("device_up", "1 if the interface is up and has a carrier, or the back end is connected");
    let each = links.iter().map(|(device, status, _)| {
        let is_running = status.is_some_and(|status| status.state == LinkState::Running);
        ([("device", *device)], f64::from(u8::from(is_running)))
    });
    families.gauges(running, None, each)?;
    let losses = (
        "carrier_losses",
        "Times that the interface lost its carrier, or the back end, during the run",
    );
    let each = links.iter().filter_map(|(device, status, before)| {
        let losses = (*status)?.carrier_losses.wrapping_sub(*before);
        Some(([("device", *device)], u64::from(losses)))
    });
    families.counters(losses, None, each)
}

/// Adds the counters that the kernel, or a driver in this process, keeps for each queue.
pub(crate) fn encode_devices(
    devices: &[MeasuredDevice],
    families: &mut Families<'_>,
) -> fmt::Result {
    let facts =
        devices.iter().map(|device| [("device", device.name.as_str()), ("via", device.via.name())]);
    families.infos(("device", "Devices that packets are received from"), facts)?;
    encode_links(devices, families)?;
    let counts = |is_interface: bool| {
        let devices =
            devices.iter().filter(move |device| device.via.is_interface() == is_interface);
        let each = devices.flat_map(|device| {
            let queues = (0..).zip(&device.counts);
            queues.flat_map(move |(number, counts): (u16, _)| {
                let number = number.to_string();
                counts
                    .iter()
                    .map(move |(name, count)| (device.name.clone(), number.clone(), name, count))
            })
        });
        each.collect::<Vec<_>>()
    };
    let kernel = ("kernel_drops", "Frames that the kernel dropped, by the kernel's names");
    let driver = ("driver_events", "Counters of a driver in this process, by drivers' names");
    for (about, counts) in [(kernel, counts(true)), (driver, counts(false))] {
        let each = counts.iter().map(|(device, number, name, count)| {
            ([("device", device.as_str()), ("queue", number), ("name", name)], *count)
        });
        families.counters(about, None, each)?;
    }
    Ok(())
}
