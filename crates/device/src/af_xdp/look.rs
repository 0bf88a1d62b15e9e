//! Times of looks at what no ring reports: the kernel's drop counters, and the device.

/// Interval of looks at a queue that is never empty.
const LOOK_NS: u64 = 10_000_000;

/// Interval of looks at a queue that runs empty or sleeps: `poll(2)` on an AF_XDP socket reports no
/// error (`xsk_poll`).
pub(super) const IDLE_LOOK_NS: u64 = 200_000_000;

/// Time without a poll after which a queue counts as woken: the frames that woke it are passed on
/// before the next look.
const WOKEN_NS: u64 = 1_000_000;

/// True if a poll looks at the kernel's counters and at the device, `since_ns` after the last look.
/// Only a busy queue looks often. An idle queue drops nothing, and these calls take longer than the
/// few frames of a poll that was woken.
pub(super) fn is_look_due(is_empty: bool, since_poll_ns: u64, since_ns: u64) -> bool {
    let is_idle = is_empty || since_poll_ns >= WOKEN_NS;
    since_ns >= if is_idle { IDLE_LOOK_NS } else { LOOK_NS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_10_woken_poll_looks_later() {
        // A frame each 20 ms: neither the poll that it wakes looks, nor the empty one behind it.
        assert!(!is_look_due(false, 20_000_000, 20_000_000));
        assert!(!is_look_due(true, 20_000_000, 20_000_000), "another queue's frames wait");
        assert!(!is_look_due(true, 2_000, IDLE_LOOK_NS - 1));
        // A queue that is never empty looks all the same, and so does one that only sleeps.
        assert!(is_look_due(false, 2_000, LOOK_NS));
        assert!(is_look_due(true, IDLE_LOOK_NS, IDLE_LOOK_NS));
    }
}
