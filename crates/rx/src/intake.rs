//! Intake: the first spine. Runs on the CPU that polls a queue, and owns the stages that bring a
//! frame from the source to a backlog.

mod changes; // live changes of an intake

use std::sync::Arc;

use forebay_buf::{Pool, Position};

use crate::arrive::{Burst, RefusedFrame};
use crate::backlog::{BacklogRing, Backlogs, Note};
use crate::coalesce::{CoalesceConfig, Coalescer, FlushReason};
use crate::counters::IntakeCounters;
use crate::cpu::{CpuId, RxQueue};
use crate::drop_reason::DropReason;
use crate::hash::{FlowHash, Hasher};
use crate::packet::{Arrival, Packet};
use crate::parse::{self, Checksum, Verify};
use crate::steer::{
    CpuLoad, Drops, FlowPlace, FlowState, FlowTables, HoldId, Release, RpsMap, SteerConfig,
    Steering, Target, Verdict,
};
use crate::steer_reason::SteerReason;

/// Budget of a CPU per turn: frames from a queue, or packets from its backlogs (`dev_weight`).
pub const DEV_WEIGHT: usize = 64;

/// Number of held moves checked per turn, besides those whose packets arrive in it.
const HOLDS_A_TURN: usize = 64;

/// Configuration of an intake.
#[derive(Debug)]
pub struct IntakeConfig {
    /// Queue that the intake serves.
    pub queue: RxQueue,
    /// Highest CPU id plus one.
    pub cpus: usize,
    /// Checksum verification.
    pub verify: Verify,
    /// True to complete partial checksums, which hold the pseudo header's sum only: see
    /// [`FrameNeeds::may_be_partial`](crate::arrive::FrameNeeds::may_be_partial).
    pub completes_checksums: bool,
    /// Hash function of flows.
    pub hasher: Arc<Hasher>,
    /// Coalescing on arrival, before steering; `None`: off.
    pub coalesce: Option<CoalesceConfig>,
    /// Steering state of the queue.
    pub steer: SteerConfig,
    /// Length of each backlog less one, in packets, as in the kernel.
    pub netdev_max_backlog: u32,
}

/// The intake of one rx queue.
#[derive(Debug)]
pub struct Intake {
    queue: RxQueue,
    verify: Verify,
    completes_checksums: bool,
    hasher: Arc<Hasher>,
    coalescer: Option<Coalescer>,
    /// Packets that left coalescing and are not steered yet; between turns, those flushed by a
    /// change of the settings.
    coalesced: Vec<Packet>,
    /// Set from a change of the key to the next turn: number of packets in `coalesced` with hashes
    /// by the old key, and the flow tables for the new one.
    hashed_before: Option<(usize, FlowTables)>,
    steering: Steering,
    backlogs: Backlogs,
    /// Number of live changes so far.
    epoch: u32,
    /// Time of the last turn.
    now_ns: u64,
    /// Hold to check next.
    next_hold: usize,
    counters: Arc<IntakeCounters>,
    dropped: Vec<Dropped>,
    /// Indices in the burst of packets without memory for a linear copy of their headers; empty
    /// between turns.
    unparsed: Vec<usize>,
}

/// Dropped frame, or frames of a merged packet, handed to the caller to return the memory.
#[derive(Debug)]
pub struct Dropped {
    /// Number of the first frame on its source, modulo 2^32.
    pub arrival: Arrival,
    /// Reason.
    pub reason: DropReason,
    /// The packet, if the frame was received at all.
    pub packet: Option<Packet>,
}

/// Outcome of releasing a hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
enum Released {
    /// All packets were forwarded, and the hold has ended.
    All,
    /// No packet, because the predecessors are not processed yet.
    None,
    /// As many as the target's backlog had room for; the rest stays held.
    Full,
}

impl Intake {
    /// Creates an intake without CPUs to send to; see [`connect`](Self::connect).
    #[must_use]
    pub fn new(config: IntakeConfig) -> Self {
        let steering = Steering::new(&config.steer);
        let held_ns = Arc::clone(steering.held_ns());
        let counters = Arc::new(IntakeCounters { held_ns, ..IntakeCounters::new(config.cpus) });
        let coalescer = |coalesce| Coalescer::new(coalesce, Arc::clone(&counters.coalesce));
        Self {
            queue: config.queue,
            verify: config.verify,
            completes_checksums: config.completes_checksums,
            hasher: config.hasher,
            coalescer: config.coalesce.map(coalescer),
            coalesced: Vec::new(),
            hashed_before: None,
            steering,
            backlogs: Backlogs::new(config.queue, config.cpus, config.netdev_max_backlog),
            epoch: 0,
            now_ns: 0,
            next_hold: 0,
            counters,
            dropped: Vec::new(),
            unparsed: Vec::new(),
        }
    }

    /// Adds a CPU that packets can go to. See [`Backlogs::connect`].
    #[must_use]
    pub fn connect(
        &mut self,
        cpu: CpuId,
        capacity: u32,
        start: Position,
        noted: bool,
    ) -> BacklogRing {
        let backlog = self.backlogs.connect(cpu, capacity, start, noted);
        self.steering.connect(cpu, start);
        self.steering.set_running(RpsMap::new(self.backlogs.cpus()));
        backlog
    }

    /// Refreshes the cached ring heads of all CPUs. To be called before the clock is read for
    /// [`turn`]: traces rely on heads that are older than the turn's time.
    ///
    /// [`turn`]: Self::turn
    pub fn observe(&mut self) {
        self.backlogs.observe();
    }

    /// Takes a burst from arrival to the backlogs, and empties it. Returns the CPUs with new
    /// packets, each once. With an empty burst, held packets still move on. `pool` is the pool of
    /// the burst's frames.
    pub fn turn(
        &mut self,
        now_ns: u64,
        burst: &mut Burst,
        pool: &mut Pool,
    ) -> impl Iterator<Item = CpuId> {
        self.turn_with_tap(now_ns, burst, pool, |_| ())
    }

    /// Runs a turn with a packet tap: `show` gets all packets after coalescing, before steering.
    pub fn turn_with_tap(
        &mut self,
        now_ns: u64,
        burst: &mut Burst,
        pool: &mut Pool,
        show: impl FnOnce(&[Packet]),
    ) -> impl Iterator<Item = CpuId> {
        self.now_ns = now_ns;
        let full_burst = burst.is_full();
        self.steering.note_poll(burst.poll_status);
        self.refuse(burst);
        self.parse(&mut burst.packets, pool);
        self.hash(&mut burst.packets);
        self.coalesce(burst, now_ns);
        show(&burst.packets);
        if self.steering.update_spread(now_ns, full_burst, &self.backlogs) {
            self.backlogs.watch();
            self.counters.resized.add(1);
        }
        self.rehash(&mut burst.packets);
        self.release_line();
        self.release_holds();
        if self.steering.has_watches() {
            self.note_rules(&burst.packets);
        }
        self.steer(&mut burst.packets);
        self.count_steering();
        self.backlogs.publish(now_ns)
    }

    /// True if a call of [`follow_load`](Self::follow_load) is due.
    #[must_use]
    pub fn is_load_due(&self, now_ns: u64) -> bool {
        self.steering.is_load_due(now_ns)
    }

    /// Decides by the loads of all CPUs, by [`CpuId::index`], how many of them get packets, and which hash ranges go to
    /// which of them.
    pub fn follow_load(&mut self, now_ns: u64, loads: &[CpuLoad]) {
        let with_frames = (loads, self.counters.frames.get());
        if self.steering.resize(now_ns, with_frames, &mut self.backlogs) {
            self.backlogs.watch();
            self.counters.resized.add(1);
        }
        let Some(round) = self.steering.balance(now_ns, loads) else { return };
        self.counters.imbalance_percent.set(round.after_percent.into());
        if round.moves > 0 {
            self.counters.balanced.add(round.moves.into());
            self.counters.imbalance_max_percent.raise_to(round.before_percent.into());
            self.backlogs.watch();
        }
    }

    /// Number of CPUs that packets go to now; the load needs no more.
    #[must_use]
    pub fn active_cpus(&self) -> usize {
        self.steering.active_cpus()
    }

    /// Turns the stamps on or off by which a delivery measures the waits of packets.
    pub fn set_stamped(&mut self, is_stamped: bool) {
        self.backlogs.set_stamped(is_stamped);
    }

    /// Takes the frames dropped since the last call.
    pub fn drain_dropped(&mut self) -> impl Iterator<Item = Dropped> {
        self.dropped.drain(..)
    }

    /// Number of packets of a burst that fit, whatever CPUs they go to: `burst` packets, at most as
    /// many as an empty backlog and an empty hold take; 0 while there is no room for them. The flow
    /// limit may still drop some.
    pub fn room_for(&mut self, burst: u32) -> u32 {
        let hold_share = u32::try_from(self.steering.hold_share()).unwrap_or(u32::MAX);
        let burst = burst.min(self.backlogs.limit()).min(hold_share);
        // Held packets go to the backlogs, too, before the burst does.
        let held = self.held() + self.coalescing();
        let count = u32::try_from(held).unwrap_or(u32::MAX).saturating_add(burst);
        let is_hold_room = self.steering.hold_room() >= burst as usize;
        if is_hold_room && self.backlogs.all_have_room_for(count) { burst } else { 0 }
    }

    /// Number of packets held until their flow may move.
    #[must_use]
    pub fn held(&self) -> usize {
        self.steering.held()
    }

    /// True if packets are held, or a fence stands: an empty turn may bring them on.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.steering.is_waiting()
    }

    /// Number of packets of one slot that can be held at once.
    #[must_use]
    pub fn hold_share(&self) -> usize {
        self.steering.hold_share()
    }

    /// Number of packets held for more segments; a merged packet counts once.
    #[must_use]
    pub fn coalescing(&self) -> usize {
        self.coalesced.len() + self.coalescer.as_ref().map_or(0, Coalescer::held)
    }

    /// Time at which the intake needs a turn to flush packets held for `gro_flush_timeout`.
    #[must_use]
    pub fn next_timeout_ns(&self) -> Option<u64> {
        if self.coalesced.is_empty() { self.coalescer.as_ref()?.next_timeout_ns() } else { Some(0) }
    }

    /// Number of packets queued on backlogs or being delivered.
    pub fn queued(&mut self) -> u32 {
        self.backlogs.queued()
    }

    /// Number of packets queued or being delivered per CPU, by the cached heads: an upper bound.
    pub fn queued_by_cpu(&self) -> impl Iterator<Item = (CpuId, u32)> {
        self.backlogs.queued_by_cpu()
    }

    /// Counters, to be read from any thread.
    #[must_use]
    pub fn counters(&self) -> &Arc<IntakeCounters> {
        &self.counters
    }

    /// Queue that this intake serves.
    #[must_use]
    pub fn queue(&self) -> RxQueue {
        self.queue
    }

    /// Starts to record the flows that share this flow's slot, for [`state_of`](Self::state_of).
    pub fn watch(&mut self, flow: FlowHash) {
        self.steering.watch(flow, self.now_ns);
    }

    /// Current CPU of a flow, and the reason.
    #[must_use]
    pub fn state_of(&mut self, flow: FlowHash) -> FlowState {
        self.steering.state_of(flow, &mut self.backlogs)
    }

    /// Desired CPU of a flow's next packet, and the reason.
    #[must_use]
    pub fn desired_of(&self, flow: FlowHash) -> (CpuId, SteerReason) {
        self.steering.desired_of(flow)
    }

    /// Current and desired CPU of a flow: the cheap part of [`state_of`](Self::state_of).
    #[must_use]
    pub fn place_of(&self, flow: FlowHash) -> FlowPlace {
        self.steering.place_of(flow)
    }

    /// Remembered drops of a flow.
    pub fn drops_of(&self, flow: FlowHash) -> impl Iterator<Item = Drops> {
        self.steering.journal.drops_of(flow)
    }

    fn refuse(&mut self, burst: &mut Burst) {
        self.counters.kernel_dropped.add(std::mem::take(&mut burst.kernel_dropped));
        for RefusedFrame { arrival, wire_len, reason } in burst.refused.drain(..) {
            self.counters.frames.add(1);
            self.counters.bytes.add(wire_len.into());
            self.counters.drops[reason.index()].add(1);
            self.dropped.push(Dropped { arrival, reason, packet: None });
        }
    }

    fn parse(&mut self, packets: &mut Vec<Packet>, pool: &mut Pool) {
        let mut bytes = 0;
        for (index, packet) in packets.iter_mut().enumerate() {
            bytes += u64::from(packet.wire_len);
            if parse::parse_packet(packet, self.verify, pool).is_err() {
                self.unparsed.push(index);
            }
        }
        self.counters.frames.add(packets.len() as u64);
        self.counters.bytes.add(bytes);
        while let Some(index) = self.unparsed.pop() {
            // Without a linear copy, the device could change the headers after they are judged.
            self.drop_frames(DropReason::NoBuffer, packets.remove(index), None);
        }
        if self.completes_checksums {
            let completed = packets.iter_mut().filter_map(parse::complete_partial).count();
            self.counters.checksums_completed.add(completed as u64);
        }
        self.count_headers(packets);
    }

    fn hash(&self, packets: &mut [Packet]) {
        for packet in packets {
            packet.hash = self.hasher.hash_packet(packet);
            self.steering.prefetch(packet.hash);
        }
    }

    /// Coalesces the burst; afterwards it holds the packets that go on now.
    fn coalesce(&mut self, burst: &mut Burst, now_ns: u64) {
        let out = &mut self.coalesced;
        match &mut self.coalescer {
            Some(coalescer) => {
                coalescer.coalesce(&mut burst.packets, now_ns, out);
                let steering = &self.steering;
                if steering.is_waiting() {
                    // A flow that waits for its move must not wait for further segments, too.
                    let waits = |flow| steering.is_flow_waiting(flow);
                    coalescer.flush_flows(FlushReason::HeldMove, out, waits);
                }
                coalescer.end_poll(burst.poll_status, now_ns, out);
            }
            None if out.is_empty() => return,
            None => out.append(&mut burst.packets),
        }
        std::mem::swap(&mut burst.packets, out);
    }

    /// Steers the packets with hashes by the old key, after a change of the key.
    fn rehash(&mut self, packets: &mut Vec<Packet>) {
        let Some((before, tables)) = self.hashed_before.take() else { return };
        let mut hashed_before = packets.drain(..before).collect();
        self.steer(&mut hashed_before);
        self.steering.rehash(tables, self.now_ns, &self.backlogs);
    }

    fn steer(&mut self, packets: &mut Vec<Packet>) {
        self.steering.weigh(packets);
        for packet in packets.drain(..) {
            if let Some(hold) = self.steering.hold_of(packet.hash) {
                match self.release(hold) {
                    Released::All => {}
                    Released::None => {
                        self.hold(packet, hold);
                        continue;
                    }
                    Released::Full => {
                        self.hold_if_room(packet, hold);
                        continue;
                    }
                }
            }
            match self.steering.decide(packet.hash, self.now_ns, &mut self.backlogs) {
                Verdict::Forward(target) => {
                    self.enqueue(packet, target);
                }
                Verdict::Hold(hold) => self.hold(packet, hold),
                Verdict::Refuse => self.hold_or_drop(packet),
            }
        }
    }

    /// Holds a packet in the place of another, or drops it. Behind a fence the CPU of the
    /// predecessors is unknown, so any CPU could reorder the flow (RFS-6). Other flows of the slot
    /// may be on a CPU outside the map.
    #[cold]
    fn hold_or_drop(&mut self, packet: Packet) {
        if self.make_room()
            && let Verdict::Hold(hold) =
                self.steering.decide(packet.hash, self.now_ns, &mut self.backlogs)
        {
            self.hold(packet, hold);
        } else {
            self.drop_frames(DropReason::HoldFull, packet, None);
        }
    }

    /// Holds a packet behind predecessors that may move, but find a full backlog. Drops it if its own CPU has no room,
    /// either. No room is reserved: held packets wait for it, and those of a slot have a limit.
    #[cold]
    fn hold_if_room(&mut self, packet: Packet, hold: HoldId) {
        // Flows of one slot may have different CPUs, and the hold's target is that of its oldest packet.
        let (cpu, _) = self.steering.desired_of(packet.hash);
        if self.backlogs.has_room(cpu) {
            self.hold(packet, hold);
        } else {
            self.drop_packet(packet, cpu, DropReason::BacklogFull);
        }
    }

    /// Records the rules that made the keys of watched flows.
    #[cold]
    fn note_rules(&mut self, packets: &[Packet]) {
        for packet in packets {
            self.steering.note_rule(packet.hash, self.now_ns, || self.hasher.rule_of(packet));
        }
    }

    /// Returns the packet's position on the backlog, unless it was dropped.
    fn enqueue(&mut self, packet: Packet, target: Target) -> Option<Position> {
        let (flow, arrival, segments) = (packet.hash, packet.arrival, packet.segment_count());
        if !flow.is_some() {
            self.counters.unsteered.add(1);
        }
        let (epoch, enqueued_ns, steering) = (self.epoch, self.now_ns, &self.steering);
        let note = |position| Note {
            arrival,
            enqueued_ns,
            epoch,
            steer_reason: target.steer_reason,
            position,
            head_old: target.head_old,
            previous_flow: target.slot.map_or(FlowHash::NONE, |slot| steering.last_flow(slot)),
        };
        match self.backlogs.enqueue(target.cpu, packet, note) {
            Ok(tail) => {
                self.steering.record(flow, target, tail, self.now_ns);
                let counters = &self.counters.per_cpu[target.cpu.index()];
                counters.by_reason[target.steer_reason.index()].add(segments.into());
                Some(tail)
            }
            Err((packet, reason)) => {
                self.drop_packet(packet, target.cpu, reason);
                None
            }
        }
    }

    fn hold(&mut self, packet: Packet, hold: HoldId) {
        let Err(packet) = self.steering.hold(hold, packet) else { return };
        match self.give_up(hold) {
            Some(target) if self.steering.stay_unholdable(packet.hash, target) => {
                self.enqueue(packet, target);
            }
            // Forwarding would overtake held packets or those in front of a fence, or bring a flow
            // to a CPU outside the map.
            _ => self.drop_frames(DropReason::HoldFull, packet, None),
        }
    }

    /// Makes room for one held packet: the oldest of the longest hold that may follow its
    /// predecessors to its old CPU does so. Returns false if no hold can yield.
    fn make_room(&mut self) -> bool {
        let longest = self.steering.longest_to_yield(HOLDS_A_TURN, &mut self.backlogs);
        let Some((hold, target)) = longest else { return false };
        let Some(packet) = self.steering.pop_held_to_stay(hold, target.cpu) else { return false };
        self.enqueue(packet, target);
        self.steering.end_hold(hold, self.now_ns);
        true
    }

    /// Gives up a held move for which the arena has no room: its packets follow their predecessors
    /// to the old CPU. Returns the target of the next packet, or `None` if packets stay held.
    fn give_up(&mut self, hold: HoldId) -> Option<Target> {
        let Release::Forward(target) = self.steering.decide_give_up(hold) else { return None };
        while self.backlogs.has_room(target.cpu)
            && let Some(packet) = self.steering.pop_held_to_stay(hold, target.cpu)
        {
            self.enqueue(packet, target);
        }
        self.steering.end_hold(hold, self.now_ns).then_some(target)
    }

    /// Releases the packets of a hold, if they may move, as far as the backlog has room.
    fn release(&mut self, hold: HoldId) -> Released {
        let Release::Forward(mut target) = self.steering.decide_release(hold, &mut self.backlogs)
        else {
            return Released::None;
        };
        while self.backlogs.has_room(target.cpu)
            && let Some(packet) = self.steering.pop_held(hold)
        {
            if self.enqueue(packet, target).is_some() {
                target.head_old = None; // the first queued packet moved the slot
            }
        }
        let is_empty = self.steering.end_hold(hold, self.now_ns);
        if is_empty { Released::All } else { Released::Full }
    }

    fn release_holds(&mut self) {
        for _ in 0..self.steering.active_holds().min(HOLDS_A_TURN) {
            let before = self.steering.active_holds();
            if self.next_hold >= before {
                self.next_hold = 0;
            }
            let Some(hold) = self.steering.active_hold(self.next_hold) else { return };
            let _ = self.release(hold);
            if self.steering.active_holds() == before {
                self.next_hold += 1; // an ended hold is replaced at its index by another
            }
        }
    }

    /// Releases the line before a fence as far as the backlogs have room, then lifts the fence.
    fn release_line(&mut self) {
        while let Release::Forward(target) =
            self.steering.decide_line(self.now_ns, &mut self.backlogs)
            && self.backlogs.has_room(target.cpu)
            && let Some(packet) = self.steering.leave_line()
        {
            self.enqueue(packet, target);
        }
    }

    fn drop_packet(&mut self, packet: Packet, cpu: CpuId, reason: DropReason) {
        self.counters.per_cpu[cpu.index()].dropped.add(packet.segment_count().into());
        self.drop_frames(reason, packet, Some(cpu));
    }

    fn drop_frames(&mut self, reason: DropReason, packet: Packet, cpu: Option<CpuId>) {
        let (flow, frames) = (packet.hash, packet.segment_count().into());
        self.counters.drops[reason.index()].add(frames);
        self.steering.journal.dropped(Drops { flow, reason, cpu, frames, last_ns: self.now_ns });
        self.dropped.push(Dropped { arrival: packet.arrival, reason, packet: Some(packet) });
    }

    fn count_headers(&self, packets: &[Packet]) {
        let (mut flawed, mut ip_bad, mut l4_bad) = (0, 0, 0);
        for Packet { headers, .. } in packets {
            flawed += u64::from(headers.flaw.is_some());
            ip_bad += u64::from(headers.ip_checksum == Checksum::Bad);
            l4_bad += u64::from(headers.l4_checksum == Checksum::Bad);
        }
        self.counters.flawed.add(flawed);
        self.counters.ip_checksum_bad.add(ip_bad);
        self.counters.l4_checksum_bad.add(l4_bad);
    }

    fn count_steering(&self) {
        let tally = self.steering.tally();
        self.counters.active_cpus.set(self.steering.active_cpus() as u64);
        self.counters.moves.raise_to(tally.moves);
        self.counters.stays.raise_to(tally.stays);
        self.counters.holds.raise_to(tally.holds);
        self.counters.unheld.raise_to(tally.unheld);
        self.counters.held_max_ns.raise_to(tally.held_max_ns);
    }
}
