//! Packet sockets: the options that live devices need, and the receive rings shared with the kernel
//! (packet(7), Documentation/networking/packet_mmap.rst).

mod block_ring; //  blocks of many frames (`TPACKET_V3`)
mod frame_ring; //  slots of one frame each (`TPACKET_V2`)
mod mapped_ring; // memory of either

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

pub use block_ring::{BlockRing, BlockRingLayout};
pub use frame_ring::{FrameRing, FrameRingLayout};
use libc::{c_int, c_uint, socklen_t};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use super::hidden::Hidden;

/// `ETH_P_ALL` of include/uapi/linux/if_ether.h: frames of every protocol.
const ETH_P_ALL: u16 = 3;

/// `SIOCGIFMTU` of include/uapi/linux/sockios.h.
const SIOCGIFMTU: libc::c_ulong = 0x8921;

/// `PACKET_FANOUT_FLAG_IGNORE_OUTGOING` of include/uapi/linux/if_packet.h: a fanout group does not
/// follow the `PACKET_IGNORE_OUTGOING` option of its sockets.
const PACKET_FANOUT_FLAG_IGNORE_OUTGOING: c_uint = 0x4000;

/// Non-blocking packet socket for whole frames.
#[derive(Debug)]
pub struct PacketSocket(Hidden);

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
        let socket = net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        Ok(Self(Hidden::new(socket)?))
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
        // SAFETY: the request reads a name and writes a number, both within `request`. By itself, past the preloaded
        // library's `ioctl`, which refuses descriptors that the program does not know.
        let done = unsafe { libc::syscall(libc::SYS_ioctl, fd, SIOCGIFMTU, &raw mut request) };
        checked(if done < 0 { -1 } else { 0 })?;
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
