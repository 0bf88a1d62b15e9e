//! `compare tcp`: requests and answers over TCP connections, over a veth or a TAP.
//!
//! The client is one thread on the second CPU with sockets of the kernel; each connection asks again
//! once it has its answer. The server has both CPUs, and the scheduler places its threads. Frames of
//! one queue arrive; they are left where they arrive, steered by their hash (RPS), or to the CPU
//! where the thread of their connection runs (RFS).

use std::process::Command;
use std::rc::Rc;

use forebay_sys::cpu_list::CpuList;
use serde_json::Value;

use super::CompareSetting;
use super::child::StartedProgram;
use super::network::{
    AT_TAP, KernelSteering, Network, PORT, RECEIVER, SENDER, TAP, TO_RECEIVER, TO_TAP,
};
use super::receive::RFS_FLOWS;
use super::subject::{Author, Better, Quantity, Subject, SubjectGroup, TurnFigures, TurnLength};

const QUANTITIES: &[Quantity] = &[
    Quantity { name: "transactions", unit: "thousand/s", better: Better::More },
    Quantity { name: "median", unit: "ms", better: Better::Less },
    Quantity { name: "90th percentile", unit: "ms", better: Better::Less },
    Quantity { name: "99th percentile", unit: "ms", better: Better::Less },
    Quantity {
        name: "CPU time of server and client",
        unit: "µs/transaction",
        better: Better::Less,
    },
];

/// Load of a group, and the server's threads for it.
#[derive(Clone, Copy)]
struct RpcLoad {
    group: &'static str,
    connections: u16,
    /// Arguments of the server.
    service: &'static str,
}

const LOADS: [RpcLoad; 6] = [
    RpcLoad { group: "TCP, 1 connection", connections: 1, service: "--readers 1 --per-thread 1" },
    RpcLoad {
        group: "TCP, 50 connections, a thread each",
        connections: 50,
        service: "--readers 50 --per-thread 1",
    },
    RpcLoad {
        group: "TCP, 200 connections, a thread each",
        connections: 200,
        service: "--readers 200 --per-thread 1",
    },
    RpcLoad {
        group: "TCP, 500 connections, a thread each",
        connections: 500,
        service: "--readers 500 --per-thread 1",
    },
    RpcLoad {
        group: "TCP, 200 connections, polled by 8 threads",
        connections: 200,
        service: "--readers 8 --per-thread 25",
    },
    RpcLoad {
        group: "TCP, work in 32 KiB per connection, 100 connections, a thread each",
        connections: 100,
        service: "--readers 100 --per-thread 1 --work 1000 --set-bytes 32768",
    },
];

/// Stack of a server.
#[derive(Clone, Copy)]
enum TcpStack {
    Kernel,
    /// Device of ours, as arguments.
    Own(&'static str),
    Tap,
}

const STACKS: [(Author, &str, TcpStack); 4] = [
    (Author::Peer, "kernel", TcpStack::Kernel),
    (Author::Forebay, "forebay, AF_XDP", TcpStack::Own("--via af_xdp")),
    (
        Author::Forebay,
        "forebay, AF_PACKET, ring of frames",
        TcpStack::Own("--via af_packet --packet-ring frames"),
    ),
    (Author::Forebay, "forebay, TAP", TcpStack::Tap),
];

/// Steering of received frames.
#[derive(Clone, Copy)]
enum TcpSteering {
    Off,
    Rps,
    Rfs,
}

const STEERINGS: [(&str, TcpSteering); 3] =
    [("off", TcpSteering::Off), ("RPS", TcpSteering::Rps), ("RFS", TcpSteering::Rfs)];

impl TcpSteering {
    /// State of the kernel's steering. A mask has both CPUs.
    fn kernel(self, setting: &CompareSetting) -> KernelSteering {
        let mask = CpuList::new([setting.cpus.sender, setting.cpus.receiver]);
        match self {
            Self::Off => KernelSteering::default(),
            Self::Rps => KernelSteering { mask, flows: 0 },
            Self::Rfs => KernelSteering { mask, flows: RFS_FLOWS },
        }
    }

    /// Arguments of our server, whose mask has all its CPUs by default.
    fn own(self) -> Vec<String> {
        let flows = match self {
            Self::Off | Self::Rps => 0,
            Self::Rfs => RFS_FLOWS,
        };
        let mut knobs =
            vec![format!("rps_sock_flow_entries={flows}"), format!("rps_flow_cnt={flows}")];
        if matches!(self, Self::Off) {
            knobs.push("rps_cpus=0".to_owned());
        }
        knobs.into_iter().flat_map(|knob| ["--set".to_owned(), knob]).collect()
    }
}

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = Rc::new(Network::pair()?);
    let mut subjects = Vec::new();
    let turn = TurnLength::window(setting.window);
    for load in LOADS {
        let group = SubjectGroup { name: load.group, metrics: QUANTITIES, turn };
        for (author, stack_name, stack) in STACKS {
            for (steering_name, steering) in STEERINGS {
                let network = Rc::clone(&network);
                let measure = move || measure(setting, &network, load, stack, steering);
                let name = format!("{stack_name}, {steering_name}");
                subjects.push(Subject::new(group, author, name, measure));
            }
        }
    }
    Ok(subjects)
}

fn measure(
    setting: &CompareSetting,
    network: &Network,
    load: RpcLoad,
    stack: TcpStack,
    steering: TcpSteering,
) -> Result<TurnFigures, String> {
    let kernel = match stack {
        TcpStack::Kernel => steering.kernel(setting),
        TcpStack::Own(_) | TcpStack::Tap => KernelSteering::default(),
    };
    let _restored = network.steer(RECEIVER, &kernel)?;
    let server = StartedProgram::start(&mut server(setting, network, load, stack, steering)?)?;
    if matches!(stack, TcpStack::Tap) {
        network.ip(RECEIVER.namespace, &format!("addr add {} dev {TAP}", AT_TAP[0]))?;
        network.ip(RECEIVER.namespace, &format!("link set {TAP} up"))?;
    }
    let mut client = StartedProgram::start(&mut client(setting, network, load, stack)?)?;
    let cpu_ns = server.cpu_ns()?;
    let result = client.result()?;
    let cpu_ns = server.cpu_ns()?.saturating_sub(cpu_ns);
    sample(&result, crate::table::figures::as_f64(cpu_ns))
}

fn server(
    setting: &CompareSetting,
    network: &Network,
    load: RpcLoad,
    stack: TcpStack,
    steering: TcpSteering,
) -> Result<Command, String> {
    let mut command = network.own(RECEIVER.namespace, &format!("rpc-serve {}", load.service))?;
    command.args(["--cpus", &format!("{},{}", setting.cpus.receiver, setting.cpus.sender)]);
    command.args(["--port", PORT]);
    match stack {
        TcpStack::Kernel => command.arg("--kernel"),
        TcpStack::Own(via) => {
            command.args(via.split(' ')).args(["--device", RECEIVER.device]).args(steering.own())
        }
        TcpStack::Tap => {
            let device = ["--via", "tap", "--device", TAP, "--address", AT_TAP[1]];
            command.args(device).args(steering.own())
        }
    };
    Ok(command)
}

fn client(
    setting: &CompareSetting,
    network: &Network,
    load: RpcLoad,
    stack: TcpStack,
) -> Result<Command, String> {
    let (namespace, to) = match stack {
        TcpStack::Kernel | TcpStack::Own(_) => (SENDER.namespace, TO_RECEIVER),
        TcpStack::Tap => (RECEIVER.namespace, TO_TAP),
    };
    let mut command = network.own(namespace, "rpc-ask")?;
    command.args(["--cpus", &setting.cpus.sender.to_string(), "--port", PORT, "--to", to]);
    command.args(["--connections", &load.connections.to_string()]);
    command.args(["--warm-up", &setting.warm_up.as_millis().to_string()]);
    command.args(["--window", &setting.window.as_millis().to_string()]);
    Ok(command)
}

/// Figures of a client's result, and of the server's CPU time.
fn sample(result: &Value, server_cpu_ns: f64) -> Result<TurnFigures, String> {
    let number = |name: &str| result[name].as_f64().ok_or("the client has no result");
    // The warm-up is in the CPU times, too.
    let transactions = number("transactions")? + number("warm_up_transactions")?;
    let cpu_ns = number("cpu_ns")? + server_cpu_ns;
    Ok(TurnFigures::default()
        .with("transactions", number("transactions_per_s")? / 1e3)
        .with("median", number("p50_ns")? / 1e6)
        .with("90th percentile", number("p90_ns")? / 1e6)
        .with("99th percentile", number("p99_ns")? / 1e6)
        .with("CPU time of server and client", cpu_ns / transactions / 1e3))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cpu_time_is_of_both_ends() {
        let result = json!({
            "transactions": 30, "transactions_per_s": 5000.0, "p50_ns": 1_000_000, "p90_ns": 2_000_000,
            "p99_ns": 3_000_000, "warm_up_transactions": 10, "cpu_ns": 100_000,
        });
        let figures = sample(&result, 300_000.0).unwrap().figures;
        let value = |metric: &str| figures[metric][0].value;
        assert!((value("transactions") - 5.0).abs() < 1e-9);
        assert!((value("99th percentile") - 3.0).abs() < 1e-9);
        assert!((value("CPU time of server and client") - 10.0).abs() < 1e-9);
        assert!(sample(&json!({}), 0.0).is_err());
    }
}
