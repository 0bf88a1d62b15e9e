//! The reference: a small model of the rules of Linux 6.18, after `get_rps_cpu`,
//! `enqueue_to_backlog`, `process_backlog` and `dev_cpu_dead` in net/core/dev.c.
//!
//! Packets are a few numbers here, CPUs have one backlog each for all queues, and there is no limit
//! but `netdev_max_backlog`. Delivery on the spot (`netif_receive_skb`) happens during the poll.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use forebay_rx::hash::FlowHash;
use forebay_rx::steer::RpsMap;
use forebay_rx::{CpuId, RxQueue};

use crate::action::SimChange;
use crate::census::{Backlog, Census};
use crate::cpu_set::CpuSet;
use crate::indirection::Indirection;
use crate::laws::{Delivered, Laws};
use crate::machine::{FlowStanding, Handed, Now, Poll, SimMachine, TakenIn};
use crate::scenario::Scenario;
use crate::traffic::{FlowId, Traffic};

/// Most packets that a CPU processes at once: `dev_weight`.
const DEV_WEIGHT: usize = 64;

/// The multiplier of `hash_32`, which finds a flow's entry in a queue's table.
const GOLDEN_RATIO_32: u32 = 0x61c8_8647;

/// Machine with the rules of Linux 6.18.
pub(crate) struct KernelMachine {
    queues: Vec<ModelQueue>,
    cpus: Vec<SoftnetData>,
    sock_flows: SockFlows,
    rps_map: RpsMap,
    /// Table of the device, under the rule of RSS++.
    indirection: Option<Indirection>,
    online: CpuSet,
    netdev_max_backlog: usize,
    moves: u64,
}

/// State of one rx queue.
struct ModelQueue {
    queue: RxQueue,
    /// `rps_dev_flow_table`; empty if `rps_flow_cnt` is 0.
    flow_table: Vec<DevFlow>,
    /// CPU of the last packet of each hash: for the observer only.
    last: BTreeMap<u32, CpuId>,
}

/// `rps_dev_flow`.
#[derive(Clone, Copy)]
struct DevFlow {
    cpu: Option<CpuId>,
    last_qtail: u32,
}

/// `softnet_data`.
struct SoftnetData {
    input_pkt_queue: VecDeque<ModelPacket>,
    process_queue: VecDeque<ModelPacket>,
    /// Packets in `__netif_receive_skb`; `handled` is the number of those delivered already.
    in_hand: Vec<ModelPacket>,
    handled: usize,
    input_queue_head: u32,
    input_queue_tail: u32,
}

/// `rps_sock_flow_table`: indexed by the low bits of the hash; an entry has its upper bits and the
/// CPU.
struct SockFlows {
    entries: Vec<Option<(u32, CpuId)>>,
    /// Mask of the bits of an entry that contain the CPU.
    cpu_mask: u32,
}

#[derive(Clone, Copy)]
struct ModelPacket {
    number: u64,
    flow: FlowId,
    sequence: u64,
    hash: FlowHash,
    queue: RxQueue,
}

/// Target of a packet, and the flow table entry in which the backlog's tail is saved.
struct ModelTarget {
    cpu: CpuId,
    entry: Option<usize>,
}

impl KernelMachine {
    /// `get_rps_cpu`. `None` if the packet is processed on the spot.
    fn steer(&mut self, packet: &ModelPacket) -> Option<ModelTarget> {
        if !packet.hash.is_some() {
            return None;
        }
        let queue = &mut self.queues[usize::from(packet.queue.0)];
        if let Some(next_cpu) = self.sock_flows.desired(packet.hash)
            && !queue.flow_table.is_empty()
        {
            let entry = queue.entry_of(packet.hash);
            let flow = &mut queue.flow_table[entry];
            let may_switch = flow.cpu.is_none_or(|cpu| {
                let head = self.cpus[cpu.index()].input_queue_head;
                !self.online.contains(cpu) || head.wrapping_sub(flow.last_qtail).cast_signed() >= 0
            });
            if flow.cpu != Some(next_cpu) && may_switch {
                let last_qtail = self.cpus[next_cpu.index()].input_queue_head;
                *flow = DevFlow { cpu: Some(next_cpu), last_qtail };
            }
            if let Some(cpu) = flow.cpu.filter(|cpu| self.online.contains(*cpu)) {
                return Some(ModelTarget { cpu, entry: Some(entry) });
            }
        }
        if let Some(indirection) = &mut self.indirection {
            indirection.count(packet.hash);
        }
        let cpu = self.by_hash(packet.hash)?;
        self.online.contains(cpu).then_some(ModelTarget { cpu, entry: None })
    }

    /// CPU that a packet of this hash should go to, regardless of the flow table.
    fn desired_cpu(&self, queue: &ModelQueue, hash: FlowHash) -> Option<CpuId> {
        let online = |cpu: &CpuId| self.online.contains(*cpu);
        let rfs = self.sock_flows.desired(hash).filter(online);
        let rfs = rfs.filter(|_| !queue.flow_table.is_empty());
        rfs.or_else(|| self.by_hash(hash).filter(online))
    }

    /// CPU for a hash, by the map or by the device.
    fn by_hash(&self, hash: FlowHash) -> Option<CpuId> {
        match &self.indirection {
            Some(indirection) => indirection.cpu_of(hash),
            None => self.rps_map.select(hash),
        }
    }

    /// `enqueue_to_backlog`.
    fn enqueue(
        &mut self,
        packet: ModelPacket,
        ModelTarget { cpu, entry }: ModelTarget,
        laws: &mut Laws,
    ) {
        let queue = &mut self.queues[usize::from(packet.queue.0)];
        let softnet = &mut self.cpus[cpu.index()];
        if softnet.input_pkt_queue.len() > self.netdev_max_backlog {
            // `enqueue_to_backlog` drops a packet if the queue is longer than `netdev_max_backlog`.
            laws.dropped(packet.number);
            return;
        }
        softnet.input_queue_tail = softnet.input_queue_tail.wrapping_add(1);
        softnet.input_pkt_queue.push_back(packet);
        if let Some(entry) = entry {
            queue.flow_table[entry].last_qtail = softnet.input_queue_tail;
        }
        let before = queue.last.insert(packet.hash.0, cpu);
        self.moves += u64::from(before.is_some_and(|before| before != cpu));
    }

    /// `dev_cpu_dead`: packets queued for a removed CPU are steered again, by the CPU that notices.
    fn requeue(&mut self, gone: CpuId, runs_on: CpuId, laws: &mut Laws, wake: &mut Vec<CpuId>) {
        let softnet = &mut self.cpus[gone.index()];
        let processing = std::mem::take(&mut softnet.process_queue);
        let input = std::mem::take(&mut softnet.input_pkt_queue);
        let packets = processing.into_iter().chain(input);
        for packet in packets {
            let softnet = &mut self.cpus[gone.index()];
            softnet.input_queue_head = softnet.input_queue_head.wrapping_add(1);
            let target = self.steer(&packet).unwrap_or(ModelTarget { cpu: runs_on, entry: None });
            wake.push(target.cpu);
            self.enqueue(packet, target, laws);
        }
    }

    fn deliver(
        packet: ModelPacket,
        cpu: CpuId,
        now_ns: u64,
        laws: &mut Laws,
        handed: &mut Vec<Handed>,
    ) {
        let ModelPacket { number, flow, sequence, hash, .. } = packet;
        handed.push(Handed { flow, hash });
        laws.delivered(Delivered { number, flow, sequence, cpu, now_ns });
    }
}

impl SimMachine for KernelMachine {
    const DRAINS: bool = false;

    fn new(scenario: &Scenario, _: &Traffic) -> Self {
        let knobs = &scenario.knobs;
        let queue = |queue| ModelQueue {
            queue: RxQueue(queue),
            flow_table: flow_table(knobs.rps_flow_cnt),
            last: BTreeMap::new(),
        };
        let softnet = |_| SoftnetData {
            input_pkt_queue: VecDeque::new(),
            process_queue: VecDeque::new(),
            in_hand: Vec::new(),
            handled: 0,
            input_queue_head: knobs.start,
            input_queue_tail: knobs.start,
        };
        Self {
            queues: (0..scenario.queues).map(queue).collect(),
            cpus: (0..scenario.cpus).map(softnet).collect(),
            sock_flows: SockFlows::new(knobs.sock_flow_entries, scenario.cpus),
            indirection: knobs
                .indirection
                .then(|| Indirection::new(&RpsMap::new(knobs.rps_cpus.iter()))),
            rps_map: RpsMap::new(knobs.rps_cpus.iter()),
            online: CpuSet::range(0, scenario.cpus),
            netdev_max_backlog: knobs.netdev_max_backlog as usize,
            moves: 0,
        }
    }

    fn take_in(&mut self, poll: Poll<'_>, laws: &mut Laws) -> TakenIn {
        let mut handled = 0;
        if let Some(indirection) = &mut self.indirection {
            indirection.assign(poll.now.ns, poll.loads);
        }
        for &id in poll.flows {
            let number = poll.traffic.next_frame();
            let flow = poll.traffic.flow_mut(id);
            let (sequence, hash) = (flow.sequence, flow.hash);
            flow.sequence += 1;
            laws.arrived(number, id, sequence);
            let packet = ModelPacket { number, flow: id, sequence, hash, queue: poll.queue };
            match self.steer(&packet) {
                Some(target) => {
                    poll.wake.push(target.cpu);
                    self.enqueue(packet, target, laws);
                }
                None => {
                    handled += 1;
                    Self::deliver(packet, poll.cpu, poll.now.ns, laws, poll.handed);
                }
            }
        }
        TakenIn { handled }
    }

    fn waits_until_ns(&self, _: RxQueue) -> Option<u64> {
        None
    }

    fn take(&mut self, cpu: CpuId, _: Now) -> usize {
        let softnet = &mut self.cpus[cpu.index()];
        if softnet.process_queue.is_empty() {
            std::mem::swap(&mut softnet.process_queue, &mut softnet.input_pkt_queue);
        }
        let taken = softnet.process_queue.len().min(DEV_WEIGHT);
        softnet.in_hand.extend(softnet.process_queue.drain(..taken));
        taken
    }

    fn handle(&mut self, cpu: CpuId, now_ns: u64, laws: &mut Laws, handed: &mut Vec<Handed>) {
        let softnet = &mut self.cpus[cpu.index()];
        softnet.handled = softnet.in_hand.len();
        for &packet in &softnet.in_hand {
            Self::deliver(packet, cpu, now_ns, laws, handed);
        }
    }

    fn complete(&mut self, cpu: CpuId) {
        let softnet = &mut self.cpus[cpu.index()];
        let processed = u32::try_from(softnet.in_hand.len()).unwrap_or(u32::MAX);
        softnet.input_queue_head = softnet.input_queue_head.wrapping_add(processed);
        softnet.in_hand.clear();
        softnet.handled = 0;
    }

    fn lose(&mut self, _: CpuId, _: &mut Laws) {} // the kernel has no threads to lose

    fn change(&mut self, change: &SimChange, _: Now, laws: &mut Laws, wake: &mut Vec<CpuId>) {
        match change {
            // CPUs that do not run are left out when the mask is written.
            SimChange::RpsCpus(cpus) => {
                self.rps_map = RpsMap::new(cpus.and(self.online).iter());
                if let Some(indirection) = &mut self.indirection {
                    indirection.keep_within(&self.rps_map);
                }
            }
            SimChange::RpsFlowCnt(count) => {
                for queue in &mut self.queues {
                    queue.flow_table = flow_table(*count);
                }
            }
            SimChange::SockFlowEntries(entries) => {
                let cpus = u16::try_from(self.cpus.len()).unwrap_or(u16::MAX);
                self.sock_flows = SockFlows::new(*entries, cpus);
            }
            SimChange::MaxBacklog(packets) => self.netdev_max_backlog = *packets as usize,
            SimChange::Online(cpus) => self.online = *cpus,
            SimChange::CpuDead { gone, runs_on } => self.requeue(*gone, *runs_on, laws, wake),
            // The traffic has its new hashes already, and the model does not depend on the others.
            SimChange::HashKey(_)
            | SimChange::Coalesce(_)
            | SimChange::FlowLimit(_)
            | SimChange::PollingCpu(..) => {}
        }
    }

    fn note(&mut self, _: &'static str, _: &dyn fmt::Display, _: u64) {}

    fn record(&mut self, hash: FlowHash, cpu: CpuId) {
        self.sock_flows.record(hash, cpu);
    }

    fn standing(&self, queue: RxQueue, hash: FlowHash) -> Option<FlowStanding> {
        let queue = &self.queues[usize::from(queue.0)];
        let desired_cpu = self.desired_cpu(queue, hash)?;
        let at = queue.last.get(&hash.0).copied();
        Some(FlowStanding { key: hash.0, at, desired_cpu, is_held: false })
    }

    fn has_fence(&self, _: RxQueue) -> bool {
        false
    }

    fn census(&mut self, census: &mut Census) {
        census.backlog_max = self.netdev_max_backlog as u64 + 1;
        census.batch_max = DEV_WEIGHT as u64;
        census.backlogs.clear();
        census.in_hand.clear();
        (census.queued, census.frames_done) = (0, 0);
        for (cpu, softnet) in (0..).map(CpuId).zip(&self.cpus) {
            let input = softnet.input_pkt_queue.len();
            let in_hand = softnet.in_hand.len() as u64;
            let queue = self.queues[0].queue;
            let (frames, packets) = (input as u64, input as u64);
            census.backlogs.push(Backlog { queue, cpu, frames, packets });
            census.in_hand.push(in_hand);
            census.queued += (input + softnet.process_queue.len()) as u64 + in_hand;
            census.frames_done += softnet.handled as u64;
        }
        census.frames_away = census.queued;
        census.queued -= census.frames_done;
    }

    fn moves(&self) -> u64 {
        self.moves
    }

    fn check_rest(&mut self, _: &mut Laws) {}
}

impl ModelQueue {
    /// `rfs_slot`.
    fn entry_of(&self, hash: FlowHash) -> usize {
        let log = self.flow_table.len().trailing_zeros();
        let product = hash.0.wrapping_mul(GOLDEN_RATIO_32);
        product.checked_shr(u32::BITS - log).unwrap_or(0) as usize
    }
}

impl SockFlows {
    fn new(entries: u32, cpus: u16) -> Self {
        let len = if entries > 0 { entries.next_power_of_two() } else { 0 };
        let cpu_mask = u32::from(cpus).next_power_of_two() - 1;
        Self { entries: vec![None; len as usize], cpu_mask }
    }

    fn record(&mut self, hash: FlowHash, cpu: CpuId) {
        let upper = hash.0 & !self.cpu_mask;
        if let Some(place) = self.place(hash)
            && hash.is_some()
        {
            self.entries[place] = Some((upper, cpu));
        }
    }

    fn desired(&self, hash: FlowHash) -> Option<CpuId> {
        let (upper, cpu) = self.entries[self.place(hash)?]?;
        (upper == hash.0 & !self.cpu_mask).then_some(cpu)
    }

    fn place(&self, hash: FlowHash) -> Option<usize> {
        let mask = self.entries.len().checked_sub(1)?;
        Some(hash.0 as usize & mask)
    }
}

/// A table with all entries unset.
fn flow_table(rps_flow_cnt: u32) -> Vec<DevFlow> {
    let len = if rps_flow_cnt > 0 { rps_flow_cnt.next_power_of_two() } else { 0 };
    vec![DevFlow { cpu: None, last_qtail: 0 }; len as usize]
}

#[cfg(test)]
mod tests {
    use forebay_rx::steer::CpuLoad;
    use forebay_sys::random::Random;

    use super::*;
    use crate::rules::Rules;
    use crate::scenario::{Overrides, Situation};

    const CPUS: u16 = 4;

    fn rss_plus_plus(situation: Situation) -> KernelMachine {
        let overrides = Overrides { cpus: Some(CPUS), ..Overrides::default() };
        let scenario = situation.draw(overrides, &mut Random::new(1));
        let scenario = Rules::RssPlusPlus.applied_to(scenario);
        let plan = scenario.traffic.clone();
        let traffic = Traffic::new(plan, scenario.packets, scenario.queues, Random::new(2));
        KernelMachine::new(&scenario, &traffic)
    }

    fn cpus_of(machine: &KernelMachine) -> Vec<Option<CpuId>> {
        let mut cpus: Vec<_> = (1..2_000).map(|hash| machine.by_hash(FlowHash(hash))).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }

    /// Two assignments, between which only one CPU had work, and packets of each hash.
    fn assign(machine: &mut KernelMachine) {
        let busy = |busy_ns| CpuLoad { busy_ns, ..CpuLoad::default() };
        let indirection = machine.indirection.as_mut().unwrap();
        (1..2_000).for_each(|hash| indirection.count(FlowHash(hash)));
        indirection.assign(1_000_000_000, &[0, 0, 9_000_000, 0].map(busy));
    }

    #[test]
    fn rss_follows_the_mask() {
        let mut machine = rss_plus_plus(Situation::MaskChange);
        for cpus in [vec![CpuId(1), CpuId(2)], vec![CpuId(3)], vec![]] {
            let mask = SimChange::RpsCpus(cpus.iter().copied().collect());
            machine.change(&mask, Now { ns: 0 }, &mut Laws::default(), &mut Vec::new());
            let expected =
                if cpus.is_empty() { vec![None] } else { cpus.into_iter().map(Some).collect() };
            assert_eq!(cpus_of(&machine), expected);
        }
    }

    #[test]
    fn rss_assigns_within_the_mask() {
        let mut machine = rss_plus_plus(Situation::Elephant);
        assert_eq!(cpus_of(&machine), [1, 2, 3].map(|cpu| Some(CpuId(cpu))));
        assign(&mut machine);
        assert_eq!(cpus_of(&machine), [1, 2, 3].map(|cpu| Some(CpuId(cpu))));
    }
}
