//! Packets held for more segments: they are released in time, and the engine wakes up for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_buf::Pool;
use forebay_device::synthetic::SyntheticSource;
use forebay_engine::{Config, Engine, Outcome, VirtualCosts};
use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
use forebay_rx::coalesce::FlushReason;
use forebay_rx::delivery::Batch;
use forebay_rx::hash::Hasher;
use forebay_rx::{Handler, Source};
use forebay_sys::clock::Clock;

use super::*;
use crate::coalescing::traced::{Files, traced};

const TIMEOUT_NS: u64 = 50_000;

/// Duration of a source's pause, which ends early once the frames before it are delivered.
const PAUSE_NS: u64 = 20_000_000_000;

/// Source of rows of frames with a long pause behind each. The pause ends once all earlier frames
/// are delivered.
struct Pausing {
    rows: SyntheticSource,
    row: u64,
    given: u64,
    due_ns: u64,
    /// True if the source does not keep up in its pauses, for lack of memory.
    is_starved: bool,
    delivered: Arc<AtomicU64>,
}

impl Source for Pausing {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        let pauses = self.given > 0 && self.given.is_multiple_of(self.row);
        if pauses && self.delivered.load(Ordering::Relaxed) < self.given {
            assert!(ask.now_ns < self.due_ns, "held until more comes");
            let now_ns = self.due_ns;
            return Ok(if self.is_starved {
                Polled::BehindUntil { now_ns }
            } else {
                Polled::IdleUntil { now_ns }
            });
        }
        let max = self.row - self.given % self.row;
        let polled = self.rows.poll(
            PollRequest { max: usize::try_from(max).unwrap(), ..ask },
            pool,
            burst,
        )?;
        self.given += burst.len() as u64;
        self.due_ns = ask.now_ns + PAUSE_NS;
        Ok(polled)
    }
}

/// Handler that counts frames.
struct Counting(Arc<AtomicU64>);

impl Handler for Counting {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        let frames = batch.packets.iter().map(|packet| u64::from(packet.segment_count()));
        self.0.fetch_add(frames.sum(), Ordering::Relaxed);
    }
}

/// Engine on one CPU, with ten rows of five frames and a pause behind each.
fn paused(clock: Clock, timeout_ns: u64, is_starved: bool) -> Engine<Counting> {
    let delivered = Arc::new(AtomicU64::new(0));
    let traffic = SyntheticPlan { run: (5, 5), ..in_rows(50, 7) };
    let source = Pausing {
        rows: SyntheticSource::new(traffic, None),
        row: 5,
        given: 0,
        due_ns: 0,
        is_starved,
        delivered: Arc::clone(&delivered),
    };
    let hasher = Arc::new(Hasher::keyed(&[3; 16], false));
    let cpus = CpuList::new(sys::allowed_cpus().into_iter().take(1));
    let mut config = Config::new(cpus, hasher);
    let gro = CoalesceConfig { gro_flush_timeout_ns: timeout_ns, ..CoalesceConfig::default() };
    config.coalesce = Coalesce { is_on: true, config: gro, ..Coalesce::default() };
    Engine::build(&config, vec![Box::new(source)], clock, |_| Counting(Arc::clone(&delivered)))
        .unwrap()
}

fn assert_let_go<H>(outcome: &Outcome<H>, by: FlushReason) {
    let counters = &outcome.queues[0].coalesce;
    let flushes = FlushReason::ALL.map(|reason| (reason, counters.flushes[reason.index()].get()));
    assert_eq!(flushes.into_iter().filter(|flush| flush.1 > 0).collect::<Vec<_>>(), [(by, 10)]);
    assert_eq!((counters.segments_in.get(), counters.packets_out.get()), (50, 10));
}

#[test]
fn promise_3_pausing_source_leaves_nothing_held() {
    // Held segments may have the memory that a starved source lacks: they do not wait.
    let cases = [
        (0, false, FlushReason::PollEnd),
        (TIMEOUT_NS, false, FlushReason::Timeout),
        (TIMEOUT_NS, true, FlushReason::PollEnd),
    ];
    for (timeout_ns, is_starved, reason) in cases {
        let stepped = paused(Clock::virtual_at_zero(), timeout_ns, is_starved);
        let outcome = stepped.run_stepped(3, VirtualCosts::default());
        assert_let_go(&outcome, reason);
        assert!(outcome.elapsed_ns < PAUSE_NS, "no pause was waited for");
        assert_let_go(&paused(Clock::machine(), timeout_ns, is_starved).run().unwrap(), reason);
    }
}

#[test]
fn gro_flush_timeout_exact_in_simulation() {
    const PERIOD_NS: u64 = 1_000_000;
    let rate = Rate::PerSecond(1000);
    let traffic = SyntheticPlan { rate, run: (1, 1), ..in_rows(100, 7) };
    let mut plan = coalescing(CoalesceAt::Arrive, stepped(1, traffic, 1));
    plan.engine.coalesce.config.gro_flush_timeout_ns = TIMEOUT_NS;
    let Files { report, deliver, .. } = traced("timeout", plan);
    assert_eq!(report.path.lro.flushes["timeout"], 99, "{:?}", report.path.lro);
    assert_eq!(report.path.lro.flushes["poll_end"], 1, "the last one ends with the source");
    for [frame, enqueued_ns] in deliver.numbers(["frame", "t_enq"]).into_iter().take(99) {
        assert_eq!(enqueued_ns, frame * PERIOD_NS + TIMEOUT_NS, "frame {frame}");
    }
}

#[test]
fn slow_segments_merge_with_timeout() {
    let packets_out = |timeout_ns| {
        let rate = Rate::PerSecond(100_000);
        let mut plan = stepped(1, SyntheticPlan { rate, ..in_rows(400, 1) }, 1);
        plan = coalescing(CoalesceAt::Arrive, plan);
        plan.engine.coalesce.config.gro_flush_timeout_ns = timeout_ns;
        run(plan).path.lro.packets_out
    };
    // A frame arrives every 10 us, except when a CPU stalls.
    assert!(packets_out(0) > 350);
    assert!((60..80).contains(&packets_out(TIMEOUT_NS)), "six to a packet");
}

#[test]
fn promise_3_held_packets_yield_under_shortage() {
    // A backlog of one packet, then packet memory for only a part of the packets that all flows
    // could hold.
    for (netdev_max_backlog, frames, flows) in [(0, 100, 7), (1000, 20_000, 200)] {
        let mut plan = stepped(1, SyntheticPlan { run: (1, 1), ..in_rows(frames, flows) }, 1);
        plan = coalescing(CoalesceAt::Arrive, plan);
        plan.engine.netdev_max_backlog = netdev_max_backlog;
        plan.engine.hold_max = 64;
        let config = &mut plan.engine.coalesce.config;
        (config.descriptors, config.gro_flush_timeout_ns) = (4096, 20_000_000);
        let report = run(plan.clone());
        assert_eq!(
            (report.path.delivered, report.path.lro.flushes["timeout"]),
            (frames, 0),
            "{report:?}"
        );
        drop_when_full(&mut plan);
        let report = run(plan);
        let no_buffer = report.path.dropped["no_buffer"];
        assert!(no_buffer < 1000, "{no_buffer} frames found no memory: {report:?}");
    }
}
