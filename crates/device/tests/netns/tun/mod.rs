//! TUN and TAP against the kernel's own stack: each test in its thread's own network namespace,
//! which ends with the thread.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use forebay_testkit::namespaces;
use forebay_testkit::namespaces::{enter_new, trial};

mod opening;
mod receiving;
mod rig;
mod sending;
mod tunnels;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let tests = [opening::TESTS, receiving::TESTS, sending::TESTS, tunnels::TESTS].concat();
    let missing_tunnels = missing.clone().or_else(tunnels::missing);
    let whole = tunnels::WHOLE.iter().map(|test| (*test, &missing_tunnels));
    let tests = tests.into_iter().map(|test| (test, &missing)).chain(whole);
    let trials = tests.map(|((name, test), missing)| {
        let silent = move || {
            enter_new();
            rig::silence();
            test();
        };
        trial(name, missing.as_ref(), silent)
    });
    trials.collect()
}

/// Name and function of a test.
type Test = (&'static str, fn());

/// Reason why these tests cannot be run here, if there is one.
fn missing() -> Option<String> {
    namespaces::missing(&["ip"]).or_else(namespaces::tun_missing)
}
