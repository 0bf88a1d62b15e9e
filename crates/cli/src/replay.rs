//! `forebay replay`: from the command line to a plan, and from a report to its output.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay_device::pcap::{Capture, ReplayPlan};
use forebay_device::synthetic::SyntheticPlan;
use forebay_device::{Progress, Rate};
use forebay_engine::{Config, WhenFull};
use forebay_run::replay::{Input, Mode, Replay, ReplayConfig, ReplayReport, bundled_capture};
use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::random::Random;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tracing::warn;

use crate::args::{ReplayArgs, WhenFullArg};
use crate::failure::Failure;
use crate::log::SuppressedReports;
use crate::options::check_queues;
use crate::options::engine::Cpus;
use crate::options::hash::HashKind;
use crate::options::socket::SocketPlace;
use crate::plot::{self, PlotFiles};
use crate::records::{warn_of_damaged, warn_of_unread};
use crate::script::PlacedChange;
use crate::signals::{Hangup, stop_on_signals};
use crate::synthetic::SyntheticSpec;
use crate::ticker::{FailureMessages, Ticker};
use crate::{output, script, table};

/// Period of the progress bar.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

/// Runs a replay and prints its report.
pub(crate) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    let seed = seed(args);
    let plan = plan(args, seed)?;
    let cpus = plan.engine.cpus.clone();
    let changes_at: Vec<u64> = plan.engine.script.changes().iter().map(|it| it.frame).collect();
    let config = args.control.read()?;
    let replay = Replay::open(plan)?;
    let plots = args.plot.as_deref().map(PlotFiles::create).transpose()?;
    let suppressed = SuppressedReports::begin()?;
    let interrupted = stop_on_signals(replay.stopper(), Hangup::Ends)?;
    let place = args.control.place(None, None)?;
    let socket = place.map(SocketPlace::bind).transpose()?.flatten();
    let (control, counts) = (replay.control(), replay.counts());
    let given = args.engine.given(|change| control.name_of(change));
    let faces = args.control.open(&control, counts, config.as_ref(), &given, socket)?;
    let metrics = args.metrics.serve(&args.metrics.access()?, || replay.metrics())?;
    let teller = FailureMessages::begin(replay.failures())?;
    let bar = Bar::show(replay.progress(), args)?;
    let report = replay.run();
    drop((teller, faces, metrics, suppressed));
    bar.finish();
    let result =
        Replayed { report: report?, seed, interrupted: interrupted.load(Ordering::Relaxed) };
    if !result.interrupted {
        warn_of_changes_not_made(&changes_at, result.report.path.packets_in);
    }
    let drawn = match (plots, &result.report.timeline) {
        (Some(plots), Some(timeline)) => plots.draw(timeline),
        _ => Ok(()),
    };
    finish(result, args, &cpus).and(drawn)
}

/// Document that `--json` prints.
#[derive(Serialize)]
struct Replayed {
    #[serde(flatten)]
    report: ReplayReport,
    /// Seed of all random draws.
    seed: u64,
    /// True if a signal asked the run to end early.
    interrupted: bool,
}

/// Seed of all random draws.
fn seed(args: &ReplayArgs) -> u64 {
    let is_fixed = args.deterministic || args.synthetic.is_some();
    args.seed.unwrap_or_else(|| if is_fixed { 1 } else { drawn_seed() })
}

/// A random number of 53 bits, which every JSON reader can represent.
fn drawn_seed() -> u64 {
    const JSON_BITS: u32 = 53;
    let bits = sys::random_key().first_chunk().copied().map_or(1, u64::from_le_bytes);
    bits >> (u64::BITS - JSON_BITS)
}

/// Warns of scripted changes for frames after the last one.
fn warn_of_changes_not_made(changes_at: &[u64], frames: u64) {
    let count = changes_at.iter().filter(|frame| **frame > frames).count() as u64;
    if count > 0 {
        let late = table::counted(count, "scripted change");
        let frames = table::counted(frames, "frame");
        warn!("{late} not made: the input ended after {frames}");
    }
}

/// Prints a report, and reports failures.
fn finish(replayed: Replayed, args: &ReplayArgs, cpus: &CpuList) -> Result<(), Failure> {
    let report = &replayed.report;
    warn_of_damaged(report.damaged_records, report.first_damage.as_deref());
    for (link_type, count) in &report.unread_link_types {
        warn_of_unread(link_type, *count, "dropped as link_type");
    }
    let text = if args.json {
        serde_json::to_string(&replayed).unwrap_or_default() + "\n"
    } else {
        let told = report.explain.iter().map(|flow| format!("\n{flow}"));
        table::render_replay(report, cpus) + &told.collect::<String>()
    };
    let printed = output::print(&text);
    let broken = report.broken_promises();
    if !broken.is_empty() {
        let seed = format!(" and the seed ({})", replayed.seed);
        return Err(Failure::promise(broken, &seed));
    }
    match replayed.report.errors.into_iter().next() {
        Some(error) => Err(error.into()),
        None => printed,
    }
}

fn plan(args: &ReplayArgs, seed: u64) -> Result<ReplayConfig, Failure> {
    let when_full = match (args.when_full, args.rate.0) {
        (Some(WhenFullArg::Wait), _) | (None, Rate::Max) => WhenFull::Wait,
        (Some(WhenFullArg::Drop), _) | (None, _) => WhenFull::Drop,
    };
    let input = match &args.synthetic {
        Some(_) if args.rate.0 == Rate::Capture => {
            let problem = "--rate capture: made-up traffic has no times of its own";
            return Err(Failure::usage(problem, "give a rate in packets a second, or max"));
        }
        Some(SyntheticSpec(spec)) => {
            Input::Synthetic(SyntheticPlan { seed, rate: args.rate.0, ..spec.clone() })
        }
        None => {
            let files = args.files.iter().cloned().map(Capture::named);
            let mut captures: Vec<_> = files.collect();
            if captures.is_empty() {
                captures.push(bundled_capture());
            }
            let (loops, rate) = (args.loops, args.rate.0);
            Input::Captures(ReplayPlan { captures, loops, rate })
        }
    };
    if args.resegment
        && let Some(lost) = args.engine.coalesce.lost()
    {
        warn!("--resegment: {lost}");
    }
    check_queues(args.queues.get().into())?;
    Ok(ReplayConfig {
        input,
        queues: args.queues,
        engine: engine(args, seed, when_full)?,
        mode: if args.deterministic { Mode::Stepped { seed } } else { Mode::Live },
        work_ns: args.work,
        write_pcap: args.write_pcap.clone(),
        resegment: args.resegment,
        rotation: args.rotate.rotation(args.write_pcap.is_some())?,
        trace: args.trace.plan(),
        plots: args.plot.as_deref().map(plot::paths).unwrap_or_default(),
        explain: args.explain.clone(),
    })
}

fn engine(args: &ReplayArgs, seed: u64, when_full: WhenFull) -> Result<Config, Failure> {
    if args.engine.hash.hash == HashKind::Device {
        let problem = "--hash device: no live device has hashed these packets";
        return Err(Failure::usage(problem, "give another, or none"));
    }
    let mut changes: Vec<_> = args.at.iter().cloned().map(PlacedChange::from).collect();
    if let Some(path) = &args.script {
        changes.extend(script::read(path)?);
    }
    let cpus = if args.deterministic { Cpus::Virtual } else { Cpus::Real };
    let config = args.engine.config(cpus, || seeded_key(seed), changes)?;
    Ok(Config { when_full, start_counters: args.start_counters, ..config })
}

/// Derives a key from the seed, so that a run can be repeated. An author of captures cannot know a
/// drawn seed.
fn seeded_key(seed: u64) -> [u8; 16] {
    let mut random = Random::new(seed);
    let words = [random.bits().to_le_bytes(), random.bits().to_le_bytes()];
    let mut key = [0; 16];
    key.copy_from_slice(words.as_flattened());
    key
}

/// A progress bar on standard error, if that is a terminal.
struct Bar {
    bar: ProgressBar,
    mover: Option<Ticker>,
}

impl Bar {
    fn show(progress: &Arc<Progress>, args: &ReplayArgs) -> Result<Self, Failure> {
        if !io::stderr().is_terminal() {
            return Ok(Self { bar: ProgressBar::hidden(), mover: None });
        }
        let bar = progress.total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let template = if args.synthetic.is_some() {
            "{bar:40} {human_pos}/{human_len} frames  {per_sec}  {eta} left"
        } else {
            "{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let (moved, progress) = (bar.clone(), Arc::clone(progress));
        let move_on = move || moved.set_position(progress.done.load(Ordering::Relaxed));
        Ok(Self {
            bar,
            mover: Some(Ticker::every(PROGRESS_PERIOD, "shows the progress", move_on)?),
        })
    }

    fn finish(self) {
        drop(self.mover);
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_key() {
        assert_eq!(seeded_key(5), seeded_key(5));
        assert_ne!(seeded_key(5), seeded_key(6));
    }
}
