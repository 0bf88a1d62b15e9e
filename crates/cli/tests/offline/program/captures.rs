//! Captures given to `forebay replay`: those read, those refused, and the messages.

use std::io::Write;
use std::process::{Child, Stdio};

use etherparse::IpNumber;

use super::*;

/// A block of a little-endian pcapng capture.
fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let mut body = body.to_vec();
    body.resize(body.len().next_multiple_of(4), 0);
    let total = (u32::try_from(body.len()).unwrap() + 12).to_le_bytes();
    [&kind.to_le_bytes(), &total, &body[..], &total].concat()
}

fn interface(link_type: u16) -> Vec<u8> {
    block(1, &[&link_type.to_le_bytes()[..], &[0; 6]].concat())
}

fn packet(interface: u32, bytes: &[u8]) -> Vec<u8> {
    let len = u32::try_from(bytes.len()).unwrap();
    let fields = [interface, 0, 0, len, len].map(u32::to_le_bytes);
    block(6, &[fields.as_flattened(), bytes].concat())
}

/// Writes a pcapng capture of these blocks.
fn write_pcapng(dir: &WorkDir, name: &str, blocks: &[Vec<u8>]) {
    let section = [&0x1a2b_3c4d_u32.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat();
    let file = [block(0x0a0d_0d0a, &section), blocks.concat()].concat();
    fs::write(dir.path(name), file).unwrap();
}

#[test]
fn promise_2_unread_records_by_link_type() {
    let dir = WorkDir::new();
    let beacon = packet(1, b"a beacon");
    let interfaces = [interface(1), interface(195)].concat();
    write_pcapng(&dir, "m.pcapng", &[interfaces, packet(0, &[0; 60]), beacon.clone(), beacon]);
    let report = dir.report("m.pcapng --loops 2 --cpus 1");
    assert_eq!([&report["delivered"], &report["dropped"]["link_type"]], [2, 4]);
    assert_eq!(report["unread_link_types"]["195 (IEEE802_15_4)"], 4);
    let told = dir.run("replay m.pcapng --cpus 1").told;
    assert!(told.contains("2 records dropped as link_type: of link type 195"), "{told}");
}

#[test]
fn promise_2_traced_frames_keep_their_order() {
    let dir = WorkDir::new();
    let packets: Vec<_> = (0..100).map(|frame| packet(frame % 2, &[0; 60])).collect();
    write_pcapng(&dir, "m.pcapng", &[interface(1), interface(195), packets.concat()]);
    dir.report("m.pcapng --deterministic --cpus 1 --trace t --trace-parse --at 31:rps_cpus=0");
    let frames: Vec<_> = (0..100).map(|frame| frame.to_string()).collect();
    for file in ["t/parse.csv", "t/flowkey.csv"] {
        assert_eq!(dir.column(file, "frame"), frames, "{file}");
    }
}

#[test]
fn capture_with_nothing_readable_is_refused() {
    let dir = WorkDir::new();
    dir.write_one_flow("good.pcap", 3);
    let beacons = [interface(195), packet(0, b"a beacon"), packet(0, b"another")];
    write_pcapng(&dir, "w.pcapng", &beacons);
    for files in ["w.pcapng", "good.pcap w.pcapng"] {
        let run = dir.run(&format!("replay {files} --cpus 1 --write-pcap out"));
        assert_eq!(run.code, Some(2), "{files}: {}", run.told);
        for part in [
            "w.pcapng: none of its records can be read (2 of link type 195 (IEEE802_15_4))",
            "LINUX_SLL (113)",
        ] {
            assert!(run.told.contains(part), "{files}: {part:?} is not in {:?}", run.told);
        }
        assert!(!dir.path("out").exists(), "no packet was replayed");
    }
}

#[test]
fn captures_are_checked_before_replay() {
    let dir = WorkDir::new();
    dir.write_one_flow("good.pcap", 3);
    fs::write(dir.path("text.pcap"), "this is no capture, as anybody sees").unwrap();
    for (second, problem) in [
        ("none.pcap", "cannot open none.pcap"),
        ("text.pcap", "text.pcap: not a capture file"),
        (".", "cannot read ."),
    ] {
        let run = dir.run(&format!("replay good.pcap {second} --cpus 1 --write-pcap out"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{second}: {}", run.told);
        assert!(run.told.contains(problem), "{second}: {}", run.told);
        assert!(!dir.path("out").exists(), "no packet was replayed");
    }
}

/// Starts a replay whose standard input is a pipe.
fn start(dir: &WorkDir, args: &str) -> Child {
    let mut run = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    let run = run.current_dir(&dir.0).args(args.split(' ')).stdin(Stdio::piped());
    run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Closes the run's input, and collects its output.
fn finish(run: Child) -> Run {
    Run::of(&run.wait_with_output().unwrap())
}

fn gzip(dir: &WorkDir, name: &str) {
    let packed = std::process::Command::new("gzip").arg(dir.path(name)).status();
    assert!(packed.unwrap().success());
}

#[test]
fn captures_from_stdin_and_packed() {
    let dir = WorkDir::new();
    dir.write_one_flow("f.pcap", 7);
    let plain = fs::read(dir.path("f.pcap")).unwrap();
    gzip(&dir, "f.pcap");
    fs::rename(dir.path("f.pcap.gz"), dir.path("f.packed")).unwrap();
    let packed = fs::read(dir.path("f.packed")).unwrap();
    assert_eq!(dir.report("f.packed --cpus 1 --queues 2 --loops 2")["delivered"], 14);
    for mode in ["", " --deterministic"] {
        for input in [&plain, &packed] {
            let mut run = start(&dir, &format!("replay f.packed - f.packed --cpus 1 --json{mode}"));
            // Write in small pieces, so that a read may end anywhere.
            let mut pipe = run.stdin.take().unwrap();
            input.chunks(7).for_each(|piece| pipe.write_all(piece).unwrap());
            drop(pipe);
            let run = finish(run);
            assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
            let report: Value = serde_json::from_str(&run.stdout).unwrap();
            assert_eq!(report["delivered"], 21);
        }
    }
}

#[test]
fn stdin_capture_checked_when_reached() {
    let dir = WorkDir::new();
    dir.write_one_flow("f.pcap", 7);
    for (args, delivered) in [("-", None), ("f.pcap -", Some(7))] {
        let mut run = start(&dir, &format!("replay {args} --cpus 1"));
        run.stdin.take().unwrap().write_all(b"this is no capture, as anybody sees").unwrap();
        let run = finish(run);
        assert_eq!(run.code, Some(2), "{args}: {}", run.told);
        assert!(run.told.contains("standard input: not a capture file"), "{}", run.told);
        assert_eq!(run.stdout.is_empty(), delivered.is_none(), "{args}: {}", run.stdout);
    }
    for (args, problem) in [
        ("replay - -", "name it once"),
        ("replay - --loops 2", "standard input can be read only once"),
        ("replay - --queues 2", "standard input can be read only once"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}");
        assert!(run.told.contains(problem), "{args}: {}", run.told);
    }
}

#[test]
fn promise_3_run_ends_despite_silent_input() {
    let dir = WorkDir::new();
    dir.write_one_flow("f.pcap", 3);
    let mut run = start(&dir, "replay --json --cpus 1 --write-pcap out -");
    let mut input = run.stdin.take().unwrap();
    input.write_all(&fs::read(dir.path("f.pcap")).unwrap()).unwrap();
    // The file is created with the first packet: received packets are delivered even if no more
    // arrive.
    while !dir.path("out/cpu0.pcap").exists() && run.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let killed = std::process::Command::new("kill").args(["-TERM", &run.id().to_string()]).status();
    assert!(killed.unwrap().success());
    let run = finish(run);
    assert_eq!(run.code, Some(0), "{}", run.told);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(
        [&report["delivered"], &report["interrupted"]],
        [&Value::from(3), &Value::from(true)]
    );
    drop(input);
}

#[test]
fn errors_are_json_on_request() {
    let dir = WorkDir::new();
    dir.write_one_flow("f.pcap", 1);
    fs::write(dir.path("none.pcap"), "not one").unwrap();
    for (args, part) in [
        ("replay f.pcap none.pcap --json", "none.pcap: "),
        ("replay f.pcap --loops 2 --queues 2000 --json", "--queues 2000: "),
        ("run no-such0 --json", "no-such0"),
        ("get mtu --json --control none", "none"),
        ("explain --json --control none nonsense", "nonsense"),
        ("bench parse none.pcap --json", "none.pcap: "),
    ] {
        let run = dir.run(args);
        let document: Value = serde_json::from_str(&run.stdout).unwrap();
        assert_ne!(run.code, Some(0), "{args}");
        assert!(document["error"].as_str().unwrap().contains(part), "{args}: {document}");
        assert!(document["help"].is_string(), "{args}: {document}");
        assert!(run.told.contains(document["error"].as_str().unwrap().split(' ').next().unwrap()));
    }
    // A run that produces a report prints the report as its document.
    let mut run = start(&dir, "replay f.pcap - --json --cpus 1");
    run.stdin.take().unwrap().write_all(b"this is no capture, as anybody sees").unwrap();
    let run = finish(run);
    let document: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((run.code, &document["delivered"]), (Some(2), &Value::from(1)));
}

#[test]
fn promise_3_endless_inputs_are_refused() {
    let dir = WorkDir::new();
    for (args, problem) in [
        ("replay --script /dev/zero", "--script /dev/zero: it has more than 16384 KiB"),
        ("replay --config /dev/zero", "cannot read /dev/zero: it has more than 1024 KiB"),
        ("run --config /dev/zero", "cannot read /dev/zero: it has more than 1024 KiB"),
        ("hash --vectors /dev/zero", "cannot read /dev/zero: it has more than 16384 KiB"),
        ("exec lo --take udp:53 -- /dev/zero", "cannot read /dev/zero: it is not a regular file"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(problem), "{args}: {}", run.told);
    }
}

#[test]
fn one_is_not_many() {
    let dir = WorkDir::new();
    dir.write_one_flow("one.pcap", 1);
    let run = dir.run("replay one.pcap");
    assert!(run.stdout.starts_with("1 packet in ("), "{}", run.stdout);
    assert!(run.stdout.contains("\n1 flow, the largest"), "{}", run.stdout);
}

#[test]
fn lro_losses_are_reported() {
    let dir = WorkDir::new();
    dir.write_one_flow("one.pcap", 1);
    for (mode, is_said) in [("lro", true), ("gro", false)] {
        let run =
            dir.run(&format!("replay one.pcap --coalesce {mode} --write-pcap out --resegment"));
        assert_eq!(
            run.told.contains("come back with the newest acknowledgement"),
            is_said,
            "{mode}"
        );
    }
}

/// Polls an hour apart amount to none: the run still ends when asked to, and reads its input again
/// once polling is permitted.
#[test]
fn promise_3_deferred_polls_delay_no_change() {
    let dir = WorkDir::new();
    dir.write_one_flow("f.pcap", 4);
    let capture = fs::read(dir.path("f.pcap")).unwrap();
    let half = 24 + (capture.len() - 24) / 2;
    for is_asked in [true, false] {
        let _ = fs::remove_dir_all(dir.path("out"));
        let mut run = start(
            &dir,
            "replay --json --cpus 1 --write-pcap out --control s.sock \
             --at 0:gro_flush_timeout=3600000000000 --at 0:napi_defer_hard_irqs=9 -",
        );
        let mut input = run.stdin.take().unwrap();
        input.write_all(&capture[..half]).unwrap();
        while !dir.path("out/cpu0.pcap").exists() && run.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        if is_asked {
            let pid = run.id().to_string();
            assert!(std::process::Command::new("kill").arg(pid).status().unwrap().success());
        } else {
            let told = dir.run("get napi_defer_hard_irqs --control s.sock");
            assert_eq!((told.code, told.stdout.as_str()), (Some(0), "9\n"), "{}", told.told);
            input.write_all(&capture[half..]).unwrap();
            let told = dir.run("set napi_defer_hard_irqs=0 --control s.sock");
            assert_eq!(told.code, Some(0), "{}", told.told);
            drop(input);
        }
        let run = finish(run);
        assert_eq!(run.code, Some(0), "{}", run.told);
        let report: Value = serde_json::from_str(&run.stdout).unwrap();
        assert_eq!(report["delivered"], if is_asked { 2 } else { 4 });
    }
}

/// One name for a flow inside a tunnel and outside: its last packets tell, other than errors about it.
#[test]
fn flk_7_explained_rule_is_of_last_packet() {
    let dir = WorkDir::new();
    let datagram = |number: u8| {
        let mut bytes = Vec::new();
        let builder =
            PacketBuilder::ipv4([192, 168, 0, number], [192, 168, 0, 9], 64).udp(1000, 53);
        builder.write(&mut bytes, b"question").unwrap();
        bytes
    };
    let framed = |protocol: Option<u8>, packet: &[u8]| {
        let mut bytes = Vec::new();
        let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        match protocol {
            None => bytes.extend([&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0], packet].concat()),
            Some(protocol) => builder
                .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
                .write(&mut bytes, IpNumber(protocol), packet)
                .unwrap(),
        }
        bytes
    };
    // IP in IP, and GRE.
    let (tunnelled, in_gre) = (
        |number| framed(Some(4), &datagram(number)),
        |number| framed(Some(47), &[&[0, 0, 8, 0], &datagram(number)[..]].concat()),
    );
    // It was sent by the other end: addresses and ports are reversed.
    let mut sent = Vec::new();
    let builder = PacketBuilder::ipv4([192, 168, 0, 9], [192, 168, 0, 1], 64).udp(53, 1000);
    builder.write(&mut sent, b"answer").unwrap();
    let error = framed(Some(1), &[&[3, 3, 0, 0, 0, 0, 0, 0], &sent[..]].concat());
    let frames = [
        tunnelled(1),
        error,
        framed(None, &datagram(2)),
        in_gre(3),
        in_gre(4),
        framed(None, &datagram(4)),
    ];
    let packets = frames.iter().map(|frame| packet(0, frame));
    let blocks: Vec<_> = [interface(1)].into_iter().chain(packets).collect();
    write_pcapng(&dir, "m.pcapng", &blocks);
    let flows = (1..=5).map(|number| format!(" --explain 192.168.0.{number}:1000,192.168.0.9:53"));
    let args = format!("m.pcapng --cpus 1 --deterministic{}", flows.collect::<String>());
    let report = dir.report(&format!("{args} --trace t --trace-parse"));
    let rules: Vec<_> = report["explain"]
        .as_array()
        .unwrap()
        .iter()
        .map(|told| (told["rule"].as_str().unwrap(), told["rule_in_tunnel"].as_str()))
        .collect();
    let recorded = ["inner", "outer", "inner", "outer"].map(|rule| (rule, None));
    assert_eq!(rules, [&recorded[..], &[("outer", Some("inner"))]].concat());
    let traced = dir.column("t/flowkey.csv", "rule");
    assert_eq!(traced, ["inner", "icmp", "outer", "inner", "inner", "outer"]);
    let told = dir.run(&format!("replay {args}")).stdout;
    for words in ["key:   inner (flow_key=auto)", "key:   outer, or inner in a tunnel (flow_key"] {
        assert!(told.contains(words), "{words}: {told}");
    }
}
