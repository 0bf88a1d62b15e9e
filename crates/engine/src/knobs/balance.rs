//! Knobs of the balance: assignment of hash ranges to CPUs by load.

use forebay_rx::steer::{BalanceConfig, BalancePolicy};
use forebay_sys::error::Error;

use super::change::refused;

/// Largest `rps_balance_target`, in percent of the mean load.
const TARGET_MAX: u32 = 1_000;

/// Largest `rps_balance_rate`, in hash ranges per second.
const RATE_MAX: u32 = 1_000_000;

/// Bounds of `rps_balance_usecs`, in microseconds.
const WINDOW_US: [u32; 2] = [100, 10_000_000];

/// A change of one knob.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BalanceChange {
    /// `rps_balance`: by load or not.
    Policy(BalancePolicy),
    /// `rps_balance_target`: load that the busiest CPU may have, in percent of the mean.
    Target(u32),
    /// `rps_balance_rate`: hash ranges that may be reassigned in a second.
    Rate(u32),
    /// `rps_balance_usecs`: time between two measurements, in µs.
    Window(u32),
}

impl BalanceChange {
    /// Names of all knobs.
    pub const KNOBS: [&'static str; 4] =
        ["rps_balance", "rps_balance_target", "rps_balance_rate", "rps_balance_usecs"];

    /// Name of the knob.
    #[must_use]
    pub fn knob(self) -> &'static str {
        let [policy, target, rate, window] = Self::KNOBS;
        match self {
            Self::Policy(_) => policy,
            Self::Target(_) => target,
            Self::Rate(_) => rate,
            Self::Window(_) => window,
        }
    }

    /// Value as it reads back.
    #[must_use]
    pub fn value(self) -> String {
        match self {
            Self::Policy(BalancePolicy::Off) => "off".to_owned(),
            Self::Policy(BalancePolicy::Load) => "load".to_owned(),
            Self::Target(number) | Self::Rate(number) | Self::Window(number) => number.to_string(),
        }
    }

    /// Setting of a knob in a configuration; `None` if the knob is not one of the balance.
    #[must_use]
    pub fn current(knob: &str, config: BalanceConfig) -> Option<Self> {
        let all = [
            Self::Policy(config.policy),
            Self::Target(config.target_percent),
            Self::Rate(config.moves_per_second),
            Self::Window(config.window_us),
        ];
        all.into_iter().find(|change| change.knob() == knob)
    }

    /// Configuration after this change.
    #[must_use]
    pub fn applied_to(self, config: BalanceConfig) -> BalanceConfig {
        match self {
            Self::Policy(policy) => BalanceConfig { policy, ..config },
            Self::Target(target_percent) => BalanceConfig { target_percent, ..config },
            Self::Rate(moves_per_second) => BalanceConfig { moves_per_second, ..config },
            Self::Window(window_us) => BalanceConfig { window_us, ..config },
        }
    }

    /// Reads a knob's value; `None` if the knob is not one of the balance.
    ///
    /// # Errors
    /// If the value is invalid.
    pub fn parse(knob: &str, value: &str) -> Option<Result<Self, Error>> {
        let knob = Self::KNOBS.into_iter().find(|known| *known == knob)?;
        let number = |least: u32, most: u32| {
            let number = value.trim().parse().ok().filter(|number| (least..=most).contains(number));
            let why = || format!("it is a number from {least} to {most}");
            number.ok_or_else(|| refused(knob, value, &why()))
        };
        Some(match (knob, value.trim()) {
            ("rps_balance", "off") => Ok(Self::Policy(BalancePolicy::Off)),
            ("rps_balance", "load") => Ok(Self::Policy(BalancePolicy::Load)),
            ("rps_balance", _) => Err(refused(knob, value, "it is load or off")),
            ("rps_balance_target", _) => number(101, TARGET_MAX).map(Self::Target),
            ("rps_balance_rate", _) => number(0, RATE_MAX).map(Self::Rate),
            _ => number(WINDOW_US[0], WINDOW_US[1]).map(Self::Window),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rps_b_knobs_round_trip() {
        let mut config = BalanceConfig::default();
        for (knob, value) in [
            ("rps_balance", "load"),
            ("rps_balance_target", "120"),
            ("rps_balance_rate", "0"),
            ("rps_balance_usecs", "100"),
        ] {
            let change = BalanceChange::parse(knob, &format!(" {value} ")).unwrap().unwrap();
            assert_eq!((change.knob(), change.value().as_str()), (knob, value));
            assert_ne!(BalanceChange::current(knob, config), Some(change), "{knob} differs");
            config = change.applied_to(config);
            assert_eq!(BalanceChange::current(knob, config), Some(change));
        }
        assert!(BalanceChange::parse("rps_cpus", "3").is_none());
        assert_eq!(BalanceChange::current("rps_cpus", config), None);
    }

    #[test]
    fn rps_b_impossible_values_have_reasons() {
        for (knob, value, why) in [
            ("rps_balance", "on", "it is load or off"),
            ("rps_balance_target", "100", "it is a number from 101 to 1000"),
            ("rps_balance_rate", "-1", "it is a number from 0 to 1000000"),
            ("rps_balance_usecs", "10ms", "it is a number from 100 to 10000000"),
        ] {
            let error = BalanceChange::parse(knob, value).unwrap().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(knob), "{error}");
        }
    }
}
