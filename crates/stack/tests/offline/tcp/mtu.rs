//! Paths that drop large packets without an error, and the search for what they take (RFC 4821).

use forebay_stack::tcp::{MtuProbing, Phase, TcpConfig, TcpError, TcpInfo, TcpOptions, TcpSocket};
use proptest::prelude::*;

use super::pair::{Faults, MTU, Pair};
use super::streams::{config, run};

const SECOND_US: u64 = 1_000_000;

/// Bytes in which a search ends.
const LEN: usize = 3_000_000;

/// Packets of a search that begins, with timestamps.
const FIRST_BYTES: u32 = 1024 + 12 + 40;

/// Two hosts with a path of 10 ms that takes packets up to this size, and a connection.
fn opened(largest_bytes: u32, config: TcpConfig) -> (Pair, TcpSocket, TcpSocket) {
    let faults = Faults {
        delay_us: 10_000,
        largest_bytes: [largest_bytes; 2],
        // RACK orders packets by time.
        apart_us: 50,
        ..Faults::default()
    };
    let mut pair = Pair::new(1, faults, [config; 2]);
    let (client, server) = pair.open(80);
    (pair, client, server)
}

fn probing(mtu_probing: MtuProbing) -> TcpConfig {
    // Little is in flight: there are many round trips.
    TcpConfig { mtu_probing, wmem: (87_040, 200_000), ..TcpConfig::default() }
}

/// Sends bytes from host 0, and returns the number of those that host 1 has read before the time is over.
fn carry(pair: &mut Pair, (from, to): (TcpSocket, TcpSocket), len: usize, within_us: u64) -> usize {
    let (bytes, end_us) = (vec![7; 40_000], pair.now_us + within_us);
    let (mut written, mut read, mut room) = (0, 0, vec![0; 40_000]);
    while read < len && pair.now_us < end_us {
        let next = &bytes[..bytes.len().min(len - written)];
        // As a writer that waits for `EPOLLOUT` does: its writes are larger than a few segments.
        let is_writable = pair.hosts[0].tcp.readiness(from).is_ok_and(|now| now.writable);
        let next = if is_writable { next } else { &[] };
        match pair.call(0, |tcp, out| tcp.write(from, next, Default::default(), out)) {
            Ok(more) => written += more,
            Err(TcpError::WouldBlock) => {}
            Err(_) => break,
        }
        read += pair.call(1, |tcp, out| tcp.read(to, &mut room, out)).unwrap_or(0);
        if !pair.step() {
            break;
        }
    }
    read
}

fn info(pair: &Pair, socket: TcpSocket) -> TcpInfo {
    pair.hosts[0].tcp.info(socket).unwrap().unwrap()
}

/// Whatever a path takes is found within the threshold, without a time-out and without a smaller window.
#[test]
fn tcp_48_search_finds_what_a_path_takes() {
    for (sack, gso_bytes) in [(true, 0), (true, 60_000), (false, 0)] {
        for largest in [FIRST_BYTES, 1100, 1280, 1399, 1400, 1492, MTU] {
            let config = TcpConfig { sack, gso_bytes, ..probing(MtuProbing::Always) };
            let (mut pair, client, server) = opened(largest, config);
            assert_eq!(carry(&mut pair, (client, server), LEN, 600 * SECOND_US), LEN);
            let told = info(&pair, client);
            let (low, high) = told.mtu_search.unwrap();
            assert!(low <= largest && largest <= high && high - low < 8, "{largest}: {told:?}");
            assert_eq!(told.mss_bytes, low - 52, "{largest}: {told:?}");
            let counters = pair.hosts[0].tcp.counters();
            let losses = counters.sack_recovery.get() + counters.reno_recovery.get();
            assert_eq!((counters.timeouts.get(), losses), (0, 0), "{largest}: {told:?}");
            let (failed, resent) = (counters.mtup_fail.get(), counters.retrans_segs.get());
            assert!(resent <= 2 * failed, "{largest}: {resent} for {failed} probes");
            assert!((largest < MTU) == (failed > 0) || largest > 1492, "{largest}: {failed}");
        }
    }
}

/// Without probes nothing arrives, and with them all does, however little the path takes.
#[test]
fn tcp_48_black_holes_let_data_pass() {
    for largest in [100, 300, 552, 800, 1200, 1490] {
        let (mut pair, client, server) = opened(largest, probing(MtuProbing::Off));
        assert_eq!(carry(&mut pair, (client, server), 100_000, 2000 * SECOND_US), 0, "{largest}");
        let (mut pair, client, server) = opened(largest, probing(MtuProbing::AfterBlackHole));
        assert_eq!(info(&pair, client).mtu_search, None);
        let len = 100_000;
        let read = carry(&mut pair, (client, server), len, 600 * SECOND_US);
        assert_eq!(read, len, "{largest}: {:?}", info(&pair, client));
    }
}

/// A path that takes larger packets later is used so after a while.
#[test]
fn tcp_48_search_begins_anew_after_a_while() {
    let (mut pair, client, server) = opened(1200, probing(MtuProbing::Always));
    assert_eq!(carry(&mut pair, (client, server), LEN, 60 * SECOND_US), LEN);
    assert!(info(&pair, client).mss_bytes <= 1200 - 52);
    pair.faults.largest_bytes = [0; 2];
    assert_eq!(carry(&mut pair, (client, server), LEN, 60 * SECOND_US), LEN);
    assert!(info(&pair, client).mss_bytes <= 1200 - 52, "not before the interval is over");
    while info(&pair, client).unacked > 0 {
        assert!(pair.step());
    }
    pair.now_us += 600 * SECOND_US;
    assert_eq!(carry(&mut pair, (client, server), LEN, 60 * SECOND_US), LEN);
    assert!(info(&pair, client).mss_bytes > MTU - 52 - 8, "{:?}", info(&pair, client));
}

/// When a probe arrives, as many bytes as before may be in flight, in fewer segments.
#[test]
fn tcp_48_arrival_keeps_windows_bytes() {
    let (mut pair, client, server) = opened(0, probing(MtuProbing::Always));
    let (mut before, mut rises) = (info(&pair, client), 0);
    for _ in 0..2000 {
        // One event at a time.
        carry(&mut pair, (client, server), 40_000, 1);
        let after = info(&pair, client);
        if after.mss_bytes > before.mss_bytes {
            let [had, has] = [before, after].map(|told| told.cwnd * (told.mss_bytes + 52));
            // What one ACK adds.
            let grown = 3 * (after.mss_bytes + 52);
            assert!(had - has.min(had) < after.mss_bytes + 52, "{before:?} {after:?}");
            assert!(has <= had + grown, "{before:?} {after:?}");
            rises += 1;
        }
        before = after;
    }
    assert!(rises > 3, "{before:?}");
}

/// A probe takes the places of two segments; when it is lost, the window is as before.
#[test]
fn tcp_48_loss_gives_place_back() {
    let (mut pair, client, server) = opened(1200, probing(MtuProbing::Always));
    let counters = std::sync::Arc::clone(pair.hosts[0].tcp.counters());
    let (mut before, mut failed) = (info(&pair, client), 0);
    for _ in 0..2000 {
        carry(&mut pair, (client, server), 40_000, 1);
        let after = info(&pair, client);
        if counters.mtup_fail.get() > failed {
            failed = counters.mtup_fail.get();
            assert_eq!((after.cwnd, after.phase), (before.cwnd + 1, Phase::Loss), "{after:?}");
        }
        before = after;
    }
    assert!(failed > 2 && counters.timeouts.get() == 0, "{before:?}");
}

/// A path that reorders shows a loss by time only: that of a probe is still no sign of congestion.
#[test]
fn tcp_48_late_loss_keeps_window() {
    let (mut pair, client, server) = opened(1200, probing(MtuProbing::Always));
    pair.call(0, |tcp, out| tcp.set_route_mtu(client, 600, out)).unwrap();
    (pair.faults.reorder, pair.faults.apart_us) = (10, 0);
    // Segments overtake few others.
    for _ in 0..40 {
        carry(&mut pair, (client, server), 6_000, 60 * SECOND_US);
    }
    (pair.faults.reorder, pair.faults.apart_us) = (0, 50);
    let counters = std::sync::Arc::clone(pair.hosts[0].tcp.counters());
    let losses = || counters.sack_recovery.get() + counters.timeouts.get();
    let before = losses();
    assert!(info(&pair, client).reorderings > 0 && counters.mtup_fail.get() == 0);
    pair.call(0, |tcp, out| tcp.set_route_mtu(client, MTU, out)).unwrap();
    // A few segments behind each probe, and then nothing until all arrived.
    for _ in 0..100 {
        carry(&mut pair, (client, server), 36_000, 60 * SECOND_US);
    }
    assert!(counters.mtup_fail.get() > 2, "{:?}", info(&pair, client));
    assert_eq!(losses(), before, "{:?}", info(&pair, client));
}

/// The device of a listener has another MTU when the ACK comes than when the SYN came: a smaller one counts.
#[test]
fn tcp_54_handshake_follows_a_smaller_mtu() {
    for (mtu_bytes, expected) in [(1300, 1300), (9000, MTU)] {
        let faults = Faults { delay_us: 10_000, ..Faults::default() };
        let mut pair = Pair::new(1, faults, [TcpConfig::default(); 2]);
        let there = pair.address(1, 80);
        let listener = pair.hosts[1].tcp.socket().unwrap();
        pair.hosts[1].tcp.bind(listener, there).unwrap();
        pair.hosts[1].tcp.listen(listener, 16).unwrap();
        let client = pair.hosts[0].tcp.socket().unwrap();
        let here = pair.address(0, 0);
        let begun = pair.call(0, |tcp, out| tcp.connect(client, (here, there), MTU, out));
        assert_eq!(begun, Err(TcpError::InProgress));
        while pair.segments[1] == 0 {
            assert!(pair.step());
        }
        pair.hosts[1].receives_on.mtu_bytes = mtu_bytes;
        let server = loop {
            match pair.hosts[1].tcp.accept(listener) {
                Ok((server, _)) => break server,
                Err(_) => assert!(pair.step()),
            }
        };
        let told = pair.hosts[1].tcp.info(server).unwrap().unwrap();
        assert_eq!(told.path_mtu_bytes, expected);
    }
}

/// Segments are never longer than the device takes, nor than the peer or the user wants.
#[test]
fn tcp_48_search_has_bounds() {
    let config = TcpConfig { base_mss: 400, ..probing(MtuProbing::Always) };
    let (mut pair, ..) = opened(0, config);
    let there = pair.address(1, 81);
    let listener = pair.hosts[1].tcp.socket().unwrap();
    pair.hosts[1].tcp.bind(listener, there).unwrap();
    pair.hosts[1].tcp.listen(listener, 16).unwrap();
    let client = pair.hosts[0].tcp.socket().unwrap();
    let options = TcpOptions { max_segment: Some(900), ..TcpOptions::default() };
    pair.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
    let here = pair.address(0, 0);
    let begun = pair.call(0, |tcp, out| tcp.connect(client, (here, there), MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    let server = loop {
        match pair.hosts[1].tcp.accept(listener) {
            Ok((server, _)) => break server,
            Err(_) => assert!(pair.step()),
        }
    };
    assert_eq!(carry(&mut pair, (client, server), LEN, 60 * SECOND_US), LEN);
    let told = info(&pair, client);
    assert!(told.mss_bytes > 888 - 8 && told.mss_bytes <= 888, "{told:?}");
    let route = pair.call(0, |tcp, out| tcp.set_route_mtu(client, 700, out));
    assert_eq!((route, info(&pair, client).mss_bytes), (Ok(()), 648));
    assert_eq!(carry(&mut pair, (client, server), LEN, 60 * SECOND_US), LEN);
    assert_eq!(info(&pair, client).mss_bytes, 648);
    pair.call(0, |tcp, out| tcp.set_route_mtu(client, MTU, out)).unwrap();
    assert_eq!(info(&pair, client).mss_bytes, 648, "a probe shows first that more arrives");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn tcp_48_streams_survive_any_mtu(
        seed: u64, first in config(), second in config(), lens in [0_usize..150_000, 0_usize..150_000],
        loss in 0_u32..4, reorder in 0_u32..10, delay_us in 0_u64..30_000, merges: bool,
        largest in [100_u32..1600, 100_u32..1600], is_found_late: [bool; 2],
    ) {
        let configs = [first, second].into_iter().zip(is_found_late).map(|(config, is_late)| {
            let mode = if is_late { MtuProbing::AfterBlackHole } else { MtuProbing::Always };
            TcpConfig { mtu_probing: mode, ..config }
        });
        let configs: Vec<_> = configs.collect();
        let faults = Faults { loss, reorder, delay_us, merges, largest_bytes: largest, ..Faults::default() };
        run(seed, faults, [configs[0], configs[1]], lens, TcpOptions::default());
    }
}
