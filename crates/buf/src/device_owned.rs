//! Frames that a device holds, indexed by their address.
//!
//! A device that receives straight into packet memory (AF_XDP) is given addresses and returns
//! addresses. This table keeps the frames' handles meanwhile. So whatever addresses the device
//! returns, a frame has one holder, and none is lost: frames that the device never returns go back
//! to their owners when the table is dropped.

use std::fmt;

use crate::Pool;
use crate::frame::Frame;

/// Frames of one region that one device queue holds.
pub struct DeviceOwned {
    /// Indexed by the chunk's offset in the region, in units of the chunk size.
    frames: Box<[Option<Frame>]>,
    /// Base address of the region; offsets count from here.
    region: usize,
    /// log2 of the chunk size.
    shift: u32,
    count: usize,
}

impl DeviceOwned {
    /// Creates a table for frames with chunks of `chunk_bytes`, of the region that `pool` is part
    /// of.
    ///
    /// # Panics
    /// If `chunk_bytes` is not a power of two.
    #[must_use]
    pub fn new(pool: &Pool, chunk_bytes: u32) -> Self {
        assert!(
            chunk_bytes.is_power_of_two(),
            "chunks of {chunk_bytes} bytes cannot be told apart"
        );
        let (base, len_bytes) = pool.region().span();
        let shift = chunk_bytes.trailing_zeros();
        Self {
            frames: (0..len_bytes >> shift).map(|_| None).collect(),
            region: base.addr().get(),
            shift,
            count: 0,
        }
    }

    /// Hands a frame to the device, and returns the offset of its packet's first byte in the
    /// region.
    ///
    /// # Errors
    /// Returns the frame if it has followers or pieces, is of another region, or its chunk is not
    /// of this table's size and alignment.
    #[inline]
    pub fn lend(&mut self, frame: Frame) -> Result<u64, Frame> {
        let Some(offset) = self.offset_of(&frame) else { return Err(frame) };
        match self.frames.get_mut(offset >> self.shift) {
            Some(place @ None) => {
                let first_byte = offset as u64 + u64::from(frame.start());
                *place = Some(frame);
                self.count += 1;
                Ok(first_byte)
            }
            _ => Err(frame),
        }
    }

    /// True if [`lend`](Self::lend) accepts the frame.
    #[must_use]
    pub fn takes(&self, frame: &Frame) -> bool {
        let place = self.offset_of(frame).and_then(|offset| self.frames.get(offset >> self.shift));
        place.is_some_and(Option::is_none)
    }

    /// Offset of a frame's chunk in the region. `None` if the frame has followers or pieces, or its
    /// chunk another size or alignment.
    fn offset_of(&self, frame: &Frame) -> Option<usize> {
        let offset = frame.chunk.addr().get().checked_sub(self.region)?;
        let fits = !frame.has_more()
            && frame.home().chunk_bytes == 1 << self.shift
            && offset.trailing_zeros() >= self.shift;
        fits.then_some(offset)
    }

    /// Takes back the frame whose chunk holds the byte at `offset` of the region. `None` if the
    /// device does not hold that frame: it returned a wrong address, or one twice.
    #[inline]
    pub fn take_back(&mut self, offset: u64) -> Option<Frame> {
        let place = usize::try_from(offset >> self.shift).ok()?;
        let frame = self.frames.get_mut(place)?.take()?;
        self.count -= 1;
        Some(frame)
    }

    /// Number of frames that the device holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// True if the device holds no frame.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl fmt::Debug for DeviceOwned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceOwned({} frames)", self.count)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::Region;
    use crate::frame::BEFORE_PACKET_BYTES;
    use crate::pool::{ChunkClass, carve, region_bytes};

    const CHUNK: ChunkClass = ChunkClass { chunk_bytes: 2048, chunks: 4 };
    const LARGE: ChunkClass = ChunkClass { chunk_bytes: 4096, chunks: 2 };

    fn pools() -> [Pool; 2] {
        let shares = [vec![CHUNK, LARGE], vec![CHUNK]];
        let region = Region::allocate(region_bytes(&shares));
        carve(region, &shares).unwrap().try_into().unwrap()
    }

    #[test]
    fn posted_frame_returns_exactly_once() {
        let [mut pool, mut other] = pools();
        let mut lent = DeviceOwned::new(&pool, 2048);
        let mut offsets = Vec::new();
        for mark in 0..4 {
            let source = if mark == 3 { &mut other } else { &mut pool };
            let mut frame = source.allocate(100).unwrap();
            frame.copy_from(&[mark; 100]);
            offsets.push(lent.lend(frame).unwrap());
        }
        assert_eq!(lent.len(), 4);
        for (mark, offset) in (0..4).zip(offsets).rev() {
            assert_eq!(offset % 2048, u64::from(BEFORE_PACKET_BYTES));
            let frame = lent.take_back(offset - 200 + u64::from(mark) * 400).unwrap();
            assert_eq!(frame.data(), [mark; 100]);
            assert!(lent.take_back(offset).is_none());
        }
        assert!(lent.is_empty());
    }

    #[test]
    fn unposted_is_not_returned() {
        let [mut pool, _other] = pools();
        let mut lent = DeviceOwned::new(&pool, 2048);
        for offset in [0, 2048, 1 << 20, u64::MAX] {
            assert!(lent.take_back(offset).is_none());
        }
        let (mut head, follower) = (pool.allocate(1).unwrap(), pool.allocate(1).unwrap());
        head.append(follower);
        let head = lent.lend(head).unwrap_err();
        assert_eq!(head.follower_count(), 1);
        assert!(lent.lend(pool.allocate(3000).unwrap()).is_err());
        let [mut stranger, _] = pools();
        assert!(lent.lend(stranger.allocate(1).unwrap()).is_err());
    }

    #[test]
    fn promise_4_device_owned_frames_return_with_table() {
        let [mut pool, _other] = pools();
        let mut lent = DeviceOwned::new(&pool, 2048);
        for _ in 0..3 {
            lent.lend(pool.allocate(1).unwrap()).unwrap();
        }
        assert_eq!(pool.in_use(), 3);
        drop(lent);
        assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn frame_range_is_exact() {
        let [mut pool, _other] = pools();
        let mut lent = DeviceOwned::new(&pool, 2048);
        let mut frame = pool.allocate(100).unwrap();
        frame.copy_from(&[7; 100]);
        let offset = lent.lend(frame).unwrap();
        let mut frame = lent.take_back(offset).unwrap();
        assert!(frame.place(offset + 10, 90));
        assert_eq!((frame.data(), frame.headroom().len()), (&[7; 90][..], 138));
        let end = offset + 2048 - u64::from(BEFORE_PACKET_BYTES);
        assert!(frame.place(end - 5, 5));
        for (at, len) in
            [(end - 5, 6), (end, 1), (offset - 129, 1), (offset, u32::MAX), (u64::MAX, 1)]
        {
            assert!(!frame.place(at, len), "{len} bytes at {at}");
        }
        assert!(frame.place(offset - 128, 128));
    }
}
