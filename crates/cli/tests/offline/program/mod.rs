//! The program as people and scripts use it: exit codes, output streams, and options.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod advise; //         the masks for a machine
mod back_end; //       the back end of a vhost-user device, gone and back
mod captures; //       captures read and refused
mod doctor; //         what to change on this machine
mod coalescing; //     options and figures of coalescing
mod control; //        queries and changes during a run
mod hash_and_bench; // `forebay hash` and `forebay bench`
mod log; //            messages: forms, levels, a limit
mod metrics; //        metrics of a replay
mod plot; //           pictures of runs
mod places; //         runs found by name
mod rotation; //       captures in several files
mod run; //            live devices, without privileges
mod scripts; //        scripted changes
mod service; //        a run under a service manager
mod sim; //            `forebay sim`
mod top; //            one view of a run

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::process::Output;

use assert_cmd::Command;
use etherparse::PacketBuilder;
use pcap_file::pcap::{PcapPacket, PcapReader, PcapWriter};
use serde_json::Value;
use tempfile::TempDir;

/// Frames in the bundled capture, and flows.
const BUNDLED_FRAMES: u64 = 32_000;
const BUNDLED_FLOWS: u64 = 64;

/// A directory to run the program in. Names are short, so that a message fits on one line.
struct WorkDir(TempDir);

/// Outcome of a run.
struct Run {
    code: Option<i32>,
    stdout: String,
    /// Standard error, without the frame and line breaks that are drawn around messages.
    told: String,
}

impl Run {
    fn of(output: &Output) -> Self {
        let stderr = str::from_utf8(&output.stderr).unwrap();
        let words = stderr.split([' ', '\n', '│']).filter(|word| !word.is_empty());
        Self {
            code: output.status.code(),
            stdout: str::from_utf8(&output.stdout).unwrap().to_owned(),
            told: words.collect::<Vec<_>>().join(" "),
        }
    }
}

impl WorkDir {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Runs the program with arguments that contain no spaces.
    fn run(&self, args: &str) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        Run::of(&command.current_dir(&self.0).args(args.split(' ')).output().unwrap())
    }

    /// Runs the program with its standard output on a full device.
    fn run_out_of_room(&self, args: &str) -> Run {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output =
            command.current_dir(&self.0).args(args.split(' ')).stdout(full).output().unwrap();
        Run {
            code: output.status.code(),
            stdout: String::new(),
            told: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Report of a replay, which must keep all promises.
    fn report(&self, args: &str) -> Value {
        let run = self.run(&format!("replay --json {args}"));
        assert_eq!(run.code, Some(0), "{args}: {}", run.told);
        let report: Value = serde_json::from_str(&run.stdout).unwrap();
        let losses = report["dropped"].as_object().unwrap().values().filter_map(Value::as_u64);
        let accounted = number(&report["delivered"]) + losses.sum::<u64>();
        assert_eq!(accounted + number(&report["queued"]), number(&report["packets_in"]), "{args}");
        assert_eq!(report["reordered"], 0, "{args}");
        report
    }

    /// A column of a trace file.
    fn column(&self, file: &str, name: &str) -> Vec<String> {
        let text = self.read(file);
        let mut lines = text.lines();
        let place = lines.next().unwrap().split(',').position(|column| column == name).unwrap();
        lines.map(|line| line.split(',').nth(place).unwrap().to_owned()).collect()
    }

    /// Writes a capture of UDP frames, each with the addresses and ports given.
    fn write_udp<'a>(&self, name: &str, frames: impl IntoIterator<Item = &'a Endpoints>) {
        let mut writer = PcapWriter::new(File::create(self.path(name)).unwrap()).unwrap();
        for (sequence, (source, source_port, destination, destination_port)) in
            frames.into_iter().enumerate()
        {
            let mut frame = Vec::new();
            PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
                .ipv4(*source, *destination, 64)
                .udp(*source_port, *destination_port)
                .write(&mut frame, &sequence.to_be_bytes())
                .unwrap();
            let len = u32::try_from(frame.len()).unwrap();
            writer.write_packet(&PcapPacket::new(std::time::Duration::ZERO, len, &frame)).unwrap();
        }
    }

    fn write_one_flow(&self, name: &str, frames: usize) {
        self.write_udp(name, vec![&MS_V4_0; frames]);
    }
}

/// Source address and port, destination address and port.
type Endpoints = ([u8; 4], u16, [u8; 4], u16);

/// The first row of Microsoft's "Verifying the RSS Hash Calculation".
const MS_V4_0: Endpoints = ([66, 9, 149, 187], 2794, [161, 142, 100, 80], 1766);
const MS_V4_0_BACK: Endpoints = ([161, 142, 100, 80], 1766, [66, 9, 149, 187], 2794);

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn sum(report: &Value, field: &str) -> u64 {
    report["per_cpu"].as_array().unwrap().iter().map(|cpu| number(&cpu[field])).sum()
}

fn frames_of(capture: &Path) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(File::open(capture).unwrap()).unwrap();
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.unwrap().data.into_owned());
    }
    frames
}

#[test]
fn bundled_capture_report_is_exact() {
    let report = WorkDir::new().report("--cpus 2 --rps 1,00000003");
    for field in ["packets_in", "delivered"] {
        assert_eq!(report[field], BUNDLED_FRAMES, "{field}");
    }
    assert_eq!(report["flows"], BUNDLED_FLOWS);
    assert!(number(&report["bytes_in"]) > BUNDLED_FRAMES * 60);
    assert_eq!(report["queued"], 0);
    let pps = report["delivered"].as_f64().unwrap() / report["elapsed_s"].as_f64().unwrap();
    assert!((report["pps"].as_f64().unwrap() / pps - 1.0).abs() < 1e-6);
    let cpus: Vec<_> =
        report["per_cpu"].as_array().unwrap().iter().map(|cpu| &cpu["cpu"]).collect();
    assert_eq!(cpus, [0, 1]);
    assert_eq!(sum(&report, "packets"), BUNDLED_FRAMES);
    assert_eq!(sum(&report, "bytes"), number(&report["bytes_in"]));
    assert!(sum(&report, "busy_ns") > 0);
    for field in ["wakeups", "backlog_max"] {
        assert!(report["per_cpu"][1][field].is_u64(), "{field}");
    }
    for field in ["moves", "held", "held_max_ns"] {
        assert!(report["steer"][field].is_u64(), "{field}");
    }
    for field in ["segments_in", "packets_out"] {
        assert_eq!(report["lro"][field], BUNDLED_FRAMES, "{field}");
    }
}

#[test]
fn json_alone_on_stdout() {
    let dir = WorkDir::new();
    let run = dir.run("replay --json --cpus 1 --rps 3");
    assert_eq!(run.code, Some(0));
    assert!(run.stdout.ends_with("}\n") && run.stdout.lines().count() == 1, "{}", run.stdout);
    assert!(run.told.contains("--rps: CPUs 1 are not among --cpus (0) and are ignored"));
    let run = dir.run("replay --json --cpus 1 --set flow_limit_cpu_bitmap=2");
    assert!(run.told.contains("flow_limit_cpu_bitmap: CPUs 1 are not among"), "{}", run.told);
}

#[test]
fn people_get_table_and_verdict() {
    let run = WorkDir::new().run("replay --cpus 1");
    assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
    for part in ["32,000 packets in", "CPU", "backlog max", "64 flows"] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
    assert!(run.stdout.ends_with("order checked, 0 violations; every frame accounted for\n"));
}

#[test]
fn unusable_input_names_place_and_remedy() {
    let dir = WorkDir::new();
    dir.write_one_flow("huge.pcap", 1);
    let mut huge = fs::read(dir.path("huge.pcap")).unwrap();
    huge[32..36].copy_from_slice(&(2u32 << 30).to_ne_bytes());
    fs::write(dir.path("huge.pcap"), huge).unwrap();
    fs::write(dir.path("empty.pcap"), "").unwrap();
    fs::write(dir.path("text.pcap"), "hello, this is not a capture at all\n").unwrap();
    fs::create_dir(dir.path("dir.pcap")).unwrap();
    for (file, problem, remedy) in [
        ("none.pcap", "cannot open none.pcap", "check that the path is right"),
        ("empty.pcap", "empty.pcap: the file is empty at offset 0", "give a pcap or pcapng file"),
        (
            "text.pcap",
            "text.pcap: not a capture file (it begins with 68656c6c) at offset 0",
            "give a pcap or pcapng file",
        ),
        ("dir.pcap", "cannot read dir.pcap", "check that the path is right"),
        ("huge.pcap", "huge.pcap: a record claims 2147483648 bytes", "cut it before that offset"),
        ("huge.pcap", "at offset 24", "repair it"),
    ] {
        let run = dir.run(&format!("replay --cpus 1 {file}"));
        assert_eq!(run.code, Some(2), "{file}: {}", run.told);
        for part in [problem, remedy] {
            assert!(run.told.contains(part), "{file}: {part:?} is not in {:?}", run.told);
        }
    }
}

#[test]
fn promise_2_data_before_damage_is_delivered() {
    let dir = WorkDir::new();
    dir.write_one_flow("broken.pcap", 3);
    let mut bytes = fs::read(dir.path("broken.pcap")).unwrap();
    let offset = bytes.len();
    bytes.extend([0xff; 16]);
    fs::write(dir.path("broken.pcap"), bytes).unwrap();
    let run = dir.run("replay --json --cpus 1 broken.pcap");
    assert_eq!(run.code, Some(2));
    assert!(run.told.contains(&format!("at offset {offset}")), "{}", run.told);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!([&report["packets_in"], &report["delivered"]], [3, 3]);
    assert!(report["error"].as_str().unwrap().starts_with("broken.pcap: a record claims"));
}

#[test]
fn bad_options_are_refused_by_name() {
    let dir = WorkDir::new();
    for (args, part) in [
        ("replay --rate 0", "a rate is a number above 0, max or capture"),
        ("replay --queues 0", "--queues <N>"),
        ("replay --cpus 0", "there is no CPU to run on"),
        ("replay --cpus 3-1", "--cpus 3-1: a mask is hexadecimal"),
        ("replay --rps 0x3", "--rps 0x3: a mask is hexadecimal"),
        ("replay --at 100", "it has the form FRAME:KNOB=VALUE"),
        ("replay --at 1:rps_cpu=3", "those that change during a run are rps_cpus"),
        ("replay --set netdev_max_backlog=-1", "cannot hold fewer than 0 packets (EINVAL)"),
        ("replay --set mtu=08", "mtu takes a number from 68 to 65535 (EINVAL)"),
        ("replay --at 9:netdev_max_backlog=2147483648", "a number from 0 to 2147483647 (EINVAL)"),
        ("replay --deterministic --cpus 2 --set rps_cpus=4", "(EOVERFLOW)"),
        ("replay --deterministic --cpus 2 --set rps_cpus=1,,1", "(EOVERFLOW)"),
        ("replay --deterministic --work 9223372036854775807", "is not in 0..=1000000"),
        ("replay --work 1000001", "is not in 0..=1000000"),
        ("replay --hash md5", "[possible values: keyed, keyed-symmetric, toeplitz"),
        ("replay --hash-key 00", "a key for the keyed hash has 16 bytes"),
        ("replay --hash toeplitz --hash-key 6d5a", "at least 40 bytes"),
        ("replay --hash-key xy", "give pairs of hexadecimal digits"),
        ("replay --synthetic flows=0", "flows is a number from 1 to 16777216"),
        ("replay --synthetic flows=1 f.pcap", "cannot be used with"),
        ("replay --start-counters 4294967296", "--start-counters <N>"),
        ("replay --trace-parse", "--trace <DIR>"),
        ("replay --rps_cpus 3", "unexpected argument"),
        ("replay --queues 129", "give at most 128"),
        ("replay --queues 2 /dev/null", "/dev/null is not a regular file"),
        ("replay --loops 2 /dev/null", "/dev/null is not a regular file"),
        ("replay --cpus 4097", "give 4096 at most"),
        ("replay --rps-flow-cnt 4194305", "--rps-flow-cnt <N>"),
        ("replay --cpus 2 --at 5:pause=9", "pause=9: that CPU is not among --cpus"),
        ("replay --cpus 2 --set resume=9", "resume=9: that CPU is not among --cpus"),
        ("replay --synthetic frames=1 --loops 2", "cannot be used with"),
        ("replay --synthetic frames=1 --rate capture", "made-up traffic has no times of its own"),
        ("bench parse --reps 0", "--reps <N>"),
        ("bench parse --secs 0", "--secs <S>"),
        ("play", "unrecognized subcommand 'play'"),
        ("hash", "--vectors <FILE>"),
        ("bench speed", "[possible values: parse, checksum"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}

#[test]
fn promise_9_a_seed_determines_a_whole_run() {
    let dir = WorkDir::new();
    let delivered = |name: &str, seed: u64| {
        let fixed = "--deterministic --cpus 4 --work 500 --synthetic frames=5000";
        dir.report(&format!("{fixed} --seed {seed} --trace {name}"));
        dir.read(&format!("{name}/deliver.csv"))
    };
    let first = delivered("a", 7);
    assert_eq!(first.lines().count(), 5001);
    assert!(first == delivered("b", 7), "the same seed");
    assert!(first != delivered("c", 8), "another seed");
}

/// A run that shows something is repeated with a trace.
#[test]
fn promise_9_trace_leaves_seeded_run_alike() {
    let dir = WorkDir::new();
    let of = |trace: &str| {
        let overload = "--synthetic frames=5000 --set netdev_max_backlog=20 --when-full drop";
        let fixed = format!("--deterministic --seed 3 --cpus 4 --work 2000 {overload}");
        let report = dir.report(&format!("{trace}{fixed}"));
        ["elapsed_s", "dropped", "per_cpu", "steer"].map(|field| report[field].to_string())
    };
    let untraced = of("");
    assert!(!untraced[1].contains("\"backlog_full\":0,"), "{}", untraced[1]);
    assert_eq!(untraced, of("--trace t --trace-parse "));
}

#[test]
fn promise_2_written_captures_hold_every_frame_once() {
    let dir = WorkDir::new();
    let flows = (0..3000u16).map(|frame| ([10, 0, 0, 1], 1000 + frame % 40, [10, 0, 0, 2], 53));
    let flows: Vec<_> = flows.collect();
    dir.write_udp("in.pcap", &flows);
    let fixed = "in.pcap --cpus 2 --spread always --rps 3 --write-pcap";
    for (name, mode) in [("stepped", "--deterministic"), ("live", "--when-full wait")] {
        let report = dir.report(&format!("{fixed} {name} {mode}"));
        let mut written = Vec::new();
        for cpu in report["per_cpu"].as_array().unwrap() {
            let frames = frames_of(&dir.path(&format!("{name}/cpu{}.pcap", cpu["cpu"])));
            assert_eq!(frames.len() as u64, number(&cpu["packets"]), "{name}");
            assert!(!frames.is_empty(), "{name}: flows are spread");
            written.extend(frames);
        }
        written.sort_unstable();
        let mut sent = frames_of(&dir.path("in.pcap"));
        sent.sort_unstable();
        assert!(written == sent, "{name}: every frame, byte for byte, once");
    }
}

#[test]
fn options_change_only_what_named() {
    let dir = WorkDir::new();
    dir.write_one_flow("f.pcap", 100);
    // IPv6, UDP and Ethernet headers around 100 bytes.
    const SYNTHETIC_BYTES: u64 = 1000 * (14 + 40 + 8 + 100);
    for (args, field, value) in [
        ("f.pcap --loops 3", "packets_in", 300),
        ("f.pcap f.pcap", "packets_in", 200),
        ("f.pcap --loops 0", "packets_in", 0),
        ("--synthetic flows=5,frames=1000,size=100,run=1..3,ipv6", "bytes_in", SYNTHETIC_BYTES),
        ("--synthetic flows=5,frames=1000,size=100,run=1..3,ipv6", "flows", 5),
        ("--queues 3", "packets_in", BUNDLED_FRAMES),
        ("--queues 3 --hash toeplitz", "flows", BUNDLED_FLOWS),
        ("--hash keyed-symmetric --no-checksums", "flows", BUNDLED_FLOWS),
        ("--hash toeplitz-symmetric", "flows", BUNDLED_FLOWS),
        ("--start-counters 4294966296", "delivered", BUNDLED_FRAMES),
        ("--rps 0 --spread always --work 10", "delivered", BUNDLED_FRAMES),
    ] {
        for mode in ["", " --deterministic"] {
            let report = dir.report(&format!("{args} --cpus 2{mode}"));
            assert_eq!(report[field], value, "{args}{mode}: {field}");
        }
    }
}

#[test]
fn rps_9_empty_mask_disables_rps() {
    let dir = WorkDir::new();
    for (mask, share) in [("0", [BUNDLED_FRAMES, 0]), ("2", [0, BUNDLED_FRAMES])] {
        let report = dir.report(&format!("--deterministic --cpus 2 --spread always --rps {mask}"));
        let packets = [0, 1].map(|cpu: usize| number(&report["per_cpu"][cpu]["packets"]));
        assert_eq!(packets, share, "--rps {mask}");
    }
}

#[test]
fn trace_shows_queues_and_start_counters() {
    let dir = WorkDir::new();
    dir.report(
        "--deterministic --cpus 2 --spread always --queues 3 --start-counters 4294966296 --trace t",
    );
    let queues: BTreeSet<_> = dir.column("t/deliver.csv", "rxq").into_iter().collect();
    assert_eq!(queues, ["0", "1", "2"].map(str::to_owned).into());
    let positions = dir.column("t/deliver.csv", "qpos");
    let positions: BTreeSet<u32> = positions.iter().map(|tail| tail.parse().unwrap()).collect();
    assert!(positions.contains(&4_294_966_297) && positions.contains(&0), "counters wrap");
    assert!(!positions.contains(&4_294_966_296) && !positions.contains(&1_000_000_000));
}

#[test]
fn output_never_goes_over_input() {
    let dir = WorkDir::new();
    fs::create_dir(dir.path("out")).unwrap();
    dir.write_one_flow("out/cpu7.pcap", 3);
    fs::write(dir.path("out/cpu0.pcap"), "kept").unwrap();
    std::os::unix::fs::symlink("cpu7.pcap", dir.path("out/deliver.csv")).unwrap();
    std::os::unix::fs::symlink("out/cpu7.pcap", dir.path("link.pcap")).unwrap();
    for args in ["link.pcap --write-pcap out", "out/cpu7.pcap --trace out"] {
        let run = dir.run(&format!("replay --cpus 1 {args}"));
        assert_eq!(run.code, Some(2), "{args}");
        assert!(run.told.contains("is to be replayed and would be lost"), "{}", run.told);
        assert_eq!(frames_of(&dir.path("out/cpu7.pcap")).len(), 3);
        assert_eq!(dir.read("out/cpu0.pcap"), "kept");
    }
}

#[test]
fn output_directory_is_of_one_run() {
    let dir = WorkDir::new();
    fs::create_dir(dir.path("out")).unwrap();
    for name in ["cpu9.pcap", "cpu0-ip.pcap", "cpu9.txt", "parse.csv", "counters.json"] {
        fs::write(dir.path("out").join(name), "stale").unwrap();
    }
    dir.report("--cpus 1 --write-pcap out --trace out");
    let files = fs::read_dir(dir.path("out")).unwrap();
    let files: BTreeSet<_> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    let expected =
        ["config.csv", "counters.json", "cpu0.pcap", "cpu9.txt", "deliver.csv", "drop.csv"];
    assert_eq!(files, expected.map(str::to_owned).into());
    assert!(dir.read("out/counters.json").starts_with('{'));
}

/// The limit of a file's size (`ulimit -f`) is told as a full disk is, and what is beyond it is counted.
#[test]
fn ops_2_file_size_limit_is_told() {
    const LIMIT_BYTES: u64 = 100 << 10;
    let dir = WorkDir::new();
    let run = "replay --json --cpus 1 --no-control --trace t --write-pcap p";
    let mut command = Command::new("prlimit");
    command.args([&format!("--fsize={LIMIT_BYTES}"), env!("CARGO_BIN_EXE_forebay")]);
    let run = Run::of(&command.current_dir(&dir.0).args(run.split(' ')).output().unwrap());
    assert_eq!(run.code, Some(3), "{}", run.told);
    for file in ["t/deliver.csv", "p/cpu0.pcap"] {
        let told = run.told.contains(&format!("cannot write {file}: File too large"));
        assert!(told, "{file}: {}", run.told);
    }
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["delivered"], BUNDLED_FRAMES);
    assert!(number(&report["trace_rows_lost"]) > 0, "{report}");
    for file in fs::read_dir(dir.path("t")).unwrap() {
        let path = file.unwrap().path();
        let text = fs::read(&path).unwrap();
        assert!(text.len() as u64 <= LIMIT_BYTES, "{path:?}");
        assert!(text.last().is_none_or(|byte| b"\n}".contains(byte)), "{path:?} ends within a row");
    }
    let mut reader = PcapReader::new(File::open(dir.path("p/cpu0.pcap")).unwrap()).unwrap();
    let mut records = 0;
    while let Some(record) = reader.next_packet() {
        assert!(record.is_ok(), "record {records} is cut off");
        records += 1;
    }
    assert!((1..BUNDLED_FRAMES).contains(&records), "{records}");
}

#[test]
fn unwritable_output_still_reports() {
    let dir = WorkDir::new();
    fs::write(dir.path("v.json"), hash_and_bench::VECTORS).unwrap();
    for args in [
        "replay --cpus 1",
        "replay --json --cpus 1",
        "hash --vectors v.json",
        "bench hash --reps 1",
        "--help",
        "--version",
        "help run",
        "replay --help",
    ] {
        let run = dir.run_out_of_room(args);
        assert_eq!(run.code, Some(3), "{args}: {}", run.told);
        assert!(run.told.contains("cannot write to standard output"), "{args}: {}", run.told);
    }
    fs::create_dir(dir.path("t")).unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path("t/drop.csv")).unwrap();
    let run = dir.run("replay --json --cpus 1 --trace t");
    assert_eq!(run.code, Some(3), "{}", run.told);
    assert!(run.told.contains("check that there is room"), "{}", run.told);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["delivered"], BUNDLED_FRAMES);
    assert!(report["error"].as_str().unwrap().starts_with("cannot write t/drop.csv"));
    assert!(dir.read("t/counters.json").contains("32000"));
}

#[test]
fn rps_9_trace_shows_effective_mask() {
    let dir = WorkDir::new();
    dir.report("--deterministic --cpus 0,2 --rps 7 --at 100:rps_cpus=6 --trace t");
    assert_eq!(dir.column("t/config.csv", "value"), ["5", "4"]);
}

#[test]
fn every_run_tells_its_seed() {
    let dir = WorkDir::new();
    let seed = |args: &str| number(&dir.report(&format!("--cpus 1 {args}"))["seed"]);
    assert_eq!(seed("--seed 7"), 7);
    assert_eq!(seed("--deterministic"), 1);
    assert_eq!(seed("--synthetic frames=10"), 1);
    assert_ne!(seed("--queues 1"), seed("--queues 1"), "drawn");
    assert_eq!(dir.report("--cpus 1")["interrupted"], false);
}

#[test]
fn signal_ends_run_in_order() {
    let dir = WorkDir::new();
    let args = "replay --json --cpus 1 --rate 1000 --loops 1000 --write-pcap out";
    let mut run = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    let run = run.current_dir(&dir.0).args(args.split(' '));
    let run = run.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut run = run.spawn().unwrap();
    // The file is created with the first packet, when signal handlers are installed.
    while !dir.path("out/cpu0.pcap").exists() && run.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let killed = std::process::Command::new("kill").args(["-TERM", &run.id().to_string()]).status();
    assert!(killed.unwrap().success());
    let output = run.wait_with_output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains("forebay: stopping; once more to end now"), "{told}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert_eq!(report["packets_in"], report["delivered"]);
}
