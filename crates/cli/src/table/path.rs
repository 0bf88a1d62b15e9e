//! Tables about the path.

use std::time::Duration;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use forebay_run::report::{CpuReport, PathReport};
use forebay_sys::cpu_list::CpuList;

use super::figures::{as_f64, bytes, counted, grouped, nanoseconds, percent, scaled, seconds};

/// Totals and rates.
pub(super) fn totals(path: &PathReport) -> String {
    let PathReport { packets_in, bytes_in, delivered, elapsed_s, pps, .. } = path;
    let gbit = as_f64(*bytes_in) * 8.0 / elapsed_s.max(1e-9) / 1e9;
    format!(
        "{} in ({}), {} delivered in {} — {}pps, {gbit:.2} Gbit/s\n",
        counted(*packets_in, "packet"),
        bytes(*bytes_in),
        grouped(*delivered),
        seconds(*elapsed_s),
        scaled(*pps),
    )
}

/// Work of each CPU; with its flows if the run distinguished flows.
pub(super) fn per_cpu(path: &PathReport) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let has_flows = path.per_cpu.iter().any(|cpu| cpu.flows.is_some());
    let header = ["CPU", "packets", "share", "flows", "busy", "backlog max", "woken"];
    let is_shown = |column: &usize| has_flows || header[*column] != "flows";
    let columns: Vec<_> = (0..header.len()).filter(is_shown).collect();
    table.set_header(columns.iter().map(|&column| header[column]));
    for cpu in &path.per_cpu {
        let row = row(cpu, path);
        table.add_row(columns.iter().map(|&column| row[column].clone()));
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn row(cpu: &CpuReport, path: &PathReport) -> [String; 7] {
    let busy_s = Duration::from_nanos(cpu.busy_ns).as_secs_f64();
    [
        cpu.cpu.to_string(),
        grouped(cpu.packets),
        percent(as_f64(cpu.packets), as_f64(path.delivered)),
        cpu.flows.map(grouped).unwrap_or_default(),
        percent(busy_s, path.elapsed_s),
        grouped(cpu.backlog_max),
        grouped(cpu.wakeups),
    ]
}

/// Number of flows, and how evenly they are spread over `cpus`.
pub(super) fn flows(path: &PathReport, cpus: &CpuList, flows: u64, largest_flow: u64) -> String {
    let shares = path.per_cpu.iter().map(|cpu| cpu.packets);
    let busiest = shares.max().unwrap_or(0);
    let even = as_f64(path.delivered) / as_f64(cpus.cpus().len() as u64).max(1.0);
    format!(
        "{}, the largest {} of all packets; the busiest CPU has {:.2} times an even share\n",
        counted(flows, "flow"),
        percent(as_f64(largest_flow), as_f64(path.delivered)),
        if even > 0.0 { as_f64(busiest) / even } else { 0.0 },
    )
}

/// Moves between CPUs, if there were any.
pub(super) fn steering(path: &PathReport) -> String {
    let steer = &path.steer;
    let mut text = String::new();
    if steer.moves + steer.stays + steer.held > 0 {
        text += &format!(
            "{} between CPUs; packets held back for one {} (at most {}); {} stayed until their flow \
             could move\n",
            counted(steer.moves, "move"),
            counted(steer.held, "time"),
            nanoseconds(steer.held_max_ns),
            counted(steer.stays, "packet"),
        );
    }
    if steer.balanced > 0 {
        let [before, after] = steer.imbalance_percent;
        text += &format!(
            "{} assigned by load: the busiest CPU had {before} % of the mean, and has {after} %\n",
            counted(steer.balanced, "hash range"),
        );
    }
    if steer.unsteered > 0 {
        let packets = counted(steer.unsteered, "packet");
        text += &format!("{packets} without a flow hash, not steered\n");
    }
    text
}

/// Results of coalescing, if enabled.
pub(super) fn coalescing(path: &PathReport) -> String {
    let lro = &path.lro;
    if lro.flushes.values().sum::<u64>() + lro.refused.values().sum::<u64>() == 0 {
        return String::new();
    }
    let mut text = format!(
        "{} became {}: {:.1} frames and {:.0} bytes each\n",
        counted(lro.segments_in, "frame"),
        counted(lro.packets_out, "packet"),
        as_f64(lro.segments_in) / as_f64(lro.packets_out).max(1.0),
        lro.bytes_per_packet,
    );
    for (what, counts) in [("not merged", &lro.refused), ("flushed", &lro.flushes)] {
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

/// Drops, and flaws found by parsing.
pub(super) fn losses(path: &PathReport) -> String {
    let mut text = String::new();
    for (reason, count) in path.dropped.iter().filter(|(_, count)| **count > 0) {
        text += &format!("dropped: {} {reason}\n", grouped(*count));
    }
    let parse = &path.parse;
    for (what, count) in [
        ("inconsistent headers", parse.flawed),
        ("wrong IP checksums", parse.ip_checksum_bad),
        ("wrong TCP or UDP checksums", parse.l4_checksum_bad),
        ("checksums left to a device, completed", parse.checksums_completed),
    ] {
        if count > 0 {
            text += &format!("noticed: {} {what}\n", grouped(count));
        }
    }
    text
}

/// Rows that the trace could not take, if any.
pub(super) fn trace_losses(rows: Option<u64>) -> String {
    let lost = rows.filter(|rows| *rows > 0);
    lost.map_or_else(String::new, |rows| {
        format!("{} of the trace could not be written\n", counted(rows, "row"))
    })
}

/// Verdict of the order check.
pub(super) fn order(reordered: u64, unchecked: u64) -> String {
    match (reordered, unchecked) {
        (0, 0) => "order checked, 0 violations".to_owned(),
        (0, unchecked) => format!("order checked but for {}", counted(unchecked, "packet")),
        (reordered, _) => format!("ORDER VIOLATED {}", counted(reordered, "time")),
    }
}

/// Verdict on the conservation of frames.
pub(super) fn conservation(path: &PathReport) -> String {
    match path.unaccounted() {
        0 => "every frame accounted for".to_owned(),
        frames => format!("{} FRAMES UNACCOUNTED FOR", grouped(frames)),
    }
}
