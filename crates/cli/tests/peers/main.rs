//! Judges that are independent of the code under test: tshark for parsing, stamps in packets for
//! order and completeness, damage for the readers of captures, Linux for coalescing, for knobs and
//! for live devices, and another user.
//!
//! A judge whose tool is missing is reported as ignored, with the reason on standard error.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod compare; //     comparisons with installed peers
mod captures; //    capture files, written by another library
mod damage; //      captures with seeded damage
mod frames; //      frames of every kind
mod gro; //         coalescing, by laws and by the kernel
mod live; //        live devices, by the kernel and by well-known senders
mod journal; //     messages in a journal
mod knobs; //       strings written to knobs, by the kernel
mod browser; //     Chromium, driven by a test
mod metrics; //     metrics, by promtool and Prometheus
mod mount; //       the mounted knobs, by the kernel's own files
mod page; //        the page in Chromium
mod order; //       the traces of stamped packets
mod program; //     the program under test
mod stress; //      scripts that change all settings
mod second_user; // another user at the control socket
mod top; //         the terminal view, in tmux
mod tshark; //      every field, compared with tshark's
mod tunnels; //     the innermost flow, compared with tshark's

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = vec![judge("parse_agrees_with_tshark", tshark::missing(), tshark::judge)];
    trials.push(judge("flk_2_tshark_finds_the_same_flow", tshark::missing(), tunnels::judge));
    trials.extend([
        judge("promise_1_order_holds_with_flips_live", order::one_cpu(), order::judge_live),
        judge("promise_1_order_holds_with_flips_deterministic", None, order::judge_deterministic),
        judge("promise_1_order_holds_in_a_storm_live", order::one_cpu(), order::judge_storm_live),
        judge(
            "promise_1_order_holds_in_a_storm_deterministic",
            None,
            order::judge_storm_deterministic,
        ),
        judge("promise_5_damaged_captures_never_break_the_program", None, damage::judge),
    ]);
    trials.extend(gro::TRIALS.map(|(name, trial)| judge(name, None, trial)));
    let kernel = gro::kernel_missing();
    let tagged = gro::kernel_missing_vlans();
    let vxlan = kernel.clone().or_else(gro::kernel_missing_vxlan);
    trials.extend([
        judge("lro_t4_tunnels_agree_with_the_kernel", kernel.clone(), gro::judge_kernel_tunnelled),
        judge(
            "lro_t4_outer_fields_agree_with_the_kernel",
            kernel.clone(),
            gro::judge_kernel_outside,
        ),
        judge("lro_t4_vxlan_agrees_with_the_kernel", vxlan, gro::judge_kernel_vxlan),
        judge(
            "lro_t4_gre_and_geneve_agree_with_linux",
            gro::missing_guest(),
            gro::judge_guest_tunnelled,
        ),
        judge("lro_8_agrees_with_the_kernel", kernel.clone(), gro::judge_kernel),
        judge("lro_2_agrees_with_the_kernel_behind_tags", tagged, gro::judge_kernel_tagged),
        judge("lro_11_bulk_merges_as_in_kernel", kernel, gro::judge_bulk),
    ]);
    let name = "rps_8_knobs_answer_as_the_kernel_answers";
    trials.push(judge(name, knobs::missing(), knobs::judge));
    let mounts = mount::missing();
    for (name, trial) in mount::TRIALS {
        trials.push(judge(name, mounts.clone(), trial));
    }
    let name = "rps_8_a_second_user_controls_nothing";
    trials.push(judge(name, second_user::missing(), second_user::judge));
    for (name, trial, tool) in metrics::TRIALS {
        trials.push(judge(name, metrics::missing(tool), trial));
    }
    for (name, trial) in page::TRIALS {
        trials.push(judge(name, browser::missing().or_else(order::one_cpu), trial));
    }
    for (name, trial) in top::TRIALS {
        trials.push(judge(name, top::missing(), trial));
    }
    let name = "ops_1_journal_has_messages_and_fields";
    trials.push(judge(name, journal::missing(), journal::judge));
    let name = "cmp_2_rows_have_figures_or_reasons";
    trials.push(judge(name, live::missing(&[]), compare::judge_rows));
    let name = "cmp_2_signalled_group_ends_once";
    trials.push(judge(name, live::missing(&[]), compare::judge_signalled));
    for (tools, judges) in live::TRIALS {
        let missing = live::missing(tools);
        trials.extend(judges.iter().map(|(name, trial)| judge(name, missing.clone(), *trial)));
    }
    let missing = live::missing(&[]).or_else(live::fleet::missing);
    trials.extend(live::fleet::TRIALS.map(|(name, trial)| judge(name, missing.clone(), trial)));
    libtest_mimic::run(&arguments, trials).exit();
}

/// Result of a judge: success, or all violations.
type Judgement = Result<(), Failed>;

/// A trial that is ignored if something is `missing`.
fn judge(name: &str, missing: Option<String>, trial: fn() -> Judgement) -> Trial {
    let is_ignored = missing.is_some();
    if let Some(missing) = missing {
        eprintln!("{name} is ignored: {missing}");
    }
    Trial::test(name, trial).with_ignored_flag(is_ignored)
}
