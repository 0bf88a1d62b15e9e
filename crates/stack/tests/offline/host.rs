//! Packets as a host receives them: by their link-layer address.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::Arc;

use etherparse::PacketBuilder;
use forebay_stack::network::{
    NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict,
};

use crate::neighbours::rig::{ALL, OTHERS, OURS, THEIRS, identity, v4, v6};
use crate::reassembly::frames::{packet, pool};

fn network() -> (NetworkLayer, Arc<NetworkCounters>) {
    let counters = Arc::<NetworkCounters>::default();
    let mut network = NetworkLayer::new(NetworkConfig::default(), Arc::clone(&counters));
    network.take_tcp();
    (network, counters)
}

/// RFC 1122, section 3.3.6 (`tcp_v4_rcv`): a SYN to all stations would be answered by every host that has the address.
#[test]
fn promise_13_tcp_in_group_frames_dropped() {
    const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];
    let (mut pool, (mut network, counters)) = (pool(8, 1), network());
    for is_ipv6 in [false, true] {
        for (mac, dropped) in [
            (OURS, None),
            (ALL, Some(NetworkDrop::UnicastInL2Multicast)),
            (GROUP, Some(NetworkDrop::UnicastInL2Multicast)),
            (OTHERS, Some(NetworkDrop::Otherhost)),
        ] {
            let builder = PacketBuilder::ethernet2(THEIRS, mac);
            let builder = match is_ipv6 {
                false => builder.ipv4(v4("10.9.0.2").octets(), v4("10.9.0.1").octets(), 64),
                true => builder.ipv6(v6("fd00::2").octets(), v6("fd00::1").octets(), 64),
            };
            let mut syn = Vec::new();
            builder.tcp(1000, 80, 1, 1000).syn().write(&mut syn, &[]).unwrap();
            let packet = packet(&mut pool, &syn);
            let packet = match network.receive(packet, &identity(), 1, &mut pool) {
                NetworkVerdict::Segment(packet) => {
                    assert_eq!(dropped, None);
                    packet
                }
                NetworkVerdict::Dropped(packet, reason) => {
                    assert_eq!(dropped, Some(reason), "{mac:?}");
                    packet
                }
                other => panic!("{other:?}"),
            };
            pool.put(packet.frame);
        }
    }
    assert_eq!(counters.drops.get(NetworkDrop::UnicastInL2Multicast), 4);
}
