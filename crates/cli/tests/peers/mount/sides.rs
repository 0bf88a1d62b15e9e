//! The two sides that a script is run on: the kernel's tree, and that of a run.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use std::{fmt, fs, thread};

use forebay_testkit::namespaces::named::{NamedNamespace, run};
use libtest_mimic::Failed;
use serde_json::Value;
use tempfile::TempDir;

use crate::program;

/// Period in which a mount is looked for.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// Output of a script.
#[derive(PartialEq, Eq)]
pub(super) struct Told {
    pub(super) output: String,
    pub(super) errors: String,
    pub(super) code: Option<i32>,
}

impl Told {
    /// Without what differs between the sides: the root, and the number's name.
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

/// The kernel's files, at a root as ours have it. A device called as in a replay stands in a
/// namespace of its own, where there are no numbers but the namespace's.
pub(super) struct Kernel {
    namespace: NamedNamespace,
    root: TempDir,
}

impl Kernel {
    const NUMBER: &str = "somaxconn";

    /// In a mount namespace of its own, so that nothing is to be removed.
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
        let tried = kernel.tell("true")?;
        if tried.code == Some(0) { Ok(kernel) } else { Err(tried.errors.into()) }
    }

    pub(super) fn tell(&self, script: &str) -> Result<Told, Failed> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.namespace.name(), "sh", "-c", Self::SETUP, script]);
        tell(command, self.root.path(), Self::NUMBER)
    }
}

/// An empty directory to mount on. Whatever becomes of a run, it is not left mounted.
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
        // Only what has failed leaves something to be unmounted.
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

    /// Starts a run that goes on until it is told to stop, and waits for its files.
    pub(super) fn start(directory: &Mountpoint) -> Result<Self, Failed> {
        Self::start_at(directory, "2k")
    }

    /// Starts one of so many packets a second.
    pub(super) fn start_at(directory: &Mountpoint, rate: &str) -> Result<Self, Failed> {
        Self::start_by(directory.path(), rate)
    }

    /// Starts one on a directory that goes by another name.
    pub(super) fn start_by(root: &Path, rate: &str) -> Result<Self, Failed> {
        let child = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(["replay", "--json", "--rate", rate, "--loops", "1000000", "--queues", "2"])
            .arg("--mount")
            .arg(root)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut run = Self { child: Some(child), root: root.to_owned() };
        // A run that has delivered something: one that is stopped before proves nothing.
        while !has_delivered(root) {
            let child = run.child.as_mut().ok_or("no child")?;
            if child.try_wait()?.is_some() {
                return Err(program::told(&run.wait()?).into());
            }
            thread::sleep(LOOK_PERIOD);
        }
        Ok(run)
    }

    pub(super) fn tell(&self, script: &str) -> Result<Told, Failed> {
        self.tell_under(&["bash", "-c"], script)
    }

    /// Runs a script by a command of one's own.
    pub(super) fn tell_under(&self, command: &[&str], script: &str) -> Result<Told, Failed> {
        let mut whole = Command::new(command[0]);
        whole.args(&command[1..]).arg(script);
        tell(whole, &self.root, Self::NUMBER)
    }

    /// Has the run end in order, and returns its report.
    pub(super) fn stop(mut self) -> Result<Value, Failed> {
        self.signal("TERM")?;
        let output = self.wait()?;
        if output.status.success() {
            Ok(serde_json::from_slice(&output.stdout)?)
        } else {
            Err(format!("{}: {}", output.status, program::told(&output)).into())
        }
    }

    /// Ends it at once.
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
            // A judgement has failed, and nobody is left to be told.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn tell(mut command: Command, root: &Path, number: &str) -> Result<Told, Failed> {
    command.env("T", root).env("INT", number).env("LC_ALL", "C").stdin(Stdio::null());
    Ok(Told::of(&command.output()?, root, number))
}

/// True if some CPU of the run has processed a packet: the first column of a line.
fn has_delivered(root: &Path) -> bool {
    let stat = fs::read_to_string(root.join("proc/net/softnet_stat")).unwrap_or_default();
    stat.lines().any(|line| !line.starts_with("00000000"))
}
