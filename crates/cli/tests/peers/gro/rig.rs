//! Two network namespaces of our own with a veth pair between them: the kernel coalesces at one end
//! what is sent at the other. Sent and seen by tools that everybody knows, tcpreplay and tcpdump:
//! what tcpdump sees has been through GRO.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use forebay_testkit::namespaces::named::{NamedNamespace, run};
use libtest_mimic::Failed;
use pcap_file::pcap::PcapReader;

const TOOLS: [[&str; 2]; 4] =
    [["ip", "-V"], ["ethtool", "--version"], ["tcpdump", "--version"], ["tcpreplay", "--version"]];

const SENDER: &str = "tx";
const RECEIVER: &str = "rx";

/// Held across polls, so that what the sender's pauses tear apart is merged all the same.
const GRO_FLUSH_TIMEOUT_NS: &str = "3000000";
const NAPI_DEFER_HARD_IRQS: &str = "10";

/// Above all that may be merged: tcpdump's ring has room for one frame of this size at a time.
const SNAP_BYTES: &str = "70000";
const RING_KIB: &str = "65536";

/// Packets that are never seen are not waited for longer. It ends a try, and never a verdict.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reason why the kernel cannot be asked.
pub(crate) fn missing() -> Option<String> {
    let is_there = |[tool, argument]: [&str; 2]| {
        let mut command = Command::new(tool);
        command.arg(argument).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok()
    };
    if let Some([tool, _]) = TOOLS.into_iter().find(|tool| !is_there(*tool)) {
        return Some(format!("{tool} is not installed"));
    }
    let refused = Wire::new().err()?;
    let reason = refused.message().unwrap_or_default().to_owned();
    Some(format!("it takes root, network namespaces and veth: {reason}"))
}

/// The namespaces and the wire between them; both go when it does.
struct Wire {
    sender: NamedNamespace,
    receiver: NamedNamespace,
}

impl Wire {
    fn new() -> Result<Self, Failed> {
        let wire = Self { sender: NamedNamespace::new()?, receiver: NamedNamespace::new()? };
        let (from, to) = (wire.sender.name(), wire.receiver.name());
        let one_end =
            ["link", "add", "name", SENDER, "mtu", "65535", "netns", from, "type", "veth"];
        let other_end = ["peer", "name", RECEIVER, "mtu", "65535", "netns", to];
        run("ip", &[&one_end[..], &other_end].concat())?;
        Ok(wire)
    }
}

/// Everything that is needed to see what the kernel makes of frames.
pub(crate) struct Rig {
    wire: Wire,
    tcpdump: Child,
    seen: Receiver<Vec<u8>>,
}

impl Rig {
    pub(crate) fn new() -> Result<Self, Failed> {
        let wire = Wire::new()?;
        for (namespace, device) in [(&wire.sender, SENDER), (&wire.receiver, RECEIVER)] {
            namespace.run(&["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"])?;
            let knobs = format!(
                "cd /sys/class/net/{device} && echo {GRO_FLUSH_TIMEOUT_NS} >gro_flush_timeout && echo {NAPI_DEFER_HARD_IRQS} >napi_defer_hard_irqs"
            );
            namespace.run(&["sh", "-c", &knobs])?;
            namespace.run(&["ip", "link", "set", "dev", device, "up", "promisc", "on"])?;
        }
        wire.sender.run(&["ethtool", "-K", SENDER, "tso", "off", "gso", "off"])?;
        let receives = ["gro", "on", "rx-udp-gro-forwarding", "on"];
        wire.receiver.run(&[&["ethtool", "-K", RECEIVER][..], &receives].concat())?;
        let mut tcpdump = Command::new("ip")
            .args(["netns", "exec", wire.receiver.name(), "tcpdump", "-i", RECEIVER, "-Q", "in"])
            .args(["-s", SNAP_BYTES, "-B", RING_KIB, "--immediate-mode", "-U", "-w", "-"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stdout = tcpdump.stdout.take().ok_or("tcpdump has no output")?;
        let (sender, seen) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        thread::spawn(move || {
            // The file's header comes when tcpdump listens.
            let Ok(mut reader) = PcapReader::new(stdout) else { return };
            let _ = ready.send(());
            while let Some(Ok(packet)) = reader.next_packet() {
                if sender.send(packet.data.into_owned()).is_err() {
                    return;
                }
            }
        });
        let rig = Self { wire, tcpdump, seen };
        is_ready.recv().map_err(|_| "tcpdump ended at once")?;
        Ok(rig)
    }

    /// Has the receiver take VXLAN.
    pub(crate) fn open_vxlan(&self) -> Result<(), Failed> {
        let add = ["ip", "link", "add", "vx", "type", "vxlan", "id", "7", "dstport", "4789"];
        let up = ["ip", "link", "set", "dev", "vx", "up"];
        self.wire.receiver.run(&[&add[..], &["dev", RECEIVER]].concat())?;
        self.wire.receiver.run(&up)
    }

    /// Sends a capture at its times, or as fast as can be.
    pub(crate) fn play(&self, capture: &Path, is_timed: bool) -> Result<(), Failed> {
        let capture = capture.to_str().ok_or("a path that is not UTF-8")?;
        // Read in beforehand: the kernel merges little of what comes slowly.
        let pace = if is_timed { "--multiplier=1" } else { "--topspeed" };
        self.wire.sender.run(&["tcpreplay", "-q", "-K", pace, "-i", SENDER, capture])
    }

    /// The next packet from above the kernel's GRO.
    pub(crate) fn receive(&self) -> Option<Vec<u8>> {
        self.seen.recv_timeout(PATIENCE).ok()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // It may have ended by itself; the namespaces follow.
        let _ = self.tcpdump.kill();
        let _ = self.tcpdump.wait();
    }
}
