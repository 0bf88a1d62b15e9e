//! Replays of synthetic traffic on a few CPUs, and directories for their files.
#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]
#![allow(dead_code, reason = "each test takes what it needs")]

use std::fs;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_device::synthetic::SyntheticPlan;
use forebay_engine::knobs::Script;
use forebay_engine::{Config, WhenFull};
use forebay_run::replay::{Input, Mode, Replay, ReplayConfig, ReplayReport};
use forebay_rx::CpuId;
use forebay_rx::hash::Hasher;
use forebay_rx::steer::SpreadPolicy;
use forebay_sys::cpu_list::CpuList;

/// Replay on these CPUs that steers every packet, with a constant hash key.
pub(crate) fn plan(
    cpus: impl IntoIterator<Item = CpuId>,
    input: Input,
    mode: Mode,
) -> ReplayConfig {
    let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
    let mut engine = Config::new(CpuList::new(cpus), hasher);
    engine.spread = SpreadPolicy::Always;
    ReplayConfig {
        input,
        queues: NonZeroU16::MIN,
        engine,
        mode,
        work_ns: 0,
        write_pcap: None,
        resegment: false,
        rotation: Default::default(),
        trace: None,
        plots: Vec::new(),
        explain: Vec::new(),
    }
}

/// Stepped replay of synthetic traffic on CPUs 0 to `cpus - 1`.
pub(crate) fn stepped(cpus: u16, traffic: SyntheticPlan, seed: u64) -> ReplayConfig {
    plan((0..cpus).map(CpuId), Input::Synthetic(traffic), Mode::Stepped { seed })
}

/// Makes a replay drop packets when there is no room for them.
pub(crate) fn drop_when_full(plan: &mut ReplayConfig) {
    plan.engine.when_full = WhenFull::Drop;
}

/// Script of changes, written as on the command line.
pub(crate) fn script(changes: &[&str]) -> Script {
    Script::new(changes.iter().map(|change| change.parse().unwrap()).collect())
}

/// Runs to the end, and checks the promises that every run keeps.
pub(crate) fn run(plan: ReplayConfig) -> ReplayReport {
    let report = Replay::open(plan).unwrap().run().unwrap();
    assert_eq!(report.broken_promises(), [""; 0], "{report:?}");
    assert_eq!((report.path.queued, report.order_unchecked), (0, 0), "{report:?}");
    let processed: u64 = report.path.per_cpu.iter().map(|cpu| cpu.packets).sum();
    assert_eq!(processed, report.path.delivered);
    report
}

/// An empty directory of this name, for one test.
pub(crate) fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if directory.exists() {
        fs::remove_dir_all(&directory).unwrap();
    }
    fs::create_dir_all(&directory).unwrap();
    directory
}
