//! The device of these tests against a driver that is not ours: who judges must be right.

use crate::Test;
use crate::backend::{Offer, Site};
use crate::device::Header;
use crate::frames::datagram;
use crate::testpmd::Testpmd;

pub(crate) const TESTS: &[Test] = &[
    ("dpdks_driver_understands_the_device_of_these_tests", || echoes(Offer::usual(), "")),
    ("dpdks_driver_understands_it_with_packed_rings", || {
        echoes(Offer::usual().packed(), ",packed_vq=1");
    }),
];

/// What the driver is given it sends back, the way it is told.
fn echoes(offer: Offer, settings: &str) {
    let site = Site::new();
    let settings = format!("queues=1,queue_size=256,mrg_rxbuf=1{settings}");
    let _driver = Testpmd::driver(&site.path(), &settings, &["--forward-mode=io"]);
    let mut device = site.meet(offer);
    // More than once around the rings.
    for round in 0..60 {
        let frames =
            (0..20u16).map(|at| datagram(20 * round + u32::from(at), 60 + 70 * usize::from(at)));
        let frames: Vec<_> = frames.collect();
        for frame in &frames {
            device.deliver(0, Header::default(), frame).unwrap();
        }
        let sent = device.await_sent(0, frames.len()).unwrap();
        let sent: Vec<_> = sent.into_iter().map(|sent| sent.bytes).collect();
        assert!(sent == frames, "round {round}");
    }
}
