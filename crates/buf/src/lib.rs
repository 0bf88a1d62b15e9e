//! The memory of the receive path: who owns a packet's bytes, and how they change hands.
//!
//! ```text
//!  region ──carved into──► chunks ──handed out as──► Frame ──moved through──► ring ──► another CPU
//!                            ▲                                                            │
//!                            └── free list ◄── the owner's inbox ◄── batches of 32 frames ◄──┘
//! ```
//!
//! Memory is one of Forebay's few islands of `unsafe`. Its public face is safe: nothing a
//! caller does with frames, pools and ring ends can read freed memory or alias a live buffer.

#[cfg(not(target_pointer_width = "64"))]
compile_error!(
    "Forebay is for 64-bit targets: it counts bytes and frames of packet memory, and positions that \
     devices know, in 64 bits. Build it for x86_64 or aarch64."
);

pub mod region; //       one piece of memory for all the frames of an engine
pub mod frame; //        one chunk of it: a move-only handle
pub mod chain; //        frames behind a frame: one packet in several pieces
pub mod frags; //        pieces behind a frame: payload left where a device put it
pub mod pool; //         the frames of one CPU, and the way home for the frames of others
pub mod recycle_ring; // buffers that one owner fills in turn, freed where they are read
pub mod device_owned; // frames that a device has in its hands
pub mod page_frag; //    pieces of memory that a peer shares, cut to any size
pub mod ring; //         single producer, single consumer: the only queue between CPUs
pub mod wake; //         who sleeps, and whom to wake

pub mod position; // a point in a ring's life: a counter that wraps
pub mod sum; //      the checksum's sum of bytes, by the vectors of the CPU at hand
mod free_batch; //   frames on their way home, thirty-two at a time
pub mod cache; //    cache lines: kept apart, and asked for ahead of their use
pub mod sync; //     the standard library's atomics, or loom's

pub use cache::{prefetch, prefetch_value, prefetch_value_to_write};
pub use device_owned::DeviceOwned;
pub use frame::Frame;
pub use page_frag::{PageFrag, PageFragCache};
pub use pool::Pool;
pub use position::Position;
pub use recycle_ring::RecycleRing;
pub use region::{Claim, Region};
