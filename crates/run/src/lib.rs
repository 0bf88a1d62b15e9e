//! Whole runs: live devices or a capture through the receive path, with a report on the fate of
//! every packet.

#![forbid(unsafe_code)]

pub mod run; //     live devices through the path, and on to the destinations of packets
pub mod replay; //  a capture through the whole path, every packet checked

pub mod report; //      numbers of a run
pub mod order_check; // check that every flow was delivered in order
mod outputs; //         files that a run may overwrite
