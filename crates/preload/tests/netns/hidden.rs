//! Descriptors that the program does not know: it neither sees them nor closes them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::{Hosts, NEAR};

/// Has a second thread, a UDP socket, a listener and a connection with options of its own. Prints their numbers and those
/// that are open, closes all that it has not opened, in one of several ways, and opens others in their place. Its
/// sockets go on, and nothing comes to the others.
const CLOSES: &str = "
import ctypes, errno, fcntl, os, resource, select, signal, socket, sys, threading
signal.alarm(60)
libc, way = ctypes.CDLL(None, use_errno=True), sys.argv[1]
started = threading.Event()
threading.Thread(target=lambda: (started.set(), threading.Event().wait()), daemon=True).start()
started.wait()
def succeeds(call, *arguments):
    try:
        call(*arguments)
        return True
    except OSError:
        return False

end = min(5500, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
before = [it for it in range(3, end) if succeeds(fcntl.fcntl, it, fcntl.F_GETFD)]
print('before', before)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('10.9.0.1', 7))
listener = socket.create_server(('10.9.0.1', 7))
connection, peer = listener.accept()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
own = [it.fileno() for it in (udp, listener, connection)]
print('own', own)

def others(call, *arguments):
    return [it for it in range(3, end - 1) if it not in own and succeeds(call, it, *arguments)]

def refused(*arguments):
    ctypes.set_errno(0)
    return libc.dup3(*arguments), errno.errorcode.get(ctypes.get_errno())

def unopened(call, *arguments):
    # Files of the time of a call are open for a moment.
    while not set(others(call, *arguments)) <= set(before):
        pass
    return True

print('open', unopened(fcntl.fcntl, fcntl.F_GETFD), unopened(lambda it: os.close(os.dup(it))), unopened(lambda it: os.close(os.dup2(it, end - 1))))
print('used', unopened(os.read, 0), unopened(os.write, b''), unopened(os.readv, [bytearray(0)]), unopened(os.writev, [b'']))
closed = [it for it in range(3, end) if it not in own + before]
for of in (lambda it: (it, it, 0), lambda it: (it, end - 1, 1), lambda it: (it, end - 1, 0), lambda it: (end - 1, it, 0)):
    print('refused', sorted({refused(*of(it)) for it in closed}))
if way == 'close':
    print('closed', others(os.close))
else:
    first = 3
    for number in sorted(own):
        if first < number:
            print(libc.close_range(first, number - 1, 0))
        first = number + 1
    print(libc.closefrom(first) if way == 'closefrom' else libc.close_range(first, 2 ** 32 - 1, 0))
placed = [socket.socketpair() for _ in range(200)]
print('placed', all(it.fileno() < 512 for pair in placed for it in pair))
for _ in range(3):
    udp.sendto(b'datagram', ('10.9.0.2', 9))
    print(select.select([udp], [], [], 20)[0] == [udp], udp.recv(100))
    print(select.select([connection], [], [], 20)[0] == [connection], connection.recv(8))
    connection.sendall(b'answered')
print('end', connection.recv(8))
connection.close()
print('next', listener.accept()[0].recv(8))
listener.close()
udp.close()
print('strays', select.select([it for pair in placed for it in pair], [], [], 0)[0])
print('alive', all(pair[0].send(b'x') == 1 and pair[1].recv(9) == b'x' for pair in placed))
";

/// Waits for each number that the library may use, beside a socket, in every way, and asks about it.
const ASKS: &str = "
import ctypes, errno, fcntl, os, select, signal, socket, struct, termios
signal.alarm(60)
os.dup2(0, 1023) # the kernel does not look at numbers beyond its table of them
libc = ctypes.CDLL(None, use_errno=True)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('10.9.0.1', 7))
epoll = select.epoll()
event, second = struct.pack('=IQ', select.EPOLLIN, 0), struct.pack('ll', 1, 0)
chk, one = ctypes.c_ulong(16), ctypes.c_size_t(1)
file, full = os.open('/proc/self/exe', os.O_RDONLY), os.pipe()
os.write(full[1], b'x')

def is_closed(number):
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return True

def answer(call, *arguments):
    ctypes.set_errno(0)
    return call(*arguments), errno.errorcode.get(ctypes.get_errno())

def polled(call, number, *arguments):
    both = struct.pack('ihh', udp.fileno(), select.POLLIN, 0) + struct.pack('ihh', number, select.POLLIN, 0)
    room = ctypes.create_string_buffer(both, 16)
    found = answer(call, room, ctypes.c_ulong(2), *arguments)
    return found, struct.unpack('ihhihh', room)[1:3], struct.unpack('ihhihh', room)[3] == number, struct.unpack('ihhihh', room)[4:]

def selected(call, number, place, *arguments):
    sets = [ctypes.create_string_buffer(128) for _ in range(3)]
    sets[place][number // 8] = 1 << number % 8
    # Those from the count on do not matter.
    assert call(number, *sets, ctypes.create_string_buffer(16), *arguments[1:]) == 0
    sets[place][number // 8] = 1 << number % 8
    return answer(call, 1024, *sets, *arguments)

for name, ask in {
    'poll': lambda it: polled(libc.poll, it, -1),
    'ppoll': lambda it: polled(libc.ppoll, it, None, None),
    'poll_chk': lambda it: polled(libc.__poll_chk, it, -1, chk),
    'ppoll_chk': lambda it: polled(libc.__ppoll_chk, it, None, None, chk),
    'select': lambda it: {selected(libc.select, it, place, None) for place in range(3)},
    'pselect': lambda it: {selected(libc.pselect, it, place, None, None) for place in range(3)},
    'add': lambda it: answer(libc.epoll_ctl, epoll.fileno(), 1, it, event),
    'set': lambda it: answer(libc.epoll_ctl, it, 1, udp.fileno(), event),
    'epoll_wait': lambda it: answer(libc.epoll_wait, it, event, 1, 0),
    'epoll_pwait': lambda it: answer(libc.epoll_pwait, it, event, 1, 0, None),
    'epoll_pwait2': lambda it: answer(libc.epoll_pwait2, it, event, 1, second, None),
    'sendfile to': lambda it: answer(libc.sendfile, it, file, None, one),
    'sendfile from': lambda it: answer(libc.sendfile, full[1], it, None, one),
    'splice to': lambda it: answer(libc.splice, full[0], None, it, None, one, 0),
    'splice from': lambda it: answer(libc.splice, it, None, full[1], None, one, 0),
    'ioctl': lambda it: answer(libc.ioctl, it, termios.FIONREAD, event),
}.items():
    answers = [repr(ask(it)) for it in range(512, 1024) if is_closed(it)]
    print(name, len(answers), sorted(set(answers)))
";

pub(crate) fn none_are_found() {
    let hosts = Hosts::new();
    let run = |config| hosts.lines(Command::new("python3").args(["-c", ASKS]), config);
    let config = "via=af_packet take=udp:7 spin=auto dev=exa";
    assert_eq!(run(Some(config)), run(None));
}

/// Time between two looks for the end of the program.
const LOOK: Duration = Duration::from_millis(100);

/// Connects from the far host until there is an answer, asks three times, and connects again, unless the program has
/// ended.
fn converse(hosts: &Hosts, has_ended: impl Fn() -> bool + Sync) {
    let hear = |mut stream: &TcpStream| -> io::Result<usize> {
        stream.set_read_timeout(Some(LOOK))?;
        loop {
            match stream.read(&mut [0; 8]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && !has_ended() => {}
                heard => return heard,
            }
        }
    };
    let begin = || -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(NEAR)?;
        stream.write_all(b"question")?;
        hear(&stream)?;
        Ok(stream)
    };
    hosts.far.run(|| {
        let mut stream = loop {
            match begin() {
                Ok(stream) => break stream,
                Err(_) if has_ended() => return,
                Err(_) => thread::yield_now(),
            }
        };
        let mut talk = || -> io::Result<usize> {
            for _ in 0..2 {
                stream.write_all(b"question")?;
                hear(&stream)?;
            }
            stream.shutdown(Shutdown::Both)?;
            let mut next = TcpStream::connect(NEAR)?;
            next.write_all(b"the next")?;
            hear(&next)
        };
        // Ignored: the program's lines tell what has failed.
        let _ = talk();
    });
}

fn closed(hosts: &Hosts, way: &str, config: Option<&str>) -> Vec<String> {
    thread::scope(|scope| {
        let lines =
            scope.spawn(|| hosts.lines(Command::new("python3").args(["-c", CLOSES, way]), config));
        converse(hosts, || lines.is_finished());
        lines.join().unwrap()
    })
}

pub(crate) fn all_are_closed(via: &str) {
    let hosts = Hosts::with_echo();
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("program.sock");
    let taken = format!("via={via} take=udp:7,tcp:7 spin=auto dev=exa");
    let config = format!("{taken} control={}", control.display());
    for way in ["close", "close_range", "closefrom"] {
        let kernels = closed(&hosts, way, None);
        let ours = closed(&hosts, way, Some(&config));
        assert_eq!(ours, kernels, "{way}");
    }
}
