//! `compare bridge`: time of a ping through two interfaces, and of its answer back.

use std::process::Command;
use std::rc::Rc;

use super::CompareSetting;
use super::child::StartedProgram;
use super::network::{LinkEnd, Network};
use super::peers;
use super::subject::{
    Author, Better, Quantity, RequestCounts, Subject, SubjectGroup, TurnFigures, TurnLength,
};

const QUANTITIES: &[Quantity] = &[
    Quantity { name: "mean", unit: "ms", better: Better::Less },
    Quantity { name: "99th percentile", unit: "ms", better: Better::Less },
];

const ONE: LinkEnd = LinkEnd { namespace: "one", device: "left", number: 1 };
const TO_ONE: LinkEnd = LinkEnd { namespace: "middle", device: "to-one", number: 11 };
const TO_OTHER: LinkEnd = LinkEnd { namespace: "middle", device: "to-other", number: 12 };
const OTHER: LinkEnd = LinkEnd { namespace: "other", device: "right", number: 2 };

/// A bridge between the two interfaces.
#[derive(Clone, Copy)]
enum BridgeProgram {
    Kernel,
    /// Arguments of `forebay compare-own`.
    Own(&'static str),
}

const BRIDGES: [(Author, &str, BridgeProgram); 5] = [
    (Author::Peer, "kernel bridge", BridgeProgram::Kernel),
    (Author::Forebay, "forebay, AF_XDP", BridgeProgram::Own("bridge --via af_xdp")),
    (
        Author::Forebay,
        "forebay, AF_XDP, never asleep",
        BridgeProgram::Own("bridge --via af_xdp --spin"),
    ),
    (Author::Forebay, "forebay, AF_PACKET", BridgeProgram::Own("bridge --via af_packet")),
    (
        Author::Forebay,
        "forebay, AF_PACKET, ring of frames",
        BridgeProgram::Own("bridge --via af_packet --packet-ring frames"),
    ),
];

/// Pings of a turn.
#[derive(Clone, Copy)]
struct Pings {
    /// Seconds between two of them; 0: each upon the last answer.
    interval: &'static str,
    count: u16,
}

const LIGHT: Pings = Pings { interval: "0.005", count: 200 };
const BACK_TO_BACK: Pings = Pings { interval: "0", count: 2000 };
const WARM_UP: Pings = Pings { interval: "0.01", count: 10 };

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = Network::new(&[ONE.namespace, TO_ONE.namespace, OTHER.namespace])?;
    network.join([ONE, TO_ONE])?;
    network.join([TO_OTHER, OTHER])?;
    network.address(ONE, &[(OTHER.number, OTHER.number)])?;
    network.address(OTHER, &[(ONE.number, ONE.number)])?;
    let network = Rc::new(network);
    let mut subjects = Vec::new();
    for (name, pings) in [
        ("ping through a bridge, 200 a second", LIGHT),
        ("ping through a bridge, back to back", BACK_TO_BACK),
    ] {
        let turn = TurnLength::Pings(pings.count);
        let group = SubjectGroup { name, metrics: QUANTITIES, turn };
        for (author, name, bridge) in BRIDGES {
            let network = Rc::clone(&network);
            let measure = move || measure(setting, &network, bridge, pings);
            subjects.push(Subject::new(group, author, name, measure));
        }
    }
    Ok(subjects)
}

fn measure(
    setting: &CompareSetting,
    network: &Network,
    bridge: BridgeProgram,
    pings: Pings,
) -> Result<TurnFigures, String> {
    if !peers::is_installed("ping") {
        return Err("ping is not installed: install iputils-ping".to_owned());
    }
    match bridge {
        BridgeProgram::Kernel => {
            let middle = TO_ONE.namespace;
            network.ip(middle, "link add bridge type bridge")?;
            for end in [TO_ONE, TO_OTHER] {
                network.ip(middle, &format!("link set {} master bridge", end.device))?;
            }
            network.ip(middle, "link set bridge up")?;
            let measured = ping(network, pings);
            network.ip(middle, "link del bridge")?;
            measured
        }
        BridgeProgram::Own(args) => {
            let mut command = network.own(TO_ONE.namespace, args)?;
            let cpus = setting.cpus.receiver.to_string();
            command.args(["--device", TO_ONE.device, "--device", TO_OTHER.device, "--cpus", &cpus]);
            let _bridge = StartedProgram::start(&mut command)?;
            ping(network, pings)
        }
    }
}

fn ping(network: &Network, pings: Pings) -> Result<TurnFigures, String> {
    let told = |mut command: Command| {
        let output = command.output().map_err(|error| error.to_string())?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let ping = |Pings { interval, count }: Pings| {
        let mut command = network.inside(ONE.namespace, "ping");
        command.args(["-n", "-W", "1", "-i", interval, "-c", &count.to_string(), "10.77.0.2"]);
        told(command)
    };
    ping(WARM_UP)?;
    figures(&ping(pings)?)
}

/// Figures of what ping printed.
fn figures(told: &str) -> Result<TurnFigures, String> {
    let time = |line: &str| line.split_once("time=")?.1.split(' ').next()?.parse::<f64>().ok();
    // The second answer to a ping is no further one.
    let answers = told.lines().filter(|line| !line.ends_with("(DUP!)"));
    let mut times: Vec<_> = answers.filter_map(time).collect();
    times.sort_by(f64::total_cmp);
    let Some(late) = times.get((times.len() * 99 / 100).min(times.len().saturating_sub(1))) else {
        return Err("no ping was answered".to_owned());
    };
    let sent =
        told.lines().find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok());
    let sent = sent.ok_or("ping did not tell how many it has sent")?;
    let requests = RequestCounts { sent, answered: times.len() as u64 };
    let count = u32::try_from(times.len()).unwrap_or(u32::MAX);
    let mean = times.iter().sum::<f64>() / f64::from(count);
    let figures = TurnFigures::default().with("mean", mean).with("99th percentile", *late);
    Ok(figures.with_requests(requests))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_ping() {
        let told = "PING 10.77.0.2 56(84) bytes of data.\n\
                    64 bytes from 10.77.0.2: icmp_seq=1 ttl=64 time=0.020 ms\n\
                    64 bytes from 10.77.0.2: icmp_seq=2 ttl=64 time=0.060 ms\n\
                    64 bytes from 10.77.0.2: icmp_seq=2 ttl=64 time=0.900 ms (DUP!)\n\n\
                    --- 10.77.0.2 ping statistics ---\n\
                    3 packets transmitted, 2 received, +1 duplicates, 33.3% packet loss, time 9ms\n";
        let TurnFigures { figures: of, requests } = figures(told).unwrap();
        assert_eq!(requests, Some(RequestCounts { sent: 3, answered: 2 }));
        assert!((of["mean"][0].value - 0.04).abs() < 1e-9, "{of:?}");
        assert!((of["99th percentile"][0].value - 0.06).abs() < 1e-9, "{of:?}");
        assert_eq!(figures("nothing").unwrap_err(), "no ping was answered");
    }
}
