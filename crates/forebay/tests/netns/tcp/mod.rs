//! TCP sockets against the kernel's, through a TAP or a veth in a network namespace per test.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

pub(crate) mod streams; // bytes to and fro
mod fast_open; // data in a SYN
mod shared; //  beside the kernel
mod calls; //   what the calls of `std` do
mod news; //    nothing is missed, nor the end
mod rpc; //     requests and answers
mod moving; //  readers and masks that move
mod addresses; // which can be listened on and connected to
mod sharing; // listeners that share an address
mod many; //    many connections, one after another and at once
mod flooded; // good clients beside a SYN flood
mod killed; //  processes that are killed
mod told; //    what `explain` says

use forebay::net::Net;
use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial_inside;

use crate::parts::Part;
use crate::sockets::moving::one_cpu;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = namespaces::missing(&["ip"]).or_else(namespaces::tun_missing);
    let trials = [
        streams::TRIALS,
        fast_open::TRIALS,
        shared::TRIALS,
        calls::TRIALS,
        news::TRIALS,
        rpc::TRIALS,
        addresses::TRIALS,
        sharing::TRIALS,
        many::TRIALS,
        killed::TRIALS,
        told::TRIALS,
    ]
    .concat();
    let inside = |missing: Option<String>| {
        move |(name, test): Trial| trial_inside(name, missing.as_ref(), test)
    };
    let no_flood = missing.clone().or_else(|| namespaces::missing(&["trafgen"]));
    let flooded = flooded::TRIALS.iter().copied().map(inside(no_flood));
    let alone = missing.clone().or_else(one_cpu);
    let moving = moving::TRIALS.iter().copied().map(inside(alone));
    trials.into_iter().map(inside(missing)).chain(moving).chain(flooded).collect()
}

/// Parts of tests that run in processes of their own.
pub(crate) fn parts() -> Vec<Part> {
    [many::PARTS, flooded::PARTS, killed::PARTS].concat()
}

/// Value of a counter in the line `Tcp` of `snmp`.
fn tcp_counter(net: &Net, name: &str) -> u64 {
    let snmp = net.snmp();
    let mut lines = snmp.lines().filter(|line| line.starts_with("Tcp: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let found = names.split(' ').zip(values.split(' ')).find(|(of, _)| *of == name);
    found.unwrap().1.parse().unwrap()
}

/// A test and its name.
type Trial = (&'static str, fn());
