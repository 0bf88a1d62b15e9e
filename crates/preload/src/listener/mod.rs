//! A listening TCP socket of the program.
//!
//! The kernel's socket stays bound and listening, and drops every packet: it keeps the port, and gives the
//! kernel's answers to all calls about names and options. Connections are accepted by the engine of the
//! process that uses the listener first after `listen`, which may be a child of the one that called it.

mod accept;
mod copies; // copies in other processes
mod kept; //   listeners of the program that the process was before

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;
use forebay::net::TcpListener;
use forebay_device::rx_filter::FilterProtocol;
use forebay_stack::tcp::FastOpenOptions;
use forebay_sys::drop_filter::refuse_packets;
use forebay_sys::hidden::Hidden;
use forebay_sys::readiness::{Ended, ReadinessDescriptor, ReadinessSetter, readiness};
use forebay_sys::tcp_reserve::{self, Reservation};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, FdFlags, fcntl_getfd};
use rustix::net::getsockname;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_reuseport};

pub(crate) use self::copies::{Copies, OtherCopies};
pub(crate) use self::kept::{KeptListener, restore};
use crate::epoll_sets::Registered;
use crate::errno::unconnected_errno;
use crate::membership::Membership;
use crate::option::SocketOption;
use crate::origin::Origin;
use crate::runtime::{
    StillWaits, excluding, is_in_parents_memory, is_taken, is_used, note_use, prepare, running,
    when_free,
};
use crate::socket::{Socket, Takeover};
use crate::start_error::GRANT;
use crate::tcp_options::{Inherited, Packets, TcpSetting, is_accepted};
use crate::udp_options::timeout;
use crate::{abi, epoll_sets, fork_locks, lacking, passing, table};

/// Listeners that this process has, and those of them that no engine of this process serves.
static LISTENERS: AtomicUsize = AtomicUsize::new(0);
static UNSERVED: AtomicUsize = AtomicUsize::new(0);

/// Taken while a listener gets its engine.
static SERVING: Mutex<()> = Mutex::new(());

/// Listener, shared by the descriptors that were duplicated from each other, and copied by a fork.
pub(crate) struct Listener {
    inherited: Arc<Inherited>,
    local: SocketAddr,
    v6_only: bool,
    backlog: u32,
    is_nonblocking: AtomicBool,
    served: ArcSwapOption<Served>,
    /// True once the program has ended the listening, which `listen` begins anew.
    has_ended: AtomicBool,
    /// Descriptor that the program polls while another process receives the packets.
    placeholder: Mutex<Option<(ReadinessSetter, ReadinessDescriptor)>>,
    /// Process that made it.
    origin: Origin,
    /// Process whose engine served it when it ended.
    ended_in: OnceLock<Origin>,
    /// `None` without descriptors for it: then a process that closes it asks for no other's.
    copies: Mutex<Option<Copies>>,
}

/// Listener of an engine.
pub(crate) struct Served {
    pub(crate) tcp: TcpListener,
    /// Process of the engine.
    origin: Origin,
    pub(crate) membership: Option<Arc<Membership>>,
}

/// True if this process has listeners.
pub(crate) fn exist() -> bool {
    LISTENERS.load(Ordering::Relaxed) > 0
}

/// True if a call that waits may wait for a listener that no engine serves yet.
pub(crate) fn any_unserved() -> bool {
    UNSERVED.load(Ordering::Relaxed) > 0
}

/// Keeps the locks of this module until the process has forked.
pub(crate) fn keep_locks() {
    fork_locks::lock(&SERVING).into_iter().for_each(fork_locks::keep);
    fork_locks::lock(&tcp_reserve::LISTENERS).into_iter().for_each(fork_locks::keep);
    passing::keep_locks();
}

/// Begins anew in a child, which has an engine for none of the listeners.
pub(crate) fn forked() {
    UNSERVED.store(LISTENERS.load(Ordering::Relaxed), Ordering::Relaxed);
    passing::forked();
}

impl Listener {
    /// Binds a socket whose port was found in use, if only closed listeners and their connections have it.
    ///
    /// # Errors
    /// As `bind`: `EADDRINUSE` also for a socket that stays the kernel's.
    pub(crate) fn bind_beside_closed(
        descriptor: BorrowedFd<'_>,
        local: SocketAddr,
        bind: impl Fn() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        if !is_taken(FilterProtocol::Tcp, local)
            || !abi::is_plain(descriptor, FilterProtocol::Tcp)
            || is_in_parents_memory()
        {
            return Err(Errno::ADDRINUSE);
        }
        passing::stop_leaving(local);
        tcp_reserve::beside_closed(descriptor, local, bind)
    }

    /// Takes over the kernel's socket at a descriptor that the program lets listen.
    ///
    /// # Errors
    /// As `listen(2)`; `ENODEV` if a device cannot be opened.
    pub(crate) fn listen(descriptor: BorrowedFd<'_>, backlog: i32) -> Result<Takeover, Errno> {
        let number = abi::number(descriptor);
        if !table::has_slot(number) || !abi::is_plain(descriptor, FilterProtocol::Tcp) {
            return Ok(Takeover::Kernels);
        }
        let local = getsockname(descriptor)?;
        let Ok(local) = SocketAddr::try_from(local) else { return Ok(Takeover::Kernels) };
        if !is_taken(FilterProtocol::Tcp, local) {
            return Ok(Takeover::Kernels);
        }
        prepare()?;
        abi::prepare_to_close();
        lacking::report(descriptor, local, is_accepted);
        refuse_packets(descriptor).map_err(|error| {
            report!(
                "forebay: cannot have the kernel drop the packets to {local}: {error}; some kernels (6.18 without \
                 CONFIG_TCP_MD5SIG) require CAP_NET_ADMIN for that: {GRANT}"
            );
            unconnected_errno(&error)
        })?;
        let listen = || rustix::net::listen(descriptor, backlog);
        tcp_reserve::beside_closed(descriptor, local, listen)?;
        // As the kernel: a negative number is the largest.
        let backlog = u32::try_from(backlog).unwrap_or(u32::MAX);
        let kernel = Hidden::duplicate(descriptor)?;
        let listener = Self::unserved(kernel, local, backlog, Copies::new().ok())?;
        let socket = Arc::new(Socket::Listener(listener));
        table::insert(number, Arc::clone(&socket));
        if let (true, Socket::Listener(listener)) = (is_used(), &*socket)
            && let Err(error) = listener.serve(&socket)
        {
            table::remove(number).into_iter().for_each(Socket::let_go);
            return Err(error);
        }
        Ok(Takeover::Ours)
    }

    /// Listener that no engine serves yet, by the kernel's socket, which listens and drops every packet.
    fn unserved(
        kernel: Hidden,
        local: SocketAddr,
        backlog: u32,
        copies: Option<Copies>,
    ) -> Result<Self, Errno> {
        let is_nonblocking = fcntl_getfl(&kernel)?.contains(OFlags::NONBLOCK);
        let v6_only =
            local.is_ipv6() && abi::is_on(kernel.as_fd(), SocketOption::of_ipv6(libc::IPV6_V6ONLY));
        let reservation = Reservation::of_listener(kernel);
        let inherited = Inherited::of(reservation.map_err(|error| unconnected_errno(&error))?)?;
        LISTENERS.fetch_add(1, Ordering::Relaxed);
        UNSERVED.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            inherited: Arc::new(inherited),
            local,
            v6_only,
            backlog,
            is_nonblocking: is_nonblocking.into(),
            served: ArcSwapOption::empty(),
            has_ended: AtomicBool::default(),
            placeholder: Mutex::default(),
            origin: Origin::here(),
            ended_in: OnceLock::new(),
            copies: Mutex::new(copies),
        })
    }

    /// The kernel's socket.
    pub(crate) fn kernel(&self) -> BorrowedFd<'_> {
        self.inherited.kernel.as_fd()
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(crate) fn set_nonblocking(&self, is_nonblocking: bool) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    /// True of a copy whose locks threads of the parent may have held.
    pub(crate) fn is_of_parent(&self) -> bool {
        match &*self.served.load() {
            Some(served) => served.origin.is_parent(),
            None => self.ended_in.get().unwrap_or(&self.origin).is_parent(),
        }
    }

    /// Closes this process's copy of the kernel's socket, which nothing here uses any more: the port is free once the
    /// parent has closed its own.
    pub(crate) fn close_copy(&self) {
        if self.origin.claim_close() {
            self.inherited.kernel.unlist();
            abi::close_forgotten(self.kernel());
            self.copies().iter().for_each(Copies::close_forgotten);
        }
    }

    /// True once [`shutdown`](Self::shutdown) has ended the listening.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Ends the listening: connections that were not accepted are reset, or go on in another process, and calls that wait
    /// return. `socket` is the listener as the table has it.
    ///
    /// # Errors
    /// `ENOTCONN` if it had ended.
    pub(crate) fn shutdown(&self, socket: &Arc<Socket>) -> Result<(), Errno> {
        let _serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return Err(Errno::NOTCONN);
        }
        self.inherited.kernel.set_live(false);
        if self.end_served(None) {
            return Ok(()); // no copy goes on
        }
        self.set_placeholder(socket)?;
        self.end_placeholder();
        Ok(())
    }

    /// Ends the listening of this process, which ends, also while its threads wait in `accept`.
    pub(crate) fn end_here(&self) {
        let _serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.has_ended.swap(true, Ordering::AcqRel) {
            let others = self.copies().take().map(Copies::close_own);
            self.end_served(others);
        }
    }

    /// Ends the listener of this process's engine. False without one.
    fn end_served(&self, others: Option<OtherCopies>) -> bool {
        let Some(served) = self.served_here() else { return false };
        served.tcp.notify_ended();
        self.ended_in.get_or_init(Origin::here);
        drop(self.served.swap(None));
        UNSERVED.fetch_add(1, Ordering::Relaxed);
        passing::leave(served, self.addresses().collect(), others);
        true
    }

    /// Puts the kernel's socket back at a descriptor of a listener that has ended.
    pub(crate) fn give_back(&self, number: RawFd) -> Result<(), Errno> {
        let flags = abi::with_number(number, |descriptor| fcntl_getfd(descriptor))?;
        epoll_sets::replace(number, self.kernel(), flags.contains(FdFlags::CLOEXEC))?;
        table::remove(number).into_iter().for_each(Socket::let_go);
        Ok(())
    }

    /// Addresses as the engine has them: a socket of IPv6 may take IPv4, too.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> + use<> {
        let (ip, port) = (self.local.ip(), self.local.port());
        let has_both = ip.is_ipv6() && ip.is_unspecified() && !self.v6_only;
        let any: IpAddr = Ipv4Addr::UNSPECIFIED.into();
        let ips = std::iter::once(ip.to_canonical()).chain(has_both.then_some(any));
        ips.map(move |ip| SocketAddr::new(ip, port))
    }

    pub(crate) fn served_here(&self) -> Option<Arc<Served>> {
        self.served.load_full().filter(|served| !served.origin.is_parent())
    }

    /// Serves the listener by this process's engine. `socket` is the listener as the table has it.
    ///
    /// # Errors
    /// `ENODEV` without an engine; `EADDRNOTAVAIL` if the address is none of the devices'.
    pub(crate) fn serve(&self, socket: &Arc<Socket>) -> Result<Arc<Served>, Errno> {
        if let Some(served) = self.served_here() {
            return Ok(served);
        }
        // Before the lock, which a thread that forks does not wait for so long.
        self.addresses().for_each(passing::stop_leaving);
        let _serving = SERVING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(served) = self.served_here() {
            return Ok(served);
        }
        if self.has_ended() {
            return Err(Errno::INVAL);
        }
        if let Some(by) = excluding() {
            report!(
                "forebay: process {by} accepts the connections to {}, and its child {} cannot: let the program fork \
                 before it waits for connections",
                self.local,
                process::id()
            );
            return Err(Errno::NODEV);
        }
        let runtime = match running() {
            Err(Errno::BUSY) => {
                self.wait_in_turn(socket)?;
                return Err(Errno::BUSY);
            }
            runtime => runtime?,
        };
        note_use();
        let mut options = runtime.net.socket().v6_only(self.v6_only);
        if socket_reuseport(&self.inherited.kernel).unwrap_or(false) {
            options = options.reuse_port();
        }
        let (reserved, placeholder) =
            (Arc::clone(&self.inherited.kernel), self.placeholder().take());
        let is_placed = placeholder.is_some();
        let readiness = placeholder.map_or_else(|| self.readiness(), Ok)?;
        let tcp =
            options.listen_reserved(self.local, self.backlog, Some(reserved), Some(readiness));
        let tcp = tcp.map_err(|error| {
            report!(
                "forebay: process {} cannot listen on {}: {error}; check that a taken device has the address, and \
                 that no other listener has the port",
                process::id(),
                self.local
            );
            unconnected_errno(&error)
        })?;
        tcp.set_nonblocking(true);
        let membership = runtime.membership.clone();
        let served = Arc::new(Served { tcp, origin: Origin::here(), membership });
        self.adopt(&served, self.inherited.all().into_iter());
        if !is_placed {
            self.place(socket, served.readiness()?)?;
        }
        if let Some(membership) = &served.membership {
            self.addresses().for_each(|address| membership.join(address));
        }
        // The parent's copy stays as it is: see `is_of_parent`.
        std::mem::forget(self.served.swap(Some(Arc::clone(&served))));
        Ok(served)
    }

    /// Serves the listener once the process that receives the packets has ended. Until then its descriptor is never
    /// readable.
    fn wait_in_turn(&self, socket: &Arc<Socket>) -> Result<(), Errno> {
        if self.set_placeholder(socket)? {
            report!(
                "forebay: another process serves {}: process {} will serve it when that one has ended",
                self.local,
                process::id()
            );
        }
        when_free(serve_all)
    }

    /// Puts a descriptor that is never readable at the listener's numbers; false if it was there.
    fn set_placeholder(&self, socket: &Arc<Socket>) -> Result<bool, Errno> {
        let mut placeholder = self.placeholder();
        if placeholder.is_some() {
            return Ok(false);
        }
        let (setter, descriptor) = self.readiness()?;
        self.place(socket, descriptor.as_fd())?;
        *placeholder = Some((setter, descriptor));
        Ok(true)
    }

    /// Creates a readiness descriptor, which is never writable. It signals what comes as the program has asked, from the first
    /// connection on.
    fn readiness(&self) -> Result<(ReadinessSetter, ReadinessDescriptor), Errno> {
        let (mut setter, descriptor) = readiness().map_err(|error| unconnected_errno(&error))?;
        setter.not_writable(&descriptor);
        abi::copy_signals(self.kernel(), descriptor.as_fd());
        Ok((setter, descriptor))
    }

    /// Replaces each of the listener's descriptors by a readiness descriptor.
    fn place(&self, socket: &Arc<Socket>, readiness: BorrowedFd<'_>) -> Result<(), Errno> {
        // The flag belongs to all processes that have the kernel's socket.
        let is_nonblocking = fcntl_getfl(self.kernel())?.contains(OFlags::NONBLOCK);
        self.set_nonblocking(is_nonblocking);
        let mut flags = fcntl_getfl(readiness)?; // with that of signals
        flags.set(OFlags::NONBLOCK, is_nonblocking);
        fcntl_setfl(readiness, flags)?;
        // Another thread may close a number, and open a file there: what takes long is done before.
        let registered = Registered::of(table::numbers_of(socket));
        for number in table::numbers_of(socket) {
            let flags = abi::with_number(number, |descriptor| fcntl_getfd(descriptor))?;
            registered.replace(number, readiness, flags.contains(FdFlags::CLOEXEC))?;
        }
        UNSERVED.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Wakes calls that wait on the placeholder; they then find why nothing can be accepted.
    fn end_placeholder(&self) {
        if let Some((setter, descriptor)) = &mut *self.placeholder() {
            setter.end(Ended::Both, descriptor);
        }
    }

    /// Not locked at a fork: who holds it holds the lock of serving, or drops the listener.
    fn copies(&self) -> MutexGuard<'_, Option<Copies>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn placeholder(&self) -> MutexGuard<'_, Option<(ReadinessSetter, ReadinessDescriptor)>> {
        self.placeholder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adopts an option that the program has set on the kernel's socket.
    pub(crate) fn adopt_option(&self, option: SocketOption) {
        self.inherited.add(option);
        if let Some(served) = self.served_here() {
            self.adopt(&served, std::iter::once(option));
        }
    }

    fn adopt(&self, served: &Served, options: impl Iterator<Item = SocketOption>) {
        let settings: Vec<_> =
            options.filter_map(|option| TcpSetting::of(option, self.kernel())).collect();
        let packets = if self.local.is_ipv6() { Packets::Both } else { Packets::V4 };
        served.tcp.set_option(|options| {
            settings.iter().for_each(|setting| setting.apply(packets, options));
        });
        self.adopt_fast_open(served);
        if let Ok(readiness) = served.readiness() {
            let wait = timeout(self.kernel(), libc::SO_RCVTIMEO);
            let _ = set_socket_timeout(readiness, Timeout::Recv, wait); // as valid as it was there
        }
    }

    /// Adopts Fast Open of the kernel's socket.
    fn adopt_fast_open(&self, served: &Served) {
        let value = |name| abi::option_value(self.kernel(), SocketOption::of_tcp(name));
        let queue = value(libc::TCP_FASTOPEN).ok().and_then(|queue| u32::try_from(queue).ok());
        let no_cookie = value(libc::TCP_FASTOPEN_NO_COOKIE).is_ok_and(|no_cookie| no_cookie != 0);
        let (queue, keys) = (queue.unwrap_or(0), abi::fast_open_keys(self.kernel()));
        // Ignored: the run has ended, which the next call tells.
        let _ = served.tcp.set_fast_open(|options| {
            *options = FastOpenOptions { queue, no_cookie, keys, ..*options };
        });
    }
}

/// Serves all listeners, now that this process may. Failures are reported, and returned by `accept`.
fn serve_all() -> StillWaits {
    let mut still_waits = StillWaits(false);
    for number in table::within(0, u32::MAX) {
        if let Some(socket) = table::look(number)
            && let Socket::Listener(listener) = &*socket
        {
            match listener.serve(socket.shared()) {
                Ok(_) => {}
                Err(Errno::BUSY) => still_waits = StillWaits(true),
                Err(_) => listener.end_placeholder(),
            }
        }
    }
    still_waits
}

impl Served {
    fn readiness(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.tcp.descriptor().map_err(|error| unconnected_errno(&error))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        LISTENERS.fetch_sub(1, Ordering::Relaxed);
        if let Some(served) = self.served_here() {
            drop(self.served.swap(None));
            let others = self.copies().take().map(Copies::close_own);
            return passing::leave(served, self.addresses().collect(), others);
        }
        let placeholder = self.placeholder().take();
        if placeholder.is_none() {
            UNSERVED.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some((setter, descriptor)) = placeholder {
            drop(descriptor); // first: who polls it would see the setter's end
            drop(setter);
        }
    }
}
