//! An event that another process has too: what rings of a virtio device are kicked and called by.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{ReadWriteFlags, preadv2};
use vmm_sys_util::eventfd::EventFd;

/// A pipe-like file has no place to read at: this says that none is meant (`preadv2(2)`).
const NO_OFFSET: u64 = u64::MAX;

/// An event that one process signals and another waits for. Both have the same open file, so the
/// other may take away what was signalled, and may set the flags of the file.
#[derive(Debug)]
pub(crate) struct PeerEvent(OwnedFd);

impl PeerEvent {
    /// An event that has not happened.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Has it happen.
    pub(crate) fn signal(&self) {
        // It fails only if it has happened 2^64 times and nobody looked: then it has happened.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Has it not have happened; returns whether it had. It never waits, whatever the flags are.
    pub(crate) fn clear(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        preadv2(&self.0, &mut into, NO_OFFSET, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// Whether the other side had signals wait for it, by the flags of the file. It is mended, and a
    /// thread of ours that waits goes on.
    pub(crate) fn was_made_to_wait(&self) -> bool {
        let Ok(flags) = fcntl_getfl(&self.0) else { return false };
        if flags.contains(OFlags::NONBLOCK) {
            return false;
        }
        let _ = fcntl_setfl(&self.0, flags | OFlags::NONBLOCK);
        // Whoever waits does so because the count is full.
        self.clear();
        true
    }

    /// What becomes readable when it happens.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Another handle on it, as crate vhost takes it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn handle(&self) -> io::Result<EventFd> {
        let owned = self.0.try_clone()?.into_raw_fd();
        // SAFETY: an open eventfd that was duplicated for this, and that nobody else closes.
        Ok(unsafe { EventFd::from_raw_fd(owned) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn what_one_side_signals_the_other_sees_once() {
        let event = PeerEvent::new().unwrap();
        let other = event.handle().unwrap();
        assert!(!event.clear());
        other.write(3).unwrap();
        other.write(1).unwrap();
        assert!(event.clear() && !event.clear());
        event.signal();
        assert_eq!(other.read().unwrap(), 1);
    }

    /// The flags belong to the open file, which the peer has as well.
    #[test]
    fn a_peer_that_makes_the_event_wait_holds_nobody() {
        let event = Arc::new(PeerEvent::new().unwrap());
        let peers = event.handle().unwrap();
        fcntl_setfl(event.descriptor(), OFlags::empty()).unwrap();
        peers.write(u64::MAX - 1).unwrap();
        let blocked = {
            let event = Arc::clone(&event);
            thread::spawn(move || event.signal())
        };
        // However late the thread comes: its signal finds a full event, or one that is mended.
        while !event.was_made_to_wait() {
            thread::yield_now();
        }
        blocked.join().unwrap();
        event.clear();
        assert!(!event.clear(), "an empty event has nobody wait either");
        assert!(!event.was_made_to_wait());
    }
}
