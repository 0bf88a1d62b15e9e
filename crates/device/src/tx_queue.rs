//! Tx queue: hands packets of any CPU to the one CPU that drives a device queue, in order.
//!
//! Each sending CPU has a lane to each queue, and packets leave by their
//! [tickets](forebay_rx::ordered_queue).

mod outgoing; // next packet to send, cut if it must be
mod sink; //     one CPU's sink
mod usable; //   queues that can send now

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use forebay_rx::Packet;
use forebay_rx::arrive::Waker;
use forebay_rx::ordered_queue::{LaneConsumer, LaneProducer, Lanes, Sequencer, lane};
use forebay_rx::sink::{SendDrop, SinkCounters};
pub(crate) use outgoing::{Outgoing, OutgoingSegment, OutgoingShape, longest_frame_bytes};
pub use sink::TxQueueSink;
pub(crate) use usable::UsableQueues;

/// Maximum number of packets that wait between one CPU and one queue.
pub(crate) const TX_QUEUE_PACKETS: u32 = 1024;

/// State shared by both ends of a queue's lanes.
struct TxQueueShared {
    tickets: Sequencer,
    /// Wakes the driving CPU; unset until a CPU drives the queue.
    wake: OnceLock<Waker>,
    /// Lanes that the driving CPU has not taken over, with the counters of their senders.
    joined: Mutex<Vec<(LaneConsumer, Arc<SinkCounters>)>>,
    /// Number of lanes that ever joined. Written under the lock (Release), read by the driving CPU
    /// (Acquire).
    joins: AtomicUsize,
    /// True if no CPU drives the queue any more.
    is_gone: AtomicBool,
    /// Lanes that the driving CPU has left, for packets that were handed in meanwhile.
    left: Mutex<Option<DrivenLanes>>,
}

impl TxQueueShared {
    fn joined(&self) -> MutexGuard<'_, Vec<(LaneConsumer, Arc<SinkCounters>)>> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn left(&self) -> MutexGuard<'_, Option<DrivenLanes>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receiving ends of all lanes of a queue, with the counters of their senders.
struct DrivenLanes {
    lanes: Lanes,
    counters: Vec<Arc<SinkCounters>>,
}

impl DrivenLanes {
    /// Drops all packets, and counts them.
    fn clear(&mut self) {
        for (count, counters) in self.lanes.clear().into_iter().zip(&self.counters) {
            counters.add_dropped(SendDrop::Down, count);
        }
    }
}

/// Handle by which CPUs join a queue.
#[derive(Clone)]
pub(crate) struct TxQueue(Arc<TxQueueShared>);

impl TxQueue {
    /// Returns a queue, and the end of it for the driving CPU.
    pub(crate) fn new() -> (Self, TxQueueConsumer) {
        Self::starting_at(0)
    }

    fn starting_at(ticket: u32) -> (Self, TxQueueConsumer) {
        let shared = Arc::new(TxQueueShared {
            tickets: Sequencer::starting_at(ticket),
            wake: OnceLock::new(),
            joined: Mutex::new(Vec::new()),
            joins: AtomicUsize::new(0),
            is_gone: AtomicBool::new(false),
            left: Mutex::new(None),
        });
        let lanes = Lanes::new(ticket, Vec::new());
        let consumer = TxQueueConsumer {
            shared: Arc::clone(&shared),
            driven: DrivenLanes { lanes, counters: Vec::new() },
        };
        (Self(shared), consumer)
    }

    /// Adds a lane for one more CPU, whose packets are counted in `counters`.
    pub(crate) fn join(&self, counters: Arc<SinkCounters>) -> TxQueueProducer {
        self.join_with(TX_QUEUE_PACKETS, counters)
    }

    fn join_with(&self, capacity: u32, counters: Arc<SinkCounters>) -> TxQueueProducer {
        let (producer, consumer) = lane(capacity);
        let mut joined = self.0.joined();
        joined.push((consumer, counters));
        self.0.joins.fetch_add(1, Ordering::Release);
        TxQueueProducer { shared: Arc::clone(&self.0), lane: producer }
    }
}

/// Sending end of a lane.
pub(crate) struct TxQueueProducer {
    shared: Arc<TxQueueShared>,
    lane: LaneProducer,
}

impl TxQueueProducer {
    /// Takes the oldest of `packets`, as many as there is room for, and returns their number. The
    /// rest stays in `packets`.
    pub(crate) fn put(&mut self, packets: &mut Vec<Packet>) -> usize {
        let room = self.lane.room_for(packets.len());
        let rest = packets.split_off(room.min(packets.len()));
        let count = packets.len();
        if count > 0 {
            let tickets = self.shared.tickets.draw(packets);
            self.lane.send(tickets, packets);
        }
        *packets = rest;
        count
    }

    /// Wakes the CPU that drives the queue.
    pub(crate) fn wake(&self) {
        if let Some(wake) = self.shared.wake.get() {
            wake();
        }
    }

    /// True if no CPU drives the queue any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.shared.is_gone.load(Ordering::Relaxed)
    }
}

impl Drop for TxQueueProducer {
    /// Counts packets that were handed in while the driving CPU left the queue.
    fn drop(&mut self) {
        if let Some(driven) = &mut *self.shared.left() {
            driven.clear();
        }
    }
}

/// Index of a lane, and so of the CPU that sent a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LaneId(pub(crate) u16);

/// Receiving end of all lanes of a queue, for the driving CPU.
pub(crate) struct TxQueueConsumer {
    shared: Arc<TxQueueShared>,
    driven: DrivenLanes,
}

impl TxQueueConsumer {
    /// Sets the waker of the driving CPU. Only the first call has an effect.
    pub(crate) fn wake_by(&self, wake: Waker) {
        // A second waker would be the same CPU's.
        let _ = self.shared.wake.set(wake);
    }

    /// Returns the next packet in ticket order, if it has arrived, and its lane.
    pub(crate) fn next(&mut self) -> Option<(LaneId, Packet)> {
        if self.shared.joins.load(Ordering::Acquire) != self.driven.counters.len() {
            self.take_over();
        }
        let (lane, packet) = self.driven.lanes.take_one()?;
        Some((LaneId(u16::try_from(lane).unwrap_or(u16::MAX)), packet))
    }

    /// Takes over lanes that have joined.
    fn take_over(&mut self) {
        for (lane, counters) in self.shared.joined().drain(..) {
            self.driven.lanes.join(lane);
            self.driven.counters.push(counters);
        }
    }

    /// True if packets were handed in that have not left.
    pub(crate) fn has_some(&self) -> bool {
        self.driven.lanes.has_some(&self.shared.tickets)
    }

    /// True if any CPU can send.
    pub(crate) fn has_lanes(&self) -> bool {
        self.shared.joins.load(Ordering::Relaxed) > 0
    }

    /// Returns the counters of a lane's sender.
    pub(crate) fn counters(&self, of: LaneId) -> Option<&SinkCounters> {
        self.driven.counters.get(usize::from(of.0)).map(|counters| &**counters)
    }
}

impl Drop for TxQueueConsumer {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut left = shared.left();
        shared.is_gone.store(true, Ordering::Relaxed);
        self.take_over();
        self.driven.clear();
        let none = DrivenLanes { lanes: Lanes::new(0, Vec::new()), counters: Vec::new() };
        *left = Some(std::mem::replace(&mut self.driven, none));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, Pool, carve, region_bytes};
    use forebay_rx::packet::Arrival;
    use forebay_rx::parse::Link;
    use proptest::prelude::*;

    use super::*;

    fn pool(chunks: u32) -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: 512, chunks }]];
        carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
    }

    fn packet(pool: &mut Pool, mark: u32) -> Packet {
        let mut frame = pool.allocate(8).unwrap();
        frame.copy_from(&mark.to_ne_bytes());
        Packet::received(frame, Arrival(0), 4, Link::Ethernet)
    }

    fn mark(packet: &Packet) -> u32 {
        u32::from_ne_bytes(packet.frame.data().try_into().unwrap())
    }

    proptest! {
        /// For CPUs that hand in any batches, and a queue polled at any time: packets leave in the
        /// order of handover, and packets without room stay with the sender.
        #[test]
        fn promise_1_packets_leave_in_handover_order(
            start in prop_oneof![Just(0u32), u32::MAX - 50..=u32::MAX],
            capacity in prop_oneof![Just(4u32), Just(64)],
            steps in proptest::collection::vec((0usize..3, 0u32..9, 0usize..9), 1..80),
        ) {
            let mut memory = pool(1000);
            let (tx_queue, mut consumer) = TxQueue::starting_at(start);
            let counters = Arc::<SinkCounters>::default();
            let mut producers: Vec<_> =
                (0..3).map(|_| tx_queue.join_with(capacity, Arc::clone(&counters))).collect();
            let mut expected = VecDeque::new();
            let mut next = 0;
            for (cpu, count, take) in steps {
                let mut packets: Vec<_> =
                    (next..next + count).map(|number| packet(&mut memory, number)).collect();
                let taken = producers[cpu].put(&mut packets);
                prop_assert_eq!(taken + packets.len(), count as usize);
                expected.extend((next..).take(taken).map(|number| (cpu, number)));
                next += count;
                for _ in 0..take {
                    let left = consumer.next();
                    let left = left.map(|(lane, packet)| (usize::from(lane.0), mark(&packet)));
                    prop_assert_eq!(left, expected.pop_front());
                }
                prop_assert_eq!(consumer.has_some(), !expected.is_empty());
            }
            drop(consumer);
            prop_assert_eq!(counters.dropped(SendDrop::Down), expected.len() as u64);
            prop_assert!(producers[0].is_gone());
            // A sender that looked before the queue was gone still hands in a packet.
            let late = producers[0].put(&mut vec![packet(&mut memory, 0)]);
            drop(producers);
            prop_assert_eq!(counters.dropped(SendDrop::Down), (expected.len() + late) as u64);
            prop_assert_eq!(memory.in_use(), 0);
        }
    }

    #[test]
    fn promise_1_moving_flow_leaves_in_order() {
        const PACKETS: u32 = 4000;
        let mut memory = pool(4096);
        let (tx_queue, mut consumer) = TxQueue::new();
        let turn = Arc::new(AtomicU32::new(0));
        let packets: Vec<_> = (0..PACKETS).map(|number| packet(&mut memory, number)).collect();
        let mut shares = [Vec::new(), Vec::new()];
        for (number, packet) in packets.into_iter().enumerate() {
            shares[number / 3 % 2].push(packet);
        }
        let senders: Vec<_> = shares
            .into_iter()
            .map(|share| {
                let (mut producer, turn) = (tx_queue.join(Arc::default()), Arc::clone(&turn));
                thread::spawn(move || {
                    for packet in share {
                        // The flow moves to this CPU when the packet's number is next.
                        while turn.load(Ordering::Acquire) != mark(&packet) {
                            thread::yield_now();
                        }
                        let next = mark(&packet) + 1;
                        let mut one = vec![packet];
                        while producer.put(&mut one) == 0 {
                            thread::yield_now();
                        }
                        turn.store(next, Ordering::Release);
                    }
                })
            })
            .collect();
        for expected in 0..PACKETS {
            let left = loop {
                match consumer.next() {
                    Some((_, packet)) => break packet,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(mark(&left), expected);
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    }
}
