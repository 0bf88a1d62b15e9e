//! Receive ring of slots, one for each frame (`TPACKET_V2`): a frame can be read as soon as it has
//! arrived, and wakes a reader that sleeps.

use std::io::{self, IoSliceMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::c_int;
use rustix::io::readv;
use rustix::mm::{self, MapFlags, ProtFlags};

use super::PacketSocket;

/// Layout of a ring of slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRingLayout {
    /// Size of a block: a power of two, whole pages.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Size of a slot, which divides the size of a block. Of a longer frame, the slot has the
    /// beginning, and the socket the whole.
    pub slot_bytes: u32,
}

/// Ring of slots that a socket receives into. The slots pass between the kernel and this process in
/// order.
#[derive(Debug)]
pub struct FrameRing {
    socket: PacketSocket,
    base: NonNull<u8>,
    layout: FrameRingLayout,
    /// Index of the slot that the kernel hands over next.
    next: usize,
}

// SAFETY: the mapping belongs to this value alone, and is not tied to a thread.
unsafe impl Send for FrameRing {}

impl FrameRing {
    /// Sets up a ring for a socket that is not bound yet. `whole_bytes` is the memory that the
    /// kernel may hold for frames longer than a slot, up to what this process may have.
    ///
    /// # Errors
    /// If the kernel refuses the layout, or has no memory for it.
    pub fn new(
        socket: PacketSocket,
        layout: FrameRingLayout,
        whole_bytes: usize,
    ) -> io::Result<Self> {
        let FrameRingLayout { block_bytes, blocks, slot_bytes } = layout;
        let is_divided = slot_bytes > 0 && block_bytes.is_multiple_of(slot_bytes);
        if !is_divided || (slot_bytes as usize) < align_of::<AtomicU32>() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let version = libc::tpacket_versions::TPACKET_V2 as c_int;
        socket.set(libc::SOL_PACKET, libc::PACKET_VERSION, &version)?;
        // The kernel doubles what it is asked for (socket(7)).
        socket.set_receive_buffer(whole_bytes / 2)?;
        socket.set(libc::SOL_PACKET, libc::PACKET_COPY_THRESH, &1)?;
        let request = libc::tpacket_req {
            tp_block_size: block_bytes,
            tp_block_nr: blocks,
            tp_frame_size: slot_bytes,
            tp_frame_nr: layout.slots(),
        };
        socket.set(libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let (bytes, rights) = (layout.bytes(), ProtFlags::READ | ProtFlags::WRITE);
        let address = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice, of exactly the ring.
        let mapped = unsafe { mm::mmap(address, bytes, rights, MapFlags::SHARED, &socket, 0) }?;
        let base = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { socket, base, layout, next: 0 })
    }

    /// The ring's socket.
    pub fn socket(&self) -> &PacketSocket {
        &self.socket
    }

    /// Oldest slot, header included, if the kernel has handed it over. The bytes are as the kernel
    /// wrote them, unchecked.
    pub fn slot(&self) -> Option<&[u8]> {
        // Pairs with the kernel's barrier before it writes the status: a reader of the status sees
        // all that the kernel wrote before.
        let status = self.status().load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return None;
        }
        let slot_bytes = self.layout.slot_bytes as usize;
        // SAFETY: a slot of the mapping, which holds initialised bytes that the kernel does not
        // touch until `give_back`, which takes `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(self.first_byte(), slot_bytes) })
    }

    /// Returns the oldest slot to the kernel, if it was handed over.
    pub fn give_back(&mut self) {
        if self.slot().is_none() {
            return;
        }
        // Pairs with the kernel's read of the status before it writes to the slot: all reads of
        // this process come before.
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.next = (self.next + 1) % self.layout.slots().max(1) as usize;
    }

    /// Reads the oldest frame that was longer than its slot (`TP_STATUS_COPY`), behind its
    /// `virtio_net_hdr`, and returns the number of bytes of both. The frame leaves the socket.
    ///
    /// # Errors
    /// If the socket has none.
    pub fn take_whole(&self, header: &mut [u8], frame: &mut [u8]) -> io::Result<usize> {
        Ok(readv(&self.socket, &mut [IoSliceMut::new(header), IoSliceMut::new(frame)])?)
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: `tp_status` is the first word of the header at the beginning of a slot; aligned,
        // as slots are multiples of 16 bytes, which the kernel checks; it lives as long as the
        // mapping; both sides only access it whole.
        unsafe { AtomicU32::from_ptr(self.first_byte().cast()) }
    }

    fn first_byte(&self) -> *mut u8 {
        // SAFETY: `next` is less than the number of slots, and slots fill their blocks, so this is
        // inside the mapping.
        unsafe { self.base.as_ptr().add(self.next * self.layout.slot_bytes as usize) }
    }
}

impl Drop for FrameRing {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nobody holds a slice of it any more.
        let unmapped = unsafe { mm::munmap(self.base.as_ptr().cast(), self.layout.bytes()) };
        debug_assert!(unmapped.is_ok(), "a ring of ours cannot be unmapped: {unmapped:?}");
    }
}

impl FrameRingLayout {
    fn slots(self) -> u32 {
        (self.block_bytes / self.slot_bytes.max(1)).saturating_mul(self.blocks)
    }

    fn bytes(self) -> usize {
        self.block_bytes as usize * self.blocks as usize
    }
}
