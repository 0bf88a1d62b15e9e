//! The report as tables.

use std::fmt::Write;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::cpu::{DISTURBED, ONE_CPU};
use super::report::{CompareReport, CompareRow, Comparison, NO_CLASS};
use super::subject::{Author, Better, LOST_PER_THOUSAND_MAX};
use crate::bench::figures::RoundSpread;
use crate::bench::pair::CacheClass;
use crate::table::figures::{as_f64, counted, grouped, percent};

/// The whole report.
pub(super) fn render(report: &CompareReport) -> String {
    let CompareReport { version, is_debug_build, machine, rounds, .. } = report;
    let build = if *is_debug_build { ", a debug build that says nothing of its speed" } else { "" };
    let kind = if machine.is_virtual { "virtual " } else { "" };
    let mut text = format!(
        "forebay {version}{build}; {} ({} {kind}CPUs), Linux {}, {}; load {:.1} at the start\n\
         {}, in each a turn of every program; a ratio is Forebay's median divided by the row's\n",
        machine.processor,
        machine.cpus,
        machine.kernel,
        machine.compiler,
        machine.load,
        counted((*rounds).into(), "round"),
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
    let Comparison { group, metric, unit, better, turn, seeds, class, rows } = comparison;
    let better = match better {
        Better::More => "more",
        Better::Less => "less",
    };
    let class = match class.as_str() {
        ONE_CPU => class.clone(),
        NO_CLASS => "no turn to compare".to_owned(),
        class => format!("cache distance {class}"),
    };
    let seeds = seeds.map(|[first, last]| format!(", seeds {first} to {last}")).unwrap_or_default();
    let mut text = format!(
        "\n{group}: {metric} ({unit}, {better} is better, {class}, turns of {turn}{seeds})\n"
    );
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
    for row in rows {
        for remark in [lost(row), without_figures(row)].into_iter().flatten() {
            // Never fails: a string takes everything.
            let _ = writeln!(text, "{}: {remark}", row.program);
        }
    }
    text
}

/// Remark on a row's requests without an answer.
fn lost(row: &CompareRow) -> Option<String> {
    let requests = row.requests.filter(|requests| requests.lost() > 0)?;
    let (lost, sent) = (requests.lost(), requests.sent);
    let share = as_f64(lost) / as_f64(sent) * 100.0;
    let mut text =
        format!("{} of {} had no answer ({share:.2} %)", grouped(lost), counted(sent, "request"));
    if requests.are_too_few_answered() {
        let most = percent(as_f64(LOST_PER_THOUSAND_MAX), 1000.0);
        text += &format!("; not compared, as that is more than {most}");
    }
    Some(text)
}

/// Reason why a row has no figures in the class of the others, or no further ones.
fn without_figures(CompareRow { reason, spread, classes, .. }: &CompareRow) -> Option<String> {
    match (reason, spread) {
        (Some(reason), _) => Some(reason.clone()),
        (None, Some(_)) => None,
        (None, None) => {
            let others: Vec<_> = classes.iter().map(in_class).collect();
            Some(format!("no turn to compare, but {}", others.join(" and ")))
        }
    }
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

/// Turns of one class, in words.
fn in_class((class, spread): (&String, &RoundSpread)) -> String {
    let turns = counted(spread.n as u64, "turn");
    let median = figure(spread.median());
    let when = match class.as_str() {
        DISTURBED => "whose repeats were all disturbed by other programs".to_owned(),
        class if class == CacheClass::Moved.name() => {
            "during which the cache distance changed".to_owned()
        }
        class => format!("at cache distance {class}"),
    };
    format!("{turns} {when} (median {median})")
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
    use super::super::subject::RequestCounts;
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
            "UDP socket: received (kpps, more is better, cache distance far_l3, turns of 3000 ms, seeds 1 to 4)",
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
    fn cmp_3_rows_without_turns_are_explained() {
        let mut report = report::made_up();
        let comparison = &mut report.comparisons[0];
        let row = &mut comparison.rows[0];
        row.spread = None;
        row.classes.remove("far_l3");
        row.classes.insert("moved".to_owned(), RoundSpread::of(&[5.0, 7.0]));
        let remark = "kernel: no turn to compare, but 2 turns during which the cache distance changed (median 6.00) \
                      and 1 turn at cache distance same_l3 (median 900)";
        let text = section(comparison);
        assert!(text.lines().any(|line| line == remark), "{text}");
        comparison.class = NO_CLASS.to_owned();
        let title = "(kpps, more is better, no turn to compare, turns of 3000 ms, seeds 1 to 4)";
        assert!(section(comparison).contains(title));
    }

    #[test]
    fn cmp_5_lost_requests_are_told() {
        let mut report = report::made_up();
        let told = |row: &mut CompareRow, answered| {
            row.requests = Some(RequestCounts { sent: 2000, answered });
            lost(row)
        };
        let row = &mut report.comparisons[0].rows[0];
        assert_eq!(told(row, 2000), None);
        assert_eq!(told(row, 1990).unwrap(), "10 of 2,000 requests had no answer (0.50 %)");
        let refused =
            "11 of 2,000 requests had no answer (0.55 %); not compared, as that is more than 0.5 %";
        assert_eq!(told(row, 1989).unwrap(), refused);
    }

    #[test]
    fn figures_keep_three_digits() {
        assert_eq!([1234.5, 12.34, 1.234, 0.1234].map(figure), ["1234", "12.3", "1.23", "0.1234"]);
    }
}
