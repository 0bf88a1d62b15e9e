//! Listeners and their connections in one process.

use std::process::Command;
use std::thread;

use super::Hosts;
use super::forks::CONFIG;

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
