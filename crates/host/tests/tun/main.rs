//! TUN and TAP against the kernel's own stack: each test in a network namespace that its thread
//! makes for itself, which goes with the thread.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::process::Command;
use std::thread;

use libtest_mimic::{Arguments, Trial};
use nix::sched::{CloneFlags, unshare};

mod opening;
mod receiving;
mod rig;
mod sending;

fn main() {
    let mut arguments = Arguments::from_args();
    // A program that another test starts has our descriptors too, for a moment.
    arguments.test_threads = Some(1);
    let missing = missing();
    let tests = [opening::TESTS, receiving::TESTS, sending::TESTS].concat();
    let trials = tests.into_iter().map(|(name, test)| {
        if let Some(missing) = &missing {
            eprintln!("{name} is ignored: {missing}");
        }
        Trial::test(name, move || in_a_namespace(test)).with_ignored_flag(missing.is_some())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// A test and its name.
type Test = (&'static str, fn());

fn in_a_namespace(test: fn()) -> Result<(), libtest_mimic::Failed> {
    let told = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        rig::silence();
        test();
    });
    told.join().map_err(|_| "it panicked, as told above".into())
}

/// Why there can be no such test here.
fn missing() -> Option<String> {
    if Command::new("ip").arg("-V").output().is_err() {
        return Some("the program ip is missing".to_owned());
    }
    let made = thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join().ok()?;
    if let Err(errno) = made {
        return Some(format!("no network namespace can be made: {errno}"));
    }
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .err()
        .map(|error| format!("/dev/net/tun cannot be opened: {error}"))
}
