//! UDP sockets against the kernel's, through a TAP or a veth in a network namespace per test.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod calls; //    what the calls of `std` do
mod end; //      what waits when a run ends
mod exchange; // datagrams to and fro
mod following; // addresses and MTUs that change
mod paths; //    routers with smaller links
mod groups; //   multicast
mod host; //     its addresses elsewhere, and its answers
mod messages; // what headers say, both ways
pub(crate) mod moving; //   readers that move
pub(crate) mod shared; //   on an interface that the kernel has too
mod pressure; // readers that are slow
pub(crate) mod rig; //      a network, sockets over it, and the kernel at the other end

use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial_inside;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    let trials = [
        exchange::TRIALS,
        calls::TRIALS,
        pressure::TRIALS,
        shared::TRIALS,
        end::TRIALS,
        messages::TRIALS,
        groups::TRIALS,
        host::TRIALS,
        following::TRIALS,
        paths::TRIALS,
    ]
    .concat();
    let inside = |missing: Option<String>| {
        move |(name, test): Trial| trial_inside(name, missing.as_ref(), test)
    };
    let alone = missing.clone().or_else(moving::one_cpu);
    let moving = moving::TRIALS.iter().copied().map(inside(alone));
    trials.into_iter().map(inside(missing)).chain(moving).collect()
}

/// A test and its name.
type Trial = (&'static str, fn());
