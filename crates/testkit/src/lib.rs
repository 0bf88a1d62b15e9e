//! Parts that tests of several crates are made of. No part of the product.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::new_without_default,
    reason = "tests panic"
)]

pub mod namespaces; // network namespaces of a test's own, and the tools run in them
pub mod programs; //   programs that a test makes, and runs
pub mod host; //       a host of a stack, whose clock stands
pub mod packets; //    packets in one frame, and the same in pieces
