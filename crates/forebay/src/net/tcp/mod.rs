//! TCP sockets: connections in shards, which any CPU may work on.
//!
//! A connection belongs to the shard that a keyed hash of its ends names. The CPU that its packets are
//! steered to locks the shard for a segment, and so does a thread for a call. The drain rule makes the
//! packets of a connection come in order from one CPU at a time, so a connection follows its packets
//! without being handed over.

mod shards; //   the connections of the host
mod timers; //   when a CPU must look after its shards
mod explain; //  connections of a flow, for observers
mod listed; //   listeners and connections, for observers
mod short; //    writes that wait for memory
mod wait; //     wake-up of a TCP socket's waiters
mod call; //     calls that wait
mod listener; // the public listener
mod connect; //  opening of connections
mod stream; //   the public connection

pub(super) use listener::ListenOptions;
pub use listener::TcpListener;
pub(super) use shards::TcpShards;
pub use stream::TcpStream;
pub(super) use timers::TcpTicks;

#[cfg(test)]
mod idle;
