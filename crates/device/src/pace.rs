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

/// Schedule of one source, from its first poll on.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    rate: Rate,
    start_ns: Option<u64>,
    /// Recorded time that corresponds to `pass_due_ns`, in this pass over the files.
    pass_start: Option<u64>,
    pass_due_ns: u64,
    last_due_ns: u64,
}

impl Pace {
    pub(super) fn new(rate: Rate) -> Self {
        Self { rate, start_ns: None, pass_start: None, pass_due_ns: 0, last_due_ns: 0 }
    }

    /// Engine time at which frame `number`, recorded at `timestamp_ns`, is due. Never before the
    /// preceding frame, even if the capture's times are out of order.
    pub(super) fn due_ns(&mut self, now_ns: u64, number: u64, timestamp_ns: u64) -> u64 {
        let start_ns = *self.start_ns.get_or_insert(now_ns);
        let due_ns = match self.rate {
            Rate::Max => return now_ns,
            Rate::PerSecond(rate) => start_ns + since_start_ns(number, rate),
            Rate::Capture => {
                let pass_start = *self.pass_start.get_or_insert_with(|| {
                    self.pass_due_ns = self.last_due_ns.max(start_ns);
                    timestamp_ns
                });
                self.pass_due_ns.saturating_add(timestamp_ns.saturating_sub(pass_start))
            }
        };
        self.last_due_ns = self.last_due_ns.max(due_ns);
        self.last_due_ns
    }

    /// Begins another pass: the next frame is due together with the last one, at any recorded time.
    pub(super) fn begin_pass(&mut self) {
        self.pass_start = None;
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
    fn no_rate_is_always_due() {
        assert_eq!(Pace::new(Rate::Max).due_ns(77, 1 << 40, 5), 77);
    }
}
