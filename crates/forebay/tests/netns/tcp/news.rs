//! Reads and pollers get all news, and the end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream as KernelStream};
use std::thread;
use std::time::Duration;

use forebay::net::{NetConfig, TcpListener, TcpStream};
use forebay_stack::tcp::TcpConfig;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, send};

use crate::sockets::rig::{OURS, OURS_V6, Running, over_tap};
use crate::tcp::Trial;
use crate::tcp::streams::{LONG, fill, is_window_closed};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_17_urgent_byte_takes_no_other_along", urgent),
    ("tcp_17_calls_after_the_end_return", after_the_end),
    ("tcp_17_waiting_read_sleeps", asleep),
    ("tcp_16_listener_on_all_has_each_address", all_addresses),
    ("tcp_17_writes_wait_for_memory", memory),
    ("tcp_18_bulk_waits_for_frames", bulk),
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

/// A read that waits sleeps until its bytes come.
fn asleep() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let mut kernels = KernelStream::connect(listener.local_addr()).unwrap();
    let (mut ours, _) = listener.accept().unwrap();
    let reader = thread::spawn(move || {
        ours.read_exact(&mut [0]).unwrap();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sleeps.unwrap().trim().parse::<u32>().unwrap()
    });
    thread::sleep(Duration::from_millis(300));
    kernels.write_all(&[7]).unwrap();
    let sleeps = reader.join().unwrap();
    assert!(sleeps < 100, "{sleeps} sleeps in 300 ms");
    drop(listener);
    running.end();
}

/// Writes wait for memory that another connection uses, however they wait.
fn memory() {
    let tcp = TcpConfig { memory_bytes: 1 << 20, wmem: (8 << 20, 8 << 20), ..NetConfig::TCP };
    let (net, engine) = over_tap(&NetConfig { tcp, ..NetConfig::default() });
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let pair = || {
        let kernels = KernelStream::connect(listener.local_addr()).unwrap();
        (listener.accept().unwrap().0, kernels)
    };
    let ((mut full, mut slow), (mut other, _quick), (mut third, _quick_too)) =
        (pair(), pair(), pair());
    // The peers read nothing: more than the least that each connection may have to send stays here.
    other.set_nonblocking(true);
    assert_eq!(other.write(&[7; 400_000]).unwrap(), 400_000);
    while !is_window_closed(&other) {
        thread::yield_now();
    }
    fill(&mut full);
    assert_eq!(other.write(b"more").unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(!is_writable(&other, Duration::ZERO));
    thread::scope(|scope| {
        scope.spawn(|| third.write_all(&[7; 100_000]).unwrap());
        full.shutdown(Shutdown::Write).unwrap();
        std::io::copy(&mut slow, &mut std::io::sink()).unwrap();
        // The third connection may take what is free.
        let len = loop {
            assert!(is_writable(&other, LONG));
            match other.write(b"more") {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => break written.unwrap(),
            }
        };
        assert_eq!(len, 4);
    });
    drop((full, other, third, listener));
    running.end();
}

fn is_writable(stream: &TcpStream, within: Duration) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(stream.descriptor().unwrap(), PollFlags::OUT)];
    poll(&mut polled, Some(&Timespec::try_from(within).unwrap())).unwrap() == 1
}

/// A window of more segments than there are frames leaves by and by, without a loss.
fn bulk() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let running = Running::begin(engine);
    let mut kernels = KernelStream::connect(listener.local_addr()).unwrap();
    let (mut ours, _) = listener.accept().unwrap();
    let reader = thread::spawn(move || std::io::copy(&mut kernels, &mut std::io::sink()).unwrap());
    let block = vec![7; 4 << 20];
    (0..100).for_each(|_| ours.write_all(&block).unwrap());
    drop((ours, listener));
    assert_eq!(reader.join().unwrap(), 100 * (4 << 20));
    let netstat = net.netstat();
    let mut lines = netstat.lines().filter(|line| line.starts_with("TcpExt: "));
    let at = lines.next().unwrap().split(' ').position(|name| name == "TCPFastRetrans").unwrap();
    assert_eq!(lines.next().unwrap().split(' ').nth(at), Some("0"), "{netstat}");
    let mut outcome = running.end();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// As in the kernel: who listens on all addresses has each of them.
fn all_addresses() {
    let (net, _engine) = over_tap(&NetConfig::default());
    let is_free = |address: &str| TcpListener::bind(&net, address).is_ok();
    let (all_v4, one) = ("0.0.0.0:7", format!("{OURS}:7"));
    let listener = TcpListener::bind(&net, all_v4).unwrap();
    assert!(!is_free(&one) && !is_free("[::]:7") && is_free(&format!("[{OURS_V6}]:7")));
    drop(listener);
    let listener = TcpListener::bind(&net, &one).unwrap();
    assert!(!is_free(all_v4) && !is_free("[::]:7") && is_free("0.0.0.0:8"));
    drop(listener);
    assert!(is_free(all_v4) && is_free("[::]:7"));
}
