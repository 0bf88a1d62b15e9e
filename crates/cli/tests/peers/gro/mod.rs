//! Coalescing, judged by `lro.jsonl`: by the expectations of the Linux self-test, by laws, and by
//! the kernel itself.

mod segment; //  frames, described by their special fields
mod damage; //   wrong lengths
mod around; //   tunnels around frames
mod case; //     frames sent, and permitted results
mod selftest; // the cases of Linux's gro.c
mod further; //  additional cases
mod wire; //     naive parsing and checksumming of frames
mod trace; //    the program's trace of coalescing
mod laws; //     properties of all packets
mod kernel; //   Linux's GRO, over a veth pair or in a guest
mod rig; //      namespaces and tools for the kernel
mod guest; //    a virtual machine with the modules that this kernel may lack

pub(crate) use kernel::{
    judge_bulk, judge_guest_tunnelled, judge_kernel, judge_kernel_outside, judge_kernel_tagged,
    judge_kernel_tunnelled, judge_kernel_vxlan, missing as kernel_missing, missing_guest,
    missing_vlans as kernel_missing_vlans, missing_vxlan as kernel_missing_vxlan,
};
use libtest_mimic::Failed;

use crate::Judgement;
use crate::gro::case::{Case, Expected};
use crate::gro::segment::{Family, Segment, Tags};
use crate::gro::trace::Left;
use crate::gro::wire::Wire;

pub(crate) const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];
const TAGS: [Tags; 3] = [Tags::None, Tags::Single, Tags::Double];

/// Cases of one kind, built from a segment with the fields that they share.
pub(crate) type Group = fn(&Segment) -> Vec<Case>;

/// Name and function of a trial.
pub(crate) type NamedTrial = (&'static str, fn() -> Judgement);

pub(crate) const TRIALS: [NamedTrial; 15] = [
    ("lro_8_data_matches_linux_selftest", || judge(selftest::data)),
    ("lro_8_ack_matches_linux_selftest", || judge(selftest::ack)),
    ("lro_8_flags_match_linux_selftest", || judge(selftest::flags)),
    ("lro_8_tcp_matches_linux_selftest", || judge(selftest::tcp)),
    ("lro_8_ip_matches_linux_selftest", || judge(selftest::ip)),
    ("lro_7_large_matches_linux_selftest", || judge(selftest::large)),
    ("lro_8_single_matches_linux_selftest", || judge(selftest::single)),
    ("lro_9_capacity_matches_linux_selftest", || judge(selftest::capacity)),
    ("lro_3_padding_is_trimmed", || judge(further::padding)),
    ("lro_8_sequences_wrap_and_must_be_contiguous", || judge(further::sequence)),
    ("promise_1_nothing_overtakes_an_ack", || judge(further::overtaking)),
    ("lro_9_eight_of_sixteen_flows_merge", || judge(further::flows)),
    ("lro_6_sizes_mix_and_fill_up_packets", || judge(further::sizes)),
    ("lro_8_udp_datagrams_merge", || judge(further::udp)),
    ("lro_4_malformed_frames_pass_alone", || judge(further::malformed)),
];

/// Judges a group for both families, each without a tag, with one and with two.
fn judge(group: Group) -> Judgement {
    let mut wrong = Vec::new();
    for (family, tags) in FAMILIES.into_iter().flat_map(|family| TAGS.map(|tags| (family, tags))) {
        for case in group(&Segment::first(family, tags, 0)) {
            let problems = match judge_case(&case) {
                Ok(problems) => problems,
                Err(failed) => vec![failed.message().unwrap_or("failed").to_owned()],
            };
            wrong.extend(
                problems.iter().map(|it| format!("{} {family:?} tags {tags:?}: {it}", case.name)),
            );
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// All violations in a case.
fn judge_case(case: &Case) -> Result<Vec<String>, Failed> {
    let sent = case.frames(0);
    let left = trace::coalesce(&sent, &["--deterministic", "--cpus", "1", "--rate", "capture"])?;
    let frames: Vec<_> = sent.iter().map(|(_, frame)| frame).collect();
    let mut wrong = laws::broken(&frames, &left);
    let merged = || left.iter().filter(|packet| packet.inputs.len() > 1);
    for alone in &case.alone {
        if merged().any(|packet| packet.inputs.contains(alone)) {
            wrong.push(format!("frame {alone} is merged"));
        }
    }
    // Packets of the segments that end the flows do not belong to the case.
    let own: Vec<_> = left
        .iter()
        .filter(|packet| packet.inputs.iter().any(|it| *it < case.segments.len()))
        .collect();
    wrong.extend(met(&case.expected, &own).err());
    Ok(wrong)
}

fn met(expected: &Expected, left: &[&Left]) -> Result<(), String> {
    let payloads = |left: &[&Left]| left.iter().map(|it| it.payload_len).collect::<Vec<_>>();
    match expected {
        Expected::Lawful => Ok(()),
        Expected::Payloads(accepted) => {
            let payloads = payloads(left);
            let is_met = accepted.contains(&payloads);
            is_met.then_some(()).ok_or(format!("payloads {payloads:?}, expected {accepted:?}"))
        }
        Expected::ByPort(ports) => ports.iter().try_for_each(|(port, expected)| {
            let is_of_it = |packet: &&&Left| {
                Wire::read(&packet.bytes).is_some_and(|wire| wire.source_port() == *port)
            };
            let of_it: Vec<_> = left.iter().filter(is_of_it).copied().collect();
            let payloads = payloads(&of_it);
            let is_met = payloads == *expected;
            is_met.then_some(()).ok_or(format!("{port}: {payloads:?}, expected {expected:?}"))
        }),
        Expected::Merged(least) => {
            let count = left.iter().filter(|packet| packet.inputs.len() > 1).count();
            (count >= *least).then_some(()).ok_or(format!("{count} merged, expected {least}"))
        }
    }
}
