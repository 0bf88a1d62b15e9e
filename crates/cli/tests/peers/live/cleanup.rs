//! Duties of a run towards its user: dropping privileges, reloading the config file, and ending in
//! order.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use forebay_testkit::namespaces::named;
use libtest_mimic::Failed;
use serde_json::Value;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{DEVICE, Link, Way};
use crate::live::program::{Run, command, wait_until};
use crate::live::restarts::judge_silence;
use crate::live::sender::{Capture, Pace, judge_sum, play, settle};

pub(crate) const TRIALS: [Judge; 8] = [
    ("run_continues_without_privileges", || Way::ALL.into_iter().try_for_each(judge_user)),
    ("promise_8_a_hangup_reloads_the_config", judge_reload),
    ("promise_2_queued_packets_survive_signal", judge_drain),
    ("run_ends_on_time", judge_duration),
    ("a_run_listens_where_get_looks", judge_default_socket),
    ("promise_12_given_socket_goes_with_run", judge_given_socket),
    ("svc_4_user_without_file_is_told", judge_private_files),
    ("promise_12_an_interface_is_promiscuous_while_asked", || {
        [Way::AfXdpNative, Way::AfXdpGeneric, Way::AfPacket]
            .into_iter()
            .try_for_each(judge_promiscuous)
    }),
];

const PPS: u32 = 50_000;

/// Fewer frames than fit in a backlog.
const QUEUED_FRAMES: usize = 800;

/// Without options, runs on one interface listen under different names, and remove their sockets; so
/// does one that is another user by then. A socket that a killed run has left is replaced.
fn judge_default_socket() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    let directory = tempfile::tempdir()?;
    fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
    let program = |args: &[&str]| {
        let mut command = command(&link.near);
        command.args(args).env("RUNTIME_DIRECTORY", directory.path());
        command.env_remove("XDG_RUNTIME_DIR").env_remove("FOREBAY_CONTROL");
        command
    };
    let weight = |args: &[&str]| {
        let output = program(&[&["get", "dev_weight"], args].concat()).output()?;
        Ok::<_, Failed>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let start = |name: &str, more: &[&str]| {
        let args = [&["run", DEVICE, "--via", "af_packet"], more].concat();
        let run = program(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        wait_until("it listens", || Ok(weight(&["--name", name])? == "64\n"))?;
        Ok::<_, Failed>(run)
    };
    let mut killed = start("fb0", &["--user", "nobody"])?;
    killed.kill()?;
    killed.wait()?;
    let of_user = directory.path().join("65534");
    if !of_user.join("fb0.sock").exists() {
        return Err("the killed run's socket is not in its user's directory".into());
    }
    let mut runs = vec![start("fb0", &["--user", "nobody"])?, start("fb0-2", &[])?];
    runs.extend([start("fb0-3", &[])?, start("fb0-4", &["--user", "nobody"])?]);
    program(&["set", "dev_weight=65", "--name", "fb0-2"]).status()?;
    let told = (weight(&["--name", "fb0"])?, weight(&["--name", "fb0-2"])?, weight(&[])?);
    for run in &mut runs {
        named::run("kill", &["-s", "TERM", &run.id().to_string()])?;
        run.wait()?;
    }
    let left = |directory: &Path| -> Result<Vec<_>, std::io::Error> {
        fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
    };
    let left = [left(directory.path())?, left(&of_user)?].concat();
    if told == ("64\n".to_owned(), "65\n".to_owned(), String::new()) && left == ["65534"] {
        return Ok(());
    }
    Err(format!("{told:?}, and {left:?} are left").into())
}

/// A socket at a path that was given, in a directory where the run's later user may remove nothing, goes
/// when the run ends or is killed. One that another run has bound there stays.
fn judge_given_socket() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    let directory = tempfile::tempdir()?;
    fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
    let path = directory.path().join("c.sock");
    let at = path.display().to_string();
    let start = |user: &[&str]| {
        let args = [&["run", DEVICE, "--via", "af_packet", "--control", &at], user].concat();
        let mut program = command(&link.near);
        let run = program.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        wait_until("it listens", || {
            let told =
                command(&link.near).args(["get", "dev_weight", "--control", &at]).output()?;
            Ok(told.stdout == b"64\n")
        })?;
        Ok::<_, Failed>(run)
    };
    for signal in ["TERM", "KILL"] {
        let mut run = start(&["--user", "nobody"])?;
        named::run("kill", &["-s", signal, &run.id().to_string()])?;
        run.wait()?;
        wait_until("the socket is gone", || Ok(!path.exists()))?;
    }
    let mut replaced = start(&["--user", "nobody"])?;
    fs::remove_file(&path)?;
    let mut other = start(&[])?;
    replaced.kill()?;
    replaced.wait()?;
    settle();
    let stays = path.exists();
    other.kill()?;
    other.wait()?;
    if stays { Ok(()) } else { Err("another run's socket is gone".into()) }
}

/// Files that only root may read: the token is read before the run becomes another user, and of the
/// config file it is told that no reload will read it.
fn judge_private_files() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    let directory = tempfile::tempdir()?;
    fs::set_permissions(&directory, Permissions::from_mode(0o755))?;
    let [config, token, told] = ["f.toml", "token", "told"].map(|it| directory.path().join(it));
    let of_run = format!("[run]\npage-token = \"{}\"\n", token.display());
    for (path, text) in [(&config, of_run.as_str()), (&token, "0123456789abcdef0123456789")] {
        fs::write(path, text)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
    }
    let mut program = command(&link.near);
    program.args(["run", DEVICE, "--via", "af_packet", "--no-control", "--user", "nobody"]);
    program.args(["--metrics", "0", "--config"]).arg(&config);
    let mut run = program.stdout(Stdio::null()).stderr(fs::File::create(&told)?).spawn()?;
    let listens = wait_until("the metrics are served", || {
        Ok(fs::read_to_string(&told)?.contains("metrics at http://"))
    });
    run.kill()?;
    run.wait()?;
    let text = fs::read_to_string(&told)?;
    listens.map_err(|_| Failed::from(text.as_str()))?;
    let warning = format!("nobody cannot read {}: Permission denied", config.display());
    if text.contains(&warning) { Ok(()) } else { Err(text.into()) }
}

/// The kernel's promiscuity count: not raised before, after, or without the option.
fn judge_promiscuous(way: Way) -> Judgement {
    let link = Link::new(way)?;
    let judge = |wanted: u64, when: &str| {
        let told = link.near.output_of(&["ip", "-d", "-j", "link", "show", "dev", DEVICE])?;
        let shown: Value = serde_json::from_str(&told)?;
        let count = shown[0]["promiscuity"].as_u64();
        if count == Some(wanted) {
            return Ok(());
        }
        Err(Failed::from(format!("{way:?}, {when}: promiscuity is {count:?}, not {wanted}")))
    };
    let mut plain = Run::start(&link.near, link.args(&[]))?;
    judge(0, "not asked")?;
    plain.stop()?;
    let mut run = Run::start(&link.near, link.args(&["--promiscuous"]))?;
    judge(1, "asked")?;
    run.stop()?;
    judge(0, "ended")?;
    let mut run = Run::start(&link.near, link.args(&["--promiscuous", "--user", "nobody"]))?;
    judge(1, "asked, as nobody")?;
    run.kill()?;
    judge(0, "killed")
}

fn judge_user(way: Way) -> Judgement {
    let link = Link::new(way)?;
    let capture = Capture::write(way, 0)?;
    let mut run = Run::start(&link.near, link.args(&["--cpus", "2", "--user", "nobody"]))?;
    for thread in fs::read_dir(format!("/proc/{}/task", run.id()?))? {
        judge_thread(&thread?.path())
            .map_err(|failed| format!("{way:?}: {}", failed.message().unwrap_or_default()))?;
    }
    let sent = play(&link, &capture, Pace::Packets(PPS), 1)?;
    settle();
    let report = run.stop()?;
    judge_sum(&link, &report, sent)?;
    if report.number("delivered")? == 0 {
        return Err(format!("{way:?}: nothing was delivered: {}", report.value()).into());
    }
    judge_silence(&link)
}

/// Checks that a thread has the identity and capabilities of `nobody` only.
fn judge_thread(thread: &Path) -> Judgement {
    let status = match fs::read_to_string(thread.join("status")) {
        // A thread may have ended since it was listed, except the first one.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        status => status?,
    };
    let is = |name: &str, wanted: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.is_some_and(|rest| rest.split_whitespace().all(|field| field == wanted))
    };
    let none = "0000000000000000";
    let is_nobody = is("Uid:", "65534")
        && is("Gid:", "65534")
        && ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"].iter().all(|set| is(set, none));
    if is_nobody { Ok(()) } else { Err(format!("{}: {status}", thread.display()).into()) }
}

fn judge_reload() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("forebay.toml");
    let write = |text: &str| fs::write(&config, text);
    write("[knobs]\nnetdev_max_backlog = 500\n")?;
    let path = config.to_str().ok_or("a path that is not UTF-8")?;
    let mut run = Run::start(&link.near, link.args(&["--config", path]))?;
    let reads = |run: &Run, value: &str| -> Result<bool, Failed> {
        Ok(run.asks("get netdev_max_backlog")? == [value])
    };
    if !reads(&run, "500")? {
        return Err("the config file is not heard".into());
    }
    // An invalid file changes nothing, and the next one is still read.
    write("[knobs]\nnetdev_max_backlog = \"a lot\"\n")?;
    run.signal("HUP")?;
    settle();
    if !reads(&run, "500")? {
        return Err("half a config file is heard".into());
    }
    write("[knobs]\nnetdev_max_backlog = 700\n")?;
    run.signal("HUP")?;
    wait_until("the config file is reloaded", || reads(&run, "700"))?;
    run.stop().map(drop)
}

/// A stopped run delivers all packets taken, also those queued for a paused CPU.
fn judge_drain() -> Judgement {
    for way in [Way::AfPacket, Way::AfXdpNative, Way::Tap] {
        let link = Link::new(way)?;
        let capture = Capture::of_few(way, QUEUED_FRAMES)?;
        let mut run = Run::start(&link.near, link.args(&["--cpus", "2", "--rps", "2"]))?;
        let socket = run.socket();
        run.asks("pause 1")?;
        let sent = play(&link, &capture, Pace::Packets(PPS), 1)?;
        settle();
        run.signal("TERM")?;
        let (report, _) = run.ends(0)?;
        judge_sum(&link, &report, sent)?;
        if report.number("delivered")? + link.lost(report.number("kernel_dropped")?)? != sent {
            return Err(format!("{way:?}: of {sent}: {}", report.value()).into());
        }
        if socket.exists() {
            return Err(format!("{way:?}: {} is left", socket.display()).into());
        }
        judge_silence(&link)?;
    }
    Ok(())
}

fn judge_duration() -> Judgement {
    let link = Link::new(Way::AfPacket)?;
    Run::start(&link.near, link.args(&["--duration", "1"]))?.ends(0)?;
    judge_silence(&link)
}
