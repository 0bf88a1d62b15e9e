//! Buffer policies: the memory that packets wait in for a slow reader, and the return of frames.
//!
//! | policy | packets wait | frames are returned |
//! |---|---|---|
//! | `owner` | in the frame they arrived in | by the reader, in batches, to the CPU that owns them |
//! | `copy-cache` | under pressure, small ones in a [buffer](super::copy_cache) | by the reader: a mark |
//! | `condense` | under pressure, small ones in the smallest chunks | as with `owner` |
//! | `none` | in the frame they arrived in | by the reader, one by one, through the shared inbox |
//!
//! Buffers and small chunks belong to the CPU that received the packet. With `copy-cache`, packets
//! that are not copied are returned as with `none`.
//!
//! Pressure is defined as in the kernel: the socket holds more than half of its limit (UDP-1). The
//! policy is read for each run of packets, so a change takes effect at any time.

use std::fmt;
use std::mem::replace;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use forebay_buf::pool::FREE_BATCH_FRAMES;
use forebay_buf::{Frame, Pool};
use forebay_rx::packet::Packet;

use super::account::{Account, is_under_pressure, size};
use super::copy_cache::{Copied, CopyCache};
use super::queue::SocketQueueConsumer;
use crate::counter::StackCounter;

/// Policy for the use and return of packet memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ReclaimPolicy {
    /// Readers return frames to their owner in batches.
    #[default]
    Owner,
    /// Packets are copied to a cache of the receiving CPU while a reader is slow.
    CopyCache,
    /// Packets are copied to small chunks while a reader is slow.
    Condense,
    /// Readers free each frame where it is read: the baseline.
    None,
}

impl ReclaimPolicy {
    /// All policies, by [`index`](Self::index).
    pub const ALL: [Self; 4] = [Self::Owner, Self::CopyCache, Self::Condense, Self::None];

    /// Name of the policy.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::CopyCache => "copy-cache",
            Self::Condense => "condense",
            Self::None => "none",
        }
    }

    /// Index in [`ALL`](Self::ALL).
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for ReclaimPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error: a name that is not a buffer policy's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchPolicy(String);

impl fmt::Display for NoSuchPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ReclaimPolicy::ALL.map(ReclaimPolicy::name).join(", ");
        write!(f, "there is no buffer policy {:?}: take one of {names}", self.0)
    }
}

impl std::error::Error for NoSuchPolicy {}

impl FromStr for ReclaimPolicy {
    type Err = NoSuchPolicy;

    fn from_str(name: &str) -> Result<Self, NoSuchPolicy> {
        let named = Self::ALL.into_iter().find(|policy| policy.name() == name);
        named.ok_or_else(|| NoSuchPolicy(name.to_owned()))
    }
}

/// The policy of an engine. Any thread may set it; every CPU and every reader reads it.
#[derive(Debug, Default)]
pub struct SharedPolicy(AtomicU8);

impl SharedPolicy {
    /// Creates a shared policy with an initial value.
    #[must_use]
    pub fn new(policy: ReclaimPolicy) -> Self {
        let shared = Self::default();
        shared.store(policy);
        shared
    }

    /// The current policy.
    #[must_use]
    pub fn load(&self) -> ReclaimPolicy {
        // Relaxed: frames reach their owner under any policy, whichever buffer their packets waited
        // in.
        let index = usize::from(self.0.load(Ordering::Relaxed));
        ReclaimPolicy::ALL.get(index).copied().unwrap_or_default()
    }

    /// Sets the policy, for packets put in and frames returned from now on.
    pub fn store(&self, policy: ReclaimPolicy) {
        self.0.store(policy as u8, Ordering::Relaxed);
    }
}

/// One CPU's counters of packets moved to other buffers.
#[derive(Debug, Default)]
pub struct ReclaimCounters {
    /// Packets copied into the cache.
    pub cached: StackCounter,
    /// Packets not copied into the cache because they are too long or in several frames.
    pub not_eligible: StackCounter,
    /// Packets not copied because the buffers tried were in use.
    pub busy: StackCounter,
    /// Packets copied into a smaller chunk.
    pub condensed: StackCounter,
}

/// Copies packets for slow readers into memory that their CPU can spare for a while.
#[derive(Debug)]
pub struct BufferReclaimer {
    /// The copy cache, if there is memory for one.
    cache: Option<CopyCache>,
    /// Small chunks of this CPU, in the region that its packets arrive in.
    small: Option<Pool>,
    counters: Arc<ReclaimCounters>,
}

impl BufferReclaimer {
    /// Creates the reclaimer of one CPU. Without a cache, `copy-cache` copies nothing; without
    /// small chunks, `condense` copies nothing.
    #[must_use]
    pub fn new(
        cache: Option<CopyCache>,
        small: Option<Pool>,
        counters: Arc<ReclaimCounters>,
    ) -> Self {
        Self { cache, small, counters }
    }

    /// Sets the pool of small chunks, in the region that the CPU's packets arrive in.
    pub fn set_small(&mut self, small: Pool) {
        self.small = Some(small);
    }

    /// Number of buffers and small chunks in use.
    pub fn frames_away(&mut self) -> usize {
        let cached = self.cache.as_ref().map_or(0, CopyCache::away);
        cached + self.small.as_mut().map_or(0, Pool::in_use)
    }

    /// The copy cache, if any.
    #[must_use]
    pub fn cache(&self) -> Option<&CopyCache> {
        self.cache.as_ref()
    }

    /// Copies, by `policy`, those of `packets` that would reach a socket under pressure and still
    /// be within its limit, and returns their original frames to `pool`. To be called before they
    /// are put into the socket's queue: a packet is charged the frame it waits in.
    pub fn reclaim(
        &mut self,
        policy: ReclaimPolicy,
        account: &Account,
        packets: &mut [Packet],
        pool: &mut Pool,
    ) {
        let smaller = match (policy, &self.cache, &self.small) {
            (ReclaimPolicy::CopyCache, Some(_), _) => CopyCache::TRUESIZE,
            (ReclaimPolicy::Condense, _, Some(small)) => small.smallest_chunk_bytes(),
            _ => return,
        };
        let (mut rmem, rcvbuf) = (account.rmem(), account.rcvbuf());
        for packet in packets {
            // The socket will drop this packet: copying it would be wasted work.
            if rmem.saturating_add(smaller) > rcvbuf {
                break;
            }
            if is_under_pressure(rmem, rcvbuf) {
                match policy {
                    ReclaimPolicy::Condense => self.condense(packet, pool),
                    _ => self.copy(packet, pool),
                }
            }
            rmem = rmem.saturating_add(size(packet));
        }
    }

    fn copy(&mut self, packet: &mut Packet, pool: &mut Pool) {
        let Some(cache) = &mut self.cache else { return };
        let counter = match cache.copy(packet, pool) {
            Copied::Done => &self.counters.cached,
            Copied::NotEligible => &self.counters.not_eligible,
            Copied::Busy => &self.counters.busy,
        };
        counter.add(1);
    }

    /// Copies a packet into a smaller chunk of this CPU, if the packet fits and a chunk is free
    /// (`skb_condense`).
    fn condense(&mut self, packet: &mut Packet, pool: &mut Pool) {
        let Some(chunks) = &mut self.small else { return };
        if packet.is_chain() || packet.frame.truesize() <= chunks.smallest_chunk_bytes() {
            return;
        }
        let Some(mut small) = chunks.allocate(packet.frame.len_bytes()) else { return };
        small.copy_from(packet.frame.data());
        pool.put(replace(&mut packet.frame, small));
        self.counters.condensed.add(1);
    }
}

/// Returns a frame that was read. With `owner` and `condense` the frame may wait in a batch until
/// `pool` is flushed.
#[inline]
pub fn give_back(frame: Frame, pool: &mut Pool, policy: ReclaimPolicy) {
    match policy {
        ReclaimPolicy::Owner | ReclaimPolicy::Condense => pool.put(frame),
        ReclaimPolicy::CopyCache | ReclaimPolicy::None => drop(frame),
    }
}

/// Return path of one reader: frames are returned in batches, and the socket is uncharged once a
/// batch has been sent.
///
/// A batch is sent when it is full, or holds a quarter of the socket's limit (as in
/// `udp_rmem_release`), or nothing is left to be read. So an idle reader withholds no frames, and
/// the frames in an unsent batch stay charged to the socket.
#[derive(Debug)]
pub struct FrameReturn {
    pool: Pool,
    /// Frames in the unsent batch.
    frames: usize,
    /// Bytes charged for those frames.
    bytes: u32,
}

impl FrameReturn {
    /// Creates the return path through `pool`, which needs no frames of its own
    /// ([`Pool::return_handle`]).
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self { pool, frames: 0, bytes: 0 }
    }

    /// Returns packets that were taken out of `consumer` and read. `packets` is empty afterwards.
    pub fn give_back(
        &mut self,
        packets: &mut Vec<Packet>,
        consumer: &mut SocketQueueConsumer,
        policy: ReclaimPolicy,
    ) {
        let most_bytes = consumer.account().rcvbuf() / 4;
        for packet in packets.drain(..) {
            self.frames += 1;
            self.bytes = self.bytes.saturating_add(size(&packet));
            give_back(packet.frame, &mut self.pool, policy);
            if self.frames >= FREE_BATCH_FRAMES || self.bytes >= most_bytes {
                self.flush(consumer);
            }
        }
        if !consumer.has_some() {
            self.flush(consumer);
        }
    }

    /// Sends the unsent batch, and uncharges the socket. To be called when packets are kept, before
    /// the reader does something else for long.
    pub fn flush(&mut self, consumer: &mut SocketQueueConsumer) {
        if self.frames > 0 {
            self.pool.flush();
            consumer.uncharge(self.bytes);
            (self.frames, self.bytes) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use forebay_buf::Region;
    use proptest::prelude::*;

    use super::*;
    use crate::socket::SocketId;
    use crate::socket::queue::{Enqueue, SocketQueueConfig, SocketQueueProducer, queue};
    use crate::socket::testutil::{Layout, datagram, pools_of};

    fn socket(id: u64, rcvbuf: u32) -> (SocketQueueProducer, SocketQueueConsumer) {
        let config = SocketQueueConfig { id: SocketId(id), rcvbuf, slots: 64 };
        let (mut producers, consumer) = queue(config, 1);
        (producers.remove(0), consumer)
    }

    /// One CPU: its memory, and its reclaimer.
    struct Cpu {
        pool: Pool,
        relief: BufferReclaimer,
        dropped: Vec<Packet>,
    }

    impl Cpu {
        fn new(chunks: u32, buffers: u32) -> Self {
            let region = Region::allocate(CopyCache::region_bytes(buffers));
            let (pool, small) = pools_of(chunks);
            let relief =
                BufferReclaimer::new(Some(CopyCache::new(region, 0)), Some(small), Arc::default());
            Self { pool, relief, dropped: Vec::new() }
        }

        /// Puts one datagram in. Returns true if the socket accepted it.
        fn put(
            &mut self,
            producer: &mut SocketQueueProducer,
            policy: ReclaimPolicy,
            mark: u64,
        ) -> bool {
            let mut run = vec![datagram(&mut self.pool, Layout::V4, &mark.to_be_bytes())];
            self.relief.reclaim(policy, producer.account(), &mut run, &mut self.pool);
            assert_eq!(producer.put(&mut run, &mut self.dropped), Enqueue::Done);
            let is_taken = self.dropped.is_empty();
            self.dropped.drain(..).for_each(|packet| self.pool.put(packet.frame));
            is_taken
        }

        fn put_many(
            &mut self,
            producer: &mut SocketQueueProducer,
            policy: ReclaimPolicy,
            count: u64,
        ) {
            for mark in 0..count {
                self.put(producer, policy, mark);
            }
        }

        fn cached(&self) -> u64 {
            self.relief.counters.cached.get()
        }

        fn buffers_away(&self) -> usize {
            self.relief.cache().unwrap().away()
        }

        /// Frames and buffers in use.
        fn away(&mut self) -> usize {
            self.pool.in_use() + self.relief.frames_away()
        }

        fn is_whole(&mut self) -> bool {
            self.away() == 0
        }
    }

    fn marks(packets: &[Packet]) -> Vec<u64> {
        let mark = |packet: &Packet| packet.view().payload().try_into().map(u64::from_be_bytes);
        packets.iter().map(|packet| mark(packet).unwrap()).collect()
    }

    #[test]
    fn promise_8_policies_have_one_name_each() {
        for policy in ReclaimPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(ReclaimPolicy::ALL[policy.index()], policy);
            assert_eq!(SharedPolicy::new(policy).load(), policy);
        }
        assert_eq!(SharedPolicy::default().load(), ReclaimPolicy::Owner);
        let refused = "lru".parse::<ReclaimPolicy>().unwrap_err().to_string();
        assert!(refused.contains("\"lru\"") && refused.contains("copy-cache"), "{refused}");
    }

    #[test]
    fn udp_1_no_pressure_no_copy() {
        for policy in [ReclaimPolicy::CopyCache, ReclaimPolicy::Condense] {
            let mut cpu = Cpu::new(64, 8);
            let (mut producer, mut consumer) = socket(0, 16 * 2048);
            for mark in 0..9 {
                assert!(cpu.put(&mut producer, policy, mark));
            }
            // Eight frames are half of the limit, and the ninth was put in at that point, without
            // pressure.
            assert_eq!(producer.account().rmem(), 9 * 2048);
            assert!(cpu.put(&mut producer, policy, 9));
            let copied = cpu.cached() + cpu.relief.counters.condensed.get();
            assert_eq!(copied, 1, "{policy}");
            let mut taken = Vec::new();
            assert_eq!(consumer.take(64, &mut taken), 10);
            assert_eq!(marks(&taken), Vec::from_iter(0..10));
        }
    }

    #[test]
    fn udp_1_copying_starts_at_pressure() {
        let mut cpu = Cpu::new(64, 64);
        let (mut producer, _consumer) = socket(0, 16 * 2048);
        let mut run: Vec<_> =
            (0..40).map(|_| datagram(&mut cpu.pool, Layout::V4, b"question")).collect();
        cpu.relief.reclaim(ReclaimPolicy::CopyCache, producer.account(), &mut run, &mut cpu.pool);
        // Nine frames of 2048 bytes, then 14 copies of 1024 bytes: 32 KiB. The others will be
        // dropped.
        assert_eq!((cpu.cached(), cpu.buffers_away()), (14, 14));
        let sizes: Vec<_> = run.iter().map(size).collect();
        assert_eq!(sizes, [vec![2048; 9], vec![1024; 14], vec![2048; 17]].concat());
        assert_eq!(producer.put(&mut run, &mut cpu.dropped), Enqueue::Done);
        assert_eq!((cpu.dropped.len(), producer.account().rmem()), (17, 16 * 2048));
    }

    /// The queue length oscillates around the threshold. With every policy, and while the policy
    /// changes, the packets read are those accepted, in the same order.
    #[test]
    fn udp_1_pressure_flip_keeps_order_and_bytes() {
        let mut cpu = Cpu::new(64, 8);
        let (mut producer, mut consumer) = socket(0, 16 * 2048);
        let mut way_back = FrameReturn::new(cpu.pool.return_handle());
        let (mut taken, mut queued) = (Vec::new(), VecDeque::new());
        let (mut is_reading, mut policies) = (false, ReclaimPolicy::ALL.into_iter().cycle());
        let mut policy = ReclaimPolicy::default();
        for mark in 0..100_000 {
            if mark % 1000 == 0 {
                policy = policies.next().unwrap();
            }
            if cpu.put(&mut producer, policy, mark) {
                queued.push_back(mark);
            } else {
                is_reading = true;
            }
            if is_reading {
                consumer.take(2, &mut taken);
                assert!(queued.drain(..taken.len()).eq(marks(&taken)));
                way_back.give_back(&mut taken, &mut consumer, policy);
                is_reading = producer.account().rmem() > 12 * 1024;
            }
        }
        let ReclaimCounters { cached, condensed, .. } = &*cpu.relief.counters;
        assert!(cached.get() > 1000 && condensed.get() > 1000, "{:?}", cpu.relief.counters);
        consumer.take(64, &mut taken);
        way_back.give_back(&mut taken, &mut consumer, ReclaimPolicy::Owner);
        assert_eq!(consumer.account().rmem(), 0);
        assert!(cpu.is_whole());
    }

    #[test]
    fn udp_4_peek_clone_keeps_buffer() {
        let mut cpu = Cpu::new(64, 3);
        let (mut producer, mut consumer) = socket(0, 8192);
        for mark in 0..5 {
            cpu.put(&mut producer, ReclaimPolicy::CopyCache, mark);
        }
        assert_eq!(cpu.cached(), 2, "the last two");
        let mut taken = Vec::new();
        consumer.take(4, &mut taken);
        let mut other = socket(1, 8192);
        for mark in 100..200 {
            cpu.put(&mut other.0, ReclaimPolicy::CopyCache, mark);
            // Peeked at repeatedly, taken and kept: the bytes do not change.
            if let Some(packet) = consumer.peek() {
                assert_eq!(marks(std::slice::from_ref(packet)), [4]);
            }
            assert_eq!(marks(&taken), [0, 1, 2, 3]);
            if mark % 9 == 0 {
                other = socket(1, 8192);
            }
        }
        assert!(cpu.cached() > 10 && cpu.relief.counters.busy.get() > 0);
    }

    #[test]
    fn udp_6_two_sockets_one_cpu_share_cache() {
        const BUFFERS: u32 = 8;
        let mut cpu = Cpu::new(64, BUFFERS);
        let mut sockets = [socket(0, 24 * 1024), socket(1, 24 * 1024)];
        let mut taken_by = [Vec::new(), Vec::new()];
        for mark in 0..40 {
            let which = usize::from(mark % 2 == 1);
            if cpu.put(&mut sockets[which].0, ReclaimPolicy::CopyCache, mark) {
                taken_by[which].push(mark);
            }
        }
        assert_eq!((cpu.cached(), cpu.buffers_away()), (8, 8), "no more than there are");
        assert!(cpu.relief.counters.busy.get() > 0, "the others went the usual way");
        let mut copies = Vec::new();
        for ((_, consumer), expected) in sockets.iter_mut().zip(&taken_by) {
            let mut taken = Vec::new();
            consumer.take(64, &mut taken);
            assert_eq!(&marks(&taken), expected);
            copies.push(taken.iter().filter(|packet| size(packet) == CopyCache::TRUESIZE).count());
        }
        assert!(copies[0].abs_diff(copies[1]) <= 1, "a fair share each: {copies:?}");
        drop(sockets);
        assert!(cpu.is_whole());
    }

    #[test]
    fn udp_2_socket_close_brings_all_buffers_back() {
        for policy in ReclaimPolicy::ALL {
            let mut cpu = Cpu::new(64, 64);
            let (mut producer, mut consumer) = socket(0, 32 * 1024);
            cpu.put_many(&mut producer, policy, 64);
            let mut in_hand = Vec::new();
            consumer.take(3, &mut in_hand);
            drop(consumer);
            assert_eq!(cpu.away(), 3, "{policy}");
            FrameReturn::new(cpu.pool.return_handle()).give_back(
                &mut in_hand,
                &mut socket(1, 0).1,
                policy,
            );
            assert!(cpu.is_whole(), "{policy}");
        }
    }

    /// Frames that a reader returned are back at their owner once nothing is left to be read,
    /// however few they are.
    #[test]
    fn udp_r6_remote_batch_idle_reader_holds_nothing() {
        // With the larger limit, a batch is full before a quarter of the limit is read.
        let sizes = [64 * 2048, 1 << 20];
        for (policy, rcvbuf) in ReclaimPolicy::ALL.iter().flat_map(|p| sizes.map(|size| (*p, size)))
        {
            let mut cpu = Cpu::new(64, 64);
            let (mut producer, mut consumer) = socket(0, rcvbuf);
            let mut way_back = FrameReturn::new(cpu.pool.return_handle());
            let mut taken = Vec::new();
            cpu.put_many(&mut producer, policy, 40);
            for left in (0..40).rev() {
                consumer.take(1, &mut taken);
                way_back.give_back(&mut taken, &mut consumer, policy);
                let (away, rmem) = (cpu.away(), consumer.account().rmem() as usize);
                assert!(away <= left + FREE_BATCH_FRAMES, "{policy}: {away} with {left} queued");
                assert!(
                    (away * 512..=(left + FREE_BATCH_FRAMES) * 2048).contains(&rmem),
                    "{policy}"
                );
            }
            assert!(cpu.is_whole() && consumer.account().rmem() == 0, "{policy}");
        }
    }

    #[test]
    fn udp_1_small_sockets_regain_room_early() {
        let mut cpu = Cpu::new(64, 64);
        let (mut producer, mut consumer) = socket(0, 8 * 2048);
        let mut way_back = FrameReturn::new(cpu.pool.return_handle());
        let mut taken = Vec::new();
        (0..8).for_each(|mark| assert!(cpu.put(&mut producer, ReclaimPolicy::Owner, mark)));
        for (reads, rmem) in [(1, 8), (2, 6), (3, 6), (4, 4)] {
            consumer.take(1, &mut taken);
            way_back.give_back(&mut taken, &mut consumer, ReclaimPolicy::Owner);
            assert_eq!(consumer.account().rmem(), rmem * 2048, "after {reads}");
        }
    }

    /// Exactly half of a socket's limit is not pressure; one byte more is.
    #[test]
    fn udp_1_pressure_begins_above_half_of_rcvbuf() {
        for policy in [ReclaimPolicy::CopyCache, ReclaimPolicy::Condense] {
            let mut cpu = Cpu::new(64, 64);
            let (mut producer, consumer) = socket(0, 8 * 2048);
            let moved = |cpu: &Cpu| cpu.cached() + cpu.relief.counters.condensed.get();
            cpu.put_many(&mut producer, policy, 5);
            assert_eq!((consumer.account().rmem(), moved(&cpu)), (5 * 2048, 0), "{policy}");
            cpu.put_many(&mut producer, policy, 1);
            assert_eq!(moved(&cpu), 1, "{policy}");
        }
    }

    /// A flood leaves no state behind: once it is read, packets take the same path as before the
    /// flood.
    #[test]
    fn udp_r3_flood_recovery_leaves_no_state() {
        for policy in ReclaimPolicy::ALL {
            let mut cpu = Cpu::new(512, 768);
            let (mut producer, mut consumer) = socket(0, 212_992);
            let mut way_back = FrameReturn::new(cpu.pool.return_handle());
            let mut taken = Vec::new();
            let flood = (0..2000).filter(|mark| cpu.put(&mut producer, policy, *mark)).count();
            assert!((104..2000).contains(&flood), "{policy}: {flood}");
            while consumer.take(64, &mut taken) > 0 {
                way_back.give_back(&mut taken, &mut consumer, policy);
            }
            assert!(cpu.is_whole() && producer.account().rmem() == 0);
            let copied = cpu.cached() + cpu.relief.counters.condensed.get();
            for mark in 0..1000 {
                assert!(cpu.put(&mut producer, policy, mark));
                consumer.take(1, &mut taken);
                assert_eq!(marks(&taken), [mark]);
                way_back.give_back(&mut taken, &mut consumer, policy);
            }
            assert_eq!(cpu.cached() + cpu.relief.counters.condensed.get(), copied);
            assert!(cpu.is_whole());
        }
    }

    #[test]
    fn condensing_cuts_charge_where_fitting() {
        let mut cpu = Cpu::new(64, 1);
        let condense = |cpu: &mut Cpu, payload: usize| {
            let mut packet = datagram(&mut cpu.pool, Layout::V4, &vec![9; payload]);
            let bytes = packet.frame.data().to_vec();
            cpu.relief.condense(&mut packet, &mut cpu.pool);
            assert_eq!(packet.frame.data(), bytes);
            size(&packet)
        };
        // 14 + 20 + 8 bytes of headers in a chunk that has 256 for a packet.
        assert_eq!(condense(&mut cpu, 256 - 42), 512);
        assert_eq!(condense(&mut cpu, 257 - 42), 2048);
        assert_eq!(cpu.relief.counters.condensed.get(), 1);
        // All small chunks are in use: the packet stays in its frame.
        let small = cpu.relief.small.as_mut().unwrap();
        let away: Vec<_> = (0..64).map(|_| small.allocate(1).unwrap()).collect();
        assert_eq!(condense(&mut cpu, 8), 2048);
        drop(away);
        assert!(cpu.is_whole());
    }

    proptest! {
        /// Promises 3 and 4: with any policies, readers and pace, all memory is returned in the
        /// end, and no socket exceeds its limit by more than one packet.
        #[test]
        fn promise_4_frames_come_home_by_every_policy(
            rcvbuf in prop_oneof![Just(0u32), Just(5000), Just(40_000)],
            buffers in 0u32..20,
            steps in proptest::collection::vec((0usize..4, 0usize..2, 0usize..12, 0usize..12), 0..60),
        ) {
            let mut cpu = Cpu::new(400, buffers.max(1));
            let mut sockets = [socket(0, rcvbuf), socket(1, rcvbuf)];
            let mut ways = [(); 2].map(|()| FrameReturn::new(cpu.pool.return_handle()));
            let mut taken = Vec::new();
            for (policy, which, puts, takes) in steps {
                let policy = ReclaimPolicy::ALL[policy];
                let (producer, consumer) = &mut sockets[which];
                for mark in 0..puts as u64 {
                    let _ = cpu.put(producer, policy, mark);
                    prop_assert!(producer.account().rmem() <= rcvbuf.max(2048));
                }
                consumer.take(takes, &mut taken);
                ways[which].give_back(&mut taken, consumer, policy);
            }
            for ((_, consumer), way_back) in sockets.iter_mut().zip(&mut ways) {
                while consumer.take(64, &mut taken) > 0 {
                    way_back.give_back(&mut taken, consumer, ReclaimPolicy::Owner);
                }
                prop_assert_eq!(consumer.account().rmem(), 0);
            }
            prop_assert!(cpu.is_whole());
        }
    }
}
