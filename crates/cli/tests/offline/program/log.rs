//! Messages of the program: forms, levels, and the limit of repeated ones.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::WorkDir;

/// Messages of a command with `--log json`, and its exit code.
fn messages(dir: &WorkDir, args: &str) -> (Vec<Value>, Option<i32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let output = command.args(args.split(' ')).current_dir(&dir.0).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
    (stderr.lines().map(parse).collect(), output.status.code())
}

#[test]
fn ops_1_json_messages_have_fields() {
    let dir = WorkDir::new();
    let (told, code) = messages(&dir, "replay --cpus 1 --metrics 0 --log json");
    assert_eq!(code, Some(0));
    let [served] = told.as_slice() else { panic!("{told:?}") };
    let address = served["address"].as_str().unwrap();
    let message = format!("metrics at http://{address}/metrics, a page at http://{address}/");
    assert_eq!((&served["level"], &served["message"]), (&"INFO".into(), &message.into()));
    assert!(served["timestamp"].is_string() && served["target"].is_string(), "{served}");
}

#[test]
fn ops_1_failures_are_messages_too() {
    let dir = WorkDir::new();
    let (told, code) = messages(&dir, "replay none.pcap --log json");
    let [failure] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((code, &failure["level"], &failure["code"]), (Some(2), &"ERROR".into(), &2.into()));
    assert!(failure["message"].as_str().unwrap().contains("none.pcap"), "{failure}");
    assert!(failure["help"].is_string(), "{failure}");
}

#[test]
fn ops_1_levels_leave_out_messages() {
    let dir = WorkDir::new();
    for (level, is_told) in [("info", [true, true]), ("warn", [false, true]), ("error", [false; 2])]
    {
        let args = format!("replay --cpus 1 --rps 9 --metrics 0 --log-level {level}");
        let run = dir.run(&args);
        assert_eq!(run.code, Some(0), "{}", run.told);
        let parts = ["metrics at", "--rps: CPUs 3 are not among"];
        assert_eq!(parts.map(|part| run.told.contains(part)), is_told, "{level}: {}", run.told);
    }
}

#[test]
fn ops_1_unwritable_stderr_ends_nothing() {
    let dir = WorkDir::new();
    for (args, code) in [("replay --cpus 1 --metrics 0", 0), ("replay none.pcap", 2)] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let command = command.args(args.split(' ')).current_dir(&dir.0);
        let status = command.stderr(full).stdout(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(code), "{args}");
    }
}

/// Nobody reads standard error, and its pipe is full.
#[test]
fn ops_1_unread_stderr_delays_no_end() {
    let dir = WorkDir::new();
    let (_unread, mut full) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&full, true).unwrap();
    while full.write(b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&full, false).unwrap();
    let args = "replay --json --cpus 1 --rate 1000 --loops 1000 --write-pcap out";
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let command = command.args(args.split(' ')).current_dir(&dir.0);
    let mut run = Repeating(command.stdout(Stdio::piped()).stderr(full).spawn().unwrap());
    while !dir.path("out/cpu0.pcap").exists() && run.0.try_wait().unwrap().is_none() {
        thread::yield_now();
    }
    let id = run.0.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &id]).status().unwrap().success());
    let mut report = String::new();
    BufReader::new(run.0.stdout.take().unwrap()).read_line(&mut report).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["interrupted"], true);
}

#[test]
fn ops_1_unreachable_journal_is_told() {
    let run = WorkDir::new().run("replay --cpus 1 --log journald");
    if run.code == Some(0) {
        // A journal runs here.
        return;
    }
    assert_eq!(run.code, Some(2));
    assert!(run.told.contains("the journal cannot be reached"), "{}", run.told);
}

/// A run that is ended with the test.
struct Repeating(Child);

impl Drop for Repeating {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ops_1_repeated_messages_are_counted() {
    let dir = WorkDir::new();
    let file = "[run]\ndevices = [\"vhost-user:v.sock\"]\nlisten = true\ncpus = 1\nno-control = \
                true\nlog = \"json\"\nmetrics = \"0\"\n";
    fs::write(dir.path("f.toml"), file).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["run", "--config", "f.toml"]).current_dir(&dir.0);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut run = Repeating(child);
    let lines = BufReader::new(run.0.stderr.take().unwrap()).lines();
    let mut told = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    assert!(told.next().unwrap()["message"].as_str().unwrap().starts_with("metrics at"));
    fs::write(dir.path("f.toml"), "no table").unwrap();
    let (is_over, id) = (Arc::new(AtomicBool::new(false)), run.0.id().to_string());
    let ended = Arc::clone(&is_over);
    let asker = thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            assert!(Command::new("kill").args(["-s", "HUP", &id]).status().unwrap().success());
            thread::sleep(Duration::from_millis(20));
        }
    });
    let suppressed = told.find(|message| message["suppressed"].is_u64()).unwrap();
    is_over.store(true, Ordering::Relaxed);
    asker.join().unwrap();
    let message = suppressed["message"].as_str().unwrap();
    let times = suppressed["suppressed"].as_u64().unwrap();
    assert!(times > 0 && message.starts_with(&format!("{times} times more within a second: ")));
    assert!(message.contains("f.toml"), "{message}");
}
