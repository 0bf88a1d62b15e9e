//! Rate limit of messages: the same one a few times a second, and a bounded number of all.

use std::collections::HashMap;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter};

use super::REPORTS_TARGET;
use super::text::message_of;

/// Upper bound on printed messages with the same text, per second.
const SAME_MAX: u64 = 5;

/// Upper bound on printed messages, per second.
const ALL_MAX: usize = 200;

const SECOND: Duration = Duration::from_secs(1);

/// Limit of the messages of a process; a filter of events. Off until a run begins: the answers of
/// other commands are not repetitions.
#[derive(Debug, Default)]
pub(super) struct MessageLimit {
    is_on: AtomicBool,
    limited: Mutex<Limited>,
}

#[derive(Debug, Default)]
struct Limited {
    /// Second that is counted now; `None` before the first message.
    began: Option<Instant>,
    /// Times that each message came in this second: at most [`ALL_MAX`] messages.
    times: HashMap<String, u64>,
    /// Number of messages printed in this second.
    printed: usize,
    /// Messages suppressed in this second, except those with a count in `times`.
    others: u64,
    /// Messages suppressed in earlier seconds.
    ended: Suppressed,
}

/// Messages that were not printed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Suppressed {
    /// Messages that were printed before, and the number of times that they were not: at most
    /// [`ALL_MAX`].
    pub(super) same: HashMap<String, u64>,
    /// Number of all others.
    pub(super) others: u64,
}

impl MessageLimit {
    /// Limits messages from now on, or no longer.
    pub(super) fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Counts a message, and returns true if it may be printed.
    fn admits(&self, message: String, now: Instant) -> bool {
        let mut limited = self.lock();
        limited.roll(now);
        let times = limited.times.get(&message).copied().unwrap_or(0);
        if times < SAME_MAX && limited.printed == ALL_MAX {
            limited.others += 1;
            return false;
        }
        limited.times.insert(message, times + 1);
        let is_admitted = times < SAME_MAX;
        limited.printed += usize::from(is_admitted);
        is_admitted
    }

    /// Takes the messages that were suppressed in seconds that are over.
    pub(super) fn take_ended(&self) -> Suppressed {
        let mut limited = self.lock();
        limited.roll(Instant::now());
        mem::take(&mut limited.ended)
    }

    /// Takes all messages that were suppressed so far.
    pub(super) fn take_all(&self) -> Suppressed {
        let mut limited = self.lock();
        limited.end_second();
        mem::take(&mut limited.ended)
    }

    fn lock(&self) -> MutexGuard<'_, Limited> {
        self.limited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limited {
    /// Begins a new second if the last one is over.
    fn roll(&mut self, now: Instant) {
        if self.began.is_none_or(|began| now.saturating_duration_since(began) >= SECOND) {
            self.end_second();
            self.began = Some(now);
        }
    }

    fn end_second(&mut self) {
        let Suppressed { same, others } = &mut self.ended;
        for (message, times) in self.times.drain().filter(|(_, times)| *times > SAME_MAX) {
            let times = times - SAME_MAX;
            if same.len() < ALL_MAX || same.contains_key(&message) {
                *same.entry(message).or_default() += times;
            } else {
                *others += times;
            }
        }
        *others += mem::take(&mut self.others);
        self.printed = 0;
    }
}

impl<S: Subscriber> Filter<S> for &'static MessageLimit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        // A report that is suppressed would take its numbers along.
        !self.is_on.load(Ordering::Relaxed)
            || event.metadata().target() == REPORTS_TARGET
            || self.admits(message_of(event), Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(limit: &MessageLimit, message: &str, times: u64, now: Instant) -> u64 {
        (0..times).map(|_| u64::from(limit.admits(message.to_owned(), now))).sum()
    }

    #[test]
    fn ops_1_same_message_is_limited() {
        let (limit, now) = (MessageLimit::default(), Instant::now());
        assert_eq!(admitted(&limit, "down", 40, now), SAME_MAX);
        assert_eq!(admitted(&limit, "up", 3, now), 3);
        let later = now + SECOND;
        assert_eq!(admitted(&limit, "down", 2, later), 2, "a new second");
        let suppressed = limit.take_all();
        assert_eq!(suppressed.same, [("down".to_owned(), 40 - SAME_MAX)].into());
        assert_eq!(suppressed.others, 0);
        assert_eq!(limit.take_all(), Suppressed::default(), "each is told once");
    }

    /// Printed and suppressed messages are all that came, whatever their texts are.
    #[test]
    fn ops_1_all_messages_are_counted() {
        let (limit, mut now) = (MessageLimit::default(), Instant::now());
        let (mut came, mut printed) = (0, 0);
        for second in 0..3 {
            for number in 0..3 * ALL_MAX {
                let times = if number % 7 == 0 { 12 } else { 1 };
                printed += admitted(&limit, &format!("{second}: {number}"), times, now);
                came += times;
            }
            now += SECOND;
        }
        assert_eq!(printed, 3 * ALL_MAX as u64);
        let Suppressed { same, others } = limit.take_all();
        assert!(same.len() <= ALL_MAX && !same.is_empty());
        let suppressed: u64 = same.values().sum();
        assert_eq!(printed + suppressed + others, came);
    }
}
