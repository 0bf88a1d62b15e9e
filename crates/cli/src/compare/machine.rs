//! Facts about this machine that figures depend on.

use std::fs;
use std::process::Command;

use forebay_sys as sys;
use serde::Serialize;

/// Facts about this machine.
#[derive(Debug, Serialize)]
pub(super) struct MachineFacts {
    pub(super) processor: String,
    /// Number of CPUs that this process may use.
    pub(super) cpus: usize,
    pub(super) is_virtual: bool,
    pub(super) kernel: String,
    pub(super) compiler: String,
    /// Average number of runnable tasks over the last minute, before the comparison.
    pub(super) load: f64,
}

impl MachineFacts {
    pub(super) fn read() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|load| load.parse().ok());
        Self {
            processor: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cpus: sys::allowed_cpus().len(),
            is_virtual: field(&cpuinfo, "flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            kernel: kernel.trim().to_owned(),
            compiler: compiler(),
            load: load.unwrap_or(0.0),
        }
    }
}

/// Value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim())
}

fn compiler() -> String {
    let asked = Command::new("cc").arg("--version").output();
    let told = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    told.ok().and_then(|told| told.lines().next().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_name() {
        let text = "processor\t: 0\nmodel name\t: A: B\n";
        assert_eq!((field(text, "model name"), field(text, "flags")), (Some("A: B"), None));
    }
}
