//! `compare receive`: packets a second that arrive from a flood of 60-byte UDP frames.
//!
//! The sender has the second CPU, where a veth's receive softirq also runs unless the kernel steers
//! it away. The receiver has the first.

use std::process::Command;

use forebay_sys::cpu_list::CpuList;
use serde_json::Value;

use super::child::StartedProgram;
use super::network::{KernelSteering, Network, PORT, RECEIVER, SENDER, TO_NOBODY, TO_RECEIVER};
use super::peers::Peer;
use super::subject::{Author, Better, Quantity, Subject, SubjectGroup, TurnFigures, TurnLength};
use super::{CompareCpus, CompareSetting};

const QUANTITIES: &[Quantity] = &[
    Quantity { name: "received", unit: "thousand packets/s", better: Better::More },
    Quantity { name: "CPU time of the receiver", unit: "ns/packet", better: Better::Less },
];

/// Size of the kernel's flow tables with RFS.
pub(super) const RFS_FLOWS: u32 = 32_768;

/// Steering by the kernel or by XDP in front of a receiver.
#[derive(Clone, Copy)]
enum FloodSteering {
    Off,
    Rps,
    RpsBoth,
    Rfs,
    Cpumap,
    CpumapBoth,
}

impl FloodSteering {
    fn kernel(self, setting: &CompareSetting) -> KernelSteering {
        let CompareCpus { sender, receiver } = setting.cpus;
        match self {
            Self::Off | Self::Cpumap | Self::CpumapBoth => KernelSteering::default(),
            Self::Rps => KernelSteering { mask: CpuList::new([receiver]), flows: 0 },
            Self::RpsBoth => KernelSteering { mask: CpuList::new([sender, receiver]), flows: 0 },
            Self::Rfs => {
                KernelSteering { mask: CpuList::new([sender, receiver]), flows: RFS_FLOWS }
            }
        }
    }

    /// CPUs of a cpumap.
    fn cpumap(self, setting: &CompareSetting) -> Option<String> {
        let CompareCpus { sender, receiver } = setting.cpus;
        match self {
            Self::Off | Self::Rps | Self::RpsBoth | Self::Rfs => None,
            Self::Cpumap => Some(receiver.to_string()),
            Self::CpumapBoth => Some(format!("{sender},{receiver}")),
        }
    }
}

/// Receiving program.
enum FloodReceiver {
    Peer(Peer, &'static str),
    /// Arguments of `forebay compare-own`.
    Own(&'static str),
}

/// All that a turn needs.
struct FloodTurn {
    to: &'static str,
    steering: FloodSteering,
    receiver: FloodReceiver,
    /// True if the receiver has both CPUs.
    on_both: bool,
}

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = std::rc::Rc::new(Network::pair()?);
    let mut subjects = Vec::new();
    let mut add = |group, author, name: &str, turn: FloodTurn| {
        let network = std::rc::Rc::clone(&network);
        let measure = move || measure(setting, &network, &turn);
        let length = TurnLength::window(setting.window);
        let group = SubjectGroup { name: group, metrics: QUANTITIES, turn: length };
        subjects.push(Subject::new(group, author, name, measure));
    };
    for (name, mode, steering) in [
        ("kernel, blocking", "block", FloodSteering::Off),
        ("kernel, spinning", "spin", FloodSteering::Off),
        ("kernel, RPS to the reader's CPU", "block", FloodSteering::Rps),
        ("kernel, RPS to both CPUs", "block", FloodSteering::RpsBoth),
        ("kernel, RFS", "block", FloodSteering::Rfs),
        ("kernel, XDP cpumap to the reader's CPU", "block", FloodSteering::Cpumap),
        ("kernel, XDP cpumap to both CPUs", "block", FloodSteering::CpumapBoth),
    ] {
        let receiver = FloodReceiver::Peer(Peer::Udp, mode);
        let turn = FloodTurn { to: TO_RECEIVER, steering, receiver, on_both: false };
        add("UDP socket", Author::Peer, name, turn);
    }
    for (name, own, on_both) in [
        ("forebay, over AF_XDP", "udp-count --via af_xdp", false),
        ("forebay, over AF_PACKET", "udp-count --via af_packet", false),
        ("forebay, over AF_XDP, 2 CPUs, balanced", "udp-count --via af_xdp --balance", true),
    ] {
        add("UDP socket", Author::Forebay, name, own_turn(TO_RECEIVER, own, on_both));
    }
    for (group, name, peer, mode, on_both) in [
        ("AF_PACKET", "TPACKET_V3", Peer::Packet, "ring", false),
        ("AF_PACKET", "TPACKET_V3, fanout of 2 threads", Peer::Packet, "ring", true),
        ("AF_PACKET", "recvmmsg", Peer::Packet, "messages", false),
        ("AF_XDP", "libxdp, spinning", Peer::Xsk, "spin", false),
        ("AF_XDP", "libxdp, poll", Peer::Xsk, "poll", false),
    ] {
        let receiver = FloodReceiver::Peer(peer, mode);
        let turn = FloodTurn { to: TO_NOBODY, steering: FloodSteering::Off, receiver, on_both };
        add(group, Author::Peer, name, turn);
    }
    for (group, name, own, on_both) in [
        ("AF_PACKET", "forebay", "count --via af_packet", false),
        (
            "AF_PACKET",
            "forebay, ring of frames",
            "count --via af_packet --packet-ring frames",
            false,
        ),
        ("AF_PACKET", "forebay, 2 CPUs", "count --via af_packet", true),
        ("AF_XDP", "forebay", "count --via af_xdp", false),
        ("AF_XDP", "forebay, 2 CPUs", "count --via af_xdp", true),
        ("AF_XDP", "forebay, 2 CPUs, balanced", "count --via af_xdp --balance", true),
    ] {
        add(group, Author::Forebay, name, own_turn(TO_NOBODY, own, on_both));
    }
    Ok(subjects)
}

fn own_turn(to: &'static str, own: &'static str, on_both: bool) -> FloodTurn {
    FloodTurn { to, steering: FloodSteering::Off, receiver: FloodReceiver::Own(own), on_both }
}

fn measure(
    setting: &CompareSetting,
    network: &Network,
    turn: &FloodTurn,
) -> Result<TurnFigures, String> {
    let (window, warm_up) = (setting.window.as_millis(), setting.warm_up.as_millis());
    let CompareCpus { sender: sends_on, receiver: receives_on } = setting.cpus;
    let _restored = network.steer(RECEIVER, &turn.steering.kernel(setting))?;
    let _cpumap = match turn.steering.cpumap(setting) {
        None => None,
        Some(cpus) => {
            let mut command =
                network.inside(RECEIVER.namespace, setting.peers.program(Peer::Cpumap)?);
            Some(StartedProgram::start(command.args([
                "--device",
                RECEIVER.device,
                "--cpus",
                &cpus,
            ]))?)
        }
    };
    let cpus =
        if turn.on_both { format!("{receives_on},{sends_on}") } else { receives_on.to_string() };
    let mut command = receiver(setting, network, &turn.receiver)?;
    command.args(["--device", RECEIVER.device, "--cpus", &cpus, "--port", PORT]);
    command.args(["--warm-up", &warm_up.to_string(), "--window", &window.to_string()]);
    // Compiled, if need be, before the receiver waits.
    let mut flood = network.inside(SENDER.namespace, setting.peers.program(Peer::Flood)?);
    let mut receiver = StartedProgram::start(&mut command)?;
    flood.args(["--device", SENDER.device, "--cpus", &sends_on.to_string(), "--port", PORT]);
    flood.args(["--to", turn.to, "--flows", &setting.flows.to_string()]);
    flood.args(["--mode", if setting.is_skewed { "zipf" } else { "even" }]);
    let _flood = StartedProgram::start(&mut flood)?;
    sample(&receiver.result()?)
}

fn receiver(
    setting: &CompareSetting,
    network: &Network,
    receiver: &FloodReceiver,
) -> Result<Command, String> {
    match receiver {
        FloodReceiver::Peer(peer, mode) => {
            let mut command = network.inside(RECEIVER.namespace, setting.peers.program(*peer)?);
            command.args(["--mode", mode]);
            Ok(command)
        }
        FloodReceiver::Own(args) => network.own(RECEIVER.namespace, args),
    }
}

/// Figures of a receiver's result.
fn sample(result: &Value) -> Result<TurnFigures, String> {
    let number = |name: &str| result[name].as_f64().filter(|number| *number > 0.0);
    let (packets, ns) = number("packets")
        .zip(number("ns"))
        .ok_or("the receiver counted no packet in the window: try a longer --window")?;
    let cpu_ns = result["cpu_ns"].as_f64().unwrap_or_default();
    Ok(TurnFigures::default()
        .with("received", packets / ns * 1e6)
        .with("CPU time of the receiver", cpu_ns / packets))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rate_is_packets_per_window() {
        let result = json!({ "packets": 500, "ns": 1_000_000, "cpu_ns": 250_000 });
        let figures = sample(&result).unwrap().figures;
        let value = |metric: &str| figures[metric][0].value;
        assert!((value("received") - 500.0).abs() < 1e-9);
        assert!((value("CPU time of the receiver") - 500.0).abs() < 1e-9);
        assert!(sample(&json!({ "packets": 0, "ns": 5 })).is_err());
    }
}
