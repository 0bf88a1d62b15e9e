//! A run of the program on live devices.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use forebay_control::ControlClient;
use forebay_testkit::namespaces::named::{NamedNamespace, run};
use forebay_testkit::programs;
use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;

use crate::Judgement;
use crate::program::told;

/// Time after which a run counts as hanging.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between two checks of a condition.
pub(super) const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Number of columns of a line of `softnet_stat`.
const SOFTNET_COLUMNS: usize = 15;

const PROGRAM: &str = env!("CARGO_BIN_EXE_forebay");

/// A live run. Drop kills the run, and deletes its files.
pub(super) struct Run {
    child: Option<Child>,
    directory: TempDir,
}

impl Run {
    /// Starts a run in a namespace, and waits until it takes packets.
    pub(super) fn start<S: AsRef<OsStr>>(
        namespace: &NamedNamespace,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Self, Failed> {
        Self::start_as(namespace.command(PROGRAM), args)
    }

    /// Starts a run by a given command, and waits until it takes packets.
    pub(super) fn start_as<S: AsRef<OsStr>>(
        mut command: Command,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Self, Failed> {
        let directory = tempfile::tempdir()?;
        // The run may have another user id, or change to one.
        fs::set_permissions(&directory, Permissions::from_mode(0o777))?;
        let child = command
            .arg("run")
            .args(args)
            .args(["--json", "--control", "s.sock"])
            .current_dir(&directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut run = Self { child: Some(child), directory };
        wait_until("it listens", || {
            if run.child()?.try_wait()?.is_some() {
                let output = run.wait()?;
                return Err(format!("it ended: {}: {}", output.status, told(&output)).into());
            }
            // The queues answer it, between their turns.
            Ok(run.asks("explain 0badcafe").is_ok())
        })?;
        Ok(run)
    }

    /// Directory that the run was started in.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.directory().join("s.sock")
    }

    pub(super) fn id(&self) -> Result<u32, Failed> {
        Ok(self.child.as_ref().ok_or("it has ended")?.id())
    }

    /// Sends a request to the control socket. Returns the lines of the answer.
    pub(super) fn asks(&self, request: &str) -> Result<Vec<String>, Failed> {
        let answer = ControlClient::connect(&self.socket()).and_then(|mut run| run.ask(request));
        answer.map_err(|error| format!("{request}: {error}").into())
    }

    /// Packets processed by all CPUs: the first column of each line of `softnet_stat`.
    pub(super) fn processed(&self) -> Result<u64, Failed> {
        let lines = self.asks("get proc/net/softnet_stat")?.join(" ");
        let packets = lines.split_whitespace().step_by(SOFTNET_COLUMNS);
        Ok(packets.map(|packets| u64::from_str_radix(packets, 16)).sum::<Result<_, _>>()?)
    }

    pub(super) fn signal(&self, signal: &str) -> Result<(), Failed> {
        run("kill", &["-s", signal, &self.id()?.to_string()])
    }

    /// Ends the run in order. Returns its report, which must keep promise 2.
    pub(super) fn stop(&mut self) -> Result<Report, Failed> {
        self.signal("TERM")?;
        Ok(self.ends(0)?.0)
    }

    /// Waits until the run ends with this exit code. Returns its report, which must keep promise 2,
    /// and its standard error.
    pub(super) fn ends(&mut self, code: i32) -> Result<(Report, String), Failed> {
        let output = self.wait()?;
        if output.status.code() != Some(code) {
            return Err(format!("{code} was expected: {}: {}", output.status, told(&output)).into());
        }
        Ok((Report::read(&output)?, told(&output)))
    }

    /// Ends it at once.
    pub(super) fn kill(&mut self) -> Result<(), Failed> {
        self.signal("KILL")?;
        self.wait().map(drop)
    }

    /// Waits for the end of the run. Its output must fit in the pipes.
    pub(super) fn wait(&mut self) -> Result<Output, Failed> {
        wait_until("it ends", || Ok(self.child()?.try_wait()?.is_some()))?;
        Ok(self.child.take().ok_or("it has ended")?.wait_with_output()?)
    }

    fn child(&mut self) -> Result<&mut Child, Failed> {
        Ok(self.child.as_mut().ok_or("it has ended")?)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Ignored: a judgement has already failed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs the program to its end, where it is expected to fail early.
pub(super) fn try_run(mut command: Command, args: &[&str]) -> Result<Output, Failed> {
    let child = command.arg("run").args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    let directory = tempfile::tempdir()?;
    let child = child.current_dir(&directory).env("RUNTIME_DIRECTORY", directory.path());
    let mut run = Run { child: Some(child.spawn()?), directory };
    run.wait()
}

/// A command that runs the program in a namespace.
pub(super) fn command(namespace: &NamedNamespace) -> Command {
    namespace.command(PROGRAM)
}

/// A copy of the program that every user may run.
pub(super) struct Shared(TempDir);

impl Shared {
    pub(super) fn new() -> Result<Self, Failed> {
        let directory = tempfile::tempdir()?;
        programs::copy(PROGRAM, &directory.path().join("forebay"))?;
        fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
        Ok(Self(directory))
    }

    pub(super) fn path(&self) -> PathBuf {
        self.0.path().join("forebay")
    }
}

/// Waits until `is_so` returns true. Fails after [`PATIENCE`].
pub(crate) fn wait_until(
    what: &str,
    mut is_so: impl FnMut() -> Result<bool, Failed>,
) -> Result<(), Failed> {
    let begin = Instant::now();
    while !is_so()? {
        if begin.elapsed() > PATIENCE {
            return Err(format!("waited in vain until {what}").into());
        }
        thread::sleep(LOOK_PERIOD);
    }
    Ok(())
}

/// Final report of a run.
#[derive(Debug)]
pub(super) struct Report(Value);

impl Report {
    /// Parses the document on standard output, and checks that its counts add up and no frame is
    /// missing.
    fn read(output: &Output) -> Result<Self, Failed> {
        let report = serde_json::from_slice(&output.stdout).map_err(|error| {
            let text = String::from_utf8_lossy(&output.stdout);
            format!("standard output is not one document: {error}: {text:?}")
        })?;
        let report = Self(report);
        report.judge_balance()?;
        Ok(report)
    }

    fn judge_balance(&self) -> Judgement {
        let accounted = self.number("delivered")? + self.dropped()? + self.number("queued")?;
        if self.number("packets_in")? != accounted {
            return Err(format!("it does not add up: {}", self.0).into());
        }
        if self.number("frames_away")? != 0 {
            return Err(format!("frames are missing: {}", self.0).into());
        }
        Ok(())
    }

    pub(super) fn number(&self, name: &str) -> Result<u64, Failed> {
        self.0[name].as_u64().ok_or_else(|| format!("no number {name}: {}", self.0).into())
    }

    /// Packets dropped by us, for any reason.
    pub(super) fn dropped(&self) -> Result<u64, Failed> {
        let reasons = self.0["dropped"].as_object().ok_or("there are no drops in the report")?;
        Ok(reasons.values().filter_map(Value::as_u64).sum())
    }

    /// The whole report.
    pub(super) fn value(&self) -> &Value {
        &self.0
    }
}
