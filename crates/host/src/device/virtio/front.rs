//! What is said to a back end over the socket (the vhost-user protocol, as QEMU's documentation has
//! it), by crate vhost.
//!
//! The crate waits for an answer without end: it goes on where a time-out interrupts it. So whoever
//! calls here sees to it that the connection is cut when an answer takes too long.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use vhost::vhost_user::message::{
    FrontendReq, MAX_MSG_SIZE, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU};

use super::features::{Features, VHOST_USER_F_PROTOCOL_FEATURES, Wishes};
use super::port::{PairEvents, Session};
use crate::sys::virtio::RingAddresses;

/// The two rings of a queue pair in one layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PairRings {
    /// That of received packets.
    pub(super) rx: RingAddresses,
    /// That of sent packets.
    pub(super) tx: RingAddresses,
}

/// The rings of one queue pair. All bytes of them are as new when a session begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QueueRings {
    /// The entries of each.
    pub(super) size: u16,
    /// Where they are if they are split.
    pub(super) split: PairRings,
    /// Where they are if they are packed. None: packed rings are not asked for.
    pub(super) packed: Option<PairRings>,
}

/// The one region of memory that the device gets: guest-physical addresses are our own.
#[derive(Debug)]
pub(super) struct MemoryTable {
    /// The file behind it, mapped from its beginning.
    pub(super) descriptor: OwnedFd,
    /// Where it is mapped.
    pub(super) base_address: u64,
    /// How much of it.
    pub(super) len_bytes: u64,
}

/// What a device is set up with.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) memory: MemoryTable,
    pub(super) queues: Vec<QueueRings>,
    pub(super) wishes: Wishes,
}

/// Which message failed, and why: as in `GET_FEATURES: peer disconnected`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Failure {
    message: &'static str,
    why: String,
}

impl Failure {
    fn of<E: fmt::Display>(message: &'static str) -> impl FnOnce(E) -> Self {
        move |why| Self { message, why: why.to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.message, self.why)
    }
}

/// A back end that is set up.
pub(super) struct Front {
    vhost: Frontend,
    rings: usize,
    /// It can be told to leave a ring alone.
    has_enable: bool,
}

/// VRING_BASE of a packed ring that is as new: index 0, wrap counter 1.
const PACKED_BASE: u16 = 1 << 15;

impl Front {
    /// Sets a device up, from its first message to all queues being enabled (INIT1).
    pub(super) fn set_up(
        stream: &UnixStream,
        plan: &Plan,
        number: u64,
    ) -> Result<(Self, Session), Failure> {
        let own = stream.try_clone().map_err(Failure::of("dup"))?;
        let rings_asked = 2 * u64::try_from(plan.queues.len()).unwrap_or(u64::MAX);
        let mut vhost = Frontend::from_stream(own, rings_asked);
        vhost.set_owner().map_err(Failure::of("SET_OWNER"))?;
        let mut offered = vhost.get_features().map_err(Failure::of("GET_FEATURES"))?;
        let protocol = agree_on_protocol(&mut vhost, offered)?;
        let has = |feature| protocol.contains(feature);
        let mtu = if offered >> VIRTIO_NET_F_MTU & 1 == 1 && has(VhostUserProtocolFeatures::CONFIG)
        {
            config_mtu(stream)?
        } else {
            None
        };
        if mtu.is_none() {
            offered &= !(1 << VIRTIO_NET_F_MTU);
        }
        let features =
            Features::negotiate(offered, plan.wishes).map_err(Failure::of("features"))?;
        let most = if features.has(VIRTIO_NET_F_MQ) && has(VhostUserProtocolFeatures::MQ) {
            queue_pairs(stream)?
        } else {
            1
        };
        let pairs = plan.queues.len().min(usize::try_from(most).unwrap_or(usize::MAX));
        vhost.set_features(features.bits()).map_err(Failure::of("SET_FEATURES"))?;
        set_memory(&vhost, &plan.memory)?;
        let events = (0..pairs).map(|_| PairEvents::new()).collect::<std::io::Result<Vec<_>>>();
        let events = events.map_err(Failure::of("eventfd"))?;
        for (pair, (rings, events)) in plan.queues.iter().zip(&events).enumerate() {
            set_pair(&vhost, pair, rings, events, features)?;
        }
        let has_enable = features.has(VHOST_USER_F_PROTOCOL_FEATURES);
        let mut front = Self { vhost, rings: 2 * pairs, has_enable };
        for ring in 0..front.rings {
            front.enable(ring, true)?;
        }
        Ok((front, Session { number, features, mtu, pairs: events }))
    }

    /// Has the device leave a queue pair alone, if it can be told.
    pub(super) fn disable(&mut self, pair: usize) -> Result<(), Failure> {
        self.enable(2 * pair, false)?;
        self.enable(2 * pair + 1, false)
    }

    /// Has the device give a queue pair no more, and returns when it has: it takes one message after
    /// the other, and has answered one that came later.
    pub(super) fn stop_receiving(&mut self, pair: usize) -> Result<(), Failure> {
        if self.has_enable {
            self.enable(2 * pair, false)?;
            self.vhost.get_features().map(drop).map_err(Failure::of("GET_FEATURES"))
        } else {
            let stopped = self.vhost.get_vring_base(2 * pair);
            stopped.map(drop).map_err(Failure::of("GET_VRING_BASE"))
        }
    }

    /// Has the device stop: it has answered for every ring that it uses none of the memory any more
    /// (VQ11).
    pub(super) fn stop(&self) -> Result<(), Failure> {
        for ring in 0..self.rings {
            self.vhost.get_vring_base(ring).map_err(Failure::of("GET_VRING_BASE"))?;
        }
        Ok(())
    }

    /// Without the protocol's features a ring is enabled from its first kick on.
    fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), Failure> {
        if !self.has_enable {
            return Ok(());
        }
        let done = self.vhost.set_vring_enable(ring, enabled);
        done.map_err(Failure::of("SET_VRING_ENABLE"))
    }
}

/// Settles how both sides speak. An answer to each message is asked for where that can be had: a back
/// end that refuses something says so then.
fn agree_on_protocol(
    vhost: &mut Frontend,
    offered: u64,
) -> Result<VhostUserProtocolFeatures, Failure> {
    if offered >> VHOST_USER_F_PROTOCOL_FEATURES & 1 == 0 {
        return Ok(VhostUserProtocolFeatures::empty());
    }
    let known = vhost.get_protocol_features().map_err(Failure::of("GET_PROTOCOL_FEATURES"))?;
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG;
    let agreed = known & wanted;
    vhost.set_protocol_features(agreed).map_err(Failure::of("SET_PROTOCOL_FEATURES"))?;
    if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    Ok(agreed)
}

/// The one region, at our own addresses.
fn set_memory(vhost: &Frontend, memory: &MemoryTable) -> Result<(), Failure> {
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: memory.base_address,
        memory_size: memory.len_bytes,
        userspace_addr: memory.base_address,
        mmap_offset: 0,
        mmap_handle: memory.descriptor.as_raw_fd(),
    };
    vhost.set_mem_table(&[region]).map(drop).map_err(Failure::of("SET_MEM_TABLE"))
}

/// Tells of both rings of a pair. The kick comes last: a back end may begin with it.
fn set_pair(
    vhost: &Frontend,
    pair: usize,
    rings: &QueueRings,
    events: &PairEvents,
    features: Features,
) -> Result<(), Failure> {
    let packed = rings.packed.filter(|_| features.has(VIRTIO_F_RING_PACKED));
    let base = if packed.is_some() { PACKED_BASE } else { 0 };
    let PairRings { rx, tx } = packed.unwrap_or(rings.split);
    let both = [(2 * pair, rx, &events.rx_kick), (2 * pair + 1, tx, &events.tx_kick)];
    let call = events.call.handle().map_err(Failure::of("dup"))?;
    for (ring, addresses, kick) in both {
        let kick = kick.handle().map_err(Failure::of("dup"))?;
        let addresses = VringConfigData {
            queue_max_size: rings.size,
            queue_size: rings.size,
            flags: 0,
            desc_table_addr: addresses.descriptors,
            used_ring_addr: addresses.device,
            avail_ring_addr: addresses.driver,
            log_addr: None,
        };
        vhost.set_vring_num(ring, rings.size).map_err(Failure::of("SET_VRING_NUM"))?;
        vhost.set_vring_base(ring, base).map_err(Failure::of("SET_VRING_BASE"))?;
        vhost.set_vring_addr(ring, &addresses).map_err(Failure::of("SET_VRING_ADDR"))?;
        vhost.set_vring_call(ring, &call).map_err(Failure::of("SET_VRING_CALL"))?;
        vhost.set_vring_kick(ring, &kick).map_err(Failure::of("SET_VRING_KICK"))?;
    }
    Ok(())
}

/// How many queue pairs the back end has. The crate takes the answer for a number of rings, and then
/// refuses us the second of a pair; to QEMU and DPDK it is one of pairs.
fn queue_pairs(stream: &UnixStream) -> Result<u64, Failure> {
    const MESSAGE: &str = "GET_QUEUE_NUM";
    let answer = ask(stream, FrontendReq::GET_QUEUE_NUM, &[]).map_err(Failure::of(MESSAGE))?;
    let pairs = answer.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
    match pairs {
        Some(0) | None => Err(Failure::of(MESSAGE)("it has no queues")),
        Some(pairs) => Ok(pairs),
    }
}

/// The least MTU of a device (virtio 1.2, section 5.1.4).
const MTU_MIN: u16 = 68;

/// The MTU in the device's configuration: `virtio_net_config.mtu`. None if it has none that can be.
fn config_mtu(stream: &UnixStream) -> Result<Option<u16>, Failure> {
    /// `mac`, `status`, `max_virtqueue_pairs`, `mtu`.
    const CONFIG_BYTES: usize = 6 + 2 + 2 + 2;
    /// `offset`, `size`, `flags` (struct vhost_user_config).
    const WHICH_BYTES: usize = 4 + 4 + 4;
    let mut request = [0; WHICH_BYTES + CONFIG_BYTES];
    request[4..8].copy_from_slice(&12_u32.to_ne_bytes());
    let answer = ask(stream, FrontendReq::GET_CONFIG, &request);
    let answer = answer.map_err(Failure::of("GET_CONFIG"))?;
    // A back end that cannot say it answers with less.
    let config = answer.get(WHICH_BYTES..).and_then(<[u8]>::first_chunk::<CONFIG_BYTES>);
    let mtu = config.map(|&[.., low, high]| u16::from_le_bytes([low, high]));
    Ok(mtu.filter(|&mtu| mtu >= MTU_MIN))
}

/// One question and its answer. For what the crate reads in its own way: it takes an answer for as long
/// as the question was, and waits for the rest of a shorter one.
fn ask(mut stream: &UnixStream, request: FrontendReq, body: &[u8]) -> Result<Vec<u8>, String> {
    const VERSION: u32 = 1;
    let reply = VhostUserHeaderFlag::REPLY.bits();
    let code = u32::from(request);
    let len_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let header = [code, VERSION, len_bytes].map(u32::to_ne_bytes);
    let message = [header.as_flattened(), body].concat();
    stream.write_all(&message).map_err(|error| error.to_string())?;
    let mut header = [[0; 4]; 3];
    stream.read_exact(header.as_flattened_mut()).map_err(|error| error.to_string())?;
    let [of, flags, len_bytes] = header.map(u32::from_ne_bytes);
    let len_bytes = usize::try_from(len_bytes).unwrap_or(usize::MAX);
    if of != code || flags & (reply | 3) != reply | VERSION || len_bytes > MAX_MSG_SIZE {
        return Err(format!("its answer is of message {of}, flags {flags:#x}, {len_bytes} bytes"));
    }
    let mut answer = vec![0; len_bytes];
    stream.read_exact(&mut answer).map_err(|error| error.to_string())?;
    Ok(answer)
}
