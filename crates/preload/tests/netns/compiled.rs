//! Programs in C, whose calls meet others: of handlers that interrupt them, and of other threads.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use super::{Hosts, NEAR};

const HANDLERS: &str = include_str!("handlers.c");
const CLOSES: &str = include_str!("closes.c");
const COPIES: &str = include_str!("copies.c");

const CONFIG: &str = "via=af_packet take=udp:7,tcp:7 spin=auto dev=exa";

/// Time between two looks for the end of the program.
const LOOK: Duration = Duration::from_millis(100);

fn compiled(folder: &Path, program: &str) -> PathBuf {
    let [source, compiled] = ["program.c", "program"].map(|name| folder.join(name));
    std::fs::write(&source, program).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-D_GNU_SOURCE", "-w", "-pthread", "-o"]).args([&compiled, &source]);
    assert!(cc.status().unwrap().success());
    compiled
}

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

pub(crate) fn handlers_use_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(folder.path(), HANDLERS);
    let run = |config| {
        let hosts = Hosts::with_echo();
        thread::scope(|scope| {
            scope.spawn(|| converse(&hosts));
            hosts.lines(&mut Command::new(&program), config)
        })
    };
    let ours = run(Some(CONFIG));
    assert_eq!(ours.last().unwrap(), "handled, 0");
    assert_eq!(ours, run(None));
}

/// Connects from the far host again and again, asks, and waits for the end, until the program has ended.
fn ask_until(hosts: &Hosts, has_ended: impl Fn() -> bool + Sync) {
    let ask = || -> io::Result<()> {
        let mut stream = TcpStream::connect(NEAR)?;
        stream.write_all(b"question")?;
        stream.set_read_timeout(Some(LOOK))?;
        while !has_ended() {
            match stream.read(&mut [0; 8]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                ended => return ended.map(drop),
            }
        }
        Ok(())
    };
    hosts.far.run(|| {
        while !has_ended() {
            // Ignored: the program may not listen yet, and resets connections with bytes unread.
            let _ = ask();
        }
    });
}

pub(crate) fn closing_spares_threads() {
    closes(CLOSES);
}

pub(crate) fn children_close_copies() {
    closes(COPIES);
}

fn closes(program: &str) {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(folder.path(), program);
    let hosts = Hosts::new();
    for config in [Some(CONFIG), None] {
        thread::scope(|scope| {
            let lines = scope.spawn(|| hosts.lines(&mut Command::new(&program), config));
            ask_until(&hosts, || lines.is_finished());
            assert_eq!(lines.join().unwrap(), ["closed, 0"]);
        });
    }
}
