//! Forebay's rules: the real path, with real frames, stepped by the world.

mod application; // handler of the packets
mod build; //       construction of the path
mod change; //      live changes
mod reassembly; //  reassembly of fragments

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use application::{SeenByReader, SimApplication};
use forebay_buf::Pool;
use forebay_engine::timeline::{Timeline, TimelineRecorder};
use forebay_rx::arrive::{Burst, PollStatus, RefusedFrame};
use forebay_rx::hash::FlowHash;
use forebay_rx::intake::Dropped;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::steer::{FlowPlace, MOVES_MAX, SockFlowTable};
use forebay_rx::{CpuId, Delivery, DropReason, Intake, Packet, RxQueue};
use reassembly::SimReassembly;

use crate::action::{SimChange, SimCoalesceAt};
use crate::census::{Backlog, Census};
use crate::cpu_set::CpuSet;
use crate::laws::{Law, Laws};
use crate::machine::{FlowStanding, Handed, Now, Poll, SimMachine, TakenIn};
use crate::recording::Recording;
use crate::scenario::Scenario;
use crate::traffic::{FRAME_BYTES, Flow, Traffic};

/// Least time between two samples of a timeline at first, in nanoseconds.
const TIMELINE_PERIOD_NS: u64 = 1_000;

/// The path on virtual CPUs.
pub(crate) struct PathMachine {
    queues: Vec<SimQueue>,
    cpus: Vec<SimCpu>,
    /// One pool for each CPU; frames received by a queue are in the memory of the CPU that polls
    /// it.
    pools: Vec<Pool>,
    sock_flows: Option<Arc<SockFlowTable>>,
    coalesce: SimCoalesceAt,
    gro_flush_timeout_ns: u64,
    /// True if packets may have consisted of several frames.
    merges: bool,
    epoch: u32,
    rps_cpus: CpuSet,
    running: CpuSet,
    netdev_max_backlog: u32,
    hold_max: u32,
    batch_max: u32,
    seen: SeenByReader,
    /// Reassembly, if datagrams arrive in fragments.
    reassembly: Option<SimReassembly>,
    recording: Option<Recording>,
    timeline: Option<TimelineRecorder>,
}

struct SimQueue {
    intake: Intake,
    burst: Burst,
    /// True if something changed since the last turn.
    changed: bool,
}

struct SimCpu {
    delivery: Delivery,
    /// True if the delivery does not have the current coalescing setting yet.
    coalesce_is_stale: bool,
    /// Number of frames of the current batch that the application has received.
    frames_done: u64,
}

impl PathMachine {
    /// Starts recording the run, for independent checkers.
    pub(crate) fn record_to(&mut self, directory: &Path) -> forebay_sys::Result<()> {
        let recording = Recording::create(directory, self.cpus.len())?;
        recording.changed(0, 0, "rps_cpus", &self.effective_mask());
        self.recording = Some(recording);
        Ok(())
    }

    /// Starts recording a timeline.
    pub(crate) fn record_timeline(&mut self) {
        let queues = self.queues.iter_mut().map(|queue| {
            queue.intake.set_stamped(true);
            Arc::clone(queue.intake.counters())
        });
        let cpus =
            self.cpus.iter().map(|cpu| (cpu.delivery.cpu(), Arc::clone(cpu.delivery.counters())));
        let recorder =
            TimelineRecorder::new(queues.collect(), cpus.collect(), 0, TIMELINE_PERIOD_NS);
        self.timeline = Some(recorder);
    }

    /// Finishes the timeline, if one is recorded.
    pub(crate) fn finish_timeline(&mut self, now_ns: u64) -> Option<Timeline> {
        self.timeline.take().map(|recorder| recorder.finish(now_ns))
    }

    /// Finishes a recording.
    pub(crate) fn finish_recording(
        &mut self,
        traffic: &Traffic,
        laws: &Laws,
    ) -> forebay_sys::Result<()> {
        let Some(recording) = self.recording.take() else { return Ok(()) };
        let intakes = self.queues.iter().map(|queue| &**queue.intake.counters());
        let deliveries = self.cpus.iter().map(|cpu| &**cpu.delivery.counters());
        recording.finish(
            &intakes.collect::<Vec<_>>(),
            &deliveries.collect::<Vec<_>>(),
            laws.delivered,
            traffic,
        )
    }

    fn queue(&self, queue: RxQueue) -> &SimQueue {
        &self.queues[usize::from(queue.0)]
    }

    fn place_of(&self, queue: RxQueue, hash: FlowHash) -> FlowPlace {
        self.queue(queue).intake.place_of(hash)
    }

    /// Creates frames for the flows that have arrived, as a device would have written them.
    fn receive(&mut self, poll: &mut Poll<'_>, laws: &mut Laws) {
        let SimQueue { burst, .. } = &mut self.queues[usize::from(poll.queue.0)];
        let pool = &mut self.pools[poll.cpu.index()];
        pool.collect();
        for &id in poll.flows {
            let number = poll.traffic.next_frame();
            let flow = poll.traffic.flow_mut(id);
            match received(pool, flow, Arrival::of_frame(number)) {
                Ok((packet, sequence)) => {
                    laws.arrived(number, id, sequence);
                    burst.packets.push(packet);
                }
                Err(refused) => {
                    laws.refused(number);
                    burst.refused.push(refused);
                }
            }
        }
        burst.poll_status = match () {
            () if poll.traffic.waits_in(poll.queue) => PollStatus::MorePending,
            () if poll.traffic.has_ended() => PollStatus::Last,
            () => PollStatus::Drained,
        };
    }

    fn account_dropped(&mut self, dropped: Dropped, queue: RxQueue, cpu: CpuId, laws: &mut Laws) {
        if let Some(recording) = &mut self.recording {
            recording.dropped(&dropped, queue);
        }
        let Dropped { arrival, reason, packet } = dropped;
        match packet {
            Some(packet) => {
                for segment in packet.segments() {
                    laws.dropped(segment.arrival.0.into());
                    self.seen.drops[reason.index()] += 1;
                }
                self.pools[cpu.index()].put(packet.frame);
            }
            None => {
                laws.dropped(arrival.0.into());
                self.seen.drops[reason.index()] += 1;
            }
        }
    }

    /// Number of frames put on the backlog from a queue to a CPU that the application has not
    /// received.
    fn queued(&self, queue: &SimQueue, cpu: &SimCpu) -> u64 {
        let target = &queue.intake.counters().per_cpu[cpu.delivery.cpu().index()];
        target.enqueued()
            - self.seen.passed[self.seen.lane(queue.intake.queue(), cpu.delivery.cpu())]
    }

    /// Counts the packets on the backlogs of one queue.
    fn count_backlogs(&self, queue: usize, census: &mut Census) {
        let (queue, first) = (&self.queues[queue], queue * self.cpus.len());
        let counted = self.cpus.iter().zip(queue.intake.queued_by_cpu());
        for (backlog, (cpu, (at, packets))) in census.backlogs[first..].iter_mut().zip(counted) {
            debug_assert_eq!(backlog.cpu, at, "every queue has a lane to every CPU");
            (backlog.frames, backlog.packets) = (self.queued(queue, cpu), packets.into());
        }
    }

    /// Counts the packets in front of the backlogs.
    fn count_waiting(&self, census: &mut Census) {
        census.backlog_max = u64::from(self.netdev_max_backlog) + 1;
        census.merges = self.merges;
        census.coalesce_ns = if self.merges { self.gro_flush_timeout_ns } else { 0 };
        (census.held, census.coalescing) = (0, 0);
        census.unheld.clear();
        for SimQueue { intake, .. } in &self.queues {
            census.held += intake.held() as u64;
            census.coalescing += intake.coalescing() as u64;
            census.unheld.push(intake.counters().unheld.get());
        }
    }

    fn effective_mask(&self) -> String {
        // An empty mask sets no limit.
        let map = self.rps_cpus.and(self.running);
        if map.len() > 0 { map.mask() } else { CpuSet::range(0, crate::cpu_set::CPUS_MAX).mask() }
    }
}

impl SimMachine for PathMachine {
    const DRAINS: bool = true;

    fn new(scenario: &Scenario, traffic: &Traffic) -> Self {
        build::machine(scenario, traffic)
    }

    fn take_in(&mut self, mut poll: Poll<'_>, laws: &mut Laws) -> TakenIn {
        if let Some(timeline) = &mut self.timeline {
            timeline.observe(poll.now.ns);
        }
        self.receive(&mut poll, laws);
        let queue = &mut self.queues[usize::from(poll.queue.0)];
        queue.changed = false;
        queue.intake.observe();
        if queue.intake.is_load_due(poll.now.ns) {
            self.follow_load(&poll);
        }
        let queue = &mut self.queues[usize::from(poll.queue.0)];
        let pool = &mut self.pools[poll.cpu.index()];
        poll.wake.extend(queue.intake.turn(poll.now.ns, &mut queue.burst, pool));
        let dropped: Vec<_> = queue.intake.drain_dropped().collect();
        for dropped in dropped {
            self.check_room(&dropped, poll.queue, laws);
            self.account_dropped(dropped, poll.queue, poll.cpu, laws);
        }
        self.pools[poll.cpu.index()].flush();
        TakenIn { handled: 0 }
    }

    fn waits_until_ns(&self, queue: RxQueue) -> Option<u64> {
        let SimQueue { intake, changed, .. } = self.queue(queue);
        if *changed || intake.is_waiting() { Some(0) } else { intake.next_timeout_ns() }
    }

    fn take(&mut self, cpu: CpuId, now: Now) -> usize {
        let SimCpu { delivery, coalesce_is_stale, .. } = &mut self.cpus[cpu.index()];
        if std::mem::take(coalesce_is_stale) {
            let places = (self.coalesce, SimCoalesceAt::Deliver);
            delivery.set_coalesce(build::coalesce_config(places, self.gro_flush_timeout_ns));
        }
        let taken = delivery.take(usize::MAX);
        if self.timeline.is_some() {
            delivery.record_waits(now.ns);
        }
        delivery.coalesce();
        taken
    }

    fn handle(&mut self, cpu: CpuId, now_ns: u64, laws: &mut Laws, handed: &mut Vec<Handed>) {
        let Self { cpus, pools, seen, reassembly, recording, .. } = self;
        let pool = &mut pools[cpu.index()];
        let cpu = &mut cpus[cpu.index()];
        let delivered = laws.delivered;
        let mut application = SimApplication { now_ns, laws, handed, seen, reassembly, recording };
        cpu.delivery.handle(pool, &mut application);
        cpu.frames_done = laws.delivered - delivered;
    }

    fn complete(&mut self, cpu: CpuId) {
        let pool = &mut self.pools[cpu.index()];
        let cpu = &mut self.cpus[cpu.index()];
        cpu.frames_done = 0;
        cpu.delivery.complete(pool);
        pool.flush();
    }

    fn lose(&mut self, cpu: CpuId, laws: &mut Laws) {
        let Some((queue, lost)) = self.cpus[cpu.index()].delivery.abandon_batch() else { return };
        let lane = self.seen.lane(queue, cpu);
        self.seen.next[lane] = None;
        let frames = lost.iter().flat_map(|lost| &lost.packet);
        self.seen.passed[lane] += frames.map(|it| u64::from(it.segment_count())).sum::<u64>();
        for dropped in lost {
            self.account_dropped(dropped, queue, cpu, laws);
        }
        self.pools[cpu.index()].flush();
    }

    fn change(&mut self, change: &SimChange, now: Now, _: &mut Laws, _: &mut Vec<CpuId>) {
        self.apply(change, now.ns);
    }

    fn note(&mut self, what: &'static str, value: &dyn fmt::Display, now_ns: u64) {
        self.begin_epoch();
        if let Some(recording) = &self.recording {
            recording.changed(now_ns, self.epoch, what, &value.to_string());
        }
    }

    fn record(&mut self, hash: FlowHash, cpu: CpuId) {
        if let Some(table) = &self.sock_flows {
            table.record(hash, cpu);
        }
    }

    fn standing(&self, queue: RxQueue, hash: FlowHash) -> Option<FlowStanding> {
        let FlowPlace { slot, cpu, desired_cpu, is_held, .. } = self.place_of(queue, hash);
        Some(FlowStanding { key: slot.unwrap_or(u32::MAX), at: cpu, desired_cpu, is_held })
    }

    fn has_fence(&self, queue: RxQueue) -> bool {
        self.place_of(queue, FlowHash::NONE).has_fence
    }

    fn census(&mut self, census: &mut Census) {
        census.batch_max = self.batch_max.into();
        census.hold_max = u64::from(self.hold_max.max(1)) * self.queues.len() as u64;
        census.backlogs.clear();
        for queue in &self.queues {
            for cpu in &self.cpus {
                let (queue, cpu) = (queue.intake.queue(), cpu.delivery.cpu());
                census.backlogs.push(Backlog { queue, cpu, frames: 0, packets: 0 });
            }
        }
        for queue in 0..self.queues.len() {
            self.count_backlogs(queue, census);
        }
        self.count_waiting(census);
        census.queued = census.backlogs.iter().map(|backlog| backlog.frames).sum();
        census.in_hand.clear();
        census.in_hand.extend(self.cpus.iter().map(|cpu| cpu.delivery.batch_len() as u64));
        census.frames_away = self.pools.iter_mut().map(|pool| pool.in_use() as u64).sum();
        census.frames_done = self.cpus.iter().map(|cpu| cpu.frames_done).sum();
    }

    fn census_of(&mut self, queue: RxQueue, census: &mut Census) {
        if census.backlogs.is_empty() {
            return self.census(census);
        }
        self.count_backlogs(queue.0.into(), census);
        self.count_waiting(census);
    }

    fn moves(&self) -> u64 {
        self.queues.iter().map(|queue| queue.intake.counters().moves.get()).sum()
    }

    fn active_cpus(&self, queue: RxQueue) -> Option<usize> {
        Some(self.queue(queue).intake.active_cpus())
    }

    fn check_rest(&mut self, laws: &mut Laws) {
        let intakes = || self.queues.iter().map(|queue| queue.intake.counters());
        let deliveries = || self.cpus.iter().map(|cpu| cpu.delivery.counters());
        let frames = intakes().map(|it| it.frames.get()).sum();
        laws.agree(Law::Counters, "frames", frames, laws.frames_in);
        let delivered = deliveries().map(|it| it.frames.get()).sum();
        laws.agree(Law::Counters, "delivered frames", delivered, laws.delivered);
        for reason in DropReason::ALL {
            let dropped: u64 = intakes().map(|it| it.drops[reason.index()].get()).sum();
            let lost: u64 = deliveries().map(|it| it.lost.get()).sum();
            let counted = if reason == DropReason::CpuLost { lost } else { dropped };
            laws.agree(Law::Counters, reason.name(), counted, self.seen.drops[reason.index()]);
        }
        self.check_moves(laws);
        if let Some(reassembly) = &mut self.reassembly {
            reassembly.check_rest(laws);
        }
    }
}

impl PathMachine {
    /// Checks that no packet is refused because others are held while there is room behind its
    /// predecessors. A flow that has used its share of the hold, or is behind a fence, may have to
    /// wait; and a CPU outside the map has no room for a flow that is not there.
    fn check_room(&self, dropped: &Dropped, queue: RxQueue, laws: &mut Laws) {
        let Dropped { reason: DropReason::HoldFull, packet: Some(packet), arrival } = dropped
        else {
            return;
        };
        let intake = &self.queue(queue).intake;
        let FlowPlace { cpu, is_allowed, is_held, has_fence, .. } = intake.place_of(packet.hash);
        let may_hold_no_more = is_held && intake.held() >= intake.hold_share();
        let room_behind = intake
            .queued_by_cpu()
            .find(|(at, queued)| Some(*at) == cpu && *queued <= self.netdev_max_backlog);
        if is_allowed
            && !has_fence
            && !may_hold_no_more
            && let Some((cpu, queued)) = room_behind
        {
            laws.broke(Law::Bounds, || {
                let held = intake.held();
                format!("{arrival:?} is refused, {held} held, with {queued} queued on {cpu}")
            });
        }
    }

    /// Checks the counters of moves. A move is visible in its first packet, unless that was lost.
    fn check_moves(&mut self, laws: &mut Laws) {
        let counters = || self.queues.iter().map(|queue| queue.intake.counters());
        let (moves, holds) = (self.moves(), counters().map(|it| it.holds.get()).sum());
        let stays: u64 = counters().map(|it| it.stays.get()).sum();
        let lost = self.seen.drops[DropReason::CpuLost.index()];
        let seen = self.seen.moves;
        if moves < seen || moves > seen + lost {
            laws.broke(Law::Counters, || {
                format!("{moves} moves are counted, {seen} were seen, {lost} frames were lost")
            });
        }
        // One hold may hold many packets, and move more than once, so only its presence is
        // compared.
        let held = self.seen.held.min(1);
        for (what, counted, seen) in [("holds", holds, held), ("stays", stays, self.seen.stays)] {
            if counted < seen {
                laws.broke(Law::Counters, || format!("{counted} {what}, but {seen} were seen"));
            }
        }
        for queue in &mut self.queues {
            let remembered = queue.intake.state_of(FlowHash::NONE).moves.len();
            if remembered > MOVES_MAX {
                laws.broke(Law::Bounds, || format!("{remembered} moves in a journal"));
            }
        }
    }
}

fn received(
    pool: &mut Pool,
    flow: &mut Flow,
    arrival: Arrival,
) -> Result<(Packet, u64), RefusedFrame> {
    let wire_len = u32::try_from(FRAME_BYTES).unwrap_or(u32::MAX);
    let Some(mut frame) = pool.allocate(wire_len) else {
        return Err(RefusedFrame { arrival, wire_len, reason: DropReason::NoBuffer });
    };
    frame.set_len(wire_len);
    let sequence = flow.write_next(frame.data_mut());
    let mut packet = Packet::received(frame, arrival, wire_len, Link::Ethernet);
    if flow.device_hash {
        packet.hash = flow.hash;
    }
    Ok((packet, sequence))
}
