//! Status line of a live run, on standard error, if that is a terminal.

use std::cmp::Reverse;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use forebay_run::run::{Snapshot, Watch};
use forebay_sys::error::Result;
use indicatif::{ProgressBar, ProgressStyle};

use crate::table::figures::{as_f64, grouped, percent, scaled, seconds};
use crate::ticker::Ticker;

/// Period of the status line.
const STATUS_PERIOD: Duration = Duration::from_millis(500);

/// Upper bound on the CPUs shown: the busiest ones.
const CPUS_SHOWN_MAX: usize = 8;

/// The status line.
pub(super) struct Status {
    bar: ProgressBar,
    ticker: Option<Ticker>,
}

impl Status {
    pub(super) fn show(watch: Watch) -> Result<Self> {
        if !io::stderr().is_terminal() {
            return Ok(Self { bar: ProgressBar::hidden(), ticker: None });
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
            bar.set_style(style);
        }
        let (shown, began) = (bar.clone(), Instant::now());
        let mut before = (began, watch.look());
        let ticker = Ticker::every(STATUS_PERIOD, "shows the status line", move || {
            let now = (Instant::now(), watch.look());
            let (lasted, passed) = (now.0 - began, now.0 - before.0);
            shown.set_message(line(lasted, passed, &before.1, &now.1));
            before = now;
        })?;
        Ok(Self { bar, ticker: Some(ticker) })
    }

    pub(super) fn finish(self) {
        drop(self.ticker);
        self.bar.finish_and_clear();
    }
}

/// The status line, with rates between two snapshots taken `passed` apart.
fn line(lasted: Duration, passed: Duration, before: &Snapshot, now: &Snapshot) -> String {
    let passed_s = passed.as_secs_f64().max(1e-9);
    let grown = |count: fn(&Snapshot) -> u64| count(now).saturating_sub(count(before));
    let a_second = |count| scaled(as_f64(grown(count)) / passed_s);
    let mut parts = vec![
        seconds(lasted.as_secs_f64()),
        format!("{}pps", a_second(|at| at.packets_in)),
        format!("{}bit/s in", a_second(|at| at.bytes_in * 8)),
        shares(before, now),
        format!("{} queued", grouped(now.per_cpu.iter().map(|cpu| cpu.queued).sum())),
    ];
    let (segments, packets) = (grown(|at| at.segments_in), grown(|at| at.packets_out));
    if packets > 0 {
        parts.push(format!("merged {:.1}:1", as_f64(segments) / as_f64(packets)));
    }
    if now.sent > 0 {
        parts.push(format!("{}packets/s out", a_second(|at| at.sent)));
    }
    let dropped = now.dropped.iter().filter(|(_, count)| **count > 0);
    let dropped = dropped.map(|(reason, count)| format!("{} {reason}", grouped(*count)));
    let others = [(now.kernel_dropped, "kernel"), (now.not_sent, "not sent")];
    let others = others.into_iter().filter(|(count, _)| *count > 0);
    let others = others.map(|(count, what)| format!("{} {what}", grouped(count)));
    let dropped: Vec<_> = dropped.chain(others).collect();
    if !dropped.is_empty() {
        parts.push(format!("dropped: {}", dropped.join(", ")));
    }
    parts.join("  ")
}

/// Share of packets that each CPU delivered.
fn shares(before: &Snapshot, now: &Snapshot) -> String {
    let earlier = before.per_cpu.iter().map(|cpu| cpu.packets).chain(std::iter::repeat(0));
    let shares = now.per_cpu.iter().zip(earlier);
    let shares = shares.map(|(cpu, earlier)| (cpu.cpu, cpu.packets.saturating_sub(earlier)));
    let mut shares: Vec<_> = shares.collect();
    let all: u64 = shares.iter().map(|(_, packets)| packets).sum();
    shares.sort_by_key(|(_, packets)| Reverse(*packets));
    let more = if shares.len() > CPUS_SHOWN_MAX { " …" } else { "" };
    shares.truncate(CPUS_SHOWN_MAX);
    shares.sort_by_key(|(cpu, _)| *cpu);
    let share = |packets| percent(as_f64(packets), as_f64(all));
    let shares = shares.iter().map(|(cpu, packets)| format!("cpu{cpu} {}", share(*packets)));
    shares.collect::<Vec<_>>().join(" ") + more
}

#[cfg(test)]
mod tests {
    use forebay_run::run::CpuSnapshot;
    use forebay_rx::CpuId;

    use super::*;

    #[test]
    fn line_reports_since_last_one() {
        let cpu =
            |cpu, packets, queued| CpuSnapshot { cpu: CpuId(cpu), packets, queued, busy_ns: 0 };
        let before = Snapshot {
            packets_in: 1000,
            bytes_in: 60_000,
            per_cpu: vec![cpu(0, 900, 0), cpu(1, 100, 0)],
            ..Snapshot::default()
        };
        let now = Snapshot {
            packets_in: 3000,
            bytes_in: 185_000,
            kernel_dropped: 7,
            dropped: [("backlog_full", 5), ("no_buffer", 0)].into(),
            per_cpu: vec![cpu(0, 1900, 10), cpu(1, 1100, 2)],
            segments_in: 2000,
            packets_out: 200,
            sent: 50,
            ..before.clone()
        };
        let text = line(Duration::from_secs(90), Duration::from_millis(500), &before, &now);
        assert_eq!(
            text,
            "90.00 s  4.0 kpps  2.00 Mbit/s in  cpu0 50.0 % cpu1 50.0 %  12 queued  merged 10.0:1  \
             100.0 packets/s out  dropped: 5 backlog_full, 7 kernel"
        );
    }
}
