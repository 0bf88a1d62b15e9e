//! TCP headers: read from packets, and written in front of payloads.
// Received bytes are accessed by patterns and checked slices only.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::panic))]

pub(super) mod options; // maximum segment size, scale, SACK, timestamps
pub(super) mod emit; //    a segment to be sent
pub(super) mod segment; // a segment received

pub(super) use emit::{Outgoing, emit};
pub(super) use options::{Options, SackBlock, SackBlocks, TIMESTAMPS_BYTES, Timestamps};
pub(super) use segment::{Flags, Segment};
