//! Packet memory of the receive path: ownership of frames and their transfer between CPUs.
//!
//! ```text
//!  region ──carved into──► chunks ──handed out as──► Frame ──moved through──► ring ──► another CPU
//!                            ▲                                                            │
//!                            └── free list ◄── the owner's inbox ◄── batches of 32 frames ◄──┘
//! ```
//!
//! The crate is one of Forebay's few islands of `unsafe`. Its public interface is safe: no use of
//! frames, pools and ring ends can read freed memory or alias a live buffer.

#[cfg(not(target_pointer_width = "64"))]
compile_error!(
    "Forebay is for 64-bit targets: it counts bytes and frames of packet memory, and positions that \
     devices know, in 64 bits. Build it for x86_64 or aarch64."
);

pub mod region; //       memory that holds all the frames of an engine
pub mod frame; //        one chunk of it: a move-only handle
pub mod chain; //        frames behind a frame: one packet in several pieces
pub mod frags; //        pieces behind a frame: payload left where a device put it
pub mod pool; //         the frames of one CPU; returns frames of other CPUs to their owners
pub mod recycle_ring; // buffers that one owner fills in turn; freed in place
pub mod device_owned; // frames that a device holds
pub mod page_frag; //    pieces of memory shared with a peer, of any size
pub mod ring; //         single producer, single consumer: packets from one CPU to another
pub mod wake; //         sleep state of a CPU, and wake-ups

pub mod position; // a position in a ring: a counter that wraps
pub mod sum; //      the checksum's sum of bytes, vectorized
pub mod carryless; // a Toeplitz hash by multiplication
mod free_batch; //   frames on their way to their owner, 32 at a time
pub mod cache; //    cache lines: padding and prefetches
pub mod sync; //     the standard library's atomics, or loom's

pub use cache::{prefetch, prefetch_value, prefetch_value_to_write};
pub use device_owned::DeviceOwned;
pub use frame::Frame;
pub use page_frag::{PageFrag, PageFragCache};
pub use pool::Pool;
pub use position::Position;
pub use recycle_ring::RecycleRing;
pub use region::{Claim, Region};
