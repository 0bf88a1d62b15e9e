//! Delivery: the second spine. It runs on the CPU that packets were steered to and owns what it
//! takes to bring them from the backlogs to the application.

use std::sync::Arc;

use forebay_buf::Pool;
use forebay_buf::ring::Consumer;

use crate::arrive::PollStatus;
use crate::backlog::{BacklogRing, Note};
use crate::coalesce::{CoalesceConfig, Coalescer, FlushReason};
use crate::counters::DeliveryCounters;
use crate::cpu::{CpuId, RxQueue};
use crate::drop_reason::DropReason;
use crate::intake::Dropped;
use crate::packet::{Arrival, Packet};

/// The application: gets packets in batches, on the CPU they were steered to.
pub trait Handler: Send {
    /// Handles a batch. The packets of a flow come in the order of arrival, in this batch and
    /// from batch to batch, whichever CPU gets them.
    ///
    /// Packets left in the batch return to their owners when this returns; a handler that keeps a
    /// packet takes it out.
    fn handle(&mut self, batch: &mut Batch<'_>);
}

/// Packets of one rx queue, oldest first.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The CPU that they were steered to: this one.
    pub cpu: CpuId,
    /// The queue that they came from.
    pub rx_queue: RxQueue,
    /// The packets.
    pub packets: &'a mut Vec<Packet>,
    /// Notes of the packets that were on the backlog, if notes are taken.
    pub notes: &'a [Note],
    /// Memory for packets that the handler makes.
    pub pool: &'a mut Pool,
}

impl Batch<'_> {
    /// Note of a packet, by the place of one of its segments in the order of
    /// arrival: where packets are merged behind the backlog, every segment has a note of its own.
    #[must_use]
    pub fn note_of(&self, arrival: Arrival) -> Option<&Note> {
        self.notes.iter().find(|note| note.arrival == arrival)
    }
}

/// The delivery of one CPU.
#[derive(Debug)]
pub struct Delivery {
    cpu: CpuId,
    batch_max: usize,
    /// One for each rx queue.
    lanes: Vec<BacklogRing>,
    /// The lane whose turn it is, and whose packets are in hand.
    lane: usize,
    /// The batch in hand; empty between batches.
    packets: Vec<Packet>,
    notes: Vec<Note>,
    /// Frames of the batch that the handler has now, which may take packets out of it.
    handled: u64,
    coalescer: Option<Coalescer>,
    /// Packets while they are coalesced; empty otherwise.
    coalesced: Vec<Packet>,
    counters: Arc<DeliveryCounters>,
}

impl Delivery {
    /// A delivery that takes at most `batch_max` packets in hand at once.
    #[must_use]
    pub fn new(cpu: CpuId, lanes: Vec<BacklogRing>, batch_max: usize) -> Self {
        let packets = Vec::with_capacity(batch_max);
        Self {
            cpu,
            batch_max,
            lanes,
            lane: 0,
            packets,
            notes: Vec::new(),
            handled: 0,
            coalescer: None,
            coalesced: Vec::new(),
            counters: Arc::default(),
        }
    }

    /// Changes how packets are coalesced on delivery, if they are. Nothing is in hand.
    pub fn set_coalesce(&mut self, coalesce: Option<CoalesceConfig>) {
        let counters = &self.counters.coalesce;
        self.coalescer = coalesce.map(|config| Coalescer::new(config, Arc::clone(counters)));
    }

    /// The spine: takes up to `budget` packets from the backlogs to the handler, and returns how
    /// many. The lanes have their turns one after another.
    pub fn turn(&mut self, budget: usize, pool: &mut Pool, handler: &mut impl Handler) -> usize {
        let mut done = 0;
        while done < budget {
            let taken = self.take(budget - done);
            if taken == 0 {
                break;
            }
            self.coalesce();
            self.handle(pool, handler);
            self.complete(pool);
            done += taken;
        }
        done
    }

    /// Takes a batch of at most `max` packets in hand, from the next lane that has any. Nothing is
    /// in hand before.
    pub fn take(&mut self, max: usize) -> usize {
        debug_assert!(self.packets.is_empty(), "a batch is completed before the next is taken");
        for _ in 0..self.lanes.len() {
            self.lane = if self.lane + 1 < self.lanes.len() { self.lane + 1 } else { 0 };
            let lane = &mut self.lanes[self.lane];
            let waiting = lane.packets.queued();
            if waiting > 0 {
                self.counters.backlog_max.raise_to(waiting.into());
                let taken = lane.packets.take(max.min(self.batch_max), &mut self.packets);
                if let Some(notes) = &mut lane.notes {
                    take_notes(notes, taken, &mut self.notes);
                }
                return taken;
            }
        }
        0
    }

    /// Merges what can be merged of the batch in hand. A batch is a poll, whatever the
    /// `gro_flush_timeout`: the backlog's head may only pass what was handled, so nothing is kept.
    pub fn coalesce(&mut self) {
        let Some(coalescer) = &mut self.coalescer else { return };
        coalescer.coalesce(&mut self.packets, 0, &mut self.coalesced);
        coalescer.end_poll(PollStatus::Last, 0, &mut self.coalesced);
        std::mem::swap(&mut self.packets, &mut self.coalesced);
    }

    /// Packets in hand.
    #[must_use]
    pub fn in_hand(&self) -> usize {
        self.packets.len()
    }

    /// Hands the batch to the handler.
    pub fn handle(&mut self, pool: &mut Pool, handler: &mut impl Handler) {
        let (mut frames, mut bytes) = (0, 0);
        for packet in &self.packets {
            frames += u64::from(packet.segment_count());
            bytes += u64::from(packet.wire_len);
        }
        self.handled = frames;
        handler.handle(&mut Batch {
            cpu: self.cpu,
            rx_queue: self.lanes[self.lane].rx_queue,
            packets: &mut self.packets,
            notes: &self.notes,
            pool,
        });
        self.handled = 0;
        self.counters.frames.add(frames);
        self.counters.bytes.add(bytes);
        self.counters.batches.add(1);
    }

    /// Declares the batch processed: the backlog's head moves on, which lets its flows go
    /// elsewhere (ordering hazard H13), and the frames return to their owners.
    pub fn complete(&mut self, pool: &mut Pool) {
        self.lanes[self.lane].release();
        for packet in self.packets.drain(..) {
            pool.put(packet.frame);
        }
        self.notes.clear();
    }

    /// Gives up the batch in hand of a thread that is lost: nobody knows how much of it the
    /// application has seen. The backlog's head passes it, so its flows go on. Returns the queue
    /// that it came from and those of its packets that are still there, for their owners.
    pub fn abandon_batch(&mut self) -> Option<(RxQueue, Vec<Dropped>)> {
        let lane = self.lanes.get_mut(self.lane)?;
        // What coalescing still held comes behind what it had let go.
        let mut packets = std::mem::take(&mut self.coalesced);
        if let Some(coalescer) = &mut self.coalescer {
            coalescer.flush(FlushReason::Switch, &mut packets);
        }
        packets.append(&mut self.packets);
        let frames = packets.iter().map(|packet| u64::from(packet.segment_count())).sum();
        self.counters.lost.add(std::mem::take(&mut self.handled).max(frames));
        let lost = packets.into_iter().map(|packet| {
            let (arrival, reason) = (packet.arrival, DropReason::CpuLost);
            Dropped { arrival, reason, packet: Some(packet) }
        });
        lane.release();
        self.notes.clear();
        Some((lane.rx_queue, lost.collect()))
    }

    /// True if packets wait.
    pub fn has_work(&mut self) -> bool {
        self.lanes.iter_mut().any(|lane| lane.packets.queued() > 0)
    }

    /// The counters, for whoever wants to read them.
    #[must_use]
    pub fn counters(&self) -> &Arc<DeliveryCounters> {
        &self.counters
    }

    /// The CPU that it delivers on.
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.cpu
    }
}

/// Takes the notes of `count` packets that were just taken. They were published before those, but
/// a look at the ring counts what was there at an earlier one first.
fn take_notes(notes: &mut Consumer<Note>, count: usize, out: &mut Vec<Note>) {
    while out.len() < count {
        if notes.take(count - out.len(), out) == 0 {
            debug_assert!(false, "a packet without its note");
            return;
        }
    }
}
