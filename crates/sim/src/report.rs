//! Many runs, in a table that a person reads and a document that a program does.

use std::ops::RangeInclusive;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde::Serialize;

use crate::laws::Law;
use crate::liveness::Wait;
use crate::rules::Rules;
use crate::scenario::{Overrides, Situation};
use crate::world::{Outcome, run};

/// What the runs of one scenario came to.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The scenario.
    pub scenario: &'static str,
    /// Whose rules.
    pub rules: Rules,
    /// Runs.
    pub seeds: u64,
    /// Things that happened.
    pub steps: u64,
    /// Frames that were taken in.
    pub packets: u64,
    /// Those that reached an application.
    pub delivered: u64,
    /// Those that were dropped, and said so.
    pub dropped: u64,
    /// Number of times flows changed their CPU.
    pub moves: u64,
    /// Moves that had been wished for while packets were on their way to the old CPU.
    pub hazardous: u64,
    /// Packets that were delivered after a later one of their flow.
    pub reordered: u64,
    /// Number of times a law was broken.
    pub violations: u64,
    /// The law of order.
    pub order_violations: u64,
    /// That of conservation.
    pub conservation_errors: u64,
    /// That of bounds.
    pub bound_violations: u64,
    /// That of liveness.
    pub liveness_violations: u64,
    /// Counters that said something else than was seen.
    pub counter_errors: u64,
    /// The longest that a wish took to be granted, times that CPUs lost to faults apart.
    pub wait_max_ns: u64,
    /// What that wait was bounded by.
    pub wait_bound_ns: u64,
    /// Number of times the elephant changed its CPU, where there is one.
    pub elephant_moves: u64,
    /// The first law that was broken.
    pub first_violation: Option<Violation>,
}

/// A law that was broken.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Violation {
    /// In this run.
    pub seed: u64,
    /// The law.
    pub law: Law,
    /// What happened.
    pub text: String,
}

impl Summary {
    /// Runs a scenario with these seeds; `done` is told of each run.
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

    /// No runs yet.
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
            wait_max_ns: 0,
            wait_bound_ns: 0,
            elephant_moves: 0,
            first_violation: None,
        }
    }

    /// Adds a run.
    pub fn add(&mut self, outcome: &Outcome) {
        let [order, conservation, bounds, liveness, counters] = outcome.broken;
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
        self.elephant_moves += outcome.elephant_moves;
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

    /// True if no law was broken.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.violations == 0
    }
}

/// Runs side by side, for people.
#[must_use]
pub fn render(summaries: &[&Summary]) -> String {
    let lines = summaries.iter().filter_map(|summary| verdict(summary));
    table(summaries) + &lines.collect::<String>()
}

/// A row for each summary.
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

/// What else there is to say of runs, a line each.
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

/// As 12.3 µs.
fn microseconds(ns: u64) -> String {
    format!("{}.{} µs", grouped(ns / 1_000), ns / 100 % 10)
}

/// As 1,234,567.
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
