//! A host on a link, and messages of its neighbours by etherparse.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::icmpv6::NeighborAdvertisementHeader;
use etherparse::{
    ArpEthIpv4Packet, ArpOperation, Icmpv6Type, LinkHeader, NetHeaders, PacketBuilder,
    PacketHeaders, TransportHeader,
};
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::Packet;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Checksum, Link, Verify, parse};
use forebay_stack::network::neighbours::NeighbourEvent;
use forebay_stack::network::{Identity, NetworkDrop, Prefix, arp, ndisc};

pub(crate) const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];
pub(crate) const OTHERS: [u8; 6] = [2, 0, 0, 0, 0, 3];
pub(crate) const ALL: [u8; 6] = [0xff; 6];

pub(crate) const IP: usize = 14;
const ICMPV6: usize = IP + 40;

pub(crate) fn v4(address: &str) -> Ipv4Addr {
    address.parse().unwrap()
}

pub(crate) fn v6(address: &str) -> Ipv6Addr {
    address.parse().unwrap()
}

pub(crate) fn ip(address: &str) -> IpAddr {
    address.parse().unwrap()
}

/// A host with 10.9.0.1/24 and fd00::1/64, for which the kernel does not answer.
pub(crate) fn identity() -> Identity {
    let prefix = |address, bits| Prefix { address: ip(address), bits };
    Identity {
        mac: Some(OURS),
        addresses: vec![
            prefix("192.0.2.1", 32),
            prefix("10.9.0.1", 24),
            prefix("fe80::1", 64),
            prefix("fd00::1", 64),
        ],
        elsewhere: BTreeSet::new(),
        groups: Vec::new(),
        mtu: 1500,
        is_whole_host: true,
    }
}

pub(crate) fn pool(chunks: u32) -> Pool {
    let [pool] = pools(chunks);
    pool
}

/// Pools of as many CPUs, each with this number of frames.
pub(crate) fn pools<const N: usize>(chunks: u32) -> [Pool; N] {
    let shares = vec![vec![ChunkClass { chunk_bytes: 512, chunks }]; N];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().try_into().unwrap()
}

pub(crate) fn packet(pool: &mut Pool, bytes: &[u8]) -> Packet {
    let len_bytes = u32::try_from(bytes.len()).unwrap();
    let mut packet =
        Packet::received(pool.allocate(len_bytes).unwrap(), Arrival(1), len_bytes, Link::Ethernet);
    packet.frame.copy_from(bytes);
    packet.headers = parse(bytes, len_bytes, Link::Ethernet, Verify::Checksums);
    packet
}

/// An ARP message from the neighbour, to `to`. Requests have no target MAC address.
pub(crate) fn arp_message(
    to: [u8; 6],
    operation: ArpOperation,
    sender: &str,
    target: &str,
) -> Vec<u8> {
    let message = ArpEthIpv4Packet {
        operation,
        sender_mac: THEIRS,
        sender_ipv4: v4(sender).octets(),
        target_mac: if operation == ArpOperation::REPLY { to } else { [0; 6] },
        target_ipv4: v4(target).octets(),
    };
    let mut bytes = Vec::new();
    PacketBuilder::ethernet2(THEIRS, to).arp(message.into()).write(&mut bytes).unwrap();
    bytes.resize(60, 0xee); // as short frames are padded
    bytes
}

/// A neighbour discovery message from the neighbour.
#[derive(Clone, Debug)]
pub(crate) struct Ndisc {
    pub(crate) source: &'static str,
    pub(crate) destination: &'static str,
    pub(crate) kind: Icmpv6Type,
    pub(crate) target: &'static str,
    pub(crate) options: Vec<u8>,
    pub(crate) hop_limit: u8,
}

/// A solicitation of our address by the neighbour.
pub(crate) fn solicitation() -> Ndisc {
    Ndisc {
        source: "fd00::2",
        destination: "ff02::1:ff00:1",
        kind: Icmpv6Type::NeighborSolicitation,
        target: "fd00::1",
        options: [&[1, 1], THEIRS.as_slice()].concat(),
        hop_limit: 255,
    }
}

/// An advertisement by the neighbour.
pub(crate) fn advertisement(solicited: bool, r#override: bool) -> Ndisc {
    let flags = NeighborAdvertisementHeader { router: false, solicited, r#override };
    Ndisc {
        destination: "fd00::1",
        kind: Icmpv6Type::NeighborAdvertisement(flags),
        target: "fd00::2",
        options: [&[2, 1], THEIRS.as_slice()].concat(),
        ..solicitation()
    }
}

impl Ndisc {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let [source, destination] = [self.source, self.destination].map(|ip| v6(ip).octets());
        let payload = [&v6(self.target).octets(), self.options.as_slice()].concat();
        let builder = PacketBuilder::ethernet2(THEIRS, OURS);
        let builder = builder.ipv6(source, destination, self.hop_limit).icmpv6(self.kind);
        let mut bytes = Vec::new();
        builder.write(&mut bytes, &payload).unwrap();
        bytes
    }

    /// Passes the message to the code under test.
    pub(crate) fn received(
        &self,
        pool: &mut Pool,
    ) -> (Result<NeighbourEvent, NetworkDrop>, Packet) {
        let mut packet = packet(pool, &self.bytes());
        let heard = ndisc::receive(&mut packet, ICMPV6, &identity());
        (heard, packet)
    }
}

pub(crate) fn arp_received(
    pool: &mut Pool,
    bytes: &[u8],
    is_to_us: bool,
) -> (Result<NeighbourEvent, NetworkDrop>, Packet) {
    let mut packet = packet(pool, bytes);
    let heard = arp::receive(&mut packet, &identity(), is_to_us);
    (heard, packet)
}

/// An ARP frame as parsed by etherparse: its MAC addresses and its message.
pub(crate) fn read_arp(packet: &Packet) -> ([[u8; 6]; 2], ArpEthIpv4Packet) {
    let read = PacketHeaders::from_ethernet_slice(packet.frame.data()).unwrap();
    let Some(NetHeaders::Arp(message)) = read.net else { panic!("{read:?}") };
    (link_addresses(read.link), message.try_eth_ipv4().unwrap())
}

/// A neighbour discovery frame as parsed by etherparse.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Read {
    /// Destination and source MAC address.
    pub(crate) link_addresses: [[u8; 6]; 2],
    pub(crate) source: Ipv6Addr,
    pub(crate) destination: Ipv6Addr,
    pub(crate) kind: Icmpv6Type,
    pub(crate) target: Ipv6Addr,
    pub(crate) options: Vec<u8>,
}

pub(crate) fn read_ndisc(packet: &Packet) -> Read {
    let read = PacketHeaders::from_ethernet_slice(packet.frame.data()).unwrap();
    let Some(NetHeaders::Ipv6(header, _)) = &read.net else { panic!("{read:?}") };
    let Some(TransportHeader::Icmpv6(icmp)) = &read.transport else { panic!("{read:?}") };
    let payload = read.payload.slice();
    let sum = icmp.icmp_type.calc_checksum(header.source, header.destination, payload).unwrap();
    assert_eq!((icmp.checksum, header.hop_limit), (sum, 255));
    let (target, options) = payload.split_first_chunk::<16>().unwrap();
    let wire_len = packet.wire_len;
    let parsed = parse(packet.frame.data(), wire_len, Link::Ethernet, Verify::Checksums);
    assert_eq!((packet.headers, parsed.flaw), (parsed, None));
    assert_ne!(parsed.l4_checksum, Checksum::Bad);
    Read {
        link_addresses: link_addresses(read.link),
        source: header.source.into(),
        destination: header.destination.into(),
        kind: icmp.icmp_type,
        target: (*target).into(),
        options: options.to_vec(),
    }
}

fn link_addresses(link: Option<LinkHeader>) -> [[u8; 6]; 2] {
    let Some(LinkHeader::Ethernet2(link)) = link else { panic!("{link:?}") };
    [link.destination, link.source]
}
