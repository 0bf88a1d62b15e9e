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
mod tests {
    use Standing::{FurtherThread, OtherCore, Polling, PollingCore};
    use tempfile::TempDir;

    use super::*;

    /// Synthetic /sys.
    struct Tree(TempDir);

    impl Tree {
        fn new() -> Self {
            Self(TempDir::new().unwrap())
        }

        fn write(&self, file: &str, text: impl AsRef<[u8]>) {
            let path = self.0.path().join("devices/system/cpu").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// Adds a CPU with caches as on most machines; `caches` are lists by level, from 1 on.
        fn cpu(&self, cpu: u16, core: &str, node: u16, caches: &[&str]) {
            self.write(&format!("cpu{cpu}/topology/core_cpus_list"), core);
            self.write(&format!("cpu{cpu}/node{node}/cpulist"), "");
            let of_level = |index: usize| if index < 2 { 1 } else { index };
            for index in 0..=caches.len() {
                let kind = ["Data", "Instruction"].get(index).unwrap_or(&"Unified");
                let file = |name| format!("cpu{cpu}/cache/index{index}/{name}");
                self.write(&file("type"), format!("{kind}\n"));
                self.write(&file("level"), format!("{}\n", of_level(index)));
                self.write(&file("shared_cpu_list"), caches[of_level(index) - 1]);
            }
        }

        /// Two packages of four cores with two threads each (n and n + 8); two cores share a
        /// last-level cache.
        fn two_packages() -> Self {
            let tree = Self::new();
            for cpu in 0..16 {
                let core = cpu % 8;
                let threads = format!("{core},{}", core + 8);
                let first = core / 2 * 2;
                let cache = format!("{first}-{},{}-{}", first + 1, first + 8, first + 9);
                tree.cpu(cpu, &threads, core / 4, &[&threads, &threads, &cache]);
            }
            tree
        }

        fn advise(&self, polling: u16, running: &str) -> Advice {
            let running = list(running);
            Topology::read(self.0.path(), &running).advise(CpuId(polling), &running)
        }

        /// Scope and mask of the advice.
        fn mask(&self, polling: u16, running: &str) -> (Scope, String) {
            let advice = self.advise(polling, running);
            (advice.scope, advice.rps_cpus().to_string())
        }
    }

    fn list(text: &str) -> CpuList {
        CpuList::parse_list(text).unwrap()
    }

    fn standings(advice: &Advice) -> Vec<(u16, Standing)> {
        advice.order.iter().map(|&(cpu, standing)| (cpu.0, standing)).collect()
    }

    #[test]
    fn rps_c1_cache_cpus_polling_core_last() {
        let tree = Tree::two_packages();
        for (polling, order, left_out) in [
            (0, [1, 9, 8, 0], "2-7,10-15"),
            (9, [0, 8, 1, 9], "2-7,10-15"),
            (13, [4, 12, 5, 13], "0-3,6-11,14-15"),
        ] {
            let advice = tree.advise(polling, "0-15");
            assert_eq!(advice.scope, Scope::Cache(3));
            let kinds = [OtherCore, FurtherThread, PollingCore, Polling];
            let expected: Vec<_> = order.into_iter().zip(kinds).collect();
            assert_eq!(standings(&advice), expected);
            assert_eq!(advice.left_out, list(left_out));
            let others = advice.rps_cpus_without_polling().unwrap();
            assert_eq!(others, CpuList::new(order[..3].iter().copied().map(CpuId)));
        }
    }

    #[test]
    fn rps_c1_private_cache_cpu_shares_with_node() {
        let tree = Tree::two_packages();
        for (running, scope, mask) in [
            ("0,2,4", Scope::Node(0), "0,2"),
            ("0,4,6", Scope::Everything, "0,4,6"),
            ("0", Scope::Everything, "0"),
            // A CPU that does not exist counts as near; an existing one of the node does not share
            // the cache.
            ("0,2,40", Scope::Cache(3), "0,40"),
        ] {
            assert_eq!(tree.mask(0, running), (scope, mask.to_owned()), "of {running}");
        }
        assert_eq!(tree.mask(40, "0-3,40"), (Scope::Everything, "0-3,40".to_owned()));
        assert_eq!(tree.advise(0, "0").rps_cpus_without_polling(), None);
    }

    #[test]
    fn rps_c1_default_covers_all_polling_cpus() {
        let tree = Tree::two_packages();
        let near = |queues, running| {
            let running = list(running);
            Topology::read(tree.0.path(), &running).near_polling(queues, &running).to_string()
        };
        assert_eq!(near(1, "0-15"), list("0-1,8-9").to_string());
        assert_eq!(near(2, "0-15"), near(1, "0-15"), "both poll on the first cache");
        assert_eq!(near(3, "0-15"), list("0-3,8-11").to_string());
        assert_eq!(near(2, "0,5,8,11-12"), list("0,5,8,12").to_string());
        assert_eq!(near(100, "0-15"), list("0-15").to_string());
    }

    #[test]
    fn rps_c1_hybrid_core_owns_its_cache() {
        let tree = Tree::new();
        for (cpu, threads) in [(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")] {
            tree.cpu(cpu, threads, 0, &[threads, threads, "0-7"]);
        }
        (4..8)
            .for_each(|cpu| tree.cpu(cpu, &cpu.to_string(), 0, &[&cpu.to_string(), "4-7", "0-7"]));
        (8..10).for_each(|cpu| tree.cpu(cpu, &cpu.to_string(), 0, &[&cpu.to_string(), "8-9"]));
        let advice = tree.advise(0, "0-9");
        assert_eq!((advice.scope, &advice.left_out), (Scope::Cache(3), &list("8-9")));
        assert_eq!(advice.of_standing(OtherCore), list("2,4-7"));
        assert_eq!(advice.of_standing(FurtherThread), list("3"));
        assert_eq!(advice.of_standing(PollingCore), list("1"));
        assert_eq!(advice.order.last(), Some(&(CpuId(0), Polling)));
        assert_eq!(tree.mask(8, "0-9"), (Scope::Cache(2), "8-9".to_owned()));
    }

    #[test]
    fn rps_c1_silent_sysfs_takes_all() {
        let everything = |cpus: &str| (Scope::Everything, cpus.to_owned());
        assert_eq!(Tree::new().mask(0, "0-3"), everything("0-3"));
        let tree = Tree::two_packages();
        let cpu1 = tree.0.path().join("devices/system/cpu/cpu1");
        fs::remove_dir_all(cpu1.join("cache")).unwrap();
        assert_eq!(tree.mask(0, "0-3"), (Scope::Cache(3), "0-1".to_owned()), "0 vouches for 1");
        assert_eq!(tree.mask(1, "0-7"), (Scope::Node(0), "0-3".to_owned()));
        fs::remove_dir_all(cpu1.join("node0")).unwrap();
        assert_eq!(tree.mask(1, "0-7"), everything("0-7"));
        fs::remove_dir_all(cpu1.join("topology")).unwrap();
        assert_eq!(tree.advise(1, "0-9").of_standing(PollingCore), CpuList::default());
        tree.write("cpu1/topology/thread_siblings_list", "1,9");
        assert_eq!(tree.advise(1, "0-9").of_standing(PollingCore), list("9"), "older kernels");
    }

    #[test]
    fn contradictions_count_as_unsaid() {
        let everything = (Scope::Everything, "0-1,4".to_owned());
        let huge = "0,".repeat(1 << 20);
        let in_vain: [&[u8]; 9] = [
            b"",
            b"\n",
            b"1",
            b"0-",
            b"0-99999999999999999999",
            b"0-4096",
            b"\xff0-1",
            b"3-0",
            huge.as_bytes(),
        ];
        for text in in_vain {
            let tree = Tree::two_packages();
            tree.write("cpu0/cache/index3/shared_cpu_list", text);
            tree.write("cpu0/node1/cpulist", "");
            assert_eq!(tree.mask(0, "0-1,4"), everything, "{text:.20?}");
        }
        for level in ["", "-1", "three", "1e9", "300", "\0"] {
            let tree = Tree::two_packages();
            tree.write("cpu0/cache/index3/level", level);
            fs::remove_dir_all(tree.0.path().join("devices/system/cpu/cpu0/node0")).unwrap();
            assert_eq!(tree.mask(0, "0-1,4"), everything, "{level:?}");
            tree.write("cpu0/cache/index3/level", "3");
            assert_eq!(tree.mask(0, "0-1,4").0, Scope::Cache(3));
            tree.write("cpu0/cache/index3/type", level);
            assert_eq!(tree.mask(0, "0-1,4"), everything, "a type {level:?}");
        }
        let tree = Tree::two_packages();
        for greedy in ["cpu0/cache/index3/shared_cpu_list", "cpu0/topology/core_cpus_list"] {
            tree.write(greedy, "0-4095");
        }
        tree.write("cpu9/cache/index3/shared_cpu_list", "9");
        let advice = tree.advise(0, "0-15");
        assert_eq!(standings(&advice), [(1, OtherCore), (8, PollingCore), (0, Polling)]);
    }

    #[test]
    fn rps_12_masks_have_kernel_width() {
        let tree = Tree::two_packages();
        let width = |cpus| Topology::read(tree.0.path(), &list(cpus)).mask_width(&list(cpus));
        assert_eq!([width("0-1"), width("")], [2, 1]);
        tree.write("online", "0-15\n");
        assert_eq!(width("0-1"), 16);
        tree.write("possible", "0-127\n");
        assert_eq!([width("0-1"), width("200")], [128, 201]);
        assert_eq!(Topology::online(tree.0.path()), Some(list("0-15")));
    }
}
