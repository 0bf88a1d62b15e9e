//! Summary of many runs, as a table for people and a document for programs.

use std::ops::RangeInclusive;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde::Serialize;

use crate::evenness::Balanced;
use crate::laws::Law;
use crate::liveness::Wait;
use crate::rules::Rules;
use crate::scenario::{Overrides, Situation};
use crate::world::{SimOutcome, run};

/// Result of the runs of one scenario.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The scenario.
    pub scenario: &'static str,
    /// Rules that the runs were under.
    pub rules: Rules,
    /// Number of runs.
    pub seeds: u64,
    /// Number of events executed.
    pub steps: u64,
    /// Number of frames taken in.
    pub packets: u64,
    /// Number of frames that reached an application.
    pub delivered: u64,
    /// Number of frames dropped and accounted for.
    pub dropped: u64,
    /// Number of times that a flow changed CPU.
    pub moves: u64,
    /// Number of moves requested while packets were on their way to the old CPU.
    pub hazardous: u64,
    /// Number of packets delivered after a later one of their flow.
    pub reordered: u64,
    /// Number of violations of all laws.
    pub violations: u64,
    /// Violations of the law of order.
    pub order_violations: u64,
    /// Violations of the law of conservation.
    pub conservation_errors: u64,
    /// Violations of the law of bounds.
    pub bound_violations: u64,
    /// Violations of the law of liveness.
    pub liveness_violations: u64,
    /// Counters that differed from the observed values.
    pub counter_errors: u64,
    /// Flows that the load moved twice in a second.
    pub rest_violations: u64,
    /// Longest time until a flow reached its desired CPU, without time that CPUs lost to faults.
    pub wait_max_ns: u64,
    /// Bound on that time.
    pub wait_bound_ns: u64,
    /// Number of times that the elephant changed CPU, if there is one.
    pub elephant_moves: u64,
    /// Busy time of the busiest CPU in percent of the mean, in the second half of a run; the
    /// largest.
    pub imbalance_percent: u64,
    /// Evenness of the load, if it is followed; the worst of all runs.
    pub balanced: Option<Balanced>,
    /// The first violation.
    pub first_violation: Option<Violation>,
}

/// A violation of a law.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Violation {
    /// Seed of the run.
    pub seed: u64,
    /// The law.
    pub law: Law,
    /// Description of the violation.
    pub text: String,
}

impl Summary {
    /// Runs a scenario with these seeds; `done` is called after each run.
    #[must_use]
    pub fn of_runs(
        rules: Rules,
        situation: Situation,
        seeds: RangeInclusive<u64>,
        overrides: Overrides,
        mut done: impl FnMut(),
    ) -> Self {
        let mut summary = Self::new(rules, situation);
        for seed in seeds {
            summary.add(&run(rules, situation, seed, overrides));
            done();
        }
        summary
    }

    /// Creates a summary without runs.
    #[must_use]
    pub fn new(rules: Rules, situation: Situation) -> Self {
        Self {
            scenario: situation.name(),
            rules,
            seeds: 0,
            steps: 0,
            packets: 0,
            delivered: 0,
            dropped: 0,
            moves: 0,
            hazardous: 0,
            reordered: 0,
            violations: 0,
            order_violations: 0,
            conservation_errors: 0,
            bound_violations: 0,
            liveness_violations: 0,
            counter_errors: 0,
            rest_violations: 0,
            wait_max_ns: 0,
            wait_bound_ns: 0,
            elephant_moves: 0,
            imbalance_percent: 0,
            balanced: None,
            first_violation: None,
        }
    }

    /// Adds a run.
    pub fn add(&mut self, outcome: &SimOutcome) {
        let [order, conservation, bounds, liveness, counters, rest] = outcome.broken;
        self.seeds += 1;
        self.steps += outcome.steps;
        self.packets += outcome.packets;
        self.delivered += outcome.delivered;
        self.dropped += outcome.dropped;
        self.moves += outcome.moves;
        self.hazardous += outcome.hazardous;
        self.reordered += order;
        self.violations += outcome.broken.iter().sum::<u64>();
        self.order_violations += order;
        self.conservation_errors += conservation;
        self.bound_violations += bounds;
        self.liveness_violations += liveness;
        self.counter_errors += counters;
        self.rest_violations += rest;
        self.elephant_moves += outcome.elephant_moves;
        self.imbalance_percent = self.imbalance_percent.max(outcome.imbalance_percent);
        self.balanced = match (self.balanced, outcome.balanced) {
            (Some(one), Some(other)) => Some(one.worse(other)),
            (one, other) => one.or(other),
        };
        let Wait { ns, bound_ns } = outcome.longest;
        if ns > self.wait_max_ns {
            (self.wait_max_ns, self.wait_bound_ns) = (ns, bound_ns);
        }
        if self.first_violation.is_none() {
            let first = outcome.first.clone();
            let seed = outcome.seed;
            self.first_violation = first.map(|(law, text)| Violation { seed, law, text });
        }
    }

    /// True if no law was violated.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.violations == 0
    }
}

/// Renders summaries side by side, for people.
#[must_use]
pub fn render(summaries: &[&Summary]) -> String {
    let lines = summaries.iter().filter_map(|summary| verdict(summary));
    table(summaries) + &balance_table(summaries) + &lines.collect::<String>()
}

/// Table with a row for each summary.
#[must_use]
pub fn table(summaries: &[&Summary]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "scenario",
        "rules",
        "seeds",
        "packets",
        "dropped",
        "moves",
        "hazardous",
        "out of order",
        "other violations",
        "longest wait",
        "its bound",
    ]);
    for summary in summaries {
        table.add_row(row(summary));
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt() + "\n"
}

/// Table of how evenly the load lay; empty if it was not balanced.
#[must_use]
pub fn balance_table(summaries: &[&Summary]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "scenario",
        "rules",
        "busiest CPU, of the mean",
        "possible",
        "uneven for",
        "CPUs by phase",
        "all after",
        "moves a second",
        "out of order",
        "moved twice in a second",
    ]);
    let none = || "-".to_owned();
    for summary in summaries {
        let Some(balanced) = summary.balanced else { continue };
        table.add_row([
            summary.scenario.to_owned(),
            summary.rules.to_string(),
            format!("{} %", balanced.busiest_percent),
            format!("{} %", balanced.possible_percent),
            format!("{} ms", grouped(balanced.uneven_ns / 1_000_000)),
            balanced.cpus.map(|cpus| cpus.map_or(none(), |cpus| cpus.to_string())).join(" "),
            balanced.spread_ns.map_or(none(), |ns| format!("{} ms", grouped(ns / 1_000_000))),
            grouped(balanced.desired_changes_a_second),
            grouped(summary.reordered),
            grouped(summary.rest_violations),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    if table.is_empty() { String::new() } else { table.trim_fmt() + "\n" }
}

fn row(summary: &Summary) -> [String; 11] {
    [
        summary.scenario.to_owned(),
        summary.rules.to_string(),
        grouped(summary.seeds),
        grouped(summary.packets),
        grouped(summary.dropped),
        grouped(summary.moves),
        grouped(summary.hazardous),
        grouped(summary.reordered),
        grouped(summary.violations - summary.order_violations),
        microseconds(summary.wait_max_ns),
        microseconds(summary.wait_bound_ns),
    ]
}

/// Additional remarks on the runs, one per line.
fn verdict(summary: &Summary) -> Option<String> {
    let Summary { rules, elephant_moves, first_violation, .. } = summary;
    let mut text = String::new();
    if summary.scenario == Situation::Elephant.name() {
        text += &format!("{rules}: the elephant changed its CPU {elephant_moves} times\n");
    }
    if let Some(Violation { seed, law, text: first }) = first_violation {
        text += &format!("{rules}: first broken with seed {seed}: {}: {first}\n", law.name());
    }
    (!text.is_empty()).then_some(text)
}

/// Formats as 12.3 µs.
fn microseconds(ns: u64) -> String {
    format!("{}.{} µs", grouped(ns / 1_000), ns / 100 % 10)
}

/// Formats as 1,234,567.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
