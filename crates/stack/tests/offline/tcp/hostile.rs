//! Segments of a stranger who sees the connection.

use forebay_stack::network::{NetworkDrop, Prefix};
use forebay_stack::tcp::{FamilyOptions, State, TcpConfig, TcpError, TcpOptions};
use proptest::prelude::*;

use super::forged::{Forged, bytes_of, say};
use super::pair::{Faults, Host, MTU, Pair};
use super::reuseport::{accepted, begin, listen, settle};

const FIN: u8 = 1;
const SYN: u8 = 2;
const ACK: u8 = 16;

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

/// RFC 7323, section 2.2.
#[test]
fn tcp_5_crossed_window_is_not_scaled() {
    let mut pair = lone();
    let socket = pair.hosts[1].tcp.socket().unwrap();
    let ends = (pair.address(1, 80), pair.address(0, 1000));
    let begun = pair.call(1, |tcp, out| tcp.connect(socket, ends, MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    let seq = pair.last[1].0;
    // MSS 1460, scale 10.
    let options = vec![2, 4, 5, 0xb4, 3, 3, 10];
    let syn = Forged { window: 5000, options: options.clone(), ..Forged::plain(SYN, 0) };
    say(&mut pair, 1000, &syn, (0, 0)).unwrap();
    let syn_ack = Forged { window: 5000, options, ..Forged::plain(SYN | ACK, 0) };
    say(&mut pair, 1000, &syn_ack, (0, seq.wrapping_add(1)));
    let info = pair.hosts[1].tcp.info(socket).unwrap().unwrap();
    assert_eq!((info.state, info.send_window_bytes), (State::Established, 5000));
}

/// A SYN-ACK of another connection with the same ends (`PAWSActiveRejected`).
#[test]
fn tcp_17_echo_before_syn_is_reset() {
    let mut pair = lone();
    let socket = pair.hosts[1].tcp.socket().unwrap();
    let ends = (pair.address(1, 80), pair.address(0, 1000));
    let (now_us, mut sent) = (pair.now_us, Vec::new());
    let begun =
        pair.hosts[1].call(now_us, &mut sent, |tcp, out| tcp.connect(socket, ends, MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    let number = |at: usize| u32::from_be_bytes(sent[0][at..at + 4].try_into().unwrap());
    // Behind the options of the segment size and of SACK.
    let (seq, stamp) = (number(24), number(48));
    let mut answer = |echo: u32| {
        let mut options = vec![8, 10, 0, 0, 0, 7];
        options.extend(echo.to_be_bytes());
        let syn_ack = Forged { options, ..Forged::plain(SYN | ACK, 0) };
        say(&mut pair, 1000, &syn_ack, (0, seq.wrapping_add(1)))
    };
    let rst = 4;
    assert_eq!(answer(stamp.wrapping_sub(1)).map(|(_, flags)| flags), Some(rst));
    assert_eq!(answer(stamp.wrapping_add(1)).map(|(_, flags)| flags), Some(rst));
    assert_eq!(answer(stamp).map(|(_, flags)| flags), Some(ACK));
}

/// A SYN that reopens a connection in TIME-WAIT is one to the listener (`IP_MINTTL`).
#[test]
fn tcp_17_far_syn_reopens_nothing() {
    let mut pair = lone();
    let listener = listen(&mut pair, None);
    let (seq, _) = say(&mut pair, 1000, &Forged::plain(SYN, 0), (0, 0)).unwrap();
    say(&mut pair, 1000, &Forged::plain(ACK, 0), (1, seq.wrapping_add(1)));
    let server = accepted(&mut pair, listener)[0];
    let options = pair.hosts[1].tcp.options(listener).unwrap();
    let options = TcpOptions { min_ttl: 255, ..options };
    pair.call(1, |tcp, out| tcp.set_options(listener, options, out)).unwrap();
    pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    say(&mut pair, 1000, &Forged::plain(FIN | ACK, 0), (1, seq.wrapping_add(2)));
    assert_eq!(pair.hosts[1].tcp.time_wait_count(), 1);
    // Its TTL is 64.
    assert_eq!(say(&mut pair, 1000, &Forged::plain(SYN, 0), (100_000, 0)), None);
    let tcp = &pair.hosts[1].tcp;
    assert_eq!((tcp.time_wait_count(), tcp.counters().min_ttl_drop.get()), (1, 1));
}

/// A listener of both families has a limit for each (`IP_MINTTL`, `IPV6_MINHOPCOUNT`).
#[test]
fn tcp_17_families_have_own_limits() {
    let far = FamilyOptions { min_ttl: 255, ..FamilyOptions::default() };
    // Those of IPv6 first: the SYNs are of IPv4, with a TTL of 64.
    let near = FamilyOptions::default();
    for (min_ttl, v4, is_answered) in
        [(255, Some(near), true), (0, Some(far), false), (255, None, false), (0, None, true)]
    {
        let mut pair = lone();
        let listener = listen(&mut pair, None);
        let options = pair.hosts[1].tcp.options(listener).unwrap();
        let options = TcpOptions { min_ttl, v4, ..options };
        pair.call(1, |tcp, out| tcp.set_options(listener, options, out)).unwrap();
        let answer = say(&mut pair, 1000, &Forged::plain(SYN, 0), (0, 0));
        assert_eq!(answer.is_some(), is_answered, "{min_ttl} {v4:?}");
    }
}

/// Two hosts of which nobody hears the other.
fn lone() -> Pair {
    Pair::new(1, Faults { loss: 100, ..Faults::default() }, [TcpConfig::default(); 2])
}
