//! Transmit path of sockets: route and source address, and the hand-over to the kernel of datagrams
//! that this process cannot send itself.

use std::net::{IpAddr, SocketAddr};
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
        self.check(of, to)?;
        if self.take_refusal() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let routes = self.shared.routes();
        let Way { device, source, is_named } = self.route(of, to, &routes)?;
        let mut between = Between { source, destination: to };
        let marks = self.marks_of(of, to.ip());
        let identity = routes.identity(device);
        self.check_broadcast(to, &identity)?;
        // What programs on the kernel's stack of this host get can only come from the kernel.
        let has_kernel = self.has_kernel(device);
        if is_this_host(to.ip(), &identity) {
            return match has_kernel {
                true => self.send_by_kernel(of, device, between, marks),
                false => Err(no_loopback(to.ip())),
            };
        }
        let is_looped = || self.options.multicast_loop.load(Ordering::Relaxed);
        if to.ip().is_multicast() {
            SendForm::of(of.payload.len(), marks, between, identity.mtu)?;
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

    /// Checks what does not depend on the payload: addresses and route.
    pub(super) fn check_way(&self, of: &Transmit<'_>) -> io::Result<()> {
        let to = plain(of.destination);
        self.check(of, to)?;
        let routes = self.shared.routes();
        let Way { device, .. } = self.route(of, to, &routes)?;
        self.check_broadcast(to, &routes.identity(device))
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
        if to.port() == 0 {
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
        let is_bound = !plain(bound).ip().is_unspecified() && !plain(bound).ip().is_multicast();
        let asked = of.source.map(|source| source.to_canonical()).filter(|ip| !ip.is_unspecified());
        let own = asked.map(|ip| SocketAddr::new(ip, 0)).or(is_bound.then_some(bound));
        let found = self.find_route(routes, of.device, own, of.destination)?;
        let Some((device, address)) = found else {
            self.shared.unsent.count_no_route(to.ip());
            return Err(Errno::NETUNREACH.into());
        };
        // An IPv4 source has no way to IPv6 (`ip6_dst_lookup_tail`).
        if plain(own.unwrap_or(bound)).is_ipv4() && to.is_ipv6() {
            return Err(Errno::AFNOSUPPORT.into());
        }
        // Source must be an address of this host (`ip_route_output_key`, `ip6_datagram_send_ctl`).
        if asked.is_some_and(|asked| !routes.is_own(asked)) {
            return Err(if to.is_ipv4() { Errno::NETUNREACH } else { Errno::INVAL }.into());
        }
        let (is_named, own) = (own.is_some(), own.map(|own| plain(own).ip()).or(address));
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
        let by_option = || self.options.multicast_device().filter(|_| has_option);
        match device.or_else(by_option) {
            Some(device) if device.index() >= self.shared.devices.len() => Err(Errno::NODEV.into()),
            Some(device) => Ok(routes.find_by(device.index(), ip)),
            None => Ok(routes.find_named_between(own, to)),
        }
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
        let ttl = if to.is_multicast() { &options.multicast_ttl } else { &options.ttl };
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
            match udp_send::send(reserved, piece, self.shown(to), &control) {
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
mod tests {
    use std::sync::{Arc, Barrier};
    use std::thread;

    use std::net::Ipv6Addr;
    use std::sync::atomic::AtomicUsize;
    use std::time::Instant;

    use forebay_rx::Handler;
    use forebay_rx::parse::Link;
    use forebay_stack::Host;
    use forebay_stack::network::neighbours::{ANSWERED_MAX, NeighbourDrops};
    use forebay_stack::socket::SocketId;
    use forebay_stack::socket::table::Binding;
    use forebay_sys::interface::InterfaceIndex;

    use super::super::host::CpuHost;
    use super::super::neighbours::DeviceNeighbours;
    use super::super::rig::{
        Recording, device, host, host_on, neighbour, own_address, pool, received,
    };
    use super::super::shared::{NetDevice, NetState};
    use super::super::wake::Wake;
    use super::super::{NetConfig, stacks};
    use super::*;

    fn bound(state: &Arc<NetState>, local: SocketAddr) -> Endpoint {
        let wake = Arc::<Wake>::default();
        let binding = Binding::new(SocketId(0), local);
        let entry = state.bind(binding, 1 << 20, Arc::clone(&wake) as _).unwrap();
        Endpoint::new(Arc::clone(state), entry, wake, None)
    }

    /// A host with a device that only this process has, where neighbours are learned.
    fn learning_host(sink: Recording, mac: [u8; 6]) -> Arc<NetState> {
        let on = device(0);
        let identity = Identity { mac: Some(mac), ..Identity::clone(&on.identity.load()) };
        on.identity.store(Arc::new(identity));
        let own = |on: &NetDevice| DeviceNeighbours::Own(Arc::clone(&on.learned));
        host_on(vec![on], vec![vec![Box::new(sink)]], NetConfig::TCP, own)
    }

    /// A thread that goes on to another CPU uses the transmitter there, once the other has sent what the
    /// socket gave to it.
    #[test]
    fn udp_19_migration_keeps_order_of_datagrams() {
        let gate = Arc::new(Barrier::new(2));
        let [mut first, second] = [(), ()].map(|()| Recording::default());
        first.gate = Some(Arc::clone(&gate));
        let lens = Arc::clone(&first.lens);
        let second = Recording { lens: Arc::clone(&lens), ..second };
        let state = host(vec![vec![Box::new(first)], vec![Box::new(second)]], NetConfig::TCP);
        let socket = bound(&state, SocketAddr::new(own_address(0), 53));
        let send_by = |index, len: usize| {
            let payload = vec![7; len];
            let datagram = Transmit::new(&payload, neighbour(0));
            socket.send_by(index, &datagram, Flush::Now).unwrap()
        };
        thread::scope(|scope| {
            let user = scope.spawn(|| send_by(CpuIndex(0), 100));
            gate.wait();
            // The sink is in use: both calls return at once.
            send_by(CpuIndex(0), 200);
            send_by(CpuIndex(1), 300);
            let early = std::mem::take(&mut *lens.lock().unwrap());
            gate.wait();
            user.join().unwrap();
            assert!(early.is_empty(), "{early:?} overtook what the first CPU sends");
        });
        send_by(CpuIndex(1), 400);
        assert_eq!(*lens.lock().unwrap(), [100, 200, 300, 400]);
        assert_eq!(state.send_frames_away(), 0);
    }

    #[test]
    fn rfs_6_answer_left_to_another_is_unsent() {
        let gate = Arc::new(Barrier::new(2));
        let sink = Recording { gate: Some(Arc::clone(&gate)), ..Recording::default() };
        let state = host(vec![vec![Box::new(sink)]], NetConfig::TCP);
        let socket = bound(&state, SocketAddr::new(own_address(0), 53));
        let send = |len: usize| {
            let payload = vec![7; len];
            let datagram = Transmit::new(&payload, neighbour(0));
            socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| send(100));
            gate.wait(); // the other thread is in the sink
            send(200);
            let gathered = state.transmitter_of(CpuIndex(0)).mark();
            let has_sent = || state.transmitter_of(CpuIndex(0)).has_sent(gathered);
            assert!(!has_sent());
            gate.wait();
            other.join().unwrap();
            assert!(has_sent());
        });
    }

    #[test]
    fn udp_21_bound_socket_sends_by_its_device() {
        let sinks = [(); 2].map(|()| Recording::default());
        let lens = sinks.each_ref().map(|sink| Arc::clone(&sink.lens));
        let sinks = sinks.into_iter().map(|sink| Box::new(sink) as _).collect();
        let state = host(vec![sinks], NetConfig::TCP);
        let socket = bound(&state, SocketAddr::new(own_address(1), 53));
        for to in [SocketAddr::from(([192, 0, 2, 9], 4000)), neighbour(1)] {
            let datagram = Transmit::new(&[7; 100], to);
            socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
        }
        let lens = lens.map(|lens| lens.lock().unwrap().clone());
        assert_eq!(lens, [vec![], vec![100; 2]], "by each device");
    }

    #[test]
    fn udp_22_link_local_sender_has_scope() {
        let mut on = device(0);
        on.kernels = Some(InterfaceIndex(7));
        let sinks = vec![vec![Box::new(Recording::default()) as _]];
        let state = host_on(vec![on], sinks, NetConfig::TCP, |_| DeviceNeighbours::NoLink);
        let socket = bound(&state, "[::]:53".parse().unwrap());
        let [from, to] = [9, 1].map(|last| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last));
        let builder = etherparse::PacketBuilder::ipv6(from.octets(), to.octets(), 64);
        let packet = received(&mut pool(1), Link::Ip, builder.udp(4000, 53));
        let expected = ["[fe80::9%7]:4000", "[fe80::1%7]:53"].map(|text| text.parse().unwrap());
        let received = socket.read_message(&packet, &mut [0; 3]);
        assert_eq!([received.source, received.destination], expected);
        let datagram = Datagram::of(packet, 7);
        assert_eq!([datagram.source(), datagram.destination()], expected);
    }

    /// A CPU that sleeps wakes, and repeats the solicitation though no packet comes.
    #[test]
    fn promise_8_waiting_send_wakes_a_cpu() {
        let state = learning_host(Recording::default(), [2; 6]);
        let rings = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&rings);
        let ring = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        state.tcp.set_wakers(vec![Arc::new(ring)]);
        let socket = bound(&state, SocketAddr::new(own_address(0), 53));
        let mut host = CpuHost::new(CpuIndex(0), Arc::clone(&state));
        assert_eq!(host.sleep_max_ns(), None);
        let datagram = Transmit::new(&[7; 100], neighbour(0));
        socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
        assert_eq!(rings.load(Ordering::Relaxed), 1);
        let mut stack = stacks(&state, vec![None], None).remove(0);
        assert!(stack.sleep_max_ns().is_some());
        state.end();
        assert_eq!(stack.sleep_max_ns(), None);
    }

    /// Requests from spoofed addresses are answered as they came. They cost few solicitations, and nobody that is waited for.
    #[test]
    fn udp_25_spoofed_requests_solicit_few() {
        const OURS: [u8; 6] = [2, 0, 0, 0, 0, 1];
        const THEIRS: [u8; 6] = [2, 9, 9, 9, 9, 9];
        let sink = Recording::default();
        let lens = Arc::clone(&sink.lens);
        let state = learning_host(sink, OURS);
        let socket = bound(&state, SocketAddr::new(own_address(0), 53));
        socket.options.is_nonblocking.store(true, Ordering::Relaxed);
        let send = |to| {
            let datagram = Transmit::new(&[7; 100], to);
            socket.send_by(CpuIndex(0), &datagram, Flush::Now).unwrap();
            std::mem::take(&mut *lens.lock().unwrap())
        };
        let began = Instant::now();
        assert_eq!(send(neighbour(0)).len(), 1, "the solicitation");
        let (mut answers, mut asks, mut pool) = (0, 0, pool(1));
        for number in 0..10_000u16 {
            let [high, low] = number.to_be_bytes();
            let source = [10, 9, 64 + high, low];
            let builder = etherparse::PacketBuilder::ethernet2(THEIRS, OURS);
            let builder = builder.ipv4(source, [10, 9, 0, 1], 64).udp(4000, 53);
            let packet = received(&mut pool, Link::Ethernet, builder);
            let request = socket.read_message(&packet, &mut [0; 3]);
            pool.put(packet.frame);
            let sent = send(request.source);
            answers += sent.iter().filter(|&&len| len == 100).count();
            asks += sent.iter().filter(|&&len| len != 100).count();
        }
        let elapsed_s = usize::try_from(began.elapsed().as_secs()).unwrap() + 1;
        assert_eq!(answers, 10_000);
        assert!(asks <= (1 + elapsed_s) * ANSWERED_MAX as usize, "{asks} in {elapsed_s} s");
        let neighbours = state.devices[0].learned();
        assert_eq!((neighbours.waiting(), neighbours.drops()), (1, NeighbourDrops::default()));
    }
}
