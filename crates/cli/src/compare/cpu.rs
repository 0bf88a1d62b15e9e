//! `compare cpu`: stages in memory, ours by `forebay bench`, beside programs of DPDK.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::CompareSetting;
use super::child::StartedProgram;
use super::peers::Peer;
use super::segments;
use super::subject::{
    Author, Better, Quantity, Subject, SubjectGroup, TurnFigure, TurnFigures, TurnLength,
};
use crate::bench::pair::CpuPair;

/// Repeats of a turn, and seconds that they may take.
const REPEATS: u32 = 9;
const SECONDS: u32 = 2;

/// Class of figures that one CPU alone determines.
pub(super) const ONE_CPU: &str = "one CPU";

/// Class of figures of which every repeat was disturbed by other programs.
pub(super) const DISTURBED: &str = "disturbed";

const RING: &[Quantity] = &[Quantity { name: "median", unit: "ns/object", better: Better::Less }];
const POOL: &[Quantity] = &[Quantity { name: "median", unit: "ns/buffer", better: Better::Less }];
const PARSE: &[Quantity] = &[Quantity { name: "median", unit: "ns/frame", better: Better::Less }];
const HASH: &[Quantity] = &[Quantity { name: "median", unit: "ns/hash", better: Better::Less }];
const MERGE: &[Quantity] = &[
    Quantity { name: "gro", unit: "ns/frame", better: Better::Less },
    Quantity { name: "parse_gro", unit: "ns/frame", better: Better::Less },
    Quantity { name: "all", unit: "ns/frame", better: Better::Less },
];

/// Stage, and the programs that have it: arguments of `forebay bench`, each with a name, or a peer and its mode.
struct Stage {
    group: &'static str,
    quantities: &'static [Quantity],
    own: &'static [(&'static str, &'static str)],
    peers: &'static [(&'static str, Peer, &'static str)],
    /// Flows of a capture, and segments of one in a row.
    capture: Option<(u16, u16)>,
}

const STAGES: [Stage; 8] = [
    Stage {
        group: "ring from one CPU to another, 32 at once",
        quantities: RING,
        own: &[("forebay", "ring")],
        peers: &[("rte_ring", Peer::DpdkRing, "")],
        capture: None,
    },
    Stage {
        group: "buffer allocated on one CPU, freed on the other, 32 at once",
        quantities: POOL,
        own: &[("forebay", "pool")],
        peers: &[("rte_mempool", Peer::DpdkPool, "")],
        capture: None,
    },
    Stage {
        group: "headers of a frame of 60 bytes",
        quantities: PARSE,
        own: &[("forebay", "parse")],
        peers: &[("rte_net_get_ptype", Peer::DpdkParse, "")],
        capture: None,
    },
    Stage {
        group: "Toeplitz hash, IPv4",
        quantities: HASH,
        own: &[("forebay", "hash")],
        peers: &[
            ("rte_softrss_be", Peer::DpdkToeplitz, "soft4"),
            ("rte_thash_gfni", Peer::DpdkToeplitz, "gfni4"),
        ],
        capture: None,
    },
    Stage {
        group: "Toeplitz hash, IPv6",
        quantities: HASH,
        own: &[("forebay", "hash --v6")],
        peers: &[
            ("rte_softrss_be", Peer::DpdkToeplitz, "soft6"),
            ("rte_thash_gfni", Peer::DpdkToeplitz, "gfni6"),
        ],
        capture: None,
    },
    merged("segments merged, 1 flow", (1, 1)),
    merged("segments merged, 8 flows in runs", (8, 8)),
    merged("segments merged, 64 flows in turn", (64, 1)),
];

const fn merged(group: &'static str, capture: (u16, u16)) -> Stage {
    Stage {
        group,
        quantities: MERGE,
        own: &[("forebay", "lro"), ("forebay, hash by the device", "lro --hash given")],
        peers: &[("rte_gro", Peer::DpdkGro, "")],
        capture: Some(capture),
    }
}

pub(super) fn subjects(setting: &CompareSetting) -> Vec<Subject<'_>> {
    let mut subjects = Vec::new();
    let turn = TurnLength::Repeats { count: REPEATS, seconds_max: SECONDS };
    for Stage { group, quantities, own, peers, capture } in STAGES {
        let group = SubjectGroup { name: group, metrics: quantities, turn };
        for &(name, peer, mode) in peers {
            let measure = move || {
                let file = capture.map(|flows| segments_file(setting, flows)).transpose()?;
                let mode = file.map_or(mode.to_owned(), |file| file.display().to_string());
                dpdk(setting, peer, &mode, quantities)
            };
            subjects.push(Subject::new(group, Author::Peer, name, measure));
        }
        for &(name, args) in own {
            let measure = move || {
                let file = capture.map(|flows| segments_file(setting, flows)).transpose()?;
                bench(args, file, quantities)
            };
            subjects.push(Subject::new(group, Author::Forebay, name, measure));
        }
    }
    subjects
}

/// A capture of segments, written when it is first asked for.
fn segments_file(setting: &CompareSetting, (flows, run): (u16, u16)) -> Result<PathBuf, String> {
    let path = setting.peers.file(&format!("segments_{flows}_{run}.pcap"));
    if !path.exists() {
        fs::write(&path, segments::capture(flows, run)).map_err(|error| error.to_string())?;
    }
    Ok(path)
}

/// Runs a program of DPDK. Two of the peers' options have another sense here: `--flows` is the number of repeats, and
/// `--mode` may be a capture.
fn dpdk(
    setting: &CompareSetting,
    peer: Peer,
    mode: &str,
    quantities: &[Quantity],
) -> Result<TurnFigures, String> {
    let mut command = Command::new(setting.peers.program(peer)?);
    command.args(["--cpus", &dpdk_cpus(setting.cpus.of_bench()), "--mode", mode]);
    command.args(["--flows", &REPEATS.to_string(), "--window", &(SECONDS * 1000).to_string()]);
    figures(&StartedProgram::spawn(&mut command)?.result()?, quantities)
}

/// CPUs of a program of DPDK, in the order of `forebay bench`: the one that produces, or works alone, and the one that
/// consumes.
fn dpdk_cpus(cpus: CpuPair) -> String {
    let CpuPair { producer, consumer } = cpus;
    format!("{producer},{consumer}")
}

fn bench(own: &str, file: Option<PathBuf>, quantities: &[Quantity]) -> Result<TurnFigures, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    let args = format!("bench {own} --reps {REPEATS} --secs {SECONDS} --json");
    command.args(args.split(' ')).args(file);
    figures(&StartedProgram::spawn(&mut command)?.result()?, quantities)
}

/// Figures of a result: one for each class, or one alone; named ones have a spread each. Those of disturbed repeats have
/// a class that is compared with none.
fn figures(result: &Value, quantities: &[Quantity]) -> Result<TurnFigures, String> {
    let mut figures = TurnFigures::default();
    if let Some(classes) = result["classes"].as_object() {
        for (class, spread) in classes {
            let value = spread["median"].as_f64().ok_or("a class has no median")?;
            figures.add(quantities[0].name, TurnFigure { value, class: Some(class.clone()) });
        }
        return Ok(figures);
    }
    for Quantity { name, .. } in quantities {
        let spread = if result[name].is_object() { &result[name] } else { result };
        let value = spread["median"].as_f64();
        let value =
            value.ok_or_else(|| format!("the program's result has no figure {name}: {result}"))?;
        let class = if spread["all_disturbed"] == true { DISTURBED } else { ONE_CPU };
        figures.add(name, TurnFigure { value, class: Some(class.to_owned()) });
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use forebay_rx::CpuId;
    use serde_json::json;

    use super::super::CompareCpus;
    use super::*;
    use crate::bench::pair;

    #[test]
    fn cmp_4_dpdk_has_the_bench_cpus() {
        let allowed = [CpuId(4), CpuId(6), CpuId(7)];
        let bench = pair::two_of(&allowed).unwrap();
        let compared = CompareCpus::of(&allowed).unwrap();
        let expected = format!("{},{}", bench.producer, bench.consumer);
        assert_eq!(dpdk_cpus(compared.of_bench()), expected);
    }

    #[test]
    fn result_is_filed_by_class() {
        let of = |value: f64, class: &str| TurnFigure { value, class: Some(class.to_owned()) };
        let ring =
            json!({ "classes": { "far_l3": { "median": 9.0 }, "moved": { "median": 5.0 } } });
        let ring = figures(&ring, RING).unwrap().figures;
        assert_eq!(ring["median"], [of(9.0, "far_l3"), of(5.0, "moved")]);
        let hash = figures(&json!({ "median": 4.5 }), HASH).unwrap().figures;
        assert_eq!(hash["median"], [of(4.5, ONE_CPU)]);
        let merge = json!({ "gro": { "median": 1.0 }, "parse_gro": { "median": 2.0 } });
        assert!(figures(&merge, MERGE).unwrap_err().contains("no figure all"));
    }

    #[test]
    fn cmp_4_disturbed_figures_have_no_ratio() {
        let of = |value: f64, class: &str| TurnFigure { value, class: Some(class.to_owned()) };
        let hash = json!({ "median": 4.5, "all_disturbed": true });
        assert_eq!(figures(&hash, HASH).unwrap().figures["median"], [of(4.5, DISTURBED)]);
        let spread = |median: f64, all_disturbed: bool| json!({ "median": median, "all_disturbed": all_disturbed });
        let merge = json!({
            "all_disturbed": true, "gro": spread(1.0, true), "parse_gro": spread(2.0, false), "all": spread(3.0, false),
        });
        let merge = figures(&merge, MERGE).unwrap().figures;
        assert_eq!(merge["gro"], [of(1.0, DISTURBED)]);
        assert_eq!(
            [&merge["parse_gro"], &merge["all"]],
            [&[of(2.0, ONE_CPU)], &[of(3.0, ONE_CPU)]]
        );
    }
}
