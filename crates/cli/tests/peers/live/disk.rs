//! A full disk: it is told when it fills, and what is not written is counted.

use std::fs;
use std::path::Path;

use forebay_testkit::namespaces::named;
use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;

use crate::Judgement;
use crate::live::Judge;
use crate::live::messages::Messages;
use crate::program::{replay, told};

pub(crate) const TRIALS: [Judge; 2] = [
    ("ops_2_full_disk_is_told_at_once", judge_at_once),
    ("ops_2_lost_trace_rows_are_counted", judge_trace),
];

/// A small file system, for as long as this value lives.
pub(super) struct SmallDisk(TempDir);

impl SmallDisk {
    pub(super) fn new() -> Result<Self, Failed> {
        let disk = Self(tempfile::tempdir()?);
        named::run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs", &disk.name()])?;
        Ok(disk)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn name(&self) -> String {
        self.0.path().display().to_string()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Ignored: nothing can be done about a failure here.
        let _ = named::run("umount", &["-l", &self.name()]);
    }
}

/// The message comes while the run goes on, with the place and the remedy.
fn judge_at_once() -> Judgement {
    for what in ["--write-pcap", "--trace"] {
        let disk = SmallDisk::new()?;
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["replay", "--loops", "1000000", "--rate", "20k", "--log", "json"]);
        command.args([what, &disk.name()]);
        let mut run = Messages::of(command)?;
        let failure = run.wait_for("problem")?;
        run.judge_alive()?;
        let text = |field: &str| failure[field].as_str().unwrap_or_default().to_owned();
        let parts = [disk.name(), "No space left on device".to_owned()];
        let is_whole = parts.iter().all(|part| text("problem").contains(part))
            && text("consequence").contains("counted")
            && text("help").contains("room");
        if !is_whole || failure["level"] != "ERROR" {
            return Err(format!("{what}: {failure}").into());
        }
    }
    Ok(())
}

/// Rows in the files and lost rows are those of a disk with room.
fn judge_trace() -> Judgement {
    let (roomy, small) = (tempfile::tempdir()?, SmallDisk::new()?);
    let run = |directory: &str, code| -> Result<(Value, String), Failed> {
        let fixed = ["--deterministic", "--cpus", "1", "--json", "--trace", directory];
        let output = replay(roomy.path(), fixed);
        if output.status.code() != Some(code) {
            return Err(format!("{code} was expected: {}", told(&output)).into());
        }
        Ok((serde_json::from_slice(&output.stdout)?, told(&output)))
    };
    let (whole, _) = run("roomy", 0)?;
    let (cut, said) = run(&small.name(), 3)?;
    let lost = cut["trace_rows_lost"].as_u64().unwrap_or(0);
    let [all, left] = [&roomy.path().join("roomy"), small.path()].map(rows);
    let (all, left) = (all?, left?);
    let is_told = said.matches("left out, and counted").count() == 1;
    if whole["trace_rows_lost"] == 0 && lost > 0 && left + lost == all && is_told {
        return Ok(());
    }
    Err(format!("{left} rows and {lost} lost, of {all}: {said}").into())
}

/// Lines of all tables of a trace.
fn rows(directory: &Path) -> Result<u64, Failed> {
    let mut rows = 0;
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "csv") {
            let text = fs::read_to_string(path)?;
            if !text.is_empty() && !text.ends_with('\n') {
                return Err("half a row is left".into());
            }
            rows += text.lines().count() as u64;
        }
    }
    Ok(rows)
}
