//! Control: what can be set, in the kernel's words, and when it changes.

pub mod coalesce;
pub mod cpus;
pub mod script;
pub mod errno; //   the kernel's names for what is refused
mod number; //      the kernel's two ways of reading numbers
pub mod machine; // what the answers depend on
pub mod knob; //    every knob: its name, its place, its default
pub mod answer; //  what a knob answers when it is written to

pub use answer::{Nonsense, REFUSED_NONSENSE, Refusal, Taken};
pub use coalesce::{Coalesce, CoalesceAt, CoalesceChange};
pub use cpus::{CpuList, MaskError};
pub use errno::Errno;
pub use knob::{Knob, Place, Value};
pub use machine::Machine;
pub use script::{Change, Script, ScriptedChange};
