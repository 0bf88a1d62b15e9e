//! State of a run while it lasts.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_control::Control;
use forebay_rx::CpuId;
use forebay_rx::counters::{CoalesceCounters, Counter, IntakeCounters};
use forebay_rx::sink::SinkCounters;
use forebay_sys::failure::FirstFailure;

use crate::report::dropped;

/// Reader of a run's counters, which disturbs no thread of the run (promise 7). Cheap to clone;
/// usable from any thread.
#[derive(Clone)]
pub struct Watch {
    control: Control,
    sinks: Vec<Arc<SinkCounters>>,
    failures: Vec<FirstFailure>,
}

/// Counters of a run so far. Related numbers may be a moment apart.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Snapshot {
    /// Number of frames received.
    pub packets_in: u64,
    /// Number of bytes of these frames on the wire.
    pub bytes_in: u64,
    /// Number of frames that the kernel dropped before they could be received.
    pub kernel_dropped: u64,
    /// Number of frames delivered.
    pub delivered: u64,
    /// Number of frames dropped, by the name of the reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Number of frames that entered coalescing; 0 while it is off.
    pub segments_in: u64,
    /// Number of packets that left coalescing.
    pub packets_out: u64,
    /// Counters of each CPU.
    pub per_cpu: Vec<CpuSnapshot>,
    /// Number of packets that destinations took.
    pub sent: u64,
    /// Number of bytes of these packets.
    pub bytes_sent: u64,
    /// Number of packets that destinations did not take.
    pub not_sent: u64,
}

/// Counters of one CPU so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuSnapshot {
    /// The CPU.
    pub cpu: CpuId,
    /// Number of frames that the CPU delivered.
    pub packets: u64,
    /// Number of frames that wait in the CPU's backlogs.
    pub queued: u64,
    /// Busy time, in nanoseconds.
    pub busy_ns: u64,
}

impl Watch {
    pub(super) fn new(
        control: Control,
        sinks: Vec<Arc<SinkCounters>>,
        failures: Vec<FirstFailure>,
    ) -> Self {
        Self { control, sinks, failures }
    }

    /// First failure of each part that can fail during the run, each set as soon as it happens:
    /// captures, the trace, devices.
    #[must_use]
    pub fn failures(&self) -> &[FirstFailure] {
        &self.failures
    }

    /// Current state of the run.
    #[must_use]
    pub fn look(&self) -> Snapshot {
        let shared = self.control.state();
        let Some(counters) = shared.counters() else { return Snapshot::default() };
        let (queues, cpus) = (&counters.queues, &counters.cpus);
        let sum = |counter: fn(&IntakeCounters) -> &Counter| -> u64 {
            queues.iter().map(|queue| counter(queue).get()).sum()
        };
        let merged = |counter: fn(&CoalesceCounters) -> &Counter| -> u64 {
            let arriving = queues.iter().map(|queue| counter(&queue.coalesce).get());
            arriving.chain(cpus.iter().map(|cpu| counter(&cpu.coalesce).get())).sum()
        };
        let sent = |count: fn(&SinkCounters) -> u64| self.sinks.iter().map(|at| count(at)).sum();
        let numbered = (0..).zip(shared.cpus().cpus()).zip(cpus);
        let per_cpu = numbered.map(|((index, &cpu), delivery)| {
            // Dequeued packets are read first, so that they are never more than the enqueued ones.
            let packets = delivery.frames.get();
            let gone = packets + delivery.lost.get();
            let targets = queues.iter().filter_map(|queue| queue.per_cpu.get(cpu.index()));
            let came: u64 = targets.map(|target| target.enqueued()).sum();
            let queued = came.saturating_sub(gone);
            CpuSnapshot { cpu, packets, queued, busy_ns: shared.busy_ns(index) }
        });
        let per_cpu: Vec<_> = per_cpu.collect();
        Snapshot {
            packets_in: sum(|queue| &queue.frames),
            bytes_in: sum(|queue| &queue.bytes),
            kernel_dropped: sum(|queue| &queue.kernel_dropped),
            delivered: per_cpu.iter().map(|cpu| cpu.packets).sum(),
            dropped: dropped(queues, cpus.iter().map(|cpu| cpu.lost.get()).sum()),
            segments_in: merged(|coalesce| &coalesce.segments_in),
            packets_out: merged(|coalesce| &coalesce.packets_out),
            per_cpu,
            sent: sent(SinkCounters::packets),
            bytes_sent: sent(SinkCounters::bytes),
            not_sent: sent(SinkCounters::dropped_in_all),
        }
    }
}
