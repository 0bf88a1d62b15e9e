//! Opening of connections: the device, a port that nobody has, the first segment.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::{io, iter};

use forebay_stack::socket::LOCAL_PORTS;
use forebay_stack::tcp::{Flow, Tcp, TcpError, TcpOut, TcpSocket, WriteFlags};
use forebay_sys::neighbour;
use forebay_sys::tcp_reserve::Reservation;
use rustix::io::Errno;

use super::super::endpoint::plain;
use super::super::sending::no_loopback;
use super::super::shared::NetState;
use super::shards::{Reserved, ShardSocket};
use super::stream::TcpStream;
use super::wait::StreamWatch;

/// Begins to open a connection with these waiters, without waiting, and perhaps with data in its SYN, whose number is returned. The route
/// is asked for, and the port reserved, in the namespace of the calling thread.
pub(super) fn begin(
    shared: &Arc<NetState>,
    to: SocketAddr,
    data: Option<&[u8]>,
    waiters: StreamWatch,
) -> io::Result<(TcpStream, usize)> {
    let theirs = plain(to);
    check_destination(shared, theirs.ip())?;
    let (device, source) = shared.routes().find_named(to).ok_or(Errno::NETUNREACH)?;
    let kernels_source = shared.routes().kernels_source(device, theirs.ip());
    let source = kernels_source.or(source).ok_or(Errno::NETUNREACH)?;
    let identity = shared.routes().identity(device);
    if matches!(theirs.ip(), IpAddr::V4(to) if identity.is_broadcast(to)) {
        return Err(Errno::NETUNREACH.into());
    }
    let now_ns = shared.tcp.clock().now_ns();
    let mut mtu_bytes = shared.tcp.mtu_towards(theirs.ip(), identity.mtu, now_ns);
    let kernels = shared.devices[device].kernels;
    if kernels.is_some() && !is_link_local(theirs.ip()) {
        let route = neighbour::route(theirs.ip())?.ok_or(Errno::NETUNREACH)?;
        mtu_bytes = route.mtu.map_or(mtu_bytes, |of_route| mtu_bytes.min(of_route));
    }
    let mut ports = shared.tcp.ports(theirs);
    let any_port = shared.routes().scoped(SocketAddr::new(source, 0), source);
    let mut candidates = iter::from_fn(|| match kernels {
        None => Some(Ok((ports.next()?, None))),
        // The kernel chooses a port that none of its sockets has.
        Some(_) => Some(reserve(any_port)),
    })
    .take(LOCAL_PORTS.len());
    loop {
        let (port, reserved) = candidates.next().ok_or(Errno::ADDRNOTAVAIL)??;
        let flow = Flow { ours: SocketAddr::new(source, port), theirs };
        let shard = shared.tcp.shard_of(&flow);
        let opened = shared.call_tcp(shard, |tcp, out| {
            // A walk over the connections that has passed here is about this one, too.
            let mtu_bytes = mtu_bytes.min(shared.routes().identity(device).mtu);
            open(tcp, &flow, mtu_bytes, data, out)
        });
        match opened {
            Ok((socket, written)) => {
                let is_mapped = to.is_ipv6() && theirs.is_ipv4();
                let place = ShardSocket { shard, socket };
                let of = Arc::clone(shared);
                let stream = TcpStream::of(of, place, flow, is_mapped, reserved, waiters);
                // The end of the run resets the connections that it finds.
                return match shared.has_ended() {
                    false => Ok((stream, written)),
                    true => Err(io::ErrorKind::BrokenPipe.into()),
                };
            }
            Err(TcpError::AddressInUse) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reserves a port of the kernel's choice. Without a free one the error is that of `connect`, not that of `bind`.
fn reserve(any_port: SocketAddr) -> io::Result<(u16, Option<Reserved>)> {
    let reserved = Reservation::of_connection(any_port).map_err(|error| {
        let has_none = Errno::from_io_error(&error) == Some(Errno::ADDRINUSE);
        if has_none { Errno::ADDRNOTAVAIL.into() } else { error }
    })?;
    Ok((reserved.port()?, Some(Arc::new(reserved))))
}

/// Refuses destinations that no device leads to: there is no loopback.
fn check_destination(shared: &NetState, to: IpAddr) -> io::Result<()> {
    if to.is_multicast() {
        return Err(Errno::NETUNREACH.into());
    }
    if to.is_unspecified() || to.is_loopback() || shared.routes().is_this_end(to) {
        return Err(no_loopback(to));
    }
    Ok(())
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Opens a connection with these ends, and returns the number of bytes in its SYN.
fn open(
    tcp: &mut Tcp,
    flow: &Flow,
    mtu_bytes: u32,
    data: Option<&[u8]>,
    out: &mut TcpOut<'_>,
) -> Result<(TcpSocket, usize), TcpError> {
    let (socket, ends) = (tcp.socket()?, (flow.ours, flow.theirs));
    let begun = match data {
        None => tcp.connect(socket, ends, mtu_bytes, out).map(|()| 0),
        Some(bytes) => {
            tcp.connect_with_data(socket, ends, mtu_bytes, bytes, WriteFlags::default(), out)
        }
    };
    match begun {
        Ok(written) => Ok((socket, written)),
        Err(TcpError::InProgress) => Ok((socket, 0)),
        Err(error) => {
            tcp.close(socket, out)?;
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::rig::{Recording, host};
    use super::super::super::{Net, NetConfig};
    use super::*;

    /// Nobody answers a broadcast, whose SYNs would go to all for two minutes.
    #[test]
    fn tcp_17_broadcast_address_is_refused() {
        let recording = Recording::default();
        let sent = Arc::clone(&recording.lens);
        let net = Net(host(vec![vec![Box::new(recording) as _]], NetConfig::TCP));
        for to in ["10.9.0.255:80", "255.255.255.255:80", "[::ffff:10.9.0.255]:80"] {
            let error = TcpStream::begin_connect(&net, to.parse().unwrap()).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(Errno::NETUNREACH), "{to}");
        }
        assert_eq!(sent.lock().unwrap().len(), 0);
    }
}
