//! Options of a run in its config file: they stand in front of those typed, which override them.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use forebay_control::ConfigFile;
use forebay_control::run_options::{OptionValue, RunOption};
use forebay_sys::Error;

use crate::args::Cli;
use crate::failure::Failure;

/// Name of the command whose options a file can have.
const RUN: &str = "run";
/// Name in the file of the devices, which are not an option.
const DEVICES: &str = "devices";
/// Options that a file cannot have: the file itself.
const NOT_IN_FILE: &str = "config";
/// Option that ends the run's privileges.
const USER: &str = "user";

/// Parses a command line; one of a run is completed by its config file. Ends the program as clap
/// does if the command line is invalid, or asks for help.
pub(crate) fn parse(typed: &[OsString]) -> Result<Cli, Failure> {
    // What is typed may need options that only the file has.
    let parts = Cli::command().ignore_errors(true).try_get_matches_from(typed);
    let file = parts.iter().find_map(|parts| {
        let run = parts.subcommand_matches(RUN)?;
        Some((run, run.get_one::<std::path::PathBuf>(NOT_IN_FILE)?))
    });
    let matches = match file {
        Some((run, path)) => with_file(&ConfigFile::read(path)?, run, typed)?,
        None => Cli::command().try_get_matches_from(typed).map_err(|error| shown(&error))?,
    };
    Ok(Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()))
}

/// Shows an error of the command line, or the help or version that it asks for, and ends the program. Returns only
/// if that cannot be written.
fn shown(error: &clap::Error) -> Failure {
    if error.use_stderr() {
        error.exit();
    }
    match error.print().and_then(|()| io::stdout().flush()) {
        // A closed pipe: its reader has read enough.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Failure::Output { error },
        _ => std::process::exit(0),
    }
}

/// Parses the command line again, with the options of the file in it.
fn with_file(
    file: &ConfigFile,
    run: &ArgMatches,
    typed: &[OsString],
) -> Result<ArgMatches, Failure> {
    let mut line: Vec<OsString> = typed.iter().take(2).cloned().collect();
    let FileWords { options, devices } = words(file, run)?;
    line.extend(options.into_iter().map(OsString::from));
    line.extend(typed.iter().skip(2).cloned());
    // A device's name is never an option.
    let ends_options = !devices.is_empty() && !typed.iter().any(|word| word == "--");
    line.extend(ends_options.then(|| OsString::from("--")));
    line.extend(devices.into_iter().map(OsString::from));
    Cli::command().try_get_matches_from(line).map_err(|error| {
        match Cli::command().try_get_matches_from(typed) {
            // The file has no part in it.
            Err(typed) if typed.kind() == error.kind() => return shown(&typed),
            Ok(_) | Err(_) => {}
        }
        let text = error.render().to_string();
        let first = text.lines().next().unwrap_or_default();
        let problem = format!(
            "{} and the command line: {}",
            file.path().display(),
            first.strip_prefix("error: ").unwrap_or(first)
        );
        Failure::usage(problem, "correct the table [run] of that file, or the command line")
    })
}

/// Words of a file.
#[derive(Debug, Default)]
struct FileWords {
    options: Vec<String>,
    devices: Vec<String>,
}

/// Words of the file's options, but for those that are typed, or exclude one that is.
fn words(file: &ConfigFile, run: &ArgMatches) -> Result<FileWords, Failure> {
    let command = Cli::command();
    let mut words = FileWords::default();
    let Some(command) = command.find_subcommand(RUN) else { return Ok(words) };
    let typed: Vec<_> = command.get_arguments().filter(|arg| is_typed(run, arg)).collect();
    for option in file.run_options() {
        let wrong = |problem: String| -> Failure {
            Error::Config { path: file.path().to_owned(), line: option.line, problem }.into()
        };
        let Some(arg) = argument(command, &option.name) else {
            return Err(wrong(unknown(&option.name)));
        };
        let words_of_it = words_of(option, arg).map_err(wrong)?;
        let yields = |it: &&Arg| it.get_id() == arg.get_id() || is_ousted(command, arg, it);
        if typed.iter().any(yields) {
            continue;
        }
        let place = if arg.is_positional() { &mut words.devices } else { &mut words.options };
        place.extend(words_of_it);
    }
    Ok(words)
}

fn is_typed(run: &ArgMatches, arg: &Arg) -> bool {
    run.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
}

/// True if an option of the file yields to a typed one that excludes it. `user` does not: nobody is to
/// keep privileges unawares.
fn is_ousted(command: &Command, of_file: &Arg, typed: &Arg) -> bool {
    let names = |of: &Arg, it: &Arg| {
        command.get_arg_conflicts_with(of).iter().any(|arg| arg.get_id() == it.get_id())
    };
    of_file.get_long() != Some(USER) && (names(of_file, typed) || names(typed, of_file))
}

fn argument<'a>(run: &'a Command, name: &str) -> Option<&'a Arg> {
    let is_it = |arg: &&Arg| match arg.get_long() {
        Some(long) => long == name && long != NOT_IN_FILE,
        None => arg.is_positional() && name == DEVICES,
    };
    run.get_arguments().find(is_it)
}

fn unknown(name: &str) -> String {
    format!("`forebay run` has no option {name}; {DEVICES} are its devices, see forebay help run")
}

/// Words of one option, as they would be typed.
fn words_of(option: &RunOption, arg: &Arg) -> Result<Vec<String>, String> {
    let RunOption { name, value, .. } = option;
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    match value {
        OptionValue::Flag(is_given) if is_flag => {
            Ok(is_given.then(|| format!("--{name}")).into_iter().collect())
        }
        OptionValue::Texts(texts) if arg.is_positional() => Ok(texts.clone()),
        OptionValue::Texts(texts) if !is_flag => {
            Ok(texts.iter().map(|text| format!("--{name}={text}")).collect())
        }
        OptionValue::Flag(_) => Err(format!("{name} takes a value, not true or false")),
        OptionValue::Texts(_) => Err(format!("{name} is true or false")),
    }
}

/// Words about options that have changed since the run began, if any: they take effect with the
/// next run.
pub(super) fn changed(before: &ConfigFile, now: &ConfigFile) -> Option<String> {
    let plain = |file: &ConfigFile| -> Vec<_> {
        let options = file.run_options().iter();
        options.map(|option| (option.name.clone(), option.value.clone())).collect()
    };
    let (before, now) = (plain(before), plain(now));
    let mut names: Vec<_> = before
        .iter()
        .filter(|option| !now.contains(option))
        .chain(now.iter().filter(|option| !before.contains(option)))
        .map(|(name, _)| name.as_str())
        .collect();
    names.sort_unstable();
    names.dedup();
    (!names.is_empty())
        .then(|| format!("{} changed: that takes effect with the next run", names.join(", ")))
}

/// Path of a config file that names the devices.
pub(super) fn or_devices(path: Option<&Path>) -> Failure {
    let problem = match path {
        Some(path) => {
            format!("{} names no devices, and neither does the command line", path.display())
        }
        None => "no device is named".to_owned(),
    };
    Failure::usage(problem, "name one, or give devices = [\"DEV\"] in the table [run]")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::args::Command as Chosen;
    use crate::run::RunArgs;

    /// Arguments of a run, by a config file and a command line.
    fn args(file: &str, typed: &str) -> Result<RunArgs, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f.toml");
        fs::write(&path, file).unwrap();
        let path = path.to_str().unwrap();
        let typed =
            ["forebay", "run", "--config", path].into_iter().chain(typed.split_whitespace());
        match parse(&typed.map(OsString::from).collect::<Vec<_>>())
            .map_err(|error| error.to_string())?
            .command
        {
            Chosen::Run(args) => Ok(*args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn svc_1_file_says_what_options_say() {
        let file = "[run]\ndevices = [\"eth1\", \"tun:t0\"]\ntake = \"udp:53\"\nqueues = 2\n\
                    check = true\nyes = false\nduration = 1.5\ncpus = \"0-1\"\nto = [\"count\", \
                    \"pcap:/d\"]\nset = [\"dev_weight=32\", \"mtu=70\"]\ncoalesce = \"gro\"\n\
                    name = \"dns\"\nmove-after = 7\n";
        let args = args(file, "").unwrap();
        let devices: Vec<_> = args.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(devices, ["eth1", "t0"]);
        assert_eq!((args.queues.get(), args.check, args.yes), (2, true, false));
        assert_eq!(args.duration, Some(std::time::Duration::from_millis(1500)));
        assert_eq!((args.to.len(), args.engine.set.len()), (2, 2));
        assert_eq!(args.engine.cpus.cpus.as_deref(), Some("0-1"));
        assert_eq!(args.engine.move_after, Some(7));
        assert_eq!(args.control.name.as_deref(), Some("dns"));
        assert!(args.take.is_some() && args.engine.coalesce.coalesce.is_some());
    }

    #[test]
    fn svc_1_command_line_overrides_file() {
        let file = "[run]\ndevices = [\"eth1\"]\nqueues = 2\nto = [\"count\", \"count\"]\n";
        let both = args(file, "eth7 --queues 4 --to dev:eth9").unwrap();
        assert_eq!((both.devices.len(), both.devices[0].name.as_str()), (1, "eth7"));
        assert_eq!((both.queues.get(), both.to.len()), (4, 1));
        assert_eq!(args(file, "--json").unwrap().queues.get(), 2);
    }

    /// Typed options may need options that the file has.
    #[test]
    fn svc_1_typed_options_need_those_of_file() {
        let file = "[run]\ndevices = [\"a\"]\nmetrics = \"9464\"\ntrace = \"d\"\n";
        let both = args(file, "--metrics-host m.example --trace-parse").unwrap();
        assert_eq!(both.metrics.metrics_host, ["m.example"]);
        assert!(both.trace.trace_parse);
        let refused = args("[run]\ndevices = [\"a\"]\nmetrics-host = [\"m\"]\n", "").unwrap_err();
        assert!(
            refused.contains("f.toml and the command line: the following required"),
            "{refused}"
        );
    }

    #[test]
    fn svc_1_typed_options_oust_those_they_exclude() {
        let control = "[run]\ndevices = [\"a\"]\ncontrol = \"/run/c.sock\"\n";
        let without = args(control, "--no-control").unwrap().control;
        assert!(without.no_control && without.control.is_none());
        let named = args(control, "--name n").unwrap().control;
        assert_eq!((named.name.as_deref(), named.control), (Some("n"), None));
        let silent = "[run]\ndevices = [\"a\"]\nno-control = true\n";
        let heard = args(silent, "--control c.sock").unwrap().control;
        assert!(!heard.no_control && heard.control.is_some());
        let refused =
            args("[run]\ndevices = [\"a\"]\nuser = \"nobody\"\n", "--mount /m").unwrap_err();
        assert!(refused.contains("cannot be used with"), "{refused}");
    }

    /// Knobs of the file are not set where these say otherwise.
    #[test]
    fn svc_1_typed_options_override_knobs() {
        let given = |typed: &str| {
            let file = "[run]\ndevices = [\"a\"]\n[knobs]\nflow_key = \"inner\"\n";
            args(file, typed).unwrap().engine.given(ToString::to_string)
        };
        assert!(given("").is_empty());
        assert_eq!(given("--flow-key outer"), ["flow_key"]);
        assert_eq!(given("--spread busy"), ["rps_spread"]);
        assert_eq!(given("--descriptors 9"), ["coalesce", "lro_descriptors"]);
        assert_eq!(given("--rps 1 --mtu 1500"), ["rps_cpus", "coalesce", "mtu"]);
        let each = given("--set dev_weight=9 --set rx-0/rps_cpus=1 --set online=1:0");
        assert_eq!(each, ["dev_weight=9", "rx-0/rps_cpus=1", "online=1:0"]);
        assert_eq!(given("--set cpus=0"), ["cpus=0", "online"]);
    }

    #[test]
    fn svc_1_device_names_are_no_options() {
        let file = "[run]\ndevices = [\"--help\", \"-x\"]\n";
        for typed in ["", "--json", "--json --"] {
            let devices = args(file, typed).unwrap().devices;
            let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
            assert_eq!(names, ["--help", "-x"], "{typed}");
        }
    }

    #[test]
    fn svc_1_bad_options_name_file_and_line() {
        for (file, part) in [
            (
                "[run]\ndevices = [\"a\"]\nspeed = 3\n",
                "f.toml:3: `forebay run` has no option speed",
            ),
            ("[run]\nconfig = \"f\"\n", "f.toml:2: `forebay run` has no option config"),
            ("[run]\ncheck = 1\n", "f.toml:2: check is true or false"),
            ("[run]\ntake = true\n", "f.toml:2: take takes a value"),
            ("[run]\nqueues = 0\n", "f.toml and the command line: invalid value '0' for '--queues"),
            ("[run]\nname = \"a\"\nno-control = true\n", "cannot be used with"),
        ] {
            let refused = args(file, "").unwrap_err();
            assert!(refused.contains(part), "{file}: {refused}");
        }
        assert!(args("[knobs]\nmtu = 70\n", "").unwrap().devices.is_empty());
    }
}
