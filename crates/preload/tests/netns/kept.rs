//! Listeners that a process keeps as it runs another program.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::forks::{CONFIG, FORBIDS, ask};
use super::{Hosts, NEAR};

/// Pause before more is written to a process that may be dead.
const WRITE_AGAIN: Duration = Duration::from_millis(300);

/// Functions of the programs below. `serve` is a program that serves connections of the listener at its number, each by the
/// number of its process, until one sends `end`.
const COMMON: &str = "
import ctypes, os, select, signal, socket, sys, threading
signal.alarm(60)
libc = ctypes.CDLL(None)
SERVES = '''
import os, select, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
if listener.getsockname() != ('10.9.0.1', 7) or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
    print('not the listener', flush=True)
waits = select.epoll()
waits.register(listener, select.EPOLLIN)
while True:
    waits.poll()
    connection, peer = listener.accept()
    asked = connection.recv(100)
    connection.sendall(b'%d' % os.getpid())
    connection.close()
    if asked == b'end':
        break
print('ended', flush=True)
'''

def arguments(number):
    return [sys.executable, '-c', SERVES, str(number)]

def listens():
    listener = socket.create_server(('10.9.0.1', 7))
    os.set_inheritable(listener.fileno(), True)
    return listener

def child(run):
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(99)
    return pid

def words(given):
    return [ctypes.c_char_p(word.encode()) for word in given] + [None]

def strings(words):
    return (ctypes.c_char_p * (len(words) + 1))(*[word.encode() for word in words], None)
";

/// Runs `serve` in the way that its argument names.
const WAYS: &str = "
listener = listens()
number = listener.fileno()
program = arguments(number)
ways = {
    'execv': lambda: os.execv(program[0], program),
    'execve': lambda: os.execve(program[0], program, {}),
    'execvp': lambda: os.execvp('env', ['env'] + program),
    'execvpe': lambda: libc.execvpe(b'env', strings(['env'] + program), strings(['A=1'])),
    'execveat': lambda: libc.execveat(
        os.open('/usr/bin', os.O_RDONLY), b'env', strings(['env'] + program), strings(['LD_PRELOAD=']), 0),
    'execl': lambda: libc.execl(program[0].encode(), *words(program)),
    'execl of many': lambda: libc.execl(b'/usr/bin/env', *words(['env'] + 20 * ['A=1'] + program)),
    'execlp': lambda: libc.execlp(b'env', *words(['env'] + program)),
    'execle': lambda: libc.execle(program[0].encode(), *words(program), strings(['A=1'])),
    'fexecve': lambda: os.execve(os.open(program[0], os.O_RDONLY), program, {}),
    'syscall': lambda: libc.syscall(SYS_execve, program[0].encode(), strings(program), strings([])),
    'twice': lambda: os.execv('/bin/sh', ['sh', '-c', 'exec \"$@\"', 'sh'] + program),
    'fork of the next': lambda: os.execv('/bin/sh', ['sh', '-c', '\"$@\"; true', 'sh'] + program),
}
SYS_execve = 59 if os.uname().machine == 'x86_64' else 221
way = sys.argv[1]
if way == 'standard input':
    os.dup2(number, 0)
    listener.close()
    os.execv(program[0], arguments(0))
if way == 'closes others':
    os.closerange(3, number)
    os.closerange(number + 1, 70000)
    os.execv(program[0], program)
if way == 'vfork':
    import subprocess
    subprocess.run(program, pass_fds=[number])
elif way in ('served', 'threads'):
    select.select([listener], [], [], 0)
    if way == 'threads':
        ends = threading.Event()
        for run in [listener.accept] + 3 * [lambda: [os.close(os.dup(number)) for _ in range(1 << 30)]]:
            threading.Thread(target=run, daemon=True).start()
    os.execv(program[0], program)
elif way == 'failures':
    open_before = len(os.listdir('/proc/self/fd'))
    for _ in range(50):
        for path in '/nowhere', '/proc/version':
            try:
                os.execv(path, ['x'])
            except OSError:
                pass
    print(len(os.listdir('/proc/self/fd')) - open_before, flush=True)
    os.execv(program[0], program)
else:
    os.waitpid(child(ways[way]), 0)
";

fn program(text: &str) -> String {
    [COMMON, text].concat()
}

/// Asks the server to end, and returns its answer.
fn end(hosts: &Hosts) -> String {
    hosts.far.run(|| {
        loop {
            match exchange("end") {
                Some(answer) => return answer,
                None => thread::yield_now(),
            }
        }
    })
}

pub(crate) fn next_program_serves() {
    let ways = [
        "execv",
        "execve",
        "execvp",
        "execvpe",
        "execveat",
        "execl",
        "execl of many",
        "execlp",
        "execle",
        "fexecve",
        "syscall",
        "twice",
        "fork of the next",
        "standard input",
        "closes others",
        "vfork",
        "served",
        "threads",
        "failures",
    ];
    for way in ways {
        let hosts = Hosts::new();
        thread::scope(|scope| {
            let ended = scope.spawn(|| end(&hosts));
            let mut command = Command::new("python3");
            let command = command.args(["-c", &program(WAYS), way]);
            let (lines, errors) = hosts.lines_and_errors(command, Some(CONFIG));
            let expected: &[_] = if way == "failures" { &["0", "ended"] } else { &["ended"] };
            assert_eq!(lines, expected, "{way}: {errors}");
            assert!(ended.join().unwrap().parse::<u32>().is_ok(), "{way}");
        });
    }
}

/// Runs programs by addresses at which there is no memory, with a listener to keep and without, and prints the errors.
const FAULTS: &str = "
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
page = os.sysconf('SC_PAGESIZE')
start = libc.mmap(None, ctypes.c_size_t(2 * page), 3, 34, -1, ctypes.c_long(0))
nowhere = start + page
libc.mprotect(ctypes.c_void_p(nowhere), ctypes.c_size_t(page), 0)
ctypes.memset(start, ord('a'), page)
endless = nowhere - 3
environment = lambda address: (ctypes.c_void_p * 2)(address, None)
pointers = ctypes.c_void_p.from_address(nowhere - ctypes.sizeof(ctypes.c_void_p))
path, none = b'/bin/true', strings(['true'])
for address in 1, nowhere, endless, 1 << 47, (1 << 64) - 8:
    for way, arguments in {
        'path': (ctypes.c_void_p(address), none, none),
        'argv': (path, ctypes.c_void_p(address), none),
        'word': (path, environment(address), none),
        'envp': (path, none, ctypes.c_void_p(address)),
        'variable': (path, none, environment(address)),
    }.items():
        for call in libc.execve, lambda *given: libc.syscall(SYS_execve, *given):
            print(way, call(*arguments), ctypes.get_errno())
pointers.value = ctypes.addressof(ctypes.create_string_buffer(b'A=1'))
print(libc.execve(path, none, ctypes.c_void_p(ctypes.addressof(pointers))), ctypes.get_errno(), flush=True)
os._exit(0)
";

pub(crate) fn without_memory_fails() {
    let number = "SYS_execve = 59 if os.uname().machine == 'x86_64' else 221\n";
    let run = |begin: &str, config| {
        let mut command = Command::new("python3");
        let command = command.args(["-c", &program(&[begin, number, FAULTS].concat())]);
        Hosts::new().lines(command, config)
    };
    let kernels = run("", None);
    assert!(
        kernels.len() == 51
            && kernels.iter().all(|line| line.ends_with(" -1 14") || line == "-1 14")
    );
    assert_eq!(run("listener = listens()\n", Some(CONFIG)), kernels);
    assert_eq!(run("", Some(CONFIG)), kernels);
}

/// Serves in a child, which answers `child`, and in a program that this has run in a child of its own. On the word `kill` the
/// first kills one of them.
const BESIDE: &str = "
listener = listens()

def serve():
    select.select([listener], [], [], 0)
    pid = child(lambda: os.execv(sys.executable, arguments(listener.fileno())))
    while True:
        connection, peer = listener.accept()
        asked = connection.recv(100)
        if asked == b'kill' and sys.argv[1] == 'child':
            os.kill(os.getpid(), signal.SIGKILL)
        if asked == b'kill':
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        connection.sendall(b'child')
        connection.close()
        if asked == b'end':
            os._exit(0)

os.waitpid(child(serve), 0)
";

pub(crate) fn serves_beside() {
    for killed in ["program", "child"] {
        let hosts = Hosts::new();
        let kill_and_end = || {
            let mut servers = BTreeSet::new();
            while servers.len() < 2 {
                servers.insert(ask(&hosts));
            }
            // The program answers, too, and does not know the word.
            while hosts.far.run(|| exchange("kill")).is_some_and(|answer| answer != "child") {}
            servers.retain(|server| (server == "child") == (killed == "program"));
            let left: BTreeSet<_> = (0..20).map(|_| ask(&hosts)).collect();
            assert_eq!(left, servers, "after the end of the {killed}");
            end(&hosts);
        };
        thread::scope(|scope| {
            let asking = scope.spawn(kill_and_end);
            let mut command = Command::new("python3");
            let command = command.args(["-c", &program(BESIDE), killed]);
            hosts.lines(command, Some(CONFIG));
            asking.join().unwrap();
        });
    }
}

/// Runs programs that are to have no listener, or cannot have one, and looks at what they find.
const OTHERS: &str = "
LOOKS = '''
import os, socket, sys
print(sorted(name for name in os.environ if name.startswith('FOREBAY')), flush=True)
print([number for number in sys.argv[1:] if os.path.exists('/proc/self/fd/' + number)], flush=True)
print([it for it in os.listdir('/proc/self/fd') if int(it) > 511], flush=True)
socket.create_server(('10.9.0.1', 7))
print('free', flush=True)
'''
listener = listens()
number = listener.fileno()
os.set_inheritable(number, sys.argv[1] != 'closed')
if sys.argv[1] == 'static':
    path = '/proc/self/fd/%d' % os.memfd_create('static')
    head = bytearray(64)
    head[:5] = b'\\x7fELF\\x02'
    open(path, 'wb').write(head)
    for _ in range(3):
        try:
            os.execv(path, ['static'])
        except OSError:
            pass
    os.set_inheritable(number, False)
if sys.argv[1] == 'forged':
    listener.close()
    os.environ['FOREBAY_KEPT'] = '%d:0:%d' % (os.getpid(), os.fstat(0).st_ino)
os.execv(sys.executable, [sys.executable, '-c', LOOKS, '0', '1', str(number)])
";

pub(crate) fn others_get_none() {
    for (way, is_told) in [("closed", false), ("static", true), ("forged", false)] {
        let hosts = Hosts::new();
        let mut command = Command::new("python3");
        let command = command.args(["-c", &program(OTHERS), way]);
        let (lines, errors) = hosts.lines_and_errors(command, Some(CONFIG));
        assert_eq!(lines, ["['FOREBAY_EXEC']", "['0', '1']", "[]", "free"], "{way}: {errors}");
        assert_eq!(errors.lines().count(), usize::from(is_told), "{way}: {errors}");
        assert_eq!(errors.contains("is linked statically"), is_told, "{way}: {errors}");
    }
}

/// Runs a program that gives up its privileges before it serves.
const GIVES_UP: &str = "
listener = listens()
program = arguments(listener.fileno())
program[2] = sys.argv[1] + 'forbid()\\n' + program[2]
os.waitpid(child(lambda: os.execv(program[0], program)), 0)
";

pub(crate) fn devices_are_opened() {
    let hosts = Hosts::new();
    thread::scope(|scope| {
        let ended = scope.spawn(|| end(&hosts));
        let mut command = Command::new("python3");
        let command = command.args(["-c", &program(GIVES_UP), FORBIDS]);
        let config = format!("{CONFIG} opened_by=1");
        assert_eq!(hosts.lines(command, Some(&config)), ["ended"]);
        ended.join().unwrap();
    });
}

/// Answer to a word. A process that is killed says nothing more: who writes again is told.
fn exchange(word: &str) -> Option<String> {
    let mut stream = TcpStream::connect(NEAR).ok()?;
    stream.write_all(word.as_bytes()).ok()?;
    stream.set_read_timeout(Some(WRITE_AGAIN)).ok()?;
    let mut answer = String::new();
    loop {
        match stream.read_to_string(&mut answer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => stream.write_all(b" ").ok()?,
            read => return read.ok().filter(|len| *len > 0).map(|_| answer),
        }
    }
}
