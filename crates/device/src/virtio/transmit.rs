//! From packets to buffers that the device sends: the driver's side of the transmit ring.
//!
//! A packet is copied into slots of the shared memory, behind the virtio-net header with its
//! offloads, and its frame returns to its owner at once. There is a slot for each descriptor of the
//! ring; a packet of several slots is a descriptor chain. A device that completes nothing holds up
//! slots only: further packets wait in the bounded lanes of the sending CPUs.
//!
//! Packets in the ring count as sent once the device has used their buffers, and as dropped if the
//! session ends before. Without a session, packets are dropped at once: the link is down.

use std::iter;

use forebay_buf::{PageFrag, PageFragCache, Pool};
use forebay_rx::Packet;
use forebay_rx::coalesce::gso::{
    GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, VIRTIO_NET_HDR_BYTES, describe, gso_type,
};
use forebay_rx::sink::{SendDrop, Sent};
use forebay_sys::virtio::{Direction, RingDescriptor, Virtqueue};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::ends::{EndKind, Reason};
use super::features::Features;
use super::header::HASH_HEADER_BYTES;
use super::memory::RingPlace;
use super::port::{Port, PortSession};
use super::receive::layout;
use crate::tx_queue::{
    LaneId, Outgoing, OutgoingSegment, OutgoingShape, TxQueueConsumer, longest_frame_bytes,
};

/// Length of a slot: an ordinary packet, or a part of a longer one.
pub(super) const SLOT_BYTES: u32 = 2048;

/// Maximum number of slots of a packet: 64 KiB, with link header and virtio header.
const CHAIN_SLOTS_MAX: u32 = 33;

/// Maximum number of packets put into the ring before they are published.
const BATCH_PACKETS: usize = 256;

/// Maximum number of used entries processed in a turn: completing is faster than posting.
const COMPLETIONS_MAX: usize = 2 * BATCH_PACKETS;

/// Transmit side of one queue pair.
pub(super) struct VirtioTransmit {
    outgoing: Outgoing,
    place: RingPlace,
    /// Ring of the session, if there is one.
    ring: Option<Virtqueue>,
    /// True if the queue pair is shut, as the device has violated the protocol of a ring, or a kick failed: the ring
    /// is not used until the next session. A device discards what it finds in a ring that is disabled.
    is_shut: bool,
    slots: TxSlots,
    /// Posted packets, by buffer id. A record in private memory.
    chains: Box<[Option<DescriptorChain>]>,
    limits: VirtioTxLimits,
    /// Number of slots that the next packet waits for; 0 if none waits.
    awaited: u16,
    /// True if the device is to call when it has used a buffer.
    is_armed: bool,
    /// True if the last turn left used entries unprocessed.
    has_more_sent: bool,
}

/// Buffer in the ring: a packet, or a segment of one.
struct DescriptorChain {
    first_slot: u16,
    slots: u16,
    lane: LaneId,
    /// Counts to add when the buffer was sent; the packet counts with its last segment.
    sent: Sent,
}

/// Result of a turn.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct TransmitStep {
    /// Number of packets that left their lanes.
    count: usize,
    /// True if the device is to be kicked.
    kick: bool,
    /// Violation by the device, which shuts the queue.
    lie: Option<Reason>,
}

/// Limits of the device for packets.
#[derive(Clone, Copy, Debug)]
struct VirtioTxLimits {
    features: Features,
    /// Length of the longest IP packet.
    mtu: u32,
    /// Maximum number of slots of a packet.
    slots_max: u32,
}

impl VirtioTransmit {
    /// Creates the transmit side for a ring, with pieces of [`SLOT_BYTES`] of `memory` as slots.
    ///
    /// # Panics
    /// If the memory has fewer slots than the ring has descriptors.
    pub(super) fn new(consumer: TxQueueConsumer, place: RingPlace, memory: PageFragCache) -> Self {
        let size = place.size();
        let slots_max = CHAIN_SLOTS_MAX.min(size.into());
        Self {
            outgoing: Outgoing::new(consumer),
            place,
            ring: None,
            is_shut: false,
            slots: TxSlots::new(memory, size),
            chains: iter::repeat_with(|| None).take(size.into()).collect(),
            limits: VirtioTxLimits { features: Features::default(), mtu: u32::MAX, slots_max },
            awaited: 0,
            is_armed: false,
            has_more_sent: false,
        }
    }

    #[cfg(test)]
    pub(super) fn ring(&self) -> Option<&Virtqueue> {
        self.ring.as_ref()
    }

    /// Returns the lanes that packets come from.
    pub(super) fn consumer(&self) -> &TxQueueConsumer {
        self.outgoing.consumer()
    }

    /// Ends the previous session, and begins the given one. `None` only once the device does not
    /// use the ring any more. Packets that the device has not taken are dropped.
    pub(super) fn set_session(&mut self, session: Option<&PortSession>) {
        self.end();
        if let Some(session) = session {
            self.begin(session.features, session.mtu);
        }
    }

    fn begin(&mut self, features: Features, mtu: Option<u16>) {
        let event_idx = features.has(VIRTIO_RING_F_EVENT_IDX);
        let ring = self.ring.insert(self.place.ring(layout(features), event_idx));
        // No calls: nothing waits for completions, and a call for each packet would be wasted.
        let _ = ring.ask_for_call(false);
        self.limits.features = features;
        self.limits.mtu = mtu.map_or(u32::MAX, u32::from);
    }

    /// Drops packets that the device has not taken. The ring's memory is left as it is: if the source
    /// is dropped in a session, the device still uses it (VQ11).
    fn end(&mut self) {
        if !self.is_shut {
            // Packets that the device used before the end were sent: at most those posted. A
            // violation does not matter any more.
            let _ = self.complete(usize::MAX);
        }
        for chain in self.chains.iter_mut().filter_map(Option::take) {
            self.slots.free(&chain);
            let lost = chain.sent.packets;
            self.outgoing.count(chain.lane, Sent::default(), SendDrop::Down, lost);
        }
        self.ring = None;
        (self.is_shut, self.awaited, self.is_armed) = (false, 0, false);
        self.has_more_sent = false;
    }

    /// Counts the packets that the device has sent, and posts as many waiting packets as there is
    /// room for. Without a ring, packets wait for one that the next poll sets up, unless the run is over.
    /// Returns the number of packets that were sent or dropped.
    pub(super) fn turn(&mut self, port: &mut Port, is_over: bool, pool: &mut Pool) -> usize {
        let waits = self.ring.is_none() && !is_over;
        let step = self.step(pool, || !waits || !port.has_changed());
        if let Some(lie) = step.lie {
            port.shut(lie);
        }
        if step.kick && !port.kick_tx() {
            self.shut();
        }
        step.count
    }

    /// Ends the use of the ring for the rest of the session, as the queue pair is shut. Packets that the device has
    /// not sent yet count as dropped once the session ends.
    pub(super) fn shut(&mut self) {
        // A violation does not matter any more.
        let _ = self.complete(usize::MAX);
        (self.is_shut, self.is_armed) = (true, false);
    }

    /// True if the queue pair is shut.
    pub(super) fn is_shut(&self) -> bool {
        self.is_shut
    }

    /// Takes one turn. Without a usable ring, packets are dropped while `is_down` returns true.
    fn step(&mut self, pool: &mut Pool, is_down: impl Fn() -> bool) -> TransmitStep {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.is_shut) else {
            let count = self.outgoing.discard(SendDrop::Down, BATCH_PACKETS, pool, is_down);
            return TransmitStep { count, ..TransmitStep::default() };
        };
        if std::mem::take(&mut self.is_armed) {
            let _ = ring.ask_for_call(false); // completions are processed now
        }
        if let Err(lie) = self.complete(COMPLETIONS_MAX) {
            self.is_shut = true;
            return TransmitStep { lie: Some(lie), ..TransmitStep::default() };
        }
        let count = self.fill(pool);
        let kick = count > 0 && self.ring.as_mut().is_some_and(Virtqueue::publish);
        TransmitStep { count, kick, lie: None }
    }

    /// True if a turn would find work. If packets wait for slots, also asks the device for a call
    /// once it has used some slots, because the caller is about to sleep.
    pub(super) fn has_work(&mut self) -> bool {
        if self.has_more_sent {
            return true;
        }
        if !self.outgoing.has_some() {
            return false;
        }
        match &mut self.ring {
            Some(ring) if !self.is_shut && ring.free() < self.awaited => {
                self.is_armed = true;
                ring.ask_for_call(true)
            }
            _ => true,
        }
    }

    /// True if the device was asked to call since the last turn.
    pub(super) fn is_armed(&self) -> bool {
        self.is_armed
    }

    /// True if the device has packets that it may not have sent yet. A sent packet is counted by
    /// the first turn after its transmission. No event announces the transmission.
    pub(super) fn is_sending(&self) -> bool {
        let in_use = |ring: &Virtqueue| ring.free() < ring.size();
        !self.is_shut && self.ring.as_ref().is_some_and(in_use)
    }

    /// Counts sent packets and frees their slots, for at most `entries_max` used entries.
    ///
    /// # Errors
    /// A violation by the device, which makes the ring unusable.
    fn complete(&mut self, entries_max: usize) -> Result<(), Reason> {
        self.has_more_sent = false;
        if !self.is_sending() {
            return Ok(());
        }
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let (mut lane, mut sent) = (LaneId(0), Sent::default());
        let mut taken = 0;
        let end = loop {
            if taken == entries_max {
                self.has_more_sent = true;
                break Ok(());
            }
            let used = match ring.next_used() {
                Ok(Some(used)) => used,
                Ok(None) => break Ok(()),
                Err(lie) => break Err(EndKind::UsedIndex.reason(format!("transmit ring: {lie}"))),
            };
            taken += 1;
            let chain = ring.take(used.id).and_then(|id| self.chains[id.index()].take());
            let Some(chain) = chain else {
                let why = format!("it has sent buffer {}, which it was not given", used.id);
                break Err(EndKind::NotGiven.reason(why));
            };
            if chain.lane != lane {
                self.outgoing.count(lane, std::mem::take(&mut sent), SendDrop::Down, 0);
                lane = chain.lane;
            }
            sent.packets += chain.sent.packets;
            sent.frames += chain.sent.frames;
            sent.bytes += chain.sent.bytes;
            self.slots.free(&chain);
        };
        self.outgoing.count(lane, sent, SendDrop::Down, 0);
        end
    }

    /// Puts packets into the ring, without publishing them. Returns their number.
    fn fill(&mut self, pool: &mut Pool) -> usize {
        let (limits, free) = (self.limits, self.ring.as_ref().map_or(0, Virtqueue::free));
        let mut free = u32::from(free);
        self.awaited = 0;
        let mut count = 0;
        while count < BATCH_PACKETS {
            let Some(segment) = self.outgoing.next(pool, |packet| limits.shape(packet)) else {
                break;
            };
            let slots = limits.slots(len_bytes(&segment.packet));
            if slots > free {
                self.awaited = u16::try_from(slots).unwrap_or(u16::MAX);
                self.outgoing.put_back(segment);
                break;
            }
            let Packet { frame, .. } = self.post(segment);
            pool.put(frame);
            free -= slots;
            count += 1;
        }
        count
    }

    /// Puts a packet into the ring, which must have room for it.
    fn post(&mut self, OutgoingSegment { lane, mut packet, is_last }: OutgoingSegment) -> Packet {
        let mut sent = Sent::default();
        sent.add(&packet);
        sent.packets = is_last.into();
        let mut header = [0; HASH_HEADER_BYTES as usize];
        // The number of buffers and the hash are for the device to set (both are 0 here).
        header[..VIRTIO_NET_HDR_BYTES].copy_from_slice(&describe(&mut packet).to_bytes());
        let header = &header[..self.limits.features.header_bytes() as usize];
        let (first_slot, pieces) = self.slots.fill(iter::once(header).chain(packet.fragments()));
        let slots = u16::try_from(pieces.len()).unwrap_or(u16::MAX);
        let chain = DescriptorChain { first_slot, slots, lane, sent };
        let ring = self.ring.as_mut();
        match ring.and_then(|ring| ring.post(pieces, Direction::ToDevice).ok()) {
            Some(id) => self.chains[id.index()] = Some(chain),
            // Unreachable: as many slots are free as descriptors.
            None => {
                self.slots.free(&chain);
                self.outgoing.count(lane, Sent::default(), SendDrop::Full, is_last.into());
            }
        }
        packet
    }
}

impl Drop for VirtioTransmit {
    fn drop(&mut self) {
        self.end();
    }
}

impl VirtioTxLimits {
    /// Returns how a packet can be sent, or why it cannot.
    fn shape(self, packet: &Packet) -> Result<OutgoingShape, SendDrop> {
        let longest = longest_frame_bytes(packet, self.mtu)?;
        let len_bytes = len_bytes(packet);
        let is_short = self.slots(len_bytes) <= self.slots_max;
        if packet.gso_size() == 0 {
            let fits = is_short && len_bytes <= longest;
            return if fits { Ok(OutgoingShape::Whole) } else { Err(SendDrop::TooLong) };
        }
        let segment_bytes = u32::from(packet.headers.payload_offset) + u32::from(packet.gso_size());
        match () {
            () if segment_bytes > longest => Err(SendDrop::TooLong),
            () if is_short && self.is_cut_by_device(packet) => Ok(OutgoingShape::Whole),
            () => Ok(OutgoingShape::Cut),
        }
    }

    /// True if the device cuts such a packet (`VIRTIO_NET_F_HOST_*`), which implies that it
    /// completes checksums.
    fn is_cut_by_device(self, packet: &Packet) -> bool {
        let gso_type = gso_type(packet);
        let feature = match gso_type & !GSO_ECN {
            GSO_TCPV4 => VIRTIO_NET_F_HOST_TSO4,
            GSO_TCPV6 => VIRTIO_NET_F_HOST_TSO6,
            GSO_UDP_L4 => VIRTIO_NET_F_HOST_USO,
            _ => return false,
        };
        let takes_ecn = gso_type & GSO_ECN == 0 || self.features.has(VIRTIO_NET_F_HOST_ECN);
        takes_ecn && self.features.has(feature)
    }

    /// Returns the number of slots for a packet of this length.
    fn slots(self, len_bytes: u32) -> u32 {
        len_bytes.saturating_add(self.features.header_bytes()).div_ceil(SLOT_BYTES)
    }
}

/// Length of a packet on the ring, with headers counted once.
#[inline]
fn len_bytes(packet: &Packet) -> u32 {
    if !packet.is_chain() {
        return packet.frame.total_len_bytes();
    }
    let bytes = packet.fragments().map(<[u8]>::len).sum::<usize>();
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Shared memory for packets to send.
struct TxSlots {
    slots: Box<[PageFrag]>,
    /// Free slots; the last one freed is used first, because it is in cache.
    free: Vec<u16>,
    /// Next slot of the same packet, by slot.
    next: Box<[u16]>,
    /// Descriptors of the packet being copied.
    pieces: Vec<RingDescriptor>,
}

impl TxSlots {
    fn new(mut memory: PageFragCache, count: u16) -> Self {
        let slots: Box<_> = iter::from_fn(|| memory.cut(SLOT_BYTES)).take(count.into()).collect();
        assert_eq!(slots.len(), usize::from(count), "there is memory for a slot per descriptor");
        let (free, next) = ((0..count).rev().collect(), vec![0; count.into()].into());
        Self { slots, free, next, pieces: Vec::new() }
    }

    /// Copies bytes into a chain of slots. Returns the first slot, and the descriptors of all.
    ///
    /// # Panics
    /// If too few slots are free.
    fn fill<'a>(&mut self, stretches: impl Iterator<Item = &'a [u8]>) -> (u16, &[RingDescriptor]) {
        self.pieces.clear();
        let first = self.take();
        let (mut slot, mut end) = (first, 0);
        for mut bytes in stretches {
            while !bytes.is_empty() {
                if end == SLOT_BYTES as usize {
                    self.describe(slot, end);
                    let next = self.take();
                    self.next[usize::from(slot)] = next;
                    (slot, end) = (next, 0);
                }
                let (here, rest) = bytes.split_at(bytes.len().min(SLOT_BYTES as usize - end));
                #[expect(clippy::cast_possible_truncation, reason = "less than a slot")]
                self.slots[usize::from(slot)].copy_out(end as u32, here);
                end += here.len();
                bytes = rest;
            }
        }
        self.describe(slot, end);
        (first, &self.pieces)
    }

    fn take(&mut self) -> u16 {
        let Some(slot) = self.free.pop() else {
            panic!("as many slots are free as descriptors, and was it not asked for those?")
        };
        slot
    }

    /// Adds the descriptor of a slot.
    fn describe(&mut self, slot: u16, len: usize) {
        let address = self.slots[usize::from(slot)].address();
        #[expect(clippy::cast_possible_truncation, reason = "at most a slot")]
        self.pieces.push(RingDescriptor { address, len_bytes: len as u32 });
    }

    /// Frees the slots of a packet.
    fn free(&mut self, chain: &DescriptorChain) {
        let mut slot = chain.first_slot;
        for _ in 0..chain.slots {
            self.free.push(slot);
            slot = self.next[usize::from(slot)];
        }
    }
}

#[cfg(test)]
mod tests;
