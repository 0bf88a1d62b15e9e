//! The way out over a packet socket: many packets in a call, a merged one as one send that the kernel
//! or the device cuts.

use std::io::IoSlice;
use std::sync::Arc;

use path::Packet;
use path::coalesce::gso::describe;
use path::coalesce::resegment;
use path::parse::{Headers, Link};
use rustix::io::Errno;
use rustix::net::{MMsgHdr, SendAncillaryBuffer, SendFlags, sendmmsg};

use super::{link_of, refused};
use crate::device::sink::{SendDrop, Sent, Sink, SinkCounters};
use crate::error::{Error, Result};
use crate::sys::interface::Interface;
use crate::sys::packet::PacketSocket;

/// The most packets that are handed to the kernel in one call.
const BATCH_MAX: usize = 64;

/// What the kernel may hold for a device that is slower than we are: about a hundred of the largest
/// packets.
const SEND_BUFFER_BYTES: usize = 8 << 20;

/// One CPU's way out of an interface.
///
/// Packets go as they are, with their link header. One of several segments goes whole, if each of
/// them fits the MTU. An IP packet without a link header, as a TUN gives it, cannot go onto an
/// Ethernet, for there is nobody to say to which station; it is dropped as
/// [`SendDrop::LinkHeader`].
pub struct PacketSink {
    socket: PacketSocket,
    interface: Interface,
    /// What the interface's frames begin with.
    link: Link,
    /// How many packets are handed over in a call: fewer while there is no room for all.
    batch: usize,
    counters: Arc<SinkCounters>,
}

/// What became of the first of some packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// So many were sent.
    Sent(usize),
    /// The first one was dropped.
    Dropped(SendDrop),
    /// The first one is of several segments, and the kernel does not cut it.
    MustBeCut,
}

impl PacketSink {
    /// Opens a way out. The interface need not be up yet.
    ///
    /// # Errors
    /// What the kernel refuses, by name; an interface whose frames are neither Ethernet's nor IP's.
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
        })
    }

    /// Asks for the MTU anew, as it may have changed. An interface that is gone keeps its last.
    fn update_mtu(&mut self) {
        let Interface { index, mtu, .. } = &mut self.interface;
        *mtu = self.socket.mtu(index.0).unwrap_or(*mtu);
    }

    /// Why a packet cannot go out, if it cannot.
    fn refusal(&self, packet: &Packet) -> Option<SendDrop> {
        let Headers { link, network_offset, payload_offset, .. } = packet.headers;
        if link != self.link {
            return Some(SendDrop::LinkHeader);
        }
        // The kernel only looks at the length of what is not to be cut.
        let headers_len = u32::from(payload_offset).saturating_sub(network_offset.into());
        let is_too_long =
            packet.gso_size > 0 && headers_len + u32::from(packet.gso_size) > self.interface.mtu;
        is_too_long.then_some(SendDrop::TooLong)
    }

    /// Sends the first packets, or says why the very first is not sent.
    fn step(&mut self, packets: &mut [Packet]) -> Result<Step> {
        let mut going = 0;
        for packet in packets.iter().take(self.batch) {
            match self.refusal(packet) {
                None => going += 1,
                Some(reason) if going == 0 => return Ok(Step::Dropped(reason)),
                Some(_) => break,
            }
        }
        match hand_over(&self.socket, &mut packets[..going]) {
            Ok(sent) => {
                self.batch = (self.batch * 2).min(BATCH_MAX);
                Ok(Step::Sent(sent.min(going)))
            }
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                // Each of the others is a try of its own.
                self.batch = 1;
                Ok(Step::Dropped(SendDrop::Full))
            }
            Err(Errno::MSGSIZE) => Ok(Step::Dropped(SendDrop::TooLong)),
            Err(Errno::NETDOWN) => Ok(Step::Dropped(SendDrop::Down)),
            Err(Errno::NXIO | Errno::NODEV) => {
                Err(Error::DeviceGone { name: self.interface.name.clone() })
            }
            Err(Errno::INVAL | Errno::OPNOTSUPP) if packets[0].gso_size > 0 => Ok(Step::MustBeCut),
            Err(_) => Ok(Step::Dropped(SendDrop::Refused)),
        }
    }

    /// Sends a packet as its segments, which are left in `done`. It counts as sent if all are.
    fn send_cut(&mut self, packet: Packet, done: &mut Vec<Packet>) -> Result<()> {
        let first = done.len();
        resegment(packet, done);
        let mut lost = None;
        let mut sent = Sent::default();
        let mut next = first;
        while next < done.len() {
            match self.step(&mut done[next..])? {
                Step::Sent(count) => {
                    done[next..next + count].iter().for_each(|segment| sent.add(segment));
                    next += count;
                }
                Step::Dropped(reason) => {
                    lost.get_or_insert(reason);
                    next += 1;
                }
                // It came whole from a kernel that cuts such packets.
                Step::MustBeCut => {
                    lost.get_or_insert(SendDrop::Refused);
                    next += 1;
                }
            }
        }
        sent.packets = u64::from(lost.is_none());
        self.counters.add_sent(sent);
        if let Some(reason) = lost {
            self.counters.add_dropped(reason, 1);
        }
        Ok(())
    }
}

impl Sink for PacketSink {
    fn send(&mut self, packets: &mut Vec<Packet>) -> Result<()> {
        if packets.iter().any(|packet| packet.gso_size > 0) {
            self.update_mtu();
        }
        let mut cut = Vec::new();
        let mut next = 0;
        while next < packets.len() {
            match self.step(&mut packets[next..])? {
                Step::Sent(count) => {
                    let mut sent = Sent::default();
                    packets[next..next + count].iter().for_each(|packet| sent.add(packet));
                    self.counters.add_sent(sent);
                    next += count;
                }
                Step::Dropped(reason) => {
                    self.counters.add_dropped(reason, 1);
                    next += 1;
                }
                Step::MustBeCut => self.send_cut(packets.remove(next), &mut cut)?,
            }
        }
        packets.append(&mut cut);
        Ok(())
    }

    fn counters(&self) -> &Arc<SinkCounters> {
        &self.counters
    }
}

/// Hands packets to the kernel, in order, and returns how many it took; at least one, or its error is
/// the first one's.
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
