//! Datagrams that the kernel sends, with control data of their own.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};

use super::interface::InterfaceIndex;

/// Control data of a datagram.
#[derive(Clone, Copy, Debug)]
pub struct SendControl {
    /// Source address.
    pub source: Option<IpAddr>,
    /// Interface that it leaves by.
    pub interface: Option<InterfaceIndex>,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Time to live, or hop limit; `None`: the socket's. The kernel refuses an IPv4 TTL of 0 here.
    pub ttl: Option<u8>,
}

/// Sends a datagram by the kernel.
///
/// # Errors
/// Errors of `sendmsg`.
pub fn send(
    socket: BorrowedFd<'_>,
    payload: &[u8],
    to: SocketAddr,
    control: &SendControl,
) -> io::Result<usize> {
    let is_v4 = to.ip().to_canonical().is_ipv4();
    let (class, ttl) = (i32::from(control.traffic_class), control.ttl.map(i32::from));
    let index = control.interface.map_or(0, |interface| interface.0);
    let v4 = match control.source.map(|source| source.to_canonical()) {
        Some(IpAddr::V4(source)) => source,
        _ => Ipv4Addr::UNSPECIFIED,
    };
    let v6 = match control.source {
        Some(IpAddr::V6(source)) => source.octets(),
        _ => [0; 16],
    };
    let local = in_addr { s_addr: u32::from_ne_bytes(v4.octets()) };
    let any = in_addr { s_addr: 0 };
    let index_v4 = i32::try_from(index).unwrap_or(0);
    let info_v4 = in_pktinfo { ipi_ifindex: index_v4, ipi_spec_dst: local, ipi_addr: any };
    let info_v6 = in6_pktinfo { ipi6_addr: in6_addr { s6_addr: v6 }, ipi6_ifindex: index };
    let mut messages = Vec::with_capacity(3);
    if control.source.is_some() || index > 0 {
        messages.push(match is_v4 {
            true => ControlMessage::Ipv4PacketInfo(&info_v4),
            false => ControlMessage::Ipv6PacketInfo(&info_v6),
        });
    }
    messages.push(match is_v4 {
        true => ControlMessage::Ipv4Tos(&control.traffic_class),
        false => ControlMessage::Ipv6TClass(&class),
    });
    if let Some(ttl) = &ttl {
        messages.push(match is_v4 {
            true => ControlMessage::Ipv4Ttl(ttl),
            false => ControlMessage::Ipv6HopLimit(ttl),
        });
    }
    let to = SockaddrStorage::from(to);
    let payload = [io::IoSlice::new(payload)];
    Ok(sendmsg(socket.as_raw_fd(), &payload, &messages, MsgFlags::empty(), Some(&to))?)
}
