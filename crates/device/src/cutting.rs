//! Memory of a sink that has no pool, for the segments of GSO packets.

use std::fmt;
use std::ops::ControlFlow;

use forebay_buf::Region;
use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::Packet;
use forebay_rx::coalesce::SegmentCutter;

/// Size of a chunk; larger ones are for longer segments.
const CHUNK_BYTES: u32 = 2048;

/// Memory for segments that are sent together, unless one alone needs more.
const MEMORY_BYTES: u32 = 128 << 10;

/// Memory that segments are cut into. Allocated when the first packet is cut.
#[derive(Default)]
pub(crate) struct CutMemory {
    /// Boxed, as sinks move it with each call.
    pool: Option<Box<Pool>>,
}

impl CutMemory {
    /// Cuts a [GSO packet](Packet::is_gso), and passes its segments to `send`, some at a time, until that breaks off.
    /// Returns false if segments could not be made.
    pub(crate) fn cut(
        &mut self,
        packet: &Packet,
        mut send: impl FnMut(&mut [Packet]) -> ControlFlow<()>,
    ) -> bool {
        let segment_bytes = u32::from(packet.headers.payload_offset) + u32::from(packet.gso_size());
        let Some(mut cutter) = SegmentCutter::new(packet) else { return false };
        let Some(pool) = self.pool_for(segment_bytes) else { return false };
        let mut segments = Vec::new();
        while cutter.left() > 0 {
            while let Some(segment) = cutter.cut_next(pool) {
                segments.push(segment);
            }
            if segments.is_empty() {
                return false;
            }
            let flow = send(&mut segments);
            segments.drain(..).for_each(|segment| pool.put(segment.frame));
            if flow.is_break() {
                break;
            }
        }
        true
    }

    /// Pool with frames for so many bytes.
    fn pool_for(&mut self, len_bytes: u32) -> Option<&mut Pool> {
        if self.pool.as_ref().is_none_or(|pool| pool.largest_frame_bytes() < len_bytes) {
            let chunk_bytes =
                (len_bytes + BEFORE_PACKET_BYTES).next_power_of_two().max(CHUNK_BYTES);
            let chunks = (MEMORY_BYTES / chunk_bytes).max(1);
            let shares = [vec![ChunkClass { chunk_bytes, chunks }]];
            let pools = carve(Region::allocate(region_bytes(&shares)), &shares);
            self.pool = pools.ok()?.pop().map(Box::new);
        }
        self.pool.as_deref_mut()
    }
}

impl fmt::Debug for CutMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CutMemory({:?})", self.pool)
    }
}
