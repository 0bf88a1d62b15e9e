//! Calls in all modes: the program of `matrix/` makes them, and its peer in the far namespace does what it is told.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;

use forebay_testkit::namespaces::cable::Namespace;

use super::Hosts;

/// Parts of the program, of which the last one runs it, in two strings: an argument is no longer than 128 KiB
/// (`MAX_ARG_STRLEN`).
const CALLS: [&str; 2] = [
    concat!(
        include_str!("matrix/rig.py"),
        include_str!("matrix/listeners.py"),
        include_str!("matrix/bytes.py"),
        include_str!("matrix/ends.py"),
        include_str!("matrix/bounds.py"),
        include_str!("matrix/signals.py"),
        include_str!("matrix/datagrams.py"),
        include_str!("matrix/lengths.py"),
    ),
    concat!(
        include_str!("matrix/modes.py"),
        include_str!("matrix/families.py"),
        include_str!("matrix/sharing.py"),
        include_str!("matrix/groups.py"),
        include_str!("matrix/sources.py"),
        include_str!("matrix/states.py"),
        include_str!("matrix/vectors.py"),
        include_str!("matrix/settings.py"),
        include_str!("matrix/marks.py"),
        include_str!("matrix/many.py"),
        include_str!("matrix/main.py"),
    ),
];

/// Program of its arguments.
const RUN: &str = "import sys; exec(sys.argv.pop(1) + sys.argv.pop(1))";

/// Python with the program.
fn python() -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", RUN]).args(CALLS);
    command
}

/// Peer, until the value is dropped.
struct Peer(Child);

impl Peer {
    fn start(hosts: &Hosts) -> Self {
        let mut command = python();
        command.arg("peer").stdout(Stdio::piped());
        let mut child = hosts.far.run(|| command.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

/// Gives a device an IPv6 address, which those of the tests lack.
fn with_ipv6(host: &Namespace, device: &str, address: &str) {
    let path = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
    host.run(|| std::fs::write(path, "0").unwrap());
    host.command(&format!("ip addr add {address} dev {device} nodad"));
}

/// Lines of the program, the last of which tells what the kernel's sockets received.
fn answers(config: Option<&str>) -> Vec<String> {
    let hosts = Hosts::new();
    with_ipv6(&hosts.near, "exa", "fd09::1/64");
    with_ipv6(&hosts.far, "exb", "fd09::2/64");
    hosts.near.command("ip addr add 10.9.0.3/24 dev exa"); // chosen by `sources`
    hosts.near.command("ip link set lo up");
    for limit in ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"] {
        hosts.far.run(|| std::fs::write(format!("/proc/sys/net/{limit}"), "0").unwrap()); // answers all
    }
    let _peer = Peer::start(&hosts);
    hosts.lines(&mut python(), config)
}

pub(crate) fn same_answers(via: &str) {
    static OF_KERNEL: OnceLock<Vec<String>> = OnceLock::new();
    let config = format!("via={via} take=udp:7,tcp:7,udp:17,tcp:17 spin=auto dev=exa");
    // Side by side: both mostly wait.
    let (mut kernels, mut ours) = thread::scope(|scope| {
        let kernels = scope.spawn(|| OF_KERNEL.get_or_init(|| answers(None)).clone());
        let ours = answers(Some(&config));
        (kernels.join().unwrap(), ours)
    });
    assert_ne!(kernels.pop().unwrap(), "kernel 0");
    assert_eq!(ours.pop().unwrap(), "kernel 0", "the sockets were not ours");
    let different: Vec<_> =
        ours.iter().zip(&kernels).filter(|(ours, kernels)| ours != kernels).collect();
    assert!(different.is_empty(), "our answers and the kernel's: {different:#?}");
    assert_eq!(ours.len(), kernels.len());
}
