//! Sockets of the kernel that drop every packet: they only keep a port.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::random_key;
use super::socket_filter::{self, FilterInstruction};

/// `BPF_RET | BPF_K` with 0: drops every packet.
const REFUSE: FilterInstruction = FilterInstruction { code: 0x06, jt: 0, jf: 0, k: 0 };

/// Options of linux/tcp.h: a key for all peers of a prefix.
const TCP_MD5SIG_EXT: libc::c_int = 32;
const TCP_MD5SIG_FLAG_PREFIX: u8 = 1;

/// `struct tcp_md5sig`: an address of 128 bytes, flags, length of the prefix, length of the key, interface, key.
const SIGNATURE_BYTES: usize = 216;
const FLAGS_AT: usize = 128;
const KEY_LEN_AT: usize = 130;
const KEY_AT: usize = 136;

/// Place of the address in `struct sockaddr_in6`, and of the bytes that make it one of IPv4.
const ADDRESS_AT: usize = 8;
const MAPPED_AT: usize = ADDRESS_AT + 10;

/// Makes a socket drop every packet. A TCP listener then keeps its port, and the kernel answers no segment to it.
///
/// Some kernels (6.18) let only holders of `CAP_NET_ADMIN` attach a filter to a socket of TCP. For others such a socket
/// takes only segments that are signed with a random key (RFC 2385).
///
/// # Errors
/// The kernel's: `EPERM` if it has no signatures either.
pub fn refuse_packets(socket: BorrowedFd<'_>) -> io::Result<()> {
    match socket_filter::attach(socket, &[REFUSE]) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            require_signatures(socket).map_err(|_| error)
        }
        attached => attached,
    }
}

/// True for a socket with a filter of another kind than that of [`refuse_packets`].
pub fn is_filtered(socket: BorrowedFd<'_>) -> bool {
    // The kernel tells no filter of another form (`sk_get_filter`).
    socket_filter::attached(socket).map_or(true, |it| !it.is_empty() && it != [REFUSE])
}

/// Makes a TCP socket drop segments that are not signed by a key that nobody knows (`tcp_inbound_hash`).
fn require_signatures(socket: BorrowedFd<'_>) -> io::Result<()> {
    let is_ipv6 = rustix::net::sockopt::socket_domain(socket)? == rustix::net::AddressFamily::INET6;
    if !is_ipv6 {
        return set_key(socket, &peers(libc::AF_INET, false));
    }
    set_key(socket, &peers(libc::AF_INET6, false))?;
    set_key(socket, &peers(libc::AF_INET6, true))
}

/// A key for all peers of a family; those of an IPv6 socket over IPv4 have mapped addresses.
fn peers(family: libc::c_int, are_mapped: bool) -> [u8; SIGNATURE_BYTES] {
    let mut option = [0; SIGNATURE_BYTES];
    let family = libc::sa_family_t::try_from(family).unwrap_or_default();
    option[..size_of_val(&family)].copy_from_slice(&family.to_ne_bytes());
    if are_mapped {
        option[MAPPED_AT..MAPPED_AT + 2].fill(0xff);
    }
    let key = random_key();
    let key_len = u16::try_from(key.len()).unwrap_or_default();
    option[FLAGS_AT] = TCP_MD5SIG_FLAG_PREFIX; // of no bits
    option[KEY_LEN_AT..KEY_LEN_AT + 2].copy_from_slice(&key_len.to_ne_bytes());
    option[KEY_AT..KEY_AT + key.len()].copy_from_slice(&key);
    option
}

fn set_key(socket: BorrowedFd<'_>, option: &[u8; SIGNATURE_BYTES]) -> io::Result<()> {
    let bytes = libc::socklen_t::try_from(option.len()).unwrap_or_default();
    // SAFETY: the kernel reads `bytes` bytes of the option, and keeps no pointer to them.
    let done = unsafe {
        let (socket, option) = (socket.as_raw_fd(), option.as_ptr().cast());
        libc::setsockopt(socket, libc::IPPROTO_TCP, TCP_MD5SIG_EXT, option, bytes)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{
        AddressFamily, SocketAddrAny, SocketFlags, SocketType, bind, connect, getsockname, listen,
        socket_with,
    };

    use super::*;

    /// Events of a connection attempt over loopback, where the kernel answers before `connect` returns.
    fn answer(family: AddressFamily, to: &SocketAddrAny) -> PollFlags {
        let peer = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let _ = connect(&peer, to);
        let mut polled = [PollFd::new(&peer, PollFlags::OUT)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        polled[0].revents()
    }

    fn refuses_all(refuse: impl Fn(BorrowedFd<'_>) -> io::Result<()>) {
        let families = [
            (AddressFamily::INET, "127.0.0.1:0", "127.0.0.1"),
            (AddressFamily::INET6, "[::]:0", "::1"),
            (AddressFamily::INET6, "[::]:0", "127.0.0.1"),
        ];
        for (family, local, peer) in families {
            let socket =
                socket_with(family, SocketType::STREAM, SocketFlags::empty(), None).unwrap();
            let local: std::net::SocketAddr = local.parse().unwrap();
            bind(&socket, &local).unwrap();
            let port =
                std::net::SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap().port();
            let to = std::net::SocketAddr::new(peer.parse().unwrap(), port);
            let of_peer = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            assert!(
                answer(of_peer, &to.into()).contains(PollFlags::ERR),
                "reset before it listens"
            );
            refuse(socket.as_fd()).unwrap();
            listen(&socket, 8).unwrap();
            assert_eq!(answer(of_peer, &to.into()), PollFlags::empty(), "{to}");
        }
    }

    #[test]
    fn tcp_16_listener_that_refuses_is_silent() {
        refuses_all(refuse_packets);
    }

    #[test]
    fn tcp_16_unsigned_segments_are_dropped() {
        refuses_all(require_signatures);
    }
}
