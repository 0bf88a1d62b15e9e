//! A kernel that coalesces frames: the machine's own, over a veth pair between two namespaces, or a
//! guest's, over a TAP. Frames are sent by tcpreplay, and seen by tcpdump behind GRO.

use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use forebay_testkit::namespaces::named::{NamedNamespace, run};
use libtest_mimic::Failed;
use pcap_file::pcap::PcapReader;

use super::around::Around;
use super::guest::Guest;

const TOOLS: [[&str; 2]; 4] =
    [["ip", "-V"], ["ethtool", "--version"], ["tcpdump", "--version"], ["tcpreplay", "--version"]];

const SENDER: &str = "tx";
const RECEIVER: &str = "rx";

/// Above the frames of all cases; a TAP takes less than a veth.
const GUEST_MTU: &str = "16000";

/// Frames that wait for a guest: more than a try has.
const GUEST_QUEUE: &str = "30000";

/// Packets are held across polls, so that pauses of the sender do not prevent merging.
const GRO_FLUSH_TIMEOUT_NS: &str = "3000000";
const NAPI_DEFER_HARD_IRQS: &str = "10";

/// Larger than any merged packet: tcpdump's ring has room for one frame of this size at a time.
const SNAP_BYTES: &str = "70000";
const RING_KIB: &str = "65536";

/// Time to wait for missing packets. Its end ends a try, but does not decide a verdict.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reason why the kernel cannot be judged against.
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
    Some(format!("this needs root, network namespaces and veth: {reason}"))
}

/// The namespaces and the veth pair between them, deleted on drop.
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

/// A kernel to be asked.
pub(crate) enum Asked {
    /// The machine's own.
    Own,
    /// A guest's, which goes on running while nobody asks: a boot takes longer than all answers.
    Guest { idle: RefCell<Option<Rig>>, guest: Guest },
}

impl Asked {
    pub(crate) fn guest() -> Result<Self, Failed> {
        Ok(Self::Guest { idle: RefCell::new(None), guest: Guest::new()? })
    }

    pub(crate) fn is_guest(&self) -> bool {
        matches!(self, Self::Guest { .. })
    }

    /// A kernel that merges in this tunnel.
    pub(crate) fn rig(&self, around: Around) -> Result<Rig, Failed> {
        match self {
            Self::Own => {
                let rig = Rig::new()?;
                if let (Around::Vxlan { .. }, Some(receiver)) = (around, &rig.receiver) {
                    open_vxlan(receiver)?;
                }
                Ok(rig)
            }
            Self::Guest { idle, guest } => {
                let running = idle.borrow_mut().take();
                running.map_or_else(|| Rig::in_guest(guest), Ok)
            }
        }
    }

    /// Takes a rig back that has seen the ends of all flows.
    pub(crate) fn give_back(&self, rig: Rig) {
        if let Self::Guest { idle, .. } = self {
            *idle.borrow_mut() = Some(rig);
        }
    }
}

/// Everything needed to observe how the kernel merges frames.
pub(crate) struct Rig {
    sender: NamedNamespace,
    /// Namespace of the receiving end, unless that is a guest.
    receiver: Option<NamedNamespace>,
    watcher: Child,
    seen: Receiver<Vec<u8>>,
}

impl Rig {
    /// The kernel of this machine.
    fn new() -> Result<Self, Failed> {
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
        let mut tcpdump = wire.receiver.command("tcpdump");
        tcpdump.args(["-i", RECEIVER, "-Q", "in", "-s", SNAP_BYTES, "-B", RING_KIB]);
        tcpdump.args(["--immediate-mode", "-U", "-w", "-"]);
        Self::watch(&mut tcpdump, wire.sender, Some(wire.receiver))
    }

    /// The kernel of a guest.
    fn in_guest(guest: &Guest) -> Result<Self, Failed> {
        let host = NamedNamespace::new()?;
        host.run(&["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"])?;
        host.run(&["ip", "tuntap", "add", "dev", SENDER, "mode", "tap"])?;
        let limits = ["mtu", GUEST_MTU, "txqueuelen", GUEST_QUEUE];
        host.run(&[&["ip", "link", "set", "dev", SENDER, "up"][..], &limits].concat())?;
        let boot = guest.boot(SENDER);
        let mut qemu = host.command(&boot[0]);
        qemu.args(&boot[1..]);
        Self::watch(&mut qemu, host, None)
    }

    /// Starts a program whose output is a capture of what a kernel has coalesced.
    fn watch(
        program: &mut Command,
        sender: NamedNamespace,
        receiver: Option<NamedNamespace>,
    ) -> Result<Self, Failed> {
        let mut watcher = program.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let stdout = watcher.stdout.take().ok_or("the watcher has no output")?;
        let (pass, seen) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        thread::spawn(move || {
            // tcpdump writes the file header when it starts to capture.
            let Ok(mut reader) = PcapReader::new(stdout) else { return };
            let _ = ready.send(());
            while let Some(Ok(packet)) = reader.next_packet() {
                if pass.send(packet.data.into_owned()).is_err() {
                    return;
                }
            }
        });
        let rig = Self { sender, receiver, watcher, seen };
        is_ready.recv().map_err(|_| "the watcher ended at once")?;
        Ok(rig)
    }

    /// Sends a capture, with its own timing or at full speed.
    pub(crate) fn play(&self, capture: &Path, is_timed: bool) -> Result<(), Failed> {
        let capture = capture.to_str().ok_or("a path that is not UTF-8")?;
        // Preload the capture: the kernel merges little of slow traffic.
        let pace = if is_timed { "--multiplier=1" } else { "--topspeed" };
        self.sender.run(&["tcpreplay", "-q", "-K", pace, "-i", SENDER, capture])
    }

    /// The next packet seen above the kernel's GRO.
    pub(crate) fn receive(&self) -> Option<Vec<u8>> {
        self.seen.recv_timeout(PATIENCE).ok()
    }
}

/// Opens a VXLAN device at the receiver, whose kernel merges in VXLAN from then on.
fn open_vxlan(receiver: &NamedNamespace) -> Result<(), Failed> {
    let add = ["ip", "link", "add", "vx", "type", "vxlan", "id", "7", "dstport", "4789"];
    receiver.run(&[&add[..], &["dev", RECEIVER]].concat())?;
    receiver.run(&["ip", "link", "set", "dev", "vx", "up"])
}

impl Drop for Rig {
    fn drop(&mut self) {
        // Ignored: the watcher may have ended. The namespaces are deleted next.
        let _ = self.watcher.kill();
        let _ = self.watcher.wait();
    }
}
