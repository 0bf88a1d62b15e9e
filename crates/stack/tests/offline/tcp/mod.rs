//! Two hosts of TCP with a path between them, in virtual time.

#![allow(clippy::unwrap_used, reason = "tests panic")]

mod causes; // retransmissions by cause
#[path = "../../../../cli/src/compare/own/impaired_path.rs"]
mod impaired_path; // loss, reordering, a bottleneck
mod course; //        bulk streams through such paths
mod goodput; //       laws: how much of it arrives
mod flood; //  SYN floods and memory
mod held; //   devices that keep frames for a while
mod idle; //   memory of connections after use
mod frames; // hosts without free frames
mod fast_open; // data in a SYN
mod told; //   what a connection tells of itself
mod forged; // segments that a stranger makes up
mod hostile; // segments of a stranger
mod mtu; //    paths that drop large packets
mod moves; //  connections whose applications move from CPU to CPU
mod pair; //   the hosts and the path
mod liars; //  peers that lie, and what they cost
mod port_again; // connections from a port where one was before
mod random_calls; // laws: options that change meanwhile
mod reuseport; // listeners that share an address
mod division; // listeners beside another process's
mod streams; // laws: every byte arrives once, in order
mod twin; //   the same with smoltcp as the peer
