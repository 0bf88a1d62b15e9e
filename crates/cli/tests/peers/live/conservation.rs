//! Conservation: frames sent by tcpreplay equal the frames delivered, those dropped by us with a
//! reason and those counted as dropped by the kernel, at a rate below capacity and at one far
//! above.

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{Link, Way};
use crate::live::program::Run;
use crate::live::sender::{Capture, Pace, generate, judge_sum, play, settle};

pub(crate) const TRIALS: [Judge; 5] = [
    ("promise_2_native_xdp_is_accounted_for", || judge(Way::AfXdpNative)),
    ("promise_2_generic_xdp_is_accounted_for", || judge(Way::AfXdpGeneric)),
    ("promise_2_packet_socket_is_accounted_for", || judge(Way::AfPacket)),
    ("promise_2_tap_is_accounted_for", || judge(Way::Tap)),
    ("promise_2_tun_is_accounted_for", || judge(Way::Tun)),
];

/// Judges for ways with several queues.
pub(crate) const OF_QUEUES: [Judge; 1] =
    [("promise_2_several_queues_are_accounted_for", judge_queues)];

const QUEUES: u16 = 2;
const FRAMES_OF_QUEUES: u64 = 100_000;

/// Rate below every way's capacity, in packets per second.
const SLOW_PPS: u32 = 20_000;

/// Repeats of the capture: more bytes than any ring holds.
const LOOPS: u32 = 10;
const PADDING_BYTES: usize = 1000;

fn judge(way: Way) -> Judgement {
    judge_slow(way)?;
    judge_fast(way)
}

fn judge_slow(way: Way) -> Judgement {
    let link = Link::new(way)?;
    let capture = Capture::write(way, 0)?;
    let mut run = Run::start(&link.near, link.args(&["--cpus", "2"]))?;
    let sent = play(&link, &capture, Pace::Packets(SLOW_PPS), 1)?;
    settle();
    let report = run.stop()?;
    judge_sum(&link, &report, sent)?;
    if report.number("delivered")? == 0 {
        return Err(format!("nothing was delivered: {}", report.value()).into());
    }
    Ok(())
}

/// The delivering CPU is paused, so that we drop. Then the program is, so that the kernel drops.
fn judge_fast(way: Way) -> Judgement {
    let link = Link::new(way)?;
    let capture = Capture::write(way, PADDING_BYTES)?;
    let mut run = Run::start(&link.near, link.args(&["--cpus", "2", "--rps", "2"]))?;
    let play_all = |loops| play(&link, &capture, Pace::TopSpeed, loops);
    run.asks("pause 1")?;
    let mut sent = play_all(1)?;
    run.signal("STOP")?;
    sent += play_all(LOOPS)?;
    run.signal("CONT")?;
    sent += play_all(1)?;
    run.asks("resume 1")?;
    sent += play_all(1)?;
    settle();
    let report = run.stop()?;
    judge_sum(&link, &report, sent)?;
    let seen = [report.dropped()?, report.number("kernel_dropped")?, report.number("delivered")?];
    if seen.contains(&0) {
        return Err(format!("not far above what is taken: {}", report.value()).into());
    }
    Ok(())
}

/// Each queue gets a share of many flows, and nothing is counted twice.
fn judge_queues() -> Judgement {
    for way in [Way::AfXdpNative, Way::AfXdpGeneric, Way::AfPacket, Way::Tap] {
        let link = Link::with_queues(way, QUEUES)?;
        let args = ["--cpus", "2", "--queues", "2"];
        let mut run = Run::start(&link.near, link.args(&args))?;
        let sent = generate(&link, FRAMES_OF_QUEUES)?;
        settle();
        let report = run.stop()?;
        judge_sum(&link, &report, sent)?;
        let queues = report.value()["devices"][0]["queues"].as_array();
        let packets = queues.into_iter().flatten().filter_map(|queue| queue["packets"].as_u64());
        let packets: Vec<_> = packets.collect();
        let came_in = report.number("packets_in")?;
        // Without NAPI, as with generic XDP only, a veth does not report the receive queue.
        let is_shared = way == Way::AfXdpGeneric || !packets.contains(&0);
        let is_shared = is_shared && packets.len() == usize::from(QUEUES);
        if !is_shared || packets.iter().sum::<u64>() != came_in {
            return Err(format!("{way:?}: {came_in} came in, {packets:?} by queues").into());
        }
    }
    Ok(())
}
