//! Calls that wait.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{Arrived, is_cpu};
use forebay_stack::tcp::TcpError;

use super::super::options::Timeout;
use super::super::shared::NetState;
use super::super::waiting::Deadline;
use super::wait::{Seen, Wait};

/// Repeats an attempt until it does not block, at most for a time-out. An attempt that would block
/// returns the number of wake-ups that it has seen.
pub(super) fn wait_for<T>(
    shared: &NetState,
    wait: &Wait,
    is_nonblocking: &AtomicBool,
    timeout: &Timeout,
    mut attempt: impl FnMut() -> io::Result<Result<T, Seen>>,
) -> io::Result<T> {
    let mut deadline = Deadline::of(timeout);
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
        deadline.check()?;
        let waiting = shared.begin_wait();
        if waiting.arrived == Arrived::Nothing {
            wait.sleep(seen, deadline.left()?);
        }
    }
}

impl NetState {
    /// Error of a call: `BrokenPipe` if the run has ended, and its sockets with it.
    pub(super) fn tcp_failure(&self, error: TcpError) -> io::Error {
        match error {
            TcpError::NoSocket if self.has_ended() => io::ErrorKind::BrokenPipe.into(),
            error => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use super::super::super::rig::{PacketsForOthers, Recording, host, own_address};
    use super::super::super::{Net, NetConfig};
    use super::super::TcpListener;
    use super::*;

    /// A call returns though other sockets get packets without a gap.
    #[test]
    fn exe_9_timeout_ends_busy_polled_accept() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        state.set_busy_poll(Arc::<PacketsForOthers>::default());
        let local = SocketAddr::new(own_address(0), 80);
        let listener = TcpListener::bind(&Net(state), local).unwrap();
        listener.set_accept_timeout(Some(PacketsForOthers::TURN)).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
