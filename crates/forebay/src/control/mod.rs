//! Control: what can be set, in the kernel's words, and when it changes.

pub mod change; //   a live change
pub mod script; //   those that are written down before a run
pub mod live; //     whoever changes a running engine
pub mod tree; //     the same as files, at the kernel's places
mod files; //       what they say and take
mod stats; //       what is counted
pub mod mount; //   the files in a directory, for shells and scripts
pub mod coalesce;
pub mod machine; // what the answers depend on
pub mod knob; //    every knob: its name, its place, its default
pub mod answer; //  what a knob answers when it is written to
pub mod flow; //    flows as people write them
pub mod explain; // where a flow is, and why, in words
pub mod names; //   the ends of paths that knobs go by
pub mod list; //    what each knob means
pub mod config_file; // what a run begins with
pub mod request; // the language of the control socket
mod seats; //       who may speak there
mod session; //     one client
pub mod socket; //  where clients come in
pub mod client; //  the other end of it
pub mod places; //  which runs there are

pub use answer::{Nonsense, REFUSED_NONSENSE, Refusal, Taken};
pub use change::{Change, Queues};
pub use client::ControlClient;
pub use coalesce::{Coalesce, CoalesceAt, CoalesceChange};
pub use config_file::ConfigFile;
pub use explain::Explanation;
pub use flow::FlowName;
pub use knob::{Knob, Place, Value};
pub use live::Control;
pub use machine::Machine;
pub use mount::Mount;
pub use script::{Script, ScriptedChange};
pub use socket::ControlSocket;
pub use tree::{Entry, EntryKind};
