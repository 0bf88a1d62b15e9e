//! Sockets that a program adds to a set of `epoll` before it binds them.

use std::process::Command;
use std::thread;

use super::Hosts;
use super::forks::ask;

/// Adds a UDP socket to two sets before `bind`, and a TCP socket before `listen`, in the way of the argument, and prints what the
/// sets tell of them.
const REGISTERS: &str = "
import select, socket, sys
way = getattr(select, sys.argv[1], 0)
sets = [select.epoll(), select.epoll()]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for each in sets:
    each.register(udp, select.EPOLLIN | way)
udp.bind(('10.9.0.1', 7))
for _ in range(3):
    print(sets[0].poll(0))
    udp.sendto(b'question', ('10.9.0.2', 9))
    for each in sets:
        print('udp', [(number == udp.fileno(), events) for number, events in each.poll(20)])
    print(udp.recv(100))
    for each in sets:
        each.modify(udp, select.EPOLLIN | way)
for each in sets:
    each.unregister(udp)
tcp = socket.socket()
tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
tcp.bind(('10.9.0.1', 7))
sets[0].register(tcp, select.EPOLLIN | way)
tcp.listen()
print('tcp', [(number == tcp.fileno(), events) for number, events in sets[0].poll(20)])
connection, peer = tcp.accept()
print(connection.recv(100))
connection.sendall(b'answer')
sets[0].unregister(tcp)
try:
    sets[0].unregister(tcp)
except FileNotFoundError:
    print('no longer registered')
";

pub(crate) fn outlive_binding(via: &str) {
    for way in ["level", "EPOLLET", "EPOLLONESHOT"] {
        let told = |config: Option<&str>| {
            let hosts = Hosts::with_echo();
            thread::scope(|scope| {
                let asked = scope.spawn(|| ask(&hosts));
                let mut command = Command::new("python3");
                let lines = hosts.lines(command.args(["-c", REGISTERS, way]), config);
                assert_eq!(asked.join().unwrap(), "answer", "{way}");
                lines
            })
        };
        let ours = told(Some(&format!("via={via} take=udp:7,tcp:7 spin=auto dev=exa")));
        assert_eq!(ours, told(None), "{way}");
    }
}
