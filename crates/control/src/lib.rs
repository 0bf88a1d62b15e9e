//! Control plane: the knobs of an engine under the kernel's names, read and changed while it runs.
#![forbid(unsafe_code)]

pub mod handle; //      handle that changes a running engine
pub mod tree; //        tree of files, at the kernel's paths
mod files; //           reads and writes of its files
mod stats; //           counters of each CPU
#[cfg(feature = "mount")]
pub mod mount; //       the tree mounted on a directory, for shells and scripts
pub mod flow; //        names of flows, in common notations
pub mod connection; //  connections of a flow, as the socket layer tells them
pub mod explain; //     CPU of a flow, and the reason, in words
pub mod top_flows; //   flows with the most packets
pub mod names; //       short names of knobs
pub mod list; //        list of all knobs, with their meanings
pub mod config_file; // initial values of the knobs
pub mod preload_config; // environment of an unmodified program
pub mod run_options; // options of a run, in the same file
pub mod request; //     requests of the control socket
mod clients; //         slots of the socket's clients
mod session; //         session of one client
pub mod socket; //      listening end of the control socket
mod shared_socket; //   a control socket that forked processes share
pub mod client; //      client end of the control socket
pub mod places; //      discovery of runs

pub use client::ControlClient;
pub use config_file::ConfigFile;
pub use explain::Explanation;
pub use flow::FlowName;
pub use handle::Control;
#[cfg(feature = "mount")]
pub use mount::Mount;
pub use shared_socket::SharedControlSocket;
pub use socket::{BoundSocket, ControlSocket};
pub use tree::{EntryKind, TreeEntry};
