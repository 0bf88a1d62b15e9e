//! Receiving frames.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use forebay_device::af_packet::PacketOptions;
use forebay_rx::arrive::Polled;
use forebay_rx::parse::{Checksum, Transport, link_layer};
use forebay_sys::Error;
use forebay_sys::interface::Interface;
use forebay_testkit::namespaces::cable::{Cable, Namespace};
use forebay_testkit::namespaces::command;
use pcap_file::pcap::{PcapPacket, PcapWriter};

use crate::af_packet::taker::{Taker, options};

/// Tests of this module.
pub(crate) const TRIALS: &[(&str, fn())] = &[
    ("promise_2_low_rate_loses_nothing", low_rate),
    ("promise_2_overload_is_counted_by_kernel", high_rate),
    ("stripped_tag_is_reinserted", tags),
    ("filter_reads_behind_two_tags", tags_of_what_is_taken),
    ("unrequested_stays_with_kernel", taken),
    ("several_queues_no_duplicates_flows_stable", queues),
    ("outgoing_packets_do_not_come", outgoing),
    ("link_goes_down_and_up", down_and_up),
    ("deleted_interface_ends_after_last_frame", deleted),
    ("twenty_openings_leave_nothing", openings),
];

/// Two namespaces, and a cable from `pka`, where frames are taken, to `pkb`, whose kernel sends.
pub(crate) struct Link {
    pub(crate) here: Namespace,
    pub(crate) there: Namespace,
}

impl Link {
    pub(crate) fn new() -> Self {
        let (here, there) = (Namespace::new(), Namespace::new());
        Cable { near: (&here, "pka"), far: (&there, "pkb") }.lay();
        there.command("ip addr add 10.9.0.2/24 dev pkb");
        there.command("ip neigh add 10.9.0.1 lladdr 02:00:00:00:00:01 dev pkb");
        Self { here, there }
    }

    /// Makes the far kernel send datagrams of `len` bytes, and returns how many it accepted.
    pub(crate) fn send(&self, count: u32, len: usize, pause: Duration) -> u64 {
        self.there.run(|| send(count, len, pause))
    }
}

/// Sends datagrams from the namespace of the calling thread.
fn send(count: u32, len: usize, pause: Duration) -> u64 {
    let sockets: Vec<_> = (0..16).map(|_| sender()).collect();
    let mut payload = vec![0x5a; len];
    let mut sent = 0;
    for number in 0..count {
        payload[..4].copy_from_slice(&number.to_be_bytes());
        sent += u64::from(sockets[number as usize % sockets.len()].send(&payload).is_ok());
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
    sent
}

fn sender() -> UdpSocket {
    let socket = UdpSocket::bind("10.9.0.2:0").unwrap();
    socket.connect("10.9.0.1:9").unwrap();
    socket
}

/// Number of frames that the kernel dropped before any packet socket received them.
pub(super) fn dropped_before() -> u64 {
    Interface::named("pka").unwrap().counters().unwrap().rx_dropped
}

fn low_rate() {
    low_rate_into(Taker::open);
}

pub(super) fn low_rate_into(open: fn(&str) -> Taker) {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = open("pka");
        let before = SystemTime::now();
        thread::scope(|scope| {
            let sender = scope.spawn(|| link.send(500, 700, Duration::from_micros(300)));
            taker.await_packets(500);
            assert_eq!(sender.join().unwrap(), 500);
        });
        let after = SystemTime::now();
        let since_1970 = |time: SystemTime| {
            u64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos()).unwrap()
        };
        let mut last = since_1970(before);
        for (number, packet) in (0u32..).zip(&taker.packets) {
            assert_eq!(packet.view().payload().len(), 700);
            assert_eq!(packet.view().payload()[..4], number.to_be_bytes());
            // The sender left its checksum to a veth, which computes none.
            assert_eq!(packet.headers.l4_checksum, Checksum::Good);
            assert_eq!(packet.headers.transport, Transport::Udp);
            assert_eq!((packet.arrival.0, packet.wire_len), (number, 742));
            assert!(packet.timestamp_ns >= last);
            last = packet.timestamp_ns;
        }
        assert!(last <= since_1970(after));
        taker.recycle();
        assert_eq!(taker.count_to_end(), 0);
        assert_eq!((taker.kernel_dropped, taker.refused.len()), (0, 0));
    });
}

fn high_rate() {
    high_rate_into(Taker::open);
}

pub(super) fn high_rate_into(open: fn(&str) -> Taker) {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = open("pka");
        let before = dropped_before();
        // First more frames than the ring's 32 MiB hold, at 128 bytes or more a frame, while no
        // poll runs; then more while polls run.
        let mut sent = link.send(300_000, 18, Duration::ZERO);
        let mut taken = 0;
        thread::scope(|scope| {
            let flood = scope.spawn(|| link.send(150_000, 18, Duration::ZERO));
            while !flood.is_finished() {
                taker.poll(false).unwrap();
                taken += taker.packets.len() as u64;
                taker.recycle();
            }
            sent += flood.join().unwrap();
        });
        taken += taker.count_to_end();
        let dropped = taker.kernel_dropped;
        assert!(dropped > 0, "{sent} frames were too few");
        assert!(taken > 10_000, "{taken} frames taken, {dropped} dropped");
        assert_eq!(sent, taken + dropped + dropped_before() - before);
    });
}

/// The kernel strips the outer tag of every frame that it receives.
fn tags() {
    tags_into(Taker::open);
}

pub(super) fn tags_into(open: fn(&str) -> Taker) {
    let link = Link::new();
    let inner = [0x81, 0, 0x0b, 0xb9];
    let outer = [[0x88, 0xa8, 0x20, 9], [0x81, 0, 0xe0, 9]];
    let frames = [
        tagged(&[outer[0], inner].concat()),
        tagged(&[outer[1], inner].concat()),
        tagged(&outer[1]),
        tagged(&[]),
    ];
    let vlans: [&[u16]; 4] = [&[9, 3001], &[9, 3001], &[9], &[]];
    link.here.run(|| {
        let mut taker = open("pka");
        link.there.run(|| replay("pkb", &frames));
        taker.await_packets(4);
        for ((packet, frame), vlans) in taker.packets.iter().zip(&frames).zip(vlans) {
            assert_eq!(packet.frame.data(), frame);
            assert_eq!(packet.wire_len as usize, frame.len());
            assert_eq!(link_layer(frame, packet.headers.link).vlans(), vlans);
            assert_eq!(packet.headers.l4_checksum, Checksum::Good);
            assert_eq!(packet.view().payload(), TAGGED_PAYLOAD);
        }
    });
}

const TAGGED_PAYLOAD: [u8; 333] = [0x5a; 333];

/// Datagram to port 9 behind tags.
fn tagged(tags: &[u8]) -> Vec<u8> {
    let mut frame = [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2], tags, &[8, 0]].concat();
    let packet = etherparse::PacketBuilder::ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64).udp(7, 9);
    packet.write(&mut frame, &TAGGED_PAYLOAD).unwrap();
    frame
}

/// The filter skips two tags, and counts the stripped one.
fn tags_of_what_is_taken() {
    let link = Link::new();
    let tag = [0x81, 0, 0, 9];
    let behind = |count| tagged(&[tag].repeat(count).concat());
    link.here.run(|| {
        let options = PacketOptions { take: "udp:9".parse().unwrap(), ..options() };
        let mut taker = Taker::open_queues("pka", &options).remove(0);
        link.there.run(|| replay("pkb", &[behind(3), behind(2), behind(1), behind(0)]));
        taker.await_packets(3);
        let lens: Vec<_> = taker.packets.iter().map(|packet| packet.wire_len).collect();
        let plain = u32::try_from(behind(0).len()).unwrap();
        assert_eq!(lens, [plain + 8, plain + 4, plain]);
        taker.recycle();
        assert_eq!(taker.count_to_end(), 0);
    });
}

/// Sends frames with tcpreplay.
fn replay(interface: &str, frames: &[Vec<u8>]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("frames.pcap");
    let mut writer = PcapWriter::new(std::fs::File::create(&path).unwrap()).unwrap();
    for frame in frames {
        let len = u32::try_from(frame.len()).unwrap();
        writer.write_packet(&PcapPacket::new(Duration::ZERO, len, frame)).unwrap();
    }
    drop(writer);
    command(&format!("tcpreplay --topspeed -i {interface} {}", path.display()));
}

/// Packets outside the filter stay with the kernel, which receives the taken ones too.
fn taken() {
    let link = Link::new();
    link.here.run(|| {
        let options = PacketOptions { take: "udp:9".parse().unwrap(), ..options() };
        let mut taker = Taker::open_queues("pka", &options).remove(0);
        command("ip addr add 10.9.0.1/24 dev pka");
        let kernels = UdpSocket::bind("10.9.0.1:10").unwrap();
        link.there.run(|| {
            let socket = UdpSocket::bind("10.9.0.2:0").unwrap();
            for port in [10, 9] {
                socket.send_to(&[port; 40], ("10.9.0.1", port.into())).unwrap();
            }
        });
        assert_eq!(kernels.recv(&mut [0; 100]).unwrap(), 40);
        taker.await_packets(1);
        assert_eq!(taker.packets[0].view().payload(), [9; 40]);
        taker.recycle();
        assert_eq!(taker.count_to_end(), 0);
    });
}

fn queues() {
    let link = Link::new();
    link.here.run(|| {
        let options = PacketOptions { queues: 3, ..options() };
        let mut takers = Taker::open_queues("pka", &options);
        let sent = link.send(640, 100, Duration::ZERO);
        let mut seen = vec![None; 640];
        let mut frames = 0;
        while frames < sent {
            for (queue, taker) in takers.iter_mut().enumerate() {
                taker.poll(false).unwrap();
                for packet in &taker.packets {
                    let number = packet.view().payload().first_chunk().copied().unwrap();
                    let place = &mut seen[u32::from_be_bytes(number) as usize];
                    assert_eq!(place.replace(queue), None, "it came twice");
                    assert_eq!(packet.arrival.0 as usize % 3, queue);
                    frames += 1;
                }
                taker.recycle();
            }
        }
        // Each socket sends every sixteenth datagram.
        for flow in 0..16 {
            let first = seen[flow];
            assert!(seen.iter().skip(flow).step_by(16).all(|queue| *queue == first));
        }
        let used = (0..3).filter(|queue| seen.contains(&Some(*queue))).count();
        assert!(used > 1, "all flows came by one queue");
        // Frames sent by this host are not received with several queues either.
        command("ip addr add 10.9.0.1/24 dev pka");
        command("ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev pka");
        let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
        socket.send_to(&[0; 100], "10.9.0.2:9").unwrap();
        let came: u64 = takers.iter_mut().map(Taker::count_to_end).sum();
        // The far kernel may answer with a port-unreachable error.
        assert!(came <= 1, "{came} frames came");
    });
}

fn outgoing() {
    let link = Link::new();
    link.here.run(|| {
        command("ip addr add 10.9.0.1/24 dev pka");
        command("ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev pka");
        let mut taker = Taker::open("pka");
        let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
        let there = link.there.run(|| UdpSocket::bind("10.9.0.2:9").unwrap());
        for _ in 0..50 {
            socket.send_to(&[0; 100], "10.9.0.2:9").unwrap();
        }
        drop(there);
        assert_eq!(taker.count_to_end(), 0);
    });
}

fn down_and_up() {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = Taker::open("pka");
        for round in 1..=3 {
            link.send(10, 100, Duration::ZERO);
            taker.await_packets(10 * round);
            command("ip link set pka down");
            // The interface may be about to be removed, which no event would announce.
            while !matches!(taker.poll(false).unwrap(), Polled::IdleUntil { .. }) {
                thread::sleep(Duration::from_micros(200));
            }
            command("ip link set pka up");
        }
        link.send(10, 100, Duration::ZERO);
        taker.await_packets(40);
    });
}

fn deleted() {
    deleted_below(Taker::open);
}

pub(super) fn deleted_below(open: fn(&str) -> Taker) {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = open("pka");
        let sent = link.send(300, 100, Duration::ZERO);
        command("ip link del pka");
        let error = taker.await_error();
        let error = error.downcast::<Error>().unwrap();
        assert!(matches!(&*error, Error::DeviceGone { name } if name == "pka"), "{error}");
        assert_eq!(taker.packets.len() as u64, sent);
        // A new interface of the same name is another one.
        let refused = Interface::named("pka").unwrap_err();
        assert!(matches!(refused, Error::NoInterface { .. }), "{refused}");
    });
}

/// A socket is listed until its last descriptor is closed and its ring is unmapped.
fn openings() {
    let link = Link::new();
    let sockets = || std::fs::read_to_string("/proc/thread-self/net/packet").unwrap();
    let floods = AtomicBool::new(true);
    thread::scope(|scope| {
        scope.spawn(|| {
            while floods.load(Ordering::Relaxed) {
                link.send(1000, 18, Duration::ZERO);
            }
        });
        let left = link.here.run(|| {
            let before = sockets();
            for _ in 0..20 {
                let mut taker = Taker::open("pka");
                taker.await_some();
                assert!(sockets() != before && taker.count_to_end() > 0);
            }
            (before, sockets())
        });
        floods.store(false, Ordering::Relaxed);
        assert_eq!(left.0, left.1);
    });
}
