//! Order of delivery, determined from the stamps in packets: every flow's packets ascend by
//! `order`, none is lost or duplicated, and a flow changes its CPU only when the old CPU has
//! processed all of it, while masks change under load.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::Path;

use etherparse::PacketBuilder;
use forebay_sys::random::Random;
use libtest_mimic::Failed;
use serde_json::Value;

use crate::frames::Frame;
use crate::{Judgement, captures, program, stress};

const FLOWS: [u32; 5] = [1, 7, 64, 512, 4096];
/// Initial counters: zero, and close to wrapping.
const START_COUNTERS: [&str; 2] = ["0", "4294966296"];

/// Frames between two changes of the mask.
const FLIP_FRAMES: usize = 500;

/// Minimum number of moves under load in all runs of a judge; fewer prove nothing.
const HAZARDS_MIN: usize = 1_000;

/// Shift from the hash to the default flow table's 4096 entries, which are indexed by the upper
/// bits.
const ENTRY_SHIFT: u32 = 32 - 12;

const ETHERNET_BYTES: usize = 14;

/// Configuration of a run.
struct Scene {
    frames: usize,
    args: &'static [&'static str],
    changes: Changes,
}

/// Changes during a run.
enum Changes {
    /// The mask, set to these values in turn.
    Masks(&'static [&'static str]),
    /// Any setting, on this many CPUs.
    Storm(u16),
}

const LIVE: Scene = Scene {
    frames: 80_000,
    args: &["--cpus", "2", "--rate", "500k", "--work", "2000"],
    changes: Changes::Masks(&["1", "2", "3"]),
};

const DETERMINISTIC: Scene = Scene {
    frames: 30_000,
    args: &["--deterministic", "--cpus", "4", "--rate", "600k", "--work", "2000"],
    changes: Changes::Masks(&["1", "c", "2", "f", "8", "5"]),
};

const STORM_LIVE: Scene = Scene {
    frames: 80_000,
    args: &["--cpus", "2", "--rate", "300k", "--work", "2000", "--hash", "toeplitz"],
    changes: Changes::Storm(2),
};

const STORM_DETERMINISTIC: Scene = Scene {
    frames: 30_000,
    args: &[
        "--deterministic",
        "--cpus",
        "4",
        "--rate",
        "600k",
        "--work",
        "2000",
        "--hash",
        "toeplitz",
    ],
    changes: Changes::Storm(4),
};

/// Reason why order cannot be violated here.
pub(crate) fn one_cpu() -> Option<String> {
    let cpus = forebay_sys::allowed_cpus().len();
    (cpus < 2).then(|| format!("it takes two CPUs, and {cpus} may be used"))
}

pub(crate) fn judge_live() -> Judgement {
    judge(&LIVE)
}

pub(crate) fn judge_deterministic() -> Judgement {
    judge(&DETERMINISTIC)
}

pub(crate) fn judge_storm_live() -> Judgement {
    judge(&STORM_LIVE)
}

pub(crate) fn judge_storm_deterministic() -> Judgement {
    judge(&STORM_DETERMINISTIC)
}

fn judge(scene: &Scene) -> Judgement {
    let directory = tempfile::tempdir()?;
    let mut all = Findings::default();
    for flows in FLOWS {
        let stamped = Stamped { flows, frames: scene.frames, padding_bytes: 0, has_ethernet: true };
        let sent = stamped.write(&directory.path().join("f.pcap"));
        for (start, seed) in START_COUNTERS.into_iter().zip(["3", "4"]) {
            let args = ["--start-counters", start, "--seed", seed];
            let Findings { moves, hazards } =
                run(scene, directory.path(), args, &sent).map_err(|failed| {
                    let problem = failed.message().unwrap_or_default();
                    format!("{flows} flows, {args:?}: {problem}")
                })?;
            all.moves += moves;
            all.hazards += hazards;
        }
    }
    if all.moves < HAZARDS_MIN || all.hazards < HAZARDS_MIN {
        return Err(format!("nothing is proved: {all:?}").into());
    }
    Ok(())
}

/// Source address of a flow.
pub(crate) fn source(flow: u32) -> [u8; 4] {
    let [.., high, low] = flow.to_be_bytes();
    [10, 1, high, low]
}
pub(crate) const DESTINATION: [u8; 4] = [10, 9, 0, 1];
pub(crate) const PORTS: (u16, u16) = (1024, 9000);

/// Stamped UDP: runs of one to eight frames of a flow, in order within each flow.
pub(crate) struct Stamped {
    pub(crate) flows: u32,
    pub(crate) frames: usize,
    /// Number of bytes after each stamp.
    pub(crate) padding_bytes: usize,
    /// True if the frames begin with an Ethernet header, false if with an IP header.
    pub(crate) has_ethernet: bool,
}

impl Stamped {
    /// Writes a capture. Returns the number of frames of each flow.
    pub(crate) fn write(&self, path: &Path) -> Vec<u64> {
        let mut random = Random::new(self.flows.into());
        let mut sent = vec![0; self.flows as usize];
        let mut stamped = Vec::new();
        while stamped.len() < self.frames {
            let flow = u32::try_from(random.below(self.flows.into())).unwrap();
            for _ in 0..random.between(1, 8) {
                let sequence: &mut u64 = &mut sent[flow as usize];
                stamped.push(self.stamp(flow, *sequence));
                *sequence += 1;
            }
        }
        let write = if self.has_ethernet { captures::write_pcap } else { captures::write_pcap_raw };
        write(path, &stamped);
        sent
    }

    fn stamp(&self, flow: u32, sequence: u64) -> Frame {
        let padding = vec![0; self.padding_bytes];
        let stamp = [&b"STMP"[..], &flow.to_be_bytes(), &sequence.to_be_bytes(), &padding];
        let mut bytes = Vec::new();
        PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4(source(flow), DESTINATION, 64)
            .udp(PORTS.0, PORTS.1)
            .write(&mut bytes, &stamp.concat())
            .unwrap();
        if !self.has_ethernet {
            bytes.drain(..ETHERNET_BYTES);
        }
        Frame { wire_len: u32::try_from(bytes.len()).unwrap(), bytes }
    }
}

fn run(scene: &Scene, directory: &Path, args: [&str; 4], sent: &[u64]) -> Result<Findings, Failed> {
    let script = match scene.changes {
        Changes::Masks(masks) => {
            let frames = (FLIP_FRAMES..scene.frames).step_by(FLIP_FRAMES);
            let flips = frames.zip(masks.iter().cycle());
            flips.map(|(frame, mask)| format!("{frame}:rps_cpus={mask}\n")).collect()
        }
        Changes::Storm(cpus) => stress::script(cpus, sent.len(), scene.frames),
    };
    fs::write(directory.join("script.txt"), script)?;
    let fixed = "f.pcap --json --spread always --trace t --script script.txt".split(' ');
    let output = program::replay(directory, fixed.chain(scene.args.iter().copied()).chain(args));
    if !output.status.success() {
        return Err(program::told(&output).into());
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let trace = Trace::read(&directory.join("t"))?;
    let (findings, lost) = trace.judge(sent)?;
    if lost > 0 {
        return Err(format!("{lost} packets are neither delivered nor dropped").into());
    }
    if let Changes::Masks(_) = scene.changes {
        trace.judge_entries()?;
    }
    let counted = [&report["delivered"], &trace.counters["delivered"]].map(Value::as_u64);
    if counted != [Some(trace.delivered.len() as u64); 2] {
        return Err(format!("{counted:?} counted, {} traced", trace.delivered.len()).into());
    }
    Ok(findings)
}

/// A line of `deliver.csv`.
struct Delivered {
    order: u64,
    flow: u32,
    sequence: u64,
    frame: u64,
    hash: u32,
    epoch: u32,
    cpu: u32,
    /// The backlog's tail counter after this packet.
    position: u32,
    /// The old backlog's head counter, if the packet moved its flow-table slot.
    head_old: Option<u32>,
    enqueued_ns: u64,
    processed_ns: u64,
}

/// A line of `drop.csv`.
struct Dropped {
    frame: u64,
    flow: u32,
    sequence: u64,
    /// True if its thread died with it.
    is_lost: bool,
}

struct Trace {
    delivered: Vec<Delivered>,
    dropped: Vec<Dropped>,
    /// Mask at the start of each epoch.
    masks: BTreeMap<u32, u32>,
    counters: Value,
}

/// Events without which a run proves nothing.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Packets that went to another CPU than their flow's previous one.
    pub(crate) moves: usize,
    /// Packets that arrived under a new mask while their flow's previous one was still queued.
    pub(crate) hazards: usize,
}

/// Judges the trace of a live run of one queue, to which `sent` packets of each flow were sent.
/// Also returns the number of packets that never arrived.
pub(crate) fn judge_trace(directory: &Path, sent: &[u64]) -> Result<(Findings, u64), Failed> {
    Trace::read(directory)?.judge(sent)
}

impl Trace {
    fn read(directory: &Path) -> Result<Self, Failed> {
        Ok(Self {
            delivered: rows(directory, "deliver.csv", Delivered::of)?,
            dropped: rows(directory, "drop.csv", Dropped::of)?,
            masks: rows(directory, "config.csv", mask)?.into_iter().flatten().collect(),
            counters: serde_json::from_slice(&fs::read(directory.join("counters.json"))?)?,
        })
    }

    /// Also returns the number of sent packets that were neither delivered nor dropped.
    fn judge(&self, sent: &[u64]) -> Result<(Findings, u64), Failed> {
        let lost = self.judge_completeness(sent)?;
        let mut flows: HashMap<u32, Vec<&Delivered>> = HashMap::new();
        for packet in &self.delivered {
            flows.entry(packet.flow).or_default().push(packet);
        }
        let mut findings = Findings::default();
        let died = self.dropped.iter().filter(|packet| packet.is_lost);
        let died: BTreeSet<_> = died.map(|packet| (packet.flow, packet.frame)).collect();
        for packets in flows.values_mut() {
            packets.sort_by_key(|packet| packet.order);
            for [before, packet] in packets.array_windows() {
                judge_pair(before, packet)?;
                findings.moves += usize::from(before.cpu != packet.cpu);
                let is_queued = before.processed_ns > packet.enqueued_ns;
                findings.hazards += usize::from(before.epoch != packet.epoch && is_queued);
                self.judge_mask(packet, Some(before), &died)?;
            }
            if let Some(first) = packets.first() {
                self.judge_mask(first, None, &died)?;
            }
        }
        Ok((findings, lost))
    }

    /// Checks that no stamp is delivered or dropped twice, or was never sent. Returns the number
    /// that are neither.
    fn judge_completeness(&self, sent: &[u64]) -> Result<u64, Failed> {
        let delivered = self.delivered.iter().map(|packet| (packet.flow, packet.sequence));
        let dropped = self.dropped.iter().map(|packet| (packet.flow, packet.sequence));
        let mut seen = HashSet::new();
        for stamp in delivered.chain(dropped) {
            if !seen.insert(stamp) {
                return Err(format!("flow, sequence {stamp:?} comes twice").into());
            }
            if sent.get(stamp.0 as usize).is_none_or(|count| stamp.1 >= *count) {
                return Err(format!("flow, sequence {stamp:?} was never sent").into());
            }
        }
        Ok(sent.iter().sum::<u64>() - seen.len() as u64)
    }

    /// Checks that a packet moves its flow-table entry only when the head counter has passed the
    /// entry's last packet, of whichever flow.
    fn judge_entries(&self) -> Judgement {
        let mut entries: HashMap<u32, Vec<&Delivered>> = HashMap::new();
        let mut entry_of = HashMap::new();
        for packet in &self.delivered {
            let entry = packet.hash >> ENTRY_SHIFT;
            entries.entry(entry).or_default().push(packet);
            entry_of.insert(packet.flow, entry);
        }
        let drops = self.dropped.iter();
        let drops: BTreeSet<_> =
            drops.filter_map(|drop| Some((*entry_of.get(&drop.flow)?, drop.frame))).collect();
        for (entry, packets) in &mut entries {
            packets.sort_by_key(|packet| packet.frame);
            for [before, packet] in packets.array_windows() {
                // A dropped packet between the two may already have moved the entry.
                let is_next =
                    drops.range((*entry, before.frame)..(*entry, packet.frame)).next().is_none();
                if let (Some(head), true) = (packet.head_old, is_next)
                    && head.wrapping_sub(before.position).cast_signed() < 0
                {
                    let (frame, position) = (packet.frame, before.position);
                    return Err(format!("frame {frame} moved at {head}, before {position}").into());
                }
            }
        }
        Ok(())
    }

    /// Checks that a packet is on a CPU of its epoch's mask, or behind one of its flow still
    /// queued.
    fn judge_mask(
        &self,
        packet: &Delivered,
        before: Option<&Delivered>,
        died: &BTreeSet<(u32, u64)>,
    ) -> Judgement {
        let mask =
            self.masks.range(..=packet.epoch).next_back().map_or(u32::MAX, |(_, mask)| *mask);
        let follows = before.is_some_and(|before| {
            before.cpu == packet.cpu && before.processed_ns > packet.enqueued_ns
        });
        // The batch of a thread that died was in the backlog until then, without a line of its own.
        let since = before.map_or(0, |before| before.frame);
        let places = (packet.flow, since)..(packet.flow, packet.frame);
        let follows = follows || died.range(places).next().is_some();
        if mask >> packet.cpu & 1 == 0 && !follows {
            return Err(format!(
                "frame {} is on CPU {}, outside {mask:x}",
                packet.frame, packet.cpu
            )
            .into());
        }
        Ok(())
    }
}

/// Lines of a file, without the header.
fn rows<T>(directory: &Path, name: &str, row: fn(&str) -> Option<T>) -> Result<Vec<T>, Failed> {
    let text = fs::read_to_string(directory.join(name))?;
    let parsed = |line| row(line).ok_or_else(|| format!("{name}: {line}").into());
    text.lines().skip(1).map(parsed).collect()
}

/// Judges two packets of a flow that were delivered one after the other.
fn judge_pair(before: &Delivered, packet: &Delivered) -> Judgement {
    if packet.sequence <= before.sequence || packet.frame <= before.frame {
        return Err(format!("frame {} was delivered behind {}", packet.frame, before.frame).into());
    }
    if packet.enqueued_ns > packet.processed_ns {
        return Err(format!("frame {} was processed before it was queued", packet.frame).into());
    }
    if packet.cpu != before.cpu && before.processed_ns > packet.enqueued_ns {
        return Err(
            format!("frame {} moved before {} was processed", packet.frame, before.frame).into()
        );
    }
    Ok(())
}

impl Delivered {
    fn of(line: &str) -> Option<Self> {
        let fields: Vec<_> = line.split(',').collect();
        let &[
            order,
            flow,
            sequence,
            _,
            frame,
            hash,
            epoch,
            cpu,
            position,
            head_old,
            _,
            enqueued,
            processed,
        ] = fields.as_slice()
        else {
            return None;
        };
        Some(Self {
            order: order.parse().ok()?,
            flow: flow.parse().ok()?,
            sequence: sequence.parse().ok()?,
            frame: frame.parse().ok()?,
            hash: u32::from_str_radix(hash, 16).ok()?,
            epoch: epoch.parse().ok()?,
            cpu: cpu.parse().ok()?,
            position: position.parse().ok()?,
            head_old: (!head_old.is_empty()).then(|| head_old.parse()).transpose().ok()?,
            enqueued_ns: enqueued.parse().ok()?,
            processed_ns: processed.parse().ok()?,
        })
    }
}

impl Dropped {
    fn of(line: &str) -> Option<Self> {
        let fields: Vec<_> = line.split(',').collect();
        let &[_, frame, reason, flow, sequence] = fields.as_slice() else { return None };
        Some(Self {
            frame: frame.parse().ok()?,
            flow: flow.parse().ok()?,
            sequence: sequence.parse().ok()?,
            is_lost: reason == "cpu_lost",
        })
    }
}

/// An epoch and the mask set at its start, if the change is of the mask.
fn mask(line: &str) -> Option<Option<(u32, u32)>> {
    let fields: Vec<_> = line.splitn(4, ',').collect();
    let &[_, epoch, what, value] = fields.as_slice() else { return None };
    let epoch = epoch.parse().ok()?;
    let mask = || Some((epoch, u32::from_str_radix(value, 16).ok()?));
    // Names of the knob in a script, and over the control socket.
    if ["rps_cpus", "rx-0/rps_cpus"].contains(&what) { mask().map(Some) } else { Some(None) }
}
