//! `forebay replay`: from the command line to a plan, and from a report to what is printed.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use forebay::control::cpus::MAX_CPUS;
use forebay::control::{
    Change, Coalesce, CoalesceAt, ConfigFile, ControlSocket, CpuList, Mount, Script, ScriptedChange,
};
use forebay::device::pcap::{Capture, ReplayPlan};
use forebay::device::synthetic::SyntheticPlan;
use forebay::device::{Progress, Rate};
use forebay::engine::{Config, Stopper, WhenFull};
use forebay::random::Random;
use forebay::replay::{Input, Mode, Plan, Replay, Report, TracePlan, bundled_capture};
use forebay::sys;
use forebay::topology::{SYSFS, Topology};
use indicatif::{ProgressBar, ProgressStyle};
use path::CpuId;
use path::coalesce::{CoalesceConfig, CoalesceMode};
use path::hash::toeplitz::{STANDARD_KEY, SYMMETRIC_KEY};
use path::hash::{Hasher, RETA_ENTRIES};
use path::parse::Verify;
use path::steer::{MoveAfter, RPS_FLOW_CNT, SpreadPolicy};
use serde::Serialize;

use crate::args::{CoalesceArg, CoalesceAtArg, HashKind, ReplayArgs, SpreadArg, WhenFullArg};
use crate::failure::Failure;
use crate::output;
use crate::script;
use crate::synthetic::SyntheticSpec;
use crate::table;

/// How often the progress bar moves.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

/// Runs a replay and prints its report.
pub(crate) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    let seed = seed(args);
    let plan = plan(args, seed)?;
    let cpus = plan.engine.cpus.clone();
    let config = args.config.as_deref().map(ConfigFile::read).transpose()?;
    let mountpoint = args.mount.as_deref();
    mountpoint.map(Mount::check).transpose()?;
    let replay = Replay::open(plan)?;
    let socket = controlled(&replay, args, config.as_ref())?;
    // Before there is a mount that a signal would leave behind.
    let interrupted = stop_on_signals(replay.stopper());
    let mount = mountpoint.map(|directory| Mount::new(replay.control(), directory)).transpose()?;
    let bar = Bar::show(replay.progress(), args);
    let report = replay.run();
    drop((mount, socket));
    bar.finish();
    let result =
        Replayed { report: report?, seed, interrupted: interrupted.load(Ordering::Relaxed) };
    finish(result, args, &cpus)
}

/// Sets the knobs as the config file has them, and listens for whoever sets others.
fn controlled(
    replay: &Replay,
    args: &ReplayArgs,
    config: Option<&ConfigFile>,
) -> Result<Option<ControlSocket>, Failure> {
    let control = replay.control();
    if let Some(config) = config {
        for note in config.apply(&control, &given(args))? {
            eprintln!("forebay: {}: {note}", config.path().display());
        }
    }
    let path = config.map(|config| std::path::absolute(config.path())).transpose();
    let path = path.unwrap_or_default();
    let open = |at: &PathBuf| ControlSocket::open(control, at, path);
    Ok(args.control.as_ref().map(open).transpose()?)
}

/// The knobs that options set: the config file does not count for them.
fn given(args: &ReplayArgs) -> Vec<&'static str> {
    let options = [
        ("rps_cpus", args.rps.is_some()),
        ("rps_flow_cnt", args.rps_flow_cnt.is_some()),
        ("hash_key", args.hash_key.is_some()),
        ("coalesce", args.coalesce.is_some()),
        ("coalesce_at", args.coalesce_at.is_some()),
        ("gro_flush_timeout", args.gro_flush_timeout.is_some()),
        ("lro_descriptors", args.descriptors.is_some()),
        ("mtu", args.mtu.is_some()),
    ];
    options.into_iter().filter_map(|(knob, is_given)| is_given.then_some(knob)).collect()
}

/// What `--json` prints.
#[derive(Serialize)]
struct Replayed {
    #[serde(flatten)]
    report: Report,
    /// What all draws were determined by.
    seed: u64,
    /// Whether a signal asked the run to end early.
    interrupted: bool,
}

/// What all draws are determined by.
fn seed(args: &ReplayArgs) -> u64 {
    let is_fixed = args.deterministic || args.synthetic.is_some();
    args.seed.unwrap_or_else(|| if is_fixed { 1 } else { drawn_seed() })
}

/// A number that readers of JSON can hold, whatever they make of it.
fn drawn_seed() -> u64 {
    const JSON_BITS: u32 = 53;
    let bits = sys::random_key().first_chunk().copied().map_or(1, u64::from_le_bytes);
    bits >> (u64::BITS - JSON_BITS)
}

/// Prints a report and says what went wrong.
fn finish(replayed: Replayed, args: &ReplayArgs, cpus: &CpuList) -> Result<(), Failure> {
    let report = &replayed.report;
    if let Some(first) = &report.first_damage {
        eprintln!("forebay: {} damaged records passed over: {first}", report.damaged_records);
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
        return Err(Failure::Promise { broken, seed: replayed.seed });
    }
    match replayed.report.errors.into_iter().next() {
        Some(error) => Err(error.into()),
        None => printed,
    }
}

fn plan(args: &ReplayArgs, seed: u64) -> Result<Plan, Failure> {
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
            let files = args.files.iter().cloned().map(Capture::File);
            let mut captures: Vec<_> = files.collect();
            if captures.is_empty() {
                captures.push(bundled_capture());
            }
            let (loops, rate) = (args.loops, args.rate.0);
            Input::Captures(ReplayPlan { captures, loops, rate })
        }
    };
    if args.queues.get() > RETA_ENTRIES {
        let problem = format!("--queues {}: there is no way to deal frames to all", args.queues);
        let help = format!("give at most {RETA_ENTRIES}: an indirection table has as many entries");
        return Err(Failure::usage(problem, help));
    }
    Ok(Plan {
        input,
        queues: args.queues,
        engine: engine(args, seed, when_full)?,
        mode: if args.deterministic { Mode::Stepped { seed } } else { Mode::Live },
        work_ns: args.work,
        write_pcap: args.write_pcap.clone(),
        resegment: args.resegment,
        trace: args.trace.clone().map(|directory| TracePlan { directory, parse: args.trace_parse }),
        explain: args.explain.clone(),
    })
}

fn engine(args: &ReplayArgs, seed: u64, when_full: WhenFull) -> Result<Config, Failure> {
    let cpus = cpus(args)?;
    let mut config = Config::new(cpus, Arc::new(hasher(args, seed)?));
    if let Some(mask) = &args.rps {
        let rps_cpus = CpuList::parse_mask_or_list(mask).map_err(|error| {
            Failure::usage(format!("--rps {mask}: {error}"), "give a mask such as 3, or a list")
        })?;
        say_ignored("--rps", &rps_cpus, &config.cpus);
        config.rps_cpus = rps_cpus;
    } else if !args.deterministic {
        // Virtual CPUs have no caches: what a seed determines does not depend on the machine.
        let topology = Topology::read(Path::new(SYSFS), &config.cpus);
        config.rps_cpus = topology.near_polling(args.queues.get().into(), &config.cpus);
    }
    let set = args.set.iter().map(|change| ScriptedChange { frame: 0, change: change.clone() });
    let mut changes: Vec<_> = set.chain(args.at.iter().cloned()).collect();
    if let Some(path) = &args.script {
        changes.extend(script::read(path)?);
    }
    let script = Script::new(changes);
    for change in script.changes() {
        check_cpus(&change.change, &config.cpus)?;
    }
    config.script = script;
    config.when_full = when_full;
    config.coalesce = coalesce(args);
    if args.no_checksums && config.coalesces(|coalesce| coalesce.is_on) {
        eprintln!(
            "forebay: --no-checksums: what nobody has verified is not merged, so nothing will be"
        );
    }
    config.rps_flow_cnt = args.rps_flow_cnt.unwrap_or(RPS_FLOW_CNT);
    config.start_counters = args.start_counters;
    config.verify = if args.no_checksums { Verify::Nothing } else { Verify::Checksums };
    config.spread = match args.spread {
        SpreadArg::Busy => SpreadPolicy::WhenBusy,
        SpreadArg::Always => SpreadPolicy::Always,
    };
    if let Some(packets) = args.move_after {
        config.move_after = MoveAfter { packets, ..MoveAfter::default() };
    }
    Ok(config)
}

/// How packets are coalesced at first: in `gro` mode where anything is said about it but that.
fn coalesce(args: &ReplayArgs) -> Coalesce {
    let is_asked = args.coalesce_at.is_some()
        || args.gro_flush_timeout.is_some()
        || args.descriptors.is_some()
        || args.mtu.is_some();
    let mode = match args.coalesce {
        Some(CoalesceArg::Gro) => Some(CoalesceMode::Gro),
        Some(CoalesceArg::Lro) => Some(CoalesceMode::Lro),
        Some(CoalesceArg::Off) => None,
        None => is_asked.then_some(CoalesceMode::default()),
    };
    let default = CoalesceConfig::default();
    Coalesce {
        is_on: mode.is_some(),
        at: match args.coalesce_at {
            Some(CoalesceAtArg::Deliver) => CoalesceAt::Deliver,
            Some(CoalesceAtArg::Arrive) | None => CoalesceAt::Arrive,
        },
        config: CoalesceConfig {
            mode: mode.unwrap_or_default(),
            descriptors: args.descriptors.unwrap_or(default.descriptors),
            mtu: args.mtu.unwrap_or(default.mtu),
            gro_flush_timeout_ns: args.gro_flush_timeout.unwrap_or(default.gro_flush_timeout_ns),
        },
    }
}

/// Says which CPUs a change names in vain, and refuses one that has nothing else to say.
fn check_cpus(change: &Change, cpus: &CpuList) -> Result<(), Failure> {
    match change {
        Change::RpsCpus(_, list) | Change::FlowLimitCpuBitmap(list) | Change::Cpus(list) => {
            say_ignored(change.knob(), list, cpus);
        }
        Change::Pause(cpu) | Change::Resume(cpu) | Change::Kill(cpu) if !cpus.contains(*cpu) => {
            let problem = format!("{}={cpu}: that CPU is not among --cpus", change.knob());
            return Err(Failure::usage(problem, format!("give one of {cpus}")));
        }
        _ => {}
    }
    Ok(())
}

/// The kernel drops CPUs that it cannot use from a mask without a word; we say so (RPS-9).
fn say_ignored(what: &str, wanted: &CpuList, cpus: &CpuList) {
    let ignored = wanted.cpus().iter().copied().filter(|cpu| !cpus.contains(*cpu));
    let ignored = CpuList::new(ignored);
    if !ignored.is_empty() {
        eprintln!("forebay: {what}: CPUs {ignored} are not among --cpus ({cpus}) and are ignored");
    }
}

fn cpus(args: &ReplayArgs) -> Result<CpuList, Failure> {
    let allowed = CpuList::new(sys::allowed_cpus());
    let list = cpus_of(args.cpus.as_deref(), &allowed)?;
    let missing = CpuList::new(list.cpus().iter().copied().filter(|cpu| !allowed.contains(*cpu)));
    if !missing.is_empty() && !args.deterministic {
        eprintln!(
            "forebay: CPUs {missing} do not exist here or may not be used: their threads run where \
             the system puts them"
        );
    }
    Ok(list)
}

/// What `--cpus` names. A number means that many CPUs, of those that may be used first; anything
/// else is a list.
pub(crate) fn cpus_of(text: Option<&str>, allowed: &CpuList) -> Result<CpuList, Failure> {
    let Some(text) = text else { return Ok(allowed.clone()) };
    let help = "give a number of CPUs from 1 on, or a list such as 0-3,8";
    let list = match text.trim().parse::<u16>() {
        Ok(count) if count > MAX_CPUS => {
            let problem = format!("--cpus {count}: that is more than there can be");
            return Err(Failure::usage(problem, format!("give {MAX_CPUS} at most")));
        }
        Ok(count) => {
            let count = usize::from(count);
            let others = (0..).map(CpuId).filter(|cpu| !allowed.contains(*cpu));
            CpuList::new(allowed.cpus().iter().copied().chain(others).take(count))
        }
        Err(_) => CpuList::parse_list(text)
            .map_err(|error| Failure::usage(format!("--cpus {text}: {error}"), help))?,
    };
    if list.is_empty() {
        return Err(Failure::usage(format!("--cpus {text}: there is no CPU to run on"), help));
    }
    Ok(list)
}

fn hasher(args: &ReplayArgs, seed: u64) -> Result<Hasher, Failure> {
    let given = args.hash_key.as_deref().map(|text| {
        let help = "give pairs of hexadecimal digits";
        let refused = |error| Failure::usage(format!("--hash-key {text}: {error}"), help);
        hex::decode(text).map_err(refused)
    });
    let given = given.transpose()?;
    match args.hash {
        HashKind::Keyed | HashKind::KeyedSymmetric => {
            let key = match given {
                Some(key) => key.try_into().map_err(|key: Vec<u8>| {
                    let problem = format!("--hash-key of {} bytes", key.len());
                    Failure::usage(problem, "a key for the keyed hash has 16 bytes")
                })?,
                None => seeded_key(seed),
            };
            Ok(Hasher::keyed(&key, args.hash == HashKind::KeyedSymmetric))
        }
        HashKind::Toeplitz | HashKind::ToeplitzSymmetric => {
            let symmetric = args.hash == HashKind::ToeplitzSymmetric;
            let default = if symmetric { SYMMETRIC_KEY } else { STANDARD_KEY };
            let key = given.unwrap_or_else(|| default.to_vec());
            Hasher::toeplitz(&key).map_err(|error| {
                let help = "a key for the Toeplitz hash has at least 40 bytes";
                Failure::usage(format!("--hash-key: {error}"), help)
            })
        }
    }
}

/// A key that the seed determines, so that a run can be repeated. Whoever wrote the captures does
/// not know a seed that is drawn.
fn seeded_key(seed: u64) -> [u8; 16] {
    let mut random = Random::new(seed);
    let words = [random.bits().to_le_bytes(), random.bits().to_le_bytes()];
    let mut key = [0; 16];
    key.copy_from_slice(words.as_flattened());
    key
}

/// The first signal ends the run early, in order; a second one ends the program. Returns what
/// tells whether the run was asked to end.
fn stop_on_signals(stopper: Stopper) -> Arc<AtomicBool> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // Where signals cannot be caught, they end the program as they always do.
        let _ = signal_hook::flag::register_conditional_default(signal, Arc::clone(&asked));
        let _ = signal_hook::flag::register(signal, Arc::clone(&asked));
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&interrupted);
    thread::spawn(move || {
        while !asked.load(Ordering::Relaxed) {
            thread::sleep(PROGRESS_PERIOD);
        }
        // A terminal that is gone must not keep the run from ending in order.
        let _ = writeln!(io::stderr(), "forebay: stopping; once more to end now");
        told.store(true, Ordering::Relaxed);
        stopper.stop();
    });
    interrupted
}

/// A progress bar on standard error, if that is a terminal.
struct Bar {
    bar: ProgressBar,
    done: Arc<AtomicBool>,
    mover: Option<thread::JoinHandle<()>>,
}

impl Bar {
    fn show(progress: &Arc<Progress>, args: &ReplayArgs) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        if !io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden(), done, mover: None };
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
        let (moved, ended, progress) = (bar.clone(), Arc::clone(&done), Arc::clone(progress));
        let mover = thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                moved.set_position(progress.done.load(Ordering::Relaxed));
                thread::sleep(PROGRESS_PERIOD);
            }
        });
        Self { bar, done, mover: Some(mover) }
    }

    fn finish(self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(mover) = self.mover {
            // It only moves a bar; if it panicked, the bar stood still.
            let _ = mover.join();
        }
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
