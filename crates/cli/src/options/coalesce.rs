//! Options of coalescing.

use clap::{Args, ValueEnum};
use forebay_engine::knobs::coalesce::{MTU_MAX, MTU_MIN};
use forebay_engine::knobs::{Coalesce, CoalesceAt};
use forebay_rx::coalesce::{CoalesceConfig, CoalesceMode};

/// Initial settings of coalescing.
#[derive(Debug, Args)]
pub(crate) struct CoalesceOptions {
    /// Merge segments of one flow: what can be taken apart again exactly (gro), also TCP whose
    /// acknowledgement, window and timestamps advance (lro), or nothing [default: off; gro if one
    /// of the next four options is given]
    #[arg(long, value_enum)]
    pub(crate) coalesce: Option<CoalesceArg>,

    /// Where: before steering, as in the kernel, or on the CPUs that packets were steered to
    /// [default: arrive]
    #[arg(long, value_enum)]
    pub(crate) coalesce_at: Option<CoalesceAtArg>,

    /// Nanoseconds that a packet waits for more segments after the queue ran empty (arrive)
    /// [default: 0]
    #[arg(long, value_name = "NS")]
    pub(crate) gro_flush_timeout: Option<u64>,

    /// Flows of which segments can be held at once, rounded up to a power of two [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32)
          .range(1..=i64::from(forebay_rx::coalesce::LRO_DESCRIPTORS_MAX)))]
    pub(crate) descriptors: Option<u32>,

    /// The longest IP packet that the device receives, for which lro leaves room [default: 1500]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32)
          .range(i64::from(MTU_MIN)..=i64::from(MTU_MAX)))]
    pub(crate) mtu: Option<u32>,
}

/// Warning: fields that frames merged in `lro` mode take from the newest segment.
const LOST_IN_LRO: &str = "frames that lro has merged come back with the newest acknowledgement, \
    window, timestamps and IP id of their packet, not each with its own; gro gives back all";

/// Kinds of packets that are merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CoalesceArg {
    /// What can be taken apart again exactly
    Gro,
    /// TCP whose acknowledgement, window and timestamps advance, too
    Lro,
    /// Nothing
    Off,
}

/// Stage at which packets are coalesced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CoalesceAtArg {
    /// Before steering
    Arrive,
    /// On the CPUs that packets were steered to
    Deliver,
}

impl CoalesceOptions {
    /// Settings for the engine: `gro` mode if only other options of coalescing are given.
    pub(crate) fn coalesce(&self) -> Coalesce {
        let mode = match self.coalesce {
            Some(CoalesceArg::Gro) => Some(CoalesceMode::Gro),
            Some(CoalesceArg::Lro) => Some(CoalesceMode::Lro),
            Some(CoalesceArg::Off) => None,
            None => self.is_asked().then_some(CoalesceMode::default()),
        };
        let default = CoalesceConfig::default();
        Coalesce {
            is_on: mode.is_some(),
            at: match self.coalesce_at {
                Some(CoalesceAtArg::Deliver) => CoalesceAt::Deliver,
                Some(CoalesceAtArg::Arrive) | None => CoalesceAt::Arrive,
            },
            config: CoalesceConfig {
                mode: mode.unwrap_or_default(),
                descriptors: self.descriptors.unwrap_or(default.descriptors),
                mtu: self.mtu.unwrap_or(default.mtu),
                gro_flush_timeout_ns: self
                    .gro_flush_timeout
                    .unwrap_or(default.gro_flush_timeout_ns),
                ..default
            },
            ..Coalesce::default()
        }
    }

    /// True if an option is given that is about what is merged.
    fn is_asked(&self) -> bool {
        self.coalesce_at.is_some()
            || self.gro_flush_timeout.is_some()
            || self.descriptors.is_some()
            || self.mtu.is_some()
    }

    /// Warning about the fields that `--resegment` cannot restore, if any.
    pub(crate) fn lost(&self) -> Option<&'static str> {
        (self.coalesce == Some(CoalesceArg::Lro)).then_some(LOST_IN_LRO)
    }

    /// Knobs that these options set, each with true if its option, or one that implies it, is given.
    pub(crate) fn given(&self) -> [(&'static str, bool); 5] {
        [
            ("coalesce", self.coalesce.is_some() || self.is_asked()),
            ("coalesce_at", self.coalesce_at.is_some()),
            ("gro_flush_timeout", self.gro_flush_timeout.is_some()),
            ("lro_descriptors", self.descriptors.is_some()),
            ("mtu", self.mtu.is_some()),
        ]
    }
}
