//! Signals that a run minds.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use forebay_engine::Stopper;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::ticker::Ticker;

/// Time between two looks for a signal.
const SIGNAL_PERIOD: Duration = Duration::from_millis(100);

/// Effect of SIGHUP: a terminal hung up, or somebody asks for a reload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hangup {
    /// The same as any other signal.
    Ends,
    /// Something else: see [`on_hangup`].
    Acts,
}

/// The first signal ends the run early, in order; a second one ends the program. Returns what
/// tells whether the run was asked to end.
pub(crate) fn stop_on_signals(stopper: Stopper, hangup: Hangup) -> Arc<AtomicBool> {
    let asked = Arc::new(AtomicBool::new(false));
    let ends = [SIGINT, SIGTERM, SIGHUP].into_iter();
    for signal in ends.filter(|&signal| signal != SIGHUP || hangup == Hangup::Ends) {
        // Where signals cannot be caught, they end the program as they always do.
        let _ = signal_hook::flag::register_conditional_default(signal, Arc::clone(&asked));
        let _ = signal_hook::flag::register(signal, Arc::clone(&asked));
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&interrupted);
    thread::spawn(move || {
        while !asked.load(Ordering::Relaxed) {
            thread::sleep(SIGNAL_PERIOD);
        }
        // A terminal that is gone must not keep the run from ending in order.
        let _ = writeln!(io::stderr(), "forebay: stopping; once more to end now");
        told.store(true, Ordering::Relaxed);
        stopper.stop();
    });
    interrupted
}

/// Does something each time a terminal hangs up, or somebody says so, for as long as what is
/// returned lives. The signal ends nothing any more.
pub(crate) fn on_hangup(mut act: impl FnMut() + Send + 'static) -> Ticker {
    let asked = Arc::new(AtomicBool::new(false));
    // Where it cannot be caught, it ends the program as it always does.
    let _ = signal_hook::flag::register(SIGHUP, Arc::clone(&asked));
    Ticker::every(SIGNAL_PERIOD, move || {
        if asked.swap(false, Ordering::Relaxed) {
            act();
        }
    })
}
