//! Engine: one pinned thread per CPU, or one seeded scheduler in place of all.
//!
//! A turn of a CPU runs the intakes of the queues that it polls, then its delivery, 64 packets
//! each; an idle CPU sleeps. [`threads`] runs turns on threads; [`stepped`] runs the same turns on
//! one thread, in an order that a seed determines.
#![forbid(unsafe_code)]

pub mod knobs; //  settings that can be changed, and the answer to a write
pub mod trace; //  plain files from which external tools can judge a run
pub mod timeline; // counters at several times of a run, for pictures

mod engine; //     an engine: handles, and the ways to run it
mod build; //      construction of an engine
mod config; //     configuration of an engine
mod devices; //    numbers of the devices' queues
mod memory; //     packet memory: its size, the sizes of its chunks

mod threads; //    a thread for each CPU
mod start_barrier; // the threads' wait for each other as a run begins
mod stepped; //    one seeded scheduler in place of the threads
mod cpu_thread; // one CPU's loop: turns, spinning, sleep
mod worker; //     one CPU's turn: its queues, its delivery, its handler
mod queue; //      one rx queue: source, memory, intake, changes
mod pollers; //    the CPU that polls each queue, of those that run
mod idle; //       time to spin before a sleep
mod busy_poll; //  turns of a sleeping CPU by threads of the application
mod cpu_waker; //  wake-ups of CPUs
pub(crate) mod mailbox; // queues handed over to a CPU
mod limits; //     budgets of a turn
mod policies; //   balance and spread, by the load of the CPUs
mod measured; //   times that are measured on request
mod flows; //      recorder of the CPUs that applications run on

mod changes; //    live changes: checked, prepared, numbered
pub mod log; //    the changes in one order for all threads
mod settings; //   settings of all knobs, in force or not
mod question; //   questions to the queues, between their turns
mod deferred_free; // replaced tables, freed on a thread of its own
mod shared; //     state that the threads share
mod outcome; //    outcome of a run

pub use busy_poll::{Arrived, BusyPoll};
pub use changes::{CHANGES_MAX, QUESTIONS_MAX};
pub use config::{Config, SPARE_FRAMES, WhenFull};
pub use cpu_thread::{CpuThread, is_cpu};
pub use devices::{DeviceQueues, Devices};
pub use engine::{Engine, Stopper};
pub use flows::Flows;
pub use idle::{SPIN_ALWAYS_NS, SPIN_MAX_NS};
pub use limits::{BURST_MAX, DEFER_MAX, Limits};
pub use measured::Measured;
pub use memory::kept_bytes;
pub use outcome::{CpuOutcome, Outcome};
pub use question::{
    BURST_REQUESTS_MAX, Explained, HASH_RANGES, Question, QueueRanges, SampledBurst, SampledPacket,
};
pub use settings::{QueueSettings, Settings};
pub use shared::{CpuProgress, EngineState};
pub use stepped::VirtualCosts;
pub use threads::PANICS_IN_A_ROW;
