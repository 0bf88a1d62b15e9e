//! The queue compared with a plain queue, and under several threads.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::thread;

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use proptest::prelude::*;

use super::*;

const SMALL_BYTES: u32 = 512;
const LARGE_BYTES: u32 = 2048;
const CPUS: usize = 3;
const ID: SocketId = SocketId(7);

fn pools(owners: usize, chunks: u32) -> Vec<Pool> {
    let share = [SMALL_BYTES, LARGE_BYTES].map(|chunk_bytes| ChunkClass { chunk_bytes, chunks });
    // The last pool is the reader's, which only returns frames.
    let mut shares = vec![share.to_vec(); owners];
    shares.push(Vec::new());
    carve(Region::allocate(region_bytes(&shares)), &shares).unwrap()
}

fn packet(pool: &mut Pool, mark: u32, charge: Charge) -> Packet {
    let mut frame = pool.allocate(if charge == Charge::Large { 1000 } else { 4 }).unwrap();
    frame.copy_from(&mark.to_ne_bytes());
    if matches!(charge, Charge::Merged | Charge::FragList) {
        (0..2).for_each(|_| frame.append(pool.allocate(1000).unwrap()));
    }
    let mut packet = Packet::received(frame, Arrival(0), 4, Link::Ethernet);
    packet.set_gso_size(if charge == Charge::Merged { 1000 } else { 0 });
    packet
}

fn mark(packet: &Packet) -> u32 {
    u32::from_ne_bytes(packet.frame.data().try_into().unwrap())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Charge {
    Small,
    Large,
    /// Three datagrams, each in its own frame.
    Merged,
    /// One datagram, in three frames.
    FragList,
}

impl Charge {
    fn bytes(self) -> u32 {
        match self {
            Self::Small => SMALL_BYTES,
            Self::Large => LARGE_BYTES,
            Self::Merged | Self::FragList => SMALL_BYTES + 2 * LARGE_BYTES,
        }
    }

    fn datagrams(self) -> u64 {
        if self == Self::Merged { 3 } else { 1 }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(usize, Vec<Charge>),
    Take(usize),
    Peek,
    /// Uncharges this many 256ths of the bytes in hand.
    Uncharge(u8),
    SetRcvbuf(u32),
    Arm,
    Disarm,
}

fn step() -> impl Strategy<Value = Step> {
    let charge = prop_oneof![
        Just(Charge::Small),
        Just(Charge::Large),
        Just(Charge::Merged),
        Just(Charge::FragList),
    ];
    let put = (0..CPUS, proptest::collection::vec(charge, 0..9));
    prop_oneof![
        4 => put.prop_map(|(cpu, charges)| Step::Put(cpu, charges)),
        2 => (0usize..12).prop_map(Step::Take),
        1 => Just(Step::Peek),
        2 => any::<u8>().prop_map(Step::Uncharge),
        1 => (0u32..40_000).prop_map(Step::SetRcvbuf),
        1 => Just(Step::Arm),
        1 => Just(Step::Disarm),
    ]
}

/// Slow reference model: one queue, packet by packet, by the kernel's rule.
#[derive(Default)]
struct Twin {
    waiting: VecDeque<(u32, Charge)>,
    rmem: u32,
    rcvbuf: u32,
    in_hand: u32,
    queued: u64,
    dropped: u64,
    is_armed: bool,
}

impl Twin {
    /// Puts packets in, and returns the marks of those dropped.
    fn put(&mut self, packets: &[(u32, Charge)]) -> Vec<u32> {
        let mut dropped = Vec::new();
        for &(mark, charge) in packets {
            if self.rmem != 0 && self.rmem + charge.bytes() > self.rcvbuf {
                dropped.push(mark);
                self.dropped += charge.datagrams();
            } else {
                self.waiting.push_back((mark, charge));
                self.rmem += charge.bytes();
                self.queued += charge.datagrams();
            }
        }
        dropped
    }

    fn take(&mut self, max: usize) -> Vec<u32> {
        let taken: Vec<_> = self.waiting.drain(..max.min(self.waiting.len())).collect();
        self.in_hand += taken.iter().map(|(_, charge)| charge.bytes()).sum::<u32>();
        taken.into_iter().map(|(mark, _)| mark).collect()
    }
}

/// The queue, its reference model, and the memory of its packets.
struct Rig {
    pools: Vec<Pool>,
    queue: Arc<SocketQueue>,
    /// Inlets, created when their CPUs have a packet to put in.
    producers: [Option<SocketQueueProducer>; CPUS],
    consumer: SocketQueueConsumer,
    twin: Twin,
    next: u32,
    dropped: Vec<Packet>,
    taken: Vec<Packet>,
}

impl Rig {
    fn step(&mut self, step: Step) {
        let Self { queue, producers, consumer, twin, dropped, taken, .. } = self;
        match step {
            Step::Put(cpu, charges) => {
                let numbered: Vec<_> = (self.next..).zip(charges).collect();
                self.next += u32::try_from(numbered.len()).unwrap();
                let pool = &mut self.pools[cpu];
                let mut packets =
                    numbered.iter().map(|&(mark, charge)| packet(pool, mark, charge)).collect();
                let producer = producers[cpu].get_or_insert_with(|| queue.producer(cpu).unwrap());
                let result = producer.put(&mut packets, dropped);
                assert!(packets.is_empty());
                let expected = twin.put(&numbered);
                assert!(dropped.drain(..).map(|packet| mark(&packet)).eq(expected.iter().copied()));
                let wakes = twin.is_armed && expected.len() < numbered.len();
                assert_eq!(result, if wakes { Enqueue::WakeReader } else { Enqueue::Done });
                twin.is_armed &= !wakes;
            }
            Step::Take(max) => {
                let count = consumer.take(max, taken);
                assert_eq!(count, taken.len());
                assert!(taken.drain(..).map(|packet| mark(&packet)).eq(twin.take(max)));
            }
            Step::Peek => {
                let front = twin.waiting.front().map(|(mark, _)| *mark);
                assert_eq!(consumer.peek().map(mark), front);
            }
            Step::Uncharge(part) => {
                let bytes = u32::try_from(u64::from(twin.in_hand) * u64::from(part) / 255).unwrap();
                consumer.uncharge(bytes);
                twin.in_hand -= bytes;
                twin.rmem -= bytes;
            }
            Step::SetRcvbuf(bytes) => {
                consumer.account().set_rcvbuf(bytes);
                twin.rcvbuf = bytes;
            }
            Step::Arm => {
                twin.is_armed = twin.waiting.is_empty();
                assert_eq!(consumer.arm(), twin.is_armed);
            }
            Step::Disarm => {
                consumer.disarm();
                twin.is_armed = false;
            }
        }
        self.check();
    }

    fn check(&self) {
        let Self { consumer, twin, .. } = self;
        let account = consumer.account();
        assert_eq!(consumer.has_some(), !twin.waiting.is_empty());
        assert_eq!((account.rmem(), consumer.in_hand_bytes()), (twin.rmem, twin.in_hand));
        assert_eq!((account.queued(), account.dropped()), (twin.queued, twin.dropped));
    }
}

proptest! {
    /// For any runs put in by any CPUs, and any times at which the reader looks: packets come out
    /// in the order in which they were put in, exactly the packets that the kernel would drop are
    /// dropped, and a sleeping reader is woken once.
    #[test]
    fn promise_1_and_2_queue_agrees_with_reference(
        start in prop_oneof![Just(0u32), u32::MAX - 50..=u32::MAX],
        slots in 1u32..9,
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let rcvbuf = 20_000;
        let config = SocketQueueConfig { id: ID, rcvbuf, slots };
        let counters = Arc::new(CounterTable::new(CPUS, ID.index() + 1));
        let (queue, consumer) = starting_at(config, start, &counters, Arc::new(Awake));
        let mut rig = Rig {
            pools: pools(CPUS, 1500),
            producers: [const { None }; CPUS],
            queue,
            consumer,
            twin: Twin { rcvbuf, ..Twin::default() },
            next: 0,
            dropped: Vec::new(),
            taken: Vec::new(),
        };
        steps.into_iter().for_each(|step| rig.step(step));
        // The reader is dropped, with any packets queued; then the CPUs' producers.
        let Rig { mut pools, producers, consumer, queue, .. } = rig;
        drop(consumer);
        for producer in producers.into_iter().flatten() {
            let (mut producer, mut late) = (producer, vec![packet(&mut pools[0], 0, Charge::Small)]);
            prop_assert_eq!(producer.put(&mut late, &mut Vec::new()), Enqueue::Closed);
            prop_assert_eq!(late.len(), 1);
        }
        prop_assert!(queue.producer(0).is_none());
        prop_assert!(pools.iter_mut().all(|pool| pool.in_use() == 0));
    }
}

/// A reader that is slow now and then and sleeps when the queue is empty, and CPUs that put packets
/// in as fast as they can. Every packet comes out or is dropped, the packets of each CPU come out
/// in order, the bytes held stay within `rcvbuf`, and no wake-up is lost (the reader would sleep
/// forever).
#[test]
#[expect(clippy::disallowed_methods, reason = "the threads of CPUs and of a reader")]
fn promise_2_and_3_several_cpus_sleeping_reader_lose_nothing() {
    const RUNS: u32 = 3000;
    let (producers, mut consumer) =
        queue(SocketQueueConfig { id: ID, rcvbuf: 40 * SMALL_BYTES, slots: 2 }, CPUS);
    let mut pools = pools(CPUS, 256);
    let mut way_home = pools.pop().unwrap();
    let (reader, ended) = (thread::current(), Arc::new(AtomicU64::new(0)));
    let producers: Vec<_> = (0..)
        .zip(producers)
        .zip(pools)
        .map(|((cpu, producer), pool)| {
            let (reader, ended) = (reader.clone(), Arc::clone(&ended));
            thread::spawn(move || {
                let result = produce((cpu, producer), pool, RUNS, &reader);
                ended.fetch_add(1, Ordering::Release);
                // The reader may sleep here, and checks if any producer is left.
                reader.unpark();
                result
            })
        })
        .collect();

    let mut last = [None; CPUS];
    let (mut taken, mut count) = (Vec::new(), 0u64);
    while ended.load(Ordering::Acquire) < CPUS as u64 || consumer.has_some() {
        let max = 1 + (count % 70) as usize;
        if consumer.take(max, &mut taken) == 0 {
            if consumer.arm() {
                thread::park();
            }
            continue;
        }
        let bytes = consumer.in_hand_bytes();
        assert!(consumer.account().rmem() <= consumer.account().rcvbuf(), "promise 3");
        for packet in taken.drain(..) {
            let (cpu, number) = ((mark(&packet) >> 24) as usize, mark(&packet) & 0x00ff_ffff);
            assert!(last[cpu] < Some(number), "promise 1: {number} behind {:?}", last[cpu]);
            last[cpu] = Some(number);
            way_home.put(packet.frame);
            count += 1;
        }
        way_home.flush();
        consumer.uncharge(bytes);
    }
    let producers: Vec<_> =
        producers.into_iter().map(|producer| producer.join().unwrap()).collect();
    let sent: u64 = producers.iter().map(|(_, _, sent)| sent).sum();
    let account = consumer.account();
    assert_eq!((account.queued(), account.rmem()), (count, 0));
    assert_eq!(account.queued() + account.dropped(), sent, "promise 2");
    for (producer, mut pool, _) in producers {
        drop(producer);
        assert_eq!(pool.in_use(), 0);
    }
}

/// Puts in runs of varying length.
#[expect(clippy::disallowed_methods, reason = "the thread of a CPU")]
fn produce(
    (cpu, mut producer): (u32, SocketQueueProducer),
    mut pool: Pool,
    runs: u32,
    reader: &thread::Thread,
) -> (SocketQueueProducer, Pool, u64) {
    let cpu = cpu << 24;
    let (mut packets, mut dropped, mut number) = (Vec::new(), Vec::new(), 0);
    for run in 0..runs {
        for _ in 0..1 + run * 7 % 64 {
            packets.push(packet(&mut pool, cpu | number, Charge::Small));
            number += 1;
        }
        if producer.put(&mut packets, &mut dropped) == Enqueue::WakeReader {
            reader.unpark();
        }
        dropped.drain(..).for_each(|packet| pool.put(packet.frame));
        if run % 16 == 0 {
            thread::yield_now();
        }
    }
    (producer, pool, number.into())
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the threads of CPUs")]
fn promise_1_moving_flow_is_read_in_order() {
    const PACKETS: u64 = 4000;
    let (producers, mut consumer) =
        queue(SocketQueueConfig { id: ID, rcvbuf: u32::MAX, slots: 16 }, CPUS);
    let turn = Arc::new(AtomicU64::new(0));
    let producers: Vec<_> = (0u64..)
        .zip(producers.into_iter().zip(pools(CPUS, 4000)))
        .map(|(cpu, (mut producer, mut pool))| {
            let turn = Arc::clone(&turn);
            thread::spawn(move || {
                for number in (0..PACKETS).filter(|number| number / 3 % CPUS as u64 == cpu) {
                    // The flow is on this CPU once the count has reached its number.
                    while turn.load(Ordering::Acquire) != number {
                        thread::yield_now();
                    }
                    let mark = u32::try_from(number).unwrap();
                    let mut one = vec![packet(&mut pool, mark, Charge::Small)];
                    assert_eq!(producer.put(&mut one, &mut Vec::new()), Enqueue::Done);
                    turn.store(number + 1, Ordering::Release);
                }
            })
        })
        .collect();
    let mut taken = Vec::new();
    while taken.len() < usize::try_from(PACKETS).unwrap() {
        if consumer.take(5, &mut taken) == 0 {
            thread::yield_now();
        }
    }
    assert!(taken.iter().map(mark).eq(0..u32::try_from(PACKETS).unwrap()));
    producers.into_iter().for_each(|producer| producer.join().unwrap());
}

#[test]
fn rfs_6_inline_reader_sleeps_through_errors() {
    let config = SocketQueueConfig { id: ID, slots: 4, rcvbuf: 1 << 20 };
    let (mut producers, mut consumer) = queue(config, 1);
    let socket = Arc::clone(consumer.queue());
    assert!(consumer.arm_for_packets());
    assert_eq!(socket.refuse(), Enqueue::WakeReader);
    assert!(!consumer.arm(), "the error is news");
    assert!(consumer.arm_for_packets(), "but not for a reader that takes none");
    let mut pool = pools(1, 1).remove(0);
    assert_eq!(
        producers[0].put(&mut vec![packet(&mut pool, 1, Charge::Small)], &mut vec![]),
        Enqueue::WakeReader
    );
    assert!(!consumer.arm_for_packets());
    assert!(socket.take_refusal());
}
