//! A trace: plain files that agree with each other and with the report.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

use forebay_device::Rate;
use forebay_device::synthetic::SyntheticPlan;
use forebay_engine::trace;
use forebay_run::replay::{Replay, ReplayReport, TracePlan};

use crate::replays::{directory, drop_when_full, run, script, stepped};

/// A file of a trace, with columns by the names in its header.
struct Table {
    columns: HashMap<String, usize>,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn read(path: &Path, header: &str) -> Self {
        let text = fs::read_to_string(path).unwrap();
        let (first, rows) = text.split_once('\n').unwrap();
        assert_eq!(first, header, "{}", path.display());
        let fields = |row: &str| row.split(',').map(str::to_owned).collect::<Vec<_>>();
        let columns = fields(first).into_iter().zip(0..).collect();
        let rows: Vec<_> = rows.lines().map(fields).collect();
        assert!(rows.iter().all(|row| row.len() == fields(first).len()), "{}", path.display());
        Self { columns, rows }
    }

    /// Columns as numbers, row by row; `None` for an empty field.
    fn numbers<const N: usize>(&self, names: [&str; N]) -> Vec<[Option<u64>; N]> {
        let at = names.map(|name| self.columns[name]);
        self.rows.iter().map(|row| at.map(|at| row[at].parse().ok())).collect()
    }

    fn texts<const N: usize>(&self, names: [&str; N]) -> Vec<[&str; N]> {
        let at = names.map(|name| self.columns[name]);
        self.rows.iter().map(|row| at.map(|at| row[at].as_str())).collect()
    }
}

const FRAMES: u64 = 5000;
const START: u32 = u32::MAX - 200;
const CHANGES: [&str; 5] = [
    "1000:rps_cpus=2",
    "2000:rps_cpus=7",
    "2500:pause=1",
    "3000:resume=1",
    "4000:netdev_max_backlog=50",
];

/// Replay of more packets than three CPUs can process, on two queues, with changes during the run.
fn traced(name: &str) -> (PathBuf, ReplayReport) {
    let directory = directory(name);
    let traffic = SyntheticPlan {
        frames: FRAMES,
        rate: Rate::PerSecond(2_000_000),
        ..SyntheticPlan::default()
    };
    let mut plan = stepped(3, traffic, 4);
    plan.queues = NonZeroU16::new(2).unwrap();
    plan.work_ns = 2000;
    plan.engine.netdev_max_backlog = 200;
    plan.engine.start_counters = START;
    plan.engine.script = script(&CHANGES);
    drop_when_full(&mut plan);
    plan.trace = Some(TracePlan { directory: directory.clone(), parse: true });
    let report = run(plan);
    assert!(report.path.delivered > 0 && report.path.dropped_in_all() > 0, "{report:?}");
    assert!(report.path.steer.moves > 0, "{report:?}");
    (directory, report)
}

#[test]
fn ops_4_failed_replay_keeps_earlier_files() {
    let directory = directory("kept");
    let captures = directory.join("captures");
    fs::create_dir(&captures).unwrap();
    let names = trace::FILES.iter().copied().chain(["captures/cpu9.pcap"]);
    let paths: Vec<_> = names.map(|name| directory.join(name)).collect();
    paths.iter().for_each(|path| fs::write(path, "old").unwrap());
    let of_earlier = |path: &&PathBuf| fs::read_to_string(path).unwrap_or_default() == "old";
    for parse in [true, false] {
        let traffic = SyntheticPlan { frames: 100, ..SyntheticPlan::default() };
        let mut plan = stepped(2, traffic, 1);
        plan.write_pcap = Some(captures.clone());
        plan.trace = Some(TracePlan { directory: directory.clone(), parse });
        // What comes between opening and running may fail, as the control socket.
        let opened = Replay::open(plan).unwrap();
        assert_eq!(paths.iter().filter(of_earlier).count(), paths.len(), "{parse}");
        opened.run().unwrap();
        let left: Vec<_> = paths.iter().filter(|path| path.exists()).collect();
        assert_eq!(left.iter().copied().filter(of_earlier).count(), 0, "{left:?}");
        assert_eq!(left.len(), if parse { 6 } else { 4 }, "{left:?}");
        paths.iter().for_each(|path| fs::write(path, "old").unwrap());
    }
}

const DELIVER: &str = "order,flow,seq,rxq,frame,hash,epoch,cpu,qpos,head_old,because,t_enq,t_deq";
const DROP: &str = "rxq,frame,reason,flow,seq";

#[test]
fn promise_2_every_frame_is_in_one_file() {
    let (directory, report) = traced("one-file");
    let deliver = Table::read(&directory.join("deliver.csv"), DELIVER);
    let drops = Table::read(&directory.join("drop.csv"), DROP);
    assert_eq!(deliver.rows.len() as u64, report.path.delivered);
    assert_eq!(drops.rows.len() as u64, report.path.dropped_in_all());

    let frames = [&deliver, &drops].map(|table| table.numbers(["frame"])).concat();
    let frames: BTreeSet<_> = frames.as_flattened().iter().map(|frame| frame.unwrap()).collect();
    assert_eq!(frames, (0..FRAMES).collect());

    let packets = [&deliver, &drops].map(|table| table.numbers(["flow", "seq"])).concat();
    let packets: BTreeSet<_> = packets.into_iter().collect();
    assert_eq!(packets.len() as u64, FRAMES, "stamps tell all packets apart");
    for (reason, count) in &report.path.dropped {
        let rows = drops.texts(["reason"]).into_iter().filter(|row| row[0] == *reason).count();
        assert_eq!(rows as u64, *count, "{reason}");
    }

    let counters = fs::read_to_string(directory.join("counters.json")).unwrap();
    let counters: serde_json::Value = serde_json::from_str(&counters).unwrap();
    assert_eq!(counters["rx_frames"], FRAMES);
    assert_eq!(counters["delivered"], report.path.delivered);
    assert_eq!(counters["drops"], serde_json::to_value(&report.path.dropped).unwrap());
    assert_eq!(counters["rfs"]["moves"], report.path.steer.moves);
    for cpu in counters["per_cpu"].as_array().unwrap() {
        let rows = deliver.numbers(["cpu"]);
        let delivered = rows.iter().filter(|row| row[0] == cpu["cpu"].as_u64()).count();
        assert_eq!(cpu["deq"], delivered);
        assert_eq!(cpu["enq"], cpu["deq"], "nothing is queued at the end");
    }
}

#[test]
fn promise_1_delivery_order_is_total() {
    let (directory, _) = traced("order");
    let deliver = Table::read(&directory.join("deliver.csv"), DELIVER);
    let mut rows =
        deliver.numbers(["order", "flow", "seq", "rxq", "cpu", "qpos", "t_enq", "t_deq"]);
    rows.sort_unstable();
    let (mut flows, mut backlogs) = (HashMap::new(), HashMap::new());
    for (at, row) in (0..).zip(rows) {
        let [order, flow, seq, rxq, cpu, position, enqueued, dequeued] = row.map(Option::unwrap);
        assert_eq!(order, at);
        let last = flows.insert((rxq, flow), seq);
        assert!(last < Some(seq), "flow {flow} of rx-{rxq}: {seq} after {last:?}");
        let before = backlogs.insert((rxq, cpu), position).unwrap_or(START.into());
        let wrapped = (before + 1) % (1 << 32);
        assert_eq!(position, wrapped, "a backlog's tail moves by one: rx-{rxq}, cpu{cpu}");
        assert!(enqueued <= dequeued);
    }
    assert!(backlogs.values().any(|position| *position < START.into()), "counters wrapped");
}

/// Flows of a slot share the hash's bits above this one: 4096 slots.
const SLOT_SHIFT: u32 = 20;

#[test]
fn move_names_the_head_allowing_it() {
    let (directory, report) = traced("moves");
    let deliver = Table::read(&directory.join("deliver.csv"), DELIVER);
    let mut rows: Vec<_> = deliver.texts(["frame", "rxq", "hash", "cpu", "head_old"]);
    rows.sort_by_key(|row| row[0].parse::<u64>().unwrap());
    let (mut slots, mut moves, mut proofs) = (HashMap::new(), 0, 0);
    for [frame, rxq, hash, cpu, head_old] in rows {
        let slot = u32::from_str_radix(hash, 16).unwrap() >> SLOT_SHIFT;
        let last = slots.insert((rxq, slot), (hash, cpu));
        let moved = last.is_some_and(|(_, last)| last != cpu);
        let behind_its_own = last.is_some_and(|(last, _)| last == hash);
        assert_eq!(!head_old.is_empty(), moved && behind_its_own, "frame {frame}");
        moves += u64::from(moved);
        proofs += u64::from(!head_old.is_empty());
    }
    assert_eq!(moves, report.path.steer.moves);
    assert!(proofs > moves / 2, "{proofs} of {moves}");
}

#[test]
fn changes_are_traced_in_force() {
    let (directory, _) = traced("changes-in-force");
    let config = Table::read(&directory.join("config.csv"), "t_ns,epoch,what,value");
    let expected = [
        ["0", "rps_cpus", "7"],
        ["1", "rps_cpus", "2"],
        ["2", "rps_cpus", "7"],
        ["3", "pause", "1"],
        ["4", "resume", "1"],
        ["5", "netdev_max_backlog", "50"],
    ];
    assert_eq!(config.texts(["epoch", "what", "value"]), expected);
    assert!(config.numbers(["t_ns"]).is_sorted());

    let first_frames = [0, 1000, 2000, 2500, 3000, 4000, FRAMES];
    let deliver = Table::read(&directory.join("deliver.csv"), DELIVER);
    for row in deliver.numbers(["epoch", "frame"]) {
        let [epoch, frame] = row.map(Option::unwrap);
        let epoch = usize::try_from(epoch).unwrap();
        // The path decides about held packets later than they arrive.
        assert!(first_frames[epoch + 1] > frame || epoch == 5, "epoch {epoch}, frame {frame}");
    }
}

#[test]
fn every_frame_gets_a_row() {
    let (directory, _) = traced("parse");
    let header = "frame,len,caplen,eth_type,vlans,ip_ver,src,dst,proto,ttl,frag,ip_hl,ip_len,\
                  ip_csum,l4_csum,sport,dport,l4_payload_len,tcp_seq,tcp_flags,hash,verdict";
    let parse = Table::read(&directory.join("parse.csv"), header);
    let mut frames = parse.numbers(["frame"]);
    frames.sort_unstable();
    assert_eq!(frames.concat(), (0..FRAMES).map(Some).collect::<Vec<_>>());
    let fixed = ["len", "eth_type", "proto", "ip_csum", "l4_csum", "dport", "tcp_seq", "verdict"];
    let udp = ["60", "0x0800", "17", "G", "G", "9000", "", "udp"];
    assert!(parse.texts(fixed).iter().all(|row| *row == udp));

    let header = "frame,rule,layers,src,dst,proto,sport,dport,id,hash";
    let keys = Table::read(&directory.join("flowkey.csv"), header);
    let columns = ["frame", "src", "dst", "proto", "sport", "dport", "hash"];
    assert_eq!(keys.texts(columns), parse.texts(columns), "no tunnel here");
    let rules = keys.texts(["rule", "layers", "id"]);
    assert!(rules.iter().all(|row| *row == ["outer", "ipv4.udp", ""]));
}
