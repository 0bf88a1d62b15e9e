//! From a fresh socket to one that is bound to its queue, on memory that all sockets of an engine
//! share.
//!
//! The first socket registers the packet memory with the kernel (the UMEM); the others share it.
//! What one was bound with, copying and scattering, holds for those that share with it: one that
//! needs other settings registers the same memory again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use forebay_buf::device_owned::DeviceOwned;
use forebay_buf::{Pool, Region};
use rustix::io::Errno;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XDP_PGOFF_RX_RING,
    XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpRingOffset,
    XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use super::Socket;
use super::ring::{Consuming, Producing, XdpRingPlace};

/// Longest time for which a queue may be busy: the kernel takes a closed socket down after the close has returned.
const TEARDOWN_MAX: Duration = Duration::from_secs(2);

/// Wait between two looks.
const TEARDOWN_WAIT: Duration = Duration::from_millis(2);

/// The most packets that one call to send takes in copy mode (`linux/if_xdp.h`, Linux 6.17).
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// Time for which a driver is polled by a call that finds nothing, and its budget of packets.
const BUSY_POLL_US: u32 = 20;
const BUSY_POLL_BUDGET: u32 = 64;

/// Copy modes: who brings a frame into packet memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CopyMode {
    /// The device if it can, else the kernel.
    #[default]
    Auto,
    /// The kernel.
    Copy,
    /// The device.
    ZeroCopy,
}

/// Configuration of a socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketConfig {
    /// The interface's index.
    pub interface: u32,
    /// Queue of the interface.
    pub queue: u32,
    /// The size of the chunks that are lent: 2048 or 4096.
    pub chunk_bytes: u32,
    /// Copy mode.
    pub copying: CopyMode,
    /// True if packets may be larger than a chunk, and come in several.
    pub is_scattered: bool,
    /// True if the driver is polled by our calls rather than by its interrupts.
    pub busy_poll: bool,
    /// Entries of the rx ring, a power of two; none if nothing is to be received.
    pub rx_entries: Option<u32>,
    /// The same of the tx ring.
    pub tx_entries: Option<u32>,
    /// Entries of the fill ring.
    pub fill_entries: u32,
}

/// Refusal of a socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub struct OpenError {
    /// Attempt.
    pub action: &'static str,
    /// Answer of the kernel.
    pub source: io::Error,
}

impl OpenError {
    /// Names what was tried, for `map_err`.
    fn of<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { action, source: source.into() }
    }

    fn is(&self, errno: Errno) -> bool {
        self.source.raw_os_error() == Some(errno.raw_os_error())
    }
}

/// Packet memory that is registered, by a socket that lives.
struct Umem {
    region: Arc<Region>,
    chunk_bytes: u32,
    /// As it was bound.
    copying: CopyMode,
    is_scattered: bool,
    socket: Weak<OwnedFd>,
}

static UMEMS: Mutex<Vec<Umem>> = Mutex::new(Vec::new());

fn umems() -> MutexGuard<'static, Vec<Umem>> {
    // A list that is kept whole at every step.
    UMEMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket's descriptor, which others may share memory with.
pub(super) struct Handle {
    /// There until the end.
    socket: Option<Arc<OwnedFd>>,
    /// True if others can find it among the [`UMEMS`].
    is_listed: bool,
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Some(socket) => socket.as_fd(),
            None => unreachable!("a handle has its socket until it is dropped"),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.is_listed {
            // Others hold the descriptor under the lock only, so this closes it.
            let mut umems = umems();
            self.socket = None;
            umems.retain(|umem| umem.socket.strong_count() > 0);
        }
    }
}

/// See [`Socket::open`].
pub(super) fn open(config: &SocketConfig, pool: &Pool) -> Result<Socket, OpenError> {
    let mut umems = umems();
    let mut shared = None;
    for umem in umems.iter().filter(|umem| umem.suits(config, pool)) {
        let Some(first) = umem.socket.upgrade() else { continue };
        match bound(config, pool, RegisteredMemory::SharedWith(first.as_fd())) {
            Ok(socket) => {
                shared = Some(socket);
                break;
            }
            // That socket lost its device, or this driver cannot do what that one can.
            Err(error) if [Errno::BADF, Errno::OPNOTSUPP].iter().any(|&no| error.is(no)) => {}
            Err(error) => return Err(error),
        }
    }
    let mut socket = match shared {
        Some(socket) => socket,
        None => bound(config, pool, RegisteredMemory::Own)?,
    };
    umems.push(Umem {
        region: Arc::clone(pool.region()),
        chunk_bytes: config.chunk_bytes,
        copying: if socket.is_zero_copy() { CopyMode::ZeroCopy } else { CopyMode::Copy },
        is_scattered: config.is_scattered,
        socket: socket.handle.socket.as_ref().map(Arc::downgrade).unwrap_or_default(),
    });
    socket.handle.is_listed = true;
    Ok(socket)
}

impl Umem {
    /// True if a socket that is to be like this can share with it.
    fn suits(&self, config: &SocketConfig, pool: &Pool) -> bool {
        Arc::ptr_eq(&self.region, pool.region())
            && self.chunk_bytes == config.chunk_bytes
            && self.is_scattered == config.is_scattered
            && (config.copying == CopyMode::Auto || config.copying == self.copying)
    }
}

/// Memory that a socket works on.
#[derive(Clone, Copy)]
enum RegisteredMemory<'a> {
    Own,
    SharedWith(BorrowedFd<'a>),
}

fn bound(
    config: &SocketConfig,
    pool: &Pool,
    memory: RegisteredMemory<'_>,
) -> Result<Socket, OpenError> {
    let flags = SocketFlags::CLOEXEC;
    let fd = net::socket_with(AddressFamily::XDP, SocketType::RAW, flags, None)
        .map_err(OpenError::of("open an AF_XDP socket"))?;
    if let RegisteredMemory::Own = memory {
        register(fd.as_fd(), pool.region(), config.chunk_bytes)?;
    }
    let mut socket = with_rings(fd, config, pool)?;
    if config.busy_poll {
        prefer_busy_poll(socket.as_fd()).map_err(OpenError::of("turn busy polling on"))?;
    }
    bind_when_free(socket.as_fd(), config, memory)?;
    if socket.is_zero_copy() {
        socket.teardown = Some(Teardown::of(config)?);
    }
    if let Some(entries) = config.tx_entries {
        // Older kernels take 32 at a time, and are called more often.
        let _ = set_option(socket.as_fd(), libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, entries);
    }
    Ok(socket)
}

fn register(socket: BorrowedFd<'_>, region: &Region, chunk_bytes: u32) -> Result<(), OpenError> {
    let (base, len_bytes) = region.span();
    let len_bytes = len_bytes - len_bytes % chunk_bytes as usize;
    let umem = XdpUmemReg {
        addr: base.addr().get() as u64,
        len: len_bytes as u64,
        chunk_size: chunk_bytes,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    let action = "give the packet memory to the kernel";
    sockopt::set_xdp_umem_reg(socket, umem).map_err(OpenError::of(action))
}

fn with_rings(socket: OwnedFd, config: &SocketConfig, pool: &Pool) -> Result<Socket, OpenError> {
    let fd = socket.as_fd();
    // Every frame that is being sent finds room when it is done.
    let completion_entries = config.tx_entries.unwrap_or(1).max(2);
    let sized = || {
        sockopt::set_xdp_umem_fill_ring_size(fd, config.fill_entries)?;
        sockopt::set_xdp_umem_completion_ring_size(fd, completion_entries)?;
        if let Some(entries) = config.rx_entries {
            sockopt::set_xdp_rx_ring_size(fd, entries)?;
        }
        if let Some(entries) = config.tx_entries {
            sockopt::set_xdp_tx_ring_size(fd, entries)?;
        }
        sockopt::xdp_mmap_offsets(fd)
    };
    let offsets = sized().map_err(OpenError::of("set the rings up"))?;
    let place = |ring, page_offset, offsets: XdpRingOffset, entries| XdpRingPlace {
        ring,
        page_offset,
        offsets,
        entries,
    };
    let action = "map the rings";
    let fill = place("fill", XDP_UMEM_PGOFF_FILL_RING, offsets.fr, config.fill_entries);
    let fill = Producing::map(fd, fill).map_err(OpenError::of(action))?;
    let completion =
        place("completion", XDP_UMEM_PGOFF_COMPLETION_RING, offsets.cr, completion_entries);
    let completion = Consuming::map(fd, completion).map_err(OpenError::of(action))?;
    let rx = config
        .rx_entries
        .map(|entries| Consuming::map(fd, place("rx", XDP_PGOFF_RX_RING, offsets.rx, entries)));
    let rx = rx.transpose().map_err(OpenError::of(action))?;
    let tx = config
        .tx_entries
        .map(|entries| Producing::map(fd, place("tx", XDP_PGOFF_TX_RING, offsets.tx, entries)));
    let tx = tx.transpose().map_err(OpenError::of(action))?;
    Ok(Socket {
        fill,
        completion,
        rx,
        tx,
        handle: Handle { socket: Some(Arc::new(socket)), is_listed: false },
        teardown: None,
        lent: DeviceOwned::new(pool, config.chunk_bytes),
        sending: 0,
        _region: Arc::clone(pool.region()),
    })
}

/// Binds, waiting for an earlier socket of the same queue to be taken down.
fn bind_when_free(
    socket: BorrowedFd<'_>,
    config: &SocketConfig,
    memory: RegisteredMemory<'_>,
) -> Result<(), OpenError> {
    let since = Instant::now();
    loop {
        match bind(socket, config, memory) {
            Err(Errno::BUSY) if since.elapsed() < TEARDOWN_MAX => {
                std::thread::sleep(TEARDOWN_WAIT);
            }
            bound => return bound.map_err(OpenError::of("bind to the queue")),
        }
    }
}

fn bind(
    socket: BorrowedFd<'_>,
    config: &SocketConfig,
    memory: RegisteredMemory<'_>,
) -> Result<(), Errno> {
    let to = |flags| SocketAddrXdp::new(flags, config.interface, config.queue);
    let copying = match config.copying {
        CopyMode::Auto => SocketAddrXdpFlags::empty(),
        CopyMode::Copy => SocketAddrXdpFlags::XDP_COPY,
        CopyMode::ZeroCopy => SocketAddrXdpFlags::XDP_ZEROCOPY,
    };
    let scattered = match config.is_scattered {
        true => SocketAddrXdpFlags::XDP_USE_SG,
        false => SocketAddrXdpFlags::empty(),
    };
    match memory {
        RegisteredMemory::Own => {
            let flags = SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP | copying | scattered;
            net::bind(socket, &to(flags))
        }
        RegisteredMemory::SharedWith(first) => {
            let addr = to(SocketAddrXdpFlags::XDP_SHARED_UMEM);
            net::bind(socket, &SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: first })
        }
    }
}

/// Waits, when it is dropped, until the driver of a zero-copy queue has let go of the frames of a
/// socket that is closed: the kernel tells it to only later (`xp_release_deferred`). Until then the
/// queue is busy; so there is a second socket, which can be bound to it when it is not.
pub(super) struct Teardown {
    socket: OwnedFd,
    config: SocketConfig,
    /// Region that the second socket has for packet memory.
    _region: Region,
}

impl Teardown {
    /// To be made before privileges are let go.
    fn of(config: &SocketConfig) -> Result<Self, OpenError> {
        const ENTRIES: u32 = 2;
        let action = "prepare for the end of a zero-copy queue";
        let config = SocketConfig { copying: CopyMode::Copy, is_scattered: false, ..*config };
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::XDP, SocketType::RAW, flags, None)
            .map_err(OpenError::of(action))?;
        let region = Region::allocate(config.chunk_bytes as usize);
        register(socket.as_fd(), &region, config.chunk_bytes)?;
        sockopt::set_xdp_umem_fill_ring_size(&socket, ENTRIES)
            .and_then(|()| sockopt::set_xdp_umem_completion_ring_size(&socket, ENTRIES))
            .and_then(|()| sockopt::set_xdp_rx_ring_size(&socket, ENTRIES))
            .map_err(OpenError::of(action))?;
        Ok(Self { socket, config, _region: region })
    }
}

impl Drop for Teardown {
    fn drop(&mut self) {
        // Busy still, it is another program's by now; refused, it has gone with its device.
        let _ = bind_when_free(self.socket.as_fd(), &self.config, RegisteredMemory::Own);
    }
}

/// `Documentation/networking/napi.rst`, "Busy polling".
fn prefer_busy_poll(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, 1)?;
    set_option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL, BUSY_POLL_US)?;
    set_option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, BUSY_POLL_BUDGET)
}

fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: u32,
) -> io::Result<()> {
    const LEN_BYTES: libc::socklen_t = 4;
    let value = std::ptr::from_ref(&value).cast();
    // SAFETY: the kernel reads as many bytes from there as a u32 has, and keeps nothing.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, LEN_BYTES) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
