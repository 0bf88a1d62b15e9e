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

pub mod scenario; // events that may happen in a run, each a small value
mod everything; //   scenario in which everything is drawn
mod action; //       changes and faults; their details are drawn when they occur
mod traffic; //      flows and their frames
mod readers; //      applications: the CPU on which each flow is read

mod virtual_cpu; //  activities of a CPU, and their durations
mod costs; //        costs of activities in virtual time
mod world; //        one run: a loop over events

mod rules; //        rules that a run is under
mod machine; //      interface between a run and its rules
mod path_machine; // Forebay's rules: the real path
mod kernel; //       rules of Linux 6.18, in a small model
mod recording; //    trace of a run for independent checkers

mod census; //       location of all packets
mod laws; //         order, conservation, bounds, counters
mod liveness; //     every wish is granted in a bounded time
pub mod report; //   summaries of many runs

mod cpu_set; //      sets of CPUs

pub use laws::Law;
pub use liveness::Wait;
pub use report::Summary;
pub use rules::Rules;
pub use scenario::{Overrides, Situation};
pub use world::{SimOutcome, run, run_recorded};
