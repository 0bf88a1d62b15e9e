//! Neighbours on a device where the kernel does not act for this host: others find us, and we find
//! others, by ARP and neighbour discovery.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod messages;
mod received;
pub(crate) mod rig;
mod table;
