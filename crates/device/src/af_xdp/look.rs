//! Times of looks at what no ring reports: the kernel's drop counters, and the device.

/// Interval of looks at a queue that is never empty.
const LOOK_NS: u64 = 10_000_000;

/// Interval of looks at a queue that has just run empty.
const IDLE_LOOK_NS: u64 = 1_000_000;

/// Interval of looks at a queue that sleeps: `poll(2)` on an AF_XDP socket reports no error
/// (`xsk_poll`).
pub(super) const ASLEEP_LOOK_NS: u64 = 200_000_000;

/// Time without a poll after which a queue counts as woken: the frames that woke it are passed on
/// before the next look.
const WOKEN_NS: u64 = 1_000_000;

/// True if a poll looks at the kernel's counters and at the device, `since_ns` after the last look.
/// A poll that may have been woken by frames, of this queue or of another one, does not: the calls
/// take longer than the frames. The empty poll behind them does.
pub(super) fn is_look_due(is_empty: bool, since_poll_ns: u64, since_ns: u64) -> bool {
    let interval_ns = match (since_poll_ns >= WOKEN_NS, is_empty) {
        (true, _) => ASLEEP_LOOK_NS,
        (false, true) => IDLE_LOOK_NS,
        (false, false) => LOOK_NS,
    };
    since_ns >= interval_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_10_woken_poll_looks_later() {
        // A frame each 5 ms: the poll that it wakes passes it on, and the one behind looks.
        assert!(!is_look_due(false, 5_000_000, 5_000_000));
        assert!(!is_look_due(true, 5_000_000, 5_000_000), "another queue's frames wait");
        assert!(is_look_due(true, 2_000, 5_000_000));
        assert!(!is_look_due(true, 2_000, IDLE_LOOK_NS - 1));
        // A queue that is never empty looks all the same, and so does one that only sleeps.
        assert!(is_look_due(false, 2_000, LOOK_NS));
        assert!(is_look_due(true, ASLEEP_LOOK_NS, ASLEEP_LOOK_NS));
    }
}
