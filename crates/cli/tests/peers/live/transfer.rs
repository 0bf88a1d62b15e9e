//! Files and iperf3 through a run, which forwards between two interfaces or into a TUN, with
//! coalescing or without. The content arrives unchanged, and no checksum is wrong at the far end.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::thread;

use forebay_device::tun::TunDevice;
use forebay_sys::random::Random;
use forebay_testkit::namespaces::named::NamedNamespace;
use libtest_mimic::Failed;

use crate::Judgement;
use crate::live::Judge;
use crate::live::forwarding::{DEVICE, DEVICE_MAC, PEER, PEER_MAC, Way, join};
use crate::live::program::{Report, Run, wait_until};

pub(crate) const TRIALS: [Judge; 7] = [
    ("promise_6_native_xdp_keeps_content", || judge_forwarding(Way::AfXdpNative)),
    ("promise_6_generic_xdp_keeps_content", || judge_forwarding(Way::AfXdpGeneric)),
    ("promise_6_packet_sockets_keep_content", || judge_forwarding(Way::AfPacket)),
    ("promise_6_native_xdp_to_tun_keeps_content", || judge_tun(Way::AfXdpNative)),
    ("promise_6_generic_xdp_to_tun_keeps_content", || judge_tun(Way::AfXdpGeneric)),
    ("promise_6_packet_socket_to_tun_keeps_content", || judge_tun(Way::AfPacket)),
    ("lro_t6_run_sends_tap_whole_tunnels", judge_whole_tunnels),
];

/// Second interface of a forwarding run, and the interface behind it.
const OUT: &str = "fb2";
const OUT_PEER: &str = "fb3";
const OUT_MACS: [&str; 2] = ["02:00:00:00:00:04", "02:00:00:00:00:03"];

/// TUN that a run writes to.
const TUN: &str = "ft0";

/// MAC address of no host: only a run receives frames to it.
const STRANGER_MAC: &str = "02:00:00:00:00:99";

const FILE_BYTES: usize = 16 << 20;
const FILE_PORT: u16 = 9000;
const IPERF_BYTES: &str = "16M";

/// Sender, receiver and its address, and counts that must stay zero.
struct Ends<'a> {
    client: &'a NamedNamespace,
    server: &'a NamedNamespace,
    address: &'static str,
}

/// Forwards between two interfaces, in both directions.
fn judge_forwarding(way: Way) -> Judgement {
    let (client, near, server) =
        (NamedNamespace::new()?, NamedNamespace::new()?, NamedNamespace::new()?);
    join((&near, DEVICE, DEVICE_MAC), (&client, PEER, PEER_MAC), 1)?;
    join((&near, OUT, OUT_MACS[0]), (&server, OUT_PEER, OUT_MACS[1]), 1)?;
    client.run(&["ip", "address", "add", "10.7.0.1/24", "dev", PEER])?;
    server.run(&["ip", "address", "add", "10.7.0.2/24", "dev", OUT_PEER])?;
    let ends = Ends { client: &client, server: &server, address: "10.7.0.2" };
    for is_offloaded in [true, false] {
        set_offloads(&client, PEER, is_offloaded)?;
        set_offloads(&server, OUT_PEER, is_offloaded)?;
        // XDP sees packets before their checksums are filled in.
        if is_offloaded && way.is_xdp() {
            continue;
        }
        for coalesce in ["gro", "off"] {
            let there_and_back = ["--to", "dev:fb2", "--to", "dev:fb0"];
            let args = [&[DEVICE, OUT], way.args(), &there_and_back].concat();
            let report = ends.judge(&near, &args, coalesce, &["-R"])?;
            judge_merging(&report, coalesce, is_offloaded)?;
        }
    }
    Ok(())
}

/// Forwards from one interface to a TUN, behind which the kernel receives. The kernel's answers
/// bypass the run.
fn judge_tun(way: Way) -> Judgement {
    let (client, near) = (NamedNamespace::new()?, NamedNamespace::new()?);
    join((&near, DEVICE, DEVICE_MAC), (&client, PEER, PEER_MAC), 1)?;
    let at_client = [
        "ip address add 10.7.0.1/24 dev fb1",
        &format!("ip neighbour add 10.7.0.2 lladdr {STRANGER_MAC} dev fb1"),
        "ip route add 10.8.0.0/24 via 10.7.0.2",
    ];
    let at_near = [
        "ip address add 10.7.0.2/24 dev fb0",
        &format!("ip neighbour add 10.7.0.1 lladdr {PEER_MAC} dev fb0"),
        "ip tuntap add dev ft0 mode tun",
        "ip address add 10.8.0.1/24 dev ft0",
        "ip link set ft0 up",
        "sysctl -qw net.ipv4.conf.all.rp_filter=0",
        "sysctl -qw net.ipv4.conf.ft0.rp_filter=0",
    ];
    for (namespace, commands) in [(&client, &at_client[..]), (&near, &at_near)] {
        for command in commands {
            namespace.run(&command.split(' ').collect::<Vec<_>>())?;
        }
    }
    set_offloads(&client, PEER, false)?;
    let ends = Ends { client: &client, server: &near, address: "10.8.0.1" };
    for coalesce in ["gro", "off"] {
        let to = format!("tun:{TUN}");
        let args = [&[DEVICE], way.args(), &["--to", &to]].concat();
        let report = ends.judge(&near, &args, coalesce, &[])?;
        judge_merging(&report, coalesce, false)?;
    }
    Ok(())
}

/// Forwards VXLAN from one interface to a TAP, behind which the kernel takes it apart. Merged packets
/// reach the TAP whole, if this kernel can segment them.
fn judge_whole_tunnels() -> Judgement {
    let (client, near) = (NamedNamespace::new()?, NamedNamespace::new()?);
    join((&near, DEVICE, DEVICE_MAC), (&client, PEER, PEER_MAC), 1)?;
    let at_client = [
        "ip address add 10.7.0.1/24 dev fb1",
        &format!("ip neighbour add 10.7.0.2 lladdr {STRANGER_MAC} dev fb1"),
        "ip link add vx0 type vxlan id 7 dstport 4789 remote 10.7.0.2 dev fb1",
        "ip address add 10.9.0.1/24 dev vx0",
        "ip link set vx0 up",
    ];
    let at_near = [
        &format!("ip tuntap add dev {TUN} mode tap"),
        &format!("ip link set {TUN} up address {STRANGER_MAC}"),
        &format!("ip address add 10.7.0.2/32 dev {TUN}"),
        "ip route add 10.7.0.1/32 dev fb0 src 10.7.0.2",
        &format!("ip neighbour add 10.7.0.1 lladdr {PEER_MAC} dev fb0"),
        "ip link add vx0 type vxlan id 7 dstport 4789 remote 10.7.0.1 local 10.7.0.2 dev fb0",
        "ip address add 10.9.0.2/24 dev vx0",
        "ip link set vx0 up",
        "sysctl -qw net.ipv4.conf.all.rp_filter=0",
        &format!("sysctl -qw net.ipv4.conf.{TUN}.rp_filter=0"),
    ];
    for (namespace, commands) in [(&client, &at_client[..]), (&near, &at_near)] {
        for command in commands {
            namespace.run(&command.split(' ').collect::<Vec<_>>())?;
        }
    }
    set_offloads(&client, PEER, false)?;
    let facts = near.within(|| Ok(TunDevice::open_for_whole_tunnels("ft1", 1)?.facts()))?;
    let is_whole = facts.iter().any(|(_, fact)| fact.contains("written whole"));
    let ends = Ends { client: &client, server: &near, address: "10.9.0.2" };
    let to = format!("tun:{TUN}");
    let args = [&[DEVICE], Way::AfPacket.args(), &["--whole-tunnels", "--to", &to]].concat();
    let report = ends.judge(&near, &args, "gro", &[])?;
    judge_merging(&report, "gro", false)?;
    let sent = &report.value()["sent"][0];
    let written = sent[if is_whole { "packets" } else { "frames" }].as_u64();
    let file = format!("/sys/class/net/{TUN}/statistics/rx_packets");
    let received = near.output_of(&["cat", &file])?.trim().parse().ok();
    if written.is_none() || received != written {
        return Err(format!("the TAP received {received:?} packets: {sent}").into());
    }
    Ok(())
}

/// Sets whether the sender leaves segmentation and checksums to its interface.
fn set_offloads(namespace: &NamedNamespace, device: &str, is_on: bool) -> Judgement {
    let state = if is_on { "on" } else { "off" };
    let features = ["tx", state, "tso", state, "gso", state];
    namespace.run(&[&["ethtool", "-K", device][..], &features].concat())
}

impl Ends<'_> {
    /// Sends a file both ways, then iperf3 traffic, through a run in `near`.
    fn judge(
        &self,
        near: &NamedNamespace,
        args: &[&str],
        coalesce: &str,
        further: &[&'static str],
    ) -> Result<Report, Failed> {
        let case = format!("--coalesce {coalesce}");
        let in_case = |failed: Failed| -> Failed {
            format!("{case}: {}", failed.message().unwrap_or_default()).into()
        };
        let args = [args, &["--cpus", "2", "--coalesce", coalesce]].concat();
        let mut run = Run::start(near, args).map_err(in_case)?;
        self.judge_file().map_err(in_case)?;
        for direction in [None].into_iter().chain(further.iter().copied().map(Some)) {
            self.judge_iperf(direction).map_err(in_case)?;
        }
        let report = run.stop().map_err(in_case)?;
        for namespace in [self.client, self.server] {
            judge_checksums(namespace).map_err(in_case)?;
        }
        Ok(report)
    }

    /// Checks that a file returns unchanged.
    fn judge_file(&self) -> Judgement {
        let mut random = Random::new(1);
        let file: Vec<u8> = (0..FILE_BYTES / 8).flat_map(|_| random.bits().to_le_bytes()).collect();
        let address: SocketAddr = format!("{}:{FILE_PORT}", self.address).parse()?;
        let listener = self.server.within(|| Ok(TcpListener::bind(address)?))?;
        let mut client = self.client.within(|| Ok(TcpStream::connect(address)?))?;
        let (mut server, _) = listener.accept()?;
        let (there, back) = thread::scope(|scope| {
            let there = scope.spawn(move || -> std::io::Result<Vec<u8>> {
                let mut received = Vec::new();
                server.read_to_end(&mut received)?;
                server.write_all(&received)?;
                Ok(received)
            });
            client.write_all(&file)?;
            client.shutdown(Shutdown::Write)?;
            let mut back = Vec::new();
            client.read_to_end(&mut back)?;
            let there = there.join().map_err(|_| "the receiver has panicked")??;
            Ok::<_, Failed>((there, back))
        })?;
        if there != file || back != file {
            return Err("a file is not what was sent".into());
        }
        Ok(())
    }

    /// Checks that iperf3 succeeds at both ends.
    fn judge_iperf(&self, direction: Option<&'static str>) -> Judgement {
        let mut server = self.server.command("iperf3");
        let server = server.args(["-s", "-1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut server = Ended(server.spawn()?);
        wait_until("iperf3 listens", || {
            // Port 5201 in state 0A (LISTEN): connections of an earlier iperf3 may remain on that
            // port.
            let sockets = self.server.output_of(&["cat", "/proc/net/tcp6", "/proc/net/tcp"])?;
            Ok(sockets.lines().any(|socket| socket.contains(":1451 ") && socket.contains(" 0A ")))
        })?;
        let client = ["iperf3", "-c", self.address, "-n", IPERF_BYTES];
        self.client.run(&[&client[..], direction.as_slice()].concat())?;
        let status = server.0.wait()?;
        if status.success() { Ok(()) } else { Err(format!("iperf3 -s: {status}").into()) }
    }
}

/// A process that is killed on drop.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The process has ended already, unless a judgement has failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks that no packet with a wrong checksum or an invalid header has arrived in a namespace.
fn judge_checksums(namespace: &NamedNamespace) -> Judgement {
    let told = namespace.output_of(&["cat", "/proc/net/snmp"])?;
    let lines: Vec<_> = told.lines().collect();
    let mut seen = 0;
    for [names, values] in lines.as_chunks::<2>().0 {
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            if ["InCsumErrors", "InHdrErrors"].contains(&name) {
                seen += 1;
                if value != "0" {
                    return Err(format!("{name} is {value}: {values}").into());
                }
            }
        }
    }
    if seen == 0 { Err(format!("no errors are counted: {told}").into()) } else { Ok(()) }
}

/// Checks that segments were merged if requested. Packets that arrive as GSO need not be.
fn judge_merging(report: &Report, coalesce: &str, comes_whole: bool) -> Judgement {
    let lro = &report.value()["lro"];
    let [segments, packets] = ["segments_in", "packets_out"].map(|name| lro[name].as_u64());
    let is_merged = packets < segments;
    if is_merged != (coalesce == "gro") && !comes_whole {
        return Err(format!("--coalesce {coalesce}: {}", report.value()).into());
    }
    Ok(())
}
