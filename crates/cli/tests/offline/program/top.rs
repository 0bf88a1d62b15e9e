//! One view of a run, printed.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::WorkDir;
use super::control::Live;

/// The first flow of the bundled capture.
const FLOW: &str = "10.9.0.2:39796,10.9.0.1:53";

/// Lines of a view from the one that begins with `title` to the next blank one.
fn section<'a>(view: &'a str, title: &str) -> Vec<&'a str> {
    let from_title = view.lines().skip_while(|line| !line.trim_start().starts_with(title));
    from_title.skip(1).take_while(|line| !line.is_empty()).collect()
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Drops so far of a run.
fn dropped(live: &Live<'_>) -> u64 {
    let metrics = live.answer("metrics\n");
    let lines = metrics.lines().filter(|line| line.starts_with("forebay_packets_dropped_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

#[test]
fn top_1_view_agrees_with_the_run() {
    let dir = WorkDir::new();
    let args = "--cpus 1 --queues 2 --when-full drop --work 1000 --set netdev_max_backlog=1";
    let live = Live::start(&dir, args);
    while dropped(&live) == 0 {
        std::thread::yield_now();
    }
    let before = dropped(&live);
    let view = live.told("top --once --interval 0.2 --follow 10.9.0.2:39796,10.9.0.1:53");
    let after = dropped(&live);

    assert!(view.lines().all(|line| line.chars().count() <= 80), "{view}");
    let cpus = section(&view, ">CPU");
    assert_eq!(cpus.len(), 1, "{view}");
    assert_eq!(words(cpus[0])[0], "0", "{view}");
    let queues = section(&view, "queue ");
    let named: Vec<_> = queues.iter().map(|line| words(line)[..3].to_vec()).collect();
    assert_eq!(named, [["rx-0", "0", "1"], ["rx-1", "0", "1"]], "{view}");
    let drops: u64 = section(&view, "drops at")
        .iter()
        .map(|line| {
            let words = words(line);
            assert_eq!(words[1], "backlog_full", "{view}");
            words[3].parse::<u64>().unwrap()
        })
        .sum();
    assert!((before..=after).contains(&drops), "{drops} is not within {before} to {after}");
    assert!(view.contains(&format!("/s, {drops} in all")), "{view}");

    let explained = live.told(&format!("explain {FLOW}"));
    for line in explained.lines().filter(|line| line.starts_with("  now:   on CPU")) {
        assert!(view.contains(line), "{line} is not in {view}");
    }
    assert!(view.contains("\nfollowing 10.9.0.2:39796 > 10.9.0.1:53\n"), "{view}");
    live.end();
}

#[test]
fn top_4_flows_are_those_explained() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1");
    let flows = loop {
        // Packets may be late.
        let answer = live.answer("flows\n");
        if answer != "ok\n" {
            break answer;
        }
    };
    let mut sampled = 0;
    for line in flows.lines().filter(|line| *line != "ok") {
        let words: Vec<_> = line.splitn(6, ' ').collect();
        let [packets, of_packets, "rx-0", hash, "0", name] = words[..] else { panic!("{line}") };
        assert!(name.starts_with("udp 10.9.0.2:") && name.ends_with(" > 10.9.0.1:53"), "{line}");
        let explained = live.answer(&format!("explain --json {name}\n"));
        let explained: Value = serde_json::from_str(explained.lines().next().unwrap()).unwrap();
        assert_eq!((&explained["hash"], &explained["queues"][0]["cpu"]), (&json!(hash), &json!(0)));
        let [packets, of_packets] = [packets, of_packets].map(|count| count.parse().unwrap());
        assert!((1..=of_packets).contains(&packets), "{line}");
        sampled += packets;
    }
    assert!(sampled > 0_u64, "{flows}");
    let view = live.told("top --once --interval 0.5");
    assert!(
        section(&view, "flow, by").iter().all(|line| line.contains(" > 10.9.0.1:53")),
        "{view}"
    );
    live.end();
}

#[test]
fn top_1_answer_has_all_metrics() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1");
    let answer = live.answer("metrics\nmetrics all\n");
    let (metrics, refusal) = answer.split_once("# EOF\nok\n").unwrap();
    for name in ["forebay_packets_received_total{", "forebay_cpu_busy_seconds_total{"] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    assert!(refusal.starts_with("error EINVAL: "), "{refusal}");
    // Nobody has asked the engine to measure times.
    let waits =
        metrics.lines().filter(|line| line.starts_with("forebay_backlog_wait_seconds_count"));
    assert!(
        waits.clone().count() > 0 && waits.clone().all(|line| line.ends_with(" 0")),
        "{metrics}"
    );
    live.end();
}

#[test]
fn top_5_unusable_call_is_refused() {
    let dir = WorkDir::new();
    for (args, code, part) in [
        ("top --control s.sock", 2, "give --once to print one view"),
        ("top --once --control s.sock", 3, "no run answers at s.sock"),
        ("top --once --interval 0", 2, "it is from 0.1 to 3600"),
        ("top --once --follow 10.0.0.1", 2, "it takes two addresses, not 1"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(code), ""), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}

#[test]
fn top_5_end_during_view_is_told() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1");
    let mut top = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let args = "top --once --interval 3 --control s.sock";
    let top = top.current_dir(&dir.0).args(args.split(' ')).stdout(Stdio::piped());
    let top = top.stderr(Stdio::piped()).spawn().unwrap();
    live.end();
    let output = top.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("no run answers"), "{told}");
}
