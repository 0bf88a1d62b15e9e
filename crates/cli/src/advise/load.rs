//! Load of a capture on the advised masks, with and without balancing.

use std::path::Path;

use comfy_table::CellAlignment;
use forebay_device::pcap::Capture;
use forebay_rx::CpuId;
use forebay_rx::hash::{FlowHash, Hasher, Indirection};
use forebay_rx::parse::{self, Verify, View};
use forebay_rx::steer::{BalanceConfig, BalancePreview, QueueTraffic, RpsMap};
use forebay_sys as sys;
use forebay_sys::cpu_list::CpuList;
use serde::Serialize;
use tracing::warn;

use crate::failure::Failure;
use crate::options::{HashOptions, check_queues};
use crate::records::{warn_of_damaged, warn_of_unread};
use crate::table::{counted, grouped};

/// Maximum number of packets that are read of a capture.
const PACKETS_MAX: usize = 1 << 24;

/// Load of a capture's packets, as if every packet took the same time.
#[derive(Serialize)]
pub(super) struct LoadAdvice {
    /// Number of packets with a flow.
    packets: u64,
    /// Number of different flow hashes.
    flows: u64,
    /// Share of the heaviest flow, in percent.
    heaviest_percent: u64,
    cpus: Vec<CpuShare>,
    /// Load of the busiest CPU in percent of the mean, with `rps_balance` off and on.
    busiest_percent: [u64; 2],
    /// Number of moves of hash ranges that balancing needs.
    moves: u32,
    rps_balance: BalanceAdvice,
}

/// Share of one CPU in percent of all packets.
#[derive(Serialize)]
struct CpuShare {
    cpu: u16,
    off: f64,
    load: f64,
}

#[derive(Serialize)]
struct BalanceAdvice {
    value: &'static str,
    why: String,
}

impl LoadAdvice {
    /// Reads a capture, and previews its load on these masks, one for each queue.
    pub(super) fn of(file: &Path, hash: &HashOptions, masks: &[CpuList]) -> Result<Self, Failure> {
        check_queues(masks.len())?;
        let hasher = hash.hasher(|| *sys::random_key().first_chunk().unwrap_or(&[0; 16]))?;
        let hashes = hashes_of(file, &hasher)?;
        let queue_count = u16::try_from(masks.len()).unwrap_or(u16::MAX);
        let indirection = Indirection::new(queue_count);
        let traffic = |mask: &CpuList| QueueTraffic {
            map: RpsMap::new(mask.cpus().iter().copied()),
            hashes: Vec::new(),
        };
        let mut queues: Vec<_> = masks.iter().map(traffic).collect();
        for hash in &hashes {
            queues[usize::from(indirection.queue(*hash).0)].hashes.push(*hash);
        }
        let config = BalanceConfig::default();
        let preview = BalancePreview::of(&queues, config);
        let busiest_percent = preview.busiest_percent(&queues);
        let (flows, heaviest) = flows_of(hashes);
        let packets: u64 = preview.before.iter().sum();
        let percent = |part: u64| part * 100 / packets.max(1);
        let advice = Self {
            packets,
            flows,
            heaviest_percent: percent(heaviest),
            cpus: shares(&queues, &preview, packets),
            busiest_percent,
            moves: preview.moves,
            rps_balance: BalanceAdvice { value: "off", why: String::new() },
        };
        Ok(Self { rps_balance: advice.recommend(config.target_percent.into()), ..advice })
    }

    fn recommend(&self, target_percent: u64) -> BalanceAdvice {
        let [before, after] = self.busiest_percent;
        let begins_at = 2 * target_percent - 100;
        let off = |why| BalanceAdvice { value: "off", why };
        if self.cpus.len() < 2 {
            return off("there is no second CPU to balance with".to_owned());
        }
        if before <= begins_at {
            return off(format!("the busiest CPU has {before} % of the mean, which is even"));
        }
        if after >= before {
            let Self { heaviest_percent, .. } = self;
            let is_heavy = heaviest_percent * self.cpus.len() as u64 * 10 >= before * 9;
            let reason = if is_heavy {
                format!("the heaviest flow alone has {heaviest_percent} % of all packets")
            } else {
                "the queues have different masks, or few flows".to_owned()
            };
            return off(format!(
                "the busiest CPU has {before} % of the mean, and no move would help: {reason}"
            ));
        }
        let moves = crate::table::counted(self.moves.into(), "move");
        let why = format!(
            "the busiest CPU gets {after} % of the mean instead of {before} %, after {moves} of \
             hash ranges"
        );
        BalanceAdvice { value: "load", why }
    }

    pub(super) fn render(&self) -> String {
        let Self { packets, flows, heaviest_percent, .. } = self;
        let rows = self.cpus.iter().map(|CpuShare { cpu, off, load }| {
            [cpu.to_string(), format!("{off:.1} %"), format!("{load:.1} %")]
        });
        let header = ["CPU", "rps_balance=off", "rps_balance=load"];
        let mut shares = super::table(header, rows);
        for column in shares.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let BalanceAdvice { value, why } = &self.rps_balance;
        let row = ["rps_balance".to_owned(), (*value).to_owned(), why.clone()];
        format!(
            "\nload of the capture: {} of {}, the heaviest with {heaviest_percent} %\n\n\
             {}\n\n{}",
            counted(*packets, "packet"),
            counted(*flows, "flow"),
            shares.trim_fmt(),
            super::aligned(["knob", "value", "why"], [row]),
        )
    }
}

/// Flow hashes of a capture's packets, in order.
fn hashes_of(file: &Path, hasher: &Hasher) -> Result<Vec<FlowHash>, Failure> {
    let mut reader = Capture::named(file.to_owned()).open()?;
    let mut hashes = Vec::new();
    while let Some(record) = reader.record()? {
        if hashes.len() == PACKETS_MAX {
            let packets = grouped(PACKETS_MAX as u64);
            warn!("only the first {packets} packets count: the capture has more");
            break;
        }
        if let Some(link) = record.link {
            let headers = parse::parse(record.bytes, record.wire_len, link, Verify::Nothing);
            let view = View::new(record.bytes, &headers);
            let hash = hasher.hash_of(&view, record.wire_len, FlowHash::NONE);
            hashes.extend(hash.is_some().then_some(hash));
        }
        reader.advance();
    }
    reader.verdict()?;
    warn_of_damaged(reader.damage().records, reader.damage().first.as_deref());
    for (link_type, count) in reader.unread() {
        warn_of_unread(&link_type, count, "not counted");
    }
    if hashes.is_empty() {
        let problem = format!("{}: no packet of it has a flow", file.display());
        return Err(Failure::usage(problem, "give a capture with IP packets"));
    }
    Ok(hashes)
}

/// Number of different flows, and packets of the heaviest one.
fn flows_of(mut hashes: Vec<FlowHash>) -> (u64, u64) {
    hashes.sort_unstable_by_key(|hash| hash.0);
    let flows = hashes.chunk_by(|one, next| one == next);
    flows.fold((0, 0), |(count, most), flow| (count + 1, most.max(flow.len() as u64)))
}

fn shares(queues: &[QueueTraffic], preview: &BalancePreview, packets: u64) -> Vec<CpuShare> {
    let percent = |part: u64| {
        // A tenth of a percent is as exact as any prediction can be.
        #[expect(clippy::cast_precision_loss, reason = "at most a thousand")]
        let mille = (part * 1_000 / packets.max(1)) as f64;
        mille / 10.0
    };
    let pairs = (0..).zip(preview.before.iter().zip(&preview.after));
    let is_mapped = |cpu: u16| queues.iter().any(|queue| queue.map.contains(CpuId(cpu)));
    let mapped = pairs.filter(|(cpu, _)| is_mapped(*cpu));
    let share = |(cpu, (before, after)): (u16, (&u64, &u64))| CpuShare {
        cpu,
        off: percent(*before),
        load: percent(*after),
    };
    mapped.map(share).collect()
}
