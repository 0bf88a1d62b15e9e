//! Rules that a run is under.

use std::fmt;

use forebay_rx::steer::BalancePolicy;
use serde::Serialize;

use crate::scenario::Scenario;

/// Rules that packets are steered by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Rules {
    /// Forebay's rules: the real path.
    Forebay,
    /// Forebay's rules with the load left where the map has it.
    Ranges,
    /// Rules of Linux 6.18, in a small model.
    Kernel,
    /// The model of Linux with the rule of RSS++, which balances by load and keeps no order.
    #[serde(rename = "rss++")]
    RssPlusPlus,
}

impl Rules {
    /// The scenario under these rules.
    pub(crate) fn applied_to(self, mut scenario: Scenario) -> Scenario {
        match self {
            Self::Forebay | Self::Kernel => {}
            Self::Ranges => scenario.knobs.balance.policy = BalancePolicy::Off,
            Self::RssPlusPlus => scenario.knobs.indirection = true,
        }
        scenario
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forebay => "forebay",
            Self::Ranges => "ranges",
            Self::Kernel => "kernel",
            Self::RssPlusPlus => "rss++",
        })
    }
}
