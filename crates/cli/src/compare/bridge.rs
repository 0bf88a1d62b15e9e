//! `compare bridge`: time of a ping through two interfaces, and of its answer back.

use std::process::Command;
use std::rc::Rc;

use super::CompareSetting;
use super::child::StartedProgram;
use super::network::{LinkEnd, Network};
use super::peers;
use super::subject::{Author, Better, Quantity, Subject, TurnFigures};

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

/// Options of ping: at light load, and each request upon the last answer.
const LIGHT: [&str; 4] = ["-i", "0.005", "-c", "200"];
const BACK_TO_BACK: [&str; 4] = ["-i", "0", "-c", "2000"];

pub(super) fn subjects(setting: &CompareSetting) -> Result<Vec<Subject<'_>>, String> {
    let network = Network::new(&[ONE.namespace, TO_ONE.namespace, OTHER.namespace])?;
    network.join([ONE, TO_ONE])?;
    network.join([TO_OTHER, OTHER])?;
    network.address(ONE, &[(OTHER.number, OTHER.number)])?;
    network.address(OTHER, &[(ONE.number, ONE.number)])?;
    let network = Rc::new(network);
    let mut subjects = Vec::new();
    for (group, pings) in [
        ("ping through a bridge, 200 a second", LIGHT),
        ("ping through a bridge, back to back", BACK_TO_BACK),
    ] {
        for (author, name, bridge) in BRIDGES {
            let network = Rc::clone(&network);
            let measure = move || measure(setting, &network, bridge, pings);
            subjects.push(Subject::new(group, author, name, QUANTITIES, measure));
        }
    }
    Ok(subjects)
}

fn measure(
    setting: &CompareSetting,
    network: &Network,
    bridge: BridgeProgram,
    pings: [&str; 4],
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

fn ping(network: &Network, options: [&str; 4]) -> Result<TurnFigures, String> {
    let told = |mut command: Command| {
        let output = command.output().map_err(|error| error.to_string())?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let ping = |options: &[&str]| {
        let mut command = network.inside(ONE.namespace, "ping");
        command.args(["-n", "-W", "1"]).args(options).arg("10.77.0.2");
        told(command)
    };
    // The first ones warm up.
    ping(&["-i", "0.01", "-c", "10"])?;
    figures(&ping(&options)?)
}

/// Figures of what ping printed.
fn figures(told: &str) -> Result<TurnFigures, String> {
    let time = |line: &str| line.split_once("time=")?.1.split(' ').next()?.parse::<f64>().ok();
    let mut times: Vec<_> = told.lines().filter_map(time).collect();
    times.sort_by(f64::total_cmp);
    let Some(late) = times.get((times.len() * 99 / 100).min(times.len().saturating_sub(1))) else {
        return Err("no ping was answered".to_owned());
    };
    let count = u32::try_from(times.len()).unwrap_or(u32::MAX);
    let mean = times.iter().sum::<f64>() / f64::from(count);
    Ok(TurnFigures::default().with("mean", mean).with("99th percentile", *late))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_ping() {
        let told = "PING 10.77.0.2 56(84) bytes of data.\n\
                    64 bytes from 10.77.0.2: icmp_seq=1 ttl=64 time=0.020 ms\n\
                    64 bytes from 10.77.0.2: icmp_seq=2 ttl=64 time=0.060 ms\n";
        let of = figures(told).unwrap().figures;
        assert!((of["mean"][0].value - 0.04).abs() < 1e-9, "{of:?}");
        assert!((of["99th percentile"][0].value - 0.06).abs() < 1e-9, "{of:?}");
        assert_eq!(figures("nothing").unwrap_err(), "no ping was answered");
    }
}
