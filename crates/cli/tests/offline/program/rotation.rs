//! Captures in several files: by size, by time, and the newest only.

use std::collections::BTreeMap;
use std::fs::{self, File};

use pcap_file::pcap::PcapReader;

use super::{BUNDLED_FRAMES, WorkDir};

/// Smallest size that can be asked for.
const SIZE_BYTES: u64 = 65_536;

/// Records of each capture in a directory, by its name.
fn records(dir: &WorkDir, directory: &str) -> BTreeMap<String, u64> {
    let entries = fs::read_dir(dir.path(directory)).unwrap().map(Result::unwrap);
    let count = |entry: fs::DirEntry| {
        let mut reader = PcapReader::new(File::open(entry.path()).unwrap()).unwrap();
        let mut records = 0;
        while let Some(record) = reader.next_packet() {
            record.unwrap();
            records += 1;
        }
        (entry.file_name().into_string().unwrap(), records)
    };
    entries.map(count).collect()
}

#[test]
fn ops_4_rotation_by_size_loses_nothing() {
    let dir = WorkDir::new();
    let fixed = "--cpus 2 --spread always --rps 3 --write-pcap out --rotate-bytes 64k";
    dir.report(fixed);
    let files = records(&dir, "out");
    assert_eq!(files.values().sum::<u64>(), BUNDLED_FRAMES);
    for name in ["cpu0.000000.pcap", "cpu0.000001.pcap", "cpu1.000000.pcap", "cpu1.000001.pcap"] {
        assert!(files.contains_key(name), "{name}: {files:?}");
    }
    for name in files.keys() {
        let len_bytes = fs::metadata(dir.path("out").join(name)).unwrap().len();
        assert!(len_bytes <= SIZE_BYTES, "{name}: {len_bytes}");
    }
    // Files of an earlier run do not stay.
    dir.report(&format!("{fixed} --rotate-keep 2"));
    let kept = records(&dir, "out");
    assert_eq!(kept.len(), 4, "{kept:?}");
    let last = |files: &BTreeMap<String, u64>| files.keys().next_back().unwrap().clone();
    assert!(last(&kept).as_str() > "cpu1.000001.pcap", "the newest: {kept:?}");
}

#[test]
fn ops_4_rotation_by_time_follows_packets() {
    let dir = WorkDir::new();
    // Two packets a second, in virtual time.
    let fixed = "--synthetic flows=1,frames=20 --rate 2 --cpus 1 --deterministic --write-pcap out";
    dir.report(&format!("{fixed} --rotate-seconds 3"));
    let files = records(&dir, "out");
    assert_eq!(files.values().sum::<u64>(), 20);
    assert_eq!(files.len(), 4, "six packets of three seconds each: {files:?}");
}

#[test]
fn ops_4_impossible_rotations_are_usage() {
    let dir = WorkDir::new();
    for (args, part) in [
        ("replay --rotate-bytes 1M", "there are no captures to write to"),
        ("run lo --rotate-seconds 60 --to count", "there are no captures to write to"),
        ("replay --write-pcap out --rotate-keep 3", "--rotate-keep: there is one capture"),
        ("replay --write-pcap out --rotate-bytes 1k", "64k at least"),
        ("replay --write-pcap out --rotate-seconds 0", "--rotate-seconds <SECS>"),
        ("replay --write-pcap out --rotate-seconds 9 --rotate-keep 0", "--rotate-keep <N>"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}
