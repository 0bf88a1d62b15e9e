use std::cell::Cell;
use std::fs;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use forebay_buf::Position;
use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
use forebay_rx::backlog::Backlogs;
use forebay_rx::delivery::Batch;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::steer::{CpuLoad, SpreadPolicy};
use forebay_rx::{Packet, RxQueue, Source};
use forebay_sys::Event;
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;

use super::*;
use crate::busy_poll::Loan;
use crate::cpu_thread::CpuThread;
use crate::limits::BURST_MAX;
use crate::trace::Trace;
use crate::{Config, Engine};

/// Device that receives nothing.
struct Silent;

impl Source for Silent {
    fn poll(&mut self, _: PollRequest, _: &mut Pool, _: &mut Burst) -> Result<Polled, SourceError> {
        Ok(Polled::Idle)
    }
}

/// Handler that queues each packet again, as CPUs do that are faster than this one.
struct Feeding {
    backlogs: Backlogs,
    handled: u32,
}

impl Handler for Feeding {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        self.handled += u32::try_from(batch.packets.len()).unwrap();
        // Ends a turn that does not end by itself.
        if self.handled > 1 << 20 {
            return;
        }
        let cpu = batch.cpu;
        for packet in batch.packets.drain(..) {
            self.backlogs.enqueue(cpu, packet, |_| unreachable!("there are no notes")).unwrap();
        }
        self.backlogs.publish(0).for_each(drop);
    }
}

/// Device that receives a frame at a time, each 2^30 frames after the one before.
struct Sparse(u64);

impl Source for Sparse {
    fn poll(
        &mut self,
        _: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        let mut frame = pool.allocate(60).unwrap();
        frame.set_len(60);
        let arrival = Arrival::of_frame(self.0);
        self.0 += 1 << 30;
        burst.packets.push(Packet::received(frame, arrival, 60, Link::Ethernet));
        Ok(Polled::Idle)
    }
}

/// Device that receives one frame.
struct Single(Option<Sparse>);

impl Source for Single {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.0.take().map_or(Ok(Polled::Idle), |mut sparse| sparse.poll(ask, pool, burst))
    }
}

/// Device that sends five packets in each turn, and receives one.
struct Sending(Sparse);

impl Source for Sending {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.0.poll(ask, pool, burst)
    }

    fn transmit(&mut self, _: &mut Pool) -> usize {
        5
    }
}

/// Device with frames for which there is no memory: its descriptor stays readable.
struct Starved(Event);

impl Source for Starved {
    fn poll(&mut self, _: PollRequest, _: &mut Pool, _: &mut Burst) -> Result<Polled, SourceError> {
        Ok(Polled::Ready)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.descriptor())
    }
}

struct Idler;

impl Handler for Idler {
    fn handle(&mut self, _: &mut Batch<'_>) {}
}

fn one_cpu() -> Config {
    let cpus = CpuList::new([CpuId(0)]);
    Config { cpus, spread: SpreadPolicy::WhenBusy, ..Config::live() }
}

/// Load of the only CPU.
fn load_of(shared: &EngineState) -> CpuLoad {
    let mut loads = Vec::new();
    shared.cpu_loads(&mut loads);
    loads.remove(0)
}

/// Worker of one CPU over this source.
fn worker<H: Handler + 'static>(
    config: &Config,
    source: impl Source + 'static,
    handler: H,
) -> Worker<H> {
    let mut handler = Some(handler);
    let handler = |_| handler.take().unwrap();
    let sources: Vec<Box<dyn Source>> = vec![Box::new(source)];
    let engine = Engine::build(config, sources, Clock::virtual_at_zero(), handler);
    engine.unwrap().workers.remove(0)
}

#[test]
fn promise_3_turn_delivers_a_burst_at_most() {
    let most = i32::MAX.cast_unsigned();
    for (dev_weight, dev_weight_rx_bias) in [(most, 1), (64, most), (most, most)] {
        let cpu = CpuId(0);
        let mut config = Config { cpus: CpuList::new([cpu]), ..Config::live() };
        config.limits = Limits {
            dev_weight,
            dev_weight_rx_bias,
            netdev_budget: most,
            netdev_budget_usecs: most,
            ..config.limits
        };
        let mut backlogs = Backlogs::new(RxQueue(0), 1, config.netdev_max_backlog);
        let backlog = backlogs.connect(cpu, config.backlog_capacity(), Position(0), false);
        let mut worker = worker(&config, Silent, Feeding { backlogs, handled: 0 });
        worker.delivery = Delivery::new(cpu, vec![backlog], 64);
        for number in 0..64 {
            let mut frame = worker.queues[0].pool.allocate(60).unwrap();
            frame.set_len(60);
            let packet = Packet::received(frame, Arrival(number), 60, Link::Ethernet);
            worker.handler.backlogs.enqueue(cpu, packet, |_| unreachable!()).unwrap();
        }
        worker.handler.backlogs.publish(0).for_each(drop);
        worker.turn(0);
        assert_eq!(worker.handler.handled, BURST_MAX, "{dev_weight} times {dev_weight_rx_bias}");
        assert!(worker.delivery.has_work(), "more was queued meanwhile");
    }
}

#[test]
fn lost_frames_have_full_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let trace = Trace::open(directory.path(), false, false).unwrap();
    trace.begin().unwrap();
    let cpus = CpuList::new([CpuId(0)]);
    let config = Config { cpus, trace: Some(Arc::clone(&trace)), ..Config::live() };
    let mut worker = worker(&config, Sparse(0), Idler);
    for _ in 0..9 {
        worker.turn(0);
    }
    worker.life = ThreadState::Terminating;
    worker.turn(0);
    worker.recover(None);
    assert_eq!(trace.finish("{}").len(), 0);
    let rows = fs::read_to_string(directory.path().join("drop.csv")).unwrap();
    let row = format!("0,{},cpu_lost,", 9_u64 << 30);
    assert!(rows.lines().last().unwrap().starts_with(&row), "{rows}");
}

#[test]
fn rps_s1_inline_work_counts_as_delivery() {
    let worker = worker(&one_cpu(), Sparse(0), Idler);
    let (clock, shared) = (worker.shared.clock.clone(), Arc::clone(&worker.shared));
    let mut cpu = CpuThread::new(Box::new(worker), None);
    let pass = |ms: u64| clock.advance_to(clock.now_ns() + ms * 1_000_000);
    let times =
        || (load_of(&shared).busy_ns / 1_000_000, load_of(&shared).delivering_ns / 1_000_000);
    pass(1_000); // without a packet: the thread may have slept
    assert!(cpu.turn_until(|| true));
    assert_eq!(times(), (0, 0));
    pass(5);
    assert!(cpu.turn_until(|| true));
    assert_eq!(times(), (5, 5));
    pass(7);
    assert!(cpu.turn_once());
    assert_eq!(times(), (12, 12));
    pass(9); // answers wait for another thread
    let looks = Cell::new(0);
    let has_answered = || {
        looks.set(looks.get() + 1);
        pass(u64::from((2..=3).contains(&looks.get())));
        looks.get() > 3
    };
    assert!(cpu.turn_until_answered(|| looks.get() > 3, has_answered));
    assert_eq!(times(), (23, 23));
    let load = load_of(&shared);
    assert_eq!((load.packets, load.frames), (cpu.turns(), cpu.turns()), "each turn has its budget");
    assert_eq!(shared.squeezed(0), 0);
}

#[test]
fn rps_s1_others_datagrams_are_work() {
    let worker = worker(&one_cpu(), Single(Some(Sparse(0))), Idler);
    let (clock, shared) = (worker.shared.clock.clone(), Arc::clone(&worker.shared));
    let mut cpu = CpuThread::new(Box::new(worker), None);
    let pass = |ms: u64| clock.advance_to(clock.now_ns() + ms * 1_000_000);
    assert!(cpu.turn_until(|| true));
    cpu.worker().delivery.release(); // as if another CPU had delivered it
    pass(5);
    assert!(cpu.turn_until(|| true));
    let times = |load: CpuLoad| (load.busy_ns / 1_000_000, load.delivering_ns / 1_000_000);
    assert_eq!(times(load_of(&shared)), (5, 0));
    pass(7); // nothing was received
    assert!(cpu.turn_until(|| true));
    assert_eq!(times(load_of(&shared)), (5, 0));
}

#[test]
fn rps_s1_sent_packets_are_not_polled() {
    let mut config = one_cpu();
    config.limits.netdev_budget = 6;
    let mut worker = worker(&config, Sending(Sparse(0)), Idler);
    let shared = Arc::clone(&worker.shared);
    for turns in 1..=3 {
        assert_eq!(worker.turn(0), Activity::Worked(7));
        let load = load_of(&shared);
        assert_eq!((load.frames, load.packets), (turns, turns));
    }
    assert_eq!(shared.squeezed(0), 0, "all was taken");
}

#[test]
fn cpu_sleeps_beside_readable_starved_queue() {
    for is_lent in [true, false] {
        let event = Event::new().unwrap();
        event.signal();
        let worker = worker(&Config { spin_max_ns: 0, ..one_cpu() }, Starved(event), Idler);
        let loan = Arc::new(Loan::new(Arc::clone(&worker.shared), 0));
        let mut cpu = CpuThread::new(Box::new(worker), Some(loan).filter(|_| is_lent));
        cpu.set_contended(true); // it does not spin, whatever it waits for
        let (began, mut looks) = (Instant::now(), 0);
        cpu.turn_until(|| {
            looks += 1;
            looks > 100 // two for each sleep
        });
        assert!(began.elapsed() > Duration::from_millis(2), "{:?}", began.elapsed());
    }
}

#[test]
fn promise_3_fence_is_lifted_without_traffic() {
    let mut worker = worker(&one_cpu(), Single(Some(Sparse(0))), Idler);
    worker.delivery.set_read_inline(true);
    assert_eq!(worker.turn(0), Activity::Worked(2));
    worker.shared.change(&"rps_flow_cnt=64".parse().unwrap()).unwrap();
    for _ in 0..3 {
        let Activity::IdleUntil(due_ns) = worker.turn(0) else { panic!("there is no work") };
        assert!(due_ns.is_some(), "the packet is not read yet");
    }
    worker.delivery.release();
    let activity = [worker.turn(0), worker.turn(0)];
    assert_eq!(activity[1], Activity::IdleUntil(None), "nothing waits any more");
}
