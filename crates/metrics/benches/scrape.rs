//! Time of a scrape of 128 CPUs and 10,000 sockets: prints one JSON line, the median of 21.
//!
//! The sockets are those of [`sockets`].
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod sockets;

use std::time::Instant;

use forebay::net::UdpSocket;
use forebay_metrics::TextFormat;

const REPEATS: usize = 21;

fn main() {
    let (sockets, metrics) = sockets::deliver();
    let filled = |socket: &UdpSocket| {
        let counts = socket.counts();
        assert_eq!(counts.queued + counts.rcvbuf_errors, sockets::FLOWS);
        counts.by_cpu.len()
    };
    let cpus: usize = sockets.iter().map(filled).max().unwrap();
    let mut times_us = Vec::new();
    let mut text = String::new();
    for _ in 0..REPEATS {
        let began = Instant::now();
        text = metrics.text(TextFormat::OpenMetrics);
        times_us.push(began.elapsed().as_micros());
    }
    times_us.sort_unstable();
    let (median_us, bytes, lines) = (times_us[REPEATS / 2], text.len(), text.lines().count());
    println!(
        "{{\"bench\":\"scrape\",\"cpus\":{cpus},\"sockets\":{},\"flows\":{},\
         \"median_us\":{median_us},\"lines\":{lines},\"bytes\":{bytes}}}",
        sockets.len(),
        sockets::FLOWS,
    );
}
