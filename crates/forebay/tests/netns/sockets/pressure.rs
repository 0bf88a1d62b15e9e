//! Readers that are slow, or do not read at all.

use std::time::Duration;

use forebay::net::counters::SocketCounts;
use forebay::net::{Datagrams, NetConfig, UdpSocket};
use forebay_stack::network::{NetworkCounters, NetworkDrop};
use forebay_stack::socket::reclaim::ReclaimPolicy;

use crate::sockets::Trial;
use crate::sockets::rig::{OURS, Running, client, over_tap};

pub(crate) const TRIALS: &[Trial] = &[
    ("promise_4_unread_socket_holds_only_rcvbuf", not_read),
    ("udp_1_policies_change_under_load", policies),
    ("udp_5_works_without_copy_cache", memory_low),
    ("udp_5_a_missing_udp_mem_is_named", without_udp_mem),
    ("promise_2_socket_closed_under_load_leaves_nothing", closed),
];

fn not_read() {
    const RCVBUF: u32 = 64 << 10;
    let (net, engine) = over_tap(&NetConfig::default());
    let lazy = net.socket().recv_buffer_size(RCVBUF).bind(format!("{OURS}:8")).unwrap();
    let good = net.bind(format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let (to_lazy, to_good) = (client(lazy.local_addr()), client(good.local_addr()));
    let mut sent = 0;
    for number in 0..20_000u32 {
        to_lazy.send(&number.to_be_bytes()).unwrap();
        sent += 1;
        if number % 10 == 0 {
            sent += come_through(&good, &to_good, number);
        }
        assert!(lazy.counts().rmem <= RCVBUF);
    }
    let goods = good.counts();
    assert_eq!(goods.rcvbuf_errors, 0, "whatever the other one does");
    assert!(goods.queued >= 2000);
    let mut outcome = running.end();
    let before: u64 =
        outcome.queues.iter().map(|queue| queue.dropped() + queue.kernel_dropped.get()).sum();
    let counts = lazy.counts();
    let after = |counts: &SocketCounts| counts.queued + counts.rcvbuf_errors;
    assert_eq!(before + after(&counts) + after(&good.counts()), sent);
    assert_eq!(counts.queued, u64::from(RCVBUF / 2048));
    let dropped = |counters: &NetworkCounters| counters.drops.get(NetworkDrop::SocketRcvbuff);
    let in_all: u64 = net.counters().iter().map(|counters| dropped(counters)).sum();
    assert_eq!(in_all, counts.rcvbuf_errors);
    // The frames of queued datagrams stay in use until the socket is closed.
    drop(good);
    assert_eq!(net.frames_away(&mut outcome) as u64, counts.queued);
    drop(lazy);
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// Sends a datagram until it is read, as a device may drop it while a CPU is busy. Returns the
/// number sent.
fn come_through(good: &UdpSocket, kernels: &std::net::UdpSocket, number: u32) -> u64 {
    good.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut buffer = [0; 4];
    let mut sent = 0;
    loop {
        kernels.send(&number.to_be_bytes()).unwrap();
        sent += 1;
        // A datagram that was sent twice may arrive late.
        while good.recv(&mut buffer).is_ok() {
            if buffer == number.to_be_bytes() {
                return sent;
            }
        }
    }
}

fn policies() {
    let config = NetConfig {
        rmem_default: 64 << 10,
        copy_cache_bytes: Some(8 << 20),
        ..NetConfig::default()
    };
    let (net, engine) = over_tap(&config);
    let socket = net.bind(format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let kernels = client(socket.local_addr());
    let mut batch = Datagrams::new();
    let (mut sent, mut last) = (0u64, None);
    for round in 0..200 {
        net.set_policy(ReclaimPolicy::ALL[round % 4]).unwrap();
        for _ in 0..100 {
            kernels.send(&sent.to_be_bytes()).unwrap();
            sent += 1;
        }
        // Mostly more than half of the limit is queued. All datagrams may have been dropped before.
        let mut some = socket.recv_batch(&mut batch, 7).unwrap_or(0);
        while some > 0 {
            for datagram in &batch {
                let number = u64::from_be_bytes(datagram.payload().try_into().unwrap());
                assert!(last.is_none_or(|last| last < number), "in order, and as it was sent");
                last = Some(number);
            }
            some = socket.try_recv_batch(&mut batch, 7);
        }
    }
    drop(batch);
    let mut outcome = running.end();
    assert!(last.is_some());
    drop(socket);
    assert_eq!(net.frames_away(&mut outcome), 0);
}

fn memory_low() {
    let few = NetConfig { copy_cache_bytes: Some(100_000), ..NetConfig::default() };
    let (net, engine) = over_tap(&few);
    let refused = net.set_policy(ReclaimPolicy::CopyCache).unwrap_err().to_string();
    assert!(refused.contains("copy-cache") && refused.contains("256"), "{refused}");
    net.set_policy(ReclaimPolicy::Condense).unwrap();
    drop(engine);
}

/// Only the initial network namespace has the file; this namespace lacks it.
fn without_udp_mem() {
    assert!(!std::path::Path::new("/proc/sys/net/ipv4/udp_mem").exists());
    let (net, engine) = over_tap(&NetConfig::default());
    let refused = net.set_policy(ReclaimPolicy::CopyCache).unwrap_err().to_string();
    assert!(refused.contains("net.ipv4.udp_mem") && !refused.contains("0 bytes"), "{refused}");
    drop(engine);
}

fn closed() {
    let (net, engine) = over_tap(&NetConfig::default());
    let running = Running::begin(engine);
    let kernels = std::net::UdpSocket::bind("10.9.0.1:0").unwrap();
    for round in 0..50u32 {
        let socket = net.bind(format!("{OURS}:7")).unwrap();
        let mut buffer = [0; 100];
        for _ in 0..20 {
            kernels.send_to(&round.to_be_bytes(), socket.local_addr()).unwrap();
        }
        // Datagrams to the previous sockets may have reached no socket, but never this one.
        assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
    }
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}
