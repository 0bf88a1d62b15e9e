//! One run: a loop of executing the next event and checking the laws.

mod acts; //  changes and faults
mod turns; // turns of CPUs

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;

use forebay_engine::timeline::Timeline;
use forebay_rx::hash::FlowHash;
use forebay_rx::steer::CpuLoad;
use forebay_rx::{CpuId, RxQueue};
use forebay_sys::random::Random;

use crate::census::Census;
use crate::cpu_set::CpuSet;
use crate::evenness::{Balanced, Evenness, LOOK_NS};
use crate::kernel::KernelMachine;
use crate::laws::{Law, Laws};
use crate::liveness::{Circumstances, Liveness, Wait};
use crate::machine::{Handed, Now, SimMachine};
use crate::path_machine::PathMachine;
use crate::readers::Readers;
use crate::rules::Rules;
use crate::scenario::{Overrides, Scenario, Situation};
use crate::traffic::{FlowId, Traffic};
use crate::virtual_cpu::{CpuPace, VirtualCpu};

/// Limit on the steps of a run: a number per packet, and a constant.
const STEPS_A_PACKET: u64 = 200;
const STEPS_BESIDES: u64 = 1_000_000;

/// Number of backlogs that are looked at after each step, on average: of more, every nth step.
const BACKLOGS_A_STEP: u64 = 64;

/// Result of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SimOutcome {
    /// Seed that determined all draws.
    pub seed: u64,
    /// Number of events executed.
    pub steps: u64,
    /// Number of frames taken in.
    pub packets: u64,
    /// Number of frames that reached an application.
    pub delivered: u64,
    /// Number of frames dropped and accounted for.
    pub dropped: u64,
    /// Number of times that a flow, or the flows of one slot, changed CPU.
    pub moves: u64,
    /// Number of moves requested while packets were on their way to the old CPU.
    pub hazardous: u64,
    /// Number of violations of each law, in the order of [`Law::ALL`].
    pub broken: [u64; Law::ALL.len()],
    /// The first violation: its law, and a description.
    pub first: Option<(Law, String)>,
    /// Longest time that a flow waited to move to its desired CPU, with the bound for it.
    pub longest: Wait,
    /// Number of times that the elephant changed CPU.
    pub elephant_moves: u64,
    /// Busy time of the busiest CPU in percent of the mean, in the second half of the run.
    pub imbalance_percent: u64,
    /// Evenness of the load, if it is followed.
    pub balanced: Option<Balanced>,
    /// Digest of all deliveries: frame, time and CPU.
    pub digest: u64,
}

/// Runs one seed of a scenario.
#[must_use]
pub fn run(rules: Rules, situation: Situation, seed: u64, overrides: Overrides) -> SimOutcome {
    match rules {
        Rules::Forebay | Rules::Ranges => {
            World::<PathMachine>::new(rules, situation, seed, overrides).run()
        }
        Rules::Kernel | Rules::RssPlusPlus => {
            World::<KernelMachine>::new(rules, situation, seed, overrides).run()
        }
    }
}

/// Parts of a run that are recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recorded<'a> {
    /// Directory of a trace.
    pub trace: Option<&'a Path>,
    /// True if a timeline is recorded.
    pub timeline: bool,
}

/// Runs one seed of a scenario under Forebay's rules, and records it.
///
/// # Errors
/// If the trace cannot be written.
pub fn run_recorded(
    situation: Situation,
    seed: u64,
    overrides: Overrides,
    recorded: Recorded<'_>,
) -> forebay_sys::Result<(SimOutcome, Option<Timeline>)> {
    let mut world = World::<PathMachine>::new(Rules::Forebay, situation, seed, overrides);
    if let Some(directory) = recorded.trace {
        world.machine.record_to(directory)?;
    }
    if recorded.timeline {
        world.machine.record_timeline();
    }
    world.go_on_to_the_end();
    world.machine.finish_recording(&world.traffic, &world.laws)?;
    let timeline = world.machine.finish_timeline(world.now_ns);
    Ok((world.outcome(), timeline))
}

/// A machine with its CPUs, traffic, applications, changes and faults.
struct World<M> {
    scenario: Scenario,
    seed: u64,
    machine: M,
    traffic: Traffic,
    readers: Option<Readers>,
    cpus: Vec<VirtualCpu>,
    online: CpuSet,
    /// CPUs that were taken offline before their stop was noticed.
    unnoticed: CpuSet,
    pace: CpuPace,
    events: BinaryHeap<Reverse<SimEvent>>,
    /// Number of events so far: events of the same time are executed in order of creation.
    event_count: u64,
    laws: Laws,
    liveness: Liveness,
    census: Census,
    now_ns: u64,
    /// Work of each CPU.
    loads: Vec<CpuLoad>,
    /// Work of each CPU when half of the packets had arrived.
    loads_at_half: Option<Vec<CpuLoad>>,
    /// Evenness of the load, if it is followed.
    evenness: Option<Evenness>,
    steps: u64,
    /// Random source for durations, and for the order of simultaneous events.
    schedule: Random,
    /// Random source for changes and faults.
    chance: Random,
    spare: Spare,
}

/// Buffers kept for reuse.
#[derive(Default)]
struct Spare {
    flows: Vec<FlowId>,
    came: Vec<turns::TurnBefore>,
    handed: Vec<Handed>,
    wake: Vec<CpuId>,
}

/// An event at a known time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct SimEvent {
    at_ns: u64,
    count: u64,
    what: Happening,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Happening {
    /// The action at this index of the scenario's list.
    Recurs(usize),
    /// The application reads all available packets of a flow.
    Reads(FlowId),
    Resumes(CpuId),
    RunsFastAgain(CpuId),
    IsReplaced(CpuId),
    IsNoticed(CpuId),
    ComesBack(CpuId),
    /// The assignment of all flows is looked at.
    IsLookedAt,
}

impl<M: SimMachine> World<M> {
    fn new(rules: Rules, situation: Situation, seed: u64, overrides: Overrides) -> Self {
        // Separate random streams: a further draw from one changes nothing for the others.
        let mut streams = Random::new(seed);
        let mut stream = || Random::new(streams.bits());
        let scenario = rules.applied_to(situation.draw(overrides, &mut stream()));
        let traffic =
            Traffic::new(scenario.traffic.clone(), scenario.packets, scenario.queues, stream());
        let readers = stream();
        let readers = scenario.readers.map(|plan| Readers::new(plan, readers));
        let mut world = Self {
            machine: M::new(&scenario, &traffic),
            traffic,
            readers,
            cpus: (0..scenario.cpus).map(|_| VirtualCpu::new()).collect(),
            online: CpuSet::range(0, scenario.cpus),
            unnoticed: CpuSet::default(),
            pace: CpuPace {
                batch_max: scenario.knobs.batch_max.into(),
                queues: scenario.queues.into(),
                polling: (0..scenario.queues).map(CpuId).collect(),
                factor: scenario.costs.factor,
            },
            events: BinaryHeap::new(),
            event_count: 0,
            laws: Laws::default(),
            liveness: Liveness::new(scenario.knobs.move_after, scenario.queues),
            census: Census::default(),
            now_ns: 0,
            loads: vec![CpuLoad::default(); scenario.cpus.into()],
            loads_at_half: None,
            evenness: situation.follows_load().then(Evenness::default),
            steps: 0,
            schedule: stream(),
            chance: stream(),
            spare: Spare::default(),
            scenario,
            seed,
        };
        for index in 0..world.scenario.recurring.len() {
            world.recur(index);
        }
        if world.evenness.is_some() {
            world.at(0, Happening::IsLookedAt);
        }
        world
    }

    fn run(mut self) -> SimOutcome {
        self.go_on_to_the_end();
        self.outcome()
    }

    fn go_on_to_the_end(&mut self) {
        let steps_max = STEPS_BESIDES + STEPS_A_PACKET * self.scenario.packets;
        let backlogs = u64::from(self.scenario.queues) * u64::from(self.scenario.cpus);
        let check_one_in = (backlogs / BACKLOGS_A_STEP).max(1);
        while self.step() {
            self.steps += 1;
            if self.steps.is_multiple_of(check_one_in) {
                self.check();
            }
            if self.steps > steps_max {
                let census = &self.census;
                self.laws.broke(Law::Liveness, || {
                    format!("no rest after {steps_max} steps: {census:?}")
                });
                return;
            }
        }
        self.machine.census(&mut self.census);
        self.laws.check_rest(&self.census);
        self.machine.check_rest(&mut self.laws);
    }

    /// Checks the laws that hold at any time. The limit of the backlogs changes right after a check: those that it finds
    /// longer than the next limit may stay so.
    fn check(&mut self) {
        self.machine.census(&mut self.census);
        self.laws.check(&self.census);
    }

    /// Executes the next event; `false` if there is none.
    fn step(&mut self) -> bool {
        let free_at_ns = self.cpus.iter().map(|cpu| cpu.free_at_ns).min().unwrap_or(u64::MAX);
        if let Some(&Reverse(event)) = self.events.peek()
            && event.at_ns <= free_at_ns
        {
            self.events.pop();
            self.now_ns = self.now_ns.max(event.at_ns);
            self.happen(event.what);
            return true;
        }
        if free_at_ns == u64::MAX {
            return false;
        }
        self.now_ns = self.now_ns.max(free_at_ns);
        let cpu = self.first_free(free_at_ns);
        self.turn(cpu);
        true
    }

    /// The CPU that is free first; a random one of several.
    fn first_free(&mut self, free_at_ns: u64) -> CpuId {
        let cpus = (0..).map(CpuId).zip(&self.cpus);
        let first = cpus.filter(|(_, cpu)| cpu.free_at_ns == free_at_ns).map(|(id, _)| id);
        first.collect::<CpuSet>().pick(&mut self.schedule)
    }

    fn at(&mut self, at_ns: u64, what: Happening) {
        self.event_count += 1;
        self.events.push(Reverse(SimEvent { at_ns, count: self.event_count, what }));
    }

    fn after(&mut self, ns: u64, what: Happening) {
        self.at(self.now_ns + ns, what);
    }

    fn now(&self) -> Now {
        Now { ns: self.now_ns }
    }

    fn cpu(&mut self, cpu: CpuId) -> &mut VirtualCpu {
        &mut self.cpus[cpu.index()]
    }

    fn wake(&mut self, cpu: CpuId) {
        let now_ns = self.now_ns;
        self.cpus[cpu.index()].wake(now_ns, &mut self.schedule);
    }

    /// Checks which moves of a queue are done by now.
    fn look(&mut self, queue: RxQueue) {
        let Self { machine, liveness, laws, .. } = self;
        let around = Circumstances {
            now_ns: self.now_ns,
            cpus: &self.cpus,
            pace: &self.pace,
            census: &self.census,
        };
        let standing = |hash: FlowHash| machine.standing(queue, hash);
        liveness.look(queue, standing, machine.has_fence(queue), around, laws);
    }

    /// Restarts the observation of a queue, after its slots were replaced or its polling CPU
    /// changed.
    fn begin_anew(&mut self, queue: RxQueue) {
        self.machine.census(&mut self.census);
        let around = Circumstances {
            now_ns: self.now_ns,
            cpus: &self.cpus,
            pace: &self.pace,
            census: &self.census,
        };
        self.liveness.begin_anew(queue, self.machine.has_fence(queue), around);
    }

    /// Busy time of the busiest CPU in percent of the mean, in the second half of the run.
    fn imbalance_percent(&self) -> u64 {
        let none = CpuLoad::default();
        let before = self.loads_at_half.iter().flatten().chain(std::iter::repeat(&none));
        let busy_ns = self.loads.iter().zip(before).map(|(now, then)| now.busy_ns - then.busy_ns);
        let (max, sum) = busy_ns.fold((0, 0), |(max, sum), ns| (ns.max(max), sum + ns));
        max * 100 * self.loads.len() as u64 / sum.max(1)
    }

    /// Looks at the assignment of all flows, if the load is balanced.
    fn look_at_assignment(&mut self) {
        let Some(evenness) = &mut self.evenness else { return };
        if self.traffic.has_ended() {
            return;
        }
        let run = (&self.machine, &self.traffic, &self.pace);
        evenness.look(self.now_ns, run, self.cpus.len(), &mut self.laws);
        self.after(LOOK_NS, Happening::IsLookedAt);
    }

    fn outcome(mut self) -> SimOutcome {
        let now_ns = self.now_ns;
        let balanced = self.evenness.as_mut().map(|evenness| evenness.end(now_ns));
        let laws = &self.laws;
        SimOutcome {
            seed: self.seed,
            steps: self.steps,
            packets: laws.frames_in,
            delivered: laws.delivered,
            dropped: laws.dropped,
            moves: self.machine.moves(),
            hazardous: self.liveness.hazardous,
            broken: Law::ALL.map(|law| laws.broken(law)),
            longest: self.liveness.longest,
            elephant_moves: laws.moves_of(FlowId(0)),
            imbalance_percent: self.imbalance_percent(),
            balanced,
            digest: laws.digest,
            first: self.laws.first,
        }
    }
}
