//! Right of one process to run an engine that several have a copy of, since they were forked.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};

use crate::{abi, kept};

/// A file that all copies share. The process that has it locked is the one that runs the engine, or has run
/// it: the byte in the file says that the state of the copies is old.
pub(crate) struct Claim(OwnedFd);

impl Claim {
    pub(crate) fn new() -> io::Result<Self> {
        let file = memfd_create("forebay-claim", MemfdFlags::CLOEXEC)?;
        let claim = Self(kept::duplicate(&file)?);
        kept::add(claim.0.as_fd());
        Ok(claim)
    }

    /// Claims the engine for this process. False if a process has or had it.
    pub(crate) fn take(&self) -> bool {
        let is_first = || pread(&self.0, &mut [0; 1], 0) == Ok(0);
        abi::lock(self.0.as_fd()) && is_first() && pwrite(&self.0, &[1], 0) == Ok(1)
    }

    /// Waits until no other process has the engine.
    pub(crate) fn wait(&self) {
        abi::lock_in_turn(self.0.as_fd());
    }

    /// Process that has the engine, if it lives.
    pub(crate) fn holder(&self) -> Option<i32> {
        abi::lock_holder(self.0.as_fd())
    }
}
