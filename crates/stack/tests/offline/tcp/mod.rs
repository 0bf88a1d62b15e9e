//! Two hosts of TCP with a path between them, in virtual time.

#![allow(clippy::unwrap_used, reason = "tests panic")]

mod causes; // retransmissions by cause
mod flood; //  SYN floods and memory
mod forged; // segments that a stranger makes up
mod hostile; // segments of a stranger
mod pair; //   the hosts and the path
mod streams; // laws: every byte arrives once, in order
