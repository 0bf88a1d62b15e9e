//! Socket that quinn sends and receives through.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use forebay::net::message::Transmit;
use forebay::net::{Datagram, Datagrams};
use forebay_tokio::{Interest, UdpSocket};
use quinn::udp::{EcnCodepoint, RecvMeta};
use quinn::{AsyncUdpSocket, UdpPoller};

/// Maximum number of datagrams in a merged one (`UDP_GRO`) and in one payload sent by quinn.
const SEGMENTS_MAX: usize = 64;

/// Forebay UDP socket that implements quinn's `AsyncUdpSocket`.
#[derive(Debug)]
pub struct Socket {
    socket: UdpSocket,
    /// True if bound to an IPv6 address.
    is_v6: bool,
    /// Batch from which datagrams are copied out; empty between calls.
    batch: Mutex<Datagrams>,
    unsent: AtomicU64,
    truncated: AtomicU64,
}

impl Socket {
    /// Takes over a bound socket. Must be called on the endpoint's runtime.
    ///
    /// # Errors
    /// As [`UdpSocket::new`].
    pub fn new(socket: forebay::net::UdpSocket) -> io::Result<Self> {
        socket.set_gro(true);
        socket.set_path_ignored(true); // quinn finds out by itself what arrives
        let is_v6 = socket.local_addr().is_ipv6();
        Ok(Self {
            is_v6,
            socket: UdpSocket::new(socket)?,
            batch: Mutex::default(),
            unsent: AtomicU64::new(0),
            truncated: AtomicU64::new(0),
        })
    }

    /// Underlying socket, for its options and counters.
    #[must_use]
    pub fn inner(&self) -> &forebay::net::UdpSocket {
        self.socket.inner()
    }

    /// Number of payloads that could not be sent, such as MTU probes larger than the device's MTU.
    /// Quinn treats them like packets lost in the network.
    #[must_use]
    pub fn unsent(&self) -> u64 {
        self.unsent.load(Ordering::Relaxed)
    }

    /// Number of datagrams dropped because they were longer than quinn's buffers
    /// (`max_udp_payload_size`).
    #[must_use]
    pub fn truncated(&self) -> u64 {
        self.truncated.load(Ordering::Relaxed)
    }

    /// Copies a datagram, or all datagrams merged into it, and returns its metadata.
    fn copy(&self, datagram: &Datagram, room: &mut [u8]) -> RecvMeta {
        let mut len = 0;
        let mut stride = usize::from(datagram.gso_size());
        for segment in datagram.segments() {
            let Some(to) = room.get_mut(len..len + segment.len()) else {
                self.truncated.fetch_add(1, Ordering::Relaxed);
                break;
            };
            to.copy_from_slice(segment);
            len += segment.len();
        }
        if stride == 0 {
            stride = len;
        }
        let mut addr = datagram.source();
        addr.set_ip(self.shown(addr.ip()));
        RecvMeta {
            addr,
            len,
            stride,
            ecn: EcnCodepoint::from_bits(datagram.ecn()),
            dst_ip: Some(self.shown(datagram.destination().ip())),
        }
    }

    /// Maps IPv4 addresses of an IPv6 socket to IPv6 (RFC 4291), as quinn compares them with the
    /// addresses it sends to.
    fn shown(&self, address: IpAddr) -> IpAddr {
        match address {
            IpAddr::V4(v4) if self.is_v6 => v4.to_ipv6_mapped().into(),
            _ => address,
        }
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Poller { socket: self, waiting: None })
    }

    fn try_send(&self, transmit: &quinn::udp::Transmit<'_>) -> io::Result<()> {
        for (number, payload) in payloads(transmit).enumerate() {
            let message = Transmit {
                source: transmit.src_ip,
                traffic_class: transmit.ecn.map(|ecn| ecn as u8),
                gso_size: u16::try_from(transmit.segment_size.unwrap_or(0)).unwrap_or(u16::MAX),
                ..Transmit::new(payload, transmit.destination)
            };
            let sent = self.socket.try_io(Interest::WRITABLE, |socket| socket.send_msg(&message));
            match sent.map_err(|error| (error.kind(), error)) {
                Ok(_) => {}
                Err((io::ErrorKind::BrokenPipe, error)) => return Err(error),
                // Quinn sends everything again later, so nothing may have left.
                Err((io::ErrorKind::WouldBlock, error)) if number == 0 => return Err(error),
                // Not reported: an error for one destination must not end the whole endpoint.
                // Quinn's loss detection finds it.
                Err(_) => {
                    self.unsent.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        let max = bufs.len().min(meta.len());
        let count = ready!(self.socket.poll_recv_batch(cx, &mut batch, max))?;
        for ((datagram, room), meta) in batch.iter().zip(bufs).zip(meta) {
            *meta = self.copy(datagram, room);
        }
        batch.clear();
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        SEGMENTS_MAX
    }

    fn max_receive_segments(&self) -> usize {
        SEGMENTS_MAX
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// Payloads of one send each: as many datagrams as fit, which are fewer than quinn's if the MTU is large.
fn payloads<'a>(transmit: &quinn::udp::Transmit<'a>) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let most = Transmit::payload_bytes_max(transmit.destination);
    let len = transmit.segment_size.map_or(0, |size| most - most % size.max(1));
    let len = if len == 0 { transmit.contents.len() } else { len };
    transmit.contents.chunks(len.max(1))
}

/// Wait of one task until the socket is writable. Every task has a waiter of its own.
struct Poller {
    socket: Arc<Socket>,
    waiting: Option<Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>>,
}

impl UdpPoller for Poller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, waiting } = &mut *self;
        let wait = || {
            let socket = Arc::clone(socket);
            Box::pin(async move { socket.socket.writable().await }) as Pin<Box<_>>
        };
        let result = ready!(waiting.get_or_insert_with(wait).as_mut().poll(cx));
        *waiting = None;
        Poll::Ready(result)
    }
}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Poller({:?})", self.socket.inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_12_large_segments_fit_in_sends() {
        let contents = vec![0; 90_000];
        let lens = |segment_size, len, to: &str| {
            let transmit = quinn::udp::Transmit {
                destination: to.parse().unwrap(),
                ecn: None,
                contents: &contents[..len],
                segment_size,
                src_ip: None,
            };
            payloads(&transmit).map(<[u8]>::len).collect::<Vec<_>>()
        };
        let (v4, v6) = ("10.9.0.1:443", "[fd09::1]:443");
        assert_eq!(lens(Some(8_972), 10 * 8_972, v4), [7 * 8_972, 3 * 8_972]);
        assert_eq!(lens(Some(8_952), 9 * 8_952 + 1, v6), [7 * 8_952, 2 * 8_952 + 1]);
        assert_eq!(lens(Some(65_507), 65_508, v4), [65_507, 1]);
        assert_eq!(lens(Some(1_452), 10 * 1_452, v4), [10 * 1_452]);
        assert_eq!(lens(None, 1_200, v4), [1_200]);
        assert_eq!(lens(None, 0, v4), [0; 0]);
        // Longer than any datagram: refused by the send.
        assert_eq!(lens(Some(70_000), 70_001, v4), [70_001]);
    }
}
