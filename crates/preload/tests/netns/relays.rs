//! Connections that other processes use than the one that has accepted them.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use super::forks::CONFIG;
use super::{Hosts, NEAR, preloaded};

/// Words of four bytes in each direction, and connections at the same time.
const WORDS: u32 = 750_000;
const CLIENTS: u32 = 20;

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
fn bytes_of(client: u32) -> Vec<u8> {
    let word = |place: u32| (place ^ client << 24).wrapping_mul(2_654_435_761).to_le_bytes();
    (0..WORDS).flat_map(word).collect()
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

/// Sends bytes by many clients at the same time to a program that returns them.
fn all_are_echoed(program: &str, config: &str) {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + program;
    thread::scope(|scope| {
        let served = scope.spawn(|| {
            hosts.lines_and_errors(Command::new("python3").args(["-c", &program]), Some(config))
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

pub(crate) fn children_echo(via: &str) {
    let config = format!("via={via} take=tcp:7 spin=auto dev=exa");
    all_are_echoed("fork_for(20, echo)", &config);
}

/// Tells the peer, by a child, if mappings that a fork wipes have pages: in the parent, and in the child.
const WIPED: &str = "
def has_wiped_pages():
    kib = 0
    for line in open('/proc/self/smaps'):
        first, *others = line.split()
        if first == 'Rss:':
            used = int(others[0])
        elif first == 'VmFlags:' and 'wf' in others:
            kib += used
    return kib > 0
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
connection, peer = listener.accept()
parents = has_wiped_pages()
if os.fork() == 0:
    connection.sendall(b'%d, %d' % (parents, has_wiped_pages()))
    os._exit(0)
connection.close()
os.wait()
";

pub(crate) fn children_lack_memory(via: &str) {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + WIPED;
    let config = format!("via={via} take=tcp:7 spin=auto dev=exa");
    thread::scope(|scope| {
        scope.spawn(|| hosts.lines(Command::new("python3").args(["-c", &program]), Some(&config)));
        let mut told = String::new();
        hosts.far.run(|| connected().read_to_string(&mut told)).unwrap();
        assert_eq!(told, "1, 0", "has the parent any, and has the child");
    });
}

/// Runs another program in children on the connection: as standard input and output, set by the child, by the C library's
/// `posix_spawn`, and by a child in its parent's memory; or at the number that the parent has.
const PROGRAMS: &str = "
def cat(connection):
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    os.execvp('cat', ['cat'])
def cat_there(connection):
    connection.set_inheritable(True)
    os.execvp('sh', there(connection))
there = lambda connection: ['sh', '-c', 'cat <&%d >&%d' % ((connection.fileno(),) * 2)]
fork_for(5, cat)
fork_for(5, cat_there)
for index in range(10):
    connection, peer = listener.accept()
    ends = [(os.POSIX_SPAWN_DUP2, connection.fileno(), end) for end in (0, 1)]
    if index % 4 == 1:
        os.posix_spawn('/bin/cat', ['cat'], os.environ, file_actions=ends)
    elif index % 4:
        subprocess.Popen(['cat'], stdin=connection, stdout=connection)
    else:
        subprocess.Popen(there(connection), pass_fds=[connection.fileno()])
    connection.close()
";

pub(crate) fn programs_echo() {
    all_are_echoed(PROGRAMS, CONFIG);
}

/// Passes connections to a process that was there before, which reads and writes them.
const PASSES: &str = "
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    listener.close()
    for _ in range(20):
        _, passed, _, _ = socket.recv_fds(theirs, 1, 1)
        if os.fork() == 0:
            echo(socket.socket(fileno=passed[0]))
            os._exit(0)
        os.close(passed[0])
    os._exit(0)
theirs.close()
for _ in range(20):
    connection, peer = listener.accept()
    socket.send_fds(ours, [b'x'], [connection.fileno()])
    connection.close()
ours.recv(1)
";

pub(crate) fn passed_echo() {
    all_are_echoed(PASSES, CONFIG);
}

/// Forks a child for each of two connections, which say what they read, and ends.
const ENDS: &str = "
def tells(connection):
    if sys.argv[1] == 'exit':
        time.sleep(0.5)
        connection.sendall(b'late')
        return
    connection.sendall(b'go')
    try:
        data = connection.recv(100)
    except ConnectionResetError: # 'go' was sent, and not taken from the pair
        data = b''
    os.write(said[1], b'end' if data == b'' else data)
said = os.pipe()
fork_for(2, tells)
if sys.argv[1] == 'exit':
    sys.exit()
if os.fork() == 0:
    os.close(said[1])
    words = b''
    while word := os.read(said[0], 100):
        words += word
    print(words, flush=True)
    os._exit(0)
os.read(said[0], 1)
";

/// First two bytes that a client reads from a connection, after which it tells so, and the connection.
fn read_first(hosts: &Hosts, reads: &mpsc::Sender<()>) -> (TcpStream, Vec<u8>) {
    hosts.far.run(|| {
        let (mut stream, mut bytes) = (connected(), vec![0; 2]);
        stream.read_exact(&mut bytes).unwrap();
        reads.send(()).unwrap();
        (stream, bytes)
    })
}

/// Bytes that a client reads from a connection until its end.
fn read_all(hosts: &Hosts, reads: &mpsc::Sender<()>) -> Vec<u8> {
    let (mut stream, mut all) = read_first(hosts, reads);
    stream.read_to_end(&mut all).unwrap();
    all
}

/// A child's connection outlives the exit of its parent, which waits for it.
pub(crate) fn owner_exits() {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + ENDS;
    let run = |config| {
        thread::scope(|scope| {
            let (reads, _begun) = mpsc::channel();
            let clients = [(); 2].map(|()| {
                let (hosts, reads) = (&hosts, reads.clone());
                scope.spawn(move || read_all(hosts, &reads))
            });
            let mut server = Command::new("python3");
            let lines = hosts.lines_and_errors(server.args(["-c", &program, "exit"]), config);
            (lines, clients.map(|client| client.join().unwrap()))
        })
    };
    let ours = run(Some(CONFIG));
    assert_eq!(ours.1, [b"late", b"late"]);
    assert_eq!(ours, run(None));
}

/// Writes to a stream of the C library, duplicates its descriptor, and ends without a call more.
const STREAM: &str = "
import ctypes, fcntl
connection, peer = listener.accept()
number = connection.detach()
c = ctypes.CDLL(None)
c.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(c.fdopen(number, b'r+'))
c.fputs(b'late', stream)
fcntl.fcntl(number, fcntl.F_DUPFD, 300)
";

/// Streams are written at the exit, and the connection ends despite duplicates.
pub(crate) fn streams_are_written() {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + STREAM;
    thread::scope(|scope| {
        let client = scope.spawn(|| read_all(&hosts, &mpsc::channel().0));
        let server = &mut Command::new("python3");
        let lines = hosts.lines_and_errors(server.args(["-c", &program]), Some(CONFIG));
        assert_eq!(client.join().unwrap(), b"late");
        assert_eq!(lines, (vec![], String::new()));
    });
}

/// Children see the end of their connections if their parent is killed.
pub(crate) fn owner_is_killed() {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + ENDS;
    thread::scope(|scope| {
        let ((reads, begun), mut clients) = (mpsc::channel(), Vec::new());
        for _ in 0..2 {
            let (hosts, reads) = (&hosts, reads.clone());
            clients.push(scope.spawn(move || read_first(hosts, &reads)));
        }
        let mut command = Command::new("python3");
        command.args(["-c", &program, "kill"]).stdout(Stdio::piped());
        let mut server = hosts.near.run(|| preloaded(&mut command, CONFIG).spawn().unwrap());
        for _ in 0..2 {
            begun.recv().unwrap();
        }
        server.kill().unwrap();
        let mut lines = String::new();
        server.stdout.take().unwrap().read_to_string(&mut lines).unwrap();
        server.wait().unwrap();
        assert_eq!(lines, "b'endend'\n");
    });
}

/// Serves three connections: one that the peer resets while the child reads, one while it writes, and another one.
const RESETS: &str = "
signal.signal(signal.SIGPIPE, signal.SIG_IGN)

def reading(connection):
    connection.sendall(b'go')
    try:
        ended = connection.recv(100) == b''
    except ConnectionResetError:
        ended = True
    try:
        while True:
            connection.sendall(b'x')
    except OSError as error:
        print(ended, errno.errorcode[error.errno], flush=True)

def writing(connection):
    connection.sendall(b'go')
    try:
        while True:
            connection.sendall(b'x' * 100000)
    except OSError as error:
        print(error.errno in (errno.EPIPE, errno.ECONNRESET), flush=True)

fork_for(1, reading)
fork_for(1, writing)
fork_for(1, echo)
";

/// A reset by the peer ends the calls of a child.
pub(crate) fn resets_are_seen() {
    let hosts = Hosts::new();
    let program = BEGIN.to_owned() + RESETS;
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            let (reads, _begun) = mpsc::channel();
            for _ in 0..2 {
                let (stream, _) = read_first(&hosts, &reads);
                set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
            }
            hosts.far.run(|| echoed(b"goes on").unwrap())
        });
        let server = &mut Command::new("python3");
        let lines = hosts.lines(server.args(["-c", &program]), Some(CONFIG));
        assert_eq!(client.join().unwrap(), b"goes on");
        assert_eq!(lines, ["True EPIPE", "True"]);
    });
}

/// Serves one connection in each way, in the order in which the [client](CLIENT) opens them.
const WAYS: &str = include_str!("relays/ways.py");

/// Opens a connection for each of the [ways](WAYS), and prints what comes.
const CLIENT: &str = include_str!("relays/client.py");

/// All ways to use an inherited connection answer as those of the kernel.
pub(crate) fn ways_are_the_kernels() {
    let program = BEGIN.to_owned() + WAYS;
    let run = |config: Option<&str>| {
        let hosts = Hosts::new();
        thread::scope(|scope| {
            let client = scope.spawn(|| {
                let mut client = Command::new("timeout");
                client.args(["100", "python3", "-c", CLIENT]);
                let output = hosts.far.run(|| client.output().unwrap());
                String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
            });
            let (lines, errors) =
                hosts.lines_and_errors(Command::new("python3").args(["-c", &program]), config);
            let client: Vec<String> = client.join().unwrap();
            (lines, client, errors)
        })
    };
    let (kernels, ours) = (run(None), run(Some(CONFIG)));
    assert_eq!(kernels.1.len(), 24, "{kernels:?}");
    assert_eq!(ours, kernels);
}
