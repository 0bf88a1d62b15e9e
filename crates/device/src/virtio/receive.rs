//! From used buffers to packets: the driver's side of the receive ring, and its checks of the
//! device.

use std::sync::Arc;

use forebay_buf::frags::FRAG_TABLE_BYTES;
use forebay_buf::{Frame, Pool};
use forebay_rx::arrive::{Burst, HEAD_BYTES, Numbering, RefusedFrame};
use forebay_rx::coalesce::gso::{DATA_VALID, GSO_NONE, NEEDS_CSUM};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::Link;
use forebay_rx::{DropReason, Packet};
use forebay_sys::virtio::{BufferId, InvalidRing, Used, Virtqueue, VirtqueueLayout};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_net::VIRTIO_NET_F_GUEST_CSUM;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::buffers::{Buffers, GOOD_PACKET_LEN};
use super::copybreak::{HeaderCopyLen, copied, copy_head};
use super::features::Features;
use super::header::{HASH_HEADER_BYTES, NetHeader};
use super::memory::RingPlace;
use super::port::PortSession;
use crate::KernelCounts;

/// Maximum length of packets that are copied out of their buffer, which is posted again at once: to
/// keep the buffer and cut another one costs more than the copy.
const COPYBREAK_BYTES: u32 = 256;

/// Length of an Ethernet header: shorter packets are refused (SEED1).
const ETHERNET_BYTES: u32 = 14;

/// Length of the longest packet: an IP packet of 64 KiB with an Ethernet header and two tags.
pub(super) const LARGEST_BYTES: u32 = (1 << 16) + 22;

/// Timeout for the rest of a packet, if all buffers so far are full (NET10).
const REST_NS: u64 = 100_000_000;

/// Distance ahead of the current used buffer at which first lines are prefetched.
const PREFETCH_AHEAD: u16 = 8;

/// Names of the driver's counters, in the order of [`Count`].
pub(super) const COUNTS: [&str; 4] =
    ["rx_length_errors", "rx_bad_ids", "rx_vnet_header", "rx_buffers_short"];

/// Indices into [`COUNTS`].
#[derive(Clone, Copy)]
enum Count {
    LengthErrors,
    BadIds,
    VnetHeaders,
    BuffersShort,
}

/// Receive side of one queue pair.
pub(super) struct VirtioReceiver {
    place: RingPlace,
    ring: Virtqueue,
    buffers: Buffers,
    heads: HeaderCopyLen,
    features: Features,
    device_hash: bool,
    numbering: Numbering,
    /// True if memory ran out when buffers were last posted.
    is_starved: bool,
    /// Packet whose last buffers have not arrived.
    partial: Option<Partial>,
    /// Maximum number of used entries still to be processed; unlimited while buffers are posted, and
    /// 0 without a session.
    left: usize,
    counts: Arc<KernelCounts>,
}

/// First buffers of a packet.
struct Partial {
    /// Frame of the packet, or the reason why the packet is dropped: its other buffers are then
    /// only awaited.
    frame: Result<Frame, DropReason>,
    header: NetHeader,
    /// Number of bytes so far, without the device's header.
    len_bytes: u32,
    /// Number of buffers that have not arrived.
    missing: u16,
    /// True if all buffers so far are full, as the specification requires of all but the last
    /// (5.1.6.4.1).
    is_full: bool,
    /// Time of arrival of the latest buffer.
    since_ns: u64,
}

/// State after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PollState {
    /// More used entries are possible.
    More,
    /// No used entry before the rest of a packet, which is dropped at this time.
    Part {
        /// Engine time.
        until_ns: u64,
    },
    /// No used entry, and no partial packet.
    Nothing,
}

impl VirtioReceiver {
    pub(super) fn new(
        place: RingPlace,
        buffers: Buffers,
        device_hash: bool,
        counts: Arc<KernelCounts>,
    ) -> Self {
        Self {
            ring: place.ring(VirtqueueLayout::Split, false),
            place,
            buffers,
            heads: HeaderCopyLen::default(),
            features: Features::default(),
            device_hash,
            numbering: Numbering::of_queue(forebay_rx::RxQueue(0), 1),
            is_starved: false,
            partial: None,
            left: 0,
            counts,
        }
    }

    #[cfg(test)]
    pub(super) fn ring(&self) -> &Virtqueue {
        &self.ring
    }

    pub(super) fn number_by(&mut self, numbering: Numbering) {
        self.numbering = numbering;
    }

    /// Begins a session with its features, and fills the ring. Returns whether the device is to be
    /// kicked.
    pub(super) fn begin(&mut self, session: &PortSession) -> bool {
        let features = session.features;
        self.features = features;
        self.ring = self.place.ring(layout(features), features.has(VIRTIO_RING_F_EVENT_IDX));
        // Without mergeable buffers, each buffer must hold a whole packet (NET2).
        let mtu = session.mtu.map_or(GOOD_PACKET_LEN, |mtu| u32::from(mtu) + ETHERNET_BYTES + 4);
        let min_packet_bytes = if features.mergeable() { 0 } else { mtu };
        self.buffers.sizing.begin(features.header_bytes(), min_packet_bytes);
        self.left = usize::MAX;
        // Calls stay off until the CPU is about to sleep; nothing can have arrived yet.
        let _ = self.ring.ask_for_call(false);
        self.refill()
    }

    /// Ends a session whose device is gone or has stopped: takes back its buffers. A partial packet
    /// is dropped.
    pub(super) fn end(&mut self, pool: &mut Pool, burst: &mut Burst) {
        self.give_up(pool, burst);
        self.buffers.take_back();
        // A device that did not stop may still use the ring's memory, which is left as it is.
        self.ring = self.place.ring(VirtqueueLayout::Split, false);
        self.left = 0;
    }

    /// Ends posting: used entries beyond the buffers that the device has are ignored.
    pub(super) fn post_no_more(&mut self) {
        self.left = self.left.min((self.ring.size() - self.ring.free()).into());
    }

    /// Takes up to `max` frames out of the ring. Processes at most that many used entries, valid or
    /// not.
    ///
    /// # Errors
    /// If the ring's state is invalid, which makes it unusable.
    pub(super) fn turn(
        &mut self,
        max: usize,
        now_ns: u64,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<PollState, InvalidRing> {
        let (mut taken, most) = (0, max.min(self.left));
        let rest = loop {
            if taken == most || burst.len() >= max {
                break if taken < self.left {
                    PollState::More
                } else {
                    self.rest(now_ns, pool, burst)
                };
            }
            let Some(used) = self.ring.next_used()? else {
                break self.rest(now_ns, pool, burst);
            };
            if taken == 0 {
                self.prefetch_first(used);
            }
            self.prefetch(PREFETCH_AHEAD - 1);
            self.take(used, now_ns, pool, burst);
            taken += 1;
        };
        self.left = self.left.saturating_sub(taken);
        self.buffers.shown().add_used(taken as u64);
        Ok(rest)
    }

    /// Posts buffers in place of those taken. Returns whether the device is to be kicked.
    #[must_use]
    pub(super) fn refill(&mut self) -> bool {
        self.is_starved = !self.buffers.refill(&mut self.ring);
        if self.is_starved {
            self.count(Count::BuffersShort);
        }
        self.ring.publish()
    }

    /// Enables or disables calls of the device. Returns true if used entries are already present.
    pub(super) fn ask_for_call(&mut self, wanted: bool) -> bool {
        self.ring.ask_for_call(wanted)
    }

    /// True if memory ran out, so the device may have too few buffers for its next packet.
    pub(super) fn is_starved(&self) -> bool {
        self.is_starved
    }

    /// Prefetches the first buffers of a turn.
    #[inline(never)] // once for a turn
    fn prefetch_first(&self, used: Used) {
        self.prefetch_used(used);
        (0..PREFETCH_AHEAD - 1).for_each(|ahead| self.prefetch(ahead));
    }

    /// Prefetches the buffer that is `ahead` of the current one.
    #[inline(always)] // once for a packet
    fn prefetch(&self, ahead: u16) {
        if let Some(used) = self.ring.peek_used(ahead) {
            self.prefetch_used(used);
        }
    }

    #[inline(always)] // once for a packet
    fn prefetch_used(&self, used: Used) {
        let header_bytes = self.features.header_bytes();
        if used.len_bytes <= header_bytes + COPYBREAK_BYTES {
            self.buffers.prefetch(used.id, used.len_bytes);
        } else {
            self.buffers.prefetch(used.id, header_bytes + self.heads.len_bytes());
            // The buffer is not posted again: another one takes its entry.
            self.ring.prefetch_place(used.id);
        }
    }

    #[inline]
    fn take(&mut self, used: Used, now_ns: u64, pool: &mut Pool, burst: &mut Burst) {
        let Some(id) = self.ring.take(used.id) else { return self.count(Count::BadIds) };
        match self.partial.take() {
            None => self.first(id, used.len_bytes, now_ns, pool, burst),
            Some(partial) => self.next(partial, (id, used.len_bytes), now_ns, pool, burst),
        }
    }

    /// Processes the first buffer of a packet.
    #[inline]
    fn first(
        &mut self,
        id: BufferId,
        used_bytes: u32,
        now_ns: u64,
        pool: &mut Pool,
        burst: &mut Burst,
    ) {
        let header_bytes = self.features.header_bytes();
        let out = self.ring.size() - self.ring.free();
        let is_mergeable = self.features.mergeable();
        let Some(frag) = self.buffers.posted(id) else { return self.count(Count::BadIds) };
        let fits = (header_bytes + ETHERNET_BYTES..=frag.room_bytes()).contains(&used_bytes);
        let mut header = [0; HASH_HEADER_BYTES as usize];
        // Without a hash, a few bytes more are copied: constant lengths are copied faster, and
        // every buffer has as many.
        frag.copy_in(0, &mut header);
        let header = NetHeader::from_bytes(&header, header_bytes == HASH_HEADER_BYTES);
        let buffers = if is_mergeable { header.num_buffers } else { 1 };
        // Invalid: shorter than an Ethernet frame, longer than its buffer, or more buffers than
        // posted.
        if !fits || buffers == 0 || buffers - 1 > out {
            let wire_len = used_bytes.saturating_sub(header_bytes);
            self.ring.post_again(id);
            return self.refuse(wire_len, DropReason::LengthError, burst);
        }
        let len_bytes = used_bytes - header_bytes;
        if buffers == 1 && len_bytes <= COPYBREAK_BYTES {
            let frame = copied(frag, header_bytes, len_bytes, pool);
            if self.buffers.is_outgrown(frag) {
                self.buffers.take(id);
            } else {
                self.ring.post_again(id);
            }
            return match frame {
                Some(frame) => self.finish(frame, &header, len_bytes, pool, burst),
                None => self.refuse(len_bytes, DropReason::NoBuffer, burst),
            };
        }
        let is_full = used_bytes == frag.room_bytes();
        let frame = self.head(id, used_bytes, pool);
        if buffers > 1 {
            let missing = buffers - 1;
            let since_ns = now_ns;
            self.partial = Some(Partial { frame, header, len_bytes, missing, is_full, since_ns });
            return;
        }
        match frame {
            Ok(frame) => self.finish(frame, &header, len_bytes, pool, burst),
            Err(reason) => self.refuse(len_bytes, reason, burst),
        }
    }

    /// Copies the first bytes of a packet into a private frame, and attaches the rest of the
    /// buffer.
    #[inline]
    fn head(
        &mut self,
        id: BufferId,
        used_bytes: u32,
        pool: &mut Pool,
    ) -> Result<Frame, DropReason> {
        let Some(mut frame) = pool.allocate(HEAD_BYTES + FRAG_TABLE_BYTES) else {
            self.ring.post_again(id);
            return Err(DropReason::NoBuffer);
        };
        let Some(mut frag) = self.buffers.take(id) else { return Err(DropReason::LengthError) };
        let header_bytes = self.features.header_bytes();
        let head_bytes = (used_bytes - header_bytes).min(self.heads.len_bytes());
        frame.set_len(head_bytes);
        copy_head(&frag, header_bytes, frame.data_mut());
        self.heads.add(frame.data());
        frag.set_len(used_bytes);
        frag.pull(header_bytes + head_bytes);
        if frag.len_bytes() > 0 && frame.attach(frag).is_err() {
            pool.put(frame);
            return Err(DropReason::Oversize);
        }
        Ok(frame)
    }

    /// Processes one more buffer of a packet.
    fn next(
        &mut self,
        mut partial: Partial,
        (id, used_bytes): (BufferId, u32),
        now_ns: u64,
        pool: &mut Pool,
        burst: &mut Burst,
    ) {
        let room_bytes = self.buffers.posted(id).map_or(0, |frag| frag.room_bytes());
        let len_bytes = partial.len_bytes.saturating_add(used_bytes);
        let fits = used_bytes <= room_bytes && len_bytes <= LARGEST_BYTES;
        partial.is_full &= used_bytes == room_bytes;
        partial.missing -= 1;
        partial.since_ns = now_ns;
        match (&mut partial.frame, fits) {
            (Ok(frame), true) if used_bytes > 0 => {
                partial.len_bytes = len_bytes;
                let attached = self.buffers.take(id).map(|mut frag| {
                    frag.set_len(used_bytes);
                    frame.attach(frag).is_ok()
                });
                if attached != Some(true) {
                    partial.lose(DropReason::LengthError, pool);
                }
            }
            (Ok(_), true) | (Err(_), _) => self.ring.post_again(id),
            // Longer than its buffer, or a packet longer than any IP packet.
            (Ok(_), false) => {
                self.ring.post_again(id);
                partial.lose(DropReason::LengthError, pool);
            }
        }
        if partial.missing > 0 {
            self.partial = Some(partial);
            return;
        }
        match partial.frame {
            Ok(frame) => self.finish(frame, &partial.header, partial.len_bytes, pool, burst),
            Err(reason) => self.refuse(partial.len_bytes, reason, burst),
        }
    }

    /// Finishes a packet whose buffers have all arrived.
    #[inline(always)] // passed through memory, a frame waits for its store: half of the stage
    fn finish(
        &mut self,
        frame: Frame,
        header: &NetHeader,
        len_bytes: u32,
        pool: &mut Pool,
        burst: &mut Burst,
    ) {
        let arrival = self.numbering.next_arrival();
        let is_pinning = self.buffers.is_short() && frame.frag_count() > 0;
        if header.says_nothing(self.device_hash) && !is_pinning {
            self.buffers.sizing.add(len_bytes);
            burst.packets.push(Packet::received(frame, arrival, len_bytes, Link::Ethernet));
            return;
        }
        let packet = Packet::received(frame, arrival, len_bytes, Link::Ethernet);
        self.finish_as_said(packet, header, pool, burst);
    }

    /// Finishes a packet with offloads or a hash, or while memory is short.
    #[inline(never)]
    fn finish_as_said(
        &mut self,
        mut packet: Packet,
        header: &NetHeader,
        pool: &mut Pool,
        burst: &mut Burst,
    ) {
        let (arrival, wire_len) = (packet.arrival, packet.wire_len);
        if self.device_hash && header.hash.is_some() {
            packet.hash = header.hash;
        }
        if !self.carry(header, &mut packet) {
            pool.put(packet.frame);
            self.count(Count::VnetHeaders);
            burst.refused.push(RefusedFrame { arrival, wire_len, reason: DropReason::VnetHeader });
            return;
        }
        self.buffers.sizing.add(wire_len);
        // Packets held by readers pin whole blocks. With few blocks left, none should leave.
        if packet.is_nonlinear()
            && self.buffers.is_short()
            && let Some(copy) = packet.copied(pool)
        {
            pool.put(std::mem::replace(&mut packet, copy).frame);
        }
        burst.packets.push(packet);
    }

    /// Applies the header to the packet, as far as negotiated (NET11). Returns false if the header
    /// is invalid.
    fn carry(&self, header: &NetHeader, packet: &mut Packet) -> bool {
        let mut offloads = header.offloads;
        // Other bits must be ignored (NET4).
        offloads.flags &= NEEDS_CSUM | DATA_VALID;
        if !self.features.has(VIRTIO_NET_F_GUEST_CSUM) {
            // Not negotiated: `DATA_VALID` is not trusted, and `NEEDS_CSUM` is a violation.
            if offloads.flags & NEEDS_CSUM != 0 {
                return false;
            }
            offloads.flags = 0;
        }
        let is_agreed =
            offloads.gso_type == GSO_NONE || self.features.accepts_gso(offloads.gso_type);
        // `hdr_len` is only a hint (NET6).
        offloads.hdr_len = 0;
        is_agreed && offloads.carry_into(packet).is_ok()
    }

    /// Returns the state of an empty ring, with the time-out of a partial packet.
    fn rest(&mut self, now_ns: u64, pool: &mut Pool, burst: &mut Burst) -> PollState {
        let Some(partial) = &self.partial else { return PollState::Nothing };
        let until_ns = partial.since_ns.saturating_add(REST_NS);
        // Behind a buffer that is not full, the rest of a packet arrives at once or never (SEED2).
        if partial.is_full && now_ns < until_ns {
            return PollState::Part { until_ns };
        }
        self.give_up(pool, burst);
        PollState::Nothing
    }

    /// Drops the partial packet.
    fn give_up(&mut self, pool: &mut Pool, burst: &mut Burst) {
        if let Some(mut partial) = self.partial.take() {
            partial.lose(DropReason::LengthError, pool);
            let reason = partial.frame.err().unwrap_or(DropReason::LengthError);
            self.refuse(partial.len_bytes, reason, burst);
        }
    }

    #[cold]
    fn refuse(&mut self, wire_len: u32, reason: DropReason, burst: &mut Burst) {
        if reason == DropReason::LengthError {
            self.count(Count::LengthErrors);
        }
        let arrival: Arrival = self.numbering.next_arrival();
        burst.refused.push(RefusedFrame { arrival, wire_len, reason });
    }

    #[cold]
    fn count(&mut self, what: Count) {
        self.counts.add(what as usize, 1);
    }
}

/// Returns the ring layout for negotiated features.
pub(super) fn layout(features: Features) -> VirtqueueLayout {
    if features.has(VIRTIO_F_RING_PACKED) {
        VirtqueueLayout::Packed
    } else {
        VirtqueueLayout::Split
    }
}

impl Partial {
    /// Drops the bytes of the packet; its other buffers are still awaited.
    fn lose(&mut self, reason: DropReason, pool: &mut Pool) {
        if let Ok(frame) = std::mem::replace(&mut self.frame, Err(reason)) {
            pool.put(frame);
        }
    }
}
