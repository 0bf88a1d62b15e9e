//! Tests in network namespaces: what may be missing for them, and how they run.

pub mod cable; // two of them, and a veth between
pub mod named; // those that programs are run in

use std::fs::OpenOptions;
use std::process::Command;
use std::thread;

use libtest_mimic::Trial;
use nix::sched::{CloneFlags, unshare};

/// A test on a thread of its own; ignored, and says so, if something is missing.
pub fn trial(name: &str, missing: Option<&String>, test: impl FnOnce() + Send + 'static) -> Trial {
    if let Some(missing) = missing {
        eprintln!("{name} is ignored: {missing}");
    }
    let run = || thread::spawn(test).join().map_err(|_| "it panicked, as told above".into());
    Trial::test(name, run).with_ignored_flag(missing.is_some())
}

/// The same in a namespace that its thread makes for itself: it goes with the thread.
pub fn trial_inside(name: &str, missing: Option<&String>, test: fn()) -> Trial {
    let inside = move || {
        enter_new();
        test();
    };
    trial(name, missing, inside)
}

/// Has the calling thread be in a namespace of its own.
pub fn enter_new() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
}

/// Reason why there can be no namespaces here, or nothing done in them: a tool is missing.
pub fn missing(tools: &[&str]) -> Option<String> {
    for tool in tools {
        if Command::new(tool).arg("-V").output().is_err() {
            return Some(format!("the program {tool} is missing"));
        }
    }
    let made = thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join().ok()?;
    made.err().map(|errno| format!("no network namespace can be made: {errno}"))
}

/// Reason why there can be no TAP or TUN here.
pub fn tun_missing() -> Option<String> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    opened.err().map(|error| format!("/dev/net/tun cannot be opened: {error}"))
}

/// Runs a tool in the namespace of the calling thread.
pub fn command(line: &str) {
    tried(line).unwrap();
}

/// The same, and what it says if it fails.
pub fn tried(line: &str) -> Result<(), String> {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{line}: {told}")) }
}

/// Runs `ip` so.
pub fn ip(arguments: &str) {
    command(&format!("ip {arguments}"));
}
