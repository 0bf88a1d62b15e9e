//! The engine on real threads.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use path::Handler;

use super::Outcome;
use super::idle::Idle;
use super::queue::Activity;
use super::shared::Shared;
use super::worker::{Worker, outcome};
use crate::error::{Error, Result};
use crate::sys;

/// How long a CPU sleeps at most while its queues wait for other CPUs, which do not wake it.
const BLOCKED_SLEEP: Duration = Duration::from_micros(50);

/// Runs each worker on a thread of its own until all of them end.
pub(super) fn run<H: Handler + 'static>(
    workers: Vec<Worker<H>>,
    shared: &Arc<Shared>,
) -> Result<Outcome<H>> {
    let mut threads = Vec::new();
    let mut failed = None;
    for worker in workers {
        let cpu = worker.cpu;
        let spawned =
            thread::Builder::new().name(format!("forebay-cpu{cpu}")).spawn(move || guarded(worker));
        match spawned {
            Ok(thread) => threads.push((cpu, thread)),
            Err(source) => {
                failed = Some(Error::Thread { cpu, source });
                shared.abort();
                break;
            }
        }
    }
    let started_ns = shared.start_when_ready(threads.len());
    let mut ended = Vec::new();
    for (cpu, thread) in threads {
        match thread.join() {
            Ok(Ok(worker)) => ended.push(worker),
            Ok(Err(message)) => failed = Some(Error::Panicked { cpu, message }),
            Err(_) => failed = Some(Error::Panicked { cpu, message: String::new() }),
        }
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(outcome(ended, shared, shared.clock.now_ns() - started_ns)),
    }
}

/// Runs a worker. If it panics, what it was to drain never will be, so the others end at once.
/// That is for programs built with unwinding, as tests are; where a panic aborts, as in releases of
/// the `forebay` program, nothing comes back here.
fn guarded<H: Handler>(mut worker: Worker<H>) -> Result<Worker<H>, String> {
    let caught = panic::catch_unwind(AssertUnwindSafe(|| work(&mut worker)));
    caught.map_err(|payload| {
        worker.shared.abort();
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
    })?;
    Ok(worker)
}

fn work<H: Handler>(worker: &mut Worker<H>) {
    let shared = Arc::clone(&worker.shared);
    // A CPU that does not exist here, or may not be used, is a thread that goes where it is put.
    let _ = sys::pin_to(worker.cpu);
    sys::make_timers_precise();
    shared.bell(worker.index).belongs_to_this_thread();
    shared.ready_to_start();
    let mut idle = Idle::new(shared.spin_max_ns);
    let mut turn_ns = shared.clock.now_ns();
    while !shared.is_aborted() {
        let activity = worker.turn();
        let now_ns = shared.clock.now_ns();
        if let Activity::Worked(_) = activity {
            shared.add_busy(worker.index, now_ns - turn_ns);
            idle.worked(turn_ns);
            turn_ns = now_ns;
            continue;
        }
        if worker.has_ended() {
            return;
        }
        if idle.should_sleep(now_ns, activity == Activity::Blocked) {
            sleep(worker, &shared, activity, now_ns);
        } else {
            std::hint::spin_loop();
        }
        turn_ns = shared.clock.now_ns();
    }
}

fn sleep<H: Handler>(worker: &mut Worker<H>, shared: &Shared, activity: Activity, now_ns: u64) {
    let at_most = match activity {
        Activity::Worked(_) => return,
        Activity::Blocked => Some(BLOCKED_SLEEP),
        Activity::IdleUntil(due_ns) => {
            due_ns.map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(now_ns)))
        }
        Activity::Ended => None,
    };
    shared.bell(worker.index).sleep(at_most, || worker.has_business());
}
