//! The mounted knobs compared with the kernel's own files: scripts written for sysfs and procfs
//! must run unchanged, and other users must not be able to change anything.

mod scripts; // typical uses of such files
mod sides; //   the two trees: the kernel's and ours

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;
use forebay_testkit::namespaces::named::run;
use libtest_mimic::Failed;
use scripts::{SCRIPTS, STRANGERS};
use serde_json::Value;
use sides::{Kernel, Mountpoint, Run};

use crate::{Judgement, program};

const TOOLS: [&str; 9] =
    ["ip", "bash", "dash", "python3", "awk", "sed", "setpriv", "unshare", "sysctl"];

/// Name and function of a judge.
type Judge = (&'static str, fn() -> Judgement);

/// All judges of the mount.
pub(crate) const TRIALS: [Judge; 7] = [
    ("promise_8_mount_runs_sysfs_and_procfs_scripts", judge_scripts),
    ("promise_8_mount_refuses_second_user", judge_strangers),
    ("promise_8_mount_serves_plain_programs", judge_unprefixed),
    ("promise_1_mount_writes_keep_order", judge_order),
    ("promise_2_a_mount_goes_with_its_run", judge_ends),
    ("promise_12_dead_mount_is_replaced", judge_killed),
    ("promise_12_a_foreign_dead_mount_stays", judge_foreign),
];

/// Reason why these judges cannot run.
pub(crate) fn missing() -> Option<String> {
    if let Err(error) = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse") {
        return Some(format!("/dev/fuse cannot be opened: {error}"));
    }
    if !sys::user().is_root() {
        return Some("this needs root".to_owned());
    }
    let is_there = |tool: &str| {
        let looked =
            Command::new("sh").args(["-c", "command -v $0", tool]).stdout(Stdio::null()).status();
        looked.is_ok_and(|status| status.success())
    };
    if let Some(tool) = TOOLS.into_iter().find(|tool| !is_there(tool)) {
        return Some(format!("{tool} is not installed"));
    }
    if sys::allowed_cpus().len() < 2 {
        return Some("with one CPU there is nothing to steer".to_owned());
    }
    let cpus = |which| fs::read_to_string(format!("/sys/devices/system/cpu/{which}")).ok();
    let allowed = CpuList::new(sys::allowed_cpus()).to_string();
    if cpus("online") != cpus("possible") || cpus("online") != Some(allowed + "\n") {
        return Some("both sides have the same CPUs only where all run and may be used".to_owned());
    }
    let refused = Kernel::new().err()?;
    let reason = refused.message().unwrap_or_default().to_owned();
    Some(format!("it takes network namespaces and veth: {reason}"))
}

/// Runs every script on both sides.
fn judge_scripts() -> Judgement {
    compare(&SCRIPTS)
}

/// Tries the scripts of another user.
fn judge_strangers() -> Judgement {
    compare(&STRANGERS)
}

fn compare(scripts: &[(&str, &str)]) -> Judgement {
    let directory = Mountpoint::new()?;
    let (kernel, run) = (Kernel::new()?, Run::start(&directory)?);
    let mut wrong = Vec::new();
    for (name, script) in scripts {
        let (expected, told) = (kernel.output_of(script)?, run.output_of(script)?);
        if expected != told {
            wrong.push(format!("{name}\n  the kernel: {expected}\n  the mount:  {told}"));
        }
    }
    assert_is_clean(&run.stop()?)?;
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// Programs with fixed paths work: the mount is bound over the kernel's directories, in a mount
/// namespace.
fn judge_unprefixed() -> Judgement {
    let directory = Mountpoint::new()?;
    let run = Run::start(&directory)?;
    let script = "
        mount --bind $T/proc/sys/net/core /proc/sys/net/core || exit
        mount --bind $T/sys/class/net /sys/class/net || exit
        sysctl -w net.core.netdev_max_backlog=2500
        sysctl -n net.core.netdev_max_backlog
        for file in /sys/class/net/*/queues/rx-*/rps_cpus; do echo 1 > $file; cat $file; done
        sysctl -w net.core.dev_weight=none";
    let told = run.output_under(&["unshare", "-m", "bash", "-c"], script)?;
    // The run does not wait for mount namespaces that still have the mount.
    assert_is_clean(&run.stop()?)?;
    let output = "net.core.INT = 2500\n2500\n1\n1\n";
    let error = "sysctl: setting key \"net.core.dev_weight\": Invalid argument\n";
    if told.output.starts_with(output) && told.errors == error {
        Ok(())
    } else {
        Err(told.to_string().into())
    }
}

/// Shell commands change everything that affects order, while packets flow and others watch.
fn judge_order() -> Judgement {
    let directory = Mountpoint::new()?;
    let run = Run::start_at(&directory, "100k")?;
    let script = "cd $T
        while :; do cat proc/net/softnet_stat sys/class/net/replay/queues/rx-*/rps_cpus; done \\
            > /dev/null & watcher=$!
        for turn in {1..100}; do
            for file in sys/class/net/replay/queues/rx-*/rps_cpus; do
                echo $((turn % 2 + 1)) > $file
            done
            echo $((turn % 3 * 1000)) > sys/class/net/replay/queues/rx-0/rps_flow_cnt
            echo $((turn % 4 * 5000)) > proc/sys/net/core/rps_sock_flow_entries
            echo $((turn % 5 * 300 + 100)) > proc/sys/net/core/netdev_max_backlog
            echo $((turn % 2)) > sys/devices/system/cpu/cpu1/online
        done; kill $watcher; echo 1 > sys/devices/system/cpu/cpu1/online
        cat sys/devices/system/cpu/online";
    let told = run.output_of(script)?;
    let report = run.stop()?;
    assert_is_clean(&report)?;
    if told.code != Some(0) || !told.errors.is_empty() {
        return Err(told.to_string().into());
    }
    if report["steer"]["moves"] == 0 {
        return Err(format!("nothing has moved: {report}").into());
    }
    Ok(())
}

/// The mount ends with its run, even if processes have it as working directory.
fn judge_ends() -> Judgement {
    let directory = Mountpoint::new()?;
    let run = Run::start(&directory)?;
    let bystander = |command: &str, argument: &str| {
        let mut bystander = Command::new(command);
        bystander.args([argument, "sleep", "infinity"]).current_dir(directory.path()).spawn()
    };
    // One process in the directory, and one in a mount namespace with a copy of the mount.
    let mut bystanders = [bystander("env", "-i")?, bystander("unshare", "-m")?];
    let report = run.stop();
    for bystander in &mut bystanders {
        bystander.kill()?;
        bystander.wait()?;
    }
    assert_is_clean(&report?)?;
    if fs::read_dir(directory.path())?.next().is_some() {
        return Err("something is left behind".into());
    }
    Ok(())
}

/// After a run was killed the next one mounts again, however often, and by any name of the
/// directory, as under a supervisor. The next run is refused while the first one lives.
fn judge_killed() -> Judgement {
    let directory = Mountpoint::new()?;
    for _ in 0..3 {
        Run::start(&directory)?.kill()?;
    }
    let link = tempfile::tempdir()?;
    let name = link.path().join("link");
    std::os::unix::fs::symlink(directory.path(), &name)?;
    let next = Run::start_by(&name, "2k")?;
    refused(&directory, "it is not empty")?;
    assert_is_clean(&next.stop()?)?;
    if mounts_on(directory.path())? != 0 {
        return Err("something is left mounted".into());
    }
    Ok(())
}

/// A dead mount of another program is left alone.
fn judge_foreign() -> Judgement {
    let directory = Mountpoint::new()?;
    // A process that opens the device, mounts, and exits; then one of another user's run.
    let script = "exec 3<>/dev/fuse
        mount -i -t fuse -o fd=3,rootmode=40000,user_id=$1,group_id=0,allow_other $0 $T";
    for (name, user) in [("sshfs", "0"), ("forebay", "1")] {
        let script = ["-ec", script, name, user];
        let mut command = Command::new("bash");
        let told = command.args(script).env("T", directory.path()).output()?;
        if !told.status.success() {
            return Err(program::told(&told).into());
        }
        refused(&directory, "it was no run of yours")?;
        if mounts_on(directory.path())? != 1 {
            return Err(format!("the mount of {name}, user {user}, was touched").into());
        }
        run("umount", &["-l", &directory.path().to_string_lossy()])?;
    }
    Ok(())
}

/// Number of mounts on a directory.
fn mounts_on(directory: &Path) -> Result<usize, Failed> {
    let directory = directory.to_string_lossy();
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(mounts.lines().filter(|line| line.split(' ').nth(4) == Some(&directory)).count())
}

/// Checks that a run refuses to mount there, with these words in the message.
fn refused(directory: &Mountpoint, words: &str) -> Judgement {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let output = command.args(["replay", "--mount"]).arg(directory.path()).output()?;
    let told = program::told(&output);
    if output.status.code() == Some(2) && told.contains(words) {
        return Ok(());
    }
    Err(format!("{words:?} was expected: {}, {told}", output.status).into())
}

/// Checks that nothing was lost or reordered, whatever was set.
fn assert_is_clean(report: &Value) -> Judgement {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let dropped = report["dropped"].as_object().into_iter().flat_map(|reasons| reasons.values());
    let accounted =
        number(&report["delivered"]) + number(&report["queued"]) + dropped.map(number).sum::<u64>();
    if accounted > 0 && report["packets_in"] == accounted && report["reordered"] == 0 {
        Ok(())
    } else {
        Err(Failed::from(format!("the run's report: {report}")))
    }
}
