//! Eventfd shared with another process: the kicks and calls of virtio rings.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{ReadWriteFlags, preadv2};
use vmm_sys_util::eventfd::EventFd;

use super::aio::Signaller;

/// `preadv2(2)`: offset -1 reads at the file's position, as an eventfd requires.
const NO_OFFSET: u64 = u64::MAX;

/// Event that one process signals and another waits for. Both have the same open file, so the other
/// process may reset it, fill its counter, and change its flags. Nothing here reads or writes it in
/// a way that could block.
#[derive(Debug)]
pub struct PeerEvent(OwnedFd);

impl PeerEvent {
    /// Creates an event that is not signalled.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Self::with_count(0)
    }

    /// Creates an event that is signalled from the start: an eventfd with count 1.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn happened() -> io::Result<Self> {
        Self::with_count(1)
    }

    fn with_count(count: u32) -> io::Result<Self> {
        Ok(Self(eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Signals the event. Never blocks, whatever the other side has done to it.
    ///
    /// # Errors
    /// If the kernel has no memory: then the event is not signalled.
    pub fn signal(&self, signaller: &Signaller) -> io::Result<()> {
        signaller.signal(self.0.as_fd())
    }

    /// Resets the event. Returns true if it was signalled. Never blocks, whatever its flags.
    pub fn clear(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        preadv2(&self.0, &mut into, NO_OFFSET, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// Descriptor that is readable while the event is signalled.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Another handle on the event, of the type that crate vhost takes.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn handle(&self) -> io::Result<EventFd> {
        let owned = self.0.try_clone()?.into_raw_fd();
        // SAFETY: an open eventfd that was duplicated for this handle; nobody else closes it.
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

    /// The flags and the counter belong to the open file, which the peer has as well.
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
