//! One queue, polled by the calling thread.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_buf::Pool;
use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{ChunkClass, carve, region_bytes};
use forebay_device::{Device, RxBuffers};
use forebay_rx::arrive::{
    Attachment, Burst, FrameNeeds, HEAD_CHUNK_BYTES, Numbering, PollRequest, Polled, SourceError,
};
use forebay_rx::{DropReason, RxQueue, Source};
use forebay_sys as sys;
use forebay_sys::Error;

use crate::failure::Failure;

/// Numbers of chunks for the heads of nonlinear packets, for Ethernet frames, and for larger frames
/// if the source needs them: enough for a few bursts, as no packet is kept.
const HEADS: u32 = 4 << 10;
const SMALL_CHUNK_BYTES: u32 = 2 << 10;
const SMALL_CHUNKS: u32 = 4 << 10;
const LARGE_CHUNKS: u32 = 256;
const PAGE_BYTES: u32 = 4 << 10;

/// A queue, and the memory that it receives in.
pub(super) struct Driver {
    source: Box<dyn Source>,
    buffers: Option<Arc<RxBuffers>>,
    pool: Pool,
    burst: Burst,
    max: usize,
    /// True if the first bytes of each packet are read.
    touch: bool,
    origin: Instant,
    /// Cost of reading the clock.
    clock: Duration,
}

/// Counts of received packets.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counted {
    pub(super) packets: usize,
    /// Bytes of the packets, from the Ethernet header on.
    pub(super) bytes: usize,
    /// Memory occupied by the packets.
    pub(super) truesize: usize,
    /// Device buffers that the packets arrived in, if the device reports them.
    pub(super) buffers: Option<usize>,
    /// Polls that returned packets, and polls that did not.
    pub(super) bursts: usize,
    pub(super) empty: usize,
    /// Time of polls that returned packets.
    pub(super) busy: Duration,
    /// Frames that could not be received, by [`DropReason::index`].
    pub(super) refused: [usize; DropReason::ALL.len()],
}

impl Driver {
    /// Creates a driver of a device's first queue, with `max` packets per poll.
    pub(super) fn over(device: &mut Device, max: usize, touch: bool) -> Result<Self, Failure> {
        let Some(source) = device.sources.drain(..).next() else {
            return Err(Failure::usage("the device has no queue", "this is a bug: report it"));
        };
        let buffers = device.rx_buffers.first().cloned();
        Self::new(source, buffers, max, touch)
    }

    fn new(
        mut source: Box<dyn Source>,
        buffers: Option<Arc<RxBuffers>>,
        max: usize,
        touch: bool,
    ) -> Result<Self, Failure> {
        let shares = [chunks(source.needs())];
        let region = sys::map_packet_memory(region_bytes(&shares))?;
        let pool = carve(region, &shares).ok().and_then(|mut pools| pools.pop());
        let Some(mut pool) = pool else {
            return Err(Failure::usage("the region is too small", "this is a bug: report it"));
        };
        let numbering = Numbering::of_queue(RxQueue(0), 1);
        source.attach(Attachment::without_waker(&mut pool, numbering)).map_err(broken)?;
        let (burst, origin) = (Burst::default(), Instant::now());
        let clock = (0..20_000).map(|_| Instant::now().elapsed()).min().unwrap_or_default();
        Ok(Self { source, buffers, pool, burst, max, touch, origin, clock })
    }

    /// Receives until `end`, or until `enough` packets have arrived.
    pub(super) fn run_until(&mut self, end: Instant, enough: usize) -> Result<Counted, Failure> {
        let mut counted = Counted::default();
        let used_before = self.buffers_used();
        let mut now = Instant::now();
        while now < end && counted.packets < enough {
            let before = counted.packets;
            let polled = self.turn(now, &mut counted)?;
            // One reading of the clock ends a turn and begins the next.
            let then = std::mem::replace(&mut now, Instant::now());
            if counted.packets == before {
                counted.empty += 1;
            } else {
                counted.bursts += 1;
                counted.busy += (now - then).saturating_sub(self.clock);
            }
            if polled == Polled::Exhausted {
                break;
            }
        }
        let used = self.buffers_used().zip(used_before);
        counted.buffers =
            used.and_then(|(now, before)| usize::try_from(now.wrapping_sub(before)).ok());
        Ok(counted)
    }

    /// Receives a burst, and returns its frames.
    fn turn(&mut self, now: Instant, counted: &mut Counted) -> Result<Polled, Failure> {
        let now_ns = u64::try_from((now - self.origin).as_nanos()).unwrap_or(u64::MAX);
        let ask = PollRequest { now_ns, max: self.max, may_wait: true, is_last: false };
        let polled = self.source.poll(ask, &mut self.pool, &mut self.burst);
        let polled = polled.map_err(broken)?;
        for packet in self.burst.packets.drain(..) {
            counted.packets += 1;
            counted.bytes += packet.wire_len as usize;
            counted.truesize += packet.frame.truesize() as usize;
            if self.touch {
                black_box(packet.frame.data().first_chunk::<8>());
            }
            self.pool.put(packet.frame);
        }
        for refused in self.burst.refused.drain(..) {
            counted.refused[refused.reason.index()] += 1;
        }
        Ok(polled)
    }

    fn buffers_used(&self) -> Option<u64> {
        self.buffers.as_ref().map(|buffers| buffers.used())
    }

    /// Current size of the device's buffers.
    pub(super) fn rx_buffer_size_bytes(&self) -> Option<u32> {
        self.buffers.as_ref().map(|buffers| buffers.size_bytes())
    }

    /// Drops the queue. Returns the number of frames still in use.
    pub(super) fn close(self) -> usize {
        let Self { source, mut pool, burst, .. } = self;
        drop((source, burst));
        pool.in_use()
    }
}

impl Counted {
    pub(super) fn add(&mut self, other: &Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.truesize += other.truesize;
        self.buffers = match (self.buffers, other.buffers) {
            (Some(buffers), Some(others)) => Some(buffers + others),
            (one, other) => one.or(other),
        };
        self.bursts += other.bursts;
        self.empty += other.empty;
        self.busy += other.busy;
        for (refused, others) in self.refused.iter_mut().zip(other.refused) {
            *refused += others;
        }
    }

    /// Frames that could not be received, by the name of the drop reason.
    pub(super) fn refused(&self) -> BTreeMap<&'static str, usize> {
        let named = DropReason::ALL.map(|reason| (reason.name(), self.refused[reason.index()]));
        named.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

/// Chunks for the frames that the source returns and keeps.
fn chunks(needs: FrameNeeds) -> Vec<ChunkClass> {
    let mut classes = Vec::new();
    if needs.head_frames > 0 {
        classes.push(ChunkClass { chunk_bytes: HEAD_CHUNK_BYTES, chunks: HEADS });
    }
    let small = SMALL_CHUNKS.saturating_add(needs.device_frames);
    classes.push(ChunkClass { chunk_bytes: SMALL_CHUNK_BYTES, chunks: small });
    let largest = needs.largest_bytes.min(u32::from(u16::MAX) * 2) + BEFORE_PACKET_BYTES;
    if largest > SMALL_CHUNK_BYTES {
        let chunk_bytes = largest.next_multiple_of(PAGE_BYTES);
        classes.push(ChunkClass { chunk_bytes, chunks: LARGE_CHUNKS });
    }
    classes
}

/// Converts a failure of the source.
fn broken(error: SourceError) -> Failure {
    match error.downcast::<Error>() {
        Ok(error) => Failure::from(*error),
        Err(source) => Failure::from(Error::Source { queue: RxQueue(0).to_string(), source }),
    }
}

#[cfg(test)]
mod tests {
    use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};

    use super::*;

    #[test]
    fn source_is_counted_and_released() {
        let plan = SyntheticPlan { frames: 10_000, ..SyntheticPlan::default() };
        let source = Box::new(SyntheticSource::new(plan, None));
        let mut driver = Driver::new(source, None, 32, true).unwrap();
        let end = Instant::now() + Duration::from_secs(600);
        let first = driver.run_until(end, 1).unwrap();
        assert_eq!((first.packets, first.bursts), (32, 1));
        let mut all = driver.run_until(end, usize::MAX).unwrap();
        all.add(&first);
        assert_eq!((all.packets, all.bytes, all.refused().len()), (10_000, 600_000, 0));
        assert!(all.truesize >= all.bytes && all.busy > Duration::ZERO, "{all:?}");
        assert_eq!(driver.close(), 0);
    }
}
