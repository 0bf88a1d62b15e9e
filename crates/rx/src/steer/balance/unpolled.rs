//! Unpolled work: what the polls of a queue need beyond those that its CPU has time for.
//!
//! A CPU without time left polls less than its queue needs, and the frames that the queue loses are not weighed. So the CPU
//! seems to have less work than others, although it has more. As long as no poll empties the queue and other CPUs have time left, the
//! work expected of that CPU fills it, and hash ranges leave it until its polls keep up. The number of frames of a poll says
//! nothing about that: a device without free memory gives few, and a change of the settings takes effect inside a burst.

use crate::arrive::PollStatus;
use crate::cpu::CpuId;

/// Windows in a row in which polls do not keep up, before that counts: a CPU may be kept from running in one.
const WINDOWS_MIN: u8 = 2;

/// Part of the work that is expected no more after a window in which polls keep up. The work besides delivery that is
/// measured then rises by the same part.
const LEFT_OFF: u64 = 4;

/// Unpolled work of one queue.
#[derive(Debug, Default)]
pub(super) struct Unpolled {
    /// CPU that polls the queue.
    cpu: Option<CpuId>,
    /// True if a poll in this window left frames behind, as far as its source knows.
    left_frames: bool,
    /// True if a poll in this window emptied the queue: it kept up.
    has_kept_up: bool,
    /// Windows in a row in which polls did not keep up.
    windows: u8,
    /// Work in ns a second.
    work_ns: u64,
}

impl Unpolled {
    /// Takes note of a poll by this CPU, and of what its source has left behind it.
    pub(super) fn see_poll(&mut self, cpu: CpuId, behind: PollStatus) {
        if self.cpu.replace(cpu) != Some(cpu) {
            self.begin();
        }
        let is_drained = behind == PollStatus::Drained;
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
    /// the CPU has time left, or no other has.
    pub(super) fn end_window(&mut self, missing_ns: Option<u64>) -> u64 {
        let left_frames = std::mem::take(&mut self.left_frames);
        let has_kept_up = std::mem::take(&mut self.has_kept_up);
        let missing_ns = missing_ns.filter(|_| left_frames && !has_kept_up);
        self.windows = missing_ns.map_or(0, |_| self.windows.saturating_add(1));
        self.work_ns -= self.work_ns / LEFT_OFF;
        if let Some(missing_ns) = missing_ns.filter(|_| self.windows >= WINDOWS_MIN) {
            self.work_ns = self.work_ns.max(missing_ns);
        }
        self.work_ns
    }
}
