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
    (4..8).for_each(|cpu| tree.cpu(cpu, &cpu.to_string(), 0, &[&cpu.to_string(), "4-7", "0-7"]));
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
