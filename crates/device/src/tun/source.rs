//! Packets that the kernel sends to the device, as a source.

use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use forebay_buf::{Frame, Pool};
use forebay_rx::arrive::{
    Attachment, Burst, FrameNeeds, Numbering, PollRequest, Polled, RefusedFrame, SourceError,
};
use forebay_rx::coalesce::gso::{GSO_NONE, NEEDS_CSUM, VIRTIO_NET_HDR_TUNNEL_BYTES, VirtioNetHdr};
use forebay_rx::parse::{Link, Verify};
use forebay_rx::{DropReason, Packet, RxQueue, Source};
use forebay_sys::clock::now_since_1970_ns;
use forebay_sys::error::Error;
use rustix::io::{self, Errno};

use super::TunKind;
use super::open::OpenTun;

/// Length of the longest packet that the kernel cuts for a device (`GSO_LEGACY_MAX_SIZE`,
/// netdevice.h), with an Ethernet header and two tags.
const LARGEST_BYTES: u32 = 65_536 + 22;

/// Maximum length of packets that are copied into a frame of their size; longer ones stay in the
/// frame that they were read into. A waiting packet should not hold many times the memory that it
/// needs, and copying takes a tenth of the time of reading.
const COPIED_BYTES_MAX: u32 = 16 << 10;

/// Interval of reading the kernel's drop counter.
const COUNT_EVERY_NS: u64 = 100_000_000;

/// Time for which packets may still arrive after the device was closed to the kernel.
const CLOSING_NS: u64 = 2_000_000;

/// Maximum number of packets to read from a queue after it was closed: more than the queue holds,
/// unless `txqueuelen` was raised far.
const CLOSING_PACKETS_MAX: usize = 65_536;

/// Source of one queue.
#[derive(Debug)]
pub struct TunSource {
    device: Arc<OpenTun>,
    queue: usize,
    verify: Verify,
    numbering: Numbering,
    /// Frame of the largest size to read the next packet into, whose length is known only after the
    /// read.
    spare: Option<Frame>,
    /// Time of the next read of the kernel's drop counter.
    count_at_ns: u64,
    closing: Option<Closing>,
}

/// End of a source, which still drains its queue.
#[derive(Clone, Copy, Debug)]
struct Closing {
    /// Time from which no packet can arrive any more.
    until_ns: u64,
    /// Number of packets that are still read.
    packets_left: usize,
}

/// Result of a read.
enum TunRead {
    /// A packet was read.
    Packet,
    /// No packet was queued.
    Empty,
    /// No frame was free to read into.
    NoFrame,
}

impl TunSource {
    pub(super) fn new(device: Arc<OpenTun>, queue: usize, verify: Verify) -> Self {
        Self {
            device,
            queue,
            verify,
            numbering: Numbering::of_queue(RxQueue(0), 1),
            spare: None,
            count_at_ns: 0,
            closing: None,
        }
    }

    /// Reads one packet.
    fn read(&mut self, pool: &mut Pool, burst: &mut Burst) -> Result<TunRead, Errno> {
        let Some(mut frame) = self.spare.take().or_else(|| pool.allocate(LARGEST_BYTES)) else {
            return Ok(TunRead::NoFrame);
        };
        let mut header = [0; VIRTIO_NET_HDR_TUNNEL_BYTES];
        let header_bytes = self.device.header_bytes();
        let room = frame.room_mut();
        let mut places = [IoSliceMut::new(&mut header[..header_bytes]), IoSliceMut::new(room)];
        let read = io::readv(self.device.descriptor(self.queue), &mut places);
        let len = match read {
            Ok(len) => len.saturating_sub(header_bytes).min(frame.room_mut().len()),
            Err(errno) => {
                self.spare = Some(frame);
                return match errno {
                    Errno::AGAIN => Ok(TunRead::Empty),
                    errno => Err(errno),
                };
            }
        };
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        frame.set_len(len);
        // The fields behind it are of tunnels, which the kernel cuts.
        let [plain @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _] = header;
        self.take(VirtioNetHdr::from_bytes(plain), frame, pool, burst);
        Ok(TunRead::Packet)
    }

    /// Makes a packet of a frame that was read.
    fn take(&mut self, header: VirtioNetHdr, frame: Frame, pool: &mut Pool, burst: &mut Burst) {
        let arrival = self.numbering.next_arrival();
        let wire_len = frame.len_bytes();
        let link = match self.device.kind() {
            TunKind::Tun => Link::Ip,
            TunKind::Tap => Link::Ethernet,
        };
        let smaller = if wire_len <= COPIED_BYTES_MAX { pool.allocate(wire_len) } else { None };
        let mut packet = match smaller {
            Some(smaller) => {
                let mut packet = Packet::received(smaller, arrival, wire_len, link);
                packet.fill(frame.data(), self.verify_of(header));
                self.spare = Some(frame);
                packet
            }
            None => Packet::received(frame, arrival, wire_len, link),
        };
        match header.carry_into(&mut packet) {
            Ok(()) => burst.packets.push(packet),
            Err(_) => {
                pool.put(packet.frame);
                let reason = DropReason::VnetHeader;
                burst.refused.push(RefusedFrame { arrival, wire_len, reason });
            }
        }
    }

    /// Returns whether to sum a packet while it is copied: to verify its checksum, or to complete
    /// it.
    fn verify_of(&self, header: VirtioNetHdr) -> Verify {
        match header {
            VirtioNetHdr { gso_type: GSO_NONE, flags: NEEDS_CSUM, .. } => Verify::Checksums,
            VirtioNetHdr { gso_type: GSO_NONE, flags: 0, .. } => self.verify,
            // The checksum is computed when the packet is cut, or the kernel has verified it.
            _ => Verify::Nothing,
        }
    }

    /// Reads queued packets until the burst has `max`, and stamps them with the time.
    fn fill(&mut self, max: usize, pool: &mut Pool, burst: &mut Burst) -> Result<TunRead, Errno> {
        let first = burst.packets.len();
        let read = self.read_up_to(max, pool, burst);
        if burst.packets.len() > first {
            let timestamp_ns = now_since_1970_ns();
            burst.packets[first..].iter_mut().for_each(|packet| packet.timestamp_ns = timestamp_ns);
        }
        read
    }

    fn read_up_to(
        &mut self,
        max: usize,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<TunRead, Errno> {
        while burst.len() < max {
            match self.read(pool, burst) {
                Ok(TunRead::Packet) | Err(Errno::INTR) => {}
                ended => return ended,
            }
        }
        Ok(TunRead::Packet)
    }

    fn count_dropped(&mut self, now_ns: u64, burst: &mut Burst) {
        burst.kernel_dropped += self.device.drops().newly();
        self.count_at_ns = now_ns.saturating_add(COUNT_EVERY_NS);
    }

    /// Reads the rest of the queue, for as long as packets may arrive.
    fn close(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, Errno> {
        let closing = self.closing.get_or_insert_with(|| {
            self.device.close_to_the_kernel();
            Closing {
                until_ns: ask.now_ns.saturating_add(CLOSING_NS),
                packets_left: CLOSING_PACKETS_MAX,
            }
        });
        let (until_ns, max) = (closing.until_ns, ask.max.min(closing.packets_left));
        let read = self.fill(max, pool, burst)?;
        if let Some(closing) = &mut self.closing {
            closing.packets_left -= burst.len().min(closing.packets_left);
        }
        let is_over = self.closing.is_some_and(|closing| closing.packets_left == 0);
        match read {
            TunRead::Packet | TunRead::NoFrame if !is_over => Ok(Polled::Ready),
            TunRead::Empty if ask.now_ns < until_ns => Ok(Polled::IdleUntil { now_ns: until_ns }),
            TunRead::Empty | TunRead::Packet | TunRead::NoFrame => {
                self.count_dropped(ask.now_ns, burst);
                self.spare = None;
                Ok(Polled::Exhausted)
            }
        }
    }

    fn poll_open(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, Errno> {
        let polled = match self.fill(ask.max, pool, burst)? {
            TunRead::Packet | TunRead::NoFrame => Polled::Ready,
            TunRead::Empty => Polled::Idle,
        };
        if ask.now_ns >= self.count_at_ns && self.queue == 0 {
            self.count_dropped(ask.now_ns, burst);
        }
        Ok(polled)
    }
}

impl Source for TunSource {
    fn needs(&self) -> FrameNeeds {
        FrameNeeds { device_frames: 1, largest_bytes: LARGEST_BYTES, ..FrameNeeds::default() }
    }

    fn attach(&mut self, at: Attachment<'_>) -> Result<(), SourceError> {
        self.numbering = at.numbering;
        Ok(())
    }

    fn poll(
        &mut self,
        ask: PollRequest,
        pool: &mut Pool,
        burst: &mut Burst,
    ) -> Result<Polled, SourceError> {
        let polled = if ask.is_last {
            self.close(ask, pool, burst)
        } else {
            self.poll_open(ask, pool, burst)
        };
        polled.map_err(|errno| {
            let name = self.device.name().to_owned();
            Box::new(match errno {
                Errno::BADFD => Error::DeviceGone { name },
                errno => Error::Device {
                    name,
                    what: "read a packet".to_owned(),
                    source: errno.into(),
                    help: "see the kernel's log (dmesg)".to_owned(),
                },
            })
            .into()
        })
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.descriptor(self.queue))
    }
}
