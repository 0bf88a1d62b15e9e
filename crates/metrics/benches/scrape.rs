//! Time of a scrape of 128 CPUs and 10,000 sockets: prints one JSON line with medians of 21, of making the text and
//! of a whole scrape over loopback.
//!
//! The sockets are those of [`sockets`].
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod server;
mod sockets;

use std::thread;
use std::time::{Duration, Instant};

use forebay::net::UdpSocket;
use forebay_metrics::TextFormat;

const REPEATS: usize = 21;

/// Pause before each: a server answers scrapes within 100 ms with one text.
const PAUSE: Duration = Duration::from_millis(150);

fn main() {
    let (sockets, metrics) = sockets::deliver();
    let filled = |socket: &UdpSocket| {
        let counts = socket.counts();
        assert_eq!(counts.queued + counts.rcvbuf_errors, sockets::FLOWS);
        counts.by_cpu.len()
    };
    let cpus: usize = sockets.iter().map(filled).max().unwrap();
    let mut text = String::new();
    let text_us = median_us(|| text = metrics.text(TextFormat::OpenMetrics));
    let server = server::serve(metrics);
    let mut answer = Vec::new();
    let scrape_us = median_us(|| _ = server::scrape(&server, &mut answer));
    let (bytes, lines) = (text.len(), text.lines().count());
    println!(
        "{{\"bench\":\"scrape\",\"cpus\":{cpus},\"sockets\":{},\"flows\":{},\
         \"text_us\":{text_us},\"scrape_us\":{scrape_us},\"lines\":{lines},\"bytes\":{bytes}}}",
        sockets.len(),
        sockets::FLOWS,
    );
}

fn median_us(mut act: impl FnMut()) -> u128 {
    let mut times: Vec<_> = (0..REPEATS)
        .map(|_| {
            thread::sleep(PAUSE);
            let began = Instant::now();
            act();
            began.elapsed().as_micros()
        })
        .collect();
    times.sort_unstable();
    times[REPEATS / 2]
}
