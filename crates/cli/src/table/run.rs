//! Final report of a run as text.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use forebay_device::Via;
use forebay_run::run::{DeviceReport, RunReport, SentReport, StoppedBy};
use forebay_sys::cpu_list::CpuList;

use super::figures::{bytes, counted, grouped};
use super::path;

/// The whole report as text.
pub(crate) fn render(report: &RunReport, cpus: &CpuList) -> String {
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
    text += &path::trace_losses(report.trace_rows_lost);
    text += &verdict(report);
    text
}

/// Packets received by each queue of each device. The driver's own counts are not further drops:
/// its frames are among the packets.
fn devices(devices: &[DeviceReport]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let is_driven = |device: &DeviceReport| device.via == Via::VhostUser.name();
    let has_kernel = devices.iter().any(|device| !is_driven(device));
    let kernel = has_kernel.then_some("dropped by the kernel");
    let driver = devices.iter().any(is_driven).then_some("counted by our driver");
    let columns = ["device", "via", "queue", "packets"].into_iter().chain(kernel).chain(driver);
    table.set_header(columns);
    for device in devices {
        let facts = device.facts.iter().map(|(name, value)| format!(", {name}: {value}"));
        let via = device.via.to_owned() + &facts.collect::<String>();
        for queue in &device.queues {
            let (rx_queue, packets) = (queue.rx_queue.to_string(), grouped(queue.packets));
            let counts = [(kernel, &queue.kernel_dropped), (driver, &queue.driver)];
            let counts = counts.into_iter().filter(|(column, _)| column.is_some());
            let counts = counts.map(|(_, counts)| named(counts.iter()));
            let row = [device.name.clone(), via.clone(), rx_queue, packets];
            table.add_row(row.into_iter().chain(counts));
        }
    }
    for column in table.column_iter_mut().skip(2).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

fn sent(sent: &SentReport) -> String {
    let SentReport { to, packets, frames, bytes: sent_bytes, dropped, .. } = sent;
    let mut text = format!("{} to {to}", counted(*packets, "packet"));
    if frames != packets {
        text += &format!(" ({})", counted(*frames, "frame"));
    }
    text += &format!(", {}", bytes(*sent_bytes));
    if dropped.values().any(|count| *count > 0) {
        text += &format!("; not sent: {}", named(dropped.iter()));
    }
    text + "\n"
}

/// Non-zero counts, with their names.
fn named<'a>(counts: impl Iterator<Item = (&'a &'static str, &'a u64)>) -> String {
    let counts = counts.filter(|(_, count)| **count > 0);
    counts.map(|(name, count)| format!("{} {name}", grouped(*count))).collect::<Vec<_>>().join(", ")
}

fn verdict(report: &RunReport) -> String {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use forebay_run::run::QueueReport;

    use super::*;

    fn device(via: Via, packets: u64, counts: &[(&'static str, u64)]) -> DeviceReport {
        let counts: BTreeMap<_, _> = counts.iter().copied().collect();
        let (kernel_dropped, driver) = match via.is_interface() {
            true => (counts, BTreeMap::new()),
            false => (BTreeMap::new(), counts),
        };
        DeviceReport {
            name: "d0".to_owned(),
            via: via.name(),
            queues: vec![QueueReport { rx_queue: 0, packets, kernel_dropped, driver }],
            facts: BTreeMap::new(),
            interface: None,
        }
    }

    #[test]
    fn promise_2_driver_counts_are_no_kernel_drops() {
        let kernel = device(Via::AfPacket, 5, &[("tp_drops", 2)]);
        let driven = device(Via::VhostUser, 9, &[("rx_bad_ids", 1200), ("rx_length_errors", 0)]);
        let lines = |devices: &[DeviceReport]| {
            let table = super::devices(devices);
            let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            lines.map(|words| words.join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(
            lines(std::slice::from_ref(&kernel)),
            ["device via queue packets dropped by the kernel", "d0 af_packet 0 5 2 tp_drops"]
        );
        assert_eq!(
            lines(std::slice::from_ref(&driven)),
            [
                "device via queue packets counted by our driver",
                "d0 vhost-user 0 9 1,200 rx_bad_ids"
            ]
        );
        let columns = "device via queue packets dropped by the kernel counted by our driver";
        assert_eq!(lines(&[kernel, driven])[0], columns);
    }
}
