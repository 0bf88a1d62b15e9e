//! Unpolled work: what the polls of a queue need beyond those that its CPU has time for.
//!
//! A CPU without time left polls less than its queue needs, and the frames that the queue loses are not weighed. So the CPU
//! seems to have less work than others, although it has more. As long as no poll empties the queue and other CPUs have time left, the
//! work expected of that CPU fills it, and hash ranges leave it until its polls keep up. The number of frames of a poll says
//! nothing about that: a device without free memory gives few, and a change of the settings takes effect inside a burst.

use crate::arrive::PollStatus;
use crate::cpu::CpuId;

/// Part of the work that is forgotten after a window in which polls keep up: one in this many. The
/// work besides delivery that is measured then rises by the same part.
const FORGET_DIVISOR: u64 = 4;

/// Unpolled work of one queue.
#[derive(Debug, Default)]
pub(super) struct Unpolled {
    /// CPU that polls the queue.
    cpu: Option<CpuId>,
    /// True if a poll in this window left frames behind, as far as its source knows.
    left_frames: bool,
    /// True if a poll in this window emptied the queue: it kept up.
    has_kept_up: bool,
    /// Work that the CPU's expected work lacked to fill it at the end of the last window, if polls did not keep up in that.
    missing_before_ns: Option<u64>,
    /// Work in ns a second.
    work_ns: u64,
}

impl Unpolled {
    /// Takes note of a poll by this CPU, and of the state of its source afterwards.
    pub(super) fn note_poll(&mut self, cpu: CpuId, status: PollStatus) {
        if self.cpu.replace(cpu) != Some(cpu) {
            self.begin();
        }
        let is_drained = status == PollStatus::Drained;
        self.left_frames |= !is_drained;
        self.has_kept_up |= is_drained;
    }

    /// Begins the first window.
    pub(super) fn begin(&mut self) {
        *self = Self { cpu: self.cpu, ..Self::default() };
    }

    /// CPU that polls the queue.
    pub(super) fn cpu(&self) -> Option<CpuId> {
        self.cpu
    }

    /// Ends a window, and returns the unpolled work. `missing_ns` is what the CPU's expected work lacks to fill it; `None` if
    /// the CPU has time left, or no other has. What was not missing a window before counts in the next one: a CPU may be
    /// kept from running in one window, and when hash ranges have left it, it needs time for what came before.
    pub(super) fn end_window(&mut self, missing_ns: Option<u64>) -> u64 {
        let left_frames = std::mem::take(&mut self.left_frames);
        let has_kept_up = std::mem::take(&mut self.has_kept_up);
        let missing_ns = missing_ns.filter(|_| left_frames && !has_kept_up);
        let before_ns = std::mem::replace(&mut self.missing_before_ns, missing_ns);
        self.work_ns -= self.work_ns / FORGET_DIVISOR;
        if let (Some(before_ns), Some(missing_ns)) = (before_ns, missing_ns) {
            self.work_ns = self.work_ns.max(before_ns.min(missing_ns));
        }
        self.work_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrive::PollStatus::{Drained, MorePending};

    /// Ranges have left, so more is missing, but their packets may still be queued: that counts a window later.
    #[test]
    fn rps_b1_queued_work_is_awaited() {
        let mut unpolled = Unpolled::default();
        let mut window = |status, missing_ns| {
            unpolled.note_poll(CpuId(0), status);
            unpolled.end_window(missing_ns)
        };
        assert_eq!(window(MorePending, Some(400)), 0, "a window may be chance");
        assert_eq!(window(MorePending, Some(400)), 400);
        assert_eq!(window(MorePending, Some(800)), 400, "ranges have left");
        assert_eq!(window(MorePending, Some(800)), 800, "that was not enough");
        assert_eq!(window(Drained, Some(900)), 600);
        assert_eq!(window(MorePending, Some(900)), 450, "the first window again");
    }
}
