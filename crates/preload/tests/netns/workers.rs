//! Several processes that serve one listener at the same time.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use forebay_control::ControlClient;
use rustix::process::{Pid, Signal, kill_process_group};

use super::forks::CONFIG;
use super::{Hosts, NEAR, preloaded};

/// Listens, and forks a server on each word `fork` that one reads; others are `close`, after which a server accepts
/// nothing more, `end`, and `kill`, after which the first server is dead. A server answers each line by its number.
const SERVERS: &str = "
import os, signal, socket, threading
listener = socket.create_server(('10.9.0.1', 7))
asked = os.pipe()
pids = []

def serve(number, connection):
    for line in connection.makefile():
        word = line.strip()
        if word == 'fork':
            os.write(asked[1], b'x')
        if word == 'close':
            closed.set()
        if word == 'kill':
            os.kill(pids[0], signal.SIGKILL)
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
    pid = os.fork()
    if pid == 0:
        closed = threading.Event()
        listener.settimeout(0.05)
        accept(children)
        threading.Event().wait()
    pids.append(pid)
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

    /// First connection: the program may not listen yet.
    fn first() -> Self {
        loop {
            match Self::new() {
                Ok(client) => return client,
                Err(_) => thread::yield_now(),
            }
        }
    }

    /// Connection to this server.
    fn of(number: &str) -> Self {
        loop {
            let mut client = Self::new().unwrap();
            if client.say("hello").unwrap() == number {
                return client;
            }
        }
    }

    /// Says a word. Returns the server's number.
    fn say(&mut self, word: &str) -> io::Result<String> {
        writeln!(self.0.get_mut(), "{word}")?;
        let mut number = String::new();
        self.0.read_line(&mut number)?;
        Ok(number.trim().to_owned())
    }
}

/// Opens connections until many in a row are by these servers, and by each of them. Those of a server that has
/// ended may fail before.
fn await_servers(numbers: &[&str]) {
    let expected: BTreeSet<_> = numbers.iter().map(ToString::to_string).collect();
    let hello = || Client::new().and_then(|mut client| client.say("hello")).unwrap_or_default();
    while (0..50).map(|_| hello()).collect::<BTreeSet<_>>() != expected {}
}

/// Serves before it forks a child that serves, too. Each answers each line by its number, and ends on the word `end`.
const BESIDE: &str = "
import os, select, signal, socket
listener = socket.create_server(('10.9.0.1', 7))
select.select([listener], [], [], 0)
number = 0 if os.fork() else 1
signal.alarm(60) # if the client has failed
while True:
    connection, peer = listener.accept()
    for line in connection.makefile():
        connection.sendall(b'%d\\n' % number)
        if line == 'end\\n':
            os._exit(0)
    connection.close()
";

pub(crate) fn child_serves_beside() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let lines =
            scope.spawn(|| hosts.lines(Command::new("python3").args(["-c", BESIDE]), Some(CONFIG)));
        hosts.far.run(|| {
            drop(Client::first());
            await_servers(&["0", "1"]);
            assert_eq!(Client::of("0").say("end").unwrap(), "0");
            await_servers(&["1"]);
            assert_eq!(Client::of("1").say("end").unwrap(), "1");
        });
        assert!(lines.join().unwrap().is_empty());
    });
}

/// Runs a program, and `talk` as its clients. If these fail, it is killed with its children, however long it has run.
fn run(program: &[&str], config: &str, talk: impl FnOnce() + Send) {
    let hosts = Hosts::new();
    let mut command = Command::new("python3");
    preloaded(command.arg("-c").args(program), config).process_group(0);
    let mut program = hosts.near.run(|| command.spawn().unwrap());
    let result = thread::scope(|scope| scope.spawn(|| hosts.far.run(talk)).join());
    if let Err(failure) = result {
        let group = Pid::from_raw(program.id().try_into().unwrap()).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
        std::panic::resume_unwind(failure);
    }
    assert!(program.wait().unwrap().success());
}

fn talk_to_servers() {
    let mut first = Client::first();
    assert_eq!(first.say("fork").unwrap(), "0");
    await_servers(&["0", "1"]);
    assert_eq!(first.say("hello").unwrap(), "0", "it has its connection");
    assert_eq!(Client::of("1").say("end").unwrap(), "1");
    await_servers(&["0"]);
    assert_eq!(first.say("fork").unwrap(), "0");
    await_servers(&["0", "2"]);
    assert_eq!(first.say("close").unwrap(), "0");
    await_servers(&["2"]);
    assert_eq!(first.say("fork").unwrap(), "0", "after it has closed its listener");
    assert_eq!(first.say("end").unwrap(), "0");
    await_servers(&["2"]);
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "2");
}

pub(crate) fn connections_are_divided() {
    run(&[SERVERS], CONFIG, talk_to_servers);
}

/// Talks to the servers, of which one is killed.
fn talk_after_kill() {
    let mut first = Client::first();
    assert_eq!(first.say("fork").unwrap(), "0");
    await_servers(&["0", "1"]);
    let mut second = Client::of("1");
    assert_eq!(second.say("kill").unwrap(), "1");
    await_servers(&["1"]);
    let gone = first.say("hello").map_err(|error| error.kind());
    assert_eq!(gone, Err(ErrorKind::ConnectionReset), "the other one answers for it");
    assert_eq!(second.say("fork").unwrap(), "1");
    await_servers(&["1", "2"]);
    assert_eq!(second.say("fork").unwrap(), "1");
    assert_eq!(second.say("end").unwrap(), "1");
    await_servers(&["2"]);
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "2");
}

pub(crate) fn killed_is_replaced() {
    run(&[SERVERS], CONFIG, talk_after_kill);
}

/// Talks to the servers, and asks and changes the newest by the control socket.
fn control_servers(socket: &Path) {
    let ask = |request: &str| ControlClient::connect(socket).unwrap().ask(request).unwrap();
    let mut first = Client::first();
    assert_eq!(first.say("hello").unwrap(), "0");
    ask("set netdev_budget 77");
    let metrics = ask("metrics");
    for part in
        ["forebay_tcp_connections{state=\"ESTAB\"} 1", "device=\"exa\"", "local=\"10.9.0.1:7\""]
    {
        assert!(metrics.iter().any(|line| line.contains(part)), "{part}: {metrics:#?}");
    }
    assert_eq!(first.say("fork").unwrap(), "0");
    await_servers(&["0", "1"]);
    assert_ne!(ask("get netdev_budget"), ["77"], "of the newer server");
    await_part(&|| frames_of(&ask("metrics")));
    assert_eq!(Client::of("1").say("end").unwrap(), "1");
    await_servers(&["0"]);
    // It accepts clients once the newer one has ended, which that may do later than it gives up its connections.
    let asked = || ControlClient::connect(socket).ok()?.ask("get netdev_budget").ok();
    while asked().is_none_or(|answer| answer != ["77"]) {}
    assert_eq!(first.say("fork").unwrap(), "0");
    await_servers(&["0", "2"]);
    assert_eq!(first.say("fork").unwrap(), "0");
    assert_eq!(first.say("end").unwrap(), "0");
    await_servers(&["2"]);
    assert_eq!(Client::new().unwrap().say("end").unwrap(), "2");
}

/// Frames that a process has received, by its metrics.
fn frames_of(metrics: &[String]) -> u64 {
    let lines = metrics.iter().filter(|line| line.starts_with("forebay_packets_delivered_total"));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Opens connections until the newest of two servers receives its part of their frames alone, since the kernel leaves out
/// the rest.
fn await_part(received: &dyn Fn() -> u64) {
    let sent = || -> u64 {
        let devices = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let line = devices.lines().find_map(|line| line.trim().strip_prefix("exb:")).unwrap();
        line.split_whitespace().nth(9).unwrap().parse().unwrap()
    };
    loop {
        let before = (received(), sent());
        (0..100).for_each(|_| drop(Client::new().unwrap().say("hello").unwrap()));
        if (received() - before.0) * 4 < (sent() - before.1) * 3 {
            return;
        }
    }
}

pub(crate) fn newest_is_controlled() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("program.sock");
    let config = format!("{CONFIG} control={}", socket.display());
    run(&[SERVERS], &config, || control_servers(&socket));
    assert!(ControlClient::connect(&socket).is_err(), "no process is left");
}

/// Listens with a socket for each of two children, as with `reuseport`, or with one for both. The first child accepts
/// nothing, and closes its listener when the second one is asked to `close`, or ends its listening, and begins it anew.
/// With `full` the second one has little room, and accepts nothing more then.
const PASSES: &str = "
import os, select, socket, sys, threading
def listen(backlog=128):
    listener = socket.socket()
    # Not with one that is opened anew, which would share the address with itself.
    if sys.argv[1] != 'again':
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(('10.9.0.1', 7))
    listener.listen(backlog)
    return listener

is_full = sys.argv[1] == 'full'
listeners = [listen(), listen(5)] if is_full or sys.argv[1] == 'each' else [listen()] * 2
closed = threading.Event()
closes = os.pipe()

def say(connection):
    for line in connection.makefile():
        connection.sendall(b'0\\n')

def answer():
    while True:
        connection, peer = listeners[0].accept()
        threading.Thread(target=say, args=(connection,), daemon=True).start()

if os.fork() == 0:
    select.select([listeners[0]], [], [], 0)
    os.read(closes[0], 1)
    if sys.argv[1] == 'again':
        listeners[0].shutdown(socket.SHUT_RDWR)
        listeners[0].listen()
        threading.Thread(target=answer, daemon=True).start()
    else:
        listeners[0].close()
    os.read(closes[0], 1)
    os._exit(0)

def serve(connection):
    for line in connection.makefile():
        if line == 'close\\n':
            closed.set()
            os.write(closes[1], b'x')
        connection.sendall(b'1\\n')
        if line == 'end\\n':
            os.write(closes[1], b'x')
            os._exit(0)

if os.fork() == 0:
    while not (is_full and closed.is_set()):
        connection, peer = listeners[1].accept()
        threading.Thread(target=serve, args=(connection,)).start()
    threading.Event().wait()
for listener in listeners:
    listener.close()
os.wait(), os.wait()
";

/// Time after which a connection is taken for one that is not accepted. A slower answer does no harm.
const PATIENCE: Duration = Duration::from_millis(100);

/// Asks the second server to have the first one close its listener. Returns the connection to it, and those that the
/// first one has not accepted.
fn close_first() -> (Client, Vec<Client>) {
    let patient = |client: &Client, wait| client.0.get_ref().set_read_timeout(wait).unwrap();
    let is_served = |client: &mut Client| {
        patient(client, Some(PATIENCE));
        client.say("hello").is_ok()
    };
    let mut served = Client::first();
    while !is_served(&mut served) {
        served = Client::first();
    }
    // Until many go to the child that accepts none.
    let clients = std::iter::repeat_with(|| Client::new().unwrap());
    let waiting: Vec<_> = clients
        .filter_map(|mut client| (!is_served(&mut client)).then_some(client))
        .take(30)
        .collect();
    patient(&served, None);
    assert_eq!(served.say("close").unwrap(), "1");
    waiting.iter().for_each(|client| patient(client, None));
    (served, waiting)
}

/// Talks to servers that answer with one of `numbers`.
fn talk_while_closing(numbers: &[&str], then: impl Fn()) {
    let (mut served, mut waiting) = close_first();
    for client in &mut waiting {
        let mut number = String::new();
        client.0.read_line(&mut number).unwrap();
        assert!(
            numbers.contains(&number.trim_end()),
            "what was said before is read, too: {number:?}"
        );
        assert_eq!(client.say("hello").unwrap(), number.trim_end());
    }
    then();
    assert_eq!(served.say("end").unwrap(), "1");
}

/// Waits until the connections are reset that the second server has no room for.
fn await_resets() {
    let (mut served, mut waiting) = close_first();
    let mut reset_count = 0;
    while waiting.len() > 7 {
        waiting.retain(|client| {
            let stream = client.0.get_ref();
            stream.set_nonblocking(true).unwrap();
            match stream.peek(&mut [0; 1]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                // Told once.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => reset_count += 1,
                // The second server has accepted it before, and was slow.
                told => assert_eq!(told.unwrap(), 1),
            }
            false
        });
        thread::yield_now();
    }
    assert!(reset_count > 0);
    assert_eq!(served.say("end").unwrap(), "1");
}

/// Runs the program with these listeners, and `talk` as its clients.
fn run_passes(listeners: &str, talk: impl FnOnce() + Send) {
    run(&[PASSES, listeners], CONFIG, talk);
}

pub(crate) fn unaccepted_are_passed_on() {
    for listeners in ["one", "each"] {
        run_passes(listeners, || talk_while_closing(&["1"], || {}));
    }
}

pub(crate) fn listener_is_reopened() {
    let say_hello = || Client::new().and_then(|mut client| client.say("hello")).unwrap();
    // What nobody has accepted goes to either: the first one serves again by then.
    run_passes("again", || talk_while_closing(&["0", "1"], || while say_hello() != "0" {}));
}

pub(crate) fn refused_are_reset() {
    run_passes("full", await_resets);
}

/// Listens, and forks a server that closes its listener once a connection waits. Only then another server is forked.
const HEIRS: &str = "
import os, select, socket
listener = socket.create_server(('10.9.0.1', 7))
closed, ends = os.pipe(), os.pipe()
if os.fork() == 0:
    select.select([listener], [], [])
    listener.close()
    os.write(closed[1], b'x')
    os.read(ends[0], 1)
    os._exit(0)
os.read(closed[0], 1)
if os.fork() == 0:
    connection, peer = listener.accept()
    for line in connection.makefile():
        connection.sendall(b'1\\n')
    os._exit(0)
os.wait()
os.write(ends[1], b'x')
os.wait()
";

pub(crate) fn unaccepted_await_heir() {
    run(&[HEIRS], CONFIG, || assert_eq!(Client::first().say("hello").unwrap(), "1"));
}
