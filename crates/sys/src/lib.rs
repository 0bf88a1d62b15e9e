//! Calls to Linux. The second island of `unsafe`: each file has a safe interface.

mod cpus; //          CPUs that exist, pinning, CPU time
mod memory; //        memory for packets
pub mod hidden; //    descriptors that the program in this process does not know
mod event; //         eventfd that wakes a thread sleeping on descriptors
pub mod signals; //   threads started with all signals blocked, and ignored signals
pub mod readiness; // a descriptor whose readability and writability the engine controls
pub mod terminal; //  input of a terminal, which may be gone
#[cfg(feature = "vhost-user")]
mod peer_event; //    an eventfd shared with another process
#[cfg(feature = "vhost-user")]
mod aio; //           signals to such an eventfd without waiting

pub mod interface; //     network interfaces, in the namespace of the calling thread
mod netlink; //           requests to the kernel over netlink
pub mod udp_reserve; //   a UDP port reserved against other programs
pub mod tcp_reserve; //   a TCP port reserved likewise
pub mod drop_filter; //   filter of kernel sockets that drop every packet
pub mod udp_send; //      datagrams sent through the kernel
pub mod neighbour; //     the kernel's addresses, routes and neighbours
pub mod host_facts; //    links, addresses and routes over a socket that stays open
pub mod network_changes; // notifications of their changes
mod ethtool; //           facts that a driver reports
pub mod bpf; //           programs and maps in the kernel
pub mod xdp_attached; //  XDP programs that others attached to an interface
mod generic_netlink; //   requests to families of generic netlink
pub mod netdev; //        XDP features of an interface
pub mod ethtool_netlink; // offloads, hash and rings of a device
mod kernel_settings; //   settings of the kernel that ours follow
pub mod machine_facts; // CPUs, limits and settings of this machine
pub mod device_facts; //  abilities and settings of a device
pub mod packet; //        packet sockets and their ring
pub mod socket_filter; // classic BPF filters of sockets
pub mod tun; //           TUN and TAP

mod user; //          the user who runs this process
pub mod privilege; // privileges that a device needs, and dropping them
pub mod xdp; //       AF_XDP sockets: receive into frames, send from them
#[cfg(feature = "vhost-user")]
pub mod virtio; //    rings and memory shared with a device in another process

pub mod errno; //            errors of the control tree, by the kernel's names
pub mod refused; //          outcome of a write: accepted, or refused with an errno
pub mod number; //           the kernel's two ways of reading numbers
pub mod cpu_list; //         CPUs as the kernel writes and reads them
pub mod topology; //         CPUs that share caches and nodes, and the masks that follow
pub mod clock; //            engine time: the machine's, or a scheduler's
pub mod random; //           numbers determined by a seed
mod secret; //               keys that nobody can guess
mod removal; //              files and mounts that are removed
pub mod private_listener; // Unix sockets for programs of the same user
pub mod unix_peer; //        user and process at their other end
pub mod text_file; //        texts that somebody else wrote, up to a size
pub mod error; //            errors: what failed, where, and what to do
pub mod failure; //          failures of a run, for whoever reports them

#[cfg(feature = "vhost-user")]
pub use aio::Signaller;
pub use cpus::{
    allowed_cpus, cpu_ns_of, current_cpu, keep_on, pin_to, preemptions, process_cpu_ns,
    set_sched_slice, set_timer_slack, thread_cpu_ns,
};
pub use error::{Error, Result};
pub use event::Event;
pub use kernel_settings::{tcp_fast_open, udp_mem_low_pages};
pub use memory::{available_memory_bytes, map_packet_memory, wipe_on_fork};
#[cfg(feature = "vhost-user")]
pub use peer_event::PeerEvent;
pub use removal::{remove_file, unmount_lazily};
pub use secret::random_key;
pub use user::{User, directory_of, may_make_files_in, may_remove, user};
