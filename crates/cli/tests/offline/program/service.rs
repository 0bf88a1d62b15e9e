//! A run as a service manager starts it: by a config file, with notices and reloads. It waits for
//! the back end of a vhost-user device, which takes no privileges.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Run, WorkDir};

/// Time after which a run counts as hanging.
const PATIENCE: Duration = Duration::from_secs(180);

/// A service: a run, and the socket that its notices come to.
struct Service<'a> {
    dir: &'a WorkDir,
    child: Child,
    notices: UnixDatagram,
}

impl<'a> Service<'a> {
    /// Starts a run of `f.toml`, with these knobs in it, and waits until it is ready.
    fn start(dir: &'a WorkDir, knobs: &str) -> Self {
        write(dir, knobs);
        let path = dir.path("notify");
        let notices = UnixDatagram::bind(&path).unwrap();
        notices.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["run", "--config", "f.toml"]).current_dir(&dir.0);
        command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "2000000");
        command.env_remove("WATCHDOG_PID").stdout(Stdio::piped()).stderr(Stdio::piped());
        let service = Self { dir, child: command.spawn().unwrap(), notices };
        assert_eq!(service.notice(), "READY=1");
        service
    }

    /// Next notice. Fails if none comes for [`PATIENCE`].
    fn notice(&self) -> String {
        let mut bytes = [0; 256];
        let len = loop {
            match self.notices.recv(&mut bytes) {
                // A call with a time-out is not restarted, not even after the machine was stopped for a while.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                received => break received.unwrap(),
            }
        };
        str::from_utf8(&bytes[..len]).unwrap().trim_end().to_owned()
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &id]).status().unwrap().success());
    }

    /// Value of a knob.
    fn reads(&self, knob: &str) -> String {
        let run = self.dir.run(&format!("get {knob} --control s.sock"));
        assert_eq!(run.code, Some(0), "{}", run.told);
        run.stdout.trim_end().to_owned()
    }

    /// Ends the run in order, and returns its output.
    fn stop(mut self) -> Run {
        self.signal("TERM");
        while self.notice() != "STOPPING=1" {}
        let child = std::mem::replace(&mut self.child, Command::new("true").spawn().unwrap());
        Run::of(&child.wait_with_output().unwrap())
    }
}

impl Drop for Service<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes the config file, with these knobs.
fn write(dir: &WorkDir, knobs: &str) {
    let run = "[run]\ndevices = [\"vhost-user:v.sock\"]\nlisten = true\ncpus = 1\n\
               control = \"s.sock\"\n";
    fs::write(dir.path("f.toml"), format!("{run}[knobs]\n{knobs}")).unwrap();
}

#[test]
fn svc_2_run_notifies_service_manager() {
    let dir = WorkDir::new();
    let service = Service::start(&dir, "dev_weight = 32\n");
    assert_eq!(service.reads("dev_weight"), "32");
    for _ in 0..5 {
        assert_eq!(service.notice(), "WATCHDOG=1");
    }
    let run = service.stop();
    assert_eq!(run.code, Some(0), "{}", run.told);
    assert!(run.stdout.contains("every frame accounted for"), "{}", run.stdout);
}

/// SIGHUP and SIGINT, as under `nohup` and in the background of a script.
#[test]
fn svc_4_ignored_signals_stay_ignored() {
    let dir = WorkDir::new();
    let args = "replay --rate 5k --loops 1000000 --cpus 1 --control s.sock";
    let script = format!("trap '' HUP INT; exec \"$0\" {args}");
    let mut run = Command::new("sh");
    let run = run.current_dir(&dir.0).args(["-c", &script, env!("CARGO_BIN_EXE_forebay")]);
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while dir.run("get mtu --control s.sock").code != Some(0) {
        assert!(run.try_wait().unwrap().is_none(), "it has ended");
    }
    let status = fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).unwrap();
    let caught = u64::from_str_radix(caught, 16).unwrap();
    let [hup, int, term] = [1, 2, 15].map(|signal: u32| caught >> (signal - 1) & 1);
    let kill = |signal: &str| {
        let killed = Command::new("kill").args([signal, &run.id().to_string()]).status().unwrap();
        assert!(killed.success());
    };
    kill("-HUP");
    kill("-TERM");
    assert_eq!(run.wait().unwrap().code(), Some(0), "ended in order");
    assert_eq!([hup, int, term], [0, 0, 1]);
}

#[test]
fn svc_4_hangup_applies_only_what_changed() {
    let dir = WorkDir::new();
    let service = Service::start(&dir, "netdev_max_backlog = 500\ndev_weight = 32\n");
    assert_eq!(dir.run("set dev_weight=40 netdev_budget=200 --control s.sock").code, Some(0));
    write(&dir, "dev_weight = 32\nnetdev_budget_usecs = 9000\nnetdev_budget = 400\n");
    service.signal("HUP");
    let began = Instant::now();
    while service.reads("netdev_budget_usecs") != "9000" {
        assert!(began.elapsed() < PATIENCE, "the file is not read again");
    }
    while service.reads("netdev_budget") != "400" {
        assert!(began.elapsed() < PATIENCE, "the file is read in part");
    }
    let now = ["netdev_max_backlog", "dev_weight"].map(|knob| service.reads(knob));
    assert_eq!(now, ["1000", "40"], "the default, and what was set");
    let run = service.stop();
    for part in ["netdev_budget: 400 instead of 200", "f.toml: read again"] {
        assert!(run.told.contains(part), "{part}: {}", run.told);
    }
}

#[test]
fn svc_4_refusal_repeats_no_accepted_knobs() {
    let dir = WorkDir::new();
    let service = Service::start(&dir, "");
    let awaited = |knob: &str, value: &str| {
        let began = Instant::now();
        while service.reads(knob) != value {
            assert!(began.elapsed() < PATIENCE, "{knob} does not become {value}");
        }
    };
    let file = "netdev_max_backlog = \"none\"\nnetdev_budget = 400\n";
    write(&dir, file);
    service.signal("HUP");
    awaited("netdev_budget", "400");
    assert_eq!(dir.run("set netdev_budget=200 --control s.sock").code, Some(0));
    write(&dir, &format!("{file}dev_weight = 33\n"));
    service.signal("HUP");
    awaited("dev_weight", "33");
    assert_eq!(service.reads("netdev_budget"), "200", "as it was set");
    let run = service.stop();
    let refusals = run.told.matches("netdev_max_backlog cannot be").count();
    assert_eq!(refusals, 2, "tried again: {}", run.told);
}

#[test]
fn svc_1_file_without_devices_is_usage() {
    let dir = WorkDir::new();
    fs::write(dir.path("f.toml"), "[knobs]\n").unwrap();
    fs::write(dir.path("g.toml"), "[run]\ndevices = [\"lo\"]\nspeed = 1\n").unwrap();
    for (args, part) in [
        ("run --config f.toml", "f.toml names no devices"),
        ("run --config g.toml", "g.toml:3: `forebay run` has no option speed"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{}", run.told);
        assert!(run.told.contains(part), "{part}: {}", run.told);
    }
    let run = dir.run("run --config g.toml --json");
    assert!(run.stdout.starts_with("{\"error\":\"g.toml:3:"), "{}", run.stdout);
}
