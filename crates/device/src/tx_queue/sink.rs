//! One CPU's sink: a lane to each of the device's queues.

use std::sync::Arc;

use forebay_rx::Packet;
use forebay_rx::sink::{SendDrop, Sink, SinkCounters, SinkError};
use forebay_sys::error::Error;

use super::usable::UsableCopy;
use super::{TxQueue, TxQueueProducer, UsableQueues};

/// One CPU's sink of a device whose queues are driven by the CPUs that poll them.
///
/// Packets of a flow go to one queue, and leave it in the order of handover, as long as that queue can
/// send. If it cannot, they go to another one that can.
pub struct TxQueueSink {
    /// Name of the device.
    name: String,
    ways: Vec<TxQueueProducer>,
    /// Queues among which flows are spread, and the latest copy.
    usable: (Arc<UsableQueues>, UsableCopy),
    /// Packets for each queue, during a call of [`Sink::send`].
    sorted: Vec<Vec<Packet>>,
    counters: Arc<SinkCounters>,
}

impl TxQueueSink {
    /// Returns a sink for one more CPU of the device `name`, with a lane to each queue. All queues
    /// can send.
    pub(crate) fn new(name: String, queues: &[TxQueue]) -> Self {
        Self::among(name, queues, Arc::new(UsableQueues::all(queues.len())))
    }

    /// Returns such a sink of a device whose queues can send at times.
    pub(crate) fn among(name: String, queues: &[TxQueue], usable: Arc<UsableQueues>) -> Self {
        assert!(!queues.is_empty(), "{name}: a device that sends has a tx queue");
        let counters = Arc::default();
        let copy = usable.copy();
        Self {
            name,
            usable: (usable, copy),
            ways: queues.iter().map(|queue| queue.join(Arc::clone(&counters))).collect(),
            sorted: queues.iter().map(|_| Vec::new()).collect(),
            counters,
        }
    }

    /// Hands packets to a queue, and returns true if the queue is gone. Packets without room stay
    /// in `packets`.
    fn put(&mut self, queue: usize, packets: &mut Vec<Packet>) -> bool {
        let way = &mut self.ways[queue];
        if way.is_gone() {
            self.counters.add_dropped(SendDrop::Down, packets.len() as u64);
            return true;
        }
        if way.put(packets) > 0 {
            way.wake();
        }
        self.counters.add_dropped(SendDrop::Full, packets.len() as u64);
        false
    }
}

impl Sink for TxQueueSink {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError> {
        if packets.is_empty() {
            return Ok(());
        }
        let mut is_gone = false;
        if self.ways.len() == 1 {
            is_gone = self.put(0, packets);
        } else {
            let (usable, copy) = &mut self.usable;
            copy.follow(usable);
            for packet in packets.drain(..) {
                self.sorted[copy.queue_of(packet.hash.0 as usize)].push(packet);
            }
            for queue in 0..self.ways.len() {
                let mut sorted = std::mem::take(&mut self.sorted[queue]);
                if !sorted.is_empty() {
                    is_gone |= self.put(queue, &mut sorted);
                    packets.append(&mut sorted);
                }
                self.sorted[queue] = sorted;
            }
        }
        if is_gone { Err(Error::DeviceGone { name: self.name.clone() }.into()) } else { Ok(()) }
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }
}
