//! A ring from the device's side, split or packed, which checks the driver's use of it.

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

/// Buffer that the driver made available: a chain of memory parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Chain {
    /// Buffer id of the driver.
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

    /// Returns the addresses and lengths of the first `len` bytes.
    pub(crate) fn first(&self, len: usize) -> Vec<(u64, usize)> {
        let mut left = len;
        let parts = self.parts.iter().map(|part| {
            let len = left.min(part.len_bytes.try_into().unwrap());
            left -= len;
            (part.address, len)
        });
        parts.filter(|(_, len)| *len > 0).collect()
    }

    /// Returns a used entry with this length.
    pub(crate) fn used(&self, len_bytes: u32) -> Used {
        let descriptors = self.parts.len().try_into().unwrap();
        Used { id: self.id.into(), len_bytes, descriptors }
    }
}

/// Used entry of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Used {
    pub(crate) id: u32,
    pub(crate) len_bytes: u32,
    /// Number of packed descriptors of the buffer.
    pub(crate) descriptors: u16,
}

/// Location of a ring, by the driver's addresses, and its settings.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) memory: Memory,
    pub(crate) size: u16,
    pub(crate) base: u32,
    /// Descriptor area, driver area, device area.
    pub(crate) areas: [u64; 3],
    pub(crate) event_idx: bool,
    pub(crate) carries: Carries,
}

/// Kind of buffers in a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carries {
    /// Packets that the device writes.
    Received,
    /// Packets that the driver has written.
    Sent,
    /// Commands that the driver has written, each with room for the device's answer.
    Commands,
}

impl Carries {
    /// Checks that parts writable by the device are the right ones, and come last.
    pub(crate) fn judge(self, parts: &[Part]) {
        let is_right = match self {
            Self::Received => parts.iter().all(|part| part.is_writable),
            Self::Sent => !parts.iter().any(|part| part.is_writable),
            Self::Commands => parts.is_sorted_by_key(|part| part.is_writable),
        };
        assert!(is_right, "VQ2: {self:?}: {parts:x?}");
    }
}

/// Ring in its layout.
#[derive(Debug)]
pub(crate) enum Layout {
    Split(Split),
    Packed(Packed),
}

/// Ring with its kick and call eventfds.
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

    /// Takes the next available buffer.
    pub(crate) fn take(&mut self) -> Option<Chain> {
        match &mut self.layout {
            Layout::Split(ring) => ring.take(),
            Layout::Packed(ring) => ring.take(),
        }
    }

    /// Reports used buffers, all at once.
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

    /// Returns the location of the ring.
    pub(crate) fn place(&self) -> &Place {
        match &self.layout {
            Layout::Split(ring) => &ring.place,
            Layout::Packed(ring) => &ring.place,
        }
    }

    /// Signals the call eventfd, whether the driver wants a call or not.
    pub(crate) fn call(&self) {
        // A full counter, or a driver that has gone, needs no call.
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    /// Fills the counter of the kick eventfd, so that a write to it would block.
    pub(crate) fn has_kicks_wait(&self) {
        fcntl_setfl(&self.kick, OFlags::NONBLOCK).unwrap();
        // With the counter emptied first, the write sets it to its maximum.
        let _ = rustix::io::read(&self.kick, &mut [0u8; 8]);
        let _ = rustix::io::write(&self.kick, &(u64::MAX - 1).to_ne_bytes());
        fcntl_setfl(&self.kick, OFlags::empty()).unwrap();
    }

    /// Enables kicks, and sleeps until a kick or an available buffer, at most that long. A test
    /// that times out here has lost a wake-up.
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

/// Waits until a descriptor is readable, at most that long.
pub(crate) fn is_readable(descriptor: &impl std::os::fd::AsFd, at_most: Duration) -> bool {
    let at_most = Timespec::try_from(at_most).unwrap();
    let mut descriptors = [PollFd::new(descriptor, PollFlags::IN)];
    match poll(&mut descriptors, Some(&at_most)) {
        Ok(ready) => ready > 0,
        Err(rustix::io::Errno::INTR) => false,
        Err(errno) => panic!("poll: {errno}"),
    }
}
