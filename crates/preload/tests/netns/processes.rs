//! Descriptors that processes keep for others, and news of the ends of others.

use std::process::Command;

use super::Hosts;
use super::forks::{CONFIG, FORBIDS};

/// Forks children that serve in turn, and counts its descriptors after each. One fork fails to open the devices, for
/// want of descriptors: the next but one does not.
const COUNTS: &str = "
import os, resource, select, signal, socket, time
listener = socket.create_server(('10.9.0.1', 7))
answers, answered = os.pipe()
children = []

def names():
    others = set(os.listdir('/proc/self/task')) - {str(os.getpid())}
    return [open('/proc/self/task/%s/comm' % task).read() for task in others]

def fork():
    child = os.fork()
    if child:
        children.append(child)
        return os.read(answers, 1)
    signal.alarm(60)
    select.select([listener], [], [], 0)
    while not all(name.startswith('forebay') for name in names()):
        pass # a thread gives itself its name
    os.write(answered, b'1' if 'forebay-engine\\n' in names() else b'0')
    signal.pause()

count = lambda: len(os.listdir('/proc/self/fd'))
serving, counts = [], []
for _ in range(4):
    serving.append(fork())
    counts.append(count())
print(serving, len(set(counts[1:])), flush=True)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(count() == counts[-1])
time.sleep(1.2)
print(fork(), count() == counts[-1])
for child in children:
    os.kill(child, signal.SIGKILL)
";

pub(crate) fn engines_are_closed() {
    let hosts = Hosts::new();
    let lines = hosts.lines(Command::new("python3").args(["-c", COUNTS]), Some(CONFIG));
    assert_eq!(lines, ["[b'1', b'1', b'1', b'1'] 1", "True", "b'1' True"]);
}

/// Forks many times while a thread takes the locks of listeners. Each child asks for one: it serves beside its parent.
const LOCKS: &str = "
import errno, os, select, signal, socket, threading
listener = socket.create_server(('10.9.0.1', 7))
listener.setblocking(False)
select.select([listener], [], [], 0)

def lock():
    while not has_ended:
        other = socket.socket()
        other.setsockopt(socket.IPPROTO_IP, 15, 1) # IP_FREEBIND
        try:
            other.bind(('10.9.0.99', 7)) # not while a child has a copy of the last
            other.listen()
        except OSError:
            other.close()

def child():
    signal.alarm(20)
    try:
        listener.accept()
    except OSError as error:
        os._exit(error.errno)

has_ended = False
locks = threading.Thread(target=lock)
locks.start()
ends = set()
for _ in range(50):
    pid = os.fork() or child()
    end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ends.add(errno.errorcode.get(end, end))
    if end < 0:
        break
print(ends)
has_ended = True
locks.join()
";

pub(crate) fn locks_are_free() {
    let hosts = Hosts::new();
    let lines = hosts.lines(Command::new("python3").args(["-c", LOCKS]), Some(CONFIG));
    assert_eq!(lines, ["{'EAGAIN'}"]);
}

/// Forks two children: the second waits for the end of the first without the right to open the devices.
const FAILS: &str = "
import ctypes, errno, os, select, signal, socket
signal.alarm(60)
listener = socket.create_server(('10.9.0.1', 7))
steps = [os.pipe() for _ in range(3)]
done = lambda step: os.write(steps[step][1], b'x')
after = lambda step: os.read(steps[step][0], 1)
if os.fork() == 0:
    signal.alarm(60)
    after(0)
    select.select([listener], [], [], 0)
    done(1)
    after(2)
    os._exit(0)
forbid()
if os.fork() == 0:
    signal.alarm(60)
    after(1)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
    waits = select.epoll()
    waits.register(listener, select.EPOLLIN)
    print(waits.poll(0), flush=True)
    done(2)
    print(len(waits.poll(20)), flush=True)
    try:
        listener.accept()
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    os._exit(0)
done(0)
os.wait(), os.wait()
";

pub(crate) fn failed_turn() {
    let hosts = Hosts::new();
    let lines = hosts
        .lines(Command::new("python3").args(["-c", &(FORBIDS.to_owned() + FAILS)]), Some(CONFIG));
    assert_eq!(lines, ["[]", "1", "ENODEV"]);
}

/// Forks twice with too few descriptors for what its children are to share, and once with enough.
const SHARES: &str = "
import os, resource
free = os.dup(0)
os.close(free)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for limit in free + 1, free + 1, soft:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    print(len(os.listdir('/proc/self/fd')) > 4 if limit == soft else None)
";

pub(crate) fn failed_lock() {
    let hosts = Hosts::new();
    let mut command = Command::new("python3");
    let (lines, errors) = hosts.lines_and_errors(command.args(["-c", SHARES]), Some(CONFIG));
    assert_eq!(lines, ["None", "None", "True"], "the last fork has made it");
    let is_told = errors.contains("know of each other") && errors.contains("(ulimit -n)");
    assert!(is_told && errors.lines().count() == 1, "{errors}");
}

/// Is killed while a child lives that serves nothing, and begins anew.
const KILLED: &str = "
import os, select, signal, socket
def serve():
    listener = socket.create_server(('10.9.0.1', 7))
    select.select([listener], [], [], 0)
    return listener

children, child = os.pipe()
first = os.fork()
if first == 0:
    listener = serve()
    if os.fork() == 0:
        signal.alarm(60)
        listener.close()
        os.write(child, b'%d' % os.getpid())
    signal.pause()
left = int(os.read(children, 20))
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
try:
    serve()
    os.stat('program.sock')
    print('serves')
finally:
    os.kill(left, signal.SIGKILL)
";

pub(crate) fn socket_is_replaced() {
    let hosts = Hosts::new();
    let folder = tempfile::tempdir().unwrap();
    let config = format!("{CONFIG} control={}", folder.path().join("program.sock").display());
    let mut command = Command::new("python3");
    command.args(["-c", KILLED]).current_dir(folder.path());
    let (lines, errors) = hosts.lines_and_errors(&mut command, Some(&config));
    assert_eq!((lines, errors), (vec!["serves".to_owned()], String::new()));
}

/// Serves in spite of a control socket that cannot be made.
const UNCONTROLLED: &str = "
import select, socket
listener = socket.create_server(('10.9.0.1', 7))
print(select.select([listener], [], [], 0))
";

pub(crate) fn without_control() {
    let hosts = Hosts::new();
    let config = format!("{CONFIG} control=/nowhere/program.sock");
    let mut command = Command::new("python3");
    let (lines, errors) = hosts.lines_and_errors(command.args(["-c", UNCONTROLLED]), Some(&config));
    assert_eq!(lines, ["([], [], [])"]);
    assert!(errors.contains("/nowhere/program.sock"), "{errors}");
}
