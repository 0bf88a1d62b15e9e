//! Window of measurement: begins a while after the first packet, and has one packet at least.

use std::thread;
use std::time::{Duration, Instant};

use forebay_sys as sys;
use serde_json::json;

use super::OwnArgs;
use crate::output;

/// Interval between two looks for the first packet.
const LOOK_PERIOD: Duration = Duration::from_millis(1);

/// Time to wait for a packet, as by the peers.
const PACKET_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a thread that prints the packets of the window, and then ends the program.
pub(super) fn report(args: &OwnArgs, counted: impl Fn() -> u64 + Send + 'static) {
    let [warm_up, window] = [args.warm_up, args.window].map(Duration::from_millis);
    thread::spawn(move || {
        wait_for_more_than(0, &counted);
        thread::sleep(warm_up);
        let (packets, began, cpu_ns) = (counted(), Instant::now(), sys::process_cpu_ns());
        thread::sleep(window);
        wait_for_more_than(packets, &counted);
        let packets = counted() - packets;
        let ns = began.elapsed().as_nanos();
        let cpu_ns = sys::process_cpu_ns() - cpu_ns;
        let result = json!({ "packets": packets, "ns": u64::try_from(ns).ok(), "cpu_ns": cpu_ns });
        // Ignored: without a reader nobody waits for the result.
        let _ = output::print(&format!("{result}\n"));
        std::process::exit(0);
    });
}

/// Ends the program if no further packet comes.
fn wait_for_more_than(packets: u64, counted: impl Fn() -> u64) {
    let began = Instant::now();
    while counted() == packets {
        if began.elapsed() > PACKET_TIMEOUT {
            eprintln!("no packet came");
            std::process::exit(1);
        }
        thread::sleep(LOOK_PERIOD);
    }
}
