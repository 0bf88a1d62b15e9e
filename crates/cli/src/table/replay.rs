//! Final report of a replay as text.

use forebay_run::replay::ReplayReport;
use forebay_sys::cpu_list::CpuList;

use super::figures::counted;
use super::path;

/// The whole report as text.
pub(crate) fn render(report: &ReplayReport, cpus: &CpuList) -> String {
    let mut text = path::totals(&report.path);
    text += &format!("\n{}\n", path::per_cpu(&report.path));
    text += &path::flows(&report.path, cpus, report.flows, report.largest_flow);
    text += &path::steering(&report.path);
    text += &path::coalescing(&report.path);
    text += &path::losses(&report.path);
    if report.damaged_records > 0 {
        let records = counted(report.damaged_records, "damaged record");
        text += &format!("noticed: {records} in the capture, passed over\n");
    }
    text += &path::trace_losses(report.trace_rows_lost);
    text += &verdict(report);
    text
}

fn verdict(report: &ReplayReport) -> String {
    let order = path::order(report.reordered, report.order_unchecked);
    format!("{order}; {}\n", path::conservation(&report.path))
}
