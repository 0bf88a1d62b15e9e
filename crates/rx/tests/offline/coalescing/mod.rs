//! Coalescing: what is merged, what is not and why, and that all of it can be taken apart again.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

mod frames; //   segments and frames
mod rig; //      a coalescer by itself
mod refused; //  every refusal, one field changed at a time
mod flushed; //  every reason to let go, and when
mod merged; //   what a merged packet is, and its segments again
mod gso; //      its description, and whoever cuts it by that
mod carried; //  what came before a frame, believed as far as the frame bears it out
mod partial; //  checksums that nobody says are partial
mod tunnel_frames; // segments inside tunnels
mod tunnels; //  what is merged inside tunnels, and its segments again
mod tunnel_refused; // every refusal of a tunnel
mod whole; //    packets that come whole, and are cut
mod limits; //   bytes, counts, and what advances in `lro` mode
mod table; //    the descriptors
mod device; //   checksums by the device
mod pieces; //   packets whose payload lies where a device put it
mod laws; //     what holds for any traffic
mod spines; //   the same on arrival and on delivery, while settings change
