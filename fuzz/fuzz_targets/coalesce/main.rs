//! Segments of a few flows, some in tunnels, some modified, mixed with any bytes, through coalescing while
//! its settings change. Resegmented, every merged packet equals its frames byte for byte (promise
//! 6), no packet of a hash overtakes another (1), every frame leaves once and is returned (2, 4),
//! and no limit is exceeded (3).
#![no_main]

mod flows;
mod ledger;
#[path = "../pieces.rs"]
mod pieces;
mod tunnels;

use std::sync::Arc;

use arbitrary::Arbitrary;
use flows::{Change, Flows, Received};
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_rx::Packet;
use forebay_rx::arrive::PollStatus;
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode, Coalescer, FlushReason, HELD_NS_MAX};
use forebay_rx::counters::CoalesceCounters;
use forebay_rx::hash::{FlowHash, Hasher};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::{DeviceSum, Headers, Link, Verify, parse, parse_packet};
use ledger::Ledger;
use libfuzzer_sys::fuzz_target;
use pieces::{HEADS, Shared};

/// Enough chunks for the packet with most segments of the smallest size, and for one of the
/// largest.
const CHUNKS: [ChunkClass; 4] = [
    ChunkClass { chunk_bytes: 512, chunks: 600 },
    ChunkClass { chunks: 300, ..HEADS },
    ChunkClass { chunk_bytes: 2048, chunks: 64 },
    ChunkClass { chunk_bytes: 10_240, chunks: 12 },
];

#[derive(Arbitrary, Debug)]
struct Run {
    knobs: Knobs,
    operations: Vec<Operation>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Knobs {
    settings: Settings,
    device: Device,
    /// True if all flows share two hashes.
    collide: bool,
    /// Bit 0: frames carry their arrival time. Bit 1: their ends are in pieces; the other bits say
    /// how much is not, in units of 4 bytes.
    ways: u8,
    /// True if packets that leave are coalesced again, as when coalescing moves from arrival to
    /// delivery.
    twice: bool,
}

/// Bits of [`Knobs::ways`].
const TIMED: u8 = 1;
const IN_PIECES: u8 = 2;

/// Checksum offload of the device.
#[derive(Arbitrary, Clone, Copy, PartialEq, Eq, Debug)]
enum Device {
    Nothing,
    /// The device verifies checksums.
    Verifies,
    /// The device sums all bytes (CHECKSUM_COMPLETE).
    SumsUp,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Settings {
    lro: bool,
    descriptors: u8,
    jumbo: bool,
    timeout_us: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Operation {
    /// Consecutive segments of a flow.
    Train { flow: u8, size: u8, count: u8 },
    /// A modified segment of a flow.
    Odd { flow: u8, size: u8, change: Change },
    /// A frame of any bytes.
    Raw { len: u8, bytes: [u8; 60] },
    /// End of a poll, and a pause.
    EndPoll { status: AnyStatus, wait_us: u16 },
    /// Change of the settings.
    Set(Settings),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum AnyStatus {
    MorePending,
    Drained,
    Last,
}

fuzz_target!(|run: Run| {
    let mut rig = Rig::new(run.knobs);
    for operation in run.operations {
        rig.operate(operation);
        rig.ledger.account(&rig.counters);
    }
    rig.end_poll(PollStatus::Last);
    rig.ledger.close(&rig.counters);
    assert_eq!(rig.pool.in_use(), 0, "all frames are home");
    if let Some(shared) = &mut rig.shared {
        shared.check_all_is_home(&mut rig.pool);
    }
});

struct Rig {
    knobs: Knobs,
    coalescer: Coalescer,
    counters: Arc<CoalesceCounters>,
    second: Option<Coalescer>,
    hasher: Hasher,
    pool: Pool,
    /// Memory of a device whose frames end in pieces.
    shared: Option<Shared>,
    flows: Flows,
    ledger: Ledger,
    now_ns: u64,
}

impl Rig {
    fn new(knobs: Knobs) -> Self {
        let shares = [CHUNKS.to_vec()];
        let pools = carve(Region::allocate(region_bytes(&shares)), &shares).expect("large enough");
        let counters = Arc::new(CoalesceCounters::default());
        let config = knobs.settings.config();
        Self {
            knobs,
            coalescer: Coalescer::new(config, Arc::clone(&counters)),
            second: knobs.twice.then(|| Coalescer::new(config, Arc::default())),
            counters,
            hasher: Hasher::keyed(&[7; 16], false),
            pool: pools.into_iter().next().expect("one share"),
            shared: (knobs.ways & IN_PIECES > 0).then(Shared::new),
            flows: Flows::default(),
            ledger: Ledger::default(),
            now_ns: 1,
        }
    }

    fn operate(&mut self, operation: Operation) {
        match operation {
            Operation::Train { flow, size, count } => {
                for _ in 0..=count {
                    let received = self.flows.next(flow, size, Change::Nothing);
                    self.receive(&received);
                }
            }
            Operation::Odd { flow, size, change } => {
                let received = self.flows.next(flow, size, change);
                self.receive(&received);
            }
            Operation::Raw { len, bytes } => {
                let bytes = bytes[..usize::from(len) % (bytes.len() + 1)].to_vec();
                let link = if len < 128 { Link::Ethernet } else { Link::Ip };
                self.receive(&Received { cut_off: 0, link, bytes });
            }
            Operation::EndPoll { status, wait_us } => {
                self.now_ns += u64::from(wait_us) * 1000;
                self.end_poll(match status {
                    AnyStatus::MorePending => PollStatus::MorePending,
                    AnyStatus::Drained => PollStatus::Drained,
                    AnyStatus::Last => PollStatus::Last,
                });
            }
            Operation::Set(settings) => {
                let mut out = Vec::new();
                let mode = self.coalescer.config().mode;
                self.coalescer.set_config(settings.config(), &mut out);
                assert_eq!(self.coalescer.held(), 0);
                self.leave_flushed(out, mode);
                self.leave_second(mode, |second, out| second.set_config(settings.config(), out));
            }
        }
    }

    fn receive(&mut self, received: &Received) {
        let Some(packet) = self.packet(received) else { return };
        self.ledger.enter(&packet);
        let (mut packets, mut out) = (vec![packet], Vec::new());
        self.coalescer.coalesce(&mut packets, self.now_ns, &mut out);
        assert!(packets.is_empty());
        let CoalesceConfig { mode, descriptors, .. } = *self.coalescer.config();
        assert!(self.coalescer.held() <= descriptors.max(1).next_power_of_two() as usize);
        self.leave(out, mode);
    }

    /// Packet that an intake makes of a frame; `None` if the pool has no frame.
    fn packet(&mut self, received: &Received) -> Option<Packet> {
        let len_bytes = u32::try_from(received.bytes.len()).expect("short");
        let frame = match &mut self.shared {
            Some(shared) => {
                let head_len = usize::from(self.knobs.ways >> 2) * 4;
                shared.split(&received.bytes, head_len, &mut self.pool)?
            }
            None => {
                let mut frame = self.pool.allocate(len_bytes)?;
                frame.copy_from(&received.bytes);
                frame
            }
        };
        let arrival = Arrival::of_frame(self.ledger.next_frame());
        let wire_len = len_bytes + u32::from(received.cut_off);
        let mut packet = Packet::received(frame, arrival, wire_len, received.link);
        packet.timestamp_ns = if self.knobs.ways & TIMED > 0 { self.now_ns } else { 0 };
        let checked = parse(&received.bytes, wire_len, received.link, Verify::Checksums);
        let verify = match self.knobs.device {
            Device::Nothing => Verify::Checksums,
            Device::Verifies => {
                let l4_checksum = checked.l4_checksum;
                packet.headers = Headers { l4_checksum, ..packet.headers };
                Verify::Nothing
            }
            Device::SumsUp => {
                packet.device_sum = DeviceSum::of_frame(&received.bytes, received.link);
                Verify::Nothing
            }
        };
        parse_packet(&mut packet, verify, &mut self.pool).expect("few headers are long");
        let hash = self.hasher.hash(&packet.view());
        let collides = self.knobs.collide && hash.is_some();
        packet.hash = if collides { FlowHash(1 + hash.0 % 2) } else { hash };
        Some(packet)
    }

    fn end_poll(&mut self, status: PollStatus) {
        let mut out = Vec::new();
        self.coalescer.end_poll(status, self.now_ns, &mut out);
        let CoalesceConfig { mode, gro_flush_timeout_ns, .. } = *self.coalescer.config();
        self.leave_flushed(out, mode);
        self.leave_second(mode, |second, out| second.flush(FlushReason::PollEnd, out));
        if status == PollStatus::Last || status == PollStatus::Drained && gro_flush_timeout_ns == 0
        {
            assert_eq!(self.coalescer.held(), 0);
        }
        assert_eq!(self.coalescer.next_timeout_ns().is_some(), self.coalescer.held() > 0);
        let tick_ns = if gro_flush_timeout_ns == 0 { HELD_NS_MAX } else { 0 };
        let due_ns = self.coalescer.next_timeout_ns().map(|due_ns| due_ns + tick_ns);
        assert!(due_ns.is_none_or(|due_ns| due_ns > self.now_ns), "held for too long");
    }

    /// Packets that were flushed together leave oldest first.
    fn leave_flushed(&mut self, packets: Vec<Packet>, mode: CoalesceMode) {
        assert!(packets.is_sorted_by_key(|packet| packet.arrival.0));
        self.leave(packets, mode);
    }

    /// Packets leave coalescing, and enter the second one if there is one.
    fn leave(&mut self, mut packets: Vec<Packet>, mode: CoalesceMode) {
        self.ledger.count(&packets);
        if let Some(second) = &mut self.second {
            let mut out = Vec::new();
            second.coalesce(&mut packets, self.now_ns, &mut out);
            packets = out;
        }
        self.judge(packets, mode);
    }

    fn leave_second(
        &mut self,
        mode: CoalesceMode,
        let_go: impl FnOnce(&mut Coalescer, &mut Vec<Packet>),
    ) {
        let mut out = Vec::new();
        if let Some(second) = &mut self.second {
            let_go(second, &mut out);
        }
        self.judge(out, mode);
    }

    fn judge(&mut self, packets: Vec<Packet>, mode: CoalesceMode) {
        for packet in packets {
            self.ledger.judge(packet, mode, &mut self.pool);
        }
    }
}

impl Settings {
    fn config(self) -> CoalesceConfig {
        CoalesceConfig {
            mode: if self.lro { CoalesceMode::Lro } else { CoalesceMode::Gro },
            descriptors: u32::from(self.descriptors % 17),
            mtu: if self.jumbo { 9000 } else { 1500 },
            gro_flush_timeout_ns: u64::from(self.timeout_us) * 1000,
            ..CoalesceConfig::default()
        }
    }
}
