//! Knobs: settings under the kernel's names, and the answer to a write.

pub mod knob; //     every knob: its name, its place, its default
pub mod change; //   a live change
pub mod text; //     a change as text, for a command line or a script
pub mod script; //   changes that are scripted before a run
pub mod coalesce; // the knobs of coalescing, in ethtool's words
pub mod balance; //  the knobs of the balance
pub mod spread; //   the knobs of the number of CPUs
pub mod answer; //   the answer of a knob that is written to
pub mod write; //    the change that a write to a knob of the kernel makes
pub mod machine; //  facts of the machine that the answers depend on

pub use answer::{
    InvalidInput, KERNEL_RPS_FLOW_CNT_MAX, KnobRefusal, REFUSED_INVALID_INPUT, TakenValue,
};
pub use balance::BalanceChange;
pub use change::{Change, Queues};
pub use coalesce::{Coalesce, CoalesceAt, CoalesceChange};
pub use knob::{Knob, KnobPlace, Value};
pub use machine::Machine;
pub use script::{Script, ScriptedChange, ScriptedText};
pub use spread::SpreadChange;
pub use text::ChangeText;
