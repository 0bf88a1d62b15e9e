//! Software segmentation of GSO packets.

use std::fmt;

use forebay_buf::Pool;

use super::resegment::{ResegmentPlan, resegment};
use crate::nonlinear::PieceReader;
use crate::packet::{Packet, Shape};
use crate::parse::checksum::Sum;

/// Cuts a [GSO packet](Packet::is_gso) into the frames that the kernel would send
/// (`tcp_gso_segment`, `__udp_gso_segment`), each in a frame of `pool`, oldest segment first. IPv4
/// ids increase by one, the sequence number by the preceding payload; PSH and FIN are kept on the
/// last segment, CWR on the first one; lengths and checksums are correct. The frame of the GSO
/// packet is freed. A merged packet is [resegmented](resegment) instead; any other goes to `out`
/// unchanged.
///
/// # Errors
/// Returns the packet, to be dropped with a reason, if the pool has no frame for a segment, or if
/// the headers of a copied tunnel were edited so that it is no longer recognized. `out` is unchanged
/// then.
pub fn cut(packet: Packet, pool: &mut Pool, out: &mut Vec<Packet>) -> Result<(), Packet> {
    if !packet.is_gso() {
        resegment(packet, out);
        return Ok(());
    }
    let Some(mut cutter) = SegmentCutter::new(&packet) else { return Err(packet) };
    let first = out.len();
    while cutter.left() > 0 {
        let Some(segment) = cutter.cut_next(pool) else {
            // All segments or none: a part of a packet would count as the whole.
            out.drain(first..).for_each(|segment| pool.put(segment.frame));
            return Err(packet);
        };
        out.push(segment);
    }
    pool.put(packet.frame);
    Ok(())
}

/// Cuts a [GSO packet](Packet::is_gso) as [`cut()`] does, one segment at a time, for those who have less memory than all
/// segments need.
pub struct SegmentCutter<'a> {
    whole: &'a Packet,
    plan: ResegmentPlan,
    /// Reader of the payload of the next segment.
    payload: PieceReader<'a>,
    /// Number of the next segment.
    next: u32,
}

impl<'a> SegmentCutter<'a> {
    /// Begins with the first segment. `None` if this is no GSO packet, or a copied tunnel whose headers were edited so that
    /// it is no longer recognized.
    #[must_use]
    pub fn new(whole: &'a Packet) -> Option<Self> {
        let Shape::Gso(size) = whole.shape() else { return None };
        let plan = ResegmentPlan::of(whole, size);
        let payload = PieceReader::at(&whole.frame, whole.headers.payload_offset.into());
        // Without headers, none can be made for the segments.
        plan.has_headers().then_some(Self { whole, plan, payload, next: 0 })
    }

    /// Number of segments still to be cut.
    #[must_use]
    pub fn left(&self) -> u32 {
        self.plan.segments() - self.next
    }

    /// Cuts the next segment into a frame of `pool`. `None` if that has none, or nothing is left.
    pub fn cut_next(&mut self, pool: &mut Pool) -> Option<Packet> {
        if self.left() == 0 {
            return None;
        }
        let segment = cut_out(self.next, &self.plan, self.whole, &mut self.payload, pool)?;
        self.next += 1;
        Some(segment)
    }
}

impl fmt::Debug for SegmentCutter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SegmentCutter({} of {:?})", self.next, self.whole)
    }
}

/// Segment of this number, with the next payload, which is summed while it is copied.
fn cut_out(
    number: u32,
    plan: &ResegmentPlan,
    whole: &Packet,
    payload: &mut PieceReader<'_>,
    pool: &mut Pool,
) -> Option<Packet> {
    let header_len = whole.headers.payload_offset;
    let header = whole.frame.data().get(..header_len.into())?;
    let (_, len) = plan.place(number);
    let mut frame = pool.allocate(u32::from(header_len) + len)?;
    frame.set_len(u32::from(header_len) + len);
    let (to_header, to_payload) = frame.data_mut().split_at_mut(header.len());
    to_header.copy_from_slice(header);
    let (mut sum, mut is_odd) = (Sum::default(), false);
    let read = payload.read_with(to_payload, |to, from| {
        sum = sum.plus(Sum::taken(forebay_buf::sum::copy_and_sum(to, from)).behind(is_odd));
        is_odd ^= !from.len().is_multiple_of(2);
    });
    if read.is_none() {
        pool.put(frame);
        return None;
    }
    let received = Packet::received(frame, whole.arrival, 0, whole.headers.link);
    let mut segment = Packet { timestamp_ns: whole.timestamp_ns, hash: whole.hash, ..received };
    plan.rewrite(number, sum, &mut segment);
    Some(segment)
}
