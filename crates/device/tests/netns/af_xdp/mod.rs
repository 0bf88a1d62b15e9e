//! AF_XDP on a veth pair, against the kernel's own sockets at the far end. Each test has its own
//! network namespace, which ends with its thread.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod receive;
mod rig;
mod send;

use std::path::Path;
use std::thread;

use forebay_sys::interface::Interface;
use forebay_sys::netdev;
use forebay_testkit::namespaces;
use forebay_testkit::namespaces::trial_inside;

pub(crate) fn trials() -> Vec<libtest_mimic::Trial> {
    let missing = missing();
    let no_hash = missing.clone().or_else(hash_missing);
    let trial = |name: &str, test: fn()| trial_inside(name, missing.as_ref(), test);
    let hashed = "device_hash_comes_with_packet";
    let trials = vec![
        trial("datagrams_arrive_in_order", receive::as_sent),
        trial("datagrams_arrive_in_generic_mode_too", receive::generic),
        trial("busy_polled_datagrams_arrive", receive::busy_polled),
        trial_inside(hashed, no_hash.as_ref(), receive::hashed),
        trial("promise_2_missing_room_is_counted_exactly", receive::overrun),
        trial("promise_2_missing_frames_are_counted_exactly", receive::starved),
        trial("promise_2_end_loses_nothing_uncounted", receive::ended),
        trial("two_queues_share_the_packet_memory", receive::two_queues),
        trial("frames_above_chunk_come_whole", receive::jumbo),
        trial("promise_4_twenty_opens_and_closes_leak_nothing", receive::reopened),
        trial("link_comes_back", receive::link_down),
        trial("deleted_interface_ends_source", receive::deleted),
        trial("unopenable_is_refused_with_reason", receive::refused),
        trial("echoed_traffic_arrives_in_order", send::echoed),
        trial("gso_packet_leaves_as_segments", send::cut),
        trial("promise_1_flow_leaves_in_order_any_cpu", send::two_queues),
        trial("device_opens_send_only", send::only),
        trial("promise_2_unsent_packets_drop_by_name", send::dropped),
        trial("foreign_frames_are_sent_as_copies", send::copied),
        trial("jumbo_frames_are_sent_in_pieces", send::jumbo),
    ];
    trials
}

/// Reason why AF_XDP cannot be tested here, if there is one.
fn missing() -> Option<String> {
    let refused = || forebay_sys::privilege::for_af_xdp("a test", true).err();
    namespaces::missing(&["ip"]).or_else(|| refused().map(|error| error.to_string()))
}

/// Reason why the device hash cannot be tested here, if there is one.
fn hash_missing() -> Option<String> {
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Some("this kernel does not tell its own types".to_owned());
    }
    let has_hash = thread::spawn(|| {
        namespaces::enter_new();
        rig::make_link(1, 1500);
        netdev::has_rx_hash(Interface::named(rig::OURS).unwrap().index).unwrap()
    });
    let has_hash = has_hash.join().ok()?;
    (has_hash != Some(true)).then(|| "veth has no receive hash on this kernel".to_owned())
}
