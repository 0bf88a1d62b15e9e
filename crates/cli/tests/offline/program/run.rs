//! `forebay run` without privileges.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::program::WorkDir;

/// User id of `nobody`.
const OTHER: u32 = 65534;

#[test]
fn without_a_device_it_explains_itself() {
    let run = WorkDir::new().run("run");
    assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""));
    for part in ["Usage: forebay run [OPTIONS] [DEV]...", "--take <LIST>", "Examples:", "SIGHUP"] {
        assert!(run.told.contains(part), "{part}: {}", run.told);
    }
}

#[test]
fn missing_device_error_lists_others() {
    let dir = WorkDir::new();
    for args in ["run no-such0", "run lo af_packet:no-such0 --yes"] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(3), ""), "{args}: {}", run.told);
        let problem = "there is no interface \"no-such0\" in this network namespace";
        let is_told = run.told.contains(problem) && run.told.contains("there are: ");
        assert!(is_told && run.told.contains("lo"), "{}", run.told);
    }
}

#[test]
fn impossible_run_options_are_usage() {
    let dir = WorkDir::new();
    for (args, part) in [
        ("run tun:t0 --take udp:53", "--take with tun: what is sent there is all taken"),
        ("run t0 --via tap --promiscuous", "--promiscuous with tap: there are no other stations"),
        ("run lo --via af_packet --xdp-mode native", "--xdp-mode with af_packet"),
        ("run lo --via af_packet --busy-poll", "--busy-poll with af_packet"),
        ("run lo --packet-ring frames", "--packet-ring with af_xdp: there is no packet socket"),
        (
            "run lo --via af_packet --packet-ring frames --hash device",
            "--packet-ring frames with --hash device: the kernel gives hashes by blocks",
        ),
        ("run lo --spin 5", "--spin <SPIN>"),
        ("run tun:t0 tap:t1 --replace", "--replace with tun, tap"),
        ("run tun:t0 --hash device", "--hash device with tun"),
        ("run vhost-user:v --take udp:53", "--take with vhost-user: what is sent there"),
        ("run vhost-user:v --busy-poll", "--busy-poll with vhost-user: it cannot be driven"),
        ("run vhost-user:v --copy copy", "--copy with vhost-user"),
        ("run vhost-user:v --queue-size 3", "queue-size cannot be \"3\""),
        ("run vhost-user:v --rx-buffers small", "give auto, mtu, page or bytes"),
        ("run lo tun:t0 --rx-buffers page", "--rx-buffers with af_xdp, tun: it is about the rings"),
        ("run lo --queue-size 256", "--queue-size with af_xdp: it is about the rings"),
        ("run lo --packed", "--packed with af_xdp: it is about the rings"),
        ("run lo --listen", "--listen with af_xdp: it is about the rings"),
        ("run vhost-user:", "\"vhost-user:\" names no device"),
        ("run no0 no0", "devices cannot be \"no0\": it is named twice"),
        ("run lo tun:t0 af_packet:lo", "devices cannot be \"lo\": it is named twice"),
        ("run vhost-user:v vhost-user:v", "devices cannot be \"v\": it is named twice"),
        ("run usb:t0", "\"usb\" is not a way to open a device"),
        ("run lo --via pcap", "\"pcap\" is not a way to open a device"),
        ("run lo --take udp:99999", "--take <LIST>"),
        ("run lo --to tap:t0", "none of count, pcap:DIR, tun:NAME and dev:NAME"),
        ("run lo --resegment --to dev:lo", "there are no captures to write to"),
        ("run tun:t0 --whole-tunnels --to count", "--whole-tunnels: there is no TAP to send to"),
        ("run lo --duration 0", "it is a number of seconds above 0"),
        ("run lo --queues 0", "--queues <N>"),
        ("run lo --user nobody --mount m", "cannot be used with"),
        ("run lo --cpus 0", "there is no CPU to run on"),
        ("run lo --set pause=9 --cpus 2", "that CPU is not among --cpus"),
        ("run lo --config none.toml", "cannot read none.toml"),
        ("run lo --mount none", "there is no such directory"),
        ("replay --hash device", "no live device has hashed these packets"),
    ] {
        let run = dir.run(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args}: {}", run.told);
        assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
    }
}

#[test]
fn missing_permission_named_with_remedy() {
    let dir = WorkDir::new();
    for (args, problem, remedy) in [
        (
            "run lo --via af_packet --yes",
            "AF_PACKET on lo needs CAP_NET_RAW, which this process does not have",
            "setcap cap_net_raw+ep",
        ),
        (
            "run lo --yes",
            "AF_XDP on lo needs CAP_NET_RAW, CAP_NET_ADMIN, CAP_",
            "setcap cap_net_raw,cap_net_admin,cap_",
        ),
    ] {
        let run = dir.run_as_other(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(3), ""), "{args}: {}", run.told);
        for part in [problem, remedy, "or run as root"] {
            assert!(run.told.contains(part), "{args}: {part:?} is not in {:?}", run.told);
        }
    }
}

/// However many threads the system allows, a command works or names the thread that it lacks.
#[test]
fn refused_threads_are_named() {
    let dir = WorkDir::new();
    for args in [
        "replay --cpus 2 --no-control --metrics 127.0.0.1:0",
        "run vhost-user:none --no-control --metrics 127.0.0.1:0 --duration 1",
    ] {
        for threads_max in 1..=10 {
            let run = dir.run_as_other_within(Some(threads_max), args);
            let is_named = run.told.contains("cannot start the thread ")
                || run.told.contains("cannot start its link");
            let told = format!("{threads_max} threads, {args}: {}", run.told);
            match run.code {
                Some(0) => assert!(threads_max > 2, "{told}"),
                Some(3) => assert!(is_named && run.told.contains("ulimit -u"), "{told}"),
                _ => panic!("{told}"),
            }
        }
    }
}

impl WorkDir {
    /// Runs the program as a user without privileges: as another one, if this one is root.
    fn run_as_other(&self, args: &str) -> crate::program::Run {
        self.run_as_other_within(None, args)
    }

    /// Runs the program so, while that user may have at most so many threads.
    fn run_as_other_within(&self, threads_max: Option<u32>, args: &str) -> crate::program::Run {
        let program = self.path("forebay");
        if !program.exists() {
            // A directory that every user may enter.
            forebay_testkit::programs::copy(env!("CARGO_BIN_EXE_forebay"), &program).unwrap();
            fs::set_permissions(&self.0, Permissions::from_mode(0o755)).unwrap();
        }
        let mut command = match threads_max {
            Some(threads_max) => {
                let mut limited = Command::new("prlimit");
                limited.arg(format!("--nproc={threads_max}")).arg(program);
                limited
            }
            None => Command::new(program),
        };
        command.args(args.split(' ')).current_dir(&self.0);
        if fs::metadata("/proc/self").is_ok_and(|process| is_root(&process)) {
            command.uid(OTHER).gid(OTHER);
        }
        crate::program::Run::of(&command.output().unwrap())
    }
}

/// True if files of this process belong to root.
fn is_root(process: &fs::Metadata) -> bool {
    std::os::unix::fs::MetadataExt::uid(process) == 0
}
