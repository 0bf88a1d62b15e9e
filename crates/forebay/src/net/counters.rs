//! Counters of the network layer and of sockets.

pub use forebay_stack::network::{NetworkCounters, NetworkDrop};

pub use super::udp::SocketCounts;
