//! The kernel's own stack: frames go into a TAP, and sockets behind it receive the datagrams.

use std::net::{SocketAddr, UdpSocket};

use forebay_buf::Pool;
use forebay_device::tun::{TunDevice, TunKind, TunSink};
use forebay_rx::sink::Sink;
use forebay_testkit::namespaces::{await_local_route, command, ip};

use crate::network::frames::{MAC, OWN_V4, OWN_V6, PORTS};
use crate::network::local_addresses;

/// The interface, in the namespace of the test's thread.
pub(crate) const NAME: &str = "net-oracle";

/// Memory for incomplete datagrams.
pub(crate) const FRAGMENTS_BYTES: u32 = 64 << 20;

/// A datagram as an application receives it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Delivered {
    pub(crate) port: u16,
    pub(crate) source: SocketAddr,
    pub(crate) payload: Vec<u8>,
}

/// A TAP and the sockets behind it.
pub(crate) struct Kernel {
    sink: TunSink,
    pool: Pool,
    sockets: Vec<UdpSocket>,
}

impl Kernel {
    /// Creates the TAP and sockets in the calling thread's namespace, which must be new.
    pub(crate) fn new() -> Self {
        command("sysctl -qw net.ipv6.bindv6only=1 net.ipv6.conf.default.accept_dad=0");
        // Most datagrams stay incomplete, and eviction under memory pressure is not compared.
        command(&format!("sysctl -qw net.ipv4.ipfrag_high_thresh={FRAGMENTS_BYTES}"));
        command(&format!("sysctl -qw net.ipv6.ip6frag_high_thresh={FRAGMENTS_BYTES}"));
        // The kernel would send errors to itself if a frame has the kernel's own address as source,
        // and count them.
        command("sysctl -qw net.ipv4.icmp_msgs_per_sec=0 net.ipv4.icmp_msgs_burst=0");
        ip("link set lo up");
        let device = TunDevice::open(NAME, TunKind::Tap, 1).unwrap();
        ip(&format!("link set {NAME} address {}", MAC.map(|byte| format!("{byte:02x}")).join(":")));
        ip(&format!("link set {NAME} addrgenmode none"));
        for (address, bits) in OWN_V4 {
            ip(&format!("addr add {address}/{bits} dev {NAME}"));
        }
        for (address, bits) in OWN_V6 {
            ip(&format!("addr add {address}/{bits} dev {NAME} nodad"));
        }
        ip(&format!("link set {NAME} up"));
        OWN_V6.iter().for_each(|(address, _)| await_local_route(address));
        let wildcards = ["0.0.0.0", "::"].map(|address| address.parse().unwrap());
        let sockets = wildcards.into_iter().flat_map(|address| {
            PORTS.map(|port| {
                let socket = UdpSocket::bind(SocketAddr::new(address, port)).unwrap();
                socket.set_nonblocking(true).unwrap();
                socket
            })
        });
        Self { sockets: sockets.collect(), pool: local_addresses::pool(), sink: device.sink() }
    }

    /// Joins a group with every socket of its family.
    pub(crate) fn join(&self) {
        use crate::network::frames::{JOINED_V4, JOINED_V6};
        let index = nix::net::if_::if_nametoindex(NAME).unwrap();
        for socket in &self.sockets {
            match socket.local_addr().unwrap() {
                SocketAddr::V4(_) => socket.join_multicast_v4(&JOINED_V4, &OWN_V4[0].0).unwrap(),
                SocketAddr::V6(_) => socket.join_multicast_v6(&JOINED_V6, index).unwrap(),
            }
        }
    }

    /// Datagrams received because of one frame. A write passes through the whole stack before it
    /// returns.
    pub(crate) fn offer(&mut self, frame: &[u8]) -> Vec<Delivered> {
        let mut packets = vec![local_addresses::packet(frame, &mut self.pool)];
        self.sink.send(&mut packets).unwrap();
        packets.drain(..).for_each(|packet| self.pool.put(packet.frame));
        self.take()
    }

    fn take(&self) -> Vec<Delivered> {
        let mut delivered = Vec::new();
        let mut bytes = vec![0; 1 << 16];
        for socket in &self.sockets {
            let port = socket.local_addr().unwrap().port();
            while let Ok((len, source)) = socket.recv_from(&mut bytes) {
                let payload = bytes[..len].to_vec();
                delivered.push(Delivered { port, source: plain(source), payload });
            }
        }
        delivered
    }
}

/// The address as in the packet, without scope. For a packet from port 0 of the unspecified
/// address, the kernel matches the first wildcard socket as if connected, possibly the IPv6 socket,
/// even one for IPv6 only (`__udp4_lib_demux_lookup`).
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Rows of `/proc/net/snmp` and `snmp6` in the calling thread's namespace, by name. IPv6 names
/// begin with `Ip6` or `Udp6`.
pub(crate) fn snmp() -> std::collections::BTreeMap<String, u64> {
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap();
    let mut values = std::collections::BTreeMap::new();
    let text = read("snmp");
    let lines: Vec<_> = text.lines().collect();
    for pair in lines.chunks(2) {
        let [names, numbers] = pair else { continue };
        let group = names.split(':').next().unwrap();
        let names = names.split_whitespace().skip(1);
        for (name, number) in names.zip(numbers.split_whitespace().skip(1)) {
            values.insert(format!("{group}{name}"), number.parse::<u64>().unwrap_or(0));
        }
    }
    for line in read("snmp6").lines() {
        let mut words = line.split_whitespace();
        let (name, number) = (words.next().unwrap(), words.next().unwrap());
        values.insert(name.to_owned(), number.parse().unwrap());
    }
    values
}
