//! Memory of connections that are idle after use.

use forebay_stack::tcp::{Tcp, TcpConfig, TcpOptions, TcpOut, TcpSocket, Timestamping, WriteFlags};
use forebay_testkit::memory::{CountingAllocator, heap};

use super::pair::{Faults, Pair};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Connections of the test, each with an end at both hosts: those that are used before, and those that are counted.
const WARM: u16 = 10;
const RETURNING: u16 = 100;
const FIRST_PORT: u16 = 80;
/// Bytes of a request, in several segments, and of its answer.
const REQUEST_BYTES: usize = 20_000;
const ANSWER_BYTES: usize = 3_000;
/// Bytes that may be left: state of the congestion control, once a window was reduced (48), and a timer (24).
const LEFT_BYTES: i64 = 64;

/// A request and its answer, over a path that reorders segments. Returns the most memory that was in use.
fn exchange(pair: &mut Pair, (client, server): (TcpSocket, TcpSocket)) -> i64 {
    let mut most = 0;
    for (from, [sender, reader], len) in
        [(0, [client, server], REQUEST_BYTES), (1, [server, client], ANSWER_BYTES)]
    {
        let bytes = vec![7; len];
        let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            tcp.write(sender, &bytes, WriteFlags { zero_copy: true, ..WriteFlags::default() }, out)
        };
        assert_eq!(pair.call(from, write), Ok(len));
        let mut left = len;
        while left > 0 {
            assert!(pair.step());
            pair.hosts.iter_mut().for_each(|host| host.tcp.take_ready(&mut Vec::new()));
            most = most.max(heap().bytes);
            let mut room = [0; 4096];
            let read = pair.call(1 - from, |tcp, out| tcp.read(reader, &mut room, out));
            left -= read.unwrap_or(0);
        }
    }
    most
}

/// Goes on until nothing is due any more.
fn idle(pair: &mut Pair) -> i64 {
    while pair.step() {}
    pair.hosts.iter_mut().for_each(|host| host.tcp.take_ready(&mut Vec::new()));
    heap().bytes
}

#[test]
fn tcp_12_idle_connection_gives_back_its_queues() {
    let faults = Faults { reorder: 20, delay_us: 1_000, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [TcpConfig::default(); 2]);
    let ends: Vec<_> = (0..WARM + RETURNING).map(|port| pair.open(FIRST_PORT + port)).collect();
    // The test's own queues grow, and those of the hosts' frames.
    let (first, rest) = ends.split_at(WARM.into());
    first.iter().for_each(|&ends| {
        exchange(&mut pair, ends);
    });
    let before = idle(&mut pair);
    let most = rest.iter().map(|&ends| exchange(&mut pair, ends)).max().unwrap();
    let after = idle(&mut pair);
    let [used, each] = [most, after].map(|bytes| (bytes - before) / (2 * i64::from(RETURNING)));
    eprintln!("{used} in use, {each} left");
    assert!(used > 4 * LEFT_BYTES, "{used} bytes in use for each end");
    assert!(each <= LEFT_BYTES, "{each} bytes more for each end than before its use");
}

/// Takes all reports of both ends, and returns their number.
fn take_reports(pair: &mut Pair, ends: [TcpSocket; 2]) -> usize {
    let mut taken = 0;
    for (host, socket) in ends.into_iter().enumerate() {
        while pair.hosts[host].tcp.take_report(socket).unwrap().is_some() {
            taken += 1;
        }
    }
    taken
}

#[test]
fn tcp_12_idle_connection_gives_back_its_reports() {
    let faults = Faults { delay_us: 1_000, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [TcpConfig::default(); 2]);
    let flags = Timestamping::OPT_ID.with(Timestamping::TX_SOFTWARE).with(Timestamping::TX_ACK);
    let ends: Vec<_> = (0..WARM + RETURNING).map(|port| pair.open(FIRST_PORT + port)).collect();
    for (host, socket) in ends.iter().flat_map(|&(client, server)| [(0, client), (1, server)]) {
        let set = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            let options = TcpOptions { zero_copy: true, ..tcp.options(socket)? };
            tcp.set_options(socket, options, out)?;
            tcp.set_timestamping(socket, flags, out)
        };
        pair.call(host, set).unwrap();
    }
    let (first, rest) = ends.split_at(WARM.into());
    for &(client, server) in first {
        exchange(&mut pair, (client, server));
        assert!(take_reports(&mut pair, [client, server]) > 0);
    }
    let before = idle(&mut pair);
    for (at, &(client, server)) in rest.iter().enumerate() {
        exchange(&mut pair, (client, server));
        // Those of every other connection wait until it is idle.
        if at % 2 == 0 {
            assert!(take_reports(&mut pair, [client, server]) > 0);
        }
    }
    let charged = pair.hosts.iter().map(|host| host.tcp.memory_bytes()).sum::<u64>();
    assert!(charged > 0, "reports are charged");
    let unread = idle(&mut pair);
    let charged = pair.hosts.iter().map(|host| host.tcp.memory_bytes()).sum::<u64>();
    assert!(charged > 0, "reports that nobody reads are charged");
    for &(client, server) in rest {
        take_reports(&mut pair, [client, server]);
    }
    let after = idle(&mut pair);
    let [waiting, each] =
        [unread, after].map(|bytes| (bytes - before) / (2 * i64::from(RETURNING)));
    eprintln!("{waiting} with reports of every other one, {each} left");
    assert!(waiting > LEFT_BYTES && each <= LEFT_BYTES, "{each} bytes more for each end");
    // ACKs have come since the reports of these were taken.
    for &(client, server) in first {
        take_reports(&mut pair, [client, server]);
    }
    assert!(pair.hosts.iter().all(|host| host.tcp.memory_bytes() == 0));
}
