//! The virtio-net driver against devices: an honest one, a hostile one, and DPDK's.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod backend; //  the device's side of the socket
mod device; //   what it does with its rings
mod frames; //   frames that are told apart
mod memory; //   what the front end shares
mod messages; // of the protocol
#[path = "../namespaces/mod.rs"]
mod namespaces;
mod packed; //   the packed ring, from the device's side
mod peer; //     the device of these tests, judged
mod ring; //     a ring, in either layout
mod split; //    the split one
mod testpmd; //  DPDK's

use libtest_mimic::{Arguments, Trial};
use namespaces::trial;

/// A test and its name.
type Test = (&'static str, fn());

fn main() {
    let mut arguments = Arguments::from_args();
    // Each has an engine's threads already.
    arguments.test_threads = Some(1);
    let no_dpdk = testpmd::missing();
    let trials = [trials(peer::TESTS, no_dpdk.as_ref())].into_iter().flatten();
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn trials(tests: &[Test], missing: Option<&String>) -> Vec<Trial> {
    tests.iter().map(|&(name, test)| trial(name, missing, test)).collect()
}
