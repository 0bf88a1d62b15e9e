//! Listeners and their connections in one process.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;

use forebay_testkit::namespaces::cable::{Cable, Namespace};

use super::forks::{CONFIG, ask};
use super::{Hosts, NEAR};

/// Adds each connection to an epoll set by its number, closes it at once, and counts the events of connections.
const CLOSES: &str = "
import ctypes, select, socket, struct
libc = ctypes.CDLL(None)
listener = socket.create_server(('10.9.0.1', 7), backlog=1000)
listener.setblocking(False)
waits = select.epoll()

def add(number, data):
    event = struct.pack('=IQ', select.EPOLLIN | select.EPOLLRDHUP, data)
    assert libc.epoll_ctl(waits.fileno(), 1, number, event) == 0

add(listener.fileno(), 0)
events = ctypes.create_string_buffer(12 * 64)
accepted, stale, idle = 0, [], 0
while accepted < 3000 and idle < 20:
    found = libc.epoll_wait(waits.fileno(), events, 64, 1000)
    idle = idle + 1 if found == 0 else 0
    for index in range(found):
        mask, data = struct.unpack_from('=IQ', events, 12 * index)
        if data != 0:
            stale.append((mask, data))
    try:
        while True:
            connection, peer = listener.accept()
            accepted += 1
            add(connection.fileno(), accepted)
            connection.close()
    except BlockingIOError:
        pass
print(accepted >= 3000, len(stale), stale[:5])
";

/// Opens connections, each of which sends a few bytes and is reset.
const RESETS: &str = "
import socket, struct, threading

def reset():
    for _ in range(1200):
        try:
            it = socket.create_connection(('10.9.0.1', 7))
            it.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            it.send(b'x')
            it.close()
        except OSError:
            pass

resets = [threading.Thread(target=reset) for _ in range(4)]
for each in resets:
    each.start()
for each in resets:
    each.join()
";

pub(crate) fn no_events_once_closed() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let lines =
            scope.spawn(|| hosts.lines(Command::new("python3").args(["-c", CLOSES]), Some(CONFIG)));
        while !lines.is_finished() {
            let resets = || Command::new("python3").args(["-c", RESETS]).status();
            assert!(hosts.far.run(resets).unwrap().success());
        }
        assert_eq!(lines.join().unwrap(), ["True 0 []"]);
    });
}

/// Waits only by the functions that `poll` and `ppoll` are with `_FORTIFY_SOURCE`.
const CHECKED: &str = "
import ctypes, socket, struct, sys
libc = ctypes.CDLL(None)
listener = socket.create_server(('10.9.0.1', 7))
polled = ctypes.create_string_buffer(struct.pack('ihh', listener.fileno(), 1, 0), 8)
second = struct.pack('ll', 1, 0)
for _ in range(20):
    if sys.argv[1] == 'poll':
        found = libc.__poll_chk(polled, ctypes.c_ulong(1), 1000, ctypes.c_ulong(8))
    else:
        found = libc.__ppoll_chk(polled, ctypes.c_ulong(1), second, None, ctypes.c_ulong(8))
    if found == 1:
        break
print(found, flush=True)
connection, peer = listener.accept()
print(connection.recv(100).decode(), flush=True)
connection.sendall(b'answer')
";

pub(crate) fn checked_poll() {
    for way in ["poll", "ppoll"] {
        let hosts = Hosts::new();
        thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&hosts));
            let mut command = Command::new("python3");
            let lines = hosts.lines(command.args(["-c", CHECKED, way]), Some(CONFIG));
            assert_eq!(lines, ["1", "question"], "{way}");
            assert_eq!(asked.join().unwrap(), "answer");
        });
    }
}

/// Sets options that sockets of Forebay lack, before `bind` and `listen`, and lets the listener listen once more.
const LACKING: &str = "
import ctypes, socket, struct
nothing = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0xFFFF))
taken = struct.pack('HL', 1, ctypes.addressof(nothing))
for kind in socket.SOCK_DGRAM, socket.SOCK_STREAM:
    it = socket.socket(socket.AF_INET, kind)
    it.setsockopt(socket.SOL_SOCKET, 26, taken) # SO_ATTACH_FILTER
    it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 5)
    it.setsockopt(socket.SOL_SOCKET, 42, 0) # SO_PEEK_OFF
    it.setsockopt(socket.SOL_SOCKET, 60, 1) # SO_ZEROCOPY
    it.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes([1, 1, 1, 0]))
    it.setsockopt(*((17, 101, 1) if kind == socket.SOCK_DGRAM else (6, 27, 1))) # UDP_NO_CHECK6_TX, TCP_SAVE_SYN
    it.setsockopt(socket.IPPROTO_IP, 21, 1) # IP_MINTTL, which they have
    it.bind(('10.9.0.1', 7))
plain = socket.create_server(('10.9.0.1', 8))
plain.shutdown(socket.SHUT_RD)
plain.listen()
it.listen()
";

pub(crate) fn lacking_is_told() {
    let hosts = Hosts::new();
    let config = "via=af_packet take=udp:7,tcp:7,tcp:8 spin=auto dev=exa";
    let mut command = Command::new("python3");
    let (_, errors) = hosts.lines_and_errors(command.args(["-c", LACKING]), Some(config));
    let lines: Vec<_> = errors.lines().collect();
    let of_all = ["SO_RCVLOWAT", "SO_PEEK_OFF", "SO_ZEROCOPY", "IP_OPTIONS"];
    let of_kind = |own| of_all.into_iter().chain([own, "SO_ATTACH_FILTER"]);
    let names: Vec<_> = of_kind("UDP_NO_CHECK6_TX").chain(of_kind("TCP_SAVE_SYN")).collect();
    assert_eq!(lines.len(), names.len(), "{errors}");
    for (line, name) in lines.into_iter().zip(names) {
        let is_told = line.contains(name) && line.contains("has no effect");
        assert!(is_told && line.contains("10.9.0.1:7"), "{errors}");
    }
}

/// Lets a socket listen at an address that is none of the devices', twice, while the engine runs.
const REFUSED: &str = "
import errno, select, socket
listener = socket.create_server(('10.9.0.1', 7))
select.select([listener], [], [], 0)
other = socket.socket()
other.setsockopt(socket.IPPROTO_IP, 15, 1) # IP_FREEBIND
other.bind(('10.9.0.99', 7))
for _ in range(2):
    try:
        print(other.listen())
    except OSError as error:
        print(errno.errorcode[error.errno])
other.close()
";

pub(crate) fn refused_twice() {
    let hosts = Hosts::new();
    let lines = hosts.lines(Command::new("python3").args(["-c", REFUSED]), Some(CONFIG));
    assert_eq!(lines, ["EADDRNOTAVAIL", "EADDRNOTAVAIL"]);
}

/// Accepts a connection of IPv4 from a listener of both families, and asks for the MTU of its path by each.
const MTU: &str = "
import errno, socket
listener = socket.create_server(('::', 7), family=socket.AF_INET6, dualstack_ipv6=True)
connection, peer = listener.accept()
for level, option in (socket.IPPROTO_IP, 14), (socket.IPPROTO_IPV6, 24): # IP_MTU, IPV6_MTU
    try:
        print(connection.getsockopt(level, option))
    except OSError as error:
        print(errno.errorcode[error.errno])
print(connection.recv(100))
connection.sendall(b'answer')
";

pub(crate) fn mtu_by_family() {
    let told = |config| {
        let hosts = Hosts::new();
        thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&hosts));
            let lines = hosts.lines(Command::new("python3").args(["-c", MTU]), config);
            assert_eq!(asked.join().unwrap(), "answer");
            lines
        })
    };
    assert_eq!(told(Some(CONFIG)), told(None));
}

/// Accepts two connections and sends more by each than its window holds. Tells the MTU of their paths before and after.
const SENDS: &str = "
import socket
listener = socket.create_server(('10.9.0.1', 7))
for _ in range(2):
    connection, peer = listener.accept()
    mtu = lambda: connection.getsockopt(socket.IPPROTO_IP, 14) # IP_MTU
    before = mtu()
    connection.sendall(bytes(300_000))
    print(connection.recv(1), before, mtu())
";

/// Path with a router whose next link is smaller than both ends': only its errors tell of it.
pub(crate) fn path_mtu_is_heard() {
    let told = |config: Option<&str>| {
        let (hosts, beyond) = (Hosts::new(), Namespace::new());
        route(&hosts, &beyond);
        hosts.far.command("ip link set exc mtu 1300");
        thread::scope(|scope| {
            scope.spawn(|| beyond.run(|| (0..2).for_each(|_| receive())));
            hosts.lines(Command::new("python3").args(["-c", SENDS]), config)
        })
    };
    let kernels = told(None);
    assert_eq!(kernels, ["b'x' 1500 1300", "b'x' 1300 1300"]);
    for via in ["af_packet", "af_xdp"] {
        assert_eq!(told(Some(&CONFIG.replace("af_packet", via))), kernels, "{via}");
    }
}

/// Makes the far host a router between the near one and a third.
fn route(hosts: &Hosts, beyond: &Namespace) {
    Cable { near: (&hosts.far, "exc"), far: (beyond, "exd") }.lay();
    hosts.near.command("ip route add 10.8.0.0/24 via 10.9.0.2");
    hosts.far.command("ip addr add 10.8.0.1/24 dev exc");
    hosts.far.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    beyond.command("ip addr add 10.8.0.2/24 dev exd");
    beyond.command("ip route add 10.9.0.0/24 via 10.8.0.1");
}

/// Accepts a connection and reads it to its end.
const READS: &str = "
import socket
listener = socket.create_server(('10.9.0.1', 7))
connection, peer = listener.accept()
print(sum(len(part) for part in iter(lambda: connection.recv(1 << 20), b'')))
";

/// A peer that does not discover the MTU of its path: a router divides its segments.
pub(crate) fn fragments_are_joined() {
    for via in ["af_packet", "af_xdp"] {
        let (hosts, beyond) = (Hosts::new(), Namespace::new());
        route(&hosts, &beyond);
        hosts.far.command("ip link set exb mtu 1300");
        let knob = "/proc/sys/net/ipv4/ip_no_pmtu_disc";
        beyond.run(|| std::fs::write(knob, "1").unwrap());
        let config = CONFIG.replace("af_packet", via);
        thread::scope(|scope| {
            scope.spawn(|| beyond.run(|| connected().write_all(&[7; 300_000]).unwrap()));
            let program = &mut Command::new("python3");
            let lines = hosts.lines(program.args(["-c", READS]), Some(&config));
            assert_eq!(lines, ["300000"], "{via}");
        });
    }
}

/// Answers when all has come by a connection.
fn receive() {
    let mut stream = connected();
    stream.read_exact(&mut [0; 300_000]).unwrap();
    stream.write_all(b"x").unwrap();
}

/// Connects, once the server listens.
fn connected() -> TcpStream {
    loop {
        match TcpStream::connect(NEAR) {
            Ok(stream) => return stream,
            Err(_) => thread::yield_now(),
        }
    }
}

/// Asks for signals of what arrives at a UDP socket, a listener and a connection, in both ways, before the socket is taken
/// and after that.
const SIGNALLED: &str = "
import fcntl, os, select, signal, socket, struct, threading, time
kinds = [signal.SIGIO, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, kinds)

def ask(it, way):
    if way == 'ioctl':
        fcntl.ioctl(it, 0x8901, struct.pack('i', os.getpid())) # FIOSETOWN
        fcntl.ioctl(it, 0x5452, struct.pack('i', 1)) # FIOASYNC
    else:
        fcntl.fcntl(it, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(it, 10, signal.SIGUSR1) # F_SETSIG
        fcntl.fcntl(it, fcntl.F_SETFL, fcntl.fcntl(it, fcntl.F_GETFL) | os.O_ASYNC)

def told(it, *what):
    told = signal.sigtimedwait(kinds, 20)
    flags, owner = fcntl.fcntl(it, fcntl.F_GETFL), fcntl.fcntl(it, fcntl.F_GETOWN)
    print(*what, told and told.si_signo, bool(flags & os.O_ASYNC), owner == os.getpid(), flush=True)

def ignore():
    while signal.sigtimedwait(kinds, 0):
        pass

for way in 'fcntl', 'ioctl':
    for is_early in True, False:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if is_early:
            ask(udp, way)
        udp.bind(('10.9.0.1', 7))
        if not is_early:
            ask(udp, way)
        udp.sendto(b'question', ('10.9.0.2', 9))
        told(udp, 'datagram', way, is_early)
        print(udp.recv(100))
        udp.close()
        ignore()
# The owner alone is named early.
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.fcntl(udp, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(udp, 10, signal.SIGUSR1)
udp.bind(('10.9.0.1', 7))
fcntl.fcntl(udp, fcntl.F_SETFL, os.O_ASYNC)
udp.sendto(b'question', ('10.9.0.2', 9))
told(udp, 'datagram, flag alone late')
udp.close()
ignore()
# Datagrams come while `bind` waits to say that an option has no effect, and none after that.
header = struct.pack('!HHHH', 7, 9, 9, 0) + b'x'
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
out, full = os.pipe()
os.set_blocking(full, False)
try:
    while True:
        os.write(full, bytes(4096))
except BlockingIOError:
    os.set_blocking(full, True)
stderr = os.dup(2)
os.dup2(full, 2)

def arrive():
    for _ in range(30):
        raw.sendto(header, ('10.9.0.2', 0))
        time.sleep(0.01)
    os.read(out, 1 << 20)

udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 5)
ask(udp, 'fcntl')
arrives = threading.Thread(target=arrive)
arrives.start()
udp.bind(('10.9.0.1', 7))
arrives.join()
os.dup2(stderr, 2)
told(udp, 'datagram while it is bound')
udp.close()
ignore()
listener = socket.socket()
ask(listener, 'fcntl')
listener.bind(('10.9.0.1', 7))
listener.listen()
print(select.select([listener], [listener], [], 0)[1])
told(listener, 'connection')
connection, peer = listener.accept()
ignore()
ask(connection, 'ioctl')
connection.sendall(b'send more')
told(connection, 'bytes')
connection.recv(100)
";

/// Connects, and sends as soon as there is something to read.
const PEER: &str = "
import socket, time
while True:
    try:
        peer = socket.create_connection(('10.9.0.1', 7))
        if peer.recv(100):
            break
    except OSError:
        time.sleep(0.01)
peer.sendall(b'more')
peer.recv(100)
";

pub(crate) fn arrivals_are_signalled() {
    let config = "via=af_packet take=udp:7,tcp:7 spin=auto dev=exa";
    let told = |config| {
        let hosts = Hosts::with_echo();
        let mut peer = Command::new("python3");
        let mut peer = hosts.far.run(|| peer.args(["-c", PEER]).spawn().unwrap());
        let lines = hosts.lines(Command::new("python3").args(["-c", SIGNALLED]), config);
        peer.kill().unwrap();
        peer.wait().unwrap();
        lines
    };
    assert_eq!(told(Some(config)), told(None));
}

/// Ends while threads wait in `accept`.
const ENDS: &str = "
import ctypes, socket, threading, time
listener = socket.create_server(('10.9.0.1', 7))

def accept():
    waits.set()
    try:
        listener.accept()
    except OSError as error:
        print('accept has returned', error, flush=True)

for _ in range(2):
    waits = threading.Event()
    threading.Thread(target=accept, daemon=True).start()
    waits.wait()
time.sleep(0.2) # until they wait
print('ends', flush=True)
ctypes.CDLL(None)._exit(0) # other threads of Python run meanwhile
";

pub(crate) fn no_return_at_the_end() {
    for config in [None, Some(CONFIG)] {
        let hosts = Hosts::new();
        let (lines, errors) =
            hosts.lines_and_errors(Command::new("python3").args(["-c", ENDS]), config);
        assert_eq!((lines, errors.as_str()), (vec!["ends".to_owned()], ""));
    }
}
