//! Runs found by name, in the directory that client and run agree on.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use crate::program::{Run, WorkDir};

/// A replay that runs until dropped.
struct Lasting(Child);

impl Lasting {
    /// Starts a named replay, and waits until it listens.
    fn start(dir: &WorkDir, name: &str) -> Self {
        let args = ["replay", "--cpus", "1", "--rate", "1k", "--loops", "1000000", "--name", name];
        let mut command = forebay(dir);
        let child = command.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut run = Self(child);
        while UnixStream::connect(dir.path(&format!("forebay/{name}.sock"))).is_err() {
            assert!(run.0.try_wait().unwrap().is_none(), "{name} has ended");
            std::thread::yield_now();
        }
        run
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program, with the socket directory inside this one.
fn forebay(dir: &WorkDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.current_dir(&dir.0).env("XDG_RUNTIME_DIR", dir.0.path());
    command.env_remove("RUNTIME_DIRECTORY").env_remove("FOREBAY_CONTROL");
    command
}

fn ask(dir: &WorkDir, args: &str) -> Run {
    Run::of(&forebay(dir).args(args.split(' ')).output().unwrap())
}

#[test]
fn runs_found_by_name() {
    let dir = WorkDir::new();
    let own = dir.path("forebay").display().to_string();
    let first = Lasting::start(&dir, "first");
    let run = ask(&dir, "get mtu --name first");
    assert_eq!((run.code, run.stdout.as_str()), (Some(0), "1500\n"), "{}", run.told);
    // Clients also look in /run/forebay, where root's runs are.
    let alone = ask(&dir, "get mtu");
    let elsewhere = std::path::Path::new("/run/forebay").exists();
    assert!(alone.code == Some(0) || elsewhere, "{}", alone.told);

    let second = Lasting::start(&dir, "second");
    ask(&dir, "set mtu=9000 --name second");
    assert_eq!(ask(&dir, "get mtu --name second").stdout, "9000\n");
    assert_eq!(ask(&dir, "get mtu --name first").stdout, "1500\n");
    let run = ask(&dir, "get mtu");
    assert_eq!(run.code, Some(2), "{}", run.told);
    for part in ["several runs listen", "first", "second", "--name"] {
        assert!(run.told.contains(part), "{part}: {}", run.told);
    }
    let run = ask(&dir, "replay --name first");
    assert_eq!(run.code, Some(3), "{}", run.told);
    assert!(run.told.contains("first.sock is in use by process"), "{}", run.told);

    // Killed runs leave sockets, which clients ignore and the next run takes over.
    drop((first, second));
    assert!(dir.path("forebay/first.sock").exists());
    let run = ask(&dir, "get mtu --name second");
    assert!(run.told.contains("no run answers at") && run.told.contains(&own), "{}", run.told);
    let _third = Lasting::start(&dir, "first");
    assert_eq!(ask(&dir, "get mtu --name first").stdout, "1500\n");
}

#[test]
fn absent_run_error_lists_places() {
    let dir = WorkDir::new();
    let mut command = forebay(&dir);
    let command = command.env("RUNTIME_DIRECTORY", dir.path("mine")).args(["list"]);
    let run = Run::of(&command.output().unwrap());
    assert!(run.code == Some(3) || std::path::Path::new("/run/forebay").exists(), "{}", run.told);
    for (args, part) in [
        ("get mtu --name ../x", "name cannot be \"../x\""),
        ("replay --name a/b", "name cannot be \"a/b\""),
        ("replay --name a --no-control", "cannot be used with"),
        ("get mtu --name a --control b", "cannot be used with"),
    ] {
        let run = ask(&dir, args);
        assert_eq!(run.code, Some(2), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}
