//! Packet memory of an engine: its size, and the sizes of its chunks.

use forebay_buf::Pool;
use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::pool::{ChunkClass, FREE_BATCH_FRAMES, MIN_CHUNK_BYTES, carve, region_bytes};
use forebay_device::MAX_RECORD_BYTES;
use forebay_rx::Source;
use forebay_rx::arrive::{FrameNeeds, HEAD_CHUNK_BYTES};
use forebay_rx::intake::DEV_WEIGHT;
use forebay_sys as sys;
use forebay_sys::error::{Error, Result};

use super::config::Config;

/// Pools of an engine's packet memory.
pub(super) struct Pools {
    /// One pool for each queue.
    pub(super) queues: Vec<Pool>,
    /// One pool for each CPU.
    pub(super) cpus: Vec<Pool>,
    /// One pool for each further thread that makes packets.
    pub(super) senders: Vec<Pool>,
    /// Pools of the smallest chunks, one for each CPU.
    pub(super) small: Vec<Pool>,
}

/// Allocates the pools. Each queue gets chunks for all packets in flight from it and for those its
/// device holds, fewer of the large sizes. A CPU owns a few chunks at most, and returns what it
/// delivers to the owners.
pub(super) fn pools(config: &Config, sources: &[Box<dyn Source>]) -> Result<Pools> {
    let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let per_cpu = config.backlog_capacity() + config.batch_max + narrow(FREE_BATCH_FRAMES);
    let cpus = config.cpus.cpus().len();
    let on_path = narrow(cpus).saturating_mul(per_cpu).saturating_add(config.hold_max);
    let needs: Vec<_> = sources.iter().map(|source| source.needs()).collect();
    let small_bytes = small_chunk_bytes(&needs);
    let classes = |needs: &FrameNeeds| {
        let packets = packets_in_flight(on_path, config.kept_frames, *needs);
        chunk_classes(packets, small_bytes, *needs)
    };
    let mut shares: Vec<_> = needs.iter().map(classes).collect();
    let spare = spare_classes(small_bytes, config.spare_frames, &needs);
    let copies = copy_classes(small_bytes, config.kept_frames, &needs);
    shares.resize(needs.len() + cpus, [spare.clone(), copies].concat());
    shares.resize(shares.len() + usize::from(config.senders), spare);
    // Last, since the chunks of all others are aligned to their size.
    if config.small_frames > 0 {
        let small = ChunkClass { chunk_bytes: MIN_CHUNK_BYTES, chunks: config.small_frames };
        shares.resize(shares.len() + cpus, vec![small]);
    }
    let region = sys::map_packet_memory(region_bytes(&shares))?;
    let mut queues = carve(region, &shares).map_err(|error| Error::Memory {
        bytes: error.need_bytes,
        source: std::io::Error::other(error),
    })?;
    let mut cpu_pools = queues.split_off(needs.len());
    let mut senders = cpu_pools.split_off(cpus);
    let small = senders.split_off(config.senders.into());
    Ok(Pools { queues, cpus: cpu_pools, senders, small })
}

/// Chunk for a frame of a network with an MTU of 1500.
const SMALL_BYTES: u32 = 2 << 10;
/// A page: the largest chunk for a device that writes into packet memory (AF_XDP).
const PAGE_BYTES: u32 = 4 << 10;
/// Chunk for a jumbo frame.
const JUMBO_BYTES: u32 = 16 << 10;

/// Chunk for an IP packet of 64 KiB behind its link header.
const LARGEST_IP_CHUNK_BYTES: u32 = 68 << 10;

/// Heads come in multiples of this number, which fill whole pages, so that the chunks behind them
/// keep their alignment.
const HEADS_STEP: u32 = 64;
const _: () = assert!((HEADS_STEP * HEAD_CHUNK_BYTES).is_multiple_of(PAGE_BYTES));

/// One in this many packets of a source with nonlinear packets is in one frame nevertheless.
const COPIED_ONE_IN: u32 = 8;

/// One in this many chunks of a thread that makes packets has room for a jumbo frame, or for several segments.
const SPARE_JUMBO_ONE_IN: u32 = 8;

/// One in this many of those has room for the largest IP packet.
const SPARE_LARGEST_ONE_IN: u32 = 4;

/// Size of small chunks: 2 KiB for ordinary frames, or a page if the largest frame of a source
/// exceeds 2 KiB and fits into a page.
fn small_chunk_bytes(needs: &[FrameNeeds]) -> u32 {
    let room = |chunk_bytes: u32| chunk_bytes - BEFORE_PACKET_BYTES;
    let needs_page = |need: &FrameNeeds| {
        (room(SMALL_BYTES) + 1..=room(PAGE_BYTES)).contains(&need.largest_bytes)
    };
    if needs.iter().any(needs_page) { PAGE_BYTES } else { SMALL_BYTES }
}

/// Packets in flight from a source: those on the path, as many as the source limits them to, and
/// those that applications keep, which no source limits.
fn packets_in_flight(on_path: u32, kept_frames: u32, needs: FrameNeeds) -> u32 {
    on_path.min(needs.packets_max.unwrap_or(u32::MAX)).saturating_add(kept_frames)
}

/// Chunks for `packets` packets in flight: most of them small, fewer for jumbo frames, and fewer
/// for the largest frame of the source. Every size is a multiple of the small one, and heads
/// fill whole pages. Small chunks are therefore aligned to their size.
fn chunk_classes(packets: u32, small_bytes: u32, needs: FrameNeeds) -> Vec<ChunkClass> {
    let FrameNeeds { device_frames, head_frames, .. } = needs;
    let (largest_bytes, largest_chunk) = largest(needs);
    let burst = 2 * u32::try_from(DEV_WEIGHT).unwrap_or(u32::MAX);
    let mut classes = Vec::new();
    let mut add = |chunk_bytes, chunks| classes.push(ChunkClass { chunk_bytes, chunks });
    let mut packets = packets;
    if head_frames > 0 {
        let heads = packets.saturating_add(burst).saturating_add(head_frames);
        add(HEAD_CHUNK_BYTES, heads.div_ceil(HEADS_STEP).saturating_mul(HEADS_STEP));
        packets /= COPIED_ONE_IN;
    }
    add(small_bytes, packets.saturating_add(burst).saturating_add(device_frames));
    if largest_bytes + BEFORE_PACKET_BYTES > small_bytes {
        add(largest_chunk.min(JUMBO_BYTES), packets / 2 + burst);
    }
    if largest_bytes + BEFORE_PACKET_BYTES > JUMBO_BYTES {
        add(largest_chunk, packets / 16 + burst);
    }
    classes
}

/// Memory that applications may keep of the packets of a source, in bytes: that of `kept_frames` more packets.
#[must_use]
pub fn kept_bytes(kept_frames: u32, needs: FrameNeeds) -> u64 {
    let small_bytes = small_chunk_bytes(&[needs]);
    let bytes = |packets| -> u64 {
        let classes = chunk_classes(packets, small_bytes, needs);
        classes.iter().map(|class| u64::from(class.chunk_bytes) * u64::from(class.chunks)).sum()
    };
    bytes(kept_frames) - bytes(0)
}

/// Chunks for the packets that a thread makes. A device also sends packets as large as it receives: some of the chunks have
/// room for one, or for several segments, up to the largest.
fn spare_classes(small_bytes: u32, spare_frames: u32, needs: &[FrameNeeds]) -> Vec<ChunkClass> {
    let (largest_bytes, largest_chunk) =
        needs.iter().copied().map(largest).max().unwrap_or_default();
    let exceeds = |chunk_bytes| largest_bytes + BEFORE_PACKET_BYTES > chunk_bytes;
    let jumbo = if exceeds(small_bytes) { spare_frames.div_ceil(SPARE_JUMBO_ONE_IN) } else { 0 };
    let largest = if exceeds(JUMBO_BYTES) { jumbo.div_ceil(SPARE_LARGEST_ONE_IN) } else { 0 };
    let classes = [
        ChunkClass { chunk_bytes: small_bytes, chunks: spare_frames - jumbo },
        ChunkClass { chunk_bytes: largest_chunk.min(JUMBO_BYTES), chunks: jumbo - largest },
        ChunkClass { chunk_bytes: LARGEST_IP_CHUNK_BYTES, chunks: largest },
    ];
    classes.into_iter().filter(|class| class.chunks > 0).collect()
}

/// Chunks into which a CPU linearizes nonlinear packets for sockets; none without sockets or
/// without a source of such packets. Their number follows from the number of frames that
/// applications may keep.
fn copy_classes(small_bytes: u32, kept_frames: u32, needs: &[FrameNeeds]) -> Vec<ChunkClass> {
    let mut in_pieces = needs.iter().filter(|needs| needs.head_frames > 0).peekable();
    if kept_frames == 0 || in_pieces.peek().is_none() {
        return Vec::new();
    }
    vec![
        ChunkClass { chunk_bytes: small_bytes, chunks: kept_frames / 4 },
        ChunkClass { chunk_bytes: JUMBO_BYTES, chunks: kept_frames / 32 },
        ChunkClass { chunk_bytes: LARGEST_IP_CHUNK_BYTES, chunks: kept_frames / 128 },
    ]
}

/// Largest frame that a source gives, and the chunk size for it, in bytes.
fn largest(needs: FrameNeeds) -> (u32, u32) {
    let largest_bytes = needs.largest_bytes.min(MAX_RECORD_BYTES);
    (largest_bytes, (largest_bytes + BEFORE_PACKET_BYTES).next_multiple_of(PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(largest_bytes: u32) -> Vec<(u32, u32)> {
        let needs = FrameNeeds { device_frames: 1000, largest_bytes, ..FrameNeeds::default() };
        let classes = chunk_classes(3200, small_chunk_bytes(&[needs]), needs);
        classes.into_iter().map(|class| (class.chunk_bytes, class.chunks)).collect()
    }

    #[test]
    fn tcp_37_kept_frames_have_memory() {
        let of = |largest_bytes| FrameNeeds { largest_bytes, ..FrameNeeds::default() };
        assert_eq!(kept_bytes(8192, of(1514)), 8192 * 2048);
        assert_eq!(kept_bytes(8192, of(65_549)), 8192 * (2048 + (16 << 10) / 2 + (68 << 10) / 16));
        assert_eq!(kept_bytes(0, of(9018)), 0);
        let limited = FrameNeeds { packets_max: Some(100), ..of(1514) };
        assert_eq!(kept_bytes(8192, limited), kept_bytes(8192, of(1514)));
    }

    #[test]
    fn chunks_fit_frames_small_ones_aligned() {
        assert_eq!(classes(1514), [(2048, 4328)]);
        assert_eq!(classes(1792), [(2048, 4328)]);
        assert_eq!(classes(1793), [(4096, 4328)]);
        assert_eq!(classes(3840), [(4096, 4328)]);
        assert_eq!(classes(9018), [(2048, 4328), (12 << 10, 1728)]);
        assert_eq!(classes(65_549), [(2048, 4328), (16 << 10, 1728), (68 << 10, 328)]);
        for largest_bytes in [1514, 3000, 9018, 65_549, u32::MAX] {
            let classes = classes(largest_bytes);
            assert!(classes.iter().all(|(bytes, _)| bytes.is_multiple_of(classes[0].0)));
        }
    }

    #[test]
    fn source_of_few_packets_takes_little() {
        let needs = FrameNeeds { packets_max: Some(100), ..FrameNeeds::default() };
        assert_eq!([3200, 50].map(|on_path| packets_in_flight(on_path, 0, needs)), [100, 50]);
        assert_eq!(packets_in_flight(3200, 8192, needs), 100 + 8192, "kept ones have room besides");
        assert_eq!(packets_in_flight(u32::MAX, 8192, FrameNeeds::default()), u32::MAX);
    }

    #[test]
    fn heads_have_own_aligned_class() {
        for (head_frames, largest_bytes) in [(1, 1514), (63, 9018), (256, 65_549), (1000, 3000)] {
            let needs = FrameNeeds { head_frames, largest_bytes, ..FrameNeeds::default() };
            let small_bytes = small_chunk_bytes(&[needs]);
            let classes = chunk_classes(3200, small_bytes, needs);
            let &[heads, ref others @ ..] = classes.as_slice() else { panic!("{classes:?}") };
            assert_eq!(heads.chunk_bytes, HEAD_CHUNK_BYTES);
            assert!(heads.chunks >= 3200 + 128 + head_frames);
            // In the order in which chunks are carved: by size, from a page boundary.
            let mut at = 0;
            for class in [heads].iter().chain(others) {
                let is_aligned = at % small_bytes as usize == 0;
                assert!(is_aligned && class.chunk_bytes >= heads.chunk_bytes, "{classes:?}");
                at += class.chunk_bytes as usize * class.chunks as usize;
            }
            assert!(at.is_multiple_of(small_bytes as usize), "the next share is aligned, too");
        }
    }

    /// AF_XDP's rules (`xdp_umem_reg`): the memory begins and ends at a page boundary; a chunk is a
    /// power of two, 2048 bytes <= chunk <= page, and begins at a multiple of its size.
    #[test]
    fn af_xdp_accepts_layout_any_page() {
        for (largest_bytes, head_frames) in
            [(1514, 0), (1514, 63), (3000, 64), (9018, 1), (65_549, 256)]
        {
            let needs = FrameNeeds { largest_bytes, head_frames, ..FrameNeeds::default() };
            let small_bytes = small_chunk_bytes(&[needs]) as usize;
            let shares = [
                chunk_classes(3200, small_chunk_bytes(&[needs]), needs),
                chunk_classes(100, small_chunk_bytes(&[needs]), needs),
                copy_classes(small_chunk_bytes(&[needs]), 8192, &[needs]),
            ];
            let bytes = region_bytes(&shares);
            let mapped_bytes = sys::map_packet_memory(bytes).unwrap().len_bytes();
            // In the order in which chunks are carved: share by share, from a page boundary.
            let mut at = 0usize;
            for class in shares.iter().flatten() {
                let chunk_bytes = class.chunk_bytes as usize;
                assert!(chunk_bytes != small_bytes || at.is_multiple_of(chunk_bytes));
                at += chunk_bytes * class.chunks as usize;
            }
            assert!(at <= bytes && bytes <= mapped_bytes);
            for page_bytes in [4 << 10, 16 << 10, 64 << 10] {
                assert!(
                    small_bytes.is_power_of_two() && (2048..=page_bytes).contains(&small_bytes)
                );
                assert!(mapped_bytes.is_multiple_of(page_bytes), "{page_bytes}");
                assert!(page_bytes.is_multiple_of(small_bytes), "a page's boundary is a chunk's");
            }
        }
    }

    #[test]
    fn copy_room_for_nonlinear_to_sockets() {
        let of = |head_frames| FrameNeeds { head_frames, ..FrameNeeds::default() };
        assert!(copy_classes(2048, 8192, &[of(0)]).is_empty());
        assert!(copy_classes(2048, 0, &[of(1)]).is_empty());
        let classes = copy_classes(2048, 8192, &[of(0), of(1)]);
        assert!(classes.iter().all(|class| class.chunks > 0 && class.chunk_bytes % 2048 == 0));
        assert!(classes.iter().any(|class| class.chunk_bytes > 65_549 + BEFORE_PACKET_BYTES));
    }

    #[test]
    fn udp_15_senders_have_room_for_largest() {
        let of = |largest_bytes| FrameNeeds { largest_bytes, ..FrameNeeds::default() };
        let sizes = |needs: &[FrameNeeds]| {
            let classes = spare_classes(2048, 1024, needs);
            classes.iter().map(|class| (class.chunk_bytes, class.chunks)).collect::<Vec<_>>()
        };
        let whole = [(2048, 896), (JUMBO_BYTES, 96), (LARGEST_IP_CHUNK_BYTES, 32)];
        assert_eq!(sizes(&[of(65_549)]), whole);
        let bytes = whole.map(|(chunk_bytes, chunks)| chunk_bytes * chunks);
        assert_eq!(bytes.iter().sum::<u32>(), 5504 << 10, "memory of a CPU, as documented");
        assert_eq!(sizes(&[of(65_549), of(3_500)]), whole);
        assert_eq!(sizes(&[of(1514), of(9022)]), [(2048, 896), (12 << 10, 128)]);
        assert_eq!(sizes(&[of(1514)]), [(2048, 1024)]);
        assert_eq!(sizes(&[]), [(2048, 1024)]);
        for (largest_bytes, spare_frames) in [(3_841, 1), (9022, 7), (20_022, 2), (65_549, 16)] {
            let classes = spare_classes(2048, spare_frames, &[of(largest_bytes)]);
            let has_room =
                |class: &ChunkClass| class.chunk_bytes - BEFORE_PACKET_BYTES >= largest_bytes;
            assert!(classes.iter().any(has_room), "{classes:?}");
            assert_eq!(classes.iter().map(|class| class.chunks).sum::<u32>(), spare_frames);
        }
        assert!(spare_classes(2048, 0, &[of(65_549)]).is_empty());
    }
}
