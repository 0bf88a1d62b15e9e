//! The two sides that a script runs on: the kernel's tree, and a run's.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use std::{fmt, fs, thread};

use forebay_testkit::namespaces::named::{NamedNamespace, run};
use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;

use crate::program;

/// Interval between two checks for a mount.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// Output of a script.
#[derive(PartialEq, Eq)]
pub(super) struct Told {
    pub(super) output: String,
    pub(super) errors: String,
    pub(super) code: Option<i32>,
}

impl Told {
    /// Output with the differences between the sides removed: the root, and the number's name.
    fn of(output: &Output, root: &Path, number: &str) -> Self {
        let text = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes);
            text.replace(&*root.to_string_lossy(), "").replace(number, "INT")
        };
        Self {
            output: text(&output.stdout),
            errors: text(&output.stderr),
            code: output.status.code(),
        }
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} exit {:?}, errors {:?}", self.output, self.code, self.errors)
    }
}

/// The kernel's files, under a root laid out as ours. A device named as in a replay exists in a
/// network namespace, which has only the numbers of that namespace.
pub(super) struct Kernel {
    namespace: NamedNamespace,
    root: TempDir,
}

impl Kernel {
    const NUMBER: &str = "somaxconn";

    /// Sets up a mount namespace, so that nothing has to be cleaned up.
    const SETUP: &str = "set -e
        mount -t sysfs none \"$T/sys\"
        mount --bind /proc/sys/net/core \"$T/proc/sys/net/core\"
        mount --bind /proc/net/softnet_stat \"$T/proc/net/softnet_stat\"
        exec bash -c \"$0\"";

    pub(super) fn new() -> Result<Self, Failed> {
        let namespace = NamedNamespace::new()?;
        let link = ["link", "add", "name", "replay", "numrxqueues", "2"];
        let kind = ["type", "veth", "peer", "name", "peer"];
        run("ip", &[&["-n", namespace.name()], &link[..], &kind[..]].concat())?;
        let root = tempfile::tempdir()?;
        for directory in ["sys", "proc/sys/net/core", "proc/net"] {
            fs::create_dir_all(root.path().join(directory))?;
        }
        fs::write(root.path().join("proc/net/softnet_stat"), "")?;
        let kernel = Self { namespace, root };
        let tried = kernel.output_of("true")?;
        if tried.code == Some(0) { Ok(kernel) } else { Err(tried.errors.into()) }
    }

    pub(super) fn output_of(&self, script: &str) -> Result<Told, Failed> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.namespace.name(), "sh", "-c", Self::SETUP, script]);
        output_of(command, self.root.path(), Self::NUMBER)
    }
}

/// An empty directory to mount on. Drop unmounts it, whatever the run has left.
pub(super) struct Mountpoint(TempDir);

impl Mountpoint {
    pub(super) fn new() -> Result<Self, Failed> {
        Ok(Self(tempfile::tempdir()?))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mountpoint {
    fn drop(&mut self) {
        // Only a failed run leaves a mount.
        let _ = run("umount", &["-l", &self.path().to_string_lossy()]);
    }
}

/// A run of the program with its knobs mounted.
pub(super) struct Run {
    child: Option<Child>,
    root: PathBuf,
}

impl Run {
    const NUMBER: &str = "netdev_max_backlog";

    /// Starts a run that continues until told to stop, and waits for its files.
    pub(super) fn start(directory: &Mountpoint) -> Result<Self, Failed> {
        Self::start_at(directory, "2k")
    }

    /// Starts a run with this rate in packets per second.
    pub(super) fn start_at(directory: &Mountpoint, rate: &str) -> Result<Self, Failed> {
        Self::start_by(directory.path(), rate)
    }

    /// Starts a run on a directory, given by another name.
    pub(super) fn start_by(root: &Path, rate: &str) -> Result<Self, Failed> {
        let child = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["replay", "--json", "--rate", rate, "--loops", "1000000", "--queues", "2"])
            .arg("--mount")
            .arg(root)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut run = Self { child: Some(child), root: root.to_owned() };
        // Wait until packets were delivered: a run stopped earlier would prove nothing.
        while !has_delivered(root) {
            let child = run.child.as_mut().ok_or("no child")?;
            if child.try_wait()?.is_some() {
                return Err(program::told(&run.wait()?).into());
            }
            thread::sleep(LOOK_PERIOD);
        }
        Ok(run)
    }

    pub(super) fn output_of(&self, script: &str) -> Result<Told, Failed> {
        self.output_under(&["bash", "-c"], script)
    }

    /// Runs a script by a given command.
    pub(super) fn output_under(&self, command: &[&str], script: &str) -> Result<Told, Failed> {
        let mut whole = Command::new(command[0]);
        whole.args(&command[1..]).arg(script);
        output_of(whole, &self.root, Self::NUMBER)
    }

    /// Ends the run in order. Returns its report.
    pub(super) fn stop(mut self) -> Result<Value, Failed> {
        self.signal("TERM")?;
        let output = self.wait()?;
        if output.status.success() {
            Ok(serde_json::from_slice(&output.stdout)?)
        } else {
            Err(format!("{}: {}", output.status, program::told(&output)).into())
        }
    }

    /// Kills the run.
    pub(super) fn kill(mut self) -> Result<(), Failed> {
        self.signal("KILL")?;
        self.wait()?;
        Ok(())
    }

    fn signal(&self, signal: &str) -> Result<(), Failed> {
        let id = self.child.as_ref().ok_or("it has ended")?.id().to_string();
        run("kill", &["-s", signal, &id])
    }

    fn wait(&mut self) -> Result<Output, Failed> {
        Ok(self.child.take().ok_or("it has ended")?.wait_with_output()?)
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

fn output_of(mut command: Command, root: &Path, number: &str) -> Result<Told, Failed> {
    command.env("T", root).env("INT", number).env("LC_ALL", "C").stdin(Stdio::null());
    Ok(Told::of(&command.output()?, root, number))
}

/// True if some CPU of the run has processed a packet: the first column of a line.
fn has_delivered(root: &Path) -> bool {
    let stat = fs::read_to_string(root.join("proc/net/softnet_stat")).unwrap_or_default();
    stat.lines().any(|line| !line.starts_with("00000000"))
}
