//! A process that listens and forks: the one that uses the listener first serves it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::thread;

use forebay_control::ControlClient;

use super::{Hosts, NEAR};

pub(crate) const CONFIG: &str = "via=af_packet take=tcp:7 spin=auto dev=exa";

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

/// Connects from the far host and asks, until there is an answer: the program may not listen yet.
pub(crate) fn ask(hosts: &Hosts) -> String {
    let attempt = || -> io::Result<String> {
        let mut stream = TcpStream::connect(NEAR)?;
        stream.write_all(b"question")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    hosts.far.run(|| {
        loop {
            match attempt() {
                Ok(answer) if !answer.is_empty() => return answer,
                _ => thread::yield_now(),
            }
        }
    })
}

pub(crate) fn child_serves() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let asked = scope.spawn(|| ask(&hosts));
        let lines = hosts.lines(Command::new("python3").args(["-c", CHILD]), Some(CONFIG));
        assert_eq!(lines, ["question", "0"], "the question, and the end of the child");
        assert_eq!(asked.join().unwrap(), "answer");
    });
}

/// Listens, and forks three children: the first serves, and ends when the others wait for their turn. The second
/// closes its listener before that.
const TURNS: &str = "
import os, select, socket
listener = socket.create_server(('10.9.0.1', 7))
steps = [os.pipe() for _ in range(5)]
done = lambda step: os.write(steps[step][1], b'x')
after = lambda step: os.read(steps[step][0], 1)

def waits():
    waits = select.epoll()
    waits.register(listener, select.EPOLLIN)
    print(waits.poll(0), flush=True)
    return waits

if os.fork() == 0:
    after(0)
    select.select([listener], [], [], 0)
    done(1)
    after(3)
    os._exit(0)
if os.fork() == 0:
    after(1)
    waits()
    listener.close()
    done(2)
    after(4)
    os._exit(0)
if os.fork() == 0:
    after(2)
    waits = waits()
    done(3)
    print(len(waits.poll()), flush=True)
    connection, peer = listener.accept()
    print(connection.recv(100).decode(), flush=True)
    connection.sendall(b'answer')
    done(4)
    os._exit(0)
done(0)
os.wait(), os.wait(), os.wait()
";

pub(crate) fn turns_are_taken() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        // The first child may still get a connection, and end with it.
        let asked = scope.spawn(|| ask(&hosts));
        let (lines, errors) =
            hosts.lines_and_errors(Command::new("python3").args(["-c", TURNS]), Some(CONFIG));
        assert_eq!(lines, ["[]", "[]", "1", "question"]);
        assert!(errors.contains("another process serves"), "{errors}");
        assert_eq!(asked.join().unwrap(), "answer");
    });
}

/// Writes more than the peer takes, and ends at once, in one of both ways.
const ENDS: &str = "
import os, socket, sys
connection, peer = socket.create_server(('10.9.0.1', 7)).accept()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
connection.recv(100)
connection.sendall(b'x' * 3_000_000)
sys.exit(0) if sys.argv[1] == 'exit' else os._exit(0)
";

pub(crate) fn bytes_outlive() {
    for way in ["exit", "_exit"] {
        let hosts = Hosts::new();
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("program.sock");
        let config = format!("{CONFIG} control={}", socket.display());
        thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&hosts));
            hosts.lines(Command::new("python3").args(["-c", ENDS, way]), Some(&config));
            assert_eq!(asked.join().unwrap().len(), 3_000_000, "{way}");
        });
        assert!(!socket.exists(), "the socket is removed");
    }
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
    assert!(errors.contains("another process serves"), "{errors}");
}

/// Listens, and forks a server on each word `fork` that one reads; others are `close`, after which a server accepts
/// nothing more, and `end`. A server answers each line by its number.
const SERVERS: &str = "
import os, signal, socket, threading
signal.alarm(60) # if the client has failed
listener = socket.create_server(('10.9.0.1', 7))
asked = os.pipe()

def serve(number, connection):
    for line in connection.makefile():
        word = line.strip()
        if word == 'fork':
            os.write(asked[1], b'x')
        if word == 'close':
            closed.set()
        connection.sendall(b'%d\\n' % number)
        if word == 'end':
            os._exit(0)
    connection.close()

def accept(number):
    while not closed.is_set():
        try:
            connection, peer = listener.accept()
        except TimeoutError:
            continue
        threading.Thread(target=serve, args=(number, connection)).start()
    listener.close()

children = 0
while children < 3:
    if os.fork() == 0:
        signal.alarm(60)
        closed = threading.Event()
        listener.settimeout(0.05)
        accept(children)
        threading.Event().wait()
    children += 1
    os.read(asked[0], 1)
for _ in range(children):
    os.wait()
";

/// Connection to one of the servers.
struct Client(BufReader<TcpStream>);

impl Client {
    fn new() -> io::Result<Self> {
        TcpStream::connect(NEAR).map(|stream| Self(BufReader::new(stream)))
    }

    /// Says a word. Returns the server's number.
    fn say(&mut self, word: &str) -> io::Result<String> {
        writeln!(self.0.get_mut(), "{word}")?;
        let mut number = String::new();
        self.0.read_line(&mut number)?;
        Ok(number.trim().to_owned())
    }
}

/// Opens connections, all of which are served, until many in a row are by this server. In between two may serve.
fn await_server(number: &str) {
    let mut in_a_row = 0;
    while in_a_row < 50 {
        let is_its = Client::new().unwrap().say("hello").unwrap() == number;
        in_a_row = if is_its { in_a_row + 1 } else { 0 };
    }
}

/// Opens connections until this server has taken over from another one, whose connections end with it.
fn await_successor(number: &str) {
    let hello = || Client::new().and_then(|mut client| client.say("hello"));
    while !hello().is_ok_and(|by| by == number) {}
    await_server(number);
}

fn talk_to_servers() {
    let mut first = loop {
        match Client::new() {
            Ok(client) => break client,
            Err(_) => thread::yield_now(), // it does not listen yet
        }
    };
    assert_eq!(first.say("fork").unwrap(), "0");
    await_server("1");
    assert_eq!(first.say("hello").unwrap(), "0", "the older one has its connection");
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "1");
    await_successor("0");
    assert_eq!(first.say("fork").unwrap(), "0", "again the newest");
    await_server("2");
    assert_eq!(first.say("close").unwrap(), "0");
    await_server("2");
    assert_eq!(first.say("fork").unwrap(), "0", "after it has closed its listener");
    assert_eq!(first.say("end").unwrap(), "0");
    await_server("2");
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "2");
}

pub(crate) fn newest_takes() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let talk = scope.spawn(|| hosts.far.run(talk_to_servers));
        hosts.lines(Command::new("python3").args(["-c", SERVERS]), Some(CONFIG));
        talk.join().unwrap();
    });
}

/// Talks to the servers, and asks and changes the one that takes new connections by the control socket.
fn control_servers(socket: &Path) {
    let ask = |request: &str| ControlClient::connect(socket).unwrap().ask(request).unwrap();
    let mut first = loop {
        match Client::new() {
            Ok(client) => break client,
            Err(_) => thread::yield_now(),
        }
    };
    assert_eq!(first.say("hello").unwrap(), "0");
    ask("set netdev_budget 77");
    let metrics = ask("metrics");
    for part in
        ["forebay_tcp_connections{state=\"ESTAB\"} 1", "device=\"exa\"", "local=\"10.9.0.1:7\""]
    {
        assert!(metrics.iter().any(|line| line.contains(part)), "{part}: {metrics:#?}");
    }
    assert_eq!(first.say("fork").unwrap(), "0");
    await_server("1");
    assert_ne!(ask("get netdev_budget"), ["77"], "of the newer server");
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "1");
    await_successor("0");
    assert_eq!(ask("get netdev_budget"), ["77"], "of the older server");
    assert_eq!(first.say("fork").unwrap(), "0");
    await_server("2");
    assert_eq!(first.say("fork").unwrap(), "0");
    assert_eq!(first.say("end").unwrap(), "0");
    await_server("2");
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "2");
}

pub(crate) fn newest_is_controlled() {
    let hosts = Hosts::new();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("program.sock");
    let config = format!("{CONFIG} control={}", socket.display());
    thread::scope(|scope| {
        let talk = scope.spawn(|| hosts.far.run(|| control_servers(&socket)));
        hosts.lines(Command::new("python3").args(["-c", SERVERS]), Some(&config));
        talk.join().unwrap();
    });
    assert!(ControlClient::connect(&socket).is_err(), "no process is left");
}

/// Listens, serves, and forks a child that closes its copy. Once the parent has ended, the child may have the port.
const LEAVES: &str = "
import os, select, socket, time
listener = socket.create_server(('10.9.0.1', 7))
select.select([listener], [], [], 0)
parent = os.getpid()
copies, copied = os.pipe()
if os.fork() == 0:
    os.close(listener.fileno())
    os.write(copied, b'x')
    while os.getppid() == parent:
        time.sleep(0.01)
    socket.create_server(('10.9.0.1', 7))
    print('bound', flush=True)
    os._exit(0)
os.read(copies, 1)
os._exit(0)
";

pub(crate) fn port_is_left() {
    let hosts = Hosts::new();
    let lines = hosts.lines(Command::new("python3").args(["-c", LEAVES]), Some(CONFIG));
    assert_eq!(lines, ["bound"]);
}
