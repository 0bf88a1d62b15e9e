//! AF_XDP sockets: packets that the kernel puts straight into frames, and sends straight from them.
//!
//! A [`Socket`] has the four rings of one device queue and the frames that the kernel holds. Whatever
//! the kernel is told of is a frame that was lent to it, and whatever it says is looked up among
//! those, so that no memory has two holders.

mod bind;
mod ring;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub use bind::{CopyMode, OpenError, SocketConfig};
use bind::{Handle, Teardown};
use forebay_buf::device_owned::DeviceOwned;
use forebay_buf::{Frame, Pool, Region};
pub use ring::RingBroken;
use ring::{Consuming, Producing};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags, sockopt};
use rustix::thread::{MembarrierCommand, membarrier};

/// A packet goes on in the next descriptor (`XDP_PKT_CONTD`).
const XDP_PKT_CONTD: u32 = 1 << 0;

/// The kernel is given frames this many at a time, unless it has next to none.
const FILL_BATCH: u32 = 32;

/// Word of a kernel that cannot be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidXdpRing {
    /// Of a ring.
    #[error(transparent)]
    Ring(#[from] RingBroken),
    /// Of a frame.
    #[error("the kernel's {ring} ring names {len_bytes} bytes at {address}, where it has no frame")]
    Frame {
        /// The ring.
        ring: &'static str,
        /// Offset, from the beginning of the packet memory on.
        address: u64,
        /// Length.
        len_bytes: u32,
    },
}

/// Answer of the kernel to a call to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Kicked {
    /// The kernel has taken what there was, or does so by itself.
    Done,
    /// The kernel wants to be called again: it has taken as much as it does at once, or the device is busy.
    Again,
    /// The device dropped the last packet that was taken.
    Dropped,
    /// The link is down: packets wait.
    Down,
    /// The socket has no device any more.
    Gone,
}

/// Packets that the kernel had for a socket and dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelDrops {
    /// For want of a frame in the fill ring, or because they were too large.
    pub rx_dropped: u64,
    /// For want of room in the rx ring.
    pub rx_ring_full: u64,
}

/// One queue of a device: its rings and the frames that the kernel has.
pub struct Socket {
    // In the order in which they must go: the kernel lets go of the memory once the rings are
    // unmapped and the descriptor is closed; then the frames may go home, and the memory with them.
    fill: Producing<1>,
    completion: Consuming<1>,
    rx: Option<Consuming<2>>,
    tx: Option<Producing<2>>,
    handle: Handle,
    teardown: Option<Teardown>,
    lent: DeviceOwned,
    /// Frames that are to be sent.
    sending: u32,
    _region: Arc<Region>,
}

impl Socket {
    /// Opens a socket and binds it to its queue. The frames of `pool`, and of all pools of the same
    /// region, can be lent to it.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn open(config: &SocketConfig, pool: &Pool) -> Result<Self, OpenError> {
        bind::open(config, pool)
    }

    /// True if the device uses the frames itself, rather than the kernel copying to and from them.
    #[must_use]
    pub fn is_zero_copy(&self) -> bool {
        sockopt::xdp_options(self.as_fd())
            .is_ok_and(|flags| flags.contains(net::xdp::XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY))
    }

    /// True if packets can be sent.
    #[must_use]
    pub fn transmits(&self) -> bool {
        self.tx.is_some()
    }

    /// Gives the kernel frames to receive into, until it has `most` of them or `pool` has none.
    /// Returns how many it has for that now.
    ///
    /// # Errors
    /// When the ring is broken.
    pub fn fill(
        &mut self,
        pool: &mut Pool,
        room_bytes: u32,
        most: u32,
    ) -> Result<u32, InvalidXdpRing> {
        let spare = self.fill.entries().saturating_sub(most);
        let room = self.fill.room(spare + FILL_BATCH)?.saturating_sub(spare);
        if room < FILL_BATCH {
            return Ok(self.fill.queued());
        }
        for _ in 0..room {
            let lent = pool.allocate(room_bytes).map(|frame| self.lent.lend(frame));
            match lent {
                Some(Ok(address)) => self.fill.push([address]),
                none_that_will_do => {
                    if let Some(Err(frame)) = none_that_will_do {
                        pool.put(frame); // only chunks of another size are left
                    }
                    self.fill.consumed()?;
                    break;
                }
            }
        }
        self.fill.submit();
        if self.fill.needs_wakeup() {
            self.wake_receive();
        }
        Ok(self.fill.queued())
    }

    /// Takes up to `max` frames that the kernel has received into. `each` gets the frame, and whether
    /// the packet goes on in the next one.
    ///
    /// # Errors
    /// When the kernel names what it does not have.
    #[inline]
    pub fn receive(
        &mut self,
        max: u32,
        mut each: impl FnMut(Frame, Continued),
    ) -> Result<u32, InvalidXdpRing> {
        let Some(rx) = &mut self.rx else { return Ok(0) };
        let count = rx.ready(max)?.min(max);
        for _ in 0..count {
            let XdpDescriptor { address, len_bytes, options } = XdpDescriptor::of(rx.next());
            let lied = InvalidXdpRing::Frame { ring: "rx", address, len_bytes };
            let mut frame = self.lent.take_back(address).ok_or(lied)?;
            if !frame.place(address, len_bytes) {
                return Err(lied);
            }
            frame.prefetch();
            let continued =
                if options & XDP_PKT_CONTD == 0 { Continued::No } else { Continued::Yes };
            each(frame, continued);
        }
        rx.release();
        Ok(count)
    }

    /// True if frames wait to be taken.
    ///
    /// # Errors
    /// When the ring is broken.
    pub fn has_received(&mut self) -> Result<bool, InvalidXdpRing> {
        Ok(match &mut self.rx {
            Some(rx) => rx.ready(1)? > 0,
            None => false,
        })
    }

    /// Number of frames for which there is room to be sent; 0 where nothing can be.
    ///
    /// # Errors
    /// When the ring is broken.
    pub fn send_room(&mut self, wanted: u32) -> Result<u32, InvalidXdpRing> {
        Ok(match &mut self.tx {
            Some(tx) => tx.room(wanted)?,
            None => 0,
        })
    }

    /// True if a frame is one that the kernel can be given: of this memory, and of chunks of the
    /// right size.
    #[must_use]
    pub fn takes(&self, frame: &Frame) -> bool {
        self.lent.takes(frame)
    }

    /// Puts a frame into the tx ring; the kernel sees it with the next [`kick`](Self::kick).
    ///
    /// # Errors
    /// With the frame: when it is not one that the kernel can be given, or is empty.
    ///
    /// # Panics
    /// Without [room](Self::send_room).
    #[inline]
    pub fn send(&mut self, frame: Frame, continued: Continued) -> Result<(), Frame> {
        let Some(tx) = &mut self.tx else { return Err(frame) };
        let len_bytes = frame.len_bytes();
        if len_bytes == 0 {
            return Err(frame);
        }
        let address = self.lent.lend(frame)?;
        let options = if continued == Continued::Yes { XDP_PKT_CONTD } else { 0 };
        tx.push(XdpDescriptor { address, len_bytes, options }.words());
        self.sending += 1;
        Ok(())
    }

    /// True if frames that were sent have not come back.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Shows the kernel what was put into the tx ring, and calls it if it wants to be called.
    pub fn kick(&mut self) -> Kicked {
        let Some(tx) = &mut self.tx else { return Kicked::Done };
        tx.submit();
        if !tx.needs_wakeup() {
            return Kicked::Done;
        }
        match net::send(self.handle.as_fd(), &[], SendFlags::DONTWAIT) {
            Ok(_) => Kicked::Done,
            Err(Errno::BUSY) => Kicked::Dropped,
            Err(Errno::NETDOWN) => Kicked::Down,
            Err(Errno::NXIO) => Kicked::Gone,
            // EAGAIN and ENOBUFS; whatever else there may be, the packets are still in the ring.
            Err(_) => Kicked::Again,
        }
    }

    /// Number of frames that the kernel has taken to be sent, modulo 2^32: the index of the next one.
    ///
    /// # Errors
    /// When the ring is broken.
    pub fn sent(&mut self) -> Result<u32, InvalidXdpRing> {
        Ok(match &mut self.tx {
            Some(tx) => tx.consumed()?,
            None => 0,
        })
    }

    /// Takes up to `max` frames back whose packets were sent.
    ///
    /// # Errors
    /// When the kernel names what it does not have.
    pub fn complete(
        &mut self,
        max: u32,
        mut each: impl FnMut(Frame),
    ) -> Result<u32, InvalidXdpRing> {
        let count = self.completion.ready(max)?.min(max);
        for _ in 0..count {
            let [address] = self.completion.next();
            let lied = InvalidXdpRing::Frame { ring: "completion", address, len_bytes: 0 };
            each(self.lent.take_back(address).ok_or(lied)?);
        }
        self.completion.release();
        self.sending = self.sending.saturating_sub(count);
        Ok(count)
    }

    /// Packets that the kernel has dropped since the socket was opened.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn kernel_drops(&self) -> io::Result<KernelDrops> {
        let statistics = sockopt::xdp_statistics(self.as_fd())?;
        let rx_ring_full = statistics.rx_ring_full.unwrap_or(0);
        Ok(KernelDrops { rx_dropped: statistics.rx_dropped, rx_ring_full })
    }

    /// True if the device is still there: its end is the only error that a socket is told of.
    #[must_use]
    pub fn has_device(&self) -> bool {
        matches!(sockopt::socket_error(self.as_fd()), Ok(Ok(())))
    }

    /// Has the driver look for frames to receive into, and for packets.
    pub fn wake_receive(&self) {
        // There is nothing to be received that way, and nothing to be done if it is refused.
        let _ = net::recv(self.as_fd(), &mut [0; 0], RecvFlags::DONTWAIT);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Socket({} frames lent)", self.lent.len())
    }
}

/// Continuation of a packet in the next frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Continued {
    /// The packet ends here.
    No,
    /// The packet goes on.
    Yes,
}

/// Waits until no CPU is any more in the middle of receiving what it began to receive before: what
/// it found in a map that has changed since is in the ring then, or dropped and counted.
///
/// `MEMBARRIER_CMD_GLOBAL` waits for a grace period of RCU (`kernel/sched/membarrier.c`), under which
/// drivers receive.
pub fn wait_for_receivers() {
    if membarrier(MembarrierCommand::Global).is_err() {
        // It is refused where CPUs have no tick. Receiving takes a few milliseconds at most.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// `struct xdp_desc` of `linux/if_xdp.h`.
struct XdpDescriptor {
    address: u64,
    len_bytes: u32,
    options: u32,
}

impl XdpDescriptor {
    #[inline]
    fn of([address, rest]: [u64; 2]) -> Self {
        let [a, b, c, d, options @ ..] = rest.to_ne_bytes();
        let len_bytes = u32::from_ne_bytes([a, b, c, d]);
        Self { address, len_bytes, options: u32::from_ne_bytes(options) }
    }

    #[inline]
    fn words(&self) -> [u64; 2] {
        let [a, b, c, d] = self.len_bytes.to_ne_bytes();
        let [e, f, g, h] = self.options.to_ne_bytes();
        [self.address, u64::from_ne_bytes([a, b, c, d, e, f, g, h])]
    }
}
