//! Unbound sockets: their options, and `bind`.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use forebay_rx::CpuId;
use forebay_stack::socket::SocketId;
use forebay_stack::socket::connection_id::{ConnectionIds, EndpointIndex, SelectById};
use forebay_stack::socket::table::{Binding, Reuse};
use forebay_sys::hidden::Hidden;
use forebay_sys::readiness::{ReadinessDescriptor, ReadinessSetter};
use forebay_sys::tcp_reserve::Reservation;
use forebay_sys::udp_reserve::{self, ReserveOptions};
use rustix::io::Errno;

use super::endpoint::{self, Endpoint};
use super::tcp::ListenOptions;
use super::wake::Wake;
use super::{Net, TcpListener, UdpSocket};

/// Options of a socket that is not bound yet.
#[derive(Clone, Debug)]
#[must_use]
pub struct SocketOptions {
    net: Net,
    reuse: Reuse,
    reuses_address: bool,
    cpu: Option<CpuId>,
    select: Option<SelectById>,
    is_v6_only: bool,
    /// Receive buffer, in bytes, if it was set.
    rcvbuf: Option<u32>,
    is_reserved: bool,
}

impl SocketOptions {
    pub(super) fn of(net: &Net) -> Self {
        Self {
            net: net.clone(),
            reuse: Reuse::None,
            reuses_address: false,
            cpu: None,
            select: None,
            is_v6_only: false,
            rcvbuf: None,
            is_reserved: true,
        }
    }

    /// Shares the address with other sockets that also set this (`SO_REUSEPORT`); the flow hash
    /// selects one of them for a datagram or connection.
    pub fn reuse_port(mut self) -> Self {
        self.reuse = Reuse::Hash;
        self
    }

    /// Lets UDP sockets that also set this be bound to addresses in common with this one's
    /// (`SO_REUSEADDR`): `0.0.0.0` beside one address, or one address twice. Of those at one address the
    /// last one bound receives; datagrams to groups are for all. TCP listeners ignore it.
    pub fn reuse_address(mut self) -> Self {
        self.reuses_address = true;
        self
    }

    /// Shares the address with other sockets, one per CPU (`SO_REUSEPORT` with `SO_INCOMING_CPU`):
    /// this one receives the datagrams delivered on `cpu`, or the connections that begin there. On a
    /// CPU without such a socket, the flow hash selects one.
    pub fn reuse_port_on(mut self, cpu: CpuId) -> Self {
        (self.reuse, self.cpu) = (Reuse::ThisCpu, Some(cpu));
        self
    }

    /// Shares the address with other sockets, each of them one endpoint of a QUIC server. A
    /// datagram goes to the endpoint that issued its destination connection ID, whatever its source
    /// address and the CPU it is delivered on. A datagram without such an ID is distributed as by
    /// [`reuse_port`](Self::reuse_port), by its addresses and ports. All members have the same `ids`, and each a different
    /// `place`.
    ///
    /// Flows follow their readers (RFS), and are identified by connection ID if the [flow
    /// keys](crate::Config) contain `quic:PORTS:LEN` with this port and the length of the IDs.
    pub fn reuse_port_by_id(mut self, ids: &Arc<ConnectionIds>, place: EndpointIndex) -> Self {
        self.reuse = Reuse::Hash;
        self.select = Some(SelectById { ids: Arc::clone(ids), place });
        self
    }

    /// Sets whether an IPv6 socket is for IPv6 alone (`IPV6_V6ONLY`), as one that is bound to an IPv6 address is in any case.
    pub fn v6_only(mut self, is_v6_only: bool) -> Self {
        self.is_v6_only = is_v6_only;
        self
    }

    /// Sets the receive buffer, in bytes, at most `rmem_max` (`SO_RCVBUF`).
    pub fn recv_buffer_size(mut self, bytes: u32) -> Self {
        self.rcvbuf = Some(bytes.min(self.net.0.rmem_max));
        self
    }

    /// Sets whether the port is also reserved in the kernel, if the kernel has one of the devices.
    /// Default: true.
    pub fn reserve(mut self, is_reserved: bool) -> Self {
        self.is_reserved = is_reserved;
        self
    }

    /// Binds the socket to the first address that is free.
    ///
    /// # Errors
    /// Of the last address: `EADDRINUSE` if another socket of this process, or of a program on the kernel's stack, has
    /// the address; `EADDRNOTAVAIL` if the address is not one of this host's; `EINVAL` of an IPv4-mapped one for
    /// [IPv6 alone](Self::v6_only); or if no file descriptors are left.
    pub fn bind(self, local: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        try_each(local, |local| self.bind_to(local))
    }

    fn bind_to(&self, local: SocketAddr) -> io::Result<UdpSocket> {
        self.check(local)?;
        first_free(local, |local, reserved| {
            if self.is_reserved && self.net.0.is_kernels(endpoint::plain(local).ip()) {
                let options = ReserveOptions {
                    reuse_port: self.reuse.is_shared(),
                    reuse_address: self.reuses_address,
                    v6_only: self.is_v6_only,
                };
                *reserved = Some(udp_reserve::reserve(local, options)?);
            }
            self.bind_by(local, reserved)
        })
    }

    /// Binds the socket to an address that the caller keeps from the kernel, by `reserved` if the kernel has it.
    ///
    /// # Errors
    /// As [`bind`](Self::bind), of this address.
    pub fn bind_reserved(
        self,
        local: SocketAddr,
        mut reserved: Option<Hidden<std::net::UdpSocket>>,
    ) -> io::Result<UdpSocket> {
        self.check(local)?;
        self.bind_by(local, &mut reserved)
    }

    /// Refuses addresses that the socket cannot have. Those that the kernel has are known from then on.
    fn check(&self, local: SocketAddr) -> io::Result<()> {
        let plain = endpoint::plain(local);
        if self.is_v6_only && local.is_ipv6() && plain.is_ipv4() {
            return Err(Errno::INVAL.into());
        }
        self.net.0.check_local(plain.ip())
    }

    /// Binds the socket to an address, if there is no conflict: then it takes the reservation of its port.
    fn bind_by(
        &self,
        mut local: SocketAddr,
        reserved: &mut Option<Hidden<std::net::UdpSocket>>,
    ) -> io::Result<UdpSocket> {
        let &Self { ref net, reuse, reuses_address, cpu, ref select, is_v6_only, .. } = self;
        let (shared, select) = (Arc::clone(&net.0), select.clone());
        if let Some(reserved) = reserved {
            local.set_port(reserved.local_addr()?.port());
        }
        let wake = Arc::new(Wake::default());
        let unbound = Binding::new(SocketId(0), endpoint::plain(local));
        let binding = Binding { reuse, reuses_address, cpu, select, is_v6_only, ..unbound };
        let rcvbuf = self.rcvbuf.unwrap_or(shared.rmem_default);
        let mut bound = shared.bind(binding, rcvbuf, Arc::<Wake>::clone(&wake))?;
        // As the program names it: an IPv6 socket keeps its family at an IPv4 address, and a scope.
        local.set_port(bound.local.port());
        bound.local = local;
        Ok(UdpSocket(Arc::new(Endpoint::new(shared, bound, wake, reserved.take()))))
    }

    /// Listens for TCP connections on the first address that is free, with room for `backlog` of them
    /// that wait to be accepted, at most 4096. A receive buffer that was set is that of each connection.
    ///
    /// Each of several listeners that share an address gets a part of the connections. When one closes,
    /// those that wait to be accepted from it are reset.
    ///
    /// # Errors
    /// As [`TcpListener::bind`]; `InvalidInput` of sharing by [connection ID](Self::reuse_port_by_id).
    pub fn listen(self, local: impl ToSocketAddrs, backlog: u32) -> io::Result<TcpListener> {
        let Self { net, reuse, cpu, select, is_v6_only, rcvbuf, is_reserved, .. } = self;
        if select.is_some() {
            let why = "connection IDs select sockets for QUIC, not for TCP: use reuse_port";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let how = ListenOptions { reuse, cpu, is_v6_only, is_reserved, rcvbuf, backlog };
        try_each(local, |local| TcpListener::listen(&net.0, local, &how))
    }

    /// Listens on an address that the caller keeps from the kernel, by `reserved` if the kernel has it. The listener's
    /// descriptor is that of `readiness`, if it is given.
    ///
    /// # Errors
    /// As [`listen`](Self::listen), of this address.
    pub fn listen_reserved(
        self,
        local: SocketAddr,
        backlog: u32,
        reserved: Option<Arc<Reservation>>,
        readiness: Option<(ReadinessSetter, ReadinessDescriptor)>,
    ) -> io::Result<TcpListener> {
        let Self { net, reuse, cpu, is_v6_only, rcvbuf, .. } = self;
        let how = ListenOptions { reuse, cpu, is_v6_only, is_reserved: false, rcvbuf, backlog };
        TcpListener::listen_reserved(&net.0, local, &how, reserved, readiness)
    }
}

/// Ports of the kernel's choice that are tried at most.
const CHOICES_MAX: usize = 16;

/// Binds to an address by `attempt`, which may reserve its port in the kernel. If the kernel chooses the port, and a socket
/// here has it without a reservation, others are tried: the reservations so far are kept meanwhile.
pub(super) fn first_free<T, R>(
    local: SocketAddr,
    mut attempt: impl FnMut(SocketAddr, &mut Option<R>) -> io::Result<T>,
) -> io::Result<T> {
    let mut refused = Vec::new();
    loop {
        let mut reserved = None;
        match attempt(local, &mut reserved) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && local.port() == 0
                    && refused.len() < CHOICES_MAX =>
            {
                // Without a reservation all ports were tried.
                let Some(reserved) = reserved else { return Err(error) };
                refused.push(reserved);
            }
            done => return done,
        }
    }
}

/// Tries addresses until one succeeds, as `std` does. Returns the error of the last one.
pub(super) fn try_each<T>(
    addresses: impl ToSocketAddrs,
    mut attempt: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let mut failed = io::Error::new(io::ErrorKind::InvalidInput, "no address was found");
    for address in addresses.to_socket_addrs()? {
        match attempt(address) {
            Ok(done) => return Ok(done),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

#[cfg(test)]
mod tests {
    use forebay_sys::interface::InterfaceIndex;

    use super::super::neighbours::DeviceNeighbours;
    use super::super::rig::{Recording, device, host_on, own_address};
    use super::super::{Net, NetConfig};
    use super::*;

    /// Attempts whose first ones find their port in use here, each with a reservation that is told by its drop.
    fn attempts(refused: usize, port: u16) -> (io::Result<usize>, usize) {
        let (kept, mut count) = (Arc::new(()), 0);
        let done = first_free((own_address(0), port).into(), |_, reserved| {
            assert_eq!(Arc::strong_count(&kept), 1 + count, "the kernel would choose it again");
            *reserved = Some(Arc::clone(&kept));
            count += 1;
            if count <= refused { Err(Errno::ADDRINUSE.into()) } else { Ok(count) }
        });
        (done, count)
    }

    #[test]
    fn udp_24_choice_in_use_is_replaced() {
        assert_eq!(attempts(2, 0).0.unwrap(), 3);
        assert_eq!(
            (attempts(2, 7).0.is_err(), attempts(2, 7).1),
            (true, 1),
            "a port of the caller"
        );
        assert_eq!(attempts(usize::MAX, 0).1, CHOICES_MAX + 1);
        let without =
            first_free::<(), ()>((own_address(0), 0).into(), |_, _| Err(Errno::ADDRINUSE.into()));
        assert!(without.is_err(), "all ports are in use");
    }

    /// Beside a device that the kernel has, too.
    #[test]
    fn udp_24_own_addresses_need_no_kernel() {
        let mut kernels = device(0);
        kernels.kernels = Some(InterfaceIndex(i32::MAX.unsigned_abs()));
        let sinks = [(); 2].map(|()| Box::<Recording>::default() as _);
        let no_link = |_: &_| DeviceNeighbours::NoLink;
        let devices = vec![kernels, device(1)];
        let net = Net(host_on(devices, vec![sinks.into()], NetConfig::TCP, no_link));
        let socket = net.bind((own_address(1), 0)).unwrap();
        assert!(net.bind(socket.local_addr()).is_err(), "the port is taken");
        // The kernel of this machine does not have the other one.
        let error = net.bind((own_address(0), 0)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AddrNotAvailable);
    }
}
