//! Arrive: frames come in bursts from a source.

use mem::Pool;

use crate::drop_reason::DropReason;
use crate::packet::{Arrival, Packet};

/// Where frames come from: a capture, a generator, a device queue.
///
/// One CPU polls a source, and never waits in it.
pub trait Source: Send {
    /// Adds frames to `burst`, in the order of arrival, in memory from `pool`.
    ///
    /// # Errors
    /// When the source is broken and will give no more. What came before stays in `burst`.
    fn poll(&mut self, ask: Ask, pool: &mut Pool, burst: &mut Burst)
    -> Result<Polled, SourceError>;
}

/// What a source is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// The engine's time.
    pub now_ns: u64,
    /// The most frames.
    pub max: usize,
    /// Whether a frame that is due while no packet memory is free may wait, if the source can keep
    /// it, rather than be dropped as by a device.
    pub may_wait: bool,
}

/// What broke a source, said so that a person can mend it.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// What a source has after a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// More, perhaps: poll again at once.
    Ready,
    /// Nothing before this time.
    IdleUntil {
        /// In the engine's time.
        now_ns: u64,
    },
    /// Nothing ever again.
    Exhausted,
}

/// Frames as they came from a source, oldest first.
#[derive(Debug, Default)]
pub struct Burst {
    /// Those that were received: packets that nothing is known about yet.
    pub packets: Vec<Packet>,
    /// Those that could not be.
    pub refused: Vec<Refused>,
    /// What the source has behind them. Whoever polls says so.
    pub behind: Behind,
}

/// What there is behind a burst: whether segments may wait for more of their kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Behind {
    /// More, right now.
    More,
    /// Nothing yet.
    #[default]
    Nothing,
    /// Nothing that segments may wait for: nothing ever again, or nothing before they make room.
    End,
}

impl Burst {
    /// How many frames came.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packets.len() + self.refused.len()
    }

    /// Whether none came.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A frame that the source had to let go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// Its place in the order of arrival.
    pub arrival: Arrival,
    /// Its length on the wire.
    pub wire_len: u32,
    /// Why.
    pub reason: DropReason,
}
