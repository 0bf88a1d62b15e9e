//! Input of a terminal, which may be gone.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Outcome of a wait for input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TerminalInput {
    /// Bytes to be read.
    Ready,
    /// None so far.
    Nothing,
    /// The terminal is gone (`POLLHUP`).
    HungUp,
}

/// Waits for input of a terminal, at most for `time`. A signal ends the wait.
///
/// # Errors
/// Those of `poll`.
pub fn input_within(terminal: impl AsFd, time: Duration) -> io::Result<TerminalInput> {
    let mut polled = [PollFd::new(&terminal, PollFlags::IN)];
    let time = Timespec::try_from(time).map_err(io::Error::other)?;
    match poll(&mut polled, Some(&time)) {
        Ok(0) | Err(Errno::INTR) => return Ok(TerminalInput::Nothing),
        Ok(_) => {}
        Err(error) => return Err(error.into()),
    }
    let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    let is_gone = polled[0].revents().intersects(gone);
    Ok(if is_gone { TerminalInput::HungUp } else { TerminalInput::Ready })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn hang_up_is_no_input() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(input_within(&ours, Duration::ZERO).unwrap(), TerminalInput::Nothing);
        theirs.write_all(b"q").unwrap();
        assert_eq!(input_within(&ours, Duration::from_secs(3600)).unwrap(), TerminalInput::Ready);
        drop(theirs);
        assert_eq!(input_within(&ours, Duration::ZERO).unwrap(), TerminalInput::HungUp);
    }
}
