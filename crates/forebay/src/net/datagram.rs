//! Datagrams as a reader gets them: in place in packet memory, in batches.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use forebay_rx::Packet;
use forebay_rx::hash::FlowHash;
use forebay_rx::packet::Shape;
use forebay_stack::network::compose::LinkAddresses;

use super::endpoint::Endpoint;
use super::message::DeviceIndex;
use super::neighbours::link_back;
use super::transmit::Between;

/// One datagram, or several of one sender that were merged (see [`gso_size`](Self::gso_size)).
pub struct Datagram {
    pub(super) packet: Packet,
    pub(super) answer: Option<Reply>,
    /// Scope of link-local addresses on the device that it came in on.
    scope_id: u32,
    /// Linear copy of a payload that is spread over several frames.
    together: Option<Box<[u8]>>,
    /// `truesize` of returned frames that are still charged to the socket.
    pub(super) freed_bytes: u32,
}

/// Addresses of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    pub(super) between: Between,
    pub(super) back: Option<LinkAddresses>,
}

/// Error: the answer, of this length in bytes, does not fit in the datagram's frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoRoom(pub usize);

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes do not fit where the datagram lies: send them as another one", self.0)
    }
}

impl std::error::Error for NoRoom {}

impl Datagram {
    pub(super) fn of(packet: Packet, scope_id: u32) -> Self {
        let is_apart = packet.shape() == Shape::FragList;
        let together = is_apart.then(|| joined(&packet));
        Self { packet, answer: None, scope_id, together, freed_bytes: 0 }
    }

    /// Payload: of merged datagrams, that of the first one; once answered, the answer.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        if self.answer.is_some() {
            return self.packet.frame.data();
        }
        let payload = self.packet.view().payload();
        match (self.packet.shape(), &self.together) {
            (Shape::Gso(size), _) => payload.get(..size.get().into()).unwrap_or(payload),
            (Shape::FragList, Some(together)) => together,
            _ => payload,
        }
    }

    /// Payloads of the merged datagrams, in order. A datagram that was not merged has one.
    pub fn segments(&self) -> impl Iterator<Item = &[u8]> {
        let (alone, cut, merged) = match self.packet.shape() {
            Shape::Single | Shape::FragList => (Some(self.payload()), None, None),
            Shape::Gso(size) => {
                let chunks = self.packet.view().payload().chunks(size.get().into());
                (None, Some(chunks), None)
            }
            Shape::Merged(_) => (None, None, Some(self.packet.segments())),
        };
        let merged = merged.into_iter().flatten().map(|segment| segment.payload);
        alone.into_iter().chain(cut.into_iter().flatten()).chain(merged)
    }

    /// Payload length of each merged datagram but the last (`UDP_GRO`); 0 if not merged.
    #[must_use]
    pub fn gso_size(&self) -> u16 {
        self.packet.gso_size()
    }

    /// Sender. A link-local address has the scope of the device, if the kernel has that.
    #[must_use]
    pub fn source(&self) -> SocketAddr {
        let Between { destination: sender, .. } = self.way_back();
        scoped(sender, self.scope_id)
    }

    /// Destination: an address of this host, or a multicast or broadcast address. A link-local address has a scope as that of
    /// the sender has.
    #[must_use]
    pub fn destination(&self) -> SocketAddr {
        let Between { source: receiver, .. } = self.way_back();
        scoped(receiver, self.scope_id)
    }

    /// Time of arrival, in ns since 1970; 0 if the device has no timestamps.
    #[must_use]
    pub fn timestamp_ns(&self) -> u64 {
        self.packet.timestamp_ns
    }

    /// Traffic class: DSCP in the upper six bits, ECN in the lower two. 0 once answered.
    #[must_use]
    pub fn traffic_class(&self) -> u8 {
        if self.answer.is_some() {
            return 0;
        }
        traffic_class_of(&self.packet)
    }

    /// Time to live, or hop limit, as it arrived.
    #[must_use]
    pub fn ttl(&self) -> u8 {
        if self.answer.is_some() {
            return 0;
        }
        ttl_of(&self.packet)
    }

    /// Device that it came in on.
    #[must_use]
    pub fn device(&self) -> DeviceIndex {
        DeviceIndex(self.packet.headers.device)
    }

    /// Explicit congestion notification bits (RFC 3168).
    #[must_use]
    pub fn ecn(&self) -> u8 {
        self.traffic_class() & 3
    }

    /// Flow hash, by which the datagram was steered.
    #[must_use]
    pub fn hash(&self) -> FlowHash {
        self.packet.hash
    }

    /// Writes `payload` over the datagram as its answer, which
    /// [`send_replies`](super::UdpSocket::send_replies) sends back.
    ///
    /// # Errors
    /// If the answer does not fit in the datagram's frame; the datagram is then unchanged.
    pub fn reply(&mut self, payload: &[u8]) -> Result<(), NoRoom> {
        let answer = self
            .answer
            .unwrap_or_else(|| Reply { between: self.way_back(), back: link_back(&self.packet) });
        let frame = &mut self.packet.frame;
        if self.answer.is_none() {
            // Remove the headers: `send_replies` writes new ones.
            let headers_bytes = u32::from(self.packet.headers.payload_offset);
            frame.pull(headers_bytes.min(frame.len_bytes()));
        }
        if payload.len() > frame.room_mut().len() {
            if self.answer.is_none() {
                frame.push(self.packet.headers.payload_offset.into());
            }
            return Err(NoRoom(payload.len()));
        }
        if frame.follower_count() > 0 {
            let before = frame.truesize();
            drop(frame.take_followers());
            self.freed_bytes += before - frame.truesize();
        }
        frame.copy_from(payload);
        self.packet.set_gso_size(0);
        self.answer = Some(answer);
        Ok(())
    }

    /// Addresses of the answer: those of the datagram, swapped.
    fn way_back(&self) -> Between {
        if let Some(answer) = self.answer {
            return answer.between;
        }
        let nobody = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let view = self.packet.view();
        let (from, to) = view.ports().unwrap_or_default();
        Between {
            source: SocketAddr::new(view.destination().unwrap_or(nobody), to),
            destination: SocketAddr::new(view.source().unwrap_or(nobody), from),
        }
    }
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Datagram({} bytes from {})", self.payload().len(), self.source())
    }
}

pub(super) fn traffic_class_of(packet: &Packet) -> u8 {
    packet.view().traffic_class().unwrap_or(0)
}

pub(super) fn ttl_of(packet: &Packet) -> u8 {
    packet.view().ttl().unwrap_or(0)
}

/// An address as programs know it: with a scope if it is link-local (`ipv6_iface_scope_id`).
pub(super) fn scoped(address: SocketAddr, scope_id: u32) -> SocketAddr {
    let SocketAddr::V6(mut v6) = address else { return address };
    if v6.ip().is_unicast_link_local() {
        v6.set_scope_id(scope_id);
    }
    v6.into()
}

/// Payload of a datagram in several frames.
fn joined(packet: &Packet) -> Box<[u8]> {
    let mut payload = vec![0; packet.headers.payload_len.into()];
    let len = packet.copy_payload(&mut payload);
    payload.truncate(len);
    payload.into()
}

/// Datagrams read in one call. They count against the socket's receive buffer until they are
/// answered, replaced by the next batch, or dropped.
#[derive(Default)]
pub struct Datagrams {
    pub(super) datagrams: Vec<Datagram>,
    /// Socket that the datagrams were read from; `None` without datagrams, so that the socket can be closed.
    pub(super) of: Option<Arc<Endpoint>>,
    /// `truesize` of the datagrams already answered.
    pub(super) gone_bytes: u32,
}

impl Datagrams {
    /// Creates an empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of datagrams.
    #[must_use]
    pub fn len(&self) -> usize {
        self.datagrams.len()
    }

    /// True if the batch is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    /// Datagrams; those of each sender are in the order of arrival.
    pub fn iter(&self) -> std::slice::Iter<'_, Datagram> {
        self.datagrams.iter()
    }

    /// Mutable datagrams, in the same order, to be answered.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Datagram> {
        self.datagrams.iter_mut()
    }

    /// Returns the memory of the datagrams.
    pub fn clear(&mut self) {
        if let Some(of) = self.of.take() {
            of.give_back(self);
        }
    }
}

impl<'a> IntoIterator for &'a Datagrams {
    type Item = &'a Datagram;
    type IntoIter = std::slice::Iter<'a, Datagram>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a> IntoIterator for &'a mut Datagrams {
    type Item = &'a mut Datagram;
    type IntoIter = std::slice::IterMut<'a, Datagram>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.clear();
    }
}

impl fmt::Debug for Datagrams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.datagrams).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use etherparse::PacketBuilder;
    use forebay_rx::delivery::Batch;
    use forebay_rx::parse::Link;
    use forebay_rx::{CpuId, Handler, RxQueue};

    use super::super::rig::{Recording, host, own_address, pool, received};
    use super::super::{Net, NetConfig, stacks};
    use super::*;

    /// A batch whose datagrams are all gone does not keep a closed socket at its port.
    #[test]
    fn udp_11_empty_batch_holds_no_socket() {
        let state = host(vec![vec![Box::new(Recording::default()) as _]], NetConfig::TCP);
        let mut stack = stacks(&state, vec![None], None).remove(0);
        let (net, local) = (Net(state), SocketAddr::new(own_address(0), 53));
        let mut batch = Datagrams::new();
        let bind = || {
            let socket = net.bind(local).expect("the port is free");
            socket.set_nonblocking(true);
            socket
        };
        let socket = bind();
        assert_eq!(socket.try_recv_batch(&mut batch, 64), 0);
        drop(socket);
        let socket = bind();
        let error = socket.recv_batch(&mut batch, 64).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        drop(socket);
        let socket = bind();
        let mut pool = pool(1);
        let builder = PacketBuilder::ipv4([10, 9, 0, 2], [10, 9, 0, 1], 64).udp(4000, 53);
        let mut packets = vec![received(&mut pool, Link::Ip, builder)];
        let (cpu, rx_queue, packets) = (CpuId(0), RxQueue(0), &mut packets);
        stack.handle(&mut Batch { cpu, rx_queue, packets, notes: &[], pool: &mut pool });
        assert_eq!(socket.recv_batch(&mut batch, 64).unwrap(), 1);
        batch.iter_mut().for_each(|datagram| datagram.reply(&[8; 3]).unwrap());
        assert_eq!(socket.send_replies(&mut batch).unwrap(), 1);
        assert_eq!(socket.counts().rmem, 0, "what is answered is not charged");
        drop(socket);
        drop(bind());
    }
}
