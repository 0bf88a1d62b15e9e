//! Delivery: the second spine. Runs on the CPU that packets were steered to, and brings them from
//! the backlogs to the application.

use std::os::fd::BorrowedFd;
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

/// Application that handles packets in batches, on the CPU they were steered to.
pub trait Handler: Send {
    /// Handles a batch. Packets of a flow come in order of arrival, within a batch and from batch
    /// to batch, even when the flow moves to another CPU.
    ///
    /// Frames of packets left in the batch return to their owners afterwards; a handler takes out
    /// the packets that it keeps.
    fn handle(&mut self, batch: &mut Batch<'_>);

    /// Does what is due without packets. Called once per turn of the CPU, with the time at which the
    /// turn began, in ns.
    fn tick(&mut self, _now_ns: u64) {}

    /// Time that the CPU may sleep if no packets arrive, in ns; `None` without a limit. Called right
    /// before each sleep, when other threads can wake the CPU already.
    fn sleep_max_ns(&mut self) -> Option<u64> {
        None
    }

    /// Descriptor that is readable while the handler has work that no packet causes, for the next turns; `None` without one.
    /// The CPU does not sleep while it is readable.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// True if, since the last call, a reader's buffer was at least half full, and neither a reader nor a peer was waiting for
    /// a packet. False if there were no packets, or if the handler does not know.
    fn are_readers_behind(&mut self) -> bool {
        false
    }
}

/// Observer of each batch of a turn: it may read clocks, which delivery does not.
pub trait BatchObserver {
    /// Called before the batch is coalesced.
    fn batch_is_taken(&mut self, _delivery: &mut Delivery) {}

    /// Called once the handler has returned.
    fn batch_is_handled(&mut self, _delivery: &mut Delivery) {}
}

impl BatchObserver for () {}

/// Packets of one rx queue, oldest first.
#[derive(Debug)]
pub struct Batch<'a> {
    /// CPU that the packets were steered to, which is the one that runs the handler.
    pub cpu: CpuId,
    /// Rx queue that the packets came from.
    pub rx_queue: RxQueue,
    /// The packets.
    pub packets: &'a mut Vec<Packet>,
    /// Notes of the packets, made when they were queued, if notes are enabled.
    pub notes: &'a [Note],
    /// Memory for packets that the handler creates.
    pub pool: &'a mut Pool,
}

impl Batch<'_> {
    /// Note of the segment with this number. A packet merged behind the backlog has a note per
    /// segment.
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
    /// Backlogs of this CPU, one per rx queue.
    backlogs: Vec<BacklogRing>,
    /// Index of the backlog that the current batch is from.
    current: usize,
    /// Current batch; empty between batches.
    packets: Vec<Packet>,
    /// True if batches count as processed only when they are [released](Self::release).
    is_read_inline: bool,
    notes: Vec<Note>,
    /// Number of frames in the batch while the handler runs; else 0.
    frames_in_handler: u64,
    coalescer: Option<Coalescer>,
    /// Scratch for coalescing; empty otherwise.
    coalesced: Vec<Packet>,
    counters: Arc<DeliveryCounters>,
}

impl Delivery {
    /// Creates a delivery with batches of at most `batch_max` packets.
    #[must_use]
    pub fn new(cpu: CpuId, backlogs: Vec<BacklogRing>, batch_max: usize) -> Self {
        let packets = Vec::with_capacity(batch_max);
        Self {
            cpu,
            batch_max,
            backlogs,
            current: 0,
            packets,
            is_read_inline: false,
            notes: Vec::new(),
            frames_in_handler: 0,
            coalescer: None,
            coalesced: Vec::new(),
            counters: Arc::default(),
        }
    }

    /// Sets coalescing on delivery; `None`: off. To be called between batches.
    pub fn set_coalesce(&mut self, coalesce: Option<CoalesceConfig>) {
        let counters = &self.counters.coalesce;
        self.coalescer = coalesce.map(|config| Coalescer::new(config, Arc::clone(counters)));
    }

    /// Sets the maximum number of packets per batch. To be called between batches.
    pub fn set_batch_max(&mut self, batch_max: usize) {
        self.batch_max = batch_max;
        // Between batches it is empty.
        self.packets.reserve(batch_max);
    }

    /// Sets whether the thread of this delivery also reads what its handler queues for the application. Batches then
    /// count as processed when they are [released](Self::release), no longer when the handler returns: what the
    /// application answers is in order too. To be called between batches.
    pub fn set_read_inline(&mut self, is_read_inline: bool) {
        self.is_read_inline = is_read_inline;
        if !is_read_inline {
            self.release();
        }
    }

    /// Declares all batches until now processed: advances the backlogs' heads, after which their flows may move
    /// (ordering hazard H13). To be called between batches.
    pub fn release(&mut self) {
        self.backlogs.iter_mut().for_each(BacklogRing::release);
    }

    /// True if batches were handled that are not [released](Self::release).
    #[must_use]
    pub fn has_unreleased(&self) -> bool {
        self.backlogs.iter().any(|backlog| backlog.packets.in_hand() > 0)
    }

    /// Delivers up to `budget` packets from the backlogs, round-robin, and returns how many.
    pub fn turn(&mut self, budget: usize, pool: &mut Pool, handler: &mut impl Handler) -> usize {
        self.observed_turn(budget, pool, handler, &mut ())
    }

    /// The spine: a [turn](Self::turn) whose batches are observed.
    pub fn observed_turn(
        &mut self,
        budget: usize,
        pool: &mut Pool,
        handler: &mut impl Handler,
        observer: &mut impl BatchObserver,
    ) -> usize {
        let mut done = 0;
        while done < budget {
            let taken = self.take(budget - done);
            if taken == 0 {
                break;
            }
            observer.batch_is_taken(self);
            self.coalesce();
            self.handle(pool, handler);
            observer.batch_is_handled(self);
            self.complete(pool);
            done += taken;
        }
        done
    }

    /// Takes a batch of at most `max` packets from the next backlog that has any, and returns their
    /// number. The batch before must be completed.
    pub fn take(&mut self, max: usize) -> usize {
        debug_assert!(self.packets.is_empty(), "a batch is completed before the next is taken");
        for _ in 0..self.backlogs.len() {
            self.current =
                if self.current + 1 < self.backlogs.len() { self.current + 1 } else { 0 };
            let backlog = &mut self.backlogs[self.current];
            let waiting = backlog.packets.queued();
            if waiting > 0 {
                self.counters.backlog_max.raise_to(waiting.into());
                let taken = backlog.packets.take(max.min(self.batch_max), &mut self.packets);
                self.counters.taken.add(taken as u64);
                if let Some(notes) = &mut backlog.notes {
                    take_notes(notes, taken, &mut self.notes);
                }
                return taken;
            }
        }
        0
    }

    /// Coalesces the current batch. Every batch ends with a flush, regardless of
    /// `gro_flush_timeout`: the backlog's head may only pass handled packets, so none may stay
    /// held.
    pub fn coalesce(&mut self) {
        let Some(coalescer) = &mut self.coalescer else { return };
        coalescer.coalesce(&mut self.packets, 0, &mut self.coalesced);
        coalescer.end_poll(PollStatus::Last, 0, &mut self.coalesced);
        std::mem::swap(&mut self.packets, &mut self.coalesced);
    }

    /// Number of packets of the current batch.
    #[must_use]
    pub fn batch_len(&self) -> usize {
        self.packets.len()
    }

    /// Records the waits of the current batch's packets, as far as they were
    /// [stamped](crate::Intake::set_stamped). To be called before the batch is coalesced.
    pub fn record_waits(&mut self, now_ns: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "at most the capacity of a ring")]
        let count = self.packets.len() as u32;
        if let Some(backlog) = self.backlogs.get_mut(self.current) {
            backlog.record_waits(count, now_ns, &self.counters.wait_ns);
        }
    }

    /// Records the age of the current batch's oldest packet, if it has a timestamp.
    pub fn record_latency(&self, now_since_1970_ns: u64) {
        let oldest = self.packets.first().map(|packet| packet.timestamp_ns);
        if let Some(arrived_ns) = oldest.filter(|arrived_ns| *arrived_ns > 0) {
            self.counters.latency_ns.record(now_since_1970_ns.saturating_sub(arrived_ns), 1);
        }
    }

    /// Records the duration of a handler's call.
    pub fn record_handler(&self, ns: u64) {
        self.counters.handler_ns.record(ns, 1);
    }

    /// Hands the batch to the handler.
    pub fn handle(&mut self, pool: &mut Pool, handler: &mut impl Handler) {
        let (mut frames, mut bytes) = (0, 0);
        for packet in &self.packets {
            frames += u64::from(packet.segment_count());
            bytes += u64::from(packet.wire_len);
        }
        self.frames_in_handler = frames;
        // Before the handler, which may take packets out.
        let batch_packets = self.packets.len() as u64;
        handler.handle(&mut Batch {
            cpu: self.cpu,
            rx_queue: self.backlogs[self.current].rx_queue,
            packets: &mut self.packets,
            notes: &self.notes,
            pool,
        });
        self.frames_in_handler = 0;
        self.counters.frames.add(frames);
        self.counters.bytes.add(bytes);
        self.counters.batches.add(1);
        self.counters.batch_packets.record(batch_packets, 1);
    }

    /// Ends the batch: returns the frames to their owners, and declares it processed, unless its packets are
    /// [read inline](Self::set_read_inline).
    pub fn complete(&mut self, pool: &mut Pool) {
        if !self.is_read_inline {
            self.backlogs[self.current].release();
        }
        for packet in self.packets.drain(..) {
            pool.put(packet.frame);
        }
        self.notes.clear();
    }

    /// Abandons the current batch after its thread died; the application may have seen any part of
    /// it. Advances the backlog's head, so that its flows go on, unless packets before it may wait for an inline reader.
    /// Returns the rx queue and the packets still in the batch.
    pub fn abandon_batch(&mut self) -> Option<(RxQueue, Vec<Dropped>)> {
        let backlog = self.backlogs.get_mut(self.current)?;
        // Packets that coalescing still holds follow those that it has flushed.
        let mut packets = std::mem::take(&mut self.coalesced);
        if let Some(coalescer) = &mut self.coalescer {
            coalescer.flush(FlushReason::Switch, &mut packets);
        }
        packets.append(&mut self.packets);
        let frames = packets.iter().map(|packet| u64::from(packet.segment_count())).sum();
        self.counters.lost.add(std::mem::take(&mut self.frames_in_handler).max(frames));
        let lost = packets.into_iter().map(|packet| {
            let (arrival, reason) = (packet.arrival, DropReason::CpuLost);
            Dropped { arrival, reason, packet: Some(packet) }
        });
        if !self.is_read_inline {
            backlog.release();
        }
        self.notes.clear();
        Some((backlog.rx_queue, lost.collect()))
    }

    /// True if packets are queued.
    pub fn has_work(&mut self) -> bool {
        self.backlogs.iter_mut().any(|backlog| backlog.packets.queued() > 0)
    }

    /// Counters, to be read from any thread.
    #[must_use]
    pub fn counters(&self) -> &Arc<DeliveryCounters> {
        &self.counters
    }

    /// CPU that runs this delivery.
    #[must_use]
    pub fn cpu(&self) -> CpuId {
        self.cpu
    }
}

/// Takes the notes of `count` packets just taken. Notes are published before their packets, but the
/// cached tail of their ring may be older; taking again refreshes it.
fn take_notes(notes: &mut Consumer<Note>, count: usize, out: &mut Vec<Note>) {
    while out.len() < count {
        if notes.take(count - out.len(), out) == 0 {
            debug_assert!(false, "a packet without its note");
            return;
        }
    }
}
