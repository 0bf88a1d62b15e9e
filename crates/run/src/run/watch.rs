//! State of a run while it lasts.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_control::Control;
use forebay_device::pcap::FirstFailure;
use forebay_rx::CpuId;
use forebay_rx::counters::{CoalesceCounters, Counter, IntakeCounters};
use forebay_rx::sink::SinkCounters;

use crate::report::dropped;

/// Looks at the counters of a run, and disturbs nobody (promise 7). Cheap to clone; from any thread.
#[derive(Clone)]
pub struct Watch {
    control: Control,
    sinks: Vec<Arc<SinkCounters>>,
    failure: FirstFailure,
}

/// Counters of a run so far. Numbers that belong together may be a moment apart.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Snapshot {
    /// Frames that came in.
    pub packets_in: u64,
    /// Bytes of them on the wire.
    pub bytes_in: u64,
    /// Frames that the kernel dropped before.
    pub kernel_dropped: u64,
    /// Frames delivered.
    pub delivered: u64,
    /// Frames dropped, by the name of the reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Frames that came to coalescing; 0 where it is off.
    pub segments_in: u64,
    /// Packets that they became.
    pub packets_out: u64,
    /// By CPU.
    pub per_cpu: Vec<CpuSnapshot>,
    /// Packets that were sent on.
    pub sent: u64,
    /// Bytes of them.
    pub bytes_sent: u64,
    /// Packets that were to be sent on and could not.
    pub not_sent: u64,
}

/// Counters of one CPU so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuSnapshot {
    /// The CPU.
    pub cpu: CpuId,
    /// Frames it delivered.
    pub packets: u64,
    /// Frames that wait in its backlogs.
    pub queued: u64,
    /// Time for which it was at work.
    pub busy_ns: u64,
}

impl Watch {
    pub(super) fn new(
        control: Control,
        sinks: Vec<Arc<SinkCounters>>,
        failure: FirstFailure,
    ) -> Self {
        Self { control, sinks, failure }
    }

    /// Failure that keeps packets from being written where they are to go, if any: the first such
    /// thing. The run goes on, and counts them.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// State of the run now.
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
            // What has gone first: it must not be more than what came.
            let packets = delivery.frames.get();
            let gone = packets + delivery.lost.get();
            let targets = queues.iter().filter_map(|queue| queue.per_cpu.get(cpu.index()));
            let came: u64 = targets.map(|target| target.enqueued.get()).sum();
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
