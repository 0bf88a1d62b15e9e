//! `forebay run`: from the command line to a plan, and from a report to its output.

mod args; //    options of the command
mod file; //    options in its config file
mod devices; // from the options to devices
mod links; //   messages about the links of interfaces
mod status; //  status line, on a terminal

use std::sync::atomic::Ordering;

pub(crate) use args::{PacketRingArg, RunArgs};
pub(crate) use file::parse;
use forebay_control::config_file::Reloaded;
use forebay_control::{ConfigFile, Control, places};
use forebay_device::Via;
use forebay_engine::{Config, SPARE_FRAMES};
use forebay_run::run::{Run, RunConfig, RunReport, To};
use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;
use forebay_sys::privilege;
use serde::Serialize;
use status::Status;
use tracing::{error, info, warn};

use crate::failure::Failure;
use crate::log::SuppressedReports;
use crate::options::engine::Cpus;
use crate::options::socket::SocketPlace;
use crate::service::ServiceNotices;
use crate::signals::{Hangup, on_hangup, stop_on_signals};
use crate::ticker::{FailureMessages, Ticker};
use crate::{output, table};

/// Runs devices until the run is ended, and prints the report.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    if args.devices.is_empty() {
        return Err(file::or_devices(args.control.config.as_deref()));
    }
    let plan = plan(args)?;
    let cpus = plan.engine.cpus.clone();
    let config = args.control.read()?;
    let access = args.metrics.access()?;
    devices::check_interfaces(args, &plan.devices)?;
    let run = Run::open(plan)?;
    let name = places::name_of(args.devices.iter().map(|device| device.name.as_str()));
    let later = args.user.as_deref().map(privilege::user_named).transpose()?;
    let place = args.control.place(Some(&name), later)?;
    if let Some(user) = &args.user {
        // Before threads are created: each thread would have to drop its privileges itself.
        privilege::drop_to(user)?;
        check_outputs(args, user)?;
        check_reload(config.as_ref(), user);
    }
    let socket = place.map(SocketPlace::bind).transpose()?.flatten();
    let suppressed = SuppressedReports::begin()?;
    let hangup = if config.is_some() { Hangup::Acts } else { Hangup::Ends };
    let interrupted = stop_on_signals(run.stopper(), hangup)?;
    let control = run.control();
    let given = args.engine.given(|change| control.name_of(change));
    // Before others learn of the run: what they connect is told.
    let links = links::watch(args, run.links())?;
    let faces = args.control.open(&control, run.counts(), config.as_ref(), &given, socket)?;
    let metrics = args.metrics.serve(&access, || run.metrics())?;
    let reloader = config.map(|config| reload_on_hangup(config, run.control(), given));
    let reloader = reloader.transpose()?;
    let teller = FailureMessages::begin(run.watch().failures().to_vec())?;
    let status = Status::show(run.watch())?;
    let notices = ServiceNotices::begin(run.control(), run.stopper())?;
    let report = run.run();
    status.finish();
    drop((notices, links, teller, reloader, faces, metrics, suppressed));
    finish(Ran { report: report?, interrupted: interrupted.load(Ordering::Relaxed) }, args, &cpus)
}

/// Reports at once, rather than at the first packet, if the user cannot write the outputs.
fn check_outputs(args: &RunArgs, user: &str) -> Result<(), Failure> {
    let captures = args.to.iter().filter_map(|to| match to {
        To::Pcap(directory) => Some(directory),
        To::Count | To::Tun(_) | To::Dev(_) => None,
    });
    captures.chain(&args.trace.trace).try_for_each(|directory| {
        sys::may_make_files_in(directory).map_err(|error| {
            let directory = directory.display();
            let problem = format!("{user} cannot write to {directory}: {error}");
            Failure::usage(problem, format!("make it theirs: chown {user} {directory}"))
        })
    })
}

/// Tells at once, rather than at the first SIGHUP, if the user cannot read the config file again.
fn check_reload(config: Option<&ConfigFile>, user: &str) {
    let Some(path) = config.map(ConfigFile::path) else { return };
    if let Err(error) = std::fs::File::open(path) {
        let path = path.display();
        warn!(
            file = %path,
            "{user} cannot read {path}: {error}; SIGHUP will change nothing. Let them read it: \
             chgrp THEIRS {path}; chmod 640 {path}"
        );
    }
}

fn plan(args: &RunArgs) -> Result<RunConfig, Failure> {
    let to_captures = args.to.iter().any(|to| matches!(to, To::Pcap(_)));
    if args.resegment && !to_captures {
        let problem = "--resegment: there are no captures to write to";
        return Err(Failure::usage(problem, "give --to pcap:DIR, or leave it out"));
    }
    let has_tap = args.devices.iter().any(|it| it.via.unwrap_or(args.via) == Via::Tap)
        || args.to.iter().any(|to| matches!(to, To::Tun(_)));
    if args.whole_tunnels && !has_tap {
        let problem = "--whole-tunnels: there is no TAP to send to";
        return Err(Failure::usage(problem, "give --to tun:NAME, or leave it out"));
    }
    if args.resegment
        && let Some(lost) = args.engine.coalesce.lost()
    {
        warn!("--resegment: {lost}");
    }
    let devices = devices::configs(args)?;
    let engine = args.engine.config(Cpus::Real, sys::random_key, Vec::new())?;
    let engine = Config { spare_frames: SPARE_FRAMES, spin_max_ns: args.spin.max_ns(), ..engine };
    Ok(RunConfig {
        to: args.to.clone(),
        resegment: args.resegment,
        whole_tunnels: args.whole_tunnels,
        rotation: args.rotate.rotation(to_captures)?,
        trace: args.trace.plan(),
        check_order: args.check,
        duration: args.duration,
        ..RunConfig::new(devices, engine)
    })
}

/// Applies what has changed in the config file on each SIGHUP. The run continues even if the file is
/// invalid.
fn reload_on_hangup(
    config: ConfigFile,
    control: Control,
    given: Vec<String>,
) -> sys::error::Result<Ticker> {
    let mut before = config;
    on_hangup(move || {
        let path = before.path().to_owned();
        let now = match ConfigFile::read_again(&path) {
            Ok(now) => now,
            Err(error) => {
                return error!(file = %path.display(), "{error}; all knobs stay as they are");
            }
        };
        let Reloaded { changed, notes, errors, in_force } =
            now.apply_changes(&before, &control, &given);
        let later = file::changed(&before, &now);
        for line in changed.iter().chain(&notes).chain(&later) {
            info!(file = %path.display(), "{}: {line}", path.display());
        }
        for error in &errors {
            error!(file = %path.display(), "{error}");
        }
        let told = if errors.is_empty() { "read again" } else { "read again, in part" };
        info!(file = %path.display(), "{}: {told}", path.display());
        before = in_force;
    })
}

/// Document that `--json` prints.
#[derive(Serialize)]
struct Ran {
    #[serde(flatten)]
    report: RunReport,
    /// True if a signal asked the run to end.
    interrupted: bool,
}

/// Prints a report, and reports failures.
fn finish(ran: Ran, args: &RunArgs, cpus: &CpuList) -> Result<(), Failure> {
    let text = if args.json {
        serde_json::to_string(&ran).unwrap_or_default() + "\n"
    } else {
        table::render_run(&ran.report, cpus)
    };
    let printed = output::print(&text);
    let broken = ran.report.broken_promises();
    if !broken.is_empty() {
        return Err(Failure::promise(broken, " and the report"));
    }
    match ran.report.errors.into_iter().next() {
        Some(error) => Err(error.into()),
        None => printed,
    }
}
