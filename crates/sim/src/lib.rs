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
mod everything; //   a scenario of which all is drawn
mod action; //       changes and faults, drawn when their time comes
mod traffic; //      flows and their frames
mod readers; //      the applications: on which CPU each flow is read

mod virtual_cpu; //  who does what, and for how long
mod costs; //        what things cost in virtual time
mod world; //        one run: the next thing happens, again and again

mod rules; //        whose rules a run is under
mod machine; //      what a run asks of the rules it runs under
mod path_machine; // ours: the real path
mod kernel; //       Linux 6.18's, in a small model
mod recording; //    what ours leaves for outsiders to judge

mod census; //       where all packets are
mod laws; //         order, conservation, bounds, counters
mod liveness; //     is every wish granted in time?
pub mod report; //   many runs, in a table that a person reads

mod cpu_set; //      a few CPUs

pub use laws::Law;
pub use liveness::Wait;
pub use report::Summary;
pub use rules::Rules;
pub use scenario::{Overrides, Situation};
pub use world::{SimOutcome, run, run_recorded};
