//! TCP sockets against the kernel's, through a TAP or a veth in a network namespace per test.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod streams; // bytes to and fro
mod shared; //  beside the kernel
mod calls; //   what the calls of `std` do
mod news; //    nothing is missed, nor the end
mod rpc; //     requests and answers
mod moving; //  readers and masks that move
mod addresses; // which can be listened on and connected to
mod sharing; // listeners that share an address
mod told; //    what `explain` says

use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial_inside;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    let trials = [
        streams::TRIALS,
        shared::TRIALS,
        calls::TRIALS,
        news::TRIALS,
        rpc::TRIALS,
        moving::TRIALS,
        addresses::TRIALS,
        sharing::TRIALS,
        told::TRIALS,
    ]
    .concat();
    trials.into_iter().map(|(name, test)| trial_inside(name, missing.as_ref(), test)).collect()
}

/// A test and its name.
type Trial = (&'static str, fn());
