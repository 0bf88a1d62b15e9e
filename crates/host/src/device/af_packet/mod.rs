//! AF_PACKET: frames from any interface, over a ring that the kernel copies them into.

mod block; // what lies in a block of the ring
