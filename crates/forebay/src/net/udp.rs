//! UDP sockets with the calls of `std::net::UdpSocket`, and batches of datagrams in place.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{fmt, io};

use forebay_stack::socket::account::{Account, CounterSums};
use forebay_stack::socket::counters::LaneCounters;
use forebay_stack::socket::reader::SocketReader;
use rustix::io::Errno;
use rustix::net::sockopt::{set_ip_multicast_ttl, set_socket_reuseaddr};

use super::datagram::Datagrams;
use super::endpoint::Endpoint;
use super::message::{DeviceIndex, Received, Transmit};
use super::sending::Flush;
use super::unbound::try_each;

/// A UDP socket of a [`Net`](super::Net).
///
/// Any number of threads may send and receive. Each datagram is received by one of them.
#[derive(Clone)]
pub struct UdpSocket(pub(super) Arc<Endpoint>);

/// Counters of a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SocketCounts {
    /// Total number of datagrams queued since the socket was bound, read or not.
    pub queued: u64,
    /// Number of datagrams queued by each CPU, in the order of the engine's CPUs.
    pub by_cpu: Vec<u64>,
    /// Datagrams dropped because the receive buffer was full: `RcvbufErrors`.
    pub rcvbuf_errors: u64,
    /// Packet memory charged to the socket, in bytes (`sk_rmem_alloc`).
    pub rmem: u32,
    /// Receive buffer, in bytes (`SO_RCVBUF`).
    pub rcvbuf: u32,
}

impl SocketCounts {
    pub(super) fn of(account: &Account) -> Self {
        let queued = |lane: Option<&LaneCounters>| lane.map_or(0, |lane| lane.queued.get());
        let by_cpu: Vec<_> = account.lanes().map(queued).collect();
        let sums = CounterSums { queued: by_cpu.iter().sum(), dropped: account.dropped() };
        Self { by_cpu, ..Self::without_cpus(account, sums) }
    }

    /// Counters without those by CPU.
    pub(super) fn without_cpus(account: &Account, sums: CounterSums) -> Self {
        let (rmem, rcvbuf) = (account.rmem(), account.rcvbuf());
        let CounterSums { queued, dropped: rcvbuf_errors } = sums;
        Self { queued, by_cpu: Vec::new(), rcvbuf_errors, rmem, rcvbuf }
    }
}

impl UdpSocket {
    /// Local address; once connected, with the IP address chosen by the route.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local()
    }

    /// Address of the peer, if the socket is connected.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.remote()
    }

    /// Connects to a peer: only datagrams from the peer are received from now on, and
    /// [`send`](Self::send) sends to it.
    ///
    /// # Errors
    /// If the address cannot be resolved, or is of another family (`EAFNOSUPPORT`, as of IPv6 from a socket that an
    /// IPv4-mapped peer gave its address); `ENETUNREACH` if there is no
    /// route, and to IPv4 of a socket for [IPv6 alone](super::SocketOptions::v6_only); `Unsupported` to this host itself,
    /// as for [`send_to`](Self::send_to).
    pub fn connect(&self, to: impl ToSocketAddrs) -> io::Result<()> {
        try_each(to, |to| self.0.connect(to))
    }

    /// Ends the connection to a peer: datagrams from everywhere are received again, at the address that the socket was
    /// bound to (`connect` to `AF_UNSPEC`).
    pub fn disconnect(&self) {
        self.0.disconnect();
    }

    /// Sends a datagram to the connected peer.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); and `ENOTCONN`.
    pub fn send(&self, payload: &[u8]) -> io::Result<usize> {
        let to = self.peer_addr().ok_or(Errno::NOTCONN)?;
        self.0.send(&Transmit::new(payload, to))
    }

    /// Sends a datagram, never as fragments (`IP_PMTUDISC_DO`).
    ///
    /// # Errors
    /// `EMSGSIZE` if the datagram does not fit in the MTU; `ENETUNREACH` if there is no route, and to IPv4 from a socket
    /// for [IPv6 alone](super::SocketOptions::v6_only);
    /// `Unsupported` to this host itself by a device that only this process has: there is no loopback. Where the kernel has
    /// the device, and the socket's port is reserved there, it delivers to its own programs, and sockets of this process get nothing.
    /// `ECONNREFUSED` after an ICMP port unreachable from the connected peer; and if the device is
    /// gone. Waits while no packet memory is free, except if the socket is non-blocking or the
    /// calling thread is an engine CPU's, which may be the one that must collect the memory: then
    /// `WouldBlock`.
    pub fn send_to(&self, payload: &[u8], to: impl ToSocketAddrs) -> io::Result<usize> {
        self.0.send(&Transmit::new(payload, first(to)?))
    }

    /// Sends a payload as datagrams of `gso_size` bytes each; the last one may be shorter
    /// (`UDP_SEGMENT`).
    ///
    /// # Errors
    /// As [`send_msg`](Self::send_msg).
    pub fn send_gso(&self, payload: &[u8], gso_size: u16, to: SocketAddr) -> io::Result<usize> {
        self.send_msg(&Transmit { gso_size, ..Transmit::new(payload, to) })
    }

    /// Sends many datagrams with one notification of the device.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to) if the first datagram cannot be sent. After a later failure,
    /// the number of datagrams sent before it is returned instead.
    pub fn send_batch<'a>(
        &self,
        datagrams: impl IntoIterator<Item = (&'a [u8], SocketAddr)>,
    ) -> io::Result<usize> {
        let datagrams = datagrams.into_iter();
        self.send_all(datagrams.map(|(payload, to)| Transmit::new(payload, to)))
    }

    /// Sends a datagram, or several of one length, with control data of its own (`sendmsg`).
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to). `EINVAL`: a source of another family, an IPv4 TTL of 0, more datagrams
    /// than [`Transmit::SEGMENTS_MAX`], port 0 that is not the peer's. A source that is not this host's: `ENETUNREACH`, of IPv6, loopback
    /// and groups `EINVAL`. `EMSGSIZE` also when `gso_size` does not fit in the MTU.
    pub fn send_msg(&self, message: &Transmit<'_>) -> io::Result<usize> {
        self.0.send(message)
    }

    /// Checks a datagram as [`send_msg`](Self::send_msg) does, up to its length, and sends nothing. The error that waits
    /// stays. Without a payload, as with `MSG_PROBE`.
    ///
    /// # Errors
    /// As [`send_msg`](Self::send_msg).
    pub fn check_msg(&self, message: &Transmit<'_>) -> io::Result<()> {
        self.0.check_message(message)
    }

    /// Sends many messages with one notification of the device (`sendmmsg`).
    ///
    /// # Errors
    /// As [`send_msg`](Self::send_msg) if the very first cannot be sent. Otherwise the number of messages
    /// sent before the first failure is returned.
    pub fn send_msgs(&self, messages: &[Transmit<'_>]) -> io::Result<usize> {
        self.send_all(messages.iter().copied())
    }

    fn send_all<'a>(&self, messages: impl Iterator<Item = Transmit<'a>>) -> io::Result<usize> {
        let transmitter = self.0.shared.transmitter_index();
        let mut sent = 0;
        let mut failed = None;
        for message in messages {
            if let Err(error) = self.0.send_by(transmitter, &message, Flush::Later) {
                failed = Some(error);
                break;
            }
            sent += 1;
        }
        let flushed = self.0.shared.flush_all(transmitter).map_err(io::Error::other);
        match failed {
            Some(error) if sent == 0 => Err(error),
            _ => flushed.map(|()| sent),
        }
    }

    /// Receives one datagram into `buffer`. Returns the number of bytes copied and the sender.
    /// Excess bytes are discarded.
    ///
    /// # Errors
    /// `WouldBlock`, at once or after the time-out, as configured, and on the thread of a CPU, which must not wait
    /// ([`recv_batch_on`](Self::recv_batch_on) turns it); `ECONNREFUSED` as for [`send_to`](Self::send_to); `BrokenPipe` once the engine has ended and all datagrams are
    /// read.
    pub fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let packet = self.0.wait_for(SocketReader::next)?;
        let read = self.0.read(&packet, buffer);
        self.0.reader().give_back(packet, self.0.shared.policy.load());
        Ok(read)
    }

    /// Receives one datagram into `buffer`, with all that its headers say (`recvmsg`).
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv_msg(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let packet = self.0.wait_for(SocketReader::next)?;
        let read = self.0.read_message(&packet, buffer);
        self.0.reader().give_back(packet, self.0.shared.policy.load());
        Ok(read)
    }

    /// Receives one datagram into `buffer`. Returns the number of bytes copied.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buffer).map(|(len, _)| len)
    }

    /// Reads the next datagram without taking it.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn peek_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.0.wait_for(|reader| reader.peek().map(|packet| self.0.read(packet, buffer)))
    }

    /// Reads the next datagram without taking it, with all that its headers say.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn peek_msg(&self, buffer: &mut [u8]) -> io::Result<Received> {
        self.0.wait_for(|reader| reader.peek().map(|packet| self.0.read_message(packet, buffer)))
    }

    /// Takes the error that waits: `ECONNREFUSED` after an ICMP port unreachable from the connected peer (`SO_ERROR`).
    #[must_use]
    pub fn take_error(&self) -> Option<io::Error> {
        self.0.take_refusal().then(|| io::ErrorKind::ConnectionRefused.into())
    }

    /// Receives between 1 and `max` datagrams in place, without copying. The previous datagrams of
    /// `batch` are returned first. With a `max` of 0 it returns 0 at once, as `recvmmsg` does.
    ///
    /// # Errors
    /// As [`recv_from`](Self::recv_from).
    pub fn recv_batch(&self, batch: &mut Datagrams, max: usize) -> io::Result<usize> {
        batch.clear();
        if max == 0 {
            return Ok(0);
        }
        self.0.wait_for(|reader| self.0.take_batch(reader, batch, max))
    }

    /// Receives up to `max` datagrams in place without waiting; returns 0 if none is queued.
    pub fn try_recv_batch(&self, batch: &mut Datagrams, max: usize) -> usize {
        batch.clear();
        self.try_take(batch, max)
    }

    pub(super) fn try_take(&self, batch: &mut Datagrams, max: usize) -> usize {
        self.0.try_take(|reader| self.0.take_batch(reader, batch, max)).unwrap_or(0)
    }

    /// Sends the answers of a batch to the senders of its datagrams, in order. Returns the number
    /// sent. An answer without a route, or longer than the device's MTU, is dropped and counted
    /// (`OutNoRoutes`, `OutDiscards` of [`Net::snmp`](super::Net::snmp)).
    ///
    /// # Errors
    /// If the device is gone.
    pub fn send_replies(&self, batch: &mut Datagrams) -> io::Result<usize> {
        self.0.send_replies(batch)
    }

    /// Sets whether calls return at once if nothing is queued (`O_NONBLOCK`).
    pub fn set_nonblocking(&self, is_nonblocking: bool) {
        self.0.options.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    /// Sets the longest wait for a datagram; `None`: no limit (`SO_RCVTIMEO`).
    ///
    /// # Errors
    /// If the time-out is zero, as in `std`.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.options.read_timeout.set(timeout)
    }

    /// Sets the longest wait for packet memory to send from; `None`: no limit (`SO_SNDTIMEO`).
    ///
    /// # Errors
    /// If the time-out is zero, as in `std`.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.options.write_timeout.set(timeout)
    }

    /// Sets whether merged datagrams are read as one (`UDP_GRO`).
    pub fn set_gro(&self, is_on: bool) {
        self.0.reader().set_takes_merged(is_on);
    }

    /// Sets whether flows follow the CPU that reads them (RFS). Default: true, except for sockets
    /// bound [one per CPU](super::SocketOptions::reuse_port_on).
    pub fn set_followed(&self, is_followed: bool) {
        self.0.options.is_followed.store(is_followed, Ordering::Relaxed);
    }

    /// Sets the time to live, or hop limit, of datagrams sent (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    ///
    /// # Errors
    /// `EINVAL` if it is 0 and the socket is of IPv4. A hop limit of 0 holds for IPv6 destinations
    /// only.
    pub fn set_ttl(&self, ttl: u8) -> io::Result<()> {
        if ttl == 0 && self.0.is_ipv4() {
            return Err(Errno::INVAL.into());
        }
        self.0.options.ttl.store(ttl, Ordering::Relaxed);
        Ok(())
    }

    /// Sets DSCP and ECN of datagrams sent (`IP_TOS`, `IPV6_TCLASS`).
    pub fn set_traffic_class(&self, class: u8) {
        self.0.options.tos.store(class, Ordering::Relaxed);
    }

    /// Sets the receive buffer, in bytes, at most `rmem_max` (`SO_RCVBUF`).
    pub fn set_recv_buffer_size(&self, bytes: u32) {
        self.0.reader().consumer.account().set_rcvbuf(bytes.min(self.0.shared.rmem_max));
    }

    /// Sets whether datagrams above the MTU leave as fragments, instead of being refused with
    /// `EMSGSIZE` (`IP_PMTUDISC_WANT` instead of `IP_PMTUDISC_DO`). Those of one [GSO
    /// payload](Transmit::gso_size) are never fragmented.
    pub fn set_fragment(&self, may_fragment: bool) {
        self.set_fragment_v4(may_fragment);
        self.set_fragment_v6(may_fragment);
    }

    /// [`set_fragment`](Self::set_fragment) for datagrams of IPv4 alone (`IP_MTU_DISCOVER`).
    pub fn set_fragment_v4(&self, may_fragment: bool) {
        self.0.options.may_fragment_v4.store(may_fragment, Ordering::Relaxed);
    }

    /// [`set_fragment`](Self::set_fragment) for datagrams of IPv6 alone (`IPV6_MTU_DISCOVER`).
    pub fn set_fragment_v6(&self, may_fragment: bool) {
        self.0.options.may_fragment_v6.store(may_fragment, Ordering::Relaxed);
    }

    /// Sets whether routers may fragment datagrams of IPv4: these then leave without "don't fragment", and with an
    /// identification each (`IP_PMTUDISC_DONT`). Default: false.
    pub fn set_fragment_by_routers(&self, may_fragment: bool) {
        self.0.options.may_routers_fragment.store(may_fragment, Ordering::Relaxed);
    }

    /// Sets whether the MTU is that of the device alone, whatever routers tell of the path (`IP_PMTUDISC_PROBE`, and with
    /// [fragments](Self::set_fragment) `IP_PMTUDISC_OMIT`). Default: false.
    pub fn set_path_ignored(&self, is_ignored: bool) {
        self.set_path_ignored_v4(is_ignored);
        self.set_path_ignored_v6(is_ignored);
    }

    /// [`set_path_ignored`](Self::set_path_ignored) for datagrams of IPv4 alone (`IP_MTU_DISCOVER`).
    pub fn set_path_ignored_v4(&self, is_ignored: bool) {
        self.0.options.ignores_path_v4.store(is_ignored, Ordering::Relaxed);
    }

    /// [`set_path_ignored`](Self::set_path_ignored) for datagrams of IPv6 alone (`IPV6_MTU_DISCOVER`).
    pub fn set_path_ignored_v6(&self, is_ignored: bool) {
        self.0.options.ignores_path_v6.store(is_ignored, Ordering::Relaxed);
    }

    /// Sets whether datagrams may be sent to broadcast addresses; if not, they are refused with `EACCES`
    /// (`SO_BROADCAST`). Default: true, unlike the kernel's.
    pub fn set_broadcast(&self, may_broadcast: bool) {
        self.0.options.may_broadcast.store(may_broadcast, Ordering::Relaxed);
    }

    /// Sets whether sockets that [reuse](super::SocketOptions::reuse_address) addresses, too, may be bound beside this one
    /// (`SO_REUSEADDR`).
    ///
    /// # Errors
    /// The kernel's, for the socket that reserves the port.
    pub fn set_reuse_address(&self, is_on: bool) -> io::Result<()> {
        if let Some(reserved) = &self.0.reserved {
            set_socket_reuseaddr(reserved, is_on)?;
        }
        self.0.shared.set_reuses_address(self.0.id, is_on);
        Ok(())
    }

    /// Joins a multicast group on all devices. On a device that the kernel has too, the kernel also
    /// joins the group, sends membership reports and answers queries (IGMP, MLD); on other devices
    /// nobody does.
    ///
    /// # Errors
    /// `EINVAL` if `group` is not a multicast address, or not of the socket's family; `EADDRINUSE` if it
    /// was joined before; `ENOBUFS` beyond 20 groups; the kernel's errors.
    pub fn join_multicast(&self, group: IpAddr) -> io::Result<()> {
        self.0.join(group, None)
    }

    /// Joins a multicast group on one device (`IP_ADD_MEMBERSHIP`, `IPV6_JOIN_GROUP`).
    ///
    /// # Errors
    /// As [`join_multicast`](Self::join_multicast); `ENODEV` if there is no such device.
    pub fn join_multicast_on(&self, group: IpAddr, device: DeviceIndex) -> io::Result<()> {
        self.0.join(group, Some(device))
    }

    /// Leaves a multicast group on all devices that it was joined on.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` if it was not joined.
    pub fn leave_multicast(&self, group: IpAddr) -> io::Result<()> {
        self.0.leave(group, None)
    }

    /// Leaves a multicast group on one device (`IP_DROP_MEMBERSHIP`, `IPV6_LEAVE_GROUP`).
    ///
    /// # Errors
    /// As [`leave_multicast`](Self::leave_multicast).
    pub fn leave_multicast_on(&self, group: IpAddr, device: DeviceIndex) -> io::Result<()> {
        self.0.leave(group, Some(device))
    }

    /// Sets the device that datagrams to groups leave by, and that [`connect`](Self::connect) to a group takes the local
    /// address from; `None`: the route's (`IP_MULTICAST_IF`).
    pub fn set_multicast_device(&self, device: Option<DeviceIndex>) {
        self.set_multicast_device_v4(device);
        self.set_multicast_device_v6(device);
    }

    /// [`set_multicast_device`](Self::set_multicast_device) for groups of IPv4 alone (`IP_MULTICAST_IF`).
    pub fn set_multicast_device_v4(&self, device: Option<DeviceIndex>) {
        self.0.options.groups_v4.set_device(device);
    }

    /// [`set_multicast_device`](Self::set_multicast_device) for groups of IPv6 alone (`IPV6_MULTICAST_IF`).
    pub fn set_multicast_device_v6(&self, device: Option<DeviceIndex>) {
        self.0.options.groups_v6.set_device(device);
    }

    /// Sets the source address of datagrams to groups of IPv4, for a socket that is bound to no address; `None`: that of the
    /// device (`imr_address` of `IP_MULTICAST_IF`).
    pub fn set_multicast_source_v4(&self, source: Option<Ipv4Addr>) {
        self.0.options.set_group_source_v4(source);
    }

    /// Sets the time to live, or hop limit, of datagrams to groups (`IP_MULTICAST_TTL`,
    /// `IPV6_MULTICAST_HOPS`). Default: 1. With 0, they stay on this host.
    ///
    /// # Errors
    /// The kernel's, for the socket that it [loops](Self::set_multicast_loop) datagrams through.
    pub fn set_multicast_ttl(&self, ttl: u8) -> io::Result<()> {
        self.set_multicast_ttl_v4(ttl)?;
        self.set_multicast_ttl_v6(ttl);
        Ok(())
    }

    /// [`set_multicast_ttl`](Self::set_multicast_ttl) for groups of IPv4 alone (`IP_MULTICAST_TTL`).
    ///
    /// # Errors
    /// As [`set_multicast_ttl`](Self::set_multicast_ttl).
    pub fn set_multicast_ttl_v4(&self, ttl: u8) -> io::Result<()> {
        if let Some(reserved) = &self.0.reserved {
            // The kernel takes an IPv4 TTL of 0 from this option only.
            set_ip_multicast_ttl(reserved, ttl.into())?;
        }
        self.0.options.groups_v4.ttl.store(ttl, Ordering::Relaxed);
        Ok(())
    }

    /// [`set_multicast_ttl`](Self::set_multicast_ttl) for groups of IPv6 alone (`IPV6_MULTICAST_HOPS`).
    pub fn set_multicast_ttl_v6(&self, ttl: u8) {
        self.0.options.groups_v6.ttl.store(ttl, Ordering::Relaxed);
    }

    /// Sets whether programs of the kernel's on this host hear what is sent to groups (`IP_MULTICAST_LOOP`).
    /// Default: false, unlike the kernel's: with true, the kernel sends those datagrams. Sockets of this
    /// process hear none of them.
    pub fn set_multicast_loop(&self, is_on: bool) {
        self.set_multicast_loop_v4(is_on);
        self.set_multicast_loop_v6(is_on);
    }

    /// [`set_multicast_loop`](Self::set_multicast_loop) for groups of IPv4 alone (`IP_MULTICAST_LOOP`).
    pub fn set_multicast_loop_v4(&self, is_on: bool) {
        self.0.options.groups_v4.is_looped.store(is_on, Ordering::Relaxed);
    }

    /// [`set_multicast_loop`](Self::set_multicast_loop) for groups of IPv6 alone (`IPV6_MULTICAST_LOOP`).
    pub fn set_multicast_loop_v6(&self, is_on: bool) {
        self.0.options.groups_v6.is_looped.store(is_on, Ordering::Relaxed);
    }

    /// Counters of the socket.
    #[must_use]
    pub fn counts(&self) -> SocketCounts {
        SocketCounts::of(self.0.reader().consumer.account())
    }
}

impl fmt::Debug for UdpSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UdpSocket({} {})", self.0.id, self.0.local())
    }
}

fn first(of: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    of.to_socket_addrs()?.next().ok_or_else(|| Errno::DESTADDRREQ.into())
}
