//! Addresses of sockets (`struct sockaddr`).

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

use super::is_nowhere;
use crate::datagram::SocketFamily;

/// Bytes of `sockaddr_in`, and the fewest and most of `sockaddr_in6`.
const V4_BYTES: usize = 16;
const V6_BYTES_MIN: usize = 24;
const V6_BYTES: usize = 28;

/// Reads an address.
///
/// # Safety
/// `address` is null, or `len` bytes there can be read.
pub(super) unsafe fn read(address: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Errno> {
    let len = checked(address, len)?;
    // SAFETY: the caller's promise, for as many bytes or fewer.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) };
    decode(bytes)
}

/// Reads the address of `bind`, where all of IPv4 may come without a family (`__inet_bind`).
///
/// # Safety
/// As [`read()`].
pub(super) unsafe fn read_bound(
    address: *const sockaddr,
    len: socklen_t,
) -> Result<SocketAddr, Errno> {
    // SAFETY: the caller's promise.
    if unsafe { is_without_family(address, len) } {
        // SAFETY: the caller's promise, for as many bytes or fewer.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast(), checked(address, len)?) };
        let local = decode_as(libc::AF_INET, bytes)?;
        return if local.ip().is_unspecified() { Ok(local) } else { Err(Errno::AFNOSUPPORT) };
    }
    // SAFETY: the caller's promise.
    unsafe { read(address, len) }
}

/// Checks an address that a call is given, and does not look at.
///
/// # Errors
/// As `move_addr_to_kernel`.
pub(super) fn check(address: *const sockaddr, len: socklen_t) -> Result<(), Errno> {
    if len == 0 { Ok(()) } else { checked(address, len).map(drop) }
}

/// True if so many bytes can be an address, the family at least.
pub(super) fn has_length(len: socklen_t) -> bool {
    (2..=size_of::<libc::sockaddr_storage>()).contains(&usize::try_from(len).unwrap_or(usize::MAX))
}

/// Number of bytes of an address that are of interest.
///
/// # Errors
/// As `move_addr_to_kernel`.
fn checked(address: *const sockaddr, len: socklen_t) -> Result<usize, Errno> {
    match usize::try_from(len).unwrap_or(usize::MAX) {
        0 => Err(Errno::INVAL),
        // Before the address is looked at.
        len if len > size_of::<libc::sockaddr_storage>() => Err(Errno::INVAL),
        _ if is_nowhere(address) => Err(Errno::FAULT),
        len => Ok(len.min(V6_BYTES)),
    }
}

/// Reads the address that a datagram is sent to. `None`, of IPv6 sockets only, stands for the peer.
///
/// # Errors
/// As `udp_sendmsg` and `udpv6_sendmsg`.
///
/// # Safety
/// As [`read()`].
pub(super) unsafe fn read_destination(
    address: *const sockaddr,
    len: socklen_t,
    socket: SocketFamily,
) -> Result<Option<SocketAddr>, Errno> {
    let len = checked(address, len)?;
    // SAFETY: the caller's promise, for as many bytes or fewer.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) };
    let family = family_of(bytes).ok_or(Errno::INVAL)?;
    let is_ipv6 = socket != SocketFamily::V4;
    match family {
        libc::AF_UNSPEC if is_ipv6 => Ok(None),
        libc::AF_INET if socket == SocketFamily::V6Only => Err(Errno::NETUNREACH),
        libc::AF_INET | libc::AF_INET6 if is_ipv6 => decode_as(family, bytes).map(Some),
        _ if is_ipv6 || bytes.len() < V4_BYTES => Err(Errno::INVAL),
        // A family is not asked for.
        libc::AF_UNSPEC | libc::AF_INET => decode_as(libc::AF_INET, bytes).map(Some),
        _ => Err(Errno::AFNOSUPPORT),
    }
}

/// True for an address without a family, which ends a connection (`AF_UNSPEC`).
///
/// # Safety
/// As [`read()`].
pub(super) unsafe fn is_without_family(address: *const sockaddr, len: socklen_t) -> bool {
    if !matches!(checked(address, len), Ok(2..)) {
        return false;
    }
    // SAFETY: the caller's promise, for the first two bytes.
    let family = unsafe { address.cast::<u16>().read_unaligned() };
    i32::from(family) == libc::AF_UNSPEC
}

fn decode(bytes: &[u8]) -> Result<SocketAddr, Errno> {
    decode_as(family_of(bytes).ok_or(Errno::INVAL)?, bytes)
}

fn family_of(bytes: &[u8]) -> Option<i32> {
    bytes.first_chunk().map(|family| i32::from(u16::from_ne_bytes(*family)))
}

/// Reads an address as one of this family.
fn decode_as(family: i32, bytes: &[u8]) -> Result<SocketAddr, Errno> {
    let port = bytes.get(2..4).and_then(<[u8]>::first_chunk).map(|port| u16::from_be_bytes(*port));
    let port = port.ok_or(Errno::INVAL)?;
    let word = |at: usize| bytes.get(at..at + 4).and_then(<[u8]>::first_chunk::<4>).copied();
    match family {
        libc::AF_INET if bytes.len() >= V4_BYTES => {
            let ip = word(4).map(Ipv4Addr::from).ok_or(Errno::INVAL)?;
            Ok(SocketAddr::new(ip.into(), port))
        }
        libc::AF_INET6 if bytes.len() >= V6_BYTES_MIN => {
            let ip = bytes.get(8..).and_then(<[u8]>::first_chunk::<16>).ok_or(Errno::INVAL)?;
            let scope = word(24).map_or(0, u32::from_ne_bytes);
            Ok(SocketAddrV6::new(Ipv6Addr::from(*ip), port, 0, scope).into())
        }
        libc::AF_INET | libc::AF_INET6 => Err(Errno::INVAL),
        _ => Err(Errno::AFNOSUPPORT),
    }
}

/// Bytes of an address.
pub(crate) fn encode(address: SocketAddr) -> Vec<u8> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut bytes = Vec::with_capacity(V6_BYTES);
    bytes.extend_from_slice(&u16::try_from(family).unwrap_or_default().to_ne_bytes());
    bytes.extend_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes.extend_from_slice(&v4.ip().octets());
            bytes.resize(V4_BYTES, 0);
        }
        SocketAddr::V6(v6) => {
            bytes.extend_from_slice(&v6.flowinfo().to_ne_bytes());
            bytes.extend_from_slice(&v6.ip().octets());
            bytes.extend_from_slice(&v6.scope_id().to_ne_bytes());
        }
    }
    bytes
}

/// Writes as much of an address as there is room for, and returns its whole length.
///
/// # Errors
/// As `move_addr_to_user`: `EINVAL` for room that is negative, `EFAULT` without memory.
///
/// # Safety
/// `to` is null, or `room` bytes there can be written.
pub(super) unsafe fn write(
    address: SocketAddr,
    to: *mut sockaddr,
    room: socklen_t,
) -> Result<socklen_t, Errno> {
    let room = i32::try_from(room).map_err(|_| Errno::INVAL)?;
    let bytes = encode(address);
    let count = bytes.len().min(usize::try_from(room).unwrap_or(0));
    if count > 0 {
        if is_nowhere(to) {
            return Err(Errno::FAULT);
        }
        // SAFETY: `count` bytes can be read from the vector, and written by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), count) };
    }
    Ok(socklen_t::try_from(bytes.len()).unwrap_or(0))
}

/// Writes an address to the program, whose memory has the room for it, and then its length.
///
/// # Safety
/// As [`write()`] with `*len` bytes; `len` is valid if it is not null.
pub(super) unsafe fn write_counted(
    address: SocketAddr,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    if is_nowhere(len) {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let room = unsafe { len.read() };
    // SAFETY: the caller's promise.
    let whole = unsafe { write(address, to, room) }?;
    // SAFETY: the caller's promise.
    unsafe { len.write(whole) };
    Ok(())
}

/// Writes the length of an address that there is none of.
///
/// # Errors
/// As [`write()`].
///
/// # Safety
/// `len` is valid if it is not null.
pub(super) unsafe fn write_nameless(len: *mut socklen_t) -> Result<(), Errno> {
    if is_nowhere(len) {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    if i32::try_from(unsafe { len.read() }).is_err() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    unsafe { len.write(0) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exe_2_addresses_are_read_as_written() {
        for text in ["10.0.0.1:53", "[fd00::1]:8053", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(decode(&encode(address)), Ok(address));
            for cut in 0..V4_BYTES {
                assert!(decode(&encode(address)[..cut]).is_err(), "{text} {cut}");
            }
        }
        assert_eq!(decode(&[1, 0, 0, 0]), Err(Errno::AFNOSUPPORT));
    }
}
