//! Tree of control files: the kernel's files at the kernel's paths, and some of Forebay's own.

use std::ops::Range;

use forebay_engine::Devices;
use forebay_engine::knobs::coalesce::CoalesceChange;
use forebay_engine::knobs::knob::{Knob, KnobPlace};
use forebay_engine::knobs::{BalanceChange, SpreadChange};
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::cpu_list::CpuList;
use forebay_sys::errno::Errno;

use super::names::OfDevice;
use super::stats::CPU_COUNTERS;

/// File with the size of a queue's posted receive buffers, as virtio-net names it
/// (drivers/net/virtio_net.c, where it is read-only, too).
const MERGEABLE_RX_BUFFER_SIZE: &str = "mergeable_rx_buffer_size";

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TreeEntry {
    /// Name.
    pub name: String,
    /// Kind.
    pub kind: EntryKind,
}

/// Kind of an entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A file.
    File {
        /// Permissions, as in 0o644.
        mode: u16,
    },
}

/// A file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum File {
    /// Size of a queue's receive buffers; the queue is numbered through all devices.
    RxBufferSize(RxQueue),
    /// A knob of the kernel; if it is one of a queue, that queue, numbered through all devices.
    Knob(Knob, RxQueue),
    /// State of a CPU: running or not.
    CpuOnline(CpuId),
    /// CPUs that run.
    Online,
    /// CPUs of the engine.
    Possible,
    /// Counters of all CPUs.
    SoftnetStat,
    /// A knob of coalescing.
    Coalesce(&'static str),
    /// Knob of RPS load balancing.
    Balance(&'static str),
    /// A knob of the spread.
    Spread(&'static str),
    /// Key of the flow hash. Write-only, since readers of the key could aim flows at one CPU.
    HashKey,
    /// Rules for flow keys.
    FlowKey,
    /// CPUs that run, writable.
    Cpus,
    /// One counter of one CPU.
    Counter(CpuId, &'static str),
}

impl File {
    pub(super) fn mode(self) -> u16 {
        match self {
            Self::Online
            | Self::Possible
            | Self::SoftnetStat
            | Self::Counter(..)
            | Self::RxBufferSize(_) => 0o444,
            Self::HashKey => 0o200,
            Self::Knob(..)
            | Self::CpuOnline(_)
            | Self::Coalesce(_)
            | Self::Balance(_)
            | Self::Spread(_)
            | Self::FlowKey
            | Self::Cpus => 0o644,
        }
    }

    /// True if the file is in the list of knobs: all that can be set, and those that drivers set.
    pub(super) fn is_listed(self) -> bool {
        matches!(self, Self::RxBufferSize(_)) || self.mode() & 0o200 != 0
    }
}

/// Queues and CPUs that have files.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) devices: Devices,
    pub(super) cpus: CpuList,
}

impl Tree {
    /// File at `path`.
    pub(super) fn file(&self, path: &str) -> Result<File, Errno> {
        let path = normal(path);
        match self.files().find(|(at, _)| *at == path) {
            Some((_, file)) => Ok(file),
            None => Err(match self.entries(&path) {
                Ok(_) => Errno::IsDir,
                Err(errno) => errno,
            }),
        }
    }

    /// Entries of the directory at `path`, sorted by name.
    pub(super) fn entries(&self, path: &str) -> Result<Vec<TreeEntry>, Errno> {
        let directory = normal(path);
        let prefix = if directory.is_empty() { directory.clone() } else { format!("{directory}/") };
        let mut entries = Vec::new();
        for (at, file) in self.files() {
            if directory == at || directory.starts_with(&format!("{at}/")) {
                return Err(Errno::NotDir);
            }
            let Some(below) = at.strip_prefix(&prefix) else { continue };
            entries.push(match below.split_once('/') {
                Some((name, _)) => TreeEntry { name: name.to_owned(), kind: EntryKind::Directory },
                None => {
                    let kind = EntryKind::File { mode: file.mode() };
                    TreeEntry { name: below.to_owned(), kind }
                }
            });
        }
        entries.sort();
        entries.dedup();
        if entries.is_empty() { Err(Errno::NoEnt) } else { Ok(entries) }
    }

    /// All files, each with its path.
    pub(super) fn files(&self) -> impl Iterator<Item = (String, File)> {
        let cpus = self.cpus.cpus().iter();
        let of_cpus = cpus.flat_map(|&cpu| {
            let online = (format!("sys/devices/system/cpu/cpu{cpu}/online"), File::CpuOnline(cpu));
            let counters = CPU_COUNTERS
                .into_iter()
                .map(move |name| (format!("forebay/cpu{cpu}/{name}"), File::Counter(cpu, name)));
            counters.chain([online])
        });
        let of_coalescing = CoalesceChange::KNOBS.into_iter().filter(|name| {
            Knob::named(name).is_none() // the others are the kernel's
        });
        let of_coalescing =
            of_coalescing.map(|name| (format!("forebay/{name}"), File::Coalesce(name)));
        let of_balance = BalanceChange::KNOBS
            .into_iter()
            .map(|name| (format!("forebay/{name}"), File::Balance(name)));
        let of_spread = SpreadChange::KNOBS
            .into_iter()
            .map(|name| (format!("forebay/{name}"), File::Spread(name)));
        let others = [
            ("sys/devices/system/cpu/online", File::Online),
            ("sys/devices/system/cpu/possible", File::Possible),
            ("sys/devices/system/cpu/present", File::Possible),
            ("proc/net/softnet_stat", File::SoftnetStat),
            ("forebay/flow_key", File::FlowKey),
            ("forebay/hash_key", File::HashKey),
            ("forebay/cpus", File::Cpus),
        ];
        let others = others.into_iter().map(|(path, file)| (path.to_owned(), file));
        self.knobs()
            .chain(self.rx_buffer_sizes())
            .chain(of_cpus)
            .chain(of_coalescing)
            .chain(of_balance)
            .chain(of_spread)
            .chain(others)
    }

    /// Files of buffer sizes, one for each queue of a virtio device.
    fn rx_buffer_sizes(&self) -> impl Iterator<Item = (String, File)> {
        self.devices.iter().flat_map(|(device, own)| {
            let first = own.start;
            let own = own.filter(|queue| self.devices.rx_buffers(RxQueue(*queue)).is_some());
            own.map(move |queue| {
                let directory = KnobPlace::Queue.directory(device, RxQueue(queue - first));
                let file = File::RxBufferSize(RxQueue(queue));
                (format!("{directory}/{MERGEABLE_RX_BUFFER_SIZE}"), file)
            })
        })
    }

    fn knobs(&self) -> impl Iterator<Item = (String, File)> {
        let of = |place: KnobPlace| Knob::ALL.into_iter().filter(move |knob| knob.place() == place);
        let file = |knob: Knob, device: &str, own: u16, queue: u16| {
            let directory = knob.place().directory(device, RxQueue(own));
            (format!("{directory}/{knob}"), File::Knob(knob, RxQueue(queue)))
        };
        let of_devices = self.devices.iter().flat_map(move |(device, Range { start, end })| {
            let of_queues = of(KnobPlace::Queue).flat_map(move |knob| {
                (start..end).map(move |queue| file(knob, device, queue - start, queue))
            });
            of_queues.chain(of(KnobPlace::Device).map(move |knob| file(knob, device, 0, start)))
        });
        of_devices.chain(of(KnobPlace::NetCore).map(move |knob| file(knob, "", 0, 0)))
    }

    /// Paths of the files that a short name stands for: `rps_cpus` of all queues, `eth0/rps_cpus`
    /// of those of one device, `rx-0/rps_cpus` of the first queue of each, `eth0/rx-0/rps_cpus`,
    /// `eth0/mtu`, `cpu1/online`, or a whole path.
    pub(super) fn named(&self, name: &str) -> Result<Vec<String>, Errno> {
        let name = normal(name);
        let ending = format!("/{name}");
        let files = self.files().map(|(path, _)| path);
        let is_meant = |path: &String| {
            *path == name
                || path.ends_with(&ending)
                || OfDevice::of(path).is_some_and(|of_device| of_device.is_called(&name))
        };
        let named: Vec<_> = files.filter(is_meant).collect();
        // A whole path stands for that file only.
        match named.iter().find(|path| **path == name) {
            Some(path) => Ok(vec![path.clone()]),
            None if named.is_empty() => self.file(&name).map(|_| Vec::new()),
            None => Ok(named),
        }
    }
}

/// Path without empty parts and dots.
fn normal(path: &str) -> String {
    let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_engine::DeviceQueues;

    use super::*;

    fn tree_of(devices: &[(&str, u16)]) -> Tree {
        let cpus = CpuList::new([0, 1].map(CpuId));
        let sum = devices.iter().map(|(_, queues)| usize::from(*queues)).sum();
        let devices = devices.iter().map(|(name, queues)| DeviceQueues::new(*name, *queues));
        Tree { devices: Devices::of(&devices.collect::<Vec<_>>(), sum).unwrap(), cpus }
    }

    fn tree() -> Tree {
        tree_of(&[("eth0", 2)])
    }

    fn names(path: &str) -> Vec<String> {
        tree().entries(path).unwrap().into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn rps_7_the_tree_has_the_kernels_directories() {
        assert_eq!(names(""), ["forebay", "proc", "sys"]);
        assert_eq!(names("/sys/class/net/eth0/queues/"), ["rx-0", "rx-1"]);
        assert_eq!(names("sys/class/net/eth0/queues/rx-1"), ["rps_cpus", "rps_flow_cnt"]);
        assert_eq!(
            names("sys/class/net/eth0"),
            ["gro_flush_timeout", "mtu", "napi_defer_hard_irqs", "queues"]
        );
        let cpu = ["cpu0", "cpu1", "online", "possible", "present"];
        assert_eq!(names("sys/devices/system/cpu"), cpu);
        assert_eq!(names("proc/sys/net/core").len(), 10);
    }

    #[test]
    fn only_virtio_has_buffer_size() {
        let virtio = DeviceQueues {
            rx_buffers: vec![Arc::default(), Arc::default()],
            ..DeviceQueues::new("switch", 2)
        };
        let devices = Devices::of(&[DeviceQueues::new("eth0", 1), virtio], 3).unwrap();
        let tree = Tree { devices, cpus: CpuList::new([CpuId(0)]) };
        let at =
            |queue: &str| tree.file(&format!("sys/class/net/{queue}/mergeable_rx_buffer_size"));
        assert_eq!(at("switch/queues/rx-0"), Ok(File::RxBufferSize(RxQueue(1))));
        assert_eq!(at("switch/queues/rx-1"), Ok(File::RxBufferSize(RxQueue(2))));
        assert_eq!(at("eth0/queues/rx-0"), Err(Errno::NoEnt));
        assert_eq!(at("switch"), Err(Errno::NoEnt));
        assert_eq!(tree.named("mergeable_rx_buffer_size").unwrap().len(), 2);
        assert_eq!(tree.named("switch/rx-1/mergeable_rx_buffer_size").unwrap().len(), 1);
        assert_eq!(File::RxBufferSize(RxQueue(1)).mode(), 0o444);
    }

    #[test]
    fn what_is_not_there_says_why() {
        let file = |path| tree().file(path);
        assert_eq!(file("proc/net/softnet_stat"), Ok(File::SoftnetStat));
        assert_eq!(file("proc/net"), Err(Errno::IsDir));
        assert_eq!(file("proc/net/snmp"), Err(Errno::NoEnt));
        assert_eq!(file("proc/net/softnet_stat/x"), Err(Errno::NotDir));
        assert_eq!(tree().entries("proc/net/softnet_stat"), Err(Errno::NotDir));
        assert_eq!(tree().entries("proc/ne"), Err(Errno::NoEnt));
        assert_eq!(file("sys/class/net/eth0/queues/rx-2/rps_cpus"), Err(Errno::NoEnt));
    }

    #[test]
    fn short_name_covers_all_matches() {
        let named = |name| tree().named(name).map(|paths| paths.len());
        assert_eq!(named("rps_cpus"), Ok(2));
        assert_eq!(named("rx-1/rps_cpus"), Ok(1));
        assert_eq!(named("netdev_budget"), Ok(1));
        assert_eq!(named("cpu1/online"), Ok(1));
        assert_eq!(named("forebay/cpus"), Ok(1));
        assert_eq!(named("rps_cpu"), Err(Errno::NoEnt));
    }

    #[test]
    fn device_queues_count_from_zero() {
        let tree = tree_of(&[("eth0", 2), ("eth1.7", 1), ("v", 3)]);
        let queue = |path: &str| match tree.file(path) {
            Ok(File::Knob(Knob::RpsCpus, queue)) => Ok(queue.0),
            other => Err(other),
        };
        assert_eq!(queue("sys/class/net/eth0/queues/rx-1/rps_cpus"), Ok(1));
        assert_eq!(queue("sys/class/net/eth1.7/queues/rx-0/rps_cpus"), Ok(2));
        assert_eq!(queue("sys/class/net/v/queues/rx-2/rps_cpus"), Ok(5));
        assert_eq!(queue("sys/class/net/eth1.7/queues/rx-1/rps_cpus"), Err(Err(Errno::NoEnt)));
        for (name, paths) in [
            ("rps_cpus", 6),
            ("rx-0/rps_cpus", 3),
            ("v/rps_cpus", 3),
            ("v/rx-1/rps_cpus", 1),
            ("queues/rx-1/rps_cpus", 2),
            ("sys/class/net/v/queues/rx-1/rps_cpus", 1),
            ("eth1.7/rx-0/rps_flow_cnt", 1),
            ("eth1.7/rx-1/rps_flow_cnt", 0),
            ("mtu", 3),
            ("eth0/mtu", 1),
            ("eth2/mtu", 0),
            ("netdev_budget", 1),
        ] {
            let named = tree.named(name).map_or(0, |named| named.len());
            assert_eq!(named, paths, "{name}");
        }
    }
}
