//! `forebay sim`: its list, output and exports.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::WorkDir;

const SCENARIOS: [&str; 20] = [
    "rps-stable",
    "mask-change",
    "rfs-takeover",
    "slot-collision",
    "flow-cnt-rewrite",
    "sock-entries-rewrite",
    "cpu-offline",
    "cpu-crash",
    "elephant",
    "merged-elephant",
    "strangers",
    "counter-wrap",
    "fragments",
    "skewed",
    "heavy-flow",
    "diurnal",
    "aimed",
    "waves",
    "shuffled",
    "everything",
];

fn json(args: &str) -> Value {
    let run = WorkDir::new().run(args);
    assert_eq!((run.code, run.told.as_str()), (Some(0), ""), "{args}");
    serde_json::from_str(&run.stdout).unwrap()
}

#[test]
fn scenarios_listed_unknown_is_usage() {
    let dir = WorkDir::new();
    let listed = dir.run("sim");
    let names = listed.stdout.lines().filter_map(|line| line.split(' ').next());
    assert_eq!(names.collect::<Vec<_>>(), SCENARIOS);
    let listed = json("sim --json");
    assert!(listed.as_array().unwrap().iter().map(|it| &it["scenario"]).eq(SCENARIOS));
    for args in ["sim nothing", "sim elephant --seeds 0", "sim elephant --trace dir"] {
        assert_eq!(dir.run(args).code, Some(2), "{args}");
    }
    let both = dir.run("sim elephant --rules kernel --seed 1 --trace dir");
    assert_eq!(both.code, Some(2));
    assert!(both.told.contains("leave out --rules"), "{}", both.told);
}

#[test]
fn kernel_rule_violations_are_comparison() {
    let both = json("sim mask-change --seeds 2 --packets 3000 --json");
    let kernel = &both["kernel"];
    assert_eq!((&both["scenario"], &both["rules"]), (&"mask-change".into(), &"forebay".into()));
    assert_eq!((&both["seeds"], &both["violations"]), (&2.into(), &0.into()));
    assert_eq!(both["first_violation"], Value::Null);
    assert!(both["hazardous"].as_u64() > Some(0) && both["steps"].as_u64() > Some(0));
    assert!(kernel["reordered"].as_u64() > Some(0), "{kernel}");
    assert_eq!(kernel["first_violation"]["law"], "order");
    // The summary is the same without our rules, and the reported seed reproduces the violation.
    assert_eq!(json("sim mask-change --seeds 2 --packets 3000 --json --rules kernel"), *kernel);
    let seed = &kernel["first_violation"]["seed"];
    let again = format!("sim mask-change --seed {seed} --packets 3000 --json --rules kernel");
    assert_eq!(json(&again)["first_violation"], kernel["first_violation"]);

    let run = WorkDir::new().run("sim mask-change --seeds 2 --packets 3000");
    let rows: Vec<Vec<_>> =
        run.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1][..3], ["mask-change", "forebay", "2"]);
    assert_eq!(rows[2][..3], ["mask-change", "kernel", "2"]);
}

#[test]
fn promise_1_simulated_trace_can_be_judged() {
    let dir = WorkDir::new();
    let run = dir.run("sim cpu-crash --seed 5 --packets 2000 --rules forebay --json --trace dir");
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    let [orders, flows, sequences] = ["order", "flow", "seq"].map(|column| {
        let column = dir.column("dir/deliver.csv", column).into_iter();
        column.map(|number| number.parse::<u64>().unwrap()).collect::<Vec<_>>()
    });
    // Each CPU writes rows of its own; the order numbers span all CPUs.
    let mut numbers: Vec<_> = (0..flows.len()).map(|row| (orders[row], row)).collect();
    numbers.sort_unstable();
    let numbers = numbers.into_iter().map(|(_, row)| (flows[row], sequences[row]));
    let mut last = BTreeMap::new();
    for (flow, sequence) in numbers {
        let before = last.insert(flow, sequence);
        assert!(before < Some(sequence), "{sequence} of flow {flow} after {before:?}");
    }
    assert_eq!(summary["delivered"], flows.len());
    assert_eq!(summary["dropped"], dir.column("dir/drop.csv", "frame").len());
    let sent = dir.read("dir/sent.csv");
    let sent = sent.lines().map(|line| line.split(',').nth(1).unwrap().parse::<u64>().unwrap());
    assert!(sent.sum::<u64>() <= summary["packets"].as_u64().unwrap());
    let what: BTreeSet<_> = dir.column("dir/config.csv", "what").into_iter().collect();
    assert!(what.len() > 1, "{what:?}");
    // A trace does not change the result.
    let plain = json("sim cpu-crash --seed 5 --packets 2000 --rules forebay --json");
    assert_eq!(summary, plain);
}

/// A packet in a trace.
struct Traced {
    flow: u64,
    sequence: u64,
    frame: u64,
    epoch: u64,
    cpu: u64,
    enqueued_ns: u64,
    dequeued_ns: u64,
}

/// Delivered packets of the trace in `dir`, in the order of delivery.
fn delivered(dir: &WorkDir) -> Vec<Traced> {
    let columns = ["order", "flow", "seq", "frame", "epoch", "cpu", "t_enq", "t_deq"];
    let columns = columns.map(|name| {
        let column = dir.column("dir/deliver.csv", name).into_iter();
        column.map(|number| number.parse::<u64>().unwrap()).collect::<Vec<_>>()
    });
    let rows = (0..columns[0].len()).map(|row| columns.each_ref().map(|column| column[row]));
    let mut rows: Vec<_> = rows.collect();
    rows.sort_unstable();
    let packet = |[_, flow, sequence, frame, epoch, cpu, enqueued_ns, dequeued_ns]: [u64; 8]| {
        Traced { flow, sequence, frame, epoch, cpu, enqueued_ns, dequeued_ns }
    };
    rows.into_iter().map(packet).collect()
}

/// Number of packets that came after a change while the one before in their flow was queued (`hazardous` of the independent
/// order checker), and of times that a flow's CPU changed although a packet of it was queued at a change (`moved_hazardous`).
fn hazards(dir: &WorkDir, packets: &[Traced]) -> [usize; 2] {
    let changes = dir.column("dir/config.csv", "t_ns").into_iter();
    let mut changes: Vec<_> = changes.map(|at_ns| at_ns.parse::<u64>().unwrap()).collect();
    changes.sort_unstable();
    let mut by_flow: BTreeMap<u64, Vec<&Traced>> = BTreeMap::new();
    packets.iter().for_each(|packet| by_flow.entry(packet.flow).or_default().push(packet));
    let (mut hazardous, mut moved) = (0, 0);
    for flow in by_flow.values_mut() {
        flow.sort_unstable_by_key(|packet| packet.frame);
        for pair in flow.windows(2) {
            let [before, packet] = pair else { continue };
            hazardous += usize::from(
                packet.epoch != before.epoch && before.dequeued_ns > packet.enqueued_ns,
            );
            if packet.cpu != before.cpu {
                assert!(before.dequeued_ns <= packet.enqueued_ns, "flow {}", packet.flow);
                let next = changes.partition_point(|at_ns| *at_ns <= before.enqueued_ns);
                let change = changes.get(next);
                moved += usize::from(change.is_some_and(|at_ns| *at_ns < before.dequeued_ns));
            }
        }
    }
    [hazardous, moved]
}

/// Judged by the trace alone. `docs/src/concepts/steering.md` has the figures of a million packets.
#[test]
fn promise_1_hazardous_moves_keep_order() {
    for (args, hazardous_min, moved_min) in
        [("mask-change --packets 40000", 800, 150), ("shuffled --packets 40000", 2_000, 600)]
    {
        let dir = WorkDir::new();
        let run = dir.run(&format!("sim {args} --cpus 8 --seed 1 --rules forebay --trace dir"));
        assert_eq!(run.code, Some(0), "{args}: {}", run.told);
        let packets = delivered(&dir);
        let mut last = BTreeMap::new();
        for Traced { flow, sequence, .. } in &packets {
            let before = last.insert(*flow, *sequence);
            assert!(before < Some(*sequence), "{args}: {sequence} of flow {flow} after {before:?}");
        }
        let [hazardous, moved] = hazards(&dir, &packets);
        let enough = hazardous >= hazardous_min && moved >= moved_min;
        assert!(enough, "{args}: {hazardous} hazardous, {moved} moved");
    }
}
