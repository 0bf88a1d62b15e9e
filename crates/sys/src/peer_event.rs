//! An event that another process has too: what rings of a virtio device are kicked and called by.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ReadWriteFlags, preadv2};
use vmm_sys_util::eventfd::EventFd;

use super::aio::Signaller;

/// A pipe-like file has no place to read at: this says that none is meant (`preadv2(2)`).
const NO_OFFSET: u64 = u64::MAX;

/// An event that one process signals and another waits for. Both have the same open file, so the
/// other may take away what was signalled, fill the count, and set the flags of the file: nothing
/// here reads or writes it in a way that could wait.
#[derive(Debug)]
pub struct PeerEvent(OwnedFd);

impl PeerEvent {
    /// An event that has not happened.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Self::with_count(0)
    }

    /// An event that has happened, before anybody else has it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn happened() -> io::Result<Self> {
        Self::with_count(1)
    }

    fn with_count(count: u32) -> io::Result<Self> {
        Ok(Self(eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Has it happen. It never waits, whatever the other side has done to the event.
    ///
    /// # Errors
    /// When the kernel has no memory: then it has not happened.
    pub fn signal(&self, signaller: &Signaller) -> io::Result<()> {
        signaller.signal(self.0.as_fd())
    }

    /// Has it not have happened; returns whether it had. It never waits, whatever the flags are.
    pub fn clear(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        preadv2(&self.0, &mut into, NO_OFFSET, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// Descriptor that becomes readable when it happens.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Another handle on it, as crate vhost takes it.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn handle(&self) -> io::Result<EventFd> {
        let owned = self.0.try_clone()?.into_raw_fd();
        // SAFETY: an open eventfd that was duplicated for this, and that nobody else closes.
        Ok(unsafe { EventFd::from_raw_fd(owned) })
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    #[test]
    fn signal_is_seen_once() {
        let (event, signaller) = (PeerEvent::new().unwrap(), Signaller::new().unwrap());
        let other = event.handle().unwrap();
        assert!(!event.clear());
        other.write(3).unwrap();
        other.write(1).unwrap();
        assert!(event.clear() && !event.clear());
        event.signal(&signaller).unwrap();
        assert_eq!(other.read().unwrap(), 1);
        assert!(PeerEvent::happened().unwrap().clear());
    }

    /// The flags and the count belong to the open file, which the peer has as well.
    #[test]
    fn blocking_peer_event_holds_nobody() {
        let (event, signaller) = (PeerEvent::new().unwrap(), Signaller::new().unwrap());
        let peers = event.handle().unwrap();
        fcntl_setfl(event.descriptor(), OFlags::empty()).unwrap();
        peers.write(u64::MAX - 1).unwrap();
        (0..3).for_each(|_| event.signal(&signaller).unwrap());
        assert!(event.clear());
        assert!(!event.clear(), "an empty event has nobody wait either");
    }
}
