//! A UDP socket of the program that the library has taken over.

pub(crate) mod groups; // multicast
mod inherit; // sockets of the parent
mod part; //    datagrams of this process, not of others
mod receive;
mod send;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use arc_swap::ArcSwap;
use forebay::net::{SocketOptions, UdpSocket};
use forebay_device::rx_filter::FilterProtocol;
use forebay_stack::socket::shown;
use forebay_sys::hidden::Hidden;
use forebay_sys::readiness::{Ended, readiness};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_getfd};
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_recv_buffer_size_force, set_socket_timeout,
    socket_error, socket_recv_buffer_size, socket_reuseaddr, socket_reuseport,
};
use rustix::net::{Shutdown, getpeername, getsockname};

pub(crate) use self::inherit::{adopt, any_untouched, any_unused, forked, keep_locks};
use self::part::DatagramPart;
use crate::ancillary::{Arrival, kept, scoped};
use crate::corked::Corked;
use crate::datagram::{Message, SocketFamily};
use crate::epoll_sets::Registered;
use crate::errno::unconnected_errno;
use crate::option::SocketOption;
use crate::origin::Origin;
use crate::path_errors::{self, PathError};
use crate::runtime::{Runtime, is_taken, running_for_datagrams};
use crate::socket::{Socket, Takeover};
use crate::udp_options::{OF_RESERVED, RECVERR, Settings, has_effect, timeout};
use crate::{abi, lacking, table};

/// Socket of ours, shared by the descriptors that were duplicated from each other.
pub(crate) struct Udp {
    /// The kernel's socket, never bound: it answers for all options.
    kernel: Hidden,
    udp: UdpSocket,
    /// Address that the program has given.
    bound_to: SocketAddr,
    is_ipv6: bool,
    v6_only: bool,
    settings: ArcSwap<Settings>,
    /// Sides that `shutdown` has ended: [`RECEIVING`] and [`SENDING`].
    ended: AtomicU8,
    /// Error of the path that waits.
    path_error: Arc<PathError>,
    /// Datagram that is sent once it is whole (`MSG_MORE`, `UDP_CORK`).
    corked: Corked,
    /// Process that the socket belongs to.
    origin: Origin,
    /// Part of this process in the datagrams of the address.
    part: DatagramPart,
    /// True once the program has waited for a datagram: of processes with a socket at one address those that do not are
    /// left out.
    is_used: AtomicBool,
    /// True once the program has sent or waited.
    is_touched: AtomicBool,
    /// True of a copy of a socket that the parent had used.
    was_used: bool,
}

/// Largest length that fits in the field of a header.
const LENGTH_FIELD_MAX: usize = 0xffff;

/// Sides of a socket.
const RECEIVING: u8 = 1;
const SENDING: u8 = 2;

impl Udp {
    /// Takes over the kernel's socket at a descriptor that the program binds.
    ///
    /// # Errors
    /// As `bind(2)`; `ENODEV` if the engine cannot be started.
    pub(crate) fn bind(descriptor: BorrowedFd<'_>, local: SocketAddr) -> Result<Takeover, Errno> {
        let (number, local) = (abi::number(descriptor), kept(local));
        if !is_taken(FilterProtocol::Udp, local)
            || !table::has_slot(number)
            || !abi::is_plain(descriptor, FilterProtocol::Udp)
            || is_bound(descriptor)
        {
            return Ok(Takeover::Kernels);
        }
        let is_ipv6 = abi::is_ipv6(descriptor);
        if is_ipv6 != local.is_ipv6() {
            return Ok(Takeover::Kernels); // the kernel has the right error
        }
        // As in the kernel, an address of IPv6 is for IPv6 alone.
        let is_v6_address = local.is_ipv6() && !local.ip().is_unspecified() && !is_mapped(local);
        let of_program = || abi::is_on(descriptor, SocketOption::of_ipv6(libc::IPV6_V6ONLY));
        let v6_only = is_ipv6 && (is_v6_address || of_program());
        let runtime = running_for_datagrams()?;
        abi::prepare_to_close();
        let kernel: Hidden = Hidden::duplicate(descriptor)?;
        let of_kernel = (kernel, local, v6_only);
        let registered = Registered::of([number]);
        let place = |readiness: BorrowedFd<'_>, kernel: BorrowedFd<'_>| {
            place(number, readiness, kernel, &registered)
        };
        let socket = Self::open(runtime, of_kernel, |options| options.bind(local), place)?;
        lacking::report(socket.kernel(), local, has_effect);
        if is_v6_address {
            abi::set_v6_only(socket.kernel());
        }
        table::insert(number, Arc::new(Socket::Udp(socket)));
        Ok(Takeover::Ours)
    }

    /// Binds a socket of this process's engine with the options of the kernel's, and has its descriptor placed at the
    /// program's numbers.
    fn open(
        runtime: &Runtime,
        (kernel, bound_to, v6_only): (Hidden, SocketAddr, bool),
        bind: impl FnOnce(SocketOptions) -> std::io::Result<UdpSocket>,
        place: impl FnOnce(BorrowedFd<'_>, BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<Self, Errno> {
        let mut options = runtime.net.socket().v6_only(v6_only);
        if socket_reuseport(&kernel).unwrap_or(false) {
            options = options.reuse_port();
        }
        if socket_reuseaddr(&kernel).unwrap_or(false) {
            options = options.reuse_address();
        }
        // Before `bind`, from which on datagrams come.
        let (setter, readiness) = readiness().map_err(|error| unconnected_errno(&error))?;
        // Calls that wait do so in the kernel, which knows how signals interrupt them.
        fcntl_setfl(&readiness, OFlags::empty())?;
        let udp = bind(options).map_err(|error| unconnected_errno(&error))?;
        udp.set_nonblocking(true);
        // Before a datagram makes it readable.
        place(readiness.as_fd(), kernel.as_fd())?;
        udp.descriptor_from(|| Ok((setter, readiness)))
            .map_err(|error| unconnected_errno(&error))?;
        let socket = Self {
            is_ipv6: abi::is_ipv6(kernel.as_fd()),
            kernel,
            udp,
            bound_to,
            v6_only,
            settings: ArcSwap::default(),
            ended: AtomicU8::new(0),
            path_error: Arc::default(),
            corked: Corked::default(),
            origin: Origin::here(),
            part: DatagramPart::of(runtime, bound_to, v6_only),
            is_used: AtomicBool::new(false),
            is_touched: AtomicBool::new(false),
            was_used: false,
        };
        Self::count();
        socket.part.join();
        socket.adopt_settings();
        socket.adopt_cork();
        socket.adopt_groups();
        Ok(socket)
    }

    /// The kernel's socket, for calls that it answers for us.
    pub(crate) fn kernel(&self) -> BorrowedFd<'_> {
        self.kernel.as_fd()
    }

    /// The kernel's socket, which an option is to be set for.
    ///
    /// # Errors
    /// `EBADF` in a child of the process that has the socket.
    pub(crate) fn checked_kernel(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.check()?;
        Ok(self.kernel())
    }

    /// The kernel's socket at the same port, if there is one.
    pub(crate) fn reserved(&self) -> Option<BorrowedFd<'_>> {
        self.udp.reserved()
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
        if self.is_ipv6 && option == SocketOption::of_ipv6(libc::IPV6_V6ONLY) {
            return Err(Errno::INVAL); // bound already, as the kernel's socket that would answer is not
        }
        if has_effect(option) { Ok(()) } else { Err(Errno::NOPROTOOPT) }
    }

    /// Reads the options of the kernel's socket again, after a change. Keeps `errno`: one of the families lacks some.
    pub(crate) fn adopt_settings(&self) {
        abi::keeping_errno(|| self.adopt());
    }

    fn adopt(&self) {
        if let Some(reserved) = self.udp.reserved() {
            let differ = |option: &&_| abi::option_differs(self.kernel(), reserved, **option);
            for option in OF_RESERVED.iter().filter(differ) {
                abi::copy_option(self.kernel(), reserved, *option);
                if RECVERR.contains(option) {
                    self.watch_errors(reserved);
                }
            }
            self.make_room_for_errors(reserved);
        }
        let settings = Settings::adopt(self.kernel(), &self.udp, self.is_ipv6);
        if settings.reuses_address != self.settings.load().reuses_address {
            let _ = self.udp.set_reuse_address(settings.reuses_address); // the kernel's socket has taken it
        }
        self.settings.store(Arc::new(settings));
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

    /// Gives the kernel's socket at the same port, which receives no datagrams, the program's room for a queue of errors.
    fn make_room_for_errors(&self, reserved: BorrowedFd<'_>) {
        if let Ok(bytes) = socket_recv_buffer_size(self.kernel())
            && self.asks_errors()
        {
            let asked = bytes / 2; // the kernel doubles it
            let _ = set_socket_recv_buffer_size_force(reserved, asked)
                .or_else(|_| set_socket_recv_buffer_size(reserved, asked));
        }
    }

    /// Follows the kernel's socket at the same port, which was connected first: it checks the route and gets the errors.
    ///
    /// # Errors
    /// As `connect(2)`.
    pub(crate) fn follow_peer(
        &self,
        reserved: BorrowedFd<'_>,
        to: SocketAddr,
    ) -> Result<(), Errno> {
        self.watch_errors(reserved);
        // As the kernel has it: this host in place of no address, and no scope where none is needed.
        let peer = getpeername(reserved).ok().flatten();
        self.connect(peer.and_then(|peer| SocketAddr::try_from(peer).ok()).unwrap_or(to))
    }

    pub(crate) fn connect(&self, to: SocketAddr) -> Result<(), Errno> {
        self.check()?;
        self.udp.connect(shown(to, self.is_ipv6)).map_err(|error| self.errno(&error))?;
        self.part.claim(self.local(), to, self.is_used.load(Ordering::Relaxed));
        Ok(())
    }

    pub(crate) fn disconnect(&self) -> Result<(), Errno> {
        self.check()?;
        if let Some(reserved) = self.udp.reserved() {
            let _ = rustix::net::connect_unspec(reserved); // does not fail
        }
        self.udp.disconnect();
        self.part.rejoin(self.is_used.load(Ordering::Relaxed));
        Ok(())
    }

    /// Enables error reports of the kernel's socket. Without them, calls succeed as if there were no errors.
    fn watch_errors(&self, reserved: BorrowedFd<'_>) {
        if let Err(error) = path_errors::watch(reserved, self.udp.queue(), &self.path_error) {
            report!(
                "forebay: the UDP socket of {} is not told of ICMP errors: {error}; let the program have more \
                 descriptors and threads (ulimit -n, ulimit -u), then start it again",
                self.local()
            );
        }
    }

    fn errno(&self, error: &std::io::Error) -> Errno {
        if error.kind() == std::io::ErrorKind::Unsupported && error.raw_os_error().is_none() {
            return Errno::NETUNREACH; // this host itself, by a device that the kernel does not have
        }
        match unconnected_errno(error) {
            Errno::CONNREFUSED => self.path_error.take(),
            error => error,
        }
    }

    /// Ends sides of the socket (`shutdown`). As in the kernel, those of one that is not connected end, too.
    ///
    /// # Errors
    /// `ENOTCONN` if it is not connected.
    pub(crate) fn shutdown(&self, how: i32) -> Result<(), Errno> {
        self.check()?;
        let sides = match how {
            libc::SHUT_RD => RECEIVING,
            libc::SHUT_WR => SENDING,
            libc::SHUT_RDWR => RECEIVING | SENDING,
            _ => return Err(Errno::INVAL),
        };
        let ended = self.ended.fetch_or(sides, Ordering::AcqRel) | sides;
        let visible = match ended {
            SENDING => Ended::Nothing,
            RECEIVING => Ended::Peer,
            _ => Ended::Both,
        };
        // The kernel sends for this socket, and refuses lengths for it.
        if let Some(reserved) = self.udp.reserved().filter(|_| sides & SENDING != 0) {
            let _ = rustix::net::shutdown(reserved, Shutdown::Write); // `ENOTCONN` does not prevent it
        }
        self.udp.notify_ended(visible).map_err(|error| unconnected_errno(&error))?;
        self.peer().map(drop)
    }

    fn has_ended(&self, side: u8) -> bool {
        self.ended.load(Ordering::Acquire) & side != 0
    }

    /// Takes the error that waits (`SO_ERROR`).
    pub(crate) fn take_error(&self) -> Result<Option<Errno>, Errno> {
        self.check()?;
        Ok(self.udp.take_error().map(|error| self.errno(&error)))
    }

    /// Leaves an error to the next call.
    pub(crate) fn set_pending_error(&self, error: Errno) {
        if !matches!(error, Errno::AGAIN | Errno::INTR) {
            self.path_error.set_pending(error, self.udp.queue());
        }
    }

    /// Socket of the kernel whose error queue has the ICMP errors of this one.
    pub(crate) fn error_queue(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.check()?;
        self.udp.reserved().ok_or(Errno::AGAIN)
    }

    /// After the queue of errors was read: the error that waits is that of the next ICMP error, if there is one
    /// (`sock_dequeue_err_skb`).
    pub(crate) fn follow_error_queue(&self) {
        let Some(kernels) = self.udp.reserved() else { return };
        match socket_error(kernels) {
            Ok(Err(error)) => self.path_error.set_pending(error, self.udp.queue()),
            // Ignored: what was left is of the error that was read.
            Ok(Ok(())) => drop(self.take_error()),
            Err(_) => {}
        }
    }

    /// Sender of a message, in the socket's family.
    pub(crate) fn source_of(&self, message: &Message<'_>) -> SocketAddr {
        shown(scoped(message.source(), || message.interface()), self.is_ipv6)
    }

    /// Arrival of a message, with what the program has asked for.
    pub(crate) fn arrival_of(&self, message: &Message<'_>) -> Arrival {
        let settings = self.settings();
        let dropped = match settings.counts_dropped {
            true => self.udp.queue().account().dropped(),
            false => 0,
        };
        Arrival {
            interface: message.interface(),
            answering: settings.v4_pktinfo.then(|| message.answering_address()).flatten(),
            dropped: u32::try_from(dropped).unwrap_or(u32::MAX),
        }
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.udp.local_addr()
    }

    /// # Errors
    /// `ENOTCONN` without a peer; one with port 0 counts as none (`inet_getname`).
    pub(crate) fn peer(&self) -> Result<SocketAddr, Errno> {
        self.udp.peer_addr().filter(|peer| peer.port() != 0).ok_or(Errno::NOTCONN)
    }

    fn readiness(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.udp.descriptor().map_err(|error| unconnected_errno(&error))
    }

    /// Closes this process's copies of the kernel's sockets, which nothing here uses any more: the port is free once the
    /// parent has closed its own.
    pub(crate) fn close_copy(&self) {
        if self.origin.claim_close() {
            Self::count_closed(false, true);
            abi::close_forgotten(self.kernel());
            self.udp.reserved().into_iter().for_each(abi::close_forgotten);
        }
    }

    pub(crate) fn is_of_parent(&self) -> bool {
        self.origin.is_parent()
    }

    fn family(&self) -> SocketFamily {
        match self.is_ipv6 {
            true if self.v6_only => SocketFamily::V6Only,
            true => SocketFamily::V6,
            false => SocketFamily::V4,
        }
    }

    /// # Errors
    /// `EBADF` in a child of the process that bound the socket.
    pub(crate) fn check(&self) -> Result<(), Errno> {
        self.origin.check("a socket was bound", "stay in the foreground or bind in the child")
    }
}

/// Puts a readiness descriptor at the program's number, by which its signals name it.
fn place(
    number: RawFd,
    readiness: BorrowedFd<'_>,
    kernel: BorrowedFd<'_>,
    registered: &Registered,
) -> Result<(), Errno> {
    let flags = abi::with_number(number, |descriptor| fcntl_getfd(descriptor))?;
    registered.replace(number, readiness, flags.contains(FdFlags::CLOEXEC))?;
    abi::with_number(number, |descriptor| abi::copy_signals(kernel, descriptor));
    Ok(())
}

/// True for an address of IPv4 in the form of IPv6.
fn is_mapped(address: SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some())
}

/// True for a socket that has a port: the kernel has the right error.
fn is_bound(descriptor: BorrowedFd<'_>) -> bool {
    let local = getsockname(descriptor).ok().and_then(|local| SocketAddr::try_from(local).ok());
    local.is_some_and(|local| local.port() != 0)
}

impl Drop for Udp {
    fn drop(&mut self) {
        Self::count_closed(*self.is_used.get_mut(), *self.is_touched.get_mut());
        self.part.leave();
        if let Some(reserved) = self.udp.reserved() {
            path_errors::unwatch(reserved);
        }
    }
}
