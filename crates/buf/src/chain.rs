//! Frames behind a frame: one packet in several pieces.
//!
//! A merged packet keeps the frames of all its segments, and the handle of the first frame stands
//! for all of them. The handles of the others need no memory of their own: they are written into
//! chunks of the chain, five in each, in front of the headroom.
//!
//! ```text
//!  head's chunk    ┌ link: 1 2 3 4 5 ┐ headroom │ packet …
//!  5th follower's  ┌ link: 6 7 8 9 10┐ headroom │ payload …
//! ```
//!
//! Taking a chain of 45 frames apart therefore reads nine links, not 44 chunks.

use std::mem::MaybeUninit;
use std::ptr::NonNull;

use crate::frame::{CHAIN_BYTES, Frame, HAS_FRAGS};

/// Handles in one link.
const LINK_FRAMES: usize = 5;

/// Link at the beginning of a chunk that carries a part of a chain. The head's chunk has the first
/// link; each further link is in the chunk of the last frame listed in the link before it.
#[repr(C)]
struct ChainLink {
    frames: [MaybeUninit<Frame>; LINK_FRAMES],
    /// Link that holds the latest handle. Valid in the first link only; in others these bytes are
    /// leftovers of a packet or of a list, and no pointer.
    last: MaybeUninit<NonNull<ChainLink>>,
}

const _: () = assert!(size_of::<ChainLink>() <= CHAIN_BYTES as usize, "a link stays in its place");

/// The most frames that may follow a frame.
pub const FOLLOWERS_MAX: u16 = HAS_FRAGS - 1;

impl Frame {
    /// Appends `frame` behind this one and its followers. It moves with this frame until it is
    /// [taken off](Self::take_followers).
    ///
    /// # Panics
    /// If `frame` has followers itself, or this one has [`FOLLOWERS_MAX`] already.
    #[inline(always)]
    pub fn append(&mut self, frame: Frame) {
        assert!(frame.follower_count() == 0, "a frame is appended alone");
        let followers = self.follower_count();
        assert!(followers < FOLLOWERS_MAX, "a chain has no room for another frame");
        let place = usize::from(followers) % LINK_FRAMES;
        let first = self.chunk.cast::<ChainLink>();
        let link = if followers == 0 {
            first
        } else {
            // SAFETY: the head's chunk is this handle's alone.
            let last = unsafe { (*first.as_ptr()).last };
            // SAFETY: it was written with the first follower.
            let last = unsafe { last.assume_init() };
            if place > 0 {
                last
            } else {
                // SAFETY: a link of this chain, which is this handle's alone.
                let full = unsafe { last.as_ref() };
                // SAFETY: the link is full, so all of its handles are written.
                let carrier = unsafe { full.frames[LINK_FRAMES - 1].assume_init_ref() };
                carrier.chunk.cast()
            }
        };
        // SAFETY: the link is at the beginning of a chunk of this chain, which is this handle's
        // alone, is aligned to a cache line, and has CHAIN_BYTES there that no packet uses.
        unsafe { (*link.as_ptr()).frames[place].write(frame) };
        // SAFETY: as above, for the head's chunk.
        unsafe { (*first.as_ptr()).last.write(link) };
        self.followers += 1;
    }

    /// Number of frames that follow this one.
    #[must_use]
    #[inline]
    pub fn follower_count(&self) -> u16 {
        self.followers & !HAS_FRAGS
    }

    /// Frames that follow, in the order in which they were appended.
    #[must_use]
    pub fn followers(&self) -> Followers<'_> {
        Followers { head: self, link: self.chunk.cast(), next: 0 }
    }

    /// Detaches the frames that follow, in the order in which they were appended.
    #[must_use]
    pub fn take_followers(&mut self) -> TakenFollowers {
        let left = self.follower_count();
        self.followers &= HAS_FRAGS;
        let mut taken =
            TakenFollowers { link: [const { MaybeUninit::uninit() }; _], next: 0, left };
        if left > 0 {
            // SAFETY: this chunk holds the first link, and its handles have just been given up.
            unsafe { taken.read_link(self.chunk) };
        }
        taken
    }
}

/// Iterator over the frames of a chain behind its head.
#[derive(Debug)]
pub struct Followers<'a> {
    head: &'a Frame,
    /// Link of the next frame; not read beyond the last one.
    link: NonNull<ChainLink>,
    next: u16,
}

impl<'a> Iterator for Followers<'a> {
    type Item = &'a Frame;

    fn next(&mut self) -> Option<&'a Frame> {
        if self.next == self.head.follower_count() {
            return None;
        }
        let place = usize::from(self.next) % LINK_FRAMES;
        // SAFETY: a link of the chain; none is written or detached while the head is borrowed.
        let link = unsafe { self.link.as_ref() };
        // SAFETY: the head counts the handles that were written.
        let frame = unsafe { link.frames[place].assume_init_ref() };
        self.next += 1;
        if place == LINK_FRAMES - 1 {
            self.link = frame.chunk.cast();
        }
        Some(frame)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::from(self.head.follower_count() - self.next);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Followers<'_> {}

/// Frames detached from a chain. Those that are not consumed return to their owners on drop.
#[derive(Debug)]
pub struct TakenFollowers {
    /// Copy of the current link: its chunk may be freed before its frames are.
    link: [MaybeUninit<Frame>; LINK_FRAMES],
    next: usize,
    left: u16,
}

impl TakenFollowers {
    /// Continues with the link in `chunk`.
    ///
    /// # Safety
    /// The chunk carries a link of this chain that was not read before.
    unsafe fn read_link(&mut self, chunk: NonNull<u8>) {
        // SAFETY: by the caller's promise there is one.
        self.link = unsafe { chunk.cast::<[MaybeUninit<Frame>; LINK_FRAMES]>().read() };
        self.next = 0;
    }
}

impl Iterator for TakenFollowers {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        self.left = self.left.checked_sub(1)?;
        // SAFETY: `left` counts the handles that were written and not yet taken; each is taken
        // once, as `self.next` only advances within a link.
        let frame = unsafe { self.link[self.next].assume_init_read() };
        self.next += 1;
        if self.next == LINK_FRAMES && self.left > 0 {
            // SAFETY: the full link's last frame carries the next link. That frame is still ours;
            // its next holder may overwrite the link, so the link is copied now.
            unsafe { self.read_link(frame.chunk) };
        }
        Some(frame)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.into(), Some(self.left.into()))
    }
}

impl ExactSizeIterator for TakenFollowers {}

impl Drop for TakenFollowers {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use crate::pool::{ChunkClass, carve, region_bytes};
    use crate::{Frame, Pool, Region};

    const CHUNKS: u32 = 60;

    fn pools() -> [Pool; 2] {
        let class = |chunk_bytes| ChunkClass { chunk_bytes, chunks: CHUNKS };
        let shares = [vec![class(512), class(1024)], vec![class(512)]];
        let region = Region::allocate(region_bytes(&shares));
        carve(region, &shares).unwrap().try_into().unwrap()
    }

    fn filled(pool: &mut Pool, mark: u8, len: usize) -> Frame {
        let mut frame = pool.allocate(u32::try_from(len).unwrap()).unwrap();
        frame.copy_from(&vec![mark; len]);
        frame
    }

    fn chain(pool: &mut Pool, followers: u8) -> Frame {
        let mut head = filled(pool, 0, 100);
        for mark in 1..=followers {
            head.append(filled(pool, mark, usize::from(mark) + 1));
        }
        head
    }

    fn marks<'a>(frames: impl Iterator<Item = &'a Frame>) -> Vec<u8> {
        frames.map(|frame| frame.data()[0]).collect()
    }

    #[test]
    fn followers_keep_append_order() {
        let [mut pool, _] = pools();
        for followers in [0, 1, 4, 5, 6, 10, 11, 44] {
            let mut head = chain(&mut pool, followers);
            assert_eq!(head.follower_count(), followers.into());
            let expected: Vec<u8> = (1..=followers).collect();
            assert_eq!(marks(head.followers()), expected);
            assert_eq!(head.followers().len(), followers.into());
            assert_eq!(head.truesize(), 512 * (u32::from(followers) + 1));
            let taken: Vec<_> = head.take_followers().collect();
            assert_eq!(marks(taken.iter()), expected);
            assert_eq!(
                taken.iter().map(Frame::len_bytes).sum::<u32>(),
                (2..).take(followers.into()).sum()
            );
            assert_eq!((head.follower_count(), head.data()), (0, &[0; 100][..]));
            taken.into_iter().for_each(|frame| pool.put(frame));
            pool.put(head);
            assert_eq!(pool.in_use(), 0);
        }
    }

    #[test]
    fn promise_4_chain_returns_whole() {
        let [mut pool, mut other] = pools();
        let head = chain(&mut pool, 11);
        pool.put(head);
        assert_eq!(pool.in_use(), 0);
        other.put(chain(&mut pool, 17));
        other.flush();
        assert_eq!(pool.in_use(), 0);
        drop(chain(&mut pool, 23));
        assert_eq!(pool.in_use(), 0);
        let mut head = chain(&mut pool, 12);
        let kept = head.take_followers().next().unwrap();
        assert_eq!(kept.data(), [1, 1]);
        assert_eq!(pool.in_use(), 2);
    }

    #[test]
    #[should_panic(expected = "appended alone")]
    fn a_chain_is_not_appended() {
        let [mut pool, _] = pools();
        let (mut head, tail) = (chain(&mut pool, 1), chain(&mut pool, 1));
        head.append(tail);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 128 }))]
        /// Frames of several owners in one chain keep their bytes while headers are pulled and
        /// pushed back, and all are returned.
        #[test]
        fn chains_keep_their_bytes(
            lens in proptest::collection::vec((0usize..2, 1usize..200), 0..40),
            put_by in 0usize..2,
        ) {
            let mut pools = pools();
            let mut head = filled(&mut pools[1], 255, 10);
            for (mark, &(owner, len)) in (0u8..).zip(&lens) {
                let mut frame = filled(&mut pools[owner], mark, len);
                frame.pull(u32::try_from(len / 2).unwrap());
                head.append(frame);
            }
            for (mut frame, (mark, &(owner, len))) in
                head.take_followers().zip((0u8..).zip(&lens))
            {
                prop_assert_eq!(frame.data(), vec![mark; len - len / 2]);
                frame.push(u32::try_from(len / 2).unwrap());
                prop_assert_eq!(frame.data(), vec![mark; len]);
                prop_assert_eq!(usize::from(frame.owner()), owner);
                pools[put_by].put(frame);
            }
            pools[put_by].put(head);
            pools[put_by].flush();
            prop_assert_eq!(pools[0].in_use() + pools[1].in_use(), 0);
        }
    }
}
