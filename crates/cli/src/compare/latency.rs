//! `compare latency`: time from a request to its answer, over a veth.
//!
//! The client is a UDP socket of the kernel on the second CPU, one request after the other. The
//! server on the first CPU sends each datagram back.

use std::rc::Rc;
use std::time::Duration;

use serde_json::Value;

use super::CompareSetting;
use super::child::StartedProgram;
use super::network::{Network, PORT, RECEIVER, SENDER, TO_NOBODY, TO_RECEIVER};
use super::peers::Peer;
use super::subject::{
    Author, Better, Quantity, RequestCounts, Subject, SubjectGroup, TurnFigures, TurnLength,
};

const QUANTITIES: &[Quantity] = &[
    Quantity { name: "median", unit: "ms", better: Better::Less },
    Quantity { name: "99th percentile", unit: "ms", better: Better::Less },
    Quantity { name: "CPU time of the server", unit: "µs/answer", better: Better::Less },
];

/// Requests a second at light load.
const LIGHT_RATE: u32 = 200;

/// Shortest window at light load, for percentiles of enough answers.
const LIGHT_WINDOW: Duration = Duration::from_secs(1);

/// Server that answers.
#[derive(Clone, Copy)]
enum EchoServer {
    Peer(Peer, &'static str, &'static str),
    /// Arguments of `forebay compare-own`.
    Own(&'static str),
}

const SERVERS: [(Author, &str, EchoServer); 11] = [
    (Author::Peer, "kernel UDP socket", EchoServer::Peer(Peer::Udp, "echo", TO_RECEIVER)),
    (
        Author::Peer,
        "kernel UDP socket, spinning",
        EchoServer::Peer(Peer::Udp, "echo-spin", TO_RECEIVER),
    ),
    (Author::Peer, "libxdp, poll", EchoServer::Peer(Peer::Xsk, "echo", TO_NOBODY)),
    (Author::Peer, "libxdp, spinning", EchoServer::Peer(Peer::Xsk, "echo-spin", TO_NOBODY)),
    (Author::Peer, "AF_PACKET, recvmmsg", EchoServer::Peer(Peer::Packet, "echo", TO_NOBODY)),
    (Author::Forebay, "forebay, AF_XDP", EchoServer::Own("udp-echo --via af_xdp")),
    (
        Author::Forebay,
        "forebay, AF_XDP, never asleep",
        EchoServer::Own("udp-echo --via af_xdp --spin"),
    ),
    (Author::Forebay, "forebay, AF_PACKET", EchoServer::Own("udp-echo --via af_packet")),
    (
        Author::Forebay,
        "forebay, AF_PACKET, never asleep",
        EchoServer::Own("udp-echo --via af_packet --spin"),
    ),
    (
        Author::Forebay,
        "forebay, AF_PACKET, ring of frames",
        EchoServer::Own("udp-echo --via af_packet --packet-ring frames"),
    ),
    (
        Author::Forebay,
        "forebay, AF_PACKET, ring of frames, never asleep",
        EchoServer::Own("udp-echo --via af_packet --packet-ring frames --spin"),
    ),
];

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = Rc::new(Network::pair()?);
    let mut subjects = Vec::new();
    for (name, rate, window) in [
        ("request and answer, 200 a second", LIGHT_RATE, setting.window.max(LIGHT_WINDOW)),
        ("request and answer, back to back", 0, setting.window),
    ] {
        let turn = TurnLength::window(window);
        let group = SubjectGroup { name, metrics: QUANTITIES, turn };
        for (author, name, server) in SERVERS {
            let network = Rc::clone(&network);
            let measure = move || measure(setting, &network, server, rate, window);
            subjects.push(Subject::new(group, author, name, measure));
        }
    }
    Ok(subjects)
}

fn measure(
    setting: &CompareSetting,
    network: &Network,
    server: EchoServer,
    rate: u32,
    window: Duration,
) -> Result<TurnFigures, String> {
    let (mut command, to) = match server {
        EchoServer::Peer(peer, mode, to) => {
            let mut command = network.inside(RECEIVER.namespace, setting.peers.program(peer)?);
            command.args(["--mode", mode]);
            (command, to)
        }
        EchoServer::Own(args) => (network.own(RECEIVER.namespace, args)?, TO_RECEIVER),
    };
    let (sender, receiver) = (setting.cpus.sender.to_string(), setting.cpus.receiver.to_string());
    command.args(["--device", RECEIVER.device, "--cpus", &receiver, "--port", PORT]);
    let server = StartedProgram::start(&mut command)?;
    let mut ask = network.own(SENDER.namespace, "ask")?;
    ask.args(["--cpus", &sender, "--port", PORT, "--to", to, "--rate", &rate.to_string()]);
    ask.args(["--warm-up", &setting.warm_up.as_millis().to_string()]);
    ask.args(["--window", &window.as_millis().to_string()]);
    let mut client = StartedProgram::start(&mut ask)?;
    let cpu_ns = server.cpu_ns()?;
    let result = client.result()?;
    let cpu_ns = server.cpu_ns()?.saturating_sub(cpu_ns);
    let number = |name: &str| result[name].as_f64().ok_or("the client has no result");
    // The answers of the warm-up are in the server's time, too.
    let answers = number("answers")? + number("warm_up_answers")?;
    Ok(TurnFigures::default()
        .with("median", number("p50_ns")? / 1e6)
        .with("99th percentile", number("p99_ns")? / 1e6)
        .with("CPU time of the server", crate::table::figures::as_f64(cpu_ns) / answers / 1e3)
        .with_requests(requests(&result)?))
}

/// Requests of the window, of a client's result.
fn requests(result: &Value) -> Result<RequestCounts, String> {
    let number = |name: &str| result[name].as_u64().ok_or("the client has no result");
    Ok(RequestCounts { sent: number("requests")?, answered: number("answers")? })
}
