//! SYN floods, and the memory of connections.

use forebay_stack::tcp::{SynCookies, TcpConfig, TcpError, TcpOut};

use super::forged::{Forged, bytes_of, say};
use super::pair::{Faults, MTU, Pair};

/// A SYN from a made-up source.
fn syn(from: u32) -> Vec<u8> {
    let [a, b, c, d] = (0x0a00_0000 | from).to_be_bytes();
    let mut ip = vec![0x45, 0, 0, 44, 0, 0, 0x40, 0, 64, 6, 0, 0, a, b, c, d, 192, 0, 2, 2];
    let checksum = !sum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut tcp = vec![
        0x30, 0x39, 0, 80, 1, 2, 3, 4, 0, 0, 0, 0, 0x60, 2, 0xff, 0xff, 0, 0, 0, 0, 2, 4, 5, 0xb4,
    ];
    let mut pseudo = ip[12..20].to_vec();
    pseudo.extend([0, 6, 0, 24]);
    pseudo.extend(&tcp);
    let checksum = !sum(&pseudo);
    tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
    ip.extend(tcp);
    ip
}

fn sum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap()
}

/// The client's connection was in TIME-WAIT: its SYN has a place even in a full queue, as in the kernel.
#[test]
fn tcp_13_flood_leaves_returning_clients() {
    const PORT: u16 = 5000;
    let config =
        TcpConfig { max_syn_backlog: 1, syncookies: SynCookies::Off, ..TcpConfig::default() };
    let mut pair = Pair::new(1, Faults { delay_us: 5_000, ..Faults::default() }, [config; 2]);
    let (here, there) = (pair.address(0, PORT), pair.address(1, 80));
    let listener = pair.hosts[1].tcp.socket().unwrap();
    pair.hosts[1].tcp.bind(listener, there).unwrap();
    pair.hosts[1].tcp.listen(listener, 16).unwrap();
    let client = pair.hosts[0].tcp.socket().unwrap();
    let begun = pair.call(0, |tcp, out| tcp.connect(client, (here, there), MTU, out));
    assert_eq!(begun, Err(TcpError::InProgress));
    let accepted = (0..50).find_map(|_| {
        pair.step();
        pair.hosts[1].tcp.accept(listener).ok()
    });
    for (host, socket) in [(1, accepted.unwrap().0), (0, client)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
        let until_us = pair.now_us + 500_000;
        while pair.next_us().is_some_and(|next_us| next_us < until_us) {
            pair.step();
        }
    }
    let (now_us, mut answers) = (pair.now_us, Vec::new());
    let packet = pair.hosts[1].packet(&syn(1)).unwrap();
    pair.hosts[1].deliver(packet, now_us, &mut answers);
    let packet = pair.hosts[1].packet(&syn(2)).unwrap();
    pair.hosts[1].deliver(packet, now_us, &mut answers);
    assert_eq!(answers.len(), 1, "one request fills the queue");
    let later = pair.last[0].0.wrapping_add(100_000);
    let answer = say(&mut pair, PORT, &Forged::plain(0x02, 0), (later, 0));
    assert_eq!(answer.map(|(_, flags)| flags), Some(0x12));
}

#[test]
fn tcp_13_requests_fit_as_in_kernel() {
    for backlog in [0, 1, 2, 5] {
        let config = TcpConfig { syncookies: SynCookies::Off, ..TcpConfig::default() };
        let mut pair = Pair::new(1, Faults::default(), [config; 2]);
        let there = pair.address(1, 80);
        let tcp = &mut pair.hosts[1].tcp;
        let listener = tcp.socket().unwrap();
        tcp.bind(listener, there).unwrap();
        tcp.listen(listener, backlog).unwrap();
        for from in 1..20 {
            let packet = pair.hosts[1].packet(&syn(from)).unwrap();
            pair.hosts[1].deliver(packet, 0, &mut Vec::new());
        }
        // Linux 6.18 has as many in SYN-RECV.
        assert_eq!(pair.hosts[1].tcp.request_count(), backlog + 1);
    }
}

#[test]
fn tcp_13_flood_leaves_good_clients() {
    let config = TcpConfig { max_syn_backlog: 64, ..TcpConfig::default() };
    let mut pair = Pair::new(1, Faults { delay_us: 5_000, ..Faults::default() }, [config; 2]);
    let there = pair.address(1, 80);
    let listener = pair.hosts[1].tcp.socket().unwrap();
    pair.hosts[1].tcp.bind(listener, there).unwrap();
    pair.hosts[1].tcp.listen(listener, 1024).unwrap();
    let mut from = 0;
    for client in 0..100 {
        for _ in 0..100 {
            from += 1;
            let now_us = pair.now_us;
            let host = &mut pair.hosts[1];
            let packet = host.packet(&syn(from)).unwrap();
            host.deliver(packet, now_us, &mut Vec::new());
        }
        let socket = pair.hosts[0].tcp.socket().unwrap();
        let here = pair.address(0, 0);
        let begun = pair.call(0, |tcp, out| tcp.connect(socket, (here, there), MTU, out));
        assert_eq!(begun, Err(TcpError::InProgress));
        let accepted = (0..50).find_map(|_| {
            pair.step();
            pair.hosts[1].tcp.accept(listener).ok()
        });
        let (server, _) = accepted.unwrap_or_else(|| panic!("client {client} is not served"));
        pair.call(1, |tcp, out| tcp.write(server, b"hello", Default::default(), out)).unwrap();
        let mut room = [0; 10];
        let read = (0..50).find_map(|_| {
            pair.step();
            pair.call(0, |tcp, out| tcp.read(socket, &mut room, out)).ok()
        });
        assert_eq!(read, Some(5), "client {client}");
        for (host, socket) in [(0, socket), (1, server)] {
            pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
        }
        let tcp = &pair.hosts[1].tcp;
        assert!(tcp.request_count() <= 64, "{} requests", tcp.request_count());
    }
    let counters = pair.hosts[1].tcp.counters();
    assert!(counters.syncookies_sent.get() > 9_000, "{counters:?}");
    assert!(counters.syncookies_recv.get() >= 90, "{counters:?}");
    pair.call(1, |tcp, out| tcp.close(listener, out)).unwrap();
    pair.check_rest();
}

/// A client beside a flood of more SYNs than are answered, served once it has sent its SYN again.
#[test]
fn tcp_13_repeated_syn_passes_flood() {
    const LIMIT: u32 = 500;
    const CLIENTS: u32 = 20;
    let config = TcpConfig { max_syn_backlog: 64, cookies_per_s: LIMIT, ..TcpConfig::default() };
    let mut pair = Pair::new(1, Faults { delay_us: 5_000, ..Faults::default() }, [config; 2]);
    let there = pair.address(1, 80);
    let listener = pair.hosts[1].tcp.socket().unwrap();
    pair.hosts[1].tcp.bind(listener, there).unwrap();
    pair.hosts[1].tcp.listen(listener, 1024).unwrap();
    let mut from = 0;
    for client in 0..CLIENTS {
        let socket = pair.hosts[0].tcp.socket().unwrap();
        let here = pair.address(0, 0);
        let began_us = pair.now_us;
        let begun = pair.call(0, |tcp, out| tcp.connect(socket, (here, there), MTU, out));
        assert_eq!(begun, Err(TcpError::InProgress));
        let served = (0..10_000).any(|_| {
            for _ in 0..LIMIT {
                from += 1;
                let now_us = pair.now_us;
                let host = &mut pair.hosts[1];
                let packet = host.packet(&syn(from)).unwrap();
                host.deliver(packet, now_us, &mut Vec::new());
            }
            pair.step();
            pair.hosts[1].tcp.accept(listener).is_ok()
        });
        assert!(served && pair.now_us - began_us < 1_100_000, "client {client}");
    }
    let seconds = pair.now_us / 1_000_000 + 1;
    let counters = pair.hosts[1].tcp.counters();
    // The flood's, and what the filter took for clients that came again.
    let answered = counters.syncookies_sent.get();
    assert!(answered < u64::from(LIMIT) * seconds + u64::from(from) / 20, "{answered} of {from}");
    assert!(counters.req_q_full_drop.get() > u64::from(from) / 2, "{counters:?}");
}

/// A cookie is as good after a second SYN of its flow, which found room for a request.
#[test]
fn tcp_13_cookie_outlives_later_request() {
    const SYN: u8 = 2;
    const RST: u8 = 4;
    const ACK: u8 = 16;
    let config = TcpConfig { max_syn_backlog: 1, ..TcpConfig::default() };
    let mut pair = Pair::new(1, Faults::default(), [config; 2]);
    let there = pair.address(1, 80);
    let listener = pair.hosts[1].tcp.socket().unwrap();
    pair.hosts[1].tcp.bind(listener, there).unwrap();
    pair.hosts[1].tcp.listen(listener, 16).unwrap();
    // Returns the sequence number of the answer.
    let say = |pair: &mut Pair, port: u16, flags, base| {
        let forged =
            Forged { seq: 0, ack: 0, flags, window: 100, urgent: 0, options: vec![], len: 0 };
        let ends = (pair.address(0, port), there);
        let bytes = bytes_of(&forged, pair, ends, base).unwrap();
        let (now_us, mut sent) = (pair.now_us, Vec::new());
        let packet = pair.hosts[1].packet(&bytes).unwrap();
        pair.hosts[1].deliver(packet, now_us, &mut sent);
        let sequence = |answer: &Vec<u8>| u32::from_be_bytes(answer[24..28].try_into().unwrap());
        sent.first().map(sequence)
    };
    say(&mut pair, 1000, SYN, (100, 0));
    let cookie = say(&mut pair, 2000, SYN, (500, 0)).unwrap();
    assert_eq!(pair.hosts[1].tcp.request_count(), 1, "the second is answered by a cookie");
    say(&mut pair, 1000, RST, (101, 0));
    let sequence = say(&mut pair, 2000, SYN, (500, 0)).unwrap();
    assert_eq!(pair.hosts[1].tcp.request_count(), 1);
    assert_ne!(sequence, cookie);
    assert_eq!(say(&mut pair, 2000, ACK, (501, cookie.wrapping_add(1))), None);
    assert!(pair.hosts[1].tcp.accept(listener).is_ok());
    assert_eq!(pair.hosts[1].tcp.request_count(), 0);
}

#[test]
fn tcp_12_idle_connection_keeps_no_buffer() {
    let mut pair = Pair::new(1, Faults::default(), [TcpConfig::default(); 2]);
    let (client, server) = pair.open(80);
    let send = |tcp: &mut forebay_stack::tcp::Tcp, out: &mut TcpOut<'_>| {
        tcp.write(client, &[1; 20_000], Default::default(), out)
    };
    assert_eq!(pair.call(0, send), Ok(20_000));
    for _ in 0..100 {
        pair.step();
        let _ = pair.call(1, |tcp, out| tcp.read(server, &mut [0; 30_000], out));
    }
    for host in &pair.hosts {
        assert_eq!(host.tcp.memory_bytes(), 0, "an idle connection keeps no buffer");
    }
    for (host, socket) in [(0, client), (1, server)] {
        pair.call(host, |tcp, out| tcp.close(socket, out)).unwrap();
    }
    pair.check_rest();
}
