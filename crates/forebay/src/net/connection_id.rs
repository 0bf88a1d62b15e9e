//! Connection IDs of QUIC that name the endpoint they belong to.

pub use forebay_stack::socket::connection_id::{ConnectionId, ConnectionIds, EndpointIndex};
