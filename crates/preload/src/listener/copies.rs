//! Copies of a listener in other processes.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use forebay_sys::hidden::Hidden;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::abi;

/// Pipe that nothing is written to. A fork copies both ends with the listener, and who closes a copy of the listener closes
/// its ends: once all for writing are closed, the end for reading tells so.
pub(crate) struct Copies {
    write: Hidden,
    read: Arc<Hidden>,
}

/// Copies of a listener that this process has closed.
#[derive(Clone)]
pub(crate) struct OtherCopies(Arc<Hidden>);

impl Copies {
    /// # Errors
    /// `EMFILE` if the process has no descriptors left.
    pub(crate) fn new() -> Result<Self, Errno> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let write = Hidden::new(write)?;
        Ok(Self { write, read: Arc::new(Hidden::new(read)?) })
    }

    /// The copy that this process had as another program, by its [ends](Self::ends).
    pub(crate) fn of_ends(write: Hidden, read: Hidden) -> Self {
        Self { write, read: Arc::new(read) }
    }

    /// Ends for writing and for reading.
    pub(crate) fn ends(&self) -> [BorrowedFd<'_>; 2] {
        [self.write.as_fd(), self.read.as_fd()]
    }

    /// Closes the copy of this process.
    pub(crate) fn close_own(self) -> OtherCopies {
        self.others()
    }

    /// Copies of other processes, and this one's as long as it is open.
    pub(crate) fn others(&self) -> OtherCopies {
        OtherCopies(Arc::clone(&self.read))
    }

    /// Closes this process's copy of a pipe that is forgotten, not dropped.
    pub(crate) fn close_forgotten(&self) {
        abi::close_forgotten(self.write.as_fd());
        abi::close_forgotten(self.read.as_fd());
    }
}

impl OtherCopies {
    /// True as long as another process has the listener open.
    pub(crate) fn exist(&self) -> bool {
        let mut polled = [PollFd::new(&self.0, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok() && !polled[0].revents().contains(PollFlags::HUP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_8_last_copy_is_told() {
        let copies = Copies::new().unwrap();
        let other = Hidden::<std::os::fd::OwnedFd>::duplicate(&copies.write).unwrap();
        let others = copies.close_own();
        assert!(others.exist());
        drop(other);
        assert!(!others.exist());
    }
}
