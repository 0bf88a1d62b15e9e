//! Host: the operating system's part of a stack.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, MutexGuard};

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::cpu::RxQueue;

use crate::network::neighbours::Neighbours;
use crate::network::{Identity, TcpPathError};
use crate::socket::SocketId;
use crate::socket::queue::SocketQueue;
use crate::socket::reclaim::ReclaimPolicy;
use crate::socket::table::SocketTable;

/// The host of one CPU's [`Stack`](crate::Stack): clock, sockets, devices. The stack calls the
/// methods once per batch, unless they say otherwise. A `usize` device is the device's index.
pub trait Host: fmt::Debug + Send {
    /// Current time, in ns.
    fn now_ns(&self) -> u64;

    /// Table of the sockets bound now.
    fn table(&mut self) -> &Arc<SocketTable>;

    /// Queue of a socket; `None` once the socket is closed. Called for a run of packets to a socket
    /// that the CPU has no ring to yet, and for each ICMP port unreachable to a socket.
    fn socket(&self, socket: SocketId) -> Option<Arc<SocketQueue>>;

    /// Number of sockets closed so far.
    fn sockets_closed(&self) -> u64;

    /// Buffer policy for slow readers.
    fn policy(&self) -> ReclaimPolicy;

    /// Device that an rx queue belongs to.
    fn device_of(&self, queue: RxQueue) -> usize;

    /// Number of devices. Called about ten times a second, and before each sleep.
    fn device_count(&self) -> usize;

    /// Lends packet memory of the CPU, for packets that no batch causes. Called about ten times a second.
    fn with_pool(&self, act: &mut dyn FnMut(&mut Pool));

    /// Identity of this host on a device.
    fn identity(&self, device: usize) -> Arc<Identity>;

    /// Neighbours learned on a device, shared by all CPUs.
    fn neighbours(&self, device: usize) -> MutexGuard<'_, Neighbours>;

    /// Sends packets out of a device. An answer longer than the MTU leaves in
    /// [fragments](crate::network::fragment_out::FragmentedAnswer), all others unchanged. `packets` is empty afterwards.
    fn send(&mut self, device: usize, packets: &mut Vec<Packet>);

    /// Takes segments for this host's TCP, which arrived on a device where it has the identity `on`.
    /// `segments` is empty afterwards. Called only if the network layer [takes TCP][take].
    ///
    /// [take]: crate::network::NetworkLayer::take_tcp
    fn receive_segments(&mut self, on: &Identity, segments: &mut Vec<Packet>);

    /// Takes an ICMP error about a segment that this host sent. Called for each.
    fn receive_path_error(&mut self, about: &TcpPathError);

    /// Records that a router takes packets of this length at most towards a destination, that of a datagram which may be this
    /// host's. Called for each such error.
    fn learn_path_mtu(&self, destination: IpAddr, mtu_bytes: u32);

    /// Does what is due without packets. Called once per turn.
    fn tick(&mut self, now_ns: u64);

    /// Descriptor that is readable while there is something due, which the CPU is not to sleep through; `None` without one.
    /// Called before each sleep.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Time that the CPU may sleep, in ns; `None` without a limit. Called before each sleep.
    fn sleep_max_ns(&mut self) -> Option<u64>;
}
