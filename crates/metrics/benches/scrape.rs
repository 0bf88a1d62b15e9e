//! Time of a scrape of 128 CPUs and 10,000 sockets: prints one JSON line, the median of 21.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::net::SocketAddr;
use std::time::Instant;

use forebay::net::counters::SocketCounts;
use forebay::{Batch, Clock, Config, Control, CpuId, CpuList, Engine, Handler, SyntheticSource};
use forebay_metrics::{Metrics, SOCKETS_LISTED_MAX, TextFormat};

const CPUS: u16 = 128;

const REPEATS: usize = 21;

struct Nothing;

impl Handler for Nothing {
    fn handle(&mut self, _: &mut Batch<'_>) {}
}

/// A socket that datagrams of all CPUs have come to.
fn socket(number: usize) -> (usize, SocketAddr, SocketCounts) {
    let port = 1024 + u16::try_from(number).unwrap();
    let (queued, rcvbuf_errors, rmem, rcvbuf) = (123_456_789, 1234, 65_536, 638_976);
    let counts = SocketCounts { queued, by_cpu: Vec::new(), rcvbuf_errors, rmem, rcvbuf };
    (number, SocketAddr::from(([192, 168, 100, 100], port)), counts)
}

fn main() {
    let cpus = CpuList::new((0..CPUS).map(CpuId));
    let config = Config { cpus, ..Config::live() };
    let traffic = SyntheticSource::new(Default::default(), None);
    let sources = vec![Box::new(traffic) as _];
    let engine = Engine::build(&config, sources, Clock::machine(), |_| Nothing).unwrap();
    let sockets = || (0..SOCKETS_LISTED_MAX).map(socket).collect();
    let metrics = Metrics::new().with_engine(Control::of(&engine)).with_socket_counts(sockets);
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
        "{{\"bench\":\"scrape\",\"cpus\":{CPUS},\"sockets\":{SOCKETS_LISTED_MAX},\
         \"median_us\":{median_us},\"lines\":{lines},\"bytes\":{bytes}}}"
    );
}
