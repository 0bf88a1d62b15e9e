//! The program as people and scripts meet it: exit codes, what it prints where, and its options.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod advise; //         the masks for a machine
mod coalescing; //     its options and figures
mod control; //        a run that is asked and changed
mod hash_and_bench; // the other commands
mod captures; //       what is read, and what is refused
