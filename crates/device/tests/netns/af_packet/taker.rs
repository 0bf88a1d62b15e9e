//! A source polled as by an engine, and the packets received.

use std::thread;
use std::time::{Duration, Instant};

use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_buf::{Pool, Region};
use forebay_device::af_packet::{PacketOptions, PacketRing, PacketSource, open};
use forebay_device::rx_filter::RxFilter;
use forebay_rx::arrive::{
    Attachment, Burst, Numbering, PollRequest, Polled, RefusedFrame, SourceError,
};
use forebay_rx::parse::{Verify, parse_into};
use forebay_rx::{Packet, RxQueue, Source};
use forebay_sys::interface::Interface;

/// Maximum number of frames in a burst.
const BURST: usize = 64;

pub(crate) struct Taker {
    source: PacketSource,
    pool: Pool,
    began: Instant,
    /// Packets received and not processed yet.
    pub(crate) packets: Vec<Packet>,
    pub(crate) refused: Vec<RefusedFrame>,
    pub(crate) kernel_dropped: u64,
}

/// Options for one queue that takes all frames, verified.
pub(crate) fn options() -> PacketOptions {
    PacketOptions {
        queues: 1,
        take: RxFilter::All,
        promiscuous: false,
        ring: PacketRing::Blocks,
        device_hash: false,
        verify: Verify::Checksums,
    }
}

impl Taker {
    /// Opens the interface of that name in the namespace of the calling thread.
    pub(crate) fn open(name: &str) -> Self {
        Self::open_queues(name, &options()).remove(0)
    }

    /// Opens the interface with a ring of slots.
    pub(crate) fn open_slots(name: &str) -> Self {
        Self::open_queues(name, &PacketOptions { ring: PacketRing::Frames, ..options() }).remove(0)
    }

    pub(crate) fn open_queues(name: &str, options: &PacketOptions) -> Vec<Self> {
        let sources = open(&Interface::named(name).unwrap(), options).unwrap();
        let queues = options.queues;
        sources.into_iter().zip(0..).map(|(it, number)| Self::of(it, number, queues)).collect()
    }

    fn of(mut source: PacketSource, number: u16, queues: u16) -> Self {
        let classes = [
            ChunkClass { chunk_bytes: 2048, chunks: 4000 },
            ChunkClass { chunk_bytes: (66 << 10), chunks: 200 },
        ];
        let shares = [classes.to_vec()];
        let mut pool = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0);
        let numbering = Numbering::of_queue(RxQueue(number), queues);
        source.attach(Attachment::without_waker(&mut pool, numbering)).unwrap();
        Self {
            source,
            pool,
            began: Instant::now(),
            packets: Vec::new(),
            refused: Vec::new(),
            kernel_dropped: 0,
        }
    }

    /// Polls once, and parses the packets received.
    pub(crate) fn poll(&mut self, is_last: bool) -> Result<Polled, SourceError> {
        let now_ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap();
        let ask = PollRequest { now_ns, max: BURST, may_wait: false, is_last };
        let mut burst = Burst::default();
        let polled = self.source.poll(ask, &mut self.pool, &mut burst);
        for packet in &mut burst.packets {
            let Packet { headers, frame, wire_len, device_sum, .. } = packet;
            parse_into(headers, frame.data(), *wire_len, *device_sum, Verify::Checksums);
        }
        self.packets.append(&mut burst.packets);
        self.refused.append(&mut burst.refused);
        self.kernel_dropped += burst.kernel_dropped;
        polled
    }

    /// Polls until that many packets were received, without any loss.
    pub(crate) fn await_packets(&mut self, count: usize) {
        while self.packets.len() < count {
            if self.poll(false).unwrap() != Polled::Ready {
                thread::sleep(Duration::from_micros(200));
            }
            assert_eq!((self.kernel_dropped, &*self.refused), (0, &[][..]));
        }
    }

    /// Polls until a packet was received; losses are allowed.
    pub(crate) fn await_some(&mut self) {
        while self.packets.is_empty() {
            self.poll(false).unwrap();
        }
    }

    /// Polls to the end and returns the number of frames received; none are kept.
    pub(crate) fn count_to_end(&mut self) -> u64 {
        let mut frames = 0;
        loop {
            let polled = self.poll(true).unwrap();
            frames += (self.packets.len() + self.refused.len()) as u64;
            self.recycle();
            self.refused.clear();
            match polled {
                Polled::Exhausted => return frames,
                Polled::Ready => {}
                Polled::Idle | Polled::IdleUntil { .. } | Polled::BehindUntil { .. } => {
                    thread::sleep(Duration::from_micros(200));
                }
            }
        }
    }

    /// Polls until an error.
    pub(crate) fn await_error(&mut self) -> SourceError {
        loop {
            match self.poll(false) {
                Ok(_) => thread::sleep(Duration::from_micros(200)),
                Err(error) => return error,
            }
        }
    }

    /// Frees the packets received.
    pub(crate) fn recycle(&mut self) {
        for packet in self.packets.drain(..) {
            self.pool.put(packet.frame);
        }
    }
}
