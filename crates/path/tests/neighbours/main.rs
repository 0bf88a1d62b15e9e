//! Where nobody else is this host: we are found by ARP and neighbour discovery, and find others.

mod messages;
mod rig;
mod table;
