//! Segments of a stranger who sees the connection.

use forebay_stack::network::{NetworkDrop, Prefix};
use forebay_stack::tcp::TcpConfig;
use proptest::prelude::*;

use super::forged::{Forged, bytes_of};
use super::pair::{Faults, Host, Pair};
use super::reuseport::{begin, listen, settle};

prop_compose! {
    fn near()(kind in 0..6, small in -3000_i32..3000, any: i32) -> i32 {
        match kind { 0 => any, 1 => 0, 2 => 1, _ => small }
    }
}

prop_compose! {
    fn forged()(
        seq in near(), ack in near(), flags: u8, is_ack in prop::bool::weighted(0.7), window: u16, urgent: u16,
        options in prop::collection::vec(prop_oneof![Just(1_u8), Just(5), Just(8), Just(10), any::<u8>()], 0..40),
        len in 0_usize..2000,
    ) -> Forged {
        let flags = if is_ack { flags | 0x10 } else { flags };
        Forged { seq, ack, flags, window, urgent, options, len }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn tcp_11_any_segments_are_survived(
        segments in prop::collection::vec((forged(), any::<bool>()), 1..60), seed: u64,
    ) {
        let faults = Faults { delay_us: 1000, ..Faults::default() };
        let mut pair = Pair::new(seed, faults, [TcpConfig::default(); 2]);
        let (client, server) = pair.open(80);
        let flow = pair.hosts[1].tcp.flow(server).unwrap();
        for (forged, writes) in &segments {
            // Near the numbers that a blind stranger would have to guess.
            let (seq, ack) = pair.last[1];
            let base = (ack, seq);
            let Some(bytes) = bytes_of(forged, &mut pair, (flow.theirs, flow.ours), base) else { break };
            let now_us = pair.now_us;
            let mut sent = Vec::new();
            let host = &mut pair.hosts[1];
            if let Some(packet) = host.packet(&bytes) {
                host.deliver(packet, now_us, &mut sent);
            }
            if *writes {
                // An answer of any kind is fine: the connection may have been reset.
                let _ = pair.call(1, |tcp, out| tcp.write(server, &[1; 3000], Default::default(), out));
                let _ = pair.call(1, |tcp, out| tcp.read(server, &mut [0; 100], out));
            }
            pair.step();
        }
        pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
        pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
        pair.check_rest();
    }
}

/// Applications would take its peer for one over IPv4 (`tcp_v6_conn_request`).
#[test]
fn promise_13_syn_from_mapped_address_dropped() {
    let mut pair = Pair::new(1, Faults::default(), [TcpConfig::default(); 2]);
    for (host, address) in pair.hosts.iter_mut().zip(["::ffff:10.1.2.3", "fd00::1"]) {
        host.address = address.parse().unwrap();
        host.identity.addresses[0] = Prefix { address: host.address, bits: 64 };
    }
    let listener = listen(&mut pair, None);
    begin(&mut pair);
    settle(&mut pair);
    let Host { tcp, network, .. } = &mut pair.hosts[1];
    assert!(tcp.accept(listener).is_err());
    assert_eq!(tcp.counters().passive_opens.get() + tcp.counters().out_segs.get(), 0);
    let counters = network.counters();
    assert!(counters.drops.get(NetworkDrop::IpInvalidSource) > 0);
    assert_eq!(counters.ip6.in_hdr_errors.get(), counters.drops.total());
}
