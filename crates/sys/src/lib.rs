//! Calls to Linux. The second island of `unsafe`: each file has a safe face.

mod cpus; //          which there are, and who runs where for how long
mod memory; //        for packets
mod event; //         what wakes a thread that sleeps on descriptors
pub mod readiness; // a descriptor that tells whether one may read, and write
#[cfg(feature = "vhost-user")]
mod peer_event; //    the same, shared with another process
#[cfg(feature = "vhost-user")]
mod aio; //           and signalled without waiting for that one

pub mod interface; //     network interfaces, in the namespace of the calling thread
mod netlink; //           what the kernel is asked of its network
pub mod udp_reserve; //   a port that is kept from the kernel's programs
pub mod udp_send; //      datagrams that the kernel sends for us
pub mod neighbour; //     the kernel's addresses, routes and neighbours
mod ethtool; //           what a driver says of itself
pub mod bpf; //           programs and maps in the kernel
pub mod xdp_attached; //  programs that others have put on an interface
pub mod netdev; //        what an interface can do with XDP
pub mod packet; //        packet sockets and their ring
pub mod socket_filter; // which packets a socket gets
pub mod tun; //           TUN and TAP

mod user; //          who runs this process
pub mod privilege; // what a device takes, and letting go of it
pub mod xdp; //       sockets that receive into frames and send from them
#[cfg(feature = "vhost-user")]
pub mod virtio; //    rings and memory that a device in another process reads and writes

pub mod errno; //            the kernel's names for what is refused
pub mod refused; //          a write that is taken, or refused by one of those
pub mod number; //           the kernel's two ways of reading numbers
pub mod cpu_list; //         CPUs as the kernel writes and reads them
pub mod topology; //         which CPUs are near each other, and the masks that follow
pub mod clock; //            engine time: the machine's, or a scheduler's
pub mod random; //           numbers that a seed determines
pub mod private_listener; // sockets that others of this user connect to
pub mod error; //            what can go wrong, where, and what to do

use std::io;
use std::path::Path;

#[cfg(feature = "vhost-user")]
pub use aio::Signaller;
pub use cpus::{
    allowed_cpus, current_cpu, pin_to, preemptions, process_cpu_ns, set_sched_slice,
    set_timer_slack, thread_cpu_ns,
};
pub use error::{Error, Result};
pub use event::Event;
pub use memory::{available_memory_bytes, map_packet_memory};
#[cfg(feature = "vhost-user")]
pub use peer_event::PeerEvent;
use rustix::mount::{self, UnmountFlags};
pub use user::{User, may_make_files_in, user};

/// The first of the kernel's `udp_mem`: pages of UDP memory below which it never saves. None if it does
/// not say.
#[must_use]
pub fn udp_mem_low_pages() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/udp_mem").ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Takes what is mounted on a directory out of the tree, in use or not: it goes when nobody uses it
/// any more.
///
/// # Errors
/// When it is not allowed, or nothing is mounted there.
pub fn unmount_lazily(directory: &Path) -> io::Result<()> {
    Ok(mount::unmount(directory, UnmountFlags::DETACH)?)
}

/// A secret that nobody outside can guess.
#[must_use]
pub fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    let filled = rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty());
    // The kernel gives up to 256 bytes whole once it is up, and it is.
    debug_assert_eq!(filled.ok(), Some(key.len()));
    key
}
