//! Good clients beside a SYN flood over a cable. `FOREBAY_TEST_FLOOD_PPS` sets the flood's rate; 0 is as
//! fast as one CPU sends.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use forebay::net::TcpListener;
use forebay_device::Via;
use forebay_rx::DropReason;
use forebay_testkit::namespaces::command;

use crate::parts::{self, Part, resident_kib};
use crate::sockets::rig::Running;
use crate::sockets::shared::Hosts;
use crate::tcp::many::{GROWTH_KIB, answer, ask_one, setting};
use crate::tcp::moving::counter;
use crate::tcp::streams::LONG;
use crate::tcp::{Trial, tcp_counter};

pub(crate) const TRIALS: &[Trial] = &[
    ("tcp_13_af_packet_flood_leaves_good_clients", || parts::run(OVER_AF_PACKET)),
    ("tcp_13_af_xdp_flood_leaves_good_clients", || parts::run(OVER_AF_XDP)),
];

const OVER_AF_PACKET: &str = "flood over af_packet";
const OVER_AF_XDP: &str = "flood over af_xdp";

pub(crate) const PARTS: &[Part] = &[
    Part { name: OVER_AF_PACKET, descriptors: 1024, play: || serve(Via::AfPacket) },
    Part { name: OVER_AF_XDP, descriptors: 1024, play: || serve(Via::AfXdp) },
];

/// SYNs from anywhere, each of another connection.
const SYNS: &str = "{ eth(da=02:00:00:00:00:01, sa=02:00:00:00:00:02), \
                      ipv4(sa=drnd(), da=10.9.0.1, ttl=64), \
                      tcp(sp=drnd(), dp=80, seq=drnd(), syn, win=64240) }";

/// Good clients at a time, and connections of each.
const CLIENTS: u64 = 4;
const CONNECTIONS: u64 = 50;

/// Flood that ends when it is dropped: a process and its worker.
struct Flood(Child);

impl Flood {
    fn begin(hosts: &Hosts) -> Self {
        let mut trafgen = Command::new("trafgen");
        trafgen.args(["--dev", "skb", "--conf", "-", "--cpus", "1", "--no-sock-mem"]);
        match setting("FOREBAY_TEST_FLOOD_PPS", 2_000) {
            0 => {}
            rate => drop(trafgen.args(["--rate", &format!("{rate}pps")])),
        }
        trafgen.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        trafgen.process_group(0);
        let mut child = hosts.far.run(|| trafgen.spawn().unwrap());
        child.stdin.take().unwrap().write_all(SYNS.as_bytes()).unwrap();
        Self(child)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        command(&format!("kill -9 -- -{}", self.0.id()));
        self.0.wait().unwrap();
    }
}

/// Packets that the far end has sent.
fn offered(hosts: &Hosts) -> u64 {
    hosts.far.run(|| {
        let output = Command::new("ip").args(["-j", "-s", "link", "show", "skb"]).output().unwrap();
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        told[0]["stats64"]["tx"]["packets"].as_u64().unwrap()
    })
}

/// Every good client is served, the process does not grow, and what is not served has a name.
fn serve(via: Via) {
    let hosts = Hosts::new();
    hosts.near.command("ip route add default via 10.9.0.2");
    let (net, engine) = hosts.taking(via, "tcp:80");
    let listener = hosts.near.run(|| TcpListener::bind(&net, "10.9.0.1:80").unwrap());
    listener.set_accept_timeout(Some(10 * LONG)).unwrap();
    let running = hosts.near.run(|| Running::begin(engine));
    let served = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| answer(&listener));
        }
        ask_one_from(&hosts, 0);
        let flood = Flood::begin(&hosts);
        while tcp_counter(&net, "InSegs") < 1_000 {
            thread::sleep(Duration::from_millis(1));
        }
        let (before, sent, began) = (resident_kib(), offered(&hosts), Instant::now());
        let segments = tcp_counter(&net, "InSegs");
        thread::scope(|scope| {
            for client in 0..CLIENTS {
                let (hosts, served) = (&hosts, &served);
                scope.spawn(move || {
                    for number in client * CONNECTIONS..(client + 1) * CONNECTIONS {
                        ask_one_from(hosts, number);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let (took, sent) = (began.elapsed(), offered(&hosts) - sent);
        let segments = tcp_counter(&net, "InSegs") - segments;
        let after = resident_kib();
        drop(flood);
        assert_eq!(served.load(Ordering::Relaxed), CLIENTS * CONNECTIONS);
        assert!(after <= before + GROWTH_KIB, "from {before} to {after} KiB");
        let netstat = net.netstat();
        let outcome = running.end();
        eprintln!(
            "{} good clients in {took:?}; {sent} packets sent, {segments} segments came; \
             from {before} to {after} KiB\n{netstat}{}",
            CLIENTS * CONNECTIONS,
            net.snmp()
        );
        for queue in &outcome.queues {
            let drops = DropReason::ALL.iter().zip(&queue.drops);
            drops.for_each(|(reason, count)| eprintln!("{}: {}", reason.name(), count.get()));
            eprintln!("dropped by the device: {}", queue.kernel_dropped.get());
        }
        assert!(counter(&net, "SyncookiesRecv") > 0, "{netstat}");
        assert_eq!(outcome.frames_away, 0);
    });
}

fn ask_one_from(hosts: &Hosts, number: u64) {
    hosts.far.run(|| ask_one(("10.9.0.1", 80), number));
}
