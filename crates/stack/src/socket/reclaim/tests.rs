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

    fn put_many(&mut self, producer: &mut SocketQueueProducer, policy: ReclaimPolicy, count: u64) {
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
    for (policy, rcvbuf) in ReclaimPolicy::ALL.iter().flat_map(|p| sizes.map(|size| (*p, size))) {
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
            assert!((away * 512..=(left + FREE_BATCH_FRAMES) * 2048).contains(&rmem), "{policy}");
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
