//! CPU topology: the CPUs that share a cache, a memory node or a core, by sysfs
//! (Documentation/ABI/testing/sysfs-devices-system-cpu), and the masks derived from it.
//!
//! Steering pays if the polling CPU and the one that takes over share a cache (RPS-C1, RPS-C2).
//! sysfs has nothing about offline CPUs, and little about any on some machines. Facts that are
//! missing, unreadable or contradictory count as unknown.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use forebay_rx::CpuId;

use crate::cpu_list::CpuList;

/// Root of sysfs.
pub const SYSFS: &str = "/sys";

/// Most caches of a CPU that are read: `index0` and so on. Machines have up to five.
const CACHES_MAX: u32 = 16;

/// Most bytes that are read of a file: enough for a list of every possible CPU.
const FILE_BYTES_MAX: u64 = 32 << 10;

/// Most entries of a CPU's directory that are searched for its memory node.
const ENTRIES_MAX: usize = 1024;

/// Topology of some CPUs, from one reading of sysfs.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    /// Place of each CPU; CPUs that do not exist or were not requested are absent.
    places: BTreeMap<CpuId, CpuPlace>,
    online: Option<CpuList>,
    possible: Option<CpuList>,
}

/// Cache, core and memory node of a CPU.
#[derive(Clone, Debug, Default)]
struct CpuPlace {
    /// Last-level cache.
    cache: Option<Cache>,
    /// CPUs of its core, itself among them.
    core: Option<CpuList>,
    /// Memory node.
    node: Option<u16>,
}

#[derive(Clone, Debug)]
struct Cache {
    level: u8,
    /// CPUs that share the cache, by the file of one that is among them.
    cpus: CpuList,
}

/// Proposal of the CPUs that a queue's packets should go to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Advice {
    /// CPU that polls the queue.
    pub polling: CpuId,
    /// Cache or memory node that these CPUs share with the polling one.
    pub scope: Scope,
    /// CPUs in order of preference. CPUs of equal preference are ordered by number. The polling CPU
    /// comes last, if it is running.
    pub order: Vec<(CpuId, Standing)>,
    /// Running CPUs that are too far away.
    pub left_out: CpuList,
}

/// Kind of sharing between CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// CPUs sharing the polling CPU's last-level cache; the field is its level.
    Cache(u8),
    /// CPUs of the polling CPU's memory node, which the field numbers: no other running CPU shares
    /// its cache.
    Node(u16),
    /// Nothing known: all running CPUs are taken.
    Everything,
}

/// Relation of a CPU to the polling one, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Standing {
    /// First CPU of a core other than the polling one's.
    OtherCore,
    /// On the core of a CPU that is preferred.
    FurtherThread,
    /// On the polling CPU's core, whose polling it slows down.
    PollingCore,
    /// The polling CPU itself, which is busy polling.
    Polling,
}

impl Topology {
    /// Reads the topology of `cpus` from the tree at `sysfs`.
    #[must_use]
    pub fn read(sysfs: &Path, cpus: &CpuList) -> Self {
        let system = sysfs.join("devices/system/cpu");
        let place = |&cpu: &CpuId| {
            let directory = system.join(format!("cpu{cpu}"));
            directory.is_dir().then(|| (cpu, CpuPlace::read(&directory, cpu)))
        };
        Self {
            places: cpus.cpus().iter().filter_map(place).collect(),
            online: Self::online(sysfs),
            possible: read_list(&system.join("possible")),
        }
    }

    /// CPUs that are online, if the tree at `sysfs` has them.
    #[must_use]
    pub fn online(sysfs: &Path) -> Option<CpuList> {
        read_list(&sysfs.join("devices/system/cpu/online")).filter(|online| !online.is_empty())
    }

    /// Default of `rps_cpus`: the running CPUs that share the last-level cache with the polling
    /// one; see [`advise`](Self::advise).
    #[must_use]
    pub fn default_rps_cpus(&self, polling: CpuId, running: &CpuList) -> CpuList {
        self.advise(polling, running).rps_cpus()
    }

    /// Union of the defaults for the first `queues` of the running CPUs, each of which polls a
    /// queue.
    #[must_use]
    pub fn near_polling(&self, queues: usize, running: &CpuList) -> CpuList {
        let polling = running.cpus().iter().take(queues);
        let near = polling.map(|&cpu| self.default_rps_cpus(cpu, running));
        CpuList::new(near.flat_map(|near| near.cpus().to_vec()))
    }

    /// Running CPUs that the packets of a queue polled by `polling` should go to: those that share
    /// its last-level cache; if none of the others do, those of its memory node; if none is known
    /// to be near, all. CPUs that do not exist count as near, since they occur in simulations only.
    #[must_use]
    pub fn advise(&self, polling: CpuId, running: &CpuList) -> Advice {
        let among = |is_near: &dyn Fn(CpuId) -> bool| {
            let near = running.cpus().iter().copied().filter(|&cpu| is_near(cpu));
            let near = CpuList::new(near);
            near.cpus().iter().any(|&cpu| cpu != polling).then_some(near)
        };
        let place = self.places.get(&polling);
        let level = place.and_then(|place| place.cache.as_ref()).map(|cache| cache.level);
        let node = place.and_then(|place| place.node);
        let by_cache = level.and_then(|level| {
            Some((Scope::Cache(level), among(&|cpu| self.share_cache(polling, cpu))?))
        });
        let by_node = || {
            let node = node?;
            Some((Scope::Node(node), among(&|cpu| self.is_of_node(cpu, node))?))
        };
        let (scope, cpus) =
            by_cache.or_else(by_node).unwrap_or_else(|| (Scope::Everything, running.clone()));
        let left_out = running.cpus().iter().copied().filter(|&cpu| !cpus.contains(cpu));
        let left_out = CpuList::new(left_out);
        Advice { polling, scope, order: self.order(polling, &cpus), left_out }
    }

    /// Number of bits of the kernel's bitmaps here (`nr_cpu_ids`), at least enough for `cpus`.
    #[must_use]
    pub fn mask_width(&self, cpus: &CpuList) -> u16 {
        let known = [self.possible.as_ref(), self.online.as_ref(), Some(cpus)];
        let last = known.into_iter().flatten().filter_map(|list| list.cpus().last()).max();
        last.map_or(1, |cpu| cpu.0 + 1)
    }

    fn order(&self, polling: CpuId, cpus: &CpuList) -> Vec<(CpuId, Standing)> {
        let standing = |cpu| {
            if cpu == polling {
                Standing::Polling
            } else if self.share_core(polling, cpu) {
                Standing::PollingCore
            } else if self.threads_before(cpu).any(|before| cpus.contains(before)) {
                Standing::FurtherThread
            } else {
                Standing::OtherCore
            }
        };
        let mut order: Vec<_> = cpus.cpus().iter().map(|&cpu| (cpu, standing(cpu))).collect();
        order.sort_by_key(|&(cpu, standing)| (standing, cpu));
        order
    }

    /// True if the two share a last-level cache, given that `cpu`'s is known: both files agree, as
    /// far as they are known.
    fn share_cache(&self, cpu: CpuId, other: CpuId) -> bool {
        let Some(other_place) = self.places.get(&other) else { return true };
        let names = |cache: &Option<Cache>, named| {
            cache.as_ref().is_none_or(|cache| cache.cpus.contains(named))
        };
        self.places
            .get(&cpu)
            .is_some_and(|place| names(&place.cache, other) && names(&other_place.cache, cpu))
    }

    fn is_of_node(&self, cpu: CpuId, node: u16) -> bool {
        self.places.get(&cpu).is_none_or(|place| place.node == Some(node))
    }

    /// CPUs of lower number on the core of `cpu`.
    fn threads_before(&self, cpu: CpuId) -> impl Iterator<Item = CpuId> {
        let core = self.places.get(&cpu).and_then(|place| place.core.as_ref());
        let threads = core.into_iter().flat_map(|core| core.cpus().iter().copied());
        threads.filter(move |&before| before < cpu && self.share_core(before, cpu))
    }

    /// True if the files of both say that they share a core.
    fn share_core(&self, cpu: CpuId, other: CpuId) -> bool {
        let core = |cpu| self.places.get(&cpu)?.core.as_ref();
        core(cpu).is_some_and(|core| core.contains(other))
            && core(other).is_some_and(|core| core.contains(cpu))
    }
}

impl Advice {
    /// Mask of all proposed CPUs.
    #[must_use]
    pub fn rps_cpus(&self) -> CpuList {
        CpuList::new(self.order.iter().map(|&(cpu, _)| cpu))
    }

    /// Mask for a CPU that is busy with polling alone: without the polling one, if there is another
    /// ("At high interrupt rate, it might be wise to exclude the interrupting CPU",
    /// Documentation/networking/scaling.rst).
    #[must_use]
    pub fn rps_cpus_without_polling(&self) -> Option<CpuList> {
        let others = self.order.iter().map(|&(cpu, _)| cpu).filter(|&cpu| cpu != self.polling);
        Some(CpuList::new(others)).filter(|others| !others.is_empty())
    }

    /// CPUs of one standing.
    #[must_use]
    pub fn of_standing(&self, standing: Standing) -> CpuList {
        CpuList::new(self.order.iter().filter(|(_, other)| *other == standing).map(|it| it.0))
    }
}

impl CpuPlace {
    fn read(directory: &Path, cpu: CpuId) -> Self {
        let core = ["core_cpus_list", "thread_siblings_list"].into_iter().find_map(|name| {
            read_list(&directory.join("topology").join(name)).filter(|list| list.contains(cpu))
        });
        Self { cache: last_level_cache(&directory.join("cache"), cpu), core, node: node(directory) }
    }
}

/// Cache of the highest level that holds data. `None` if it is unknown which that is or who shares
/// it: a lower level would not be the last.
fn last_level_cache(directory: &Path, cpu: CpuId) -> Option<Cache> {
    let mut last = None;
    for index in 0..CACHES_MAX {
        let directory = directory.join(format!("index{index}"));
        if !directory.is_dir() {
            break;
        }
        let level: u8 = read(&directory.join("level"))?.trim().parse().ok()?;
        let holds_data = match read(&directory.join("type"))?.trim() {
            "Data" | "Unified" => true,
            "Instruction" => false,
            // An unknown type may be the last level that holds data.
            _ => return None,
        };
        if holds_data && last.as_ref().is_none_or(|(highest, _)| *highest < level) {
            last = Some((level, directory));
        }
    }
    let (level, directory) = last?;
    let cpus = read_list(&directory.join("shared_cpu_list"))?;
    cpus.contains(cpu).then_some(Cache { level, cpus })
}

/// Memory node that the CPU's directory links to; `None` if there are several.
fn node(directory: &Path) -> Option<u16> {
    let entries = fs::read_dir(directory).ok()?.take(ENTRIES_MAX);
    let mut nodes = entries.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.strip_prefix("node")?.parse().ok()
    });
    let node = nodes.next()?;
    nodes.next().is_none().then_some(node)
}

fn read_list(path: &Path) -> Option<CpuList> {
    CpuList::parse_list(&read(path)?).ok()
}

/// Text of a small file.
fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let read = File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    // A truncated list would leave out CPUs.
    (u64::try_from(read).ok()? < FILE_BYTES_MAX).then_some(text)
}

#[cfg(test)]
mod tests;
