//! A process with few descriptors, or little memory.

use std::process::Command;
use std::thread;

use super::Hosts;
use super::forks::{CONFIG, ask};

/// Waits with a set that is shorter than its count says, before a page that cannot be read; and accepts with no
/// descriptors left, one and two, which are too few, and then with many.
const FEW: &str = "
import ctypes, errno, mmap, os, resource, select, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
listener = socket.create_server(('10.9.0.1', 7))
memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
page = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)
assert libc.mprotect(ctypes.c_void_p(page + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
number = listener.fileno()
memory[mmap.PAGESIZE - 128 + number // 8] = 1 << number % 8
few = ctypes.c_void_p(page + mmap.PAGESIZE - 128)
print(libc.select(65536, few, None, None, None), flush=True)
listener.setblocking(False)
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
for left in range(3):
    try:
        listener.accept()
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    os.close(held.pop())
for number in held:
    os.close(number)
connection, peer = listener.accept()
print(connection.recv(100).decode(), flush=True)
connection.sendall(b'answer')
";

pub(crate) fn few_descriptors() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let asked = scope.spawn(|| ask(&hosts));
        let lines = hosts.lines(Command::new("python3").args(["-c", FEW]), Some(CONFIG));
        assert_eq!(lines, ["1", "EMFILE", "EMFILE", "EMFILE", "question"]);
        assert_eq!(asked.join().unwrap(), "answer");
    });
}

/// Limits its memory once it serves, as FTP servers do, and takes some; more than it may have is refused. The limits stay as they
/// are set again, and as they were read.
const LITTLE: &str = "
import mmap, resource, select, socket
listener = socket.create_server(('10.9.0.1', 7))
select.select([listener], [], [], 0)
for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
    little = (200 << 20, resource.getrlimit(kind)[1])
    resource.setrlimit(kind, little)
    now = resource.getrlimit(kind)
    for again in (little, now, little):
        resource.setrlimit(kind, again)
        print(resource.getrlimit(kind) == now)
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000 # MAP_NORESERVE: the limit alone refuses it
taken = mmap.mmap(-1, 64 << 20, flags=private)
try:
    mmap.mmap(-1, now[0] + (1 << 20), flags=private)
except OSError as error:
    print(error.errno)
connection, peer = listener.accept()
print(connection.recv(100).decode(), flush=True)
connection.sendall(b'answer')
";

pub(crate) fn little_memory() {
    let hosts = Hosts::new();
    for config in [Some(CONFIG), None] {
        thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&hosts));
            let lines = hosts.lines(Command::new("python3").args(["-c", LITTLE]), config);
            let (stay, others) = lines.split_at_checked(6).expect("the program printed less");
            assert!(stay.iter().all(|stays| stays == "True"), "{config:?}: {stay:?}");
            assert_eq!(others, ["12", "question"], "{config:?}");
            assert_eq!(asked.join().unwrap(), "answer");
        });
    }
}

/// Has a UDP socket, a listener and a connection, whose options the program sets, in a process that may have few
/// descriptors. Their numbers are low, and those of the library are not. A thread of the library that opens a descriptor at
/// the same moment has the lowest number for that long.
const LOW: &str = "
import os, resource, socket, sys
limit = int(sys.argv[1])
numbers = lambda: {int(it) for it in os.listdir('/proc/self/fd')}
before = numbers()
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('10.9.0.1', 7))
listener = socket.create_server(('10.9.0.1', 7))
connection, peer = listener.accept()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
print(all(number < 16 for number in (udp.fileno(), listener.fileno(), connection.fileno(), os.dup(0))))
udp.sendto(b'datagram', ('10.9.0.2', 9))
print(udp.recv(100), connection.recv(100))
connection.sendall(b'answer')
if 'FOREBAY_EXEC' in os.environ:
    others = sorted(numbers() - before)[4:]
    assert limit // 2 <= others[0] and len(others) > 5, others
";

pub(crate) fn low_limits() {
    let config = "via=af_packet take=udp:7,tcp:7 spin=auto dev=exa";
    for limit in ["64", "256"] {
        let told = |config| {
            let hosts = Hosts::with_echo();
            thread::scope(|scope| {
                let asked = scope.spawn(|| ask(&hosts));
                let mut program = Command::new("python3");
                let lines = hosts.lines(program.args(["-c", LOW, limit]), config);
                assert_eq!(asked.join().unwrap(), "answer");
                lines
            })
        };
        assert_eq!(told(Some(config)), told(None), "{limit}");
    }
}
