//! The test's back end against an independent driver, to validate what judges the driver here.

use std::time::{Duration, Instant};

use crate::Test;
use crate::back_end::frames::{datagram, number_of};
use crate::back_end::queues::Header;
use crate::back_end::session::{Backend, Offer, Site};
use crate::testpmd::Testpmd;

pub(crate) const TESTS: &[Test] = &[
    ("dpdk_driver_understands_test_device", || echoes(Offer::usual(), "")),
    ("dpdk_driver_understands_packed_rings", || {
        echoes(Offer::usual().packed(), ",packed_vq=1");
    }),
];

/// Number of a probe frame, which only shows that the driver forwards.
const PROBE: u32 = u32::MAX;
const PROBE_INTERVAL: Duration = Duration::from_millis(200);

/// The driver sends frames back unchanged.
fn echoes(offer: Offer, settings: &str) {
    let site = Site::new();
    let settings = format!("queues=1,queue_size=256,mrg_rxbuf=1{settings}");
    let _driver = Testpmd::driver(&site.path(), &settings, &["--forward-mode=io"]);
    let mut device = site.meet(offer);
    await_forwarding(&mut device);
    // More than once around the rings.
    for round in 0..60 {
        let frames =
            (0..20u16).map(|at| datagram(20 * round + u32::from(at), 60 + 70 * usize::from(at)));
        let frames: Vec<_> = frames.collect();
        for frame in &frames {
            device.deliver(0, Header::default(), frame).unwrap();
        }
        let mut sent = Vec::new();
        device
            .wait("what is sent", |device| {
                let now = device.sent(0).into_iter().map(|sent| sent.bytes);
                sent.extend(now.filter(|frame| number_of(frame) != Some(PROBE)));
                sent.len() >= frames.len()
            })
            .unwrap();
        assert!(sent == frames, "round {round}");
    }
}

/// The driver's rings are in use shortly before it forwards, and it may drop frames received
/// meanwhile.
fn await_forwarding(device: &mut Backend) {
    let mut probed = Instant::now() - PROBE_INTERVAL;
    device
        .wait("a driver that forwards", |device| {
            if probed.elapsed() >= PROBE_INTERVAL {
                probed = Instant::now();
                device.deliver(0, Header::default(), &datagram(PROBE, 60)).unwrap();
            }
            !device.sent(0).is_empty()
        })
        .unwrap();
}
