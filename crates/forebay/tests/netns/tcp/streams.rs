//! Streams between our sockets and the kernel's.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener as KernelListener, TcpStream as KernelStream};
use std::thread;
use std::time::Duration;

use forebay::net::{NetConfig, TcpListener, TcpStream};

use crate::sockets::rig::{OURS, OURS_V6, Running, over_tap};
use crate::tcp::Trial;

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_15_kernel_connects_and_echoes", accepted),
    ("tcp_15_connects_to_the_kernel", connected),
    ("tcp_15_refused_connection_says_so", refused),
];

pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Bytes whose places can be told.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at / 7 + at / 1000) % 251).unwrap()).collect()
}

/// Sends bytes from the kernel's stream, and checks that they come back.
pub(crate) fn exchange(stream: &KernelStream, len: usize) {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let sent = bytes(len);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = stream;
            stream.write_all(&sent).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut came = Vec::new();
        let mut stream = stream;
        stream.read_to_end(&mut came).unwrap();
        assert_eq!(came.len(), sent.len());
        assert!(came == sent, "bytes differ");
    });
}

/// Writes, without blocking, until the peer's window is closed and no more fits into the send buffer, and tells
/// how many bytes. Nothing changes then until the peer reads.
pub(crate) fn fill(stream: &mut TcpStream) -> usize {
    stream.set_nonblocking(true);
    let mut written = 0;
    loop {
        let is_closed = is_window_closed(stream);
        let full = loop {
            match stream.write(&[7; 10_000]) {
                Ok(len) => written += len,
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        if is_closed {
            return written;
        }
        thread::yield_now();
    }
}

/// True if nothing leaves until the peer reads.
pub(crate) fn is_window_closed(stream: &TcpStream) -> bool {
    let info = stream.info().unwrap();
    info.send_window_bytes == 0 && info.unacked_bytes == 0
}

/// Echoes a stream to its end.
pub(crate) fn echo(mut stream: &TcpStream) {
    let mut buffer = vec![0; 20_000];
    loop {
        match stream.read(&mut buffer).unwrap() {
            0 => return stream.shutdown(Shutdown::Write).unwrap(),
            len => stream.write_all(&buffer[..len]).unwrap(),
        }
    }
}

fn accepted() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, "[::]:7").unwrap();
    let running = Running::begin(engine);
    let server = thread::spawn(move || {
        for _ in 0..4 {
            let (stream, peer) = listener.accept().unwrap();
            assert_eq!(stream.peer_addr(), peer);
            echo(&stream);
        }
    });
    for address in [format!("{OURS}:7"), format!("[{OURS_V6}]:7")] {
        for len in [10, 3_000_000] {
            let stream = KernelStream::connect(&address).unwrap();
            exchange(&stream, len);
        }
    }
    server.join().unwrap();
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}

fn connected() {
    let (net, engine) = over_tap(&NetConfig::default());
    let running = Running::begin(engine);
    for (address, len) in [("10.9.0.1:0", 100_000), ("[fd09::1]:0", 2_000_000)] {
        let kernel = KernelListener::bind(address).unwrap();
        let to = kernel.local_addr().unwrap();
        let server = thread::spawn(move || exchange(&kernel.accept().unwrap().0, len));
        let stream = TcpStream::connect(&net, to).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(stream.peer_addr(), to);
        echo(&stream);
        server.join().unwrap();
    }
    drop(net);
    assert_eq!(running.end().frames_away, 0);
}

fn refused() {
    let (net, engine) = over_tap(&NetConfig::default());
    let running = Running::begin(engine);
    let error = TcpStream::connect(&net, "10.9.0.1:9").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
    let error = KernelStream::connect(format!("{OURS}:9")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
    running.end();
}
