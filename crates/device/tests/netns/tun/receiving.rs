//! Receiving: packets that the kernel sends to a device arrive from its source.

use std::net::UdpSocket;

use etherparse::{PacketHeaders, TransportHeader};
use forebay_device::tun::{TunDevice, TunKind};
use forebay_rx::Packet;
use forebay_rx::arrive::Polled;
use forebay_rx::parse::{Checksum, Link, Verify, parse_into};
use forebay_sys::interface::Interface;
use forebay_testkit::namespaces::{command, ip};

use crate::tun::Test;
use crate::tun::rig::{Rig, address, neighbour, payload};

pub(crate) const TESTS: &[Test] = &[
    ("datagrams_whole_with_right_checksums", datagrams),
    ("promise_2_kernel_frames_received_or_counted", sums),
    ("link_flap_continues_deletion_ends", down_up_deleted),
];

/// Opens a device with an address, and a socket that sends through it.
fn open(kind: TunKind) -> (TunDevice, UdpSocket) {
    let device = TunDevice::open("tnrx", kind, 1).unwrap();
    address("tnrx");
    if kind == TunKind::Tap {
        neighbour("tnrx");
    }
    let socket = UdpSocket::bind("10.9.0.1:1000").unwrap();
    socket.connect("10.9.0.2:2000").unwrap();
    (device, socket)
}

/// Parses a packet as an intake does.
fn parsed(mut packet: Packet) -> Packet {
    let Packet { frame, wire_len, headers, device_sum, .. } = &mut packet;
    parse_into(headers, frame.data(), *wire_len, *device_sum, Verify::Checksums);
    packet
}

/// Returns the payload of a UDP packet, after etherparse has checked its checksums.
fn judged(packet: &Packet) -> Vec<u8> {
    let bytes = packet.frame.data();
    let headers = match packet.headers.link {
        Link::Ethernet => PacketHeaders::from_ethernet_slice(bytes),
        Link::Ip => PacketHeaders::from_ip_slice(bytes),
    };
    let headers = headers.unwrap();
    let Some(TransportHeader::Udp(udp)) = &headers.transport else { panic!("not UDP") };
    let payload = headers.payload.slice();
    let etherparse::NetHeaders::Ipv4(ip, _) = headers.net.as_ref().unwrap() else { panic!() };
    assert_eq!(ip.header_checksum, ip.calc_header_checksum());
    assert_eq!(udp.checksum, udp.calc_checksum_ipv4(ip, payload).unwrap());
    payload.to_vec()
}

fn datagrams() {
    for (kind, tx) in [(TunKind::Tun, "on"), (TunKind::Tap, "on"), (TunKind::Tap, "off")] {
        let (device, socket) = open(kind);
        command(&format!("ethtool -K tnrx tx {tx}"));
        let mut rig = Rig::new(&device);
        let lens: Vec<usize> = (0..60).chain(1440..=1472).collect();
        let mut all = Vec::new();
        for (number, &len) in lens.iter().enumerate() {
            socket.send(&payload(number, len)).unwrap();
            all.extend(rig.take(0, 1).into_iter().map(parsed));
        }
        for (number, (packet, &len)) in all.iter().zip(&lens).enumerate() {
            assert_eq!(judged(packet), payload(number, len));
            assert_eq!(packet.headers.l4_checksum, Checksum::Good);
            assert_eq!(packet.arrival.0, u32::try_from(number).unwrap());
            assert_eq!(packet.frame.truesize(), 2048, "a small packet in a large frame");
        }
        assert_eq!((all.len(), rig.dropped), (lens.len(), 0));
        rig.all_home(all);
    }
}

fn sums() {
    let (device, socket) = open(TunKind::Tun);
    let mut rig = Rig::with_chunks(&device, 600, 1);
    let mut sent = 0;
    let mut send = |packets: u64| {
        (0..packets).for_each(|_| assert_eq!(socket.send(&[7; 100]).unwrap(), 100));
        sent += packets;
    };
    send(300); // fits the device's queue
    let mut all = rig.drain(0).0;
    assert_eq!(all.len(), 300);
    send(3000); // more than the device's queue holds
    let (more, ended) = rig.drain(0);
    assert_eq!(ended.unwrap(), Polled::Ready, "there is no frame left to read into");
    assert_eq!(all.len() + more.len(), 601);
    all.extend(more);
    all.drain(..).for_each(|packet| rig.pool.put(packet.frame));
    let mut received = 601;
    send(1000);
    received += rig.finish(0).len();
    let counted = Interface::named("tnrx").unwrap().counters().unwrap();
    assert!(rig.dropped > 1000, "{}", rig.dropped);
    assert_eq!(u64::try_from(received).unwrap() + rig.dropped, sent);
    assert_eq!(counted.tx_dropped, rig.dropped);
}

fn down_up_deleted() {
    let (device, socket) = open(TunKind::Tun);
    let mut rig = Rig::new(&device);
    socket.send(b"before").unwrap();
    assert_eq!(rig.take(0, 1).len(), 1);
    ip("link set tnrx down");
    let (packets, ended) = rig.drain(0);
    assert_eq!((packets.len(), ended.unwrap()), (0, Polled::Idle));
    ip("link set tnrx up");
    socket.send(b"after").unwrap();
    assert_eq!(rig.take(0, 1).len(), 1);
    ip("link del tnrx");
    let gone = rig.drain(0).1.unwrap_err().to_string();
    assert_eq!(gone, "the interface tnrx is gone");
}
