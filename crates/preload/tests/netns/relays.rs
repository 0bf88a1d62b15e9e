//! Connections that other processes use than the one that has accepted them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::thread;

use super::forks::CONFIG;
use super::{Hosts, NEAR};

/// Bytes of each direction, and connections at the same time.
const BYTES: usize = 3_000_000;
const CLIENTS: usize = 20;

/// Listens. `each` serves a connection in a child, in its parent `after` that.
const BEGIN: &str = "
import array, errno, os, select, signal, socket, struct, subprocess, sys, time
signal.alarm(120)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server(('10.9.0.1', 7), backlog=100)

def fork_for(count, each, closes_first=True):
    for _ in range(count):
        connection, peer = listener.accept()
        begin = os.pipe()
        if os.fork() == 0:
            os.close(begin[1])
            os.read(begin[0], 1)
            listener.close()
            each(connection)
            os._exit(0)
        if closes_first:
            connection.close()
        os.close(begin[1])
        os.close(begin[0])
        if not closes_first:
            connection.close()

def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
";

fn connected() -> TcpStream {
    loop {
        match TcpStream::connect(NEAR) {
            Ok(stream) => return stream,
            Err(_) => thread::yield_now(),
        }
    }
}

/// Bytes that differ with their place, and for each client.
fn bytes_of(client: usize) -> Vec<u8> {
    let mut state = client as u64 + 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    std::iter::repeat_with(next).take(BYTES).collect()
}

/// Sends bytes and their end, and returns what comes until the other end.
fn echoed(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let stream = connected();
    thread::scope(|scope| {
        scope.spawn(|| {
            // Ignored: the reader finds what is missing.
            let _ = (&stream).write_all(bytes);
            let _ = stream.shutdown(Shutdown::Write);
        });
        let mut back = Vec::new();
        (&stream).read_to_end(&mut back)?;
        Ok(back)
    })
}

/// Has many clients send bytes at the same time to a program that returns them.
fn all_are_echoed(program: &str) {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + program;
    thread::scope(|scope| {
        let served = scope.spawn(|| {
            hosts.lines_and_errors(Command::new("python3").args(["-c", &program]), Some(CONFIG))
        });
        let client = |client| {
            let hosts = &hosts;
            scope.spawn(move || {
                let bytes = bytes_of(client);
                hosts.far.run(|| echoed(&bytes).unwrap() == bytes)
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        for (number, client) in clients.into_iter().enumerate() {
            assert!(client.join().unwrap(), "client {number}");
        }
        assert_eq!(served.join().unwrap(), (vec![], String::new()));
    });
}

pub(crate) fn children_echo() {
    all_are_echoed("fork_for(20, echo)");
}
