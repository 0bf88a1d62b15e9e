//! Receive ring of blocks that hold many frames each (`TPACKET_V3`): the kernel hands over a block
//! when it is full or its time is up.

use std::io;

use libc::c_int;

use super::PacketSocket;
use super::mapped_ring::{MappedRing, Parts};

/// Offset in bytes of `block_status` in `struct tpacket_block_desc`, behind `version` and
/// `offset_to_priv`.
const BLOCK_STATUS_AT: usize = 8;

/// Layout of a ring of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockRingLayout {
    /// Size of a block: a power of two, whole pages. No frame spans two blocks.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Longest time until the kernel hands over a block that is not full.
    pub retire_ms: u32,
    /// True if frames come with the device's hash, or the kernel's if the device has none.
    pub hashes: bool,
}

/// Ring of blocks that a socket receives into.
#[derive(Debug)]
pub struct BlockRing {
    socket: PacketSocket,
    blocks: MappedRing,
}

impl BlockRing {
    /// Sets up a ring for a socket that is not bound yet.
    ///
    /// # Errors
    /// If the kernel refuses the layout, or has no memory for it.
    pub fn new(socket: PacketSocket, layout: BlockRingLayout) -> io::Result<Self> {
        let BlockRingLayout { block_bytes, blocks, retire_ms, hashes } = layout;
        let version = libc::tpacket_versions::TPACKET_V3 as c_int;
        socket.set(libc::SOL_PACKET, libc::PACKET_VERSION, &version)?;
        let request = libc::tpacket_req3 {
            tp_block_size: block_bytes,
            tp_block_nr: blocks,
            // Frames have the size of their packets; only the product must be right.
            tp_frame_size: block_bytes,
            tp_frame_nr: blocks,
            tp_retire_blk_tov: retire_ms,
            tp_sizeof_priv: 0,
            tp_feature_req_word: if hashes { libc::TP_FT_REQ_FILL_RXHASH } else { 0 },
        };
        socket.set(libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let parts = Parts {
            count: blocks as usize,
            len_bytes: block_bytes as usize,
            status_at: BLOCK_STATUS_AT,
        };
        let blocks = MappedRing::of(&socket, parts)?;
        Ok(Self { socket, blocks })
    }

    /// The ring's socket.
    pub fn socket(&self) -> &PacketSocket {
        &self.socket
    }

    /// Oldest block, descriptor included, if the kernel has handed it over. The bytes are as the
    /// kernel wrote them, unchecked.
    pub fn block(&self) -> Option<&[u8]> {
        self.blocks.oldest()
    }

    /// Returns the oldest block to the kernel, if it was handed over.
    pub fn give_back(&mut self) {
        self.blocks.give_back();
    }
}
