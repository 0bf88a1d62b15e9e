//! The options of coalescing, and its report.

use super::*;

/// Traffic in which each flow sends ten datagrams in a row.
const ROWS: &str = "--synthetic flows=4,frames=2000,size=100,run=10 --cpus 2 --deterministic";

#[test]
fn nothing_merges_without_configuration() {
    let dir = WorkDir::new();
    for (args, is_merged) in [
        ("--seed 1", false),
        ("--coalesce off", false),
        ("--coalesce off --coalesce-at arrive --descriptors 16", false),
        ("--no-checksums --coalesce gro", false),
        ("--coalesce gro", true),
        ("--coalesce gro --coalesce-at deliver --spread always", true),
        ("--coalesce-at arrive", true),
        ("--gro-flush-timeout 20000", true),
        ("--descriptors 4", true),
        ("--mtu 9000", true),
        ("--set coalesce=gro", true),
        ("--coalesce lro --at 0:coalesce=gro", true),
    ] {
        let lro = &dir.report(&format!("{ROWS} {args}"))["lro"];
        assert_eq!(lro["segments_in"], 2000, "{args}");
        let packets = number(&lro["packets_out"]);
        assert!(packets == 2000 || is_merged && packets <= 700, "{args}: {packets}");
        assert_eq!(packets < 2000, is_merged, "{args}");
    }
}

#[test]
fn merges_and_refusals_are_reported() {
    let dir = WorkDir::new();
    let report = dir.report(&format!("{ROWS} --coalesce gro"));
    let lro = &report["lro"];
    let packets = number(&lro["packets_out"]);
    // 42 bytes of headers before each packet's payload.
    let bytes = 2000 * 100 + packets * 42;
    let [bytes_out, packets_out] =
        [bytes, packets].map(|count| f64::from(u32::try_from(count).unwrap()));
    let error = lro["bytes_per_packet"].as_f64().unwrap() - bytes_out / packets_out;
    assert!(error.abs() < 1e-6, "{lro}");
    let flushed: u64 = lro["flushes"].as_object().unwrap().values().map(number).sum();
    assert_eq!(flushed, packets, "nothing was refused: {lro}");
    assert!(lro["refused"].as_object().unwrap().values().all(|count| *count == 0), "{lro}");
    assert_eq!(sum(&report, "packets"), 2000, "frames");
    assert_eq!(sum(&report, "bytes"), bytes, "headers once");
}

#[test]
fn lro_8_mode_decides_what_merges() {
    let dir = WorkDir::new();
    let mut frames = Vec::new();
    for nth in 0..20u32 {
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .tcp(4000, 80, 1000 * nth, 500)
            .ack(nth)
            .write(&mut frame, &[7; 1000])
            .unwrap();
        frames.push(frame);
    }
    let mut writer = PcapWriter::new(File::create(dir.path("acks.pcap")).unwrap()).unwrap();
    for frame in &frames {
        let len = u32::try_from(frame.len()).unwrap();
        writer.write_packet(&PcapPacket::new(std::time::Duration::ZERO, len, frame)).unwrap();
    }
    drop(writer);
    let lro = |mode: &str| {
        dir.report(&format!("acks.pcap --cpus 1 --deterministic --coalesce {mode}"))["lro"].take()
    };
    let [gro, lro] = ["gro", "lro"].map(lro);
    assert_eq!([&gro["packets_out"], &gro["refused"]["acknowledgement"]], [20, 19], "{gro}");
    assert_eq!([&lro["packets_out"], &lro["refused"]["acknowledgement"]], [1, 0], "{lro}");
}

#[test]
fn impossible_values_refused_by_name() {
    let dir = WorkDir::new();
    for (args, part) in [
        ("--coalesce on", "[possible values: gro, lro, off]"),
        ("--coalesce-at socket", "[possible values: arrive, deliver]"),
        ("--gro-flush-timeout 1ms", "--gro-flush-timeout <NS>"),
        ("--gro-flush-timeout -1", "unexpected argument '-1'"),
        ("--descriptors 0", "0 is not in 1..=4096"),
        ("--descriptors 4097", "4097 is not in 1..=4096"),
        ("--mtu 67", "67 is not in 68..=65535"),
        ("--mtu 65536", "65536 is not in 68..=65535"),
        ("--resegment", "--write-pcap <DIR>"),
        ("--at 5:coalesce=on", "it is gro, lro or off"),
        ("--at 5:coalesce_at=x", "it is arrive or deliver"),
        ("--set lro_descriptors=0", "it is a number from 1 to 4096"),
        ("--set gro_flush_timeout=x", "gro_flush_timeout takes a number of nanoseconds (EINVAL)"),
        ("--set mtu=67", "mtu takes a number from 68 to 65535 (EINVAL)"),
        (
            "--set gro=1",
            "coalesce, coalesce_at, lro_descriptors, gro_flush_timeout, napi_defer_hard_irqs, mtu",
        ),
    ] {
        let run = dir.run(&format!("replay {args}"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}

#[test]
fn changes_apply_at_their_frames() {
    let dir = WorkDir::new();
    let changes = [
        "500:coalesce=off",
        "1000:coalesce=gro",
        "1000:mtu=9000",
        "1500:coalesce_at=deliver",
        "1500:lro_descriptors=32",
        "1500:gro_flush_timeout=1000",
    ];
    let scripted = changes.map(|change| format!(" --at {change}")).concat();
    dir.report(&format!("{ROWS} --coalesce gro{scripted} --trace t"));
    let columns = ["what", "value"].map(|name| dir.column("t/config.csv", name));
    let told = columns[0].iter().zip(&columns[1]).skip(1);
    let told: Vec<_> = told.map(|(what, value)| format!("{what}={value}")).collect();
    assert_eq!(told, changes.map(|change| change.split_once(':').unwrap().1));
    let lines = dir.read("t/lro.jsonl");
    let packets = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let frames = |packet: Value| packet["in"].as_array().unwrap().iter().map(number).collect();
    let (merged, single): (Vec<Vec<_>>, Vec<_>) =
        packets.map(frames).partition(|frames: &Vec<u64>| frames.len() > 1);
    assert!((500..1000).all(|frame| single.contains(&vec![frame])), "while it is off");
    assert!(merged.concat().len() > 1200, "most of the others: {}", merged.concat().len());
}

#[test]
fn promise_6_captures_hold_packets_or_frames() {
    let dir = WorkDir::new();
    dir.write_one_flow("in.pcap", 200);
    let fixed = "in.pcap --cpus 1 --deterministic --coalesce gro --write-pcap";
    let report = dir.report(&format!("{fixed} whole"));
    let packets = number(&report["lro"]["packets_out"]);
    assert!(packets < 20, "{packets}");
    assert_eq!(frames_of(&dir.path("whole/cpu0.pcap")).len() as u64, packets);
    dir.report(&format!("{fixed} cut --resegment"));
    assert!(frames_of(&dir.path("cut/cpu0.pcap")) == frames_of(&dir.path("in.pcap")));
}
