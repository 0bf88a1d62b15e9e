//! Control: what can be set, in the kernel's words, and when it changes.
#![forbid(unsafe_code)]

pub mod handle; //      whoever changes a running engine
pub mod tree; //        the same as files, at the kernel's places
mod files; //           what they say and take
mod stats; //           what is counted
#[cfg(feature = "mount")]
pub mod mount; //       the files in a directory, for shells and scripts
pub mod flow; //        flows as people write them
pub mod explain; //     where a flow is, and why, in words
pub mod names; //       the ends of paths that knobs go by
pub mod list; //        what each knob means
pub mod config_file; // what a run begins with
pub mod request; //     the language of the control socket
mod clients; //         who may speak there
mod session; //         one client
pub mod socket; //      where clients come in
pub mod client; //      the other end of it
pub mod places; //      which runs there are

pub use client::ControlClient;
pub use config_file::ConfigFile;
pub use explain::Explanation;
pub use flow::FlowName;
pub use handle::Control;
#[cfg(feature = "mount")]
pub use mount::Mount;
pub use socket::ControlSocket;
pub use tree::{EntryKind, TreeEntry};
