//! Sink over a packet socket. One call sends many packets. A merged packet is one send, which the
//! kernel or the device segments.

use std::io::IoSlice;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;

use forebay_rx::Packet;
use forebay_rx::coalesce::gso::describe;
use forebay_rx::coalesce::resegment;
use forebay_rx::parse::{Headers, Link};
use forebay_rx::sink::{SendDrop, Sent, Sink, SinkCounters, SinkError};
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::Interface;
use forebay_sys::packet::PacketSocket;
use rustix::io::Errno;
use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, sendmmsg};

use super::open::{link_of, refused};
use crate::cutting::CutMemory;

/// Maximum number of packets in one call.
const BATCH_MAX: usize = 64;

/// Maximum number of fragments of a send: `UIO_MAXIOV` (`linux/uio.h`).
const IOV_MAX: usize = 1024;

/// Memory that the kernel may hold for a device slower than its senders: about a hundred of the
/// largest packets.
const SEND_BUFFER_BYTES: usize = 8 << 20;

/// One CPU's sink of an interface. Packets pass the queueing discipline, so that the settings of
/// `tc` hold and taps see the packets; `PACKET_QDISC_BYPASS` gained only 0 to 5 % of the kernel's
/// 520 ns a packet on a veth.
///
/// Packets are sent with their link header. A packet of several segments is sent whole if each
/// segment fits the MTU. An IP packet without a link header, as from a TUN, cannot be sent on an
/// Ethernet, because its destination address is unknown; it is dropped as [`SendDrop::LinkHeader`].
pub struct PacketSink {
    socket: PacketSocket,
    interface: Interface,
    /// Link type of the interface's frames.
    link: Link,
    /// Number of packets per call: fewer while the kernel has no room for all.
    batch: usize,
    counters: Arc<SinkCounters>,
    /// Memory for the segments of GSO packets that must be cut.
    cutting: CutMemory,
}

/// Result for the first packets of a list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SendStep {
    /// Number of packets sent.
    Sent(usize),
    /// The first packet was dropped.
    Dropped(SendDrop),
    /// The first packet has several segments, and the kernel does not cut it.
    MustBeCut,
    /// The interface does not exist any more.
    Gone,
}

impl PacketSink {
    /// Opens a sink. The interface need not be up yet.
    ///
    /// # Errors
    /// If the kernel refuses a step, or the interface's frames are neither Ethernet nor IP.
    pub fn open(interface: &Interface) -> Result<Self> {
        let named = |what| refused(interface, what);
        let socket = PacketSocket::open().map_err(named("open a packet socket to send on it"))?;
        socket.use_vnet_headers().map_err(named("tell it of offloads (PACKET_VNET_HDR)"))?;
        socket.set_send_buffer(SEND_BUFFER_BYTES).map_err(named("set its SO_SNDBUF"))?;
        socket.send_to(interface.index.0).map_err(named("bind a packet socket to it"))?;
        Ok(Self {
            link: link_of(interface, &socket)?,
            socket,
            interface: interface.clone(),
            batch: BATCH_MAX,
            counters: Arc::default(),
            cutting: CutMemory::default(),
        })
    }

    /// Reads the MTU again, since it can change. The MTU of a removed interface keeps its last
    /// value.
    fn update_mtu(&mut self) {
        let Interface { index, mtu, .. } = &mut self.interface;
        *mtu = self.socket.mtu(index.0).unwrap_or(*mtu);
    }

    /// Reason to drop a packet before it reaches the kernel, if there is one.
    fn refusal(&self, packet: &Packet) -> Option<SendDrop> {
        let Headers { link, network_offset, payload_offset, .. } = packet.headers;
        if link != self.link {
            // The kernel adds no link header (SOCK_RAW), and does not strip one.
            return Some(SendDrop::LinkHeader);
        }
        // Of a GSO packet, the kernel does not check the segment length against the MTU
        // (`packet_snd`).
        let headers_len = u32::from(payload_offset).saturating_sub(network_offset.into());
        let is_too_long = packet.gso_size() > 0
            && headers_len + u32::from(packet.gso_size()) > self.interface.mtu;
        is_too_long.then_some(SendDrop::TooLong)
    }

    /// Sends the first packets, or returns why the very first one is not sent.
    fn step(&mut self, packets: &mut [Packet]) -> SendStep {
        let mut going = 0;
        for packet in packets.iter().take(self.batch) {
            let step = match self.refusal(packet) {
                Some(reason) => SendStep::Dropped(reason),
                None if packet.is_merged_tunnel() || is_of_too_many(packet) => SendStep::MustBeCut,
                None => {
                    going += 1;
                    continue;
                }
            };
            if going == 0 {
                return step;
            }
            // The packets before this one are sent first, in order.
            break;
        }
        let sent = loop {
            match hand_over(&self.socket, &mut packets[..going]) {
                Err(Errno::INTR) => {} // a signal came before the first packet was sent
                sent => break sent,
            }
        };
        match sent {
            Ok(sent) => {
                self.batch = (self.batch * 2).min(BATCH_MAX);
                SendStep::Sent(sent.clamp(1, going))
            }
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                // The next packets are sent one by one, so that each one has its own chance of
                // room.
                self.batch = 1;
                SendStep::Dropped(SendDrop::Full)
            }
            Err(Errno::MSGSIZE) => SendStep::Dropped(SendDrop::TooLong),
            Err(Errno::NETDOWN) => SendStep::Dropped(SendDrop::Down),
            Err(Errno::NXIO | Errno::NODEV) => SendStep::Gone,
            Err(Errno::INVAL | Errno::OPNOTSUPP) if packets[0].gso_size() > 0 => {
                SendStep::MustBeCut
            }
            Err(_) => SendStep::Dropped(SendDrop::Refused),
        }
    }
}

impl Sink for PacketSink {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<(), SinkError> {
        if packets.iter().any(|packet| packet.gso_size() > 0) {
            self.update_mtu();
        }
        let counters = Arc::clone(&self.counters);
        let mut cutting = std::mem::take(&mut self.cutting);
        let flow = send_all(packets, &mut cutting, &counters, |packets| self.step(packets));
        self.cutting = cutting;
        match flow {
            Continue(()) => Ok(()),
            Break(()) => Err(Error::DeviceGone { name: self.interface.name.clone() }.into()),
        }
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }
}

/// Sends packets one step at a time, and counts the results. A packet to be segmented is replaced
/// by its segments, at the end of the vector, unless it is a GSO packet. Stops when the interface is gone.
fn send_all(
    packets: &mut Vec<Packet>,
    cutting: &mut CutMemory,
    counters: &SinkCounters,
    mut step: impl FnMut(&mut [Packet]) -> SendStep,
) -> ControlFlow<()> {
    let mut cut = Vec::new();
    let mut flow = Continue(());
    let mut next = 0;
    while next < packets.len() && flow.is_continue() {
        match step(&mut packets[next..]) {
            SendStep::Sent(count) => {
                let mut sent = Sent::default();
                packets[next..next + count].iter().for_each(|packet| sent.add(packet));
                counters.add_sent(sent);
                next += count;
            }
            SendStep::Dropped(reason) => {
                counters.add_dropped(reason, 1);
                next += 1;
            }
            SendStep::MustBeCut => {
                let mut sending = SegmentSending::default();
                if packets[next].is_gso() {
                    flow = sending.cut_and_send(&packets[next], cutting, &mut step);
                    next += 1;
                } else {
                    let mut segments = Vec::new();
                    resegment(packets.remove(next), &mut segments);
                    flow = sending.send(&mut segments, &mut step);
                    cut.append(&mut segments);
                }
                sending.count(counters);
            }
            SendStep::Gone => flow = Break(()),
        }
    }
    counters.add_dropped(SendDrop::Down, (packets.len() - next) as u64);
    packets.append(&mut cut);
    flow
}

/// Sending of the segments of one packet, which counts as sent if all of them are.
#[derive(Default)]
struct SegmentSending {
    sent: Sent,
    /// Reason for which the first of those was dropped that could not be sent.
    lost: Option<SendDrop>,
}

impl SegmentSending {
    /// Sends segments. Stops when the interface is gone.
    fn send(
        &mut self,
        segments: &mut [Packet],
        step: &mut impl FnMut(&mut [Packet]) -> SendStep,
    ) -> ControlFlow<()> {
        let mut flow = Continue(());
        let mut next = 0;
        while next < segments.len() && flow.is_continue() {
            let reason = match step(&mut segments[next..]) {
                SendStep::Sent(count) => {
                    segments[next..next + count].iter().for_each(|segment| self.sent.add(segment));
                    next += count;
                    continue;
                }
                SendStep::Dropped(reason) => reason,
                SendStep::MustBeCut => SendDrop::Refused, // a segment is not cut again
                SendStep::Gone => {
                    flow = Break(());
                    SendDrop::Down
                }
            };
            self.lost.get_or_insert(reason);
            next += 1;
        }
        flow
    }

    /// Cuts a GSO packet, and sends its segments.
    fn cut_and_send(
        &mut self,
        packet: &Packet,
        cutting: &mut CutMemory,
        step: &mut impl FnMut(&mut [Packet]) -> SendStep,
    ) -> ControlFlow<()> {
        let mut flow = Continue(());
        let is_cut = cutting.cut(packet, |segments| {
            flow = self.send(segments, step);
            flow
        });
        if !is_cut {
            self.lost.get_or_insert(SendDrop::Refused);
        }
        flow
    }

    fn count(mut self, counters: &SinkCounters) {
        self.sent.packets = u64::from(self.lost.is_none());
        counters.add_sent(self.sent);
        if let Some(reason) = self.lost {
            counters.add_dropped(reason, 1);
        }
    }
}

/// True if a packet has more fragments than the kernel gathers in a send. Only merged packets can.
fn is_of_too_many(packet: &Packet) -> bool {
    packet.is_nonlinear() && packet.is_merged() && packet.fragments().count() >= IOV_MAX
}

/// Hands packets to the kernel, in order. Returns how many it took, at least one; an error is the
/// first packet's.
fn hand_over(socket: &PacketSocket, packets: &mut [Packet]) -> Result<usize, Errno> {
    let headers: Vec<_> = packets.iter_mut().map(|packet| describe(packet).to_bytes()).collect();
    let mut slices = Vec::with_capacity(packets.len() * 2);
    let mut ends = Vec::with_capacity(packets.len() + 1);
    ends.push(0);
    for (packet, header) in packets.iter().zip(&headers) {
        slices.push(IoSlice::new(header));
        slices.extend(packet.fragments().map(IoSlice::new));
        ends.push(slices.len());
    }
    let mut nothing: Vec<_> = packets.iter().map(|_| SendAncillaryBuffer::default()).collect();
    let places = ends.windows(2).zip(&mut nothing);
    let mut messages: Vec<_> =
        places.map(|(place, nothing)| MMsgHdr::new(&slices[place[0]..place[1]], nothing)).collect();
    sendmmsg(socket, &mut messages, SendFlags::DONTWAIT)
}

#[cfg(test)]
mod tests {
    use forebay_buf::pool::{ChunkClass, carve, region_bytes};
    use forebay_buf::{Pool, Region};
    use forebay_rx::arrive::PollStatus;
    use forebay_rx::coalesce::{CoalesceConfig, Coalescer};
    use forebay_rx::hash::FlowHash;
    use forebay_rx::packet::Arrival;
    use forebay_rx::parse::{Verify, parse_into};

    use super::*;

    fn pool() -> Pool {
        let shares = [vec![ChunkClass { chunk_bytes: 2048, chunks: 64 }]];
        carve(Region::allocate(region_bytes(&shares)), &shares).unwrap().remove(0)
    }

    /// Datagrams of one payload byte each, from `marks`, of the flow from port `from`.
    fn datagrams(from: u16, marks: &[u8], pool: &mut Pool) -> Vec<Packet> {
        let made = marks.iter().map(|&mark| {
            let addresses = ([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]);
            let builder = etherparse::PacketBuilder::ethernet2(addresses.0, addresses.1)
                .ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64)
                .udp(from, 9);
            let mut bytes = Vec::new();
            builder.write(&mut bytes, &[mark]).unwrap();
            let mut frame = pool.allocate(100).unwrap();
            frame.copy_from(&bytes);
            let mut packet = Packet::received(frame, Arrival(mark.into()), 43, Link::Ethernet);
            parse_into(&mut packet.headers, &bytes, 43, None, Verify::Checksums);
            Packet { hash: FlowHash(from.into()), ..packet }
        });
        made.collect()
    }

    fn merged(mut packets: Vec<Packet>) -> Vec<Packet> {
        let mut coalescer = Coalescer::new(CoalesceConfig::default(), Arc::default());
        let mut out = Vec::new();
        coalescer.coalesce(&mut packets, 0, &mut out);
        coalescer.end_poll(PollStatus::Last, 0, &mut out);
        out
    }

    fn marks(packets: &[Packet]) -> Vec<u8> {
        packets.iter().flat_map(|packet| packet.view().payload().to_vec()).collect()
    }

    #[test]
    fn promise_1_uncut_packet_leaves_as_segments() {
        let mut pool = pool();
        let mut packets = datagrams(1, &[1], &mut pool);
        packets.append(&mut merged(datagrams(2, &[2, 3, 4], &mut pool)));
        packets.append(&mut datagrams(1, &[5, 6], &mut pool));
        assert_eq!(packets.len(), 4);
        let counters = SinkCounters::default();
        let mut wire = Vec::new();
        // A kernel that takes two packets at a time, and none with several segments.
        let flow = send_all(&mut packets, &mut CutMemory::default(), &counters, |packets| {
            let going = packets.iter().take(2).take_while(|packet| packet.gso_size() == 0).count();
            wire.extend(marks(&packets[..going]));
            if going == 0 { SendStep::MustBeCut } else { SendStep::Sent(going) }
        });
        assert_eq!(flow, Continue(()));
        assert_eq!(wire, [1, 2, 3, 4, 5, 6]);
        assert_eq!((counters.packets(), counters.frames()), (4, 6));
        assert_eq!(counters.dropped_in_all(), 0);
        assert_eq!(packets.len(), 6, "all come back, segment by segment");
    }

    #[test]
    fn promise_2_partly_sent_packet_counts_dropped_once() {
        let mut pool = pool();
        let mut packets = merged(datagrams(2, &[1, 2, 3, 4], &mut pool));
        packets.append(&mut datagrams(1, &[5], &mut pool));
        let counters = SinkCounters::default();
        let flow = send_all(&mut packets, &mut CutMemory::default(), &counters, |packets| {
            match packets[0].gso_size() {
                0 if [2, 3].contains(&marks(packets)[0]) => SendStep::Dropped(SendDrop::Full),
                0 => SendStep::Sent(1),
                _ => SendStep::MustBeCut,
            }
        });
        assert_eq!(flow, Continue(()));
        assert_eq!((counters.packets(), counters.frames()), (1, 3));
        assert_eq!(counters.dropped(SendDrop::Full), 1);
        assert_eq!(counters.dropped_in_all(), 1);
    }

    #[test]
    fn promise_2_interface_gone_counts_the_rest() {
        for gone_at in 1..=6 {
            let mut pool = pool();
            let mut packets = datagrams(1, &[1], &mut pool);
            packets.append(&mut merged(datagrams(2, &[2, 3, 4], &mut pool)));
            packets.append(&mut datagrams(1, &[5, 6], &mut pool));
            let counters = SinkCounters::default();
            let flow =
                send_all(
                    &mut packets,
                    &mut CutMemory::default(),
                    &counters,
                    |packets| match packets[0].gso_size() {
                        0 if marks(packets)[0] == gone_at => SendStep::Gone,
                        0 => SendStep::Sent(1),
                        _ => SendStep::MustBeCut,
                    },
                );
            assert_eq!(flow, Break(()));
            assert_eq!(counters.packets() + counters.dropped(SendDrop::Down), 4, "{gone_at}");
            assert_eq!(counters.frames(), u64::from(gone_at) - 1);
            let frames: u32 = packets.iter().map(Packet::wire_count).sum();
            assert_eq!(frames, 6, "all come back");
        }
    }
}
