//! A back end over vhost-user, of the tests' own, and the driver that it is tried with.
#![allow(dead_code, reason = "each of the tests' programs uses a part")]

pub(crate) mod session; //  the device's side of the socket
pub(crate) mod messages; // of the protocol
pub(crate) mod memory; //   shared by the front end
pub(crate) mod control; //  the control ring, from its side
pub(crate) mod queues; //   what it does with its rings
pub(crate) mod ring; //     a ring, in either layout
pub(crate) mod split; //    the split one
pub(crate) mod packed; //   the packed one
pub(crate) mod frames; //   frames that are told apart
pub(crate) mod rig; //      the driver under test
