//! A ring as the device sees it, split or packed. It judges what the driver does with it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::back_end::memory::Memory;
use crate::back_end::packed::Packed;
use crate::back_end::split::Split;

/// Descriptor flags (virtio 1.2, sections 2.7.5 and 2.8.6).
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// A buffer that the driver made available: some parts of memory, one behind the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Chain {
    /// By which the driver knows it.
    pub(crate) id: u16,
    pub(crate) parts: Vec<Part>,
}

/// Part of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) address: u64,
    pub(crate) len_bytes: u32,
    pub(crate) is_writable: bool,
}

impl Chain {
    pub(crate) fn len_bytes(&self) -> u32 {
        self.parts.iter().map(|part| part.len_bytes).sum()
    }

    /// Addresses of its first `len` bytes are.
    pub(crate) fn first(&self, len: usize) -> Vec<(u64, usize)> {
        let mut left = len;
        let parts = self.parts.iter().map(|part| {
            let len = left.min(part.len_bytes.try_into().unwrap());
            left -= len;
            (part.address, len)
        });
        parts.filter(|(_, len)| *len > 0).collect()
    }

    /// An entry: used to this length.
    pub(crate) fn used(&self, len_bytes: u32) -> Used {
        let descriptors = self.parts.len().try_into().unwrap();
        Used { id: self.id.into(), len_bytes, descriptors }
    }
}

/// Entry of a buffer that was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Used {
    pub(crate) id: u32,
    pub(crate) len_bytes: u32,
    /// Entries of a packed ring that it was made of.
    pub(crate) descriptors: u16,
}

/// Place of a ring, as the driver's addresses, and what is in force for it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) memory: Memory,
    pub(crate) size: u16,
    pub(crate) base: u32,
    /// Descriptors, the driver's area, the device's area.
    pub(crate) areas: [u64; 3],
    pub(crate) event_idx: bool,
    pub(crate) carries: Carries,
}

/// Contents of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carries {
    /// Packets that the device writes.
    Received,
    /// Packets that the driver has written.
    Sent,
    /// Bytes that the driver has written, and behind it what the device answers.
    Commands,
}

impl Carries {
    /// Law: what the device writes comes last, and only where it writes.
    pub(crate) fn judge(self, parts: &[Part]) {
        let is_right = match self {
            Self::Received => parts.iter().all(|part| part.is_writable),
            Self::Sent => !parts.iter().any(|part| part.is_writable),
            Self::Commands => parts.is_sorted_by_key(|part| part.is_writable),
        };
        assert!(is_right, "VQ2: {self:?}: {parts:x?}");
    }
}

/// The ring itself, in its layout.
#[derive(Debug)]
pub(crate) enum Layout {
    Split(Split),
    Packed(Packed),
}

/// A ring, and how the two sides wake each other.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) layout: Layout,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
}

impl Ring {
    pub(crate) fn new(place: Place, is_packed: bool, [kick, call]: [OwnedFd; 2]) -> Self {
        let layout = if is_packed {
            Layout::Packed(Packed::new(place))
        } else {
            Layout::Split(Split::new(place))
        };
        Self { layout, kick, call }
    }

    /// The next buffer that the driver has made available.
    pub(crate) fn take(&mut self) -> Option<Chain> {
        match &mut self.layout {
            Layout::Split(ring) => ring.take(),
            Layout::Packed(ring) => ring.take(),
        }
    }

    /// Tells of buffers that were used, all at once.
    pub(crate) fn give(&mut self, used: &[Used]) {
        let is_wanted = match &mut self.layout {
            Layout::Split(ring) => ring.give(used),
            Layout::Packed(ring) => ring.give(used),
        };
        if is_wanted {
            self.call();
        }
    }

    pub(crate) fn is_packed(&self) -> bool {
        matches!(self.layout, Layout::Packed(_))
    }

    /// Answer to `GET_VRING_BASE`.
    pub(crate) fn base(&self) -> u32 {
        match &self.layout {
            Layout::Split(ring) => ring.base(),
            Layout::Packed(ring) => ring.base(),
        }
    }

    /// Place of the ring.
    pub(crate) fn place(&self) -> &Place {
        match &self.layout {
            Layout::Split(ring) => &ring.place,
            Layout::Packed(ring) => &ring.place,
        }
    }

    /// Interrupts the driver, whether it wants that or not.
    pub(crate) fn call(&self) {
        // A driver that has gone, or has been called 2^64 times, is not called again.
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    /// Fills the event that the driver kicks by, so that a write to it waits.
    pub(crate) fn has_kicks_wait(&self) {
        fcntl_setfl(&self.kick, OFlags::NONBLOCK).unwrap();
        // Empty or full, the count is what it is then.
        let _ = rustix::io::read(&self.kick, &mut [0u8; 8]);
        let _ = rustix::io::write(&self.kick, &(u64::MAX - 1).to_ne_bytes());
        fcntl_setfl(&self.kick, OFlags::empty()).unwrap();
    }

    /// Asks for a kick, and sleeps until there is one, or a buffer already; for so long at most.
    /// Whoever says that the driver lost a wake-up has waited in vain.
    pub(crate) fn sleep(&mut self, at_most: Duration) {
        let is_there = match &mut self.layout {
            Layout::Split(ring) => ring.ask_for_kick(),
            Layout::Packed(ring) => ring.ask_for_kick(),
        };
        if !is_there && is_readable(&self.kick, at_most) {
            rustix::io::read(&self.kick, &mut [0u8; 8]).unwrap();
        }
    }
}

/// Waits until something can be read; for so long at most.
pub(crate) fn is_readable(descriptor: &impl std::os::fd::AsFd, at_most: Duration) -> bool {
    let at_most = Timespec::try_from(at_most).unwrap();
    let mut descriptors = [PollFd::new(descriptor, PollFlags::IN)];
    match poll(&mut descriptors, Some(&at_most)) {
        Ok(ready) => ready > 0,
        Err(rustix::io::Errno::INTR) => false,
        Err(errno) => panic!("poll: {errno}"),
    }
}
