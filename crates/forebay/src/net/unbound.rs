//! Unbound sockets: their options, and `bind`.

use std::io;
use std::net::ToSocketAddrs;
use std::sync::Arc;

use forebay_rx::CpuId;
use forebay_stack::socket::SocketId;
use forebay_stack::socket::connection_id::{ConnectionIds, EndpointIndex, SelectById};
use forebay_stack::socket::table::{Binding, Reuse};
use forebay_sys as sys;

use super::endpoint::{self, Inner};
use super::wake::Wake;
use super::{Net, UdpSocket};

/// Options of a socket that is not bound yet.
#[derive(Clone, Debug)]
#[must_use]
pub struct SocketOptions {
    net: Net,
    reuse: Reuse,
    cpu: Option<CpuId>,
    select: Option<SelectById>,
    is_v6_only: bool,
    rcvbuf: u32,
    is_reserved: bool,
}

impl SocketOptions {
    pub(super) fn of(net: &Net) -> Self {
        Self {
            net: net.clone(),
            reuse: Reuse::None,
            cpu: None,
            select: None,
            is_v6_only: false,
            rcvbuf: net.0.rmem_default,
            is_reserved: true,
        }
    }

    /// Shares the address with other sockets that also set this (`SO_REUSEPORT`); the flow hash
    /// selects one of them.
    pub fn reuse_port(mut self) -> Self {
        self.reuse = Reuse::Hash;
        self
    }

    /// Shares the address with other sockets, one per CPU (`SO_REUSEPORT` with `SO_INCOMING_CPU`):
    /// this one receives the datagrams delivered on `cpu`. On a CPU without such a socket, the flow
    /// hash selects one.
    pub fn reuse_port_on(mut self, cpu: CpuId) -> Self {
        (self.reuse, self.cpu) = (Reuse::ThisCpu, Some(cpu));
        self
    }

    /// Shares the address with other sockets, each of them one endpoint of a QUIC server. A
    /// datagram goes to the endpoint that issued its destination connection ID, whatever its source
    /// address and the CPU it is delivered on. A datagram without such an ID is distributed as by
    /// [`reuse_port`](Self::reuse_port). All members have the same `ids`, and each a different
    /// `place`.
    ///
    /// Flows follow their readers (RFS), and are identified by connection ID if the [flow
    /// keys](crate::Config) contain `quic:PORTS:LEN` with this port and the length of the IDs.
    pub fn reuse_port_by_id(mut self, ids: &Arc<ConnectionIds>, place: EndpointIndex) -> Self {
        self.reuse = Reuse::Hash;
        self.select = Some(SelectById { ids: Arc::clone(ids), place });
        self
    }

    /// Sets whether an IPv6 socket ignores IPv4 (`IPV6_V6ONLY`).
    pub fn v6_only(mut self, is_v6_only: bool) -> Self {
        self.is_v6_only = is_v6_only;
        self
    }

    /// Sets the receive buffer, in bytes, at most `rmem_max` (`SO_RCVBUF`).
    pub fn recv_buffer_size(mut self, bytes: u32) -> Self {
        self.rcvbuf = bytes.min(self.net.0.rmem_max);
        self
    }

    /// Sets whether the port is also reserved in the kernel, if the kernel has one of the devices.
    /// Default: true.
    pub fn reserve(mut self, is_reserved: bool) -> Self {
        self.is_reserved = is_reserved;
        self
    }

    /// Binds the socket.
    ///
    /// # Errors
    /// `EADDRINUSE` if another socket of this process, or of a program on the kernel's stack, has
    /// the address; `EADDRNOTAVAIL` if the address is not one of this host's; or if no file
    /// descriptors are left.
    pub fn bind(self, local: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        let Self { net: Net(shared), reuse, cpu, select, is_v6_only, rcvbuf, is_reserved } = self;
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "no address to bind to");
        let mut local = local.to_socket_addrs()?.next().ok_or_else(none)?;
        let is_shared = reuse != Reuse::None;
        let is_kernels = shared.devices.iter().any(|device| device.kernels.is_some());
        let reserved = if is_reserved && is_kernels {
            Some(sys::udp_reserve::reserve(local, is_shared, is_v6_only)?)
        } else {
            None
        };
        if let Some(reserved) = &reserved {
            local.set_port(reserved.local_addr()?.port());
        }
        let wake = Arc::new(Wake::default());
        let unbound = Binding::new(SocketId(0), endpoint::plain(local));
        let binding = Binding { reuse, cpu, select, is_v6_only, ..unbound };
        let bound = shared.bind(binding, rcvbuf, Arc::<Wake>::clone(&wake))?;
        Ok(UdpSocket(Arc::new(Inner::new(shared, bound, wake, reserved))))
    }
}
