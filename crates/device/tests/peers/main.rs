//! The virtio-net driver and the back end of the tests against DPDK's.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

#[path = "../back_end/mod.rs"]
mod back_end; // the device's side, of the tests' own
mod testpmd; //  DPDK's
mod peer; //     the tests' back end, by DPDK's driver
mod live; //     our driver, by DPDK's device

use forebay_testkit::namespaces::trial;
use libtest_mimic::Arguments;

/// A test and its name.
type Test = (&'static str, fn());

fn main() {
    let mut arguments = Arguments::from_args();
    // Each has an engine's threads already.
    arguments.test_threads = Some(1);
    let missing = testpmd::missing();
    let tests = [peer::TESTS, live::TESTS].concat();
    let trials = tests.into_iter().map(|(name, test)| trial(name, missing.as_ref(), test));
    libtest_mimic::run(&arguments, trials.collect()).exit();
}
