//! packetdrill, run on one script.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scripts::Script;

/// Names the program, if it is not in `PATH`.
const VARIABLE: &str = "FOREBAY_PACKETDRILL";
/// Runs a command in a new network namespace with these settings.
const IN_NAMESPACE: &str = "ip link set lo up
for sysctl in $1; do echo ${sysctl#*=} > /proc/sys/net/ipv4/${sysctl%%=*} || exit; done
shift
exec \"$@\"";
/// Time after which a script counts as hanging, in s: far more than the longest takes.
const HANGS_AFTER_S: u32 = 900;
/// Exit status of `timeout` when the time is over.
const TIMED_OUT: i32 = 124;
/// Runs of a script by the kernel, whose time is that of a busy machine: packets and wake-ups come late.
const RUNS: usize = 10;

/// TCP that is judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subject {
    Ours,
    Kernel,
}

/// Family of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    V4,
    V6,
    /// Sockets of IPv6 with addresses of IPv4.
    Mapped,
}

/// Installed packetdrill.
#[derive(Debug)]
pub(crate) struct Judge {
    program: PathBuf,
    shim: PathBuf,
}

/// Reason why packetdrill cannot be run here.
pub(crate) fn missing() -> Option<String> {
    let reason = format!("packetdrill is neither in PATH nor named by {VARIABLE}");
    program().is_none().then_some(reason)
}

/// Reason why our TCP cannot be loaded.
pub(crate) fn shim_missing() -> Option<String> {
    let shim = shim()?;
    let reason = format!("{} was not built: build the crate's examples", shim.display());
    (!shim.exists()).then_some(reason)
}

/// Source that the shared object of our TCP is older than, if any: its scripts would judge another TCP than
/// the one that is here.
///
/// # Errors
/// If the source or the object cannot be looked at.
pub(crate) fn newer_than_shim() -> io::Result<Option<PathBuf>> {
    let Some(shim) = shim() else { return Ok(None) };
    let Ok(listed) = fs::read_to_string(shim.with_extension("d")) else { return Ok(None) };
    let built = fs::metadata(&shim)?.modified()?;
    let sources = listed.split_once(": ").map_or("", |(_, sources)| sources.trim_end());
    for source in sources.split(' ').map(PathBuf::from).filter(|source| source.exists()) {
        if fs::metadata(&source)?.modified()? > built {
            return Ok(Some(source));
        }
    }
    Ok(None)
}

/// Reason why no network namespace can be made here.
pub(crate) fn namespace_missing() -> Option<String> {
    let made = Command::new("unshare").args(["-n", "true"]).status();
    let is_made = made.is_ok_and(|status| status.success());
    (!is_made).then(|| "no network namespace can be made".to_owned())
}

fn program() -> Option<PathBuf> {
    if let Some(named) = env::var_os(VARIABLE) {
        return Some(named.into());
    }
    let folders = env::var_os("PATH")?;
    env::split_paths(&folders).map(|folder| folder.join("packetdrill")).find(|file| file.is_file())
}

/// Shared object of the example, which Cargo builds beside the tests.
fn shim() -> Option<PathBuf> {
    let test = env::current_exe().ok()?;
    let profile = test.parent().and_then(Path::parent)?;
    Some(profile.join("examples/libpacketdrill_shim.so"))
}

impl Judge {
    pub(crate) fn new() -> Option<Self> {
        Some(Self { program: program()?, shim: shim()? })
    }

    /// Runs a script.
    ///
    /// # Errors
    /// Output of packetdrill, if the script failed.
    pub(crate) fn run(
        &self,
        script: &Script,
        subject: Subject,
        family: Family,
    ) -> Result<(), String> {
        let mut told = String::new();
        for _ in 0..RUNS {
            let output = self.command(script, subject, family).output();
            let output = output.map_err(|error| format!("packetdrill cannot be run: {error}"))?;
            if output.status.success() {
                return Ok(());
            }
            if output.status.code() == Some(TIMED_OUT) {
                return Err(format!("hangs: it was ended after {HANGS_AFTER_S} s"));
            }
            told = String::from_utf8_lossy(&output.stderr).into_owned();
            if subject == Subject::Ours {
                break;
            }
        }
        Err(told)
    }

    fn command(&self, script: &Script, subject: Subject, family: Family) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &HANGS_AFTER_S.to_string()]);
        if subject == Subject::Kernel {
            command.args(["unshare", "--net", "sh", "-c", IN_NAMESPACE, "sh", script.sysctls()]);
        }
        command.arg(&self.program);
        command.arg("--tolerance_usecs=30000").args(family.arguments());
        if subject == Subject::Ours {
            command.arg(format!("--so_filename={}", self.shim.display()));
            command.arg(format!("--so_flags={} {}", family.flag(), script.sysctls()));
        }
        command.arg(script.path());
        command
    }
}

impl Family {
    fn flag(self) -> &'static str {
        match self {
            Self::V4 | Self::Mapped => "v4",
            Self::V6 => "v6",
        }
    }

    /// Addresses; those of the shim, too. Fast Open cookies of them by two keys. Names of the error queue's messages.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::V4 => &[
                "--ip_version=ipv4",
                "--local_ip=192.168.0.1",
                "--remote_ip=192.0.2.1",
                "--gateway_ip=192.168.0.254",
                "--netmask_ip=255.255.0.0",
                "-DCOOKIE=3021b9d889017eeb",
                "-DNEW_COOKIE=7fd1764838d8d00d",
                "-DERRORS_LEVEL=SOL_IP",
                "-DERRORS_TYPE=IP_RECVERR",
            ],
            Self::V6 => &[
                "--ip_version=ipv6",
                "--mtu=1520",
                "--local_ip=fd3d:0a0b:17d6::1",
                "--gateway_ip=fd3d:0a0b:17d6:8888::1",
                "--remote_ip=fd3d:fa7b:d17d::1",
                "-DCOOKIE=c1d1e9742a47a9bc",
                "-DNEW_COOKIE=e3aa039e48122544",
                "-DERRORS_LEVEL=SOL_IPV6",
                "-DERRORS_TYPE=IPV6_RECVERR",
            ],
            Self::Mapped => &[
                "--ip_version=ipv4-mapped-ipv6",
                "--local_ip=192.168.0.1",
                "--remote_ip=192.0.2.1",
                "--gateway_ip=192.168.0.254",
                "--netmask_ip=255.255.0.0",
                "-DERRORS_LEVEL=SOL_IPV6",
                "-DERRORS_TYPE=IPV6_RECVERR",
            ],
        }
    }
}
