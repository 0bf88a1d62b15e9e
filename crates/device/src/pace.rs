//! Pace of recorded or generated frames.

/// Rate at which a source yields its frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Rate {
    /// Unlimited: as fast as frames are taken.
    #[default]
    Max,
    /// Frames per second, evenly spaced; at least one.
    PerSecond(u64),
    /// Recorded times of the capture.
    Capture,
}

/// Longest pause between two frames at [`Rate::Capture`], in nanoseconds. A longer one is left out: the clock was
/// set, the capture was joined from several, or a time is damaged.
const PAUSE_NS_MAX: u64 = 3600 * 1_000_000_000;

/// Schedule of one source, from its first poll on.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    rate: Rate,
    start_ns: Option<u64>,
    /// Correspondence of recorded times and engine times in this pass over the files.
    pass: Option<Anchor>,
    /// Correspondence since a pause that was left out, for as long as only one frame has it.
    behind_pause: Option<Anchor>,
    last_due_ns: u64,
}

/// A recorded time, and the engine time that corresponds to it.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    timestamp_ns: u64,
    due_ns: u64,
}

impl Anchor {
    fn due_ns(self, timestamp_ns: u64) -> u64 {
        self.due_ns.saturating_add(timestamp_ns.saturating_sub(self.timestamp_ns))
    }
}

impl Pace {
    pub(super) fn new(rate: Rate) -> Self {
        Self { rate, start_ns: None, pass: None, behind_pause: None, last_due_ns: 0 }
    }

    /// Engine time at which frame `number`, recorded at `timestamp_ns`, is due. Never before the
    /// preceding frame, even if the capture's times are out of order.
    pub(super) fn due_ns(&mut self, now_ns: u64, number: u64, timestamp_ns: u64) -> u64 {
        let start_ns = *self.start_ns.get_or_insert(now_ns);
        let due_ns = match self.rate {
            Rate::Max => return now_ns,
            Rate::PerSecond(rate) => start_ns + since_start_ns(number, rate),
            Rate::Capture => self.capture_due_ns(timestamp_ns, start_ns),
        };
        self.last_due_ns = self.last_due_ns.max(due_ns);
        self.last_due_ns
    }

    fn capture_due_ns(&mut self, timestamp_ns: u64, start_ns: u64) -> u64 {
        let now = Anchor { timestamp_ns, due_ns: self.last_due_ns.max(start_ns) };
        let latest_ns = now.due_ns.saturating_add(PAUSE_NS_MAX);
        let pass = *self.pass.get_or_insert(now);
        let anchors = [Some(pass), self.behind_pause].into_iter().flatten();
        let mut near = anchors.filter(|anchor| anchor.due_ns(timestamp_ns) <= latest_ns);
        let anchor = near.next();
        self.pass = anchor.or(self.pass);
        self.behind_pause = if anchor.is_some() { None } else { Some(now) };
        anchor.unwrap_or(now).due_ns(timestamp_ns)
    }

    /// Begins another pass: the next frame is due together with the last one, at any recorded time.
    pub(super) fn begin_pass(&mut self) {
        (self.pass, self.behind_pause) = (None, None);
    }
}

fn since_start_ns(number: u64, rate: u64) -> u64 {
    let ns = u128::from(number) * 1_000_000_000 / u128::from(rate.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_spaces_frames_evenly() {
        let mut pace = Pace::new(Rate::PerSecond(4));
        let due: Vec<_> = (0..4).map(|number| pace.due_ns(1000, number, 0)).collect();
        assert_eq!(due, [1000, 250_001_000, 500_001_000, 750_001_000]);
    }

    #[test]
    fn capture_times_kept_joined_between_passes() {
        let mut pace = Pace::new(Rate::Capture);
        let mut due = Vec::new();
        for (number, timestamp) in [500, 510, 505, 530].into_iter().enumerate() {
            due.push(pace.due_ns(7, number as u64, timestamp));
        }
        pace.begin_pass();
        due.push(pace.due_ns(9, 4, 500));
        due.push(pace.due_ns(9, 5, 510));
        assert_eq!(due, [7, 17, 17, 37, 37, 47]);
    }

    #[test]
    fn promise_3_long_pauses_are_left_out() {
        const HOUR: u64 = PAUSE_NS_MAX;
        let due = |times: &[u64]| {
            let mut pace = Pace::new(Rate::Capture);
            let due = times.iter().map(|time| pace.due_ns(7, 0, *time) - 7);
            due.collect::<Vec<_>>()
        };
        assert_eq!(due(&[5, 5 + HOUR, 6 + HOUR]), [0, HOUR, HOUR + 1], "the longest");
        assert_eq!(due(&[5, 6, 1 << 62, 9, 12]), [0, 1, 1, 4, 7], "one damaged time");
        let day = 24 * HOUR;
        assert_eq!(due(&[5, 6, day, day + 2, day + 5]), [0, 1, 1, 3, 6], "a set clock");
        assert_eq!(due(&[0, day, 2 * day, 3 * day]), [0, 0, 0, 0]);
        assert_eq!(due(&[1 << 62, 5, 9]), [0, 0, 0], "a damaged first time");
    }

    #[test]
    fn no_rate_is_always_due() {
        assert_eq!(Pace::new(Rate::Max).due_ns(77, 1 << 40, 5), 77);
    }
}
