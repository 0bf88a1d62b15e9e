//! Receive ring of slots, one for each frame (`TPACKET_V2`): a frame can be read as soon as it has
//! arrived, and wakes a reader that sleeps.

use std::io::{self, IoSliceMut};

use libc::c_int;
use rustix::io::readv;

use super::PacketSocket;
use super::mapped_ring::{MappedRing, Parts};

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

/// Ring of slots that a socket receives into.
#[derive(Debug)]
pub struct FrameRing {
    socket: PacketSocket,
    slots: MappedRing,
}

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
        // Slots are one array only if they fill their blocks.
        if slot_bytes == 0 || !block_bytes.is_multiple_of(slot_bytes) {
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
        let parts = Parts {
            count: layout.slots() as usize,
            len_bytes: slot_bytes as usize,
            // `tp_status` is the first word of a slot's header.
            status_at: 0,
        };
        let slots = MappedRing::of(&socket, parts)?;
        Ok(Self { socket, slots })
    }

    /// The ring's socket.
    pub fn socket(&self) -> &PacketSocket {
        &self.socket
    }

    /// Oldest slot, header included, if the kernel has handed it over. The bytes are as the kernel
    /// wrote them, unchecked.
    pub fn slot(&self) -> Option<&[u8]> {
        self.slots.oldest()
    }

    /// Returns the oldest slot to the kernel, if it was handed over.
    pub fn give_back(&mut self) {
        self.slots.give_back();
    }

    /// Reads the oldest frame that was longer than its slot (`TP_STATUS_COPY`), behind its
    /// `virtio_net_hdr`, and returns the number of bytes of both. The frame leaves the socket.
    ///
    /// # Errors
    /// If the socket has none.
    pub fn take_whole(&self, header: &mut [u8], frame: &mut [u8]) -> io::Result<usize> {
        Ok(readv(&self.socket, &mut [IoSliceMut::new(header), IoSliceMut::new(frame)])?)
    }
}

impl FrameRingLayout {
    fn slots(self) -> u32 {
        (self.block_bytes / self.slot_bytes.max(1)).saturating_mul(self.blocks)
    }
}
