//! The end of a run.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use forebay::control::CpuList;
use forebay::device::Via;
use forebay::run::{DeviceReport, Report, SentReport, StoppedBy};

use super::figures::{bytes, grouped};
use super::path;

/// The whole report as text.
pub(crate) fn render(report: &Report, cpus: &CpuList) -> String {
    let mut text = path::totals(&report.path);
    text += &format!("\n{}\n\n{}\n", devices(&report.devices), path::per_cpu(&report.path));
    if let (Some(flows), Some(largest_flow)) = (report.flows, report.largest_flow) {
        text += &path::flows(&report.path, cpus, flows, largest_flow);
    }
    text += &path::steering(&report.path);
    text += &path::coalescing(&report.path);
    text += &report.sent.iter().map(sent).collect::<String>();
    text += &path::losses(&report.path);
    if report.kernel_dropped > 0 {
        text += &format!("dropped by the kernel before: {}\n", grouped(report.kernel_dropped));
    }
    text += &verdict(report);
    text
}

/// What came by each queue of each device.
fn devices(devices: &[DeviceReport]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let has_driver = devices.iter().any(|device| device.via == Via::VhostUser.name());
    let dropped = if has_driver { "dropped by kernel or driver" } else { "dropped by the kernel" };
    table.set_header(["device", "via", "queue", "packets", dropped]);
    for device in devices {
        let facts = device.facts.iter().map(|(name, value)| format!(", {name}: {value}"));
        let via = device.via.to_owned() + &facts.collect::<String>();
        for queue in &device.queues {
            table.add_row([
                device.name.clone(),
                via.clone(),
                queue.rx_queue.to_string(),
                grouped(queue.packets),
                named(queue.kernel_dropped.iter()),
            ]);
        }
    }
    for column in table.column_iter_mut().skip(2).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn sent(sent: &SentReport) -> String {
    let SentReport { to, packets, frames, bytes: sent_bytes, dropped, .. } = sent;
    let mut text = format!("{} packets to {to}", grouped(*packets));
    if frames != packets {
        text += &format!(" ({} frames)", grouped(*frames));
    }
    text += &format!(", {}", bytes(*sent_bytes));
    if dropped.values().any(|count| *count > 0) {
        text += &format!("; not sent: {}", named(dropped.iter()));
    }
    text + "\n"
}

/// Counts that are not zero, with their names.
fn named<'a>(counts: impl Iterator<Item = (&'a &'static str, &'a u64)>) -> String {
    let counts = counts.filter(|(_, count)| **count > 0);
    counts.map(|(name, count)| format!("{} {name}", grouped(*count))).collect::<Vec<_>>().join(", ")
}

fn verdict(report: &Report) -> String {
    let order = match (report.reordered, report.order_unchecked) {
        (Some(reordered), Some(unchecked)) => path::order(reordered, unchecked),
        _ => "order not checked (--check)".to_owned(),
    };
    let ended = match report.stopped_by {
        StoppedBy::Request => "ended when asked",
        StoppedBy::Duration => "ended when its time was over",
        StoppedBy::Failure => "ENDED BY A FAILURE",
        StoppedBy::Sources => "ended when nothing more came",
    };
    format!("{order}; {}; {ended}\n", path::conservation(&report.path))
}
