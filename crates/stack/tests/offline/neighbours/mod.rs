//! Neighbours on a device where the kernel does not act for this host: we are found by ARP and
//! neighbour discovery, and find others.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod messages;
mod received;
mod rig;
mod table;
