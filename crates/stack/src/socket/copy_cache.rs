//! The copy cache of a CPU. Small datagrams for a slow reader are copied into buffers that only
//! this CPU fills, and the frames that they arrived in are freed while still in the CPU's cache.
//!
//! Based on the kernel patch "udp: add rx skb cache" of 2018 (UDP-1 to UDP-6), without its two
//! defects: the size of the cache is the memory allocated, not the memory requested; and a buffer
//! in use for long is skipped instead of blocking the whole cache.

use std::fmt;
use std::mem::replace;

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::{Pool, RecycleRing, Region};
use forebay_rx::packet::Packet;
use forebay_rx::parse::Network;

/// Upper bound, exclusive, on the length of a copied datagram, from the network header on (UDP-3).
pub const COPIED_BELOW_BYTES: u32 = 512;

/// Buffer size: metadata before a packet, the longest link header, and a datagram.
const BUFFER_BYTES: u32 = 1024;
const LINK_BYTES_MAX: u32 = u8::MAX as u32;
const _: () = assert!(BEFORE_PACKET_BYTES + LINK_BYTES_MAX + COPIED_BELOW_BYTES <= BUFFER_BYTES);

/// Size that the kernel charges for such a buffer: `SKB_TRUESIZE(512)`.
const TRUESIZE_512_BYTES: u64 = 1088;
const _: () = assert!(BUFFER_BYTES as u64 <= TRUESIZE_512_BYTES, "the budget must hold");

/// Fewest buffers of a useful cache: `_SK_MEM_PACKETS`, the number of packets that a socket with
/// the kernel's default `rcvbuf` holds.
pub const BUFFERS_MIN: u32 = 256;

/// Upper bound on the buffers of one CPU.
pub const BUFFERS_MAX: u32 = 3 * BUFFERS_MIN;

/// Number of buffers tried for one datagram.
const LOOK: usize = 16;

/// Memory that the caches of all CPUs may take: 1 % of `udp_mem[0]`, which is in pages.
#[must_use]
pub fn budget_bytes(udp_mem_low_pages: u64) -> u64 {
    const PAGE_BYTES: u64 = 4096;
    udp_mem_low_pages.saturating_mul(PAGE_BYTES) / 100
}

/// Number of buffers for each of `cpus` CPUs (UDP-5).
///
/// # Errors
/// If they would be fewer than [`BUFFERS_MIN`].
pub fn buffers_per_cpu(budget_bytes: u64, cpus: u32) -> Result<u32, LowMemory> {
    let each = budget_bytes / (u64::from(cpus.max(1)) * TRUESIZE_512_BYTES);
    let buffers = u32::try_from(each).map_or(BUFFERS_MAX, |each| each.min(BUFFERS_MAX));
    if buffers < BUFFERS_MIN {
        return Err(LowMemory { budget_bytes, cpus, buffers });
    }
    Ok(buffers)
}

/// Too little memory for a copy cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowMemory {
    /// Memory for all CPUs.
    pub budget_bytes: u64,
    /// Number of CPUs.
    pub cpus: u32,
    /// Number of buffers that each would get.
    pub buffers: u32,
}

impl fmt::Display for LowMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { budget_bytes, cpus, buffers } = self;
        let need_bytes = u64::from(*cpus) * u64::from(BUFFERS_MIN) * TRUESIZE_512_BYTES;
        write!(
            f,
            "low memory, the UDP copy cache will not be allocated: {budget_bytes} bytes are \
             {buffers} buffers on each of {cpus} CPUs, and {BUFFERS_MIN} are the least \
             ({need_bytes} bytes)"
        )
    }
}

impl std::error::Error for LowMemory {}

/// Result of copying a packet.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copied {
    /// Copied into one of the cache's buffers.
    Done,
    /// Too long, in several frames, or not a datagram: the packet stays in its frame.
    NotEligible,
    /// All buffers tried are in use: the packet stays in its frame.
    Busy,
}

/// The buffers of one CPU.
#[derive(Debug)]
pub struct CopyCache {
    carousel: RecycleRing,
}

impl CopyCache {
    /// Size of a region for this many buffers.
    #[must_use]
    pub fn region_bytes(buffers: u32) -> usize {
        buffers as usize * BUFFER_BYTES as usize
    }

    /// Creates a cache for the CPU with the slot `cpu`, with as many buffers as `region` has room
    /// for.
    #[must_use]
    pub fn new(region: Region, cpu: u16) -> Self {
        Self { carousel: RecycleRing::new(region, BUFFER_BYTES, cpu) }
    }

    /// Number of buffers.
    #[must_use]
    pub fn buffers(&self) -> usize {
        self.carousel.buffers()
    }

    /// Number of buffers in use: queued, or taken by a reader.
    #[must_use]
    pub fn away(&self) -> usize {
        self.carousel.away()
    }

    /// Bytes charged for a copied packet.
    pub(super) const TRUESIZE: u32 = BUFFER_BYTES;

    /// Copies a small datagram into a buffer, and returns its frame to `pool`. The packet's
    /// metadata stays valid, as the bytes are copied from the link header on.
    #[inline]
    pub fn copy(&mut self, packet: &mut Packet, pool: &mut Pool) -> Copied {
        if !is_eligible(packet) {
            return Copied::NotEligible;
        }
        let Some(mut buffer) = self.carousel.take(LOOK) else { return Copied::Busy };
        buffer.copy_from(packet.frame.data());
        pool.put(replace(&mut packet.frame, buffer));
        Copied::Done
    }
}

/// True if the packet from the network header on is short enough, and in one frame.
fn is_eligible(packet: &Packet) -> bool {
    let before = u32::from(packet.headers.network_offset);
    packet.headers.network != Network::Other
        && !packet.is_chain()
        && packet.frame.len_bytes().saturating_sub(before) < COPIED_BELOW_BYTES
}

#[cfg(test)]
mod tests {
    use forebay_rx::packet::Arrival;
    use forebay_rx::parse::Link;

    use super::*;
    use crate::socket::testutil::{Layout, datagram, pool, pools_of};

    fn cache(buffers: u32) -> CopyCache {
        CopyCache::new(Region::allocate(CopyCache::region_bytes(buffers)), 0)
    }

    /// Result of copying a datagram of this layout, with the accounting checked.
    fn copied(layout: Layout, payload_len: usize) -> Copied {
        let (mut pool, mut cache) = (pool(), cache(2));
        let mut packet = datagram(&mut pool, layout, &vec![7; payload_len]);
        let (bytes, payload) = (packet.frame.data().to_vec(), packet.view().payload().to_vec());
        let copied = cache.copy(&mut packet, &mut pool);
        assert_eq!((packet.frame.data(), packet.view().payload()), (&bytes[..], &payload[..]));
        assert_eq!(payload.len(), payload_len);
        let is_copy = copied == Copied::Done;
        assert_eq!((cache.away(), pool.in_use()), (is_copy.into(), (!is_copy).into()));
        pool.put(packet.frame);
        assert_eq!((cache.away(), pool.in_use()), (0, 0));
        copied
    }

    #[test]
    fn udp_3_boundary_v4_483_cached_484_not() {
        assert_eq!(copied(Layout::V4, 483), Copied::Done);
        assert_eq!(copied(Layout::V4, 484), Copied::NotEligible);
        assert_eq!(copied(Layout::V4Tagged, 483), Copied::Done, "what is before it counts not");
        assert_eq!(copied(Layout::V4NoLink, 484), Copied::NotEligible);
        assert_eq!(copied(Layout::V4Options, 483 - 40), Copied::Done);
        assert_eq!(copied(Layout::V4Options, 484 - 40), Copied::NotEligible);
    }

    #[test]
    fn udp_3_boundary_v6_463_cached_464_not() {
        assert_eq!(copied(Layout::V6, 463), Copied::Done);
        assert_eq!(copied(Layout::V6, 464), Copied::NotEligible);
        assert_eq!(copied(Layout::V6Extension, 463 - 8), Copied::Done);
        assert_eq!(copied(Layout::V6Extension, 464 - 8), Copied::NotEligible);
    }

    #[test]
    fn udp_3_zero_len_is_cached_empty() {
        assert_eq!(copied(Layout::V4, 0), Copied::Done);
        assert_eq!(copied(Layout::V6, 0), Copied::Done);
    }

    #[test]
    fn udp_3_timestamp_meta_survives_the_copy() {
        let (mut pool, mut cache) = (pool(), cache(1));
        let mut packet = datagram(&mut pool, Layout::V4Tagged, b"question");
        packet.timestamp_ns = 1_234_567_890_123;
        packet.arrival = Arrival(77);
        packet.hash = forebay_rx::hash::FlowHash(0xfeed);
        packet.set_gso_size(4);
        let known = |packet: &Packet| {
            let view = packet.view();
            let addresses = (view.source(), view.destination(), view.ports(), view.ttl());
            let Packet { timestamp_ns, arrival, wire_len, hash, headers, segment_size, .. } =
                packet;
            let given = (*timestamp_ns, *arrival, *wire_len, *hash, *headers, *segment_size);
            (addresses, given, packet.device_sum)
        };
        let before = known(&packet);
        assert_eq!(cache.copy(&mut packet, &mut pool), Copied::Done);
        assert_eq!(known(&packet), before);
    }

    #[test]
    fn nonlinear_and_non_datagrams_left_alone() {
        let (mut pool, mut cache) = (pool(), cache(1));
        let mut merged = datagram(&mut pool, Layout::V4, b"first");
        let follower = datagram(&mut pool, Layout::V4, b"second").frame;
        merged.frame.append(follower);
        assert_eq!(cache.copy(&mut merged, &mut pool), Copied::NotEligible);
        let frame = pool.allocate(60).unwrap();
        let mut other = Packet::received(frame, Arrival(0), 60, Link::Ethernet);
        assert_eq!(cache.copy(&mut other, &mut pool), Copied::NotEligible);
    }

    /// The original patch stopped at a head buffer in use. Here the other buffers are reused round
    /// robin, and a buffer in use keeps its bytes.
    #[test]
    fn udp_4_ring_busy_head_is_skipped() {
        const BUFFERS: u32 = 100;
        let (mut pool, mut cache) = (pools_of(200).0, cache(BUFFERS));
        let mut copy = |mark: u32| {
            let mut packet = datagram(&mut pool, Layout::V4, &mark.to_be_bytes());
            (cache.copy(&mut packet, &mut pool), packet)
        };
        let held: Vec<_> = (0..40).map(|mark| copy(mark).1).collect();
        let mut busy = 0;
        for mark in 40..1000 {
            let (copied, packet) = copy(mark);
            assert_eq!(packet.view().payload(), mark.to_be_bytes());
            busy += u32::from(copied == Copied::Busy);
        }
        // Each round over the ring passes the 40 held buffers: two searches of 16 find nothing, and
        // the next one skips the last 8.
        assert_eq!(busy, 960 / 62 * 2);
        for (mark, packet) in (0u32..).zip(&held) {
            assert_eq!(packet.view().payload(), mark.to_be_bytes());
        }
        let rest: Vec<_> = (0..62).map(&mut copy).collect();
        let done = rest.iter().filter(|(copied, _)| *copied == Copied::Done).count();
        assert_eq!(done, 60);
        assert_eq!(copy(0).0, Copied::Busy, "all are held");
        drop((held, rest));
        assert_eq!((cache.away(), pool.in_use()), (0, 0));
    }

    #[test]
    fn udp_5_budget_hundredth_at_most_768() {
        // udp_mem[0] as the kernel sets it with 16 GiB.
        let budget = budget_bytes(393_216);
        assert_eq!(budget, 16_106_127);
        assert_eq!(buffers_per_cpu(budget, 8), Ok(768));
        assert_eq!(buffers_per_cpu(budget, 64).unwrap_err().buffers, 231);
        assert_eq!(buffers_per_cpu(u64::MAX, 1), Ok(768));
        assert_eq!(buffers_per_cpu(256 * 1088 * 4, 4), Ok(256));
        assert!(buffers_per_cpu(256 * 1088 * 4 - 1, 4).is_err());
        for cpus in 1..=64 {
            // The original patch took more memory per buffer than it had calculated, and failed
            // halfway.
            let buffers = buffers_per_cpu(budget, cpus).unwrap_or(0);
            assert!(CopyCache::region_bytes(buffers * cpus) as u64 <= budget);
        }
    }

    #[test]
    fn udp_5_memory_low_refusal_has_numbers() {
        let refused = buffers_per_cpu(1 << 20, 8).unwrap_err();
        assert_eq!(refused, LowMemory { budget_bytes: 1 << 20, cpus: 8, buffers: 120 });
        assert_eq!(
            refused.to_string(),
            "low memory, the UDP copy cache will not be allocated: 1048576 bytes are 120 buffers \
             on each of 8 CPUs, and 256 are the least (2228224 bytes)"
        );
    }

    /// The other defect of the original patch: its size was the number of buffers requested, not
    /// the number allocated.
    #[test]
    fn udp_5_cache_size_follows_memory() {
        let mut cache = CopyCache::new(Region::allocate(3 * 1024 + 700), 0);
        assert_eq!(cache.buffers(), 3);
        let mut pool = pool();
        let mut packets: Vec<_> =
            (0..4).map(|_| datagram(&mut pool, Layout::V4, b"question")).collect();
        let copied = packets.iter_mut().map(|packet| cache.copy(packet, &mut pool));
        let expected = [Copied::Done, Copied::Done, Copied::Done, Copied::Busy];
        assert!(copied.eq(expected));
    }
}
