//! Knobs: what can be set, in the kernel's words, and what writing to one answers.

pub mod knob; //     every knob: its name, its place, its default
pub mod change; //   a live change
pub mod script; //   those that are written down before a run
pub mod coalesce; // the knobs of coalescing, in ethtool's words
pub mod balance; //  the knobs of the balance
pub mod answer; //   what a knob answers when it is written to
pub mod machine; //  what the answers depend on

pub use answer::{InvalidInput, KnobRefusal, REFUSED_INVALID_INPUT, TakenValue};
pub use balance::BalanceChange;
pub use change::{Change, Queues};
pub use coalesce::{Coalesce, CoalesceAt, CoalesceChange};
pub use knob::{Knob, KnobPlace, Value};
pub use machine::Machine;
pub use script::{Script, ScriptedChange};
