//! Facts about a machine that the answers of knobs depend on.

use std::{fs, thread};

use forebay_rx::CpuId;
use forebay_sys::cpu_list::{CpuList, MAX_CPUS};
use rustix::time::{self, ClockId};

/// Minimum duration of a turn over all queues, in ticks.
const BUDGET_JIFFIES_MIN: u32 = 2;

/// Facts of a machine that a knob's answer depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// CPUs that a mask may name: 0 to `cpus` - 1 (`nr_cpu_ids`).
    pub cpus: u16,
    /// Duration of a tick of the kernel's clock, in microseconds.
    pub jiffy_us: u32,
}

impl Machine {
    /// Facts of this machine.
    #[must_use]
    pub fn here() -> Self {
        // The coarse clock advances once a tick, so its resolution is a tick.
        let tick = time::clock_getres(ClockId::MonotonicCoarse);
        let jiffy_us = u32::try_from(tick.tv_nsec / 1000).unwrap_or(0);
        Self { cpus: possible_cpus(), jiffy_us }
    }

    /// Facts of this machine, with room in masks for the CPUs of an engine: in virtual time there may
    /// be more of them.
    #[must_use]
    pub fn with(cpus: &CpuList) -> Self {
        let here = Self::here();
        Self { cpus: here.cpus.max(Self::of(cpus).cpus), ..here }
    }

    /// A machine that has no CPUs but those of an engine in virtual time, whose results do not
    /// depend on the CPUs of this machine.
    #[must_use]
    pub fn of(cpus: &CpuList) -> Self {
        let highest = cpus.cpus().last().map_or(0, |CpuId(highest)| highest.saturating_add(1));
        Self { cpus: highest, ..Self::here() }
    }

    /// A machine that has all CPUs that a mask can name.
    #[must_use]
    pub fn largest() -> Self {
        Self { cpus: MAX_CPUS, ..Self::here() }
    }

    /// Minimum of `netdev_budget_usecs`, and its default.
    #[must_use]
    pub fn netdev_budget_usecs_min(&self) -> u32 {
        self.jiffy_us.saturating_mul(BUDGET_JIFFIES_MIN)
    }
}

/// One more than the highest number that a CPU can have on this machine.
fn possible_cpus() -> u16 {
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible").ok();
    let possible = possible.and_then(|text| CpuList::parse_list(&text).ok());
    let highest = possible.and_then(|cpus| cpus.cpus().last().copied());
    highest.map_or_else(running_cpus, |CpuId(highest)| highest + 1)
}

/// Fallback for a system without sysfs.
fn running_cpus() -> u16 {
    thread::available_parallelism().map_or(1, |cpus| u16::try_from(cpus.get()).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use forebay_sys as sys;

    use super::*;

    #[test]
    fn machine_has_allowed_cpus_and_tick() {
        let here = Machine::here();
        assert!(sys::allowed_cpus().iter().all(|cpu| cpu.0 < here.cpus), "{here:?}");
        // HZ can be 100, 250, 300 or 1000.
        assert!([10_000, 4_000, 3_333, 1_000].contains(&here.jiffy_us), "{here:?}");
    }
}
