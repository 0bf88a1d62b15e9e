//! Forwarding between two interfaces: two kernels communicate through a host in the middle.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use forebay_device::af_packet::PacketSink;
use forebay_rx::Packet;
use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{CoalesceConfig, Coalescer};
use forebay_rx::hash::Hasher;
use forebay_rx::parse::Link;
use forebay_rx::sink::{SendDrop, Sink};
use forebay_sys::Error;
use forebay_sys::interface::Interface;
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use forebay_testkit::namespaces::command;
use forebay_testkit::packets::{in_one_frame, merged_vxlan, vxlan_payloads};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::UdpGsoSegment;

use crate::af_packet::taker::Taker;

/// Tests of this module.
pub(crate) const TRIALS: &[(&str, fn())] = &[
    ("promise_6_gso_streams_forward_intact", whole_streams),
    ("promise_6_merged_streams_forward_intact", merged_streams),
    ("streams_of_single_frames_arrive_intact", single_streams),
    ("gso_datagrams_are_cut_on_arrival", whole_datagrams),
    ("lro_t5_merged_tunnels_leave_segmented", merged_tunnels),
    ("too_long_by_current_mtu", too_long),
    ("link_down_and_headerless_are_counted", not_sent),
    ("deleted_interface_ends_sink", deleted),
];

/// Length of a stream in bytes.
const STREAM_BYTES: usize = 4 << 20;

/// Two hosts, connected by cables to a host in the middle.
struct Path {
    left: Namespace,
    middle: Namespace,
    right: Namespace,
}

/// Packets forwarded by the host in the middle, from left to right.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Went {
    /// Number of packets that arrived as GSO packets.
    whole: u64,
    /// Number of packets merged in the middle.
    merged: u64,
    /// Number of packets counted by the sink.
    packets: u64,
    frames: u64,
    dropped: u64,
}

impl Path {
    fn new() -> Self {
        let [left, middle, right] = [(); 3].map(|()| Namespace::new());
        Cable { near: (&left, "pkl"), far: (&middle, "pkm") }.lay();
        Cable { near: (&middle, "pkn"), far: (&right, "pkr") }.lay();
        left.command("ip addr add 10.9.0.1/24 dev pkl");
        right.command("ip addr add 10.9.0.2/24 dev pkr");
        left.command("ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev pkl");
        right.command("ip neigh add 10.9.0.1 lladdr 02:00:00:00:00:01 dev pkr");
        Self { left, middle, right }
    }

    /// Forwards in both directions while `act` runs.
    fn forward<R: Send>(&self, merges: bool, act: impl FnOnce() -> R + Send) -> (R, Went) {
        let (begun, ended) = (Barrier::new(2), AtomicBool::new(false));
        thread::scope(|scope| {
            let bridge = scope.spawn(|| self.middle.run(|| bridge(merges, &begun, &ended)));
            begun.wait();
            let result = act();
            ended.store(true, Ordering::Relaxed);
            (result, bridge.join().unwrap())
        })
    }

    /// Sends a stream from left to right and checks that it arrives unchanged.
    fn stream(&self, merges: bool) -> Went {
        let sent: Vec<u8> = (0..=250).cycle().take(STREAM_BYTES).collect();
        let listener = self.right.run(|| TcpListener::bind("10.9.0.2:9").unwrap());
        let (received, went) = self.forward(merges, || {
            thread::scope(|scope| {
                let receiver = scope.spawn(|| {
                    let mut received = Vec::new();
                    listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
                    received
                });
                let mut sender = self.left.run(|| TcpStream::connect("10.9.0.2:9").unwrap());
                sender.write_all(&sent).unwrap();
                drop(sender);
                receiver.join().unwrap()
            })
        });
        assert!(received == sent, "{} bytes of {STREAM_BYTES} arrived", received.len());
        assert_eq!(went.dropped, 0, "{went:?}");
        went
    }

    fn without_offloads(&self) {
        self.left.command("ethtool -K pkl tso off gso off");
        self.right.command("ethtool -K pkr tso off gso off");
    }
}

/// Forwards between `pkm` and `pkn`.
fn bridge(merges: bool, begun: &Barrier, ended: &AtomicBool) -> Went {
    let sink = |name| PacketSink::open(&Interface::named(name).unwrap()).unwrap();
    let mut ways = [("pkm", sink("pkn")), ("pkn", sink("pkm"))].map(|(from, to)| {
        (Taker::open(from), to, Coalescer::new(CoalesceConfig::default(), Arc::default()))
    });
    let mut went = Went::default();
    let hasher = Hasher::keyed(&[7; 16], false);
    begun.wait();
    while !ended.load(Ordering::Relaxed) {
        let mut is_idle = true;
        for (way, (taker, sink, coalescer)) in ways.iter_mut().enumerate() {
            taker.poll(false).unwrap();
            is_idle &= taker.packets.is_empty();
            if merges {
                for packet in &mut taker.packets {
                    packet.hash = hasher.hash(&packet.view());
                }
                let mut out = Vec::new();
                coalescer.coalesce(&mut taker.packets, 0, &mut out);
                coalescer.end_poll(PollStatus::Drained, 0, &mut out);
                taker.packets = out;
            }
            if way == 0 {
                let count = |of: fn(&Packet) -> bool| {
                    taker.packets.iter().filter(|it| of(it)).count() as u64
                };
                went.whole += count(Packet::is_gso);
                went.merged += count(|packet| packet.segment_count() > 1);
            }
            sink.send(&mut taker.packets).unwrap();
            taker.recycle();
            assert_eq!((taker.kernel_dropped, &*taker.refused), (0, &[][..]));
        }
        if is_idle {
            thread::sleep(Duration::from_micros(50));
        }
    }
    let counters = ways[0].1.counters();
    let (packets, frames) = (counters.packets(), counters.frames());
    Went { packets, frames, dropped: counters.dropped_in_all(), ..went }
}

fn whole_streams() {
    let went = Path::new().stream(false);
    assert!(went.whole > 0 && went.merged == 0, "{went:?}");
    assert!(
        went.frames >= (STREAM_BYTES / 1460) as u64 && went.packets < went.frames / 4,
        "{went:?}"
    );
}

fn merged_streams() {
    let path = Path::new();
    path.without_offloads();
    let went = path.stream(true);
    assert!(went.whole == 0 && went.merged > 0, "{went:?}");
    assert!(went.frames >= (STREAM_BYTES / 1460) as u64 && went.packets < went.frames, "{went:?}");
}

fn single_streams() {
    let path = Path::new();
    path.without_offloads();
    let went = path.stream(false);
    assert_eq!((went.whole, went.merged), (0, 0));
    assert_eq!(went.packets, went.frames);
}

fn whole_datagrams() {
    let path = Path::new();
    let receiver = path.right.run(|| UdpSocket::bind("10.9.0.2:9").unwrap());
    let payload: Vec<u8> = (0..=250).cycle().take(20_500).collect();
    let (_, went) = path.forward(false, || {
        let sender = path.left.run(|| UdpSocket::bind("10.9.0.1:0").unwrap());
        setsockopt(&sender, UdpGsoSegment, &1000).unwrap();
        sender.send_to(&payload, "10.9.0.2:9").unwrap();
        let mut received = [0; 2000];
        for segment in payload.chunks(1000) {
            let len = receiver.recv(&mut received).unwrap();
            assert_eq!(received[..len], *segment);
        }
    });
    assert_eq!(went, Went { whole: 1, merged: 0, packets: 1, frames: 21, dropped: 0 });
}

/// Makes the kernel on the left send datagrams of these lengths, cut at 1000 bytes, and passes the
/// packets received in the middle to `act`.
fn with_datagrams(lens: &[usize], act: impl FnOnce(&mut Vec<Packet>, &mut PacketSink) + Send) {
    let path = Path::new();
    path.middle.run(|| {
        let mut taker = Taker::open("pkm");
        path.left.run(|| {
            let sender = UdpSocket::bind("10.9.0.1:0").unwrap();
            setsockopt(&sender, UdpGsoSegment, &1000).unwrap();
            for &len in lens {
                sender.send_to(&vec![0; len], "10.9.0.2:9").unwrap();
            }
        });
        taker.await_packets(lens.len());
        let mut sink = PacketSink::open(&Interface::named("pkn").unwrap()).unwrap();
        act(&mut taker.packets, &mut sink);
    });
}

fn too_long() {
    with_datagrams(&[972, 973, 3000], |packets, sink| {
        // IP packets of 1000, of 1001, and three of 1028 bytes.
        for (mtu, too_long) in [(1028, 0), (1027, 1), (1000, 2), (999, 3), (1028, 0)] {
            command(&format!("ip link set pkn mtu {mtu}"));
            let before = sink.counters().dropped(SendDrop::TooLong);
            sink.send(packets).unwrap();
            assert_eq!(sink.counters().dropped(SendDrop::TooLong) - before, too_long, "{mtu}");
        }
        assert_eq!(sink.counters().packets(), 3 + 2 + 1 + 3);
        assert_eq!(packets.len(), 3);
    });
}

/// Merged here, and by the kernel before.
fn merged_tunnels() {
    let path = Path::new();
    let receiver = path.right.run(|| UdpSocket::bind("10.9.0.2:4789").unwrap());
    receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    for is_whole in [false, true] {
        let payloads = vxlan_payloads(70);
        let (_, merged) = merged_vxlan(&payloads, Link::Ethernet);
        let mut packets = vec![if is_whole { in_one_frame(&merged) } else { merged }];
        let sent = path.middle.run(|| {
            let mut sink = PacketSink::open(&Interface::named("pkn").unwrap()).unwrap();
            sink.send(&mut packets).unwrap();
            let counters = sink.counters();
            (counters.packets(), counters.frames(), counters.dropped_in_all())
        });
        assert_eq!(sent, (1, 70, 0), "{is_whole}");
        let mut received = [0; 2000];
        for payload in &payloads {
            let got = receiver.recv(&mut received).unwrap();
            assert!(received[..got] == payload[..], "{is_whole}: {got} bytes");
        }
        assert_eq!(packets.len(), if is_whole { 1 } else { 70 }, "all come back");
    }
}

fn not_sent() {
    with_datagrams(&[500, 2500], |packets, sink| {
        command("ip link set pkn down");
        sink.send(packets).unwrap();
        assert_eq!(sink.counters().dropped(SendDrop::Down), 2);
        command("ip link set pkn up");
        packets[0].frame.pull(14);
        packets[0].headers.link = Link::Ip;
        sink.send(packets).unwrap();
        assert_eq!(sink.counters().dropped(SendDrop::LinkHeader), 1);
        assert_eq!((sink.counters().packets(), sink.counters().frames()), (1, 3));
    });
}

fn deleted() {
    with_datagrams(&[500], |packets, sink| {
        sink.send(packets).unwrap();
        command("ip link del pkn");
        let error = sink.send(packets).unwrap_err();
        let error = error.downcast_ref::<Error>();
        assert!(matches!(error, Some(Error::DeviceGone { name }) if name == "pkn"), "{error:?}");
    });
}
