//! AF_XDP sockets: packets that the kernel receives straight into frames, and sends straight from
//! them.
//!
//! A [`Socket`] has the four rings of one device queue and the frames that the kernel holds. Only
//! frames lent to the kernel are put into its rings, and every address in its answers is looked up
//! among those, so no memory has two holders.

mod bind; // setup of a socket, up to its binding to a queue
mod ring; // rings shared with the kernel

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

/// The packet continues in the next descriptor (`XDP_PKT_CONTD`).
const XDP_PKT_CONTD: u32 = 1 << 0;

/// Number of frames given to the kernel at a time, to amortize the ring accesses.
const FILL_BATCH: u32 = 32;

/// Invalid entry or index in a ring that the kernel writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidXdpRing {
    /// Invalid index of a ring.
    #[error(transparent)]
    Ring(#[from] RingBroken),
    /// Invalid address or length of a frame.
    #[error("the kernel's {ring} ring names {len_bytes} bytes at {address}, where it has no frame")]
    Frame {
        /// The ring.
        ring: &'static str,
        /// Offset from the beginning of the packet memory.
        address: u64,
        /// Length.
        len_bytes: u32,
    },
}

/// Outcome of a wake-up of the kernel for transmission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Kicked {
    /// The kernel has taken everything, or does so without a call.
    Done,
    /// The kernel must be called again: its budget for one call is spent, or the device is busy.
    Again,
    /// The device dropped the packet that was taken last.
    Dropped,
    /// The link is down: packets wait.
    Down,
    /// The socket has lost its device.
    Gone,
}

/// Packets for a socket that the kernel dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelDrops {
    /// Dropped because the fill ring was empty, or the packet too large.
    pub rx_dropped: u64,
    /// Dropped because the rx ring was full.
    pub rx_ring_full: u64,
}

/// One queue of a device: its rings and the frames that the kernel holds.
pub struct Socket {
    // In drop order: the kernel releases the memory once the rings are unmapped and the descriptor
    // is closed; then the frames can return to their owners, and the memory can be unmapped.
    fill: Producing<1>,
    completion: Consuming<1>,
    rx: Option<Consuming<2>>,
    tx: Option<Producing<2>>,
    handle: Handle,
    teardown: Option<Teardown>,
    lent: DeviceOwned,
    /// Number of frames in the tx and completion rings.
    sending: u32,
    _region: Arc<Region>,
}

impl Socket {
    /// Opens a socket and binds it to its queue. Frames of `pool`, and of all pools of its region,
    /// can be lent to it.
    ///
    /// # Errors
    /// The call that the kernel refused.
    pub fn open(config: &SocketConfig, pool: &Pool) -> Result<Self, OpenError> {
        bind::open(config, pool)
    }

    /// True if the device accesses the frames itself, rather than the kernel copying to and from
    /// them.
    #[must_use]
    pub fn is_zero_copy(&self) -> bool {
        sockopt::xdp_options(self.as_fd())
            .is_ok_and(|flags| flags.contains(net::xdp::XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY))
    }

    /// True if the socket has a tx ring.
    #[must_use]
    pub fn transmits(&self) -> bool {
        self.tx.is_some()
    }

    /// Gives the kernel frames to receive into, until it has `most` of them or `pool` has none
    /// left. Returns the number of frames in the fill ring.
    ///
    /// # Errors
    /// If the ring's indices are invalid.
    pub fn fill(
        &mut self,
        pool: &mut Pool,
        room_bytes: u32,
        most: u32,
    ) -> Result<u32, InvalidXdpRing> {
        debug_assert!(most >= FILL_BATCH, "frames are posted {FILL_BATCH} at a time, or never");
        let spare = self.fill.entries().saturating_sub(most);
        let room = self.fill.room(spare + FILL_BATCH)?.saturating_sub(spare);
        if room >= FILL_BATCH {
            self.lend(pool, room_bytes, room)?;
        }
        // A driver that found too few frames may say so when the ring is full again: without the
        // call it would never look, as without frames it has no interrupt.
        if self.fill.needs_wakeup() {
            self.wake_receive();
        }
        Ok(self.fill.queued())
    }

    /// Puts up to `count` frames of `pool` into the fill ring.
    fn lend(&mut self, pool: &mut Pool, room_bytes: u32, count: u32) -> Result<(), InvalidXdpRing> {
        for _ in 0..count {
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
        Ok(())
    }

    /// Takes up to `max` frames that the kernel has received into. `each` gets the frame, and
    /// whether the packet continues in the next one.
    ///
    /// # Errors
    /// If the kernel returns a frame that it does not have.
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
            let invalid = InvalidXdpRing::Frame { ring: "rx", address, len_bytes };
            let mut frame = self.lent.take_back(address).ok_or(invalid)?;
            if !frame.place(address, len_bytes) {
                return Err(invalid);
            }
            frame.prefetch();
            let continued =
                if options & XDP_PKT_CONTD == 0 { Continued::No } else { Continued::Yes };
            each(frame, continued);
        }
        rx.release();
        Ok(count)
    }

    /// True if received frames are in the rx ring.
    ///
    /// # Errors
    /// If the ring's indices are invalid.
    pub fn has_received(&mut self) -> Result<bool, InvalidXdpRing> {
        Ok(match &mut self.rx {
            Some(rx) => rx.ready(1)? > 0,
            None => false,
        })
    }

    /// Number of free entries of the tx ring; 0 without a tx ring. The kernel's index is read anew
    /// if there seem to be fewer than `wanted`.
    ///
    /// # Errors
    /// If the ring's indices are invalid.
    pub fn send_room(&mut self, wanted: u32) -> Result<u32, InvalidXdpRing> {
        Ok(match &mut self.tx {
            Some(tx) => tx.room(wanted)?,
            None => 0,
        })
    }

    /// True if the kernel can be given this frame: it is of this memory, and its chunk of the right
    /// size.
    #[must_use]
    pub fn takes(&self, frame: &Frame) -> bool {
        self.lent.takes(frame)
    }

    /// Puts a frame into the tx ring, visible to the kernel after the next [`kick`](Self::kick).
    ///
    /// # Errors
    /// Returns the frame if the kernel cannot be given it, or it is empty.
    ///
    /// # Panics
    /// If the tx ring has no [room](Self::send_room).
    #[inline]
    pub fn send(&mut self, frame: Frame, continued: Continued) -> Result<(), Frame> {
        let Some(tx) = &mut self.tx else { return Err(frame) };
        let len_bytes = frame.len_bytes();
        // The kernel rejects descriptors without bytes.
        if len_bytes == 0 {
            return Err(frame);
        }
        let address = self.lent.lend(frame)?;
        let options = if continued == Continued::Yes { XDP_PKT_CONTD } else { 0 };
        tx.push(XdpDescriptor { address, len_bytes, options }.words());
        self.sending += 1;
        Ok(())
    }

    /// True if frames that were sent are not completed yet.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Publishes the tx ring to the kernel, and calls the kernel if it requests that.
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
            // EAGAIN, ENOBUFS and unexpected errors: the packets are still in the ring.
            Err(_) => Kicked::Again,
        }
    }

    /// Index of the next tx entry that the kernel reads: the number of frames taken so far, modulo
    /// 2^32.
    ///
    /// # Errors
    /// If the ring's indices are invalid.
    pub fn sent(&mut self) -> Result<u32, InvalidXdpRing> {
        Ok(match &mut self.tx {
            Some(tx) => tx.consumed()?,
            None => 0,
        })
    }

    /// Takes back up to `max` frames whose transmission is complete.
    ///
    /// # Errors
    /// If the kernel returns a frame that it does not have.
    pub fn complete(
        &mut self,
        max: u32,
        mut each: impl FnMut(Frame),
    ) -> Result<u32, InvalidXdpRing> {
        let count = self.completion.ready(max)?.min(max);
        for _ in 0..count {
            let [address] = self.completion.next();
            let invalid = InvalidXdpRing::Frame { ring: "completion", address, len_bytes: 0 };
            each(self.lent.take_back(address).ok_or(invalid)?);
        }
        self.completion.release();
        self.sending = self.sending.saturating_sub(count);
        Ok(count)
    }

    /// Counters of packets that the kernel dropped since the socket was opened.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn kernel_drops(&self) -> io::Result<KernelDrops> {
        let statistics = sockopt::xdp_statistics(self.as_fd())?;
        let rx_ring_full = statistics.rx_ring_full.unwrap_or(0);
        Ok(KernelDrops { rx_dropped: statistics.rx_dropped, rx_ring_full })
    }

    /// True if the socket still has its device: the loss of it is the only error that a socket
    /// reports.
    #[must_use]
    pub fn has_device(&self) -> bool {
        matches!(sockopt::socket_error(self.as_fd()), Ok(Ok(())))
    }

    /// Calls the driver to refill from the fill ring and to process received packets.
    pub fn wake_receive(&self) {
        // The call returns no data, and a refusal leaves nothing to do.
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
    /// The packet continues in the next frame.
    Yes,
}

/// Waits until every CPU has finished receiving that it began before this call. Packets that went
/// by a map's earlier contents are then in the ring, or dropped and counted.
///
/// `MEMBARRIER_CMD_GLOBAL` waits for an RCU grace period (`kernel/sched/membarrier.c`), and drivers
/// receive within RCU read-side sections.
pub fn wait_for_receivers() {
    if membarrier(MembarrierCommand::Global).is_err() {
        // The kernel refuses with nohz_full CPUs. Receiving takes a few milliseconds at most.
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
