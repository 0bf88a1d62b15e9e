//! Peers that lie about windows, and what they cost.

use std::net::Shutdown;

use forebay_stack::tcp::{Tcp, TcpConfig, TcpError, TcpOut, TcpSocket};

use super::forged::{Forged, say};
use super::pair::{Faults, Pair};
use super::reuseport::{accepted, listen};

const SYN: u8 = 2;
const ACK: u8 = 16;

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

/// Readers that take nothing, of what many peers send: together they keep little more than they may, each gets
/// some, and all comes once they read.
#[test]
fn tcp_37_received_bytes_have_a_common_limit() {
    const LIMIT: u64 = 200_000;
    let config = TcpConfig { received_bytes: LIMIT, ..TcpConfig::default() };
    let faults = Faults { delay_us: 1_000, ..Faults::default() };
    let mut pair = Pair::new(1, faults, [TcpConfig::default(), config]);
    let sockets: Vec<_> = (0..30).map(|_| pair.open(80)).collect();
    let bytes = vec![7; 30_000];
    for &(client, _) in &sockets {
        let write = |tcp: &mut Tcp, out: &mut TcpOut<'_>| {
            tcp.write(client, &bytes, Default::default(), out)
        };
        assert_eq!(pair.call(0, write), Ok(bytes.len()));
        run_for(&mut pair, 100_000);
    }
    let unread =
        |pair: &Pair, socket| pair.hosts[1].tcp.info(socket).unwrap().unwrap().unread_bytes;
    assert!(sockets.iter().all(|&(_, server)| unread(&pair, server) > 0), "each gets some");
    let kept_bytes = pair.hosts[1].tcp.memory_bytes();
    // One packet beyond the limit, and two for each connection.
    assert!((LIMIT..LIMIT + 3000 * 61).contains(&kept_bytes), "{kept_bytes} bytes");
    let mut room = vec![0; bytes.len()];
    let mut left: Vec<_> = sockets.iter().map(|&(_, server)| (server, bytes.len())).collect();
    while !left.is_empty() {
        for (server, left) in &mut left {
            let read = pair.call(1, |tcp, out| tcp.read(*server, &mut room, out)).unwrap_or(0);
            *left -= read;
        }
        left.retain(|(_, left)| *left > 0);
        assert!(left.is_empty() || pair.step());
    }
    for host in [0, 1] {
        pair.call(host, Tcp::abort_all);
    }
    pair.check_rest();
}

/// Segments behind gaps that never close: those of some connections leave the others what they need.
#[test]
fn tcp_37_gaps_have_a_common_limit() {
    const LIMIT: u64 = 100_000;
    let config = TcpConfig { received_bytes: LIMIT, ..TcpConfig::default() };
    let mut pair = Pair::new(1, Faults::default(), [TcpConfig::default(), config]);
    let listener = listen(&mut pair, None);
    let open = |pair: &mut Pair, port| {
        let (ours, _) = say(pair, port, &Forged::plain(SYN, 0), (0, 0)).unwrap();
        say(pair, port, &Forged::plain(ACK, 0), (1, ours + 1));
        ours + 1
    };
    for port in 1000..1040 {
        let ours = open(&mut pair, port);
        for segment in 0..20 {
            say(&mut pair, port, &Forged::plain(ACK, 500), (1001 + segment * 1000, ours));
        }
    }
    let kept_bytes = pair.hosts[1].tcp.memory_bytes();
    assert!((LIMIT..LIMIT + 3000 * 81).contains(&kept_bytes), "{kept_bytes} bytes");
    let ours = open(&mut pair, 2000);
    let server = *accepted(&mut pair, listener).last().unwrap();
    for segment in 0..20 {
        say(&mut pair, 2000, &Forged::plain(ACK, 500), (1 + segment * 500, ours));
        let read = pair.call(1, |tcp, out| tcp.read(server, &mut [0; 1000], out));
        assert_eq!(read, Ok(500), "segment {segment}");
    }
    pair.call(1, Tcp::abort_all);
}

/// ACKs that end one byte before a segment does: what is sent again has segments as long as others.
#[test]
fn tcp_14_acks_inside_segments_cost_nothing() {
    let faults = Faults { loss: 100, ..Faults::default() };
    let config = TcpConfig { gso_bytes: 60_000, ..TcpConfig::default() };
    let mut pair = Pair::new(1, faults, [config; 2]);
    let listener = listen(&mut pair, None);
    let (ours, _) = say(&mut pair, 1000, &Forged::plain(SYN, 0), (0, 0)).unwrap();
    let ack = Forged { window: 60_000, ..Forged::plain(ACK, 0) };
    say(&mut pair, 1000, &ack, (1, ours + 1));
    let server = accepted(&mut pair, listener)[0];
    assert_eq!(write(&mut pair, server, &[7; 32 * 536]), Ok(32 * 536));
    let info = |pair: &Pair| pair.hosts[1].tcp.info(server).unwrap().unwrap();
    let (mut acked, mut rounds) = (0, 0);
    while acked < 32 * 536 - 1 {
        let timeouts = info(&pair).resent.by_timeout;
        while info(&pair).resent.by_timeout == timeouts {
            assert!(pair.step());
        }
        // All but a byte of two segments more.
        let left = info(&pair).unacked_bytes - 1;
        acked += left.min(if rounds == 0 { 2 * 536 - 1 } else { 2 * 536 });
        say(&mut pair, 1000, &ack, (1, ours + 1 + acked));
        rounds += 1;
    }
    let told = info(&pair);
    assert!(rounds >= 16);
    let full = told.tally.bytes_sent / 536;
    let sent = u64::from(told.tally.data_segs_out);
    assert!(sent < 3 * full, "{sent} segments of 536 bytes for {full}");
    pair.call(1, Tcp::abort_all);
}
