//! Tests in network namespaces: their prerequisites, and how they run.

pub mod cable; // namespaces with a veth between two
pub mod named; // named ones, to run programs in

use std::fmt::Display;
use std::fs::OpenOptions;
use std::process::Command;
use std::thread;

use libtest_mimic::Trial;
use nix::sched::{CloneFlags, unshare};

/// Test on a thread of its own. Ignored, with a message, if something is missing.
pub fn trial(name: &str, missing: Option<&String>, test: impl FnOnce() + Send + 'static) -> Trial {
    if let Some(missing) = missing {
        eprintln!("{name} is ignored: {missing}");
    }
    let run = || thread::spawn(test).join().map_err(|_| "it panicked, as told above".into());
    Trial::test(name, run).with_ignored_flag(missing.is_some())
}

/// As [`trial`], in a network namespace that the test's thread creates: it is removed with the
/// thread.
pub fn trial_inside(name: &str, missing: Option<&String>, test: fn()) -> Trial {
    let inside = move || {
        enter_new();
        test();
    };
    trial(name, missing, inside)
}

/// Moves the calling thread into a new network namespace.
pub fn enter_new() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
}

/// Reason why tests with namespaces cannot run here: a missing tool or permission.
pub fn missing(tools: &[&str]) -> Option<String> {
    for tool in tools {
        if Command::new(tool).arg("-V").output().is_err() {
            return Some(format!("the program {tool} is missing"));
        }
    }
    let made = thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join().ok()?;
    made.err().map(|errno| format!("no network namespace can be made: {errno}"))
}

/// Reason why a TAP or TUN cannot be opened here.
pub fn tun_missing() -> Option<String> {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    opened.err().map(|error| format!("/dev/net/tun cannot be opened: {error}"))
}

/// Runs a tool in the namespace of the calling thread, and panics if it fails.
pub fn command(line: &str) {
    tried(line).unwrap();
}

/// Runs a tool in the namespace of the calling thread. Returns its standard error if it fails.
pub fn tried(line: &str) -> Result<(), String> {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{line}: {told}")) }
}

/// Runs `ip` as [`command`].
pub fn ip(arguments: &str) {
    command(&format!("ip {arguments}"));
}

/// Waits until an IPv6 address of this host has its local route. A work queue of the kernel adds the
/// route (`addrconf_dad_work`), even for an address with `nodad`; until then, packets to the address
/// are dropped.
pub fn await_local_route(address: impl Display) {
    let is_local = || {
        let arguments = format!("-6 route get {address}");
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        output.stdout.starts_with(b"local ")
    };
    while !is_local() {
        thread::yield_now();
    }
}
