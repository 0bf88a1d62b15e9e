//! `forebay compare`, with the peers that are installed here.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::Judgement;
use crate::program::told;

/// One connection of `compare tcp`.
const ONE: &str = "TCP, 1 connection";

/// A group of `compare tcp-bulk`.
const TAP: &str = "received over a TAP, 1 flow";

/// Every program of each comparison has figures, or the reason why it has none; ours always have.
pub(crate) fn judge_rows() -> Judgement {
    judge_kind(&["receive"], &["UDP socket", "AF_PACKET", "AF_XDP"])?;
    judge_kind(&["tcp", "--only", ONE], &[ONE])?;
    judge_kind(&["tcp-bulk", "--only", TAP], &[TAP])
}

/// `timeout` signals a program, and then its process group: the comparison ends once, with a report and without
/// what it made. What one that was killed has left goes too, but nothing of one that runs.
pub(crate) fn judge_signalled() -> Judgement {
    let mut killed = Command::new("true").spawn()?;
    killed.wait()?;
    let [killed, running] = [killed.id(), std::process::id()];
    let names = [killed, running].map(|id| format!("forebay-compare-{id}-0-test"));
    for name in &names {
        Command::new("ip").args(["netns", "add", name]).status()?;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["compare", "tcp-loss", "--rounds", "9", "--json"]).process_group(0);
    let mut comparison = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let id = comparison.id();
    while nothing_is_left(id).is_ok() && comparison.try_wait()?.is_none() {
        thread::sleep(Duration::from_millis(20));
    }
    for whom in [id.to_string(), format!("-{id}")] {
        Command::new("kill").args(["-TERM", "--", &whom]).status()?;
    }
    let output = comparison.wait_with_output()?;
    let of_running = nothing_is_left(running);
    Command::new("ip").args(["netns", "del", &names[1]]).status()?;
    let report: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("no report ({error}): {}", told(&output)))?;
    if !output.status.success() || report["is_interrupted"] != true {
        return Err(format!("{:?}: {report}", output.status).into());
    }
    if of_running.is_ok() {
        return Err("a namespace of a process that runs was removed".into());
    }
    nothing_is_left(id)?;
    nothing_is_left(killed)
}

fn judge_kind(kind: &[&str], groups: &[&str]) -> Judgement {
    let directory = tempfile::tempdir()?;
    let drawing = directory.path().join("all.svg");
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("compare").args(kind).args(["--rounds", "1", "--window", "50", "--warm-up", "20"]);
    command.args(["--json", "--svg"]).arg(&drawing).stdout(Stdio::piped()).stderr(Stdio::piped());
    let comparison = command.spawn()?;
    let id = comparison.id();
    let output = comparison.wait_with_output()?;
    if !output.status.success() {
        return Err(format!("it ended with {:?}: {}", output.status.code(), told(&output)).into());
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let comparisons = report["comparisons"].as_array().ok_or("there are no comparisons")?;
    for group in groups {
        if !comparisons.iter().any(|comparison| comparison["group"] == *group) {
            return Err(format!("nothing was compared by {group}").into());
        }
    }
    let drawn = fs::read_to_string(drawing)?.replace("&apos;", "'").replace("&#39;", "'");
    for comparison in comparisons {
        for row in comparison["rows"].as_array().ok_or("there are no rows")? {
            let program = row["program"].as_str().ok_or("a row has no program")?;
            let has_figures = !row["classes"].as_object().ok_or("no classes")?.is_empty();
            let has_reason = row["reason"].as_str().is_some_and(|reason| !reason.is_empty());
            let is_ours = row["side"] == "forebay";
            let is_right =
                if is_ours { has_figures && !has_reason } else { has_figures || has_reason };
            if !is_right {
                return Err(format!("{}: {row}", comparison["group"]).into());
            }
            if !drawn.contains(program) {
                return Err(format!("{program} is not drawn").into());
            }
        }
    }
    nothing_is_left(id)
}

/// No namespace of that process is left behind.
fn nothing_is_left(id: u32) -> Judgement {
    let output = Command::new("ip").args(["netns", "list"]).output()?;
    let left = String::from_utf8_lossy(&output.stdout);
    match left.lines().find(|line| line.starts_with(&format!("forebay-compare-{id}-"))) {
        Some(line) => Err(format!("a namespace is left: {line}").into()),
        None => Ok(()),
    }
}
