//! Transmit path of sockets: route and source address, and the hand-over to the kernel of datagrams
//! that this process cannot send itself.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, mem};

use forebay_stack::network::Identity;
use forebay_stack::network::compose::DEFAULT_TTL;
use forebay_sys::udp_send::{self, SendControl};
use rustix::io::Errno;

use super::datagram::{Datagram, Datagrams};
use super::endpoint::{Endpoint, plain};
use super::message::{DeviceIndex, Transmit};
use super::routes::{Routes, is_link_local, scope_of};
use super::shared::CpuIndex;
use super::transmit::{Between, Gathered, SendForm, SentMarks};

/// Time of the device's doorbell: with this datagram, or later for a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flush {
    Now,
    Later,
}

/// Device and source address of a datagram.
#[derive(Clone, Copy)]
struct Way {
    device: usize,
    source: SocketAddr,
    /// True if the socket or the call names the address; else the route may.
    is_named: bool,
}

impl Endpoint {
    /// Sends a payload as one datagram, or as several of one segment size, at once.
    pub(super) fn send(&self, of: &Transmit<'_>) -> io::Result<usize> {
        self.send_by(self.shared.transmitter_index(), of, Flush::Now)
    }

    /// Sends a payload by the transmitter of a CPU, or by the one that has earlier packets of the
    /// flow. With [`Flush::Later`] the caller flushes the former.
    pub(super) fn send_by(
        &self,
        index: CpuIndex,
        of: &Transmit<'_>,
        flush: Flush,
    ) -> io::Result<usize> {
        let to = plain(of.destination);
        let routes = self.shared.routes();
        let Way { device, source, is_named } = self.way_of(of, to, &routes)?;
        let mut between = Between { source, destination: to };
        let marks = self.marks_of(of, to.ip());
        let identity = routes.identity(device);
        // What programs on the kernel's stack of this host get can only come from the kernel.
        let has_kernel = self.has_kernel(device);
        if is_this_host(to.ip(), &identity) {
            self.check_refusal()?;
            return match has_kernel {
                true => self.send_by_kernel(of, device, between, marks),
                false => Err(no_loopback(to.ip())),
            };
        }
        check_length(of, marks, between, identity.mtu)?;
        self.check_refusal()?;
        if marks.gso_size > 0 {
            SendForm::of(of.payload.len(), marks, between, identity.mtu)?;
        }
        check_segments(of)?;
        let is_looped = || self.options.groups(to.ip()).is_looped.load(Ordering::Relaxed);
        if to.ip().is_multicast() {
            if has_kernel && is_looped() {
                return self.send_by_kernel(of, device, between, marks);
            }
            if marks.ttl == 0 {
                return Ok(of.payload.len()); // does not leave the host (`ip_mc_output`)
            }
        }
        let back = self.way_back(device, to.ip());
        let (mut patience, mut has_flushed) = (self.patience(), false);
        let next = || self.last_sent.next(index, to, |index| self.shared.transmitter_of(index));
        let (mut by, mut transmitter) = next();
        if !is_named && let Some(source) = transmitter.route_source(device, &identity, to.ip()) {
            between.source.set_ip(source);
        }
        loop {
            match transmitter.gather(device, &identity, between, back, of.payload, marks) {
                Ok(Gathered::Yes) => break,
                Ok(Gathered::NextUnknown) => {
                    drop(transmitter); // not held across a system call
                    return self.send_by_kernel(of, device, between, marks);
                }
                Err(full) if full.kind() == io::ErrorKind::WouldBlock => {
                    drop(transmitter);
                    // Ignored: if the device is gone, the flush below fails, too.
                    let _ = self.shared.flush_all(by);
                    if mem::replace(&mut has_flushed, true) {
                        patience.wait(by)?;
                    }
                    (by, transmitter) = next();
                }
                Err(error) => return Err(error),
            }
        }
        let has_held = transmitter.take_held();
        drop(transmitter);
        if has_held {
            self.shared.tcp.look_soon(by);
        }
        if flush == Flush::Now || by != index {
            self.shared.flush(by, device).map_err(io::Error::other)?;
        }
        Ok(of.payload.len())
    }

    /// Checks what comes before the error that waits: addresses, route and length.
    pub(super) fn check_message(&self, of: &Transmit<'_>) -> io::Result<()> {
        let to = plain(of.destination);
        let routes = self.shared.routes();
        let Way { device, source, .. } = self.way_of(of, to, &routes)?;
        let identity = routes.identity(device);
        // The kernel delivers to this host by a device of its own.
        let mtu = if is_this_host(to.ip(), &identity) { u32::MAX } else { identity.mtu };
        check_length(of, self.marks_of(of, to.ip()), Between { source, destination: to }, mtu)
    }

    /// Way of a datagram whose addresses are valid, and which may go there.
    fn way_of(&self, of: &Transmit<'_>, to: SocketAddr, routes: &Routes<'_>) -> io::Result<Way> {
        self.check(of, to)?;
        let way = self.route(of, to, routes)?;
        self.check_broadcast(to, &routes.identity(way.device))?;
        Ok(way)
    }

    /// Takes the error that waits. As in the kernel, one of the arguments, the route or the length leaves it
    /// (`sock_alloc_send_pskb`).
    fn check_refusal(&self) -> io::Result<()> {
        if self.take_refusal() { Err(io::ErrorKind::ConnectionRefused.into()) } else { Ok(()) }
    }

    /// True if the kernel has the device, and a socket to send by.
    pub(super) fn has_kernel(&self, device: usize) -> bool {
        self.reserved.is_some() && self.shared.devices[device].kernels.is_some()
    }

    /// Refuses a broadcast address, unless the socket may send to it.
    pub(super) fn check_broadcast(&self, to: SocketAddr, on: &Identity) -> io::Result<()> {
        match to.ip() {
            IpAddr::V4(to)
                if !self.options.may_broadcast.load(Ordering::Relaxed) && on.is_broadcast(to) =>
            {
                Err(Errno::ACCESS.into())
            }
            _ => Ok(()),
        }
    }

    /// Rejects arguments that the kernel rejects before its route lookup.
    fn check(&self, of: &Transmit<'_>, to: SocketAddr) -> io::Result<()> {
        if self.is_ipv4() && to.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        self.check_v6_only(to.ip())?;
        // To a peer with port 0 the kernel sends (`udp_sendmsg`).
        if to.port() == 0 && self.remote() != Some(of.destination) {
            return Err(Errno::INVAL.into());
        }
        // IPv6 accepts a hop limit of 0, IPv4 no TTL of 0 (`ip_cmsg_send`).
        if to.is_ipv4() && of.ttl == Some(0) {
            return Err(Errno::INVAL.into());
        }
        let is_other = |source: IpAddr| source.to_canonical().is_ipv4() != to.is_ipv4();
        if of.source.is_some_and(is_other) {
            return Err(Errno::INVAL.into());
        }
        Ok(())
    }

    /// Route lookup: the outgoing device, and the datagram's source address.
    fn route(&self, of: &Transmit<'_>, to: SocketAddr, routes: &Routes<'_>) -> io::Result<Way> {
        let bound = self.local_for(to.ip());
        let asked = of.source.map(|source| source.to_canonical());
        // An unspecified address of IPv4 stands for that of the route, even of a bound socket (`ip_cmsg_send`).
        let is_by_route = to.is_ipv4() && asked.is_some_and(|ip| ip.is_unspecified());
        let is_bound = !is_by_route && self.is_source(bound);
        let asked = asked.filter(|ip| !ip.is_unspecified());
        let own = asked.map(|ip| SocketAddr::new(ip, 0)).or(is_bound.then_some(bound));
        let chosen = own.or_else(|| self.group_source(routes, to.ip()));
        let found = self.find_route(routes, of.device, chosen, of.destination)?;
        let Some((device, address)) = found else {
            self.shared.unsent.count_no_route(to.ip());
            return Err(Errno::NETUNREACH.into());
        };
        // An IPv4 source has no way to IPv6 (`ip6_dst_lookup_tail`).
        if plain(own.unwrap_or(bound)).is_ipv4() && to.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        // Source must be an address of this host (`ip_route_output_key`, `ip6_datagram_send_ctl`).
        if let Some(asked) = asked.filter(|asked| !routes.is_own(*asked)) {
            let is_unknown = to.is_ipv4() && !is_never_source(asked);
            return Err(if is_unknown { Errno::NETUNREACH } else { Errno::INVAL }.into());
        }
        let (is_named, own) = (chosen.is_some(), chosen.map(|own| plain(own).ip()).or(address));
        let source = SocketAddr::new(own.ok_or(Errno::NETUNREACH)?, bound.port());
        Ok(Way { device, source, is_named })
    }

    /// Finds the device towards a destination, and the source address to use on it: by the device that is given, or that
    /// the option names for groups without a scope, or else by the route.
    ///
    /// # Errors
    /// `ENODEV` if there is no such device.
    pub(super) fn find_route(
        &self,
        routes: &Routes<'_>,
        device: Option<DeviceIndex>,
        own: Option<SocketAddr>,
        to: SocketAddr,
    ) -> io::Result<Option<(usize, Option<IpAddr>)>> {
        let ip = plain(to).ip();
        let has_option = ip.is_multicast() && scope_of(to).is_none();
        let by_option = || self.options.groups(ip).device().filter(|_| has_option);
        match device.or_else(by_option) {
            Some(device) if device.index() >= self.shared.devices.len() => Err(Errno::NODEV.into()),
            Some(device) => Ok(routes.find_by(device.index(), ip)),
            None => Ok(routes.find_named_between(own, to)),
        }
    }

    /// Source address that the socket has chosen for datagrams to a group, if it is still one of this host's.
    pub(super) fn group_source(&self, routes: &Routes<'_>, to: IpAddr) -> Option<SocketAddr> {
        let is_group = to.is_ipv4() && to.is_multicast();
        let chosen = is_group.then(|| self.options.group_source_v4()).flatten();
        chosen.filter(|source| routes.is_own(*source)).map(|source| SocketAddr::new(source, 0))
    }

    fn marks_of(&self, of: &Transmit<'_>, to: IpAddr) -> SentMarks {
        let marks = self.marks(of.gso_size, to);
        SentMarks {
            ttl: of.ttl.unwrap_or(marks.ttl),
            tos: of.traffic_class.unwrap_or(marks.tos),
            ..marks
        }
    }

    /// Header fields according to the socket's options.
    fn marks(&self, gso_size: u16, to: IpAddr) -> SentMarks {
        let options = &self.options;
        let is_on = |option: &AtomicBool| option.load(Ordering::Relaxed);
        let (may_fragment, ignores_path) = match to {
            IpAddr::V4(_) => (&options.may_fragment_v4, &options.ignores_path_v4),
            IpAddr::V6(_) => (&options.may_fragment_v6, &options.ignores_path_v6),
        };
        let ttl = if to.is_multicast() { &options.groups(to).ttl } else { &options.ttl };
        let ttl = match ttl.load(Ordering::Relaxed) {
            // A hop limit of 0, which IPv6 allows, is not meant for IPv4 (`IP_TTL`).
            0 if to.is_ipv4() && !to.is_multicast() => DEFAULT_TTL,
            ttl => ttl,
        };
        SentMarks {
            ttl,
            tos: options.tos.load(Ordering::Relaxed),
            gso_size,
            may_fragment: is_on(may_fragment),
            may_routers_fragment: to.is_ipv4() && is_on(&options.may_routers_fragment),
            ignores_path: is_on(ignores_path),
        }
    }

    /// Sends through the kernel, which resolves the next hop and queues the datagram meanwhile. On
    /// a device that the kernel does not have, the datagram is dropped, as if the neighbour's queue
    /// of unresolved packets were full.
    ///
    /// # Errors
    /// The kernel's, if it refuses the first datagram. Once one has been sent, the payload counts as
    /// sent: datagrams that the kernel refuses from then on are dropped.
    fn send_by_kernel(
        &self,
        of: &Transmit<'_>,
        device: usize,
        between: Between,
        marks: SentMarks,
    ) -> io::Result<usize> {
        let to = between.destination;
        let interface = self.shared.devices[device].kernels;
        let (Some(reserved), Some(_)) = (&self.reserved, interface) else {
            self.shared.unsent.count_discard(to.ip());
            return Ok(of.payload.len());
        };
        let is_by_device = of.device.is_some() || to.ip().is_multicast() || is_link_local(to.ip());
        let control = SendControl {
            // A link-local one beyond its link is refused: the kernel finds another.
            source: Some(between.source.ip()).filter(|from| is_by_device || !is_link_local(*from)),
            interface: interface.filter(|_| is_by_device),
            traffic_class: marks.tos,
            // An IPv4 TTL of 0 is the multicast TTL, which the kernel's socket has, too.
            ttl: Some(marks.ttl).filter(|&ttl| ttl > 0 || to.is_ipv6()),
        };
        let size = match marks.gso_size {
            0 => of.payload.len().max(1),
            size => size.into(),
        };
        let empty = of.payload.is_empty().then_some(&[][..]);
        for (number, piece) in of.payload.chunks(size).chain(empty).enumerate() {
            match udp_send::send(reserved.as_fd(), piece, self.shown(to), &control) {
                Ok(_) => {}
                // Dropped: no event would report that the kernel's socket is writable again.
                Err(error) if number > 0 || error.kind() == io::ErrorKind::WouldBlock => {
                    self.shared.unsent.count_discard(to.ip());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(of.payload.len())
    }

    pub(super) fn send_replies(&self, batch: &mut Datagrams) -> io::Result<usize> {
        let index = self.shared.transmitter_index();
        let (mut by, mut transmitter) = (index, self.shared.transmitter_of(index));
        let routes = self.shared.routes();
        let mut sent = 0;
        for datagram in batch.datagrams.extract_if(.., |datagram| datagram.answer.is_some()) {
            let Datagram { packet, answer: Some(answer), freed_bytes, .. } = datagram else {
                continue;
            };
            batch.gone_bytes += packet.frame.truesize() + freed_bytes;
            let to = answer.between.destination.ip();
            let came_by = usize::from(packet.headers.device);
            let Some((device, address)) = routes.find_back(answer.between, came_by) else {
                self.shared.unsent.count_no_route(to);
                transmitter.put(packet);
                continue;
            };
            let identity = routes.identity(device);
            let mut between = answer.between;
            // A multicast or broadcast address is not a valid source address.
            if !identity.is_own(between.source.ip())
                && let Some(address) = address
            {
                between.source.set_ip(address);
            }
            if !self.last_sent.stay(by, between.destination, &transmitter) {
                drop(transmitter);
                self.flush_other(by, index)?;
                let transmitter_of = |index| self.shared.transmitter_of(index);
                (by, transmitter) = self.last_sent.next(index, between.destination, transmitter_of);
            }
            let (back, marks) = (answer.back, self.marks(0, to));
            match transmitter.gather_answer(device, &identity, packet, back, between, marks) {
                Ok(()) => sent += 1,
                Err(_) => self.shared.unsent.count_discard(to),
            }
        }
        drop(transmitter);
        if batch.is_empty() {
            batch.clear();
        }
        self.flush_other(by, index)?;
        self.shared.flush_all(index).map_err(io::Error::other)?;
        Ok(sent)
    }

    /// Flushes a transmitter, unless it is the one that the caller flushes at its end.
    fn flush_other(&self, by: CpuIndex, index: CpuIndex) -> io::Result<()> {
        if by == index {
            return Ok(());
        }
        self.shared.flush_all(by).map_err(io::Error::other)
    }
}

/// Checks the length before the kernel copies the payload (`__ip_append_data`), which looks at that of segments later.
fn check_length(of: &Transmit<'_>, marks: SentMarks, between: Between, mtu: u32) -> io::Result<()> {
    let may_fragment = marks.may_fragment || marks.gso_size > 0;
    let marks = SentMarks { gso_size: 0, may_fragment, ..marks };
    SendForm::of(of.payload.len(), marks, between, mtu).map(drop)
}

/// Refuses more datagrams in one payload than the kernel does (`udp_send_skb`).
fn check_segments(of: &Transmit<'_>) -> io::Result<()> {
    let len_max = usize::from(of.gso_size) * Transmit::SEGMENTS_MAX;
    if of.gso_size > 0 && of.payload.len() > len_max {
        return Err(Errno::INVAL.into());
    }
    Ok(())
}

/// True for an address that no packet to another host has as its source (`ip_route_output_key_hash_rcu`).
fn is_never_source(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            v4.is_loopback() || v4.is_multicast() || v4.is_broadcast() || v4.octets()[0] == 0
        }
        IpAddr::V6(_) => true,
    }
}

/// True for an address of this host, on the device that leads to it.
pub(super) fn is_this_host(to: IpAddr, on: &Identity) -> bool {
    to.is_unspecified() || to.is_loopback() || on.is_own(to)
}

/// Error of a destination that no device leads to.
pub(super) fn no_loopback(to: IpAddr) -> io::Error {
    let why =
        format!("{to} is this host itself: Forebay has no loopback, use a socket of the kernel");
    io::Error::new(io::ErrorKind::Unsupported, why)
}

#[cfg(test)]
mod tests;
