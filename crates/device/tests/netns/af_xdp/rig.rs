//! A veth pair in a test's own namespace, with a device on one interface and kernel sockets on the
//! other.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use forebay_buf::Pool;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_device::{Device, DeviceConfig, Via};
use forebay_rx::arrive::{Attachment, Burst, Numbering, PollRequest, Polled, SourceError};
use forebay_rx::sink::Sink;
use forebay_rx::{Packet, RxQueue, Source};
use forebay_sys::interface::Interface;
use forebay_testkit::namespaces::ip;

/// Interface of the device; the kernel's sockets are on `xkb`.
pub(crate) const OURS: &str = "xka";
const ADDRESS: &str = "10.77.0.1";

/// Time after which packets count as lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const PORT: u16 = 9000;

/// Creates the veth pair, with that many queues at both ends.
pub(crate) fn make_link(queues: u16, mtu: u32) {
    ip(&format!(
        "link add xka mtu {mtu} numrxqueues {queues} numtxqueues {queues} address \
         02:00:00:00:00:01 type veth peer name xkb mtu {mtu} numrxqueues {queues} numtxqueues \
         {queues} address 02:00:00:00:00:02"
    ));
    ip("link set xka up");
    ip("link set xkb up");
    ip("addr add 10.77.0.2/24 dev xkb");
    ip("neigh add 10.77.0.1 lladdr 02:00:00:00:00:01 dev xkb nud permanent");
}

/// Opens a socket at the far end.
pub(crate) fn far_socket() -> UdpSocket {
    let socket = UdpSocket::bind("10.77.0.2:0").unwrap();
    socket.connect(SocketAddr::new(ADDRESS.parse().unwrap(), PORT)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

/// Configuration that takes datagrams to [`PORT`].
pub(crate) fn config(queues: u16) -> DeviceConfig {
    let mut config = DeviceConfig::new(OURS, Via::AfXdp);
    config.queues = queues;
    config.take = format!("udp:{PORT}").parse().unwrap();
    config
}

/// The parts of an engine that a test needs.
pub(crate) struct Rig {
    // Dropped before the pools, so that frames return first.
    pub(crate) device: Device,
    pub(crate) sources: Vec<Box<dyn Source>>,
    pub(crate) pools: Vec<Pool>,
    pub(crate) kernel_dropped: u64,
    started: Instant,
}

impl Rig {
    pub(crate) fn open(config: &DeviceConfig) -> Self {
        Self::with_memory(config, 8192, &[])
    }

    /// Opens a device with `spare` frames for each queue beyond those that the queue holds, and
    /// larger ones.
    pub(crate) fn with_memory(config: &DeviceConfig, spare: u32, larger: &[ChunkClass]) -> Self {
        // A process that another test has started may still hold the previous rig's descriptors.
        while Interface::named(OURS).unwrap().xdp_program.is_some() {
            std::thread::yield_now();
        }
        let mut device = Device::open(config).unwrap();
        let mut sources = std::mem::take(&mut device.sources);
        let shares: Vec<_> = sources
            .iter()
            .map(|source| {
                let chunks = source.needs().device_frames + spare;
                let mut classes = vec![ChunkClass { chunk_bytes: 2048, chunks }];
                classes.extend(larger);
                classes
            })
            .collect();
        let region = forebay_sys::map_packet_memory(region_bytes(&shares)).unwrap();
        let mut pools = carve(region, &shares).unwrap();
        let queues = u16::try_from(sources.len()).unwrap();
        for ((number, source), pool) in (0..).zip(&mut sources).zip(&mut pools) {
            let numbering = Numbering::of_queue(RxQueue(number), queues);
            source.attach(Attachment::without_waker(pool, numbering)).unwrap();
        }
        Self { device, sources, pools, kernel_dropped: 0, started: Instant::now() }
    }

    /// Runs a turn of one queue.
    pub(crate) fn turn(
        &mut self,
        queue: usize,
        is_last: bool,
    ) -> Result<(Vec<Packet>, Polled), SourceError> {
        let now_ns = u64::try_from(self.started.elapsed().as_nanos()).unwrap();
        let ask = PollRequest { now_ns, max: 64, may_wait: false, is_last };
        let (source, pool) = (&mut self.sources[queue], &mut self.pools[queue]);
        pool.collect();
        source.transmit(pool);
        let mut burst = Burst::default();
        let polled = source.poll(ask, pool, &mut burst)?;
        assert!(burst.refused.is_empty(), "{:?}", burst.refused);
        self.kernel_dropped += burst.kernel_dropped;
        Ok((burst.packets, polled))
    }

    /// Takes packets until none is left.
    pub(crate) fn take(&mut self, queue: usize, mut each: impl FnMut(&mut Self, Packet)) {
        loop {
            let (packets, polled) = self.turn(queue, false).unwrap();
            let is_empty = packets.is_empty();
            packets.into_iter().for_each(|packet| each(self, packet));
            if is_empty && polled != Polled::Ready {
                return;
            }
        }
    }

    /// Takes so many packets, and those behind them. The kernel may be late to pass on what was sent.
    pub(crate) fn take_count(
        &mut self,
        queue: usize,
        count: usize,
        mut each: impl FnMut(&mut Self, Packet),
    ) {
        let (begun, mut taken) = (Instant::now(), 0);
        while taken < count {
            assert!(begun.elapsed() < PATIENCE, "{taken} of {count} packets have come");
            self.take(queue, |rig, packet| {
                taken += 1;
                each(rig, packet);
            });
        }
    }

    /// Ends a queue as a run does: packets received so far are still taken.
    pub(crate) fn finish(&mut self, queue: usize, mut each: impl FnMut(&mut Self, Packet)) {
        loop {
            let (packets, polled) = self.turn(queue, true).unwrap();
            packets.into_iter().for_each(|packet| each(self, packet));
            if polled == Polled::Exhausted {
                return;
            }
        }
    }

    pub(crate) fn sink(&self) -> Box<dyn Sink> {
        self.device.sink().unwrap()
    }
}

/// Returns the payload of an IPv4 datagram, by its length field.
pub(crate) fn payload(packet: &Packet) -> &[u8] {
    let data = packet.frame.data();
    assert_eq!((&data[12..14], data[23]), (&[8, 0][..], 17), "a datagram over IPv4: {data:02x?}");
    let len = usize::from(u16::from_be_bytes([data[38], data[39]]));
    &data[42..34 + len]
}

/// Swaps the addresses and ports of a datagram, and clears its checksum.
pub(crate) fn turn_round(packet: &mut Packet) {
    let data = packet.frame.data_mut();
    for at in 0..6 {
        data.swap(at, at + 6);
    }
    for at in 26..30 {
        data.swap(at, at + 4);
    }
    data.swap(34, 36);
    data.swap(35, 37);
    data[40..42].fill(0);
}
