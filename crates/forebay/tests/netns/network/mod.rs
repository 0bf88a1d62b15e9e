//! IP and UDP against the kernel's own stack: the same hostile frames go into a TAP and into
//! [`forebay_stack::network`], and the datagrams that sockets receive are compared frame by frame.
//! Each test creates a network namespace for its thread.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial_inside;

mod addresses;
mod answers;
mod bases;
mod extensions;
mod fragments;
mod frames;
mod kernel;
mod options;
mod oracle;
mod reassembly;
mod local_addresses;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let tests = [oracle::TESTS, reassembly::TESTS, answers::TESTS].concat();
    let trials = tests.iter().map(|(name, test)| trial_inside(name, missing.as_ref(), *test));
    trials.collect()
}

/// A test and its name.
type Test = (&'static str, fn());

/// Reason why these tests cannot run here.
fn missing() -> Option<String> {
    namespaces::missing(&["ip"]).or_else(namespaces::tun_missing)
}
