//! Counters that a run reports, whatever its sources.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_engine::{CpuOutcome, Outcome};
use forebay_rx::DropReason;
use forebay_rx::coalesce::{FlushReason, MergeRefusal};
use forebay_rx::counters::{CoalesceCounters, Counter, IntakeCounters};
use serde::Serialize;

use crate::order_check::FlowOrder;

/// Work of the path on the frames of a run.
#[derive(Debug, Serialize)]
pub struct PathReport {
    /// Number of frames that the sources gave.
    pub packets_in: u64,
    /// Number of bytes of these frames on the wire.
    pub bytes_in: u64,
    /// Number of frames handed to the application, merged or not, and processed.
    pub delivered: u64,
    /// Number of frames dropped, by the name of the reason.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Number of packets still queued or held at the end.
    pub queued: u64,
    /// Duration from the first poll to the last packet, in seconds.
    pub elapsed_s: f64,
    /// Frames delivered per second.
    pub pps: f64,
    /// CPU time of the whole process during the run, in seconds.
    pub cpu_s: f64,
    /// Work of each CPU.
    pub per_cpu: Vec<CpuReport>,
    /// Counts of steering.
    pub steer: SteerReport,
    /// Counts of coalescing.
    pub lro: LroReport,
    /// Counts of parsing.
    pub parse: ParseReport,
    /// Number of frames not returned to their owners.
    pub frames_away: usize,
}

/// Work of one CPU.
#[derive(Debug, Serialize)]
pub struct CpuReport {
    /// The CPU.
    pub cpu: u16,
    /// Number of frames that the CPU delivered, merged or not.
    pub packets: u64,
    /// Number of bytes of the packets; a merged packet's headers count once.
    pub bytes: u64,
    /// Number of flows whose last packet the CPU delivered, if order was checked.
    pub flows: Option<u64>,
    /// Busy time, in nanoseconds.
    pub busy_ns: u64,
    /// Number of times the CPU was woken.
    pub wakeups: u64,
    /// Largest number of packets seen waiting in one of the CPU's backlogs.
    pub backlog_max: u64,
    /// Number of packets put on the CPU's backlogs.
    pub enqueued: u64,
    /// Number of packets that the CPU's backlogs refused.
    pub dropped: u64,
}

/// Counts of steering.
#[derive(Debug, Serialize)]
pub struct SteerReport {
    /// Number of times that a flow-table slot changed its CPU.
    pub moves: u64,
    /// Number of packets that followed their predecessors to a CPU that their flow was to leave.
    pub stays: u64,
    /// Number of held moves.
    pub held: u64,
    /// Longest duration of a held move, in nanoseconds.
    pub held_max_ns: u64,
    /// Number of packets without a hash.
    pub unsteered: u64,
    /// Number of hash ranges assigned to another CPU because of the load.
    pub balanced: u64,
    /// Load of the busiest CPU in percent of the mean: the maximum before hash ranges were
    /// reassigned, and the value expected after the last measurement of loads; 0 without one.
    pub imbalance_percent: [u64; 2],
}

/// Counts of coalescing. While coalescing is off, every frame is a packet.
#[derive(Debug, Serialize)]
pub struct LroReport {
    /// Number of frames that entered coalescing.
    pub segments_in: u64,
    /// Number of packets that left coalescing.
    pub packets_out: u64,
    /// Mean number of bytes of these packets, headers counted once.
    pub bytes_per_packet: f64,
    /// Number of frames that were not added to a packet, by the name of the reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Number of packets that were held for more segments and flushed, by the name of the reason.
    pub flushes: BTreeMap<&'static str, u64>,
}

/// Counts of parsing.
#[derive(Debug, Serialize)]
pub struct ParseReport {
    /// Number of frames with inconsistent headers.
    pub flawed: u64,
    /// Number of frames with a wrong IPv4 header checksum.
    pub ip_checksum_bad: u64,
    /// Number of frames with a wrong TCP or UDP checksum.
    pub l4_checksum_bad: u64,
    /// Number of frames whose TCP or UDP checksum was left to a device, and was completed here.
    pub checksums_completed: u64,
}

impl PathReport {
    /// Makes a report. `flows` is the result of the order check, if there was one, and `cpu_ns` the
    /// CPU time of the process.
    pub(crate) fn of<H>(outcome: &Outcome<H>, flows: Option<&FlowOrder>, cpu_ns: u64) -> Self {
        let queues = &outcome.queues;
        let sum = |counter: fn(&IntakeCounters) -> &Counter| -> u64 {
            queues.iter().map(|queue| counter(queue).get()).sum()
        };
        let max = |counter: fn(&IntakeCounters) -> &Counter| -> u64 {
            queues.iter().map(|queue| counter(queue).get()).max().unwrap_or(0)
        };
        let per_cpu = outcome.cpus.iter().map(|cpu| {
            let flows = flows.map(|flows| flows.per_cpu.get(cpu.cpu.index()).copied());
            CpuReport::of(cpu, queues, flows.map(Option::unwrap_or_default))
        });
        let per_cpu: Vec<_> = per_cpu.collect();
        let delivered = per_cpu.iter().map(|cpu| cpu.packets).sum();
        let elapsed_s = seconds(outcome.elapsed_ns);
        Self {
            packets_in: sum(|queue| &queue.frames),
            bytes_in: sum(|queue| &queue.bytes),
            delivered,
            dropped: dropped(queues, outcome.cpus.iter().map(|cpu| cpu.delivery.lost.get()).sum()),
            queued: outcome.queued,
            elapsed_s,
            pps: if elapsed_s > 0.0 { as_f64(delivered) / elapsed_s } else { 0.0 },
            cpu_s: seconds(cpu_ns),
            per_cpu,
            steer: SteerReport {
                moves: sum(|queue| &queue.moves),
                stays: sum(|queue| &queue.stays),
                held: sum(|queue| &queue.holds),
                held_max_ns: max(|queue| &queue.held_max_ns),
                unsteered: sum(|queue| &queue.unsteered),
                balanced: sum(|queue| &queue.balanced),
                imbalance_percent: [
                    max(|queue| &queue.imbalance_max_percent),
                    max(|queue| &queue.imbalance_percent),
                ],
            },
            lro: LroReport::of(queues, &outcome.cpus, delivered),
            parse: ParseReport {
                flawed: sum(|queue| &queue.flawed),
                ip_checksum_bad: sum(|queue| &queue.ip_checksum_bad),
                l4_checksum_bad: sum(|queue| &queue.l4_checksum_bad),
                checksums_completed: sum(|queue| &queue.checksums_completed),
            },
            frames_away: outcome.frames_away,
        }
    }

    /// Number of frames dropped for any reason.
    #[must_use]
    pub fn dropped_in_all(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// Difference between the frames that the sources gave and those that are accounted for.
    #[must_use]
    pub fn unaccounted(&self) -> u64 {
        self.packets_in.abs_diff(self.accounted())
    }

    /// Promises that this run broke, in words; none if all is well.
    #[must_use]
    pub fn broken_promises(&self) -> Vec<String> {
        let mut broken = Vec::new();
        if self.unaccounted() > 0 {
            let (came, accounted) = (self.packets_in, self.accounted());
            broken.push(format!(
                "conservation: {came} frames came in, {accounted} are accounted for"
            ));
        }
        if self.frames_away > 0 {
            broken.push(format!("owner return: {} frames did not come home", self.frames_away));
        }
        broken
    }

    fn accounted(&self) -> u64 {
        self.delivered + self.dropped_in_all() + self.queued
    }

    /// Text of a trace's `counters.json`.
    pub(crate) fn counters_json(&self) -> String {
        let per_cpu = self.per_cpu.iter().map(|cpu| {
            serde_json::json!({
                "cpu": cpu.cpu,
                "enq": cpu.enqueued,
                "deq": cpu.packets,
                "drop": cpu.dropped,
            })
        });
        let counters = serde_json::json!({
            "rx_frames": self.packets_in,
            "delivered": self.delivered,
            "drops": self.dropped,
            "counter_bits": 32,
            "per_cpu": per_cpu.collect::<Vec<_>>(),
            "rfs": {
                "moves": self.steer.moves,
                "deferred": self.steer.stays,
                "held": self.steer.held,
                "held_max_ns": self.steer.held_max_ns,
            },
        });
        format!("{counters}\n")
    }
}

impl LroReport {
    fn of(queues: &[Arc<IntakeCounters>], cpus: &[CpuOutcome], delivered: u64) -> Self {
        let arriving = queues.iter().map(|queue| &*queue.coalesce);
        let all: Vec<_> = arriving.chain(cpus.iter().map(|cpu| &*cpu.delivery.coalesce)).collect();
        let sum = |counter: &dyn Fn(&CoalesceCounters) -> &Counter| -> u64 {
            all.iter().map(|coalesce| counter(coalesce).get()).sum()
        };
        let segments_in = sum(&|coalesce| &coalesce.segments_in);
        let (segments_in, packets_out, bytes_out) = if segments_in == 0 {
            let bytes = cpus.iter().map(|cpu| cpu.delivery.bytes.get()).sum();
            (delivered, delivered, bytes)
        } else {
            let packets_out = sum(&|coalesce| &coalesce.packets_out);
            (segments_in, packets_out, sum(&|coalesce| &coalesce.bytes_out))
        };
        let refused = MergeRefusal::ALL
            .into_iter()
            .map(|refusal| (refusal.name(), sum(&|coalesce| &coalesce.refused[refusal.index()])));
        let flushes = FlushReason::ALL
            .into_iter()
            .map(|reason| (reason.name(), sum(&|coalesce| &coalesce.flushes[reason.index()])));
        Self {
            segments_in,
            packets_out,
            bytes_per_packet: as_f64(bytes_out) / as_f64(packets_out).max(1.0),
            refused: refused.collect(),
            flushes: flushes.collect(),
        }
    }
}

impl CpuReport {
    fn of(cpu: &CpuOutcome, queues: &[Arc<IntakeCounters>], flows: Option<u64>) -> Self {
        let targets = || queues.iter().filter_map(|queue| queue.per_cpu.get(cpu.cpu.index()));
        Self {
            cpu: cpu.cpu.0,
            packets: cpu.delivery.frames.get(),
            bytes: cpu.delivery.bytes.get(),
            flows,
            busy_ns: cpu.busy_ns,
            wakeups: cpu.wakeups,
            backlog_max: cpu.delivery.backlog_max.get(),
            enqueued: targets().map(|target| target.enqueued()).sum(),
            dropped: targets().map(|target| target.dropped.get()).sum(),
        }
    }
}

/// Number of frames dropped, by the name of the reason; `cpu_lost` of them with a CPU's thread.
pub(crate) fn dropped(
    queues: &[Arc<IntakeCounters>],
    cpu_lost: u64,
) -> BTreeMap<&'static str, u64> {
    let count = |reason: DropReason| {
        let queues = queues.iter().map(|queue| queue.drops[reason.index()].get());
        let lost = if reason == DropReason::CpuLost { cpu_lost } else { 0 };
        (reason.name(), queues.sum::<u64>() + lost)
    };
    DropReason::ALL.into_iter().map(count).collect()
}

fn seconds(ns: u64) -> f64 {
    std::time::Duration::from_nanos(ns).as_secs_f64()
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn as_f64(count: u64) -> f64 {
    count as f64
}
