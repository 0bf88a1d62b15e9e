//! Calls that wait.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forebay_engine::is_cpu;

use super::super::shared::NetState;
use super::super::waiting::Deadline;
use super::wait::{Seen, Wait};

/// Repeats an attempt until it does not block, at most for a time-out. An attempt that would block
/// tells the number of wake-ups that it has seen. `timeout_ns` of 0 means none.
pub(super) fn wait_for<T>(
    (shared, wait): (&NetState, &Wait),
    (is_nonblocking, timeout_ns): (&AtomicBool, &AtomicU64),
    mut attempt: impl FnMut() -> io::Result<Result<T, Seen>>,
) -> io::Result<T> {
    let mut deadline = Deadline::of(timeout_ns);
    let mut has_waited = false;
    loop {
        let seen = match attempt()? {
            Ok(done) => {
                if has_waited {
                    shared.suspend_wakeups();
                }
                return Ok(done);
            }
            Err(seen) => seen,
        };
        // After the attempt counted the wake-ups: an end that is not seen here wakes the sleeper.
        if shared.has_ended() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // A CPU's own thread must not sleep: its turns bring what it waits for.
        if is_nonblocking.load(Ordering::Relaxed) || is_cpu() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        has_waited = true;
        let waiting = shared.begin_wait();
        if !waiting.has_found {
            wait.sleep(seen, deadline.left()?);
        }
    }
}

/// Time-out as an atomic number, in ns.
///
/// # Errors
/// `InvalidInput` of a time-out of zero, as with `std`.
pub(super) fn timeout_ns(timeout: Option<Duration>) -> io::Result<u64> {
    match timeout {
        None => Ok(0),
        Some(timeout) if timeout.is_zero() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "a time-out of 0: pass None for none"))
        }
        Some(timeout) => Ok(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)),
    }
}

/// Time-out that is set; `None` for none.
pub(super) fn timeout_of(timeout_ns: &AtomicU64) -> Option<Duration> {
    Some(timeout_ns.load(Ordering::Relaxed)).filter(|ns| *ns > 0).map(Duration::from_nanos)
}
