//! One queue of a device: a source of frames that the kernel puts into packet memory, and the
//! sender of frames from there.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use forebay_buf::frame::BEFORE_PACKET_BYTES;
use forebay_buf::{Frame, Pool};
use forebay_rx::arrive::{
    Attachment, Burst, FrameNeeds, Numbering, PollRequest, Polled, RefusedFrame, Source,
    SourceError,
};
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::{DropReason, Packet};
use forebay_sys::clock::now_since_1970_ns;
use forebay_sys::error::Error;
use forebay_sys::interface::{Interface, InterfaceIndex};
use forebay_sys::privilege;
use forebay_sys::xdp::{
    self, Continued, CopyMode, InvalidXdpRing, KernelDrops, OpenError, Socket, SocketConfig,
};

use super::attach::Attached;
use super::look::{IDLE_LOOK_NS, is_look_due};
use super::metadata::MetadataLayout;
use super::transmit::XdpTransmit;
use crate::tx_queue::{TX_QUEUE_PACKETS, TxQueueConsumer};
use crate::{Facts, KernelCounts};

/// Size of the rx ring: maximum number of frames received and not yet taken.
pub(super) const RX_ENTRIES: u32 = 2048;

/// Size of the fill ring. A zero-copy driver takes as many frames in advance as its own ring holds.
const FILL_ENTRIES: u32 = 2 * RX_ENTRIES;

/// Number of frames in the fill ring in copy mode. The kernel uses all of them in turn, so more
/// than the rx ring holds would only occupy cache.
const COPY_FILL: u32 = RX_ENTRIES;

/// Size of the tx ring.
const TX_ENTRIES: u32 = 1024;

/// Interval of reading the MTU.
const MTU_LOOK_NS: u64 = 1_000_000_000;

/// Interval of collecting completions while the queue is idle.
const COMPLETION_NS: u64 = 1_000_000;

/// Interval of polls while frames are missing from the fill ring.
const STARVED_LOOK_NS: u64 = 50_000;

/// Drivers whose packets may come from sockets of the machine's host: virtio, and Xen's.
const GUEST_DRIVERS: [&str; 2] = ["virtio_net", "vif"];

/// Names of the kernel's counters, in the order of their indices.
pub(super) const COUNTS: [&str; 2] = ["rx_dropped", "rx_ring_full"];

/// Settings of a queue.
pub(super) struct XdpQueueConfig {
    pub(super) interface: Interface,
    pub(super) queue: u32,
    /// Program that redirects packets to the queue; `None` if the queue only sends.
    pub(super) attached: Option<Arc<Attached>>,
    pub(super) copying: CopyMode,
    pub(super) busy_poll: bool,
    /// True if frames may be larger than a chunk.
    pub(super) is_scattered: bool,
}

/// State of a queue after a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PollState {
    /// More frames are received.
    More,
    /// No frame is received, and the fill ring is less than a quarter full.
    Starved,
    /// No frame is received, and the kernel holds frames to send, or sent ones.
    Sending,
    /// No work.
    Nothing,
}

/// One queue of a device.
pub struct XdpSource {
    name: String,
    index: InterfaceIndex,
    queue: u32,
    largest_bytes: u32,
    /// True if packets may come from sockets of this machine, whose checksums the last device
    /// completes.
    may_be_partial: bool,
    config: SocketConfig,
    attached: Option<Arc<Attached>>,
    metadata: Option<MetadataLayout>,
    transmit: XdpTransmit,
    /// `None` before the queue is attached to an engine.
    socket: Option<Socket>,
    /// `None` before the queue is attached to an engine.
    numbering: Option<Numbering>,
    /// Bytes of a frame that the kernel may fill.
    room_bytes: u32,
    /// Maximum number of frames in the fill ring.
    fill_most: u32,
    /// Frames of a packet whose last frame has not arrived.
    pieces: Vec<Frame>,
    counts: Arc<KernelCounts>,
    drops_seen: KernelDrops,
    facts: Facts,
    /// Time of the last poll.
    now_ns: u64,
    looked_ns: u64,
    mtu_looked_ns: u64,
    /// True if packets go to the kernel because the run ends.
    is_removed: bool,
    failed: Option<InvalidXdpRing>,
}

impl XdpSource {
    pub(super) fn new(
        XdpQueueConfig { interface, queue, attached, copying, busy_poll, is_scattered }: XdpQueueConfig,
        consumer: TxQueueConsumer,
        facts: Facts,
    ) -> Self {
        let receives = attached.is_some();
        let transmits = queue < interface.tx_queues.into();
        let tx_entries = transmits.then_some(TX_ENTRIES);
        let config = SocketConfig {
            interface: interface.index.0,
            queue,
            chunk_bytes: 0,
            copying,
            is_scattered,
            busy_poll,
            rx_entries: receives.then_some(RX_ENTRIES),
            tx_entries,
            fill_entries: if receives { FILL_ENTRIES } else { 1 },
        };
        Self {
            index: interface.index,
            queue,
            largest_bytes: super::open::largest_frame_bytes(interface.mtu),
            may_be_partial: interface.is_virtual
                || interface.driver.as_deref().is_none_or(|of| GUEST_DRIVERS.contains(&of)),
            config,
            metadata: attached.as_ref().and_then(|attached| attached.metadata()),
            attached,
            transmit: XdpTransmit::new(consumer, tx_entries.unwrap_or(0), interface.mtu),
            name: interface.name,
            socket: None,
            numbering: None,
            room_bytes: 0,
            fill_most: FILL_ENTRIES,
            pieces: Vec::new(),
            counts: KernelCounts::new(&COUNTS),
            drops_seen: KernelDrops::default(),
            facts,
            now_ns: 0,
            looked_ns: 0,
            mtu_looked_ns: 0,
            is_removed: false,
            failed: None,
        }
    }

    /// Returns the kernel's counters.
    #[must_use]
    pub fn counts(&self) -> &Arc<KernelCounts> {
        &self.counts
    }

    /// Converts the kernel's refusal of a socket with `memory_bytes` of packet memory.
    fn refused(&self, refused: OpenError, memory_bytes: u64) -> Error {
        let help = match refused.source.raw_os_error() {
            Some(libc::EBUSY) => "another program has that queue: end it, or take another device",
            Some(libc::ENETDOWN) => &format!("set it up: ip link set {} up", self.name),
            Some(libc::ENODEV) => return Error::DeviceGone { name: self.name.clone() },
            Some(libc::EOPNOTSUPP) => "its driver cannot do that: give --copy auto",
            Some(libc::ENOBUFS | libc::ENOMEM) => {
                if let Err(missing) = privilege::for_locked_memory(&self.name, memory_bytes) {
                    return missing;
                }
                "the packet memory must be locked: raise the limit (ulimit -l), give CAP_IPC_LOCK, \
                 or ask for less memory"
            }
            Some(libc::EINVAL) => {
                &format!("check that it has that many queues: ethtool -l {}", self.name)
            }
            Some(libc::EAFNOSUPPORT) => "this kernel has no AF_XDP: give --via af_packet",
            _ => "see the kernel's log, or give --via af_packet",
        };
        let what = format!("{} {}", refused.action, self.queue);
        Error::Device {
            name: self.name.clone(),
            what,
            source: refused.source,
            help: help.to_owned(),
        }
    }

    /// Returns the error for an invalid ring, which ends the source.
    fn violation(&self, lied: InvalidXdpRing) -> SourceError {
        Box::new(Error::Device {
            name: self.name.clone(),
            what: format!("use the rings of queue {}", self.queue),
            source: std::io::Error::other(lied),
            help: "this is a bug of the kernel or of the driver: please report it there".to_owned(),
        })
    }

    /// Takes received frames.
    fn receive(
        &mut self,
        max: usize,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<u32, InvalidXdpRing> {
        let Self { socket: Some(socket), numbering: Some(numbering), pieces, metadata, .. } = self
        else {
            return Ok(0);
        };
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        if !socket.has_received()? {
            return Ok(0);
        }
        let timestamp_ns = now_since_1970_ns();
        let take = |frame: Frame, continued: Continued| {
            let received = whole(frame, continued, pieces, *metadata, pool);
            let Some(received) = received.transpose() else { return };
            let arrival = numbering.next_arrival();
            match received {
                Ok((frame, hash)) => {
                    burst.packets.push(packet_of(frame, arrival, hash, timestamp_ns));
                }
                Err((wire_len, reason)) => {
                    burst.refused.push(RefusedFrame { arrival, wire_len, reason });
                }
            }
        };
        socket.receive(max, take)
    }

    /// Takes received frames, refills the fill ring, and returns the number of frames and the state
    /// of the queue.
    fn take_in(
        &mut self,
        ask: &PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<(u32, PollState), InvalidXdpRing> {
        let received = self.receive(ask.max, pool, burst)?;
        let Some(socket) = &mut self.socket else { return Ok((0, PollState::Nothing)) };
        let mut is_starved = false;
        if self.attached.is_some() && !self.is_removed {
            is_starved = socket.fill(pool, self.room_bytes, self.fill_most)? < self.fill_most / 4;
        }
        if received == 0 && self.config.busy_poll {
            socket.wake_receive();
        }
        let rest = match () {
            () if socket.has_received()? => PollState::More,
            () if is_starved => PollState::Starved,
            () if self.transmit.has_unsent() || socket.is_sending() => PollState::Sending,
            () => PollState::Nothing,
        };
        Ok((received, rest))
    }

    /// Reads the kernel's drop counters.
    fn count_drops(&mut self, burst: &mut Burst) {
        let Some(Ok(drops)) = self.socket.as_ref().map(Socket::kernel_drops) else { return };
        let before = self.drops_seen.rx_dropped + self.drops_seen.rx_ring_full;
        burst.kernel_dropped += (drops.rx_dropped + drops.rx_ring_full).saturating_sub(before);
        self.counts.set(0, drops.rx_dropped);
        self.counts.set(1, drops.rx_ring_full);
        self.drops_seen = drops;
    }

    /// Checks periodically for changes that no ring reports: drops, the device, the MTU.
    fn look(
        &mut self,
        is_empty: bool,
        since_poll_ns: u64,
        burst: &mut Burst,
    ) -> Result<(), SourceError> {
        let since_ns = self.now_ns.saturating_sub(self.looked_ns);
        if !is_look_due(is_empty, since_poll_ns, since_ns) {
            return Ok(());
        }
        self.looked_ns = self.now_ns;
        self.count_drops(burst);
        // Frames that arrived before the device was removed are taken first.
        if is_empty && self.socket.as_ref().is_some_and(|socket| !socket.has_device()) {
            return Err(Box::new(Error::DeviceGone { name: self.name.clone() }));
        }
        let is_due = self.now_ns.saturating_sub(self.mtu_looked_ns) >= MTU_LOOK_NS;
        if is_due && self.transmit.is_used() {
            self.mtu_looked_ns = self.now_ns;
            // If the MTU cannot be read, the last one stays.
            if let Ok(Some(interface)) = Interface::by_index(self.index) {
                self.transmit.set_mtu(interface.mtu);
            }
        }
        Ok(())
    }

    /// Leaves packets that arrive from now on to the kernel.
    fn remove(&mut self) -> Result<(), SourceError> {
        if !std::mem::replace(&mut self.is_removed, true)
            && let Some(attached) = &self.attached
        {
            attached.remove(self.queue)?;
            xdp::wait_for_receivers();
        }
        Ok(())
    }
}

impl Source for XdpSource {
    fn needs(&self) -> FrameNeeds {
        let fill = self.config.rx_entries.map_or(0, |_| self.config.fill_entries);
        let sent = self.config.tx_entries.map_or(0, |entries| entries + TX_QUEUE_PACKETS);
        FrameNeeds {
            head_frames: 0,
            device_frames: fill + sent,
            largest_bytes: self.largest_bytes,
            may_be_partial: self.may_be_partial,
            ..FrameNeeds::default()
        }
    }

    fn attach(&mut self, at: Attachment<'_>) -> Result<(), SourceError> {
        // The pool's smallest chunk class is the one that devices receive into.
        let chunk_bytes = at.pool.smallest_chunk_bytes();
        if ![2048, 4096].contains(&chunk_bytes) {
            let why =
                "AF_XDP takes packet memory in chunks of 2048 or 4096 bytes, and there are none";
            return Err(why.into());
        }
        self.config.chunk_bytes = chunk_bytes;
        self.room_bytes = self.config.chunk_bytes - BEFORE_PACKET_BYTES;
        self.transmit.set_chunks(self.config.chunk_bytes, self.config.is_scattered);
        self.transmit.consumer().wake_by(at.wake_to_send);
        let memory_bytes = u64::try_from(at.pool.region().len_bytes()).unwrap_or(u64::MAX);
        let mut socket = Socket::open(&self.config, at.pool)
            .map_err(|refused| self.refused(refused, memory_bytes))?;
        let copying = if socket.is_zero_copy() { "zero_copy" } else { "copy" };
        self.facts.set("copy", copying.to_owned());
        self.fill_most = if socket.is_zero_copy() { FILL_ENTRIES } else { COPY_FILL };
        if let Some(attached) = &self.attached {
            socket
                .fill(at.pool, self.room_bytes, self.fill_most)
                .map_err(|lied| self.violation(lied))?;
            attached.insert(self.queue, socket.as_fd())?;
        }
        self.socket = Some(socket);
        self.numbering = Some(at.numbering);
        Ok(())
    }

    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        let polled_ns = std::mem::replace(&mut self.now_ns, ask.now_ns);
        if let Some(lied) = self.failed.take() {
            return Err(self.violation(lied));
        }
        if ask.is_last {
            self.remove()?;
        }
        let taken = self.take_in(&ask, pool, burst);
        let (received, rest) = taken.map_err(|lied| self.violation(lied))?;
        if ask.is_last && rest != PollState::More {
            self.count_drops(burst);
            return Ok(Polled::Exhausted);
        }
        let is_empty = received == 0 && rest != PollState::More;
        self.look(is_empty, ask.now_ns.saturating_sub(polled_ns), burst)?;
        Ok(match rest {
            // Pieces of a packet alone: the rest of it can be taken at once.
            PollState::More if burst.is_empty() => Polled::BehindUntil { now_ns: ask.now_ns },
            PollState::More => Polled::Ready,
            // It waits for frames to return to the pool, and no event announces that.
            PollState::Starved => {
                Polled::BehindUntil { now_ns: ask.now_ns.saturating_add(STARVED_LOOK_NS) }
            }
            PollState::Sending => {
                Polled::IdleUntil { now_ns: ask.now_ns.saturating_add(COMPLETION_NS) }
            }
            PollState::Nothing => {
                Polled::IdleUntil { now_ns: ask.now_ns.saturating_add(IDLE_LOOK_NS) }
            }
        })
    }

    fn transmit(&mut self, pool: &mut Pool) -> usize {
        let Some(socket) = &mut self.socket else { return 0 };
        match self.transmit.turn(socket, pool) {
            Ok(sent) => sent,
            Err(lied) => {
                // `transmit` returns no error: the next poll reports it.
                self.failed = Some(lied);
                0
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    fn has_work(&mut self) -> bool {
        self.transmit.has_work()
    }

    fn is_sending(&self) -> bool {
        self.socket.as_ref().is_some_and(Socket::is_sending)
    }
}

/// Frame and hash of a packet whose last piece this is. The metadata is in front of the first piece.
/// The error is the packet's length and the reason to drop it.
#[inline]
fn whole(
    mut frame: Frame,
    continued: Continued,
    pieces: &mut Vec<Frame>,
    metadata: Option<MetadataLayout>,
    pool: &mut Pool,
) -> Result<Option<(Frame, FlowHash)>, (u32, DropReason)> {
    let hash_of = |first: &mut Frame| {
        let hash = metadata.and_then(|layout| device_hash(layout, first));
        hash.unwrap_or(FlowHash::NONE)
    };
    if pieces.is_empty() && continued == Continued::No {
        let hash = hash_of(&mut frame);
        return Ok(Some((frame, hash)));
    }
    pieces.push(frame);
    if continued == Continued::Yes {
        return Ok(None);
    }
    let hash = pieces.first_mut().map_or(FlowHash::NONE, hash_of);
    joined(pieces, pool).map(|frame| Some((frame, hash)))
}

/// Makes a packet of a received frame, with the device's hash.
#[inline]
fn packet_of(frame: Frame, arrival: Arrival, hash: FlowHash, timestamp_ns: u64) -> Packet {
    let len_bytes = frame.len_bytes();
    let mut packet = Packet::received(frame, arrival, len_bytes, Link::Ethernet);
    (packet.timestamp_ns, packet.hash) = (timestamp_ns, hash);
    packet
}

/// Takes the hash out of the metadata in front of a packet's first frame.
fn device_hash(layout: MetadataLayout, frame: &mut Frame) -> Option<FlowHash> {
    const BYTES: u32 = 12;
    const _: () = assert!(BYTES as usize == MetadataLayout::BYTES);
    frame.push(BYTES);
    let before = frame.data_mut().first_chunk_mut();
    let hash = before.and_then(|before| layout.take_hash(before));
    frame.pull(BYTES);
    hash.map(FlowHash::computed)
}

/// Copies the pieces of a packet into one frame. The error is the packet's length and the reason
/// to drop it, if no frame of that size is free or none is so large.
fn joined(pieces: &mut Vec<Frame>, pool: &mut Pool) -> Result<Frame, (u32, DropReason)> {
    let wire_len = pieces.iter().map(Frame::len_bytes).sum();
    let frame = pool.allocate(wire_len);
    let joined = frame.map(|mut frame| {
        frame.set_len(wire_len);
        let mut room = frame.data_mut();
        for piece in &*pieces {
            let (to, rest) = room.split_at_mut(piece.data().len());
            to.copy_from_slice(piece.data());
            room = rest;
        }
        frame
    });
    pieces.drain(..).for_each(|piece| pool.put(piece));
    let is_oversize = wire_len > pool.largest_frame_bytes();
    let reason = if is_oversize { DropReason::Oversize } else { DropReason::NoBuffer };
    joined.ok_or((wire_len, reason))
}

#[cfg(test)]
mod tests {
    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};

    use super::super::metadata::RSS_KIND_L4;
    use super::*;

    const COOKIE: u32 = 0xfeed_0001;
    const CHUNK_BYTES: u32 = 1024;

    fn pool(chunks: u32) -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: CHUNK_BYTES, chunks }]];
        carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
    }

    /// A frame of this length, behind metadata with a hash of the ports.
    fn received(pool: &mut Pool, len_bytes: u32, hash: u32) -> Frame {
        let mut frame = pool.allocate(len_bytes).unwrap();
        frame.set_len(len_bytes);
        let words = [hash, RSS_KIND_L4, COOKIE].map(u32::to_ne_bytes);
        let metadata = words.as_flattened();
        let metadata_len = u32::try_from(metadata.len()).unwrap();
        frame.push(metadata_len);
        frame.data_mut()[..metadata.len()].copy_from_slice(metadata);
        frame.pull(metadata_len);
        frame
    }

    /// Otherwise a flow's long packets would have another hash than its short ones.
    #[test]
    fn promise_1_packet_in_pieces_keeps_hash() {
        let mut pool = pool(8);
        let metadata = Some(MetadataLayout::of_cookie(COOKIE));
        let mut pieces = Vec::new();
        let first = received(&mut pool, 200, 5);
        assert!(whole(first, Continued::Yes, &mut pieces, metadata, &mut pool).unwrap().is_none());
        let last = received(&mut pool, 100, 6);
        let long = whole(last, Continued::No, &mut pieces, metadata, &mut pool).unwrap().unwrap();
        let short = received(&mut pool, 100, 5);
        let short = whole(short, Continued::No, &mut pieces, metadata, &mut pool).unwrap().unwrap();
        assert_eq!((long.1, long.0.len_bytes()), (FlowHash::computed(5), 300));
        assert_eq!(short.1, long.1);
        [long.0, short.0].into_iter().for_each(|frame| pool.put(frame));
        assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn promise_2_long_packet_is_not_short_memory() {
        for (piece_bytes, chunks, expected) in
            [(300, 2, DropReason::NoBuffer), (700, 8, DropReason::Oversize)]
        {
            let mut pool = pool(chunks);
            let mut pieces = Vec::new();
            let first = received(&mut pool, piece_bytes, 5);
            let last = received(&mut pool, piece_bytes, 5);
            let begun = whole(first, Continued::Yes, &mut pieces, None, &mut pool);
            assert!(begun.unwrap().is_none());
            let refused = whole(last, Continued::No, &mut pieces, None, &mut pool);
            assert_eq!(refused.unwrap_err(), (2 * piece_bytes, expected));
            assert_eq!(pool.in_use(), 0, "all pieces are back");
        }
    }
}
