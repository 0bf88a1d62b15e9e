//! Turns of CPUs: each ends the current activity and begins the next one.

use forebay_rx::intake::DEV_WEIGHT;
use forebay_rx::steer::RpsMap;
use forebay_rx::{CpuId, RxQueue};

use super::{Happening, World};
use crate::costs::{Costs, INTAKE_NS, SERVICE_NS, WAKE_NS};
use crate::liveness::{Came, Circumstances};
use crate::machine::{Poll, SimMachine};
use crate::traffic::FlowId;
use crate::virtual_cpu::Doing;

/// State of a flow before its packets were taken in.
#[derive(Clone, Copy)]
pub(super) struct TurnBefore {
    flow: FlowId,
    packets: u32,
    at: Option<CpuId>,
    was_on_its_way: bool,
}

impl<M: SimMachine> World<M> {
    pub(super) fn turn(&mut self, cpu: CpuId) {
        match self.cpu(cpu).doing {
            Doing::Nothing => {}
            Doing::Batch => {
                self.handle(cpu);
                if let Some(ns) = Costs::draw_completion(&mut self.schedule) {
                    self.cpu(cpu).doing = Doing::Handled;
                    self.cpu(cpu).linger(ns);
                    return;
                }
                self.machine.complete(cpu);
            }
            Doing::Handled => self.machine.complete(cpu),
        }
        self.cpu(cpu).doing = Doing::Nothing;
        self.begin(cpu);
    }

    /// Begins a poll or a batch, alternating as far as there is work.
    fn begin(&mut self, cpu: CpuId) {
        let runs = self.online.contains(cpu) || M::DRAINS;
        let delivers = runs && self.cpu(cpu).paused == 0;
        let took_in = std::mem::take(&mut self.cpu(cpu).took_in);
        if took_in && delivers && self.begin_batch(cpu) {
            return;
        }
        let polled_in_vain = std::mem::take(&mut self.cpu(cpu).polled_in_vain);
        if self.poll(cpu, !polled_in_vain) || (delivers && self.begin_batch(cpu)) {
            return;
        }
        self.sleep(cpu);
    }

    fn begin_batch(&mut self, cpu: CpuId) -> bool {
        let taken = self.machine.take(cpu, self.now()) as u64;
        if taken > 0 {
            self.cpu(cpu).doing = Doing::Batch;
            let ns = self.spend(cpu, taken * SERVICE_NS * self.scenario.costs.factor);
            let load = &mut self.loads[cpu.index()];
            load.busy_ns += ns;
            load.delivering_ns += ns;
            load.packets += taken;
        }
        taken > 0
    }

    /// Polls each queue that has frames to poll or, if `may_be_empty`, that asks for an empty turn.
    fn poll(&mut self, cpu: CpuId, may_be_empty: bool) -> bool {
        let (mut polled, mut frames, mut handled) = (false, 0, 0);
        for queue in (0..self.scenario.queues).map(RxQueue) {
            if self.pace.polling[usize::from(queue.0)] != cpu {
                continue;
            }
            let is_due = |due_ns: Option<u64>| due_ns.is_some_and(|due| due <= self.now_ns);
            let comes = is_due(self.traffic.due_ns(queue));
            if comes || (may_be_empty && is_due(self.machine.waits_until_ns(queue))) {
                let (came, on_the_spot) = self.take_in(cpu, queue);
                (polled, frames, handled) = (true, frames + came, handled + on_the_spot);
            }
        }
        if polled {
            self.cpu(cpu).took_in = true;
            self.cpu(cpu).polled_in_vain = frames == 0;
            let (frames, handled) = (frames as u64, handled as u64);
            let base_ns = frames.max(1) * INTAKE_NS + handled * SERVICE_NS;
            let ns = self.spend(cpu, base_ns * self.scenario.costs.factor);
            // As in the engine, a poll that finds nothing does not count as work. It takes time that the
            // CPU has to spare.
            if frames + handled > 0 {
                self.loads[cpu.index()].busy_ns += ns;
                self.loads[cpu.index()].frames += frames;
            }
        }
        polled
    }

    /// Takes in a burst. Returns the number of its frames, and the number delivered on the spot.
    fn take_in(&mut self, cpu: CpuId, queue: RxQueue) -> (usize, usize) {
        let mut flows = std::mem::take(&mut self.spare.flows);
        let mut came = std::mem::take(&mut self.spare.came);
        self.traffic.poll(queue, DEV_WEIGHT, self.now_ns, &mut flows);
        self.stand_before(queue, &flows, &mut came);
        let now = self.now();
        let poll = Poll {
            queue,
            cpu,
            flows: &flows,
            traffic: &mut self.traffic,
            now,
            loads: &self.loads,
            wake: &mut self.spare.wake,
            handed: &mut self.spare.handed,
        };
        let handled = self.machine.take_in(poll, &mut self.laws).handled;
        if self.loads_at_half.is_none() && self.laws.frames_in >= self.scenario.packets / 2 {
            self.loads_at_half = Some(self.loads.clone());
        }
        self.machine.census_of(queue, &mut self.census);
        self.watch(queue, &came);
        self.look(queue);
        self.hand_on();
        self.wake_all();
        let frames = flows.len();
        flows.clear();
        came.clear();
        (self.spare.flows, self.spare.came) = (flows, came);
        (frames, handled)
    }

    fn stand_before(&self, queue: RxQueue, flows: &[FlowId], came: &mut Vec<TurnBefore>) {
        let mut sorted = [FlowId(0); DEV_WEIGHT];
        let sorted = &mut sorted[..flows.len()];
        sorted.copy_from_slice(flows);
        sorted.sort_unstable();
        for run in sorted.chunk_by(|one, other| one == other) {
            let flow = run[0];
            let standing = self.machine.standing(queue, self.traffic.flow(flow).hash);
            came.push(TurnBefore {
                flow,
                packets: u32::try_from(run.len()).unwrap_or(u32::MAX),
                at: standing.and_then(|standing| standing.at),
                was_on_its_way: self.laws.on_their_way(flow) > 0,
            });
        }
    }

    /// Registers the desired CPUs of flows whose packets came.
    fn watch(&mut self, queue: RxQueue, came: &[TurnBefore]) {
        let around = Circumstances {
            now_ns: self.now_ns,
            cpus: &self.cpus,
            pace: &self.pace,
            census: &self.census,
        };
        for &TurnBefore { flow, packets, at: at_before, was_on_its_way } in came {
            let hash = self.traffic.flow(flow).hash;
            if let Some(stands) = self.machine.standing(queue, hash) {
                let came = Came { queue, hash, at_before, was_on_its_way, stands, packets };
                self.liveness.came(came, around);
            }
        }
    }

    fn handle(&mut self, cpu: CpuId) {
        self.machine.handle(cpu, self.now_ns, &mut self.laws, &mut self.spare.handed);
        self.hand_on();
    }

    /// Wakes the readers of packets handed to applications.
    fn hand_on(&mut self) {
        let mut handed = std::mem::take(&mut self.spare.handed);
        if let Some(readers) = &mut self.readers {
            let map = RpsMap::new(self.scenario.knobs.rps_cpus.iter());
            let flows = u32::try_from(self.traffic.flows().len()).unwrap_or(u32::MAX);
            let by_rps = |flow| map.select(self.traffic.flow(flow).hash);
            readers.begin(flows, self.online, by_rps);
            for packet in &handed {
                if let Some(ns) = readers.wake(packet.flow, packet.hash) {
                    let (at_ns, what) = (self.now_ns + ns, Happening::Reads(packet.flow));
                    self.event_count += 1;
                    let event = super::SimEvent { at_ns, count: self.event_count, what };
                    self.events.push(std::cmp::Reverse(event));
                }
            }
        }
        handed.clear();
        self.spare.handed = handed;
    }

    /// Wakes the CPUs that have new packets.
    pub(super) fn wake_all(&mut self) {
        let mut wake = std::mem::take(&mut self.spare.wake);
        for cpu in wake.drain(..) {
            self.wake(cpu);
        }
        self.spare.wake = wake;
    }

    /// Spends time on an activity. Returns its duration.
    fn spend(&mut self, cpu: CpuId, base_ns: u64) -> u64 {
        let slowed = if self.cpu(cpu).slowed > 0 { SLOW_FACTOR } else { 1 };
        let cost = self.scenario.costs.draw(base_ns, slowed, &mut self.schedule);
        let now_ns = self.now_ns;
        self.cpu(cpu).spend(now_ns, cost);
        cost.ns
    }

    fn sleep(&mut self, cpu: CpuId) {
        let now_ns = self.now_ns;
        let mut until_ns: Option<u64> = None;
        for queue in (0..self.scenario.queues).map(RxQueue) {
            if self.pace.polling[usize::from(queue.0)] == cpu {
                let again = self.machine.waits_until_ns(queue).map(|due_ns| {
                    let again_ns = now_ns + self.schedule.between(1, WAKE_NS);
                    due_ns.max(again_ns)
                });
                let due = self.traffic.due_ns(queue).map(|due_ns| due_ns.max(now_ns + 1));
                until_ns = until_ns.into_iter().chain(again).chain(due).min();
            }
        }
        self.cpu(cpu).sleep(until_ns);
    }
}

/// Factor by which a slow CPU takes longer for everything.
const SLOW_FACTOR: u64 = 8;
