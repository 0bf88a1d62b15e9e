//! Named network namespaces, made and removed with `ip netns`, to run programs in.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use libtest_mimic::Failed;
use nix::sched::{CloneFlags, setns};

/// Network namespace that is removed on drop.
pub struct NamedNamespace {
    name: String,
}

impl NamedNamespace {
    /// Creates a namespace.
    ///
    /// # Errors
    /// If no namespace can be created.
    pub fn new() -> Result<Self, Failed> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-judge-{}-{number}", std::process::id());
        run("ip", &["netns", "add", &name])?;
        Ok(Self { name })
    }

    /// Name of the namespace, for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs a tool in the namespace, and waits for its end.
    ///
    /// # Errors
    /// If the tool fails: its standard error.
    pub fn run(&self, command: &[&str]) -> Result<(), Failed> {
        self.output_of(command).map(drop)
    }

    /// Runs a tool in the namespace; returns its standard output.
    ///
    /// # Errors
    /// If the tool fails: its standard error.
    pub fn output_of(&self, command: &[&str]) -> Result<String, Failed> {
        output_of("ip", &[&["netns", "exec", &self.name][..], command].concat())
    }

    /// Command that runs `program` in the namespace; the child process is the program itself.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]).stdin(Stdio::null());
        command
    }

    /// Runs `act` on a thread in the namespace. A socket that it opens stays in the namespace.
    ///
    /// # Errors
    /// Errors of `act`, and if it panics.
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
        // Nobody to report an error to.
        let _ = run("ip", &["netns", "del", &self.name]);
    }
}

/// Runs a tool, and waits for its end.
///
/// # Errors
/// If the tool fails: its standard error.
pub fn run(tool: &str, args: &[&str]) -> Result<(), Failed> {
    output_of(tool, args).map(drop)
}

/// Runs a tool, and returns its standard output.
///
/// # Errors
/// If the tool fails: its standard error.
pub fn output_of(tool: &str, args: &[&str]) -> Result<String, Failed> {
    let output = Command::new(tool).args(args).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{tool} {}: {told}", args.join(" ")).into())
}
