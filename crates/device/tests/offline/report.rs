//! Report of a run whose device has violated the protocol.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use forebay_device::{DeviceConfig, Via};
use forebay_engine::Config;
use forebay_run::run::{Run, RunConfig, RunReport};

use crate::Test;
use crate::back_end::frames::datagram;
use crate::back_end::queues::Header;
use crate::back_end::rig::Setup;
use crate::back_end::ring::Used;
use crate::back_end::session::{Offer, Site};
use crate::hostile::RING;

pub(crate) const TESTS: &[Test] =
    &[("promise_2_driver_counts_are_no_further_drops", counts_are_no_further_drops)];

/// Runs a device that delivers three valid packets, one that is too short, one with an invalid
/// header, and a buffer that was not posted.
fn lied_to() -> RunReport {
    let site = Site::new();
    let name = site.path().to_str().unwrap().to_owned();
    let device =
        DeviceConfig { virtio: Setup::usual().virtio, ..DeviceConfig::new(&name, Via::VhostUser) };
    let run = Run::open(RunConfig::new(vec![device], Config::live())).unwrap();
    let (stopper, watch) = (run.stopper(), run.watch());
    let run = thread::spawn(move || run.run().unwrap());
    let mut device = site.meet(Offer::usual());
    let buffer = device.buffer(0).unwrap();
    device.ring(0).give(&[Used { id: u32::from(RING), ..buffer.used(100) }]);
    for number in 1..=3 {
        device.deliver(0, Header::default(), &datagram(number, 300)).unwrap();
    }
    let unknown = Header { gso_type: 6, ..Header::default() };
    device.deliver(0, unknown, &datagram(4, 300)).unwrap();
    let mut short = device.place(0, Header::default(), &datagram(5, 300)).unwrap();
    short.used[0].len_bytes = 13;
    device.give(0, &short);
    device.wait("packets", |_| watch.look().packets_in == 5).unwrap();
    stopper.stop();
    while !run.is_finished() {
        if device.serve(Duration::from_millis(1)).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
    }
    run.join().unwrap()
}

fn counts_are_no_further_drops() {
    let report = lied_to();
    assert_eq!(report.broken_promises(), Vec::<String>::new());
    let (path, queue) = (&report.path, &report.devices[0].queues[0]);
    assert_eq!((path.packets_in, path.delivered, path.dropped_in_all()), (5, 3, 2));
    assert_eq!(queue.packets, 5);
    assert_eq!((report.kernel_dropped, queue.kernel_dropped.len()), (0, 0), "no kernel was there");
    let counted = [
        ("rx_bad_ids", 1),
        ("rx_buffers_short", 0),
        ("rx_length_errors", 1),
        ("rx_vnet_header", 1),
    ];
    assert_eq!(queue.driver, BTreeMap::from(counted));
}
