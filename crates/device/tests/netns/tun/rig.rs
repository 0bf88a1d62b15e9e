//! Shared parts of the tests: packet memory, and sources polled by hand.

use std::time::Instant;

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_device::tun::{TunDevice, TunSource};
use forebay_rx::arrive::{Attachment, Burst, Numbering, PollRequest, Polled};
use forebay_rx::{Packet, RxQueue, Source};
use forebay_testkit::namespaces::{command, ip};

/// Sources of a device, polled by hand, with their own packet memory.
pub(crate) struct Rig {
    pub(crate) pool: Pool,
    pub(crate) sources: Vec<TunSource>,
    pub(crate) burst: Burst,
    /// Number of packets reported as dropped by the kernel so far.
    pub(crate) dropped: u64,
    begun: Instant,
}

/// Result of the last poll, which yielded no more packets.
pub(crate) type Ended = Result<Polled, Box<dyn std::error::Error + Send + Sync>>;

impl Rig {
    pub(crate) fn new(device: &TunDevice) -> Self {
        Self::with_chunks(device, 2048, 256)
    }

    /// Rig with that many small and large chunks.
    pub(crate) fn with_chunks(device: &TunDevice, small: u32, large: u32) -> Self {
        let mut sources = device.sources(forebay_rx::parse::Verify::Checksums);
        let largest = sources[0].needs().largest_bytes;
        let share = vec![
            ChunkClass { chunk_bytes: 2048, chunks: small },
            ChunkClass { chunk_bytes: (largest + 256).next_multiple_of(64), chunks: large },
        ];
        let region = Region::allocate(region_bytes(std::slice::from_ref(&share)));
        let mut pool = carve(region, &[share]).unwrap().remove(0);
        let queues = u16::try_from(sources.len()).unwrap();
        for (queue, source) in (0..).map(RxQueue).zip(&mut sources) {
            let numbering = Numbering::of_queue(queue, queues);
            source.attach(Attachment::without_waker(&mut pool, numbering)).unwrap();
        }
        let (burst, dropped, begun) = (Burst::default(), 0, Instant::now());
        Self { pool, sources, burst, dropped, begun }
    }

    /// Polls one queue until it has no more packets.
    pub(crate) fn drain(&mut self, queue: usize) -> (Vec<Packet>, Ended) {
        self.poll(queue, false)
    }

    /// Polls one queue until it is exhausted.
    pub(crate) fn finish(&mut self, queue: usize) -> Vec<Packet> {
        let mut packets = Vec::new();
        loop {
            let (more, ended) = self.poll(queue, true);
            packets.extend(more);
            if ended.unwrap() == Polled::Exhausted {
                return packets;
            }
        }
    }

    /// Drains a queue until `count` packets were received.
    pub(crate) fn take(&mut self, queue: usize, count: usize) -> Vec<Packet> {
        let mut packets = Vec::new();
        while packets.len() < count {
            packets.extend(self.drain(queue).0);
            std::thread::yield_now();
        }
        packets
    }

    fn poll(&mut self, queue: usize, is_last: bool) -> (Vec<Packet>, Ended) {
        let mut packets = Vec::new();
        loop {
            let now_ns = u64::try_from(self.begun.elapsed().as_nanos()).unwrap();
            let ask = PollRequest { now_ns, max: 64, may_wait: false, is_last };
            let polled = self.sources[queue].poll(ask, &mut self.pool, &mut self.burst);
            assert!(self.burst.refused.is_empty(), "{:?}", self.burst.refused);
            self.dropped += std::mem::take(&mut self.burst.kernel_dropped);
            let is_empty = self.burst.is_empty();
            assert!(self.burst.packets.iter().all(|it| it.timestamp_ns > 0), "packets have a time");
            packets.append(&mut self.burst.packets);
            match polled {
                Ok(Polled::Ready) if !is_empty => {}
                ended => return (packets, ended),
            }
        }
    }

    /// Frees packets, and checks that all frames have returned.
    pub(crate) fn all_home(mut self, packets: Vec<Packet>) {
        for packet in packets {
            self.pool.put(packet.frame);
        }
        drop(self.sources);
        assert_eq!(self.pool.in_use(), 0);
    }
}

/// Assigns an address to an interface.
pub(crate) fn address(name: &str) {
    ip(&format!("addr add 10.9.0.1/24 dev {name}"));
}

/// Prevents unsolicited packets of the kernel, such as router solicitations.
pub(crate) fn silence() {
    command("sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1");
}

/// Adds the neighbour that packets through a TAP go to.
pub(crate) fn neighbour(name: &str) {
    ip(&format!("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev {name} nud permanent"));
}

/// Payload that identifies a datagram.
pub(crate) fn payload(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((number * 31 + at * 7) % 251).unwrap()).collect()
}
