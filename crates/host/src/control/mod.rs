//! Control: what can be set, in the kernel's words, and when it changes.

pub mod coalesce;
pub mod cpus;
pub mod script;

pub use coalesce::{Coalesce, CoalesceAt, CoalesceChange};
pub use cpus::{CpuList, MaskError};
pub use script::{Change, Script, ScriptedChange};
