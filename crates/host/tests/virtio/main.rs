//! The virtio-net driver against devices: an honest one, a hostile one, and DPDK's.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod backend; //  the device's side of the socket
mod device; //   what it does with its rings
mod frames; //   frames that are told apart
mod handshake; // odd before there is a ring
mod honest; //   what an honest device does
mod hostile; //  how lies are told and judged
mod lies; //     these
mod live; //     against DPDK's device
mod memory; //   what the front end shares
mod messages; // of the protocol
#[path = "../namespaces/mod.rs"]
mod namespaces;
mod packed; //   the packed ring, from the device's side
mod peer; //     the device of these tests, judged
mod restart; //  devices that come again
mod rig; //      the driver under test
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
    let lies = [lies::LENGTHS, lies::BUFFERS, lies::IDS, lies::RINGS, lies::HEADERS, lies::MEMORY];
    let lies = lies
        .concat()
        .into_iter()
        .map(|lie| trial(&format!("promise_5_{}", lie.0), None, move || hostile::tell(lie)));
    let tests = [
        trials(honest::TESTS, None),
        trials(handshake::TESTS, None),
        lies.collect(),
        trials(restart::TESTS, None),
        trials(peer::TESTS, no_dpdk.as_ref()),
        trials(live::TESTS, no_dpdk.as_ref()),
    ];
    libtest_mimic::run(&arguments, tests.into_iter().flatten().collect()).exit();
}

fn trials(tests: &[Test], missing: Option<&String>) -> Vec<Trial> {
    tests.iter().map(|&(name, test)| trial(name, missing, test)).collect()
}
