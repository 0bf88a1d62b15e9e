//! A host with one device and a virtual clock.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_buf::{Frame, Region};
use forebay_rx::coalesce::cut;
use forebay_rx::cpu::CpuId;
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify, parse_packet};
use forebay_stack::network::{
    Identity, NetworkConfig, NetworkLayer, NetworkVerdict, Prefix, TcpPathError,
};
use forebay_stack::tcp::{FlowHasher, Tcp, TcpConfig, TcpDevice, TcpOut, TcpSocket};

use crate::sysctls::{Sysctls, fast_open_keys, probing, set};

/// Secret of sequence numbers, the same in each run.
const SECRET: [u8; 16] = *b"a constant seed!";
/// Virtual time at the start, in µs: a date, as scripts expect one.
const START_US: u64 = 1_700_000_000_000_000;

/// Sizes and numbers of frames: the memory that the kernel takes for a packet of a TUN, headers and its
/// `sk_buff` included.
const CHUNKS: [(u32, u32); 14] = [
    (832, 4096),
    (1280, 4096),
    (2304, 8192),
    (4352, 1024),
    (8448, 256),
    (12_544, 256),
    (16_640, 128),
    (20_736, 128),
    (24_832, 128),
    (33_024, 64),
    (41_216, 64),
    (49_408, 64),
    (61_696, 64),
    (68 << 10, 64),
];
/// Bytes that the kernel has in the memory of a packet beside its data.
const BESIDE_DATA_BYTES: u32 = 384;
const SK_BUFF_BYTES: u32 = 256;

/// Host of a script.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) tcp: Tcp,
    /// Settings without those that the script changes.
    config: TcpConfig,
    pub(crate) sysctls: Sysctls,
    hasher: FlowHasher,
    network: NetworkLayer,
    identity: Identity,
    pool: Pool,
    /// Packets sent, and the times when they were.
    sent: VecDeque<(Vec<u8>, u64)>,
    pub(crate) now_us: u64,
    /// MTU that the route gets at the next `accept`.
    pub(crate) later_mtu: Option<u32>,
    /// Packets are cut into segments before they reach the device.
    cuts: bool,
    /// A socket of IPv6 was opened, though the addresses are those of IPv4.
    pub(crate) is_mapped: bool,
}

impl Host {
    /// Creates the host with the addresses that packetdrill is told to use. The flags are `v4` or `v6`, and then
    /// perhaps sysctls, by name, of `tcp_rmem` the largest; and of the device, `gso` (0 if it cuts no packets), `mtu`, and `later_mtu`, which it has from the next `accept` on.
    pub(crate) fn new(flags: &str) -> Self {
        let is_ipv6 = flags.contains("v6");
        let mut config = TcpConfig::default();
        let value = |name: &str| {
            let mut flags = flags.split_whitespace();
            flags.find_map(|flag| flag.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        for (name, value) in flags.split_whitespace().filter_map(|flag| flag.split_once('=')) {
            if name != "tcp_rmem" {
                set(&mut config, name, value);
            }
        }
        config.rmem.1 = value("tcp_rmem").unwrap_or(config.rmem.1);
        probing(&mut config, value);
        let keys = flags.split_whitespace().find_map(|flag| flag.strip_prefix("tcp_fastopen_key="));
        // As the kernel on a TUN: scripts see a packet before it is cut.
        config.gso_bytes = 65_536 - 320;
        let (address, bits, mtu) = if is_ipv6 {
            (IpAddr::from([0xfd3d, 0x0a0b, 0x17d6, 0, 0, 0, 0, 1]), 48, 1520)
        } else {
            (IpAddr::from([192, 168, 0, 1]), 16, 1500)
        };
        let mtu = value("mtu").unwrap_or(mtu);
        let share: Vec<ChunkClass> = CHUNKS
            .iter()
            .map(|&(chunk_bytes, chunks)| ChunkClass { chunk_bytes, chunks })
            .collect();
        let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
        let pool = carve(region, &[share]).ok().and_then(|mut pools| pools.pop());
        let mut network = NetworkLayer::new(NetworkConfig::default(), Default::default());
        network.take_tcp();
        let mut tcp = Tcp::new(config, SECRET, START_US);
        if let Some(keys) = keys.and_then(fast_open_keys) {
            tcp.set_fast_open_keys(keys);
        }
        Self {
            tcp,
            config,
            sysctls: Sysctls::new(flags),
            hasher: FlowHasher::new(SECRET),
            network,
            identity: Identity {
                addresses: vec![Prefix { address, bits }],
                mtu,
                is_whole_host: true,
                ..Identity::default()
            },
            pool: pool.unwrap_or_else(|| panic!("the region is as large as its pool")),
            sent: VecDeque::new(),
            now_us: START_US,
            later_mtu: value("later_mtu"),
            cuts: value("gso") == Some(0),
            is_mapped: false,
        }
    }

    /// Gives the route of a connection that was accepted its later MTU, if it has one.
    pub(crate) fn change_route(&mut self, socket: TcpSocket) {
        if let Some(mtu) = self.later_mtu.take() {
            self.identity.mtu = mtu;
            // It is a connection, as it was just accepted.
            let _ = self.call(|tcp, out| tcp.set_route_mtu(socket, mtu, out));
        }
    }

    /// Follows what the script has changed of the settings.
    pub(crate) fn follow_sysctls(&mut self) {
        if self.sysctls.read_again() {
            self.tcp.configure(self.sysctls.config(self.config));
            if let Some(keys) = self.sysctls.fast_open_keys() {
                self.tcp.set_fast_open_keys(keys);
            }
        }
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.identity.addresses[0].address
    }

    pub(crate) fn is_ipv6(&self) -> bool {
        self.address().is_ipv6()
    }

    /// True if sockets are those of IPv6, of which IPv4's addresses are mapped ones.
    pub(crate) fn has_ipv6_sockets(&self) -> bool {
        self.is_ipv6() || self.is_mapped
    }

    /// Address as calls tell it.
    pub(crate) fn told(&self, address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(ip) if self.is_mapped => {
                SocketAddr::new(ip.to_ipv6_mapped().into(), address.port())
            }
            _ => address,
        }
    }

    pub(crate) fn mtu_bytes(&self) -> u32 {
        self.identity.mtu
    }

    /// Calls TCP, and queues what it sends.
    pub(crate) fn call<R>(&mut self, act: impl FnOnce(&mut Tcp, &mut TcpOut<'_>) -> R) -> R {
        let mut packets = Vec::new();
        let (now_us, cpu) = (self.now_us, CpuId(0));
        let mut out = TcpOut { now_us, cpu, pool: &mut self.pool, packets: &mut packets };
        let result = act(&mut self.tcp, &mut out);
        for packet in packets {
            let mut segments = Vec::new();
            match packet.gso_size() {
                size if size > 0 && self.cuts => {
                    // Without frames, the packet is lost.
                    let _ = cut(packet, &mut self.pool, &mut segments);
                }
                _ => segments.push(packet),
            }
            segments.into_iter().for_each(|segment| self.transmit(segment.frame));
        }
        result
    }

    fn transmit(&mut self, frame: Frame) {
        self.sent.push_back((frame.data().to_vec(), self.now_us));
        self.pool.put(frame);
    }

    /// Receives a packet.
    pub(crate) fn deliver(&mut self, bytes: &[u8]) {
        self.follow_sysctls();
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let Some(mut frame) = self.frame_for(len) else { return };
        frame.copy_from(bytes);
        let mut packet = Packet::received(frame, Arrival(0), len, Link::Ip);
        if parse_packet(&mut packet, Verify::Checksums, &mut self.pool).is_err() {
            return self.pool.put(packet.frame);
        }
        let now_ns = self.now_us * 1000;
        let device = TcpDevice { mtu_bytes: self.mtu_bytes(), is_whole_host: true };
        match self.network.receive(packet, &self.identity, now_ns, &mut self.pool) {
            NetworkVerdict::Segment(packet) => {
                let flow = self.hasher.flow_of(&packet);
                self.call(|tcp, out| tcp.receive(packet, flow.as_ref(), device, out));
            }
            NetworkVerdict::PathError(packet, about) => {
                let TcpPathError { flow, seq, error } = *about;
                self.pool.put(packet.frame);
                self.call(|tcp, out| tcp.receive_error(&flow, seq, error, out));
            }
            NetworkVerdict::Answer(packet) => self.transmit(packet.frame),
            NetworkVerdict::Datagram(packet)
            | NetworkVerdict::Taken(packet)
            | NetworkVerdict::Heard(packet, _)
            | NetworkVerdict::Refused(packet, _)
            | NetworkVerdict::TooBig(packet, _)
            | NetworkVerdict::Dropped(packet, _) => self.pool.put(packet.frame),
            NetworkVerdict::Kept => {}
        }
    }

    /// Frame that occupies as much memory as a packet of the kernel: its allocator rounds up.
    fn frame_for(&mut self, len: u32) -> Option<Frame> {
        let before_bytes = CHUNKS.last()?.0 - self.pool.largest_frame_bytes();
        let needed = len + BESIDE_DATA_BYTES + SK_BUFF_BYTES;
        let chunk = CHUNKS.iter().map(|&(chunk, _)| chunk).find(|&chunk| chunk >= needed);
        self.pool.allocate(chunk.map_or(len, |chunk| (chunk - before_bytes).max(len)))
    }

    /// Next packet sent, and its time.
    pub(crate) fn take_sent(&mut self) -> Option<(Vec<u8>, u64)> {
        self.sent.pop_front()
    }

    pub(crate) fn has_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Advances the clock to the next timer, at most to `end_us`. Returns false at `end_us`.
    pub(crate) fn step(&mut self, end_us: u64) -> bool {
        let next_us = self.tcp.next_timer_us().unwrap_or(u64::MAX).max(self.now_us);
        if next_us > end_us {
            self.now_us = self.now_us.max(end_us);
            return false;
        }
        self.now_us = next_us;
        self.call(Tcp::advance);
        true
    }

    /// Sockets that became ready.
    pub(crate) fn has_news(&mut self) -> bool {
        let mut ready: Vec<TcpSocket> = Vec::new();
        self.tcp.take_ready(&mut ready);
        !ready.is_empty()
    }
}
