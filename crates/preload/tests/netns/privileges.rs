//! A program that gives up its privileges before its first socket.

use std::process::Command;
use std::{fs, thread};

use super::forks::ask;
use super::{Hosts, preloaded};

/// Becomes a user without capabilities, and answers then over UDP and TCP.
const UNPRIVILEGED: &str = "
import os, socket
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(('10.9.0.1', 7))
datagrams.sendto(b'datagram', ('10.9.0.2', 9))
print(datagrams.recv(100).decode())
listener = socket.create_server(('10.9.0.1', 7))
connection, peer = listener.accept()
print(connection.recv(100).decode())
connection.sendall(b'answer')
print([line.split()[1] for line in open('/proc/self/net/snmp') if line.startswith('Udp:')][1])
";

/// Starts the program in the process that opens the devices, as `forebay exec --open-at-start`.
const OPENED: &str = "FOREBAY_EXEC=\"$FOREBAY_EXEC opened_by=$$\" exec python3 -c \"$0\"";

pub(crate) fn none_are_needed() {
    let config = "via=af_packet take=udp:7,tcp:7 spin=auto dev=exa";
    let hosts = Hosts::with_echo();
    hosts.near.run(|| fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0").unwrap());
    thread::scope(|scope| {
        let asked = scope.spawn(|| ask(&hosts));
        let mut program = Command::new("sh");
        let lines = hosts.lines(program.args(["-c", OPENED, UNPRIVILEGED]), Some(config));
        assert_eq!(lines, ["datagram", "question", "0"], "the last: datagrams of the kernel's UDP");
        assert_eq!(asked.join().unwrap(), "answer");
    });
    let mut program = Command::new("python3");
    let program = preloaded(program.args(["-c", UNPRIVILEGED]), config);
    let failed = hosts.near.run(|| program.output().unwrap());
    let told = String::from_utf8_lossy(&failed.stderr);
    assert!(told.contains("needs CAP_NET_RAW") && told.contains("--open-at-start"), "{told}");
}
