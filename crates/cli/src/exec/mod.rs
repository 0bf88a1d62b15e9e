//! `forebay exec`: a program that is not ours, with the library preloaded that gives it our sockets.

mod program; // programs that cannot be preloaded

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf, absolute};
use std::process::{self, Command};

use clap::Args;
use forebay_control::preload_config::{PreloadConfig, Spin, VARIABLE};
use forebay_device::Via;
use forebay_device::rx_filter::RxFilter;
use forebay_sys::interface::Interface;
use forebay_sys::private_listener::address_of;

use crate::failure::Failure;

/// File name of the library, and the folders where it may be, from the folder of this program.
const LIBRARY: &str = "libforebay_preload.so";
const FOLDERS: [&str; 2] = [".", "../lib/forebay"];

const LOADER: &str = "LD_PRELOAD";

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Interfaces whose packets are taken
    #[arg(required = true, value_name = "DEV")]
    devices: Vec<String>,

    /// Backend of the devices: af_packet, af_xdp or tap
    #[arg(long, value_name = "VIA", default_value = "af_xdp")]
    via: Via,

    /// Ports that are taken, as in udp:53,tcp:80,udp:1000-2000: the program's UDP sockets that are bound
    /// to one of them, TCP sockets that listen on one and the connections that they accept are ours, all
    /// other sockets the kernel's
    #[arg(long, value_name = "LIST")]
    take: RxFilter,

    /// Spinning of the engine's threads without work: auto for a moment, then they sleep; never: they
    /// sleep at once; always: they never sleep
    #[arg(long, value_name = "auto|never|always", default_value_t)]
    spin: Spin,

    /// Listen there for get, set, list, watch, explain and top, from when the program has opened a
    /// socket of ours until it ends
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Open the devices (af_packet) as the program starts, for one that gives up CAP_NET_RAW before it binds or listens
    #[arg(long)]
    open_at_start: bool,

    /// Program, and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Becomes the program. Returns only if that cannot be.
pub(crate) fn run(args: &ExecArgs) -> Result<(), Failure> {
    let [program, arguments @ ..] = args.program.as_slice() else {
        return Err(usage("there is no program to run", "name one after --"));
    };
    let config = config(args)?;
    program::check(&program::find(program)?)?;
    let mut preloaded = library()?.into_os_string();
    if let Some(others) = env::var_os(LOADER).filter(|others| !others.is_empty()) {
        preloaded.push(":");
        preloaded.push(others);
    }
    let mut command = Command::new(program);
    command.args(arguments).env(LOADER, preloaded).env(VARIABLE, config.to_string());
    let problem = format!("cannot run {}: {}", program.display(), command.exec());
    Err(usage(&problem, "check that it is a program, and may be run"))
}

fn config(args: &ExecArgs) -> Result<PreloadConfig, Failure> {
    if args.via != Via::Tap {
        args.devices.iter().try_for_each(|name| Interface::named(name).map(drop))?;
    }
    let (devices, via, spin) = (args.devices.clone(), args.via, args.spin);
    let control = args.control.as_deref().map(control_path).transpose()?;
    // This process becomes the program.
    let opened_by = args.open_at_start.then(process::id);
    if opened_by.is_some() && via != Via::AfPacket {
        let problem = format!("devices of --via {via} cannot be opened as the program starts");
        return Err(usage(&problem, "use --via af_packet, or leave out --open-at-start"));
    }
    let take = args.take.clone();
    let config = PreloadConfig { devices, via, take, spin, control, opened_by };
    // As the library will read it.
    config.to_string().parse().map_err(|_: String| {
        let problem = format!("a program's sockets cannot be had by --via {via}");
        usage(&problem, "use af_packet, af_xdp or tap")
    })
}

/// Path of the control socket, whatever folder the program goes to.
fn control_path(path: &Path) -> Result<PathBuf, Failure> {
    let refused = |why: &str| {
        let problem = format!("the control socket cannot be at {}: {why}", path.display());
        usage(&problem, "give another path")
    };
    let whole = absolute(path).map_err(|error| refused(&error.to_string()))?;
    address_of(&whole, "the control socket")?;
    // It is a word of an environment variable.
    let is_word = |text: &str| !text.contains(|c: char| c.is_ascii_whitespace());
    match whole.to_str().is_some_and(is_word) {
        true => Ok(whole),
        false => Err(refused("it has blanks, or is not UTF-8")),
    }
}

/// Path of the library.
fn library() -> Result<PathBuf, Failure> {
    let own = env::current_exe().and_then(|own| own.canonicalize());
    let folder = own.ok().and_then(|own| own.parent().map(PathBuf::from)).unwrap_or_default();
    let places = FOLDERS.map(|place| folder.join(place).join(LIBRARY));
    places.iter().find_map(|place| place.canonicalize().ok()).ok_or_else(|| {
        let problem = format!("{LIBRARY} is neither beside this program nor in ../lib/forebay");
        usage(
            &problem,
            "build it (`cargo build --release -p forebay-preload`), or install it there",
        )
    })
}

fn usage(problem: &str, help: &str) -> Failure {
    Failure::Usage { problem: problem.to_owned(), help: help.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_5_early_opening_needs_af_packet() {
        let args = |via, open_at_start| ExecArgs {
            devices: vec!["lo".to_owned()],
            via,
            take: "udp:53".parse().unwrap(),
            spin: Spin::Auto,
            control: None,
            open_at_start,
            program: vec!["true".into()],
        };
        let opened_by = |args: &ExecArgs| config(args).map(|config| config.opened_by);
        assert_eq!(opened_by(&args(Via::AfPacket, true)).unwrap(), Some(process::id()));
        assert_eq!(opened_by(&args(Via::AfPacket, false)).unwrap(), None);
        for via in [Via::AfXdp, Via::Tap] {
            let Err(Failure::Usage { problem, help }) = config(&args(via, true)) else {
                panic!("{via} cannot be inherited")
            };
            assert!(problem.contains(via.name()) && help.contains("af_packet"), "{problem}");
            config(&args(via, false)).unwrap();
        }
    }
}
