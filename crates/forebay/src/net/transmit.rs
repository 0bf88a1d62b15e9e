//! Transmit side of sockets: headers, next hop, device.

mod queue; //     sending of what was gathered, by one thread at a time
mod answers; //   answers of the host itself, which may need fragments
mod segments; //  segments of TCP, which may wait for their next hop
mod last_sent; // order of a flow while its senders change CPUs

use std::mem::take;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::{fmt, io};

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::{Frame, Pool};
use forebay_rx::Packet;
use forebay_rx::packet::Arrival;
use forebay_stack::network::Identity;
use forebay_stack::network::compose::{
    DEFAULT_TTL, HEADERS_BYTES_MAX, HeaderError, LinkAddresses, UdpHeaders, emit_udp,
};
use forebay_stack::network::fragment_out::FragmentedDatagram;
use forebay_sys::clock::Clock;
use rustix::io::Errno;

use super::fragment_ids::FragmentIds;
use super::message::Transmit;
use super::neighbours::{DeviceNeighbours, Hop, RouteMtu, WayBack};
use super::path_mtus::PathMtus;
use super::routes::is_on_link;
pub(super) use last_sent::LastSent;
use queue::LeftMark;
pub(super) use queue::{Flushed, SegmentMark, SendMark, TransmitQueue};

/// Length of the largest packet of datagrams, if the frames of senders are no smaller.
const PACKET_BYTES_MAX: u32 = (16 << 10) - BEFORE_PACKET_BYTES;

/// Room for gathered packets that is made at first.
const GATHERED_ROOM: usize = 64;

/// Header fields of a datagram to be sent, addresses excluded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SentMarks {
    pub(super) ttl: u8,
    pub(super) tos: u8,
    pub(super) gso_size: u16,
    /// True if it leaves in fragments where it does not fit in the MTU.
    pub(super) may_fragment: bool,
    /// True if routers may fragment it, too. Of IPv4 alone.
    pub(super) may_routers_fragment: bool,
    /// True if the MTU is the device's, whatever routers tell.
    pub(super) ignores_path: bool,
}

impl Default for SentMarks {
    fn default() -> Self {
        Self {
            ttl: DEFAULT_TTL,
            tos: 0,
            gso_size: 0,
            may_fragment: false,
            may_routers_fragment: false,
            ignores_path: false,
        }
    }
}

/// Source and destination of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Between {
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
}

impl Between {
    /// Source and destination of a packet that is to be sent.
    fn of(packet: &Packet) -> Option<Self> {
        let view = packet.view();
        let (from, to) = view.ports()?;
        Some(Self {
            source: SocketAddr::new(view.source()?, from),
            destination: SocketAddr::new(view.destination()?, to),
        })
    }

    /// True for a packet of this flow. Of a datagram in fragments only the first one tells.
    pub(super) fn is_of(&self, packet: &Packet) -> bool {
        let parts = |Self { source, destination }: Self| {
            [source, destination].map(|address| (address.ip(), address.port()))
        };
        Self::of(packet).is_some_and(|of| parts(of) == parts(*self))
    }
}

/// Outcome of gathering a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Gathered {
    /// The datagram will be sent by the next flush.
    Yes,
    /// The next hop is unknown, and its resolution is left to the kernel.
    NextUnknown,
}

/// Gathers what one CPU sends: composes packets, and finds their next hops on each device. The
/// [transmit queue](TransmitQueue) that it belongs to sends them.
pub(super) struct Transmitter {
    clock: Clock,
    /// Time when the first of the gathered packets came, in ns.
    now_ns: u64,
    /// Frames for datagrams to be sent. The pool also returns frames of other CPUs to their owners.
    pool: Pool,
    /// True if all devices take packets of several datagrams.
    take_whole: bool,
    fragment_ids: Arc<FragmentIds>,
    path_mtus: Arc<PathMtus>,
    /// Send paths, by device.
    paths: Vec<SendPath>,
    /// Frames reserved for one send; empty between sends.
    frames: Vec<Frame>,
    /// Packets of one send; empty between sends.
    composed: Vec<Packet>,
    /// Packets displaced in a neighbour's queue; empty between sends.
    dropped: Vec<Packet>,
    /// True once packets wait for a neighbour that nobody has been told of.
    has_held: bool,
    /// Segments whose next hop the kernel is resolving.
    unresolved: Vec<segments::Unresolved>,
    /// Number of times that everything gathered had been sent.
    mark: SendMark,
    /// Number of times that no segment was unresolved, either.
    left_mark: LeftMark,
}

/// Next hops on a device, and packets to be sent there.
struct SendPath {
    neighbours: DeviceNeighbours,
    gathered: Vec<Packet>,
    /// True while the queue sends packets that it has taken.
    is_sending: bool,
}

impl Transmitter {
    pub(super) fn new(
        pool: Pool,
        take_whole: bool,
        (fragment_ids, path_mtus): (Arc<FragmentIds>, Arc<PathMtus>),
        clock: Clock,
        neighbours: impl Iterator<Item = DeviceNeighbours>,
    ) -> Self {
        let now_ns = clock.now_ns();
        let paths = neighbours.map(|neighbours| SendPath {
            neighbours,
            gathered: Vec::with_capacity(GATHERED_ROOM),
            is_sending: false,
        });
        Self {
            clock,
            now_ns,
            pool,
            take_whole,
            fragment_ids,
            path_mtus,
            paths: paths.collect(),
            frames: Vec::new(),
            composed: Vec::new(),
            dropped: Vec::new(),
            has_held: false,
            unresolved: Vec::new(),
            mark: SendMark::default(),
            left_mark: LeftMark::default(),
        }
    }

    /// Gathers a payload as one datagram, in fragments if it may leave in them, or as several of
    /// one segment size: all that it becomes, or nothing. An answer may go the way `back` that its
    /// datagram came. The next [`flush`](TransmitQueue::flush) sends it.
    ///
    /// # Errors
    /// As [`SendForm::of`]; `WouldBlock` if not enough memory is free, which a flush may change;
    /// `ENOBUFS` if there is not enough.
    pub(super) fn gather(
        &mut self,
        device: usize,
        on: &Identity,
        between: Between,
        back: Option<WayBack>,
        payload: &[u8],
        marks: SentMarks,
    ) -> io::Result<Gathered> {
        let mut form = SendForm::of(payload.len(), marks, between, on.mtu)?;
        self.look_at_clock(device);
        let Self { now_ns, pool, paths, .. } = self;
        let SendPath { neighbours, gathered, .. } = &mut paths[device];
        let to = between.destination.ip();
        let hop = match back.filter(|back| back.leads_to(to, on)) {
            Some(back) => {
                let flow = Some(between);
                Hop::Known(neighbours.hop_of_answer(flow, on, *now_ns, back, pool, gathered))
            }
            None => neighbours.hop_to(to, on, *now_ns, pool, gathered),
        };
        let mtu = self.mtu_towards(device, on, to, marks);
        if mtu < on.mtu {
            form = SendForm::of(payload.len(), marks, between, mtu)?;
        }
        let link_addresses = match hop {
            Hop::Known(link_addresses) => link_addresses,
            Hop::Sought(_) => on.mac.map(|from| LinkAddresses { to: [0; 6], from }),
            Hop::Unknown => return Ok(Gathered::NextUnknown),
        };
        match form {
            SendForm::Whole => self.compose_pieces(payload, 0, link_addresses, between, marks)?,
            SendForm::Segments(size) => {
                self.compose_pieces(payload, size, link_addresses, between, marks)?;
            }
            SendForm::Fragments => {
                self.compose_fragments(payload, mtu, link_addresses, between, marks)?;
            }
        }
        match hop {
            Hop::Sought(neighbour) => self.hold(device, neighbour),
            Hop::Known(_) | Hop::Unknown => self.add_composed(device),
        }
        Ok(Gathered::Yes)
    }

    /// Source address that the kernel's route has for a destination beyond the device's subnets; `None` if another choice
    /// counts.
    pub(super) fn route_source(
        &mut self,
        device: usize,
        on: &Identity,
        to: IpAddr,
    ) -> Option<IpAddr> {
        if is_on_link(to) || to.is_multicast() || on.addresses.iter().any(|own| own.contains(to)) {
            return None;
        }
        self.look_at_clock(device);
        let source = self.paths[device].neighbours.route_source(to, self.now_ns);
        source.filter(|source| on.is_own(*source))
    }

    /// MTU of the path to a destination whose next hop was found just now.
    fn mtu_towards(&self, device: usize, on: &Identity, to: IpAddr, marks: SentMarks) -> u32 {
        if marks.ignores_path || to.is_multicast() {
            return on.mtu;
        }
        let of_route = self.paths[device].neighbours.route_mtu(to);
        let of_path = self.path_mtus.find(to, self.now_ns);
        // A router has told the kernel, and other CPUs remember the route as it was before.
        if let Some(RouteMtu { bytes, until_ns: Some(until_ns) }) = of_route
            && of_path.is_none_or(|known| bytes < known)
        {
            self.path_mtus.learn_until(to, bytes, until_ns, self.now_ns);
        }
        let of_route = of_route.map(|of_route| of_route.bytes);
        of_route.into_iter().chain(of_path).fold(on.mtu, u32::min)
    }

    /// Notes the time, unless packets are gathered already: they leave soon after they came.
    fn look_at_clock(&mut self, device: usize) {
        if self.paths[device].gathered.is_empty() {
            self.now_ns = self.clock.now_ns();
        }
    }

    /// Composes a datagram, or datagrams of `gso_size` bytes, as many as fit in a frame as one GSO
    /// packet.
    fn compose_pieces(
        &mut self,
        payload: &[u8],
        gso_size: u16,
        link_addresses: Option<LinkAddresses>,
        between: Between,
        marks: SentMarks,
    ) -> io::Result<()> {
        let whole_len = if gso_size > 0 { self.whole_len(gso_size) } else { payload.len() };
        let whole_len = whole_len.max(1);
        self.reserve(payload.len().div_ceil(whole_len).max(1), payload.len().min(whole_len))?;
        let empty = payload.is_empty().then_some(&[][..]);
        for piece in payload.chunks(whole_len).chain(empty) {
            let Some(mut frame) = self.frames.pop() else { unreachable!("reserved for each") };
            frame.copy_from(piece);
            let mut packet = Packet::received(frame, Arrival(0), 0, forebay_rx::parse::Link::Ip);
            packet.set_gso_size(if piece.len() > gso_size.into() { gso_size } else { 0 });
            match self.compose(packet, link_addresses, between, marks) {
                Ok(packet) => self.composed.push(packet),
                Err(error) => {
                    self.discard_composed();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Composes all fragments of a datagram.
    fn compose_fragments(
        &mut self,
        payload: &[u8],
        mtu: u32,
        link_addresses: Option<LinkAddresses>,
        between: Between,
        marks: SentMarks,
    ) -> io::Result<()> {
        let Between { source, destination } = between;
        let SentMarks { ttl, tos, .. } = marks;
        let (gso_size, identification) = (0, None);
        let headers =
            UdpHeaders { link_addresses, source, destination, ttl, tos, gso_size, identification };
        let id = self.fragment_ids.next(source.ip(), destination.ip());
        let mut datagram =
            FragmentedDatagram::new(payload, headers, mtu, id).map_err(refused_headers)?;
        self.reserve(datagram.count(), datagram.fragment_bytes_max() as usize)?;
        for mut frame in self.frames.drain(..) {
            let headers = datagram.emit_next(&mut frame);
            let len_bytes = frame.len_bytes();
            let mut packet = Packet::received(frame, Arrival(0), len_bytes, headers.link);
            packet.headers = headers;
            self.composed.push(packet);
        }
        Ok(())
    }

    /// Allocates frames for all packets of one send, or none.
    fn reserve(&mut self, count: usize, len: usize) -> io::Result<()> {
        let Self { pool, frames, .. } = self;
        debug_assert!(frames.is_empty(), "a send takes all that it reserved");
        let len_bytes = u32::try_from(len).map_err(|_| too_long())?;
        frames.extend((0..count).map_while(|_| pool.allocate(len_bytes)));
        if frames.len() == count {
            return Ok(());
        }
        frames.drain(..).for_each(|frame| pool.put(frame));
        if pool.frames_for(len_bytes) < count {
            return Err(Errno::NOBUFS.into()); // waiting would not help
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn discard_composed(&mut self) {
        let Self { pool, frames, composed, .. } = self;
        frames.drain(..).for_each(|frame| pool.put(frame));
        composed.drain(..).for_each(|packet| pool.put(packet.frame));
    }

    /// Queues the composed packets, as one send, until their neighbour is resolved. Gathers them if another CPU has
    /// received its answer meanwhile.
    fn hold(&mut self, device: usize, neighbour: IpAddr) {
        let Self { paths, composed, dropped, now_ns, pool, has_held, .. } = self;
        let SendPath { neighbours, gathered, .. } = &mut paths[device];
        neighbours.hold(neighbour, composed, *now_ns, dropped);
        *has_held |= composed.is_empty();
        gathered.append(composed);
        dropped.drain(..).for_each(|packet| pool.put(packet.frame));
    }

    /// True if packets wait for a neighbour since the last call: the CPU must not sleep until packets come.
    pub(super) fn take_held(&mut self) -> bool {
        take(&mut self.has_held)
    }

    fn add_composed(&mut self, device: usize) {
        let Self { paths, composed, .. } = self;
        paths[device].gathered.append(composed);
    }

    /// Gathers the answer to a datagram that came from link-layer address `back`. The packet's
    /// frame contains only the payload.
    ///
    /// # Errors
    /// `EMSGSIZE` if the answer does not fit in the MTU.
    pub(super) fn gather_answer(
        &mut self,
        device: usize,
        on: &Identity,
        packet: Packet,
        back: Option<LinkAddresses>,
        between: Between,
        marks: SentMarks,
    ) -> io::Result<()> {
        self.look_at_clock(device);
        let (neighbours, to) = (&mut self.paths[device].neighbours, between.destination.ip());
        let link_addresses = neighbours.hop_back(to, on, self.now_ns, back);
        let mtu = self.mtu_towards(device, on, to, marks);
        if let Err(error) = check_len(packet.frame.len_bytes() as usize, between, mtu) {
            self.pool.put(packet.frame);
            return Err(error);
        }
        let packet = self.compose(packet, link_addresses, between, marks)?;
        self.add(device, packet);
        Ok(())
    }

    fn compose(
        &mut self,
        mut packet: Packet,
        link_addresses: Option<LinkAddresses>,
        between: Between,
        marks: SentMarks,
    ) -> io::Result<Packet> {
        let Between { source, destination } = between;
        let (SentMarks { ttl, tos, .. }, gso_size) = (marks, packet.gso_size());
        let identification = marks.may_routers_fragment.then(|| {
            // Each of several datagrams has its own.
            let count = packet.frame.len_bytes().div_ceil(gso_size.max(1).into());
            let count = if gso_size > 0 { count } else { 1 };
            let [.., high, low] =
                self.fragment_ids.take(source.ip(), destination.ip(), count).to_be_bytes();
            u16::from_be_bytes([high, low])
        });
        let to =
            UdpHeaders { link_addresses, source, destination, ttl, tos, gso_size, identification };
        match emit_udp(&mut packet.frame, &to) {
            Ok(headers) => packet.headers = headers,
            Err(refused) => {
                self.pool.put(packet.frame);
                return Err(refused_headers(refused));
            }
        }
        packet.wire_len = packet.frame.len_bytes();
        packet.device_sum = None;
        Ok(packet)
    }

    fn add(&mut self, device: usize, packet: Packet) {
        self.paths[device].gathered.push(packet);
    }

    /// True if there is packet memory for a datagram of any length.
    pub(super) fn has_room(&mut self) -> bool {
        self.pool.largest_free_bytes() >= self.largest_packet_bytes().max(1)
    }

    /// Number of this pool's frames in use.
    pub(super) fn frames_away(&mut self) -> usize {
        self.pool.in_use()
    }

    /// Returns the frame of a packet that is not sent.
    pub(super) fn put(&mut self, packet: Packet) {
        self.pool.put(packet.frame);
    }

    /// Length of the largest GSO payload: as many datagrams as fit in a frame, at most 64; in a small one if a device
    /// would cut them.
    fn whole_len(&self, gso_size: u16) -> usize {
        let small_bytes = self.pool.smallest_chunk_bytes().saturating_sub(BEFORE_PACKET_BYTES);
        let most = if self.take_whole { self.largest_packet_bytes() } else { small_bytes };
        let most = most as usize;
        let size = usize::from(gso_size.max(1));
        (most.saturating_sub(HEADERS_BYTES_MAX as usize) / size).clamp(1, 64) * size
    }

    /// Length of the largest packet of datagrams. Larger frames are few, and TCP's.
    fn largest_packet_bytes(&self) -> u32 {
        self.pool.largest_frame_bytes().min(PACKET_BYTES_MAX)
    }
}

/// Form in which a payload leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SendForm {
    /// One datagram in one packet.
    Whole,
    /// Several datagrams of this size.
    Segments(u16),
    /// One datagram in fragments.
    Fragments,
}

impl SendForm {
    /// Form of a payload on a path.
    ///
    /// # Errors
    /// `EMSGSIZE` if a datagram does not fit in the MTU, as with `IP_PMTUDISC_DO`, unless it is one
    /// that may leave in fragments; or if the payload is longer than any datagram, whatever the
    /// segment size.
    pub(super) fn of(
        payload_len: usize,
        marks: SentMarks,
        between: Between,
        mtu: u32,
    ) -> io::Result<Self> {
        if payload_len > Transmit::payload_bytes_max(between.destination) {
            return Err(too_long());
        }
        let gso_len = usize::from(marks.gso_size);
        if gso_len > 0 && payload_len > gso_len {
            check_len(gso_len, between, mtu)?;
            return Ok(Self::Segments(marks.gso_size));
        }
        match check_len(payload_len, between, mtu) {
            Ok(()) => Ok(Self::Whole),
            // Not even where it is the only segment (`udp_send_skb`).
            Err(_) if marks.may_fragment && gso_len == 0 => Ok(Self::Fragments),
            Err(error) => Err(error),
        }
    }
}

/// Checks the length of a datagram that is not fragmented against the MTU.
fn check_len(payload_len: usize, between: Between, mtu: u32) -> io::Result<()> {
    let headers_len = if between.destination.is_ipv4() { 28 } else { 48 };
    if payload_len + headers_len > mtu as usize { Err(too_long()) } else { Ok(()) }
}

fn refused_headers(refused: HeaderError) -> io::Error {
    match refused {
        HeaderError::TooLong => too_long(),
        HeaderError::Families => Errno::AFNOSUPPORT.into(),
    }
}

fn too_long() -> io::Error {
    Errno::MSGSIZE.into()
}

impl fmt::Debug for Transmitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transmitter({:?}, {} devices)", self.pool, self.paths.len())
    }
}

#[cfg(test)]
mod tests;
