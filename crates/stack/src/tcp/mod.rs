//! TCP: connections, listeners and their timers, without I/O, clock or randomness. A [`Tcp`] is one shard of a
//! host.
//!
//! ```text
//!  segment ─► machine ─┬─► connection ─► receive queue ─► reader
//!                      ├─► handshake (listener's requests, cookies) ─► accept queue
//!                      └─► TIME-WAIT
//!  calls, timers ──────┴─► segments to be sent
//! ```
//!
//! The rules are those of RFC 9293 and its companions as Linux 6.18 reads them; names in parentheses
//! are the kernel's. Data stay in the frames that they came in, and a merged packet is taken whole.

mod machine; //    the spine: from a packet to its connection, and out again
mod connection; // one connection: its state, and the stages that change it
mod wire; //       headers and options

mod error_queue; //   reports of what was sent
mod receive_queue; // received bytes in their frames, and out-of-order payloads
mod send_queue; //    written bytes until they are acknowledged
mod sack; //          selective acknowledgements to be sent
mod congestion; //    congestion window: NewReno, CUBIC
mod hystart; //       end of the first slow start
mod rtt; //           round-trip time, time-out

mod flow; //        the two ends of a connection
mod connection_table; // connections, handshakes and TIME-WAIT, by flow
mod isn; //         secrets: sequence numbers, cookies, ports
mod fast_open; //   data in a SYN: cookies, settings
mod memory; //      limits that all connections share
mod invalid_limit; // answers to segments out of the window
mod slots; //       values by index
mod on_demand; //   values that an idle connection does not keep
mod timer_wheel; // deadlines
mod passed; //    connections on their way to another process
mod seq; //         sequence numbers

pub mod config; //   settings and socket options
pub mod counters; // named as the kernel's
pub mod error; //    named as the kernel's
pub mod kernel_form; // what the kernel's calls read and write

pub use config::{
    Algorithm, FamilyOptions, MtuProbing, SynCookies, TcpConfig, TcpOptions, Timestamping,
};
pub use connection::{
    BusyTime, IcmpMessage, Limit, PathError, Phase, ReadMode, Readiness, Resent, State, Tally,
    TcpInfo, WindowScales, WriteFlags,
};
pub use counters::TcpCounters;
pub use error::TcpError;
pub use error_queue::{SentEvent, TcpReport};
pub use fast_open::{FastOpen, FastOpenCache, FastOpenKeys, FastOpenOptions};
pub use flow::{Flow, FlowHasher, HashedFlow, PackedFlow};
pub use machine::{
    Found, ListenerQueues, Listening, ReusePort, Tcp, TcpDevice, TcpLevels, TcpOut, TcpSocket,
};
pub use memory::TcpMemory;
pub use passed::PassedConnection;
pub use seq::Seq;
