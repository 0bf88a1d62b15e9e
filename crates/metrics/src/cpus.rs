//! Families of CPUs.

use std::fmt;
use std::sync::Arc;

use forebay_engine::EngineState;
use forebay_rx::counters::{DeliveryCounters, Histogram, IntakeCounters};
use forebay_rx::{CpuId, DropReason, SteerReason};
use prometheus_client::registry::Unit;

use crate::families::{Families, Label, gauge};

/// CPU of the engine.
struct NamedCpu<'a> {
    cpu: CpuId,
    number: String,
    /// Index in the engine.
    index: usize,
    delivery: &'a DeliveryCounters,
}

impl NamedCpu<'_> {
    fn labels(&self) -> [Label<'_>; 1] {
        [("cpu", &self.number)]
    }

    /// Frames in the CPU's backlogs, of all queues.
    fn queued(&self, queues: &[Arc<IntakeCounters>]) -> u64 {
        // Dequeued frames are read first, so that they are never more than the enqueued ones.
        let gone = self.delivery.frames.get() + self.delivery.lost.get();
        let targets = queues.iter().filter_map(|queue| queue.per_cpu.get(self.cpu.index()));
        let came: u64 = targets.map(|target| target.enqueued()).sum();
        came.saturating_sub(gone)
    }
}

/// Adds the families of all CPUs.
pub(crate) fn encode(shared: &EngineState, families: &mut Families<'_>) -> fmt::Result {
    let Some(counters) = shared.counters() else { return Ok(()) };
    let queues = &counters.queues;
    let cpus = (0..).zip(shared.cpus().cpus()).zip(&counters.cpus);
    let cpus = cpus.map(|((index, &cpu), delivery)| NamedCpu {
        cpu,
        number: cpu.to_string(),
        index,
        delivery,
    });
    let cpus: Vec<_> = cpus.collect();
    encode_delivery(&cpus, families)?;
    encode_times(&cpus, families)?;
    encode_threads(shared, &cpus, families)?;
    encode_reasons(queues, &cpus, families)?;
    let backlog = ("backlog_packets", "Frames that wait in the CPU's backlogs");
    let each = cpus.iter().map(|cpu| (cpu.labels(), gauge(cpu.queued(queues))));
    families.gauges(backlog, None, each)?;
    let peak = ("backlog_peak_packets", "Most packets seen in one backlog of the CPU");
    let each = cpus.iter().map(|cpu| (cpu.labels(), gauge(cpu.delivery.backlog_max.get())));
    families.gauges(peak, None, each)?;
    let refused = ("packets_backlog_refused", "Frames that the CPU's backlogs refused");
    let each = cpus.iter().map(|cpu| {
        let targets = queues.iter().filter_map(|queue| queue.per_cpu.get(cpu.cpu.index()));
        (cpu.labels(), targets.map(|target| target.dropped.get()).sum())
    });
    families.counters(refused, None, each)
}

/// Adds what each CPU delivered, and lost.
fn encode_delivery(cpus: &[NamedCpu<'_>], families: &mut Families<'_>) -> fmt::Result {
    let each = |count: fn(&DeliveryCounters) -> u64| {
        cpus.iter().map(move |cpu| (cpu.labels(), count(cpu.delivery)))
    };
    let delivered = ("packets_delivered", "Frames delivered on the CPU");
    families.counters(delivered, None, each(|of| of.frames.get()))?;
    let bytes = ("delivered", "Bytes delivered; headers of a merged packet count once");
    families.counters(bytes, Some(&Unit::Bytes), each(|of| of.bytes.get()))?;
    let batches = ("batches_delivered", "Batches delivered on the CPU");
    families.counters(batches, None, each(|of| of.batches.get()))?;
    let lost = ("packets_lost", "Frames dropped with a thread of the CPU, by reason");
    let each = cpus.iter().map(|cpu| {
        let [number] = cpu.labels();
        ([number, ("reason", DropReason::CpuLost.name())], cpu.delivery.lost.get())
    });
    families.counters(lost, None, each)
}

/// Adds the distributions of each CPU's deliveries.
fn encode_times(cpus: &[NamedCpu<'_>], families: &mut Families<'_>) -> fmt::Result {
    let each = |of: fn(&DeliveryCounters) -> &Histogram| {
        cpus.iter().map(move |cpu| (cpu.labels(), of(cpu.delivery)))
    };
    let batch = ("batch_packets", "Packets in a batch; a merged one counts once");
    families.number_histograms(batch, each(|of| &of.batch_packets))?;
    let wait = ("backlog_wait", "Wait of a packet from the turn that queued it to the handler");
    families.time_histograms(wait, each(|of| &of.wait_ns))?;
    let handler = ("handler", "Duration of a call of the handler, with coalescing on delivery");
    families.time_histograms(handler, each(|of| &of.handler_ns))?;
    let latency = (
        "delivery_latency",
        "Age of a batch's oldest packet when the handler gets it, from the time of its arrival",
    );
    families.time_histograms(latency, each(|of| &of.latency_ns))
}

/// Adds the reasons for which frames were steered to each CPU.
fn encode_reasons(
    queues: &[Arc<IntakeCounters>],
    cpus: &[NamedCpu<'_>],
    families: &mut Families<'_>,
) -> fmt::Result {
    let steered = ("packets_steered", "Frames put on the CPU's backlogs, by the reason for it");
    let each = cpus.iter().flat_map(|cpu| {
        SteerReason::ALL.into_iter().map(move |reason| {
            let targets = queues.iter().filter_map(|queue| queue.per_cpu.get(cpu.cpu.index()));
            let count = targets.map(|target| target.enqueued_for(reason)).sum();
            let [number] = cpu.labels();
            ([number, ("reason", reason.name())], count)
        })
    });
    families.counters(steered, None, each)
}

/// Adds the work of each CPU's thread.
fn encode_threads(
    shared: &EngineState,
    cpus: &[NamedCpu<'_>],
    families: &mut Families<'_>,
) -> fmt::Result {
    let busy = ("cpu_busy", "Time spent on packets");
    let each = cpus.iter().map(|cpu| (cpu.labels(), shared.busy_ns(cpu.index)));
    families.time_counters(busy, each)?;
    let wakeups = ("cpu_wakeups", "Wake-ups of the CPU's thread");
    let each = cpus.iter().map(|cpu| (cpu.labels(), shared.cpu_waker(cpu.index).wakeups()));
    families.counters(wakeups, None, each)?;
    let squeezed = ("cpu_time_squeezes", "Turns that ran out of budget (time_squeeze)");
    let each = cpus.iter().map(|cpu| (cpu.labels(), shared.squeezed(cpu.index)));
    families.counters(squeezed, None, each)?;
    let online = ("cpu_online", "1 if the CPU runs, 0 if it is out of service");
    let running = shared.settings().cpus;
    let each =
        cpus.iter().map(|cpu| (cpu.labels(), f64::from(u8::from(running.contains(cpu.cpu)))));
    families.gauges(online, None, each)
}
