//! Receives datagrams and counts them: `sink eth1 --bind 0.0.0.0:9000 [::]:9001`.
//!
//! Each socket is read by a thread of its own, as in an application that knows nothing of CPUs.

#[path = "ending/mod.rs"]
#[expect(dead_code, reason = "its report is JSON")]
mod ending;

use std::error::Error;
use std::net::SocketAddr;
use std::{io, thread};

use clap::Parser;
use forebay::net::counters::SocketCounts;
use forebay::net::{Datagrams, Net, UdpSocket};
use serde::Serialize;

use crate::ending::From;

/// Datagrams read at once.
const BATCH_MAX: usize = 64;

/// Receives what is sent to sockets and counts it
#[derive(Debug, Parser)]
struct Options {
    /// Where to receive; repeatable
    #[arg(long, value_name = "ADDR", num_args = 1.., required = true)]
    bind: Vec<SocketAddr>,

    /// Print one JSON document at the end and nothing else on standard output
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    from: From,
}

/// Counts of one socket.
#[derive(Debug, Serialize)]
struct Received {
    socket: SocketAddr,
    packets: u64,
    bytes: u64,
    /// Number of datagrams; each datagram of a merged packet counts.
    datagrams: u64,
    rcvbuf_errors: u64,
}

/// Report of the run.
#[derive(Debug, Serialize)]
struct Report {
    sockets: Vec<Received>,
    /// Frames that reached no socket, by reason.
    dropped: std::collections::BTreeMap<&'static str, u64>,
    frames_away: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let ports: Vec<String> =
        options.bind.iter().map(|address| format!("udp:{}", address.port())).collect();
    let mut devices = [options.from.open(&ports.join(","))?];
    let (net, engine) = Net::over(&options.from.config(), &options.from.net(), &mut devices)?;
    let sockets = options.bind.iter().map(|address| net.bind(address));
    let sockets = sockets.collect::<io::Result<Vec<_>>>()?;
    ending::stop_on_signals(engine.stopper())?;
    let readers = sockets.into_iter().map(|socket| thread::spawn(move || receive(&socket)));
    let readers: Vec<_> = readers.collect();
    let mut outcome = engine.run()?;
    let received = readers.into_iter().filter_map(|reader| reader.join().ok());
    let report = Report {
        sockets: received.collect(),
        dropped: ending::dropped(&outcome),
        frames_away: net.frames_away(&mut outcome),
    };
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report.print();
    }
    match outcome.errors.into_iter().next() {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Reads until the engine has ended and all datagrams are read.
fn receive(socket: &UdpSocket) -> Received {
    let mut batch = Datagrams::new();
    let (mut packets, mut bytes, mut datagrams) = (0, 0, 0);
    socket.set_gro(true);
    while let Ok(count) = socket.recv_batch(&mut batch, BATCH_MAX) {
        packets += count as u64;
        for segment in batch.iter().flat_map(|datagram| datagram.segments()) {
            datagrams += 1;
            bytes += segment.len() as u64;
        }
    }
    batch.clear();
    let SocketCounts { rcvbuf_errors, .. } = socket.counts();
    Received { socket: socket.local_addr(), packets, bytes, datagrams, rcvbuf_errors }
}

impl Report {
    fn print(&self) {
        for Received { socket, packets, bytes, datagrams, rcvbuf_errors } in &self.sockets {
            println!(
                "{socket}: {packets} packets, {datagrams} datagrams, {bytes} bytes; \
                 {rcvbuf_errors} had no room"
            );
        }
        for (reason, frames) in &self.dropped {
            println!("{frames} frames dropped: {reason}");
        }
        println!("{} frames not home", self.frames_away);
    }
}
