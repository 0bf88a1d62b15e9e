//! Datagrams of calls: one that was received, and one to be sent.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};

use forebay::net::Datagram;
use forebay::net::message::{DeviceIndex, Received};
use rustix::io::Errno;

use crate::ancillary::{About, SendControl};
use crate::runtime::{interface_of, running};

/// One datagram read.
pub(crate) enum Message<'a> {
    /// A datagram in place.
    Taken(&'a Datagram),
    /// Copy of a datagram that stays in the queue, and its description.
    Peeked(&'a [u8], &'a Received),
}

impl Message<'_> {
    pub(crate) fn about(&self) -> About {
        match self {
            Self::Taken(datagram) => About::from(*datagram),
            Self::Peeked(_, received) => About::from(*received),
        }
    }

    pub(crate) fn source(&self) -> SocketAddr {
        match self {
            Self::Taken(datagram) => datagram.source(),
            Self::Peeked(_, received) => received.source,
        }
    }

    /// Interface that it came in on.
    pub(crate) fn interface(&self) -> u32 {
        interface_of(self.device())
    }

    /// Address of this host from which it is answered; `None` without an engine.
    pub(crate) fn answering_address(&self) -> Option<IpAddr> {
        let destination = match self {
            Self::Taken(datagram) => datagram.destination(),
            Self::Peeked(_, received) => received.destination,
        };
        let [destination, source] =
            [destination, self.source()].map(|address| address.ip().to_canonical());
        running().ok()?.net.answering_address(destination, source, self.device())
    }

    fn device(&self) -> DeviceIndex {
        match self {
            Self::Taken(datagram) => datagram.device(),
            Self::Peeked(_, received) => received.device,
        }
    }

    /// Passes on the payload piece by piece: of a merged datagram, all segments.
    pub(crate) fn each_piece(&self, mut each: impl FnMut(&[u8])) {
        match self {
            Self::Taken(datagram) if datagram.gso_size() > 0 => datagram.segments().for_each(each),
            Self::Taken(datagram) => each(datagram.payload()),
            Self::Peeked(payload, _) => each(payload),
        }
    }
}

/// Form of a call that receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct ReceiveMode {
    pub(crate) dont_wait: bool,
    pub(crate) peek: bool,
    /// True once the call has received a datagram: a signal then ends its wait in any case.
    pub(crate) has_part: bool,
}

/// Form of a call that sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DatagramMode {
    pub(crate) dont_wait: bool,
    /// More bytes of the datagram follow (`MSG_MORE`).
    pub(crate) more_follows: bool,
    /// Out of band, which UDP does not know (`MSG_OOB`).
    pub(crate) is_urgent: bool,
    /// Checks the call and the route alone (`MSG_PROBE`).
    pub(crate) is_probe: bool,
}

/// Family of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SocketFamily {
    V4,
    V6,
    /// IPv6 without IPv4 (`IPV6_V6ONLY`).
    V6Only,
}

/// Family of a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DatagramFamily {
    V4,
    V6,
    /// IPv4 of a socket of IPv6.
    Mapped,
}

/// Message that the program sends. Each part may be refused.
pub(crate) trait OutgoingDatagram<'a> {
    fn len_bytes(&self) -> usize;

    /// Destination; `None` for the peer.
    fn destination(&self, socket: SocketFamily) -> Result<Option<SocketAddr>, Errno>;

    fn control(&self, family: DatagramFamily) -> Result<SendControl, Errno>;

    fn payload(&self) -> Result<Cow<'a, [u8]>, Errno>;
}
