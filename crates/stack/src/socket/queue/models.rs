//! Loom models of the queue, which explore every interleaving of its threads: `./ci.sh loom`.

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use loom::sync::atomic::AtomicU32 as LoomU32;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::*;

const CHUNK_BYTES: u32 = 512;
/// Initial ticket, so that tickets wrap during the test.
const START: u32 = u32::MAX;

fn rig(rcvbuf: u32, cpus: usize) -> (Vec<SocketQueueProducer>, SocketQueueConsumer, Vec<Pool>) {
    let (consumer, pools) = without_producers(rcvbuf, cpus);
    ((0..cpus).map(|cpu| consumer.queue().producer(cpu).unwrap()).collect(), consumer, pools)
}

fn without_producers(rcvbuf: u32, cpus: usize) -> (SocketQueueConsumer, Vec<Pool>) {
    woken_by(rcvbuf, cpus, Arc::new(Awake))
}

fn woken_by(
    rcvbuf: u32,
    cpus: usize,
    reader: Arc<dyn WakeReader>,
) -> (SocketQueueConsumer, Vec<Pool>) {
    let shares = vec![vec![ChunkClass { chunk_bytes: CHUNK_BYTES, chunks: 2 }]; cpus];
    let pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
    let config = SocketQueueConfig { id: SocketId(0), rcvbuf, slots: 2 };
    let (_, consumer) = starting_at(config, START, &Arc::new(CounterTable::new(cpus, 1)), reader);
    (consumer, pools)
}

fn packet(pool: &mut Pool, mark: u8) -> Packet {
    let mut frame = pool.allocate(1).unwrap();
    frame.copy_from(&[mark]);
    Packet::received(frame, Arrival(0), 1, Link::Ethernet)
}

fn put(producer: &mut SocketQueueProducer, pool: &mut Pool, mark: u8) -> Enqueue {
    let mut dropped = Vec::new();
    let put = producer.put(&mut vec![packet(pool, mark)], &mut dropped);
    assert!(dropped.is_empty());
    put
}

fn model(check: impl Fn() + Send + Sync + 'static) {
    model_within(3, check);
}

fn model_within(preemptions: usize, check: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(check);
}

/// Takes so many packets, and sleeps whenever possible.
fn take_asleep(consumer: &mut SocketQueueConsumer, packets: usize) {
    let mut taken = Vec::new();
    while taken.len() < packets {
        if consumer.take(packets, &mut taken) == 0 {
            if consumer.arm() {
                thread::park();
            } else {
                thread::yield_now();
            }
        }
    }
}

/// A reader that sleeps whenever possible, and two CPUs. A lost wake-up would leave the reader
/// asleep forever, which loom reports.
#[test]
fn sleeping_reader_woken_for_every_packet() {
    model(|| {
        let (producers, mut consumer, pools) = rig(u32::MAX, 2);
        let reader = thread::current();
        let producers: Vec<_> = producers
            .into_iter()
            .zip(pools)
            .map(|(mut producer, mut pool)| {
                let reader = reader.clone();
                thread::spawn(move || {
                    if put(&mut producer, &mut pool, 0) == Enqueue::WakeReader {
                        reader.unpark();
                    }
                    (producer, pool)
                })
            })
            .collect();
        take_asleep(&mut consumer, 2);
        producers.into_iter().for_each(|producer| drop(producer.join().unwrap()));
    });
}

/// Descriptor that is readable while there are packets, as the library's sockets have.
#[derive(Default)]
struct Descriptor {
    state: Mutex<DescriptorState>,
    changed: Condvar,
}

#[derive(Default)]
struct DescriptorState {
    is_readable: bool,
    due: u32,
}

impl WakeReader for Descriptor {
    fn wake(&self, queue: &SocketQueue) {
        let mut state = self.state.lock().unwrap();
        if queue.has_news_else_arm(state.due) {
            state.is_readable = true;
            self.changed.notify_one();
        }
    }
}

impl Descriptor {
    fn not_readable(&self, due: u32) {
        *self.state.lock().unwrap() = DescriptorState { is_readable: false, due };
    }

    fn poll(&self) {
        let mut state = self.state.lock().unwrap();
        while !state.is_readable {
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// A reader that tries first, and polls the descriptor if nothing is there; two CPUs. A packet is often read before
/// its CPU looks for a sleeping reader: that CPU then finds the reader asleep who waits for the next one.
#[test]
fn polled_descriptor_tells_every_packet() {
    model(|| {
        let descriptor = Arc::<Descriptor>::default();
        let (mut consumer, pools) = woken_by(u32::MAX, 2, Arc::clone(&descriptor) as _);
        let producers: Vec<_> = pools
            .into_iter()
            .enumerate()
            .map(|(cpu, mut pool)| {
                let mut producer = consumer.queue().producer(cpu).unwrap();
                thread::spawn(move || {
                    if put(&mut producer, &mut pool, 0) == Enqueue::WakeReader {
                        producer.queue().wake_reader();
                    }
                    (producer, pool)
                })
            })
            .collect();
        let mut taken = Vec::new();
        while taken.len() < 2 {
            if consumer.take(1, &mut taken) > 0 {
                continue;
            }
            descriptor.not_readable(consumer.due());
            if consumer.queue().has_news_else_arm(consumer.due()) {
                thread::yield_now(); // drawn, but not published yet
                continue;
            }
            descriptor.poll();
        }
        producers.into_iter().for_each(|producer| drop(producer.join().unwrap()));
    });
}

/// A reader that sleeps whenever possible, and lanes that join when their CPUs have a packet to put in. Two
/// CPUs, one packet each.
#[test]
fn late_lane_is_met_reader_woken() {
    model_within(2, || {
        let (mut consumer, pools) = without_producers(u32::MAX, 2);
        let reader = thread::current();
        let producers: Vec<_> = pools
            .into_iter()
            .enumerate()
            .map(|(cpu, mut pool)| {
                let (queue, reader) = (Arc::clone(consumer.queue()), reader.clone());
                thread::spawn(move || {
                    let mut producer = queue.producer(cpu).unwrap();
                    if put(&mut producer, &mut pool, 0) == Enqueue::WakeReader {
                        reader.unpark();
                    }
                    (producer, pool)
                })
            })
            .collect();
        take_asleep(&mut consumer, 2);
        producers.into_iter().for_each(|producer| drop(producer.join().unwrap()));
    });
}

/// A socket is closed while a CPU joins: either the CPU gets `None`, or its lane is released with
/// the socket; no packet is left.
#[test]
fn lane_joining_closed_socket_leaves_nothing() {
    model(|| {
        let (consumer, mut pools) = without_producers(u32::MAX, 1);
        let (queue, mut pool) = (Arc::clone(consumer.queue()), pools.pop().unwrap());
        let cpu = thread::spawn(move || {
            if let Some(mut producer) = queue.producer(0) {
                let mut packets = vec![packet(&mut pool, 0)];
                let _ = producer.put(&mut packets, &mut Vec::new());
            }
            pool
        });
        drop(consumer);
        let mut pool = cpu.join().unwrap();
        assert_eq!(pool.in_use(), 0);
    });
}

/// A sleeping reader is woken by a refusal at any point of its going to sleep.
#[test]
fn sleeping_reader_woken_for_refusal() {
    model(|| {
        let (mut consumer, _) = without_producers(u32::MAX, 1);
        let reader = thread::current();
        let queue = Arc::clone(consumer.queue());
        let cpu = thread::spawn(move || {
            if queue.refuse() == Enqueue::WakeReader {
                reader.unpark();
            }
        });
        while !consumer.queue().take_refusal() {
            if consumer.arm() {
                thread::park();
            }
        }
        cpu.join().unwrap();
    });
}

/// A flow moves from one CPU to another, with only the ordering that the drain rule gives: the
/// second CPU has seen that the first is done.
#[test]
fn moved_flow_is_read_in_order() {
    model(|| {
        let (mut producers, mut consumer, mut pools) = rig(u32::MAX, 2);
        let (mut second, mut first) = (producers.pop().unwrap(), producers.pop().unwrap());
        let (mut second_pool, mut first_pool) = (pools.pop().unwrap(), pools.pop().unwrap());
        let moved = Arc::new(LoomU32::new(0));
        let has_moved = Arc::clone(&moved);
        let old = thread::spawn(move || {
            let _ = put(&mut first, &mut first_pool, 0);
            moved.store(1, Ordering::Release);
            (first, first_pool)
        });
        let new = thread::spawn(move || {
            while has_moved.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            let _ = put(&mut second, &mut second_pool, 1);
            (second, second_pool)
        });
        let mut taken = Vec::new();
        consumer.take(2, &mut taken);
        let ended = (old.join().unwrap(), new.join().unwrap());
        consumer.take(2, &mut taken);
        assert!(taken.iter().map(|packet| packet.frame.data()[0]).eq([0, 1]));
        drop(ended);
    });
}

/// Two CPUs and a reader share an account with room for one packet: the account never holds two.
#[test]
fn promise_3_account_never_exceeds_limit() {
    model(|| {
        let (producers, mut consumer, pools) = rig(CHUNK_BYTES, 2);
        let producers: Vec<_> = producers
            .into_iter()
            .zip(pools)
            .map(|(mut producer, mut pool)| {
                thread::spawn(move || {
                    let mut dropped = Vec::new();
                    let _ = producer.put(&mut vec![packet(&mut pool, 0)], &mut dropped);
                    let rmem = producer.account().rmem();
                    assert!(rmem <= CHUNK_BYTES, "{rmem} bytes are held");
                    (producer, pool, dropped.len())
                })
            })
            .collect();
        let mut taken = Vec::new();
        consumer.take(2, &mut taken);
        consumer.uncharge(consumer.in_hand_bytes());
        let ended: Vec<_> =
            producers.into_iter().map(|producer| producer.join().unwrap()).collect();
        let dropped: usize = ended.iter().map(|(_, _, dropped)| dropped).sum();
        consumer.take(2, &mut taken);
        assert_eq!(taken.len() + dropped, 2);
        assert_eq!(consumer.account().rmem(), consumer.in_hand_bytes());
    });
}
