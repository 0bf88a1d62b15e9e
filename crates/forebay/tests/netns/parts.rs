//! Parts of tests that run in processes of their own, which are measured, limited or killed.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::process::Command;
use std::{env, fs};

use nix::sys::resource::{Resource, setrlimit};

/// Environment variable with the part that this process runs.
const NAME: &str = "FOREBAY_TEST_PART";

/// A part of a test.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// Limit on descriptors.
    pub(crate) descriptors: u64,
    pub(crate) play: fn(),
}

/// Command that runs a part, in the network namespace of the thread that spawns it.
pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(NAME, name);
    command
}

/// Runs a part to its end.
pub(crate) fn run(name: &str) {
    let status = command(name).status().unwrap();
    assert!(status.success(), "{status}");
}

/// Runs a part, if this process was started for one. Returns false otherwise.
pub(crate) fn played(parts: &[Part]) -> bool {
    let Ok(name) = env::var(NAME) else { return false };
    let part = parts.iter().find(|part| part.name == name).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, part.descriptors, part.descriptors).unwrap();
    (part.play)();
    true
}

/// Memory of this process.
pub(crate) fn resident_kib() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4
}
