//! The receive path: from a device's receive queue to the application.
//!
//! ```text
//!  source ─► arrive ─► parse ─► hash ─► coalesce ─► steer ─►║ backlog ║─► (coalesce) ─► handler
//!  └────────────── Intake: the CPU that polls ─────────────┘ └ rings ─┘ └ Delivery: where it was steered
//! ```
//!
//! Nothing here does I/O, reads a clock, starts a thread or draws a random number: times, seeds and
//! CPU ids are arguments. The engine on real threads, the deterministic one and the tests therefore
//! run the same code. A stage returns a verdict; errors are for the control plane.
#![forbid(unsafe_code)]

pub mod arrive; //      frames come in bursts from a source
pub mod parse; //       one walk over the headers, checksums verified
pub mod flow_key; //    the bytes that identify a flow, of outer or inner headers
pub mod hash; //        the flow's hash: keyed, Toeplitz, or the device's
pub mod coalesce; //    segments of one flow become one packet
pub mod steer; //       the CPU and the reason: RPS map, flow table, held moves
pub mod backlog; //     the rings between the polling CPU and the others
pub mod intake; //      the first spine: from the source to the backlog
pub mod delivery; //    the second spine: from the backlog to the handler
pub mod sink; //        egress: packets sent through a device, or dropped

pub mod ordered_queue; // from many CPUs to one consumer, in order
pub mod packet; //        a frame and the metadata of the stages
pub mod nonlinear; //     bytes of a frame and of its pieces
pub mod cpu; //           ids of CPUs and rx queues
pub mod reasons; //       enums of reasons, with names and indices
pub mod steer_reason; //  names of the reasons for a packet's CPU
pub mod drop_reason; //   names of the reasons for a drop
pub mod counters; //      counters with one writer each

pub use arrive::Source;
pub use cpu::{CpuId, RxQueue};
pub use delivery::{Delivery, Handler};
pub use drop_reason::DropReason;
pub use intake::Intake;
pub use packet::Packet;
pub use sink::Sink;
pub use steer_reason::SteerReason;
