//! Back end over vhost-user for tests, and the driver under test.
#![allow(dead_code, reason = "each of the tests' programs uses a part")]

pub(crate) mod session; //  the device's side of the socket
pub(crate) mod messages; // messages of the protocol
pub(crate) mod memory; //   memory shared by the front end
pub(crate) mod control; //  control ring, from the device's side
pub(crate) mod queues; //   receive and transmit rings at work
pub(crate) mod ring; //     a ring, in either layout
pub(crate) mod split; //    split layout
pub(crate) mod packed; //   packed layout
pub(crate) mod frames; //   frames that carry a number
pub(crate) mod rig; //      the driver under test
