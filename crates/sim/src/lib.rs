//! Simulation of the receive path on virtual CPUs: a virtual clock, seeded traffic, changes and
//! faults, and invariants ("laws") that are checked after every step.
//!
//! ```text
//!  scenario ─► traffic, readers, changes, faults ─► world ─► machine: path | kernel
//!                                                     └────► laws ─► report
//! ```
//!
//! A seed determines a run exactly, so any failure can be reproduced.
#![forbid(unsafe_code)]

pub mod scenario; // what may happen in a run, each a small value
mod everything; //   a scenario drawn entirely from the seed
mod action; //       changes and faults, drawn as they happen
mod shift; //        shifts of load
mod traffic; //      flows and their frames
mod readers; //      applications: the CPU on which each flow is read

mod virtual_cpu; //  activities of a CPU, and their durations
mod costs; //        costs of activities in virtual time
mod world; //        one run: a loop over events

mod rules; //        the rules that a run is under
mod machine; //      interface between a run and its rules
mod path_machine; // ours: the real path
mod kernel; //       Linux 6.18's, in a small model
mod indirection; //  RSS++'s, in a smaller one
mod recording; //    what ours leaves for outsiders to judge

mod census; //       location of all packets
mod laws; //         order, conservation, bounds, counters
mod liveness; //     arrival of every flow at its desired CPU in time
mod evenness; //     evenness of the load
pub mod report; //   many runs, in a table that a person reads

mod cpu_set; //      sets of CPUs

pub use evenness::Balanced;
pub use laws::Law;
pub use liveness::Wait;
pub use report::Summary;
pub use rules::Rules;
pub use scenario::{Overrides, Situation};
pub use world::{Recorded, SimOutcome, run, run_recorded};
