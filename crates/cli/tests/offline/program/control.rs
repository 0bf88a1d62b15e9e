//! Queries and changes during a run, over its control socket.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::{Run, WorkDir, number};

/// The first flow of the bundled capture.
const FLOW: &str = "10.9.0.2:39796,10.9.0.1:53";

/// A replay that runs until told to end.
pub(super) struct Live<'a> {
    dir: &'a WorkDir,
    child: Child,
}

impl<'a> Live<'a> {
    /// Starts a replay that listens at `s.sock`.
    pub(super) fn start(dir: &'a WorkDir, args: &str) -> Self {
        let fixed = "replay --json --rate 5k --loops 1000000 --control s.sock";
        let args = format!("{fixed} {args}");
        let mut run = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let run = run.current_dir(&dir.0).args(args.trim_end().split(' '));
        let child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut live = Self { dir, child };
        while UnixStream::connect(dir.path("s.sock")).is_err() {
            assert!(live.child.try_wait().unwrap().is_none(), "{args}: has ended");
            std::thread::yield_now();
        }
        live
    }

    /// Runs a command that queries the replay.
    fn run(&self, args: &str) -> Run {
        self.dir.run(&format!("{args} --control s.sock"))
    }

    /// Standard output of a command, which must succeed.
    pub(super) fn told(&self, args: &str) -> String {
        let run = self.run(args);
        assert_eq!(run.code, Some(0), "{args}: {}", run.told);
        run.stdout
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
    }

    fn has_received(&self) -> bool {
        let received = |line: &str| {
            line.starts_with("forebay_packets_received_total{") && !line.ends_with(" 0")
        };
        self.answer("metrics\n").lines().any(received)
    }

    fn document(&self, args: &str) -> Value {
        serde_json::from_str(&self.told(&format!("{args} --json"))).unwrap()
    }

    /// Sends bytes on a new connection.
    fn say(&self, bytes: &[u8]) -> UnixStream {
        let mut stream = UnixStream::connect(self.dir.path("s.sock")).unwrap();
        // Ignored: the run may close the connection before the end.
        let _ = stream.write_all(bytes);
        stream
    }

    /// Sends lines, and returns all answers.
    pub(super) fn answer(&self, lines: &str) -> String {
        let mut stream = self.say(lines.as_bytes());
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Ends the run once it has received packets. Returns its report, which must keep all promises.
    pub(super) fn end(mut self) -> Value {
        while !self.has_received() {
            std::thread::yield_now();
        }
        self.signal("TERM");
        let (mut report, mut told) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{told}");
        let report: Value = serde_json::from_str(&report).unwrap();
        let drops = report["dropped"].as_object().unwrap().values().filter_map(Value::as_u64);
        let accounted = number(&report["delivered"]) + drops.sum::<u64>();
        assert_eq!(accounted, number(&report["packets_in"]), "promise 2");
        assert_eq!([&report["reordered"], &report["queued"], &report["frames_away"]], [0, 0, 0]);
        assert!(number(&report["packets_in"]) > 0);
        assert!(!self.dir.path("s.sock").exists(), "removed at the end");
        report
    }
}

impl Drop for Live<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn knobs_are_read_set_and_listed() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1 --queues 2");
    assert_eq!(live.told("get netdev_max_backlog"), "1000\n");
    assert_eq!(live.told("get rps_flow_cnt"), "rx-0/rps_flow_cnt 4096\nrx-1/rps_flow_cnt 4096\n");
    assert_eq!(
        live.told("get sys/class/net/replay/mtu cpu/online"),
        "sys/class/net/replay/mtu 1500\ncpu/online 0\n"
    );
    assert_eq!(live.told("get softnet_stat").split(' ').count(), 15);

    let run = live.run("set rx-1/rps_flow_cnt=0x101 netdev_max_backlog=300");
    assert_eq!((run.code, run.stdout.as_str()), (Some(0), ""));
    let now = "forebay: now rx-1/rps_flow_cnt 512 forebay: now netdev_max_backlog 300";
    assert_eq!(run.told, now);
    live.told("set rps_flow_cnt 1024");
    assert_eq!(
        live.document("get rps_flow_cnt rx-1/rps_flow_cnt"),
        serde_json::json!({
            "rps_flow_cnt": ["rx-0/rps_flow_cnt 1024", "rx-1/rps_flow_cnt 1024"],
            "rx-1/rps_flow_cnt": "1024",
        })
    );
    let set = live.document("set dev_weight=2000 coalesce=gro");
    assert_eq!(set["now"], serde_json::json!({ "coalesce": "gro", "dev_weight": "2000" }));
    assert!(set["notes"][0].as_str().unwrap().starts_with("in effect: 1024"), "{set}");

    let list = live.document("list");
    let knob = |name: &str| {
        let knobs = list.as_array().unwrap().iter();
        let mut named = knobs.filter(|knob| knob["path"].as_str().unwrap().ends_with(name));
        named.next().unwrap_or_else(|| panic!("{name}: {list}")).clone()
    };
    let backlog = knob("proc/sys/net/core/netdev_max_backlog");
    assert_eq!([&backlog["value"], &backlog["default"]], ["300", "1000"]);
    assert_eq!(knob("rx-1/rps_flow_cnt")["value"], "1024");
    for name in ["rps_cpus", "coalesce", "cpus", "mtu", "cpu0/online"] {
        assert!(!knob(name)["meaning"].as_str().unwrap().is_empty(), "{name}");
        assert!(!knob(name)["default"].as_str().unwrap().is_empty(), "{name}");
    }
    assert!(live.told("list").contains("netdev_max_backlog"));
    live.end();
}

/// A process that is no run, and answers every request with these bytes.
fn answer_with(dir: &WorkDir, bytes: &'static [u8]) {
    let path = dir.path("s.sock");
    // Ignored: there is none yet.
    let _ = fs::remove_file(&path);
    let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            while client.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {
                // The client has read enough.
                let _ = client.write_all(bytes);
            }
        }
    });
}

/// Commands do not wait ten seconds for a run that is stopped: they name its process. It answers again later.
#[test]
fn promise_3_stopped_run_is_named() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "");
    live.signal("STOP");
    let problem = format!("process {0} is stopped (kill -CONT {0})", live.child.id());
    for command in ["get rps_cpus", "top --once", "watch rps_cpus"] {
        let run = live.run(command);
        assert_eq!((run.code, run.stdout.as_str()), (Some(3), ""), "{command}: {}", run.told);
        // The message is wrapped at words.
        let words = run.told.replace('│', " ");
        let told = words.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(told.contains(&problem), "{command}: {told}");
    }
    live.signal("CONT");
    live.told("get rps_cpus");
    live.end();
}

#[test]
fn promise_5_strange_answers_are_told() {
    let commands =
        ["get mtu", "list", "set mtu=70", "explain 10.0.0.1:5,10.0.0.2:6", "watch", "watch mtu"];
    let dir = WorkDir::new();
    let endless: &[u8] = vec![b'x'; 2 << 20].leak();
    for (answer, problem) in
        [(endless, "a line is longer than 1024 KiB"), (b"a\xff\n", "0xff, is not UTF-8")]
    {
        answer_with(&dir, answer);
        for command in commands {
            let run = dir.run(&format!("{command} --control s.sock"));
            assert_eq!((run.code, run.stdout.as_str()), (Some(3), ""), "{command}: {}", run.told);
            for part in ["the answer at s.sock cannot be used", problem, "--control"] {
                assert!(run.told.contains(part), "{command}: {part:?} is not in {:?}", run.told);
            }
        }
    }
    answer_with(&dir, b"\x1b[2J\x1b]0;x\x07 3\nok\n");
    for command in commands {
        let run = dir.run(&format!("{command} --control s.sock"));
        assert_eq!(run.code, Some(0), "{command}: {}", run.told);
        let shown = run.stdout + &run.told;
        assert!(!shown.contains(['\x1b', '\x07']), "{command}: {shown:?}");
    }
    answer_with(&dir, b"error EINVAL: \x1b[2J\n");
    let run = dir.run("get mtu --control s.sock");
    assert!(run.code == Some(2) && !run.told.contains('\x1b'), "{:?}", run.told);
}

#[test]
fn rps_8_refusals_have_errno_and_exit_code() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1");
    for (args, errno) in [
        ("set netdev_max_backlog=-1", "EINVAL"),
        ("set rps_cpus=x", "EINVAL"),
        ("set rps_cpus=1,,,,,,,,,,,,,,,,,0", "EOVERFLOW"),
        ("set rps_cpu=1", "ENOENT"),
        ("set mtu=", "EINVAL"),
        ("set mtu=\t1400", "EINVAL"),
        ("set mtu=1400\t", "EINVAL"),
        ("set netdev_max_backlog=", "EINVAL"),
        ("set gro_flush_timeout=", "EINVAL"),
        ("set coalesce=", "EINVAL"),
        ("set rx-7/rps_cpus=1", "ENOENT"),
        ("set gro_flush_timeout=18446744073709551616", "ERANGE"),
        ("set softnet_stat=1", "EACCES"),
        ("set online=1", "EINVAL"),
        ("get proc/net", "EISDIR"),
        ("get hash_key", "EACCES"),
        ("watch nothing", "ENOENT"),
        ("watch hash_key", "EACCES"),
    ] {
        let run = live.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(&format!("({errno})")), "{args}: {}", run.told);
    }
    let told = live.run("set dev_weight=70 rps_flow_cnt=512 netdev_max_backlog=-1").told;
    assert!(told.contains("set before that: dev_weight, rx-0/rps_flow_cnt"), "{told}");
    let told = live.run("set flow_key=bad").told;
    assert!(told.matches("cannot be").count() <= 1, "{told}");
    assert_eq!(told.matches("it is auto, outer or inner").count(), 1, "{told}");
    // An empty line is valid for a mask, unlike for the knobs above.
    assert_eq!(live.told("get mtu netdev_max_backlog").split_whitespace().nth(1), Some("1500"));
    live.told("set flow_limit_cpu_bitmap=1");
    live.told("set flow_limit_cpu_bitmap=");
    assert!(
        live.told("get flow_limit_cpu_bitmap").trim().chars().all(|digit| "0,".contains(digit))
    );
    let run = live.run("set cpu0/online=0");
    assert_eq!(run.code, Some(3), "the run refuses to run nowhere: {}", run.told);
    assert!(run.told.contains("(EBUSY)"), "{}", run.told);
    for (args, problem) in [
        ("set mtu", "mtu has no value"),
        ("set", "there is nothing to set"),
        ("explain 10.0.0.1", "it takes two addresses, not 1"),
        ("set --save mtu=1", "put --save behind"),
        ("set --save", "started without --config"),
    ] {
        let run = live.run(args);
        assert_eq!(run.code, Some(2), "{args}");
        assert!(run.told.contains(problem), "{args}: {}", run.told);
    }
    live.end();
    let run = dir.run("get mtu --control s.sock");
    assert_eq!(run.code, Some(3));
    assert!(run.told.contains("no run answers at s.sock"), "{}", run.told);
}

#[test]
fn socket_lines_have_an_end() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1");
    let mtu = "now mtu 9000\nin effect: once coalesce is gro or lro\nok\n9000\nok\n";
    assert_eq!(live.answer("set mtu 9000\nget mtu\n"), mtu);
    // CPUs that exist on the machine but are not used by the run are named.
    let ignored = live.answer("set rps_cpus 3\n");
    let is_alone = std::thread::available_parallelism().unwrap().get() == 1;
    let note = "ignored 1: not among the CPUs that run (0)\nok\n";
    assert!(ignored.ends_with(note) || is_alone, "{ignored}");
    // Behind the other fields, a mask has what was requested.
    let has_fields = |line: &str| {
        let fields = 4 + usize::from(line.contains("/rps_cpus\t") && !is_alone);
        line == "ok" || line.split('\t').count() == fields
    };
    assert!(live.answer("list\n").lines().all(has_fields));
    assert_eq!(live.answer("pause 0\nresume 0\nkill 0\n"), "ok\nok\nok\n");
    assert_eq!(live.answer("rfs_desired 0badcafe 0\n"), "ok\n");
    assert_eq!(live.answer("config\n"), "error ENOENT: the run was started without --config\n");
    assert!(live.answer("explain 0badcafe\n").contains("rx-0, polled by CPU 0"));
    let words = "get, set, list, watch, explain, flows, rfs_desired, pause, resume, kill, config and metrics";
    for line in ["", "hello", "GET mtu"] {
        let answer = live.answer(&format!("{line}\n"));
        assert!(answer.starts_with("error EINVAL: ") && answer.contains(words), "{answer}");
    }
    assert!(live.answer("pause 7\n").starts_with("error EINVAL: CPU 7 is not among"));
    // A watch ends with the next request, which is answered.
    assert_eq!(live.answer("watch mtu\nget mtu\n"), "mtu 9000\nok\n9000\nok\n");
    live.end();
}

#[test]
fn watch_reports_changes_until_end() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 1");
    let mut watch = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let watch = watch.current_dir(&dir.0).args(["watch", "--control", "s.sock", "--json"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = |name: &str| loop {
        let told: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        if told["name"] == name {
            break told["value"].as_str().unwrap().to_owned();
        }
    };
    assert_eq!(next("mtu"), "1500");
    for mtu in ["1400", "9000"] {
        live.told(&format!("set mtu={mtu}"));
        assert_eq!(next("mtu"), mtu);
    }
    live.told("set rps_cpus=0");
    assert_eq!(u64::from_str_radix(&next("rx-0/rps_cpus").replace(',', ""), 16), Ok(0));
    live.end();
    assert!(watch.wait().unwrap().success());
}

#[test]
fn rfs_6_explained_flow_follows_application() {
    let dir = WorkDir::new();
    // By this hash, no other flow of the capture has the flow's slot, which it would move, too.
    let args = format!("--cpus 2 --rps 1 --spread always --hash toeplitz --explain {FLOW}");
    let live = Live::start(&dir, &args);
    let state = || live.document(&format!("explain {FLOW}"))["queues"][0].clone();
    while state()["cpu"] != 0 {}
    let hash = live.document(&format!("explain {FLOW}"))["hash"].as_str().unwrap().to_owned();
    // The mask overrides the application's CPU; the desired CPU is used once the mask permits.
    let answer = live.answer(&format!("rfs_desired {hash} 1\n"));
    assert!(answer.contains("no queue follows to CPU 1") && answer.ends_with("\nok\n"), "{answer}");
    live.told("set rps_cpus=3");
    while state()["cpu"] != 1 {}
    assert_eq!(state()["desired"], serde_json::json!({ "because": "rfs", "cpu": 1 }));
    // The move happens once the paused CPU continues.
    assert_eq!(live.answer(&format!("pause 1\nrfs_desired {hash} 0\n")), "ok\nok\n");
    while state()["cpu"] != 0 && state()["held"].is_null() && state()["ahead"] == 0 {}
    live.answer("resume 1\n");
    while state()["cpu"] != 0 {}
    let told = live.told(&format!("explain {FLOW}"));
    let moved = "CPU 0 to CPU 1, since its application runs there (rfs)";
    assert!(told.contains(moved) && told.contains(&hash), "{told}");

    let report = live.end();
    let told = &report["explain"][0];
    assert_eq!(told["hash"], hash.as_str());
    let moves = told["queues"][0]["moves"].as_array().unwrap();
    assert!(moves.iter().any(|moved| moved["desired_by"] == "rfs" && moved["to"] == 1), "{told}");
    assert_eq!(told["queues"][0]["ahead"], 0, "all has been processed");
    assert_eq!(told["queues"][0]["sharers"], serde_json::json!([hash]));
}

#[test]
fn saved_state_starts_next_run() {
    let dir = WorkDir::new();
    fs::write(dir.path("c.toml"), "[knobs]\nmtu = 9000\nrps_cpus = \"1\"\n").unwrap();
    let live = Live::start(&dir, "--cpus 1 --queues 2 --config c.toml");
    assert_eq!(live.told("get mtu"), "9000\n");
    live.told("set rx-1/rps_flow_cnt=64 netdev_max_backlog=300 coalesce=lro --save");
    let values = |live: &Live| {
        let list = live.document("list");
        let knobs = list.as_array().unwrap().iter();
        knobs.map(|knob| (knob["path"].clone(), knob["value"].clone())).collect::<Vec<_>>()
    };
    let saved = values(&live);
    live.told("set --save other.toml");
    assert_eq!(dir.read("other.toml"), dir.read("c.toml"));
    live.end();

    let live = Live::start(&dir, "--cpus 1 --queues 2 --config c.toml");
    assert_eq!(values(&live), saved);
    let run = live.run("set --save=missing/c.toml");
    assert_eq!(run.code, Some(2), "{}", run.told);
    live.end();
    let live = Live::start(
        &dir,
        "--cpus 1 --queues 2 --config c.toml --mtu 1400 --set netdev_max_backlog=50",
    );
    assert_eq!(live.told("get mtu"), "1400\n");
    // Set before the first frame, possibly after the socket is open.
    while live.told("get netdev_max_backlog") != "50\n" {}
    live.end();
}

#[test]
fn config_error_names_its_line() {
    let dir = WorkDir::new();
    for (text, problem) in [
        ("[knobs]\nmtu = 1\n", "c.toml:2: mtu cannot be \"1\""),
        ("\n[knobs]\nrps_cpu = 1\n", "c.toml:3: rps_cpu cannot be \"1\": there is no knob"),
        ("[knobs.rx-9]\nrps_cpus = 1\n", "c.toml:2: rx-9/rps_cpus cannot be \"1\": there is no"),
        ("[knobs]\nmtu\n", "c.toml:2: "),
        (
            "[knobs]\nmtu = \"1400\\n9\"\n",
            "c.toml:2: mtu cannot be \"1400\\n9\": it takes one line",
        ),
        ("[other]\n", "c.toml:1: there are only the tables [run] and [knobs]"),
    ] {
        fs::write(dir.path("c.toml"), text).unwrap();
        let run = dir.run("replay --cpus 1 --config c.toml");
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{text}");
        assert!(run.told.contains(problem), "{text}: {}", run.told);
    }
    let run = dir.run("replay --cpus 1 --config none.toml");
    assert_eq!(run.code, Some(2));
    assert!(run.told.contains("cannot read none.toml"), "{}", run.told);
}

#[test]
fn promise_5_hostile_clients_stop_nobody() {
    let dir = WorkDir::new();
    let live = Live::start(&dir, "--cpus 2 --rps 3");
    let mut clients = Vec::new();
    for bytes in
        [&b"\0\xff\xfe garbage\n\n\n"[..], b"set mtu 14", b"list\nlist\n", &[b'x'; 100_000]]
    {
        clients.push(live.say(bytes));
    }
    // This client never reads its answers.
    clients.push(live.say("list\n".repeat(100_000).as_bytes()));
    for _ in 0..100 {
        clients.push(live.say(b"watch"));
        assert_eq!(live.told("get mtu"), "1500\n");
    }
    for _ in 0..20 {
        clients.push(live.say(b"watch\n"));
    }
    assert_eq!(live.told("set rps_cpus=1"), "", "watches leave room for others");
    live.say(b"set mtu 1400\nlist\nexplain 0badcafe\n"); // and is gone
    while live.told("get mtu") != "1400\n" {}
    let mut too_long = String::new();
    let told = live.say(format!("get {}\n", "x".repeat(5000)).as_bytes());
    BufReader::new(told).read_line(&mut too_long).unwrap();
    assert_eq!(too_long, "error EINVAL: a request has at most 4096 bytes\n");
    live.end();
    drop(clients);
}

#[test]
fn socket_private_dead_one_replaced() {
    let dir = WorkDir::new();
    let mut live = Live::start(&dir, "--cpus 1");
    let mode = |name| fs::metadata(dir.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("s.sock"), 0o600);
    let run = dir.run("replay --cpus 1 --control s.sock");
    assert_eq!(run.code, Some(3), "{}", run.told);
    let in_use = format!("s.sock is in use by process {}", live.child.id());
    assert!(run.told.contains(&in_use) && run.told.contains("another path"), "{}", run.told);
    live.child.kill().unwrap();
    live.child.wait().unwrap();
    assert!(dir.path("s.sock").exists(), "it had no time to remove it");
    let live = Live::start(&dir, "--cpus 1");
    fs::rename(dir.path("s.sock"), dir.path("kept")).unwrap();
    fs::write(dir.path("s.sock"), "of another").unwrap();
    let run = dir.run("replay --cpus 1 --control s.sock");
    assert_eq!(run.code, Some(2), "{}", run.told);
    assert!(run.told.contains("there is a file that is not a socket"), "{}", run.told);
    drop(live);
    assert_eq!(dir.read("s.sock"), "of another");
    let run = dir.run("replay --cpus 1 --control none/s.sock");
    assert_eq!(run.code, Some(2), "{}", run.told);
    let run = dir.run(&format!("replay --cpus 1 --control {}", "x".repeat(108)));
    assert!(run.told.contains("has 1 to 107 bytes"), "{}", run.told);

    let mut open = Command::new("sh");
    let script = "umask 0; exec \"$0\" replay --json --rate 1k --loops 1000 --control open.sock";
    let open = open.current_dir(&dir.0).args(["-c", script, env!("CARGO_BIN_EXE_forebay")]);
    let mut open = open.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !dir.path("open.sock").exists() && open.try_wait().unwrap().is_none() {}
    assert_eq!(mode("open.sock"), 0o600, "from the first moment, whatever the umask");
    open.kill().unwrap();
    open.wait().unwrap();
}

#[test]
fn replay_reports_flow_cpus_with_reasons() {
    let dir = WorkDir::new();
    let fixed = "--deterministic --cpus 2 --spread always --rps 1 --at 100:rps_cpus=2";
    let args = format!("{fixed} --explain {FLOW} --explain 0badcafe");
    let report = dir.report(&args);
    let [told, other] = &report["explain"].as_array().unwrap()[..] else { panic!("{report}") };
    let queue = &told["queues"][0];
    assert_eq!([&queue["cpu"], &queue["desired"]["cpu"], &queue["watched_since_ns"]], [1, 1, 0]);
    assert_eq!(queue["desired"]["because"], "rps");
    let moved = &queue["moves"][0];
    assert_eq!([&moved["from"], &moved["to"]], [0, 1]);
    assert!(queue["sharers"].as_array().unwrap().contains(&told["hash"]), "{queue}");
    assert_eq!((&other["flow"], &other["hash"]), (&"0badcafe".into(), &"0badcafe".into()));
    let run = dir.run(&format!("replay {args}"));
    for words in
        ["every frame accounted for\n\nflow 10.9.0.2:39796 > 10.9.0.1:53, hash", "now:   on CPU 1"]
    {
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
    }
    let run = dir.run("replay --explain nonsense");
    assert_eq!(run.code, Some(2));
    assert!(run.told.contains("is neither an address nor a port"), "{}", run.told);
}
