//! Facts about this machine and this process that decide how well packets are received.
//!
//! Most files of /proc and /sys that have them need no privilege. A fact that cannot be read is
//! absent, and listed with the reason.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{self, Resource};

use crate::cpu_list::CpuList;
use crate::error::Error;
use crate::privilege;

/// Most processes whose names are looked at.
const PROCESSES_MAX: usize = 65_536;

/// Fact that could not be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unseen {
    /// The fact, or the file that has it.
    pub what: String,
    /// Reason.
    pub why: String,
}

/// Missing capabilities, and the way to obtain them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingPrivilege {
    /// Names of the capabilities.
    pub capabilities: String,
    /// Advice.
    pub help: String,
}

/// Facts about a machine and this process.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MachineFacts {
    /// Release of the kernel, as in `6.18.5`.
    pub kernel: Option<String>,
    /// CPUs that this process may use.
    pub allowed: CpuList,
    /// CPUs that are online.
    pub online: Option<CpuList>,
    /// CPUs that the scheduler gives no threads to (`isolcpus`).
    pub isolated: Option<CpuList>,
    /// CPUs of each frequency governor; empty if the machine has none.
    pub governors: BTreeMap<String, CpuList>,
    /// Mode of transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Option<String>,
    /// Memory that this process may lock, in bytes; `u64::MAX` if there is no limit.
    pub memlock_bytes: u64,
    /// Missing privileges for AF_XDP.
    pub af_xdp: Option<MissingPrivilege>,
    /// Missing privileges for packet sockets.
    pub af_packet: Option<MissingPrivilege>,
    /// Missing privileges to lock any amount of memory.
    pub ipc_lock: Option<MissingPrivilege>,
    /// Value of `net.core.busy_poll`, in microseconds.
    pub busy_poll_us: Option<u32>,
    /// Value of `net.core.busy_read`, in microseconds.
    pub busy_read_us: Option<u32>,
    /// Value of `net.core.rps_sock_flow_entries`.
    pub rps_sock_flow_entries: Option<u32>,
    /// False if BPF programs are interpreted.
    pub is_bpf_compiled: Option<bool>,
    /// True if a process called `irqbalance` runs.
    pub has_irqbalance: Option<bool>,
    /// Facts that could not be read.
    pub unseen: Vec<Unseen>,
}

/// Reader of small files below a root directory, which notes those that it cannot read.
pub(super) struct FactReader<'a> {
    root: &'a Path,
    pub(super) unseen: Vec<Unseen>,
}

impl<'a> FactReader<'a> {
    /// Reader below `root`: `/`, or a copy of another machine's files.
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root, unseen: Vec::new() }
    }

    /// Path below the root.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    /// Text of a file, without white space around it; `None` and a note if it cannot be read.
    pub(super) fn text(&mut self, file: &str) -> Option<String> {
        match fs::read_to_string(self.path(file)) {
            Ok(text) => Some(text.trim().to_owned()),
            Err(error) => {
                self.note(&format!("/{file}"), &error);
                None
            }
        }
    }

    /// Text of a file that not every machine has: no note if it does not exist.
    pub(super) fn text_if_any(&mut self, file: &str) -> Option<String> {
        if self.path(file).exists() { self.text(file) } else { None }
    }

    /// Number in a file.
    pub(super) fn number<N: std::str::FromStr>(&mut self, file: &str) -> Option<N> {
        self.text(file)?.parse().ok()
    }

    /// List of CPUs in a file.
    pub(super) fn cpus(&mut self, file: &str) -> Option<CpuList> {
        CpuList::parse_list(&self.text(file)?).ok()
    }

    /// Notes a fact that could not be read.
    pub(super) fn note(&mut self, what: &str, why: &io::Error) {
        self.unseen.push(Unseen { what: what.to_owned(), why: why.to_string() });
    }
}

impl MachineFacts {
    /// Reads the facts below `root`, which is `/` for this machine. Privileges, limits and allowed
    /// CPUs are always those of this process.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let mut files = FactReader::new(root);
        let core = |name: &str| format!("proc/sys/net/core/{name}");
        let online = files.cpus("sys/devices/system/cpu/online");
        Self {
            kernel: files.text("proc/sys/kernel/osrelease"),
            allowed: CpuList::new(crate::allowed_cpus()),
            isolated: files.cpus("sys/devices/system/cpu/isolated"),
            governors: governors(&mut files, online.as_ref()),
            online,
            transparent_huge_pages: files
                .text_if_any("sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|modes| selected(&modes)),
            memlock_bytes: process::getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX),
            af_xdp: missing(privilege::for_af_xdp("a device", true)),
            af_packet: missing(privilege::for_af_packet("a device", false)),
            ipc_lock: missing(privilege::for_locked_memory("a device", u64::MAX)),
            // A namespace other than the first one has fewer of these files.
            busy_poll_us: files.text_if_any(&core("busy_poll")).and_then(|it| it.parse().ok()),
            busy_read_us: files.text_if_any(&core("busy_read")).and_then(|it| it.parse().ok()),
            rps_sock_flow_entries: files
                .text_if_any(&core("rps_sock_flow_entries"))
                .and_then(|entries| entries.parse().ok()),
            is_bpf_compiled: bpf_compiled(&mut files, &core("bpf_jit_enable")),
            has_irqbalance: runs(&mut files, "irqbalance"),
            unseen: files.unseen,
        }
    }
}

/// Refusal of a check, in words.
pub(super) fn missing(checked: Result<(), Error>) -> Option<MissingPrivilege> {
    let error = checked.err()?;
    let help = error.help();
    let capabilities = match error {
        Error::Privilege { missing, .. } => missing,
        other => other.to_string(),
    };
    Some(MissingPrivilege { capabilities, help })
}

/// Governors of the online CPUs.
fn governors(files: &mut FactReader<'_>, online: Option<&CpuList>) -> BTreeMap<String, CpuList> {
    let mut governors = BTreeMap::<String, CpuList>::new();
    for &cpu in online.map(CpuList::cpus).unwrap_or_default() {
        let file = format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
        if let Some(governor) = files.text_if_any(&file) {
            let cpus = governors.entry(governor).or_default();
            *cpus = cpus.with(cpu, true);
        }
    }
    governors
}

/// Word in brackets, as in `always [madvise] never`.
fn selected(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// True if the kernel compiles BPF programs; `None` if it does not say. Only root may read that.
fn bpf_compiled(files: &mut FactReader<'_>, file: &str) -> Option<bool> {
    // Where the interpreter is not built in, the file may be absent.
    Some(files.text_if_any(file)? != "0")
}

/// True if a process of this name runs.
fn runs(files: &mut FactReader<'_>, name: &str) -> Option<bool> {
    let processes = match fs::read_dir(files.path("proc")) {
        Ok(processes) => processes,
        Err(error) => {
            files.note("/proc", &error);
            return None;
        }
    };
    let is_it = |process: io::Result<fs::DirEntry>| {
        let comm = process.ok()?.path().join("comm");
        Some(fs::read_to_string(comm).ok()?.trim() == name)
    };
    Some(processes.take(PROCESSES_MAX).any(|process| is_it(process) == Some(true)))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn write(tree: &TempDir, file: &str, text: &str) {
        let path = tree.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn doc_1_machine_facts_come_from_files() {
        let tree = TempDir::new().unwrap();
        for (file, text) in [
            ("proc/sys/kernel/osrelease", "6.18.5-test\n"),
            ("sys/devices/system/cpu/online", "0-2\n"),
            ("sys/devices/system/cpu/isolated", "2\n"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
            ("sys/devices/system/cpu/cpu2/cpufreq/scaling_governor", "powersave\n"),
            ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            ("proc/sys/net/core/busy_poll", "50\n"),
            ("proc/sys/net/core/bpf_jit_enable", "0\n"),
            ("proc/17/comm", "irqbalance\n"),
        ] {
            write(&tree, file, text);
        }
        let facts = MachineFacts::read(tree.path());
        assert_eq!(facts.kernel.as_deref(), Some("6.18.5-test"));
        assert_eq!(facts.isolated.unwrap().to_string(), "2");
        let governors: Vec<_> =
            facts.governors.iter().map(|(name, cpus)| format!("{name} {cpus}")).collect();
        assert_eq!(governors, ["performance 1", "powersave 0,2"]);
        assert_eq!(facts.transparent_huge_pages.as_deref(), Some("never"));
        assert_eq!((facts.busy_poll_us, facts.busy_read_us), (Some(50), None));
        assert_eq!((facts.is_bpf_compiled, facts.has_irqbalance), (Some(false), Some(true)));
        assert_eq!(facts.unseen, []);
    }

    #[test]
    fn doc_1_unreadable_facts_are_listed() {
        let tree = TempDir::new().unwrap();
        write(&tree, "sys/devices/system/cpu/online", "0-1\n");
        let facts = MachineFacts::read(tree.path());
        let unseen: Vec<_> = facts.unseen.iter().map(|unseen| unseen.what.as_str()).collect();
        let expected = ["/proc/sys/kernel/osrelease", "/sys/devices/system/cpu/isolated", "/proc"];
        assert_eq!(unseen, expected);
        assert_eq!((facts.kernel, facts.has_irqbalance), (None, None));
    }
}
