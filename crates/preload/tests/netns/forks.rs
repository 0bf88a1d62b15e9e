//! A process that listens and forks: the one that uses the listener first serves it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;

use super::{Hosts, NEAR};

const CONFIG: &str = "via=af_packet take=tcp:7 spin=auto dev=exa";

/// Listens, and forks: the child becomes a daemon that closes all descriptors but the listener's and standard
/// output, and serves a connection.
const CHILD: &str = "
import os, socket
listener = socket.create_server(('10.9.0.1', 7))
if os.fork() == 0:
    own = listener.fileno()
    os.close(0)
    os.closerange(3, own)
    os.closerange(own + 1, 100000)
    connection, peer = listener.accept()
    print(connection.recv(100).decode(), flush=True)
    connection.sendall(b'answer')
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
";

/// Connects from the far host, and asks.
fn ask(hosts: &Hosts) -> thread::JoinHandle<String> {
    let stream = hosts.far.run(|| {
        // Until the program listens.
        loop {
            if let Ok(stream) = TcpStream::connect(NEAR) {
                return stream;
            }
            thread::yield_now();
        }
    });
    thread::spawn(move || {
        let mut stream = stream;
        stream.write_all(b"question").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    })
}

pub(crate) fn child_serves() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let asked = scope.spawn(|| ask(&hosts).join().unwrap());
        let lines = hosts.lines(Command::new("python3").args(["-c", CHILD]), Some(CONFIG));
        assert_eq!(lines, ["question", "0"], "the question, and the end of the child");
        assert_eq!(asked.join().unwrap(), "answer");
    });
}

/// Listens, forks, and lets the parent serve first: the child learns why it cannot.
const BOTH: &str = "
import os, socket
listener = socket.create_server(('10.9.0.1', 7))
listener.setblocking(False)
begin, done = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(begin[0], 1)
    try:
        listener.accept()
    except OSError as error:
        print(error.errno, flush=True)
    os.write(done[1], b'x')
    os._exit(0)
try:
    listener.accept()
except OSError as error:
    print(error.errno, flush=True)
os.write(begin[1], b'x')
os.read(done[0], 1)
os.wait()
";

pub(crate) fn second_is_told() {
    let hosts = Hosts::new();
    let (lines, errors) =
        hosts.lines_and_errors(Command::new("python3").args(["-c", BOTH]), Some(CONFIG));
    let nothing = libc::EAGAIN.to_string();
    assert_eq!(lines, [nothing.clone(), nothing], "nothing to accept for either");
    assert!(errors.contains("another process receives the connections"), "{errors}");
}
