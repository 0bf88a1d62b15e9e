//! Next packets of a device queue: whole, or cut into segments.

use std::collections::VecDeque;

use forebay_buf::Pool;
use forebay_rx::Packet;
use forebay_rx::coalesce::cut;
use forebay_rx::parse::Link;
use forebay_rx::sink::{SendDrop, Sent};

use super::{LaneId, TxQueueConsumer};

/// Length of an Ethernet header, and of a VLAN tag.
const ETHERNET_BYTES: u32 = 14;
const TAG_BYTES: u32 = 4;
const TAGGED: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// Packets of all CPUs, in order, on their way into a device's ring.
pub(crate) struct Outgoing {
    consumer: TxQueueConsumer,
    /// Packets that have left their lane and have not entered the device's ring; oldest first. At
    /// most the segments of one packet.
    waiting: VecDeque<OutgoingSegment>,
    /// Packet that has left its lane, and was not asked for the form in which it is sent.
    unshaped: Option<(LaneId, Packet)>,
    cut: Vec<Packet>,
}

/// Unit that a device sends: a packet, or a segment of one.
pub(crate) struct OutgoingSegment {
    pub(crate) lane: LaneId,
    pub(crate) packet: Packet,
    /// True for the last segment of a packet, with which the packet is counted.
    pub(crate) is_last: bool,
}

/// Form in which a device takes a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OutgoingShape {
    /// Whole packet.
    Whole,
    /// Segments, cut in software.
    Cut,
}

impl Outgoing {
    pub(crate) fn new(consumer: TxQueueConsumer) -> Self {
        Self { consumer, waiting: VecDeque::new(), unshaped: None, cut: Vec::new() }
    }

    /// Lanes that packets come from.
    pub(crate) fn consumer(&self) -> &TxQueueConsumer {
        &self.consumer
    }

    /// True if there are packets to send.
    pub(crate) fn has_some(&self) -> bool {
        !self.waiting.is_empty() || self.unshaped.is_some() || self.consumer.has_some()
    }

    /// Returns the next unit. `shape` returns how a packet is taken, or why it is refused. Refused
    /// packets are dropped and counted, as is a packet without memory to cut it.
    pub(crate) fn next(
        &mut self,
        pool: &mut Pool,
        shape: impl Fn(&Packet) -> Result<OutgoingShape, SendDrop>,
    ) -> Option<OutgoingSegment> {
        loop {
            if let Some(segment) = self.waiting.pop_front() {
                return Some(segment);
            }
            let (lane, packet) = self.take()?;
            match shape(&packet) {
                Ok(OutgoingShape::Whole) => {
                    return Some(OutgoingSegment { lane, packet, is_last: true });
                }
                Ok(OutgoingShape::Cut) => self.cut(lane, packet, pool, &shape),
                Err(reason) => self.drop_packet(lane, reason, [packet], pool),
            }
        }
    }

    /// Puts back a unit from [`next`](Self::next) that had no room.
    pub(crate) fn put_back(&mut self, segment: OutgoingSegment) {
        self.waiting.push_front(segment);
    }

    /// Drops up to `max` packets or segments, while the device is down: `is_down` is asked after each
    /// packet is taken, since a sender that has seen the device up may have handed it in meanwhile.
    /// Returns their number.
    pub(crate) fn discard(
        &mut self,
        reason: SendDrop,
        max: usize,
        pool: &mut Pool,
        is_down: impl Fn() -> bool,
    ) -> usize {
        for count in 0..max {
            let (lane, packet, is_last) = match self.waiting.pop_front() {
                // Its form is that of a device that is gone.
                Some(OutgoingSegment { lane, packet, is_last }) => (lane, packet, is_last),
                None => {
                    let Some((lane, packet)) = self.take() else { return count };
                    if !is_down() {
                        self.unshaped = Some((lane, packet));
                        return count;
                    }
                    (lane, packet, true)
                }
            };
            pool.put(packet.frame);
            self.count(lane, Sent::default(), reason, is_last.into());
        }
        max
    }

    /// Takes the next packet.
    fn take(&mut self) -> Option<(LaneId, Packet)> {
        self.unshaped.take().or_else(|| self.consumer.next())
    }

    fn cut(
        &mut self,
        lane: LaneId,
        packet: Packet,
        pool: &mut Pool,
        shape: impl Fn(&Packet) -> Result<OutgoingShape, SendDrop>,
    ) {
        let mut segments = std::mem::take(&mut self.cut);
        // A packet counts once, so a segment that cannot be sent drops all of its packet.
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

    /// Counts sent and dropped packets of a lane.
    pub(crate) fn count(&self, lane: LaneId, sent: Sent, reason: SendDrop, dropped: u64) {
        if let Some(counters) = self.consumer.counters(lane) {
            counters.add_sent(sent);
            counters.add_dropped(reason, dropped);
        }
    }
}

impl Drop for Outgoing {
    /// Counts unsent units as dropped. The lanes count theirs on their own drop.
    fn drop(&mut self) {
        let waiting = self.waiting.iter().filter(|segment| segment.is_last).map(|last| last.lane);
        let unshaped = self.unshaped.iter().map(|(lane, _)| *lane);
        for lane in waiting.chain(unshaped) {
            self.count(lane, Sent::default(), SendDrop::Down, 1);
        }
    }
}

/// Returns the longest frame that an Ethernet of this MTU takes for a packet: a tagged frame may be
/// longer.
///
/// # Errors
/// [`SendDrop::LinkHeader`], if the packet is not an Ethernet frame.
pub(crate) fn longest_frame_bytes(packet: &Packet, mtu: u32) -> Result<u32, SendDrop> {
    match packet.frame.data().get(12..14).and_then(<[u8]>::first_chunk) {
        Some(&[a, b]) if packet.headers.link == Link::Ethernet => {
            let tag_bytes = if TAGGED.contains(&[a, b]) { TAG_BYTES } else { 0 };
            Ok(mtu.saturating_add(ETHERNET_BYTES + tag_bytes))
        }
        _ => Err(SendDrop::LinkHeader),
    }
}
