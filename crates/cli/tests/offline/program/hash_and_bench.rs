//! `forebay hash` and `forebay bench`, and the hashes of a replay beside them.

use super::*;

#[test]
fn rps_5_hashes_are_network_cards() {
    let dir = WorkDir::new();
    dir.write_udp("pair.pcap", [&MS_V4_0, &MS_V4_0_BACK]);
    let hashes = |args: &str| {
        dir.report(&format!("pair.pcap --deterministic --cpus 1 --trace t {args}"));
        dir.column("t/deliver.csv", "hash")
    };
    assert_eq!(hashes("--hash toeplitz")[0], "51ccc178");
    for (kind, is_symmetric) in [
        ("keyed", false),
        ("keyed-symmetric", true),
        ("toeplitz", false),
        ("toeplitz-symmetric", true),
    ] {
        let [there, back] = &hashes(&format!("--hash {kind}"))[..] else { panic!("two frames") };
        assert_eq!(there == back, is_symmetric, "{kind}");
    }
    let key = "--hash-key 000102030405060708090a0b0c0d0e0f";
    assert_eq!(hashes(&format!("{key} --seed 1")), hashes(&format!("{key} --seed 2")));
    assert_ne!(hashes("--seed 1"), hashes("--seed 2"), "the seed draws the key");
}

/// Rows of Microsoft's "Verifying the RSS Hash Calculation", and a raw input, that of the first
/// row.
pub(crate) const VECTORS: &str = r#"{
    "keys": {"ms40": "6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa",
             "short": "6d5a56da255b0ec2", "odd": "6d5"},
    "tuples": [
        {"id": "v4", "src": "66.9.149.187", "sport": 2794, "dst": "161.142.100.80", "dport": 1766, "key": "ms40"},
        {"id": "v4b", "src": "199.92.111.2", "sport": 14230, "dst": "65.69.140.83", "dport": 4739, "key": "ms40"},
        {"id": "v6", "src": "3ffe:2501:200:1fff::7", "sport": 2794, "dst": "3ffe:2501:200:3::1", "dport": 1766, "key": "ms40"}
    ],
    "raw": [{"id": "raw", "data": "420995bba18e64500aea06e6", "key": "ms40"}]
}"#;

#[test]
fn rps_5_published_vectors_are_hashed() {
    let dir = WorkDir::new();
    fs::write(dir.path("v.json"), VECTORS).unwrap();
    let run = dir.run("hash --vectors v.json");
    assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
    assert_eq!(
        run.stdout.lines().collect::<Vec<_>>(),
        [
            "v4/l3,323e8fc2",
            "v4/l3l4,51ccc178",
            "v4b/l3,d718262a",
            "v4b/l3l4,c626b0ea",
            "v6/l3,2cc18cd5",
            "v6/l3l4,40207d3d",
            "raw,51ccc178",
        ]
    );
}

#[test]
fn unhashable_vectors_refused_by_id() {
    let dir = WorkDir::new();
    for (from, to, part) in [
        ("\"keys\"", "keys", "v.json: key must be a string at line 2"),
        ("\"keys\"", "\"key\"", "v.json: missing field `keys`"),
        ("161.142.100.80", "::1", "vector v4: src and dst are of different kinds"),
        ("161.142.100.80", "161.142.100", "v.json: invalid IP address"),
        ("2794", "70000", "v.json: invalid value: integer `70000`"),
        (
            "1766, \"key\": \"ms40\"",
            "1766, \"key\": \"ms41\"",
            "vector v4: there is no key \"ms41\"",
        ),
        ("1766, \"key\": \"ms40\"", "1766, \"key\": \"odd\"", "vector v4: key \"odd\": Odd number"),
        ("1766, \"key\": \"ms40\"", "1766, \"key\": \"short\"", "vector v4:"),
        ("420995bb", "420995b", "vector raw: data: Odd number of digits"),
    ] {
        fs::write(dir.path("v.json"), VECTORS.replacen(from, to, 1)).unwrap();
        let run = dir.run("hash --vectors v.json");
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{to}: {}", run.told);
        assert!(run.told.contains(part), "{to}: {part:?} is not in {:?}", run.told);
    }
    let run = dir.run("hash --vectors none.json");
    assert_eq!(run.code, Some(2));
    assert!(run.told.contains("cannot read none.json"), "{}", run.told);
}

#[test]
fn comparison_refuses_unknown_names_and_places() {
    let dir = WorkDir::new();
    for (args, problem) in [
        ("--only no-such-program", "--only no-such-program: no program has that name"),
        ("--svg none/all.svg", "--svg none/all.svg: No such file or directory"),
    ] {
        let run = dir.run(&format!("compare cpu {args}"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}");
        assert!(run.told.contains(problem), "{args}: {}", run.told);
    }
    fs::write(dir.path("all.svg"), "of an earlier run").unwrap();
    let run = dir.run("compare cpu --only no-such-program --svg all.svg");
    assert_eq!((run.code, dir.read("all.svg").as_str()), (Some(2), "of an earlier run"));
}

#[test]
fn benchmark_prints_one_line() {
    let run = WorkDir::new().run("bench checksum --reps 3 --secs 1");
    assert_eq!(run.code, Some(0), "{}", run.told);
    assert_eq!(run.stdout.lines().count(), 1);
    let figures: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!([&figures["name"], &figures["unit"]], ["checksum", "ns/packet"]);
    let [min, median, max] = ["min", "median", "max"].map(|field| figures[field].as_f64().unwrap());
    assert!(0.0 < min && min <= median && median <= max, "{figures}");
    assert!((1..=3).contains(&number(&figures["n"])), "{figures}");
}

#[test]
fn steering_benchmark_packets_can_be_steered() {
    let dir = WorkDir::new();
    let arp = [[0xff; 12].as_slice(), &[8, 6], &[0; 46]].concat();
    let mut jumbo = Vec::new();
    PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .udp(1, 2)
        .write(&mut jumbo, &[0; 8000])
        .unwrap();
    for (name, frames) in [("arp.pcap", vec![&arp]), ("mixed.pcap", vec![&arp, &jumbo])] {
        let mut writer = PcapWriter::new(File::create(dir.path(name)).unwrap()).unwrap();
        for frame in frames {
            let len = u32::try_from(frame.len()).unwrap();
            writer.write_packet(&PcapPacket::new(std::time::Duration::ZERO, len, frame)).unwrap();
        }
    }
    let run = dir.run("bench steer arp.pcap --reps 1");
    assert_eq!(run.code, Some(2));
    if run.told.contains("needs two CPUs") {
        return;
    }
    assert!(run.told.contains("no packet with a flow hash"), "{}", run.told);
    let run = dir.run("bench steer mixed.pcap --reps 1");
    assert_eq!(run.code, Some(0), "{}", run.told);
    let figures: Value = serde_json::from_str(&run.stdout).unwrap();
    assert!(figures["median"].as_f64().unwrap() > 0.0, "{figures}");
    assert_eq!([&figures["packets"], &figures["dropped"]], [1, 0], "{figures}");
}

#[test]
fn socket_benchmark_rotates_policies_without_leaks() {
    let run = WorkDir::new().run("bench udp --reps 1 --secs 1 --producers 2 --work-ns 20");
    if run.told.contains("needs two CPUs") {
        return;
    }
    assert_eq!(run.code, Some(0), "{}", run.told);
    let figures: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(figures["frames_away"], 0, "{figures}");
    for policy in ["owner", "copy-cache", "condense", "none"] {
        for run in figures["runs"].as_array().unwrap() {
            let policy = &run["policies"][policy];
            for figure in ["kpps", "offered_kpps", "reader_ns", "producer_ns", "dropped"] {
                assert!(policy[figure]["median"].is_number(), "{figure}: {figures}");
            }
        }
        let rates = figures["rates"][policy]["rates"].as_array().unwrap();
        let rates = rates.iter().map(|rate| rate["rate"].as_f64().unwrap());
        assert!(rates.eq([0.5, 1.0, 2.0, 4.0]), "{figures}");
    }
    let readers = figures["runs"].as_array().unwrap().iter().map(|run| &run["reader"]);
    assert!(readers.eq(["slow", "fast"]), "{figures}");
}
