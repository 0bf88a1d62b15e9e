//! Network namespaces with names, made and removed with `ip netns`: programs are run in them.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use libtest_mimic::Failed;
use nix::sched::{CloneFlags, setns};

/// A network namespace of our own, which goes when this does.
pub struct NamedNamespace {
    name: String,
}

impl NamedNamespace {
    /// Makes one.
    ///
    /// # Errors
    /// When there can be none.
    pub fn new() -> Result<Self, Failed> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-judge-{}-{number}", std::process::id());
        run("ip", &["netns", "add", &name])?;
        Ok(Self { name })
    }

    /// Name for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs a tool here to its end.
    ///
    /// # Errors
    /// When it fails: what it says.
    pub fn run(&self, command: &[&str]) -> Result<(), Failed> {
        self.tell(command).map(drop)
    }

    /// Output of a command that succeeds.
    ///
    /// # Errors
    /// When it fails: what it says.
    pub fn tell(&self, command: &[&str]) -> Result<String, Failed> {
        tell("ip", &[&["netns", "exec", &self.name][..], command].concat())
    }

    /// A program to be run here, which is the child itself.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]).stdin(Stdio::null());
        command
    }

    /// Does something here, such as opening a socket: it stays one of this namespace.
    ///
    /// # Errors
    /// Those of `act`; when it panics.
    pub fn within<T: Send>(
        &self,
        act: impl FnOnce() -> Result<T, Failed> + Send,
    ) -> Result<T, Failed> {
        let namespace = File::open(Path::new("/run/netns").join(&self.name))?;
        let act = || {
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            act()
        };
        let done = thread::scope(|scope| scope.spawn(act).join());
        done.map_err(|_| "what was to be done in a namespace has panicked")?
    }
}

impl Drop for NamedNamespace {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = run("ip", &["netns", "del", &self.name]);
    }
}

/// Runs a tool to its end.
///
/// # Errors
/// When it fails: what it says.
pub fn run(tool: &str, args: &[&str]) -> Result<(), Failed> {
    tell(tool, args).map(drop)
}

/// Runs a tool to its end; returns its standard output.
///
/// # Errors
/// When it fails: what it says.
pub fn tell(tool: &str, args: &[&str]) -> Result<String, Failed> {
    let output = Command::new(tool).args(args).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{tool} {}: {told}", args.join(" ")).into())
}
