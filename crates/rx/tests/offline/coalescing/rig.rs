//! Coalescer by itself: frames in, packets out, and a record of both.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{
    CoalesceConfig, CoalesceMode, Coalescer, FlushReason, MergeRefusal, resegment,
};
use forebay_rx::counters::{CoalesceCounters, Counter};
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::packet::{Arrival, Packet};
use forebay_rx::parse::{Link, Verify, parse_packet};

use crate::coalescing::frames::Wire;

/// Size of the chunk of a small frame.
pub(crate) const SMALL_CHUNK_BYTES: u32 = 512;

/// Frame before merging, or after resegmentation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    pub(crate) link: Link,
    pub(crate) hash: FlowHash,
    pub(crate) arrival: Arrival,
    pub(crate) timestamp_ns: u64,
    pub(crate) wire_len: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Frame {
    pub(crate) fn of(packet: &Packet) -> Self {
        let Packet { hash, arrival, timestamp_ns, wire_len, .. } = *packet;
        let bytes = packet.fragments().flatten().copied().collect();
        Self { link: packet.headers.link, hash, arrival, timestamp_ns, wire_len, bytes }
    }
}

/// Frames that packets were merged from.
pub(crate) fn taken_apart(packets: Vec<Packet>) -> Vec<Frame> {
    let mut frames = Vec::new();
    packets.into_iter().for_each(|packet| resegment(packet, &mut frames));
    frames.iter().map(Frame::of).collect()
}

/// Frames by flow, in the order given.
pub(crate) fn by_hash(frames: &[Frame]) -> BTreeMap<u32, Vec<&Frame>> {
    let mut flows = BTreeMap::<_, Vec<_>>::new();
    for frame in frames {
        flows.entry(frame.hash.0).or_default().push(frame);
    }
    flows
}

/// Nonzero counters by reason.
type Counts<T> = Vec<(T, u64)>;

pub(crate) struct Rig {
    pub(crate) pool: Pool,
    pub(crate) coalescer: Coalescer,
    pub(crate) counters: Arc<CoalesceCounters>,
    pub(crate) verify: Verify,
    pub(crate) now_ns: u64,
    /// Packets that came out and have not been checked yet.
    pub(crate) out: Vec<Packet>,
    /// All frames that went in.
    pub(crate) fed: Vec<Frame>,
    hasher: Hasher,
}

/// Pool of `small` small frames, some for Ethernet's MTU, a few for jumbo frames, and two for the
/// largest packets.
pub(crate) fn pool(small: u32) -> Pool {
    let class = |chunk_bytes, chunks| ChunkClass { chunk_bytes, chunks };
    let large = [class(2048, 100), class(1 << 14, 15), class(1 << 17, 2)];
    let shares = [[class(SMALL_CHUNK_BYTES, small)].into_iter().chain(large).collect()];
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
}

/// Packet of `wire`, as a source gives it.
pub(crate) fn received(wire: &Wire, arrival: Arrival, pool: &mut Pool) -> Packet {
    let mut frame = pool.allocate(u32::try_from(wire.bytes.len()).unwrap()).unwrap();
    frame.copy_from(&wire.bytes);
    let mut packet = said_of(frame, wire, arrival);
    if let Some(vnet) = wire.vnet {
        vnet.carry_into(&mut packet).unwrap();
    }
    packet
}

/// Packet in this frame, with the source's information on `wire`.
pub(crate) fn said_of(frame: forebay_buf::Frame, wire: &Wire, arrival: Arrival) -> Packet {
    let mut packet = Packet::received(frame, arrival, wire.wire_len, wire.link);
    packet.timestamp_ns = wire.timestamp_ns;
    packet.hash = wire.hash;
    packet.device_sum = wire.device_sum;
    packet.headers.l4_checksum = wire.l4_checksum;
    packet
}

impl Rig {
    pub(crate) fn new(config: CoalesceConfig) -> Self {
        let counters = Arc::<CoalesceCounters>::default();
        Self {
            pool: pool(1100),
            coalescer: Coalescer::new(config, Arc::clone(&counters)),
            counters,
            verify: Verify::Checksums,
            now_ns: 1,
            out: Vec::new(),
            fed: Vec::new(),
            hasher: Hasher::keyed(&[7; 16], false),
        }
    }

    pub(crate) fn gro() -> Self {
        Self::new(CoalesceConfig::default())
    }

    pub(crate) fn lro(mtu: u32) -> Self {
        Self::new(CoalesceConfig { mode: CoalesceMode::Lro, mtu, ..CoalesceConfig::default() })
    }

    /// Feeds the frames of one poll, parsed and hashed as in the intake.
    pub(crate) fn feed(&mut self, wires: &[Wire]) {
        let packets = (0..)
            .zip(wires)
            .map(|(number, wire)| received(wire, self.arrival(number), &mut self.pool));
        let packets = packets.collect();
        self.take(packets);
    }

    /// Number of the frame `later` frames after the last one.
    pub(crate) fn arrival(&self, later: u64) -> Arrival {
        Arrival::of_frame(u64::from(u32::MAX - 2) + self.fed.len() as u64 + later)
    }

    /// Feeds packets that were already received.
    pub(crate) fn take(&mut self, packets: Vec<Packet>) {
        let packets = packets.into_iter().map(|mut packet| {
            parse_packet(&mut packet, self.verify, &mut self.pool).unwrap();
            if !packet.hash.is_some() {
                packet.hash = self.hasher.hash(&packet.view());
            }
            self.fed.push(Frame::of(&packet));
            packet
        });
        let mut packets: Vec<_> = packets.collect();
        self.coalescer.coalesce(&mut packets, self.now_ns, &mut self.out);
        assert!(packets.is_empty(), "a poll is taken in whole");
    }

    pub(crate) fn end_poll(&mut self, status: PollStatus) {
        self.coalescer.end_poll(status, self.now_ns, &mut self.out);
    }

    /// Packets that come out of one poll, after which the queue is empty.
    pub(crate) fn poll(&mut self, wires: &[Wire]) -> Vec<Packet> {
        self.feed(wires);
        self.end_poll(PollStatus::Drained);
        std::mem::take(&mut self.out)
    }

    /// Number of segments of each packet that came out since the last call.
    pub(crate) fn counts(&mut self) -> Vec<u32> {
        self.out.drain(..).map(|packet| packet.segment_count()).collect()
    }

    /// Nonzero counts of refusals and flushes so far.
    pub(crate) fn verdicts(&self) -> (Counts<MergeRefusal>, Counts<FlushReason>) {
        fn risen<T: Copy>(all: &[T], counters: &[Counter]) -> Counts<T> {
            let counts = all.iter().copied().zip(counters.iter().map(Counter::get));
            counts.filter(|&(_, count)| count > 0).collect()
        }
        let counters = &self.counters;
        (risen(&MergeRefusal::ALL, &counters.refused), risen(&FlushReason::ALL, &counters.flushes))
    }
}
