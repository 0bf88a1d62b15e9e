//! Construction of the path for a scenario.

use std::sync::Arc;

use forebay_buf::pool::{ChunkClass, MIN_CHUNK_BYTES, Pool, carve, region_bytes};
use forebay_buf::{Position, Region};
use forebay_rx::arrive::Burst;
use forebay_rx::coalesce::CoalesceConfig;
use forebay_rx::intake::IntakeConfig;
use forebay_rx::parse::Verify;
use forebay_rx::steer::{BalanceBoard, SockFlowTable, SteerConfig};
use forebay_rx::{CpuId, Delivery, Intake, RxQueue};

use super::application::SeenByReader;
use super::reassembly::SimReassembly;
use super::{PathMachine, SimCpu, SimQueue};
use crate::action::{Action, SimCoalesceAt};
use crate::cpu_set::CpuSet;
use crate::scenario::Scenario;
use crate::traffic::Traffic;

/// Number of frames that each CPU owns; one that polls has as many for every [`CPUS_A_POOL`].
const POOL_FRAMES: u32 = 4_096;

/// Number of CPUs for whose backlogs one CPU's frames suffice. A frame that finds no memory is not
/// steered, and liveness would judge a move by packets that never arrived.
const CPUS_A_POOL: u16 = 4;

pub(super) fn machine(scenario: &Scenario, traffic: &Traffic) -> PathMachine {
    let knobs = &scenario.knobs;
    let sock_flows = sock_flow_table(knobs.sock_flow_entries, scenario.cpus);
    let start = Position(knobs.start);
    let capacity = ring_capacity(scenario);
    let board = Arc::new(BalanceBoard::new(scenario.queues.into(), scenario.cpus.into()));
    let mut queues: Vec<_> = (0..scenario.queues)
        .map(|queue| {
            let mut intake = intake(scenario, traffic, RxQueue(queue));
            intake.set_sock_flows(sock_flows.clone(), 0);
            intake.set_board(Arc::clone(&board));
            intake.set_balance(knobs.balance, 0);
            SimQueue { intake, burst: Burst::default(), changed: false }
        })
        .collect();
    let cpus = (0..scenario.cpus).map(CpuId).map(|cpu| {
        let lanes = queues.iter_mut();
        let lanes = lanes.map(|queue| queue.intake.connect(cpu, capacity, start, true)).collect();
        let delivery = Delivery::new(cpu, lanes, knobs.batch_max as usize);
        SimCpu { delivery, coalesce_is_stale: true, frames_done: 0 }
    });
    let cpus: Vec<_> = cpus.collect();
    for queue in &mut queues {
        queue.intake.set_rps_cpus(knobs.rps_cpus.iter(), 0);
    }
    PathMachine {
        pools: pools(scenario),
        seen: SeenByReader::new(queues.len(), cpus.len(), start),
        sock_flows,
        coalesce: knobs.coalesce,
        gro_flush_timeout_ns: knobs.gro_flush_timeout_ns,
        merges: knobs.coalesce != SimCoalesceAt::Nowhere,
        epoch: 0,
        rps_cpus: knobs.rps_cpus,
        running: CpuSet::range(0, scenario.cpus),
        netdev_max_backlog: knobs.netdev_max_backlog,
        hold_max: knobs.hold_max,
        batch_max: knobs.batch_max,
        recording: None,
        timeline: None,
        reassembly: scenario.traffic.fragments.then(|| SimReassembly::new(scenario.cpus)),
        queues,
        cpus,
    }
}

/// The socket-flow table; `None` without entries.
pub(super) fn sock_flow_table(entries: u32, cpus: u16) -> Option<Arc<SockFlowTable>> {
    (entries > 0).then(|| Arc::new(SockFlowTable::new(entries, cpus.into())))
}

/// Configuration for merging segments at `place`; `None` if they are merged elsewhere.
pub(super) fn coalesce_config(
    (at, place): (SimCoalesceAt, SimCoalesceAt),
    gro_flush_timeout_ns: u64,
) -> Option<CoalesceConfig> {
    (at == place).then(|| CoalesceConfig { gro_flush_timeout_ns, ..CoalesceConfig::default() })
}

fn intake(scenario: &Scenario, traffic: &Traffic, queue: RxQueue) -> Intake {
    let knobs = &scenario.knobs;
    Intake::new(IntakeConfig {
        queue,
        cpus: scenario.cpus.into(),
        verify: Verify::Checksums,
        completes_checksums: false,
        hasher: Arc::clone(traffic.hasher()),
        coalesce: coalesce_config(
            (knobs.coalesce, SimCoalesceAt::Arrive),
            knobs.gro_flush_timeout_ns,
        ),
        steer: SteerConfig {
            polling_cpu: CpuId(queue.0),
            rps_flow_cnt: knobs.rps_flow_cnt,
            move_after: knobs.move_after,
            hold_max: knobs.hold_max,
            spread: knobs.spread,
            batch_max: knobs.batch_max,
        },
        netdev_max_backlog: knobs.netdev_max_backlog,
    })
}

/// Ring capacity for the largest `netdev_max_backlog` of the run.
fn ring_capacity(scenario: &Scenario) -> u32 {
    let limits = scenario.recurring.iter().filter_map(|recurring| match recurring.action {
        Action::MaxBacklog(limits) => limits.iter().max().copied(),
        _ => None,
    });
    let largest = limits.fold(scenario.knobs.netdev_max_backlog, u32::max);
    (largest + 1).next_power_of_two()
}

fn pools(scenario: &Scenario) -> Vec<Pool> {
    let polling_frames = POOL_FRAMES * u32::from(scenario.cpus.div_ceil(CPUS_A_POOL));
    let share = |cpu: u16| {
        let chunks = if cpu < scenario.queues { polling_frames } else { POOL_FRAMES };
        vec![ChunkClass { chunk_bytes: MIN_CHUNK_BYTES, chunks }]
    };
    let shares: Vec<_> = (0..scenario.cpus).map(share).collect();
    let region = Region::allocate(region_bytes(&shares));
    carve(region, &shares).expect("the region is as large as asked for")
}
