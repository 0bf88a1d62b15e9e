//! Linux's own GRO, given the same frames. Timing can only make it merge less, so the try that
//! merged most counts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use libtest_mimic::Failed;

use crate::frames::Frame;
use crate::gro::around::{self, Around};
use crate::gro::case::{Case, Expected};
use crate::gro::guest;
use crate::gro::rig::{self, Asked, Rig};
use crate::gro::segment::{END, Family, Segment, Tags};
use crate::gro::wire::{FIN, Wire};
use crate::gro::{FAMILIES, Group, further, selftest, trace};
use crate::{Judgement, captures};

/// Upper bound on tries for cases that the kernel still merges less than we do.
const TRIES: usize = 40;
const TRIES_OF_ALL: usize = 8;

/// Time of the first frame: tcpreplay treats zero as missing.
const BEGIN: Duration = Duration::from_secs(1);

/// Segments of a bulk transfer: 90 full packets.
const BULK_SEGMENTS: usize = 4000;
const BULK_SEGMENT_BYTES: usize = 1448;
/// A timestamp option as in bulk transfers.
const TIMESTAMP: &[u8] = &[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];

/// Groups compared with the kernel. Left out are padding, which the kernel leaves to the device,
/// and damage.
const GROUPS: [Group; 13] = [
    selftest::data,
    selftest::ack,
    selftest::flags,
    selftest::tcp,
    selftest::ip,
    selftest::large,
    selftest::single,
    selftest::capacity,
    further::sequence,
    further::overtaking,
    further::flows,
    further::sizes,
    further::udp,
];

/// Cases in which Linux differs, and the reason. The table of cases still defines our result.
const DIFFERENCES: [(&str, &str); 3] = [
    ("sixteen_flows", "Linux holds 64 flows, in buckets, where LRO has eight descriptors"),
    ("mixed_mtu", "of 58 frames in a row timing tears some apart, on a bad day in every try"),
    ("udp_at_most_64", "as seen with 6.18, the 65th passes alone, and only then a packet begins"),
];

/// Further differences of a guest's kernel (6.1).
const DIFFERENCES_OF_GUEST: [(&str, &str); 2] = [
    ("flags_cwr", "6.1 goes on behind a segment with CWR; 6.18 does not"),
    ("large_max", "Linux counts tags in band as part of a packet's 65,535 bytes"),
];

/// Groups for each tunnel that needs a guest, which is slow.
const GROUPS_IN_GUEST: [Group; 5] =
    [selftest::data, selftest::ack, selftest::flags, selftest::tcp, further::udp];

/// Payload lengths of each flow's packets.
type Flows = BTreeMap<Vec<u8>, Vec<usize>>;

pub(crate) fn missing() -> Option<String> {
    rig::missing()
}

/// Reason why VLANs cannot be compared: without this module, GRO does not look behind a tag, and a
/// guest is asked instead.
pub(crate) fn missing_vlans() -> Option<String> {
    if knows_vlans() { rig::missing() } else { rig::missing().or_else(guest::missing) }
}

fn knows_vlans() -> bool {
    Path::new("/proc/net/vlan").exists()
}

/// Reason why a guest cannot be asked.
pub(crate) fn missing_guest() -> Option<String> {
    rig::missing().or_else(guest::missing)
}

/// VXLAN is merged where a device opens it.
pub(crate) fn missing_vxlan() -> Option<String> {
    let refused = Asked::Own.rig(Around::Vxlan { is_summed: false }).err()?;
    let reason = refused.message().unwrap_or_default();
    Some(format!("this kernel has no VXLAN (CONFIG_VXLAN): {reason}"))
}

pub(crate) fn judge_kernel() -> Judgement {
    FAMILIES
        .into_iter()
        .try_for_each(|family| judge(&Asked::Own, family, Tags::None, Around::Nothing, &GROUPS))
}

/// IPIP, 6in4, 4in6 and IPv6 in IPv6.
pub(crate) fn judge_kernel_tunnelled() -> Judgement {
    let both = |family| around::WITHOUT_DEVICE.map(|around| (family, around));
    let mut all = FAMILIES.into_iter().flat_map(both);
    all.try_for_each(|(family, around)| judge_around(&Asked::Own, family, around, &GROUPS))
}

/// The IPv4 header outside, by what may differ there and what may not.
pub(crate) fn judge_kernel_outside() -> Judgement {
    let mut all = around::OUTSIDE.into_iter();
    all.try_for_each(|around| judge_around(&Asked::Own, Family::Ipv4, around, &[selftest::data]))
}

pub(crate) fn judge_kernel_vxlan() -> Judgement {
    let both = |family| around::WITH_VXLAN.map(|around| (family, around));
    let mut all = FAMILIES.into_iter().flat_map(both);
    all.try_for_each(|(family, around)| judge_around(&Asked::Own, family, around, &GROUPS))
}

/// GRE and GENEVE around IPv4, and around IPv6 those without a checksum, in one guest.
pub(crate) fn judge_guest_tunnelled() -> Judgement {
    let guest = Asked::guest()?;
    let around_v4 = around::OF_GUEST.map(|around| (Family::Ipv4, around));
    let around_v6 = around::OF_GUEST.into_iter().filter(|around| !around.is_summed());
    let mut all = around_v4.into_iter().chain(around_v6.map(|around| (Family::Ipv6, around)));
    all.try_for_each(|(family, around)| judge_around(&guest, family, around, &GROUPS_IN_GUEST))
}

/// In a tunnel whose headers outside go on as they should, all is merged as it is without.
fn judge_around(asked: &Asked, family: Family, around: Around, groups: &[Group]) -> Judgement {
    let first = Segment::first(family, Tags::None, 0);
    let cases: Vec<_> = cases_of(&first, around, groups);
    let (inside, plain) = (ask_ours(&cases, around)?, ask_ours(&cases, Around::Nothing)?);
    // Ids outside rise from frame to frame, so flows that take turns part.
    let of_one_flow = plain.iter().filter(|(_, flows)| flows.len() == 1);
    let others: Vec<_> = of_one_flow.filter(|(number, flows)| inside[number] != **flows).collect();
    if others.is_empty() == around.parts() {
        return Err(format!("{family:?} {around:?}: not as without it: {others:?}").into());
    }
    judge(asked, family, Tags::None, around, groups)
}

fn cases_of(first: &Segment, around: Around, groups: &[Group]) -> Vec<Case> {
    let cases = groups.iter().flat_map(|group| group(first));
    cases.filter(|case| case.fits(around)).collect()
}

pub(crate) fn judge_kernel_tagged() -> Judgement {
    let asked = if knows_vlans() { Asked::Own } else { Asked::guest()? };
    let both = |family| [Tags::Single, Tags::Double].map(|tags| (family, tags));
    FAMILIES
        .into_iter()
        .flat_map(both)
        .try_for_each(|(family, tags)| judge(&asked, family, tags, Around::Nothing, &GROUPS))
}

fn judge(asked: &Asked, family: Family, tags: Tags, around: Around, groups: &[Group]) -> Judgement {
    let first = Segment::first(family, tags, 0);
    let cases = cases_of(&first, around, groups);
    let ours = ask_ours(&cases, around)?;
    let agrees = |number: u8, theirs: &Flows| {
        let (case, ours) = (&cases[usize::from(number) - 1], &ours[&number]);
        let further = if asked.is_guest() { DIFFERENCES_OF_GUEST.as_slice() } else { &[] };
        let is_stated = DIFFERENCES.iter().chain(further).any(|(name, _)| *name == case.name);
        ours == theirs || is_stated || are_versions(case, ours, theirs)
    };
    let mut wrong = Vec::new();
    for (number, theirs) in ask_kernel(asked, &cases, around, agrees)? {
        if !agrees(number, &theirs) {
            let name = cases[usize::from(number) - 1].name;
            let [ours, theirs] =
                [&ours[&number], &theirs].map(|it| it.values().collect::<Vec<_>>());
            wrong.push(format!(
                "{name} {family:?} {around:?} tags {tags:?}: {ours:?}, Linux {theirs:?}"
            ));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// A bulk transfer is merged into no more packets than Linux does (LRO-11).
pub(crate) fn judge_bulk() -> Judgement {
    for family in FAMILIES {
        let first = Segment::first(family, Tags::None, 0).tcp_options(TIMESTAMP);
        let segment = |index: usize| {
            let identification = u16::try_from(index).unwrap();
            let segment = first.at(index * BULK_SEGMENT_BYTES).len(BULK_SEGMENT_BYTES);
            segment.identification(identification, true)
        };
        let segments: Vec<_> = (0..BULK_SEGMENTS).map(segment).collect();
        let expected = Expected::Lawful;
        let bulk = [Case { name: "bulk", segments, expected, alone: Vec::new() }];
        let theirs = packets(&ask_kernel(&Asked::Own, &bulk, Around::Nothing, |_, _| true)?[&1]);
        let ours = packets(&ask_ours(&bulk, Around::Nothing)?[&1]);
        if ours == 0 || ours > theirs {
            return Err(format!("{family:?}: {ours} packets, Linux {theirs}").into());
        }
    }
    Ok(())
}

/// True if a case permits several results because versions of Linux differ.
fn are_versions(case: &Case, ours: &Flows, theirs: &Flows) -> bool {
    let Expected::Payloads(accepted) = &case.expected else { return false };
    [ours, theirs]
        .iter()
        .all(|flows| accepted.contains(&flows.values().flatten().copied().collect()))
}

/// Results of the program by case, with one replay per case.
fn ask_ours(cases: &[Case], around: Around) -> Result<BTreeMap<u8, Flows>, Failed> {
    let args = ["--deterministic", "--cpus", "1", "--rate", "capture"];
    let ask = |(number, case): (u8, &Case)| {
        let left = trace::coalesce(&wrapped(&case.frames(number), around), &args)?;
        if let Some(packet) = left.iter().find(|packet| !around.is_sound(&packet.bytes)) {
            return Err(format!("{}: {:?} is not sound", case.name, packet.inputs).into());
        }
        let packets: Vec<_> = left.iter().map(|packet| around.unwrap(&packet.bytes)).collect();
        Ok((number, flows_of(&packets).remove(&number).unwrap_or_default()))
    };
    (1..).zip(cases).map(ask).collect()
}

/// Results of the kernel by case, the best of all tries. After a few tries, only cases that are not
/// `settled` are repeated.
fn ask_kernel(
    kernel: &Asked,
    cases: &[Case],
    around: Around,
    settled: impl Fn(u8, &Flows) -> bool,
) -> Result<BTreeMap<u8, Flows>, Failed> {
    let directory = tempfile::tempdir()?;
    let capture = directory.path().join("f.pcap");
    let mut rig = kernel.rig(around)?;
    let mut best: BTreeMap<u8, Flows> = BTreeMap::new();
    for round in 0..TRIES {
        let is_asked = |number: u8| {
            round < TRIES_OF_ALL || best.get(&number).is_none_or(|best| !settled(number, best))
        };
        let asked: Vec<_> = (1..).zip(cases).filter(|(number, _)| is_asked(*number)).collect();
        if asked.is_empty() {
            break;
        }
        let (timed, at_once): (Vec<_>, Vec<_>) =
            asked.into_iter().partition(|(_, case)| case.is_timed());
        let mut frames = Vec::new();
        for (cases, is_timed) in [(at_once, false), (timed, true)] {
            let row = in_a_row(&cases);
            captures::write_pcap_at(&capture, &wrapped(&row, around));
            if !row.is_empty() {
                rig.play(&capture, is_timed)?;
            }
            frames.extend(row);
        }
        let sent: Vec<_> = frames.into_iter().map(|(_, frame)| frame.bytes).collect();
        let Some(seen) = watch(&rig, &sent, around) else {
            // Late packets must not be counted for the next try.
            rig = kernel.rig(around)?;
            continue;
        };
        let sent = flows_of(&sent);
        for (number, flows) in flows_of(&seen) {
            // A try that lost packets proves nothing.
            let is_whole = sent.get(&number).is_some_and(|sent| totals(sent) == totals(&flows));
            let is_better = |best: &Flows| {
                let [new, old] = [&flows, best].map(merging);
                // Of two that merge as much, one may have been parted where a poll of the kernel ended.
                new > old || new == old && settled(number, &flows)
            };
            if is_whole && best.get(&number).is_none_or(is_better) {
                best.insert(number, flows);
            }
        }
    }
    kernel.give_back(rig);
    let numbers = (1..).zip(cases).map(|(number, _)| number);
    let silent: Vec<u8> = numbers.filter(|number| !best.contains_key(number)).collect();
    if silent.is_empty() { Ok(best) } else { Err(format!("never seen whole: {silent:?}").into()) }
}

/// Frames in a tunnel.
fn wrapped(frames: &[(Duration, Frame)], around: Around) -> Vec<(Duration, Frame)> {
    let wrap =
        |(number, (time, frame)): (u16, &(Duration, Frame))| (*time, around.wrap(frame, number));
    (0..).zip(frames).map(wrap).collect()
}

/// All cases, one after another.
fn in_a_row(cases: &[(u8, &Case)]) -> Vec<(Duration, Frame)> {
    let mut all: Vec<(Duration, Frame)> = Vec::new();
    for (number, case) in cases {
        let begin = all.last().map_or(BEGIN, |(time, _)| *time);
        all.extend(case.frames(*number).into_iter().map(|(time, frame)| (begin + time, frame)));
    }
    all
}

/// All packets up to the ends of all flows. `None` if an end is missing.
fn watch(rig: &Rig, sent: &[Vec<u8>], around: Around) -> Option<Vec<Vec<u8>>> {
    let ends = sent.iter().filter_map(|bytes| Wire::read(bytes)).filter(is_end);
    let mut ends: BTreeSet<_> = ends.map(|wire| wire.flow()).collect();
    let mut seen = Vec::new();
    while !ends.is_empty() {
        let bytes = around.unwrap(&rig.receive()?);
        if let Some(end) = Wire::read(&bytes).filter(is_end) {
            ends.remove(&end.flow());
        }
        seen.push(bytes);
    }
    Some(seen)
}

/// Packets by case and flow, without the segments that end flows.
fn flows_of(packets: &[Vec<u8>]) -> BTreeMap<u8, Flows> {
    let mut cases: BTreeMap<u8, Flows> = BTreeMap::new();
    for wire in packets.iter().filter_map(|bytes| Wire::read(bytes)).filter(|wire| !is_end(wire)) {
        let flow = cases.entry(wire.case()).or_default().entry(wire.flow()).or_default();
        flow.push(wire.payload().len());
    }
    cases
}

fn is_end(wire: &Wire) -> bool {
    let is_empty_fin = wire.flags() & FIN != 0 && wire.payload().is_empty();
    if wire.is_tcp { is_empty_fin } else { wire.payload().starts_with(END) }
}

fn packets(flows: &Flows) -> usize {
    flows.values().map(Vec::len).sum()
}

/// Order of results: larger for fewer packets and, if equal, for fuller early packets.
fn merging(flows: &Flows) -> usize {
    flows.values().flatten().map(|len| len * len).sum()
}

/// Totals that merging does not change: bytes of each flow, and its packets without payload.
fn totals(flows: &Flows) -> Vec<(usize, usize)> {
    let total = |packets: &Vec<usize>| {
        (packets.iter().sum(), packets.iter().filter(|len| **len == 0).count())
    };
    flows.values().map(total).collect()
}
