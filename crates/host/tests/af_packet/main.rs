//! AF_PACKET against the kernel's own senders and receivers, over cables between network namespaces.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod forward; //   from one interface to another
mod intake; //    what comes in
mod namespace; // namespaces and cables
mod taker; //     a source that is polled

use std::process::Command;
use std::thread;

use libtest_mimic::{Arguments, Trial};
use nix::sched::{CloneFlags, unshare};

fn main() {
    let arguments = Arguments::from_args();
    let missing = missing();
    let trials = [intake::TRIALS, forward::TRIALS].concat().into_iter().map(|(name, test)| {
        if let Some(missing) = &missing {
            eprintln!("{name} is ignored: {missing}");
        }
        let run = move || {
            let told = thread::spawn(test);
            told.join().map_err(|_| "it panicked, as told above".into())
        };
        Trial::test(name, run).with_ignored_flag(missing.is_some())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// Why there can be no namespaces here.
fn missing() -> Option<String> {
    for tool in ["ip", "ethtool", "tcpreplay"] {
        if Command::new(tool).arg("--version").output().is_err() {
            return Some(format!("the program {tool} is missing"));
        }
    }
    let made = thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join().ok()?;
    made.err().map(|errno| format!("no network namespace can be made: {errno}"))
}
