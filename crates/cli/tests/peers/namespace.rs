//! Network namespaces, made and removed with `ip netns`.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use libtest_mimic::Failed;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace of our own, which goes when this does.
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    pub(crate) fn new() -> Result<Self, Failed> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-judge-{}-{number}", std::process::id());
        run("ip", &["netns", "add", &name])?;
        Ok(Self { name })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn run(&self, command: &[&str]) -> Result<(), Failed> {
        self.tell(command).map(drop)
    }

    /// Output of a command that succeeds.
    pub(crate) fn tell(&self, command: &[&str]) -> Result<String, Failed> {
        tell("ip", &[&["netns", "exec", &self.name][..], command].concat())
    }

    /// A program to be run here, which is the child itself.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]).stdin(Stdio::null());
        command
    }

    /// Does something here, such as opening a socket: it stays one of this namespace.
    pub(crate) fn within<T: Send>(
        &self,
        act: impl FnOnce() -> Result<T, Failed> + Send,
    ) -> Result<T, Failed> {
        let namespace = File::open(Path::new("/run/netns").join(&self.name))?;
        let act = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            act()
        };
        let done = thread::scope(|scope| scope.spawn(act).join());
        done.map_err(|_| "what was to be done in a namespace has panicked")?
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = run("ip", &["netns", "del", &self.name]);
    }
}

/// Runs a tool to its end.
pub(crate) fn run(tool: &str, args: &[&str]) -> Result<(), Failed> {
    tell(tool, args).map(drop)
}

/// Runs a tool to its end; returns its standard output.
pub(crate) fn tell(tool: &str, args: &[&str]) -> Result<String, Failed> {
    let output = Command::new(tool).args(args).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{tool} {}: {told}", args.join(" ")).into())
}
