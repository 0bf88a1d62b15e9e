//! Samples, and the engine that they are of.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use forebay::{
    Batch, Clock, Config, Control, CpuId, CpuList, Device, DropReason, Engine, Handler,
    SyntheticPlan, SyntheticSource, Via, WhenFull,
};
use forebay_metrics::{Metrics, TextFormat};

use crate::client::{samples, sum};

/// A handler that counts, and does a little work.
#[derive(Default)]
pub(crate) struct Count(Arc<AtomicU64>);

impl Handler for Count {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.0.fetch_add(batch.packets.len() as u64, Ordering::Relaxed);
    }
}

fn source(frames: u64) -> SyntheticSource {
    SyntheticSource::new(SyntheticPlan { frames, flows: 64, ..SyntheticPlan::default() }, None)
}

/// An engine on the first two CPUs over `queues` queues of `frames` frames each.
pub(crate) fn engine(queues: u16, frames: u64) -> Engine<Count> {
    let cpus = CpuList::new([0, 1].map(CpuId));
    let config = Config { cpus, when_full: WhenFull::Wait, ..Config::live() };
    let sources = (0..queues).map(|_| Box::new(source(frames)) as _).collect();
    Engine::build(&config, sources, Clock::machine(), |_| Count::default()).unwrap()
}

#[test]
fn met_1_scrape_agrees_with_outcome() {
    let engine = engine(2, 20_000);
    let metrics = Metrics::new().with_engine(Control::of(&engine));
    let outcome = engine.run().unwrap();
    let text = metrics.text(TextFormat::OpenMetrics);
    let samples = samples(&text);
    let sum = |name: &str| sum(&samples, name);
    assert_eq!(sum("forebay_packets_received_total"), 40_000.0);
    assert_eq!(sum("forebay_packets_delivered_total"), 40_000.0);
    assert_eq!(sum("forebay_packets_steered_total"), 40_000.0);
    assert_eq!(sum("forebay_packets_dropped_total"), 0.0);
    assert_eq!(sum("forebay_backlog_packets"), 0.0);
    for (queue, counters) in outcome.queues.iter().enumerate() {
        let of = format!("{{device=\"replay\",queue=\"{queue}\"}}");
        let bytes = samples[&format!("forebay_received_bytes_total{of}")];
        assert_eq!(bytes.to_string(), counters.bytes.get().to_string());
    }
    for cpu in &outcome.cpus {
        let of = format!("{{cpu=\"{}\"}}", cpu.cpu);
        let batches = cpu.delivery.batches.get().to_string();
        assert_eq!(samples[&format!("forebay_batches_delivered_total{of}")].to_string(), batches);
        for histogram in ["batch_packets", "handler_seconds"] {
            let count = samples[&format!("forebay_{histogram}_count{of}")];
            assert_eq!(count.to_string(), batches, "{histogram}");
            let all = format!("forebay_{histogram}_bucket{{le=\"+Inf\",cpu=\"{}\"}}", cpu.cpu);
            assert_eq!(samples[&all].to_string(), batches, "{histogram}");
        }
    }
    assert_eq!(sum("forebay_batch_packets_sum"), 40_000.0);
    let waits = sum("forebay_backlog_wait_seconds_count");
    assert!(waits > 0.0 && waits <= 40_000.0, "{waits} waits of 40,000 packets");
    assert_eq!(sum("forebay_delivery_latency_seconds_count"), 0.0, "no device has stamped them");
    assert!(text.ends_with("# EOF\n"));
}

/// On one CPU no stamps can run out.
#[test]
fn met_5_every_wait_is_measured_once() {
    let config = Config { cpus: CpuList::new([CpuId(0)]), ..Config::live() };
    let config = Config { when_full: WhenFull::Wait, ..config };
    let sources = vec![Box::new(source(10_000)) as _];
    let engine = Engine::build(&config, sources, Clock::machine(), |_| Count::default()).unwrap();
    let metrics = Metrics::new().with_engine(Control::of(&engine));
    engine.run().unwrap();
    let samples = samples(&metrics.text(TextFormat::Prometheus));
    assert_eq!(sum(&samples, "forebay_backlog_wait_seconds_count"), 10_000.0);
    assert!(sum(&samples, "forebay_backlog_wait_seconds_sum") > 0.0);
}

#[test]
fn met_1_every_reason_has_sample() {
    let engine = engine(1, 0);
    let metrics = Metrics::new().with_engine(Control::of(&engine));
    let text = metrics.text(TextFormat::OpenMetrics);
    for reason in DropReason::ALL {
        let name = format!("reason=\"{}\"", reason.name());
        let is_drop = |line: &str| {
            line.starts_with("forebay_packets_dropped") || line.starts_with("forebay_packets_lost")
        };
        assert!(text.lines().any(|line| is_drop(line) && line.contains(&name)), "{name}");
    }
}

/// A counter never goes back, and the last scrape has all.
#[test]
fn promise_7_scrapes_leave_run_unchanged() {
    let engine = engine(1, 200_000);
    let metrics = Metrics::new().with_engine(Control::of(&engine));
    let is_over = Arc::new(AtomicBool::new(false));
    let scraper = {
        let (metrics, is_over) = (metrics.clone(), Arc::clone(&is_over));
        thread::spawn(move || {
            let mut before = samples(&metrics.text(TextFormat::Prometheus));
            while !is_over.load(Ordering::Relaxed) {
                let now = samples(&metrics.text(TextFormat::Prometheus));
                for (name, value) in &now {
                    let is_counter = name.split('{').next().unwrap().ends_with("_total");
                    let last = before.get(name).copied().unwrap_or_default();
                    assert!(!is_counter || *value >= last, "{name}: {value} after {last}");
                }
                before = now;
            }
        })
    };
    let outcome = engine.run().unwrap();
    is_over.store(true, Ordering::Relaxed);
    scraper.join().unwrap();
    let delivered: u64 = outcome.cpus.iter().map(|cpu| cpu.delivery.frames.get()).sum();
    assert_eq!((delivered, outcome.frames_away), (200_000, 0));
    let last = samples(&metrics.text(TextFormat::Prometheus));
    assert_eq!(sum(&last, "forebay_packets_delivered_total"), 200_000.0);
}

#[test]
fn met_1_device_has_name_and_driver() {
    let mut devices =
        [Device::of_sources("tap7", Via::Tap, vec![Box::new(source(10)), Box::new(source(5))])];
    let metrics = Metrics::new().with_devices(&devices);
    let config = Config { cpus: CpuList::new([CpuId(0)]), ..Config::live() };
    let config = Config { devices: forebay_engine::DeviceQueues::of(&devices), ..config };
    let engine = Engine::over(&config, &mut devices, |_| Count::default()).unwrap();
    let metrics = metrics.with_engine(Control::of(&engine));
    engine.run().unwrap();
    let samples = samples(&metrics.text(TextFormat::Prometheus));
    assert_eq!(samples["forebay_device_info{device=\"tap7\",via=\"tap\"}"], 1.0);
    let received = |queue| {
        samples[&format!("forebay_packets_received_total{{device=\"tap7\",queue=\"{queue}\"}}")]
    };
    assert_eq!([received(0), received(1)], [10.0, 5.0]);
}

/// Metrics of every part: an engine, a device, and a destination.
pub(crate) fn full_metrics() -> Metrics {
    let devices = [Device::of_sources("tap7", Via::Tap, vec![Box::new(source(1))])];
    let engine = engine(1, 1);
    let sinks = vec![Arc::default()];
    Metrics::new()
        .with_devices(&devices)
        .with_engine(Control::of(&engine))
        .with_sinks("dev:tap7", sinks)
        .with_socket_counts(Vec::new)
}
