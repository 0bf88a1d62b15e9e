//! Packet rate of one CPU with and without scrapes of 128 CPUs and 10,000 sockets: prints one JSON line.
//!
//! A round has three windows in random order: one with a scrape, and two without. The rate with a
//! scrape is divided by that of a window without one of the same round, so that only changes of the
//! machine within a second disturb it; the same quotient of the two windows without a scrape shows
//! how much they do. Rates are packets per CPU time of the measured thread, and per second.
//!
//! With an interval of scrapes in seconds as its argument, windows with and without a scrape alternate
//! instead, each as long as the interval: seven of each, whose medians are compared.
//!
//! The scraped CPUs and sockets are those of [`sockets`], which has ended, so that two CPUs are enough; the CPU
//! that is measured is scraped, too.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod server;
mod sockets;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay::{Batch, Clock, Config, Control, CpuId, CpuList, Engine, Handler, SyntheticSource};
use forebay_device::synthetic::SyntheticPlan;
use forebay_metrics::{Metrics, TextFormat};
use forebay_sys::random::Random;
use forebay_sys::thread_cpu_ns;

/// Rounds of three windows: with those before the first, less than 170 s in all.
const ROUNDS: usize = 160;

const WINDOW: Duration = Duration::from_millis(320);

/// Windows of each kind with an interval.
const ALTERNATIONS: usize = 7;

/// Texts whose CPU time is measured.
const TEXTS: usize = 21;

/// Batches between two looks at the clock of the measured thread.
const BATCHES_A_LOOK: u32 = 64;

/// Time that the measured thread runs in each window of a round that counts: with less, others had the
/// CPU.
const RAN_MIN: Duration = Duration::from_millis(32);

/// Order of windows in a round.
const SEED: u64 = 20;

/// Windows of a round, by their order in [`Round`].
const WITH: usize = 2;

/// Packets that a thread has handled, and the CPU time that it had used by then.
#[derive(Clone, Copy, Default)]
struct Look {
    packets: u64,
    cpu_ns: u64,
}

/// Handler that counts.
#[derive(Default)]
struct Counting {
    looked: Arc<Mutex<Look>>,
    packets: u64,
    batches: u32,
}

impl Handler for Counting {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.packets += u64::try_from(batch.packets.len()).unwrap();
        self.batches += 1;
        if self.batches == BATCHES_A_LOOK {
            self.batches = 0;
            let look = Look { packets: self.packets, cpu_ns: thread_cpu_ns() };
            *self.looked.lock().unwrap() = look;
        }
    }
}

fn engine(frames: u64, looked: &Arc<Mutex<Look>>) -> Engine<Counting> {
    let config = Config { cpus: CpuList::new([CpuId(0)]), ..Config::live() };
    let plan = SyntheticPlan { frames, ..SyntheticPlan::default() };
    let sources = vec![Box::new(SyntheticSource::new(plan, None)) as _];
    let handler = |_| Counting { looked: Arc::clone(looked), ..Counting::default() };
    Engine::build(&config, sources, Clock::machine(), handler).unwrap()
}

/// Packets per second of a window, and per second that the thread ran. Others on the machine take from
/// the first only.
#[derive(Clone, Copy, Default)]
struct Rates {
    per_second: f64,
    per_cpu_second: f64,
    ran: Duration,
}

/// Rates of a window of this length that begins with `act`.
fn rates(looked: &Mutex<Look>, window: Duration, act: impl FnOnce()) -> Rates {
    let look = || *looked.lock().unwrap();
    let (began, before) = (Instant::now(), look());
    act();
    thread::sleep(window.saturating_sub(began.elapsed()));
    let (after, elapsed) = (look(), began.elapsed());
    let packets = decimal(after.packets - before.packets);
    let ran = Duration::from_nanos(after.cpu_ns - before.cpu_ns);
    Rates {
        per_second: packets / elapsed.as_secs_f64(),
        per_cpu_second: packets / ran.as_secs_f64(),
        ran,
    }
}

fn decimal(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap())
}

/// Rates of the windows of a round: without a scrape, again, and with one.
type Round = [Rates; 3];

/// Windows of a round, in an order of their own.
fn round(looked: &Mutex<Look>, random: &mut Random, mut act: impl FnMut()) -> Round {
    let mut order = [0, 1, WITH];
    for last in (1..order.len()).rev() {
        let other = random.below(u64::try_from(last + 1).unwrap());
        order.swap(last, usize::try_from(other).unwrap());
    }
    let mut round = Round::default();
    for window in order {
        round[window] = rates(looked, WINDOW, || {
            if window == WITH {
                act();
            }
        });
    }
    round
}

/// Line of rounds whose windows are in an order of their own.
fn in_rounds(looked: &Mutex<Look>, mut act: impl FnMut()) -> String {
    let mut random = Random::new(SEED);
    // The first texts and the first packets are slow.
    for _ in 0..3 {
        round(looked, &mut random, &mut act);
    }
    let rounds = (0..ROUNDS).map(|_| round(looked, &mut random, &mut act));
    let rounds: Vec<_> =
        rounds.filter(|round| round.iter().all(|rates| rates.ran >= RAN_MIN)).collect();
    assert!(rounds.len() > ROUNDS / 2, "others have the CPU: only {} rounds count", rounds.len());
    format!(
        "\"rounds\":{},\"window_ms\":{},\"packets_per_cpu_second\":{},\"pps\":{}",
        rounds.len(),
        WINDOW.as_millis(),
        compared(&rounds, |rates| rates.per_cpu_second),
        compared(&rounds, |rates| rates.per_second),
    )
}

/// Median change from the first window without a scrape to window `to`, in percent, and the interval
/// that the median is in with a probability of 95 %: by ranks, whatever the distribution is.
fn change(rounds: &[Round], to: usize, of: fn(&Rates) -> f64) -> String {
    let change = |round: &Round| (of(&round[to]) / of(&round[0]) - 1.0) * 100.0;
    let mut changes: Vec<_> = rounds.iter().map(change).collect();
    changes.sort_unstable_by(f64::total_cmp);
    let half = changes.len() / 2;
    // 1.96 standard deviations of a binomial distribution, rounded up: the square root of the number.
    let away = (1..half).find(|away| away * away >= changes.len()).unwrap_or(half);
    let [median, low, high] = [half, half - away, half + away].map(|rank| changes[rank]);
    format!("{{\"median_percent\":{median:.2},\"interval\":[{low:.2},{high:.2}]}}")
}

/// Line of a kind of rate.
fn compared(rounds: &[Round], of: fn(&Rates) -> f64) -> String {
    let mut plain: Vec<_> = rounds.iter().map(|round| of(&round[0])).collect();
    plain.sort_unstable_by(f64::total_cmp);
    let (median, range) = (plain[plain.len() / 2], [plain[0], plain[plain.len() - 1]]);
    format!(
        "{{\"median\":{median:.0},\"range\":[{:.0},{:.0}],\"with\":{},\"without_again\":{}}}",
        range[0],
        range[1],
        change(rounds, WITH, of),
        change(rounds, 1, of),
    )
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// CPU time of a text, in ms.
fn text_cpu_ms(metrics: &Metrics) -> f64 {
    let text = |_| {
        let before = thread_cpu_ns();
        std::hint::black_box(metrics.text(TextFormat::OpenMetrics));
        decimal(thread_cpu_ns() - before) / 1e6
    };
    median((0..TEXTS).map(text).collect())
}

/// Line of windows with and without a scrape in turn, each of this length.
fn alternated(looked: &Mutex<Look>, interval: Duration, mut act: impl FnMut()) -> String {
    // The first texts and the first packets are slow.
    for _ in 0..3 {
        rates(looked, WINDOW, &mut act);
    }
    let mut sides: [Vec<Rates>; 2] = Default::default();
    for _ in 0..ALTERNATIONS {
        sides[0].push(rates(looked, interval, &mut act));
        sides[1].push(rates(looked, interval, || {}));
    }
    let compared = |of: fn(&Rates) -> f64| {
        let [with, without] = sides.each_ref().map(|side| median(side.iter().map(of).collect()));
        let change = (with / without - 1.0) * 100.0;
        format!("{{\"with\":{with:.0},\"without\":{without:.0},\"change_percent\":{change:.2}}}")
    };
    let [cpu, clock] = [compared(|of| of.per_cpu_second), compared(|of| of.per_second)];
    let seconds = interval.as_secs();
    format!(
        "\"interval_s\":{seconds},\"windows\":{ALTERNATIONS},\"packets_per_cpu_second\":{cpu},\"pps\":{clock}"
    )
}

fn main() {
    // cargo adds an argument of its own.
    let interval = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let (kept, many) = sockets::deliver();
    let looked = Arc::default();
    let measured = engine(u64::MAX, &looked);
    let (state, stopper) = (measured.state(), measured.stopper());
    let own = Metrics::new().with_engine(Control::of(&measured));
    let text_cpu_ms = text_cpu_ms(&many);
    let servers = [server::serve(many), server::serve(own)];
    let run = thread::spawn(|| measured.run().map(drop));
    while !state.has_started() || looked.lock().unwrap().packets == 0 {
        thread::yield_now();
    }
    let (mut bytes, mut answer): (usize, _) = (0, Vec::new());
    let mut scrape_all =
        || bytes = servers.iter().map(|server| server::scrape(server, &mut answer)).sum();
    let figures = match interval {
        Some(seconds) => alternated(&looked, Duration::from_secs(seconds), &mut scrape_all),
        None => in_rounds(&looked, &mut scrape_all),
    };
    stopper.stop();
    run.join().unwrap().unwrap();
    println!(
        "{{\"bench\":\"scrape_rate\",\"cpus\":{},\"sockets\":{},\"bytes\":{bytes},\"text_cpu_ms\":{text_cpu_ms:.2},{figures}}}",
        sockets::CPUS,
        kept.len(),
    );
}
