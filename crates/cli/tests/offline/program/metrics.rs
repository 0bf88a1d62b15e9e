//! Metrics of a replay.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use super::WorkDir;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// Text of all metrics of the run that listens at `address`.
fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200 OK"), "{answer}");
    answer
}

/// Sum of a metric's samples.
fn sum(text: &str, name: &str) -> u64 {
    let of_name = |line: &&str| line.split('{').next() == Some(name);
    text.lines()
        .filter(of_name)
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

#[test]
fn met_1_replay_is_scraped_while_running() {
    let mut run = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let args = "replay --json --rate 5k --loops 1000000 --metrics 0";
    let run = run.args(args.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = run.spawn().unwrap();
    let mut told = BufReader::new(run.stderr.take().unwrap());
    let mut line = String::new();
    told.read_line(&mut line).unwrap();
    let address = line.trim_end().strip_prefix("forebay: metrics at http://").unwrap();
    let (address, _) = address.split_once("/metrics, a page at ").unwrap();
    let delivered = |text: &str| sum(text, "forebay_packets_delivered_total");
    let first = delivered(&scrape(address));
    let text = loop {
        let text = scrape(address);
        if delivered(&text) > first {
            break text;
        }
    };
    assert!(sum(&text, "forebay_packets_received_total") >= delivered(&text));
    assert!(sum(&text, "forebay_backlog_wait_seconds_count") > 0);
    assert_eq!(sum(&text, "forebay_delivery_latency_seconds_count"), 0, "a capture's times");
    let pid = run.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(super::number(&report["delivered"]) >= delivered(&text));
    assert!(TcpStream::connect(address).is_err(), "nobody listens after the end");
}

#[test]
fn met_3_unusable_metrics_address_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    let dir = WorkDir::new();
    for (args, code, part) in [
        ("--metrics localhost:9464", 2, "it is PORT, or ADDR:PORT"),
        ("--metrics-host name", 2, "--metrics <ADDR>"),
        ("--metrics 0 --deterministic", 2, "cannot be used with"),
        (&format!("--metrics {taken}"), 3, "cannot listen for metrics at 127.0.0.1:"),
    ] {
        let run = dir.run(&format!("replay --cpus 1 {args}"));
        assert_eq!(run.code, Some(code), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}

#[test]
fn pag_4_unusable_token_is_refused() {
    let dir = WorkDir::new();
    for (name, text, mode) in [
        ("open", "0123456789abcdef\n", 0o644),
        ("short", "0123\n", 0o600),
        ("right", "0123456789abcdef\n", 0o600),
    ] {
        fs::write(dir.path(name), text).unwrap();
        fs::set_permissions(dir.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    for (args, part) in [
        ("--page-token right", "--metrics <ADDR>"),
        ("--metrics 0 --page-token none", "cannot read none: No such file"),
        ("--metrics 0 --page-token open", "others may read it; chmod 600 open"),
        ("--metrics 0 --page-token short", "its first line is not 16 to 256"),
    ] {
        let run = dir.run(&format!("replay --cpus 1 {args}"));
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
    let run = dir.run("replay --cpus 1 --metrics 0 --page-token right");
    assert_eq!(run.code, Some(0), "{}", run.told);
    assert!(run.told.contains("/metrics, a page at http://127.0.0.1:"), "{}", run.told);
    assert!(!run.told.contains("0123456789abcdef"), "the token is not printed");
}
