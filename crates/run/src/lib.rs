//! Whole runs: live devices or a capture through the receive path, and the report of what became of
//! every packet.

#![forbid(unsafe_code)]

pub mod run; //     live devices through it, and on to where packets go
pub mod replay; //  a capture through the whole path, every packet checked

pub mod report; //      what a run came to
pub mod order_check; // was every flow delivered in order?
mod outputs; //         what a run may write over
