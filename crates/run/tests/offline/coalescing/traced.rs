//! Merged packets in the files of a run.

use std::collections::{HashMap, HashSet};
use std::fs;

use forebay_run::replay::{Replay, TracePlan};
use serde_json::Value;

use super::*;

/// Report of a run, and the files of its trace.
pub(crate) struct Files {
    pub(crate) report: ReplayReport,
    pub(crate) deliver: Rows,
    drop: Rows,
    lro: Vec<Value>,
}

/// Rows of a file, with fields by the names in its header.
pub(crate) struct Rows(Vec<HashMap<String, String>>);

impl Rows {
    fn read(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap();
        let mut lines = text.lines().map(|line| line.split(',').map(str::to_owned));
        let names: Vec<_> = lines.next().unwrap().collect();
        Self(lines.map(|fields| names.iter().cloned().zip(fields).collect()).collect())
    }

    pub(crate) fn numbers<const N: usize>(&self, names: [&str; N]) -> Vec<[u64; N]> {
        self.0.iter().map(|row| names.map(|name| row[name].parse().unwrap())).collect()
    }
}

pub(crate) fn traced(name: &str, mut plan: ReplayConfig) -> Files {
    let directory = crate::replays::directory(name);
    plan.trace = Some(TracePlan { directory: directory.clone(), parse: false });
    Files::read(run(plan), &directory)
}

impl Files {
    fn read(report: ReplayReport, directory: &Path) -> Self {
        let lro = fs::read_to_string(directory.join("lro.jsonl")).unwrap();
        Self {
            report,
            deliver: Rows::read(&directory.join("deliver.csv")),
            drop: Rows::read(&directory.join("drop.csv")),
            lro: lro.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
        }
    }
}

fn frames_in(packet: &Value) -> Vec<u64> {
    packet["in"].as_array().unwrap().iter().map(|frame| frame.as_u64().unwrap()).collect()
}

/// Checks that every frame has one line, delivered or dropped, and is in one packet.
fn assert_accounts(files: &Files, frames: u64) {
    let everything: Vec<_> = (0..frames).collect();
    let rows = [&files.deliver, &files.drop].map(|rows| rows.numbers(["frame"])).concat().concat();
    let packets: Vec<_> = files.lro.iter().flat_map(frames_in).collect();
    for mut told in [rows, packets] {
        told.sort_unstable();
        assert_eq!(told, everything);
    }
    assert_eq!(files.deliver.0.len() as u64, files.report.path.delivered);
    assert_eq!(files.drop.0.len() as u64, files.report.path.dropped_in_all());
}

/// Checks that the lines of a merged packet are together: one order, rising sequence numbers, and
/// the frames in `lro.jsonl`.
fn assert_packets(files: &Files) {
    let mut delivered: HashMap<u64, Vec<[u64; 3]>> = HashMap::new();
    for [order, flow, seq, frame] in files.deliver.numbers(["order", "flow", "seq", "frame"]) {
        delivered.entry(order).or_default().push([flow, seq, frame]);
    }
    let mut last = HashMap::new();
    let mut orders: Vec<_> = delivered.into_iter().collect();
    orders.sort_unstable();
    for (at, (order, rows)) in (0..).zip(&orders) {
        assert_eq!(at, *order, "orders have no gaps");
        for [flow, seq, _] in rows {
            assert_eq!(*flow, rows[0][0], "order {order}");
            let before = last.insert(flow, seq);
            assert!(before < Some(seq), "flow {flow}: {seq} after {before:?}");
        }
    }
    let packets: HashSet<Vec<u64>> =
        orders.iter().map(|(_, rows)| rows.iter().map(|[_, _, frame]| *frame).collect()).collect();
    let left = files.lro.iter().filter(|packet| packet["drop"].is_null()).map(frames_in);
    let (delivered, dropped): (HashSet<_>, HashSet<_>) =
        left.partition(|frames| packets.contains(frames));
    assert_eq!(delivered, packets);
    let lost: HashSet<_> = files.drop.numbers(["frame"]).into_iter().map(|[frame]| frame).collect();
    assert!(dropped.iter().flatten().all(|frame| lost.contains(frame)), "dropped after it left");
}

/// Replay of UDP rows, with drops, moves and changes during the run.
fn eventful(at: CoalesceAt) -> ReplayConfig {
    let traffic = SyntheticPlan { rate: Rate::PerSecond(3_000_000), ..in_rows(6000, 64) };
    let mut plan = coalescing(at, stepped(3, traffic, 4));
    plan.queues = NonZeroU16::new(2).unwrap();
    plan.work_ns = 8000;
    plan.engine.netdev_max_backlog = 50;
    plan.engine.script = script(&[
        "1000:rps_cpus=2",
        "2000:rps_cpus=7",
        "2500:pause=1",
        "3000:resume=1",
        "4000:rps_cpus=5",
    ]);
    drop_when_full(&mut plan);
    plan
}

#[test]
fn promise_2_every_frame_is_in_one_packet() {
    for at in ENDS {
        let files = traced("accounts", eventful(at));
        assert_accounts(&files, 6000);
        assert_packets(&files);
        let is_merged = |packet: &&Value| packet["in"].as_array().unwrap().len() > 1;
        let (before, left): (Vec<_>, Vec<_>) =
            files.lro.iter().filter(is_merged).partition(|packet| packet["drop"].is_string());
        assert!(left.len() > 50, "{at:?}: {}", left.len());
        assert!(before.is_empty(), "what was dropped before had not been merged");
        for packet in left {
            let (count, hex) = (frames_in(packet).len() as u64, packet["hex"].as_str().unwrap());
            assert_eq!([&packet["payload_len"], &packet["gso_size"]], [count * 18, 18]);
            assert_eq!(hex.len() as u64, 2 * (14 + 20 + 8 + count * 18));
            assert_eq!(packet["flags"], "");
        }
    }
}

/// As by a config file, or by `forebay set`, before the first frame.
#[test]
fn promise_2_live_coalescing_is_traced() {
    for at in ["arrive", "deliver"] {
        let directory = crate::replays::directory("traced-live");
        let mut plan = stepped(2, in_rows(6000, 64), 4);
        plan.work_ns = 200;
        plan.trace = Some(TracePlan { directory: directory.clone(), parse: false });
        let replay = Replay::open(plan).unwrap();
        assert!(!directory.join("lro.jsonl").exists(), "nothing is coalesced yet");
        for (knob, value) in [("coalesce", "gro"), ("coalesce_at", at)] {
            replay.control().set(knob, value).unwrap();
        }
        let report = replay.run().unwrap();
        assert_eq!(report.broken_promises(), [""; 0], "{report:?}");
        let merged = report.path.lro.packets_out;
        assert!(merged < 3000, "{at}: {merged}");
        let files = Files::read(report, &directory);
        assert_accounts(&files, 6000);
        assert_packets(&files);
    }
}

#[test]
fn coalescing_changes_are_traced_in_force() {
    let changes = ["coalesce=lro", "lro_descriptors=16", "gro_flush_timeout=900", "mtu=9000"];
    let at = ["coalesce_at=deliver", "coalesce=off"];
    let all: Vec<_> = (1..).zip(changes.into_iter().chain(at)).collect();
    let scripted: Vec<_> = all.iter().map(|(nth, change)| format!("{nth}00:{change}")).collect();
    let mut plan = stepped(2, in_rows(1000, 7), 1);
    plan.engine.script = script(&scripted.iter().map(String::as_str).collect::<Vec<_>>());
    traced("changes", plan);
    let config = Path::new(env!("CARGO_TARGET_TMPDIR")).join("changes/config.csv");
    let rows = Rows::read(&config).0;
    let told: Vec<_> = rows
        .iter()
        .map(|row| format!("{}:{}={}", row["epoch"], row["what"], row["value"]))
        .collect();
    let expected = all.iter().map(|(nth, change)| format!("{nth}:{change}"));
    assert_eq!(told[1..], expected.collect::<Vec<_>>());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn promise_2_traces_account_for_every_frame(
        mut plan in any_run::any_plan(),
    ) {
        plan.engine.coalesce.is_on = true;
        assert_accounts(&traced("any", plan), STREAM_FRAMES as u64);
    }
}
