//! Reads and pollers get all news, and the end.

use std::io::{ErrorKind, Write};
use std::net::TcpStream as KernelStream;
use std::thread;
use std::time::Duration;

use forebay::net::{NetConfig, TcpListener, TcpStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};

use crate::sockets::rig::{OURS, Running, over_tap};
use crate::tcp::Trial;
use crate::tcp::streams::LONG;

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_17_urgent_byte_takes_no_other_along", urgent),
    ("tcp_17_calls_after_the_end_return", after_the_end),
];

/// Reading in place passes an urgent byte, and nothing else.
fn urgent() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let mut kernels = KernelStream::connect(listener.local_addr()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_read_timeout(Some(LONG)).unwrap();
    kernels.write_all(b"before").unwrap();
    assert_eq!(send(&kernels, b"!", SendFlags::OOB).unwrap(), 1);
    kernels.write_all(b"behind").unwrap();
    drop(kernels);
    // All is there before the first read: then the urgent byte is next when `before` is read.
    thread::sleep(Duration::from_millis(50));
    let mut came = Vec::new();
    let mut take = |bytes: &[u8]| {
        came.extend_from_slice(bytes);
        bytes.len()
    };
    while ours.read_in_place(&mut take).unwrap() > 0 {}
    assert_eq!(String::from_utf8_lossy(&came), "beforebehind");
    drop((ours, listener));
    running.end();
}

fn after_the_end() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    running.end();
    let is_over = |listener: &TcpListener| {
        let mut polled = [PollFd::from_borrowed_fd(listener.descriptor().unwrap(), PollFlags::IN)];
        assert_eq!(poll(&mut polled, Some(&Timespec::default())).unwrap(), 1);
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::BrokenPipe);
    };
    // A call does not keep the end from other pollers.
    (0..3).for_each(|_| is_over(&listener));
    is_over(&TcpListener::bind(&net, format!("{OURS}:8")).unwrap());
    let to = "10.9.0.1:9".parse().unwrap();
    assert_eq!(TcpStream::begin_connect(&net, to).unwrap_err().kind(), ErrorKind::BrokenPipe);
}
