//! TUN and TAP: one descriptor of `/dev/net/tun` for each queue, and its ioctls (drivers/net/tun.c,
//! include/uapi/linux/if_tun.h).
//!
//! The crate tun-rs does not fit. It attaches to a device without setting length and byte order of
//! the header before each packet, which a persistent device keeps from its previous user; it does
//! not report if it created the device; it creates a missing `/dev/net/tun`; and it supports
//! neither steering nor filters.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Getter, IntegerSetter, Opcode, Setter, Updater, opcode};

use super::hidden::Hidden;

const SET_INTERFACE: Opcode = opcode::write::<c_int>(b'T', 202); //   TUNSETIFF
const SET_OFFLOAD: Opcode = opcode::write::<c_int>(b'T', 208); //     TUNSETOFFLOAD
const HEADER_BYTES: Opcode = opcode::read::<c_int>(b'T', 215); //     TUNGETVNETHDRSZ
const SET_HEADER_BYTES: Opcode = opcode::write::<c_int>(b'T', 216); // TUNSETVNETHDRSZ
const SET_LITTLE_ENDIAN: Opcode = opcode::write::<c_int>(b'T', 220); // TUNSETVNETLE
const LITTLE_ENDIAN: Opcode = opcode::read::<c_int>(b'T', 221); //    TUNGETVNETLE
const SET_STEERING: Opcode = opcode::read::<c_int>(b'T', 224); //     TUNSETSTEERINGEBPF
const SET_FILTER: Opcode = opcode::read::<c_int>(b'T', 225); //       TUNSETFILTEREBPF

/// Kind of frames of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TunKind {
    /// IP packets.
    Tun,
    /// Ethernet frames.
    Tap,
}

/// Device that a queue is attached to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attach<'a> {
    /// Name of the interface, at most 15 bytes.
    pub name: &'a str,
    /// Kind that the device must have.
    pub kind: TunKind,
    /// True if the device has `IFF_MULTI_QUEUE`: an existing device must agree.
    pub is_multi_queue: bool,
    /// True if the device is to be created: it must not exist (`IFF_TUN_EXCL`).
    pub is_new: bool,
}

/// Work that the kernel may leave to a device's readers: checksums to complete, segments to cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Offload {
    /// No work: packets are complete.
    Nothing,
    /// Checksums, and TCP segmentation.
    Tcp,
    /// Checksums, TCP segmentation, and UDP segmentation (Linux 6.2).
    TcpAndUdp,
    /// Checksums, TCP and UDP segmentation, and segmentation inside UDP tunnels (Linux 6.17).
    UdpTunnels,
}

/// One queue of a device, non-blocking, with a `virtio_net_hdr` before each packet.
#[derive(Debug)]
pub struct TunQueue {
    descriptor: Hidden,
}

impl TunQueue {
    /// Opens `/dev/net/tun`, attached to no device yet.
    ///
    /// # Errors
    /// If there is no such file, as in a container without it, or it may not be opened.
    pub fn open() -> rustix::io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let descriptor = fs::open("/dev/net/tun", flags, Mode::empty())?;
        Ok(Self { descriptor: Hidden::new(descriptor)? })
    }

    /// Attaches the queue to a device, or creates one, which is removed when its last queue is
    /// closed.
    ///
    /// # Errors
    /// EBUSY: the device exists though it should be new, or its only queue is in use. EINVAL: it is
    /// of another kind, no TUN or TAP, or differs in `IFF_MULTI_QUEUE`. EPERM: `CAP_NET_ADMIN` is
    /// missing. E2BIG: it has no more queues.
    pub fn attach(&self, to: Attach<'_>) -> rustix::io::Result<()> {
        let mut flags = libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        flags |= match to.kind {
            TunKind::Tun => libc::IFF_TUN,
            TunKind::Tap => libc::IFF_TAP,
        };
        if to.is_multi_queue {
            flags |= libc::IFF_MULTI_QUEUE;
        }
        if to.is_new {
            flags |= libc::IFF_TUN_EXCL;
        }
        let mut request = InterfaceRequest::new(to.name, flags).ok_or(Errno::INVAL)?;
        // SAFETY: TUNSETIFF reads and writes a `struct ifreq`, which `InterfaceRequest` matches in
        // length and layout; its number says `_IOW(int)` for historical reasons only.
        let updater = unsafe { Updater::<SET_INTERFACE, _>::new(&mut request) };
        // SAFETY: as above; the descriptor is of /dev/net/tun.
        unsafe { ioctl::ioctl(&self.descriptor, updater) }
    }

    /// Length of the header before each packet in bytes, for all queues of the device.
    pub fn header_bytes(&self) -> rustix::io::Result<c_int> {
        // SAFETY: TUNGETVNETHDRSZ writes an int.
        let getter = unsafe { Getter::<HEADER_BYTES, c_int>::new() };
        // SAFETY: as above.
        unsafe { ioctl::ioctl(&self.descriptor, getter) }
    }

    /// Sets [`header_bytes`](Self::header_bytes).
    pub fn set_header_bytes(&self, bytes: c_int) -> rustix::io::Result<()> {
        // SAFETY: TUNSETVNETHDRSZ reads an int.
        let setter = unsafe { Setter::<SET_HEADER_BYTES, c_int>::new(bytes) };
        // SAFETY: as above.
        unsafe { ioctl::ioctl(&self.descriptor, setter) }
    }

    /// True if the header is little-endian on any machine, as in virtio 1.
    pub fn is_little_endian(&self) -> rustix::io::Result<bool> {
        // SAFETY: TUNGETVNETLE writes an int.
        let getter = unsafe { Getter::<LITTLE_ENDIAN, c_int>::new() };
        // SAFETY: as above.
        let is_set = unsafe { ioctl::ioctl(&self.descriptor, getter) }?;
        Ok(is_set != 0)
    }

    /// Sets [`is_little_endian`](Self::is_little_endian).
    pub fn set_little_endian(&self, is_set: bool) -> rustix::io::Result<()> {
        // SAFETY: TUNSETVNETLE reads an int.
        let setter = unsafe { Setter::<SET_LITTLE_ENDIAN, c_int>::new(c_int::from(is_set)) };
        // SAFETY: as above.
        unsafe { ioctl::ioctl(&self.descriptor, setter) }
    }

    /// Sets the work that the kernel may leave to readers, for the whole device; it persists with
    /// the device.
    ///
    /// # Errors
    /// EINVAL: the kernel does not support that offload.
    pub fn set_offload(&self, offload: Offload) -> rustix::io::Result<()> {
        const TCP: u32 = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        const UDP: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;
        const UDP_TUNNELS: u32 = 0x080 | 0x100; // TUN_F_UDP_TUNNEL_GSO, TUN_F_UDP_TUNNEL_GSO_CSUM
        let mask = match offload {
            Offload::Nothing => 0,
            // Not TUN_F_TSO_ECN: the kernel then cuts packets of which only the first segment has
            // CWR.
            Offload::Tcp => TCP,
            Offload::TcpAndUdp => TCP | UDP,
            Offload::UdpTunnels => TCP | UDP | UDP_TUNNELS,
        };
        // SAFETY: TUNSETOFFLOAD takes a mask, not a pointer.
        let setter = unsafe { IntegerSetter::<SET_OFFLOAD>::new_usize(mask as usize) };
        // SAFETY: as above.
        unsafe { ioctl::ioctl(&self.descriptor, setter) }
    }

    /// Sets the program (`BPF_PROG_TYPE_SOCKET_FILTER`) that chooses each packet's queue: its
    /// result modulo the number of queues. Without one the kernel uses the queue that last sent a
    /// packet of the flow. The program applies to the whole device and persists with it.
    pub fn set_steering(&self, program: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
        let mut descriptor = number_of(program);
        // SAFETY: TUNSETSTEERINGEBPF reads an int, though its number says that it writes one.
        let updater = unsafe { Updater::<SET_STEERING, c_int>::new(&mut descriptor) };
        // SAFETY: as above.
        unsafe { ioctl::ioctl(&self.descriptor, updater) }
    }

    /// Sets the program that says how many bytes of each packet the device takes: 0 drops it, which
    /// the kernel counts as `tx_dropped`. The program applies to the whole device and persists with
    /// it.
    pub fn set_filter(&self, program: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
        let mut descriptor = number_of(program);
        // SAFETY: TUNSETFILTEREBPF reads an int, though its number says that it writes one.
        let updater = unsafe { Updater::<SET_FILTER, c_int>::new(&mut descriptor) };
        // SAFETY: as above.
        unsafe { ioctl::ioctl(&self.descriptor, updater) }
    }
}

impl AsFd for TunQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Descriptor of a program as the kernel reads it: -1 for none.
fn number_of(program: Option<BorrowedFd<'_>>) -> c_int {
    program.map_or(-1, |program| program.as_raw_fd())
}

/// `struct ifreq` of TUNSETIFF (include/uapi/linux/if.h).
#[repr(C)]
struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<InterfaceRequest>() == size_of::<libc::ifreq>());

impl InterfaceRequest {
    /// Makes a request. `None` if the name or a flag does not fit.
    fn new(name: &str, flags: c_int) -> Option<Self> {
        let mut request = Self { name: [0; _], flags: u16::try_from(flags).ok()?, rest: [0; _] };
        // The last byte stays 0: the name's terminator.
        let place = request.name.split_last_mut()?.1.get_mut(..name.len())?;
        place.copy_from_slice(name.as_bytes());
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_byte_name_is_refused() {
        assert!(InterfaceRequest::new("tn34567890123456", 0).is_none());
        let request = InterfaceRequest::new("tn3456789012345", 0x8000).unwrap();
        assert_eq!((&request.name[..], request.flags), (&b"tn3456789012345\0"[..], 0x8000));
    }
}
