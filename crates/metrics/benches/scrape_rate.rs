//! Packet rate of one CPU with and without a scrape a second, of 128 CPUs and 10,000 sockets, in turn:
//! prints one JSON line with the medians of 7 periods each.
//!
//! The scraped CPUs are those of an engine that does not run, so that two CPUs are enough; the CPU
//! that is measured is scraped, too.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay::net::counters::SocketCounts;
use forebay::{Batch, Clock, Config, Control, CpuId, CpuList, Engine, Handler, SyntheticSource};
use forebay_device::synthetic::SyntheticPlan;
use forebay_engine::EngineState;
use forebay_metrics::{Metrics, MetricsServer, SOCKETS_LISTED_MAX, ServerAccess};

const CPUS: u16 = 128;

/// Name of the thread of the measured CPU.
const THREAD: &str = "forebay-cpu0";

/// Periods of each kind; an odd number.
const REPEATS: usize = 7;

const SCRAPES_A_PERIOD: u32 = 3;

const SECOND: Duration = Duration::from_secs(1);

struct Nothing;

impl Handler for Nothing {
    fn handle(&mut self, _: &mut Batch<'_>) {}
}

fn engine(cpus: impl IntoIterator<Item = CpuId>) -> Engine<Nothing> {
    let config = Config { cpus: CpuList::new(cpus), ..Config::live() };
    let plan = SyntheticPlan { frames: u64::MAX, ..SyntheticPlan::default() };
    let sources = vec![Box::new(SyntheticSource::new(plan, None)) as _];
    Engine::build(&config, sources, Clock::machine(), |_| Nothing).unwrap()
}

/// A socket that datagrams have come to.
fn socket(number: usize) -> (usize, SocketAddr, SocketCounts) {
    let port = 1024 + u16::try_from(number).unwrap();
    let (queued, rcvbuf_errors, rmem, rcvbuf) = (123_456_789, 1234, 65_536, 638_976);
    let counts = SocketCounts { queued, by_cpu: Vec::new(), rcvbuf_errors, rmem, rcvbuf };
    (number, SocketAddr::from(([192, 168, 100, 100], port)), counts)
}

fn serve(metrics: Metrics) -> MetricsServer {
    MetricsServer::bind("127.0.0.1:0".parse().unwrap(), &ServerAccess::default(), metrics).unwrap()
}

/// Scrapes a server, and returns the length of the text.
fn scrape(server: &MetricsServer) -> usize {
    let address = server.address();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    text.len()
}

/// Packets of a period, for each second of it and for each second that the CPU's thread ran. Others
/// on the machine take from the first only.
#[derive(Clone, Copy)]
struct Rates {
    per_second: u64,
    per_cpu_second: u64,
}

/// Rates of a period, with a call of `act` in each second.
fn rates(state: &Arc<EngineState>, mut act: impl FnMut()) -> Rates {
    let delivered =
        || -> u64 { state.counters().unwrap().cpus.iter().map(|cpu| cpu.frames.get()).sum() };
    let (began, before, ran_ns) = (Instant::now(), delivered(), thread_ns());
    for second in 1..=SCRAPES_A_PERIOD {
        act();
        thread::sleep((second * SECOND).saturating_sub(began.elapsed()));
    }
    let packets = u128::from(delivered() - before) * SECOND.as_nanos();
    let per = |ns: u128| u64::try_from(packets / ns.max(1)).unwrap();
    Rates {
        per_second: per(began.elapsed().as_nanos()),
        per_cpu_second: per(u128::from(thread_ns() - ran_ns)),
    }
}

/// Time that the thread of the measured CPU has run.
fn thread_ns() -> u64 {
    let of_engine = |task: &Path| {
        let name = fs::read_to_string(task.join("comm")).ok()?;
        let ran = fs::read_to_string(task.join("schedstat")).ok()?;
        let ran_ns: u64 = ran.split(' ').next()?.parse().ok()?;
        (name.trim_end() == THREAD).then_some(ran_ns)
    };
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks.filter_map(|task| of_engine(&task.ok()?.path())).sum()
}

/// Median and range of some rates, as JSON.
fn summary(rates: &[Rates], of: fn(&Rates) -> u64) -> (u64, String) {
    let mut rates: Vec<_> = rates.iter().map(of).collect();
    rates.sort_unstable();
    let median = rates[rates.len() / 2];
    (median, format!("{{\"median\":{median},\"range\":[{},{}]}}", rates[0], rates[rates.len() - 1]))
}

/// Line of a kind of rate: without scrapes, with them, and the change in percent.
fn compared(without: &[Rates], with: &[Rates], of: fn(&Rates) -> u64) -> String {
    let ((before, without), (after, with)) = (summary(without, of), summary(with, of));
    let hundredths = (i128::from(after) - i128::from(before)) * 10_000 / i128::from(before.max(1));
    let sign = if hundredths < 0 { "-" } else { "" };
    let (whole, part) = (hundredths.abs() / 100, hundredths.abs() % 100);
    format!("{{\"without\":{without},\"with\":{with},\"change_percent\":{sign}{whole}.{part:02}}}")
}

fn main() {
    let idle = engine((0..CPUS).map(CpuId));
    let sockets = || (0..SOCKETS_LISTED_MAX).map(socket).collect();
    let many = Metrics::new().with_engine(Control::of(&idle)).with_socket_counts(sockets);
    let measured = engine([CpuId(0)]);
    let (state, stopper) = (measured.state(), measured.stopper());
    let own = Metrics::new().with_engine(Control::of(&measured));
    let servers = [serve(many), serve(own)];
    let run = thread::spawn(|| measured.run().map(drop));
    while !state.has_started() {
        thread::yield_now();
    }
    let mut bytes: usize = 0;
    // The first texts and the first packets are slow.
    rates(&state, || bytes = servers.iter().map(scrape).sum());
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        without.push(rates(&state, || ()));
        with.push(rates(&state, || bytes = servers.iter().map(scrape).sum()));
    }
    stopper.stop();
    run.join().unwrap().unwrap();
    println!(
        "{{\"bench\":\"scrape_rate\",\"cpus\":{CPUS},\"sockets\":{SOCKETS_LISTED_MAX},\"bytes\":{bytes},\
         \"pps\":{},\"packets_per_cpu_second\":{}}}",
        compared(&without, &with, |rates| rates.per_second),
        compared(&without, &with, |rates| rates.per_cpu_second),
    );
}
