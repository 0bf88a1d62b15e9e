//! The report as tables.

use std::fmt::Write;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::cpu::ONE_CPU;
use super::report::{CompareReport, CompareRow, Comparison};
use super::subject::{Author, Better};
use crate::bench::figures::RoundSpread;

/// The whole report.
pub(super) fn render(report: &CompareReport) -> String {
    let CompareReport { version, is_debug_build, machine, rounds, window_ms, .. } = report;
    let build = if *is_debug_build { ", a debug build that says nothing of its speed" } else { "" };
    let kind = if machine.is_virtual { "virtual " } else { "" };
    let mut text = format!(
        "forebay {version}{build}; {} ({} {kind}CPUs), Linux {}, {}; load {:.1} at the start\n\
         {rounds} rounds of {window_ms} ms, in turn; a ratio is Forebay's median divided by the row's\n",
        machine.processor, machine.cpus, machine.kernel, machine.compiler, machine.load,
    );
    for comparison in &report.comparisons {
        text += &section(comparison);
    }
    for (kind, reason) in &report.unprepared {
        // Never fails: a string takes everything.
        let _ = write!(text, "\n{kind}: not compared: {reason}\n");
    }
    if report.is_interrupted {
        text += "\ninterrupted by a signal: rows have fewer turns than rounds were asked for\n";
    }
    text
}

fn section(comparison: &Comparison) -> String {
    let Comparison { group, metric, unit, better, class, rows } = comparison;
    let better = match better {
        Better::More => "more",
        Better::Less => "less",
    };
    let mut text = format!("\n{group}: {metric} ({unit}, {better} is better, {})\n", at(class));
    let is_ours = |row: &&CompareRow| row.author == Author::Forebay && row.spread.is_some();
    let ours: Vec<_> = rows.iter().filter(is_ours).collect();
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let columns = ["", "median", "min–max", "n"].map(str::to_owned).into_iter();
    table.set_header(columns.chain((1..=ours.len()).map(|number| format!("ratio of {number}"))));
    let mut number = 0;
    for row in rows.iter().filter(|row| row.spread.is_some()) {
        if row.author == Author::Forebay {
            number += 1;
        }
        table.add_row(cells(row, number, &ours));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    text += &table.trim_fmt();
    text.push('\n');
    for CompareRow { program, reason, spread, classes, .. } in rows {
        // Never fails: a string takes everything.
        if let Some(reason) = reason {
            let _ = writeln!(text, "{program}: {reason}");
        } else if spread.is_none() {
            let others: Vec<_> = classes.iter().map(in_class).collect();
            let _ =
                writeln!(text, "{program}: only measured at cache distance {}", others.join(", "));
        }
    }
    text
}

fn cells(row: &CompareRow, number: usize, ours: &[&CompareRow]) -> Vec<String> {
    let spread = row.spread.unwrap_or_default();
    let name = match row.author {
        Author::Forebay => format!("{number}: {}", row.program),
        Author::Peer => row.program.clone(),
    };
    let mut cells = vec![
        name,
        figure(spread.median()),
        format!("{}–{}", figure(spread.min), figure(spread.max)),
        spread.n.to_string(),
    ];
    let ratio = |of: &&CompareRow| row.ratios.get(&of.program);
    let ratios = ours.iter().map(|of| ratio(of).map(|ratio| format!("{ratio:.2}")));
    cells.extend(ratios.map(Option::unwrap_or_default));
    cells
}

fn in_class((class, spread): (&String, &RoundSpread)) -> String {
    format!("{class}: {} (n {})", figure(spread.median()), spread.n)
}

/// Place of a class's figures.
fn at(class: &str) -> String {
    if class == ONE_CPU { class.to_owned() } else { format!("cache distance {class}") }
}

/// A figure with three significant digits, or whole.
pub(super) fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::report;

    #[test]
    fn cmp_3_table_has_every_row() {
        let text = render(&report::made_up());
        let lines: Vec<String> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        for line in [
            "UDP socket: received (kpps, more is better, cache distance far_l3)",
            "median min–max n ratio of 1 ratio of 2",
            "kernel 200 100–300 3 1.50 0.50",
            "1: forebay, af_xdp 300 100–500 3",
            "2: forebay, af_packet 100 50.0–150 2",
            "cpumap: no C compiler (cc): install gcc",
        ] {
            assert!(lines.iter().any(|is| is == line), "{line}: {text}");
        }
    }

    #[test]
    fn figures_keep_three_digits() {
        assert_eq!([1234.5, 12.34, 1.234, 0.1234].map(figure), ["1234", "12.3", "1.23", "0.1234"]);
    }
}
