//! Control: what can be set, in the kernel's words, and when it changes.

pub mod change; //   a live change
pub mod script; //   those that are written down before a run
pub mod settings; // what all of them come to
pub mod refused; //  what became of one
pub mod live; //     whoever changes a running engine
pub mod tree; //     the same as files, at the kernel's places
mod files; //       what they say and take
mod stats; //       what is counted
pub mod mount; //   the files in a directory, for shells and scripts
pub mod coalesce;
pub mod cpus;
pub mod errno; //   the kernel's names for what is refused
mod number; //      the kernel's two ways of reading numbers
pub mod machine; // what the answers depend on
pub mod knob; //    every knob: its name, its place, its default
pub mod answer; //  what a knob answers when it is written to
pub mod flow; //    flows as people write them

pub use answer::{Nonsense, REFUSED_NONSENSE, Refusal, Taken};
pub use change::{Change, Queues};
pub use coalesce::{Coalesce, CoalesceAt, CoalesceChange};
pub use cpus::{CpuList, MaskError};
pub use errno::Errno;
pub use flow::FlowName;
pub use knob::{Knob, Place, Value};
pub use live::Control;
pub use machine::Machine;
pub use mount::Mount;
pub use refused::{Refused, Written};
pub use script::{Script, ScriptedChange};
pub use settings::{QueueSettings, Settings};
pub use tree::{Entry, EntryKind};
