//! The process that a socket belongs to, which alone has its engine.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::runtime::forks;

/// Process that has made a socket. A fork copies the socket into a child.
pub(crate) struct Origin {
    forks: usize,
    has_warned: AtomicBool,
    has_closed_copy: AtomicBool,
}

impl Origin {
    /// Origin of a socket that the calling process makes.
    pub(crate) fn here() -> Self {
        Self {
            forks: forks(),
            has_warned: AtomicBool::new(false),
            has_closed_copy: AtomicBool::new(false),
        }
    }

    /// True in a child: the socket was made before the fork.
    pub(crate) fn is_parent(&self) -> bool {
        self.forks != forks()
    }

    /// Claims the right to close the child's copy of the kernel's sockets. True for one thread; the numbers are then the
    /// program's.
    pub(crate) fn claim_close(&self) -> bool {
        !self.has_closed_copy.swap(true, Ordering::Relaxed)
    }

    /// Refuses a call of a child, as [`refuse`](Self::refuse).
    ///
    /// # Errors
    /// `EBADF` in a child of that process.
    pub(crate) fn check(&self, made: &str, do_instead: &str) -> Result<(), Errno> {
        if self.is_parent() { Err(self.refuse(made, do_instead)) } else { Ok(()) }
    }

    /// Says once what was `made` and what to `do_instead`. Returns the error of the call.
    pub(crate) fn refuse(&self, made: &str, do_instead: &str) -> Errno {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            report!(
                "forebay: {made} before a fork, and the child cannot use it (EBADF): let the program {do_instead}, or use \
                 a TUN device (forebay run --to tun:)"
            );
        }
        Errno::BADF
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_5_copy_is_closed_once() {
        let origin = Origin::here();
        assert!(origin.claim_close());
        assert!(!origin.claim_close(), "another thread has closed the last duplicate, too");
    }
}
