//! The network layer under test, given the same frames.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::Packet;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{Link, Verify, parse_into};
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkCounters, NetworkDrop, NetworkLayer, NetworkVerdict, Prefix,
};

use crate::network::frames::{JOINED_V4, JOINED_V6, MAC, OWN_V4, OWN_V6, PORTS};
use crate::network::kernel::{Delivered, FRAGMENTS_BYTES};

/// The network layer under test, with its packet memory.
pub(crate) struct Us {
    network: NetworkLayer,
    identity: Identity,
    pool: Pool,
    fates: Fates,
    /// Frames sent in answer.
    pub(crate) answers: Vec<Vec<u8>>,
}

/// Number of frames by outcome.
#[derive(Clone, Copy, Default, Debug)]
struct Fates {
    datagrams: u64,
    answers: u64,
    taken: u64,
    kept: u64,
    dropped: u64,
}

impl Us {
    pub(crate) fn new() -> Self {
        let counters = Arc::new(NetworkCounters::default());
        let v4 = OWN_V4.map(|(address, bits)| Prefix { address: address.into(), bits });
        let v6 = OWN_V6.map(|(address, bits)| Prefix { address: address.into(), bits });
        let identity = Identity {
            mac: Some(MAC),
            addresses: [v4.as_slice(), &v6].concat(),
            elsewhere: BTreeSet::new(),
            groups: vec![JOINED_V4.into(), JOINED_V6.into()],
            mtu: 1500,
            is_whole_host: true,
        };
        // Rate limits have tests of their own.
        let mut config = NetworkConfig { icmp_ratelimit_ns: 0, ..NetworkConfig::default() };
        config.fragments.ipv4.high_thresh = FRAGMENTS_BYTES;
        config.fragments.ipv6.high_thresh = FRAGMENTS_BYTES;
        let network = NetworkLayer::new(config, counters);
        Self { network, identity, pool: pool(), fates: Fates::default(), answers: Vec::new() }
    }

    /// Datagrams that sockets on [`PORTS`] would receive of one frame, and the frame's other
    /// outcomes.
    pub(crate) fn offer(&mut self, frame: &[u8], verify: Verify) -> (Vec<Delivered>, String) {
        let mut packet = packet(frame, &mut self.pool);
        let wire_len = packet.wire_len;
        parse_into(&mut packet.headers, packet.frame.data(), wire_len, None, verify);
        match self.network.receive(packet, &self.identity, 0, &mut self.pool) {
            NetworkVerdict::Datagram(packet) => {
                self.fates.datagrams += 1;
                let delivered = delivered(&packet);
                if PORTS.contains(&delivered.port) {
                    self.network.delivered(packet.headers.network, 1);
                    self.pool.put(packet.frame);
                    return (vec![delivered], "datagram".into());
                }
                let destination = packet.view().destination().unwrap();
                if self.identity.is_to_many(destination) {
                    self.network.count_drop(&packet, NetworkDrop::NoSocket);
                    self.pool.put(packet.frame);
                    return (Vec::new(), "no socket".into());
                }
                match self.network.unreachable(packet, &self.identity, 0, &mut self.pool) {
                    NetworkVerdict::Answer(packet) => self.answer(packet),
                    NetworkVerdict::Dropped(packet, _) => self.pool.put(packet.frame),
                    other => panic!("{other:?}"),
                }
                (Vec::new(), "no socket".into())
            }
            NetworkVerdict::Answer(packet) => {
                self.fates.answers += 1;
                self.answer(packet);
                (Vec::new(), "answer".into())
            }
            NetworkVerdict::Heard(packet, heard) if heard.is_answer => {
                self.fates.answers += 1;
                self.answer(packet);
                (Vec::new(), "answer".into())
            }
            NetworkVerdict::Taken(packet)
            | NetworkVerdict::Segment(packet)
            | NetworkVerdict::PathError(packet, _)
            | NetworkVerdict::Refused(packet, _)
            | NetworkVerdict::TooBig(packet, _)
            | NetworkVerdict::Heard(packet, _) => {
                self.fates.taken += 1;
                self.pool.put(packet.frame);
                (Vec::new(), "taken".into())
            }
            NetworkVerdict::Kept => {
                self.fates.kept += 1;
                (Vec::new(), "kept".into())
            }
            NetworkVerdict::Dropped(packet, reason) => {
                self.fates.dropped += 1;
                self.pool.put(packet.frame);
                (Vec::new(), reason.name().into())
            }
        }
    }

    fn answer(&mut self, packet: Packet) {
        self.answers.push(packet.frame.data().to_vec());
        self.pool.put(packet.frame);
    }

    /// Drops incomplete datagrams, and checks that every frame is back and had one outcome.
    pub(crate) fn end(mut self, frames: u64) {
        let waiting = u64::from(self.network.fragments().frames());
        let mut dropped = Vec::new();
        // Each call drops a bounded number.
        while self.network.fragments().frames() > 0 {
            self.network.expire(u64::MAX, &mut dropped);
        }
        assert_eq!(dropped.len() as u64, waiting);
        dropped.into_iter().for_each(|(packet, _)| self.pool.put(packet.frame));
        assert_eq!(self.pool.in_use(), 0);
        let Fates { datagrams, answers, taken, dropped, kept, .. } = self.fates;
        assert_eq!(datagrams + answers + taken + dropped + kept, frames);
    }

    /// Counters, by the kernel's names.
    pub(crate) fn counted(&self) -> Vec<(&'static str, u64)> {
        let NetworkCounters { ip, ip6, udp, udp6, icmp, icmp6, .. } =
            self.network.counters().as_ref();
        let counters = [
            ("IpInReceives", &ip.in_receives),
            ("IpInHdrErrors", &ip.in_hdr_errors),
            ("IpInAddrErrors", &ip.in_addr_errors),
            ("IpInDiscards", &ip.in_discards),
            ("IpInDelivers", &ip.in_delivers),
            ("IpInUnknownProtos", &ip.in_unknown_protos),
            ("IpReasmReqds", &ip.reasm_reqds),
            ("IpReasmOKs", &ip.reasm_oks),
            ("IpReasmFails", &ip.reasm_fails),
            ("UdpInDatagrams", &udp.in_datagrams),
            ("UdpNoPorts", &udp.no_ports),
            ("UdpInErrors", &udp.in_errors),
            ("UdpInCsumErrors", &udp.in_csum_errors),
            ("UdpIgnoredMulti", &udp.ignored_multi),
            ("IcmpInMsgs", &icmp.in_msgs),
            ("IcmpInErrors", &icmp.in_errors),
            ("IcmpInCsumErrors", &icmp.in_csum_errors),
            ("Ip6InReceives", &ip6.in_receives),
            ("Ip6InHdrErrors", &ip6.in_hdr_errors),
            ("Ip6InAddrErrors", &ip6.in_addr_errors),
            ("Ip6InTruncatedPkts", &ip6.in_truncated_pkts),
            ("Ip6InDiscards", &ip6.in_discards),
            ("Ip6InDelivers", &ip6.in_delivers),
            ("Ip6InUnknownProtos", &ip6.in_unknown_protos),
            ("Ip6ReasmReqds", &ip6.reasm_reqds),
            ("Ip6ReasmOKs", &ip6.reasm_oks),
            ("Ip6ReasmFails", &ip6.reasm_fails),
            ("Udp6InDatagrams", &udp6.in_datagrams),
            ("Udp6NoPorts", &udp6.no_ports),
            ("Udp6InErrors", &udp6.in_errors),
            ("Udp6IgnoredMulti", &udp6.ignored_multi),
            ("Udp6InCsumErrors", &udp6.in_csum_errors),
            ("Icmp6InMsgs", &icmp6.in_msgs),
            ("Icmp6InErrors", &icmp6.in_errors),
            ("Icmp6InCsumErrors", &icmp6.in_csum_errors),
        ];
        counters.into_iter().map(|(name, counter)| (name, counter.get())).collect()
    }
}

fn delivered(packet: &Packet) -> Delivered {
    let view = packet.view();
    let (source_port, port) = view.ports().unwrap();
    let source = SocketAddr::new(view.source().unwrap().to_canonical(), source_port);
    Delivered { port, source, payload: view.payload().to_vec() }
}

/// A frame as a source would return it, not parsed yet.
pub(crate) fn packet(bytes: &[u8], pool: &mut Pool) -> Packet {
    let len = u32::try_from(bytes.len()).unwrap();
    let mut frame = pool.allocate(len).unwrap();
    frame.copy_from(bytes);
    Packet::received(frame, Arrival(0), len, Link::Ethernet)
}

/// Packet memory.
pub(crate) fn pool() -> Pool {
    let share = vec![
        ChunkClass { chunk_bytes: 2048, chunks: 16_384 },
        ChunkClass { chunk_bytes: 1 << 17, chunks: 16 },
    ];
    let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
    carve(region, &[share]).unwrap().remove(0)
}
