//! Packets that a device queue sends next: as they are, or the segments that they are cut into.

use std::collections::VecDeque;

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::coalesce::cut;
use forebay_rx::parse::Link;
use forebay_rx::sink::{SendDrop, Sent};

use super::{LaneId, TxQueueConsumer};

/// Ethernet's header, and what a VLAN tag adds to it.
const ETHERNET_BYTES: u32 = 14;
const TAG_BYTES: u32 = 4;
const TAGGED: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// The packets of all CPUs, in order, on their way into a device's ring.
pub(crate) struct Outgoing {
    departures: TxQueueConsumer,
    /// Packets that have left their lane, and are not in the device's ring yet; oldest first. At most the
    /// segments of one packet.
    waiting: VecDeque<OutgoingSegment>,
    cut: Vec<Packet>,
}

/// Unit that a device sends: a packet, or a segment of one.
pub(crate) struct OutgoingSegment {
    pub(crate) lane: LaneId,
    pub(crate) packet: Packet,
    /// True if it is the last one of its packet, which is counted with it.
    pub(crate) is_last: bool,
}

/// Way in which a device takes a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OutgoingShape {
    /// As it is.
    Whole,
    /// As the segments that it is of.
    Cut,
}

impl Outgoing {
    pub(crate) fn new(departures: TxQueueConsumer) -> Self {
        Self { departures, waiting: VecDeque::new(), cut: Vec::new() }
    }

    /// Lanes that packets come from.
    pub(crate) fn departures(&self) -> &TxQueueConsumer {
        &self.departures
    }

    /// True if anything is to be sent.
    pub(crate) fn has_some(&self) -> bool {
        !self.waiting.is_empty() || self.departures.has_some()
    }

    /// The next unit. `shape` says how a packet is taken, or why it is not: those are dropped and
    /// counted, and so is a packet that there is no memory to cut.
    pub(crate) fn next(
        &mut self,
        pool: &mut Pool,
        shape: impl Fn(&Packet) -> Result<OutgoingShape, SendDrop>,
    ) -> Option<OutgoingSegment> {
        loop {
            if let Some(segment) = self.waiting.pop_front() {
                return Some(segment);
            }
            let (lane, packet) = self.departures.next()?;
            match shape(&packet) {
                Ok(OutgoingShape::Whole) => {
                    return Some(OutgoingSegment { lane, packet, is_last: true });
                }
                Ok(OutgoingShape::Cut) => self.cut(lane, packet, pool, &shape),
                Err(reason) => self.drop_packet(lane, reason, [packet], pool),
            }
        }
    }

    /// Takes back what [`next`](Self::next) gave, and there was no room for.
    pub(crate) fn put_back(&mut self, segment: OutgoingSegment) {
        self.waiting.push_front(segment);
    }

    /// Drops what is to be sent, up to `max` packets or segments. Returns how many that were.
    pub(crate) fn discard(&mut self, reason: SendDrop, max: usize, pool: &mut Pool) -> usize {
        for count in 0..max {
            let waiting = self.waiting.pop_front();
            let next =
                waiting.map(|OutgoingSegment { lane, packet, is_last }| (lane, packet, is_last));
            let next =
                next.or_else(|| self.departures.next().map(|(lane, packet)| (lane, packet, true)));
            let Some((lane, packet, is_last)) = next else { return count };
            pool.put(packet.frame);
            self.count(lane, Sent::default(), reason, is_last.into());
        }
        max
    }

    fn cut(
        &mut self,
        lane: LaneId,
        packet: Packet,
        pool: &mut Pool,
        shape: impl Fn(&Packet) -> Result<OutgoingShape, SendDrop>,
    ) {
        let mut segments = std::mem::take(&mut self.cut);
        if let Err(whole) = cut(packet, pool, &mut segments) {
            self.drop_packet(lane, SendDrop::Full, [whole], pool);
        } else if let Some(reason) = segments.iter().find_map(|segment| shape(segment).err()) {
            self.drop_packet(lane, reason, segments.drain(..), pool);
        } else {
            let count = segments.len();
            self.waiting.extend((1..).zip(segments.drain(..)).map(|(number, packet)| {
                OutgoingSegment { lane, packet, is_last: number == count }
            }));
        }
        self.cut = segments;
    }

    fn drop_packet(
        &self,
        lane: LaneId,
        reason: SendDrop,
        frames: impl IntoIterator<Item = Packet>,
        pool: &mut Pool,
    ) {
        frames.into_iter().for_each(|packet| pool.put(packet.frame));
        self.count(lane, Sent::default(), reason, 1);
    }

    /// Counts what became of a lane's packets.
    pub(crate) fn count(&self, lane: LaneId, sent: Sent, reason: SendDrop, dropped: u64) {
        if let Some(counters) = self.departures.counters(lane) {
            counters.add_sent(sent);
            counters.add_dropped(reason, dropped);
        }
    }
}

impl Drop for Outgoing {
    /// Gives up what was not sent. What is in the lanes is counted there.
    fn drop(&mut self) {
        for last in self.waiting.iter().filter(|segment| segment.is_last) {
            self.count(last.lane, Sent::default(), SendDrop::Down, 1);
        }
    }
}

/// The longest frame that an Ethernet of this MTU takes a packet in: one with a tag may be longer.
///
/// # Errors
/// [`SendDrop::LinkHeader`], if it is not an Ethernet's frame.
pub(crate) fn longest_frame_bytes(packet: &Packet, mtu: u32) -> Result<u32, SendDrop> {
    match packet.frame.data().get(12..14).and_then(<[u8]>::first_chunk) {
        Some(&[a, b]) if packet.headers.link == Link::Ethernet => {
            let tag_bytes = if TAGGED.contains(&[a, b]) { TAG_BYTES } else { 0 };
            Ok(mtu.saturating_add(ETHERNET_BYTES + tag_bytes))
        }
        _ => Err(SendDrop::LinkHeader),
    }
}
