//! Packets merged inside tunnels, sent to the kernel whole or as their segments.

use std::net::{TcpListener, UdpSocket};
use std::thread;
use std::time::Duration;

use etherparse::{IpHeaders, Ipv4Header, Ipv6Header, PacketBuilder, ip_number};
use forebay_device::tun::{TunDevice, TunKind};
use forebay_rx::parse::Link;
use forebay_rx::sink::{SendDrop, Sink};
use forebay_sys::tun::{Attach, TunQueue};
use forebay_testkit::namespaces::{command, ip};
use forebay_testkit::packets::{in_one_frame, merge, merged_vxlan, vxlan_payloads};

use crate::tun::Test;
use crate::tun::rig::Rig;
use crate::tun::sending::{Pass, Pump, elsewhere, lladdr, snmp, station, stream_to};

pub(crate) const TESTS: &[Test] = &[("lro_t5_merged_tunnels_leave_one_by_one", one_by_one)];

/// Tests for which the kernel must segment inside UDP tunnels.
pub(crate) const WHOLE: &[Test] = &[
    ("lro_t6_tap_takes_merged_vxlan_whole", vxlan),
    ("lro_t6_kernel_segments_into_originals", segmented),
    ("lro_t6_longer_header_only_on_request", header_bytes),
];

/// Reason why the kernel cannot segment inside UDP tunnels, if it cannot.
pub(crate) fn missing() -> Option<String> {
    let takes_tunnels = elsewhere(|| {
        let device = TunDevice::open_for_whole_tunnels("tnwhole", 1).unwrap();
        device.facts().contains(&("tunnels", WHOLE_FACT.to_owned()))
    });
    let why = "Linux 6.17 is the first that segments inside UDP tunnels behind a TAP";
    (!takes_tunnels).then(|| why.to_owned())
}

const WHOLE_FACT: &str = "VXLAN and GENEVE are written whole, others segmented";

/// The kernel would take the datagrams of VXLAN for one.
fn one_by_one() {
    for (link, kind) in
        [(Link::Ip, TunKind::Tun), (Link::Ethernet, TunKind::Tun), (Link::Ethernet, TunKind::Tap)]
    {
        let (far, receiver) = elsewhere(|| {
            let far = lladdr("tnfar", kind, 2);
            (far, UdpSocket::bind("10.9.0.2:4789").unwrap())
        });
        receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let payloads = vxlan_payloads(70);
        let (_, merged) = merged_vxlan(&payloads, link);
        assert_eq!(merged.segment_count(), 70);
        // The kernel's own, and merged here.
        for (packet, back) in [(in_one_frame(&merged), 1), (merged, 70)] {
            let (mut sink, mut packets) = (far.sink(), vec![packet]);
            sink.send(&mut packets).unwrap();
            let mut received = [0; 2000];
            for payload in &payloads {
                let got = receiver.recv(&mut received).unwrap();
                assert!(received[..got] == payload[..], "{got} bytes");
            }
            let counters = sink.counters();
            assert_eq!((counters.packets(), counters.frames()), (1, 70));
            assert_eq!(counters.dropped_in_all(), 0);
            assert_eq!(packets.len(), back, "all come back");
        }
    }
}

/// A TCP stream through VXLAN devices on both sides arrives as sent, in fewer packets.
fn vxlan() {
    let open = |number: u8, checksum: &str| {
        let device = TunDevice::open_for_whole_tunnels("tnfar", 1).unwrap();
        station("tnfar", TunKind::Tap, number);
        let peer = 3 - number;
        ip(&format!(
            "link add tnvx type vxlan id 7 dstport 4789 dev tnfar remote 10.9.0.{peer} {checksum}"
        ));
        ip("link set tnvx up");
        ip(&format!("addr add 10.1.0.{number}/24 dev tnvx"));
        device
    };
    for (checksum, pass) in ["noudpcsum", "udpcsum"]
        .into_iter()
        .flat_map(|it| [Pass::Merged, Pass::InPiecesMerged].map(|pass| (it, pass)))
    {
        let near = open(1, checksum);
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let (far, back, listener, told) = elsewhere(|| {
            let far = open(2, checksum);
            let listener = TcpListener::bind("10.1.0.2:2000").unwrap();
            let back = Pump::start(&far, &near, Pass::AsTheyCame);
            // This thread stays in the far namespace, where it reads the counters at the end.
            let told = thread::spawn(move || {
                let _ = asked.recv();
                (received_by("tnfar"), snmp("Tcp", "InErrs"))
            });
            (far, back, listener, told)
        });
        let pump = Pump::start(&near, &far, pass);
        stream_to(&listener);
        let counters = pump.end();
        back.end();
        drop(ask);
        let (frames, packets) = (counters.frames(), counters.packets());
        let case = format!("{checksum}, {pass:?}: {frames} frames, {packets} packets");
        assert_eq!(told.join().unwrap(), (packets, 0), "{case}");
        assert!(2 * frames > 3 * packets, "{case}");
        assert_eq!(counters.dropped_in_all(), counters.dropped(SendDrop::Full), "{case}");
    }
}

/// Returns the number of packets that the kernel received from a device of the calling thread's
/// namespace.
fn received_by(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let mut lines = text.lines().filter_map(|line| line.trim().strip_prefix(&format!("{name}:")));
    lines.next().unwrap().split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A tunnel, and the packets inside.
#[derive(Clone, Copy, Debug)]
struct Case {
    is_outer_v6: bool,
    is_inner_v6: bool,
    is_tcp: bool,
    is_geneve: bool,
    has_checksum: bool,
}

/// Payload of every segment but the last.
const PAYLOAD_BYTES: u16 = 701;

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        (0..1u8 << 5).map(|bits| {
            let [is_outer_v6, is_inner_v6, is_tcp, is_geneve, has_checksum] =
                [0, 1, 2, 3, 4].map(|bit| bits >> bit & 1 == 1);
            Self { is_outer_v6, is_inner_v6, is_tcp, is_geneve, has_checksum }
        })
    }

    /// Frames of segments, the last of which is shorter, with IDs that rise past 65,535.
    fn frames(self, count: u16) -> Vec<Vec<u8>> {
        (0..count).map(|number| self.frame(number, number + 1 == count)).collect()
    }

    fn frame(self, number: u16, is_last: bool) -> Vec<u8> {
        let len = if is_last { 33 } else { PAYLOAD_BYTES };
        let payload: Vec<u8> = (0..len).map(|at| (at + number).to_le_bytes()[0]).collect();
        let mut inside = if self.is_geneve {
            vec![2, 0, 0x65, 0x58, 0, 0, 7, 0, 0, 1, 0x80, 1, 9, 9, 9, 9]
        } else {
            vec![8, 0, 0, 0, 0, 0, 7, 0]
        };
        let inner = PacketBuilder::ethernet2([6; 6], [8; 6]);
        let inner = inner.ip(ip_header(self.is_inner_v6, 1, number));
        if self.is_tcp {
            let sequence = u32::from(number) * u32::from(PAYLOAD_BYTES);
            let segment = inner.tcp(1000, 80, sequence, 512).ack(1);
            segment.write(&mut inside, &payload).unwrap();
        } else {
            inner.udp(1000, 80).write(&mut inside, &payload).unwrap();
        }
        let port = if self.is_geneve { 6081 } else { 4789 };
        let outer = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let outer = outer.ip(ip_header(self.is_outer_v6, 9, number)).udp(50_000, port);
        let mut bytes = Vec::new();
        outer.write(&mut bytes, &inside).unwrap();
        if !self.has_checksum {
            let udp = if self.is_outer_v6 { 54 } else { 34 };
            bytes[udp + 6..udp + 8].fill(0);
        }
        bytes
    }
}

fn ip_header(is_v6: bool, network: u8, number: u16) -> IpHeaders {
    if is_v6 {
        let address = |host| [0x20, 1, 0xd, 0xb8, network, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host];
        let (source, destination) = (address(1), address(2));
        let header = Ipv6Header { hop_limit: 64, source, destination, ..Ipv6Header::default() };
        return IpHeaders::Ipv6(header, Default::default());
    }
    let [source, destination] = [1, 2].map(|host| [10, network, 0, host]);
    let header = Ipv4Header::new(0, 64, ip_number::UDP, source, destination).unwrap();
    let identification = number.wrapping_sub(3);
    IpHeaders::Ipv4(Ipv4Header { identification, ..header }, Default::default())
}

/// A bridge passes a packet on to a device that takes no tunnels: the kernel segments it.
fn segmented() {
    const COUNT: u16 = 9;
    let near = TunDevice::open_for_whole_tunnels("tnnear", 1).unwrap();
    let far = TunDevice::open("tnfar", TunKind::Tap, 1).unwrap();
    ip("link add tnbridge type bridge mcast_snooping 0");
    for port in ["tnnear", "tnfar"] {
        ip(&format!("link set {port} master tnbridge"));
    }
    ip("link set tnbridge up");
    let (mut sink, mut rig) = (near.sink(), Rig::new(&far));
    for offload in ["on", "off"] {
        command(&format!("ethtool -K tnfar tx {offload}"));
        for case in Case::all() {
            let frames = case.frames(COUNT);
            let merged = merge(&frames, Link::Ethernet);
            let before = received_by("tnnear");
            let mut packets = vec![merged];
            sink.send(&mut packets).unwrap();
            assert_eq!((packets.len(), sink.counters().dropped_in_all()), (1, 0), "{case:?}");
            let segments = rig.take(0, COUNT.into());
            assert_eq!(received_by("tnnear") - before, 1, "{case:?}");
            let got: Vec<_> = segments.iter().map(|it| it.frame.data().to_vec()).collect();
            assert!(got == frames, "{case:?}, offloads {offload}: {}", differences(&got, &frames));
            segments.into_iter().for_each(|packet| rig.pool.put(packet.frame));
        }
    }
    rig.all_home(Vec::new());
}

/// The header before each packet is as long as in earlier kernels, unless tunnels are to be whole.
fn header_bytes() {
    ip("tuntap add tnmany mode tap multi_queue vnet_hdr");
    let looked = || {
        let queue = TunQueue::open().unwrap();
        let to = Attach { name: "tnmany", kind: TunKind::Tap, is_multi_queue: true, is_new: false };
        queue.attach(to).unwrap();
        queue.header_bytes().unwrap()
    };
    let first = looked();
    for (queues, len_bytes) in [(1, 10), (2, 24), (1, 10)] {
        let device = match len_bytes {
            24 => TunDevice::open_for_whole_tunnels("tnmany", queues),
            _ => TunDevice::open("tnmany", TunKind::Tap, queues),
        };
        let device = device.unwrap();
        assert_eq!(looked(), len_bytes);
        drop(device);
        assert_eq!(looked(), first, "it is as it was");
    }
}

/// Lengths of the frames, and the first bytes that differ, with their offsets.
fn differences(got: &[Vec<u8>], frames: &[Vec<u8>]) -> String {
    let differing = got.iter().zip(frames).map(|(got, frame)| {
        let at = got.iter().zip(frame).enumerate().filter(|(_, (got, byte))| got != byte);
        let at: Vec<_> = at.map(|(at, (got, byte))| (at, *got, *byte)).take(8).collect();
        format!("{} {} {at:?}", got.len(), frame.len())
    });
    format!("{} of {}: {:?}", got.len(), frames.len(), differing.collect::<Vec<_>>())
}
