//! DPDK's testpmd, as a device or as a driver.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Running testpmd process; killed on drop.
pub(crate) struct Testpmd {
    child: Child,
    /// Directory for files that a killed testpmd leaves behind.
    _left: TempDir,
}

/// Reason why testpmd cannot be run here, if there is one.
pub(crate) fn missing() -> Option<String> {
    let tried = Command::new("dpdk-testpmd").arg("--version").output();
    tried.err().map(|error| format!("dpdk-testpmd (Debian's dpdk-dev) cannot be run: {error}"))
}

impl Testpmd {
    /// Starts testpmd with these virtual devices and arguments.
    pub(crate) fn start(vdevs: &[String], arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new("dpdk-testpmd")
            .args(["--no-huge", "-m", "256", "--no-pci", "--no-telemetry", "-l", "0,1"])
            .arg("--file-prefix=forebay")
            .args(vdevs.iter().flat_map(|vdev| ["--vdev", vdev.as_str()]))
            .arg("--")
            .args(["--total-num-mbufs=16384", "--auto-start", "--no-flush-rx"])
            .args(arguments)
            .env("RUNTIME_DIRECTORY", directory.path())
            // testpmd runs until its standard input ends.
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self { child: child.unwrap(), _left: directory }
    }

    /// Starts a device that listens at `socket`, with that many queue pairs.
    pub(crate) fn device(socket: &Path, queues: u16, arguments: &[&str]) -> Self {
        let vdev = format!("net_vhost0,iface={},queues={queues}", socket.display());
        let [rxq, txq] = ["rxq", "txq"].map(|which| format!("--{which}={queues}"));
        Self::start(&[vdev], &[&[rxq.as_str(), &txq], arguments].concat())
    }

    /// Starts a driver that connects to `socket`.
    pub(crate) fn driver(socket: &Path, settings: &str, arguments: &[&str]) -> Self {
        let vdev = format!("net_virtio_user0,path={},{settings}", socket.display());
        Self::start(&[vdev], arguments)
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // Kills as `kill -9` does, so that testpmd cannot clean up.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
