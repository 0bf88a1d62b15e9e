//! State of a connection for observers: reasons why bytes wait, numbers of bytes and segments.

use std::num::NonZeroU32;

use forebay_stack::tcp::{
    IcmpMessage, Limit, PathError, Seq, Tally, Tcp, TcpConfig, TcpError, TcpInfo, TcpOptions,
    TcpOut, TcpSocket, Timestamping, WriteFlags,
};

use super::pair::{Faults, MTU, Pair};

/// Two hosts with a path of 10 ms, and this number of frames each.
fn pair(chunks: u32) -> Pair {
    let faults = Faults { delay_us: 10_000, ..Faults::default() };
    Pair::with_chunks(chunks, 1, faults, [TcpConfig::default(); 2])
}

fn info(pair: &Pair, host: usize, socket: TcpSocket) -> TcpInfo {
    pair.hosts[host].tcp.info(socket).unwrap().unwrap()
}

fn write(pair: &mut Pair, socket: TcpSocket, len: usize) -> usize {
    let write = |tcp: &mut forebay_stack::tcp::Tcp, out: &mut forebay_stack::tcp::TcpOut<'_>| {
        tcp.write(socket, &vec![7; len], WriteFlags::default(), out)
    };
    pair.call(0, write).unwrap_or(0)
}

#[test]
fn tcp_30_handshake_holds_bytes_back() {
    let mut pair = pair(8192);
    let ends = (pair.address(0, 0), pair.address(1, 80));
    let socket = pair.hosts[0].tcp.socket().unwrap();
    let begun = pair.call(0, |tcp, out| tcp.connect(socket, ends, MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    assert_eq!(info(&pair, 0, socket).limit, Limit::Application);
    assert_eq!(write(&mut pair, socket, 100), 0, "a SYN carries no data, and nothing waits");
    assert_eq!(info(&pair, 0, socket).limit, Limit::Application);
}

#[test]
fn tcp_30_windows_hold_bytes_back() {
    let mut pair = pair(8192);
    let (client, server) = pair.open(80);
    assert_eq!(info(&pair, 0, client).limit, Limit::Application);
    assert!(write(&mut pair, client, 60_000) > 20_000);
    let told = info(&pair, 0, client);
    assert_eq!(told.limit, Limit::CongestionWindow, "10 segments are under way: {told:?}");
    assert_eq!(told.unacked, told.cwnd);
    // Nobody reads at the other end.
    while pair.now_us < 3_000_000 {
        write(&mut pair, client, 60_000);
        assert!(pair.step());
    }
    let told = info(&pair, 0, client);
    assert_eq!(told.limit, Limit::PeerWindow, "{told:?}");
    assert!(told.unsent_bytes > 0 && told.send_window_bytes < told.mss_bytes, "{told:?}");
    assert!(info(&pair, 1, server).unread_bytes > 10_000);
}

#[test]
fn tcp_30_small_segment_waits_for_ack() {
    let mut pair = pair(8192);
    let (client, _) = pair.open(80);
    assert_eq!(write(&mut pair, client, 10), 10);
    assert_eq!(info(&pair, 0, client).limit, Limit::Application, "the first one leaves at once");
    assert_eq!(write(&mut pair, client, 10), 10);
    let told = info(&pair, 0, client);
    assert_eq!((told.limit, told.unsent_bytes), (Limit::SmallSegment, 10), "Nagle: {told:?}");
    while info(&pair, 0, client).unacked_bytes + info(&pair, 0, client).unsent_bytes > 0 {
        assert!(pair.step());
    }
    let options = pair.hosts[0].tcp.options(client).unwrap();
    let corked = forebay_stack::tcp::TcpOptions { cork: true, ..options };
    pair.call(0, |tcp, out| tcp.set_options(client, corked, out)).unwrap();
    assert_eq!(write(&mut pair, client, 10), 10);
    assert_eq!(info(&pair, 0, client).limit, Limit::SmallSegment, "corked");
}

#[test]
fn tcp_30_frames_are_awaited() {
    let mut pair = pair(16);
    let (client, _) = pair.open(80);
    // All frames are in other hands.
    let mut held = Vec::new();
    while let Some(frame) = pair.hosts[0].pool.allocate(100) {
        held.push(frame);
    }
    assert!(write(&mut pair, client, 20_000) > 0);
    let told = info(&pair, 0, client);
    assert_eq!((told.limit, told.unacked), (Limit::Turn, 0), "{told:?}");
    held.into_iter().for_each(|frame| pair.hosts[0].pool.put(frame));
    while info(&pair, 0, client).unsent_bytes > 0 {
        assert!(pair.step());
    }
}

/// Sends bytes from host 0, which host 1 reads, until all are acknowledged.
fn carried(pair: &mut Pair, len: usize) -> [Tally; 2] {
    let (client, server) = pair.open(80);
    let (mut written, mut read, mut room) = (0, 0, vec![0; len]);
    loop {
        if written < len {
            written += write(pair, client, len - written);
        }
        read += pair.call(1, |tcp, out| tcp.read(server, &mut room, out)).unwrap_or(0);
        let told = info(pair, 0, client);
        if read == len && told.unacked_bytes == 0 {
            return [told.tally, info(pair, 1, server).tally];
        }
        assert!(pair.step(), "nothing happens any more");
    }
}

#[test]
fn tcp_30_tally_agrees_at_both_ends() {
    const LEN: usize = 300_000;
    let [client, server] = carried(&mut pair(8192), LEN);
    // The client's SYN counts, the listener's SYN-ACK does not.
    assert_eq!(client.bytes_acked, LEN as u64 + 1);
    assert_eq!((client.bytes_sent, client.bytes_retrans), (LEN as u64, 0));
    assert_eq!(server.bytes_received, LEN as u64);
    assert_eq!((server.segs_in, server.data_segs_in), (client.segs_out, client.data_segs_out));
    assert_eq!(client.segs_in, server.segs_out + 1);
    assert_eq!((server.bytes_sent, server.bytes_acked, server.data_segs_out), (0, 0, 0));
    assert_eq!((client.bytes_received, client.data_segs_in), (0, 0));
}

#[test]
fn tcp_30_tally_counts_what_is_resent() {
    const LEN: usize = 300_000;
    for seed in 1..20 {
        let faults = Faults { loss: 5, reorder: 5, delay_us: 10_000, ..Faults::default() };
        let mut pair = Pair::new(seed, faults, [TcpConfig::default(); 2]);
        let [client, server] = carried(&mut pair, LEN);
        assert_eq!(client.bytes_acked, LEN as u64 + 1, "seed {seed}");
        assert_eq!(client.bytes_sent - client.bytes_retrans, LEN as u64, "seed {seed}: {client:?}");
        assert_eq!(server.bytes_received, LEN as u64, "seed {seed}");
        assert!(client.bytes_retrans > 0, "seed {seed}: {client:?}");
        assert!(client.data_segs_out > server.data_segs_in, "seed {seed}: {client:?} {server:?}");
    }
}

#[test]
fn tcp_17_unsent_limit_holds_bytes_back() {
    const LIMIT: u32 = 3000;
    let mut pair = pair(8192);
    let (client, server) = pair.open(80);
    let options = pair.hosts[0].tcp.options(client).unwrap();
    let limited = TcpOptions { unsent_limit: NonZeroU32::new(LIMIT), ..options };
    pair.call(0, |tcp, out| tcp.set_options(client, limited, out)).unwrap();
    let mut room = vec![0; 1 << 20];
    let (mut read, mut held_back) = (0, 0);
    while read < 1 << 20 {
        // As in the kernel, a write is cut where packets are, not at the limit.
        while write(&mut pair, client, 4000) > 0 {
            assert!(info(&pair, 0, client).unsent_bytes < LIMIT + (1 << 16));
        }
        let told = info(&pair, 0, client);
        let free = told.send_buffer_bytes - told.unacked_bytes - told.unsent_bytes;
        held_back += u32::from(told.unsent_bytes >= LIMIT && free > 10_000);
        read += pair.call(1, |tcp, out| tcp.read(server, &mut room, out)).unwrap_or(0);
        assert!(pair.step(), "nothing happens any more");
    }
    assert!(held_back > 5, "the send buffer had room {held_back} times");
}

#[test]
fn tcp_17_packets_carry_the_ttl_option() {
    let mut pair = pair(8192);
    let (client, _) = pair.open(80);
    let options = TcpOptions { ttl: 9, ..pair.hosts[0].tcp.options(client).unwrap() };
    let (now_us, mut sent) = (pair.now_us, Vec::new());
    let write = |tcp: &mut forebay_stack::tcp::Tcp, out: &mut forebay_stack::tcp::TcpOut<'_>| {
        tcp.set_options(client, options, out).unwrap();
        tcp.write(client, &[7; 100], WriteFlags::default(), out).unwrap();
    };
    pair.hosts[0].call(now_us, &mut sent, write);
    let ttls: Vec<_> = sent.iter().map(|packet| packet[8]).collect();
    assert_eq!(ttls, [9]);
}

/// A path of 10 ms each way: bytes are under way for 20 ms; a window that is closed and a buffer that is small
/// have times of their own.
#[test]
fn tcp_30_times_of_waiting_are_told() {
    let mut pair = pair(8192);
    let (client, server) = pair.open(80);
    let busy = |pair: &Pair| {
        let (busy, now_us) = (info(pair, 0, client).busy, pair.now_us);
        (busy.total_us(now_us), busy.by_peer_window_us(now_us), busy.by_send_buffer_us(now_us))
    };
    assert_eq!(busy(&pair), (0, 0, 0));
    write(&mut pair, client, 1000);
    while info(&pair, 0, client).unacked > 0 {
        assert!(pair.step());
    }
    let (total_us, by_window_us, by_buffer_us) = busy(&pair);
    assert_eq!((total_us, by_window_us, by_buffer_us), (20_000, 0, 0));
    // A stream that fills its window, and then one whose buffer holds less than that.
    let options = pair.hosts[0].tcp.options(client).unwrap();
    let stream = |pair: &mut Pair, sndbuf: u32| {
        let options = TcpOptions { sndbuf: Some(sndbuf), ..options };
        pair.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
        let until_us = pair.now_us + 200_000;
        while pair.now_us < until_us {
            write(pair, client, 60_000);
            assert!(pair.step());
            pair.call(1, |tcp, out| tcp.read(server, &mut [0; 65_536], out)).ok();
        }
        busy(pair).2
    };
    let before_us = stream(&mut pair, 1 << 20);
    let by_buffer_us = stream(&mut pair, 32_768) - before_us;
    assert!((50_000..=201_000).contains(&by_buffer_us), "{by_buffer_us}");
    // Nobody reads any more.
    pair.call(0, |tcp, out| {
        tcp.set_options(client, TcpOptions { sndbuf: Some(1 << 20), ..options }, out)
    })
    .unwrap();
    while info(&pair, 0, client).limit != Limit::PeerWindow {
        write(&mut pair, client, 60_000);
        assert!(pair.step());
    }
    let (before_us, began_us) = (busy(&pair).1, pair.now_us);
    while pair.now_us < began_us + 1_000_000 {
        assert!(pair.step());
    }
    let spent_us = busy(&pair).1 - before_us;
    // Between probes that find some room.
    assert!((300_000..=pair.now_us - began_us + 1_000).contains(&spent_us), "{spent_us}");
}

/// Taking the error of a path makes a socket less ready. The waiters hear of what makes it readable again.
#[test]
fn tcp_17_taken_error_hides_no_data() {
    let mut pair = pair(8192);
    let (client, server) = pair.open(80);
    while pair.step() {}
    let options = pair.hosts[0].tcp.options(client).unwrap();
    let options = TcpOptions { tells_path_errors: true, ..options };
    pair.call(0, |tcp, out| tcp.set_options(client, options, out)).unwrap();
    assert_eq!(write(&mut pair, client, 10), 10);
    let (seq, flow) = (Seq(pair.last[0].0), pair.hosts[0].tcp.flow(client).unwrap());
    let (error, ends_handshake, is_of_route) = (TcpError::Refused, false, false);
    let message = IcmpMessage::default();
    let error = PathError::Unreachable { error, ends_handshake, is_of_route, message };
    pair.call(0, |tcp, out| tcp.receive_error(&flow, seq, error, out));
    let taken = pair.call(0, |tcp, _| tcp.take_error(client));
    assert_eq!(taken, Ok(Some(TcpError::Refused)));
    assert!(!pair.hosts[0].tcp.readiness(client).unwrap().readable);
    let said = pair.call(1, |tcp, out| tcp.write(server, b"answer", WriteFlags::default(), out));
    assert_eq!(said, Ok(6));
    // The host checks that it is told.
    while !pair.hosts[0].tcp.readiness(client).unwrap().readable {
        assert!(pair.step());
    }
}

#[test]
fn tcp_52_waiting_reports_are_told_again() {
    let mut pair = pair(8192);
    let (client, _) = pair.open(80);
    let flags = Timestamping::TX_SCHED.with(Timestamping::TX_SOFTWARE).with(Timestamping::TX_ACK);
    pair.call(0, |tcp, out| tcp.set_timestamping(client, flags, out)).unwrap();
    let told = |tcp: &mut Tcp| {
        let mut ready = Vec::new();
        tcp.take_ready(&mut ready);
        ready.contains(&client)
    };
    told(&mut pair.hosts[0].tcp);
    assert_eq!(write(&mut pair, client, 100), 100);
    let tcp = &mut pair.hosts[0].tcp;
    assert!(tcp.readiness(client).unwrap().reported, "two times wait");
    let before = tcp.report_wakes(client).unwrap();
    assert!(tcp.take_report(client).unwrap().is_some());
    assert!(told(tcp), "another one waits");
    // A connection that is over leaves its reports, and their number, to the socket.
    let end = |tcp: &mut Tcp, out: &mut TcpOut<'_>| tcp.disconnect(client, out);
    pair.call(0, end).unwrap();
    let tcp = &mut pair.hosts[0].tcp;
    assert_eq!(tcp.report_wakes(client), Ok(before.wrapping_add(1)));
    assert!(tcp.readiness(client).unwrap().reported && tcp.memory_bytes() > 0);
    assert!(tcp.take_report(client).unwrap().is_some() && !tcp.readiness(client).unwrap().reported);
    assert_eq!((tcp.take_report(client), tcp.memory_bytes()), (Ok(None), 0));
}
