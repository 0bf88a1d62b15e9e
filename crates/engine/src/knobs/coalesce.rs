//! Settings of coalescing, and their text form.

use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode};
use forebay_sys::error::Error;

use super::knob::Knob;

/// Place of coalescing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CoalesceAt {
    /// On the polling CPU, before steering, as in the kernel: one hand-over for all segments.
    #[default]
    Arrive,
    /// On the CPUs that packets are steered to: each merges its own.
    Deliver,
}

/// Settings of coalescing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Coalesce {
    /// True if packets are coalesced.
    pub is_on: bool,
    /// Place.
    pub at: CoalesceAt,
    /// Mode.
    pub config: CoalesceConfig,
    /// Number of empty polls in a row, one `gro_flush_timeout` apart, before a CPU sleeps on the
    /// descriptors of its queues. In force even if packets are not coalesced.
    pub napi_defer_hard_irqs: u32,
}

/// A change of one setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CoalesceChange {
    /// On in this mode, or off.
    Mode(Option<CoalesceMode>),
    /// Place.
    At(CoalesceAt),
    /// Maximum number of flows with held segments.
    Descriptors(u32),
    /// Time that packets are held after the queue ran empty, in nanoseconds.
    GroFlushTimeout(u64),
    /// Number of empty polls in a row before a CPU sleeps on descriptors.
    NapiDeferHardIrqs(u32),
    /// Length of the longest IP packet that the device receives, in bytes.
    Mtu(u32),
}

impl Coalesce {
    /// Configuration for an intake; `None` if that does not coalesce.
    #[must_use]
    pub fn on_arrival(&self) -> Option<CoalesceConfig> {
        (self.is_on && self.at == CoalesceAt::Arrive).then_some(self.config)
    }

    /// Configuration for a delivery; `None` if that does not coalesce.
    #[must_use]
    pub fn on_delivery(&self) -> Option<CoalesceConfig> {
        (self.is_on && self.at == CoalesceAt::Deliver).then_some(self.config)
    }

    /// True if a change also affects when CPUs sleep.
    #[must_use]
    pub fn is_deferral(&self, change: CoalesceChange) -> bool {
        match change {
            CoalesceChange::NapiDeferHardIrqs(_) => true,
            CoalesceChange::GroFlushTimeout(_) => self.napi_defer_hard_irqs > 0,
            _ => false,
        }
    }

    /// Settings after a change.
    #[must_use]
    pub fn after(mut self, change: CoalesceChange) -> Self {
        match change {
            CoalesceChange::Mode(mode) => {
                self.is_on = mode.is_some();
                self.config.mode = mode.unwrap_or(self.config.mode);
            }
            CoalesceChange::At(at) => self.at = at,
            CoalesceChange::Descriptors(descriptors) => self.config.descriptors = descriptors,
            CoalesceChange::GroFlushTimeout(ns) => self.config.gro_flush_timeout_ns = ns,
            CoalesceChange::NapiDeferHardIrqs(polls) => self.napi_defer_hard_irqs = polls,
            CoalesceChange::Mtu(mtu) => self.config.mtu = mtu,
        }
        self
    }
}

impl CoalesceChange {
    /// Names of all knobs.
    pub const KNOBS: [&'static str; 6] = [
        "coalesce",
        "coalesce_at",
        "lro_descriptors",
        "gro_flush_timeout",
        "napi_defer_hard_irqs",
        "mtu",
    ];

    /// Name of the knob.
    #[must_use]
    pub fn knob(self) -> &'static str {
        let [mode, at, descriptors, timeout, defer, mtu] = Self::KNOBS;
        match self {
            Self::Mode(_) => mode,
            Self::At(_) => at,
            Self::Descriptors(_) => descriptors,
            Self::GroFlushTimeout(_) => timeout,
            Self::NapiDeferHardIrqs(_) => defer,
            Self::Mtu(_) => mtu,
        }
    }

    /// Value as it reads back.
    #[must_use]
    pub fn value(self) -> String {
        match self {
            Self::Mode(None) => "off".to_owned(),
            Self::Mode(Some(CoalesceMode::Gro)) => "gro".to_owned(),
            Self::Mode(Some(CoalesceMode::Lro)) => "lro".to_owned(),
            Self::At(CoalesceAt::Arrive) => "arrive".to_owned(),
            Self::At(CoalesceAt::Deliver) => "deliver".to_owned(),
            Self::Descriptors(number) | Self::NapiDeferHardIrqs(number) | Self::Mtu(number) => {
                number.to_string()
            }
            Self::GroFlushTimeout(ns) => ns.to_string(),
        }
    }

    /// Reads a knob's value; `None` if the knob is not one of coalescing, or is one of the
    /// [kernel](Knob), which has its own way to read values.
    ///
    /// # Errors
    /// If the value is invalid.
    pub fn parse(knob: &str, value: &str) -> Option<Result<Self, Error>> {
        let knob = Self::KNOBS.into_iter().find(|known| *known == knob)?;
        if Knob::named(knob).is_some() {
            return None;
        }
        let refused = |why: &str| {
            let (value, why) = (value.to_owned(), why.to_owned());
            Error::Setting { what: knob, value, why }
        };
        let parsed = match (knob, value.trim()) {
            ("coalesce", "off") => Ok(Self::Mode(None)),
            ("coalesce", "gro") => Ok(Self::Mode(Some(CoalesceMode::Gro))),
            ("coalesce", "lro") => Ok(Self::Mode(Some(CoalesceMode::Lro))),
            ("coalesce", _) => Err(refused("it is gro, lro or off")),
            ("coalesce_at", "arrive") => Ok(Self::At(CoalesceAt::Arrive)),
            ("coalesce_at", "deliver") => Ok(Self::At(CoalesceAt::Deliver)),
            ("coalesce_at", _) => Err(refused("it is arrive or deliver")),
            (_, text) => between(text, 1, forebay_rx::coalesce::LRO_DESCRIPTORS_MAX)
                .map(Self::Descriptors)
                .ok_or_else(|| refused("it is a number from 1 to 4096")),
        };
        Some(parsed)
    }
}

/// Smallest MTU that IPv4 allows (RFC 791), as in the kernel, in bytes.
pub const MTU_MIN: u32 = 68;

/// Length of the longest IP packet, in bytes.
pub const MTU_MAX: u32 = 65_535;

fn between(text: &str, least: u32, most: u32) -> Option<u32> {
    text.parse().ok().filter(|number| (least..=most).contains(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::Change;

    fn parsed(knob: &str, value: &str) -> Option<Result<CoalesceChange, String>> {
        CoalesceChange::parse(knob, value).map(|read| read.map_err(|error| error.to_string()))
    }

    /// Settings after these changes, in order.
    fn after(words: &[(&str, &str)]) -> Coalesce {
        let changes =
            words.iter().map(|(knob, value)| match format!("{knob}={value}").parse().unwrap() {
                Change::Coalesce(change) => change,
                other => panic!("{other:?}"),
            });
        changes.fold(Coalesce::default(), Coalesce::after)
    }

    #[test]
    fn knobs_round_trip() {
        let values: [(&str, &[&str]); 3] = [
            ("coalesce", &["off", "gro", "lro"]),
            ("coalesce_at", &["arrive", "deliver"]),
            ("lro_descriptors", &["1", "8", "4096"]),
        ];
        let own = CoalesceChange::KNOBS.into_iter().filter(|knob| Knob::named(knob).is_none());
        assert_eq!(values.map(|(knob, _)| knob).to_vec(), own.collect::<Vec<_>>());
        for (knob, values) in values {
            for value in values {
                let change = parsed(knob, &format!(" {value} ")).unwrap().unwrap();
                assert_eq!((change.knob(), change.value().as_str()), (knob, *value));
            }
        }
    }

    #[test]
    fn impossible_knob_leaves_others() {
        for (knob, value, why) in [
            ("coalesce", "on", "it is gro, lro or off"),
            ("coalesce", "", "it is gro, lro or off"),
            ("coalesce_at", "steer", "it is arrive or deliver"),
            ("lro_descriptors", "0", "it is a number from 1 to 4096"),
            ("lro_descriptors", "4097", "it is a number from 1 to 4096"),
        ] {
            let message = parsed(knob, value).unwrap().unwrap_err();
            assert!(message.contains(why) && message.contains(knob), "{knob}={value}: {message}");
        }
        assert_eq!(parsed("rps_cpus", "3"), None);
        assert_eq!(parsed("", "off"), None);
    }

    #[test]
    fn one_end_coalesces_at_most() {
        assert_eq!((after(&[]).on_arrival(), after(&[]).on_delivery()), (None, None));
        for (at, is_arrival) in [("arrive", true), ("deliver", false)] {
            let on = after(&[("mtu", "9000"), ("coalesce", "lro"), ("coalesce_at", at)]);
            let config =
                CoalesceConfig { mode: CoalesceMode::Lro, mtu: 9000, ..Default::default() };
            assert_eq!(on.on_arrival(), is_arrival.then_some(config));
            assert_eq!(on.on_delivery(), (!is_arrival).then_some(config));
            let off = on.after(CoalesceChange::Mode(None));
            assert_eq!((off.on_arrival(), off.on_delivery()), (None, None));
        }
    }

    #[test]
    fn deferred_settings_apply_when_enabled() {
        let words = [
            ("coalesce", "lro"),
            ("coalesce", "off"),
            ("lro_descriptors", "32"),
            ("gro_flush_timeout", "900"),
            ("coalesce", "gro"),
        ];
        let config = CoalesceConfig {
            descriptors: 32,
            gro_flush_timeout_ns: 900,
            ..CoalesceConfig::default()
        };
        assert_eq!(after(&words).on_arrival(), Some(config));
    }
}
