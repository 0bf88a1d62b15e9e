//! Knobs of the spread: how many CPUs a queue's packets go to.

use forebay_rx::steer::{SpreadConfig, SpreadPolicy};
use forebay_sys::error::Error;

use super::change::refused;

/// Bounds of `rps_spread_busy`, in percent.
const BUSY_PERCENT: [u32; 2] = [1, 100];

/// Bounds of `rps_spread_wait_usecs`.
const WAIT_US: [u32; 2] = [1, 10_000_000];

/// Bounds of `rps_spread_usecs`.
const WINDOW_US: [u32; 2] = [100, 10_000_000];

/// A change of one knob.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpreadChange {
    /// `rps_spread`: as many CPUs as the load needs, or always all.
    Policy(SpreadPolicy),
    /// `rps_spread_busy`: busy share of a CPU from which more are needed, in percent.
    Busy(u32),
    /// `rps_spread_wait_usecs`: wait on a CPU from which more are needed, in µs.
    Wait(u32),
    /// `rps_spread_usecs`: time for which the load is watched, in µs.
    Window(u32),
}

impl SpreadChange {
    /// Every knob's name.
    pub const KNOBS: [&'static str; 4] =
        ["rps_spread", "rps_spread_busy", "rps_spread_wait_usecs", "rps_spread_usecs"];

    /// The knob's name.
    #[must_use]
    pub fn knob(self) -> &'static str {
        let [policy, busy, wait, window] = Self::KNOBS;
        match self {
            Self::Policy(_) => policy,
            Self::Busy(_) => busy,
            Self::Wait(_) => wait,
            Self::Window(_) => window,
        }
    }

    /// The value as it is read back.
    #[must_use]
    pub fn value(self) -> String {
        match self {
            Self::Policy(SpreadPolicy::WhenBusy) => "auto".to_owned(),
            Self::Policy(SpreadPolicy::Always) => "always".to_owned(),
            Self::Busy(number) | Self::Wait(number) | Self::Window(number) => number.to_string(),
        }
    }

    /// The setting of a knob in a configuration; `None` if it is not a knob of the spread.
    #[must_use]
    pub fn current(knob: &str, config: SpreadConfig) -> Option<Self> {
        let all = [
            Self::Policy(config.policy),
            Self::Busy(config.busy_percent),
            Self::Wait(config.wait_us),
            Self::Window(config.window_us),
        ];
        all.into_iter().find(|change| change.knob() == knob)
    }

    /// The configuration after this change.
    #[must_use]
    pub fn applied_to(self, config: SpreadConfig) -> SpreadConfig {
        match self {
            Self::Policy(policy) => SpreadConfig { policy, ..config },
            Self::Busy(busy_percent) => SpreadConfig { busy_percent, ..config },
            Self::Wait(wait_us) => SpreadConfig { wait_us, ..config },
            Self::Window(window_us) => SpreadConfig { window_us, ..config },
        }
    }

    /// Reads a knob's value; `None` if it is not a knob of the spread.
    ///
    /// # Errors
    /// When the value cannot be.
    pub fn parse(knob: &str, value: &str) -> Option<Result<Self, Error>> {
        let knob = Self::KNOBS.into_iter().find(|known| *known == knob)?;
        let number = |[least, most]: [u32; 2]| {
            let number = value.trim().parse().ok().filter(|number| (least..=most).contains(number));
            let why = || format!("it is a number from {least} to {most}");
            number.ok_or_else(|| refused(knob, value, &why()))
        };
        Some(match (knob, value.trim()) {
            ("rps_spread", "auto") => Ok(Self::Policy(SpreadPolicy::WhenBusy)),
            ("rps_spread", "always") => Ok(Self::Policy(SpreadPolicy::Always)),
            ("rps_spread", _) => Err(refused(knob, value, "it is auto or always")),
            ("rps_spread_busy", _) => number(BUSY_PERCENT).map(Self::Busy),
            ("rps_spread_wait_usecs", _) => number(WAIT_US).map(Self::Wait),
            _ => number(WINDOW_US).map(Self::Window),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rps_s_knobs_round_trip() {
        let mut config = SpreadConfig::default();
        for (knob, value) in [
            ("rps_spread", "always"),
            ("rps_spread_busy", "80"),
            ("rps_spread_wait_usecs", "500"),
            ("rps_spread_usecs", "100"),
        ] {
            let change = SpreadChange::parse(knob, &format!(" {value} ")).unwrap().unwrap();
            assert_eq!((change.knob(), change.value().as_str()), (knob, value));
            assert_ne!(SpreadChange::current(knob, config), Some(change), "{knob} differs");
            config = change.applied_to(config);
            assert_eq!(SpreadChange::current(knob, config), Some(change));
        }
        assert!(SpreadChange::parse("rps_cpus", "3").is_none());
        assert_eq!(SpreadChange::current("rps_cpus", config), None);
    }

    #[test]
    fn rps_s_impossible_values_have_reasons() {
        for (knob, value, why) in [
            ("rps_spread", "busy", "it is auto or always"),
            ("rps_spread_busy", "0", "it is a number from 1 to 100"),
            ("rps_spread_wait_usecs", "1ms", "it is a number from 1 to 10000000"),
            ("rps_spread_usecs", "99", "it is a number from 100 to 10000000"),
        ] {
            let error = SpreadChange::parse(knob, value).unwrap().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(knob), "{error}");
        }
    }
}
