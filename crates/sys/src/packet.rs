//! Packet sockets: the options that live devices need, and the receive ring shared with the kernel
//! (packet(7), Documentation/networking/packet_mmap.rst).

mod frame_ring;

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

pub use frame_ring::{FrameRing, FrameRingLayout};
use libc::{c_int, c_uint, socklen_t};
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

/// `ETH_P_ALL` of include/uapi/linux/if_ether.h: frames of every protocol.
const ETH_P_ALL: u16 = 3;

/// `SIOCGIFMTU` of include/uapi/linux/sockios.h, in the type that the C library's `ioctl` takes.
const SIOCGIFMTU: libc::Ioctl = 0x8921;

/// Offset in bytes of `block_status` in `struct tpacket_block_desc`, behind `version` and
/// `offset_to_priv`.
const BLOCK_STATUS_AT: usize = 8;

/// `PACKET_FANOUT_FLAG_IGNORE_OUTGOING` of include/uapi/linux/if_packet.h: a fanout group does not
/// follow the `PACKET_IGNORE_OUTGOING` option of its sockets.
const PACKET_FANOUT_FLAG_IGNORE_OUTGOING: c_uint = 0x4000;

/// Non-blocking packet socket for whole frames.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

/// Counters of the kernel since they were last read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Frames that passed the filter.
    pub packets: u32,
    /// Packets dropped for want of room.
    pub drops: u32,
}

/// Interface that a socket is bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BoundPacketSocket {
    /// Index of the interface; `None` once it is gone.
    pub interface: Option<u32>,
    /// Type of link-layer header of its frames: an `ARPHRD_` of include/uapi/linux/if_arp.h.
    pub hardware: u16,
}

impl PacketSocket {
    /// Opens a socket without interface and protocol: it receives nothing until it is bound.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(Self(net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?))
    }

    /// Prepends a `virtio_net_hdr` to each frame, in both directions.
    pub fn use_vnet_headers(&self) -> io::Result<()> {
        self.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1)
    }

    /// Excludes packets that this machine sends.
    pub fn ignore_outgoing(&self) -> io::Result<()> {
        self.set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1)
    }

    /// Binds to an interface to receive from it.
    pub fn receive_from(&self, interface: u32) -> io::Result<()> {
        self.bind(interface, ETH_P_ALL)
    }

    /// Binds to an interface to send only.
    pub fn send_to(&self, interface: u32) -> io::Result<()> {
        self.bind(interface, 0)
    }

    /// Interface that the socket is bound to.
    pub fn bound(&self) -> io::Result<BoundPacketSocket> {
        let mut address = link_address(0, 0);
        let mut len = size_as_u32::<libc::sockaddr_ll>();
        let fd = self.0.as_raw_fd();
        // SAFETY: `address` has `len` bytes, and any bytes are a valid value.
        let done = unsafe { libc::getsockname(fd, (&raw mut address).cast(), &raw mut len) };
        checked(done)?;
        // The kernel sets the index to -1 when the interface is removed.
        let interface = u32::try_from(address.sll_ifindex).ok().filter(|&index| index > 0);
        Ok(BoundPacketSocket { interface, hardware: address.sll_hatype })
    }

    /// Makes the interface promiscuous as long as this socket is open.
    pub fn be_promiscuous(&self, interface: u32) -> io::Result<()> {
        let request = libc::packet_mreq {
            mr_ifindex: index_as_int(interface)?,
            mr_type: u16::try_from(libc::PACKET_MR_PROMISC).unwrap_or_default(),
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
    }

    /// Joins a fanout group, which distributes the packets that an interface receives among its
    /// sockets by flow: the given group, or a new one, whose number is returned. Packets that this
    /// machine sends are excluded.
    pub fn join_fanout(&self, group: Option<u16>) -> io::Result<u16> {
        let unique = match group {
            Some(_) => 0,
            None => libc::PACKET_FANOUT_FLAG_UNIQUEID,
        };
        let how = libc::PACKET_FANOUT_HASH | PACKET_FANOUT_FLAG_IGNORE_OUTGOING | unique;
        self.set(
            libc::SOL_PACKET,
            libc::PACKET_FANOUT,
            &((how << 16) | u32::from(group.unwrap_or(0))),
        )?;
        let [joined] = self.ask(libc::SOL_PACKET, libc::PACKET_FANOUT)?;
        let [low, high, ..] = joined.to_le_bytes();
        Ok(u16::from_le_bytes([low, high]))
    }

    /// Packets received and dropped since the last call.
    pub fn take_statistics(&self) -> io::Result<Statistics> {
        // struct tpacket_stats_v3
        let [packets, drops, _freezes] = self.ask(libc::SOL_PACKET, libc::PACKET_STATISTICS)?;
        Ok(Statistics { packets, drops })
    }

    /// Takes the pending error of the socket: `ENETDOWN` after the interface went down.
    pub fn take_error(&self) -> io::Result<Option<Errno>> {
        Ok(net::sockopt::socket_error(&self.0)?.err())
    }

    /// Requests buffer space for packets that the device has not sent yet, up to what this process
    /// may have.
    pub fn set_send_buffer(&self, bytes: usize) -> io::Result<()> {
        net::sockopt::set_socket_send_buffer_size_force(&self.0, bytes)
            .or_else(|_| net::sockopt::set_socket_send_buffer_size(&self.0, bytes))?;
        Ok(())
    }

    /// Requests buffer space for frames that wait in the socket, up to what this process may have.
    pub fn set_receive_buffer(&self, bytes: usize) -> io::Result<()> {
        net::sockopt::set_socket_recv_buffer_size_force(&self.0, bytes)
            .or_else(|_| net::sockopt::set_socket_recv_buffer_size(&self.0, bytes))?;
        Ok(())
    }

    /// MTU of an interface, in bytes.
    pub fn mtu(&self, interface: u32) -> io::Result<u32> {
        let name = net::netdevice::index_to_name(&self.0, interface)?;
        // SAFETY: a struct of bytes and numbers, for which zeros are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()).take(libc::IFNAMSIZ - 1) {
            *to = libc::c_char::from_ne_bytes([from]);
        }
        let fd = self.0.as_raw_fd();
        // SAFETY: the request reads a name and writes a number, both within `request`.
        let done = unsafe { libc::ioctl(fd, SIOCGIFMTU, &raw mut request) };
        checked(done)?;
        // SAFETY: the call has written this member of the union.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    fn bind(&self, interface: u32, protocol: u16) -> io::Result<()> {
        let address = link_address(index_as_int(interface)?, protocol);
        let len = size_as_u32::<libc::sockaddr_ll>();
        let fd = self.0.as_raw_fd();
        // SAFETY: `address` is a whole address of `len` bytes, which the kernel reads.
        let done = unsafe { libc::bind(fd, (&raw const address).cast(), len) };
        checked(done)
    }

    fn set<T>(&self, level: c_int, name: c_int, value: &T) -> io::Result<()> {
        let (value, len) = ((&raw const *value).cast::<c_void>(), size_as_u32::<T>());
        // SAFETY: the kernel reads `len` bytes at `value`; memory that these point to, if any, is
        // kept by the caller until then.
        checked(unsafe { libc::setsockopt(self.0.as_raw_fd(), level, name, value, len) })
    }

    fn ask<const N: usize>(&self, level: c_int, name: c_int) -> io::Result<[c_uint; N]> {
        let mut words = [0; N];
        let mut len = size_as_u32::<[c_uint; N]>();
        let (to, len) = ((&raw mut words).cast::<c_void>(), &raw mut len);
        // SAFETY: the kernel writes no more than `len` bytes, which `words` has; any bytes are
        // valid.
        checked(unsafe { libc::getsockopt(self.0.as_raw_fd(), level, name, to, len) })?;
        Ok(words)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Layout of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingLayout {
    /// Size of a block: a power of two, whole pages. No frame spans two blocks.
    pub block_bytes: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Longest time until the kernel hands over a block that is not full.
    pub retire_ms: u32,
    /// True if frames come with the device's hash, or the kernel's if the device has none.
    pub hashes: bool,
}

/// Ring that a socket receives into (`TPACKET_V3`): blocks that pass between the kernel and this
/// process in order.
#[derive(Debug)]
pub struct RxRing {
    socket: PacketSocket,
    base: NonNull<u8>,
    layout: RingLayout,
    /// Index of the block that the kernel hands over next.
    next: usize,
}

// SAFETY: the mapping belongs to this value alone, and is not tied to a thread.
unsafe impl Send for RxRing {}

impl RxRing {
    /// Sets up a ring for a socket that is not bound yet.
    pub fn new(socket: PacketSocket, layout: RingLayout) -> io::Result<Self> {
        let RingLayout { block_bytes, blocks, retire_ms, hashes } = layout;
        let version = libc::tpacket_versions::TPACKET_V3 as c_int;
        socket.set(libc::SOL_PACKET, libc::PACKET_VERSION, &version)?;
        let request = libc::tpacket_req3 {
            tp_block_size: block_bytes,
            tp_block_nr: blocks,
            // Frames have the size of their packets; only the product must be right.
            tp_frame_size: block_bytes,
            tp_frame_nr: blocks,
            tp_retire_blk_tov: retire_ms,
            tp_sizeof_priv: 0,
            tp_feature_req_word: if hashes { libc::TP_FT_REQ_FILL_RXHASH } else { 0 },
        };
        socket.set(libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let (bytes, rights) = (layout.bytes(), ProtFlags::READ | ProtFlags::WRITE);
        let address = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice, of exactly the ring.
        let mapped = unsafe { mm::mmap(address, bytes, rights, MapFlags::SHARED, &socket, 0) }?;
        let base = NonNull::new(mapped.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { socket, base, layout, next: 0 })
    }

    /// The ring's socket.
    pub fn socket(&self) -> &PacketSocket {
        &self.socket
    }

    /// Oldest block, descriptor included, if the kernel has handed it over. The bytes are as the
    /// kernel wrote them, unchecked.
    pub fn block(&self) -> Option<&[u8]> {
        // Pairs with the kernel's barrier before it writes the status: a reader of the status sees
        // all that the kernel wrote before.
        let status = self.status().load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: a block of the mapping, which holds initialised bytes that the kernel does not
        // touch until `give_back`, which takes `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(self.first_byte(), self.block_bytes()) })
    }

    /// Returns the oldest block to the kernel, if it was handed over.
    pub fn give_back(&mut self) {
        if self.block().is_none() {
            return;
        }
        // Pairs with the kernel's read of the status before it writes to the block: all reads of
        // this process come before.
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.next = (self.next + 1) % self.layout.blocks.max(1) as usize;
    }

    fn status(&self) -> &AtomicU32 {
        // SAFETY: inside a block, which has room for its descriptor.
        let status = unsafe { self.first_byte().add(BLOCK_STATUS_AT) };
        // SAFETY: aligned, as blocks are pages; it lives as long as the mapping; both sides only
        // access it whole.
        unsafe { AtomicU32::from_ptr(status.cast()) }
    }

    fn first_byte(&self) -> *mut u8 {
        // SAFETY: `next` is less than the number of blocks, so this is inside the mapping.
        unsafe { self.base.as_ptr().add(self.next * self.block_bytes()) }
    }

    fn block_bytes(&self) -> usize {
        self.layout.block_bytes as usize
    }
}

impl Drop for RxRing {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nobody holds a slice of it any more.
        let unmapped = unsafe { mm::munmap(self.base.as_ptr().cast(), self.layout.bytes()) };
        debug_assert!(unmapped.is_ok(), "a ring of ours cannot be unmapped: {unmapped:?}");
    }
}

impl RingLayout {
    fn bytes(self) -> usize {
        self.block_bytes as usize * self.blocks as usize
    }
}

fn link_address(interface: c_int, protocol: u16) -> libc::sockaddr_ll {
    libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).unwrap_or_default(),
        sll_protocol: protocol.to_be(),
        sll_ifindex: interface,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    }
}

fn index_as_int(interface: u32) -> io::Result<c_int> {
    c_int::try_from(interface).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn size_as_u32<T>() -> socklen_t {
    socklen_t::try_from(size_of::<T>()).unwrap_or(socklen_t::MAX)
}

fn checked(done: c_int) -> io::Result<()> {
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
