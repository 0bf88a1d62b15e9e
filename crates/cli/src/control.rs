//! `forebay get`, `set`, `list`, `watch` and `explain`: requests to a run over its control socket.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use clap::Args;
use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use forebay_control::client::{ControlClient, Enough};
use forebay_control::list::ListedKnob;
use forebay_control::names::Names;
use forebay_control::{FlowName, config_file, places};
use forebay_sys::errno::Errno;
use serde::Serialize;
use serde_json::{Value, json};
use tracing::info;

use crate::failure::Failure;
use crate::output;

/// The run that a request goes to.
#[derive(Debug, Args)]
pub(crate) struct AskedRun {
    /// Where the run listens [default: $FOREBAY_CONTROL, else the only run that listens in
    /// $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/forebay or, for root, /run/forebay]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Which run, where several listen: what it was called with --name, or else its devices
    #[arg(long, value_name = "NAME", conflicts_with = "control")]
    name: Option<String>,
}

/// The run that a request goes to, and the output format.
#[derive(Debug, Args)]
pub(crate) struct AskedKnob {
    #[command(flatten)]
    run: AskedRun,

    /// Print JSON and nothing else on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// Names or paths of knobs, as in rps_cpus, rx-0/rps_cpus or proc/net/softnet_stat
    #[arg(required = true, value_name = "KNOB")]
    knobs: Vec<String>,

    #[command(flatten)]
    pub(crate) asked: AskedKnob,
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// What is set, as in rps_cpus=3 or rx-0/rps_cpus=0-3,8; or one knob, and behind it its value
    #[arg(value_name = "KNOB=VALUE")]
    knobs: Vec<String>,

    /// Afterwards, write all knobs that are not at their defaults to FILE, or to the config file
    /// that the run was started with
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    save: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) asked: AskedKnob,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) asked: AskedKnob,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// The knob; all of them if none is given
    knob: Option<String>,

    #[command(flatten)]
    pub(crate) asked: AskedKnob,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Addresses and ports, as in udp 10.0.0.1:5000 10.0.0.2:53, or a hash as in 0badcafe
    #[arg(required = true, value_name = "FLOW")]
    flow: Vec<String>,

    #[command(flatten)]
    pub(crate) asked: AskedKnob,
}

/// Prints the values of knobs.
pub(crate) fn get(args: &GetArgs) -> Result<(), Failure> {
    let mut client = args.asked.connect()?;
    let mut read = Vec::new();
    for knob in &args.knobs {
        read.push((knob.as_str(), client.ask(&format!("get {knob}"))?));
    }
    output::print(&if args.asked.json {
        let value = |lines: &[String]| match lines {
            [line] => json!(line),
            lines => json!(lines),
        };
        let read: BTreeMap<_, _> = read.iter().map(|(knob, lines)| (*knob, value(lines))).collect();
        line(&read)
    } else if let [(_, lines)] = &read[..] {
        text(lines)
    } else {
        let named = |(knob, lines): &(&str, Vec<String>)| format!("{knob} {}\n", lines.join(" "));
        read.iter().map(named).collect()
    })
}

/// Document that `set --json` prints.
#[derive(Debug, Default, Serialize)]
struct Set {
    /// Value of each knob that was set, read back.
    now: BTreeMap<String, String>,
    /// Deviations from the requested values.
    notes: Vec<String>,
    /// File that the knobs were saved to.
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<PathBuf>,
}

impl Set {
    /// Failure that also tells the knobs that were set before it.
    fn with_knobs_set(&self, failure: Failure) -> Failure {
        if self.now.is_empty() {
            return failure;
        }
        let names: Vec<_> = self.now.keys().map(String::as_str).collect();
        failure.and_help(&format!("set before that: {}", names.join(", ")))
    }
}

/// Sets knobs, reports the values in effect, and saves them if requested.
pub(crate) fn set(args: &SetArgs) -> Result<(), Failure> {
    let settings = settings(&args.knobs)?;
    if settings.is_empty() && args.save.is_none() {
        let help = "give KNOB=VALUE, or --save; see `forebay list` for the knobs";
        return Err(Failure::usage("there is nothing to set", help));
    }
    let mut client = args.asked.connect()?;
    let mut set = Set::default();
    for (knob, value) in settings {
        let lines = client.ask(&format!("set {knob}={value}"));
        for line in lines.map_err(|error| set.with_knobs_set(error.into()))? {
            info!("{line}");
            match line.strip_prefix("now ").map(|now| now.split_once(' ').unwrap_or((now, ""))) {
                Some((name, value)) => drop(set.now.insert(name.to_owned(), value.to_owned())),
                None => set.notes.push(line),
            }
        }
    }
    if let Some(file) = &args.save {
        let saved = save(&mut client, file.clone());
        set.saved = Some(saved.map_err(|failure| set.with_knobs_set(failure))?);
    }
    if args.asked.json { output::print(&line(&set)) } else { Ok(()) }
}

/// Prints all knobs.
pub(crate) fn list(args: &ListArgs) -> Result<(), Failure> {
    let knobs = ask_for_list(&mut args.asked.connect()?)?;
    output::print(&if args.asked.json {
        let knob = |ListedKnob { path, value, default, meaning, .. }: &ListedKnob| json!({ "path": path, "value": value, "default": default, "meaning": meaning });
        line(&knobs.iter().map(knob).collect::<Vec<_>>())
    } else {
        let mut table = Table::new();
        table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(["knob", "value", "default", "what it is"]);
        let paths: Vec<_> = knobs.iter().map(|knob| &knob.path).collect();
        let names = Names::of(&paths);
        for ListedKnob { path, value, default, meaning, .. } in &knobs {
            table.add_row([&names.short(path), value.as_str(), default, meaning]);
        }
        table.trim_fmt() + "\n"
    })
}

/// Prints the values of knobs, and every change, until interrupted or until the run ends.
pub(crate) fn watch(args: &WatchArgs) -> Result<(), Failure> {
    let knob = args.knob.as_deref().unwrap_or_default();
    let mut failed = None;
    args.asked.connect()?.watch(&format!("watch {knob}"), |told| {
        let told = match told.split_once(' ') {
            Some((name, value)) if args.asked.json => {
                line(&json!({ "name": name, "value": value }))
            }
            _ => format!("{told}\n"),
        };
        match output::write(&told) {
            Ok(()) => Enough::No,
            Err(error) => {
                failed = (error.kind() != io::ErrorKind::BrokenPipe).then_some(error);
                Enough::Yes
            }
        }
    })?;
    failed.map_or(Ok(()), |error| Err(Failure::Output { error }))
}

/// Prints a flow's CPU and the reason for it.
pub(crate) fn explain(args: &ExplainArgs) -> Result<(), Failure> {
    let flow: FlowName = args.flow.join(" ").parse()?;
    let json = if args.asked.json { "--json " } else { "" };
    output::print(&text(&args.asked.connect()?.ask(&format!("explain {json}{flow}"))?))
}

impl AskedRun {
    /// Path of the run's control socket.
    pub(crate) fn path(&self) -> Result<PathBuf, Failure> {
        let set = || std::env::var_os("FOREBAY_CONTROL").filter(|path| !path.is_empty());
        Ok(match (&self.control, &self.name) {
            (Some(path), _) => path.clone(),
            (None, Some(name)) => places::find(Some(name))?,
            (None, None) => match set() {
                Some(path) => path.into(),
                None => places::find(None)?,
            },
        })
    }
}

impl AskedKnob {
    fn connect(&self) -> Result<ControlClient, Failure> {
        Ok(ControlClient::connect(&self.run.path()?)?)
    }
}

/// Parses `KNOB=VALUE…`, or one `KNOB VALUE…`.
fn settings(words: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let split = |word: &String| {
        word.split_once('=').map(|(knob, value)| (knob.to_owned(), value.to_owned()))
    };
    match words {
        [knob, value @ ..] if !knob.contains('=') && !value.is_empty() => {
            Ok(vec![(knob.clone(), value.join(" "))])
        }
        words => words.iter().map(|word| split(word).ok_or_else(|| no_value(word))).collect(),
    }
}

fn no_value(knob: &str) -> Failure {
    Failure::usage(format!("{knob} has no value"), format!("give {knob}=VALUE"))
}

fn ask_for_list(client: &mut ControlClient) -> Result<Vec<ListedKnob>, Failure> {
    let lines = client.ask("list")?;
    Ok(lines.iter().filter_map(|line| ListedKnob::from_line(line)).collect())
}

/// Saves the knobs. Returns the file's path.
fn save(client: &mut ControlClient, file: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let path = match file {
        Some(file) if file.to_string_lossy().contains('=') => {
            let problem = format!("--save {}: that is not a file's name", file.display());
            return Err(Failure::usage(problem, "put --save behind what is to be set"));
        }
        Some(file) => file,
        None if !client.is_own_run() => {
            let problem = "--save: the run is another user's, who would choose the file";
            return Err(Failure::usage(problem, "say where: --save FILE"));
        }
        None => match client.config() {
            Ok(path) => path,
            Err(forebay_sys::Error::Refused(refused))
                if matches!(refused.errno, Errno::NoEnt | Errno::Inval) =>
            {
                return Err(Failure::usage(refused.why, "say where: --save FILE"));
            }
            Err(error) => return Err(error.into()),
        },
    };
    config_file::save(&path, &ask_for_list(client)?)?;
    info!("saved to {}", path.display());
    Ok(path)
}

fn text(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

fn line(document: &impl Serialize) -> String {
    serde_json::to_value(document).unwrap_or(Value::Null).to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_two_forms() {
        let read = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(ToString::to_string).collect();
            settings(&words).map_err(|failure| failure.to_string())
        };
        let setting = |knob: &str, value: &str| (knob.to_owned(), value.to_owned());
        assert_eq!(read(&[]), Ok(vec![]));
        assert_eq!(read(&["a=1", "b="]), Ok(vec![setting("a", "1"), setting("b", "")]));
        assert_eq!(read(&["a", "1"]), Ok(vec![setting("a", "1")]));
        assert_eq!(read(&["a", "1", "2"]), Ok(vec![setting("a", "1 2")]));
        assert_eq!(read(&["a"]), Err("a has no value".to_owned()));
        assert_eq!(read(&["a=1", "b"]), Err("b has no value".to_owned()));
    }
}
