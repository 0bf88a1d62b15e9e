//! Readers and masks that move: connections follow, and nothing is reordered.

use std::io::{Read, Write};
use std::net::TcpStream as KernelStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use forebay::net::{Net, NetConfig, TcpListener};
use forebay_engine::Config;
use forebay_rx::steer::SpreadPolicy;
use forebay_sys as sys;

use crate::sockets::moving::flip_masks;
use crate::sockets::rig::{OURS, Running, over_tap, over_tap_by};
use crate::tcp::Trial;
use crate::tcp::streams::{LONG, echo, exchange};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_20_connections_follow_moving_reader", follow),
    ("tcp_20_mask_flips_reorder_no_segment", flips),
];

/// Packets that each CPU has delivered.
fn delivered(net: &Net) -> Vec<u64> {
    net.counters().iter().map(|counters| counters.ip.in_delivers.get()).collect()
}

/// Value of a counter of `netstat`.
pub(crate) fn counter(net: &Net, name: &str) -> u64 {
    let text = net.netstat();
    let (names, values) = text.split_once('\n').unwrap();
    let found = names.split(' ').zip(values.trim().split(' ')).find(|(of, _)| *of == name);
    found.unwrap().1.parse().unwrap()
}

fn follow() {
    let cpus = sys::allowed_cpus();
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let to = listener.local_addr();
    let sender = thread::spawn(move || {
        let mut stream = KernelStream::connect(to).unwrap();
        // Until the reader closes.
        while stream.write_all(&[7; 100_000]).is_ok() {}
    });
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut buffer = vec![0; 20_000];
    for round in 0..6 {
        let cpu = cpus[round % 2];
        sys::pin_to(cpu).unwrap();
        let mut read = |mut len: usize| {
            while len > 0 {
                len = len.saturating_sub(stream.read(&mut buffer).unwrap());
            }
        };
        // What was sent before the move, and the move itself.
        read(20_000_000);
        let before = delivered(&net);
        read(20_000_000);
        let came: Vec<u64> =
            delivered(&net).iter().zip(&before).map(|(now, then)| now - then).collect();
        let here = came[net.cpus().iter().position(|&of| of == cpu).unwrap()];
        let all: u64 = came.iter().sum();
        assert!(here * 100 >= all * 95, "{here} of {all} on {cpu:?}");
    }
    drop((stream, listener));
    sender.join().unwrap();
    assert_eq!(counter(&net, "TCPOFOQueue"), 0, "{}", net.netstat());
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}

fn flips() {
    let cpus = sys::allowed_cpus();
    let config = Config { spread: SpreadPolicy::Always, ..Config::live() };
    let (net, engine) = over_tap_by(&config, &NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let (control, to) = (engine.control(), listener.local_addr());
    control.set("rps_sock_flow_entries", "0").unwrap();
    let running = Running::begin(engine);
    let is_over = Arc::new(AtomicBool::new(false));
    let flips = flip_masks(control, cpus, Arc::clone(&is_over));
    let server = thread::spawn(move || {
        let streams: Vec<_> = (0..4).map(|_| listener.accept().unwrap().0).collect();
        thread::scope(|scope| streams.iter().for_each(|stream| drop(scope.spawn(|| echo(stream)))));
    });
    let client = || exchange(&KernelStream::connect(to).unwrap(), 10_000_000);
    thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(client))));
    is_over.store(true, Ordering::Relaxed);
    flips.join().unwrap();
    server.join().unwrap();
    assert!(delivered(&net).iter().filter(|&&count| count > 0).count() > 1);
    assert_eq!(counter(&net, "TCPOFOQueue"), 0, "{}", net.netstat());
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}
