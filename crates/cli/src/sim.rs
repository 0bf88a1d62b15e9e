//! `forebay sim`: scenarios on virtual CPUs, under our rules and the kernel's.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use forebay_sim::{Overrides, Recorded, Rules, Situation, Summary, report, run_recorded};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::failure::Failure;
use crate::output;
use crate::plot::PlotFiles;

/// Upper bound on the CPUs of a run: the simulator keeps them in sets of 128 bits.
const CPUS_MAX: i64 = 128;

/// Upper bound on the packets of a run, as each is kept until the end.
const PACKETS_MAX: u64 = 10_000_000;

/// Upper bound on the flows of a run, as the share of each is looked at every 10 ms.
const FLOWS_MAX: i64 = 1_000_000;

#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    /// What happens; without it, all scenarios are listed
    scenario: Option<Situation>,

    /// Run so many seeds, from 1 on
    #[arg(long, value_name = "N", default_value_t = 20, conflicts_with = "seed",
          value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// Run this seed only: the same seed is the same run, exactly
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// Whose rules packets are steered by; what the kernel's break is the expected result
    #[arg(long, value_enum, default_value_t)]
    rules: RulesArg,

    /// Virtual CPUs [default: 4, or drawn]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=CPUS_MAX))]
    cpus: Option<u16>,

    /// Packets in each run [default: some thousands]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=PACKETS_MAX))]
    packets: Option<u64>,

    /// Flows of the scenario skewed, by Zipf's law from the first rank on [default: 1,024 for each CPU, the first ranks alike]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=FLOWS_MAX))]
    flows: Option<u32>,

    /// Print one JSON document and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,

    /// Write a trace of every packet and change under our rules to DIR
    #[arg(long, value_name = "DIR", requires = "seed")]
    trace: Option<PathBuf>,

    /// Draw the run under our rules: shares of the CPUs, waits, moves and delays, as SVG files in DIR
    #[arg(long, value_name = "DIR", requires = "seed")]
    plot: Option<PathBuf>,
}

/// Rules of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
enum RulesArg {
    /// The path itself
    Forebay,
    /// The path itself, with the load left where the map has it
    Ranges,
    /// Those of Linux 6.18, in a model
    Kernel,
    /// The model of Linux with the rule of RSS++, which balances by load and keeps no order
    #[value(name = "rss++")]
    RssPlusPlus,
    /// The path's and the kernel's, side by side
    #[default]
    Both,
    /// All of them, side by side
    All,
}

impl RulesArg {
    /// True if the path's rules are among them, and all other rules.
    fn split(self) -> (bool, &'static [Rules]) {
        match self {
            Self::Forebay => (true, &[]),
            Self::Ranges => (false, &[Rules::Ranges]),
            Self::Kernel => (false, &[Rules::Kernel]),
            Self::RssPlusPlus => (false, &[Rules::RssPlusPlus]),
            Self::Both => (true, &[Rules::Kernel]),
            Self::All => (true, &[Rules::Ranges, Rules::Kernel, Rules::RssPlusPlus]),
        }
    }
}

/// Runs a scenario and prints its result.
pub(crate) fn run(args: &SimArgs) -> Result<(), Failure> {
    let Some(situation) = args.scenario else { return output::print(&listed(args.json)) };
    if args.flows.is_some() && situation != Situation::Skewed {
        let problem = "--flows is of the scenario skewed";
        return Err(Failure::usage(problem, "leave it out, or simulate skewed"));
    }
    let (has_ours, peers) = args.rules.split();
    let recorded = [("--trace", "a trace is", &args.trace), ("--plot", "pictures are", &args.plot)];
    if let Some((option, what, _)) = recorded.iter().find(|(.., directory)| directory.is_some())
        && !has_ours
    {
        let problem = format!("{option}: {what} of a run under our rules");
        return Err(Failure::usage(problem, "leave out --rules"));
    }
    let bar = progress(args, u64::from(has_ours) + peers.len() as u64);
    let (ours, drawn) = match has_ours {
        true => run_ours(args, situation, &bar).map(|(ours, drawn)| (Some(ours), drawn))?,
        false => (None, Ok(())),
    };
    let peers = peers.iter().map(|&rules| run_seeds(rules, args, situation, &bar));
    let peers: Vec<_> = peers.collect();
    bar.finish_and_clear();
    let printed = output::print(&if args.json {
        to_json(ours.as_ref(), &peers) + "\n"
    } else {
        report::render(&ours.iter().chain(&peers).collect::<Vec<_>>())
    });
    match ours.iter().chain(&peers).find_map(broken_by_us) {
        Some((rules, violation)) => Err(broken_law(args, situation, rules, violation)),
        None => printed.and(drawn),
    }
}

/// First violation of a run in which the path itself steered.
fn broken_by_us(summary: &Summary) -> Option<(Rules, &report::Violation)> {
    let is_ours = matches!(summary.rules, Rules::Forebay | Rules::Ranges);
    summary.first_violation.as_ref().filter(|_| is_ours).map(|violation| (summary.rules, violation))
}

/// Result of the path itself, and whether its pictures were drawn.
fn run_ours(
    args: &SimArgs,
    situation: Situation,
    bar: &ProgressBar,
) -> Result<(Summary, Result<(), Failure>), Failure> {
    let (true, Some(seed)) = (args.trace.is_some() || args.plot.is_some(), args.seed) else {
        return Ok((run_seeds(Rules::Forebay, args, situation, bar), Ok(())));
    };
    let plots = args.plot.as_deref().map(PlotFiles::create).transpose()?;
    let recorded = Recorded { trace: args.trace.as_deref(), timeline: plots.is_some() };
    let (outcome, timeline) = run_recorded(situation, seed, overrides(args), recorded)?;
    let drawn = match (plots, timeline) {
        (Some(plots), Some(timeline)) => plots.draw(&timeline),
        _ => Ok(()),
    };
    let mut summary = Summary::new(Rules::Forebay, situation);
    summary.add(&outcome);
    Ok((summary, drawn))
}

fn run_seeds(rules: Rules, args: &SimArgs, situation: Situation, bar: &ProgressBar) -> Summary {
    Summary::of_runs(rules, situation, seeds(args), overrides(args), || bar.inc(1))
}

fn seeds(args: &SimArgs) -> RangeInclusive<u64> {
    args.seed.map_or(1..=args.seeds, |seed| seed..=seed)
}

fn overrides(args: &SimArgs) -> Overrides {
    Overrides { cpus: args.cpus, packets: args.packets, flows: args.flows }
}

/// List of scenarios, one per line.
fn listed(json: bool) -> String {
    if json {
        let listed = Situation::ALL.map(|situation| ListedScenario {
            scenario: situation.name(),
            about: situation.about(),
        });
        return serde_json::to_string(&listed).unwrap_or_default() + "\n";
    }
    let line = |situation: Situation| format!("{:22}{}\n", situation.name(), situation.about());
    Situation::ALL.map(line).concat()
}

/// A scenario in the JSON list.
#[derive(Serialize)]
struct ListedScenario {
    scenario: &'static str,
    about: &'static str,
}

/// Document that `--json` prints: one result, or ours with those of the other rules inside, by name.
fn to_json(ours: Option<&Summary>, peers: &[Summary]) -> String {
    let Some(ours) = ours else {
        return serde_json::to_string(&peers.first()).unwrap_or_default();
    };
    let peers = peers.iter().map(|peer| (peer.rules.to_string(), peer)).collect();
    serde_json::to_string(&SideBySide { ours, peers }).unwrap_or_default()
}

#[derive(Serialize)]
struct SideBySide<'a> {
    #[serde(flatten)]
    ours: &'a Summary,
    #[serde(flatten)]
    peers: BTreeMap<String, &'a Summary>,
}

/// Progress bar of completed runs; hidden if standard error is not a terminal.
fn progress(args: &SimArgs, rules: u64) -> ProgressBar {
    let seeds = args.seed.map_or(args.seeds, |_| 1);
    let runs = seeds.saturating_mul(rules);
    if args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {eta} left");
    ProgressBar::new(runs).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn broken_law(
    args: &SimArgs,
    situation: Situation,
    rules: Rules,
    violation: &report::Violation,
) -> Failure {
    let report::Violation { seed, law, text } = violation;
    let mut command = format!("forebay sim {} --seed {seed}", situation.name());
    if rules == Rules::Ranges {
        command += " --rules ranges";
    }
    for (option, value) in [
        ("cpus", args.cpus.map(u64::from)),
        ("packets", args.packets),
        ("flows", args.flows.map(u64::from)),
    ] {
        command += &value.map_or_else(String::new, |value| format!(" --{option} {value}"));
    }
    Failure::Law { law: law.name(), text: text.clone(), command }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn any_number_of_seeds_is_run() {
        let line = format!("forebay sim waves --seeds {}", u64::MAX);
        let Command::Sim(args) = Cli::parse_from(line.split(' ')).command else {
            panic!("{line} is a simulation");
        };
        assert!(progress(&args, 4).is_hidden());
    }

    #[test]
    fn broken_law_prints_its_command() {
        let line = "forebay sim elephant --seeds 9 --cpus 5 --packets 700 --json";
        let Command::Sim(args) = Cli::parse_from(line.split(' ')).command else {
            panic!("{line} is a simulation");
        };
        let violation = report::Violation {
            seed: 8,
            law: forebay_sim::Law::Liveness,
            text: "it stays".to_owned(),
        };
        let Failure::Law { law, text, command } =
            broken_law(&args, Situation::Elephant, Rules::Forebay, &violation)
        else {
            panic!("a law was broken");
        };
        assert_eq!((law, text.as_str()), ("liveness", "it stays"));
        assert_eq!(command, "forebay sim elephant --seed 8 --cpus 5 --packets 700");
    }

    #[test]
    fn law_broken_under_ranges_fails() {
        let Command::Sim(args) = Cli::parse_from(["forebay", "sim", "waves"]).command else {
            panic!("it is a simulation");
        };
        let broken = |rules| {
            let mut summary = Summary::new(rules, Situation::Waves);
            let (law, text) = (forebay_sim::Law::Liveness, "it stays".to_owned());
            summary.first_violation = Some(report::Violation { seed: 8, law, text });
            summary
        };
        let (ranges, kernel) = (broken(Rules::Ranges), broken(Rules::Kernel));
        assert_eq!(broken_by_us(&kernel), None);
        let (rules, violation) = broken_by_us(&ranges).unwrap();
        let Failure::Law { command, .. } = broken_law(&args, Situation::Waves, rules, violation)
        else {
            panic!("a law was broken");
        };
        assert_eq!(command, "forebay sim waves --seed 8 --rules ranges");
    }
}
