//! Faults of a device: a run reports them and ends with exit code 3, or continues if possible.
//! Nothing is left attached either way.

use std::fs::{self, File};
use std::process::Output;

use pcap_file::pcap::PcapReader;

use crate::Judgement;
use crate::live::Judge;
use crate::live::disk::SmallDisk;
use crate::live::forwarding::{DEVICE, Link, Way};
use crate::live::program::{Run, Shared, command, try_run, wait_until};
use crate::live::restarts::judge_silence;
use crate::live::sender::{Capture, Pace, judge_sum, play, settle};
use crate::program::told;

pub(crate) const TRIALS: [Judge; 7] = [
    ("promise_2_run_survives_link_down", || Way::ALL.into_iter().try_for_each(judge_down)),
    ("promise_2_a_run_outlives_a_changed_mtu", || Way::ALL.into_iter().try_for_each(judge_mtu)),
    ("a_run_ends_with_its_interface", || Way::ALL.into_iter().try_for_each(judge_deletion)),
    ("missing_privilege_is_named", || Way::ALL.into_iter().try_for_each(judge_nobody)),
    ("run_reports_device_limits", judge_features),
    ("default_route_needs_consent", judge_default_route),
    ("promise_2_full_disk_is_reported_and_counted", judge_full_disk),
];

/// Judge that needs [a foreign program](FOREIGN_PROGRAM).
pub(crate) const FOREIGN: [Judge; 1] =
    [("foreign_program_replaced_only_on_request", judge_foreign)];

/// An XDP program that passes everything, from a library that knotd depends on.
pub(crate) const FOREIGN_PROGRAM: &str = "/usr/lib/x86_64-linux-gnu/bpf/xsk_def_xdp_prog.o";

const PPS: u32 = 100_000;
const PADDING_BYTES: usize = 1200;

/// Adds the way to the error.
fn of_way(way: Way, judged: Judgement) -> Judgement {
    judged.map_err(|failed| format!("{way:?}: {}", failed.message().unwrap_or_default()).into())
}

fn judge_down(way: Way) -> Judgement {
    let judged = || {
        let link = Link::new(way)?;
        let capture = Capture::write(way, 0)?;
        let mut run = Run::start(&link.near, link.args(&["--cpus", "2"]))?;
        let before = play(&link, &capture, Pace::Packets(PPS), 1)?;
        settle();
        let processed = run.processed()?;
        link.near.run(&["ip", "link", "set", DEVICE, "down"])?;
        settle();
        link.near.run(&["ip", "link", "set", DEVICE, "up"])?;
        settle();
        let after = play(&link, &capture, Pace::Packets(PPS), 1)?;
        wait_until("something comes again", || Ok(run.processed()? > processed))?;
        settle();
        judge_sum(&link, &run.stop()?, before + after)?;
        judge_silence(&link)
    };
    of_way(way, judged())
}

/// MTUs too large for the device's frames, smaller ones, and larger ones that are permitted.
fn judge_mtu(way: Way) -> Judgement {
    let judged = || {
        let link = Link::new(way)?;
        let (small, large) = (Capture::write(way, PADDING_BYTES)?, Capture::write(way, 6000)?);
        let mut run = Run::start(&link.near, link.args(&["--cpus", "2"]))?;
        let mut sent = 0;
        for mtu in ["1000", "9000", "1500"] {
            let (far, device) = link.sender();
            // Ignored: a driver with an XDP program may refuse a large MTU.
            let _ = link.near.run(&["ip", "link", "set", DEVICE, "mtu", mtu]);
            let _ = far.run(&["ip", "link", "set", device, "mtu", mtu]);
            let shown = link.sender_shown()?;
            for (capture, len_bytes) in [(&small, PADDING_BYTES + 44), (&large, 6044)] {
                if shown["mtu"].as_u64() >= u64::try_from(len_bytes).ok() {
                    sent += play(&link, capture, Pace::Packets(PPS), 1)?;
                }
            }
        }
        settle();
        let report = run.stop()?;
        judge_sum(&link, &report, sent)?;
        judge_silence(&link)
    };
    of_way(way, judged())
}

fn judge_deletion(way: Way) -> Judgement {
    let judged = || {
        let link = Link::new(way)?;
        let capture = Capture::write(way, 0)?;
        let mut run = Run::start(&link.near, link.args(&["--cpus", "2"]))?;
        let sent = play(&link, &capture, Pace::Packets(PPS), 1)?;
        settle();
        link.near.run(&["ip", "link", "delete", DEVICE])?;
        let (report, told) = run.ends(3)?;
        if report.number("packets_in")? == 0 || report.number("packets_in")? > sent {
            return Err(format!("of {sent}: {}", report.value()).into());
        }
        if told.contains(DEVICE) { Ok(()) } else { Err(format!("nobody names it: {told}").into()) }
    };
    of_way(way, judged())
}

fn judge_nobody(way: Way) -> Judgement {
    let judged = || {
        let link = Link::new(way)?;
        let program = Shared::new()?;
        let mut nobody = link.near.command("setpriv");
        nobody.args(["--reuid", "65534", "--clear-groups"]).arg(program.path());
        // Any user may open an existing TUN.
        let device = if link.is_own() { "fb7" } else { DEVICE };
        let output = try_run(nobody, &[&[device], way.args()].concat())?;
        expect(&output, &["CAP_NET_", "setcap"])?;
        judge_silence(&link)
    };
    of_way(way, judged())
}

/// Each request exceeds the capabilities of this device, or of any.
fn judge_features() -> Judgement {
    let link = Link::new(Way::AfXdpNative)?;
    let cases: [(&[&str], &[&str]); 5] = [
        (&["fb7", "--via", "af_xdp", "--take", "all"], &["fb7"]),
        (&["fb7", "--via", "af_packet"], &["fb7"]),
        (&["lo", "--via", "af_xdp", "--xdp-mode", "native", "--take", "all"], &["lo", "generic"]),
        (&[DEVICE, "--via", "af_xdp", "--copy", "zerocopy", "--take", "all"], &[DEVICE, "copy"]),
        (&[DEVICE, "--via", "af_xdp", "--queues", "2", "--take", "all"], &[DEVICE, "queue"]),
    ];
    for (args, words) in cases {
        let output = try_run(command(&link.near), args)?;
        expect(&output, words).map_err(|failed| {
            format!("{}: {}", args.join(" "), failed.message().unwrap_or_default())
        })?;
        judge_silence(&link)?;
    }
    // The second of two runs is refused because of the first.
    let mut first = Run::start(&link.near, link.args(&[]))?;
    expect(&try_run(command(&link.near), &link.args(&[]))?, &[DEVICE])?;
    first.stop()?;
    // Even root may lack a capability.
    let some = |bounds: &str| {
        let mut weak = link.near.command("setpriv");
        weak.args(["--bounding-set", bounds]).arg(env!("CARGO_BIN_EXE_forebay"));
        weak
    };
    expect(&try_run(some("-bpf,-sys_admin"), &link.args(&[]))?, &["CAP_BPF"])?;
    let filtering = [DEVICE, "--via", "af_xdp", "--take", "udp:53"];
    expect(&try_run(some("-perfmon,-sys_admin"), &filtering)?, &["CAP_PERFMON"])?;
    // Those of the unit are enough.
    let unit = include_str!("../../../../../packaging/forebay@.service");
    let bounds = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let bounds = bounds.ok_or("the unit bounds no capabilities")?.to_lowercase();
    let bounds = format!("-all,{}", bounds.replace("cap_", "+").replace(' ', ","));
    Run::start_as(some(&bounds), filtering)?.stop()?;
    judge_silence(&link)
}

/// A full disk: packets reported as written are in the file, others are counted, and the failure is
/// reported once. The second disk is full before the first write.
fn judge_full_disk() -> Judgement {
    for others_bytes in [0, 64 << 10] {
        let disk = SmallDisk::new()?;
        fs::write(disk.path().join("others"), vec![0; others_bytes])?;
        judge_disk(&disk, others_bytes == 0)?;
    }
    Ok(())
}

fn judge_disk(disk: &SmallDisk, has_room: bool) -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    let capture = Capture::write(Way::AfPacket, 0)?;
    let to = format!("pcap:{}", disk.name());
    let mut run = Run::start(&link.near, link.args(&["--cpus", "2", "--rps", "3", "--to", &to]))?;
    play(&link, &capture, Pace::Packets(PPS), 1)?;
    settle();
    run.signal("TERM")?;
    let (report, told) = run.ends(3)?;
    let mut records = 0;
    fs::remove_file(disk.path().join("others"))?;
    for entry in fs::read_dir(disk.name())? {
        let mut capture = PcapReader::new(File::open(entry?.path())?)?;
        while let Some(record) = capture.next_packet() {
            record?;
            records += 1;
        }
    }
    let sent = &report.value()["sent"][0];
    let not_written = &sent["dropped"]["not_written"];
    let sum = sent["packets"].as_u64().zip(not_written.as_u64()).map(|(some, rest)| some + rest);
    let is_told = told.matches("counted as not_written").count() == 1;
    if sent["packets"] == records && (records > 0) == has_room && *not_written != 0 && is_told {
        return if sum == sent["handed"].as_u64() { Ok(()) } else { Err("no balance".into()) };
    }
    Err(format!("{records} records, {sent}; {told}").into())
}

fn judge_default_route() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    let commands =
        ["ip address add 10.7.0.1/24 dev fb0", "ip route add default via 10.7.0.2 dev fb0"];
    for command in commands {
        link.near.run(&command.split(' ').collect::<Vec<_>>())?;
    }
    for via in ["af_packet", "af_xdp"] {
        let output = try_run(command(&link.near), &[DEVICE, "--via", via])?;
        expect(&output, &[DEVICE, "--yes"])?;
        judge_silence(&link)?;
        for consent in [["--yes"].as_slice(), &["--take", "udp:9"]] {
            Run::start(&link.near, [&[DEVICE, "--via", via], consent].concat())?.stop()?;
        }
    }
    judge_silence(&link)
}

fn judge_foreign() -> Judgement {
    let link = Link::new(Way::AfXdpGeneric)?;
    let attach = ["ip", "link", "set", "dev", DEVICE, "xdpgeneric", "obj", FOREIGN_PROGRAM];
    link.near.run(&[&attach[..], &["sec", "xdp"]].concat())?;
    let foreign = link.shown()?["xdp"]["prog"]["id"].clone();
    expect(&try_run(command(&link.near), &link.args(&[]))?, &[DEVICE, "--replace"])?;
    if link.shown()?["xdp"]["prog"]["id"] != foreign {
        return Err("the foreign program is gone".into());
    }
    let capture = Capture::write(Way::AfXdpGeneric, 0)?;
    let mut run = Run::start(&link.near, link.args(&["--replace"]))?;
    let sent = play(&link, &capture, Pace::Packets(PPS), 1)?;
    settle();
    judge_sum(&link, &run.stop()?, sent)?;
    judge_silence(&link)
}

/// Checks that a device or the system has refused, with these words in the message.
fn expect(output: &Output, words: &[&str]) -> Judgement {
    let told = told(output);
    if output.status.code() == Some(3) && words.iter().all(|word| told.contains(word)) {
        return Ok(());
    }
    Err(format!("3 and {words:?} were expected: {:?}, {told}", output.status.code()).into())
}
