//! A UDP socket of the program that the library has taken over.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use arc_swap::ArcSwap;
use forebay::net::message::Transmit;
use forebay::net::{Datagram, Datagrams, UdpSocket};
use forebay_device::rx_filter::FilterProtocol;
use forebay_stack::socket::shown;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_getfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_reuseport};

use crate::ancillary::SendControl;
use crate::errno::unconnected_errno;
use crate::option::SocketOption;
use crate::origin::Origin;
use crate::runtime::{is_taken, running_alone};
use crate::socket::{CallWait, Socket, Takeover};
use crate::udp_options::{Settings, has_effect, lacking, timeout};
use crate::{abi, protected, table};

/// Length of the longest payload of a datagram, or of several merged.
const PAYLOAD_BYTES_MAX: usize = 1 << 16;

/// Socket of ours, shared by the descriptors that were duplicated from each other.
pub(crate) struct Udp {
    /// The kernel's socket, never bound: it answers for all options.
    kernel: OwnedFd,
    udp: UdpSocket,
    is_ipv6: bool,
    settings: ArcSwap<Settings>,
    /// Process that the socket belongs to.
    origin: Origin,
}

/// One datagram read.
pub(crate) enum Message<'a> {
    /// A datagram in place.
    Taken(&'a Datagram),
    /// Copy of a datagram that stays in the queue: without ancillary data.
    Peeked(&'a [u8], SocketAddr),
}

impl Message<'_> {
    pub(crate) fn source(&self) -> SocketAddr {
        match self {
            Self::Taken(datagram) => datagram.source(),
            Self::Peeked(_, source) => *source,
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
}

impl Udp {
    /// Takes over the kernel's socket at a descriptor that the program binds.
    ///
    /// # Errors
    /// As `bind(2)`; `ENODEV` if the engine cannot be started.
    pub(crate) fn bind(descriptor: BorrowedFd<'_>, local: SocketAddr) -> Result<Takeover, Errno> {
        let number = abi::number(descriptor);
        if !is_taken(FilterProtocol::Udp, local)
            || !table::has_slot(number)
            || !abi::is_plain(descriptor, FilterProtocol::Udp)
        {
            return Ok(Takeover::Kernels);
        }
        let is_ipv6 = abi::is_ipv6(descriptor);
        if is_ipv6 != local.is_ipv6() {
            return Ok(Takeover::Kernels); // the kernel has the right error
        }
        let v6_only = is_ipv6 && abi::is_on(descriptor, SocketOption::of_ipv6(libc::IPV6_V6ONLY));
        let mut options = running_alone()?.net.socket().v6_only(v6_only);
        if socket_reuseport(descriptor).unwrap_or(false) {
            options = options.reuse_port();
        }
        let udp = options.bind(local).map_err(|error| unconnected_errno(&error))?;
        udp.set_nonblocking(true);
        for option in lacking(descriptor) {
            eprintln!("forebay: {option}, set for the socket of {local}, has no effect on it");
        }
        let kernel = protected::duplicate(descriptor)?;
        let readiness = udp.descriptor().map_err(|error| unconnected_errno(&error))?;
        // Calls that wait do so in the kernel, which knows how signals interrupt them.
        fcntl_setfl(readiness, OFlags::empty())?;
        let is_cloexec = fcntl_getfd(descriptor)?.contains(FdFlags::CLOEXEC);
        abi::replace(number, readiness, is_cloexec)?;
        let settings = ArcSwap::default();
        let socket = Self { kernel, udp, is_ipv6, settings, origin: Origin::here() };
        socket.adopt_settings();
        table::insert(number, Arc::new(Socket::Udp(socket)));
        Ok(Takeover::Ours)
    }

    /// The kernel's socket, for calls that it answers for us.
    pub(crate) fn kernel(&self) -> BorrowedFd<'_> {
        self.kernel.as_fd()
    }

    pub(crate) fn settings(&self) -> Settings {
        **self.settings.load()
    }

    /// Checks whether an option may be set.
    ///
    /// # Errors
    /// `ENOPROTOOPT` if it would have no effect.
    pub(crate) fn check_option(&self, option: SocketOption) -> Result<(), Errno> {
        self.check()?;
        if has_effect(option) { Ok(()) } else { Err(Errno::NOPROTOOPT) }
    }

    /// Reads the options of the kernel's socket again, after a change.
    pub(crate) fn adopt_settings(&self) {
        self.settings.store(Arc::new(Settings::adopt(self.kernel(), &self.udp, self.is_ipv6)));
        if let Ok(readiness) = self.udp.descriptor() {
            let wait = timeout(self.kernel(), libc::SO_RCVTIMEO);
            let _ = set_socket_timeout(readiness, Timeout::Recv, wait); // as valid as it was there
        }
        if let Ok(bytes) =
            abi::option_value(self.kernel(), SocketOption::of_socket(libc::SO_RCVBUF))
        {
            // A small datagram takes three times as much memory as in the kernel.
            self.udp
                .set_recv_buffer_size(u32::try_from(bytes).unwrap_or_default().saturating_mul(3));
        }
    }

    pub(crate) fn connect(&self, to: SocketAddr) -> Result<(), Errno> {
        self.check()?;
        self.udp.connect(shown(to, self.is_ipv6)).map_err(|error| unconnected_errno(&error))
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.udp.local_addr()
    }

    pub(crate) fn peer(&self) -> Result<SocketAddr, Errno> {
        self.udp.peer_addr().ok_or(Errno::NOTCONN)
    }

    /// Receives at most `max` datagrams, waiting for the first if the socket and the call permit. The index of
    /// each is passed on with it.
    pub(crate) fn receive(
        &self,
        max: usize,
        mode: ReceiveMode,
        mut each: impl FnMut(usize, &Message<'_>),
    ) -> Result<usize, Errno> {
        self.check()?;
        if mode.peek {
            return self.peek(mode, |message| each(0, message)).map(|()| 1);
        }
        let mut batch = Datagrams::new();
        self.attempt(mode.dont_wait, || self.udp.recv_batch(&mut batch, max))?;
        for (index, datagram) in batch.iter().enumerate() {
            each(index, &Message::Taken(datagram));
        }
        Ok(batch.len())
    }

    fn peek(&self, mode: ReceiveMode, each: impl FnOnce(&Message<'_>)) -> Result<(), Errno> {
        thread_local! {
            static PEEKED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let mut buffer = PEEKED.try_with(RefCell::take).unwrap_or_default();
        buffer.resize(PAYLOAD_BYTES_MAX, 0);
        let peeked = self.attempt(mode.dont_wait, || self.udp.peek_from(&mut buffer));
        let result = peeked.map(|(len, source)| each(&Message::Peeked(&buffer[..len], source)));
        let _ = PEEKED.try_with(|kept| kept.replace(buffer)); // a thread that ends has none
        result
    }

    /// Length of the next datagram, or 0 (`FIONREAD`).
    pub(crate) fn next_len(&self) -> Result<usize, Errno> {
        self.check()?;
        let mut len = 0;
        let mode = ReceiveMode { dont_wait: true, peek: true };
        match self.peek(mode, |message| message.each_piece(|piece| len += piece.len())) {
            Ok(()) | Err(Errno::AGAIN) => Ok(len),
            Err(error) => Err(error),
        }
    }

    fn attempt<T>(
        &self,
        dont_wait: bool,
        mut attempt: impl FnMut() -> std::io::Result<T>,
    ) -> Result<T, Errno> {
        let mut wait = CallWait::default();
        loop {
            match attempt().map_err(|error| unconnected_errno(&error)) {
                Err(Errno::AGAIN) if !dont_wait && !self.settings.load().is_nonblocking => {
                    wait.readable(self.readiness()?)?;
                }
                result => return result,
            }
        }
    }

    /// Sends a datagram.
    pub(crate) fn send(
        &self,
        payload: &[u8],
        to: Option<SocketAddr>,
        control: SendControl,
        dont_wait: bool,
    ) -> Result<usize, Errno> {
        self.check()?;
        let settings = self.settings.load();
        let to = match to {
            Some(to) => shown(to, self.is_ipv6),
            None => self.udp.peer_addr().ok_or(Errno::DESTADDRREQ)?,
        };
        let message = Transmit {
            source: control.source,
            device: control.device,
            traffic_class: control.traffic_class,
            ttl: control.ttl,
            gso_size: control.gso_size.unwrap_or(settings.gso_size),
            ..Transmit::new(payload, to)
        };
        let mut wait = CallWait::default();
        loop {
            match self.udp.send_msg(&message).map_err(|error| unconnected_errno(&error)) {
                Err(Errno::AGAIN) if !dont_wait && !settings.is_nonblocking => {
                    wait.writable(self.readiness()?, settings.write_timeout, true)?;
                }
                result => return result,
            }
        }
    }

    fn readiness(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.udp.descriptor().map_err(|error| unconnected_errno(&error))
    }

    pub(crate) fn is_of_parent(&self) -> bool {
        self.origin.is_parent()
    }

    /// # Errors
    /// `EBADF` in a child of the process that bound the socket.
    fn check(&self) -> Result<(), Errno> {
        self.origin.check("a socket was bound", "stay in the foreground or bind in the child")
    }
}
