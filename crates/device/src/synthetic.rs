//! Generated traffic: UDP flows with stamped payloads, for tests and measurements.
//!
//! Every payload begins with the stamp `STMP`, the flow (u32) and its sequence number in the flow
//! (u64), big-endian, so that a receiver can check order and completeness without other data.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_buf::Pool;
use forebay_rx::arrive::{Burst, PollRequest, Polled, RefusedFrame, SourceError};
use forebay_rx::packet::Arrival;
use forebay_rx::parse::checksum::Sum;
use forebay_rx::parse::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, Link};
use forebay_rx::{DropReason, Packet, Source};
use forebay_sys::random::Random;

use super::pace::{Pace, Rate};
use super::{LOOKS_PER_FRAME, Progress, QueueShare};

/// First bytes of a stamped payload.
pub const STAMP_MAGIC: [u8; 4] = *b"STMP";

/// Length of a stamp: magic, flow, sequence number.
pub const STAMP_BYTES: usize = 16;

/// Parameters of generated traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticPlan {
    /// Number of frames.
    pub frames: u64,
    /// Number of flows; at least one.
    pub flows: u32,
    /// Range of payload lengths, drawn uniformly; each at least [`STAMP_BYTES`].
    pub payload_bytes: (u16, u16),
    /// Range of the number of consecutive frames of one flow, drawn uniformly.
    pub run: (u32, u32),
    /// True for IPv6, false for IPv4.
    pub ipv6: bool,
    /// Seed that determines all draws.
    pub seed: u64,
    /// Rate.
    pub rate: Rate,
}

impl Default for SyntheticPlan {
    fn default() -> Self {
        Self {
            frames: 1_000_000,
            flows: 64,
            payload_bytes: (18, 18), // 60-byte frames
            run: (1, 8),
            ipv6: false,
            seed: 1,
            rate: Rate::Max,
        }
    }
}

/// Generator of synthetic traffic.
#[derive(Debug)]
pub struct SyntheticSource {
    plan: SyntheticPlan,
    random: Random,
    /// Number of frames generated of each flow.
    sequence: Vec<u64>,
    /// Flow of the current run, and the number of its frames left.
    run: (u32, u32),
    /// Number of the next frame.
    number: u64,
    payload_bytes: usize,
    pace: Pace,
    template: Template,
    /// For each flow, true if it belongs to the queue. Empty if one queue has all flows.
    shared_out: Vec<bool>,
    progress: Arc<Progress>,
}

impl SyntheticSource {
    /// Returns a source of the plan's traffic. With a `share`, only frames of that queue are
    /// yielded.
    #[must_use]
    pub fn new(mut plan: SyntheticPlan, share: Option<&QueueShare>) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a constant of 16")]
        let least = STAMP_BYTES as u16;
        let (first, last) = plan.payload_bytes;
        plan.payload_bytes = (first.max(least), last.max(first).max(least));
        plan.flows = plan.flows.max(1);
        plan.run.1 = plan.run.1.max(plan.run.0);
        let mut source = Self {
            random: Random::new(plan.seed),
            sequence: vec![0; plan.flows as usize],
            run: (0, 0),
            number: 0,
            payload_bytes: 0,
            pace: Pace::new(plan.rate),
            template: Template::new(plan.ipv6),
            shared_out: share.map(|share| shared_out(&plan, share)).unwrap_or_default(),
            progress: Arc::new(Progress { total: Some(plan.frames), ..Progress::default() }),
            plan,
        };
        source.draw();
        source
    }

    /// Returns the progress of the source, in frames.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Draws the flow and length of the next frame.
    fn draw(&mut self) {
        let (flow, left) = self.run;
        self.run = if left > 0 {
            (flow, left - 1)
        } else {
            let flow = self.random.below(self.plan.flows.into());
            let run = self.random.between(self.plan.run.0.into(), self.plan.run.1.into());
            (u32::try_from(flow).unwrap_or(0), u32::try_from(run.max(1) - 1).unwrap_or(0))
        };
        let (first, last) = self.plan.payload_bytes;
        let payload = self.random.between(first.into(), last.into());
        self.payload_bytes = usize::try_from(payload).unwrap_or(STAMP_BYTES);
    }
}

impl SyntheticSource {
    /// Generates the frame that was drawn, if it belongs to this queue.
    fn take(
        &self,
        due_ns: u64,
        pool: &mut Pool,
        packets: &mut Vec<Packet>,
    ) -> Result<(), RefusedFrame> {
        let (flow, _) = self.run;
        if self.shared_out.get(flow as usize) == Some(&false) {
            return Ok(());
        }
        let frame_bytes = self.template.frame_bytes(self.payload_bytes);
        let wire_len = u32::try_from(frame_bytes).unwrap_or(u32::MAX);
        let arrival = Arrival::of_frame(self.number);
        let Some(frame) = pool.allocate(wire_len) else {
            return Err(RefusedFrame { arrival, wire_len, reason: DropReason::NoBuffer });
        };
        let packet = Packet::received(frame, arrival, wire_len, Link::Ethernet);
        packets.push(Packet { timestamp_ns: due_ns, ..packet });
        if let Some(Packet { frame, .. }) = packets.last_mut() {
            frame.set_len(wire_len);
            self.template.write(frame.data_mut(), flow, self.sequence[flow as usize]);
        }
        Ok(())
    }
}

/// For each flow, true if it belongs to the queue.
fn shared_out(plan: &SyntheticPlan, share: &QueueShare) -> Vec<bool> {
    let has = |flow| {
        let frame = stamped_udp(flow, 0, STAMP_BYTES, plan.ipv6);
        let wire_len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        share.has(&frame, wire_len, Some(Link::Ethernet))
    };
    (0..plan.flows).map(has).collect()
}

impl Source for SyntheticSource {
    fn poll(
        &mut self,
        PollRequest { now_ns, max, may_wait, is_last }: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        for _ in 0..max * LOOKS_PER_FRAME {
            if burst.len() >= max {
                break;
            }
            if is_last || self.number == self.plan.frames {
                return Ok(Polled::Exhausted);
            }
            let due_ns = self.pace.due_ns(now_ns, self.number, 0);
            if due_ns > now_ns {
                return Ok(Polled::IdleUntil { now_ns: due_ns });
            }
            match self.take(due_ns, pool, &mut burst.packets) {
                Ok(()) => {}
                // No memory is free: the same frame is generated in the next poll.
                Err(_) if may_wait => break,
                Err(refused) => burst.refused.push(refused),
            }
            self.sequence[self.run.0 as usize] += 1;
            self.number += 1;
            self.draw();
        }
        self.progress.done.store(self.number, Ordering::Relaxed);
        Ok(Polled::Ready)
    }
}

/// Ethernet, network and UDP headers of generated frames, without the fields that vary.
#[derive(Debug)]
struct Template {
    headers: Vec<u8>,
    network: SyntheticNetwork,
}

#[derive(Clone, Copy, Debug)]
enum SyntheticNetwork {
    Ipv4,
    Ipv6,
}

const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const UDP: u8 = 17;
const HOPS: u8 = 64;
const FIRST_PORT: u16 = 1024;
const PORTS: u32 = 60_000;
const DESTINATION_PORT: u16 = 9000;

impl Template {
    fn new(ipv6: bool) -> Self {
        let mut headers = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        let network = if ipv6 {
            let prefix = u128::from(Ipv6Addr::new(0xfdaa, 0, 0, 0, 0, 0, 0, 0));
            headers.extend(ETHERTYPE_IPV6.to_be_bytes());
            headers.extend([0x60, 0, 0, 0, 0, 0, UDP, HOPS]);
            headers.extend(prefix.to_be_bytes());
            headers.extend((prefix | 1 << 64).to_be_bytes());
            SyntheticNetwork::Ipv6
        } else {
            headers.extend(ETHERTYPE_IPV4.to_be_bytes());
            headers.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, HOPS, UDP, 0, 0]);
            headers.extend(Ipv4Addr::new(10, 0, 0, 0).octets());
            headers.extend(Ipv4Addr::new(11, 9, 0, 1).octets());
            SyntheticNetwork::Ipv4
        };
        headers.extend([0, 0]);
        headers.extend(DESTINATION_PORT.to_be_bytes());
        headers.extend([0; 4]);
        Self { headers, network }
    }

    fn frame_bytes(&self, payload_bytes: usize) -> usize {
        self.headers.len() + payload_bytes.max(STAMP_BYTES)
    }

    /// Writes a frame that fills `frame`, whose length is [`frame_bytes`](Self::frame_bytes).
    fn write(&self, frame: &mut [u8], flow: u32, sequence: u64) {
        let (headers, payload) = frame.split_at_mut(self.headers.len());
        headers.copy_from_slice(&self.headers);
        let (stamp, filler) = payload.split_at_mut(STAMP_BYTES);
        stamp[..4].copy_from_slice(&STAMP_MAGIC);
        stamp[4..8].copy_from_slice(&flow.to_be_bytes());
        stamp[8..].copy_from_slice(&sequence.to_be_bytes());
        filler.fill(0); // zeros add nothing to the checksum
        let udp_len = length(UDP_BYTES + STAMP_BYTES + filler.len());

        let (network, udp) = headers[ETHERNET_BYTES..].split_at_mut(self.network_bytes());
        let pseudo = match self.network {
            SyntheticNetwork::Ipv4 => write_ipv4(network, flow, udp_len),
            SyntheticNetwork::Ipv6 => write_ipv6(network, flow, udp_len),
        };
        let port = FIRST_PORT + u16::try_from(flow % PORTS).unwrap_or(0);
        udp[..2].copy_from_slice(&port.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        let sum = pseudo.plus_word(UDP.into()).plus_len(udp_len.into());
        let checksum = match !sum.plus(Sum::of(udp)).plus(Sum::of(stamp)).fold() {
            0 => u16::MAX,
            checksum => checksum,
        };
        udp[6..].copy_from_slice(&checksum.to_be_bytes());
    }

    fn network_bytes(&self) -> usize {
        match self.network {
            SyntheticNetwork::Ipv4 => IPV4_BYTES,
            SyntheticNetwork::Ipv6 => IPV6_BYTES,
        }
    }
}

/// Fills in the fields that vary, and returns the sum of the addresses.
fn write_ipv4(header: &mut [u8], flow: u32, udp_len: u16) -> Sum {
    let total_len = length(IPV4_BYTES + usize::from(udp_len));
    header[2..4].copy_from_slice(&total_len.to_be_bytes());
    header[13..16].copy_from_slice(&flow.to_be_bytes()[1..]);
    let checksum = !Sum::of(header).fold();
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    Sum::of(&header[12..20])
}

/// Fills in the fields that vary, and returns the sum of the addresses.
fn write_ipv6(header: &mut [u8], flow: u32, udp_len: u16) -> Sum {
    header[4..6].copy_from_slice(&udp_len.to_be_bytes());
    header[20..24].copy_from_slice(&flow.to_be_bytes());
    Sum::of(&header[8..40])
}

fn length(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

/// Builds an Ethernet frame with a stamped UDP datagram of `payload_bytes`, at least
/// [`STAMP_BYTES`].
#[must_use]
pub fn stamped_udp(flow: u32, sequence: u64, payload_bytes: usize, ipv6: bool) -> Vec<u8> {
    let template = Template::new(ipv6);
    let mut frame = vec![0; template.frame_bytes(payload_bytes)];
    template.write(&mut frame, flow, sequence);
    frame
}

#[cfg(test)]
mod tests {
    use forebay_buf::Region;
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use forebay_rx::RxQueue;
    use forebay_rx::hash::{Hasher, Indirection};
    use forebay_rx::parse::{Checksum, Transport, Verify, View, parse};

    use super::*;

    /// A queue that gets none of the flows delays its CPU no longer than one that gets all.
    #[test]
    fn promise_3_queue_without_flows_polls_briefly() {
        let hasher = Arc::new(Hasher::keyed(b"the same, always", false));
        let plan = SyntheticPlan { flows: 1, frames: u64::MAX, ..SyntheticPlan::default() };
        let ask = PollRequest { now_ns: 0, max: 4, may_wait: false, is_last: false };
        let taken = [0, 1].map(|number| {
            let indirection = Indirection::new(2);
            let queue = RxQueue(number);
            let share = QueueShare { queue, indirection, hasher: Arc::clone(&hasher) };
            let mut source = SyntheticSource::new(plan.clone(), Some(&share));
            let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 64 }]];
            let region = Region::allocate(region_bytes(&shares));
            let mut pool = carve(region, &shares).unwrap().remove(0);
            let mut burst = Burst::default();
            assert_eq!(source.poll(ask, &mut pool, &mut burst).unwrap(), Polled::Ready);
            burst.packets.len()
        });
        assert_eq!(taken.iter().sum::<usize>(), 4, "one of them has the flow");
    }

    #[test]
    fn stamped_frames_have_right_checksums() {
        for (ipv6, network) in [(false, Checksum::Good), (true, Checksum::Unknown)] {
            for payload_bytes in [0, 16, 17, 18, 500, 1472] {
                let frame = stamped_udp(70_001, 5, payload_bytes, ipv6);
                let wire_len = u32::try_from(frame.len()).unwrap();
                let headers = parse(&frame, wire_len, Link::Ethernet, Verify::Checksums);
                assert_eq!(headers.transport, Transport::Udp);
                assert_eq!((headers.ip_checksum, headers.l4_checksum), (network, Checksum::Good));
                let view = View::new(&frame, &headers);
                assert_eq!(view.payload().len(), payload_bytes.max(STAMP_BYTES));
                assert_eq!(view.payload()[..4], STAMP_MAGIC);
                assert_eq!(view.payload()[4..8], 70_001u32.to_be_bytes());
                assert_eq!(view.payload()[8..16], 5u64.to_be_bytes());
            }
        }
    }
}
