//! Engine time: nanoseconds since the engine began, by the machine's clock or by a scheduler's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::time::ClockId;

use crate::cpus::clock_ns;

/// Clock that all of an engine's threads agree on.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's monotonic clock.
    Machine {
        /// Time 0, of the machine's clock, in nanoseconds. Processes that have the same one agree.
        origin_ns: u64,
    },
    /// A number that a scheduler advances.
    Virtual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's clock, beginning now.
    #[must_use]
    pub fn machine() -> Self {
        Self::Machine { origin_ns: machine_now_ns() }
    }

    /// A virtual clock at 0.
    #[must_use]
    pub fn virtual_at_zero() -> Self {
        Self::Virtual(Arc::default())
    }

    /// Time since the clock's origin, in nanoseconds.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::Machine { origin_ns } => machine_now_ns().saturating_sub(*origin_ns),
            Self::Virtual(now_ns) => now_ns.load(Ordering::Relaxed),
        }
    }

    /// True for a number that a scheduler advances.
    #[must_use]
    pub const fn is_virtual(&self) -> bool {
        matches!(self, Self::Virtual(_))
    }

    /// Sets a virtual clock to `now_ns`; no effect on the machine's.
    pub fn advance_to(&self, now_ns: u64) {
        if let Self::Virtual(clock) = self {
            clock.store(now_ns, Ordering::Relaxed);
        }
    }
}

/// Time of the machine's monotonic clock, in nanoseconds.
#[must_use]
pub fn machine_now_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// Time of day, in nanoseconds since 1970: for packets whose device gives no timestamp.
pub fn now_since_1970_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
