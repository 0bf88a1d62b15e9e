//! Loom models of the queue, which explore every interleaving of its threads: `./ci.sh loom`.

use forebay_buf::Region;
use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use loom::sync::atomic::AtomicU32 as LoomU32;
use loom::thread;

use super::*;

const CHUNK_BYTES: u32 = 512;
/// Initial ticket, so that tickets wrap during the test.
const START: u32 = u32::MAX;

fn rig(rcvbuf: u32, cpus: usize) -> (Vec<SocketQueueProducer>, SocketQueueConsumer, Vec<Pool>) {
    let (outlet, pools) = without_inlets(rcvbuf, cpus);
    ((0..cpus).map(|cpu| outlet.hub().inlet(cpu).unwrap()).collect(), outlet, pools)
}

fn without_inlets(rcvbuf: u32, cpus: usize) -> (SocketQueueConsumer, Vec<Pool>) {
    let shares = vec![vec![ChunkClass { chunk_bytes: CHUNK_BYTES, chunks: 2 }]; cpus];
    let pools = carve(Region::allocate(region_bytes(&shares)), &shares).unwrap();
    let config = SocketQueueConfig { id: SocketId(0), rcvbuf, slots: 2, cpus };
    let (_, outlet) = starting_at(config, START, Arc::new(Awake));
    (outlet, pools)
}

fn packet(pool: &mut Pool, mark: u8) -> Packet {
    let mut frame = pool.allocate(1).unwrap();
    frame.copy_from(&[mark]);
    Packet::received(frame, Arrival(0), 1, Link::Ethernet)
}

fn put(inlet: &mut SocketQueueProducer, pool: &mut Pool, mark: u8) -> Enqueue {
    let mut dropped = Vec::new();
    let put = inlet.put(&mut vec![packet(pool, mark)], &mut dropped);
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
fn take_asleep(outlet: &mut SocketQueueConsumer, packets: usize) {
    let mut taken = Vec::new();
    while taken.len() < packets {
        if outlet.take(packets, &mut taken) == 0 {
            if outlet.arm() {
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
        let (inlets, mut outlet, pools) = rig(u32::MAX, 2);
        let reader = thread::current();
        let producers: Vec<_> = inlets
            .into_iter()
            .zip(pools)
            .map(|(mut inlet, mut pool)| {
                let reader = reader.clone();
                thread::spawn(move || {
                    if put(&mut inlet, &mut pool, 0) == Enqueue::WakeReader {
                        reader.unpark();
                    }
                    (inlet, pool)
                })
            })
            .collect();
        take_asleep(&mut outlet, 2);
        producers.into_iter().for_each(|producer| drop(producer.join().unwrap()));
    });
}

/// As above, with lanes that join when their CPUs have a packet to put in. Two CPUs, one packet
/// each.
#[test]
fn late_lane_is_met_reader_woken() {
    model_within(2, || {
        let (mut outlet, pools) = without_inlets(u32::MAX, 2);
        let reader = thread::current();
        let producers: Vec<_> = pools
            .into_iter()
            .enumerate()
            .map(|(cpu, mut pool)| {
                let (hub, reader) = (Arc::clone(outlet.hub()), reader.clone());
                thread::spawn(move || {
                    let mut inlet = hub.inlet(cpu).unwrap();
                    if put(&mut inlet, &mut pool, 0) == Enqueue::WakeReader {
                        reader.unpark();
                    }
                    (inlet, pool)
                })
            })
            .collect();
        take_asleep(&mut outlet, 2);
        producers.into_iter().for_each(|producer| drop(producer.join().unwrap()));
    });
}

/// A socket is closed while a CPU joins: either the CPU gets `None`, or its lane is released with
/// the socket; no packet is left.
#[test]
fn lane_joining_closed_socket_leaves_nothing() {
    model(|| {
        let (outlet, mut pools) = without_inlets(u32::MAX, 1);
        let (hub, mut pool) = (Arc::clone(outlet.hub()), pools.pop().unwrap());
        let cpu = thread::spawn(move || {
            if let Some(mut inlet) = hub.inlet(0) {
                let mut packets = vec![packet(&mut pool, 0)];
                let _ = inlet.put(&mut packets, &mut Vec::new());
            }
            pool
        });
        drop(outlet);
        let mut pool = cpu.join().unwrap();
        assert_eq!(pool.in_use(), 0);
    });
}

/// A sleeping reader is woken by a refusal at any point of its going to sleep.
#[test]
fn sleeping_reader_woken_for_refusal() {
    model(|| {
        let (mut outlet, _) = without_inlets(u32::MAX, 1);
        let reader = thread::current();
        let hub = Arc::clone(outlet.hub());
        let cpu = thread::spawn(move || {
            if hub.refuse() == Enqueue::WakeReader {
                reader.unpark();
            }
        });
        while !outlet.hub().take_refusal() {
            if outlet.arm() {
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
        let (mut inlets, mut outlet, mut pools) = rig(u32::MAX, 2);
        let (mut second, mut first) = (inlets.pop().unwrap(), inlets.pop().unwrap());
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
        outlet.take(2, &mut taken);
        let ended = (old.join().unwrap(), new.join().unwrap());
        outlet.take(2, &mut taken);
        assert!(taken.iter().map(|packet| packet.frame.data()[0]).eq([0, 1]));
        drop(ended);
    });
}

/// Two CPUs and a reader share an account with room for one packet: the account never holds two.
#[test]
fn promise_3_account_never_exceeds_limit() {
    model(|| {
        let (inlets, mut outlet, pools) = rig(CHUNK_BYTES, 2);
        let producers: Vec<_> = inlets
            .into_iter()
            .zip(pools)
            .map(|(mut inlet, mut pool)| {
                thread::spawn(move || {
                    let mut dropped = Vec::new();
                    let _ = inlet.put(&mut vec![packet(&mut pool, 0)], &mut dropped);
                    let rmem = inlet.account().rmem();
                    assert!(rmem <= CHUNK_BYTES, "{rmem} bytes are held");
                    (inlet, pool, dropped.len())
                })
            })
            .collect();
        let mut taken = Vec::new();
        outlet.take(2, &mut taken);
        outlet.uncharge(outlet.in_hand_bytes());
        let ended: Vec<_> =
            producers.into_iter().map(|producer| producer.join().unwrap()).collect();
        let dropped: usize = ended.iter().map(|(_, _, dropped)| dropped).sum();
        outlet.take(2, &mut taken);
        assert_eq!(taken.len() + dropped, 2);
        assert_eq!(outlet.account().rmem(), outlet.in_hand_bytes());
    });
}
