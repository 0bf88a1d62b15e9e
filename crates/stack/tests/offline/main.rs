//! Tests of the stack that any machine can run.

mod host; //       packets as a host receives them
mod neighbours; // ARP and neighbour discovery
mod reassembly; // fragments
mod tcp; //        two hosts with a path between them
mod overload;
mod private; //    payloads are in memory that no device writes
