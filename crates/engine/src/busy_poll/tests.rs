use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{self, JoinHandle, ThreadId};

use forebay_buf::Pool;
use forebay_rx::arrive::{Burst, PollRequest, Polled, SourceError};
use forebay_rx::delivery::Batch;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::{CpuId, Packet, Source};
use forebay_sys::Event;
use forebay_sys::clock::Clock;
use forebay_sys::cpu_list::CpuList;

use super::*;
use crate::cpu_thread::CpuThread;
use crate::idle::{SPIN_ALWAYS_NS, SPIN_MAX_NS};
use crate::knobs::Change;
use crate::{Config, Engine, Stopper};

mod sends;
mod spins;

/// Frames that a test puts into a source.
#[derive(Default)]
struct Fed {
    frames: AtomicU64,
    /// Number of polls.
    polls: AtomicU64,
    /// Number of frames handled or lost, and the threads that handled some.
    handled: Mutex<(u64, Vec<ThreadId>)>,
    /// True while a handler is to panic.
    panics: AtomicBool,
    /// True while readers are behind.
    are_behind: AtomicBool,
    /// Packets queued for transmission, of which a call transmits at most this many.
    to_send: AtomicU64,
    sends_max: AtomicU64,
    /// True while frames that were sent do not come back.
    is_sending: AtomicBool,
    /// True while packets are received that the source reports as work.
    is_received: AtomicBool,
}

/// Source with a descriptor, which only the test makes readable.
struct FedSource {
    fed: Arc<Fed>,
    event: Arc<Event>,
    taken: u64,
}

impl Source for FedSource {
    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        self.event.clear();
        self.fed.polls.fetch_add(1, Ordering::Relaxed);
        while self.taken < self.fed.frames.load(Ordering::Acquire) && burst.len() < ask.max {
            let Some(mut frame) = pool.allocate(60) else { break };
            frame.set_len(60);
            frame.data_mut()[..8].copy_from_slice(&self.taken.to_be_bytes());
            let arrival = Arrival::of_frame(self.taken);
            burst.packets.push(Packet::received(frame, arrival, 60, Link::Ethernet));
            self.taken += 1;
        }
        Ok(match burst.is_empty() {
            true if ask.is_last => Polled::Exhausted,
            false if burst.len() == ask.max => Polled::Ready,
            _ => Polled::Idle,
        })
    }

    fn transmit(&mut self, _: &mut Pool) -> usize {
        let most = self.fed.sends_max.load(Ordering::Relaxed);
        let sent = self.fed.to_send.load(Ordering::Relaxed).min(most);
        self.fed.to_send.fetch_sub(sent, Ordering::Relaxed);
        usize::try_from(sent).unwrap()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.descriptor())
    }

    fn has_work(&mut self) -> bool {
        self.has_unsent() || self.fed.is_received.load(Ordering::Relaxed)
    }

    fn has_unsent(&mut self) -> bool {
        self.fed.to_send.load(Ordering::Relaxed) > 0
    }

    fn is_sending(&self) -> bool {
        self.fed.is_sending.load(Ordering::Relaxed)
    }
}

/// Handler that checks the order of the frames.
struct Ordered(Arc<Fed>);

impl Handler for Ordered {
    fn handle(&mut self, batch: &mut Batch<'_>) {
        let mut handled = self.0.handled.lock().unwrap();
        if self.0.panics.swap(false, Ordering::Relaxed) {
            handled.0 += batch.packets.len() as u64;
            drop(handled);
            panic!("as the test asks");
        }
        for packet in batch.packets.iter() {
            assert_eq!(packet.frame.data()[..8], handled.0.to_be_bytes(), "out of order");
            handled.0 += 1;
        }
        handled.1.push(thread::current().id());
    }

    fn are_readers_behind(&mut self) -> bool {
        self.0.are_behind.load(Ordering::Relaxed)
    }
}

/// A running engine of one CPU, whose worker is lent.
struct Rig {
    fed: Arc<Fed>,
    event: Arc<Event>,
    state: Arc<EngineState>,
    busy_poll: Arc<dyn BusyPoll>,
    loan: Arc<Loan<Ordered>>,
    stopper: Stopper,
    run: JoinHandle<u64>,
}

impl Rig {
    fn start() -> Self {
        Self::start_with(64, CpuThread::turn_to_the_end)
    }

    fn start_with(
        batch_max: u32,
        application: impl Fn(&mut CpuThread<Ordered>) + Send + Sync + 'static,
    ) -> Self {
        let (fed, event) = (Arc::<Fed>::default(), Arc::new(Event::new().unwrap()));
        let source = FedSource { fed: Arc::clone(&fed), event: Arc::clone(&event), taken: 0 };
        let cpus = CpuList::new([CpuId(0)]);
        let config = Config { cpus, spin_max_ns: 0, batch_max, ..Config::live() };
        let handler = |_| Ordered(Arc::clone(&fed));
        let sources: Vec<Box<dyn Source>> = vec![Box::new(source)];
        let mut engine = Engine::build(&config, sources, Clock::machine(), handler).unwrap();
        let busy_poll = engine.busy_poll();
        let loan = Arc::clone(&engine.loans.as_ref().unwrap()[0]);
        let (state, stopper) = (engine.state(), engine.stopper());
        let run = thread::spawn(move || engine.run_with(application).unwrap().cpus[0].replaced);
        Self { fed, event, state, busy_poll, loan, stopper, run }
    }

    /// Waits until the CPU's thread sleeps, or is about to.
    fn until_asleep(&self) {
        while !self.state.has_started() || !self.state.cpu_waker(0).is_asleep() {
            thread::yield_now();
        }
    }

    fn put(&self, frames: u64) {
        self.fed.frames.fetch_add(frames, Ordering::Release);
    }

    fn handled(&self) -> u64 {
        self.fed.handled.lock().unwrap().0
    }

    fn until_handled(&self, frames: u64) {
        while self.handled() < frames {
            thread::yield_now();
        }
    }

    /// Puts frames in without a signal, and turns the CPU until they are handled.
    fn handle_here(&self, frames: u64) {
        let before = self.handled();
        self.put(frames);
        while self.handled() < before + frames {
            self.busy_poll.before_wait();
            self.busy_poll.after_wait();
            thread::yield_now();
        }
    }

    /// Ends the run, and returns how often the CPU got a new thread.
    fn end(self) -> u64 {
        self.stopper.stop();
        self.run.join().unwrap()
    }
}

/// A CPU that the test turns, and what its threads and the application share.
fn lone_cpu(spin_max_ns: u64, fed: &Arc<Fed>) -> (CpuThread<Ordered>, Borrowers<Ordered>) {
    let event = Arc::new(Event::new().unwrap());
    let source = FedSource { fed: Arc::clone(fed), event, taken: 0 };
    let config = Config { cpus: CpuList::new([CpuId(0)]), spin_max_ns, ..Config::live() };
    let handler = |_| Ordered(Arc::clone(fed));
    let sources: Vec<Box<dyn Source>> = vec![Box::new(source)];
    let mut engine = Engine::build(&config, sources, Clock::virtual_at_zero(), handler).unwrap();
    let loan = Arc::new(Loan::new(engine.state(), 0));
    let borrowers = Borrowers::new(Arc::new([Arc::clone(&loan)]));
    (CpuThread::new(Box::new(engine.workers.remove(0)), Some(loan)), borrowers)
}

#[test]
fn exe_9_contended_cpu_lets_readers_catch_up() {
    for (are_behind, is_contended, frames, spin_max_ns, sleeps) in [
        (true, true, 3, SPIN_MAX_NS, true),
        (true, true, 63, SPIN_MAX_NS, true),
        (true, true, 200, SPIN_MAX_NS, false), // more are pending
        (true, true, 3, SPIN_ALWAYS_NS, false),
        (true, false, 3, SPIN_MAX_NS, false),
        (false, true, 3, SPIN_MAX_NS, false),
    ] {
        let fed = Arc::<Fed>::default();
        let (mut cpu, _borrowers) = lone_cpu(spin_max_ns, &fed);
        cpu.set_contended(is_contended);
        fed.are_behind.store(are_behind, Ordering::Relaxed);
        fed.frames.store(frames, Ordering::Relaxed);
        let mut polls = Vec::new();
        cpu.turn_until(|| {
            polls.push(fed.polls.load(Ordering::Relaxed));
            polls.len() >= 2
        });
        // It is asked at the end of each turn, and before each sleep.
        let expected = if sleeps { [1, 1] } else { [1, 2] };
        assert_eq!(polls[..2], expected, "{:?}", (are_behind, is_contended, frames, spin_max_ns));
    }
}

#[test]
fn rfs_6_own_reader_declares_packets_processed() {
    let fed = Arc::<Fed>::default();
    let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, &fed);
    // (frames until then, turns until the caller has something to read, whether it was given packets)
    for (frames, turns, has_some) in [(3, 1, true), (3, 1, false), (6, 2, false), (9, 1, true)] {
        fed.frames.store(frames, Ordering::Relaxed);
        let mut left = turns;
        cpu.turn_until(|| {
            left -= 1;
            left == 0
        });
        assert_eq!(fed.handled.lock().unwrap().0, frames);
        assert_eq!(cpu.worker().delivery.has_unreleased(), has_some, "{frames} frames");
    }
    cpu.turn_once();
    assert!(!cpu.worker().delivery.has_unreleased(), "the caller has come back");
}

/// A CPU whose thread reads what it delivers.
fn inline_cpu(fed: &Arc<Fed>) -> CpuThread<Ordered> {
    let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, fed);
    cpu.turn_until(|| true);
    cpu
}

fn handled(fed: &Fed) -> u64 {
    fed.handled.lock().unwrap().0
}

#[test]
fn rfs_6_packets_wait_for_sent_answers() {
    let fed = Arc::<Fed>::default();
    let mut cpu = inline_cpu(&fed);
    fed.frames.store(3, Ordering::Relaxed);
    cpu.turn_until(|| true);
    let (mut turns, mut looks) = (0, 0);
    let is_ready = || {
        turns += 1;
        turns == 3
    };
    let has_answered = || {
        looks += 1;
        false
    };
    cpu.turn_until_answered(is_ready, has_answered);
    assert_eq!((looks, cpu.worker().delivery.has_unreleased()), (3, true));
    cpu.turn_until_answered(|| true, || true);
    assert!(!cpu.worker().delivery.has_unreleased());
}

#[test]
fn promise_2_run_ends_behind_grown_ring() {
    let fed = Arc::<Fed>::default();
    let mut cpu = inline_cpu(&fed);
    let state = Arc::clone(&cpu.worker().shared);
    // Turns by a borrower, before and after the ring has grown; then the source ends.
    fed.frames.store(3, Ordering::Relaxed);
    cpu.worker().timed_turn(0);
    state.change(&Change::NetdevMaxBacklog(3000)).unwrap();
    fed.frames.store(6, Ordering::Relaxed);
    cpu.worker().timed_turn(0);
    state.stop();
    cpu.worker().timed_turn(0);
    assert!(!cpu.worker().has_ended(), "the larger ring has three");
    while cpu.turn_until(|| true) {}
    assert_eq!(handled(&fed), 6);
}

#[test]
fn promise_2_borrower_leaves_room_for_reader() {
    let fed = Arc::<Fed>::default();
    let mut cpu = inline_cpu(&fed);
    let state = Arc::clone(&cpu.worker().shared);
    state.change(&Change::NetdevMaxBacklog(63)).unwrap();
    fed.frames.store(200, Ordering::Relaxed);
    let loan = Loan::new(state, 0);
    for round in 1..=3 {
        let mut worker = cpu.into_worker();
        let mut lent = Lent { worker, until_ns: None };
        assert_eq!(loan.turn_lent(&mut lent).needed, Needed::Now);
        worker = lent.worker;
        assert_eq!((handled(&fed), worker.delivery.has_unreleased()), (round * 64, true));
        worker.delivery.release(); // the reader has come back
        cpu = CpuThread::new(worker, None);
    }
}

#[test]
fn rfs_6_dead_threads_release_nothing_unread() {
    let fed = Arc::<Fed>::default();
    let mut cpu = inline_cpu(&fed);
    fed.frames.store(3, Ordering::Relaxed);
    cpu.worker().timed_turn(0);
    fed.panics.store(true, Ordering::Relaxed);
    fed.frames.store(4, Ordering::Relaxed);
    let turn = AssertUnwindSafe(|| cpu.worker().timed_turn(0));
    catch_unwind(turn).unwrap_err();
    cpu.worker().recover(Some("as the test asks".into()));
    assert!(cpu.worker().delivery.has_unreleased(), "three packets wait in the socket");
    cpu.turn_until(|| true);
    assert!(!cpu.worker().delivery.has_unreleased(), "the new thread has read them");
}

#[test]
fn rfs_6_killed_batch_is_not_processed() {
    let fed = Arc::<Fed>::default();
    let (mut cpu, _borrowers) = lone_cpu(SPIN_MAX_NS, &fed);
    cpu.worker().shared.change(&Change::Kill(CpuId(0))).unwrap();
    fed.frames.store(3, Ordering::Relaxed);
    for _ in 0..2 {
        // The application, then what a thread does after it.
        cpu.turn_to_the_end();
        assert_eq!(cpu.worker().life, ThreadState::Terminated);
        assert!(cpu.worker().delivery.has_unreleased());
    }
}

#[test]
fn rfs_6_borrower_wakes_cpu_that_reads() {
    let looks = Arc::new(AtomicU64::new(0));
    let looked = Arc::clone(&looks);
    let rig = Rig::start_with(64, move |cpu| {
        cpu.turn_until(|| {
            looked.fetch_add(1, Ordering::Relaxed);
            false
        });
    });
    for _ in 0..20 {
        rig.until_asleep();
        let before = looks.load(Ordering::Relaxed);
        rig.handle_here(1);
        while looks.load(Ordering::Relaxed) == before {
            thread::yield_now();
        }
    }
    rig.end();
}

#[test]
fn exe_9_threads_learn_that_readers_are_behind() {
    let fed = Arc::<Fed>::default();
    let (mut cpu, borrowers) = lone_cpu(SPIN_MAX_NS, &fed);
    cpu.set_contended(true);
    fed.are_behind.store(true, Ordering::Relaxed);
    let has_seen = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&has_seen);
    let watcher = thread::spawn(move || {
        while !borrowers.is_moderated() {
            thread::yield_now();
        }
        seen.store(true, Ordering::Relaxed);
        borrowers
    });
    fed.frames.store(1, Ordering::Relaxed);
    cpu.turn_until(|| {
        fed.frames.fetch_add(1, Ordering::Relaxed);
        has_seen.load(Ordering::Relaxed)
    });
    let borrowers = watcher.join().unwrap();
    assert!(!borrowers.is_moderated(), "only while the CPU sleeps");
}

#[test]
fn exe_9_waiting_thread_receives_for_itself() {
    let rig = Rig::start();
    for round in 1..=100 {
        rig.until_asleep();
        rig.handle_here(3);
        assert_eq!(rig.handled(), round * 3);
    }
    // Nothing has woken the CPU's thread for the first.
    assert_eq!(rig.fed.handled.lock().unwrap().1[0], thread::current().id());
    rig.end();
}

#[test]
fn exe_9_packets_wake_cpu_after_last_borrower() {
    let rig = Rig::start();
    for round in 0..200_u64 {
        rig.until_asleep();
        // Arriving packets then do not wake the CPU, until a turn finds none or a thread sleeps.
        (0..round % 4).for_each(|_| rig.handle_here(1));
        if round % 3 == 0 {
            rig.busy_poll.suspend();
        }
        if round % 2 == 0 {
            rig.busy_poll.before_wait();
            rig.busy_poll.resume();
            rig.busy_poll.after_wait();
        }
        let before = rig.handled();
        rig.put(1);
        rig.event.signal();
        // By the CPU's own thread, since this one turns it no more.
        rig.until_handled(before + 1);
    }
    rig.end();
}

#[test]
fn exe_9_panic_of_borrower_is_the_handlers() {
    let rig = Rig::start();
    rig.until_asleep();
    rig.fed.panics.store(true, Ordering::Relaxed);
    rig.put(1);
    let panicking = AssertUnwindSafe(|| {
        while rig.fed.panics.load(Ordering::Relaxed) {
            rig.busy_poll.before_wait();
            thread::yield_now();
        }
    });
    catch_unwind(panicking).unwrap_err();
    assert!(!is_cpu());
    // The frame is lost with the batch; the CPU goes on by a new thread.
    rig.put(1);
    rig.event.signal();
    rig.until_handled(2);
    assert_eq!(rig.end(), 1);
}

/// Nothing but the panic tells the CPU's thread of the second packet.
#[test]
fn exe_9_panic_of_borrower_wakes_cpu() {
    let rig = Rig::start_with(1, CpuThread::turn_to_the_end);
    rig.until_asleep();
    rig.fed.panics.store(true, Ordering::Relaxed);
    rig.put(2);
    catch_unwind(AssertUnwindSafe(|| {
        while rig.fed.panics.load(Ordering::Relaxed) {
            rig.busy_poll.before_wait();
            rig.busy_poll.after_wait();
        }
    }))
    .unwrap_err();
    rig.until_handled(2);
    assert_eq!(rig.loan.suspended_until_ns(), 0);
    rig.busy_poll.suspend();
    assert!(rig.loan.suspended_until_ns() > 0, "no thread waits any more");
    assert_eq!(rig.end(), 1);
}

#[test]
fn exe_9_ended_suspension_stays_ended() {
    let (_cpu, borrowers) = lone_cpu(SPIN_MAX_NS, &Arc::default());
    let loan = &borrowers.loans[0];
    loan.was_lent.store(true, Ordering::Relaxed);
    loan.suspend();
    let until_ns = loan.suspended_until_ns();
    assert!(until_ns > 0);
    loan.used_ns.store(1, Ordering::Relaxed);
    loan.prolong(until_ns);
    assert_eq!(loan.suspended_until_ns(), until_ns + 1);
    loan.resume(); // by a thread that waits, too
    loan.prolong(until_ns + 1);
    assert_eq!(loan.suspended_until_ns(), 0);
}

#[test]
fn exe_9_borrowers_and_cpu_keep_order() {
    let rig = Rig::start();
    let is_over = Arc::new(AtomicBool::new(false));
    let borrower = || {
        let (busy_poll, is_over) = (Arc::clone(&rig.busy_poll), Arc::clone(&is_over));
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                busy_poll.before_wait();
                busy_poll.after_wait();
                busy_poll.suspend();
                thread::yield_now();
            }
        })
    };
    let borrowers = [borrower(), borrower()];
    let frames = 20_000;
    for frame in 0..frames {
        rig.put(1);
        if frame % 3 == 0 {
            rig.event.signal();
        }
        if frame % 64 == 0 {
            thread::yield_now();
        }
    }
    rig.event.signal();
    rig.until_handled(frames);
    is_over.store(true, Ordering::Relaxed);
    borrowers.into_iter().for_each(|borrower| borrower.join().unwrap());
    rig.end();
}
