//! Runs of sources that need no privileges: their reports, their ends, and the destinations of
//! their packets.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use forebay_buf::Pool;
use forebay_device::pcap::Rotation;
use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
use forebay_device::{Device, Rate, Via};
use forebay_engine::Config;
use forebay_engine::trace::{self, TracePlan};
use forebay_run::run::{Run, RunConfig, RunReport, StoppedBy, To};
use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
use forebay_rx::steer::SpreadPolicy;
use forebay_rx::{CpuId, Source};
use forebay_sys::Error;
use forebay_sys::cpu_list::CpuList;
use pcap_file::pcap::PcapReader;

/// Source of synthetic packets.
fn frames(frames: u64) -> Box<dyn Source> {
    let plan =
        SyntheticPlan { frames, rate: Rate::PerSecond(2_000_000), ..SyntheticPlan::default() };
    Box::new(SyntheticSource::new(plan, None))
}

fn endless() -> Box<dyn Source> {
    frames(u64::MAX)
}

fn device(name: &str, sources: Vec<Box<dyn Source>>) -> Device {
    Device::of_sources(name, Via::Tap, sources)
}

/// Configuration with two CPUs, over which every packet is spread.
fn plan() -> RunConfig {
    let cpus = CpuList::new([0, 1].map(CpuId));
    let engine = Config { rps_cpus: Some(cpus.clone()), cpus, ..Config::live() };
    let engine = Config { spread: SpreadPolicy::Always, ..engine };
    RunConfig { check_order: true, ..RunConfig::new(Vec::new(), engine) }
}

/// Report of a run that keeps all promises.
fn report(plan: RunConfig, devices: Vec<Device>) -> RunReport {
    kept(Run::with_devices(plan, devices).unwrap().run().unwrap())
}

fn kept(report: RunReport) -> RunReport {
    assert_eq!(report.broken_promises(), Vec::<String>::new(), "{report:?}");
    report
}

/// A device that fails after some polls, once another device has given frames.
struct Failing {
    source: Box<dyn Source>,
    polls: u32,
    other_gave: Arc<AtomicBool>,
}

/// A device that announces when it has given frames.
struct Announced {
    source: Box<dyn Source>,
    gave: Arc<AtomicBool>,
}

impl Source for Announced {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        let polled = self.source.poll(ask, pool, burst)?;
        self.gave.fetch_or(!burst.packets.is_empty(), Ordering::Relaxed);
        Ok(polled)
    }
}

impl Source for Failing {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.polls += 1;
        let polled = self.source.poll(ask, pool, burst)?;
        if self.polls < 50 || !self.other_gave.load(Ordering::Relaxed) {
            return Ok(polled);
        }
        Err(Box::new(forebay_sys::Error::DeviceGone { name: "f0".to_owned() }))
    }
}

#[test]
fn promise_2_queue_counts_add_up() {
    let devices =
        vec![device("a0", vec![frames(3000), frames(2000)]), device("b0", vec![frames(1000)])];
    let report = report(plan(), devices);
    let queues = report.devices.iter().map(|device| {
        let queues = device.queues.iter();
        let queues = queues.map(|queue| (queue.rx_queue, queue.packets)).collect::<Vec<_>>();
        (device.name.as_str(), queues)
    });
    let queues: Vec<_> = queues.collect();
    assert_eq!(queues, [("a0", vec![(0, 3000), (1, 2000)]), ("b0", vec![(0, 1000)])]);
    let path = &report.path;
    assert_eq!((path.packets_in, report.stopped_by), (6000, StoppedBy::Sources));
    assert_eq!(path.delivered + path.dropped_in_all(), 6000);
    assert!(report.sent.is_empty() && report.error.is_none());
}

/// With flows that arrive by two queues at different speeds, each queue has an order of its own.
#[test]
fn promise_1_order_check_is_per_queue() {
    let two = || vec![device("a0", vec![frames(20_000), frames(20_000)])];
    let checked = report(plan(), two());
    assert_eq!((checked.reordered, checked.order_unchecked), (Some(0), Some(0)));
    assert_eq!(checked.flows, Some(2 * 64));
    assert!(checked.path.per_cpu.iter().all(|cpu| cpu.flows.is_some()));
    let unchecked = report(RunConfig { check_order: false, ..plan() }, two());
    assert_eq!((unchecked.reordered, unchecked.flows), (None, None));
    let json = serde_json::to_value(&unchecked).unwrap();
    assert!(json.as_object().unwrap()["reordered"].is_null());
    assert!(json["per_cpu"][0]["flows"].is_null());
}

#[test]
fn failing_device_ends_run_after_delivery() {
    let gave = Arc::new(AtomicBool::new(false));
    let other_gave = Arc::clone(&gave);
    let failing = Failing { source: endless(), polls: 0, other_gave };
    let other = Announced { source: endless(), gave };
    let devices = vec![device("f0", vec![Box::new(failing)]), device("e0", vec![Box::new(other)])];
    let report = report(plan(), devices);
    assert_eq!(report.stopped_by, StoppedBy::Failure);
    assert_eq!(report.error.as_deref(), Some("the interface f0 is gone"));
    assert!(report.errors[0].is_refusal());
    assert!(report.devices.iter().all(|device| device.queues[0].packets > 0));
    assert_eq!(report.path.queued, 0);
}

#[test]
fn run_ends_by_time_or_request() {
    let in_time = RunConfig { duration: Some(Duration::from_millis(50)), ..plan() };
    let ended = report(in_time, vec![device("e0", vec![endless()])]);
    assert_eq!(ended.stopped_by, StoppedBy::Duration);
    let run = Run::with_devices(plan(), vec![device("e0", vec![endless()])]).unwrap();
    let (stopper, watch) = (run.stopper(), run.watch());
    let asker = thread::spawn(move || {
        while watch.look().delivered < 1000 {
            thread::yield_now();
        }
        stopper.stop();
    });
    let ended = kept(run.run().unwrap());
    asker.join().unwrap();
    assert_eq!(ended.stopped_by, StoppedBy::Request);
    assert!(ended.path.delivered >= 1000);
}

#[test]
fn promise_7_watch_ends_with_report() {
    let run = Run::with_devices(plan(), vec![device("a0", vec![frames(5000)])]).unwrap();
    let watch = run.watch();
    assert_eq!(watch.look().packets_in, 0);
    let report = kept(run.run().unwrap());
    let seen = watch.look();
    assert_eq!((seen.packets_in, seen.bytes_in), (5000, report.path.bytes_in));
    assert_eq!((seen.delivered, &seen.dropped), (report.path.delivered, &report.path.dropped));
    let by_cpu = report.path.per_cpu.iter().map(|cpu| cpu.packets);
    assert!(seen.per_cpu.iter().map(|cpu| cpu.packets).eq(by_cpu));
    assert!(seen.per_cpu.iter().all(|cpu| cpu.queued == 0));
}

#[test]
fn promise_2_full_disk_of_one_device_reported() {
    let directory = tempfile::tempdir().unwrap();
    let captures = directory.path().join("of a");
    let to = vec![To::Pcap(captures.clone()), To::Count];
    let devices = || vec![device("a0", vec![frames(700)]), device("b0", vec![frames(300)])];
    let plan_to = |to| RunConfig { to, ..plan() };
    let written = report(plan_to(to), devices());
    let [sent] = &written.sent[..] else { panic!("{:?}", written.sent) };
    assert_eq!((sent.handed, sent.packets, sent.frames), (700, 700, 700));
    assert_eq!(sent.to, format!("pcap:{}", captures.display()));
    assert!(records_bytes(&captures) > 700 * 16);

    // A directory is in the place of each capture file.
    for cpu in 0..2 {
        std::fs::create_dir(directory.path().join(format!("cpu{cpu}.pcap"))).unwrap();
    }
    let refused = plan_to(vec![To::Pcap(directory.path().to_owned())]);
    let run = Run::with_devices(refused, devices()).unwrap().run();
    assert!(run.is_err(), "a directory in the way cannot be removed");

    let unwritable = plan_to(vec![To::Pcap("/proc/self/fd".into())]);
    let run = Run::with_devices(unwritable, devices()).unwrap();
    let report = kept(run.run().unwrap());
    assert_eq!((report.sent[0].packets, report.sent[0].dropped["not_written"]), (0, 1000));
    assert!(report.error.unwrap().starts_with("cannot create /proc/self/fd/cpu"));
}

/// Two spellings of one directory: packets of both devices are in the same captures.
#[test]
fn promise_2_one_directory_has_one_writer() {
    let parent = tempfile::tempdir().unwrap();
    let one = parent.path().join("one");
    let other = parent.path().join("other");
    std::os::unix::fs::symlink("one", &other).unwrap();
    // Nothing is there yet: the run creates it.
    let to = vec![To::Pcap(one.clone()), To::Pcap(parent.path().join("one/../one"))];
    let devices = || vec![device("a0", vec![frames(700)]), device("b0", vec![frames(300)])];
    let first = report(RunConfig { to, ..plan() }, devices());
    let second =
        report(RunConfig { to: vec![To::Pcap(one.clone()), To::Pcap(other)], ..plan() }, devices());
    for report in [first, second] {
        let [sent] = &report.sent[..] else { panic!("{:?}", report.sent) };
        assert_eq!((sent.handed, sent.packets), (1000, 1000));
        assert_eq!(sent.to, format!("pcap:{}", one.display()));
    }
    assert_eq!(records(&one), 1000);
}

/// Names of the files of a directory that begin with `cpu`, and `old` of those with that content.
fn captures(directory: &Path) -> (usize, Vec<String>) {
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let is_old = |path: &&PathBuf| std::fs::read(path).unwrap() == b"old";
    let files: Vec<_> = files.collect();
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let mut old: Vec<_> = files.iter().filter(is_old).map(name).collect();
    old.sort();
    (files.len(), old)
}

#[test]
fn ops_4_failed_start_deletes_no_capture() {
    let directory = tempfile::tempdir().unwrap();
    let names = ["cpu0.pcap", "cpu1-ip.pcap", "cpu7.000003.pcap"];
    let names = names.map(str::to_owned);
    for name in &names {
        std::fs::write(directory.path().join(name), "old").unwrap();
    }
    let traced = tempfile::tempdir().unwrap();
    let path = |name: &str| traced.path().join(name);
    trace::FILES.iter().for_each(|name| std::fs::write(path(name), "old").unwrap());
    let is_old = |name: &&str| std::fs::read_to_string(path(name)).unwrap_or_default() == "old";
    let old = || trace::FILES.iter().copied().filter(is_old).count();
    let plan = || {
        let to = vec![To::Pcap(directory.path().to_owned())];
        let trace = Some(TracePlan { directory: traced.path().to_owned(), parse: false });
        RunConfig { to, trace, ..plan() }
    };
    // What comes between opening and running may fail, as the control socket.
    let opened = Run::with_devices(plan(), vec![device("a0", vec![frames(1000)])]).unwrap();
    assert_eq!(captures(directory.path()), (3, names.to_vec()));
    let second = Run::with_devices(plan(), vec![device("b0", vec![frames(1000)])]);
    let error = second.err().unwrap();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    assert!(error.help().contains("another path"), "{}", error.help());
    assert_eq!(captures(directory.path()), (3, names.to_vec()));
    assert_eq!(old(), trace::FILES.len());
    kept(opened.run().unwrap());
    assert_eq!(captures(directory.path()).1, Vec::<String>::new());
    assert_eq!(old(), 0);
    report(plan(), vec![device("c0", vec![frames(1000)])]);
}

#[test]
fn ops_4_restart_keeps_rotated_captures() {
    let directory = tempfile::tempdir().unwrap();
    let names = ["cpu0.000003.pcap", "cpu0.pcap", "cpu1.000011.pcap"].map(str::to_owned);
    for name in &names {
        std::fs::write(directory.path().join(name), "old").unwrap();
    }
    let rotation = Rotation { len_bytes: NonZeroU64::new(1 << 20), ..Rotation::default() };
    let to = vec![To::Pcap(directory.path().to_owned())];
    report(RunConfig { to, rotation, ..plan() }, vec![device("a0", vec![frames(1000)])]);
    assert_eq!(captures(directory.path()).1, names);
    for name in ["cpu0.000004.pcap", "cpu1.000012.pcap"] {
        assert!(directory.path().join(name).exists(), "{name}");
    }
}

/// Number of records in the captures of a directory, all of which must be whole.
fn records(directory: &Path) -> usize {
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let records = files.map(|path| {
        let mut reader = PcapReader::new(std::fs::File::open(path).unwrap()).unwrap();
        let mut count = 0;
        while let Some(record) = reader.next_packet() {
            record.unwrap();
            count += 1;
        }
        count
    });
    records.sum()
}

fn records_bytes(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn trace_and_counters_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let trace = TracePlan { directory: directory.path().to_owned(), parse: false };
    let traced = RunConfig { trace: Some(trace), check_order: false, ..plan() };
    let report = report(traced, vec![device("a0", vec![frames(400)])]);
    assert_eq!(report.reordered, Some(0), "a trace checks order too");
    let rows = std::fs::read_to_string(directory.path().join("deliver.csv")).unwrap();
    assert_eq!(rows.lines().count() as u64, 1 + report.path.delivered);
    let counters = std::fs::read_to_string(directory.path().join("counters.json")).unwrap();
    assert!(counters.contains("\"rx_frames\":400"), "{counters}");
}

#[test]
fn mismatched_places_are_refused() {
    let to = vec![To::Count, To::Count];
    let refused =
        Run::with_devices(RunConfig { to, ..plan() }, vec![device("a0", vec![frames(1)])]);
    let error = refused.err().unwrap();
    assert!(!error.is_refusal() && error.to_string().contains("one for each of 1 devices"));
}
