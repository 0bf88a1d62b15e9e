//! Setup of a socket, up to its binding to a queue, on memory that all sockets of an engine share.
//!
//! The first socket registers the packet memory with the kernel (the UMEM); the others share it.
//! The copy mode and scatter setting of the first one apply to all that share with it, so a socket
//! that needs other settings registers the same memory again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
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
use crate::hidden::Hidden;

/// Longest wait for a busy queue: the kernel takes a closed socket down after close(2) has
/// returned.
const TEARDOWN_MAX: Duration = Duration::from_secs(2);

/// Pause between two attempts to bind.
const TEARDOWN_WAIT: Duration = Duration::from_millis(2);

/// Socket option: most packets taken by one call to send in copy mode (`linux/if_xdp.h`, Linux
/// 6.17).
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// Busy polling: time in µs for which a call polls the driver in vain, and budget of packets.
const BUSY_POLL_US: u32 = 20;
const BUSY_POLL_BUDGET: u32 = 64;

/// Copy mode: who writes a frame into packet memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CopyMode {
    /// The device if it supports that, else the kernel.
    #[default]
    Auto,
    /// The kernel copies.
    Copy,
    /// The device writes it.
    ZeroCopy,
}

/// Configuration of a socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketConfig {
    /// Index of the interface.
    pub interface: u32,
    /// Queue of the interface.
    pub queue: u32,
    /// Size of the chunks that are lent: 2048 or 4096 bytes.
    pub chunk_bytes: u32,
    /// Copy mode.
    pub copying: CopyMode,
    /// True if a packet may be larger than a chunk, and span several.
    pub is_scattered: bool,
    /// True if our calls poll the driver instead of its interrupts.
    pub busy_poll: bool,
    /// Entries of the rx ring, a power of two; `None` to receive nothing.
    pub rx_entries: Option<u32>,
    /// Entries of the tx ring, a power of two; `None` to send nothing.
    pub tx_entries: Option<u32>,
    /// Entries of the fill ring, a power of two.
    pub fill_entries: u32,
}

/// Failure to open a socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {source}")]
pub struct OpenError {
    /// Attempt.
    pub action: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

impl OpenError {
    /// Adds the attempt to an error, for `map_err`.
    fn of<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { action, source: source.into() }
    }

    fn is(&self, errno: Errno) -> bool {
        self.source.raw_os_error() == Some(errno.raw_os_error())
    }
}

/// Packet memory registered by a socket that is still open.
struct Umem {
    region: Arc<Region>,
    chunk_bytes: u32,
    /// Mode in effect: never `Auto`.
    copying: CopyMode,
    is_scattered: bool,
    socket: Weak<Hidden>,
}

static UMEMS: Mutex<Vec<Umem>> = Mutex::new(Vec::new());

fn umems() -> MutexGuard<'static, Vec<Umem>> {
    // The list is consistent after every step, so a poisoned lock is usable.
    UMEMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Descriptor of a socket whose memory other sockets may share.
pub(super) struct Handle {
    /// `Some` until drop.
    socket: Option<Arc<Hidden>>,
    /// True if others can find it in [`UMEMS`].
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
            // Others hold the descriptor only under the lock, so this closes it.
            let mut umems = umems();
            self.socket = None;
            umems.retain(|umem| umem.socket.strong_count() > 0);
        }
    }
}

/// Implements [`Socket::open`].
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
            // EBADF: that socket lost its device. EOPNOTSUPP: this driver lacks a feature of that
            // one.
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
    /// True if a socket with this configuration can share the memory.
    fn suits(&self, config: &SocketConfig, pool: &Pool) -> bool {
        Arc::ptr_eq(&self.region, pool.region())
            && self.chunk_bytes == config.chunk_bytes
            && self.is_scattered == config.is_scattered
            && (config.copying == CopyMode::Auto || config.copying == self.copying)
    }
}

/// UMEM of a socket: its own, or that of another.
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
        .and_then(Hidden::new)
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
        // Older kernels take 32 packets a call and are called more often.
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

fn with_rings(socket: Hidden, config: &SocketConfig, pool: &Pool) -> Result<Socket, OpenError> {
    let fd = socket.as_fd();
    // Every frame that is being sent fits into the completion ring.
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

/// Binds, and waits meanwhile for an earlier socket of the same queue to be taken down.
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

/// On drop, waits until the driver of a zero-copy queue has released the frames of a closed socket.
/// The kernel releases them only some time after the close (`xp_release_deferred`), and the queue
/// is busy until then. To detect that, a second socket tries to bind to the queue.
pub(super) struct Teardown {
    socket: Hidden,
    config: SocketConfig,
    /// Memory that the second socket has registered.
    _region: Region,
}

impl Teardown {
    /// Prepares the second socket. To be called before privileges are dropped.
    fn of(config: &SocketConfig) -> Result<Self, OpenError> {
        const ENTRIES: u32 = 2;
        let action = "prepare for the end of a zero-copy queue";
        let config = SocketConfig { copying: CopyMode::Copy, is_scattered: false, ..*config };
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::XDP, SocketType::RAW, flags, None)
            .and_then(Hidden::new)
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
        // Still busy: another program has the queue by now. Refused: the device is gone.
        let _ = bind_when_free(self.socket.as_fd(), &self.config, RegisteredMemory::Own);
    }
}

/// Enables preferred busy polling (`Documentation/networking/napi.rst`, "Busy polling").
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
    // SAFETY: the kernel reads the four bytes of a u32 there, and keeps no pointer.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, LEN_BYTES) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
