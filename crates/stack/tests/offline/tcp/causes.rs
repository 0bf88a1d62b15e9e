//! Retransmissions, told by their causes.

use forebay_stack::tcp::{Resent, TcpConfig, TcpInfo};

use super::pair::{Faults, Pair};

/// Sends bytes over a path that loses some, until all are acknowledged. Returns what the sender tells
/// of itself then, and its count of retransmissions.
fn sent_over_lossy_path(seed: u64, loss: u32, len_bytes: usize) -> (TcpInfo, u64) {
    let faults = Faults { loss, delay_us: 10_000, ..Faults::default() };
    let mut pair = Pair::new(seed, faults, [TcpConfig::default(); 2]);
    let (client, server) = pair.open(80);
    let bytes = vec![7; len_bytes];
    let (mut written, mut read) = (0, 0);
    let mut room = vec![0; len_bytes];
    let info = loop {
        written += pair
            .call(0, |tcp, out| tcp.write(client, &bytes[written..], Default::default(), out))
            .unwrap_or(0);
        read += pair.call(1, |tcp, out| tcp.read(server, &mut room, out)).unwrap_or(0);
        let info = pair.hosts[0].tcp.info(client).unwrap().unwrap();
        if read == len_bytes && info.unacked_bytes == 0 {
            break info;
        }
        assert!(pair.step(), "seed {seed}: nothing happens any more");
    };
    let counters = pair.hosts[0].tcp.counters();
    let resent = counters.retrans_segs.get();
    // The names of RFC 4022, section 3: segments that only repeat bytes count once.
    assert_eq!(counters.out_segs.get() + resent, pair.segments[0], "seed {seed}");
    let by_cause =
        [(&counters.fast_retrans, info.resent.fast), (&counters.timeouts, info.resent.by_timeout)];
    for (counter, count) in by_cause {
        assert_eq!(counter.get(), count.into(), "seed {seed}: {counters:?}");
    }
    for (host, socket) in [(0, client), (1, server)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
    (info, resent)
}

#[test]
fn tcp_30_retransmissions_have_a_cause() {
    let (info, counted) = sent_over_lossy_path(1, 0, 200_000);
    assert_eq!((info.resent, counted), (Resent::default(), 0));
    let mut all = Resent::default();
    // The end of a short stream is probed for, as nothing follows that would be acknowledged.
    for (seed, len_bytes) in (1..=40).map(|n| (2 * n, if n <= 10 { 200_000 } else { 5_000 })) {
        let (info, counted) = sent_over_lossy_path(seed, 10, len_bytes);
        let resent = info.resent;
        assert_eq!(u64::from(resent.total()), counted, "seed {seed}: {info:?}");
        all.by_timeout += resent.by_timeout;
        all.in_slow_start += resent.in_slow_start;
        all.fast += resent.fast;
        all.as_probe += resent.as_probe;
    }
    assert!(all.by_timeout > 0 && all.fast > 0 && all.as_probe > 0, "{all:?}");
    assert!(all.fast > all.by_timeout, "most are found by SACK and RACK: {all:?}");
}
