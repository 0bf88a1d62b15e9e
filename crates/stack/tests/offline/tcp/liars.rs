//! Peers that lie about windows, and what they cost.

use std::net::Shutdown;

use forebay_stack::tcp::{Tcp, TcpConfig, TcpError, TcpOut, TcpSocket};

use super::pair::{Faults, Pair};

/// Hosts with this limit of connections without an owner.
fn pair(max_orphans: u32) -> Pair {
    let small = TcpConfig { rmem: (4096, 4096), ..TcpConfig::default() };
    let config = TcpConfig { max_orphans, ..TcpConfig::default() };
    Pair::new(1, Faults { delay_us: 1_000, ..Faults::default() }, [small, config])
}

/// Connections from host 0, which reads nothing: host 1 has written more than it takes.
fn stuffed(pair: &mut Pair, count: u32) -> Vec<(TcpSocket, TcpSocket)> {
    let open = |_| {
        let (client, server) = pair.open(80);
        let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            tcp.write(server, &[7; 20_000], Default::default(), out)
        };
        assert_eq!(pair.call(1, write), Ok(20_000));
        (client, server)
    };
    let sockets = (0..count).map(open).collect();
    run_until(pair, pair.now_us + 1_000_000);
    sockets
}

fn run_until(pair: &mut Pair, until_us: u64) {
    while pair.next_us().is_some_and(|next_us| next_us <= until_us) {
        pair.step();
    }
    pair.now_us = until_us;
}

/// Windows that stay closed, by a thousand peers that answer each probe: what the application has closed
/// ends all the same.
#[test]
fn tcp_35_closed_windows_end_orphans() {
    let mut pair = pair(1 << 16);
    let sockets = stuffed(&mut pair, 1_000);
    for &(_, server) in &sockets {
        pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    }
    assert_eq!(pair.hosts[1].tcp.orphan_count(), 1_000);
    let now_us = pair.now_us;
    run_until(&mut pair, now_us + 600_000_000);
    let tcp = &pair.hosts[1].tcp;
    assert_eq!((tcp.orphan_count(), tcp.socket_count(), tcp.memory_bytes()), (0, 0, 0));
    assert_eq!(tcp.counters().abort_on_timeout.get(), 1_000);
    for (client, _) in sockets {
        pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    }
    pair.check_rest();
}

/// One more connection without an owner than there may be is reset.
#[test]
fn tcp_35_orphans_have_a_limit() {
    let mut pair = pair(10);
    let sockets = stuffed(&mut pair, 25);
    for &(_, server) in &sockets {
        pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
        assert!(pair.hosts[1].tcp.orphan_count() <= 10);
    }
    let tcp = &pair.hosts[1].tcp;
    assert_eq!((tcp.orphan_count(), tcp.socket_count()), (10, 10));
    assert_eq!(tcp.counters().abort_on_memory.get(), 15);
    for (client, _) in sockets {
        pair.call(0, |tcp, out| tcp.close(client, out)).unwrap();
    }
    pair.check_rest();
    assert_eq!(pair.hosts[1].tcp.orphan_count(), 0);
}

/// Hosts of which the second has this much memory.
fn pair_with_memory(memory_bytes: u64) -> Pair {
    // Room for two segments: with less, the peer would wait for half of a window, as the kernel does.
    let small = TcpConfig { rmem: (8192, 8192), ..TcpConfig::default() };
    let config = TcpConfig { memory_bytes, ..TcpConfig::default() };
    Pair::new(1, Faults { delay_us: 1_000, ..Faults::default() }, [small, config])
}

fn write(pair: &mut Pair, socket: TcpSocket, bytes: &[u8]) -> Result<usize, TcpError> {
    pair.call(1, |tcp, out| tcp.write(socket, bytes, Default::default(), out))
}

/// Errors and ends of connections are told while closed windows of others keep all memory in use.
#[test]
fn tcp_37_errors_are_told_without_memory() {
    let mut pair = pair_with_memory(75_000);
    let (_, server) = pair.open(80);
    let sockets = stuffed(&mut pair, 4);
    pair.call(0, Tcp::abort_all);
    run_for(&mut pair, 10_000);
    assert!(pair.hosts[1].tcp.memory_bytes() < 20_000, "what was reset keeps nothing");
    // The next ones fill it, and are not reset.
    let full = stuffed(&mut pair, 4);
    assert_eq!(write(&mut pair, server, b"lost"), Err(TcpError::Reset));
    assert_eq!(write(&mut pair, server, b"lost"), Err(TcpError::BrokenPipe));
    let shut = full[0].1;
    pair.call(1, |tcp, out| tcp.shutdown(shut, Shutdown::Write, out)).unwrap();
    assert_eq!(write(&mut pair, shut, b"late"), Err(TcpError::BrokenPipe));
    assert_eq!(write(&mut pair, full[1].1, b"more"), Err(TcpError::WouldBlock));
    assert_eq!(write(&mut pair, full[1].1, b""), Ok(0));
    for server in sockets.into_iter().chain(full).map(|(_, server)| server).chain([server]) {
        pair.call(1, |tcp, out| tcp.close(server, out)).unwrap();
    }
    pair.call(0, Tcp::abort_all);
    pair.check_rest();
}

/// A connection whose peer takes what it gets may go on, however much memory others hold.
#[test]
fn tcp_37_full_memory_leaves_each_connection_some() {
    let mut pair = pair_with_memory(75_000);
    let (client, server) = pair.open(80);
    stuffed(&mut pair, 4);
    for _ in 0..10 {
        assert_eq!(write(&mut pair, server, &[7; 1024]), Ok(1024));
        run_for(&mut pair, 100_000);
        let read = pair.call(0, |tcp, out| tcp.read(client, &mut [0; 2048], out));
        assert_eq!(read, Ok(1024));
        run_for(&mut pair, 100_000);
    }
    // As much as `tcp_wmem` has for the least of buffers.
    assert_eq!(write(&mut pair, server, &[7; 3000]), Ok(3000));
    assert_eq!(write(&mut pair, server, &[7; 3000]), Ok(1096));
    assert_eq!(write(&mut pair, server, &[7; 3000]), Err(TcpError::WouldBlock));
    for host in [0, 1] {
        pair.call(host, Tcp::abort_all);
    }
    pair.check_rest();
}

fn run_for(pair: &mut Pair, time_us: u64) {
    let until_us = pair.now_us + time_us;
    run_until(pair, until_us);
}
