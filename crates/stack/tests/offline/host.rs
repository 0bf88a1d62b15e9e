//! Packets as a host receives them: by their link-layer address, and their length.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::Arc;

use etherparse::PacketBuilder;
use forebay_stack::network::fragment_out::FragmentedAnswer;
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict,
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

/// The answer to a request that came in fragments leaves in fragments.
#[test]
fn promise_13_answer_beyond_mtu_has_fragments() {
    for (is_ipv6, mtu, len) in
        [(false, 1500, 5000), (true, 1500, 5000), (false, 577, 578), (true, 1280, 9001)]
    {
        let (mut pool, (mut network, counters)) = (pool(64, 3), network());
        let builder = PacketBuilder::ethernet2(THEIRS, OURS);
        let mut request = Vec::new();
        let payload: Vec<_> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        match is_ipv6 {
            false => builder
                .ipv4(v4("10.9.0.2").octets(), v4("10.9.0.1").octets(), 64)
                .icmpv4_echo_request(1, 2)
                .write(&mut request, &payload),
            true => builder
                .ipv6(v6("fd00::2").octets(), v6("fd00::1").octets(), 64)
                .icmpv6_echo_request(1, 2)
                .write(&mut request, &payload),
        }
        .unwrap();
        let on = Identity { mtu, ..identity() };
        let request = packet(&mut pool, &request);
        let received = network.receive(request, &on, 1, &mut pool);
        let NetworkVerdict::Answer(answer) = received else { panic!("{received:?}") };
        let mut fragments = FragmentedAnswer::of(&answer, mtu).unwrap();
        fragments.set_id(77);
        let asker = Identity { mac: Some(THEIRS), ..asker() };
        let mut is_whole = false;
        while fragments.count() > 0 {
            assert!(!is_whole);
            let mut frame =
                pool.allocate(fragments.fragment_bytes_max().try_into().unwrap()).unwrap();
            let noted = fragments.write_next(&mut frame);
            assert!(frame.len_bytes() <= mtu + 14);
            let fragment = packet(&mut pool, frame.data());
            assert_eq!(
                (fragment.headers.network_offset, noted.fragment),
                (14, fragment.headers.fragment)
            );
            pool.put(frame);
            match network.receive(fragment, &asker, 1, &mut pool) {
                NetworkVerdict::Kept => {}
                NetworkVerdict::Taken(reply) => {
                    is_whole = true;
                    // Behind the identification and the checksum of IPv4.
                    assert!(reply.frame.data()[26..] == answer.frame.data()[26..]);
                    pool.put(reply.frame);
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(is_whole);
        let icmp = if is_ipv6 { &counters.icmp6 } else { &counters.icmp };
        assert_eq!((icmp.in_echo_reps.get(), icmp.in_errors.get()), (1, 0));
        assert!(FragmentedAnswer::of(&answer, len + 48).is_none(), "it fits");
        pool.put(answer.frame);
        assert_eq!(pool.in_use(), 0);
    }
}

/// The neighbour's own addresses.
fn asker() -> Identity {
    let mut on = identity();
    for (prefix, address) in
        on.addresses.iter_mut().zip(["192.0.2.2", "10.9.0.2", "fe80::2", "fd00::2"])
    {
        prefix.address = address.parse().unwrap();
    }
    on
}
