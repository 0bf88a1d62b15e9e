//! quinn over sockets of ours, and quinn over the kernel's at the far end of a cable.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

#[path = "../../examples/files/fetch.rs"]
mod fetch; //     the example's client
mod moving; //    clients that change their address
mod rig; //       two hosts at a cable
#[expect(dead_code, reason = "the kernel's side of the example is for people to compare")]
#[path = "../../examples/files/serve.rs"]
mod serve; //     the example's server
#[path = "../../examples/files/tls.rs"]
mod tls; //       certificates
mod transfers; // quinn's own transfer tests, in either role

use forebay_testkit::namespaces::{missing, trial_inside};
use libtest_mimic::Arguments;

/// A test and its name.
type Trial = (&'static str, fn());

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let missing = missing(&["ip"]);
    let trials = [moving::TRIALS, transfers::TRIALS].concat().into_iter();
    let trials = trials.map(|(name, test)| trial_inside(name, missing.as_ref(), test));
    libtest_mimic::run(&arguments, trials.collect()).exit();
}
