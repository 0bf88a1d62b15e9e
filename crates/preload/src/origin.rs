//! The process that a socket belongs to, which alone has its engine.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::runtime::forks;

/// Process that has made a socket. A fork copies the socket into a child.
pub(crate) struct Origin {
    forks: usize,
    has_warned: AtomicBool,
}

impl Origin {
    /// Origin of a socket that the calling process makes.
    pub(crate) fn here() -> Self {
        Self { forks: forks(), has_warned: AtomicBool::new(false) }
    }

    pub(crate) fn is_parent(&self) -> bool {
        self.forks != forks()
    }

    /// Refuses a call of a child. Says once what was `made` and what to `do_instead`.
    ///
    /// # Errors
    /// `EBADF` in a child of that process.
    pub(crate) fn check(&self, made: &str, do_instead: &str) -> Result<(), Errno> {
        if !self.is_parent() {
            return Ok(());
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tell!(
                "forebay: {made} before a fork and is used by the child, which does not work: let the program \
                 {do_instead}, or use a TUN device (forebay run --to tun:)"
            );
        }
        Err(Errno::BADF)
    }
}
