//! Network namespaces, and veth pairs between them.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_sys::cpu_list::CpuList;

/// Namespaces of a comparison, removed when dropped.
pub(super) struct Network {
    prefix: String,
    namespaces: Vec<&'static str>,
}

/// Ends of the link between a sender and a receiver.
pub(super) const SENDER: LinkEnd = LinkEnd { namespace: "sender", device: "left", number: 1 };
pub(super) const RECEIVER: LinkEnd = LinkEnd { namespace: "receiver", device: "right", number: 2 };

/// Address of the receiver.
pub(super) const TO_RECEIVER: &str = "10.77.0.2";
/// Address that nobody has. Its frames reach the receiver's device, where the kernel drops them
/// early: it does not burden readers of packets by answers of ICMP.
pub(super) const TO_NOBODY: &str = "10.77.0.9";
const NOBODY: u8 = 9;

/// Port of the receiver.
pub(super) const PORT: &str = "9000";

/// TAP that a program of ours makes, and the addresses at its ends: the kernel's and the program's.
pub(super) const TAP: &str = "tap0";
pub(super) const AT_TAP: [&str; 2] = ["10.78.0.1/24", "10.78.0.2/24"];
pub(super) const TO_TAP: &str = "10.78.0.2";

/// End of a link.
#[derive(Clone, Copy)]
pub(super) struct LinkEnd {
    pub(super) namespace: &'static str,
    pub(super) device: &'static str,
    /// Last byte of its MAC address.
    pub(super) number: u8,
}

/// State of receive packet steering of one device.
#[derive(Clone, Default)]
pub(super) struct KernelSteering {
    /// `rps_cpus`.
    pub(super) mask: CpuList,
    /// `rps_flow_cnt` and `rps_sock_flow_entries`; 0: no RFS.
    pub(super) flows: u32,
}

impl KernelSteering {
    /// Text of `rps_cpus`, as the kernel reads it.
    fn rps_cpus(&self) -> String {
        self.mask.to_mask(self.mask.cpus().last().map_or(0, |cpu| cpu.0 + 1))
    }
}

/// Begins the names of all namespaces, before the id of the process that made them.
const PREFIX: &str = "forebay-compare-";

const SOCK_FLOW_ENTRIES: &str = "/proc/sys/net/core/rps_sock_flow_entries";

impl Network {
    /// Creates namespaces without IPv6, so that nothing but the comparison sends.
    pub(super) fn new(namespaces: &[&'static str]) -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("{PREFIX}{}-{number}-", process::id());
        let mut network = Self { prefix, namespaces: Vec::new() };
        for namespace in namespaces {
            ip(&format!("netns add {}{namespace}", network.prefix))?;
            network.namespaces.push(namespace);
            let script = "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set lo up";
            // Ignored: a kernel without IPv6 has no such file.
            let _ = succeed(network.inside(namespace, "sh").args(["-c", script]));
        }
        Ok(network)
    }

    /// Joins two namespaces by a veth pair with one queue, whose ends are up and poll as a network
    /// card does (GRO on).
    pub(super) fn join(&self, [one, other]: [LinkEnd; 2]) -> Result<(), String> {
        let end = |LinkEnd { namespace, device, number }: LinkEnd| {
            let address = format!("02:00:00:00:00:{number:02x}");
            let namespace = self.full(namespace);
            format!("{device} netns {namespace} address {address} numrxqueues 1 numtxqueues 1")
        };
        ip(&format!("link add {} type veth peer name {}", end(one), end(other)))?;
        for LinkEnd { namespace, device, .. } in [one, other] {
            self.ip(namespace, &format!("link set {device} up"))?;
            succeed(self.inside(namespace, "ethtool").args(["-K", device, "gro", "on"]))?;
        }
        Ok(())
    }

    /// Creates a sender and a receiver with a link between them.
    pub(super) fn pair() -> Result<Self, String> {
        let network = Self::new(&[SENDER.namespace, RECEIVER.namespace])?;
        network.join([SENDER, RECEIVER])?;
        let (sender, receiver) = (SENDER.number, RECEIVER.number);
        network.address(SENDER, &[(receiver, receiver), (NOBODY, receiver)])?;
        network.address(RECEIVER, &[(sender, sender)])?;
        Ok(network)
    }

    /// Runs `ip` in a namespace.
    pub(super) fn ip(&self, namespace: &str, args: &str) -> Result<(), String> {
        ip(&format!("-n {} {args}", self.full(namespace)))
    }

    /// Gives an end an address of 10.77.0.0/24, and tells it those of others.
    pub(super) fn address(&self, at: LinkEnd, others: &[(u8, u8)]) -> Result<(), String> {
        let LinkEnd { namespace, device, number } = at;
        self.ip(namespace, &format!("addr add 10.77.0.{number}/24 dev {device}"))?;
        others.iter().try_for_each(|(address, mac)| {
            let mac = format!("02:00:00:00:00:{mac:02x}");
            let args = format!("neigh replace 10.77.0.{address} lladdr {mac} dev {device}");
            self.ip(namespace, &(args + " nud permanent"))
        })
    }

    /// A program to be run in a namespace.
    pub(super) fn inside(&self, namespace: &str, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.full(namespace)]).arg(program.as_ref());
        command
    }

    /// A program of our side, to be run in a namespace.
    pub(super) fn own(&self, namespace: &str, args: &str) -> Result<Command, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = self.inside(namespace, program);
        command.arg("compare-own").args(args.split(' '));
        Ok(command)
    }

    /// Sets the kernel's steering of a device. RFS has a table for the whole machine; the returned
    /// value restores its size.
    pub(super) fn steer(&self, at: LinkEnd, to: &KernelSteering) -> Result<RestoredRfs, String> {
        let (mask, flows) = (to.rps_cpus(), to.flows);
        let queue = format!("/sys/class/net/{}/queues/rx-0", at.device);
        let script = format!("echo {mask} >{queue}/rps_cpus; echo {flows} >{queue}/rps_flow_cnt");
        succeed(self.inside(at.namespace, "sh").args(["-ec", &script]))?;
        let before = std::fs::read_to_string(SOCK_FLOW_ENTRIES).unwrap_or_default();
        if flows == 0 {
            return Ok(RestoredRfs(None));
        }
        std::fs::write(SOCK_FLOW_ENTRIES, flows.to_string())
            .map_err(|error| format!("{SOCK_FLOW_ENTRIES}: {error}"))?;
        Ok(RestoredRfs(Some(before)))
    }

    /// Moves a link that is in another namespace to its own.
    pub(super) fn give(&self, from: &str, end: LinkEnd) -> Result<(), String> {
        self.ip(from, &format!("link set {} netns {}", end.device, self.full(end.namespace)))
    }

    /// Sets whether the kernel hands a device packets larger than segments: `on` or `off`.
    pub(super) fn segment(
        &self,
        namespace: &str,
        device: &str,
        offload: &str,
    ) -> Result<(), String> {
        let args = ["-K", device, "tso", offload, "gso", offload];
        succeed(self.inside(namespace, "ethtool").args(args))
    }

    /// Makes the kernel forget what it has learned of the path when a connection ends.
    pub(super) fn forget_paths(&self, namespace: &str) -> Result<(), String> {
        let script = "echo 1 >/proc/sys/net/ipv4/tcp_no_metrics_save";
        succeed(self.inside(namespace, "sh").args(["-ec", script]))
    }

    fn full(&self, namespace: &str) -> String {
        self.prefix.clone() + namespace
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            // Ignored: a namespace that cannot be removed stays without programs in it.
            let _ = ip(&format!("netns del {}{namespace}", self.prefix));
        }
    }
}

/// Removes the namespaces of comparisons that were killed.
pub(super) fn remove_left() {
    let Ok(names) = std::fs::read_dir("/run/netns") else { return };
    for name in names.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        if maker(&name).is_some_and(|id| !Path::new("/proc").join(id.to_string()).exists()) {
            // Ignored: another comparison may have removed it.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

/// Process that made the namespace with this name; `None` if no comparison did.
fn maker(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('-')?.0.parse().ok()
}

/// Restores the size of the kernel's socket-flow table when dropped.
pub(super) struct RestoredRfs(Option<String>);

impl Drop for RestoredRfs {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // Ignored: the table keeps a size that does no harm.
            let _ = std::fs::write(SOCK_FLOW_ENTRIES, before.trim());
        }
    }
}

fn ip(args: &str) -> Result<(), String> {
    succeed(Command::new("ip").args(args.split(' ')))
}

fn succeed(command: &mut Command) -> Result<(), String> {
    // A signal for the comparison does not leave its work half done.
    command.process_group(0);
    let run =
        |command: &mut Command| command.output().map_err(|error| format!("{command:?}: {error}"));
    let mut output = run(command)?;
    // It had no group of its own yet when the signal came, and so had not begun.
    if output.status.signal().is_some() {
        output = run(command)?;
    }
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

#[cfg(test)]
mod tests {
    use forebay_rx::CpuId;

    use super::*;

    #[test]
    fn cmp_4_masks_have_any_cpu() {
        for (cpus, text) in [
            (&[][..], "0"),
            (&[0, 1], "3"),
            (&[31], "80000000"),
            (&[1, 40], "100,00000002"),
            (&[64, 200], "100,00000000,00000000,00000000,00000001,00000000,00000000"),
        ] {
            let mask = CpuList::new(cpus.iter().copied().map(CpuId));
            assert_eq!(KernelSteering { mask, flows: 0 }.rps_cpus(), text);
        }
    }

    #[test]
    fn cmp_2_namespaces_name_their_maker() {
        assert_eq!(maker("forebay-compare-4711-0-sender"), Some(4711));
        let others = ["forebay-compare-", "forebay-compare-x-0-sender", "forebay-4711-0", "4711-"];
        assert!(others.iter().all(|name| maker(name).is_none()));
    }
}
