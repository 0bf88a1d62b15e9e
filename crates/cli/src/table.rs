//! The end of a replay, for people.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use forebay::control::CpuList;
use forebay::replay::{CpuReport, Report};
use indicatif::HumanCount;

/// The whole report as text.
pub(crate) fn render(report: &Report, cpus: &CpuList) -> String {
    let mut text = totals(report);
    text += &format!("\n{}\n", per_cpu(report));
    text += &steering(report, cpus);
    text += &coalescing(report);
    text += &losses(report);
    text += &verdict(report);
    text
}

fn totals(report: &Report) -> String {
    let Report { packets_in, bytes_in, delivered, elapsed_s, pps, .. } = report;
    let gbit = as_f64(*bytes_in) * 8.0 / elapsed_s.max(1e-9) / 1e9;
    format!(
        "{} packets in ({}), {} delivered in {} — {}pps, {gbit:.2} Gbit/s\n",
        grouped(*packets_in),
        bytes(*bytes_in),
        grouped(*delivered),
        seconds(*elapsed_s),
        scaled(*pps),
    )
}

fn per_cpu(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["CPU", "packets", "share", "flows", "busy", "backlog max", "woken"]);
    for cpu in &report.per_cpu {
        table.add_row(row(cpu, report));
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn row(cpu: &CpuReport, report: &Report) -> [String; 7] {
    let busy_s = std::time::Duration::from_nanos(cpu.busy_ns).as_secs_f64();
    [
        cpu.cpu.to_string(),
        grouped(cpu.packets),
        percent(as_f64(cpu.packets), as_f64(report.delivered)),
        grouped(cpu.flows),
        percent(busy_s, report.elapsed_s),
        grouped(cpu.backlog_max),
        grouped(cpu.wakeups),
    ]
}

fn steering(report: &Report, cpus: &CpuList) -> String {
    let steer = &report.steer;
    let shares = report.per_cpu.iter().map(|cpu| cpu.packets);
    let busiest = shares.max().unwrap_or(0);
    let even = as_f64(report.delivered) / as_f64(cpus.cpus().len() as u64).max(1.0);
    let mut text = format!(
        "{} flows, the largest {} of all packets; the busiest CPU has {:.2} times an even share\n",
        grouped(report.flows),
        percent(as_f64(report.largest_flow), as_f64(report.delivered)),
        if even > 0.0 { as_f64(busiest) / even } else { 0.0 },
    );
    if steer.moves + steer.stays + steer.held > 0 {
        text += &format!(
            "{} moves between CPUs; packets held back for one {} times (at most {}); {} packets \
             stayed until their flow could move\n",
            grouped(steer.moves),
            grouped(steer.held),
            nanoseconds(steer.held_max_ns),
            grouped(steer.stays),
        );
    }
    if steer.unsteered > 0 {
        text += &format!("{} packets without a flow hash, not steered\n", grouped(steer.unsteered));
    }
    text
}

fn coalescing(report: &Report) -> String {
    let lro = &report.lro;
    if lro.flushes.values().sum::<u64>() + lro.refused.values().sum::<u64>() == 0 {
        return String::new();
    }
    let mut text = format!(
        "{} frames became {} packets: {:.1} frames and {:.0} bytes each\n",
        grouped(lro.segments_in),
        grouped(lro.packets_out),
        as_f64(lro.segments_in) / as_f64(lro.packets_out).max(1.0),
        lro.bytes_per_packet,
    );
    for (what, counts) in [("not merged", &lro.refused), ("let go", &lro.flushes)] {
        let mut counts: Vec<_> = counts.iter().filter(|(_, count)| **count > 0).collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let counts = counts.iter().map(|(name, count)| format!("{} {name}", grouped(**count)));
        let counts: Vec<_> = counts.collect();
        if !counts.is_empty() {
            text += &format!("  {what}: {}\n", counts.join(", "));
        }
    }
    text
}

fn losses(report: &Report) -> String {
    let mut text = String::new();
    for (reason, count) in report.dropped.iter().filter(|(_, count)| **count > 0) {
        text += &format!("dropped: {} {reason}\n", grouped(*count));
    }
    let parse = &report.parse;
    for (what, count) in [
        ("headers that lie", parse.flawed),
        ("wrong IP checksums", parse.ip_checksum_bad),
        ("wrong TCP or UDP checksums", parse.l4_checksum_bad),
        ("damaged records in the capture, passed over", report.damaged_records),
    ] {
        if count > 0 {
            text += &format!("noticed: {} {what}\n", grouped(count));
        }
    }
    text
}

fn verdict(report: &Report) -> String {
    let order = match (report.reordered, report.order_unchecked) {
        (0, 0) => "order checked, 0 violations".to_owned(),
        (0, unchecked) => format!("order checked but for {} packets", grouped(unchecked)),
        (reordered, _) => format!("ORDER VIOLATED {} times", grouped(reordered)),
    };
    let accounted = report.delivered + report.dropped_in_all() + report.queued;
    let conservation = if accounted == report.packets_in {
        "every frame accounted for".to_owned()
    } else {
        format!("{} FRAMES UNACCOUNTED FOR", report.packets_in.abs_diff(accounted))
    };
    format!("{order}; {conservation}\n")
}

/// As 1,234,567.
fn grouped(number: u64) -> String {
    HumanCount(number).to_string()
}

fn percent(part: f64, whole: f64) -> String {
    format!("{:.1} %", if whole > 0.0 { part / whole * 100.0 } else { 0.0 })
}

fn scaled(number: f64) -> String {
    match number {
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e3 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.1} "),
    }
}

fn bytes(number: u64) -> String {
    indicatif::HumanBytes(number).to_string()
}

fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

fn nanoseconds(ns: u64) -> String {
    match as_f64(ns) {
        n if n >= 1e6 => format!("{:.1} ms", n / 1e6),
        n if n >= 1e3 => format!("{:.1} µs", n / 1e3),
        n => format!("{n:.0} ns"),
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_made_for_reading() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(percent(1.0, 3.0), "33.3 %");
        assert_eq!(percent(1.0, 0.0), "0.0 %");
        assert_eq!(scaled(2_345_678.0), "2.35 M");
        assert_eq!(nanoseconds(1_500), "1.5 µs");
        assert_eq!(seconds(0.0123), "12.3 ms");
    }
}
