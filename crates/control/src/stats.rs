//! Counters of each CPU: in the kernel's format, and in a file each.

use std::fmt::Write as _;

use forebay_engine::EngineState;
use forebay_rx::CpuId;

/// Files with the counters of one CPU.
pub(super) const CPU_COUNTERS: [&str; 10] = [
    "processed",
    "dropped",
    "time_squeeze",
    "received_rps",
    "flow_limit_count",
    "backlog_len",
    "backlog_max",
    "cpu_lost",
    "wakeups",
    "busy_ns",
];

/// Counters of one CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CpuStats {
    processed: u64,
    /// Frames that the backlogs of this CPU refused.
    dropped: u64,
    time_squeeze: u64,
    /// Number of wake-ups for packets of another CPU: the kernel's inter-processor interrupts.
    received_rps: u64,
    /// Frames that a flow limit refused on their way to any CPU, while this CPU polled them.
    flow_limit_count: u64,
    backlog_len: u64,
    backlog_max: u64,
    cpu_lost: u64,
    wakeups: u64,
    busy_ns: u64,
}

impl CpuStats {
    pub(super) fn of(cpu: CpuId, shared: &EngineState) -> Self {
        let place = shared.cpus().cpus().binary_search(&cpu).ok();
        let (Some(index), Some(counters)) = (place, shared.counters()) else {
            // Nothing is counted for a CPU outside the engine.
            return Self::default();
        };
        let queues = || counters.queues.iter();
        let targets = || queues().filter_map(|queue| queue.per_cpu.get(cpu.index()));
        let delivery = &counters.cpus[index];
        let waker = shared.cpu_waker(index);
        let gone = delivery.frames.get() + delivery.lost.get();
        let enqueued: u64 = targets().map(|target| target.enqueued()).sum();
        Self {
            processed: delivery.frames.get(),
            dropped: targets().map(|target| target.dropped.get()).sum(),
            time_squeeze: shared.squeezed(index),
            received_rps: waker.wakeups_for_packets(),
            flow_limit_count: shared.flow_limited(index),
            backlog_len: enqueued.saturating_sub(gone),
            backlog_max: delivery.backlog_max.get(),
            cpu_lost: delivery.lost.get(),
            wakeups: waker.wakeups(),
            busy_ns: shared.busy_ns(index),
        }
    }

    /// Value of one of [`CPU_COUNTERS`].
    pub(super) fn named(&self, name: &str) -> u64 {
        match name {
            "processed" => self.processed,
            "dropped" => self.dropped,
            "time_squeeze" => self.time_squeeze,
            "received_rps" => self.received_rps,
            "flow_limit_count" => self.flow_limit_count,
            "backlog_len" => self.backlog_len,
            "backlog_max" => self.backlog_max,
            "cpu_lost" => self.cpu_lost,
            "wakeups" => self.wakeups,
            _ => self.busy_ns,
        }
    }

    /// Line of `/proc/net/softnet_stat` (`softnet_seq_show` in net/core/net-procfs.c): fifteen
    /// numbers of 32 bits.
    fn softnet_line(&self, cpu: CpuId) -> String {
        let columns = [
            self.processed,
            self.dropped,
            self.time_squeeze,
            0,
            0,
            0,
            0,
            0,
            0, // once cpu_collision
            self.received_rps,
            self.flow_limit_count,
            self.backlog_len,
            cpu.0.into(),
            self.backlog_len, // input_pkt_queue: the rings
            0,                // process_queue: none beside the handler's batch
        ];
        let mut line = String::new();
        for (place, column) in columns.into_iter().enumerate() {
            let space = if place == 0 { "" } else { " " };
            // Writing to a string cannot fail.
            let _ = write!(line, "{space}{:08x}", column & u64::from(u32::MAX));
        }
        line + "\n"
    }
}

/// `/proc/net/softnet_stat`: a line for each running CPU.
pub(super) fn softnet_stat(shared: &EngineState) -> String {
    let running = shared.settings().cpus;
    let lines = running.cpus().iter().map(|&cpu| CpuStats::of(cpu, shared).softnet_line(cpu));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softnet_stat_line_has_fifteen_columns() {
        let stats = CpuStats {
            processed: 0x1_0000_00ff,
            dropped: 2,
            time_squeeze: 3,
            received_rps: 10,
            flow_limit_count: 11,
            backlog_len: 12,
            ..CpuStats::default()
        };
        let zeros = "00000000 ".repeat(6);
        assert_eq!(
            stats.softnet_line(CpuId(13)),
            format!(
                "000000ff 00000002 00000003 {zeros}0000000a 0000000b 0000000c 0000000d 0000000c \
                 00000000\n"
            )
        );
    }
}
