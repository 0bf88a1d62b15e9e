//! Notices to a service manager, by sd_notify(3): a run is ready, its CPUs turn, it ends.
//!
//! They are sent if `NOTIFY_SOCKET` is set, as systemd does for a service of `Type=notify`.

use std::env;
use std::time::Duration;

use forebay_control::Control;
use forebay_engine::{CpuProgress, Stopper};
use forebay_sys::error::Result;
use sd_notify::NotifyState;

use crate::ticker::Ticker;

/// Interval between two looks at the CPUs without a watchdog.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// Looks within the time after which the watchdog acts.
const LOOKS_IN_TIMEOUT: u32 = 20;

/// Sender of notices. Dropping it sends the last one.
pub(crate) struct ServiceNotices(Option<Ticker>);

impl ServiceNotices {
    /// Begins to send notices about a run, if anybody is to get them.
    pub(crate) fn begin(control: Control, stopper: Stopper) -> Result<Self> {
        if env::var_os("NOTIFY_SOCKET").is_none() {
            return Ok(Self(None));
        }
        let timeout = sd_notify::watchdog_enabled();
        let period = timeout.map_or(LOOK_PERIOD, |timeout| timeout / LOOKS_IN_TIMEOUT);
        let mut notices = Notices { has_watchdog: timeout.is_some(), ..Notices::default() };
        let notify = move || {
            let run = control.state();
            let due = notices.due(run.has_started(), stopper.is_asked(), &run.progress());
            due.into_iter().for_each(Notice::send);
        };
        let period = period.min(LOOK_PERIOD);
        Ok(Self(Some(Ticker::every(period, "notifies the service manager", notify)?)))
    }
}

impl Drop for ServiceNotices {
    fn drop(&mut self) {
        if let Some(ticker) = self.0.take() {
            drop(ticker);
            Notice::Stopping.send();
        }
    }
}

/// Notice to the service manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Notice {
    /// All CPUs turn.
    Ready,
    /// Every CPU has made progress.
    Watchdog,
    /// The run ends.
    Stopping,
}

impl Notice {
    fn send(self) {
        let state = match self {
            Self::Ready => NotifyState::Ready,
            Self::Watchdog => NotifyState::Watchdog,
            Self::Stopping => NotifyState::Stopping,
        };
        // Ignored: a service manager that is gone does not end the run.
        let _ = sd_notify::notify(&[state]);
    }
}

/// Notices sent so far, and the progress of the CPUs since the watchdog was last fed.
#[derive(Debug, Default)]
struct Notices {
    has_watchdog: bool,
    is_ready: bool,
    is_stopping: bool,
    /// Last turn of each CPU at the last feed, and true if it has made progress since.
    cpus: Vec<(u64, bool)>,
}

impl Notices {
    /// Notices that are due. The watchdog is fed once every CPU has ended a turn, or was asleep,
    /// since it was last fed: a CPU whose handler does not return does neither.
    fn due(&mut self, has_started: bool, is_stopping: bool, now: &[CpuProgress]) -> Vec<Notice> {
        let mut due = Vec::new();
        if has_started && !self.is_ready {
            self.is_ready = true;
            due.push(Notice::Ready);
        }
        if is_stopping && !self.is_stopping {
            self.is_stopping = true;
            due.push(Notice::Stopping);
        }
        self.cpus.resize(now.len(), (0, false));
        for ((turned_ns, has_progress), cpu) in self.cpus.iter_mut().zip(now) {
            *has_progress |= cpu.is_asleep || cpu.turned_ns != *turned_ns;
        }
        let is_alive = self.cpus.iter().all(|(_, has_progress)| *has_progress);
        if self.has_watchdog && self.is_ready && is_alive {
            self.cpus = now.iter().map(|cpu| (cpu.turned_ns, false)).collect();
            due.push(Notice::Watchdog);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Condvar, Mutex};
    use std::thread;

    use forebay_device::Rate;
    use forebay_device::synthetic::{SyntheticPlan, SyntheticSource};
    use forebay_engine::{Config, Engine, WhenFull};
    use forebay_rx::delivery::Batch;
    use forebay_rx::hash::Hasher;
    use forebay_rx::{CpuId, Handler};
    use forebay_sys::clock::Clock;
    use forebay_sys::cpu_list::CpuList;

    use super::*;

    fn cpu(turned_ns: u64, is_asleep: bool) -> CpuProgress {
        CpuProgress { turned_ns, is_asleep }
    }

    #[test]
    fn svc_2_notices_have_an_order() {
        let mut notices = Notices { has_watchdog: true, ..Notices::default() };
        assert_eq!(notices.due(false, false, &[cpu(0, true)]), []);
        let both = [Notice::Ready, Notice::Watchdog];
        assert_eq!(notices.due(true, false, &[cpu(0, true)]), both);
        assert_eq!(notices.due(true, true, &[cpu(0, false)]), [Notice::Stopping]);
        assert_eq!(notices.due(true, true, &[cpu(1, false)]), [Notice::Watchdog]);
        let mut unwatched = Notices::default();
        assert_eq!(unwatched.due(true, false, &[cpu(0, true)]), [Notice::Ready]);
    }

    #[test]
    fn svc_3_one_stuck_cpu_stops_the_feed() {
        let mut notices = Notices { has_watchdog: true, is_ready: true, ..Notices::default() };
        assert_eq!(notices.due(true, false, &[cpu(5, false), cpu(7, true)]), [Notice::Watchdog]);
        // Neither asleep nor at the end of a turn: it is within one.
        assert_eq!(notices.due(true, false, &[cpu(5, false), cpu(8, false)]), []);
        assert_eq!(notices.due(true, false, &[cpu(5, false), cpu(9, false)]), []);
        assert_eq!(notices.due(true, false, &[cpu(5, true), cpu(9, false)]), [Notice::Watchdog]);
        // Busy all the time.
        for turned_ns in 10..13 {
            let now = [cpu(turned_ns, false), cpu(turned_ns, false)];
            assert_eq!(notices.due(true, false, &now), [Notice::Watchdog]);
        }
    }

    /// Barrier that stops a handler while it is shut.
    #[derive(Default)]
    struct Gate(Mutex<bool>, Condvar);

    struct Gated(Arc<Gate>);

    impl Handler for Gated {
        fn handle(&mut self, _: &mut Batch<'_>) {
            let is_shut = self.0.0.lock().unwrap();
            drop(self.0.1.wait_while(is_shut, |is_shut| *is_shut).unwrap());
        }
    }

    impl Gate {
        fn set_shut(&self, is_shut: bool) {
            *self.0.lock().unwrap() = is_shut;
            self.1.notify_all();
        }
    }

    /// A handler that does not return stops the feed; as soon as it returns, the feed goes on.
    #[test]
    fn svc_3_hanging_handler_stops_the_feed() {
        let plan = SyntheticPlan {
            frames: u64::MAX,
            rate: Rate::PerSecond(5_000),
            ..SyntheticPlan::default()
        };
        let hasher = Arc::new(Hasher::keyed(&[1; 16], false));
        let config = Config::new(CpuList::new([CpuId(0)]), hasher);
        let config = Config { when_full: WhenFull::Drop, ..config };
        let gate = Arc::<Gate>::default();
        let source = Box::new(SyntheticSource::new(plan, None));
        let engine =
            Engine::build(&config, vec![source], Clock::machine(), |_| Gated(Arc::clone(&gate)))
                .unwrap();
        let (state, stopper) = (engine.state(), engine.stopper());
        let run = thread::spawn(|| engine.run().map(drop));
        let mut notices = Notices { has_watchdog: true, ..Notices::default() };
        let mut due = |is_stopping| {
            thread::sleep(Duration::from_millis(1));
            notices.due(state.has_started(), is_stopping, &state.progress())
        };
        for _ in 0..20 {
            while !due(false).contains(&Notice::Watchdog) {}
        }
        for _ in 0..2 {
            gate.set_shut(true);
            // The turn that is not over may still have ended: the feed stops soon.
            let mut quiet = 0;
            while quiet < 50 {
                quiet = if due(false).is_empty() { quiet + 1 } else { 0 };
            }
            gate.set_shut(false);
            while !due(false).contains(&Notice::Watchdog) {}
        }
        stopper.stop();
        run.join().unwrap().unwrap();
    }
}
