//! `compare tcp-bulk`: goodput and CPU time of bulk streams over a veth without segmentation offload,
//! and into a TAP with and without it.
//!
//! Each end has one CPU, and the sender's also processes what comes back. One has sockets of the kernel; the other is compared.

use std::rc::Rc;
use std::time::Duration;

use forebay_sys::cpu_list::CpuList;

use super::CompareSetting;
use super::child::StartedProgram;
use super::network::{
    AT_TAP, KernelSteering, Network, PORT, RECEIVER, SENDER, TAP, TO_RECEIVER, TO_TAP,
};
use super::streams::{StreamEnd, Streams, cpu_ms_per_gb, goodput};
use super::subject::{Author, Better, Quantity, Subject, SubjectGroup, TurnFigures, TurnLength};

const QUANTITIES: &[Quantity] = &[
    Quantity { name: "goodput", unit: "Gbit/s", better: Better::More },
    Quantity { name: "CPU time of both ends", unit: "ms/GB", better: Better::Less },
];

/// Shortest window and warm-up: windows grow for some time.
const WINDOW: Duration = Duration::from_secs(2);
const WARM_UP: Duration = Duration::from_secs(1);

/// Load of a group over the veth, and the end that is compared.
const LOADS: [(&str, u16, Compared); 4] = [
    ("received over a veth, 1 flow", 1, Compared::Receiver),
    ("received over a veth, 8 flows", 8, Compared::Receiver),
    ("sent over a veth, 1 flow", 1, Compared::Sender),
    ("sent over a veth, 8 flows", 8, Compared::Sender),
];

/// State of segmentation offload of a TAP whose kernel sends: packets of up to 64 KiB, or segments.
const TAP_OFFLOADS: [(&str, &str); 2] = [("packets of 64 KiB", "on"), ("segments", "off")];

/// End that has the compared stack.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compared {
    Receiver,
    Sender,
}

/// A stack, as arguments of both programs but for the device.
const STACKS: [(Author, &str, &[&str]); 4] = [
    (Author::Peer, "kernel, GRO", KERNEL),
    (Author::Forebay, "forebay, AF_XDP", &["--via", "af_xdp"]),
    (Author::Forebay, "forebay, AF_PACKET", &["--via", "af_packet"]),
    (
        Author::Forebay,
        "forebay, AF_PACKET, ring of frames",
        &["--via", "af_packet", "--packet-ring", "frames"],
    ),
];

const KERNEL: &[&str] = &["--kernel"];

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = Network::pair()?;
    for end in [SENDER, RECEIVER] {
        network.forget_paths(end.namespace)?;
        network.segment(end.namespace, end.device, "off")?;
    }
    // Else the CPU of whoever acknowledges would process that for the sender, and send more.
    let mask = CpuList::new([setting.cpus.sender]);
    network.steer(SENDER, &KernelSteering { mask, flows: 0 })?;
    let network = Rc::new(network);
    let mut subjects = Vec::new();
    let turn = TurnLength::window(setting.window.max(WINDOW));
    let group = |name| SubjectGroup { name, metrics: QUANTITIES, turn };
    for (load, connections, compared) in LOADS {
        for (author, name, stack) in STACKS {
            let network = Rc::clone(&network);
            let measure = move || {
                let streams = Streams { setting, network: &network, port: PORT, connections };
                over_veth(&streams, compared, stack)
            };
            subjects.push(Subject::new(group(load), author, name, measure));
        }
    }
    for (name, offload) in TAP_OFFLOADS {
        let network = Rc::clone(&network);
        let measure = move || {
            let streams = Streams { setting, network: &network, port: PORT, connections: 1 };
            into_tap(&streams, offload)
        };
        let name = format!("forebay, TAP, {name}");
        let group = group("received over a TAP, 1 flow");
        subjects.push(Subject::new(group, Author::Forebay, name, measure));
    }
    Ok(subjects)
}

fn over_veth(
    streams: &Streams<'_>,
    compared: Compared,
    stack: &'static [&'static str],
) -> Result<TurnFigures, String> {
    let stack_at = |end: Compared, device: &'static str| {
        let stack = if end == compared { stack } else { KERNEL };
        let device = if stack == KERNEL { vec![] } else { vec!["--device", device] };
        [stack, &device].concat()
    };
    let received_by = stack_at(Compared::Receiver, RECEIVER.device);
    let sent_by = stack_at(Compared::Sender, SENDER.device);
    let receiver = StreamEnd { namespace: RECEIVER.namespace, stack: &received_by };
    let receiver = StartedProgram::start(&mut streams.receiver(receiver, WARM_UP, WINDOW)?)?;
    let sender = StreamEnd { namespace: SENDER.namespace, stack: &sent_by };
    figures(streams, receiver, sender, TO_RECEIVER)
}

/// A TAP that the receiver makes. The kernel's end is in the same namespace.
fn into_tap(streams: &Streams<'_>, offload: &str) -> Result<TurnFigures, String> {
    let namespace = RECEIVER.namespace;
    let stack = ["--via", "tap", "--device", TAP, "--address", AT_TAP[1]];
    let receiver = StreamEnd { namespace, stack: &stack };
    let receiver = StartedProgram::start(&mut streams.receiver(receiver, WARM_UP, WINDOW)?)?;
    streams.network.segment(namespace, TAP, offload)?;
    streams.network.ip(namespace, &format!("addr add {} dev {TAP}", AT_TAP[0]))?;
    streams.network.ip(namespace, &format!("link set {TAP} up"))?;
    figures(streams, receiver, StreamEnd { namespace, stack: KERNEL }, TO_TAP)
}

fn figures(
    streams: &Streams<'_>,
    mut receiver: StartedProgram,
    sender: StreamEnd<'_>,
    to: &str,
) -> Result<TurnFigures, String> {
    let sender = StartedProgram::start(&mut streams.sender(sender, to)?)?;
    let result = receiver.result()?;
    let sender_cpu_ns = crate::table::figures::as_f64(sender.cpu_ns()?);
    Ok(TurnFigures::default()
        .with("goodput", goodput(&result)? / 1e3)
        .with("CPU time of both ends", cpu_ms_per_gb(&result, sender_cpu_ns)?))
}
