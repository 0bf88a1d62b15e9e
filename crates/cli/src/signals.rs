//! Signal handling of a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use forebay_engine::Stopper;
use forebay_sys::error::Result;
use forebay_sys::signals::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use tracing::info;

use crate::ticker::{Ticker, spawn};

/// Interval between two checks for a signal.
const SIGNAL_PERIOD: Duration = Duration::from_millis(100);

/// Time after the first signal in which others count as the same: `timeout` signals a program, and then
/// its process group with the program in it.
const ONE_SIGNAL: Duration = Duration::from_millis(500);

/// Effect of SIGHUP, which a closed terminal or a request to reload sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hangup {
    /// Ends the run, as other signals do.
    Ends,
    /// Calls a handler: see [`on_hangup`].
    Acts,
}

/// Lets a write beyond the limit of a file's size (`ulimit -f`, `LimitFSIZE=`) fail with `EFBIG` instead of
/// ending the program. The signal is handled, not ignored: `execve` passes on what is ignored, and a program
/// that `forebay exec` becomes has its default action again.
pub(crate) fn survive_file_size_limit() {
    // If the handler cannot be installed, the signal ends the program as by default.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Ends the run in order on the first signal, and the program on a later one. Returns a flag that
/// becomes true once a signal has asked the run to end.
pub(crate) fn stop_on_signals(stopper: Stopper, hangup: Hangup) -> Result<Arc<AtomicBool>> {
    let ends = [SIGINT, SIGTERM, SIGHUP].into_iter();
    let ends = ends.filter(|&signal| signal != SIGHUP || hangup == Hangup::Ends);
    let interrupted = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&interrupted);
    on_first_signal(ends, move || {
        told.store(true, Ordering::Relaxed);
        stopper.stop();
        info!("stopping; once more to end now");
    })?;
    Ok(interrupted)
}

/// Calls `act` on the first of these signals. A later one ends the program, but not one that comes with the
/// first. `act` may wait, as for somebody who reads messages. Signals that the program was started to ignore,
/// as by `nohup`, stay ignored.
pub(crate) fn on_first_signal(
    signals: impl Iterator<Item = i32>,
    act: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let (asked, insisted) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    for signal in signals.filter(|&signal| !is_ignored(signal)) {
        // If a handler cannot be installed, the signal ends the program as by default.
        let _ = signal_hook::flag::register_conditional_default(signal, Arc::clone(&insisted));
        let _ = signal_hook::flag::register(signal, Arc::clone(&asked));
    }
    let wait = move || {
        while !asked.load(Ordering::Relaxed) {
            thread::sleep(SIGNAL_PERIOD);
        }
        let insist = move || {
            thread::sleep(ONE_SIGNAL);
            insisted.store(true, Ordering::Relaxed);
        };
        // Without a thread of its own it waits for `act`.
        let insists = spawn("waits for a second signal", insist.clone());
        act();
        match insists {
            // Ignored: the thread does not panic.
            Ok(thread) => drop(thread.join()),
            Err(_) => insist(),
        }
    };
    spawn("waits for signals", wait).map(drop)
}

/// Calls `act` on each SIGHUP for as long as the returned value lives. The signal no longer ends
/// the program.
pub(crate) fn on_hangup(mut act: impl FnMut() + Send + 'static) -> Result<Ticker> {
    let asked = Arc::new(AtomicBool::new(false));
    // If the handler cannot be installed, the signal ends the program as by default.
    let _ = signal_hook::flag::register(SIGHUP, Arc::clone(&asked));
    Ticker::every(SIGNAL_PERIOD, "waits for SIGHUP", move || {
        if asked.swap(false, Ordering::Relaxed) {
            act();
        }
    })
}
