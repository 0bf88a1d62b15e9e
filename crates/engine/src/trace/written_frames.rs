//! Frames that have a row, as far as they may be told about again.

use std::collections::{HashSet, VecDeque};

/// Number of frames that are remembered: those of 2 GiB of packet memory in chunks of 2 KiB. With more in
/// flight, a frame may get a second row. Without a limit, a long run would need memory for each frame that
/// it ever saw.
const FRAMES_MAX: usize = 1 << 20;

/// Frames that a row was written for, the latest [`FRAMES_MAX`].
#[derive(Debug, Default)]
pub(super) struct WrittenFrames {
    frames: HashSet<u64>,
    /// Numbers of the frames, in the order in which they were added.
    order: VecDeque<u64>,
}

impl WrittenFrames {
    /// Adds a frame. False if it is there already.
    pub(super) fn add(&mut self, frame: u64) -> bool {
        if !self.frames.insert(frame) {
            return false;
        }
        self.order.push_back(frame);
        if self.order.len() > FRAMES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.frames.remove(&oldest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_3_written_frames_have_a_limit() {
        let mut written = WrittenFrames::default();
        let last = FRAMES_MAX as u64 + 1000;
        for frame in 0..last {
            assert!(written.add(frame) && !written.add(frame), "{frame}");
        }
        assert_eq!([written.frames.len(), written.order.len()], [FRAMES_MAX; 2]);
        assert!(!written.add(1000) && written.add(999));
    }
}
