//! Opening of an interface: its rings, their filters, the link type of its frames.

use std::os::fd::AsFd;

use forebay_rx::parse::{Link, Verify};
use forebay_sys::error::{Error, Result};
use forebay_sys::interface::Interface;
use forebay_sys::packet::{BlockRing, BlockRingLayout, FrameRing, FrameRingLayout, PacketSocket};
use forebay_sys::socket_filter::{self, FilterInstruction};

use super::PacketSource;
use super::source::OpenRing;
use crate::link::LINK_BYTES;
use crate::rx_filter::{self, RxFilter};

/// Options of an interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PacketOptions {
    /// Number of queues among which the kernel distributes flows (`PACKET_FANOUT`).
    pub queues: u16,
    /// Packets to take. The kernel's own stack still receives all of them.
    pub take: RxFilter,
    /// True to receive frames for other stations too (promiscuous mode).
    pub promiscuous: bool,
    /// True to use the hash computed by the device, or by the kernel if the device has none.
    pub device_hash: bool,
    /// Checksum verification; with it, frames are summed while they are copied.
    pub verify: Verify,
    /// Ring that the kernel copies frames into.
    pub ring: PacketRing,
}

/// Ring of a packet socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PacketRing {
    /// Blocks of frames of any size (`TPACKET_V3`). A block is handed over when it is full or after
    /// 1 ms: cheapest under load.
    #[default]
    Blocks,
    /// A slot for each frame (`TPACKET_V2`), which is handed over at once and wakes the polling CPU.
    /// Its frames have no hash: a queue that is to use the device's hash takes blocks.
    Frames,
}

/// Block size: room for the largest frame, 64 KiB, and its headers.
const BLOCK_BYTES: u32 = 128 << 10;
/// Number of blocks: 32 MiB for each queue. A block is retired after `RETIRE_MS` even if nearly
/// empty, so the polling CPU may pause for 256 ms, or for 256 frames of 64 KiB. The block size does
/// not change the rate: at 2.7 Mpps of 60 bytes no frame was lost.
const BLOCKS: u32 = 256;
/// Number of blocks of a ring for fragments: 4 MiB, 2048 frames of an MTU of 1500.
const FRAGMENT_BLOCKS: u32 = 32;
/// Maximum number of fragments on the path at once: three times those that reassembly keeps of one
/// version of IP.
const FRAGMENTS_MAX: u32 = 6144;
/// Block time-out (`tp_retire_blk_tov`), the least possible. A lone frame waits about that long:
/// 0.8 ms at the median.
const RETIRE_MS: u32 = 1;
/// Bounds of a slot's size. The slots of a queue have as much memory as the blocks would have:
/// 16384 frames of an MTU of 1500, or 2048 of 9000.
const SLOT_BYTES: [u32; 2] = [2 << 10, 16 << 10];
/// Room of a slot in front of a frame's network header: `tpacket2_hdr`, `sockaddr_ll`, a link
/// header with two tags and a `virtio_net_hdr`, aligned.
const SLOT_HEADROOM_BYTES: u32 = 128;
/// Memory that the kernel may hold for frames longer than a slot: about a hundred of the largest.
const WHOLE_BYTES: usize = 8 << 20;

/// Opens an interface: one source for each queue. Sources receive nothing before they are attached.
///
/// # Errors
/// If the kernel refuses a step, or the interface's frames are neither Ethernet nor IP.
pub fn open(interface: &Interface, options: &PacketOptions) -> Result<Vec<PacketSource>> {
    let mut group = None;
    let queues = 0..options.queues.max(1);
    queues
        .map(|_| {
            let ring = open_ring(interface, options, BLOCKS)?;
            let socket = ring.socket();
            let link = link_of(interface, socket)?;
            if options.queues > 1 {
                let joined = socket.join_fanout(group);
                let refused = refused(interface, "share its flows out among queues");
                group = Some(joined.map_err(refused)?);
            }
            Ok(PacketSource::new(ring, interface, link, options))
        })
        .collect()
}

/// Opens a source for copies of fragments, with a small ring, beside the other sources of an
/// interface. `take` lets nothing else pass.
///
/// # Errors
/// As [`open`].
pub fn open_for_fragments(
    interface: &Interface,
    take: RxFilter,
    verify: Verify,
) -> Result<PacketSource> {
    let options = PacketOptions {
        queues: 1,
        take,
        promiscuous: false,
        device_hash: false,
        verify,
        ring: PacketRing::Frames,
    };
    let ring = open_ring(interface, &options, FRAGMENT_BLOCKS)?;
    let link = link_of(interface, ring.socket())?;
    let source = PacketSource::new(ring, interface, link, &options);
    Ok(source.limited(interface.mtu.saturating_add(LINK_BYTES), FRAGMENTS_MAX))
}

/// Opens a bound ring whose socket takes nothing until a filter is attached.
fn open_ring(interface: &Interface, options: &PacketOptions, blocks: u32) -> Result<OpenRing> {
    let named = |what| refused(interface, what);
    let socket = PacketSocket::open().map_err(named("open a packet socket on it"))?;
    socket.use_vnet_headers().map_err(named("have it tell of offloads (PACKET_VNET_HDR)"))?;
    socket.ignore_outgoing().map_err(named("leave out what is sent (PACKET_IGNORE_OUTGOING)"))?;
    let refused_ring = named("get a ring (PACKET_RX_RING) for it");
    let ring = match options.ring {
        PacketRing::Frames if !options.device_hash => {
            let slot_bytes = slot_bytes(interface.mtu);
            let layout = FrameRingLayout { block_bytes: BLOCK_BYTES, blocks, slot_bytes };
            FrameRing::new(socket, layout, WHOLE_BYTES).map(OpenRing::slots)
        }
        PacketRing::Frames | PacketRing::Blocks => {
            let layout = BlockRingLayout {
                block_bytes: BLOCK_BYTES,
                blocks,
                retire_ms: RETIRE_MS,
                hashes: options.device_hash,
            };
            BlockRing::new(socket, layout).map(OpenRing::blocks)
        }
    };
    let ring = ring.map_err(refused_ring)?;
    let socket = ring.socket();
    // Filter before bind: no frame arrives that was not asked for, nor twice while queues join.
    attach_filter(interface, socket, &rx_filter::nothing())?;
    socket.receive_from(interface.index.0).map_err(named("bind a packet socket to it"))?;
    if options.promiscuous {
        let refused = named("make it promiscuous");
        socket.be_promiscuous(interface.index.0).map_err(refused)?;
    }
    Ok(ring)
}

/// Size of the slots of an interface with this MTU: whole frames fit, up to a bound.
fn slot_bytes(mtu: u32) -> u32 {
    let [least, most] = SLOT_BYTES;
    let whole = mtu.saturating_add(SLOT_HEADROOM_BYTES).clamp(least, most);
    whole.next_power_of_two().min(most)
}

/// Replaces a socket's filter.
pub(super) fn attach_filter(
    interface: &Interface,
    socket: &PacketSocket,
    filter: &[FilterInstruction],
) -> Result<()> {
    let attached = socket_filter::attach(socket.as_fd(), filter);
    attached.map_err(refused(interface, "attach a filter (SO_ATTACH_FILTER) to it"))
}

/// Returns the link type of the interface's frames.
pub(super) fn link_of(interface: &Interface, socket: &PacketSocket) -> Result<Link> {
    const ETHERNET: [u16; 2] = [libc::ARPHRD_ETHER, libc::ARPHRD_LOOPBACK];
    const BARE_IP: [u16; 6] = [
        libc::ARPHRD_NONE,
        libc::ARPHRD_TUNNEL,
        libc::ARPHRD_TUNNEL6,
        libc::ARPHRD_SIT,
        libc::ARPHRD_IPGRE,
        ARPHRD_RAWIP,
    ];
    /// `ARPHRD_RAWIP` of include/uapi/linux/if_arp.h.
    const ARPHRD_RAWIP: u16 = 519;
    let bound = socket.bound().map_err(refused(interface, "ask what its frames are"))?;
    match bound.hardware {
        kind if ETHERNET.contains(&kind) => Ok(Link::Ethernet),
        kind if BARE_IP.contains(&kind) => Ok(Link::Ip),
        kind => Err(Error::Device {
            name: interface.name.clone(),
            what: "read its frames".to_owned(),
            source: std::io::Error::other(format!("their link type is {kind} (ARPHRD_)")),
            help: "give an interface with Ethernet frames or IP packets".to_owned(),
        }),
    }
}

/// Returns a conversion of an I/O error that names the interface and the failed step.
pub(super) fn refused(interface: &Interface, what: &str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| {
        let help = match source.raw_os_error() {
            Some(libc::ENOMEM) => "free some memory, or ask for fewer queues",
            Some(libc::EPERM) => {
                "this needs CAP_NET_RAW where this network namespace was made: run as root there"
            }
            Some(libc::ENODEV | libc::ENXIO) => {
                return Error::DeviceGone { name: interface.name.clone() };
            }
            _ => "check that this kernel has AF_PACKET (CONFIG_PACKET) and is 5.15 or newer",
        };
        let (name, what, help) = (interface.name.clone(), what.to_owned(), help.to_owned());
        Error::Device { name, what, source, help }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_has_room_for_mtu() {
        assert_eq!([0, 1500, 1920, 1921].map(slot_bytes), [2048, 2048, 2048, 4096]);
        assert_eq!([9000, 65_536, u32::MAX].map(slot_bytes), [16_384; 3]);
        assert!(SLOT_BYTES.iter().all(|bytes| BLOCK_BYTES.is_multiple_of(*bytes)));
    }
}
