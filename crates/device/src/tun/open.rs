//! Opening of a device: an existing one, whose settings are restored on close, or a new one, which
//! is removed on close.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use forebay_rx::coalesce::gso::{VIRTIO_NET_HDR_BYTES, VIRTIO_NET_HDR_TUNNEL_BYTES};
use forebay_rx::parse::Verify;
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::{Interface, is_interface_name};
use forebay_sys::privilege;
use forebay_sys::tun::{Attach, Offload, TunQueue};
use rustix::io::Errno;

use super::stats::TunDrops;
use super::steering::TunSteering;
use super::{TunKind, TunSink, TunSource};
use crate::KernelCounts;

/// Header before each packet.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "a constant of 10")]
const HEADER_BYTES: i32 = VIRTIO_NET_HDR_BYTES as i32;

/// Header before each packet of a device whose kernel segments inside tunnels.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "a constant of 24")]
const TUNNEL_HEADER_BYTES: i32 = VIRTIO_NET_HDR_TUNNEL_BYTES as i32;

/// TUN or TAP device with all its queues open. It is closed with the last of its sources, sinks and
/// handles.
#[derive(Clone, Debug)]
pub struct TunDevice(Arc<OpenTun>);

/// State shared by the sources and sinks of a device.
#[derive(Debug)]
pub(super) struct OpenTun {
    interface: Interface,
    kind: TunKind,
    queues: Vec<TunQueue>,
    offload: Offload,
    tunnels: MergedTunnels,
    steering: TunSteering,
    /// Original settings; `None` if the device is new.
    before: Option<LinkBefore>,
    drops: TunDrops,
}

/// Form in which packets merged inside VXLAN and GENEVE are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum MergedTunnels {
    /// As their segments.
    Segmented,
    /// As their segments, because the kernel cannot segment them.
    Unsupported,
    /// Whole. The header before every packet is then [`TUNNEL_HEADER_BYTES`] long.
    Whole,
}

/// Original settings of an existing device, restored on close.
#[derive(Clone, Copy, Debug)]
struct LinkBefore {
    header_bytes: i32,
    is_little_endian: bool,
}

/// Origin of a device: created or existing.
enum FoundLink {
    New,
    There,
}

impl TunDevice {
    /// Opens the device of that name, in the network namespace of the calling thread, with `queues`
    /// queues. A missing device is created and set up.
    ///
    /// # Errors
    /// If the device is of another kind, is in use or has fewer queues, or the process may not open
    /// or create it.
    pub fn open(name: &str, kind: TunKind, queues: u16) -> Result<Self> {
        Self::open_as(name, kind, queues, MergedTunnels::Segmented)
    }

    /// Opens a TAP as [`open`](Self::open) does. Its sinks send packets merged inside VXLAN and
    /// GENEVE whole, if the kernel can segment them (Linux 6.17), else their segments. The header
    /// before every packet, in both directions, is 14 bytes longer then.
    ///
    /// Only for a TAP whose kernel forwards the packets or has a tunnel device for them. A UDP socket
    /// on the tunnel's port would receive all datagrams of a packet as one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_for_whole_tunnels(name: &str, queues: u16) -> Result<Self> {
        Self::open_as(name, TunKind::Tap, queues, MergedTunnels::Whole)
    }

    fn open_as(name: &str, kind: TunKind, queues: u16, tunnels: MergedTunnels) -> Result<Self> {
        // The kernel replaces %d in a name by a number.
        if !is_interface_name(name) || name.contains('%') {
            let why = "the name of an interface has at most 15 bytes, no space and no / : %".into();
            return Err(Error::Setting { what: "device name", value: name.into(), why });
        }
        let first = open_file(name)?;
        let is_multi_queue = queues > 1;
        let found = attach(&first, name, kind, is_multi_queue);
        let found = found.map_err(|errno| not_attached(name, kind, queues, errno))?;
        let before = match found {
            FoundLink::New => None,
            FoundLink::There => {
                Some(LinkBefore::of(&first).map_err(refused(name, "read its settings"))?)
            }
        };
        let interface = Interface::named(name)?;
        if interface.tun.is_some_and(|tun| tun.open_queues > 1) {
            // Header and offloads are settings of the device: they would change for the other
            // program too.
            return Err(not_attached(name, kind, queues, Errno::BUSY));
        }
        let mut device = OpenTun {
            interface,
            kind,
            queues: vec![first],
            offload: Offload::Nothing,
            tunnels,
            steering: TunSteering::default(),
            before,
            drops: TunDrops::default(),
        };
        device.set_up(queues)?;
        Ok(Self(Arc::new(device)))
    }

    /// Opens a device to send to: as a TAP if there is one of that name, else as a TUN.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_send(name: &str) -> Result<Self> {
        let kind = match Interface::named(name) {
            Ok(Interface { tun: Some(tun), .. }) if tun.is_tap => TunKind::Tap,
            _ => TunKind::Tun,
        };
        Self::open(name, kind, 1)
    }

    /// Returns one source for each queue. Call this once: two sources that read one queue would
    /// each get some of its packets. If checksums are to be verified, packets are summed while they
    /// are copied, unless the kernel has verified them.
    #[must_use]
    pub fn sources(&self, verify: Verify) -> Vec<TunSource> {
        let source = |queue| TunSource::new(Arc::clone(&self.0), queue, verify);
        (0..self.0.queues.len()).map(source).collect()
    }

    /// Returns the kernel's counters for each queue. Drops are counted with the first queue,
    /// because the kernel does not report the queue.
    #[must_use]
    pub fn counts(&self) -> Vec<Arc<KernelCounts>> {
        let further = self.0.queues.iter().skip(1).map(|_| KernelCounts::new(&[]));
        std::iter::once(Arc::clone(self.0.drops.counts())).chain(further).collect()
    }

    /// Returns a sink for one CPU.
    #[must_use]
    pub fn sink(&self) -> TunSink {
        TunSink::new(Arc::clone(&self.0))
    }

    /// Returns the interface's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the kind of the device.
    #[must_use]
    pub fn kind(&self) -> TunKind {
        self.0.kind
    }

    /// Returns facts for the report: origin, offloads, steering.
    #[must_use]
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let made = if self.0.before.is_some() { "was there" } else { "new" };
        let offload = match self.0.offload {
            Offload::Nothing => "none",
            Offload::Tcp => "checksums, TCP segments",
            Offload::TcpAndUdp | Offload::UdpTunnels => "checksums, TCP and UDP segments",
        };
        let tunnels = match self.0.tunnels {
            MergedTunnels::Segmented => "segmented before they are written",
            MergedTunnels::Unsupported => {
                "segmented before they are written; Linux 6.17 takes VXLAN and GENEVE whole"
            }
            MergedTunnels::Whole => "VXLAN and GENEVE are written whole, others segmented",
        };
        let mut facts = vec![
            ("device", made.to_owned()),
            ("offload", offload.to_owned()),
            ("tunnels", tunnels.to_owned()),
        ];
        facts.extend(self.0.steering.fact().map(|fact| ("steering", fact)));
        facts
    }
}

impl OpenTun {
    /// Sets up the header and offloads, and opens all queues but the first.
    fn set_up(&mut self, queues: u16) -> Result<()> {
        let name = self.interface.name.clone();
        let first = &self.queues[0];
        TunSteering::detach_all(first);
        let framed = first.set_little_endian(true);
        framed
            .and_then(|()| first.set_header_bytes(HEADER_BYTES))
            .map_err(refused(&name, "set the header before its packets"))?;
        if self.tunnels == MergedTunnels::Whole {
            self.tunnels = takes_tunnels(first)
                .map_err(refused(&name, "make room for tunnels in the header"))?;
        }
        self.offload = offer(first).map_err(refused(&name, "set its offloads"))?;
        for _ in 1..queues {
            let queue = open_file(&name)?;
            let (kind, is_new) = (self.kind, false);
            let to = Attach { name: &name, kind, is_multi_queue: true, is_new };
            queue.attach(to).map_err(|errno| not_attached(&name, kind, queues, errno))?;
            self.queues.push(queue);
        }
        self.steering = TunSteering::of(&self.queues[0], queues);
        if self.before.is_none() {
            self.interface.set_up()?;
        }
        self.drops = TunDrops::of(&self.interface);
        Ok(())
    }

    pub(super) fn name(&self) -> &str {
        &self.interface.name
    }

    pub(super) fn kind(&self) -> TunKind {
        self.kind
    }

    /// True if a packet of several UDP datagrams may be sent as one (`TUN_F_USO4` and
    /// `TUN_F_USO6`).
    pub(super) fn cuts_udp(&self) -> bool {
        self.offload == Offload::TcpAndUdp
    }

    /// True if packets merged inside VXLAN and GENEVE are sent as one.
    pub(super) fn takes_tunnels(&self) -> bool {
        self.tunnels == MergedTunnels::Whole
    }

    /// Length of the header before each packet.
    pub(super) fn header_bytes(&self) -> usize {
        if self.takes_tunnels() { VIRTIO_NET_HDR_TUNNEL_BYTES } else { VIRTIO_NET_HDR_BYTES }
    }

    pub(super) fn queue(&self, queue: usize) -> &TunQueue {
        &self.queues[queue]
    }

    pub(super) fn descriptor(&self, queue: usize) -> BorrowedFd<'_> {
        self.queue(queue).as_fd()
    }

    pub(super) fn drops(&self) -> &TunDrops {
        &self.drops
    }

    /// Makes the kernel drop, and count, further packets for the device.
    pub(super) fn close_to_the_kernel(&self) {
        self.steering.close(&self.queues[0]);
    }
}

impl Drop for OpenTun {
    fn drop(&mut self) {
        let Some(before) = self.before else { return };
        let Some(first) = self.queues.first() else { return };
        // The next program may read without headers, and would get uncut packets and partial
        // checksums. Errors are ignored: a removed device needs no restoring.
        let _ = first.set_offload(Offload::Nothing);
        let _ = first.set_header_bytes(before.header_bytes);
        let _ = first.set_little_endian(before.is_little_endian);
        TunSteering::detach_all(first);
    }
}

impl LinkBefore {
    fn of(queue: &TunQueue) -> rustix::io::Result<Self> {
        Ok(Self {
            header_bytes: queue.header_bytes()?,
            is_little_endian: queue.is_little_endian()?,
        })
    }
}

fn open_file(name: &str) -> Result<TunQueue> {
    TunQueue::open().map_err(|errno| {
        let help = match errno {
            Errno::ACCESS | Errno::PERM => "this needs read and write permission on that file",
            _ => "load the module (modprobe tun); a container must be given that file",
        };
        let what = "open /dev/net/tun".to_owned();
        Error::Device { name: name.into(), what, source: errno.into(), help: help.into() }
    })
}

fn attach(
    queue: &TunQueue,
    name: &str,
    kind: TunKind,
    is_multi_queue: bool,
) -> rustix::io::Result<FoundLink> {
    let new = Attach { name, kind, is_multi_queue, is_new: true };
    match queue.attach(new) {
        Ok(()) => return Ok(FoundLink::New),
        Err(Errno::BUSY) => {}
        Err(errno) => return Err(errno),
    }
    let there = Attach { is_new: false, ..new };
    match queue.attach(there) {
        // A multi-queue device can be used with one queue, but only with IFF_MULTI_QUEUE set.
        Err(Errno::INVAL) if !is_multi_queue => {
            queue.attach(Attach { is_multi_queue: true, ..there })?;
        }
        attached => attached?,
    }
    Ok(FoundLink::There)
}

/// Makes room for the fields of tunnels in the header, if the kernel can segment inside UDP tunnels.
///
/// The kernel tells by whether it knows the offload, which is about packets that we read, and is
/// turned off again by the caller: the kernel must segment those, because they are steered and
/// merged by their inner flows. For packets that we write, the length of the header is all that the
/// kernel needs (`tun_vnet_hdr_guest_features` in drivers/net/tun_vnet.h).
fn takes_tunnels(queue: &TunQueue) -> rustix::io::Result<MergedTunnels> {
    if queue.set_offload(Offload::UdpTunnels).is_err() {
        return Ok(MergedTunnels::Unsupported);
    }
    queue.set_header_bytes(TUNNEL_HEADER_BYTES)?;
    Ok(MergedTunnels::Whole)
}

/// Offers as many offloads as the kernel knows.
fn offer(queue: &TunQueue) -> rustix::io::Result<Offload> {
    for offload in [Offload::TcpAndUdp, Offload::Tcp] {
        match queue.set_offload(offload) {
            Err(Errno::INVAL) => {}
            set => return set.map(|()| offload),
        }
    }
    Ok(Offload::Nothing)
}

/// Converts the error of attaching to a device.
fn not_attached(name: &str, kind: TunKind, queues: u16, errno: Errno) -> Error {
    let (asked, command) = match kind {
        TunKind::Tun => ("a TUN", "tun"),
        TunKind::Tap => ("a TAP", "tap"),
    };
    let (what, mut source) = (format!("open it as {asked}"), io::Error::from(errno));
    let help = match errno {
        Errno::PERM | Errno::ACCESS if let Err(missing) = privilege::for_tun(name) => {
            return missing;
        }
        Errno::BUSY => {
            source = io::Error::new(source.kind(), "another program has it open");
            format!("end the program that has it (see `ip -details link show {name}`)")
        }
        Errno::TOOBIG => "the kernel gives a device 256 queues at most".to_owned(),
        Errno::INVAL => {
            let (found, help) = what_it_is(name, kind, queues);
            source = io::Error::new(io::ErrorKind::InvalidInput, found);
            help
        }
        _ => format!("see whether `ip tuntap add {name} mode {command}` works"),
    };
    Error::Device { name: name.to_owned(), what, source, help }
}

/// Describes a device of that name of another kind, and the remedy.
fn what_it_is(name: &str, kind: TunKind, queues: u16) -> (String, String) {
    let Ok(there) = Interface::named(name) else {
        return ("the kernel refuses".to_owned(), format!("see `ip link show {name}`"));
    };
    let Some(tun) = there.tun else {
        let driver = there.driver.map_or(String::new(), |driver| format!(" ({driver})"));
        let found = format!("it is neither a TUN nor a TAP{driver}");
        return (found, "open it by af_packet or af_xdp, or give another name".to_owned());
    };
    let (found, is_it) = if tun.is_tap {
        ("it is a TAP", kind == TunKind::Tap)
    } else {
        ("it is a TUN", kind == TunKind::Tun)
    };
    if is_it {
        let help = "take one queue, or make it anew with `ip tuntap add … multi_queue`";
        (format!("it has one queue, not {queues}"), help.to_owned())
    } else {
        (found.to_owned(), "open it as what it is, or give another name".to_owned())
    }
}

/// Returns a conversion of an error that names the device and the failed step, for `map_err`.
fn refused(name: &str, what: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::Device {
        name: name.to_owned(),
        what: what.to_owned(),
        source: errno.into(),
        help: "the kernel's tun driver must be that of Linux 3.19 or later".to_owned(),
    }
}
