//! Transmit side of sockets: headers, next hop, device.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::{fmt, io};

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::packet::Arrival;
use forebay_rx::sink::{Sink, SinkError};
use forebay_stack::network::Identity;
use forebay_stack::network::compose::{
    DEFAULT_TTL, HEADERS_BYTES_MAX, HeaderError, LinkAddresses, UdpHeaders, emit_udp,
};
use forebay_stack::network::fragment_out::FragmentedDatagram;
use forebay_sys::clock::Clock;
use rustix::io::Errno;

use super::fragment_ids::FragmentIds;
use super::neighbours::{Hop, KernelNeighbours};

/// Upper bound on datagrams gathered before a flush.
const GATHER_MAX: usize = 64;

/// Header fields of a datagram to be sent, addresses excluded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SentMarks {
    pub(super) ttl: u8,
    pub(super) tos: u8,
    pub(super) gso_size: u16,
    /// True if it leaves in fragments where it does not fit in the MTU.
    pub(super) may_fragment: bool,
}

impl Default for SentMarks {
    fn default() -> Self {
        Self { ttl: DEFAULT_TTL, tos: 0, gso_size: 0, may_fragment: false }
    }
}

/// Source and destination of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Between {
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
}

/// Outcome of gathering a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Gathered {
    /// The datagram will be sent by the next flush.
    Yes,
    /// The next hop is unknown, and its resolution is left to the kernel.
    NextUnknown,
}

/// Transmit side of one CPU: a sink and next hops for each device.
pub(super) struct Transmitter {
    clock: Clock,
    /// Time of the last flush, in ns.
    now_ns: u64,
    /// Frames for datagrams to be sent. The pool also returns frames of other CPUs to their owners.
    pool: Pool,
    fragment_ids: Arc<FragmentIds>,
    /// Send paths, by device.
    ways: Vec<SendPath>,
}

struct SendPath {
    sink: Box<dyn Sink>,
    neighbours: KernelNeighbours,
    gathered: Vec<Packet>,
}

impl Transmitter {
    pub(super) fn new(
        (pool, fragment_ids): (Pool, Arc<FragmentIds>),
        ways: Vec<(Box<dyn Sink>, KernelNeighbours)>,
    ) -> Self {
        let clock = Clock::machine();
        let now_ns = clock.now_ns();
        let gathered = || Vec::with_capacity(GATHER_MAX);
        let ways = ways.into_iter();
        let ways =
            ways.map(|(sink, neighbours)| SendPath { sink, neighbours, gathered: gathered() });
        Self { clock, now_ns, pool, fragment_ids, ways: ways.collect() }
    }

    /// Sends complete packets, unchanged.
    pub(super) fn send_as_is(
        &mut self,
        device: usize,
        packets: &mut Vec<Packet>,
    ) -> Result<(), SinkError> {
        self.ways[device].gathered.append(packets);
        self.flush(device)
    }

    /// Gathers a datagram with this payload. The next [`flush`](Self::flush) sends it.
    ///
    /// # Errors
    /// `EMSGSIZE` if the datagram does not fit in the device's MTU; `WouldBlock` if no memory is
    /// free.
    pub(super) fn gather(
        &mut self,
        device: usize,
        on: &Identity,
        between: Between,
        (payload, marks): (&[u8], SentMarks),
    ) -> io::Result<Gathered> {
        let gso_size = if payload.len() > marks.gso_size.into() { marks.gso_size } else { 0 };
        let whole = usize::from(gso_size);
        let fits = check_len(if whole > 0 { whole } else { payload.len() }, between, on);
        if fits.is_err() && whole == 0 && marks.may_fragment {
            return self.gather_fragments(device, on, between, (payload, marks));
        }
        fits?;
        let Self { now_ns, pool, ways, .. } = self;
        let SendPath { neighbours, gathered, .. } = &mut ways[device];
        let destination = between.destination.ip();
        let hop = neighbours.hop_to(destination, on, *now_ns, (pool, gathered));
        let link_addresses = match hop {
            Hop::Known(link_addresses) => link_addresses,
            Hop::Sought(_) => on.mac.map(|from| LinkAddresses { to: [0; 6], from }),
            Hop::Unknown => return Ok(Gathered::NextUnknown),
        };
        let len_bytes = u32::try_from(payload.len()).map_err(|_| too_long())?;
        let Some(mut frame) = pool.allocate(len_bytes) else {
            // Flushing frees memory for the next attempt.
            let _ = self.flush_all();
            return Err(io::ErrorKind::WouldBlock.into());
        };
        frame.copy_from(payload);
        let mut packet = Packet::received(frame, Arrival(0), 0, forebay_rx::parse::Link::Ip);
        packet.set_gso_size(gso_size);
        let packet = self.compose(packet, link_addresses, (between, marks))?;
        match hop {
            Hop::Sought(neighbour) => self.hold(device, neighbour, packet),
            Hop::Known(_) | Hop::Unknown => self.add(device, packet),
        }
        Ok(Gathered::Yes)
    }

    /// The same of a datagram that leaves in fragments: all of them, or none.
    fn gather_fragments(
        &mut self,
        device: usize,
        on: &Identity,
        between: Between,
        (payload, marks): (&[u8], SentMarks),
    ) -> io::Result<Gathered> {
        let Between { source, destination } = between;
        let Self { now_ns, pool, ways, fragment_ids, .. } = self;
        let SendPath { neighbours, gathered, .. } = &mut ways[device];
        let hop = neighbours.hop_to(destination.ip(), on, *now_ns, (pool, gathered));
        let link_addresses = match hop {
            Hop::Known(link_addresses) => link_addresses,
            Hop::Sought(_) => on.mac.map(|from| LinkAddresses { to: [0; 6], from }),
            Hop::Unknown => return Ok(Gathered::NextUnknown),
        };
        let SentMarks { ttl, tos, .. } = marks;
        let headers = UdpHeaders { link_addresses, source, destination, ttl, tos, gso_size: 0 };
        let id = fragment_ids.next(source.ip(), destination.ip());
        let mut datagram =
            FragmentedDatagram::new(payload, headers, on.mtu, id).map_err(refused_headers)?;
        let (count, bytes) = (datagram.count(), datagram.fragment_bytes_max());
        let mut frames: Vec<_> = (0..count).map_while(|_| pool.allocate(bytes)).collect();
        if frames.len() < count {
            frames.drain(..).for_each(|frame| pool.put(frame));
            // What has gone makes room for the next.
            let _ = self.flush_all();
            return Err(io::ErrorKind::WouldBlock.into());
        }
        for mut frame in frames {
            let headers = datagram.emit_next(&mut frame);
            let len_bytes = frame.len_bytes();
            let mut packet = Packet::received(frame, Arrival(0), len_bytes, headers.link);
            packet.headers = headers;
            match hop {
                Hop::Sought(neighbour) => self.hold(device, neighbour, packet),
                Hop::Known(_) | Hop::Unknown => self.add(device, packet),
            }
        }
        Ok(Gathered::Yes)
    }

    fn hold(&mut self, device: usize, neighbour: IpAddr, packet: Packet) {
        let mut dropped = Vec::new();
        let neighbours = &mut self.ways[device].neighbours;
        neighbours.hold(neighbour, packet, self.now_ns, &mut dropped);
        dropped.drain(..).for_each(|packet| self.pool.put(packet.frame));
    }

    /// Gathers the answer to a datagram that came from link-layer address `back`. The packet's
    /// frame contains only the payload.
    ///
    /// # Errors
    /// `EMSGSIZE` if the answer does not fit in the device's MTU.
    pub(super) fn gather_answer(
        &mut self,
        device: usize,
        on: &Identity,
        (packet, back): (Packet, Option<LinkAddresses>),
        (between, marks): (Between, SentMarks),
    ) -> io::Result<()> {
        if let Err(error) = check_len(packet.frame.len_bytes() as usize, between, on) {
            self.pool.put(packet.frame);
            return Err(error);
        }
        let neighbours = &mut self.ways[device].neighbours;
        let link_addresses = neighbours.hop_back(between.destination.ip(), on, self.now_ns, back);
        let packet = self.compose(packet, link_addresses, (between, marks))?;
        self.add(device, packet);
        Ok(())
    }

    fn compose(
        &mut self,
        mut packet: Packet,
        link_addresses: Option<LinkAddresses>,
        (between, marks): (Between, SentMarks),
    ) -> io::Result<Packet> {
        let Between { source, destination } = between;
        let (SentMarks { ttl, tos, .. }, gso_size) = (marks, packet.gso_size());
        let to = UdpHeaders { link_addresses, source, destination, ttl, tos, gso_size };
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
        let gathered = &mut self.ways[device].gathered;
        gathered.push(packet);
        if gathered.len() >= GATHER_MAX {
            // Ignored: if the device is gone, the next caller's flush fails too.
            let _ = self.flush(device);
        }
    }

    /// True if there is packet memory for a datagram of any length.
    pub(super) fn has_room(&mut self) -> bool {
        let frame = self.pool.allocate(self.pool.largest_frame_bytes());
        let has_room = frame.is_some();
        frame.into_iter().for_each(|frame| self.pool.put(frame));
        has_room
    }

    /// Number of this pool's frames in use.
    pub(super) fn frames_away(&mut self) -> usize {
        self.pool.in_use()
    }

    /// Returns the frame of a packet that is not sent.
    pub(super) fn put(&mut self, packet: Packet) {
        self.pool.put(packet.frame);
    }

    /// Sends the gathered datagrams of a device.
    ///
    /// # Errors
    /// If the device is gone.
    pub(super) fn flush(&mut self, device: usize) -> Result<(), SinkError> {
        self.now_ns = self.clock.now_ns();
        let Self { pool, ways, .. } = self;
        let way = &mut ways[device];
        let sent = if way.gathered.is_empty() { Ok(()) } else { way.sink.send(&mut way.gathered) };
        way.gathered.drain(..).for_each(|packet| pool.put(packet.frame));
        pool.flush();
        sent
    }

    /// Sends the gathered datagrams of all devices.
    ///
    /// # Errors
    /// If one of the devices is gone.
    pub(super) fn flush_all(&mut self) -> Result<(), SinkError> {
        (0..self.ways.len()).map(|device| self.flush(device)).fold(Ok(()), Result::and)
    }

    /// Length of the largest GSO payload: as many datagrams as fit in a frame, at most 64.
    pub(super) fn whole_len(&self, gso_size: u16) -> usize {
        let most = self.pool.largest_frame_bytes().min(u16::MAX.into()) as usize;
        let size = usize::from(gso_size.max(1));
        (most.saturating_sub(HEADERS_BYTES_MAX as usize) / size).clamp(1, 64) * size
    }
}

/// Checks the length against the MTU. A datagram that does not fit is refused, as with
/// `IP_PMTUDISC_DO`, unless the socket may fragment.
fn check_len(payload_len: usize, between: Between, on: &Identity) -> io::Result<()> {
    let headers_len = if between.destination.is_ipv4() { 28 } else { 48 };
    if payload_len + headers_len > on.mtu as usize { Err(too_long()) } else { Ok(()) }
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
        write!(f, "Transmitter({:?}, {} devices)", self.pool, self.ways.len())
    }
}
