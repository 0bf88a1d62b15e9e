//! Building blocks for tests of several crates. Not part of the product.
#![deny(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::new_without_default,
    reason = "tests panic"
)]

pub mod namespaces; // network namespaces for a test, and tools run in them
pub mod programs; //   executables that a test creates and runs
pub mod disk; //       a disk with limited room
pub mod host; //       a host of a stack, with a constant clock
pub mod memory; //     the heap of a thread, counted
pub mod packets; //    packets in one frame, and the same with pieces
