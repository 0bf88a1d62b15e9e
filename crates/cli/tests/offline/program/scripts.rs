//! Scripted changes: at their frames, impossible, and after the last frame.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde_json::Value;

use super::{BUNDLED_FRAMES, WorkDir, number};

#[test]
fn rps_11_scripted_mask_applies_at_frame() {
    let dir = WorkDir::new();
    // Slow enough that no packet is queued when the mask changes.
    let fixed = "--deterministic --cpus 2 --spread always --rps 1 --rate 1000 --trace t";
    dir.report(&format!("{fixed} --synthetic frames=300 --at 100:rps_cpus=2"));
    let config = dir.read("t/config.csv");
    let [header, first, change] = config.lines().collect::<Vec<_>>()[..] else {
        panic!("{config}")
    };
    assert_eq!([header, first], ["t_ns,epoch,what,value", "0,0,rps_cpus,1"]);
    assert!(change.ends_with(",1,rps_cpus,2"), "{change}");
    let rows = dir.column("t/deliver.csv", "frame").into_iter();
    for (frame, cpu) in rows.zip(dir.column("t/deliver.csv", "cpu")) {
        let frame: u64 = frame.parse().unwrap();
        assert_eq!(cpu, if frame < 100 { "0" } else { "1" }, "frame {frame}");
    }
}

#[test]
fn flk_7_traced_key_follows_the_change() {
    let key = "5a".repeat(16);
    let dir = WorkDir::new();
    let fixed = "--deterministic --cpus 2 --synthetic flows=4,frames=200 --trace t --trace-parse";
    // Inside a burst, both.
    dir.report(&format!("{fixed} --at 70:hash_key={key} --at 100:flow_key=inner"));
    let hashes = |file: &str| {
        let frames = dir.column(file, "frame").into_iter();
        frames.zip(dir.column(file, "hash")).collect::<BTreeMap<_, _>>()
    };
    let steered = hashes("t/deliver.csv");
    assert_eq!(steered.len(), 200);
    assert_eq!(hashes("t/parse.csv"), steered);
    assert_eq!(hashes("t/flowkey.csv"), steered);
    let before = steered.iter().filter(|(frame, _)| frame.parse::<u64>().unwrap() < 70);
    let before: BTreeSet<_> = before.map(|(_, hash)| hash).collect();
    assert_eq!((before.len(), steered.values().collect::<BTreeSet<_>>().len()), (4, 8));
}

#[test]
fn impossible_script_change_is_reported() {
    let run = WorkDir::new()
        .run("replay --json --deterministic --cpus 2 --at 100:online=0:0 --at 200:online=1:0");
    assert_eq!(run.code, Some(2), "{}", run.told);
    assert!(run.told.contains("the last one stays"), "{}", run.told);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(number(&report["delivered"]), BUNDLED_FRAMES);
}

/// A value can be read only once the machine is known: the line is known all the same.
#[test]
fn refused_script_value_names_its_line() {
    let dir = WorkDir::new();
    for (change, problem) in [
        ("rps_cpus=zz", "rps_cpus cannot be \"zz\": "),
        ("rfs_desired=1", "rfs_desired cannot be \"1\": it is HASH:CPU, the hash in hexadecimal"),
        ("rfs_desired=0badcafe:x", "rfs_desired cannot be \"0badcafe:x\": it is HASH:CPU"),
        ("online=1", "online cannot be \"1\": it is CPU:0 or CPU:1"),
        ("pause=7", "pause=7: that CPU is not among --cpus"),
    ] {
        // An editor's byte-order mark is no part of the first line.
        let script = format!("\u{feff}10:rps_cpus=1\n# flips\n20:{change}\n");
        fs::write(dir.path("s"), script).unwrap();
        let run = dir.run("replay --json --deterministic --cpus 2 --script s");
        assert_eq!(run.code, Some(2), "{change}: {}", run.told);
        let told: Value = serde_json::from_str(&run.stdout).unwrap();
        let told = told["error"].as_str().unwrap();
        assert!(told.starts_with(&format!("--script s, line 3: {problem}")), "{told}");
    }
}

#[test]
fn changes_after_the_input_are_told() {
    let replay = "replay --deterministic --cpus 2 --synthetic flows=4,frames=100";
    for (changes, told) in [
        ("--at 50:rps_cpus=1 --at 100:rps_cpus=3", ""),
        ("--at 101:rps_cpus=3", "1 scripted change not made: the input ended after 100 frames"),
        ("--at 5000:rps_cpus=3 --at 6000:rps_cpus=1", "2 scripted changes not made"),
    ] {
        let run = WorkDir::new().run(&format!("{replay} {changes}"));
        assert_eq!(run.code, Some(0), "{}", run.told);
        assert_eq!(run.told.is_empty(), told.is_empty(), "{changes}: {}", run.told);
        assert!(run.told.contains(told), "{changes}: {}", run.told);
    }
}
