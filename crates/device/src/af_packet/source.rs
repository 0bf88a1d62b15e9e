//! Source over the rx ring: each frame is copied into packet memory, with the kernel's metadata.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use forebay_buf::Pool;
use forebay_rx::arrive::{
    Attachment, Burst, FrameNeeds, Numbering, PollRequest, Polled, RefusedFrame, SourceError,
};
use forebay_rx::coalesce::gso::{DATA_VALID, GSO_NONE, VIRTIO_NET_HDR_BYTES, VirtioNetHdr};
use forebay_rx::cpu::RxQueue;
use forebay_rx::hash::FlowHash;
use forebay_rx::parse::{Link, Verify};
use forebay_rx::{DropReason, Packet, Source};
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::Interface;
use forebay_sys::packet::{BlockRing, FrameRing, PacketSocket};

use super::PacketOptions;
use super::block::{BlockCursor, InvalidBlock, RingFrame, TAG_BYTES};
use super::open::{attach_filter, refused};
use super::slots::Slots;
use crate::link::LINK_BYTES;
use crate::{KernelCounts, rx_filter};

/// Length of the largest frame: an IP packet of 64 KiB behind an Ethernet header with two tags.
pub(super) const LARGEST_BYTES: u32 = LINK_BYTES + 65_535;

/// Interval between reads of the socket's error and statistics while the ring is empty and polled,
/// or frames have arrived since the last one.
const LOOK_EVERY_NS: u64 = 1_000_000;

/// Interval between these reads while the link is down. A deleted interface goes down first, and its removal
/// does not wake a socket that has already reported that.
const DOWN_LOOK_NS: u64 = 100_000_000;

/// Longest interval between two looks at a queue that sleeps between frames.
const ASLEEP_LOOK_NS: u64 = 100_000_000;

/// Interval between reads of the statistics while frames are taken.
const BUSY_LOOK_NS: u64 = 10_000_000;

/// Time without a poll after which a queue counts as woken: the frames that woke it are passed on
/// before the next look.
const WOKEN_NS: u64 = 1_000_000;

/// Time for which frames may still arrive after the filter was closed: until all CPUs have seen the
/// new filter, and the last block was retired.
const LAST_FRAMES_NS: u64 = 10_000_000;

/// Timeout for frames that the kernel counted but never handed over.
const GIVEN_UP_NS: u64 = 1_000_000_000;

/// Offset of an Ethernet frame's tags: behind the addresses.
const TAG_AT: usize = 12;

/// Names of the kernel's counters.
const COUNTS: [&str; 1] = ["tp_drops"];

/// One queue of an interface.
pub struct PacketSource {
    ring: OpenRing,
    interface: Interface,
    /// Link type of the interface's frames.
    link: Link,
    options: PacketOptions,
    needs: FrameNeeds,
    numbering: Numbering,
    /// Number of frames taken out of the ring.
    taken: u64,
    /// Number of frames that the kernel had put into the ring, as of the last look.
    put: u64,
    /// Number of frames that the kernel had dropped, as of the last look.
    dropped: u64,
    /// Time of the last look at the kernel's counters, and of the last poll.
    looked_ns: u64,
    polled_ns: u64,
    /// True if frames arrived since the last look.
    is_stale: bool,
    /// True if the link went down, and no frame has arrived since.
    is_down: bool,
    ending: Option<SourceEnding>,
    counts: Arc<KernelCounts>,
}

/// End of a source, which still drains the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SourceEnding {
    since_ns: u64,
    /// True if the source ends because the interface was removed.
    is_gone: bool,
}

/// Ring of a queue, and the read position in it.
pub(super) enum OpenRing {
    Blocks {
        ring: BlockRing,
        /// Read position in the oldest block, once reading of it has begun.
        cursor: Option<BlockCursor>,
    },
    Slots(Box<Slots>),
}

impl OpenRing {
    pub(super) fn blocks(ring: BlockRing) -> Self {
        Self::Blocks { ring, cursor: None }
    }

    pub(super) fn slots(ring: FrameRing) -> Self {
        Self::Slots(Box::new(Slots::new(ring)))
    }

    pub(super) fn socket(&self) -> &PacketSocket {
        match self {
            Self::Blocks { ring, .. } => ring.socket(),
            Self::Slots(slots) => slots.ring().socket(),
        }
    }

    /// Takes frames out of the ring, as many as are there and fit the burst.
    fn take(
        &mut self,
        receiver: &mut PacketReceiver<'_>,
        max: usize,
    ) -> Result<Halt, InvalidBlock> {
        let (ring, cursor) = match self {
            Self::Blocks { ring, cursor } => (ring, cursor),
            Self::Slots(slots) => return slots.take(receiver, max),
        };
        while let Some(block) = ring.block() {
            let mut at = match cursor.take() {
                Some(at) => at,
                None => BlockCursor::at_start(block)?,
            };
            match receiver.read(block, &mut at, max)? {
                Halt::Empty => ring.give_back(),
                halt => {
                    *cursor = Some(at);
                    return Ok(halt);
                }
            }
        }
        Ok(Halt::Empty)
    }
}

/// Reason to stop taking frames for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Halt {
    /// The burst is full.
    Enough,
    /// No packet memory is free; the frames wait in the ring.
    NoMemory,
    /// The ring is empty.
    Empty,
}

impl Halt {
    /// State of a source that has taken this burst; `None` if its ring is empty.
    fn polled(self, burst: &Burst, now_ns: u64) -> Option<Polled> {
        match self {
            // All of the frames were cut: there was work, though no packet.
            Self::Enough if burst.is_empty() => Some(Polled::BehindUntil { now_ns }),
            Self::Enough | Self::NoMemory => Some(Polled::Ready),
            Self::Empty => None,
        }
    }
}

impl PacketSource {
    pub(super) fn new(
        ring: OpenRing,
        interface: &Interface,
        link: Link,
        options: &PacketOptions,
    ) -> Self {
        Self {
            ring,
            interface: interface.clone(),
            link,
            options: options.clone(),
            needs: FrameNeeds { largest_bytes: LARGEST_BYTES, ..FrameNeeds::default() },
            numbering: Numbering::of_queue(RxQueue(0), 1),
            taken: 0,
            put: 0,
            dropped: 0,
            looked_ns: 0,
            polled_ns: 0,
            is_stale: false,
            is_down: false,
            ending: None,
            counts: KernelCounts::new(&COUNTS),
        }
    }

    /// Limits the packet memory to `packets_max` frames of at most `largest_bytes`.
    pub(super) fn limited(mut self, largest_bytes: u32, packets_max: u32) -> Self {
        self.needs = FrameNeeds { largest_bytes, packets_max: Some(packets_max), ..self.needs };
        self
    }

    /// Returns the link type of the interface's frames.
    #[must_use]
    pub fn link(&self) -> Link {
        self.link
    }

    /// Returns the kernel's counters of this queue.
    #[must_use]
    pub fn counts(&self) -> &Arc<KernelCounts> {
        &self.counts
    }

    fn socket(&self) -> &PacketSocket {
        self.ring.socket()
    }

    /// Takes frames out of the ring, as many as are there and fit the burst.
    fn take_frames(
        &mut self,
        ask: &PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Halt> {
        let before = burst.len();
        let mut receiver = PacketReceiver {
            link: self.link,
            options: &self.options,
            numbering: &mut self.numbering,
            pool,
            burst,
            cut: 0,
        };
        let halt = self.ring.take(&mut receiver, ask.max);
        let cut = receiver.cut;
        let taken = (burst.len() - before) as u64 + cut;
        if taken > 0 {
            self.taken += taken;
            self.is_stale = true;
            self.is_down = false;
        }
        if let OpenRing::Slots(slots) = &mut self.ring {
            match halt {
                Ok(Halt::Empty) if taken > 0 => slots.pace.took(taken, ask.now_ns),
                Ok(Halt::Empty) => {}
                _ => slots.pace.resume(),
            }
            if slots.take_error() {
                (self.is_down, self.is_stale) = (true, true);
            }
        }
        self.dropped += cut;
        burst.kernel_dropped += cut;
        halt.map_err(|lie| self.violation(lie))
    }

    /// Returns the status for an empty ring, `since_poll_ns` after the last poll.
    fn idle(&mut self, now_ns: u64, since_poll_ns: u64, burst: &mut Burst) -> Result<Polled> {
        if self.ending.is_none() && !burst.is_empty() {
            // Frames do not wait for calls of the kernel. The next poll looks.
            return Ok(Polled::Idle);
        }
        let since_ns = now_ns.saturating_sub(self.looked_ns);
        // Frames of another queue may have woken the CPU.
        let interval_ns = if since_poll_ns < WOKEN_NS { LOOK_EVERY_NS } else { ASLEEP_LOOK_NS };
        let interval_ns = if self.is_stale { LOOK_EVERY_NS } else { interval_ns };
        let is_urgent = self.ending.is_some() || self.is_stale && self.is_down;
        if is_urgent || since_ns >= interval_ns {
            self.look(now_ns, burst)?;
        }
        match self.ending {
            Some(ending) => self.end(ending, now_ns, burst),
            None if self.is_down => Ok(Polled::IdleUntil { now_ns: now_ns + DOWN_LOOK_NS }),
            None if self.is_stale => {
                Ok(Polled::IdleUntil { now_ns: self.looked_ns + LOOK_EVERY_NS })
            }
            None => Ok(Polled::Idle),
        }
    }

    /// Reads the kernel's drop counters, and checks that the interface still exists.
    fn look(&mut self, now_ns: u64, burst: &mut Burst) -> Result<()> {
        self.looked_ns = now_ns;
        self.is_stale = false;
        let named = |what| refused(&self.interface, what);
        let socket = self.socket();
        let counted = socket.take_statistics().map_err(named("read its PACKET_STATISTICS"))?;
        let waiting = socket.take_error().map_err(named("read its socket's error"))?;
        let drops = u64::from(counted.drops);
        self.put += u64::from(counted.packets) - drops.min(counted.packets.into());
        self.dropped += drops;
        self.counts.set(0, self.dropped);
        burst.kernel_dropped += drops;
        // A link that is down may come up again; a removed interface does not.
        self.is_down |= waiting.is_some();
        if self.is_down && self.ending.is_none() {
            let bound = self.socket().bound().map_err(named("ask whether it is there"))?;
            if bound.interface.is_none() {
                self.ending = Some(SourceEnding { since_ns: now_ns, is_gone: true });
            }
        }
        Ok(())
    }

    /// Ends the source once every frame that the kernel put into the ring has been taken.
    fn end(&mut self, ending: SourceEnding, now_ns: u64, burst: &mut Burst) -> Result<Polled> {
        let SourceEnding { since_ns, is_gone } = ending;
        let waited_ns = now_ns.saturating_sub(since_ns);
        let owed = self.put.saturating_sub(self.taken);
        let may_end = waited_ns >= LAST_FRAMES_NS && owed == 0;
        if !may_end && waited_ns < GIVEN_UP_NS {
            return Ok(Polled::IdleUntil { now_ns: now_ns + LOOK_EVERY_NS });
        }
        // Frames that were counted but never handed over are lost: count them as dropped.
        burst.kernel_dropped += owed;
        if is_gone {
            return Err(Error::DeviceGone { name: self.interface.name.clone() });
        }
        Ok(Polled::Exhausted)
    }

    /// Returns the error for an invalid ring, which is not read any further.
    fn violation(&self, lie: InvalidBlock) -> Error {
        Error::Device {
            name: self.interface.name.clone(),
            what: "read its ring (PACKET_RX_RING)".to_owned(),
            source: std::io::Error::other(format!("the kernel tells of {lie}")),
            help: "this is a bug of the kernel's or of ours: please report it, with the kernel's \
                   version"
                .to_owned(),
        }
    }
}

impl Source for PacketSource {
    fn needs(&self) -> FrameNeeds {
        self.needs
    }

    fn attach(&mut self, at: Attachment<'_>) -> Result<(), SourceError> {
        self.numbering = at.numbering;
        let filter = rx_filter::filter(&self.options.take, self.link);
        Ok(attach_filter(&self.interface, self.socket(), &filter)?)
    }

    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        if ask.is_last && self.ending.is_none() {
            attach_filter(&self.interface, self.socket(), &rx_filter::nothing())?;
            self.ending = Some(SourceEnding { since_ns: ask.now_ns, is_gone: false });
        }
        let polled_ns = std::mem::replace(&mut self.polled_ns, ask.now_ns);
        let since_poll_ns = ask.now_ns.saturating_sub(polled_ns);
        let since_look_ns = ask.now_ns.saturating_sub(self.looked_ns);
        if since_poll_ns < WOKEN_NS && since_look_ns >= BUSY_LOOK_NS {
            // A ring that is never found empty loses frames, too.
            self.look(ask.now_ns, burst)?;
        }
        if let OpenRing::Slots(slots) = &self.ring
            && let Some(now_ns) = slots.pace.rests_until(ask.now_ns)
            && self.ending.is_none()
        {
            return Ok(Polled::IdleUntil { now_ns });
        }
        match self.take_frames(&ask, pool, burst)?.polled(burst, ask.now_ns) {
            Some(polled) => Ok(polled),
            None => Ok(self.idle(ask.now_ns, since_poll_ns, burst)?),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket().as_fd())
    }
}

/// Copier of frames from the ring into packet memory.
pub(super) struct PacketReceiver<'a> {
    link: Link,
    options: &'a PacketOptions,
    numbering: &'a mut Numbering,
    pool: &'a mut Pool,
    burst: &'a mut Burst,
    /// Number of frames whose end the kernel dropped.
    pub(super) cut: u64,
}

impl PacketReceiver<'_> {
    /// True if `max` frames were taken, dropped ones included.
    pub(super) fn is_full(&self, max: usize) -> bool {
        (self.burst.len() as u64).saturating_add(self.cut) >= max as u64
    }

    /// Reads frames of a block until it is empty, the burst is full or no memory is free.
    fn read(
        &mut self,
        block: &[u8],
        cursor: &mut BlockCursor,
        max: usize,
    ) -> Result<Halt, InvalidBlock> {
        while let Some(frame) = cursor.frame(block)? {
            if self.is_full(max) {
                return Ok(Halt::Enough);
            }
            if !self.receive(&frame) {
                return Ok(Halt::NoMemory);
            }
            cursor.pass(&frame)?;
        }
        Ok(Halt::Empty)
    }

    /// Adds a frame to the burst, or refuses it. Returns false if no memory is free for now.
    pub(super) fn receive(&mut self, frame: &RingFrame<'_>) -> bool {
        let tag = frame.tag.filter(|_| frame.bytes.len() >= TAG_AT && self.link == Link::Ethernet);
        let tag_len = if tag.is_some() { TAG_BYTES } else { 0 };
        let len = |bytes: usize| u32::try_from(bytes + tag_len).unwrap_or(u32::MAX);
        let (len_bytes, wire_len) = (len(frame.bytes.len()), len(frame.wire_len as usize));
        let Some(memory) = self.pool.allocate(len_bytes) else {
            let is_oversize = len_bytes > self.pool.largest_frame_bytes();
            if is_oversize {
                self.refuse(wire_len, DropReason::Oversize);
            }
            return is_oversize;
        };
        let hash = if self.options.device_hash { FlowHash(frame.hash) } else { FlowHash::NONE };
        let arrival = self.numbering.next_arrival();
        let packet = Packet::received(memory, arrival, wire_len.max(len_bytes), self.link);
        self.burst.packets.push(Packet { timestamp_ns: frame.timestamp_ns, hash, ..packet });
        let Some(packet) = self.burst.packets.last_mut() else { return true };
        let header = vnet_header_of(frame, tag_len);
        // No sum for packets that the kernel has verified, or that will be cut into segments.
        let needs_sum =
            header.is_none_or(|it| it.gso_type == GSO_NONE && it.flags & DATA_VALID == 0);
        match tag {
            None if needs_sum => packet.fill(frame.bytes, self.options.verify),
            None => packet.fill(frame.bytes, Verify::Nothing),
            Some(tag) => {
                packet.frame.set_len(len_bytes);
                let (addresses, rest) = frame.bytes.split_at(TAG_AT);
                let to = packet.frame.data_mut();
                to[..TAG_AT].copy_from_slice(addresses);
                to[TAG_AT..][..TAG_BYTES].copy_from_slice(&tag.to_bytes());
                to[TAG_AT + TAG_BYTES..].copy_from_slice(rest);
            }
        }
        let carried = header.map_or(Ok(()), |header| header.carry_into(packet));
        if carried.is_err()
            && let Some(Packet { frame, wire_len, arrival, .. }) = self.burst.packets.pop()
        {
            self.pool.put(frame);
            let reason = DropReason::VnetHeader;
            self.burst.refused.push(RefusedFrame { arrival, wire_len, reason });
        }
        true
    }

    fn refuse(&mut self, wire_len: u32, reason: DropReason) {
        let arrival = self.numbering.next_arrival();
        self.burst.refused.push(RefusedFrame { arrival, wire_len, reason });
    }
}

/// Returns the frame's `virtio_net_hdr`, if there is one, adjusted for the re-inserted VLAN tag.
fn vnet_header_of(frame: &RingFrame<'_>, tag_len: usize) -> Option<VirtioNetHdr> {
    if frame.vnet_hdr == [0; VIRTIO_NET_HDR_BYTES] {
        return None;
    }
    let mut header = VirtioNetHdr::from_bytes(frame.vnet_hdr);
    // `csum_start` counts from a frame without the stripped tag.
    let tag_len = u16::try_from(tag_len).unwrap_or_default();
    header.csum_start = header.csum_start.saturating_add(tag_len);
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames wait in the ring if the burst is full, also of cut frames alone, or if no memory is free.
    #[test]
    fn rps_b1_only_empty_ring_keeps_up() {
        let burst = Burst::default();
        assert_eq!(Halt::Enough.polled(&burst, 5), Some(Polled::BehindUntil { now_ns: 5 }));
        assert_eq!(Halt::NoMemory.polled(&burst, 5), Some(Polled::Ready));
        assert_eq!(Halt::Empty.polled(&burst, 5), None);
    }
}
