//! Ten thousand sockets of a real `Net` over 128 CPUs, which threads have delivered datagrams on.
//!
//! However many CPUs the machine has: to each socket by about 68, to which its 96 flows are hashed. Only the device
//! is replaced, by a source of these datagrams. As root, since replies would leave by the loopback interface.

use std::net::{Ipv4Addr, SocketAddrV4};

use forebay::net::{Addresses, Net, NetConfig, UdpSocket};
use forebay::{Config, CpuId, CpuList, Device, Packet, Pool, Source, Via, WhenFull};
use forebay_metrics::{Metrics, SOCKETS_LISTED_MAX};
use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::parse::checksum::Sum;
use forebay_rx::steer::SpreadPolicy;

pub(crate) const CPUS: u16 = 128;

/// Flows to each socket: they are hashed to about half of the CPUs.
pub(crate) const FLOWS: u64 = 96;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OWN: Ipv4Addr = Ipv4Addr::new(192, 168, 100, 100);
const FIRST_PORT: u16 = 1024;

/// Datagrams without a payload, one of each flow to each socket.
struct Datagrams {
    number: u64,
}

impl Datagrams {
    const COUNT: u64 = SOCKETS_LISTED_MAX as u64 * FLOWS;

    /// The frame of a number: to the sockets in turn, and of another flow in each round.
    fn frame(number: u64) -> [u8; 60] {
        let sockets = SOCKETS_LISTED_MAX as u64;
        let [socket, flow] = [number % sockets, number / sockets];
        let mut frame = [0; 60];
        frame[..6].copy_from_slice(&MAC);
        frame[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 8, 0]);
        let ip = &mut frame[14..34];
        ip[..10].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17]);
        ip[12..16].copy_from_slice(&[192, 168, 100, 1]);
        ip[16..20].copy_from_slice(&OWN.octets());
        let checksum = !Sum::of(ip).fold();
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        let source = FIRST_PORT + u16::try_from(flow).unwrap();
        let port = FIRST_PORT + u16::try_from(socket).unwrap();
        frame[34..36].copy_from_slice(&source.to_be_bytes());
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        frame[38..40].copy_from_slice(&8_u16.to_be_bytes());
        frame
    }
}

impl Source for Datagrams {
    fn poll(
        &mut self,
        PollRequest { max, .. }: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        while burst.len() < max {
            if self.number == Self::COUNT {
                return Ok(Polled::Exhausted);
            }
            let bytes = Self::frame(self.number);
            let wire_len = u32::try_from(bytes.len()).unwrap();
            let Some(frame) = pool.allocate(wire_len) else { break };
            let arrival = Arrival::of_frame(self.number);
            let mut packet = Packet::received(frame, arrival, wire_len, Link::Ethernet);
            packet.frame.set_len(wire_len);
            packet.frame.data_mut().copy_from_slice(&bytes);
            burst.packets.push(packet);
            self.number += 1;
        }
        Ok(Polled::Ready)
    }
}

/// Sockets that datagrams have come to by many CPUs, and metrics of them and of the engine.
///
/// # Panics
///
/// If the sockets cannot be set up.
pub(crate) fn deliver() -> (Vec<UdpSocket>, Metrics) {
    let cpus = CpuList::new((0..CPUS).map(CpuId));
    let config = Config {
        rps_cpus: Some(cpus.clone()),
        cpus,
        spread: SpreadPolicy::Always,
        when_full: WhenFull::Wait,
        ..Config::live()
    };
    let addresses = Addresses::Own { mac: Some(MAC), addresses: vec![(OWN.into(), 24)] };
    // Each socket keeps its first datagram, and refuses the others.
    let net = NetConfig { addresses: vec![addresses], kept_frames: 16_384, ..NetConfig::default() };
    let source = Box::new(Datagrams { number: 0 });
    let mut devices = [Device::of_sources("lo", Via::Tap, vec![source])];
    let (net, engine) = Net::over(&config, &net, &mut devices).unwrap();
    let bind = |number: usize| {
        let port = FIRST_PORT + u16::try_from(number).unwrap();
        net.socket().recv_buffer_size(1).bind(SocketAddrV4::new(OWN, port)).unwrap()
    };
    let sockets = (0..SOCKETS_LISTED_MAX).map(bind).collect();
    let metrics = Metrics::new().with_engine(engine.control()).with_sockets(net);
    engine.run().unwrap();
    (sockets, metrics)
}
