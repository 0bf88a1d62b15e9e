//! How long a busy queue that runs empty is watched before its CPU may sleep.
//!
//! Whoever sleeps is woken late where other programs want the CPU: a scheduler lets them end their
//! slice first. What comes meanwhile waits in the rx ring, and what finds it full is lost. So the CPU
//! of a queue whose ring would fill in that time stays awake for a while; any other may sleep at once.

/// How late a CPU may be woken: a slice of the scheduler's (`base_slice_ns` of some milliseconds).
const WAKE_NS: u64 = 5_000_000;

/// How long a busy queue is watched: senders pause too where other programs want their CPU.
const WATCH_NS: u64 = 50_000_000;

/// The watch over one queue.
#[derive(Debug)]
pub(super) struct Vigil {
    /// What the rx ring holds.
    entries: u32,
    /// Frames that came since the last look, and when that was.
    frames: u64,
    looked_ns: u64,
    until_ns: u64,
}

impl Vigil {
    pub(super) fn new(entries: u32) -> Self {
        Self { entries, frames: 0, looked_ns: 0, until_ns: 0 }
    }

    /// Notes frames that have come, or would have if there had been room.
    pub(super) fn note(&mut self, frames: u64) {
        self.frames += frames;
    }

    /// Looks how fast they came since the last look.
    pub(super) fn look(&mut self, now_ns: u64) {
        let since_ns = now_ns.saturating_sub(self.looked_ns);
        let in_a_wake = u128::from(self.frames) * u128::from(WAKE_NS);
        if in_a_wake > u128::from(self.entries) * u128::from(since_ns) {
            self.until_ns = now_ns.saturating_add(WATCH_NS);
        }
        (self.frames, self.looked_ns) = (0, now_ns);
    }

    /// Whether the CPU is to stay awake.
    pub(super) fn lasts_at(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_watched_for_a_while_if_its_ring_would_fill_before_its_cpu_wakes() {
        let mut vigil = Vigil::new(2048);
        let start_ns = 1 << 40;
        vigil.look(start_ns);
        // 2047 frames in the time that a wake-up may take: the ring takes them all.
        vigil.note(2047);
        vigil.look(start_ns + WAKE_NS);
        assert!(!vigil.lasts_at(start_ns + WAKE_NS));
        vigil.note(2000);
        vigil.note(49);
        let busy_ns = start_ns + 2 * WAKE_NS;
        vigil.look(busy_ns);
        assert!(vigil.lasts_at(busy_ns));
        // It has run empty, and nothing comes.
        vigil.look(busy_ns + WATCH_NS / 2);
        assert!(vigil.lasts_at(busy_ns + WATCH_NS - 1));
        assert!(!vigil.lasts_at(busy_ns + WATCH_NS));
    }
}
