//! Coalescing: merged packets, refused ones with their reasons, and exact resegmentation.

#![allow(clippy::unwrap_used, reason = "tests and what they are built from")]

mod frames; //   segments and frames
mod rig; //      a coalescer by itself
mod refused; //  every refusal, one field changed at a time
mod flushed; //  every reason to flush
mod merged; //   merged packets, and their segments
mod gso; //      `virtio_net_hdr` of merged packets, and devices that cut by it
mod gso_tunnels; // the same of packets merged inside tunnels
mod carried; //  `virtio_net_hdr` before frames, checked against them
mod partial; //  partial checksums without a mark
mod tunnel_frames; // segments inside tunnels
mod tunnels; //  packets merged inside tunnels, and their segments
mod tunnel_refused; // every refusal of a tunnel
mod whole; //    GSO packets, and their segmentation
mod limits; //   bytes, counts, and what advances in `lro` mode
mod table; //    the descriptors
mod device; //   checksums by the device
mod pieces; //   nonlinear packets
mod laws; //     laws for any traffic
mod spines; //   on arrival and on delivery, while settings change
