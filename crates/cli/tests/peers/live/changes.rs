//! Order of delivery on live devices, determined from stamps and traces, while everything changes
//! that can be changed over the control socket.

use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

use crate::live::Judge;
use crate::live::forwarding::{Link, Way};
use crate::live::program::Run;
use crate::live::sender::{Capture, Pace, play, settle};
use crate::order::{self, Findings, Stamped};
use crate::{Judgement, stress};

pub(crate) const TRIALS: [Judge; 5] = [
    ("promise_1_storm_keeps_order_by_native_xdp", || judge(Way::AfXdpNative)),
    ("promise_1_storm_keeps_order_by_generic_xdp", || judge(Way::AfXdpGeneric)),
    ("promise_1_storm_keeps_order_by_packet_socket", || judge(Way::AfPacket)),
    ("promise_1_storm_keeps_order_by_tap", || judge(Way::Tap)),
    ("promise_1_storm_keeps_order_by_tun", || judge(Way::Tun)),
];

const FLOWS: u32 = 64;
const FRAMES: usize = 80_000;
const PPS: u32 = 40_000;

/// Minimum number of packets that went to another CPU than the one before; fewer prove nothing.
const MOVES_MIN: usize = 100;
/// Minimum number of packets that arrived under new rules while the one before was still queued.
const HAZARDS_MIN: usize = 100;
const ROUNDS_MAX: usize = 8;

/// Time for which a CPU pauses before and after a change, so that some packets are queued.
const NAP: Duration = Duration::from_millis(2);

const ARGS: [&str; 8] = ["--cpus", "2", "--spread", "always", "--hash", "toeplitz", "--trace", "t"];

/// Repeats until enough is proved: on a busy machine, packets may not be queued at the right time.
fn judge(way: Way) -> Judgement {
    let mut all = Findings::default();
    for _ in 0..ROUNDS_MAX {
        let Findings { moves, hazards } = judge_round(way)?;
        all.moves += moves;
        all.hazards += hazards;
        if all.moves >= MOVES_MIN && all.hazards >= HAZARDS_MIN {
            return Ok(());
        }
    }
    Err(format!("nothing is proved: {all:?}").into())
}

fn judge_round(way: Way) -> Result<Findings, Failed> {
    let link = Link::new(way)?;
    let has_ethernet = way.has_ethernet();
    let stamped = Stamped { flows: FLOWS, frames: FRAMES, padding_bytes: 0, has_ethernet };
    let capture = Capture::of(&stamped)?;
    let mut run = Run::start(&link.near, link.args(&ARGS))?;
    let sent = thread::scope(|scope| {
        let sender = scope.spawn(|| play(&link, &capture, Pace::Packets(PPS), 1));
        change_all(&run)?;
        sender.join().map_err(|_| "the sender has panicked")?
    })?;
    settle();
    let report = run.stop()?;
    let (findings, missing) = order::judge_trace(&run.directory().join("t"), &capture.flows)?;
    let lost = link.lost(report.number("kernel_dropped")?)?;
    if missing != lost || sent != capture.flows.iter().sum::<u64>() {
        let report = report.value();
        return Err(format!("of {sent}, {missing} are missing, {lost} dropped: {report}").into());
    }
    Ok(findings)
}

/// Makes each change of a storm when its frame is due. At each change of the mask one CPU is
/// paused, with packets queued for it.
fn change_all(run: &Run) -> Judgement {
    let begin = Instant::now();
    for (line, cpu) in stress::script(2, FLOWS as usize, FRAMES).lines().zip([0, 1].iter().cycle())
    {
        let (frame, change) = line.split_once(':').ok_or("a line without a frame")?;
        let due = Duration::from_secs(1) * frame.parse()? / PPS;
        thread::sleep(due.saturating_sub(begin.elapsed()));
        let (what, value) = change.split_once('=').ok_or("a change without a value")?;
        match what {
            "pause" | "resume" | "kill" => run.asks(&format!("{what} {value}"))?,
            "rfs_desired" => run.asks(&format!("{what} {}", value.replace(':', " ")))?,
            "rps_cpus" => {
                run.asks(&format!("pause {cpu}"))?;
                thread::sleep(NAP);
                run.asks(&format!("set {what} {value}"))?;
                thread::sleep(NAP);
                run.asks(&format!("resume {cpu}"))?
            }
            _ => run.asks(&format!("set {what} {value}"))?,
        };
    }
    Ok(())
}
