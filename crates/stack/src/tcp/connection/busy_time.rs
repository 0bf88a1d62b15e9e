//! Times for which bytes waited to be acknowledged, by what held back more (`tcp_chrono_start`).

use super::{Connection, State, ms_since, stamp_ms};

/// Microseconds of a millisecond.
const MS: u64 = 1_000;
/// Lowest bits of a word, which tell the state.
const STATE_BITS: u32 = 2;
const STATE_MASK: u32 = (1 << STATE_BITS) - 1;
/// Reasons that have a time of their own.
const REASONS: usize = 3;

/// State of the sender. A later one hides those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) enum Sending {
    #[default]
    Nothing,
    Busy,
    /// Held back by the peer's window.
    PeerWindow,
    /// Held back by the send buffer, which the application would fill.
    SendBuffer,
}

/// Times for which a connection had bytes that were not acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct BusyTime {
    /// State in the lowest two bits, and the time since then above, in ms modulo 2^30: an idle connection has no
    /// word to spare.
    since: u32,
    /// Time in all states but the first, in ms.
    spent_ms: [u32; REASONS],
}

impl BusyTime {
    /// Time with bytes to be acknowledged until `now_us`, in µs (`tcpi_busy_time`).
    #[must_use]
    pub fn total_us(&self, now_us: u64) -> u64 {
        let all = [Sending::Busy, Sending::PeerWindow, Sending::SendBuffer];
        all.into_iter().map(|state| self.of(state, now_us)).sum()
    }

    /// Part for which the peer's window held back more, in µs (`tcpi_rwnd_limited`).
    #[must_use]
    pub fn by_peer_window_us(&self, now_us: u64) -> u64 {
        self.of(Sending::PeerWindow, now_us)
    }

    /// Part for which the send buffer held back more, in µs (`tcpi_sndbuf_limited`).
    #[must_use]
    pub fn by_send_buffer_us(&self, now_us: u64) -> u64 {
        self.of(Sending::SendBuffer, now_us)
    }

    fn of(&self, state: Sending, now_us: u64) -> u64 {
        let spent_ms = (state as usize).checked_sub(1).map_or(0, |place| self.spent_ms[place]);
        let running_ms = if state == self.state() { self.running_ms(now_us) } else { 0 };
        (u64::from(spent_ms) + u64::from(running_ms)) * MS
    }

    fn state(&self) -> Sending {
        match self.since & STATE_MASK {
            0 => Sending::Nothing,
            1 => Sending::Busy,
            2 => Sending::PeerWindow,
            _ => Sending::SendBuffer,
        }
    }

    /// Time in the present state, in ms.
    fn running_ms(&self, now_us: u64) -> u32 {
        // The stamp has lost its highest bits.
        let stamp_ms = stamp_ms(now_us) & !(u32::MAX >> STATE_BITS) | self.since >> STATE_BITS;
        ms_since(stamp_ms, now_us) & (u32::MAX >> STATE_BITS)
    }

    fn set(&mut self, state: Sending, now_us: u64) {
        if let Some(place) = (self.state() as usize).checked_sub(1) {
            let running_ms = self.running_ms(now_us);
            self.spent_ms[place] = self.spent_ms[place].saturating_add(running_ms);
        }
        self.since = stamp_ms(now_us) << STATE_BITS | state as u32;
    }
}

impl Connection {
    /// Begins to count the time for a state, unless a later one is counted.
    pub(super) fn begin_sending(&mut self, state: Sending, now_us: u64) {
        if state > self.busy.state() {
            self.busy.set(state, now_us);
        }
    }

    /// Ends a state (`tcp_chrono_stop`).
    pub(super) fn end_sending(&mut self, state: Sending, now_us: u64) {
        if self.sent.is_empty() && !self.has_unsent() {
            self.busy.set(Sending::Nothing, now_us);
        } else if state == self.busy.state() {
            self.busy.set(Sending::Busy, now_us);
        }
    }

    /// The application would write more than the buffer takes, and all that it wrote was sent.
    pub(super) fn note_small_buffer(&mut self, now_us: u64) {
        let is_open = matches!(self.state, State::Established | State::CloseWait);
        if is_open && self.send.is_full && !self.has_unsent() {
            self.begin_sending(Sending::SendBuffer, now_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_30_write_ahead_takes_no_time() {
        let mut busy = BusyTime::default();
        // A write's clock is ahead of that of the ACK behind it.
        for [begin_us, end_us] in [[5_000_003, 4_999_999], [6_000_000, 9_000_000]] {
            busy.set(Sending::PeerWindow, begin_us);
            busy.set(Sending::Nothing, end_us);
        }
        assert_eq!(busy.by_peer_window_us(10_000_000), 3_000_000);
        busy.set(Sending::Busy, ((1 << 30) - 5) * MS);
        assert_eq!(busy.total_us(((1 << 30) + 5) * MS), 3_010_000, "the stamp's bits have wrapped");
    }
}
