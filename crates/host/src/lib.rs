//! Forebay: a modern kernel's receive path, in user space.
//!
//! Packets come from one receive queue and are delivered on every core, in order. The path itself
//! is in the crate `path`, its memory in `mem`; this crate is where they meet Linux.

pub mod device; //  where frames come from
pub mod engine; //  one pinned thread for each CPU, or one seeded scheduler
pub mod control; // what can be set, in the kernel's words
pub mod run; //     live devices through it, and on to where packets go
pub mod replay; //  a capture through the whole path, every packet checked

pub mod report; //   what a run came to
mod outputs; //     what it may write over
pub mod topology; // which CPUs are near each other, and the masks that follow
pub mod ledger; //  was every flow delivered in order?
pub mod trace; //   plain files from which outsiders can judge a run
pub mod clock; //   engine time: the machine's, or a scheduler's
pub mod random; //  numbers that a seed determines
pub mod sys; //     what the engine asks of Linux
pub mod error; //   what can go wrong, where, and what to do

pub use error::{Error, Result};
