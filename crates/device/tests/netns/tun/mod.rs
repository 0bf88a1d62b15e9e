//! TUN and TAP against the kernel's own stack: each test in a network namespace that its thread
//! makes for itself, which goes with the thread.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use forebay_testkit::namespaces;
use forebay_testkit::namespaces::{enter_new, trial};

mod opening;
mod receiving;
mod rig;
mod sending;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let tests = [opening::TESTS, receiving::TESTS, sending::TESTS].concat();
    let trials = tests.into_iter().map(|(name, test)| {
        let silent = move || {
            enter_new();
            rig::silence();
            test();
        };
        trial(name, missing.as_ref(), silent)
    });
    trials.collect()
}

/// A test and its name.
type Test = (&'static str, fn());

/// Reason why there can be no such test here.
fn missing() -> Option<String> {
    namespaces::missing(&["ip"]).or_else(namespaces::tun_missing)
}
