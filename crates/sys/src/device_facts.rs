//! Facts about a device that decide how well its packets are received: what its driver can do, and
//! how it is set up.

use std::fs;
use std::io;
use std::path::Path;

use crate::cpu_list::CpuList;
use crate::ethtool_netlink::{self, DeviceFeatures, RingSettings, RssSettings};
use crate::interface::{Interface, InterfaceCounters};
use crate::machine_facts::{FactReader, MissingPrivilege, Unseen, missing};
use crate::netdev::{self, XdpFeatures};
use crate::{privilege, xdp_attached};

/// Most interrupts of a device that are looked at.
const INTERRUPTS_MAX: usize = 1024;

/// Interrupt of a device, and the CPUs that may handle it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interrupt {
    /// Number.
    pub number: u32,
    /// Name, as in `eth0-rx-0`.
    pub name: String,
    /// CPUs that handle it.
    pub cpus: CpuList,
}

/// RPS of the kernel at one queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelRps {
    /// Number of the queue.
    pub queue: u16,
    /// CPUs that the kernel spreads packets to (`rps_cpus`); none if it does not.
    pub cpus: CpuList,
}

/// Facts about a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceFacts {
    /// The interface.
    pub interface: Interface,
    /// True if a default route goes out of it.
    pub is_default_route: Option<bool>,
    /// XDP abilities of the driver.
    pub xdp: Option<XdpFeatures>,
    /// XDP programs that are attached.
    pub programs: Vec<String>,
    /// Offloads.
    pub features: Option<DeviceFeatures>,
    /// Hash and indirection; `None` if the device has none.
    pub rss: Option<RssSettings>,
    /// Lengths of the rx rings; `None` if the driver has none.
    pub rings: Option<RingSettings>,
    /// Largest number of rx queues; `None` if the driver does not report it.
    pub rx_queues_max: Option<u32>,
    /// Interrupts.
    pub interrupts: Vec<Interrupt>,
    /// RPS of the kernel.
    pub rps: Vec<KernelRps>,
    /// Memory node of the device.
    pub node: Option<u16>,
    /// CPUs of that node.
    pub node_cpus: Option<CpuList>,
    /// Empty polls before the driver waits for interrupts again (`napi_defer_hard_irqs`).
    pub napi_defer_hard_irqs: Option<u32>,
    /// Interval of those polls, in nanoseconds (`gro_flush_timeout`).
    pub gro_flush_timeout_ns: Option<u64>,
    /// Counters since the interface was created.
    pub counters: Option<InterfaceCounters>,
    /// Missing privileges to open it as a TAP or TUN; `None` for other devices too.
    pub tun: Option<MissingPrivilege>,
    /// Facts that could not be read.
    pub unseen: Vec<Unseen>,
}

impl DeviceFacts {
    /// Reads the facts about an interface of this namespace; files are below `root`, which is `/`
    /// for this machine.
    #[must_use]
    pub fn read(interface: Interface, root: &Path) -> Self {
        let index = interface.index;
        let mut files = FactReader::new(root);
        let mut facts = Self {
            is_default_route: interface.is_default_route().ok(),
            xdp: asked(&mut files, "XDP features", netdev::xdp_features(index)).flatten(),
            programs: Vec::new(),
            features: asked(&mut files, "offloads", ethtool_netlink::features(index)),
            rss: asked(&mut files, "hash and indirection", ethtool_netlink::rss(index)),
            rings: asked(&mut files, "ring lengths", ethtool_netlink::rings(index)),
            rx_queues_max: asked(&mut files, "queues", ethtool_netlink::rx_queues_max(index)),
            counters: interface.counters().ok(),
            interrupts: Vec::new(),
            rps: Vec::new(),
            node: None,
            node_cpus: None,
            napi_defer_hard_irqs: None,
            gro_flush_timeout_ns: None,
            tun: interface.tun.and_then(|_| missing(privilege::for_tun(&interface.name))),
            unseen: Vec::new(),
            interface,
        };
        if facts.interface.xdp_program.is_some() {
            let programs = asked(&mut files, "XDP programs", xdp_attached::attached_to(index));
            let programs = programs.unwrap_or_default();
            facts.programs = programs.iter().map(ToString::to_string).collect();
        }
        facts.read_sysfs(&mut files);
        facts.unseen = files.unseen;
        facts
    }

    /// Reads what sysfs has, if it is that of this namespace.
    fn read_sysfs(&mut self, files: &mut FactReader<'_>) {
        let directory = format!("sys/class/net/{}", self.interface.name);
        let index = fs::read_to_string(files.path(&format!("{directory}/ifindex"))).ok();
        let index = index.and_then(|index| index.trim().parse::<u32>().ok());
        if index != Some(self.interface.index.0) {
            let why = "it shows another network namespace: see `ip netns exec`, which mounts it";
            files.note(&format!("/{directory}"), &io::Error::other(why));
            return;
        }
        let napi = |name: &str| format!("{directory}/{name}");
        self.napi_defer_hard_irqs = files.number(&napi("napi_defer_hard_irqs"));
        self.gro_flush_timeout_ns = files.number(&napi("gro_flush_timeout"));
        // A node of -1 means that the machine has one node only.
        let node = files.text_if_any(&format!("{directory}/device/numa_node"));
        self.node = node.and_then(|node| node.parse().ok());
        self.node_cpus = self
            .node
            .and_then(|node| files.cpus(&format!("sys/devices/system/node/node{node}/cpulist")));
        for queue in 0..self.interface.rx_queues {
            let file = format!("{directory}/queues/rx-{queue}/rps_cpus");
            let mask = files.text_if_any(&file);
            let cpus = mask.and_then(|mask| CpuList::parse_mask(&mask).ok());
            self.rps.extend(cpus.map(|cpus| KernelRps { queue, cpus }));
        }
        self.interrupts = interrupts(files, &directory);
    }
}

/// Answer of the kernel; `None` and a note if there is none. A driver that has no such setting is
/// no reason for a note.
fn asked<T>(files: &mut FactReader<'_>, what: &str, answer: io::Result<T>) -> Option<T> {
    let is_absent = |error: &io::Error| {
        error.kind() == io::ErrorKind::Unsupported
            || error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error())
    };
    answer
        .map_err(|error| {
            if !is_absent(&error) {
                files.note(what, &error);
            }
        })
        .ok()
}

/// Interrupts of a device: those of its PCI function, which is its parent for a virtio device.
fn interrupts(files: &mut FactReader<'_>, directory: &str) -> Vec<Interrupt> {
    let device = files.path(&format!("{directory}/device"));
    let Ok(device) = device.canonicalize() else { return Vec::new() };
    let parents = [Some(device.as_path()), device.parent()];
    let numbers = parents.into_iter().flatten().find_map(|device| {
        let entries = fs::read_dir(device.join("msi_irqs")).ok()?.take(INTERRUPTS_MAX);
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Some(numbers.collect::<Vec<u32>>())
    });
    let mut numbers = numbers.unwrap_or_default();
    numbers.sort_unstable();
    let names = files.text("proc/interrupts").unwrap_or_default();
    let interrupt = |number: u32| {
        let cpus = files.cpus(&format!("proc/irq/{number}/smp_affinity_list"))?;
        Some(Interrupt { number, name: name_of(&names, number), cpus })
    };
    numbers.into_iter().filter_map(interrupt).collect()
}

/// Name of an interrupt in the text of /proc/interrupts; empty if nothing handles it.
fn name_of(interrupts: &str, number: u32) -> String {
    let mut lines = interrupts.lines().map(str::trim_start);
    let line = lines.find_map(|line| line.strip_prefix(&format!("{number}:")));
    line.and_then(|line| line.split_whitespace().last()).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doc_1_interrupts_have_their_names() {
        let text = "           CPU0       CPU1\n 24:   5  0  PCI-MSIX-0000:00:04.0   0-edge   \
                    virtio1-config\n  4:  1 2 IO-APIC 4-edge ttyS0\n";
        assert_eq!(name_of(text, 24), "virtio1-config");
        assert_eq!(name_of(text, 4), "ttyS0");
        assert_eq!(name_of(text, 2), "");
    }
}
