//! `compare tcp-loss`: goodput of bulk streams through a bridge that impairs frames, kernel to kernel
//! and with Forebay at one end.
//!
//! The bridge joins two TAPs. All senders use CUBIC. In each round the bridge draws by another seed, the same for all
//! programs.

use std::rc::Rc;
use std::time::Duration;

use super::CompareSetting;
use super::child::StartedProgram;
use super::network::{Network, PORT, RECEIVER, SENDER, TO_RECEIVER};
use super::streams::{StreamEnd, Streams, goodput};
use super::subject::{
    Author, Better, Quantity, RoundSeed, Subject, SubjectGroup, TurnFigures, TurnLength,
};

const GOODPUT: &[Quantity] = &[Quantity { name: "goodput", unit: "Mbit/s", better: Better::More }];
const SHARE: &[Quantity] =
    &[Quantity { name: "share of the first four", unit: "%", better: Better::More }];

/// Shortest window and warm-up: losses are rare events.
const WINDOW: Duration = Duration::from_secs(3);
const WARM_UP: Duration = Duration::from_secs(1);

/// Port of the second receiver.
const OTHER_PORT: &str = "9001";

/// Paths, as arguments of the bridge.
const PATHS: [(&str, &str); 13] = [
    ("100 Mbit/s, 10 ms", "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000"),
    ("loss of 0.1 %", "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000 --loss-ppm 1000"),
    ("loss of 1 %", "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000 --loss-ppm 10000"),
    ("loss of 5 %", "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000 --loss-ppm 50000"),
    (
        "1 % late by 3 ms",
        "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000 --reorder-ppm 10000 --reorder-us 3000",
    ),
    (
        "20 % late by 1 ms",
        "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000 --reorder-ppm 200000 --reorder-us 1000",
    ),
    ("5 % twice", "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000 --duplicate-ppm 50000"),
    (
        "10 Mbit/s, 1 ms, loss of 1 %",
        "--rate-kbps 10000 --delay-us 500 --queue-bytes 20000 --loss-ppm 10000",
    ),
    ("10 Mbit/s, 100 ms", "--rate-kbps 10000 --delay-us 50000 --queue-bytes 125000"),
    (
        "100 Mbit/s, 100 ms, loss of 0.1 %",
        "--rate-kbps 100000 --delay-us 50000 --queue-bytes 1250000 --loss-ppm 1000",
    ),
    ("10 Mbit/s, 10 ms, queue of 1 s", "--rate-kbps 10000 --delay-us 5000 --queue-bytes 1250000"),
    ("100 Mbit/s, 10 ms, queue of 2 ms", "--rate-kbps 100000 --delay-us 5000 --queue-bytes 25000"),
    ("1000 Mbit/s, 10 ms", "--rate-kbps 1000000 --delay-us 5000 --queue-bytes 1250000"),
];

/// Path of the flows that share it.
const SHARED: &str = "--rate-kbps 100000 --delay-us 5000 --queue-bytes 125000";

/// Stack at one end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stack {
    Kernel,
    Own,
}

impl Stack {
    /// Arguments of its program.
    fn arguments(self, device: &'static str) -> Vec<&'static str> {
        match self {
            Self::Kernel => vec!["--kernel"],
            Self::Own => {
                vec!["--via", "af_packet", "--packet-ring", "frames", "--device", device]
            }
        }
    }
}

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = Network::new(&[SENDER.namespace, RECEIVER.namespace])?;
    for end in [SENDER, RECEIVER] {
        network.forget_paths(end.namespace)?;
    }
    let network = Rc::new(network);
    let mut subjects = Vec::new();
    let turn = TurnLength::window(setting.window.max(WINDOW));
    for (name, path) in PATHS {
        let group = SubjectGroup { name, metrics: GOODPUT, turn };
        for (author, name, stacks) in [
            (Author::Peer, "kernel to kernel", [Stack::Kernel, Stack::Kernel]),
            (Author::Forebay, "forebay to kernel", [Stack::Own, Stack::Kernel]),
            (Author::Forebay, "kernel to forebay", [Stack::Kernel, Stack::Own]),
        ] {
            let network = Rc::clone(&network);
            let measure = move |seed| {
                let _bridge = bridge(&network, path, seed)?;
                measure(setting, &network, stacks)
            };
            subjects.push(Subject::seeded(group, author, name, measure));
        }
    }
    for (author, name, stack) in [
        (Author::Peer, "kernel, beside kernel", Stack::Kernel),
        (Author::Forebay, "forebay, beside kernel", Stack::Own),
    ] {
        let network = Rc::clone(&network);
        let measure = move |seed| {
            let _bridge = bridge(&network, SHARED, seed)?;
            share(setting, &network, stack)
        };
        let group = SubjectGroup { name: "4 flows beside 4 of the kernel", metrics: SHARE, turn };
        subjects.push(Subject::seeded(group, author, name, measure));
    }
    Ok(subjects)
}

fn measure(
    setting: &CompareSetting,
    network: &Network,
    [sender, receiver]: [Stack; 2],
) -> Result<TurnFigures, String> {
    let streams = Streams { setting, network, port: PORT, connections: 1 };
    let mut receiver = receive(&streams, receiver)?;
    let _sender = send(&streams, sender)?;
    let goodput = goodput(&receiver.result()?)?;
    Ok(TurnFigures::default().with("goodput", goodput))
}

/// Share of four flows of a stack, beside four of the kernel.
fn share(setting: &CompareSetting, network: &Network, stack: Stack) -> Result<TurnFigures, String> {
    let streams = |port| Streams { setting, network, port, connections: 4 };
    let ends = [(stack, streams(PORT)), (Stack::Kernel, streams(OTHER_PORT))];
    let mut receivers = Vec::new();
    for (_, streams) in ends {
        receivers.push(receive(&streams, Stack::Kernel)?);
    }
    let mut senders = Vec::new();
    for (stack, streams) in ends {
        senders.push(send(&streams, stack)?);
    }
    let mut rates = Vec::new();
    for receiver in &mut receivers {
        rates.push(goodput(&receiver.result()?)?);
    }
    let share = rates[0] / (rates[0] + rates[1]) * 100.0;
    Ok(TurnFigures::default().with("share of the first four", share))
}

/// Starts the bridge, and gives its ends to the namespaces.
fn bridge(
    network: &Network,
    path: &str,
    RoundSeed(seed): RoundSeed,
) -> Result<StartedProgram, String> {
    let arguments = format!(
        "impair --seed {seed} --device {} --device {} {path}",
        SENDER.device, RECEIVER.device
    );
    let bridge = StartedProgram::start(&mut network.own(SENDER.namespace, &arguments)?)?;
    network.give(SENDER.namespace, RECEIVER)?;
    for (end, other) in [(SENDER, RECEIVER), (RECEIVER, SENDER)] {
        let mac = format!("link set {} address 02:00:00:00:00:{:02x} up", end.device, end.number);
        network.ip(end.namespace, &mac)?;
        network.address(end, &[(other.number, other.number)])?;
    }
    Ok(bridge)
}

fn receive(streams: &Streams<'_>, stack: Stack) -> Result<StartedProgram, String> {
    let stack = stack.arguments(RECEIVER.device);
    let end = StreamEnd { namespace: RECEIVER.namespace, stack: &stack };
    StartedProgram::start(&mut streams.receiver(end, WARM_UP, WINDOW)?)
}

fn send(streams: &Streams<'_>, stack: Stack) -> Result<StartedProgram, String> {
    let stack = stack.arguments(SENDER.device);
    let end = StreamEnd { namespace: SENDER.namespace, stack: &stack };
    StartedProgram::start(&mut streams.sender(end, TO_RECEIVER)?)
}
