//! Frames whose bytes behind the first ones are in pieces, as from a device that shares its memory.

use std::sync::Arc;

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::page_frag::{FRAG_ALIGN_BYTES, PageFragCache};
use forebay_buf::pool::ChunkClass;
use forebay_buf::{Frame, Pool, Region};
use forebay_rx::arrive::{HEAD_BYTES, HEAD_CHUNK_BYTES};

/// Chunks for the first bytes of frames.
pub(crate) const HEADS: ChunkClass = ChunkClass { chunk_bytes: HEAD_CHUNK_BYTES, chunks: 64 };

const BLOCK_BYTES: u32 = 1 << 17;
const BLOCKS: u32 = 4;

/// Lengths of pieces, one behind the other: odd ones shift the sums of those behind them.
const PIECES_BYTES: [usize; 4] = [1, 64, 7, 300];
/// Pieces of a frame before the last one, which has the rest.
const PIECES_MAX: usize = 20;

/// Memory that frames share with a device.
pub(crate) struct Shared(PageFragCache);

impl Shared {
    pub(crate) fn new() -> Self {
        let region = Arc::new(Region::allocate_shared((BLOCK_BYTES * BLOCKS) as usize));
        Self(PageFragCache::new(&region, 0, BLOCK_BYTES, BLOCKS))
    }

    /// Frame with at most `head_len` bytes in itself; `None` without memory.
    pub(crate) fn split(
        &mut self,
        bytes: &[u8],
        head_len: usize,
        pool: &mut Pool,
    ) -> Option<Frame> {
        let mut frame = pool.allocate(HEAD_CHUNK_BYTES - BEFORE_PACKET_BYTES)?;
        let head_len = head_len.min(bytes.len()).min(HEAD_BYTES as usize);
        let (head, mut rest) = bytes.split_at(head_len);
        frame.copy_from(head);
        for number in 0.. {
            if rest.is_empty() {
                break;
            }
            let len = match number {
                PIECES_MAX => rest.len(),
                _ => PIECES_BYTES[number % PIECES_BYTES.len()].min(rest.len()),
            };
            let (piece, behind) = rest.split_at(len);
            let len = u32::try_from(len).ok()?;
            let Some(mut frag) = self.0.cut(len.next_multiple_of(FRAG_ALIGN_BYTES)) else {
                pool.put(frame);
                return None;
            };
            frag.copy_out(0, piece);
            frag.set_len(len);
            frame.attach(frag).expect("few pieces");
            rest = behind;
        }
        Some(frame)
    }

    /// Checks that all pieces are home, once `pool` has its frames.
    pub(crate) fn check_all_is_home(&mut self, pool: &mut Pool) {
        pool.flush();
        assert_eq!(self.0.away_blocks(), 0, "all pieces are home");
    }
}
