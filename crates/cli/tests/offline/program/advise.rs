//! `forebay advise`, on a simulated machine.

use std::fs;

use serde_json::{Value, json};

use super::{MS_V4_0, WorkDir};

/// Four cores of two threads (n and n + 4); two cores share a last-level cache. Bitmaps have room
/// for 40 CPUs.
fn machine() -> WorkDir {
    let dir = WorkDir::new();
    let write = |file: String, text: &str| {
        let path = dir.path("sys/devices/system/cpu").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    };
    write("online".to_owned(), "0-7");
    write("possible".to_owned(), "0-39");
    for cpu in 0..8 {
        let core = cpu % 4;
        write(format!("cpu{cpu}/topology/core_cpus_list"), &format!("{core},{}", core + 4));
        let shared = if core < 2 { "0-1,4-5" } else { "2-3,6-7" };
        for (file, text) in [("type", "Unified"), ("level", "3"), ("shared_cpu_list", shared)] {
            write(format!("cpu{cpu}/cache/index0/{file}"), text);
        }
    }
    dir
}

#[test]
fn rps_c1_advised_masks_have_reasons() {
    let dir = machine();
    let run = dir.run("advise --sysfs sys --polling 0,6 --json");
    assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
    let advice: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(advice["cpus"], "0-7");
    assert_eq!(advice["rps_sock_flow_entries"]["value"], 32_768);
    for (queue, polling, order, masks, cpus) in [
        (0, 0, [1, 5, 4, 0], ["00,00000033", "00,00000032"], ["0-1,4-5", "1,4-5"]),
        (1, 6, [3, 7, 2, 6], ["00,000000cc", "00,0000008c"], ["2-3,6-7", "2-3,7"]),
    ] {
        let advice = &advice["queues"][queue];
        assert_eq!((&advice["polling_cpu"], &advice["order"]), (&polling.into(), &order.into()));
        for (knob, (mask, cpus)) in
            ["rps_cpus", "rps_cpus_without_polling"].into_iter().zip(masks.into_iter().zip(cpus))
        {
            assert_eq!(
                (&advice[knob]["mask"], &advice[knob]["cpus"]),
                (&mask.into(), &cpus.into())
            );
        }
        assert_eq!(advice["rps_flow_cnt"]["value"], 16_384);
    }

    let run = dir.run("advise --sysfs sys");
    assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
    for part in [
        "rx-0, polled by CPU 0",
        "00,00000033",
        "share the last-level cache (L3) with CPU 0",
        "on the core of CPU 0",
        "2-3,6-7  left out",
        "time_squeeze",
        "rps_sock_flow_entries  32768",
    ] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
}

#[test]
fn advice_needs_cpus_that_there_are() {
    let dir = machine();
    for (args, problem) in [
        ("--sysfs sys --polling 8", "--polling 8: not among the CPUs that packets can go to"),
        ("--sysfs sys --polling x", "--polling x: "),
        ("--sysfs none", "none/devices/system/cpu/online does not say which CPUs are online"),
    ] {
        let run = dir.run(&format!("advise {args}"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}");
        assert!(run.told.contains(problem), "{args}: {}", run.told);
    }
    // The real machine has at least one usable CPU.
    assert_eq!(dir.run("advise").code, Some(0));
    let run = dir.run("advise --sysfs sys --cpus 0,12");
    assert!(run.told.contains("CPUs 12 are not among those that there are (0-7)"), "{}", run.told);
}

#[test]
fn rps_b6_advice_tells_of_unread_records() {
    let dir = machine();
    dir.write_one_flow("cut.pcap", 100);
    let whole = fs::read(dir.path("cut.pcap")).unwrap();
    fs::write(dir.path("cut.pcap"), &whole[..whole.len() - 1]).unwrap();
    let run = dir.run("advise --sysfs sys --cpus 0,4 cut.pcap");
    let told = "1 damaged record passed over: cut.pcap: a record is cut off by the end of the file";
    assert!(run.code == Some(0) && run.told.contains(told), "{}", run.told);
    // A frame of no protocol, and the cut one.
    let flowless = [&whole[..24], &[0; 8], &[60, 0, 0, 0, 60, 0, 0, 0], &[0; 60], &[7; 5]].concat();
    fs::write(dir.path("flowless.pcap"), flowless).unwrap();
    let run = dir.run("advise --sysfs sys --cpus 0,4 flowless.pcap");
    let has_told = |text| run.told.contains(text);
    let told =
        has_told("1 damaged record passed over: flowless") && has_told("no packet of it has");
    assert!(run.code == Some(2) && told, "{}", run.told);
    // IEEE 802.15.4
    fs::write(dir.path("unread.pcap"), [&whole[..20], &[195, 0, 0, 0], &whole[24..]].concat())
        .unwrap();
    let run = dir.run("advise --sysfs sys --cpus 0,4 unread.pcap");
    assert!(run.code == Some(2) && run.told.contains("link type 195"), "{}", run.told);
}

/// Four rows of Microsoft's "Verifying the RSS Hash Calculation": the first three hash to the first
/// of two CPUs (0x51ccc178, 0x5c2b394a, 0x10e828a2), the last to the second (0xc626b0ea).
#[test]
fn rps_b6_capture_decides_if_balancing_helps() {
    let dir = machine();
    let low = [
        MS_V4_0,
        ([24, 19, 198, 95], 12898, [12, 22, 207, 184], 38024),
        ([153, 39, 163, 191], 44251, [202, 188, 127, 2], 1303),
    ];
    let high = ([199, 92, 111, 2], 14230, [65, 69, 140, 83], 4739);
    let flows = [(low[0], 300), (low[1], 200), (low[2], 100), (high, 40)];
    dir.write_udp("skewed.pcap", flows.iter().flat_map(|(flow, frames)| vec![flow; *frames]));
    dir.write_udp("even.pcap", [low[0], high].iter().flat_map(|flow| vec![flow; 100]));
    dir.write_one_flow("elephant.pcap", 100);
    let advise = "advise --sysfs sys --cpus 0,4 --hash toeplitz";
    let load = |file| {
        let run = dir.run(&format!("{advise} --json {file}"));
        assert_eq!((run.code, run.told.as_str()), (Some(0), ""));
        serde_json::from_str::<Value>(&run.stdout).unwrap()["load"].clone()
    };
    let skewed = load("skewed.pcap");
    assert_eq!((&skewed["packets"], &skewed["flows"]), (&640.into(), &4.into()));
    let shares = json!([
        { "cpu": 0, "off": 93.7, "load": 46.8 },
        { "cpu": 4, "off": 6.2, "load": 53.1 },
    ]);
    assert_eq!(skewed["cpus"], shares);
    assert_eq!(skewed["busiest_percent"], json!([187, 106]));
    assert_eq!(skewed["rps_balance"]["value"], "load");
    for (file, why) in [("even.pcap", "is even"), ("elephant.pcap", "no move would help")] {
        let balance = &load(file)["rps_balance"];
        assert_eq!(balance["value"], "off", "{file}");
        assert!(balance["why"].as_str().unwrap().contains(why), "{balance}");
    }
    let run = dir.run(&format!("{advise} skewed.pcap"));
    let why = "the busiest CPU gets 106 % of the mean instead of 187 %, after 1 move";
    assert!(
        run.stdout.contains("640 packets of 4 flows") && run.stdout.contains(why),
        "{}",
        run.stdout
    );
}
