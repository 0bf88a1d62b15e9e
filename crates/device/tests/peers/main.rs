//! The virtio-net driver, and the test's back end, against DPDK's.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

#[path = "../back_end/mod.rs"]
mod back_end; // the test's back end
mod testpmd; //  DPDK's testpmd
mod peer; //     the test's back end with DPDK's driver
mod live; //     the driver with DPDK's device

use forebay_testkit::namespaces::trial;
use libtest_mimic::Arguments;

/// Name and function of a test.
type Test = (&'static str, fn());

fn main() {
    let mut arguments = Arguments::from_args();
    // Each test has the threads of an engine already.
    arguments.test_threads = Some(1);
    let missing = testpmd::missing();
    let tests = [peer::TESTS, live::TESTS].concat();
    let trials = tests.into_iter().map(|(name, test)| trial(name, missing.as_ref(), test));
    libtest_mimic::run(&arguments, trials.collect()).exit();
}
