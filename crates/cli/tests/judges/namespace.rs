//! Network namespaces, made and removed with `ip netns`.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::Failed;

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
        run("ip", &[&["netns", "exec", &self.name][..], command].concat())
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
    let output = Command::new(tool).args(args).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{tool} {}: {told}", args.join(" ")).into())
}
