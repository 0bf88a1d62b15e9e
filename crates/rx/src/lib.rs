//! The receive path: what happens to a packet between a device's queue and the application.
//!
//! ```text
//!  source ─► arrive ─► parse ─► hash ─► coalesce ─► steer ─►║ backlog ║─► (coalesce) ─► handler
//!  └────────────── Intake: the CPU that polls ─────────────┘ └ rings ─┘ └ Delivery: where it was steered
//! ```
//!
//! Nothing here does I/O, reads a clock, starts a thread or draws a random number: times, seeds
//! and CPU ids are arguments. So the engine on real threads, the deterministic one and the tests
//! run the same code. A stage returns a verdict; errors are for the control plane.
#![forbid(unsafe_code)]

pub mod arrive; //      frames come in bursts from a source
pub mod parse; //       one walk over the headers, checksums verified
pub mod flow_key; //    what tells a flow: outer headers, inner ones, an ID
pub mod hash; //        the flow's hash: keyed, Toeplitz, or the device's
pub mod coalesce; //    segments of one flow become one packet
pub mod steer; //       which CPU, and why: RPS map, flow table, held moves
pub mod backlog; //     the rings between the polling CPU and the others
pub mod intake; //      the first spine: from the source to the backlog
pub mod delivery; //    the second spine: from the backlog to the handler
pub mod sink; //        the way out: what a device sends, and what not

pub mod ordered_queue; // from many CPUs to one taker, in order
pub mod packet; //        one frame and what the stages found out about it
pub mod nonlinear; //     a frame's bytes, and those of the pieces behind it
pub mod cpu; //           ids of CPUs and rx queues
pub mod reasons; //       a name and a place for each of some reasons
pub mod steer_reason; //  the names of all reasons to go to a CPU
pub mod drop_reason; //   the names of all losses
pub mod counters; //      numbers with one writer

pub use arrive::Source;
pub use cpu::{CpuId, RxQueue};
pub use delivery::{Delivery, Handler};
pub use drop_reason::DropReason;
pub use intake::Intake;
pub use packet::Packet;
pub use sink::Sink;
pub use steer_reason::SteerReason;
