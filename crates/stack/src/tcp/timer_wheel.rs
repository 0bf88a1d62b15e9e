//! Timer wheel: one deadline per socket; arming, moving and cancelling take constant time.

use super::slots;

/// Slots of a level.
const SLOTS: usize = 256;
/// Levels, each 256 times as coarse as the one before: 1 ms to 49 days.
const LEVELS: usize = 4;
/// Microseconds of a tick of the first level.
const TICK_US: u64 = 1_000;
const NONE: u32 = u32::MAX;

/// Deadlines of one [`Tcp`](super::Tcp), by the index of a socket, a handshake or an entry in TIME-WAIT.
#[derive(Debug)]
pub(super) struct TimerWheel {
    /// First timer of each slot, by level.
    heads: Vec<u32>,
    /// A timer for each index.
    timers: Vec<Timer>,
    /// Ticks up to which deadlines were fired.
    now: u64,
    /// Number of armed timers, and of those of each level.
    armed: u32,
    counts: [u32; LEVELS],
    /// Tick before which no timer fires.
    earliest: u64,
}

#[derive(Clone, Copy, Debug)]
struct Timer {
    /// Tick at which it fires.
    at: u64,
    /// Index into `heads`; `NONE` of a timer that is not armed.
    slot: u32,
    previous: u32,
    next: u32,
}

impl Default for Timer {
    fn default() -> Self {
        Self { at: 0, slot: NONE, previous: NONE, next: NONE }
    }
}

impl TimerWheel {
    /// Memory of one timer.
    pub(super) const TIMER_BYTES: usize = size_of::<Timer>();

    /// Creates a wheel without timers, at the given time.
    pub(super) fn new(now_us: u64) -> Self {
        Self {
            heads: Vec::new(),
            timers: Vec::new(),
            now: now_us / TICK_US,
            armed: 0,
            counts: [0; LEVELS],
            earliest: u64::MAX / TICK_US,
        }
    }

    /// Arms the timer of `index`, or moves it. It fires at the first tick not before `at_us`.
    pub(super) fn arm(&mut self, index: u32, at_us: u64, now_us: u64) {
        if self.armed == 0 {
            // Nobody advances a wheel without timers: the next one need not go through that time.
            self.now = self.now.max(now_us / TICK_US);
            self.earliest = u64::MAX / TICK_US;
        }
        if self.heads.is_empty() {
            // Most wheels of a host without connections are never used.
            self.heads = vec![NONE; SLOTS * LEVELS];
        }
        let at = at_us.div_ceil(TICK_US).max(self.now + 1);
        if self.timers.len() <= index as usize {
            let more = index as usize + 1 - self.timers.len();
            slots::reserve(&mut self.timers, more);
            self.timers.resize(index as usize + 1, Timer::default());
        }
        let timer = self.timers[index as usize];
        if timer.slot != NONE && timer.at == at {
            return;
        }
        self.cancel(index);
        self.timers[index as usize].at = at;
        self.link(index);
        self.armed += 1;
        self.earliest = match self.has_due() {
            true => self.now,
            false => self.earliest.min(at).max(self.now + 1),
        };
    }

    /// Arms the timer of `index`, unless it fires until then anyway.
    pub(super) fn arm_by(&mut self, index: u32, at_us: u64, now_us: u64) {
        let armed = self.timers.get(index as usize).filter(|timer| timer.slot != NONE);
        if armed.is_none_or(|timer| timer.at > at_us.div_ceil(TICK_US)) {
            self.arm(index, at_us, now_us);
        }
    }

    /// Cancels the timer of `index`, if it is armed.
    pub(super) fn cancel(&mut self, index: u32) {
        if self.timers.get(index as usize).is_some_and(|timer| timer.slot != NONE) {
            self.unlink(index);
            self.armed -= 1;
        }
    }

    /// Advances to a time, and appends the indices whose timers fire, at most `limit` and the rest
    /// in the next call.
    pub(super) fn advance(&mut self, now_us: u64, limit: usize, fired: &mut Vec<u32>) {
        let until = now_us / TICK_US;
        let first = fired.len();
        if self.armed == 0 {
            self.now = self.now.max(until);
            self.earliest = u64::MAX / TICK_US;
            return;
        }
        if until == self.now && !self.has_due() {
            return;
        }
        while fired.len() - first < limit {
            if let Some(index) = self.take_due() {
                fired.push(index);
            } else if self.now < until {
                self.step(until);
            } else {
                break;
            }
        }
        self.earliest = self.find_earliest();
    }

    /// Goes on to the next tick that has work, at most to `until`.
    fn step(&mut self, until: u64) {
        self.now = self.next_tick().min(until);
        self.cascade();
    }

    /// True if timers of the current tick have not fired: the last call reached its limit.
    fn has_due(&self) -> bool {
        self.heads[slot_of(0, self.now)] != NONE
    }

    /// Takes a timer of the current tick, whose slot has no others.
    fn take_due(&mut self) -> Option<u32> {
        let index = self.heads[slot_of(0, self.now)];
        if index == NONE {
            return None;
        }
        self.unlink(index);
        self.armed -= 1;
        Some(index)
    }

    /// Next tick at which timers may fire, or move to a finer level: that level's which is the finest
    /// with timers.
    fn next_tick(&self) -> u64 {
        let finest = self.counts.iter().position(|&count| count > 0);
        let Some(step) = finest.map(|level| span(level) / SLOTS as u64) else {
            return u64::MAX / TICK_US;
        };
        (self.now / step + 1) * step
    }

    /// Time of the next tick at which a timer may fire, in µs; `None` without timers. Announced early
    /// if the timer is further than 256 ms away, or if an earlier one was cancelled.
    pub(super) fn next_us(&self) -> Option<u64> {
        (self.armed > 0).then_some(self.earliest * TICK_US)
    }

    /// Next tick at which a timer may fire.
    fn find_earliest(&self) -> u64 {
        if self.has_due() {
            return self.now;
        }
        let mut tick = self.next_tick();
        // Until the first level wraps, only its slots matter; then timers come down from above.
        while self.counts[0] > 0
            && !tick.is_multiple_of(SLOTS as u64)
            && self.heads[slot_of(0, tick)] == NONE
        {
            tick += 1;
        }
        tick
    }

    /// Moves the timers of coarser levels down, where those levels advance.
    fn cascade(&mut self) {
        let mut now = self.now;
        for level in 1..LEVELS {
            if !now.is_multiple_of(SLOTS as u64) {
                break;
            }
            now /= SLOTS as u64;
            let slot = slot_of(level, self.now);
            let mut index = std::mem::replace(&mut self.heads[slot], NONE);
            while index != NONE {
                let next = self.timers[index as usize].next;
                self.timers[index as usize].slot = NONE;
                self.counts[level] -= 1;
                self.link(index);
                index = next;
            }
        }
    }

    /// Puts an unlinked timer into the slot of its time.
    fn link(&mut self, index: u32) {
        let at = self.timers[index as usize].at;
        let ahead = at.saturating_sub(self.now);
        let level = (0..LEVELS - 1).find(|&level| ahead < span(level)).unwrap_or(LEVELS - 1);
        // Beyond the last level: its furthest slot, from where it is linked again.
        let at = at.min(self.now + span(LEVELS - 1) - 1);
        let slot = slot_of(level, at);
        let next = std::mem::replace(&mut self.heads[slot], index);
        if next != NONE {
            self.timers[next as usize].previous = index;
        }
        let timer = &mut self.timers[index as usize];
        (timer.previous, timer.next) = (NONE, next);
        timer.slot = u32::try_from(slot).unwrap_or(NONE);
        self.counts[level] += 1;
    }

    fn unlink(&mut self, index: u32) {
        let Timer { slot, previous, next, .. } = self.timers[index as usize];
        if previous == NONE {
            self.heads[slot as usize] = next;
        } else {
            self.timers[previous as usize].next = next;
        }
        if next != NONE {
            self.timers[next as usize].previous = previous;
        }
        self.timers[index as usize].slot = NONE;
        self.counts[slot as usize / SLOTS] -= 1;
    }
}

/// Ticks that a level and those below reach ahead.
fn span(level: usize) -> u64 {
    (SLOTS as u64).pow(u32::try_from(level + 1).unwrap_or(0))
}

fn slot_of(level: usize, tick: u64) -> usize {
    let step = span(level) / SLOTS as u64;
    let place = tick / step % SLOTS as u64;
    level * SLOTS + usize::try_from(place).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tcp_4_idle_wheel_skips_the_time() {
        const MONTH_US: u64 = 30 * 24 * 3600 * 1_000_000;
        let mut wheel = TimerWheel::new(0);
        wheel.arm(0, 1_000_000, 0);
        wheel.cancel(0);
        wheel.arm(0, MONTH_US + 200_000, MONTH_US);
        let behind_us = MONTH_US + 200_000 - wheel.now * TICK_US;
        assert!(behind_us <= 200_000, "{behind_us} µs to go through, tick by tick");
        assert_eq!(wheel.next_us(), Some(MONTH_US + 200_000));
    }

    #[test]
    fn tcp_4_far_timer_costs_few_steps() {
        const HOUR_US: u64 = 3600 * 1_000_000;
        let (mut wheel, mut fired, mut steps) = (TimerWheel::new(7_000), Vec::new(), 0);
        wheel.arm(0, 2 * HOUR_US, 7_000);
        while wheel.now < HOUR_US / TICK_US {
            wheel.step(HOUR_US / TICK_US);
            assert!(!wheel.has_due());
            steps += 1;
        }
        assert!(steps < 1000, "{steps} steps");
        let mut wakes = 0;
        wheel.earliest = wheel.find_earliest();
        while let Some(next_us) = wheel.next_us() {
            wheel.advance(next_us, usize::MAX, &mut fired);
            wakes += 1;
        }
        assert_eq!((&fired[..], wheel.now), (&[0][..], 2 * HOUR_US / TICK_US));
        assert!(wakes < 1000, "{wakes} wake-ups");
    }

    proptest! {
        #[test]
        fn tcp_4_wheel_fires_like_a_sorted_map(
            start in 0_u64..1 << 40,
            steps in prop::collection::vec((0_u32..20, 0_u64..400_000_000, 0_u64..90_000_000, any::<bool>()), 1..60),
            limit in prop_oneof![Just(usize::MAX), 1_usize..4],
        ) {
            let mut now = start;
            let mut wheel = TimerWheel::new(now);
            let mut model = BTreeMap::new();
            for (index, ahead, step, cancels) in steps {
                if cancels {
                    wheel.cancel(index);
                    model.remove(&index);
                } else {
                    let ticked = if wheel.armed == 0 { now / TICK_US } else { wheel.now };
                    wheel.arm(index, now + ahead, now);
                    model.insert(index, (now + ahead).div_ceil(TICK_US).max(ticked + 1));
                }
                now += step;
                if let Some(next) = wheel.next_us() {
                    let first = model.values().min().unwrap() * TICK_US;
                    prop_assert!(next <= first, "{} after {}", next, first);
                }
                let mut fired = Vec::new();
                wheel.advance(now, limit, &mut fired);
                let mut due: Vec<_> = model.values().copied().filter(|at| *at <= now / TICK_US).collect();
                due.sort_unstable();
                due.truncate(limit);
                let fired: Vec<_> = fired.iter().filter_map(|index| model.remove(index)).collect();
                prop_assert_eq!(&fired, &due, "the earliest, in order");
                prop_assert_eq!(wheel.armed as usize, model.len());
                prop_assert_eq!(wheel.counts.iter().sum::<u32>(), wheel.armed);
            }
        }
    }
}
