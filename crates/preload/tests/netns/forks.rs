//! A process that listens and forks: the one that uses the listener first serves it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;

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

/// Forbids a thread of root to open devices.
pub(crate) const FORBIDS: &str = "
import ctypes
def forbid():
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
";

/// Listens, and forks three children: the first serves, and ends when the others wait for their turn, as they have too
/// few descriptors to open the devices before. The second closes its listener before that.
const TURNS: &str = "
import os, resource, select, socket
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
free = os.dup(0)
os.close(free)
few, most = free + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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

/// Binds a port, and forks a child that binds another one.
const UDP: &str = "
import errno, os, socket
def bind(port):
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        it.bind(('10.9.0.1', port))
        print('bound', flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    return it
first = bind(7)
if os.fork() == 0:
    bind(8)
    os._exit(0)
os.wait()
";

/// Binds a UDP socket. Returns it, and what the call has answered.
const BIND: &str = "
import errno, os, signal, socket, sys
signal.alarm(60)

def bind():
    it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        it.bind(('10.9.0.1', 7))
        return it, 'bound'
    except OSError as error:
        return it, errno.errorcode[error.errno]
";

/// Binds a port, and forks a child. Each of them closes its copy, the one or the other first: then the port is free.
const COPIES: &str = "
first, answer = bind()
begin, done = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(begin[0], 1)
    first.close()
    os.write(done[1], b'x')
    os.read(begin[0], 1)
    os._exit(0)
def childs():
    os.write(begin[1], b'x')
    os.read(done[0], 1)
closes = [first.close, childs]
for close in closes if sys.argv[1] == 'parent' else closes[::-1]:
    print(answer)
    close()
    second, answer = bind()
print(answer)
os.write(begin[1], b'x')
os.wait()
";

pub(crate) fn copies_leave_port() {
    for first in ["parent", "child"] {
        let hosts = Hosts::new();
        let program = BIND.to_owned() + COPIES;
        let run =
            |config| hosts.lines(Command::new("python3").args(["-c", &program, first]), config);
        let config = "via=af_packet take=udp:7 spin=auto dev=exa";
        assert_eq!(run(Some(config)), run(None), "{first} closes first");
    }
}

/// Over AF_XDP the child cannot open the device as long as its parent has it.
pub(crate) fn udp_is_of_one() {
    let hosts = Hosts::new();
    let run = |via: &str| {
        let config = format!("via={via} take=udp:7,udp:8 spin=auto dev=exa");
        hosts.lines(Command::new("python3").args(["-c", UDP]), Some(&config))
    };
    assert_eq!(run("af_xdp"), ["bound", "EBUSY"]);
    assert_eq!(run("af_packet"), ["bound", "bound"]);
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

/// Writes more than the peer takes, and ends while threads wait, or while they begin to call.
const ENDS_BESIDE: &str = "
import ctypes, socket, sys, threading, time
listener = socket.create_server(('10.9.0.1', 7))
connection, peer = listener.accept()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
connection.recv(100)

ends = threading.Event()

def told(name, pause, call):
    if pause:
        ends.wait()
        time.sleep(pause)
    try:
        print(name, 'has returned', call(), flush=True)
    except OSError as error:
        print(name, 'has failed', error, flush=True)

pauses = (0,) if sys.argv[1] == 'waits' else (0.3, 0.5, 0.7, 0.9)
for pause in pauses:
    for name, call in (('recv', lambda: connection.recv(100)), ('accept', listener.accept), ('name', connection.getpeername))[:3 if pause else 2]:
        threading.Thread(target=told, args=(name, pause, call), daemon=True).start()
time.sleep(0.2) # until they wait
connection.sendall(b'x' * 3_000_000)
time.sleep(0.2)
ends.set()
ctypes.CDLL(None)._exit(0) # other threads of Python run meanwhile
";

/// Asks, and reads some seconds later.
const ASKS_SLOWLY: &str = "
import socket, time
while True:
    try:
        peer = socket.create_connection(('10.9.0.1', 7))
        break
    except OSError:
        time.sleep(0.01)
peer.sendall(b'question')
time.sleep(3)
read = 0
while some := peer.recv(1_000_000):
    read += len(some)
print(read)
";

fn ends_beside(calls: &str) {
    for config in [None, Some(CONFIG)] {
        let hosts = Hosts::new();
        thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let mut peer = Command::new("python3");
                hosts.far.run(|| peer.args(["-c", ASKS_SLOWLY]).output().unwrap().stdout)
            });
            let lines =
                hosts.lines(Command::new("python3").args(["-c", ENDS_BESIDE, calls]), config);
            assert!(lines.is_empty(), "{lines:?}");
            assert_eq!(asked.join().unwrap(), b"3000000\n");
        });
    }
}

pub(crate) fn bytes_outlive_waiting() {
    ends_beside("waits");
}

pub(crate) fn late_calls_do_not_return() {
    ends_beside("begins");
}

/// Lets a listener that is served not wait, in one of two ways. Its child accepts, and so does it itself once it listens anew.
const MODES: &str = "
import errno, fcntl, os, select, signal, socket, sys
listener = socket.create_server(('10.9.0.1', 7))
select.select([listener], [], [], 0)
if sys.argv[1] == 'ioctl':
    os.set_blocking(listener.fileno(), False)
else:
    fcntl.fcntl(listener, fcntl.F_SETFL, fcntl.fcntl(listener, fcntl.F_GETFL) | os.O_NONBLOCK)

def accept():
    signal.alarm(20)
    try:
        listener.accept()
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)

if os.fork() == 0:
    accept()
    accept()
    os._exit(0)
print(os.wait()[1])
listener.shutdown(socket.SHUT_RD)
listener.listen()
accept()
";

pub(crate) fn mode_is_kept() {
    for way in ["ioctl", "fcntl"] {
        let hosts = Hosts::new();
        let run = |config| hosts.lines(Command::new("python3").args(["-c", MODES, way]), config);
        assert_eq!(run(Some(CONFIG)), run(None), "{way}");
    }
}

/// Listens, forks, and lets the parent serve first: the child, which may not open the devices, learns why it cannot.
const BOTH: &str = "
import os, socket
listener = socket.create_server(('10.9.0.1', 7))
listener.setblocking(False)
begin, done = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(begin[0], 1)
    forbid()
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
    let mut program = Command::new("python3");
    let (lines, errors) =
        hosts.lines_and_errors(program.args(["-c", &(FORBIDS.to_owned() + BOTH)]), Some(CONFIG));
    let nothing = libc::EAGAIN.to_string();
    assert_eq!(lines, [nothing.clone(), nothing], "nothing to accept for either");
    assert!(errors.contains("another process serves"), "{errors}");
}

/// Listens, and forks a child that serves. The parent, which may not open the devices then, waits for connections, too, and
/// forks another child.
const ONCE: &str = "
import os, select, signal, socket
signal.alarm(60)
listener = socket.create_server(('10.9.0.1', 7))
served, done = os.pipe(), os.pipe()
if os.fork() == 0:
    signal.alarm(60)
    os.close(done[1])
    select.select([listener], [], [], 0)
    os.write(served[1], b'x')
    os.read(done[0], 1) # until the parent has ended, whose turn does not come
    os._exit(0)
os.read(served[0], 1)
forbid()
select.select([listener], [], [], 0)
second = os.fork()
if second == 0:
    os._exit(0)
os.waitpid(second, 0)
os._exit(0)
";

pub(crate) fn failure_is_told_once() {
    let hosts = Hosts::new();
    let mut program = Command::new("python3");
    let (_, errors) =
        hosts.lines_and_errors(program.args(["-c", &(FORBIDS.to_owned() + ONCE)]), Some(CONFIG));
    let told: Vec<_> = errors.lines().filter(|line| line.contains("CAP_NET_RAW")).collect();
    assert_eq!(told.len(), 1, "{errors}");
    assert!(
        told[0].contains("ambient capabilities") && !told[0].contains("sudo setcap"),
        "{errors}"
    );
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

/// Listens, serves, and forks a child that closes its copy. Each of them binds the address, before the parent closes its own
/// and after that.
const BINDS: &str = "
import errno, os, select, signal, socket
listener = socket.create_server(('10.9.0.1', 7))
select.select([listener], [], [], 0)
copied, closed = os.pipe(), os.pipe()

def bind():
    it = socket.socket()
    try:
        it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        it.bind(('10.9.0.1', 7))
        it.listen()
        it.setblocking(False)
        it.accept()
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    it.close()

child = os.fork()
signal.alarm(60)
if child == 0:
    listener.close()
    bind()
    os.write(copied[1], b'x')
    os.read(closed[0], 1)
    bind()
    os._exit(0)
os.read(copied[0], 1)
bind()
listener.close()
os.write(closed[1], b'x')
os.wait()
bind()
";

pub(crate) fn child_binds() {
    let hosts = Hosts::new();
    let run = |config| hosts.lines(Command::new("python3").args(["-c", BINDS]), config);
    assert_eq!(run(Some(CONFIG)), run(None));
}
