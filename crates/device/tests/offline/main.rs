//! The virtio-net driver against a well-behaved back end and a hostile one.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

#[path = "../back_end/mod.rs"]
mod back_end; //  the device's side
mod baseline; //  a well-behaved device
mod commands; //  commands, and devices that mishandle them
mod handshake; // misbehaviour before there is a ring
mod hostile; //   how violations are run and judged
mod rings; //     violations in the rings
mod offloads; //  violations in GSO and checksum offloads
mod writes; //    writes to shared memory at any time
mod report; //    report of a run with violations
mod restart; //   devices that restart
mod retries; //   violations at the end of a run, in one of two queues, in sending

use back_end::session::Offer;
use forebay_testkit::namespaces::trial;
use libtest_mimic::{Arguments, Trial};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MRG_RXBUF,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// Name and function of a test.
type Test = (&'static str, fn());

fn main() {
    let mut arguments = Arguments::from_args();
    // Each test has the threads of an engine already, and mostly waits.
    arguments.test_threads = Some(4);
    let all = [
        rings::LENGTHS,
        rings::BUFFERS,
        rings::IDS,
        rings::RINGS,
        rings::HEADERS,
        offloads::LIES,
        writes::LIES,
    ];
    let usual = Offer::usual();
    let unmerged = usual.clone().without(VIRTIO_NET_F_MRG_RXBUF);
    let with_events = usual.clone().with(VIRTIO_RING_F_EVENT_IDX);
    let with_hash = usual.clone().with(VIRTIO_NET_F_CTRL_VQ).with(VIRTIO_NET_F_HASH_REPORT);
    let lies = [
        ("", usual, all.concat()),
        ("unmerged_", unmerged, [rings::LENGTHS, rings::IDS].concat()),
        ("event_idx_", with_events, rings::RINGS.to_vec()),
        ("hash_report_", with_hash, [rings::LENGTHS, rings::BUFFERS].concat()),
    ];
    let lies = lies.into_iter().flat_map(|(with, offer, lies)| {
        lies.into_iter().map(move |lie| {
            let offer = offer.clone();
            trial(&format!("promise_5_{with}{}", lie.0), None, move || hostile::tell(&offer, lie))
        })
    });
    let tests = [
        trials(baseline::TESTS),
        trials(handshake::TESTS),
        lies.collect(),
        trials(report::TESTS),
        trials(commands::TESTS),
        trials(restart::TESTS),
        trials(retries::TESTS),
    ];
    libtest_mimic::run(&arguments, tests.into_iter().flatten().collect()).exit();
}

fn trials(tests: &[Test]) -> Vec<Trial> {
    tests.iter().map(|&(name, test)| trial(name, None, test)).collect()
}
