//! Sending packets to the kernel.

use std::net::UdpSocket;

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_device::af_xdp::{Opened, XdpDevice};
use forebay_rx::arrive::{Attachment, Burst, Numbering, PollRequest, Polled};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::sink::{SendDrop, Sink};
use forebay_rx::{Packet, RxQueue, Source};
use forebay_testkit::namespaces::ip;

use crate::af_xdp::rig::{Rig, config, far_socket, make_link, turn_round};

/// Sends so many received packets back.
fn echo(rig: &mut Rig, sink: &mut Box<dyn Sink>, count: usize) {
    let mut back = Vec::new();
    rig.take_count(0, count, |_, mut packet| {
        turn_round(&mut packet);
        back.push(packet);
    });
    sink.send(&mut back).unwrap();
    assert!(back.is_empty(), "the device keeps them");
    while rig.sources[0].has_work() {
        rig.sources[0].transmit(&mut rig.pools[0]);
    }
}

fn received(socket: &UdpSocket) -> Vec<u8> {
    let mut bytes = vec![0; 9000];
    let len = socket.recv(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

pub(crate) fn echoed() {
    make_link(1, 1500);
    let mut rig = Rig::open(&config(1));
    let mut sink = rig.sink();
    let socket = far_socket();
    for burst in 0..200u32 {
        for number in burst * 25..(burst + 1) * 25 {
            let mut bytes = vec![u8::try_from(number % 256).unwrap(); 4 + number as usize % 1000];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            socket.send(&bytes).unwrap();
        }
        echo(&mut rig, &mut sink, 25);
        for number in burst * 25..(burst + 1) * 25 {
            let bytes = received(&socket);
            assert_eq!(bytes[..4], number.to_be_bytes());
            assert_eq!(bytes.len(), 4 + number as usize % 1000);
            assert!(bytes[4..].iter().all(|&byte| u32::from(byte) == number % 256));
        }
    }
    let counters = sink.counters();
    assert_eq!((counters.packets(), counters.frames(), counters.dropped_in_all()), (5000, 5000, 0));
    rig.sources.clear();
    assert_eq!(rig.pools[0].in_use(), 0);
}

/// Datagram from the device's side to `to`.
fn datagram(pool: &mut Pool, len_bytes: usize, to: &UdpSocket) -> Packet {
    let std::net::SocketAddr::V4(to) = to.local_addr().unwrap() else { unreachable!() };
    let builder = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
        .ipv4([10, 77, 0, 1], to.ip().octets(), 64)
        .udp(crate::af_xdp::rig::PORT, to.port());
    let mut bytes = Vec::new();
    builder.write(&mut bytes, &vec![0xab; len_bytes]).unwrap();
    let mut frame = pool.allocate(u32::try_from(bytes.len()).unwrap()).unwrap();
    frame.copy_from(&bytes);
    Packet::received(frame, Arrival(0), u32::try_from(bytes.len()).unwrap(), Link::Ethernet)
}

/// A GSO packet is sent as its segments, all of them counted.
pub(crate) fn cut() {
    make_link(1, 1500);
    let larger = [ChunkClass { chunk_bytes: 16 << 10, chunks: 8 }];
    let mut rig = Rig::with_memory(&config(1), 4096, &larger);
    let mut sink = rig.sink();
    let socket = far_socket();
    let mut whole = datagram(&mut rig.pools[0], 7 * 1400 + 11, &socket);
    whole.headers = forebay_rx::parse::parse(
        whole.frame.data(),
        whole.wire_len,
        Link::Ethernet,
        forebay_rx::parse::Verify::Nothing,
    );
    whole.set_gso_size(1400);
    sink.send(&mut vec![datagram(&mut rig.pools[0], 99, &socket), whole]).unwrap();
    while rig.sources[0].has_work() {
        rig.sources[0].transmit(&mut rig.pools[0]);
    }
    for len in [&[99][..], &[1400; 7], &[11]].concat() {
        assert_eq!(received(&socket), vec![0xab; len]);
    }
    let counters = std::sync::Arc::clone(sink.counters());
    assert_eq!((counters.packets(), counters.frames(), counters.dropped_in_all()), (2, 9, 0));

    // A packet whose segments are too long counts as one dropped packet.
    let mut whole = datagram(&mut rig.pools[0], 4000, &socket);
    whole.headers = forebay_rx::parse::parse(
        whole.frame.data(),
        whole.wire_len,
        Link::Ethernet,
        forebay_rx::parse::Verify::Nothing,
    );
    whole.set_gso_size(1600);
    sink.send(&mut vec![whole]).unwrap();
    rig.sources[0].transmit(&mut rig.pools[0]);
    assert_eq!((counters.frames(), counters.dropped(SendDrop::TooLong)), (9, 1));
    rig.sources.clear();
    assert_eq!(rig.pools[0].in_use(), 0);
}

/// Two CPUs, two queues: the packets of each flow leave by one queue, in order.
pub(crate) fn two_queues() {
    make_link(2, 1500);
    let mut rig = Rig::open(&config(2));
    let mut sinks = [rig.sink(), rig.sink()];
    let sockets: Vec<_> = (0..8).map(|_| far_socket()).collect();
    for number in 0..50 {
        for (flow, socket) in (0..).zip(&sockets) {
            let mut packet = datagram(&mut rig.pools[flow as usize % 2], number + 1, socket);
            packet.hash = forebay_rx::hash::FlowHash(flow);
            // The flow changes its CPU.
            sinks[(number / 5 + flow as usize) % 2].send(&mut vec![packet]).unwrap();
        }
        for (source, pool) in rig.sources.iter_mut().zip(&mut rig.pools) {
            source.transmit(pool);
        }
    }
    for socket in &sockets {
        for number in 0..50 {
            assert_eq!(received(socket).len(), number + 1);
        }
    }
    let sent: u64 = sinks.iter().map(|sink| sink.counters().packets()).sum();
    assert_eq!(sent, 400);
    rig.sources.clear();
    assert_eq!(rig.pools.iter_mut().map(Pool::in_use).sum::<usize>(), 0);
}

/// A device opened for sending leaves received packets to the kernel.
pub(crate) fn only() {
    make_link(1, 1500);
    let interface = forebay_sys::interface::Interface::named(crate::af_xdp::rig::OURS).unwrap();
    let (device, mut sources) = XdpDevice::open(&interface, &config(1), Opened::ToSend).unwrap();
    let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 64 }]];
    let mut pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
    let numbering = Numbering::of_queue(RxQueue(0), 1);
    sources[0].attach(Attachment::without_waker(&mut pools[0], numbering)).unwrap();
    let mut sink = device.sink();
    let socket = far_socket();
    socket.send(&[1]).unwrap();
    let mut burst = Burst::default();
    let ask = PollRequest { now_ns: 0, max: 64, may_wait: false, is_last: false };
    let polled = sources[0].poll(ask, &mut pools[0], &mut burst).unwrap();
    assert!(matches!(polled, Polled::IdleUntil { .. }), "{polled:?}");
    assert!(burst.is_empty());
    sink.send(&mut vec![datagram(&mut pools[0], 77, &socket)]).unwrap();
    sources[0].transmit(&mut pools[0]);
    assert_eq!(received(&socket), vec![0xab; 77]);
}

pub(crate) fn dropped() {
    make_link(1, 1500);
    let larger = [ChunkClass { chunk_bytes: 4096, chunks: 8 }];
    let mut rig = Rig::with_memory(&config(1), 4096, &larger);
    let mut sink = rig.sink();
    let socket = far_socket();
    let pool = &mut rig.pools[0];
    let mut packets = vec![datagram(pool, 100, &socket), datagram(pool, 1600, &socket)];
    packets.push(datagram(pool, 1472, &socket));
    packets[0].headers.link = Link::Ip;
    sink.send(&mut packets).unwrap();
    rig.sources[0].transmit(&mut rig.pools[0]);
    assert_eq!(received(&socket).len(), 1472);
    let counters = std::sync::Arc::clone(sink.counters());
    let drops = || SendDrop::ALL.map(|reason| counters.dropped(reason));
    assert_eq!(counters.packets(), 1);
    assert_eq!(
        (counters.dropped(SendDrop::TooLong), counters.dropped(SendDrop::LinkHeader)),
        (1, 1)
    );

    // The far end is down: the device drops the packets.
    ip("link set xkb down");
    let mut packets: Vec<_> = (0..40).map(|_| datagram(&mut rig.pools[0], 100, &socket)).collect();
    sink.send(&mut packets).unwrap();
    rig.sources[0].transmit(&mut rig.pools[0]);
    assert_eq!((counters.packets(), counters.dropped(SendDrop::Refused)), (1, 40), "{:?}", drops());

    // The near end is down: the packets wait.
    ip("link set xkb up");
    ip("link set xka down");
    let mut packets: Vec<_> =
        (0..1500).map(|_| datagram(&mut rig.pools[0], 100, &socket)).collect();
    sink.send(&mut packets).unwrap();
    assert_eq!(packets.len(), 1500 - 1024, "as many as its ring holds");
    assert_eq!(counters.dropped(SendDrop::Full), 1500 - 1024);
    packets.clear();
    rig.sources[0].transmit(&mut rig.pools[0]);
    assert!(!rig.sources[0].has_work(), "nothing can be done");
    ip("link set xka up");
    for _ in 0..10 {
        rig.sources[0].transmit(&mut rig.pools[0]);
    }
    assert_eq!(counters.packets(), 1 + 1024, "{:?}", drops());
    assert_eq!(received(&socket).len(), 100);

    // The device is dropped with packets queued.
    ip("link set xka down");
    let mut packets: Vec<_> = (0..50).map(|_| datagram(&mut rig.pools[0], 100, &socket)).collect();
    sink.send(&mut packets).unwrap();
    rig.sources[0].transmit(&mut rig.pools[0]);
    let mut packets: Vec<_> = (0..5).map(|_| datagram(&mut rig.pools[0], 100, &socket)).collect();
    sink.send(&mut packets).unwrap();
    rig.sources.clear();
    assert_eq!(counters.dropped(SendDrop::Down), 55);
    assert_eq!(counters.packets() + counters.dropped_in_all(), 3 + 40 + 1500 + 55);
    let mut packets = vec![datagram(&mut rig.pools[0], 100, &socket)];
    assert!(sink.send(&mut packets).is_err(), "gone for good");
    drop(packets);
    assert_eq!(rig.pools[0].in_use(), 0);
}

pub(crate) fn copied() {
    make_link(1, 1500);
    let mut rig = Rig::open(&config(1));
    let mut sink = rig.sink();
    let socket = far_socket();
    // Frames of another engine's memory, with chunks of another size.
    let shares = [vec![ChunkClass { chunk_bytes: 4096, chunks: 100 }]];
    let mut others = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
    let mut packets: Vec<_> =
        (1..=100).map(|len| datagram(&mut others[0], len * 14, &socket)).collect();
    sink.send(&mut packets).unwrap();
    while rig.sources[0].has_work() {
        rig.sources[0].transmit(&mut rig.pools[0]);
    }
    for len in 1..=100 {
        assert_eq!(received(&socket), vec![0xab; len * 14]);
    }
    assert_eq!(others[0].in_use(), 0, "at home once they were copied");
}

pub(crate) fn jumbo() {
    make_link(1, 9000);
    let larger = [ChunkClass { chunk_bytes: 12 << 10, chunks: 128 }];
    let mut rig = Rig::with_memory(&config(1), 4096, &larger);
    let mut sink = rig.sink();
    let socket = far_socket();
    let lens = [100, 1792 - 42, 1792 - 41, 4000, 8972];
    let mut packets: Vec<_> =
        lens.iter().map(|&len| datagram(&mut rig.pools[0], len, &socket)).collect();
    sink.send(&mut packets).unwrap();
    while rig.sources[0].has_work() {
        rig.sources[0].transmit(&mut rig.pools[0]);
    }
    for len in lens {
        assert_eq!(received(&socket), vec![0xab; len]);
    }
    assert_eq!((sink.counters().packets(), sink.counters().frames()), (5, 5));
}
