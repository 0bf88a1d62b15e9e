//! Handlers of signals that use the sockets of the thread that they interrupt.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;

use super::{Hosts, NEAR};

const PROGRAM: &str = include_str!("handlers.c");

/// Connects from the far host once the program listens, and returns each byte until its end.
fn converse(hosts: &Hosts) {
    hosts.far.run(|| {
        let mut stream = loop {
            match TcpStream::connect(NEAR) {
                Ok(stream) => break stream,
                Err(_) => thread::yield_now(),
            }
        };
        let mut bytes = [0; 4096];
        // The program ends with bytes unread, which resets the connection.
        while let Ok(len) = stream.read(&mut bytes)
            && len > 0
            && stream.write_all(&bytes[..len]).is_ok()
        {}
    });
}

pub(crate) fn sockets_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let [source, program] = ["handlers.c", "handlers"].map(|name| folder.path().join(name));
    std::fs::write(&source, PROGRAM).unwrap();
    let mut cc = Command::new("cc");
    assert!(
        cc.args(["-D_GNU_SOURCE", "-w", "-o"])
            .args([&program, &source])
            .status()
            .unwrap()
            .success()
    );
    let run = |config| {
        let hosts = Hosts::with_echo();
        thread::scope(|scope| {
            scope.spawn(|| converse(&hosts));
            hosts.lines(&mut Command::new(&program), config)
        })
    };
    let ours = run(Some("via=af_packet take=udp:7,tcp:7 spin=auto dev=exa"));
    assert_eq!(ours.last().unwrap(), "handled, 0");
    assert_eq!(ours, run(None));
}
