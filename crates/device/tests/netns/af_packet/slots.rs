//! Receiving frames into slots, one for each.

use std::time::Duration;

use forebay_testkit::namespaces::command;

use crate::af_packet::intake::{
    Link, deleted_below, dropped_before, high_rate_into, low_rate_into, tags_into,
};
use crate::af_packet::taker::Taker;

/// Tests of this module.
pub(crate) const TRIALS: &[(&str, fn())] = &[
    ("promise_10_frame_readable_before_timer", readable_at_once),
    ("promise_10_long_frame_whole_from_socket", longer),
    ("promise_2_slots_lose_nothing_slowly", || low_rate_into(Taker::open_slots)),
    ("promise_2_overload_of_slots_is_counted", || high_rate_into(Taker::open_slots)),
    ("stripped_tag_is_reinserted_from_slots", || tags_into(Taker::open_slots)),
    ("deleted_interface_ends_after_last_slot", || deleted_below(Taker::open_slots)),
];

/// A frame is in its slot when the sender's call returns, unless the kernel defers its receipt. A
/// block would be handed over by a timer of 1 ms, which seldom runs out right then.
fn readable_at_once() {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = Taker::open_slots("pka");
        let mut at_once = 0;
        for sent in 1..=100 {
            link.send(1, 100, Duration::ZERO);
            taker.poll(false).unwrap();
            at_once += usize::from(taker.packets.len() == sent);
            taker.await_packets(sent);
        }
        assert!(at_once > 10, "{at_once} of 100 frames were readable at once");
    });
}

/// Frames that their slots cannot hold come from the socket, in their places among the others.
fn longer() {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = Taker::open_slots("pka");
        command("ip link set pka mtu 9000");
        link.there.command("ip link set pkb mtu 9000");
        let lens = [100, 8000, 1400, 5000, 5000, 18];
        for len in lens {
            assert_eq!(link.send(1, len, Duration::ZERO), 1);
        }
        taker.await_packets(lens.len());
        for (packet, len) in taker.packets.iter().zip(lens) {
            let payload = packet.view().payload();
            assert_eq!((payload.len(), &payload[..4]), (len, &[0; 4][..]));
            assert!(payload[4..].iter().all(|byte| *byte == 0x5a));
        }
        taker.recycle();
        // More than the socket may hold: the rest is counted.
        let before = dropped_before();
        let sent = link.send(20_000, 8000, Duration::ZERO);
        let taken = taker.count_to_end();
        let dropped = taker.kernel_dropped;
        assert!(dropped > 0, "{sent} frames were too few");
        assert_eq!(sent, taken + dropped + dropped_before() - before);
    });
}
