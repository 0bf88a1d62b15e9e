//! Where and how packets are coalesced, as people say it.

use std::str::FromStr;

use path::coalesce::{CoalesceConfig, CoalesceMode};

use crate::error::Error;

/// Where packets are coalesced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CoalesceAt {
    /// On the CPU that polls, before steering, as in the kernel: one hand-over for all segments.
    #[default]
    Arrive,
    /// On the CPUs that packets were steered to: each merges its own.
    Deliver,
}

/// All that can be said about coalescing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Coalesce {
    /// Whether packets are coalesced.
    pub is_on: bool,
    /// Where.
    pub at: CoalesceAt,
    /// How.
    pub config: CoalesceConfig,
}

/// A part of it that changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CoalesceChange {
    /// On in this mode, or off.
    Mode(Option<CoalesceMode>),
    /// Where.
    At(CoalesceAt),
    /// Flows of which something can be held.
    Descriptors(u32),
    /// Nanoseconds that packets are held after the queue ran empty.
    GroFlushTimeout(u64),
    /// The longest IP packet that the device receives.
    Mtu(u32),
}

impl Coalesce {
    /// What an intake is told.
    #[must_use]
    pub fn on_arrival(&self) -> Option<CoalesceConfig> {
        (self.is_on && self.at == CoalesceAt::Arrive).then_some(self.config)
    }

    /// What a delivery is told.
    #[must_use]
    pub fn on_delivery(&self) -> Option<CoalesceConfig> {
        (self.is_on && self.at == CoalesceAt::Deliver).then_some(self.config)
    }

    /// The same after a change.
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
            CoalesceChange::Mtu(mtu) => self.config.mtu = mtu,
        }
        self
    }
}

impl CoalesceChange {
    /// Every knob's name.
    pub const KNOBS: [&'static str; 5] =
        ["coalesce", "coalesce_at", "lro_descriptors", "gro_flush_timeout", "mtu"];

    /// The knob's name.
    #[must_use]
    pub fn knob(self) -> &'static str {
        let [mode, at, descriptors, timeout, mtu] = Self::KNOBS;
        match self {
            Self::Mode(_) => mode,
            Self::At(_) => at,
            Self::Descriptors(_) => descriptors,
            Self::GroFlushTimeout(_) => timeout,
            Self::Mtu(_) => mtu,
        }
    }

    /// The value as it is read back.
    #[must_use]
    pub fn value(self) -> String {
        match self {
            Self::Mode(None) => "off".to_owned(),
            Self::Mode(Some(CoalesceMode::Gro)) => "gro".to_owned(),
            Self::Mode(Some(CoalesceMode::Lro)) => "lro".to_owned(),
            Self::At(CoalesceAt::Arrive) => "arrive".to_owned(),
            Self::At(CoalesceAt::Deliver) => "deliver".to_owned(),
            Self::Descriptors(number) | Self::Mtu(number) => number.to_string(),
            Self::GroFlushTimeout(ns) => ns.to_string(),
        }
    }

    /// Reads a knob's value; `None` if it is no knob of coalescing.
    ///
    /// # Errors
    /// When the value cannot be.
    pub fn parse(knob: &str, value: &str) -> Option<Result<Self, Error>> {
        let knob = Self::KNOBS.into_iter().find(|known| *known == knob)?;
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
            ("lro_descriptors", text) => between(text, 1, path::coalesce::LRO_DESCRIPTORS_MAX)
                .map(Self::Descriptors)
                .ok_or_else(|| refused("it is a number from 1 to 4096")),
            ("mtu", text) => between(text, MTU_MIN, MTU_MAX)
                .map(Self::Mtu)
                .ok_or_else(|| refused("it is a number from 68 to 65535")),
            (_, text) => text
                .parse()
                .map(Self::GroFlushTimeout)
                .map_err(|_| refused("it is a number of nanoseconds")),
        };
        Some(parsed)
    }
}

/// The smallest MTU that IPv4 can do with (RFC 791), as in the kernel.
pub const MTU_MIN: u32 = 68;

/// The longest IP packet.
pub const MTU_MAX: u32 = 65_535;

fn between<N: FromStr + PartialOrd>(text: &str, least: N, most: N) -> Option<N> {
    text.parse().ok().filter(|number| *number >= least && *number <= most)
}
