//! Connections as `explain` tells them.

use std::io::{Read, Write};
use std::net::TcpStream as KernelStream;
use std::process::Command;

use forebay::net::{NetConfig, TcpListener, TcpStream};
use forebay_control::explain::explain;
use forebay_stack::tcp::Limit;

use crate::sockets::rig::{OURS, Running, over_tap};
use crate::tcp::Trial;
use crate::tcp::streams::{LONG, fill};

pub(crate) const TRIALS: &[Trial] = &[("tcp_30_explain_tells_where_bytes_wait", told)];

/// The kernel counts the same bytes and segments at its end.
fn compare_with_ss(ours: &TcpStream) {
    let tally = || ours.info().unwrap().tally;
    let filter = format!("-tinHO dport = :{}", ours.local_addr().port());
    let told = || {
        let output = Command::new("ss").args(filter.split(' ')).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // Until the ACK of our last segment has come.
    let line = loop {
        let line = told();
        if of_ss(&line, "bytes_acked") == tally().bytes_received + 1 {
            break line;
        }
    };
    let ours = tally();
    assert_eq!(of_ss(&line, "segs_out"), u64::from(ours.segs_in), "{line} {ours:?}");
    assert_eq!(of_ss(&line, "data_segs_out"), u64::from(ours.data_segs_in), "{line} {ours:?}");
    // The SYN-ACK was the listener's.
    assert_eq!(of_ss(&line, "segs_in"), u64::from(ours.segs_out) + 1, "{line} {ours:?}");
}

/// A number of `ss -i`; 0 if it does not say one.
fn of_ss(line: &str, name: &str) -> u64 {
    let of = |word: &str| word.strip_prefix(name)?.strip_prefix(':')?.parse().ok();
    line.split_whitespace().find_map(of).unwrap_or(0)
}

/// Bytes that nobody reads, at both ends.
fn told() {
    let (net, engine) = over_tap(&NetConfig::default());
    let listener = TcpListener::bind(&net, format!("{OURS}:7")).unwrap();
    let control = engine.control();
    let running = Running::begin(engine);
    let mut kernels = KernelStream::connect(listener.local_addr()).unwrap();
    let (mut ours, peer) = listener.accept().unwrap();
    let by_name = format!("tcp {peer} > {OURS}:7").parse().unwrap();
    kernels.write_all(b"hello").unwrap();
    ours.set_read_timeout(Some(LONG)).unwrap();
    ours.peek(&mut [0; 5]).unwrap();
    let idle = explain(&control, &by_name).unwrap();
    let [connection] = &idle.connections[..] else { panic!("not one connection: {idle}") };
    assert_eq!((connection.local, connection.peer), (ours.local_addr(), peer));
    assert_eq!(connection.state, "ESTAB");
    assert_eq!(connection.waits, ["5 bytes for the application to read them"]);
    let info = ours.info().unwrap();
    assert_eq!(info.resent.total(), 0);
    assert!(idle.to_string().contains("  info:  ts sack cubic wscale:"), "{idle}");
    compare_with_ss(&ours);

    // The same connection by the hash of its packets, and from its other end.
    for name in [format!("{:08x}", idle.hash.0), format!("tcp {OURS}:7 > {peer}")] {
        let same = explain(&control, &name.parse().unwrap()).unwrap();
        assert_eq!(same.connections.len(), 1, "{same}");
        assert_eq!(same.document()["connections"][0]["info"]["app_limited"], true, "{same}");
    }

    let written = fill(&mut ours);
    assert_eq!(ours.info().unwrap().limit, Limit::PeerWindow);
    let full = explain(&control, &by_name).unwrap();
    assert!(full.to_string().contains("the peer's window is full (rwnd_limited)"), "{full}");
    let [of_reader, of_peer @ ..] = &full.connections[0].waits[..] else { panic!("{full}") };
    assert_eq!(of_reader, "5 bytes for the application to read them");
    assert!(of_peer.last().is_some_and(|wait| wait.contains(" bytes not sent: ")), "{full}");

    let other = explain(&control, &format!("tcp {peer} > {OURS}:8").parse().unwrap()).unwrap();
    assert!(other.connections.is_empty(), "{other}");
    drop((ours, listener));
    kernels.set_read_timeout(Some(LONG)).unwrap();
    let mut came = 0;
    while let Ok(len @ 1..) = kernels.read(&mut [0; 65536]) {
        came += len;
    }
    // Our end reset the connection, as it had not read everything.
    assert!(came <= written);
    running.end();
}
