//! What comes in.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, SystemTime};

use forebay::Error;
use forebay::sys::interface::Interface;
use path::parse::{Checksum, Transport, link_layer};
use path::arrive::Polled;

use crate::namespace::{Cable, Namespace};
use crate::taker::{Taker, options};

/// The tests.
pub(crate) const TRIALS: &[(&str, fn())] = &[
    ("promise_2_at_a_low_rate_everything_that_was_sent_is_taken", low_rate),
    ("promise_2_what_was_sent_far_too_fast_was_taken_or_counted_by_the_kernel", high_rate),
    ("a_tag_that_the_kernel_took_off_is_back_in_its_place", tags),
    ("frames_come_once_with_several_queues_and_a_flow_stays_on_one", queues),
    ("what_the_machine_itself_sends_does_not_come", outgoing),
    ("a_link_may_go_down_and_up", down_and_up),
    ("an_interface_that_is_deleted_ends_its_source_after_the_last_frame", deleted),
    ("nothing_is_left_after_twenty_openings_under_load", openings),
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

    /// Has the kernel there send datagrams of `len` bytes, and returns how many it took.
    pub(crate) fn send(&self, count: u32, len: usize, pause: Duration) -> u64 {
        self.there.run(|| send(count, len, pause))
    }
}

/// The same in the namespace of the calling thread.
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

/// Frames that the kernel dropped before any packet socket could see them.
fn dropped_before() -> u64 {
    Interface::named("pka").unwrap().counters().unwrap().rx_dropped
}

fn low_rate() {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = Taker::open("pka");
        let before = SystemTime::now();
        assert_eq!(link.send(500, 700, Duration::from_micros(300)), 500);
        taker.await_packets(500);
        let after = SystemTime::now();
        let since_1970 = |time: SystemTime| {
            u64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos()).unwrap()
        };
        let mut last = since_1970(before);
        for (number, packet) in (0u32..).zip(&taker.packets) {
            assert_eq!(packet.view().payload().len(), 700);
            assert_eq!(packet.view().payload()[..4], number.to_be_bytes());
            // Its checksum was left to a device that is none.
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
    let link = Link::new();
    link.here.run(|| {
        let mut taker = Taker::open("pka");
        let before = dropped_before();
        // More than the ring holds, while nobody looks; then more while somebody does.
        let mut sent = link.send(150_000, 18, Duration::ZERO);
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
        assert!(taken > 100_000, "{taken} frames taken, {dropped} dropped");
        assert_eq!(sent, taken + dropped + dropped_before() - before);
    });
}

fn tags() {
    let link = Link::new();
    link.there.command("ip addr del 10.9.0.2/24 dev pkb");
    link.there.command("ip link add link pkb name pkv type vlan proto 802.1ad id 9");
    link.there.command("ip link add link pkv name pkw type vlan id 3001");
    link.there.command("ip link set pkv up");
    link.there.command("ip link set pkw up");
    link.there.command("ip addr add 10.9.0.2/24 dev pkw");
    link.there.command("ip neigh add 10.9.0.1 lladdr 02:00:00:00:00:01 dev pkw");
    for offload in ["on", "off"] {
        for (dev, kind) in [("pkb", "tx-vlan-stag-hw-insert"), ("pkb", "txvlan")] {
            link.there.command(&format!("ethtool -K {dev} {kind} {offload}"));
        }
        link.here.run(|| {
            let mut taker = Taker::open("pka");
            link.send(20, 333, Duration::ZERO);
            taker.await_packets(20);
            for packet in &taker.packets {
                let bytes = packet.frame.data();
                assert_eq!(bytes[12..20], [0x88, 0xa8, 0, 9, 0x81, 0, 0x0b, 0xb9], "{offload}");
                let link_layer = link_layer(bytes, packet.headers.link);
                assert_eq!(link_layer.vlans(), [9, 3001]);
                assert_eq!(packet.headers.l4_checksum, Checksum::Good);
                assert_eq!(packet.view().payload().len(), 333);
                assert_eq!(packet.wire_len as usize, 22 + 28 + 333);
                assert_eq!(bytes.len(), packet.wire_len as usize);
            }
        });
    }
}

fn queues() {
    let link = Link::new();
    link.here.run(|| {
        let options = forebay::device::af_packet::PacketOptions { queues: 3, ..options() };
        let mut takers = Taker::open_queues("pka", &options);
        let sent = link.send(640, 100, Duration::from_micros(50));
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
        // One socket sends every sixteenth datagram.
        for flow in 0..16 {
            let first = seen[flow];
            assert!(seen.iter().skip(flow).step_by(16).all(|queue| *queue == first));
        }
        let used = (0..3).filter(|queue| seen.contains(&Some(*queue))).count();
        assert!(used > 1, "all flows came by one queue");
        // What the machine sends does not come with several queues either.
        crate::namespace::command("ip addr add 10.9.0.1/24 dev pka");
        crate::namespace::command("ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev pka");
        let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
        socket.send_to(&[0; 100], "10.9.0.2:9").unwrap();
        let came: u64 = takers.iter_mut().map(Taker::count_to_end).sum();
        // The kernel there says that nobody listens.
        assert!(came <= 1, "{came} frames came");
    });
}

fn outgoing() {
    let link = Link::new();
    link.here.run(|| {
        crate::namespace::command("ip addr add 10.9.0.1/24 dev pka");
        crate::namespace::command("ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev pka");
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
            crate::namespace::command("ip link set pka down");
            for _ in 0..20 {
                taker.poll(false).unwrap();
                thread::sleep(Duration::from_micros(200));
            }
            assert_eq!(taker.poll(false).unwrap(), Polled::Idle);
            crate::namespace::command("ip link set pka up");
        }
        link.send(10, 100, Duration::ZERO);
        taker.await_packets(40);
    });
}

fn deleted() {
    let link = Link::new();
    link.here.run(|| {
        let mut taker = Taker::open("pka");
        let sent = link.send(300, 100, Duration::ZERO);
        crate::namespace::command("ip link del pka");
        let error = taker.await_error();
        let error = error.downcast::<Error>().unwrap();
        assert!(matches!(&*error, Error::DeviceGone { name } if name == "pka"), "{error}");
        assert_eq!(taker.packets.len() as u64, sent);
        // Another of that name is another one.
        let refused = Interface::named("pka").unwrap_err();
        assert!(matches!(refused, Error::NoInterface { .. }), "{refused}");
    });
}

fn openings() {
    let link = Link::new();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let sockets = || std::fs::read_to_string("/proc/thread-self/net/packet").unwrap();
    let flood = std::sync::atomic::AtomicBool::new(true);
    thread::scope(|scope| {
        scope.spawn(|| {
            while flood.load(std::sync::atomic::Ordering::Relaxed) {
                link.send(1000, 18, Duration::ZERO);
            }
        });
        link.here.run(|| {
            let (before, sockets_before) = (descriptors(), sockets());
            for _ in 0..20 {
                let mut taker = Taker::open("pka");
                taker.await_packets(100);
                taker.recycle();
                assert!(taker.count_to_end() > 0);
            }
            let is_as_before = descriptors() <= before && sockets() == sockets_before;
            flood.store(false, std::sync::atomic::Ordering::Relaxed);
            assert!(is_as_before, "{}", sockets());
        });
    });
}
