//! Three machines behind a kernel's ECMP route with resilient next hops: each flow is on one of them,
//! and stays there while machines come and go.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use etherparse::{SlicedPacket, TransportSlice};
use forebay_testkit::namespaces::named::NamedNamespace;
use libtest_mimic::Failed;
use pcap_file::pcap::PcapReader;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{DEVICE, join};
use crate::live::program::{Run, wait_until};

pub(crate) const TRIALS: [Judge; 1] = [("ops_5_flows_stay_behind_resilient_route", judge)];

/// Address of the service, on every machine.
const SERVICE: &str = "192.0.2.53";

const FLOWS: usize = 200;

/// Several ticks of the kernel: a bucket that is used in the tick of its move counts as unused.
const JIFFIES: Duration = Duration::from_millis(50);

/// Reason for which a route with resilient next hops cannot be tried here, if any.
pub(crate) fn missing() -> Option<String> {
    let tried = || {
        let namespace = NamedNamespace::new()?;
        let commands = [
            "ip link set lo up",
            "ip link add fb0 type veth peer name fb1",
            "ip link set fb0 up",
            "ip link set fb1 up",
            "ip address add 10.8.1.1/24 dev fb0",
            "ip nexthop add id 1 via 10.8.1.2 dev fb0",
            "ip nexthop add id 10 group 1 type resilient buckets 8",
        ];
        commands.iter().try_for_each(|command| run(&namespace, command))
    };
    let refused = tried().err()?;
    Some(format!("it takes resilient next hops: {}", refused.message().unwrap_or_default()))
}

/// Runs a command, whose words have no blanks, in a namespace.
fn run(namespace: &NamedNamespace, command: &str) -> Judgement {
    namespace.run(&command.split(' ').collect::<Vec<_>>())
}

/// A machine of the fleet, with a run that takes DNS and keeps what came.
struct Machine {
    run: Run,
    _namespace: NamedNamespace,
}

impl Machine {
    /// Machine of this number, which the router reaches by an interface of this number.
    fn start(router: &NamedNamespace, number: u8) -> Result<Self, Failed> {
        let namespace = NamedNamespace::new()?;
        let port = format!("r{number}");
        let [near, far] = [2, 1].map(|end| format!("02:00:00:00:0{number}:0{end}"));
        join((&namespace, DEVICE, &near), (router, &port, &far), 1)?;
        run(&namespace, &format!("ip address add 10.8.{number}.2/24 dev {DEVICE}"))?;
        run(router, &format!("ip address add 10.8.{number}.1/24 dev {port}"))?;
        run(router, &format!("ip nexthop add id {number} via 10.8.{number}.2 dev {port}"))?;
        let options =
            ["--via", "af_packet", "--take", "udp:53", "--cpus", "1", "--to", "pcap:seen"];
        let run = Run::start(&namespace, [&[DEVICE], &options[..]].concat())?;
        Ok(Self { run, _namespace: namespace })
    }

    /// Source ports of the datagrams that came, once the run is over.
    fn stop(mut self) -> Result<Vec<u16>, Failed> {
        self.run.stop()?;
        let seen: PathBuf = self.run.directory().join("seen");
        let mut ports = Vec::new();
        for entry in fs::read_dir(seen)? {
            let mut capture = PcapReader::new(File::open(entry?.path())?)?;
            while let Some(record) = capture.next_packet() {
                let record = record?;
                let packet = SlicedPacket::from_ethernet(&record.data)?;
                if let Some(TransportSlice::Udp(udp)) = packet.transport
                    && udp.destination_port() == 53
                {
                    ports.push(udp.source_port());
                }
            }
        }
        Ok(ports)
    }
}

/// Clients, each with a socket of its own: they send from the router, as routed flows would.
struct Clients(Vec<UdpSocket>);

impl Clients {
    fn new(router: &NamedNamespace) -> Result<Self, Failed> {
        let bind = |_| Ok(UdpSocket::bind("10.8.1.1:0")?);
        Ok(Self(router.within(|| (0..FLOWS).map(bind).collect())?))
    }

    /// Each client sends a datagram.
    fn send(&self) -> Judgement {
        for socket in &self.0 {
            socket.send_to(b"a query", (SERVICE, 53))?;
        }
        Ok(())
    }

    fn ports(&self) -> Result<BTreeSet<u16>, Failed> {
        self.0.iter().map(|socket| Ok(socket.local_addr()?.port())).collect()
    }
}

/// With two machines left, the kernel still notes which buckets are in use; of a single next hop it
/// does not.
fn judge() -> Judgement {
    let router = NamedNamespace::new()?;
    run(&router, "ip link set lo up")?;
    run(&router, "sysctl -qw net.ipv4.fib_multipath_hash_policy=1")?;
    let machine = |number| Machine::start(&router, number);
    let (first, second, third) = (machine(1)?, machine(2)?, machine(3)?);
    let set = |verb: &str, group: &str| {
        let resilient = "type resilient buckets 128 idle_timer 3600";
        run(&router, &format!("ip nexthop {verb} id 10 group {group} {resilient}"))
    };
    set("add", "1/2/3")?;
    run(&router, &format!("ip route add {SERVICE} nhid 10"))?;
    let clients = Clients::new(&router)?;
    clients.send()?;
    clients.send()?;
    arrived(&[&first, &second, &third], 2 * FLOWS)?;
    // The third machine is taken out: its flows go to the others.
    set("replace", "1/2")?;
    thread::sleep(JIFFIES);
    clients.send()?;
    arrived(&[&first, &second, &third], 3 * FLOWS)?;
    let before = third.stop()?;
    // It is back, and flows that have not been idle stay.
    // Ignored: it may have gone already, with the namespace of its other end.
    let _ = run(&router, "ip link delete r3");
    let third = machine(3)?;
    set("replace", "1/2/3")?;
    clients.send()?;
    arrived(&[&first, &second, &third], 4 * FLOWS - before.len())?;
    let stayed = [first.stop()?, second.stop()?];
    judge_flows(&clients.ports()?, &stayed, &before, &third.stop()?)
}

/// Waits until so many datagrams have come to these machines.
fn arrived(machines: &[&Machine], datagrams: usize) -> Judgement {
    wait_until("all datagrams have come", || {
        let processed = machines.iter().map(|machine| machine.run.processed());
        Ok(processed.sum::<Result<u64, _>>()? >= datagrams as u64)
    })
}

/// `stayed` are the datagrams at the machines that stayed, `before` those at the other one at first,
/// and `back` those there once it was back.
fn judge_flows(
    all: &BTreeSet<u16>,
    stayed: &[Vec<u16>; 2],
    before: &[u16],
    back: &[u16],
) -> Judgement {
    let times = |ports: &[u16], port: u16| ports.iter().filter(|it| **it == port).count();
    let ways = all.iter().map(|port| {
        let [first, second] = [0, 1].map(|machine| times(&stayed[machine], *port));
        [first, second, times(before, *port)]
    });
    let ways: Vec<_> = ways.collect();
    // At one machine all the time, or moved once, from the one that was taken out.
    let expected = [[4, 0, 0], [0, 4, 0], [2, 0, 2], [0, 2, 2]];
    let wrong: BTreeSet<_> = ways.iter().filter(|way| !expected.contains(way)).collect();
    let has_all = expected.iter().all(|way| ways.contains(way));
    if wrong.is_empty() && has_all && back.is_empty() {
        return Ok(());
    }
    Err(format!("wrong are {wrong:?}, all ways {has_all}, {} went back", back.len()).into())
}
